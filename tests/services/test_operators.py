"""What `check` and `health` say of a broker that is not the store."""

from __future__ import annotations

import pytest
from observe import Bench, assert_calm, in_seconds, now, sleep_until
from proxy import Proxy

from celery_tzbeat.testing.processes import wait_until

#: Due twice: to declare the queue, and in the outage. Nothing comes after it, so no cursor tells that it is late.
RARE = """
from celery_tzbeat import at
app.conf.beat_schedule = {{"rare": {{"task": "proj.record", "schedule": at({first!r}) | at({second!r})}}}}
"""


def test_health_names_what_waits_for_a_broker_that_does_not_answer(bench: Bench, proxy: Proxy) -> None:
    first, second = in_seconds(12), in_seconds(40)
    bench.write(RARE.format(first=first.isoformat(), second=second.isoformat()))
    beats = bench.start_beats(1)
    assert now() < first, "the machine is too busy for this test"
    wait_until(lambda: bench.nominals("rare"), 30, "the first message")
    assert bench.operator("health")["ok"]
    assert not bench.findings("check")

    assert now() < second, "the machine is too busy for this test"
    proxy.refuse()
    sleep_until(second)
    wait_until(bench.open_claims, 20, "the claim")
    found = wait_until(lambda: (f := bench.findings("health")) and "tzbeat.E304" in f and f, 40, "health to tell")
    assert f"claimed and not sent: '{bench.open_claims()[0]}'" in found["tzbeat.E304"]
    assert f"the broker 'amqp://guest:**@127.0.0.1:{proxy.port}" in found["tzbeat.E307"]
    assert "does not answer" in bench.findings("check")["tzbeat.W210"]

    proxy.resume()
    wait_until(lambda: second in bench.nominals("rare"), 70, "the message")
    wait_until(lambda: bench.operator("health")["ok"], 20, "health to be good again")
    assert not bench.findings("check")
    assert_calm(beats)


@pytest.mark.parametrize(
    ("wrong", "right", "words"),
    [
        ("guest:mistaken@", "guest:guest@", "ACCESS_REFUSED"),
        ("/no-such-virtual-host", "/{vhost}", "vhost no-such-virtual-host not found"),
    ],
    ids=["password", "virtual-host"],
)
def test_check_tells_a_broker_that_refuses_from_one_that_is_not_there(
    bench: Bench, vhost: str, wrong: str, right: str, words: str
) -> None:
    bench.project.url = bench.project.url.replace(right.format(vhost=vhost), wrong)
    bench.write(beat_schedule={})
    said = bench.findings("check")["tzbeat.E006"]
    assert "refuses us" in said
    assert words in said
    assert "mistaken" not in said

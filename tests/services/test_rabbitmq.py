"""Beats on a healthy RabbitMQ: each message once, in order, with all of Celery's semantics."""

from __future__ import annotations

from datetime import timedelta

import pytest
from observe import PULSE, Bench, assert_calm, assert_gapless, in_seconds, now
from proxy import Proxy
from rabbit import ADDRESS

from celery_tzbeat.model import from_iso
from celery_tzbeat.testing.processes import wait_until


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_pulses_arrive_once_in_order_and_with_their_headers(bench: Bench, kind: str) -> None:
    fast = {"fast": {"task": "proj.record", "schedule": 0.2, "args": [1], "options": {"headers": {"tenant": "a"}}}}
    bench.write(beat_schedule={**PULSE, **fast}, task_default_queue_type=kind)
    beats = bench.start_beats(2)
    assert "sends by the path 'claims': the broker 'amqp://guest:**@127.0.0.1" in beats[0].log
    wait_until(lambda: len(bench.nominals("fast")) >= 30, 60, "messages")

    assert_gapless(bench.nominals("fast"), 0.2)
    assert_gapless(bench.nominals("pulse"))
    for message in bench.inbox().messages("fast"):
        assert message.headers["periodic_task_name"] == "fast"
        assert message.headers["tenant"] == "a"
        assert message.tzbeat["key"].startswith("fast@")
        assert message.properties["delivery_mode"] == 2
        assert message.properties["correlation_id"] == message.id
        assert message.args == [1]
    messages = bench.inbox().messages()
    assert len({message.id for message in messages}) == len(messages)
    wait_until(lambda: len(bench.open_claims()) <= 1, 10, "the claims to be confirmed")
    assert not bench.audit("reclaimed")
    late = sorted(bench.lateness("fast"))
    assert late[0] >= 0, "nothing is early"
    assert late[len(late) // 2] < 0.2
    assert_calm(beats)


def test_a_worker_runs_what_beat_sends_over_a_quorum_queue(bench: Bench) -> None:
    bench.write(
        beat_schedule={
            "plain": {"task": "proj.record", "schedule": 1.0, "options": {"expires": 30}},
            "soon": {"task": "proj.record", "schedule": 2.0, "args": ["soon"], "options": {"countdown": 1}},
        },
        task_default_queue_type="quorum",
    )
    worker = bench.project.start_worker()
    bench.start_beats(1)
    wait_until(lambda: sum(r["args"] == ["soon"] for r in bench.project.received()) >= 2, 60, "delayed tasks")
    wait_until(lambda: sum(r["args"] == [] for r in bench.project.received()) >= 4, 60, "tasks")
    received = bench.project.received()
    assert len({r["id"] for r in received}) == len(received)
    assert {r["entry"] for r in received} == {"plain", "soon"}
    assert "Traceback" not in worker.log


def test_priorities_exchanges_expiry_and_countdown_are_celerys_own(bench: Bench) -> None:
    one, two, ranked = (f"{bench.queue}-{name}" for name in ("one", "two", "ranked"))
    for queue in (one, two, ranked):
        bench.inbox(queue)
    due, later = in_seconds(12), in_seconds(30 * 86400)  # RabbitMQ takes no expiry beyond 49 days
    bench.write(
        f"""
from datetime import datetime
from kombu import Exchange, Queue
from celery_tzbeat import at

news = Exchange({bench.queue + "-news"!r}, type="topic")
app.conf.task_queues = [
    Queue({bench.queue!r}, routing_key={bench.queue!r}),
    Queue({one!r}, news, routing_key="news.#"),
    Queue({two!r}, news, routing_key="*.world"),
    Queue({ranked!r}, routing_key={ranked!r}, queue_arguments={{"x-max-priority": 9}}),
]
due = at({due.isoformat()!r})

def entry(n, **options):
    return {{"task": "proj.record", "schedule": due, "args": [n], "options": options}}

app.conf.beat_schedule = {{
    "topic": entry(0, exchange=news.name, routing_key="news.world"),
    "low": entry(1, queue={ranked!r}, priority=1),
    "high": entry(2, queue={ranked!r}, priority=8),
    "expires": entry(3, expires=100),
    "expires at": entry(4, expires=datetime.fromisoformat({later.isoformat()!r})),
    "countdown": entry(5, countdown=50),
}}
"""
    )
    beats = bench.start_beats(1)
    assert now() < due, "the machine is too busy for this test"
    wait_until(lambda: len(bench.audit("sent")) == 6, 60, "all to be sent")
    assert "did not take" not in beats[0].log, "an exchange that no worker has declared yet is declared"

    assert [m.entry for m in bench.inbox(one).messages()] == ["topic"]
    assert [m.entry for m in bench.inbox(two).messages()] == ["topic"]
    assert [m.entry for m in bench.inbox(ranked).messages()] == ["high", "low"], "taken out by priority"
    assert [m.properties["priority"] for m in bench.inbox(ranked).messages()] == [8, 1]
    (relative,) = bench.inbox().messages("expires")
    assert timedelta(seconds=99) < from_iso(relative.headers["expires"]) - due < timedelta(seconds=115)
    (absolute,) = bench.inbox().messages("expires at")
    assert from_iso(absolute.headers["expires"]) == later
    (delayed,) = bench.inbox().messages("countdown")
    assert timedelta(seconds=49) < from_iso(delayed.headers["eta"]) - due < timedelta(seconds=65)
    assert_calm(beats)


def test_of_several_brokers_the_one_that_answers_is_used(bench: Bench, proxy: Proxy) -> None:
    with Proxy(ADDRESS) as closed, Proxy(ADDRESS) as silent:
        closed.refuse()
        silent.hang()
        urls = [bench.project.url.replace(str(proxy.port), str(other.port)) for other in (closed, silent, proxy)]
        bench.write(f"app.conf.broker_url = {urls!r}\n", beat_schedule=PULSE)
        beats = bench.start_beats(1)
        wait_until(lambda: len(bench.nominals()) >= 3, 60, "pulses")
        proxy.cut()
        seen = len(bench.nominals())
        wait_until(lambda: len(bench.nominals()) >= seen + 3, 60, "pulses after a cut")
        assert "names several brokers" in beats[0].log
        assert_calm(beats)

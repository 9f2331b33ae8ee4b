"""A thousand entries, some of which cannot be sent: the others are on time, and each of those is reported by name."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from kombu import Connection
from observe import Bench, in_seconds, now

from celery_tzbeat.testing.processes import wait_until

GOOD = 996

BODY = """
import uuid
from celery import Task
from celery.beat import BeatLazyFunc
from celery_tzbeat import at


class Silent(Task):
    def apply_async(self, *args, **kwargs):
        return None


@app.task(base=Silent)
def silent():
    pass


def fail():
    raise LookupError("no tenant today")


due = at({due!r})


def entry(task="proj.record", args=(), **options):
    return {{"task": task, "schedule": due, "args": args, "options": options}}


bad = {{
    "unserialisable": entry(args=[object()]),
    "lazy": entry(args=[BeatLazyFunc(fail)]),
    "no exchange": entry(exchange="no-such-exchange", routing_key="x"),
    "no queue": entry(exchange="amq.direct", routing_key="no-such-queue"),
    "header": entry(headers={{"tenant": uuid.UUID(int=1)}}),
    "silent": entry("proj.silent"),
}}
good = {{f"good {{n}}": entry(args=[n]) for n in range({good})}}
names = list(good)
for n, name in enumerate(bad):  # spread among the others
    names.insert(n * 150 + 10, name)
app.conf.beat_schedule = {{name: {{**good, **bad}}[name] for name in names}}
"""


def rate(bench: Bench) -> float:
    """Return how many messages a second RabbitMQ confirms here and now, one by one as beat sends them."""
    with Connection(bench.project.url, transport_options={"confirm_publish": True}) as connection:
        queue = connection.SimpleQueue(f"{bench.queue}-rate")
        began = time.monotonic()
        for _ in range(200):
            queue.put({"padding": "x" * 500})
        took = time.monotonic() - began
        queue.queue.delete()
        queue.close()
    return 200 / took


@pytest.mark.timeout(300)
def test_of_a_thousand_entries_the_good_ones_are_on_time_and_each_bad_one_ends_as_stated(bench: Bench) -> None:
    measured = rate(bench)
    due = in_seconds(15)
    bench.write(BODY.format(due=due.isoformat(), good=GOOD))
    (beat,) = bench.start_beats(1)
    assert now() < due, "the machine is too busy for this test"
    wait_until(lambda: len(bench.inbox().messages()) >= GOOD, 120, "the good ones")
    wait_until(lambda: len(bench.audit("dead")) == 5, 150, "the bad ones to be given up")

    messages = bench.inbox().messages()
    assert sorted(message.entry for message in messages) == sorted(f"good {n}" for n in range(GOOD))
    late = sorted(bench.lateness())
    # Measured on a quiet machine: 0.9 of the rate. Building, claiming and confirming come to it, and the machine is busy.
    slowest = min(measured, rate(bench))
    assert late[-1] < 5 + 6 * GOOD / slowest, f"{slowest:.0f} messages a second"

    reasons = {r.entry: r.detail for r in bench.audit("dead")}
    assert reasons == {
        "unserialisable": "build",
        "lazy": "build",
        "no exchange": "unroutable",
        "no queue": "unroutable",
        "header": "unroutable",
    }
    assert [(r.event, r.entry, r.detail) for r in bench.audit("skipped")] == [("skipped", "silent", "by the task")]
    letters: dict[str, Any] = {}
    for text in bench.ask(lambda store: store.dead_letters()).values():
        letter = json.loads(text)
        letters[letter["entry"]] = letter
    assert set(letters) == set(reasons)
    assert "no tenant today" in letters["lazy"]["error"]
    assert "no-such-exchange" in letters["no exchange"]["error"]
    assert "no-such-queue" in letters["no queue"]["error"]
    for name in ("no exchange", "no queue", "header"):
        assert json.loads(base64.b64decode(letters[name]["message"]))["envelopes"], "the letter has the message"
    for name, reason in reasons.items():
        words = "could not be built (5 of 5)" if reason == "build" else "the broker did not take the message"
        assert any(f"entry {name!r}" in line and words in line for line in beat.log.splitlines()), name
    assert beat.alive

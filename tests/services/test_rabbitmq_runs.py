"""Runs whose messages come over RabbitMQ: the same gate, other acknowledgements, a message put together from its parts."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest
from gated import Gated
from observe import LEASE, in_seconds
from on_brokers import FAILS, OVERLAPPING, play_overlap, play_retries
from rabbit import Inbox

from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.model import Retry
from celery_tzbeat.testing.processes import wait_until


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_runs_over_rabbitmq_end_as_over_redis(make_gated: Callable[..., Gated], pool: str) -> None:
    gated = make_gated()
    gated.start_worker("one", pool=pool)
    gated.start_worker("two", pool=pool)
    gated.send("work", "done", 1.0)
    gated.send("work", "done", 1.0)  # a copy
    gated.send("retrying", "retried", 5)
    gated.send("retrying", "swallowed", 1, "throw=False")
    gated.send("broken", "dead")
    gated.wait_for_mark("done", "d")
    gated.wait_for_mark("retried", "d")
    gated.wait_for_mark("swallowed", "d")
    gated.wait_for_mark("dead", "x")
    assert len(gated.said("done", "start")) == 1
    assert [line["retries"] for line in gated.said("retried", "start")] == list(range(6))
    run = Parcel.from_bytes(gated.letters()["dead"].message).run
    assert json.loads(run.body) == [[], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    assert run.headers["id"] == "id-dead"
    assert run.routing_key == gated.app.conf.task_default_queue


# ---- retries


def test_a_hundred_immediate_retries_on_idle_workers_are_neither_parked_for_long_nor_lost(
    make_gated: Callable[..., Gated],
) -> None:
    gated = make_gated()
    gated.start_worker("one", concurrency=1)
    gated.start_worker("two", concurrency=1)
    gated.send("retrying", "k", 100)
    gated.wait_for_mark("k", "d", 120)
    starts = gated.said("k", "start")
    assert [line["retries"] for line in starts] == list(range(101))
    waits = [start["at"] - retry["at"] for start, retry in zip(starts[1:], gated.said("k", "retry"), strict=True)]
    assert max(waits) < 10, "a busy machine; a run lease is 60 s"


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_each_retry_policy_makes_its_attempts_under_one_key_also_when_a_worker_is_killed_meanwhile(
    make_gated: Callable[..., Gated], kind: str
) -> None:
    gated = make_gated(FAILS, task_default_queue_type=kind)
    workers = {name: gated.start_worker(name) for name in ("one", "two")}
    play_retries(gated, [*workers.values()])

    gated.send(
        "fails", "long", 2, retry=Retry(max_attempts=3, delay=timedelta(seconds=6), backoff="fixed", jitter=False)
    )
    gated.wait_for_state("long", "published")
    if kind == "classic":  # a worker holds the message until it is due
        had, tried = "proj.fails[id-long] received", "proj.fails[id-long] retry"
        killed = wait_until(
            lambda: next((n for n, w in workers.items() if w.log.count(had) > w.log.count(tried)), None),
            30,
            "a worker to have the message of the second attempt",
        )
    else:  # Celery leaves it with the broker
        killed = gated.said("long", "start")[0]["worker"].partition("@")[0]
    workers[killed].kill()
    gated.wait_for_mark("long", "d", 60)
    gated.send("work", "after")  # what was multiplied would stand before it
    gated.wait_for_mark("after", "d")
    first, second = gated.said("long", "start")
    assert (first["attempt"], first["retries"], second["attempt"], second["retries"]) == (1, 0, 2, 1)
    assert first["key"] == second["key"]
    assert second["at"] - first["at"] >= 6
    assert second["worker"].partition("@")[0] != killed
    assert "long" not in gated.letters()


# ---- beats and workers

JOBS = """
from celery_tzbeat import at


def mended():
    return os.path.exists(os.path.join(os.path.dirname(__file__), "mended"))


def job(name, **options):
    @app.task(bind=True, name=f"proj.{{name}}", **options)
    def body(self):
        say(self, "start", id=self.request.id, key=current_run().key)
        if not mended():
            hangs(self)
        say(self, "end")


def hangs(self):
    if "fails" in self.name:
        raise ValueError("the API is down")
    time.sleep(60)


job("early")
job("late", acks_late=True)
job("fails")
job("fails_twice")
due = at({due!r})
app.conf.beat_schedule = {{
    "early": {{"task": "proj.early", "schedule": due, "policy": {{"run_lease": 3}}}},
    "late": {{"task": "proj.late", "schedule": due, "policy": {{"run_lease": 3}}}},
    "fails": {{"task": "proj.fails", "schedule": due, "options": {{"compression": "zlib"}}}},
    "retried": {{"task": "proj.fails_twice", "schedule": due, "policy": {{"retry": {retry!r}}}}},
}}
"""


def test_a_killed_workers_runs_and_a_failure_end_well_by_the_leader(make_gated: Callable[..., Gated]) -> None:
    retry = {
        "max_attempts": 2,
        "delay": 1,
        "backoff": "fixed",
        "jitter": False,
    }  # Celery leaves the delay to the broker
    jobs = JOBS.format(due=in_seconds(10).isoformat(), retry=retry)
    gated = make_gated(jobs, tzbeat_lease=LEASE, task_default_queue_type="quorum")
    tz, wait = gated.tz(), timedelta(seconds=30)

    def events(entry: str) -> list[str]:
        with closing(gated.store(leads=False)) as store:
            found = [record.event for record in store.audit(count=10_000) if record.entry == entry]
        return [event for event in found if event in ("abandoned", "redispatched", "dead", "replayed", "done")]

    first = gated.start_worker("one", concurrency=4)
    with closing(gated.store(leads=False)) as store:
        wait_until(store.workers_lived, 30, "the worker half attends")
    for name in ("beat one", "beat two"):
        gated.project.start_beat(name)
    for entry, count in {"early": 1, "late": 1, "fails": 1, "retried": 2}.items():
        gated.wait_for(entry, "start", 60, count=count)
    wait_until(lambda: len(gated.letters()) == 2, 30, "the failures to be dead letters")
    gated.start_worker("two")  # to it RabbitMQ gives what the first had not acknowledged
    (gated.project.directory / "mended").touch()
    first.kill()

    wait_until(lambda: events("late")[-1:] == ["done"], 60, "the late one to be done")
    assert events("late") == ["abandoned", "redispatched", "done"]
    before, after = gated.said("late", "start")
    assert (before["key"], before["id"]) == (after["key"], after["id"])

    letters = wait_until(lambda: found if len(found := gated.letters()) == 3 else None, 30, "three dead letters")
    reasons = {"early": "abandoned", "fails": "exception", "retried": "retries"}
    assert {entry: letter.reason for entry, letter in letters.items()} == reasons
    compressed = Parcel.from_bytes(letters["fails"].message).run
    assert compressed.headers["compression"] == "application/x-gzip"
    assert json.loads(zlib.decompress(compressed.body))[0] == []
    asked = tz.dead.replay(*(letter.key for letter in letters.values()), why="mended", wait=wait)
    assert [one.outcome for one in asked] == ["replayed as dispatch 2"] * 3
    for entry, letter in letters.items():
        wait_until(lambda entry=entry: events(entry)[-1:] == ["done"], 30, f"the replay of {entry} to be done")
        assert [event for event in events(entry) if event != "abandoned"] == ["dead", "replayed", "done"]
        *before, after = gated.said(entry, "start")
        assert len(before) == letter.attempts == (2 if entry == "retried" else 1)
        assert {line["key"] for line in (*before, after)} == {letter.key}
        assert {line["id"] for line in before} == {letter.task_id}
        assert after["id"] != letter.task_id
    assert gated.letters() == {}
    assert tz.runs() == []


def test_no_two_runs_of_an_entry_overlap_by_any_of_the_policies(make_gated: Callable[..., Gated]) -> None:
    gated = make_gated(OVERLAPPING, tzbeat_lease=LEASE)
    gated.start_worker(concurrency=4)
    play_overlap(gated)


# ---- what is left


def test_a_letter_has_the_message_byte_for_byte_as_it_travelled(make_gated: Callable[..., Gated], vhost: str) -> None:
    gated = make_gated()
    with closing(Inbox(vhost, gated.app.conf.task_default_queue)) as inbox:
        gated.send("broken", "plain")
        gated.send("broken", "compressed", options={"compression": "zlib"})
        gated.send("broken", "refused", options={"compression": "bzip2", "serializer": "pickle"})
        gated.send("broken", "no text")
        gated.send("broken", "not compressed", options={"compression": "zlib"})
        for message in inbox.messages():
            spoilt = message.entry in ("no text", "not compressed")
            inbox.put(replace(message, body=b"\xff\x00no json") if spoilt else message)
        wanted = {message.entry: message for message in inbox.look()}
        assert [wanted[entry].headers.get("compression") for entry in ("compressed", "refused")] == [
            "application/x-gzip",
            "application/x-bz2",
        ]
        gated.start_worker(pool="solo")
        letters = wait_until(lambda: found if len(found := gated.letters()) == 5 else None, 30, "five dead letters")
        for entry, message in wanted.items():
            assert letters[entry].reason == ("exception" if entry in ("plain", "compressed") else "undecodable")
            run = Parcel.from_bytes(letters[entry].message).run
            assert run.body == message.body, entry
            assert run.headers == message.headers, entry
            assert (run.content_type, run.content_encoding) == (
                message.properties["content_type"],
                message.properties["content_encoding"],
            )

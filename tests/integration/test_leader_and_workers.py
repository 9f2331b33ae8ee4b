"""Real beats and real workers together: killed workers, failures that are mended, runs that are stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from evidence import audit, connected, ledger, queued, refusals
from gated import GIVES_BACK, Gated
from on_brokers import OVERLAPPING, play_overlap

from celery_tzbeat.api import TzBeat
from celery_tzbeat.deliveries import DeadLetter
from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.testing.processes import wait_until

SOON = 30
WAIT = timedelta(seconds=SOON)

BODY = """
import time
from datetime import datetime, timedelta, timezone
from celery_tzbeat import TzBeat, at, current_run

tz = TzBeat(app)


@app.task(bind=True, acks_late={late!r})
def work(self, seconds):
    run = current_run()
    with open({said!r}, "a") as file:
        file.write(json.dumps({{"key": run.key, "id": self.request.id, "pid": os.getpid()}}) + "\\n")
    if not os.path.exists({mended!r}):
        raise ValueError("the API is down")
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not run.cancelled:
        time.sleep(0.05)
    run.raise_if_cancelled()


due = at((datetime.now(timezone.utc) + timedelta(seconds=8)).isoformat())
app.conf.beat_schedule = {{"job": {{"task": "proj.work", "schedule": due, "args": [{seconds!r}], "policy": {policy!r}}}}}
"""


CONF = {"worker_prefetch_multiplier": 1}


class Shop:
    """A project with one job that is due once, a beat, and a worker."""

    def __init__(
        self, project: Any, *, seconds: float, late: bool = False, conf: Mapping[str, Any] | None = None, **policy: Any
    ) -> None:
        self.project = project
        self.said: Path = project.directory / "said.jsonl"
        self.mended: Path = project.directory / "mended"
        names = {"said": str(self.said), "mended": str(self.mended)}
        project.write(BODY.format(late=late, seconds=seconds, policy=policy, **names), **CONF, **(conf or {}))
        self.worker = project.start_worker(pool="prefork")
        self.worker.wait_for_log("ready", SOON)
        with ledger(project.url) as store:
            wait_until(store.workers_lived, SOON, "the worker half attends")
        self.beat = project.start_beat()
        app = Celery("proj", broker=project.url, set_as_current=False)
        app.conf.update(tzbeat_lease=2, result_expires=None, beat_schedule={})
        self.tz = TzBeat(app, set_scheduler=False)

    def starts(self) -> list[Mapping[str, Any]]:
        return [json.loads(line) for line in self.said.read_text().splitlines()] if self.said.exists() else []

    def letter(self) -> DeadLetter:
        (letter,) = wait_until(self.tz.dead.list, SOON, "a dead letter")
        return letter

    def events(self, *names: str) -> list[str]:
        return [record.event for record in audit(self.project.url) if record.event in names]

    def kill_worker(self) -> None:
        wait_until(self.starts, SOON, "the run begins")
        self.worker.kill()


def test_a_killed_workers_run_is_dispatched_again_and_done_once(project: Any) -> None:
    shop = Shop(project, seconds=3, run_lease=3, on_abandoned="redispatch")
    shop.mended.touch()
    shop.kill_worker()
    project.start_worker(pool="prefork")
    wait_until(lambda: shop.events("done"), SOON, "it is done")
    first, second = shop.starts()
    assert (first["key"], first["id"]) == (second["key"], second["id"])
    assert shop.events("redispatched", "done", "dead") == ["redispatched", "done"]
    assert shop.tz.runs() == []


def test_an_early_acknowledged_run_of_a_killed_worker_is_a_dead_letter_and_can_be_replayed(project: Any) -> None:
    shop = Shop(project, seconds=3, run_lease=3)
    shop.mended.touch()
    shop.kill_worker()
    letter = shop.letter()
    assert letter.reason == "abandoned"
    assert letter.task_id == shop.starts()[0]["id"]
    project.start_worker(pool="prefork")
    (asked,) = shop.tz.dead.replay(letter.key, wait=WAIT)
    assert asked.is_done
    wait_until(lambda: shop.events("done"), SOON, "it is done")
    assert len(shop.starts()) == 2
    assert shop.starts()[1]["id"] != letter.task_id


@pytest.mark.parametrize("late", [False, True], ids=["early ack", "late ack"])
def test_a_failure_is_one_dead_letter_whose_replay_succeeds_when_the_cause_is_gone(project: Any, late: bool) -> None:
    shop = Shop(project, seconds=0, late=late)
    letter = shop.letter()
    assert letter.reason == "exception"
    assert "the API is down" in letter.error
    shop.mended.touch()
    (asked,) = shop.tz.dead.replay(entry="job", why="mended", wait=WAIT)
    assert asked.is_done
    wait_until(lambda: shop.events("done"), SOON, "it is done")
    assert shop.events("dead", "replayed", "done") == ["dead", "replayed", "done"]
    assert shop.tz.dead.list() == []
    assert Parcel.from_bytes(letter.message).run.body.startswith(b"[[0], {}")


def test_a_run_is_stopped_by_a_cancel(project: Any) -> None:
    shop = Shop(project, seconds=60)
    shop.mended.touch()
    wait_until(shop.starts, SOON, "the run begins")
    (asked,) = shop.tz.cancel("job", why="enough", wait=WAIT)
    assert asked.outcome == "asked to stop"
    wait_until(lambda: shop.events("revoked"), SOON, "it has stopped")
    assert (shop.tz.runs(), shop.tz.dead.list()) == ([], [])


@pytest.mark.parametrize("late", [False, True], ids=["early ack", "late ack"])
def test_an_old_copy_never_wins_before_nor_after_the_replay_of_its_dead_letter(project: Any, late: bool) -> None:
    conf = {"broker_transport_options": GIVES_BACK, "tzbeat_retention": 7200}
    shop = Shop(project, seconds=2, late=late, conf=conf, run_lease=2, on_abandoned="dead_letter")
    shop.mended.touch()
    assert shop.worker.stop(SOON) == 0  # for the message to be seen in its queue
    wait_until(lambda: queued(project.url), SOON, "the message")
    with connected(project.url) as client:
        (old,) = client.lrange("celery", 0, -1)
    first = project.start_worker("first", pool="prefork")
    wait_until(shop.starts, SOON, "the run begins")
    with connected(project.url) as client:
        wait_until(lambda: client.hlen("unacked") == late, SOON, "it to be acknowledged, or not")
    first.kill()
    letter = shop.letter()
    assert letter.reason == "abandoned"

    # Before: the broker itself gives back what was not acknowledged.
    if not late:
        with connected(project.url) as client:
            client.lpush("celery", old)
    second = project.start_worker("second", pool="prefork")
    wait_until(lambda: refusals(second), SOON, "the gate to refuse the old copy")
    assert refusals(second) == ["settled (dead)"]
    assert second.stop(SOON) == 0

    # After: the next one to be taken while the replay waits, and another behind it.
    (asked,) = shop.tz.dead.replay(letter.key, wait=WAIT)
    assert asked.is_done
    wait_until(lambda: shop.tz.run(letter.key).state == "published", SOON, "the replay to be sent")
    with connected(project.url) as client:
        assert client.llen("celery") == 1
        client.rpush("celery", old)
        client.lpush("celery", old)
    third = project.start_worker("third", pool="prefork", concurrency=2)
    wait_until(lambda: len(refusals(third)) == 2 and shop.events("done"), SOON, "the replay to be done")
    with connected(project.url) as client:
        client.lpush("celery", old)
    wait_until(lambda: len(refusals(third)) == 3, SOON, "the gate to refuse the old copy once more")
    assert refusals(third) == ["stale (published)", "stale (running)", "settled (done)"]
    assert [start["id"] == letter.task_id for start in shop.starts()] == [True, False]
    assert shop.events("started", "dead", "replayed", "done") == ["started", "dead", "replayed", "started", "done"]


def test_no_two_runs_of_an_entry_overlap_by_any_of_the_policies(project: Any) -> None:
    gated = Gated(project, body=OVERLAPPING)
    gated.start_worker(concurrency=4)
    play_overlap(gated)

"""One run a key, in each pool, with real workers: what runs, what is refused, and how it ends."""

from __future__ import annotations

from contextlib import closing
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
from gated import GIVES_BACK, Gated

from celery_tzbeat.envelopes import Parcel

if TYPE_CHECKING:
    from conftest import Project

POOLS = ["prefork", "threads", "solo", "gevent"]


@pytest.mark.parametrize("pool", POOLS)
def test_each_pool_runs_once_and_says_how_it_ended(project: Project, pool: str) -> None:
    gated = Gated(project)
    gated.start_worker(pool=pool)
    done = gated.send("work", "done", 0.5)
    gated.send("work", "done", 0.5)  # a copy of the same delivery
    gated.send("broken", "dead")
    gated.send("retrying", "retried", 2)
    gated.send("retrying", "swallowed", 1, "throw=False")
    gated.send("work", "expired", options={"expires": -10})
    plain = gated.app.send_task("proj.work", (0.0,))

    gated.wait_for_mark("done", "d")
    gated.wait_for_mark("dead", "x")
    gated.wait_for_mark("retried", "d")
    gated.wait_for_mark("swallowed", "d")
    gated.wait_for_mark("expired", "e")
    assert done.get(timeout=10) == "worked"
    assert plain.get(timeout=10) == "worked"
    assert [line["attempt"] for line in gated.said("done", "start")] == [1]
    assert [line["retries"] for line in gated.said("retried", "start")] == [0, 1, 2]
    assert [line["attempt"] for line in gated.said("retried", "start")] == [1, 2, 3]
    assert [line["retries"] for line in gated.said("swallowed", "start")] == [0, 1]
    assert gated.said("expired") == []
    letter = gated.letters()["dead"]
    assert (letter.reason, letter.task, letter.attempts) == ("exception", "proj.broken", 1)
    assert "ZeroDivisionError: broken" in letter.error
    assert "ZeroDivisionError" in letter.traceback
    run = Parcel.from_bytes(letter.message).run
    assert run.headers["id"] == "id-dead"
    assert run.routing_key == "celery"


@pytest.mark.parametrize("late", [True, False], ids=["acks_late", "acks_early"])
def test_a_task_longer_than_the_visibility_timeout_runs_once(project: Project, late: bool) -> None:
    # 12 s of work, given back by the broker after 5 s, two workers.
    gated = Gated(project, broker_transport_options=GIVES_BACK, tzbeat_retention=7200)
    gated.start_worker("one")
    gated.start_worker("two")
    gated.app.send_task("proj.late_work", (12,))  # what Celery makes of it: that the broker does give it back
    gated.send("late_work" if late else "work", "k", 12)
    gated.wait_for("plain", "start", count=2)
    gated.wait_for_mark("k", "d")
    assert len(gated.said("k", "start")) == 1
    assert gated.said("k", "start")[0]["attempt"] == 1


def test_an_immediate_retry_is_never_parked_for_long_and_never_lost(project: Project) -> None:
    gated = Gated(project)
    gated.start_worker("one", concurrency=1)
    gated.start_worker("two", concurrency=1)
    gated.app.send_task("proj.retrying", (30,))  # what Celery itself takes here: this machine may be busy
    plain = _waits(gated.wait_for("plain", "start", 60, count=31), gated.said("plain", "retry"))
    gated.send("retrying", "k", 100)
    gated.wait_for_mark("k", "d", 120)
    starts = gated.said("k", "start")
    assert [line["retries"] for line in starts] == list(range(101))
    waits = _waits(starts, gated.said("k", "retry"))
    assert median(waits) - median(plain) < 0.05
    assert max(waits) < 2.0  # a busy machine; a run lease is 60 s


def _waits(starts: list[dict[str, Any]], retries: list[dict[str, Any]]) -> list[float]:
    return [start["at"] - retry["at"] for start, retry in zip(starts[1:], retries, strict=True)]


KINDS = """
from celery import Task, shared_task
from celery.worker.request import Request


class OwnRequest(Request):
    def on_success(self, *args, **kwargs):
        raise AssertionError("Celery shadows it")


class Base(Task):
    Request = OwnRequest

    def before_start(self, task_id, args, kwargs):
        say(self, "before_start")


@shared_task(bind=True)
def shared(self):
    say(self, "start")


@app.task(bind=True, base=Base)
def based(self):
    say(self, "start")


class ByClass(Task):
    name = "proj.by_class"

    def run(self):
        say(self, "start")


app.register_task(ByClass())


@app.task(bind=True, name="proj.called")
def called(self):
    say(self, "start")


from celery.signals import worker_ready


@worker_ready.connect
def register_late(sender, **kwargs):
    @app.task(bind=True, name="proj.late")
    def late(self):
        say(self, "start")

    sender.update_strategies()
"""


def test_tasks_of_every_kind_pass_the_gate(project: Project) -> None:
    gated = Gated(project, body=KINDS)
    gated.start_worker(pool="solo")
    for kind in ("shared", "based", "by_class", "called", "late"):
        for _ in range(2):
            gated.send(kind, kind)
    for kind in ("shared", "based", "by_class", "called", "late"):
        gated.wait_for_mark(kind, "d")
        assert len(gated.said(kind, "start")) == 1, kind


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_a_run_is_claimed_where_its_body_starts(project: Project, pool: str) -> None:
    gated = Gated(project)
    gated.start_worker(pool=pool, concurrency=2)
    keys = [f"k{n}" for n in range(8)]
    for key in keys:
        gated.send("work", key, 0.5)
    for key in keys:
        gated.wait_for_mark(key, "d")
    with closing(gated.store()) as store:
        claims = [int(record.id.split("-")[0]) / 1000 for record in store.audit() if record.event == "started"]
    starts = sorted(line["at"] for line in gated.said(what="start"))
    gaps = [start - claim for start, claim in zip(starts, claims, strict=True)]
    assert max(gaps) < 0.25  # 50 ms on an idle machine; a prefetched one would show 0.5 s and more

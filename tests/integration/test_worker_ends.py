"""How runs end that nobody wishes for: killed, limited, cancelled, shut down, without a store, unreadable."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import redis
from gated import GIVES_BACK, Gated

from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.store.protocol import Request
from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.server import LocalServer

if TYPE_CHECKING:
    from conftest import Project

SHORT = {"run_lease": timedelta(seconds=2)}


def abandon_when_lapsed(gated: Gated, key: str) -> None:
    """Do what the leader's sweep does, with an unbroken view."""
    with closing(gated.store()) as store:

        def lapsed() -> bool:
            found = [run for run in store.survey().lapsed if run.entry == key]
            return bool(found) and store.abandon(found[0], epoch=1).verdict.name == "DONE"

        wait_until(lapsed, 30, f"the lease of {key} to lapse")


def test_a_killed_worker_s_late_acknowledged_run_is_started_once_more(project: Project) -> None:
    gated = Gated(project, broker_transport_options=GIVES_BACK, tzbeat_retention=7200)
    workers = {name: gated.start_worker(name) for name in ("one", "two")}
    gated.send("late_work", "k", 6, **SHORT)
    began = gated.wait_for("k", "start")[0]
    workers[began["worker"].partition("@")[0]].kill()
    abandon_when_lapsed(gated, "k")
    # Line 27: the copy that the broker gives back is started, for the ledger says that its task may run again.
    gated.wait_for_mark("k", "d", 60)
    assert [line["attempt"] for line in gated.said("k", "start")] == [1, 2]
    assert len(gated.said("k", "end")) == 1


def test_a_killed_worker_s_early_acknowledged_run_stays_abandoned_until_the_leader_decides(project: Project) -> None:
    gated = Gated(project)
    first = gated.start_worker("one")
    gated.send("work", "k", 60, **SHORT)
    gated.wait_for("k", "start")
    first.kill()
    abandon_when_lapsed(gated, "k")
    gated.start_worker("two")
    gated.send("work", "k", 0.0, **SHORT)  # a copy
    gated.send("work", "after", 0.0)
    gated.wait_for_mark("after", "d")
    assert gated.record("k")["state"] == "abandoned"
    assert len(gated.said("k", "start")) == 1


def test_a_killed_child_s_run_is_abandoned_at_once(project: Project) -> None:
    gated = Gated(project)
    gated.start_worker()
    gated.send("work", "k", 60)
    child = gated.wait_for("k", "start")[0]["pid"]
    os.kill(child, signal.SIGKILL)
    gated.wait_for_state("k", "abandoned", 20)  # its lease has 40 s left


def test_a_hard_limit_is_one_dead_letter(project: Project) -> None:
    gated = Gated(project)
    gated.start_worker()
    gated.send("stubborn", "k", 60, options={"time_limit": 1})
    gated.wait_for_mark("k", "x")
    letter = gated.letters()["k"]
    assert letter.reason == "hard_limit"
    with closing(gated.store()) as store:
        wait_until(lambda: not store.survey().lapsed, 5, "nothing to be left")
        assert [record.event for record in store.audit() if record.event in ("dead", "done", "abandoned")] == ["dead"]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_cancelled_run_stops_and_is_revoked(project: Project, pool: str) -> None:
    gated = Gated(project)
    gated.start_worker(pool=pool)
    gated.send("work", "k", 60, **SHORT)
    gated.wait_for("k", "start")
    cancel(gated, "k")
    assert gated.wait_for("k", "stop")[0]["why"] == "cancel"
    gated.wait_for_mark("k", "r")


def test_a_run_that_does_not_obey_is_ended_after_kill_after(project: Project) -> None:
    gated = Gated(project)
    gated.start_worker()
    gated.send("stubborn", "k", 60, kill_after=timedelta(seconds=1), **SHORT)
    gated.wait_for("k", "start")
    cancel(gated, "k")
    gated.wait_for_mark("k", "r")
    assert gated.said("k", "end") == []
    gated.send("work", "after", 0.0)  # the pool has a new child
    gated.wait_for_mark("after", "d")


def test_a_revoked_run_that_is_terminated_is_revoked(project: Project) -> None:
    gated = Gated(project)
    gated.start_worker()
    gated.send("stubborn", "k", 60)
    gated.wait_for("k", "start")
    gated.app.control.revoke("id-k", terminate=True)
    gated.wait_for_mark("k", "r")


def cancel(gated: Gated, key: str) -> None:
    with closing(gated.store()) as store:
        request = Request(
            "cancel", gated.ticket(key).key, by="test", why="", expires=store.time() + timedelta(minutes=5)
        )
        store.ask(request)
        asked = store.survey().requests[0]
        assert store.cancel(asked, asked.key, epoch=1).detail == "asked to stop"


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_warm_shutdown_tells_the_task_and_another_worker_goes_on(project: Project, pool: str) -> None:
    gated = Gated(project)
    first = gated.start_worker("one", pool=pool)
    gated.send("work", "k", 20)
    gated.wait_for("k", "start")
    gated.start_worker("two", pool=pool)
    first.terminate()
    assert gated.wait_for("k", "stop")[0]["why"] == "shutdown"
    gated.wait_for("k", "start", count=2)
    first.wait(30)
    assert [line["retries"] for line in gated.said("k", "start")] == [0, 1]
    assert {line["worker"].split("@")[0] for line in gated.said("k", "start")} == {"one", "two"}
    gated.wait_for_mark("k", "d", 60)


def test_a_warm_shutdown_keeps_the_lease_of_a_task_that_goes_on(project: Project) -> None:
    gated = Gated(project, broker_transport_options=GIVES_BACK, tzbeat_retention=7200)
    first = gated.start_worker("one")
    gated.send("late_work", "k", 10, run_lease=timedelta(seconds=2))
    gated.wait_for("k", "start")
    gated.start_worker("two")
    first.terminate()
    gated.wait_for("k", "end", 60)
    gated.wait_for_mark("k", "d", 60)
    first.wait(30)
    assert len(gated.said("k", "start")) == 1


def test_a_cold_shutdown_abandons_at_once_what_it_ends(project: Project) -> None:
    gated = Gated(project)
    first = gated.start_worker("one")
    gated.send("late_work", "late", 60)
    gated.send("stubborn", "early", 60)
    # Celery ends only what it has heard to be accepted, and waits for the rest.
    active = gated.app.control.inspect(timeout=1).active
    wait_until(lambda: sum(map(len, (active() or {}).values())) == 2, 30, "both to be accepted")
    os.kill(first.pid, signal.SIGQUIT)
    first.wait(60)
    assert gated.record("late")["state"] == "abandoned"
    assert gated.record("early")["state"] == "abandoned"


def test_a_soft_shutdown_tells_the_task_at_its_beginning(project: Project) -> None:
    gated = Gated(project, worker_soft_shutdown_timeout=20)
    first = gated.start_worker("one")
    gated.send("work", "k", 15)
    gated.wait_for("k", "start")
    os.kill(first.pid, signal.SIGQUIT)
    assert gated.wait_for("k", "stop", 10)[0]["why"] == "shutdown"
    first.wait(60)
    assert gated.record("k")["state"] in ("published", "abandoned")


LOOPS = """
def loop(self, items, seconds):
    for item in current_run().each(range(items)):
        say(self, "item", item=item)
        time.sleep(seconds)


early = app.task(bind=True, name="proj.early")(loop)
late = app.task(bind=True, name="proj.late", acks_late=True)(loop)
"""


@dataclass(frozen=True)
class Stop:
    """How a worker is stopped in the middle of a loop, and how many of its items that may repeat."""

    signals: tuple[signal.Signals, ...]
    soft: float = 0.0
    items: int = 5
    seconds: float = 1.0
    repeats: int = 1


STOPS = {
    "soft": Stop((signal.SIGQUIT,), soft=2, items=80, seconds=0.05, repeats=0),
    "soft and too short": Stop((signal.SIGQUIT,), soft=0.3),
    "cold": Stop((signal.SIGQUIT,)),
    "warm, then cold": Stop((signal.SIGTERM, signal.SIGQUIT)),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_loop_in_a_worker_that_is_stopped_is_resumed_by_another_from_its_checkpoint(
    project: Project, stop: Stop
) -> None:
    gated = Gated(project, body=LOOPS, worker_soft_shutdown_timeout=stop.soft)
    project.start_beat()
    other = project.start_worker("two", pool="prefork", concurrency=2, args=("-Q", "another"))
    first = gated.start_worker("one")
    other.wait_for_log("ready.", 60)
    for name in ("early", "late"):
        gated.send(name, name, stop.items, stop.seconds, on_abandoned="redispatch")
    for name in ("early", "late"):
        gated.wait_for(name, "item", count=2)
    gated.open_queue(workers=2)
    for number in stop.signals:
        os.kill(first.pid, number)
        first.wait_for_log({signal.SIGTERM: "Warm shutdown", signal.SIGQUIT: "Cold shutdown"}[number], 30)
    first.wait(30)
    for name in ("early", "late"):
        gated.wait_for_mark(name, "d", 60)
        lines = gated.said(name, "item")
        assert {line["item"] for line in lines} == set(range(stop.items)), "none is left out"
        assert len(lines) <= stop.items + stop.repeats
        workers = [line["worker"].partition("@")[0] for line in lines]
        assert workers == sorted(workers), "the second starts when the first is over"
        assert set(workers) == {"one", "two"}
        attempts = [line["attempt"] for line in lines]
        assert attempts[0] == 1
        assert attempts == sorted(attempts)
    assert gated.letters() == {}


@pytest.fixture
def ledger(make_server: Callable[..., LocalServer]) -> LocalServer:
    """A server for the ledger alone, its data on disk."""
    return make_server(appendonly=True)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "killed"])
def test_a_store_that_is_away_changes_no_result(project: Project, ledger: LocalServer, frozen: bool) -> None:
    gated = Gated(project, store=ledger.url)
    gated.start_worker()
    middle = gated.send("work", "middle", 6)
    gated.wait_for("middle", "start")
    gated.wait_for_state("middle", "running")
    ledger.freeze() if frozen else ledger.kill()
    begun = gated.send("work", "begun", 1.0)
    assert begun.get(timeout=30) == "worked"  # started and ended without the store
    assert middle.get(timeout=30) == "worked"
    ledger.thaw() if frozen else ledger.start()
    gated.wait_for_mark("middle", "d")
    gated.wait_for_mark("begun", "d")
    assert len(gated.said("begun", "start")) == len(gated.said("middle", "start")) == 1
    gated.send("work", "begun", 0.0)  # a copy, later
    gated.send("work", "after", 0.0)
    gated.wait_for_mark("after", "d")
    assert len(gated.said("begun", "start")) == 1


def test_a_run_that_holds_waits_for_the_store(project: Project, ledger: LocalServer) -> None:
    gated = Gated(project, store=ledger.url)
    gated.start_worker(concurrency=1)
    ledger.kill()
    gated.send("work", "held", 0.0, on_store_down="hold")
    gated.send("work", "once", 0.0, delivery="at_most_once", on_store_down="hold")
    assert gated.send("work", "others", 0.0).get(timeout=30) == "worked"
    assert gated.said("held") == gated.said("once") == []
    ledger.start()
    gated.wait_for_mark("held", "d")
    wait_until(lambda: "once" in gated.letters(), 30, "what is unknown to be buried")
    assert gated.letters()["once"].reason == "unknown"


def test_messages_that_never_become_a_run_are_dead_letters(project: Project) -> None:
    gated = Gated(project)
    gated.start_worker(pool="solo")
    gated.send("nowhere", "unknown")
    gated.send("work", "refused", 1.0, options={"serializer": "pickle"})
    gated.wait_for_mark("unknown", "x")
    assert gated.letters()["unknown"].reason == "unknown_task"
    gated.wait_for_mark("refused", "x")
    assert gated.letters()["refused"].reason == "undecodable"


def test_a_body_that_is_no_json_is_a_dead_letter_byte_for_byte(project: Project) -> None:
    gated = Gated(project)
    with closing(redis.Redis.from_url(project.url)) as client:
        gated.send("work", "k", 1.0)
        wire = json.loads(client.rpop("celery"))
        wire["body"] = "bm8ganNvbg=="  # no json
        client.lpush("celery", json.dumps(wire))
    gated.start_worker(pool="solo")
    gated.wait_for_mark("k", "x")
    letter = gated.letters()["k"]
    assert letter.reason == "undecodable"
    assert Parcel.from_bytes(letter.message).run.body == b"no json"


def test_after_five_starts_that_nobody_asked_for_it_is_a_dead_letter(project: Project) -> None:
    gated = Gated(project)
    gated.start_worker(concurrency=1)
    for dispatch in range(1, 4):
        gated.send("late_work", "k", 60, dispatch=dispatch, max_deliveries=2)
        if dispatch < 3:
            pid = gated.wait_for("k", "start", 30, count=dispatch)[-1]["pid"]
            os.kill(pid, signal.SIGKILL)
            gated.wait_for_state("k", "abandoned", 30)
    gated.wait_for_mark("k", "x")
    assert gated.letters()["k"].reason == "deliveries"
    assert len(gated.said("k", "start")) == 2

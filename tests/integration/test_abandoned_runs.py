"""A real beat on a real server, and a worker half played by hand: what the leader does about runs, lateness and requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from evidence import audit, ledger, queued
from hands import HandWorker

from celery_tzbeat.api import TzBeat
from celery_tzbeat.deliveries import DeadLetter
from celery_tzbeat.errors import OccurrenceNotFound
from celery_tzbeat.model import iso
from celery_tzbeat.store.protocol import Run
from celery_tzbeat.store.runs import Ended, Gate
from celery_tzbeat.testing.processes import wait_until

#: Seconds that a loaded machine may take for what is done within one.
SOON = 20

WAIT = timedelta(seconds=SOON)


@pytest.fixture
def worker(server: Any) -> Iterator[HandWorker]:
    made = HandWorker(server.url)
    made.attend()
    yield made
    made.close()


def tz_of(project: Any) -> TzBeat:
    app = Celery("proj", broker=project.url, set_as_current=False)
    app.conf.update(tzbeat_lease=12, result_expires=None, beat_schedule={})
    return TzBeat(app, set_scheduler=False)


def once(project: Any, *, lead: float = 4.0, names: tuple[str, ...] = ("job",), **policy: Any) -> None:
    """Write a project whose entries are due once, a few seconds from now."""
    entries = ", ".join(f"{name!r}: {{'task': 'proj.record', 'schedule': due, 'policy': policy}}" for name in names)
    project.write(f"""
from datetime import datetime, timedelta, timezone
from celery_tzbeat import at
policy = {policy!r}
due = at((datetime.now(timezone.utc) + timedelta(seconds={lead})).isoformat())
app.conf.beat_schedule = {{{entries}}}
""")


def every_second(project: Any, **policy: Any) -> None:
    project.write(beat_schedule={"job": {"task": "proj.record", "schedule": 1.0, "policy": policy}})


def open_runs(project: Any) -> list[Run]:
    with ledger(project.url) as store:
        return store.runs()


def state_of(project: Any, key: str) -> str:
    return next((run.state for run in open_runs(project) if run.key == key), "")


def letters(project: Any) -> list[DeadLetter]:
    with ledger(project.url) as store:
        return [DeadLetter.from_json(text) for text in store.dead_letters().values()]


def events(project: Any, *names: str) -> list[str]:
    return [record.event for record in audit(project.url) if record.event in names]


# ---- runs that lapse


def test_a_run_that_lapses_is_dispatched_again_under_its_task_id(project: Any, worker: HandWorker) -> None:
    once(project, run_lease=3, on_abandoned="redispatch")
    project.start_beat()
    first = worker.start()
    assert (first.gate, state_of(project, first.ticket.key)) == (Gate.WON, "running")
    second = worker.start()
    assert second.ticket.key == first.ticket.key
    assert (second.ticket.dispatch, second.task_id) == (2, first.task_id)
    assert second.gate is Gate.WON
    assert worker.end(first) is Ended.REFUSED
    assert worker.end(second) is Ended.DONE
    assert open_runs(project) == []
    assert events(project, "abandoned", "redispatched", "done", "dead") == ["abandoned", "redispatched", "done"]


@pytest.mark.parametrize(
    ("policy", "acks_late", "dead"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"on_abandoned": "dead_letter"}, True, True),
        ({"delivery": "at_most_once"}, True, True),
        ({"max_deliveries": 1}, True, True),
    ],
    ids=["early ack", "late ack", "dead_letter", "at most once", "used up"],
)
def test_what_becomes_of_an_abandoned_run_is_its_policys_affair(
    project: Any, worker: HandWorker, policy: dict[str, Any], acks_late: bool, dead: bool
) -> None:
    once(project, run_lease=3, **policy)
    project.start_beat()
    run = worker.start(acks_late=acks_late)
    assert worker.end(run, "abandoned") is Ended.DONE  # as MAIN writes for a child that it has lost
    if not dead:
        assert worker.start().ticket.dispatch == 2
        return
    (letter,) = wait_until(lambda: letters(project), SOON, "a dead letter")
    assert letter.reason == ("deliveries" if "max_deliveries" in policy else "abandoned")
    assert (letter.key, letter.task, letter.task_id) == (run.ticket.key, "proj.record", run.task_id)
    assert letter.message == run.payload
    assert open_runs(project) == []
    assert queued(project.url) == []


def test_a_server_that_was_restarted_makes_no_healthy_run_dead(
    make_project: Callable[[str], Any], aof_server: Any
) -> None:
    project, worker = make_project(aof_server.url), HandWorker(aof_server.url)
    worker.attend()
    once(project, names=tuple(f"job{n}" for n in range(40)), run_lease=3, on_abandoned="redispatch")
    project.start_beat()
    runs = [worker.start() for _ in range(40)]
    with worker.beating(*runs):
        wait_until(lambda: all(run.state == "running" for run in open_runs(project)), SOON, "40 runs")
        for _ in range(2):
            aof_server.kill()
            wait_until(lambda: "store" in project.processes[0].log, SOON, "the beat to notice")
            time.sleep(6)  # longer than their leases and two heartbeats
            aof_server.restart()
            time.sleep(8)  # that nothing happens meanwhile is the point
        assert events(project, "abandoned", "redispatched") == []
        assert {run.state for run in open_runs(project)} == {"running"}
    # and once they really stop, all of them are found out
    wait_until(lambda: len(events(project, "redispatched")) == 40, 30, "40 redispatches")
    worker.close()


# ---- late


def test_what_nobody_starts_in_time_is_lost_and_runs_if_it_still_comes(project: Any, worker: HandWorker) -> None:
    once(project, start_within=1)
    project.start_beat()
    wait_until(lambda: events(project, "lost"), SOON, "it is lost")
    assert open_runs(project) == []
    late = worker.start()
    assert late.gate is Gate.WON
    assert worker.end(late) is Ended.DONE


# ---- requests


def test_a_published_occurrence_is_withdrawn_and_its_message_refused(project: Any, worker: HandWorker) -> None:
    once(project)
    project.start_beat()
    (run,) = wait_until(lambda: open_runs(project), SOON, "it is published")
    assert run.state == "published"
    (asked,) = tz_of(project).cancel(run.key, why="not today", wait=WAIT)
    assert asked.outcome == "withdrawn"
    assert asked.is_done
    assert worker.start().gate is Gate.SETTLED
    (record,) = audit(project.url, "withdrawn")
    assert "not today" in record.detail
    with pytest.raises(OccurrenceNotFound):
        tz_of(project).cancel(run.key)


def test_a_run_is_asked_to_stop(project: Any, worker: HandWorker) -> None:
    once(project)
    project.start_beat()
    run = worker.start()
    (asked,) = tz_of(project).cancel("job", wait=WAIT)
    assert (asked.key, asked.outcome) == (run.ticket.key, "asked to stop")
    assert [pulse.name for pulse in worker.beat(run)] == ["CANCEL"]
    assert tz_of(project).run(run.ticket.key).cancelled
    worker.end(run, "revoked", reason="cancel")
    assert tz_of(project).runs() == []


def test_a_dead_letter_is_replayed_under_a_new_task_id(project: Any, worker: HandWorker) -> None:
    once(project)
    project.start_beat()
    run = worker.start()
    worker.end(run, "abandoned")
    (letter,) = wait_until(lambda: letters(project), SOON, "a dead letter")
    tz = tz_of(project)
    assert [found.key for found in tz.dead.list(entry="job", reason="abandoned")] == [letter.key]
    assert tz.dead.show(letter.key) == letter
    (dry,) = tz.dead.replay(letter.key, dry_run=True)
    assert (dry.key, dry.outcome, len(letters(project))) == (letter.key, None, 1)
    (asked,) = tz.dead.replay(letter.key, why="fixed", wait=WAIT)
    assert asked.outcome == "replayed as dispatch 2"
    assert asked.is_done
    again = worker.start()
    assert again.gate is Gate.WON
    assert (again.ticket.key, again.ticket.dispatch) == (letter.key, 2)
    assert again.task_id != run.task_id
    assert worker.start_of(run.payload).gate is Gate.STALE  # the old copy, returned late
    assert worker.end(again) is Ended.DONE
    assert letters(project) == []
    (record,) = audit(project.url, "replayed")
    assert "fixed" in record.detail


def test_requests_are_accepted_while_no_beat_is_alive(project: Any, worker: HandWorker) -> None:
    once(project, names=("one", "two", "three"))
    beat = project.start_beat()
    for _ in range(3):
        worker.end(worker.start(), "abandoned")
    wait_until(lambda: len(letters(project)) == 3, SOON, "three dead letters")
    beat.kill()
    tz = tz_of(project)
    keep = next(letter.key for letter in letters(project) if letter.entry == "three")
    (replay,) = tz.dead.replay(entry="one")
    (discard,) = tz.dead.discard(entry="two", limit=5)
    assert (replay.outcome, discard.outcome) == (None, None)
    project.start_beat()
    assert worker.start().ticket.entry == "one"
    wait_until(lambda: len(letters(project)) == 1, SOON, "both are carried out")
    with ledger(project.url) as store:
        assert (store.outcome(replay.id), store.outcome(discard.id)) == ("replayed as dispatch 2", "discarded")
    assert [letter.key for letter in letters(project)] == [keep]


# ---- overlap


def test_skip_lets_nothing_run_beside_an_open_one(project: Any, worker: HandWorker) -> None:
    every_second(project, overlap="skip")
    project.start_beat()
    first = worker.start()
    wait_until(lambda: len(audit(project.url, "skipped")) >= 2, SOON, "two are skipped")
    assert queued(project.url) == []
    assert {record.detail for record in audit(project.url, "skipped")} == {"overlap"}
    worker.end(first)
    assert worker.start().ticket.nominal > first.ticket.nominal


def test_buffer_one_keeps_the_newest_and_sends_it_when_the_other_is_settled(project: Any, worker: HandWorker) -> None:
    every_second(project, overlap="buffer_one")
    project.start_beat()
    first = worker.start()
    wait_until(lambda: len(audit(project.url, "coalesced")) >= 2, SOON, "older ones are coalesced")
    assert queued(project.url) == []
    assert sorted(run.state for run in open_runs(project)) == ["running", "waiting"]
    newest = max(run.nominal for run in open_runs(project))
    worker.end(first)
    second = worker.start()
    assert second.ticket.nominal >= newest
    assert worker.end(second) is Ended.DONE


def test_cancel_other_asks_the_run_to_stop_and_goes_on_when_it_has(project: Any, worker: HandWorker) -> None:
    every_second(project, overlap="cancel_other", kill_after=3600)
    project.start_beat()
    first = worker.start()
    wait_until(lambda: worker.beat(first)[0].name == "CANCEL", SOON, "the run is asked to stop")
    assert queued(project.url) == []
    worker.end(first, "revoked", reason="cancel")
    assert worker.start().ticket.nominal > first.ticket.nominal


def test_cancel_other_does_not_wait_longer_than_kill_after(project: Any, worker: HandWorker) -> None:
    every_second(project, overlap="cancel_other", kill_after=2)
    project.start_beat()
    first = worker.start()
    second = worker.start()  # though the first never stops
    assert second.ticket.nominal > first.ticket.nominal


def test_what_waits_is_taken_on_by_the_next_leader(project: Any, worker: HandWorker) -> None:
    once(project, names=("job",), overlap="buffer_one")
    beat = project.start_beat()
    first = worker.start()
    assert iso(first.ticket.nominal)
    beat.kill()
    every_second(project, overlap="buffer_one")
    second = project.start_beat()
    wait_until(lambda: "waiting" in [run.state for run in open_runs(project)], SOON, "one waits")
    second.kill()
    worker.end(first)
    project.start_beat()
    assert worker.start().ticket.nominal > first.ticket.nominal


def test_overlap_without_a_worker_half_is_said(project: Any) -> None:
    every_second(project, overlap="skip", start_within=2)
    beat = project.start_beat()
    beat.wait_for_log("no worker half is alive", SOON)
    wait_until(lambda: len(queued(project.url)) >= 2, SOON, "start_within frees the entry")
    assert events(project, "lost")
    assert "tzbeat.W213" in {finding.id for finding in tz_of_entries(project).check()}


def tz_of_entries(project: Any) -> TzBeat:
    tz = tz_of(project)
    tz.app.conf.beat_schedule = {"job": {"task": "proj.record", "schedule": 1.0, "policy": {"overlap": "skip"}}}
    return tz

"""How a run ended, from Celery's own callbacks to the ledger, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from inspect import signature
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import Task
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject, Retry
from celery.worker.request import Request
from worker_bench import Bench

from celery_tzbeat.errors import Cancelled, Permanent
from celery_tzbeat.worker import outcome
from celery_tzbeat.worker.heartbeat import Held

#: A cancelled request says that it is tried again, unless it is told not to: from Celery 5.7 on.
WITHOUT_RETRY = {"emit_retry": False} if "emit_retry" in signature(Request.cancel).parameters else {}


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def einfo(exc: BaseException) -> ExceptionInfo:
    try:
        raise exc
    except BaseException:
        return ExceptionInfo()


def run_of(bench: Bench, request: Any) -> Held:
    delivery = bench.entrance.delivery_of(request)
    assert delivery is not None
    assert delivery.run is not None
    return delivery.run


@pytest.mark.parametrize(
    ("exc", "state", "reason"),
    [
        (Ignore(), "done", ""),
        (Retry(when=60), "published", ""),
        (Reject("no", requeue=False), "dead", "rejected"),
        (Reject("again", requeue=True), "abandoned", ""),
        (Terminated(9), "revoked", ""),
        (WorkerLostError("gone"), "abandoned", ""),
        (SystemExit(1), "abandoned", ""),
        (TimeLimitExceeded(5), "dead", "hard_limit"),
        (Permanent("bad address"), "dead", "permanent"),
        (MaxRetriesExceededError("enough"), "dead", "retries"),
        (Cancelled("nobody asked"), "dead", "exception"),
        (KeyError("x"), "dead", "exception"),
    ],
)
def test_how_a_body_ended_is_how_the_run_ended(bench: Bench, exc: Exception, state: str, reason: str) -> None:
    request = bench.running()
    failed = not isinstance(exc, (WorkerLostError, TimeLimitExceeded, Terminated))
    if failed:
        with suppress(SystemExit):
            request.on_success((1, einfo(exc), 0.1))  # what a body raised comes as a result
    else:
        request.on_failure(einfo(exc))
    bench.beat(1)
    assert bench.state() == state
    if reason:
        letter = bench.letter()
        assert (letter.reason, letter.attempts, letter.task) == (reason, 1, "work")
        assert type(exc).__name__ in letter.error
    else:
        assert bench.store.dead_letters() == {}


def test_a_return_is_done_and_the_hook_leaves_no_cycle_behind(bench: Bench) -> None:
    request = bench.running()
    request.on_success((0, "None", 0.1))
    assert "on_success" not in request.__dict__
    bench.beat(1)
    assert bench.state() == "done"


def test_a_countdown_is_when_the_next_attempt_is_due(bench: Bench) -> None:
    request = bench.running()
    request.on_success((1, einfo(Retry(when=60)), 0.1))
    bench.beat(1)
    assert bench.store.data.open["k"].eta == bench.clock.now() + timedelta(seconds=59)


def test_the_last_attempt_s_exception_is_called_retries(bench: Bench) -> None:
    request = bench.running(retries=2)  # the task has two
    request.on_success((1, einfo(KeyError("x")), 0.1))
    bench.beat(1)
    assert bench.letter().reason == "retries"


@pytest.mark.parametrize("how", ["returned", "raised", "killed"])
def test_a_published_attempt_counts_whatever_came_after(bench: Bench, how: str) -> None:
    request = bench.running()
    row = run_of(bench, request).row
    assert row is not None
    bench.board.note_retry(row, (bench.clock.now() + timedelta(minutes=1)).timestamp())
    if how == "returned":
        request.on_success((0, "None", 0.1))
    elif how == "raised":
        request.on_success((1, einfo(KeyError("x")), 0.1))
    else:
        request.on_failure(einfo(WorkerLostError("gone")))
    bench.beat(1)
    record = bench.store.data.open["k"]
    assert (record.state, record.order) == ("published", (1, 1))
    assert record.eta == bench.clock.now() + timedelta(seconds=59)
    assert bench.store.dead_letters() == {}


def test_a_hard_limit_is_said_twice_and_written_once(bench: Bench) -> None:
    request = bench.running()
    request.on_failure(einfo(TimeLimitExceeded(5)))
    bench.beat(1)
    first = bench.letter()
    request.on_timeout(False, 5)
    bench.beat(1)
    assert bench.letter() == first
    assert [record.event for record in bench.store.audit()].count("dead") == 1


def test_a_cancelled_body_is_revoked_where_somebody_asked(bench: Bench) -> None:
    request = bench.running()
    bench.store.data.open["k"].cancel = "somebody"
    bench.beat()
    request.on_success((1, einfo(Cancelled("asked")), 0.1))
    bench.beat(1)
    assert bench.state() == "revoked"


def test_a_body_that_stops_for_a_shutdown_is_abandoned(bench: Bench) -> None:
    request = bench.running()
    bench.board.shut_down()
    request.on_success((1, einfo(Cancelled("shutdown")), 0.1))
    bench.beat(1)
    assert bench.state() == "abandoned"


def test_a_request_that_celery_cancels_is_abandoned_when_its_child_is_gone(bench: Bench) -> None:
    request = bench.running()
    request.cancel(None, **WITHOUT_RETRY)
    bench.beat(1)
    assert bench.state() == "running"
    request._already_cancelled = True
    request.on_failure(einfo(Terminated(15)))
    bench.beat(1)
    assert bench.state() == "abandoned"


def test_a_body_that_finishes_although_celery_cancelled_it_is_done(bench: Bench) -> None:
    request = bench.running()
    request.cancel(None, **WITHOUT_RETRY)
    request.on_success((0, "None", 0.1))
    bench.beat(1)
    assert bench.state() == "done"


def test_what_pools_without_processes_hand_over_for_a_system_exit_is_abandoned(bench: Bench) -> None:
    request = bench.running()
    with pytest.raises(TypeError):  # Celery's own complaint
        request.on_success(einfo(WorkerLostError("SystemExit(1)")))
    bench.beat(1)
    assert bench.state() == "abandoned"


def test_an_end_that_cannot_be_noted_changes_nothing_for_the_task(bench: Bench, caplog: Any) -> None:
    request = bench.running()
    run_of(bench, request).began = "not a number"  # type: ignore[assignment]
    request.on_success((0, "None", 0.1))
    assert bench.counts["errors"] == 1
    assert "could not be noted" in caplog.text


def test_a_hard_limit_that_gives_the_message_back_is_abandoned(bench: Bench) -> None:
    gives_back = hasattr(Task, "acks_on_timeout")  # from Celery 5.7 on; before, it waits for the visibility timeout
    bench.task.acks_late = True
    bench.task.acks_on_timeout = bench.task.acks_on_failure_or_timeout = False
    request = bench.running()
    request.on_timeout(False, 5)
    bench.beat(1)
    assert bench.acks == (["requeue"] if gives_back else [])
    assert bench.state() == ("abandoned" if gives_back else "dead")


def test_the_text_of_an_exception_that_has_none() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise KeyError("no")

    assert outcome.text_of(ValueError("bad")) == "ValueError: bad"
    assert outcome.text_of(Unspeakable()) == "Unspeakable: its text raises KeyError"


def test_a_greenlet_that_was_killed_was_revoked_where_somebody_ended_it_and_is_abandoned_else(bench: Bench) -> None:
    ended = bench.running(bench.ticket("ended"))
    bench.entrance.delivery_of(ended).taken = "revoked"  # type: ignore[union-attr]
    ended.on_success((False, None, None))
    gone = bench.running(bench.ticket("gone"))
    gone.on_success((False, None, None))
    bench.beat(1)
    assert (bench.state("ended"), bench.state("gone")) == ("revoked", "abandoned")

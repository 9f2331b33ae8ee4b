from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.errors import Cancelled, StoreUnavailable
from celery_tzbeat.model import Policy
from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.worker import checkpoint, faults
from celery_tzbeat.worker.run import Run, bind, current_run, unbind

NOMINAL = datetime(2026, 11, 1, 5, 30, tzinfo=timezone.utc)


class Told:
    """What a worker would tell the body."""

    why = ""


class Kept:
    """A ledger of one run: what it was given, in order; `answer` and `fails` say what it does."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer = True
        self.fails: Exception | None = None

    def checkpoint(self, key: str, token: str, state: bytes) -> bool:
        return self._take(("checkpoint", key, token, json.loads(state)))

    def progress(self, key: str, token: str, done: int, total: int | None) -> bool:
        return self._take(("progress", key, token, done, total))

    def _take(self, call: tuple[Any, ...]) -> bool:
        if self.fails:
            raise self.fails
        self.calls.append(call)
        return self.answer

    @property
    def loops(self) -> list[int]:
        """How many items were done, at each checkpoint."""
        return [call[3]["loops"][""] for call in self.calls if call[0] == "checkpoint"]

    @property
    def progresses(self) -> list[tuple[int, int | None]]:
        return [call[3:] for call in self.calls if call[0] == "progress"]

    @property
    def last(self) -> bytes:
        return json.dumps([call for call in self.calls if call[0] == "checkpoint"][-1][3]).encode()


def a_ticket(**policy: Any) -> Ticket:
    return Ticket("proj/0", "nightly@2026-11-01T05:30:00Z", "nightly", NOMINAL, 7, 1, 0, 0, Policy(**policy))


class Body:
    """A run that is bound for a test, with its ledger, its flags and its clock."""

    def __init__(self, kept: bytes | None = None, *, deadline: float | None = None, **policy: Any) -> None:
        self.ledger, self.told, self.clock = Kept(), Told(), ManualClock(NOMINAL)
        self.run = bind(
            a_ticket(**policy),
            attempt=2,
            epoch=7,
            token="t",
            deadline=self.clock.reading().monotonic + deadline if deadline is not None else None,
            flags=self.told,
            runs=lambda: self.ledger,
            checkpoint=kept,
            clock=self.clock,
        )


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    faults.counts.clear()
    yield
    unbind()


# ---- which run


def test_outside_a_run_it_is_a_detached_one_that_does_all_it_can() -> None:
    run = current_run()
    assert (run.key, run.entry, run.nominal, run.attempt, run.epoch) == (None, "", None, 1, 0)
    assert (run.remaining, run.cancelled, run.why) == (None, False, "")
    assert run.checkpoint.load("nothing") == "nothing"
    assert run.checkpoint.save({"page": 3})
    assert run.checkpoint.load() == {"page": 3}
    assert list(run.each("abc")) == ["a", "b", "c"]
    run.progress(1, 3)
    run.raise_if_cancelled()


def test_a_bound_run_is_the_current_one_until_it_is_unbound() -> None:
    body = Body(deadline=90)
    run = current_run()
    assert run is body.run
    assert (run.key, run.entry, run.nominal) == ("nightly@2026-11-01T05:30:00Z", "nightly", NOMINAL)
    assert (run.attempt, run.epoch) == (2, 7)
    assert run.remaining == pytest.approx(90)
    body.clock.advance(100)
    assert run.remaining == 0
    unbind()
    assert current_run().key is None


def test_each_thread_has_its_own_run() -> None:
    Body()
    seen: list[str | None] = []
    thread = threading.Thread(target=lambda: seen.append(current_run().key))
    thread.start()
    thread.join()
    assert seen == [None]
    assert current_run().key is not None


# ---- stopping


@pytest.mark.parametrize("why", ["cancel", "shutdown", "lost"])
def test_a_run_that_is_to_stop_knows_why(why: str) -> None:
    body = Body()
    assert not body.run.cancelled
    body.run.raise_if_cancelled()
    body.told.why = why
    assert body.run.cancelled
    assert body.run.why == why
    with pytest.raises(Cancelled):
        body.run.raise_if_cancelled()


def test_a_run_whose_time_is_up_is_told_as_celery_tells_it() -> None:
    body = Body(deadline=5)
    body.told.why = "deadline"
    assert body.run.cancelled
    with pytest.raises(SoftTimeLimitExceeded):
        body.run.raise_if_cancelled()


def test_a_shutdown_is_no_reason_to_stop_what_may_start_once_only() -> None:
    body = Body(deadline=5, delivery="at_most_once")
    body.told.why = "shutdown"
    assert not body.run.cancelled
    body.clock.advance(6)
    assert body.run.why == "deadline"


# ---- checkpoints


def test_a_checkpoint_is_kept_by_the_runs_token_and_loaded_by_the_next_attempt() -> None:
    first = Body()
    assert first.run.checkpoint.load() is None
    assert first.run.checkpoint.save({"page": 4, "seen": [1, None, "é"]})
    assert first.ledger.calls[0][:3] == ("checkpoint", "nightly@2026-11-01T05:30:00Z", "t")
    second = Body(first.ledger.last)
    assert second.run.checkpoint.load() == {"page": 4, "seen": [1, None, "é"]}
    second.run.checkpoint.load()["seen"].clear()
    assert second.run.checkpoint.load()["seen"], "what was loaded is the task's own"


@pytest.mark.parametrize("state", [None, 0, "", []])
def test_what_was_saved_is_not_mistaken_for_nothing(state: Any) -> None:
    first = Body()
    first.run.checkpoint.save(state)
    assert Body(first.ledger.last).run.checkpoint.load("default") == state


def test_nothing_is_opened_for_a_task_that_keeps_nothing() -> None:
    def never() -> Kept:
        raise AssertionError("a client was opened")

    bind(a_ticket(), attempt=1, epoch=7, token="t", flags=Told(), runs=never)
    assert current_run().checkpoint.load(3) == 3
    assert not current_run().cancelled


def test_what_is_too_large_is_not_kept_counted_and_no_error() -> None:
    body = Body()
    body.run.checkpoint.save("small")
    assert not body.run.checkpoint.save("x" * 10_000_000)
    assert body.run.checkpoint.load() == "small"
    assert len(body.ledger.calls) == 1
    assert faults.counts["checkpoint_too_large"] == 1


def test_what_json_cannot_say_is_the_tasks_mistake() -> None:
    body = Body()
    with pytest.raises(TypeError):
        body.run.checkpoint.save({"at": NOMINAL})
    assert body.run.checkpoint.load() is None


def test_a_lost_token_is_counted_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    body = Body()
    body.ledger.answer = False
    assert not body.run.checkpoint.save(1)
    assert list(body.run.each("ab")) == ["a", "b"]
    assert faults.counts["lost_token"] > 1
    assert len([record for record in caplog.records if "not this worker's" in record.message]) <= 1


def test_a_store_that_is_down_is_asked_again_after_a_pause_and_what_is_owed_is_kept_then() -> None:
    body = Body()
    body.ledger.fails = StoreUnavailable("frozen")
    loop = body.run.each(range(100))
    for _ in range(50):
        next(loop)
    assert faults.counts["checkpoint_store"] == 1, "one call for all of them"
    body.ledger.fails = None
    next(loop)
    assert body.ledger.calls == []
    body.clock.advance(checkpoint.PAUSE)
    next(loop)
    assert body.ledger.loops == [51]


def test_the_soft_limit_is_not_swallowed_by_a_call_to_the_store() -> None:
    body = Body()
    body.ledger.fails = SoftTimeLimitExceeded()
    with pytest.raises(SoftTimeLimitExceeded):
        body.run.checkpoint.save(1)


@pytest.mark.parametrize("kept", [b"{", b"[]", b"\xff"])
def test_a_checkpoint_that_cannot_be_read_begins_anew(kept: bytes) -> None:
    assert Body(kept).run.checkpoint.load("anew") == "anew"
    assert list(Body(kept).run.each("ab")) == ["a", "b"]


# ---- each


def test_an_item_is_kept_before_the_next_begins() -> None:
    body = Body()
    seen = []
    for item in body.run.each(["a", "b", "c"]):
        seen.append(item)
        assert body.ledger.loops == list(range(1, len(seen)))
    assert body.ledger.loops == [1, 2, 3]


def test_wherever_it_is_killed_no_item_is_left_out_and_one_is_repeated() -> None:
    for killed_in in range(10):
        body, seen = Body(), []
        loop = body.run.each(range(10))
        for _ in range(killed_in + 1):
            seen.append(next(loop))  # the last of them is begun, and never ended
        kept = body.ledger.last if body.ledger.loops else None
        seen += Body(kept).run.each(range(10))
        assert sorted(set(seen)) == list(range(10))
        assert len(seen) == 11
        loop.close()  # type: ignore[attr-defined]


def test_a_loop_that_raises_does_not_count_the_item_it_raised_in() -> None:
    body = Body()

    def task() -> None:
        for item in body.run.each(range(10), every=3600):
            if item == 4:
                raise KeyError

    with pytest.raises(KeyError):
        task()
    assert body.ledger.loops == [4], "kept once, when it raised"
    assert list(Body(body.ledger.last).run.each(range(10))) == [4, 5, 6, 7, 8, 9]


def test_every_bounds_the_calls() -> None:
    body = Body()
    for _ in body.run.each(range(100), every=timedelta(seconds=1)):
        body.clock.advance(0.1)
    assert len(body.ledger.loops) in (10, 11)
    assert body.ledger.loops[-1] == 100


@pytest.mark.parametrize("every", [0, 3600])
def test_it_stops_between_two_items_when_asked_and_keeps_what_is_done(every: float) -> None:
    body, seen = Body(), []

    def task() -> None:
        for item in body.run.each(range(10), every=every):
            seen.append(item)
            if item == 2:
                body.told.why = "cancel"

    with pytest.raises(Cancelled):
        task()
    assert seen == [0, 1, 2]
    assert body.ledger.loops[-1] == 3
    assert body.ledger.progresses[-1] == (3, 10)


def test_loops_are_told_apart_by_name() -> None:
    body = Body()
    list(body.run.each("abc", name="letters"))
    next(body.run.each(range(5), name="numbers"))
    again = Body(body.ledger.last)
    assert list(again.run.each("abc", name="letters")) == []
    assert list(again.run.each(range(5), name="numbers")) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="give each loop a name of its own"):
        again.run.each("abc", name="letters")


def test_a_loop_and_a_state_are_kept_side_by_side() -> None:
    body, total = Body(), 0
    for item in body.run.each([5, 6, 7]):
        total += item
        body.run.checkpoint.save(total)
    again = Body(body.ledger.last)
    assert again.run.checkpoint.load() == 18
    assert list(again.run.each([5, 6, 7])) == []


# ---- progress


def test_progress_is_kept_once_a_second_and_at_the_end() -> None:
    body = Body()
    for done in range(1, 101):
        body.run.progress(done, 100)
        body.clock.advance(0.1)
    assert body.ledger.progresses[0] == (1, 100)
    assert body.ledger.progresses[-1] == (100, 100)
    assert len(body.ledger.progresses) == 11


def test_a_loop_reports_its_progress_also_of_what_has_no_length() -> None:
    body = Body()
    list(body.run.each(iter("abc")))
    assert body.ledger.progresses == [(1, None), (3, None)]


def test_a_run_may_be_made_without_being_bound() -> None:
    assert Run(attempt=3).attempt == 3

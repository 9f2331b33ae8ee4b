from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from celery_tzbeat import Cancelled, current_run
from celery_tzbeat.testing import ManualClock, run_context

app = Celery("proj", set_as_current=False)
done: list[int] = []


@app.task
def numbers(count: int) -> str:
    run = current_run()
    for number in run.each(range(count)):
        done.append(number)
        run.checkpoint.save({"sum": run.checkpoint.load({"sum": 0})["sum"] + number})
    return f"{run.key} attempt {run.attempt}"


@pytest.fixture(autouse=True)
def _nothing_done() -> None:
    done.clear()


def test_a_body_sees_its_run_and_what_it_keeps_is_seen() -> None:
    with run_context("nightly", nominal=datetime(2026, 11, 1, 5, 30, tzinfo=timezone.utc), attempt=2) as tested:
        assert numbers(4) == "nightly@2026-11-01T05:30:00Z attempt 2"
    assert tested.checkpoint == {"sum": 6}
    assert tested.done() == 4
    assert tested.progress == (4, 4)
    assert current_run().key is None


def test_a_body_that_is_asked_to_stop_goes_on_at_the_next_attempt() -> None:
    with run_context("nightly", cancel_after=3) as first, pytest.raises(Cancelled):
        numbers(5)
    assert (first.done(), done) == (3, [0, 1, 2])
    with run_context("nightly", attempt=2, resume=first) as second:
        numbers(5)
    assert done == [0, 1, 2, 3, 4]
    assert second.checkpoint == {"sum": 10}
    assert first.done() == 3, "what the first kept is not changed by the second"


def test_a_body_begins_with_the_checkpoint_it_is_given() -> None:
    with run_context("nightly", attempt=2, checkpoint={"sum": 100}) as tested:
        assert tested.checkpoint == {"sum": 100}
        numbers(2)
    assert tested.checkpoint == {"sum": 101}


def test_a_body_sees_its_time_run_out() -> None:
    clock = ManualClock(datetime(2026, 11, 1, tzinfo=timezone.utc))
    with run_context("nightly", timeout=timedelta(minutes=1), clock=clock):
        assert current_run().remaining == 60
        clock.advance(61)
        assert current_run().why == "deadline"
        with pytest.raises(SoftTimeLimitExceeded):
            numbers(1)


def test_a_context_that_raises_leaves_no_run_behind() -> None:
    with pytest.raises(KeyError), run_context("nightly"):
        raise KeyError
    assert current_run().key is None

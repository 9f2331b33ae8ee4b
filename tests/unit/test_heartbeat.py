"""The heartbeat, row by row of its table, its turns called by hand; once as a real thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
from worker_bench import Bench

from celery_tzbeat.clock import SystemClock
from celery_tzbeat.store.runs import Beat, End, Ended, Order, Pulse
from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.threads import start_thread


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_a_lease_is_renewed_six_times_and_kept_while_an_end_is_owed(bench: Bench) -> None:
    bench.running(bench.ticket(run_lease=timedelta(seconds=6)))
    assert bench.heart.interval == 1.0
    for _ in range(20):
        bench.beat(1)
        assert not bench.store.survey().lapsed
    [run] = bench.heart.held()
    bench.runs.down = True
    bench.heart.owe(run, End(run.ticket, run.order, run.token, "done"))
    bench.beat(1)
    assert bench.heart.held() == [run]
    assert bench.heart.down
    bench.runs.down = False
    bench.beat(1)
    assert bench.heart.held() == []
    assert bench.state() == "done"


def test_the_interval_follows_the_shortest_lease_within_bounds(bench: Bench) -> None:
    assert bench.heart.interval == 10
    bench.running(bench.ticket("hour", run_lease=timedelta(hours=1)))
    assert bench.heart.interval == 10
    bench.running(bench.ticket("minute", run_lease=timedelta(seconds=30)))
    assert bench.heart.interval == 5
    bench.running(bench.ticket("second", run_lease=timedelta(seconds=1)))
    assert bench.heart.interval == 0.25


def test_it_says_that_the_worker_lives_and_touches_what_it_holds(bench: Bench) -> None:
    bench.beat()
    assert [presence.node for presence in bench.store.workers()] == ["one@host"]
    assert bench.touched == 1


def test_the_first_end_of_a_run_counts(bench: Bench) -> None:
    bench.running()
    [run] = bench.heart.held()
    bench.heart.owe(run, End(run.ticket, run.order, run.token, "done"))
    bench.heart.owe(run, End(run.ticket, run.order, run.token, "dead", reason="hard_limit", letter="{}"))
    bench.beat()
    assert bench.state() == "done"
    assert bench.heart.owed == 0


def test_ends_travel_together_and_an_unwritable_one_holds_up_no_other(bench: Bench) -> None:
    for key in ("a", "bad", "c"):
        bench.running(bench.ticket(key))
    runs = bench.heart.held()
    write, asked = bench.runs.end, []

    def end(ends: Sequence[End]) -> list[Ended]:
        asked.append(len(ends))
        if any(end.ticket.key == "bad" for end in ends):
            raise ValueError("cannot be written")
        return write(ends)

    bench.runs.end = end  # type: ignore[method-assign]
    for run in runs:
        bench.heart.owe(run, End(run.ticket, run.order, run.token, "done"))
    bench.beat()
    assert asked == [3, 1, 1, 1]
    assert [bench.state(key) for key in ("a", "bad", "c")] == ["done", "running", "done"]
    assert (bench.heart.owed, bench.counts["errors"]) == (0, 1)


def test_a_cancel_reaches_the_board_and_who_does_not_obey_is_ended_once(bench: Bench) -> None:
    bench.running(bench.ticket(kill_after=timedelta(seconds=20)))
    [run] = bench.heart.held()
    assert run.row is not None
    bench.store.data.open["k"].cancel = "somebody"
    bench.beat()
    assert bench.board.asked_to_stop(run.row)
    bench.beat()
    assert bench.killed == []
    bench.beat()
    bench.beat()
    assert bench.killed == [run]


def test_a_run_that_was_taken_away_is_told_and_its_end_is_refused(bench: Bench) -> None:
    bench.running()
    [run] = bench.heart.held()
    assert run.row is not None
    record = bench.store.data.open["k"]
    record.state, record.order, record.ran, record.token = "running", Order(2, 0), Order(2, 0), "another"
    bench.beat()
    assert bench.board.lost(run.row)
    assert bench.counts["lost"] == 1
    bench.heart.owe(run, End(run.ticket, run.order, run.token, "done"))
    bench.beat()
    assert bench.counts["ends_refused"] == 1
    assert bench.heart.held() == []


def test_a_record_that_is_gone_is_written_anew(bench: Bench) -> None:
    bench.running()
    bench.store.wipe()
    bench.beat()
    assert bench.state() == "running"
    assert bench.counts["resumed"] == 1


def test_a_bug_is_counted_and_the_next_beat_goes_on(bench: Bench) -> None:
    bench.running()
    bench.runs.error = KeyError("a bug")
    bench.beat()
    bench.runs.error = None
    bench.beat()
    assert bench.counts["errors"] == 1
    assert not bench.store.survey().lapsed


def test_a_store_that_is_away_is_asked_once_a_second(bench: Bench) -> None:
    bench.running()
    bench.runs.down, bench.runs.asked = True, 0
    bench.beat(10)
    for _ in range(9):
        bench.beat(0.1)
    assert bench.runs.asked == 1
    bench.beat(0.2)
    assert bench.runs.asked == 2


def test_what_comes_later_is_called_when_its_time_has_come(bench: Bench) -> None:
    called: list[str] = []
    bench.heart.later(0.05, lambda: called.append("soon"))
    bench.heart.later(5, lambda: called.append("late"))
    bench.beat(0.05)
    assert called == ["soon"]
    bench.beat(5)
    assert called == ["soon", "late"]


def test_the_thread_writes_an_end_within_50_ms_and_is_drained(bench: Bench) -> None:
    bench.running()
    [run] = bench.heart.held()
    bench.heart._clock = SystemClock()
    bench.heart.start()
    bench.heart.owe(run, End(run.ticket, run.order, run.token, "done"))
    assert bench.heart.drain(5)
    assert bench.state() == "done"
    wait_until(lambda: bench.store.workers(), 5, "the worker's presence")
    bench.heart.close()


def test_only_the_first_of_many_ends_wakes_the_thread_and_none_is_left_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = []
    wake = bench.heart._waker.wake
    monkeypatch.setattr(bench.heart._waker, "wake", lambda: (woken.append(1), wake()))

    def owe(key: str) -> None:
        bench.heart.owe(None, End(bench.ticket(key), Order(1, 0), "", "expired"))

    for key in "abcde":
        owe(key)
    assert len(woken) == 1
    bench.heart._clock = SystemClock()
    bench.heart.start()
    for number in range(100):  # each as soon as the one before is written: while the thread is about to wait, too
        owe(f"k{number}")
        wait_until(lambda: not bench.heart.owed, 5, "the end to be written")
    bench.heart.close()


def test_each_heartbeat_carries_what_a_lost_record_needs(bench: Bench) -> None:
    beats: list[Beat] = []

    def heartbeat_(given: Sequence[Beat]) -> list[Pulse]:
        beats.extend(given)
        return [Pulse.ALIVE for _ in given]

    bench.runs.heartbeat = heartbeat_  # type: ignore[method-assign]
    bench.running()
    bench.beat()
    assert beats[0].payload
    assert beats[0].ticket.key == "k"


def test_the_thread_is_a_daemon() -> None:
    done = threading.Event()
    seen: list[bool] = []

    def look() -> None:
        seen.append(threading.current_thread().daemon)
        done.set()

    start_thread(look, name="look")
    assert done.wait(5)
    assert seen == [True]

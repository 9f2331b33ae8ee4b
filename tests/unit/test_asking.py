"""The gate's question asked without waiting, row by row of its table; `test_gate.py` has what the answers mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery.worker import state as worker_state
from celery.worker.worker import WorkController
from kombu.asynchronous.semaphore import LaxBoundedSemaphore
from worker_bench import Bench, ScriptedHub, ScriptedLine

from celery_tzbeat.store.runs import Gate


@pytest.fixture
def hub() -> ScriptedHub:
    return ScriptedHub()


@pytest.fixture
def bench(hub: ScriptedHub) -> Iterator[Bench]:
    bench = Bench(hub=hub)
    yield bench
    bench.close()


def asked(bench: Bench, key: str = "k", *, retries: int = 0, **policy: Any) -> Any:
    """Return a request whose question is out."""
    request = bench.request(bench.ticket(key, **policy), retries=retries)
    assert bench.asks(request)
    return request


def line(bench: Bench) -> ScriptedLine:
    return bench.lines[-1]


# ---- all goes well


def test_it_goes_on_when_the_answer_is_there(bench: Bench, hub: ScriptedHub) -> None:
    request = asked(bench, retries=1)
    assert bench.processed == []  # the answer is under way
    line(bench).arrived = 1
    hub.turn()
    assert bench.processed == [request]
    assert bench.offer(request)
    assert bench.runs.asked == 1
    assert bench.state() == "running"
    assert [run.ticket.key for run in bench.heart.held()] == ["k"]


def test_answers_go_to_those_who_asked_in_one_turn(bench: Bench, hub: ScriptedHub) -> None:
    bench.running(bench.ticket("two"))
    requests = [asked(bench, "one"), asked(bench, "two"), asked(bench, "three")]
    assert len(bench.lines) == 1
    line(bench).arrived = 3
    hub.turn()
    assert bench.processed == requests
    assert [bench.offer(request) for request in requests] == [True, False, True]
    assert bench.counts["live"] == 1


def test_where_the_ledger_has_no_message_it_is_sent_along(bench: Bench, hub: ScriptedHub) -> None:
    request = asked(bench)
    assert line(bench).answers[0].gate is Gate.UNKEPT
    line(bench).arrived = 1
    hub.turn()
    assert bench.offer(request)
    assert bench.store.data.open["k"].payload


def test_a_parked_successor_asks_without_waiting_each_time(bench: Bench, hub: ScriptedHub) -> None:
    bench.running()
    second = asked(bench, retries=1)
    for times in (1, 2):
        line(bench).arrived = 1
        hub.turn()
        assert not bench.offer(second)
        bench.consumer.fire()
        assert bench.consumer.requested == [second] * times
        assert bench.asks(second)


@pytest.mark.parametrize("options", [{"expires": 60}, {"stamped_headers": ["team"], "team": "blue"}])
def test_celery_has_its_say_first(bench: Bench, options: dict[str, Any]) -> None:
    assert not bench.asks(bench.request(bench.ticket(), **options))
    revoked = bench.request(bench.ticket())
    worker_state.revoked.add(revoked.id)
    assert not bench.asks(revoked)
    assert not bench.asks(bench.request(None))
    assert bench.runs.asked == 0


# ---- what fails


def test_while_the_store_is_down_nobody_asks(bench: Bench) -> None:
    bench.runs.down = True
    first, second = bench.request(bench.ticket("one")), bench.request(bench.ticket("two"))
    assert not bench.asks(first)
    assert bench.heart.down
    assert not bench.asks(second)
    assert bench.offer(first)  # by the rule for a store that is down
    assert bench.runs.asked == 0
    assert bench.counts["started_blind"] == 1


def test_any_number_that_wait_for_a_place_are_held_while_the_store_is_down(bench: Bench, hub: ScriptedHub) -> None:
    # One that is held gives its place back, which goes to the next at once: within one another they were too many.
    controller: Any = object.__new__(WorkController)
    places = LaxBoundedSemaphore(1)
    controller.pool, process = None, controller._process_task
    controller._quick_acquire, controller._quick_release = places.acquire, places.release
    controller._process_task = lambda request: bench.entrance.asks(request, process) or process(request)
    places.acquire(lambda: None)  # by a long task
    requests = [bench.request(bench.ticket(f"k{i}", on_store_down="hold")) for i in range(500)]
    for request in requests:
        controller._process_task_sem(request)
    bench.runs.down = True
    places.release()
    hub.turn()
    assert len(bench.entrance.parked) == 500
    assert places.value == 1
    assert bench.runs.asked == 0


def test_an_answer_that_does_not_come_is_not_waited_for(bench: Bench, hub: ScriptedHub) -> None:
    requests = [asked(bench, "runs"), asked(bench, "holds", on_store_down="hold")]
    bench.clock.advance(0.3)
    hub.fire()
    assert bench.processed == requests
    assert line(bench).closed
    assert bench.heart.down
    assert [bench.offer(request) for request in requests] == [True, False]
    assert bench.runs.asked == 2  # those that were not answered
    assert list(bench.entrance.parked) == [requests[1]]
    assert hub.timers == []


def test_the_timer_looks_again_as_long_as_anything_is_out(bench: Bench, hub: ScriptedHub) -> None:
    asked(bench, "one")
    bench.clock.advance(0.2)
    asked(bench, "two")
    line(bench).arrived = 1
    hub.turn()
    bench.clock.advance(0.1)
    hub.fire()
    assert len(bench.processed) == 1  # the second has 0.15 s left
    assert not line(bench).closed
    bench.clock.advance(0.2)
    hub.fire()
    assert len(bench.processed) == 2


def test_answers_that_came_while_the_loop_was_busy_are_no_silence(bench: Bench, hub: ScriptedHub) -> None:
    requests = [asked(bench, "one"), asked(bench, "two")]
    line(bench).arrived = 2
    bench.clock.advance(3)  # the loop looks at its timers before its sockets
    hub.fire()
    assert bench.processed == requests
    assert not bench.heart.down
    assert not line(bench).closed


def test_a_line_that_broke_while_the_loop_was_busy_is_asked_again(bench: Bench, hub: ScriptedHub) -> None:
    requests = [asked(bench, "one", retries=1), asked(bench, "two", retries=1)]
    line(bench).arrived, line(bench).broken = 1, True
    bench.clock.advance(3)
    hub.fire()
    assert bench.processed == requests
    assert not bench.heart.down
    assert [bench.offer(request) for request in requests] == [True, True]


@pytest.mark.parametrize("arrived", [0, 1])
def test_a_line_that_breaks_is_asked_again_by_the_same_token(bench: Bench, hub: ScriptedHub, arrived: int) -> None:
    requests = [asked(bench, "one", retries=1), asked(bench, "two", retries=1)]
    line(bench).broken, line(bench).arrived = True, arrived
    hub.turn()
    assert bench.processed == requests
    assert hub.readers == {}
    assert [bench.offer(request) for request in requests] == [True, True]
    assert {record.starts for record in bench.store.data.open.values()} == {1}  # they had been heard
    assert not bench.heart.down
    assert bench.asks(bench.request(bench.ticket("three")))  # by a new line
    assert len(bench.lines) == 2


def test_an_idle_line_that_breaks_is_replaced(bench: Bench, hub: ScriptedHub) -> None:
    asked(bench, "one")
    line(bench).arrived = 1
    hub.turn()
    line(bench).broken = True
    hub.turn()
    assert line(bench).closed
    assert bench.asks(bench.request(bench.ticket("two")))
    assert len(bench.lines) == 2


def test_a_line_that_breaks_while_it_is_asked_leaves_nobody_behind(bench: Bench, hub: ScriptedHub) -> None:
    first = asked(bench, "one", retries=1)
    line(bench).broken = True
    second = bench.request(bench.ticket("two"))
    assert not bench.asks(second)
    assert bench.processed == [first]
    assert bench.offer(first)
    assert bench.offer(second)


@pytest.mark.parametrize("answered", [False, True])
def test_one_that_was_revoked_meanwhile_is_written_so(bench: Bench, hub: ScriptedHub, answered: bool) -> None:
    request = asked(bench, retries=1)
    worker_state.revoked.add(request.id)
    line(bench).arrived = int(answered)
    hub.turn()
    if not answered:
        bench.clock.advance(0.3)
        hub.fire()
    assert bench.processed == [request]
    assert not bench.offer(request)
    bench.beat(10)
    assert bench.state() == "revoked"
    assert bench.heart.held() == []


def test_one_that_was_revoked_while_another_runs_leaves_that_alone(bench: Bench, hub: ScriptedHub) -> None:
    bench.running()
    copy = asked(bench)
    worker_state.revoked.add(copy.id)
    line(bench).arrived = 1
    hub.turn()
    bench.offer(copy)
    bench.beat(1)
    assert bench.state() == "running"


@pytest.mark.parametrize("answers", [True, False])
def test_when_the_loop_ends_what_was_won_is_given_back(bench: Bench, hub: ScriptedHub, answers: bool) -> None:
    request = asked(bench, retries=1)
    assert bench.state() == "running"
    line(bench).broken = not answers
    bench.end_of_the_loop()
    assert (line(bench).closed, hub.readers) == (True, {})
    assert bench.processed == []
    bench.heart.beat_soon()
    bench.beat(1)
    assert bench.state() == "published"
    again = bench.request(bench.ticket(), retries=1)  # the broker delivers it again
    assert bench.offer(again)
    assert bench.store.data.open["k"].starts == 1
    assert request not in [run.request() for run in bench.heart.held()]


def test_when_the_loop_ends_what_is_held_without_an_answer_is_given_back(bench: Bench, hub: ScriptedHub) -> None:
    request = asked(bench, retries=1, on_store_down="hold")
    bench.clock.advance(0.3)
    hub.fire()
    assert not bench.offer(request)
    assert bench.state() == "running"  # the ledger had heard it
    bench.end_of_the_loop()
    bench.beat(1)
    assert bench.state() == "published"


def test_what_is_held_without_an_answer_is_given_back_when_it_goes_back_to_its_queue(
    bench: Bench, hub: ScriptedHub
) -> None:
    request = asked(bench, retries=1, on_store_down="hold")
    bench.clock.advance(0.3)
    hub.fire()
    assert not bench.offer(request)
    bench.clock.advance(601)
    assert not bench.offer(request)
    assert bench.acks == ["requeue"]
    bench.beat(1)
    assert bench.state() == "published"


def test_what_was_held_and_runs_is_not_given_back(bench: Bench, hub: ScriptedHub) -> None:
    request = asked(bench, retries=1, on_store_down="hold")
    bench.clock.advance(0.3)
    hub.fire()
    assert not bench.offer(request)
    bench.beat(1)  # the store answers again
    assert bench.offer(request)
    bench.end_of_the_loop()
    bench.beat(1)
    assert bench.state() == "running"


def test_what_is_held_without_an_answer_and_then_revoked_is_written_so(bench: Bench, hub: ScriptedHub) -> None:
    request = asked(bench, retries=1, on_store_down="hold")
    bench.clock.advance(0.3)
    hub.fire()
    assert not bench.offer(request)
    assert bench.state() == "running"  # the ledger had heard it
    worker_state.revoked.add(request.id)
    assert not bench.offer(request)
    bench.beat(1)
    assert bench.state() == "revoked"


def test_in_a_pool_without_an_event_loop_it_is_given_back_too() -> None:
    bench = Bench()
    bench.runs.loses_replies = True
    request = bench.request(bench.ticket(on_store_down="hold"), retries=1)
    assert not bench.offer(request)
    assert bench.state() == "running"
    bench.runs.loses_replies = False
    bench.entrance.give_back()
    bench.beat(1)
    assert bench.state() == "published"
    bench.close()


def test_when_the_loop_ends_what_was_refused_is_left_alone(bench: Bench) -> None:
    bench.running()
    asked(bench)
    bench.end_of_the_loop()
    bench.beat(1)
    assert bench.state() == "running"


def test_what_comes_when_the_loop_has_ended_is_neither_asked_for_nor_run(bench: Bench, hub: ScriptedHub) -> None:
    asked(bench, "before")
    bench.end_of_the_loop()
    asked_before = bench.runs.asked
    late, expiring = bench.request(bench.ticket("late")), bench.request(bench.ticket("expiring"), expires=60)
    assert bench.asks(late)
    assert bench.asks(expiring)
    assert not bench.asks(bench.request(None))  # not ours
    hub.turn()
    assert bench.runs.asked == asked_before
    assert bench.processed == []
    assert bench.acks == []
    assert bench.asking is not None
    bench.asking.begin()  # connected again
    assert bench.asks(bench.request(bench.ticket("again")))
    assert len(bench.lines) == 2


def test_one_that_raises_keeps_nobody_from_its_answer(bench: Bench, hub: ScriptedHub) -> None:
    def process(request: Any) -> None:
        bench.processed.append(request)
        if request is first:
            raise OSError("the broker is gone")

    first, second = bench.request(bench.ticket("one")), bench.request(bench.ticket("two"))
    assert bench.entrance.asks(first, process)
    assert bench.entrance.asks(second, process)
    line(bench).arrived = 2
    with pytest.raises(OSError, match="broker"):
        hub.turn()
    hub.turn()
    assert bench.processed == [first, second]

"""The gate, row by row of its table, on Celery's own requests and a ledger in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta

import pytest
from billiard.exceptions import WorkerLostError
from celery.worker import state as worker_state
from worker_bench import Bench

from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.worker.gate import CLAIM
from celery_tzbeat.worker.install import NotStarted


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_a_message_without_our_header_asks_nobody(bench: Bench) -> None:
    assert bench.offer(bench.request(None))
    assert bench.offer(bench.request(None, meta={"tzbeat": None}))
    assert bench.runs.asked == 0
    assert bench.heart.held() == []


def test_a_header_that_cannot_be_read_runs_as_any_other(bench: Bench) -> None:
    assert bench.offer(bench.request(None, meta={"tzbeat": {"key": "k", "epoch": "first"}}))
    assert bench.runs.asked == 0
    assert bench.counts["unreadable"] == 1


def test_the_first_delivery_runs_and_carries_its_claim_to_the_body(bench: Bench) -> None:
    request = bench.running(bench.ticket(timeout=timedelta(seconds=30)))
    claim = request.request_dict["properties"][CLAIM]
    assert claim["attempt"] == 1
    assert claim["deadline"] == bench.clock.reading().monotonic + 30
    assert CLAIM not in request.message.properties  # it may go back to its queue
    assert [run.ticket.key for run in bench.heart.held()] == ["k"]
    assert bench.state() == "running"
    assert bench.acks == []


def test_a_copy_of_what_runs_or_is_done_is_acknowledged(bench: Bench) -> None:
    request = bench.running()
    copy = bench.request(bench.ticket())
    assert not bench.offer(copy)
    assert copy not in worker_state.reserved_requests
    request.on_success((0, "None", 0.1))
    bench.beat(1)
    assert not bench.offer(bench.request(bench.ticket()))
    assert bench.acks == ["ack", "ack"]
    assert (bench.counts["live"], bench.counts["settled"]) == (1, 1)


def test_a_lower_order_is_stale(bench: Bench) -> None:
    bench.running(bench.ticket(dispatch=2))
    assert not bench.offer(bench.request(bench.ticket(dispatch=1)))
    assert bench.counts["stale"] == 1


def test_a_successor_is_parked_and_asks_again(bench: Bench) -> None:
    bench.running()
    second = bench.request(bench.ticket(), retries=1)
    assert not bench.offer(second)
    assert bench.consumer.qos.raised == 1
    assert bench.acks == []
    assert second in worker_state.reserved_requests
    assert [seconds for seconds, _ in bench.consumer.later] == [0.01]
    bench.consumer.fire()
    assert bench.consumer.requested == [second]
    bench.clock.advance(0.03)
    assert not bench.offer(second)  # not yet
    bench.clock.advance(5)
    assert not bench.offer(second)
    assert [round(seconds, 3) for seconds, _ in bench.consumer.later] == [0.03, 0.05]
    assert bench.consumer.qos.raised == 1


def test_a_retry_frees_its_successor(bench: Bench) -> None:
    first = bench.running()
    second = bench.request(bench.ticket(), retries=1)
    assert not bench.offer(second)
    delivery = bench.entrance.delivery_of(first)
    assert delivery is not None
    assert delivery.run is not None
    assert delivery.run.row is not None
    bench.board.note_retry(delivery.run.row, None)
    first.on_success((0, "None", 0.1))
    bench.beat(0.1)
    assert bench.state() == "published"
    assert bench.offer(second)
    assert bench.consumer.qos.raised == 0
    assert second.request_dict["properties"][CLAIM]["attempt"] == 2


def test_what_was_parked_for_ten_minutes_goes_back_to_its_queue(bench: Bench) -> None:
    bench.running()
    second = bench.request(bench.ticket(), retries=1)
    bench.offer(second)
    bench.clock.advance(601)
    assert not bench.offer(second)
    assert bench.acks == ["requeue"]
    assert bench.consumer.qos.raised == 0
    assert second not in worker_state.reserved_requests


@pytest.mark.parametrize("end", ["reconnected", "shutting down"])
def test_what_is_parked_is_dropped_with_its_connection_and_with_the_worker(bench: Bench, end: str) -> None:
    bench.running()
    bench.offer(bench.request(bench.ticket(), retries=1))
    if end == "reconnected":
        bench.consumer.connection = object()
    else:
        bench.board.shut_down()
    bench.consumer.fire()
    assert bench.consumer.requested == []
    assert bench.acks == []


def test_too_many_deliveries_are_a_dead_letter(bench: Bench) -> None:
    ticket = bench.ticket(max_deliveries=1)
    bench.running(ticket).on_failure(einfo(WorkerLostError("killed")))
    bench.beat(1)
    assert bench.state() == "abandoned"
    late = bench.request(bench.ticket(dispatch=2, max_deliveries=1))
    assert not bench.offer(late)
    bench.beat(1)
    letter = bench.letter()
    assert (letter.reason, letter.attempts, letter.task_id) == ("deliveries", 1, late.id)
    assert Parcel.from_bytes(letter.message).run.headers["id"] == late.id
    assert bench.state() == "dead"
    assert bench.acks[-1] == "ack"


def test_at_most_once_is_not_started_blindly(bench: Bench) -> None:
    assert not bench.offer(bench.request(bench.ticket(delivery="at_most_once", on_store_down="hold")))
    bench.beat(1)
    assert bench.letter().reason == "unknown"


def test_expired_and_revoked_deliveries_are_written_so(bench: Bench) -> None:
    expired = bench.request(bench.ticket("late"), expires=-5)
    revoked = bench.request(bench.ticket("revoked"))
    worker_state.revoked.add(revoked.id)
    assert not bench.offer(expired)
    assert not bench.offer(revoked)
    bench.beat(1)
    assert (bench.state("late"), bench.state("revoked")) == ("expired", "revoked")


def test_a_question_at_receipt_claims_nothing(bench: Bench) -> None:
    request = bench.request(bench.ticket(), expires=3600)
    worker_state.reserved_requests.discard(request)  # Celery asks before it reserves
    assert bench.offer(request)
    assert bench.runs.asked == 0
    worker_state.task_reserved(request)
    assert bench.offer(request)
    assert bench.state() == "running"


def test_without_the_store_it_runs_and_registers_later(bench: Bench) -> None:
    bench.runs.down = True
    assert bench.offer(bench.request(bench.ticket()))
    assert bench.offer(bench.request(bench.ticket("other")))
    assert bench.runs.asked == 1  # the second did not wait for a store that had not answered the first
    assert bench.state() == ""
    bench.heart.turn()  # the heartbeat asks at once, in vain
    assert bench.runs.asked == 2
    bench.runs.down = False
    bench.beat(2)
    assert not bench.heart.down
    assert bench.state() == "running"
    assert bench.counts["resumed"] == 2


def test_a_start_without_the_store_is_registered_as_soon_as_it_answers(bench: Bench) -> None:
    bench.beat()  # the next one would come in 10 s
    bench.runs.down = True
    assert bench.offer(bench.request(bench.ticket()))
    bench.runs.down = False
    bench.beat(0)
    assert bench.state() == "running"


def test_without_the_store_what_holds_is_parked(bench: Bench) -> None:
    bench.runs.down = True
    request = bench.request(bench.ticket(on_store_down="hold"))
    assert not bench.offer(request)
    assert bench.acks == []
    bench.runs.down = False
    bench.beat(2)
    bench.consumer.fire()
    assert bench.consumer.requested == [request]
    assert bench.offer(request)


def test_a_bug_in_the_gate_does_not_keep_a_task_from_running(bench: Bench) -> None:
    bench.runs.error = ZeroDivisionError("a bug")
    assert bench.offer(bench.request(bench.ticket()))
    assert bench.counts["errors"] == 1


def test_where_the_pool_takes_more_than_it_runs_the_claim_waits_for_the_body() -> None:
    bench = Bench(at_acceptance=True)
    first, copy = bench.request(bench.ticket()), bench.request(bench.ticket())
    assert bench.offer(first)
    assert bench.offer(copy)
    assert bench.runs.asked == 0
    first.on_accepted(1, 0.0)
    assert bench.state() == "running"
    with pytest.raises(NotStarted):
        copy.on_accepted(1, 0.0)
    assert bench.acks == ["ack", "ack"]  # the first one is acknowledged early, as its task wishes
    assert copy not in worker_state.active_requests
    bench.close()


def test_a_run_that_its_pool_forgot_is_noticed(bench: Bench) -> None:
    request = bench.running()
    worker_state.task_ready(request)
    del request
    gc.collect()
    bench.beat()
    assert [run.ticket.key for run in bench.vanished] == ["k"]


def einfo(exc: BaseException) -> object:
    from billiard.einfo import ExceptionInfo

    try:
        raise exc
    except BaseException:
        return ExceptionInfo()

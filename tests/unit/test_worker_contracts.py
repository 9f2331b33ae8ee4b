"""What the worker half relies on in Celery, kombu and billiard without their promise.

Each test names what to do should it fail one day.
"""

from __future__ import annotations

import inspect
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import amqp as py_amqp
import pytest
from billiard.exceptions import WorkerLostError
from celery import Celery, bootsteps, signals
from celery.app import amqp, trace
from celery.app.task import Context
from celery.concurrency import base as concurrency
from celery.concurrency import prefork, solo, thread
from celery.exceptions import TaskRevokedError
from celery.utils.imports import symbol_by_name
from celery.worker import consumer as worker_consumer
from celery.worker import loops, strategy, worker
from celery.worker import request as worker_request
from celery.worker import state as worker_state
from celery.worker.consumer.tasks import Tasks
from kombu import Queue
from kombu.asynchronous import Hub
from kombu.transport import pyamqp
from kombu.transport import redis as kombu_redis
from worker_bench import NOON, Bench

from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.testing.server import LocalServer
from celery_tzbeat.worker.gate import CLAIM
from celery_tzbeat.worker.install import WorkerHalf
from celery_tzbeat.worker.outcome import raw_message
from celery_tzbeat.worker.request import GatedRequest
from celery_tzbeat.worker.wire import keep_bodies


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


class Pool:
    """A pool that keeps what it is given, as `create_request_cls` wants it."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def apply_async(self, target: Any, **options: Any) -> None:
        self.given.append(options)


def made_by_celery(bench: Bench, request: Any, pool: Pool) -> Any:
    """Return a request of the class that Celery's strategy makes of ours, for the same message."""
    cls = worker_request.create_request_cls(bench.task.Request, bench.task, pool, "one@host", None, app=bench.app)
    made = cls(
        request.message,
        app=bench.app,
        task=bench.task,
        hostname="one@host",
        headers=request.message.headers,
        body=request.message.body,
        on_ack=lambda *_: bench.acks.append("ack"),
    )
    worker_state.task_reserved(made)
    return made


def test_the_strategy_makes_its_requests_of_the_task_s_own_class() -> None:
    # Else: `create_request_cls` in celery.worker.strategy is the next seam.
    source = inspect.getsource(strategy.default)
    assert "symbol_by_name(task.Request)" in source
    assert "create_request_cls(Request, task" in source


def test_revoked_is_asked_just_before_the_pool_and_keeps_it_from_running(bench: Bench) -> None:
    # Else: no gate. `before_start` with Ignore is the fallback of the design's research.
    pool = Pool()
    first = made_by_celery(bench, bench.request(bench.ticket()), pool)
    first.execute_using_pool(pool)
    assert len(pool.given) == 1
    copy = made_by_celery(bench, bench.request(bench.ticket()), pool)
    with pytest.raises(TaskRevokedError):
        copy.execute_using_pool(pool)
    assert len(pool.given) == 1


def test_our_on_success_in_the_instance_is_not_shadowed(bench: Bench) -> None:
    # Else: a success is a request that left `active_requests` without a failure.
    pool = Pool()
    made = made_by_celery(bench, bench.request(bench.ticket()), pool)
    made.execute_using_pool(pool)
    [given] = pool.given
    assert given["callback"] == made._on_success
    given["accept_callback"](1, 0.0)
    given["callback"]((0, "None", 0.1))
    bench.beat(1)
    assert bench.state() == "done"
    assert made not in worker_state.active_requests


def test_failures_timeouts_and_ends_by_others_reach_the_request(bench: Bench) -> None:
    # Else: the sweep finds out when the lease lapses.
    for name in ("on_failure", "on_timeout", "on_accepted", "terminate", "cancel", "revoked", "maybe_expire"):
        assert callable(getattr(worker_request.Request, name)), name
    pool = Pool()
    made = made_by_celery(bench, bench.request(bench.ticket()), pool)
    made.execute_using_pool(pool)
    assert pool.given[0]["error_callback"] == made.on_failure
    assert pool.given[0]["timeout_callback"] == made.on_timeout
    assert isinstance(made, GatedRequest)
    assert issubclass(WorkerLostError, Exception)


def test_a_request_has_room_for_what_we_keep_and_says_who_ended_it(bench: Bench) -> None:
    request = bench.request(bench.ticket())
    assert isinstance(request.__dict__, dict)
    assert request._already_revoked is False
    assert request._already_cancelled is False


def test_what_we_add_to_properties_reaches_the_body_and_no_later_message(bench: Bench) -> None:
    # Else: another field of the request that `as_execution_options` does not hand on.
    request = bench.running()
    context = Context(request.request_dict)
    assert context.properties[CLAIM]["token"]
    signature = bench.task.signature_from_request(context, retries=1)
    assert CLAIM not in signature.options
    assert request.request_dict["properties"][CLAIM]["token"] not in str(signature)
    assert signature.options["headers"]["meta"]["tzbeat"]["key"] == "k"  # the ticket goes on


def test_a_retry_says_under_which_id_and_number_it_was_published(bench: Bench) -> None:
    # Else: a retry that the task swallows ends its run as done.
    seen: list[dict[str, Any]] = []

    def note(headers: Any = None, **_: Any) -> None:
        seen.append(headers)

    signals.after_task_publish.connect(note)
    try:
        bench.app.send_task("work", (), task_id="an-id", retries=3, countdown=60)
    finally:
        signals.after_task_publish.disconnect(note)
    assert (seen[0]["id"], seen[0]["retries"]) == ("an-id", 3)
    assert isinstance(seen[0]["eta"], str)


def test_signals_around_the_body_are_sent_where_it_runs() -> None:
    # Else: bind in the wrapped body, as the policy's retry does.
    source = inspect.getsource(trace.build_tracer)
    assert "send_prerun(sender=task, task_id=uuid, task=task" in source
    assert "send_postrun(sender=task, task_id=uuid, task=task" in source


def test_a_bootstep_of_the_consumer_is_made_before_the_pool_forks_and_shut_down_after_it() -> None:
    # Else: signals worker_init and worker_shutdown, and a wrapped `WorkController._shutdown`.
    assert "self.consumer.shutdown()" in inspect.getsource(worker.WorkController.on_stopped)
    assert "send_all(parent, 'shutdown')" in inspect.getsource(worker_consumer.Consumer.Blueprint.shutdown)
    app = Celery("contract", set_as_current=False)
    assert isinstance(app.steps["consumer"], set)
    assert not app.configured
    assert symbol_by_name(WorkerHalf.requires[0]) is Tasks


def test_the_consumer_builds_its_strategies_and_refuses_what_it_cannot_read_through_itself() -> None:
    # Else: install at worker_init alone; undecodable messages are found by `start_within`.
    assert "c.update_strategies()" in inspect.getsource(Tasks.start)
    assert "on_decode_error=c.on_decode_error" in inspect.getsource(Tasks.start)
    assert "signals.task_unknown.send" in inspect.getsource(worker_consumer.Consumer.on_unknown_task)
    assert "signals.task_rejected.send" in inspect.getsource(worker_consumer.Consumer.on_invalid_task)


def test_pools_without_processes_accept_where_the_body_starts() -> None:
    # Else: claim in `revoked()`, up to a prefetch early.
    called: list[str] = []

    def refuse(pid: int, accepted: float) -> None:
        called.append("accepted")
        raise KeyError("refused")

    with pytest.raises(KeyError):
        concurrency.apply_target(lambda: called.append("body"), accept_callback=refuse)
    assert called == ["accepted"]
    pool = thread.TaskPool(limit=1)
    result = pool.on_apply(lambda: called.append("body"), accept_callback=refuse)
    with pytest.raises(KeyError):
        result.get(5)
    pool.executor.shutdown()
    assert called == ["accepted", "accepted"]
    assert not thread.TaskPool.uses_semaphore
    assert not solo.TaskPool.uses_semaphore


def test_a_greenlet_that_is_killed_reports_no_runtime() -> None:
    # Else: what gevent's pool reports of a killed body is looked for in `GatedRequest._on_success`.
    from celery.concurrency.gevent import TaskPool
    from greenlet import GreenletExit

    def ended() -> None:
        raise GreenletExit

    assert TaskPool._make_killable_target(ended)() == (False, None, None)
    assert "T = monotonic() - time_start" in inspect.getsource(trace.build_tracer)


def test_a_place_in_the_pool_is_given_by_a_call_that_can_be_wrapped_and_taken_back_from_one_that_does_not_run() -> None:
    # Else: the gate asks and waits (`Entrance.asks` is never called).
    controller = object.__new__(worker.WorkController)
    seen: list[Any] = []
    controller.pool = None
    controller._quick_acquire = lambda call, *args: call(*args)
    controller._quick_release = lambda: seen.append("released")

    class Refused:
        def execute_using_pool(self, pool: Any) -> None:
            raise TaskRevokedError("refused")

    controller._process_task(Refused())
    assert seen == ["released"]
    controller._process_task = seen.append
    controller._process_task_sem("request")
    assert seen == ["released", "request"]
    assert "hub" in inspect.signature(worker_consumer.Consumer.__init__).parameters
    assert prefork.TaskPool.uses_semaphore


def test_celery_s_event_loop_calls_back_for_sockets_and_later() -> None:
    # Else: the gate asks and waits.
    seen: list[str] = []
    hub = Hub()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        hub.add_reader(ours.fileno(), lambda: seen.append(ours.recv(10).decode()))
        hub.call_later(0.0, lambda: seen.append("later"))
        hub.call_soon(lambda: seen.append("soon"))
        theirs.sendall(b"read")
        for _ in range(100):
            if len(seen) == 3:
                break
            hub.run_once()
        assert sorted(seen) == ["later", "read", "soon"]
        hub.reset()
        hub.remove_reader(ours.fileno())  # what a reset has forgotten may be removed again
    hub.close()


def test_steps_of_the_consumer_are_stopped_before_its_messages_go_back_in_every_shutdown_and_reconnection() -> None:
    # Else: starts that are out when the loop ends are abandoned when their leases lapse.
    blueprint = inspect.getsource(bootsteps.Blueprint)
    assert "self.restart(" in blueprint
    assert "'terminate' if terminate else 'stop'" in blueprint
    assert "blueprint.restart(self)" in inspect.getsource(worker_consumer.Consumer.start)
    assert "reversed(parent.steps) if reverse" in blueprint


def test_a_soft_shutdown_begins_with_a_call_that_can_be_wrapped() -> None:
    # Else: tasks hear of it when the wait is over.
    from celery.apps import worker as apps_worker

    assert "worker.wait_for_soft_shutdown()" in inspect.getsource(apps_worker.on_cold_shutdown)


def test_a_redis_message_is_kept_as_it_was_in_the_queue(server: LocalServer) -> None:
    # Else: the parts are put together; the body is the same, the rest of the text may differ.
    app = Celery("contract", broker=server.url, set_as_current=False)
    app.send_task("work", ("é",), headers={"meta": {"tzbeat": 1}})
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        wire = channel.client.lindex("celery", 0)
        message = Queue("celery")(channel).get()
    assert raw_message(message, NOON) == wire
    app.close()


@pytest.mark.parametrize("body", [zlib.compress(b"[[], {}, {}]", 1), b"not compressed at all"], ids=["whole", "broken"])
def test_an_amqp_channel_makes_its_messages_of_a_class_of_its_own_that_decompresses(body: bytes) -> None:
    # Else: the letter has the body decompressed, without the header that says otherwise.
    properties = {"content_type": "x/y", "content_encoding": "binary", "priority": 3, "correlation_id": "id"}
    sent = py_amqp.Message(body, application_headers={"compression": "application/x-gzip"}, **properties)
    sent.delivery_info = {"delivery_tag": 1, "exchange": "", "routing_key": "celery"}
    channel = object.__new__(pyamqp.Channel)
    as_kombu_makes_it = channel.message_to_python(sent)
    for _ in range(2):
        keep_bodies(channel)
    message = channel.message_to_python(sent)
    assert (message.body, bool(message.errors)) == (as_kombu_makes_it.body, bool(as_kombu_makes_it.errors))
    kept = Parcel.from_bytes(raw_message(message, NOON)).run
    assert (kept.body, kept.headers) == (body, {"compression": "application/x-gzip"})
    assert len(type(message).__mro__) == len(pyamqp.Message.__mro__) + 1
    assert pyamqp.Channel.Message is pyamqp.Message, "no other channel is touched"
    # It can be sent again as it was.
    again = channel.prepare_message(
        kept.body, kept.priority, kept.content_type, kept.content_encoding, kept.headers, kept.properties
    )
    assert (again.body, again.properties) == (sent.body, sent.properties)
    # Without our class: a body and headers that agree.
    plain = Parcel.from_bytes(raw_message(as_kombu_makes_it, NOON)).run
    assert (plain.body, plain.headers) == ((body, kept.headers) if as_kombu_makes_it.errors else (b"[[], {}, {}]", {}))


def test_a_worker_consumes_when_its_bootsteps_have_started() -> None:
    # Else: the first messages of a connection are kept decompressed.
    assert ".consume(" not in inspect.getsource(Tasks.start)
    assert "TaskConsumer(\n            c.connection" in inspect.getsource(Tasks.start), "on its default channel"
    assert "consumer.consume()" in inspect.getsource(loops.asynloop)
    assert "consumer.consume()" in inspect.getsource(loops.synloop)


def test_the_redis_channel_names_its_index_of_unacknowledged_messages(server: LocalServer) -> None:
    # Else: nothing is touched; copies of what runs are refused by the gate.
    app = Celery("contract", broker=server.url, set_as_current=False)
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        assert channel.unacked_index_key == kombu_redis.Channel.unacked_index_key
        pool = channel._get_pool()
        client = channel.Client(connection_pool=pool)
        client.zadd(channel.unacked_index_key, {"tag": 1.0}, xx=True)
        assert client.zrange(channel.unacked_index_key, 0, -1) == []  # an acknowledged one is not revived
        pool.disconnect()
    app.close()


def test_the_amqp_module_sends_what_it_published() -> None:
    assert "headers=headers2" in inspect.getsource(amqp.AMQP._create_task_sender)

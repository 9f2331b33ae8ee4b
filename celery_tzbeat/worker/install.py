"""The worker half on an app: from `install`, called where the app is made, to the parts of each worker process.

`install` reads and writes no configuration: it leaves a bootstep with the app, and receivers with Celery's signals. The
bootstep is made with a worker's consumer, before the pool forks; there the settings are read, the board and the heartbeat
made, and each task's Request replaced by one with our gate in front. That is repeated each time Celery builds its strategies
(`Consumer.update_strategies`: at each connection, so tasks registered late are seen), on top of whatever Request the task's
class has then: its own, its base's, or that of another library.

The body's side needs no bootstep: what the gate claimed travels with the request (`properties["tzbeat"]`).

| what fails | what happens |
| --- | --- |
| settings cannot be used (no store) | logged as an error: this worker runs messages of ours as any others |
| a task whose class refuses a new Request | logged; its messages run without the gate |
| a strategy of the user's own that makes other requests | they run without the gate |
| a receiver in here raises | Celery logs it; the task's result is unchanged |
| a pool child that is a fresh interpreter ("spawn") | it has no board (see `cancel`); its tasks are prepared at its start |
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

from celery import Celery, Task, bootsteps, signals
from celery._state import get_current_worker_task
from celery.app.trace import build_tracer
from celery.utils.imports import symbol_by_name

import celery_tzbeat
from celery_tzbeat.clock import Clock, SystemClock
from celery_tzbeat.deliveries import Ticket, WorkerPresence
from celery_tzbeat.model import from_iso
from celery_tzbeat.settings import Settings
from celery_tzbeat.store.redis_runs import RedisRuns
from celery_tzbeat.store.runs import End, Order, Runs

from . import outcome
from .asking import Asking
from .cancel import Board, Flags, Row
from .gate import CLAIM, Entrance
from .heartbeat import Heart, Held
from .request import GatedRequest
from .retry import retry_by_policy
from .run import bind, unbind
from .touch import Toucher
from .wire import keep_bodies

logger = logging.getLogger(__name__)

#: Bounds of one call by the gate, which runs in the worker's loop (a call connects and asks: twice this), in seconds.
GATE_TIMEOUT = 0.25


def install(app: Celery) -> None:
    """Install the worker half on an app; a second call changes nothing. Nothing happens before a worker starts."""
    app.steps["consumer"].add(WorkerHalf)
    signals.task_prerun.connect(_bind, weak=False, dispatch_uid="tzbeat")
    signals.task_postrun.connect(_unbind, weak=False, dispatch_uid="tzbeat")
    signals.after_task_publish.connect(_note_retry, weak=False, dispatch_uid="tzbeat")
    signals.worker_process_init.connect(partial(_prepare_child, app), weak=False, dispatch_uid=f"tzbeat-{id(app)}")
    signals.task_unknown.connect(_unknown, weak=False, dispatch_uid="tzbeat")
    signals.task_rejected.connect(_refused, weak=False, dispatch_uid="tzbeat")
    signals.worker_shutting_down.connect(_shutting_down, weak=False, dispatch_uid="tzbeat")


class WorkerHalf(bootsteps.StartStopStep):
    """The parts of one worker, in MAIN; `current` is that of this process (a forked child has its MAIN's)."""

    label = "tzbeat"
    requires = ("celery.worker.consumer.tasks:Tasks",)  # so that what we write at the end comes before messages go back
    current: ClassVar[WorkerHalf | None] = None

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self.app: Celery = consumer.app
        self.counts: Counter[str] = Counter()
        self.clock: Clock = SystemClock()
        settings, problems = Settings.examine(self.app)
        self.enabled = settings is not None
        if settings is None:
            logger.error("tzbeat: this worker runs scheduled messages without the worker half: %s", "; ".join(problems))
            return
        self.settings = settings
        self.board = Board()
        pool = consumer.pool
        self.heart = Heart(
            runs=partial(open_runs, settings, timeout=settings.call_timeout),
            namespace=settings.namespace,
            presence=partial(self._presence, f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"),
            board=self.board,
            clock=self.clock,
            counts=self.counts,
            touch=Toucher(self._unacked, consumer, self.clock).touch,
            overdue=self._kill,
            vanished=self._vanished,
        )
        green = bool(getattr(pool, "is_green", False))
        self.asking = self._asking(consumer)
        self.entrance = Entrance(
            consumer=consumer,
            runs=partial(open_runs, settings, timeout=GATE_TIMEOUT),
            namespace=settings.namespace,
            heart=self.heart,
            board=self.board,
            clock=self.clock,
            counts=self.counts,
            at_acceptance=green or _is_threads(pool),
            stop_body=_stop_greenlet if green else NotStarted,
            asking=self.asking,
        )
        self._started = False
        self._consumer = consumer
        WorkerHalf.current = self
        self._wrap(consumer)
        self.prepare()

    def start(self, consumer: Any) -> None:
        """Begin; called again at each connection, after `Tasks` has made its channel and before that consumes."""
        if not self.enabled:
            return
        _guarded(self, keep_bodies, consumer.task_consumer.channel)
        if self.asking is not None:
            self.asking.begin()
        if not self._started:
            self._started = True
            self.heart.start()

    def stop(self, consumer: Any) -> None:
        if self.enabled:
            self.entrance.give_back()

    def terminate(self, consumer: Any) -> None:
        self.stop(consumer)

    def prepare(self) -> None:
        """Put the gate in front of every task's Request, and the policy's retry around its body."""
        for task in list(self.app.tasks.values()):
            try:
                retry_by_policy(task)
                put_gate(task, self.entrance)
            except Exception:
                self.counts["errors"] += 1
                logger.exception("tzbeat: task %s runs without the gate", task.name)

    def shutdown(self, consumer: Any) -> None:
        """Write what is owed, and that runs whose bodies are gone with the pool were abandoned. The pool has ended."""
        if not self.enabled:
            return
        if not _is_threads(self._consumer.pool):  # threads go on until they end, and the heartbeat with them
            for run in self.heart.held():
                self._vanished(run)
        if not self.heart.drain(self.settings.drain_timeout.total_seconds()):
            logger.warning("tzbeat: the store did not take %d ends before the worker ended", self.heart.owed)

    def bury(self, message: Any, reason: str, error: str) -> None:
        """Write a dead letter for a message that never became a request, where its key can be read (line 36)."""
        headers = message.headers or {}
        ticket = Ticket.from_headers(headers)
        if ticket is None:
            return
        if not ticket.namespace:
            ticket = replace(ticket, namespace=self.settings.namespace)
        text = outcome.letter(
            ticket,
            reason,
            error,
            task=str(headers.get("task") or ""),
            at=self.clock.now(),
            message=outcome.raw_message(message, self.clock.now()),
            worker=self._consumer.hostname,
            task_id=str(headers.get("id") or ""),
        )
        order = Order(ticket.dispatch, int(headers.get("retries") or 0))
        self.counts[reason] += 1
        self.heart.owe(None, End(ticket, order, "", "dead", reason=reason, letter=text))

    # ---- parts

    def _wrap(self, consumer: Any) -> None:
        """Stand behind four of Celery's calls, on these objects only."""
        update_strategies, on_decode_error = consumer.update_strategies, consumer.on_decode_error
        controller = consumer.controller
        process, wait_for_soft_shutdown = controller._process_task, controller.wait_for_soft_shutdown

        def update() -> Any:
            self.prepare()
            return update_strategies()

        def ask_first(request: Any) -> None:
            ours = isinstance(request, GatedRequest) and request.entrance is self.entrance
            if not (ours and self.entrance.asks(request, process)):
                process(request)

        def undecodable(message: Any, exc: Exception) -> Any:
            _guarded(self, self.bury, message, "undecodable", outcome.text_of(exc))
            return on_decode_error(message, exc)

        def wait() -> Any:
            self.board.shut_down()  # Celery's own signal comes after the wait
            return wait_for_soft_shutdown()

        consumer.update_strategies = update
        consumer.on_decode_error = undecodable
        controller._process_task = ask_first
        controller.wait_for_soft_shutdown = wait

    def _asking(self, consumer: Any) -> Asking | None:
        """Return how to ask without waiting; None where Celery has no event loop, or gives its pool all it has."""
        hub = getattr(consumer, "hub", None)
        if hub is None or not consumer.pool.uses_semaphore:
            return None
        runs = open_runs(self.settings, self.settings.namespace, timeout=GATE_TIMEOUT)
        return Asking(hub, runs.line, patience=GATE_TIMEOUT, silent=self.heart.store_failed, clock=self.clock)

    def _presence(self, worker: str, running: int) -> WorkerPresence:
        pool = type(self._consumer.pool).__module__.rpartition(".")[2]
        return WorkerPresence(worker, self._consumer.hostname, pool, celery_tzbeat.__version__, running)

    def _unacked(self) -> Iterable[Any]:
        """Return the requests whose messages are to stay ours: of live runs, and parked ones."""
        live = [run.request() for run in self.heart.held()]
        return [r for r in (*live, *list(self.entrance.parked)) if r is not None and not r.acknowledged]

    def _vanished(self, run: Held) -> None:
        seconds = self.clock.reading().monotonic - run.began
        self.heart.owe(run, End(run.ticket, run.order, run.token, "abandoned", seconds=seconds))

    def _kill(self, run: Held) -> None:
        """End the body of a run that was asked to stop and did not, where the pool can."""
        request, pool = run.request(), self._consumer.pool
        if request is not None and (pool.uses_semaphore or getattr(pool, "is_green", False)):
            logger.warning("tzbeat: %s did not stop within its kill_after and is ended", run.ticket.key)
            self._consumer.call_soon(request.terminate, pool, "SIGKILL")


def put_gate(task: Task, entrance: Entrance) -> None:
    """Have the requests of a task pass our gate: on its class, which is the task's own. A second call changes nothing."""
    found = symbol_by_name(task.Request)
    if issubclass(found, GatedRequest):
        if found.entrance is entrance:
            return
        found = found.__bases__[-1]
    type(task).Request = _gated(found, entrance)


@cache
def _gated(base: type, entrance: Entrance) -> type:
    return type("Request", (GatedRequest, base), {"entrance": entrance, "__module__": __name__})


class NotStarted(Exception):
    """Raised in a pool's thread to keep a refused body from running; nobody sees it."""


def _stop_greenlet() -> BaseException:
    ending: BaseException = importlib.import_module("greenlet").GreenletExit()  # ends a greenlet without a word
    return ending


def _is_threads(pool: Any) -> bool:
    return type(pool).__module__ == "celery.concurrency.thread"


def open_runs(settings: Settings, namespace: str, *, timeout: float) -> RedisRuns:
    """Return a ledger of a namespace on this worker's own store."""
    return RedisRuns(
        settings.url, namespace, timeout=timeout, retention=settings.retention, audit_max=settings.audit_max
    )


def _guarded(half: WorkerHalf, call: Callable[..., None], *args: Any) -> None:
    try:
        call(*args)
    except Exception:
        half.counts["errors"] += 1
        logger.exception("tzbeat: %s failed", call.__name__)


# ---- where the body runs


def _claim_of(task: Task) -> dict[str, Any] | None:
    request = task.request
    properties = request.properties
    claim = properties.get(CLAIM) if isinstance(properties, dict) and not request.is_eager else None
    return claim if isinstance(claim, dict) else None


def _bind(task: Task, **_: Any) -> None:
    claim = _claim_of(task)
    if claim is None:
        return
    half = WorkerHalf.current
    ticket = Ticket.from_headers({"meta": {"tzbeat": claim["ticket"]}})
    assert ticket is not None
    board = half.board if half is not None and half.enabled else None
    row = Row(*claim["row"]) if claim["row"] is not None else None
    bind(
        ticket,
        attempt=claim["attempt"],
        epoch=ticket.epoch,
        token=claim["token"],
        deadline=claim["deadline"],
        flags=Flags(board, row, claim["deadline"]),
        runs=partial(_runs_of_body, task.app, ticket.namespace),
        checkpoint=claim["checkpoint"],
    )


def _unbind(task: Task, **_: Any) -> None:
    unbind()


def _runs_of_body(app: Celery, namespace: str) -> Runs:
    return _runs_of_process(os.getpid(), app, namespace)


@cache
def _runs_of_process(pid: int, app: Celery, namespace: str) -> Runs:
    settings = Settings.read(app)
    return open_runs(settings, namespace, timeout=settings.call_timeout)


def _note_retry(headers: Any = None, **_: Any) -> None:
    """Tell MAIN that the run in whose body we are has published its own next attempt."""
    task = get_current_worker_task()
    half = WorkerHalf.current
    if task is None or half is None or not half.enabled or not isinstance(headers, dict):
        return
    request = task.request
    claim = _claim_of(task)
    if claim is None or claim["row"] is None:
        return
    if headers.get("id") == request.id and int(headers.get("retries") or 0) > request.retries:
        eta = headers.get("eta")
        due = eta if not isinstance(eta, str) else from_iso(eta)
        half.board.note_retry(Row(*claim["row"]), due.timestamp() if due is not None else None)


def _prepare_child(app: Celery, **_: Any) -> None:
    """Prepare the tasks of a pool child that is a fresh interpreter: what MAIN prepared did not come with a fork."""
    if WorkerHalf.current is None:
        for name, task in app.tasks.items():
            retry_by_policy(task)
            task.__trace__ = build_tracer(name, task, app.loader, app=app)


# ---- signals of MAIN


def _unknown(message: Any, name: str, **_: Any) -> None:
    half = WorkerHalf.current
    if half is not None and half.enabled:
        half.bury(message, "unknown_task", f"no task is named {name!r} on this worker")


def _refused(message: Any, exc: Exception | None, **_: Any) -> None:
    half = WorkerHalf.current
    if half is not None and half.enabled:
        half.bury(message, "undecodable", outcome.text_of(exc) if exc is not None else "no task is named")


def _shutting_down(**_: Any) -> None:
    half = WorkerHalf.current  # in a signal handler: one write to memory
    if half is not None and half.enabled:
        half.board.shut_down()

"""A worker half without a worker: real requests of a real app, a ledger in memory, time moved by hand."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery
from celery.worker import state as worker_state
from kombu import Queue

from celery_tzbeat.deliveries import DeadLetter, Ticket, WorkerPresence
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import Policy
from celery_tzbeat.store.runs import Beat, End, Ended, Pulse, Start, Started
from celery_tzbeat.testing import MemoryRuns
from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.store import MemoryStore
from celery_tzbeat.worker.asking import Asking
from celery_tzbeat.worker.cancel import Board
from celery_tzbeat.worker.gate import Entrance
from celery_tzbeat.worker.heartbeat import Heart, Held
from celery_tzbeat.worker.install import NotStarted, put_gate

NOON = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)


class Unreliable(MemoryRuns):
    """A ledger that can be made to fail, and counts what it is asked."""

    down = False
    loses_replies = False  # of starts: carried out, and nobody is told
    error: Exception | None = None
    asked = 0

    def _answer(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error
        if self.down:
            raise StoreUnavailable("away")

    def start(self, start: Start) -> Started:
        self._answer()
        started = super().start(start)
        if self.loses_replies:
            raise StoreUnavailable("the reply was lost")
        return started

    def heartbeat(self, beats: Sequence[Beat]) -> list[Pulse]:
        self._answer()
        return super().heartbeat(beats)

    def end(self, ends: Sequence[End]) -> list[Ended]:
        self._answer()
        return super().end(ends)

    def attend(self, presence: WorkerPresence) -> None:
        self._answer()
        super().attend(presence)


class ScriptedLine:
    """A line on which the ledger hears each question at once, and whose answers come when a test lets them."""

    def __init__(self, runs: Unreliable) -> None:
        self._runs = runs
        self.answers: deque[Started] = deque()  # what the ledger has said
        self.arrived = 0  # how many of them are there
        self.broken = self.closed = False

    def fileno(self) -> int:
        return 99

    def ask(self, start: Start) -> None:
        self._check()
        self.answers.append(self._runs.start(start))

    def answered(self) -> bool:
        if not self.arrived:
            self._check()
        return self.arrived > 0

    def answer(self) -> Started:
        if not self.arrived:
            self._check()
        self.arrived = max(0, self.arrived - 1)
        return self.answers.popleft()

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.broken:
            raise StoreUnavailable("the line broke")


class ScriptedHub:
    """What is needed of Celery's event loop; a test lets its sockets become readable and its timers fire."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.soon: list[Callable[[], None]] = []

    def add_reader(self, fileno: int, call: Callable[[], None]) -> None:
        self.readers[fileno] = call

    def remove_reader(self, fileno: int) -> None:
        self.readers.pop(fileno, None)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append((seconds, call))

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def turn(self) -> None:
        """Let the loop look at its sockets, and do what it was told to do soon."""
        for call in [*self.readers.values()]:
            call()
        soon, self.soon = self.soon, []
        for call in soon:
            call()

    def fire(self) -> None:
        """Let the timers' time come."""
        due, self.timers = self.timers, []
        for _, call in due:
            call()


class Qos:
    """Celery's prefetch count: how many more than usual it would take."""

    raised = 0

    def increment_eventually(self) -> None:
        self.raised += 1

    def decrement_eventually(self) -> None:
        self.raised -= 1


@dataclass
class ScriptedConsumer:
    """What the gate needs of Celery's consumer: a timer that a test fires, a prefetch count, where requests go."""

    connection: object = field(default_factory=object)
    qos: Qos = field(default_factory=Qos)
    pool: Any = None
    hostname: str = "one@host"
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    requested: list[Any] = field(default_factory=list)

    @property
    def timer(self) -> ScriptedConsumer:
        return self

    def call_after(self, seconds: float, call: Callable[[], None]) -> None:
        self.later.append((seconds, call))

    def on_task_request(self, request: Any) -> None:
        self.requested.append(request)

    def fire(self) -> None:
        """Let the timer's time come."""
        due, self.later = self.later, []
        for _, call in due:
            call()


class Bench:
    """One worker's parts. `request` makes what Celery makes of a delivery; `offer` asks its gate, as the pool would."""

    def __init__(self, *, at_acceptance: bool = False, hub: ScriptedHub | None = None) -> None:
        self.clock = ManualClock(NOON)
        self.store = MemoryStore(self.clock)
        self.store.take_office(1)
        self.runs = Unreliable(self.store)
        self.board = Board()
        self.counts: Counter[str] = Counter()
        self.killed: list[Held] = []
        self.vanished: list[Held] = []
        self.touched = 0
        self.heart = Heart(
            runs=lambda namespace: self.runs,
            namespace="n",
            presence=lambda running: WorkerPresence("host:1:a", "one@host", "prefork", "0", running),
            board=self.board,
            clock=self.clock,
            counts=self.counts,
            touch=self._touch,
            overdue=self.killed.append,
            vanished=self.vanished.append,
        )
        self.consumer = ScriptedConsumer()
        self.lines: list[ScriptedLine] = []
        self.processed: list[Any] = []  # what came again with its answer
        self.asking = self._asking(hub) if hub is not None else None
        self.entrance = Entrance(
            consumer=self.consumer,
            runs=lambda namespace: self.runs,
            namespace="n",
            heart=self.heart,
            board=self.board,
            clock=self.clock,
            counts=self.counts,
            at_acceptance=at_acceptance,
            stop_body=NotStarted,
            asking=self.asking,
        )
        self.app = Celery("bench", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.acks: list[str] = []

        @self.app.task(name="work", max_retries=2, shared=False)  # type: ignore[untyped-decorator]
        def work() -> None:
            """Never run here."""

        self.task = self.app.tasks["work"]
        put_gate(self.task, self.entrance)

    def close(self) -> None:
        worker_state.reset_state()
        self.heart.close()
        self.app.close()

    def ticket(self, key: str = "k", *, dispatch: int = 1, **policy: Any) -> Ticket:
        return Ticket("n", key, "e", NOON, 1, dispatch, 7, abs(hash(key)) % 1000, Policy(**policy))

    def request(self, ticket: Ticket | None, *, retries: int = 0, meta: Any = None, **options: Any) -> Any:
        """Return the reserved request of a message that was sent and received."""
        headers = {"meta": {"tzbeat": ticket.to_header()} if ticket is not None else meta}
        self.app.send_task("work", (), headers=headers, retries=retries, **options)
        with self.app.connection_for_read() as connection:
            message = Queue("celery")(connection.default_channel).get()
        request = self.task.Request(
            message,
            app=self.app,
            task=self.task,
            hostname="one@host",
            headers=message.headers,
            body=message.body,
            on_ack=lambda *_: self.acks.append("ack"),
            on_reject=lambda *args: self.acks.append("requeue" if args[-1] else "reject"),
        )
        worker_state.task_reserved(request)
        return request

    def offer(self, request: Any) -> bool:
        """Return whether the pool would run a request."""
        return not request.revoked()

    def asks(self, request: Any) -> bool:
        """Return whether a request is asked for without waiting; it comes to `processed`."""
        return self.entrance.asks(request, self.processed.append)

    def end_of_the_loop(self) -> None:
        """Do what the bootstep does when Celery's event loop has ended."""
        self.entrance.give_back()

    def running(self, ticket: Ticket | None = None, *, retries: int = 0) -> Any:
        """Return a request that runs."""
        request = self.request(ticket or self.ticket(), retries=retries)
        assert self.offer(request)
        return request

    def beat(self, seconds: float = 10.0) -> None:
        """Let time pass, then let the heartbeat do what is due."""
        self.clock.advance(seconds)
        self.heart.turn()

    def state(self, key: str = "k") -> str:
        """Return an unsettled occurrence's state, or the done mark's; empty where the ledger knows nothing."""
        record = self.store.data.open.get(key)
        if record is not None:
            return str(record.state)
        marks = {field: mark for (_, bucket), mark in self.store.data.done.items() for field in (bucket.field,)}
        return marks.get(abs(hash(key)) % 1000, "").partition(" ")[0]

    def letter(self, key: str = "k") -> DeadLetter:
        return DeadLetter.from_json(self.store.data.dead[key])

    def _asking(self, hub: ScriptedHub) -> Asking:
        def line() -> ScriptedLine:
            if self.runs.down:
                raise StoreUnavailable("away")
            self.lines.append(ScriptedLine(self.runs))
            return self.lines[-1]

        return Asking(hub, line, patience=0.25, silent=self.heart.store_failed, clock=self.clock)

    def _touch(self) -> None:
        self.touched += 1


SECOND = timedelta(seconds=1)

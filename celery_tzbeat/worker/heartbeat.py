"""The heartbeat: one thread in MAIN that keeps the run leases, writes the ends that are owed, and hears who is to stop.

It has a client of its own, waits in `poll()`, is a real OS thread also under gevent, and ends with the process only: a warm
shutdown drains for as long as its tasks take, and their leases are kept meanwhile. It does nothing for a run that the gate
did not hand to it (`hold`), and forgets it when its end is written.

| what fails | what happens |
| --- | --- |
| the store, for a while | `down` is set for the gate; leases are not renewed (no leader calls them lapsed), ends stay owed |
| the store, for ever | as above; the ends are gone with the process |
| a run's record is gone, or lies open | the heartbeat writes it anew (RESUMED) |
| another token runs the key | both go on, counted (OVERLAP) |
| the run was settled or given to another | the body is told (`lost`), no more heartbeats; its end is refused |
| a request that no callback came for (its pool dropped it) | it is garbage one day, and the run is abandoned then |
| MAIN stopped for longer than a run lease | the sweep declares its runs abandoned; when it wakes, it hears LOST |
| a bug in here | logged and counted; the next beat goes on |
| the process forks with this thread alive | the child has no such thread, and must not use this object |
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from celery_tzbeat.clock import Clock, Waker
from celery_tzbeat.deliveries import Ticket, WorkerPresence
from celery_tzbeat.errors import StoreUnavailable, StoreUnreadable
from celery_tzbeat.store.protocol import BATCH
from celery_tzbeat.store.runs import SLOWEST_BEAT, Beat, End, Ended, Order, Pulse, Runs, heartbeat_of
from celery_tzbeat.threads import start_thread

from .cancel import Board, Row

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Ends are written at most so often, in seconds: those that come meanwhile travel together.
GATHER = 0.02

#: The store is asked again so soon after a call that failed, in seconds.
RETRY = 1.0


@dataclass(eq=False)
class Held:
    """A run of this worker, from its claim until its end is written."""

    ticket: Ticket
    order: Order
    token: str
    worker: str
    acks_late: bool
    payload: Callable[[], bytes]
    row: Row | None
    request: Callable[[], Any]  # a weak reference to Celery's request
    began: float  # monotonic seconds
    starts: int = 0
    lost: bool = False
    asked_at: float | None = None  # when somebody asked it to stop, monotonic seconds
    killed: bool = False
    end: End | None = None


class Heart:
    """See the module.

    `runs` opens a ledger by namespace, for this thread alone. `touch` keeps the broker from redelivering what is held.
    `overdue` is told of a run that was asked to stop and did not within its `kill_after`, `vanished` of one whose request is
    gone without an end. All four are called in this thread, and may raise.
    """

    def __init__(
        self,
        *,
        runs: Callable[[str], Runs],
        namespace: str,
        presence: Callable[[int], WorkerPresence],
        board: Board,
        clock: Clock,
        counts: Counter[str],
        touch: Callable[[], None],
        overdue: Callable[[Held], None],
        vanished: Callable[[Held], None],
    ) -> None:
        self.down = False  # the store does not answer, as far as the last call told
        self._runs = runs
        self._ledgers: dict[str, Runs] = {}
        self._namespaces = {namespace}
        self._presence = presence
        self._board = board
        self._clock = clock
        self._counts = counts
        self._touch = touch
        self._overdue = overdue
        self._vanished = vanished
        self._held: dict[str, Held] = {}
        self._owed: deque[tuple[Held | None, End]] = deque()
        self._later: deque[tuple[float, Callable[[], None]]] = deque()
        self._waker = Waker()
        self._started = self._closed = False
        self._idle = True  # the thread does not look for ends by itself: the next one must wake it
        self._wrote_at = self._beat_at = self._failed_at = float("-inf")

    # ---- for MAIN, from any of its threads

    def start(self) -> None:
        """Start the thread: a real one, also where gevent has patched threading."""
        self._started = True
        start_thread(self._live, name="tzbeat-heartbeat")

    def close(self) -> None:
        """Renew nothing any more, for tests: a worker's heart beats until its process ends."""
        self._closed = True
        if self._started:
            self._waker.wake()  # the thread lets go of what it waits on
        else:
            self._waker.close()

    def hold(self, run: Held) -> None:
        """Keep a run's lease from now on."""
        self._held[run.token] = run
        if run.ticket.namespace not in self._namespaces:
            self._namespaces = {*self._namespaces, run.ticket.namespace}
        if heartbeat_of(run.ticket.policy.run_lease) < SLOWEST_BEAT:
            self._waker.wake()  # the wait may be longer than this run can do without a heartbeat

    def owe(self, run: Held | None, end: End) -> None:
        """Write an end soon, and keep the run's lease until then. The first end of a run counts, others are passed over."""
        if run is not None:
            if run.end is not None:
                return
            run.end = end
        self._owed.append((run, end))
        if self._idle:  # otherwise it wakes by itself: a thread that is woken by each end takes MAIN's time from it
            self._idle = False
            self._waker.wake()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something in this thread, some seconds from now."""
        self._later.append((self._now() + seconds, call))
        self._waker.wake()

    def held(self) -> list[Held]:
        """Return the runs whose ends are not written yet."""
        return list(self._held.values())

    def store_failed(self) -> None:
        """Say that the store did not answer somebody else: this thread asks at once, and finds out when it does again."""
        self.down = True
        self.beat_soon()

    def beat_soon(self) -> None:
        """Beat at once: a run that started without the store is known to nobody until then."""
        self._beat_at = float("-inf")
        self._waker.wake()

    def drain(self, seconds: float) -> bool:
        """Wait until what is owed is written, for so long at most; return whether it is."""
        until = self._now() + seconds
        waiter = Waker()
        while self._owed and self._now() < until:
            self._waker.wake()
            waiter.wait(GATHER)
        waiter.close()
        return not self._owed

    @property
    def owed(self) -> int:
        """How many ends are not written yet."""
        return len(self._owed)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats: a sixth of the shortest run lease that is held."""
        return min(
            (heartbeat_of(run.ticket.policy.run_lease) for run in self.held() if not run.lost), default=SLOWEST_BEAT
        )

    @property
    def pause(self) -> float:
        """Seconds until the next heartbeat: sooner while the store does not answer."""
        return min(RETRY, self.interval) if self.down else self.interval

    # ---- the thread

    def _live(self) -> None:
        while not self._closed:
            self._guarded(self._wait)
            self.turn()
        self._waker.close()

    def _wait(self) -> None:
        self._idle = True  # said before it looks: an end that comes after the look finds it said, and wakes
        if self._owed or self._now() < self._wrote_at + GATHER:
            self._idle = False
        self._waker.wait(self._next() - self._now())

    def turn(self) -> None:
        """Do what is due now. Raises nothing."""
        now = self._now()
        for _ in range(len(self._later)):
            at, call = self._later.popleft()
            if at <= now:
                self._guarded(call)
            else:
                self._later.append((at, call))
        if now < self._failed_at + RETRY:
            return
        if self._owed and now >= self._wrote_at + GATHER:
            self._wrote_at = now
            self._ask(self._write_ends)
        if now >= self._beat_at + self.pause:
            self._beat_at = now
            self._ask(self._beat)
            self._guarded(self._touch)

    def _next(self) -> float:
        """Return when there is something to do, in monotonic seconds."""
        due = [self._beat_at + self.pause]
        if self._owed or not self._idle:
            due.append(self._wrote_at + GATHER)
        return min(max(min(due), self._failed_at + RETRY), *(at for at, _ in list(self._later)), float("inf"))

    def _ask(self, question: Callable[[], None]) -> None:
        """Ask the store; note whether it answered."""
        try:
            question()
        except (StoreUnavailable, StoreUnreadable) as exc:
            if not self.down:
                logger.warning("tzbeat: the store does not answer the heartbeat: %s", exc)
            self.down, self._failed_at = True, self._now()
            self._counts["store_failed"] += 1
        except Exception:
            self._counts["errors"] += 1
            logger.exception("tzbeat: the heartbeat failed")
        else:
            if self.down:
                logger.info("tzbeat: the store answers the heartbeat again")
            self.down = False

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self._counts["errors"] += 1
            logger.exception("tzbeat: the heartbeat failed in %r", call)

    def _write_ends(self) -> None:
        batch = list(islice(self._owed, BATCH))
        for namespace, owed in _by_namespace(batch, lambda item: item[1].ticket):
            for (run, end), ended in zip(owed, self._end(namespace, [end for _, end in owed]), strict=True):
                if run is not None:
                    self._release(run)
                if ended is Ended.REFUSED:
                    self._counts["ends_refused"] += 1
                    logger.warning(
                        "tzbeat: %s ended as %s, but it was given to another meanwhile", end.ticket.key, end.state
                    )
        for _ in batch:
            self._owed.popleft()

    def _end(self, namespace: str, ends: list[End]) -> list[Ended | None]:
        ledger = self._ledger(namespace)
        try:
            return [*ledger.end(ends)]
        except (StoreUnavailable, StoreUnreadable):
            raise
        except Exception:
            if len(ends) > 1:  # one that cannot be written must not hold up the others
                return [ended for end in ends for ended in self._end(namespace, [end])]
            self._counts["errors"] += 1
            logger.exception("tzbeat: the end %s of %s cannot be written", ends[0].state, ends[0].ticket.key)
            return [None]

    def _release(self, run: Held) -> None:
        if self._held.pop(run.token, None) is not None and run.row is not None:
            self._board.free(run.row)

    def _beat(self) -> None:
        live = [run for run in self.held() if not run.lost]
        for run in live:
            if run.end is None and run.request() is None:
                self._guarded(partial(self._vanished, run))
        for namespace, runs in _by_namespace(live, lambda run: run.ticket):
            for start in range(0, len(runs), BATCH):
                part = runs[start : start + BATCH]
                beats = [Beat(r.ticket, r.order, r.token, r.worker, r.acks_late, r.payload()) for r in part]
                for run, pulse in zip(part, self._ledger(namespace).heartbeat(beats), strict=True):
                    self._hear(run, pulse)
        for namespace in self._namespaces:
            self._ledger(namespace).attend(self._presence(len(live)))

    def _hear(self, run: Held, pulse: Pulse) -> None:
        if pulse is Pulse.CANCEL:
            now = self._now()
            if run.asked_at is None:
                run.asked_at = now
                if run.row is not None:
                    self._board.ask_to_stop(run.row)
            elif (
                run.end is None
                and not run.killed
                and now >= run.asked_at + run.ticket.policy.kill_after.total_seconds()
            ):
                run.killed = True
                self._guarded(partial(self._overdue, run))
        elif pulse is Pulse.LOST and run.end is None:
            run.lost = True
            self._counts["lost"] += 1
            logger.warning("tzbeat: %s was settled, or given to another worker, while it runs here", run.ticket.key)
            if run.row is not None:
                self._board.tell_lost(run.row)
        elif pulse in (Pulse.RESUMED, Pulse.OVERLAP):
            self._counts[pulse.value.lower()] += 1
            logger.warning("tzbeat: heartbeat of %s: %s", run.ticket.key, pulse.value.lower())

    def _ledger(self, namespace: str) -> Runs:
        if namespace not in self._ledgers:
            self._ledgers[namespace] = self._runs(namespace)
        return self._ledgers[namespace]

    def _now(self) -> float:
        return self._clock.reading().monotonic


def _by_namespace(items: list[T], ticket: Callable[[T], Ticket]) -> list[tuple[str, list[T]]]:
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(ticket(item).namespace, []).append(item)
    return list(found.items())

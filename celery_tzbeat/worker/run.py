"""`current_run()`: what a task's body knows of its run, what it keeps, and whether it is to stop.

`bind` and `unbind` are called around the body, in its process and thread or greenlet. Threads that the task starts itself
see no run: hand it to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from datetime import datetime, timedelta
from itertools import islice
from typing import Protocol, TypeVar

from celery.exceptions import SoftTimeLimitExceeded

from celery_tzbeat.clock import Clock, Reading, SystemClock
from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.errors import Cancelled

from .checkpoint import Checkpoint, Keeper, Line

Item = TypeVar("Item")

#: The least time between two progresses that are kept, in seconds.
PROGRESS_EVERY = 1.0

_REASONS = {
    "cancel": "somebody asked this run to stop",
    "shutdown": "the worker is shutting down",
    "lost": "this run was taken away from its worker",
}


class Flags(Protocol):
    """What the worker tells a body. Looked at between items: it must cost no I/O."""

    @property
    def why(self) -> str:
        """Why the run is to stop: cancel, shutdown, lost or deadline; empty while it may go on."""


class Run:
    """One attempt at an occurrence, as its task sees it.

    `key` names the occurrence, and is the idempotency key to hand on; None outside a run. `attempt` counts the starts of the
    key, from 1. `(epoch, attempt)` rises with every start, so a task can fence its own writes with it.
    """

    def __init__(
        self,
        ticket: Ticket | None = None,
        *,
        attempt: int = 1,
        epoch: int = 0,
        deadline: float | None = None,
        flags: Flags | None = None,
        line: Line | None = None,
        checkpoint: bytes | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.ticket = ticket
        self.attempt = attempt
        self.epoch = epoch
        self.checkpoint = Checkpoint(line, checkpoint)
        self._deadline = deadline
        self._flags = flags
        self._line = line
        self._clock = clock or SystemClock()
        self._loops: set[str] = set()
        self._begun = False
        self._progress_at: Reading | None = None
        self._progress_owed: tuple[int, int | None] | None = None

    @property
    def key(self) -> str | None:
        """The occurrence's key: the same for every attempt. None outside a run."""
        return self.ticket.key if self.ticket is not None else None

    @property
    def entry(self) -> str:
        """The entry's name; empty outside a run and for an `idempotent` message."""
        return self.ticket.entry if self.ticket is not None else ""

    @property
    def nominal(self) -> datetime | None:
        """The instant that the schedule names; None where no schedule does."""
        return self.ticket.nominal if self.ticket is not None else None

    @property
    def remaining(self) -> float | None:
        """Seconds to the soft limit, never below 0; None without one."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - self._clock.reading().monotonic)

    @property
    def why(self) -> str:
        """Why this run is to stop; empty while it may go on.

        ``cancel``: somebody asked. ``shutdown``: the worker is stopping; said to runs that may be started again, and what
        stops then is sent again at once. ``lost``: the ledger gave the run to another. ``deadline``: its time is up.
        """
        why = self._flags.why if self._flags is not None else ""
        if why == "shutdown" and self.ticket is not None and self.ticket.policy.delivery == "at_most_once":
            return "deadline" if self.remaining == 0 else ""
        return why

    @property
    def cancelled(self) -> bool:
        """Whether this run is to stop, for whatever reason. About a microsecond: ask as often as you like."""
        return bool(self.why)

    def raise_if_cancelled(self) -> None:
        """Raise Cancelled where the run is to stop; SoftTimeLimitExceeded where its time is up."""
        why = self.why
        if why == "deadline":
            raise SoftTimeLimitExceeded()
        if why:
            raise Cancelled(_REASONS.get(why, why))

    def begin(self) -> bool:
        """Return whether the body begins now; False once it has begun: it was called again, by itself."""
        first, self._begun = not self._begun, True
        return first

    def each(self, items: Iterable[Item], *, name: str = "", every: float | timedelta = 0) -> Iterator[Item]:
        """Yield the items that no earlier attempt has done, keep how many are done, and stop when asked to.

        An item is done when the next one is asked for. That is kept before the next one begins, by one call to the store:
        after a kill no item is left out, and at most the last one is repeated. With `every` (seconds or timedelta) it is kept
        no more often than that: cheaper, and what was done since is repeated after a kill. It is kept, too, when the loop
        ends, breaks or raises. While the store does not serve the loop goes on, and keeps what it owes later.

        `items` must come in the same order at each attempt: those that were done are passed over by number. Progress is
        reported (`progress`). Raises what `raise_if_cancelled` does, between two items; ValueError for a second loop of one
        name, because loops are told apart by their names.
        """
        if name in self._loops:
            raise ValueError(f"this run has a loop named {name!r} already: give each loop a name of its own")
        self._loops.add(name)
        pause = every.total_seconds() if isinstance(every, timedelta) else float(every)
        return self._walk(items, name, pause)

    def _walk(self, items: Iterable[Item], name: str, pause: float) -> Iterator[Item]:
        total = len(items) if isinstance(items, Sized) else None
        done = self.checkpoint.reached(name)
        kept = self._clock.reading()
        try:
            for item in islice(items, done, None):
                self.raise_if_cancelled()
                yield item
                done += 1
                self.checkpoint.reach(name, done)
                now = self._clock.reading()
                if now.advance_since(kept) >= pause:
                    self.checkpoint.flush()
                    kept = now
                self.progress(done, total)
        finally:
            self.checkpoint.flush()
            self._keep_progress()

    def progress(self, done: int, total: int | None = None) -> None:
        """Say how far the run is, for people (`tzbeat runs`). Kept at most once a second, and when `done` is `total`."""
        self._progress_owed = (done, total)
        last = self._progress_at
        if last is None or done == total or self._clock.reading().advance_since(last) >= PROGRESS_EVERY:
            self._keep_progress()

    def _keep_progress(self) -> None:
        if self._progress_owed is None:
            return
        if self._line is not None:
            self._line.progress(*self._progress_owed)
        self._progress_at, self._progress_owed = self._clock.reading(), None


_current: ContextVar[Run | None] = ContextVar("celery_tzbeat_run", default=None)


def current_run() -> Run:
    """Return the run of the task that is executing here; outside one, a new detached run whose key is None."""
    return _current.get() or Run()


def bind(
    ticket: Ticket,
    *,
    attempt: int,
    epoch: int,
    token: str,
    flags: Flags,
    runs: Callable[[], Keeper],
    deadline: float | None = None,
    checkpoint: bytes | None = None,
    clock: Clock | None = None,
) -> Run:
    """Make a run the current one of this thread or greenlet. `deadline` is in monotonic seconds."""
    clock = clock or SystemClock()
    run = Run(
        ticket,
        attempt=attempt,
        epoch=epoch,
        deadline=deadline,
        flags=flags,
        line=Line(ticket.key, token, runs, clock),
        checkpoint=checkpoint,
        clock=clock,
    )
    _current.set(run)
    return run


def unbind() -> None:
    """Leave no run behind in this thread or greenlet."""
    _current.set(None)

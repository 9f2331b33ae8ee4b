"""The gate's question asked without waiting: MAIN's event loop goes on while the ledger answers.

In the pools that have an event loop and count what they give to it (prefork), a request that has got its place in the pool is
asked for by `Asking.ask`, keeps the place, and comes again to `Entrance` when the answer is there. Elsewhere, and wherever
this does not work, the gate asks and waits: the answer is the same, since a token that asks twice is answered alike.

Seam: `hub.add_reader`, `hub.remove_reader` and `hub.call_later` of Celery's event loop.

| what fails | what happens |
| --- | --- |
| the line cannot be opened or written to | the store is said to be down: all go on by the gate's rule for that |
| no answer within the bound | the same for all that were asked, by a timer: the loop does not wait |
| the line breaks: server restarted, script unknown | dropped; each that was asked asks again, and waits |
| the loop ends: connection lost, shutdown | answers are waited for, within the bound; a start that was won is given back |
| a request comes after that, from what was read of the broker | dropped, neither asked for nor run: the pool takes none |
| a request was revoked or expired meanwhile | written so under its token, which may have started |
| a bug in here | logged and counted by the gate; the request asks and waits |
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from celery_tzbeat.clock import Clock
from celery_tzbeat.errors import StoreUnavailable, StoreUnreadable
from celery_tzbeat.store.runs import Line, Start, Started

logger = logging.getLogger(__name__)


class Asked(NamedTuple):
    """A question that is out."""

    at: float  # monotonic seconds
    start: Start
    answer: Callable[[Started | None], None]


class Asking:
    """See the module. All calls come from the thread of the event loop.

    `line` opens one; `patience` is how long an answer is waited for, in seconds; `silent` is told when the store does not
    answer. Each `answer` is called once, with None where there is none: it must not raise what it does not want the loop to
    see, and nothing that it raises keeps others from their answers.
    """

    def __init__(
        self, hub: Any, line: Callable[[], Line], *, patience: float, silent: Callable[[], None], clock: Clock
    ) -> None:
        self._hub = hub
        self._open = line
        self._patience = patience
        self._silent = silent
        self._clock = clock
        self._line: Line | None = None
        self._fileno = -1
        self._watched = False  # a timer looks after what is out
        self.ended = False  # between a loop and the next one, and after the last
        self._asked: deque[Asked] = deque()
        self._due: deque[tuple[Asked, Started | None]] = deque()  # answered, and not yet told

    def ask(self, start: Start, answer: Callable[[Started | None], None]) -> bool:
        """Ask; False where that is not possible now, and `answer` will not be called."""
        try:
            if self._line is None:
                self._line = self._open()
                self._fileno = self._line.fileno()
                self._hub.add_reader(self._fileno, self._readable)
            self._line.ask(start)
        except (StoreUnavailable, StoreUnreadable) as exc:
            logger.warning("tzbeat: the store does not answer the gate: %s", exc)
            self._silent()
            self._drop()
            self._tell()
            return False
        self._asked.append(Asked(self._now(), start, answer))
        if not self._watched:
            self._watched = True
            self._hub.call_later(self._patience, self._look)
        return True

    def put_off(self, start: Start, answer: Callable[[Started | None], None]) -> bool:
        """Answer None, by the loop: for one that is not asked about. True."""
        self._due.append((Asked(self._now(), start, answer), None))
        self._hub.call_soon(self._tell)
        return True

    def begin(self) -> None:
        """Say that the loop is about to turn."""
        self.ended = False

    def settle(self) -> list[tuple[Start, Started | None]]:
        """Wait for what is out, within the bound, and close the line: the loop has ended. Nobody is told any more.

        Returns what was asked, with its answer; None where there is none.
        """
        try:
            while self._asked and self._line is not None:
                self._due.append((self._asked[0], self._line.answer()))
                self._asked.popleft()
        except (StoreUnavailable, StoreUnreadable):
            self._silent()
        self._drop()
        self.ended = True
        self._watched = False  # timers end with the loop
        untold = [(asked.start, started) for asked, started in self._due]
        self._due.clear()
        return untold

    # ---- in the loop

    def _readable(self) -> None:
        """Take the answers that are there: one at least, or the line has broken."""
        line = self._line
        if line is None:
            return
        try:
            if not self._asked and line.answered():
                raise StoreUnavailable("the store says something that it was not asked")
            while self._asked:
                self._due.append((self._asked[0], line.answer()))
                self._asked.popleft()
                if self._asked and not line.answered():
                    break
        except (StoreUnavailable, StoreUnreadable) as exc:
            self._broke(exc)
        self._tell()

    def _overdue(self) -> bool:
        """Return whether an answer has not come in time. One that came while the loop was busy is no silence: it is read."""
        while self._asked and self._line is not None and self._now() >= self._asked[0].at + self._patience:
            try:
                if not self._line.answered():
                    return True
                self._due.append((self._asked[0], self._line.answer()))
                self._asked.popleft()
            except (StoreUnavailable, StoreUnreadable) as exc:
                self._broke(exc)
        return False

    def _look(self) -> None:
        """See to answers that do not come."""
        self._watched = False
        if self._overdue():
            logger.warning("tzbeat: the store does not answer the gate within %s s", self._patience)
            self._silent()
            self._drop()
        elif self._asked:
            self._watched = True
            self._hub.call_later(self._patience, self._look)
        self._tell()

    def _broke(self, exc: Exception) -> None:
        if self._asked:
            logger.info("tzbeat: the gate's line to the store broke, and what was out is asked again: %s", exc)
        self._drop()

    def _drop(self) -> None:
        """Close the line; what is out has no answer."""
        line, self._line = self._line, None
        if line is not None:
            self._hub.remove_reader(self._fileno)
            line.close()
        self._due.extend((asked, None) for asked in self._asked)
        self._asked.clear()

    def _tell(self) -> None:
        try:
            while self._due:
                asked, started = self._due.popleft()
                asked.answer(started)
        finally:
            if self._due:
                self._hub.call_soon(self._tell)

    def _now(self) -> float:
        return self._clock.reading().monotonic

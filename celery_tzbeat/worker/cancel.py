"""How a run is told to stop, and what its body tells MAIN: one row per run on a board in shared memory.

MAIN makes the board before the pool forks, so that a child reads and writes the same memory: no call, no lock, about 100 ns.
In threads, gevent and solo it is the same memory anyway. A row is a run's from its claim to its end; each run has a number of
its own, never 0, so that a body which outlives its end (it was revoked, say) neither reads nor writes for the row's next run.

| what fails | what happens |
| --- | --- |
| a pool child that is a fresh interpreter ("spawn") | no board: it sees its deadline only; a swallowed retry is not seen |
| more live runs than rows | as above for those runs |
| a torn read of a row (8 aligned bytes are copied at once on every platform served) | not handled |
"""

from __future__ import annotations

import mmap
import struct
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from celery_tzbeat.clock import Clock, SystemClock

#: Rows on a board: live runs of one worker that can be told apart. 32 bytes each.
ROWS = 4096

Why = Literal["", "cancel", "shutdown", "lost", "deadline"]

_NUMBER = struct.Struct("=Q")
_INSTANT = struct.Struct("=d")

# The fields of a row, in bytes from its start. The board's first row holds the fields of the worker.
_CANCEL = 0  # the run that somebody asked to stop
_LOST = 8  # the run whose token was taken away
_RETRIED = 16  # the run that has published its next attempt
_ETA = 24  # when that attempt is due: seconds since 1970, 0 for at once
_SHUTDOWN = 0  # of the first row: 1 once the worker is shutting down
_SIZE = 32


class Row(NamedTuple):
    """Where a run stands on the board."""

    place: int
    number: int


@dataclass(frozen=True, slots=True)
class Retried:
    """A run's next attempt was published; `eta` is when it is due, in seconds since 1970, None for at once."""

    eta: float | None


class Board:
    """The rows. `take` and `free` are MAIN's; all else may be called from any process, thread or signal handler."""

    def __init__(self, rows: int = ROWS) -> None:
        self._memory = mmap.mmap(-1, _SIZE * (rows + 1))
        self._free = deque(range(1, rows + 1))
        self._numbers = 0

    def take(self) -> Row | None:
        """Return a row for a new run; None where all are taken."""
        try:
            place = self._free.popleft()
        except IndexError:
            return None
        self._numbers += 1
        return Row(place, self._numbers)

    def free(self, row: Row) -> None:
        """Give a row back; the longest unused one is taken next."""
        self._free.append(row.place)

    def ask_to_stop(self, row: Row) -> None:
        """Tell a run that somebody asked it to stop."""
        self._write(row, _CANCEL, row.number)

    def tell_lost(self, row: Row) -> None:
        """Tell a run that the ledger gave it to another."""
        self._write(row, _LOST, row.number)

    def shut_down(self) -> None:
        """Tell all runs that the worker is shutting down. No I/O, no lock: fit for a signal handler."""
        _NUMBER.pack_into(self._memory, _SHUTDOWN, 1)

    @property
    def shutting_down(self) -> bool:
        return bool(_NUMBER.unpack_from(self._memory, _SHUTDOWN)[0])

    def note_retry(self, row: Row, eta: float | None) -> None:
        """Say that a run has published its next attempt, due at `eta` (seconds since 1970)."""
        _INSTANT.pack_into(self._memory, row.place * _SIZE + _ETA, eta or 0.0)
        self._write(row, _RETRIED, row.number)

    def retried(self, row: Row) -> Retried | None:
        """Return what `note_retry` said of a run."""
        if not self._is(row, _RETRIED):
            return None
        return Retried(_INSTANT.unpack_from(self._memory, row.place * _SIZE + _ETA)[0] or None)

    def asked_to_stop(self, row: Row) -> bool:
        return self._is(row, _CANCEL)

    def lost(self, row: Row) -> bool:
        return self._is(row, _LOST)

    def _write(self, row: Row, field: int, value: int) -> None:
        _NUMBER.pack_into(self._memory, row.place * _SIZE + field, value)

    def _is(self, row: Row, field: int) -> bool:
        return bool(_NUMBER.unpack_from(self._memory, row.place * _SIZE + field)[0] == row.number)


class Flags:
    """What a body is told, from where it runs. `deadline` is in monotonic seconds, the same in all processes of a host."""

    def __init__(
        self, board: Board | None, row: Row | None, deadline: float | None, clock: Clock | None = None
    ) -> None:
        self._board = board
        self._row = row
        self.deadline = deadline
        self._clock = clock or SystemClock()

    @property
    def why(self) -> Why:
        """Why the run is to stop, the most urgent reason; empty while it may go on. No I/O."""
        if self._board is not None:
            if self._row is not None and self._board.lost(self._row):
                return "lost"
            if self._row is not None and self._board.asked_to_stop(self._row):
                return "cancel"
            if self._board.shutting_down:
                return "shutdown"
        if self.deadline is not None and self._clock.reading().monotonic >= self.deadline:
            return "deadline"
        return ""

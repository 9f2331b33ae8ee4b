"""What time it is, and how a thread waits: the only reader of clocks.

Wall time decides what is due. Three clocks together decide how long a lease may be trusted (`Reading`). The store
decides who leads. Two hosts' clocks are never compared with each other, only each with the store's.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol

UTC = timezone.utc


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the three clocks of this host, in seconds.

    `monotonic` stands still while the host is suspended, `boottime` does not (where the system has it), `wall` is the
    clock on the wall, which an operator may set.
    """

    monotonic: float
    boottime: float
    wall: float

    def advance_since(self, earlier: Reading) -> float:
        """Return the greatest advance of any of the three clocks since `earlier`, in seconds, never below 0.

        A host that slept must not believe that no time passed; a wall clock that went back counts as 0.
        """
        return max(
            self.monotonic - earlier.monotonic,
            self.boottime - earlier.boottime,
            self.wall - earlier.wall,
            0.0,
        )


class Clock(Protocol):
    """A host's clocks, passed to whatever needs them."""

    def now(self) -> datetime:
        """Return the instant on the wall clock, aware, UTC."""

    def reading(self) -> Reading:
        """Return one look at all three clocks."""


class SystemClock:
    """The clocks of this host."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def reading(self) -> Reading:
        monotonic = time.monotonic()
        boottime = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else monotonic
        return Reading(monotonic=monotonic, boottime=boottime, wall=time.time())


class Waker:
    """A wait that another thread, or a file descriptor, can end early.

    `poll()` on a socketpair, never a timed lock: a timed `Condition.wait` hangs for ever under a faked clock, and a lock
    cannot be used inside a signal handler. `wake` may be called from any thread and from a signal handler.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def wait(self, seconds: float, *, also: Sequence[int] = ()) -> None:
        """Return after `seconds`, or sooner: when woken, or when a descriptor in `also` can be read.

        Does not say which; a caller looks at its own state. Does not read from the descriptors in `also`.
        """
        poller = select.poll()
        for descriptor in (self._reader.fileno(), *also):
            if descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        poller.poll(max(0.0, seconds) * 1000)
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass

    def wake(self) -> None:
        """End the present wait, or the next one if nobody waits now."""
        with suppress(OSError):  # a full buffer wakes as well as one more byte; a closed one has nobody to wake
            self._writer.send(b"\0")

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

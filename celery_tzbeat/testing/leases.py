"""A lease server in memory, for simulations: the same answers as Redis, at times that a test chooses.

The conformance suite holds it against a real server. Not promised: safety between threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from celery_tzbeat.clock import Clock
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.leases.protocol import Free, Granted, Held, Leader, Lost, Renewed
from celery_tzbeat.model import from_micros, micros


@dataclass(frozen=True, slots=True)
class _Record:
    """The leader key: kept free for a leader that may be alive where `holder` is empty."""

    holder: str
    epoch: int
    since: datetime
    expires_at: datetime
    step_down: bool = False


class MemoryLeases:
    """One server with one lease (a `LeaseProvider`); every holder of a simulation asks the same instance.

    `clock` is the server's own: skew or step it as you like. With `unavailable = True` every call fails and
    nothing happens; `wipe()` is a FLUSHALL; `replicas` is how many have what was written.
    """

    def __init__(self, clock: Clock, lease: timedelta) -> None:
        self.unavailable = False
        self.replicas = 0
        self._clock = clock
        self._lease = lease
        self._record: _Record | None = None
        self._mark = 0  # the highest epoch ever granted, or given back + 1
        self._subscriptions: list[MemorySubscription] = []

    def acquire(self, holder: str, *, floor: int) -> Granted | Held:
        now = self._answer()
        record = self._present(now)
        if record is not None and record.holder == holder:
            self._record = replace(record, expires_at=now + self._lease)
            return Granted(record.epoch, now)
        if record is None and self._mark < floor:
            self._mark = floor
            record = _Record("", floor, now, now + self._lease)
        if record is not None:
            remaining = min(record.expires_at - now, self._lease)
            self._record = replace(record, expires_at=now + remaining)
            return Held(record.holder, record.epoch, remaining, now)
        self._mark = max(micros(now), self._mark + 1)
        self._record = _Record(holder, self._mark, now, now + self._lease)
        return Granted(self._mark, now)

    def renew_late(self, holder: str, epoch: int) -> Renewed | Lost:
        record = self._present(self._answer())
        forgotten = self._mark < epoch or (record is not None and not record.holder)
        return Lost("", 0, self._answer()) if forgotten else self.renew(holder, epoch)

    def renew(self, holder: str, epoch: int) -> Renewed | Lost:
        now = self._answer()
        record = self._present(now)
        if (record is None or not record.holder) and self._mark <= epoch:
            record = _Record(holder, epoch, now, now)
        elif record is None:
            return Lost("", 0, now)
        elif (record.holder, record.epoch) != (holder, epoch):
            return Lost(record.holder, record.epoch, now)
        self._mark = max(self._mark, epoch)
        self._record = replace(record, expires_at=now + self._lease)
        return Renewed(now, step_down=record.step_down)

    def replicated(self, wanted: int) -> int:
        self._answer()
        return self.replicas

    def resign(self, holder: str, epoch: int) -> bool:
        record = self._present(self._answer())
        if record is None or (record.holder, record.epoch) != (holder, epoch):
            return False
        self._record = None
        self._mark = max(self._mark, epoch + 1)
        self._publish()
        return True

    def ask_to_step_down(self, epoch: int) -> bool:
        record = self._present(self._answer())
        if record is None or not record.holder or record.epoch != epoch:
            return False
        self._record = replace(record, step_down=True)
        self._publish()
        return True

    def look(self) -> Free | Held:
        now = self._answer()
        record = self._present(now)
        if record is None:
            return Free(now)
        return Held(record.holder, record.epoch, min(record.expires_at - now, self._lease), now)

    def leader(self) -> Leader | None:
        now = self._answer()
        record = self._present(now)
        if record is None or not record.holder:
            return None
        return Leader(record.holder, record.epoch, min(record.expires_at - now, self._lease), record.since)

    def listen(self) -> MemorySubscription:
        subscription = MemorySubscription(self._subscriptions)
        self._subscriptions.append(subscription)
        return subscription

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def wipe(self) -> None:
        """Forget everything, the high-water mark as well."""
        self._record = None
        self._mark = 0

    def _answer(self) -> datetime:
        """Return the server's time (in microseconds, as Redis tells it), or fail."""
        if self.unavailable:
            raise StoreUnavailable("the store in memory was told not to answer")
        return from_micros(micros(self._clock.now()))

    def _present(self, now: datetime) -> _Record | None:
        if self._record is not None and self._record.expires_at <= now:
            self._record = None
        return self._record

    def _publish(self) -> None:
        for subscription in self._subscriptions:
            subscription.heard = True


class MemorySubscription:
    """What one listener has heard since its last `drain` (a `Subscription`)."""

    def __init__(self, among: list[MemorySubscription]) -> None:
        self.heard = True  # what was said before went unheard
        self._among = among

    def fileno(self) -> int:
        return -1

    def drain(self) -> bool:
        heard, self.heard = self.heard, False
        return heard

    def close(self) -> None:
        if self in self._among:
            self._among.remove(self)

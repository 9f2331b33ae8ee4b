"""A clock that stands still until a test moves it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from celery_tzbeat.clock import Reading

UTC = timezone.utc


class ManualClock:
    """The clocks of one host (a `celery_tzbeat.clock.Clock`), turned by hand.

    >>> clock = ManualClock(datetime(2026, 11, 1, 5, 29, tzinfo=UTC))
    >>> clock.advance(60)
    >>> clock.now().isoformat()
    '2026-11-01T05:30:00+00:00'

    Each host of a simulation has its own, and so has the server. Moving a clock wakes nobody: a test moves
    time, then calls what should happen at that time.
    """

    def __init__(self, start: datetime) -> None:
        """Start at the aware instant `start`; the other two clocks start at 0."""
        self._show(_instant(start), 0.0, 0.0)

    def now(self) -> datetime:
        return self._wall

    def reading(self) -> Reading:
        return self._reading

    def advance(self, seconds: float) -> None:
        """Let time pass: all three clocks go on."""
        _refuse_negative(seconds)
        before = self._reading
        self._show(self._wall + timedelta(seconds=seconds), before.monotonic + seconds, before.boottime + seconds)

    def suspend(self, seconds: float) -> None:
        """Let the host sleep: wall and boottime go on, monotonic stands still."""
        _refuse_negative(seconds)
        before = self._reading
        self._show(self._wall + timedelta(seconds=seconds), before.monotonic, before.boottime + seconds)

    def set_wall(self, instant: datetime) -> None:
        """Step the wall clock to the aware `instant`, forward or back; the other two do not notice."""
        before = self._reading
        self._show(_instant(instant), before.monotonic, before.boottime)

    def _show(self, wall: datetime, monotonic: float, boottime: float) -> None:
        self._wall = wall
        self._reading = Reading(monotonic=monotonic, boottime=boottime, wall=wall.timestamp())


def _instant(given: datetime) -> datetime:
    if given.tzinfo is None:
        raise ValueError(
            f"{given!r} is naive: an instant carries a zone, for example datetime(..., tzinfo=timezone.utc)"
        )
    return given.astimezone(UTC)


def _refuse_negative(seconds: float) -> None:
    if seconds < 0:
        raise ValueError(f"{seconds} s: time does not go back; `set_wall` steps the wall clock")

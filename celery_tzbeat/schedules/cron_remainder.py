# ruff: noqa: DTZ001, DTZ901 - walls, and instants inside this room, are naive on purpose
"""Cron less cron, in one zone: a row of walls, and where to look on from an instant that is taken away.

A wall is left where its date, hour, minute or second is not the other's, so the search jumps over whole years that are taken
away. It holds between changes of offset; `OneZone` stops each jump at the edge of a gap or fold.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache

from celery_tzbeat.model import MICROSECOND, UTC
from celery_tzbeat.schedules import civil, cron
from celery_tzbeat.schedules.civil import Fold, shifted
from celery_tzbeat.schedules.cron import Cron
from celery_tzbeat.schedules.crontabs import CronRule
from celery_tzbeat.schedules.fields import spread
from celery_tzbeat.schedules.reading import Reading, naive_utc


class Left:
    """The walls of one cron expression that are not in any of some others, forward and backward."""

    __slots__ = ("_first", "_last", "base", "taken")

    def __init__(self, base: Cron, taken: tuple[Cron, ...]) -> None:
        self.base, self.taken = base, taken
        # The first and last clock that is left on a day, by the set of those of `taken` that have the day.
        self._first: dict[int, tuple[int, int, int] | None] = {}
        self._last: dict[int, tuple[int, int, int] | None] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left, ever: all kinds of year are within any 28 in a row without a century."""
        found = self.first_from(datetime(2000, 1, 1))
        return found is None or found.year >= 2029

    def first_from(self, wall: datetime) -> datetime | None:
        """Return the first wall left >= `wall`."""
        year, month, day = wall.year, wall.month, wall.day
        clock = self._clock_from(self._having(year, month, day), wall) if self._has(year, month, day) else None
        if clock is not None:
            return datetime(year, month, day, *clock)
        limit = min(year + cron.BOUND, 9999)
        while year <= limit:
            for later, having in self._days(year, month, range(day + 1, 32)):
                clock = self._first_clock(having)
                if clock is not None:
                    return datetime(year, month, later, *clock)
            month, day = month + 1, 0
            if month > 12:
                year, month = year + 1, 1
        return None

    def last_until(self, wall: datetime) -> datetime | None:
        """Return the last wall left <= `wall`."""
        year, month, day = wall.year, wall.month, wall.day
        clock = self._clock_until(self._having(year, month, day), wall) if self._has(year, month, day) else None
        if clock is not None:
            return datetime(year, month, day, *clock)
        limit = max(year - cron.BOUND, 1)
        while year >= limit:
            for earlier, having in self._days(year, month, range(day - 1, 0, -1)):
                clock = self._last_clock(having)
                if clock is not None:
                    return datetime(year, month, earlier, *clock)
            month, day = month - 1, 32
            if month < 1:
                year, month = year - 1, 12
        return None

    def _has(self, year: int, month: int, day: int) -> bool:
        return bool(self.base.days(year, month) >> day & 1)

    def _having(self, year: int, month: int, day: int) -> int:
        return sum(1 << place for place, each in enumerate(self.taken) if each.days(year, month) >> day & 1)

    def _days(self, year: int, month: int, wanted: range) -> Iterator[tuple[int, int]]:
        """Yield the base's days of a month in an order, each with the set of those of `taken` that have it."""
        days = self.base.days(year, month)
        if not days:
            return
        masks = [each.days(year, month) for each in self.taken]
        if self._first_clock((1 << len(masks)) - 1) is None:
            common = days
            for mask in masks:
                common &= mask
            days &= ~common  # nothing is left of a day that all have
        if not days:
            return
        for day in wanted:
            if days >> day & 1:
                yield day, sum(1 << place for place, mask in enumerate(masks) if mask >> day & 1)

    def _first_clock(self, having: int) -> tuple[int, int, int] | None:
        if having not in self._first:
            self._first[having] = self._clock_from(having, datetime(1, 1, 1))
        return self._first[having]

    def _last_clock(self, having: int) -> tuple[int, int, int] | None:
        if having not in self._last:
            self._last[having] = self._clock_until(having, datetime(1, 1, 1, 23, 59, 59))
        return self._last[having]

    def _clock_from(self, having: int, wall: datetime) -> tuple[int, int, int] | None:
        taken = [self.taken[place] for place in spread(having)]
        for hour in spread(self.base.hour >> wall.hour << wall.hour):
            in_hour = [each for each in taken if each.hour >> hour & 1]
            low = wall.minute if hour == wall.hour else 0
            for minute in spread(self.base.minute >> low << low):
                seconds = self._seconds(in_hour, minute)
                if hour == wall.hour and minute == wall.minute:
                    seconds = seconds >> wall.second << wall.second
                if seconds:
                    return hour, minute, (seconds & -seconds).bit_length() - 1
        return None

    def _clock_until(self, having: int, wall: datetime) -> tuple[int, int, int] | None:
        taken = [self.taken[place] for place in spread(having)]
        for hour in reversed(spread(self.base.hour & (2 << wall.hour) - 1)):
            in_hour = [each for each in taken if each.hour >> hour & 1]
            high = wall.minute if hour == wall.hour else 59
            for minute in reversed(spread(self.base.minute & (2 << high) - 1)):
                seconds = self._seconds(in_hour, minute)
                if hour == wall.hour and minute == wall.minute:
                    seconds &= (2 << wall.second) - 1
                if seconds:
                    return hour, minute, seconds.bit_length() - 1
        return None

    def _seconds(self, in_hour: list[Cron], minute: int) -> int:
        seconds = self.base.second
        for each in in_hour:
            if each.minute >> minute & 1:
                seconds &= ~each.second
        return seconds


@lru_cache(maxsize=1024)
def _left(base: Cron, taken: tuple[Cron, ...]) -> Left:
    return Left(base, taken)


class OneZone:
    """Crons of one zone that take away from a cron of that zone: where to look on from one that is taken."""

    __slots__ = ("_offsets", "alike", "base", "taken")

    def __init__(self, base: CronRule, taken: tuple[CronRule, ...]) -> None:
        assert base.zone is not None  # asked before
        self.base, self.taken = base, taken
        self._offsets = civil.offsets(base.zone.key)
        self.alike = all(_policy(each) == _policy(base) for each in taken)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left but, at most, at changes of offset."""
        return _left(self.base.cron, tuple(each.cron for each in self.taken)).is_empty

    def later(self, instant: datetime) -> datetime | None:
        """Return an instant after one that is taken, nothing being left before it; None for the end of time."""
        if self.alike:
            return self._reading(self.taken).next_after(instant)
        audible, _, edge = self._around(naive_utc(instant))
        found = self._reading(audible).next_after(instant)
        if edge is None:
            return found
        bound = edge.replace(tzinfo=UTC)
        return bound if found is None else min(found, bound)

    def earlier(self, instant: datetime) -> datetime | None:
        """Return an instant before one that is taken, nothing being left after it."""
        if self.alike:
            return self._reading(self.taken).prev_before(instant)
        audible, edge, _ = self._around(shifted(naive_utc(instant), -MICROSECOND))
        found = self._reading(audible).prev_before(instant)
        if edge is None:
            return found
        bound = edge.replace(tzinfo=UTC)
        return bound if found is None else max(found, bound)

    def _reading(self, taken: tuple[CronRule, ...]) -> Reading:
        fixed, gap, fold = _policy(self.base)
        left = _left(self.base.cron, tuple(each.cron for each in taken))
        return Reading(left, self._offsets, fixed, gap, fold)  # type: ignore[arg-type]

    def _around(self, instant: datetime) -> tuple[tuple[CronRule, ...], datetime | None, datetime | None]:
        """Return those that fire around an instant, and the edges of the time in which this is so.

        A fixed time is silent in one pass of a fold: in the first (fold="second") or in the second (fold="first").
        """
        stretch = self._offsets.stretch(self._offsets.index(instant))
        assert stretch is not None  # every instant is in one
        edges = [stretch.begin, stretch.end]
        silent: Fold | None = None
        if stretch.before > stretch.opens:
            edges.append(stretch.begin + (stretch.before - stretch.opens))
            if instant < edges[-1]:
                silent = "first"
        if stretch.closes > stretch.after:
            edges.append(stretch.end - (stretch.closes - stretch.after))
            if instant >= edges[-1]:
                silent = "second"
        audible = tuple(
            each for each in self.taken if not each.fixed or silent is None or (each.fold or "first") != silent
        )
        behind = max((edge for edge in edges if edge <= instant), default=datetime.min)
        ahead = min((edge for edge in edges if edge > instant), default=datetime.max)
        return audible, None if behind == datetime.min else behind, None if ahead == datetime.max else ahead


def _policy(rule: CronRule) -> tuple[bool, str, str]:
    if not rule.fixed:
        return False, "end", "first"  # neither matters
    return True, rule.gap or "end", rule.fold or "first"

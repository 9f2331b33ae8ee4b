# ruff: noqa: DTZ901 - walls, and instants inside this room, are naive on purpose
"""Walls read in a zone: which instants a row of walls stands for.

*A fixed time that falls into a gap fires once when the gap ends, a fixed time that comes twice fires at its first pass,
and a wildcard schedule follows real time through both.*

Each stretch of constant offset has a range of walls that may fire in it: all it shows, less the pass that `fold` takes
away. Within it wall order is instant order, so the search goes stretch by stretch and never meets the disorder that a
change makes. What was found missing once is not searched again in the next stretch.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from celery_tzbeat.model import MICROSECOND, UTC
from celery_tzbeat.schedules.civil import DISORDER, SECOND, Fold, Gap, Offsets, Stretch, shifted


class Walls(Protocol):
    """An ascending row of walls on whole seconds."""

    def first_from(self, wall: datetime) -> datetime | None:
        """Return the first one >= `wall`."""

    def last_until(self, wall: datetime) -> datetime | None:
        """Return the last one <= `wall`."""


def naive_utc(instant: datetime) -> datetime:
    """Return an aware instant as a naive UTC one; ValueError for a naive one."""
    if instant.tzinfo is None or instant.utcoffset() is None:
        raise ValueError(f"an instant must be aware, {instant!r} has no zone")
    if instant.tzinfo is not UTC:
        try:
            instant = instant.astimezone(UTC)
        except OverflowError:  # an instant beyond year 1 or 9999 in UTC: nothing is there, so the end stands for it
            return datetime.max if instant.year > 1 else datetime.min
    return instant.replace(tzinfo=None)


@dataclass(frozen=True, slots=True)
class Reading:
    """A row of walls, read in one zone as fixed times or as a wildcard."""

    walls: Walls
    offsets: Offsets
    fixed: bool
    gap: Gap
    fold: Fold

    def next_after(self, instant: datetime) -> datetime | None:
        """Return the first occurrence strictly after an instant, None where there is none. Aware, UTC."""
        after = naive_utc(instant)
        found: datetime | None = None
        searched = datetime.max  # no wall is at or after `searched` and before `found`

        def first_from(low: datetime) -> datetime | None:
            nonlocal found, searched
            if low < searched or (found is not None and found < low):
                searched, found = low, self.walls.first_from(low)
            return found

        index = self.offsets.index(after)
        while (stretch := self.offsets.stretch(index)) is not None:
            if stretch.begin > after:
                if self.fixed and self.gap == "end" and stretch.before < stretch.opens:
                    missing = first_from(stretch.before)
                    if missing is not None and missing < stretch.opens:
                        return stretch.begin.replace(tzinfo=UTC)
                low, high = self._range(stretch)
            else:
                low, high = self._range(stretch)
                low = max(low, shifted(after.replace(microsecond=0), stretch.offset + SECOND))
            wall = first_from(low)
            if wall is not None and wall < high:
                return (wall - stretch.offset).replace(tzinfo=UTC)
            if wall is None and stretch.begin > shifted(after, DISORDER):
                return None
            index += 1
        return None

    def prev_before(self, instant: datetime) -> datetime | None:
        """Return the last occurrence strictly before an instant, None where there is none. Aware, UTC."""
        before = naive_utc(instant)
        found: datetime | None = None
        searched = datetime.min  # no wall is after `found` and at or before `searched`

        def last_until(high: datetime) -> datetime | None:
            nonlocal found, searched
            if high > searched or (found is not None and found > high):
                searched, found = high, self.walls.last_until(high)
            return found

        index = self.offsets.index(shifted(before, -MICROSECOND))
        while (stretch := self.offsets.stretch(index)) is not None:
            low, high = self._range(stretch)
            if before < stretch.end:
                high = min(high, shifted(before, stretch.offset))
            wall = last_until(_second_before(high))
            if wall is not None and wall >= low:
                return (wall - stretch.offset).replace(tzinfo=UTC)
            if self.fixed and self.gap == "end" and stretch.before < stretch.opens:
                missing = last_until(stretch.opens - SECOND)
                if missing is not None and missing >= stretch.before:
                    return stretch.begin.replace(tzinfo=UTC)
            if wall is None and stretch.end < shifted(before, -DISORDER):
                return None
            index -= 1
        return None

    def mark(self, nominal: datetime) -> str:
        """Return the wall that an occurrence stands for and its pass: ``2026-11-01T01:30:00 first``.

        The pass is only, first, second, or end (of a gap: then the wall is the latest missing one). Empty for a
        wildcard, and for an instant that is no occurrence.
        """
        if not self.fixed:
            return ""
        instant = naive_utc(nominal)
        stretch = self.offsets.stretch(self.offsets.index(instant))
        assert stretch is not None  # every instant is in one
        wall = instant + stretch.offset
        if wall.microsecond == 0 and self.walls.first_from(wall) == wall:
            if wall < stretch.before:
                return f"{wall.isoformat()} second"
            return f"{wall.isoformat()} {'first' if wall >= stretch.after else 'only'}"
        if instant == stretch.begin and self.gap == "end":
            missing = self.walls.last_until(stretch.opens - SECOND)
            if missing is not None and missing >= stretch.before:
                return f"{missing.isoformat()} end"
        return ""

    def resume(self, nominal: datetime, mark: str) -> datetime:
        """Return the later of `nominal` and the instant that the marked wall has under the zone's present rules."""
        text, _, passed = mark.partition(" ")
        if not self.fixed or not passed:
            return nominal
        wall = datetime.fromisoformat(text)
        passes = self.offsets.passes(wall)
        if passes:
            first = self.fold == "first" or (self.fold == "both" and passed == "first")
            fired: datetime | None = passes[0] if first else passes[-1]
        else:
            fired = self.offsets.gap_end(wall) if self.gap == "end" else None
        return nominal if fired is None else max(nominal, fired.replace(tzinfo=UTC))

    def _range(self, stretch: Stretch) -> tuple[datetime, datetime]:
        """Return low <= wall < high, the walls that may fire in a stretch."""
        low, high = stretch.opens, stretch.closes
        if self.fixed:
            if self.fold == "first":
                low = max(low, stretch.before)
            elif self.fold == "second":
                high = min(high, stretch.after)
        return low, high


def _second_before(wall: datetime) -> datetime:
    """Return the last whole second strictly before a wall."""
    return shifted(wall, -MICROSECOND).replace(microsecond=0)

"""What a schedule says, for people: instants with their walls, and what happens where the clocks change."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import MICROSECOND, UTC, Entry, Schedule, iso
from celery_tzbeat.schedules import civil


@dataclass(frozen=True, slots=True)
class Upcoming:
    """One occurrence to come: its instant, and the wall that clocks in `zone` show then.

    `note` says in words what is unusual: the wall that was wanted does not exist, or comes twice.
    """

    instant: datetime
    wall: datetime
    offset: timedelta
    zone: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "instant": iso(self.instant),
            "wall": self.wall.isoformat(),
            "offset": offset_text(self.offset),
            "zone": self.zone,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Planned:
    """One occurrence to come of one entry."""

    entry: str
    task: str
    upcoming: Upcoming

    @property
    def instant(self) -> datetime:
        return self.upcoming.instant

    def to_dict(self) -> dict[str, Any]:
        return {"entry": self.entry, "task": self.task, **self.upcoming.to_dict()}


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a zone's offset: at `instant` clocks go from `old_wall` to `new_wall`."""

    zone: str
    instant: datetime
    old_wall: datetime
    new_wall: datetime
    old_offset: timedelta
    new_offset: timedelta

    @property
    def text(self) -> str:
        """The change in words."""
        low, high = sorted((self.old_wall, self.new_wall))
        forward = self.new_wall > self.old_wall
        with_date = low.date() != high.date()
        old, new, first, last = (
            _clock(wall, with_date=with_date) for wall in (self.old_wall, self.new_wall, low, high)
        )
        direction, fate = ("forward", "do not exist") if forward else ("back", "come twice")
        return f"clocks go {direction} from {old} to {new}: times from {first} to before {last} {fate}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "zone": self.zone,
            "instant": iso(self.instant),
            "old_wall": self.old_wall.isoformat(),
            "new_wall": self.new_wall.isoformat(),
            "old_offset": offset_text(self.old_offset),
            "new_offset": offset_text(self.new_offset),
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class Crossing:
    """The occurrences around one change of offset; `change` is None in a zone that changes no more."""

    change: Change | None
    before: tuple[Upcoming, ...]
    after: tuple[Upcoming, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "change": self.change.to_dict() if self.change else None,
            "before": [each.to_dict() for each in self.before],
            "after": [each.to_dict() for each in self.after],
        }


def upcoming(schedule: Schedule, *, n: int, after: datetime, zone: ZoneInfo) -> tuple[Upcoming, ...]:
    """Return at most `n` occurrences strictly after an instant, in order."""
    found: list[Upcoming] = []
    instant = schedule.next_after(after)
    while instant is not None and len(found) < n:
        found.append(_shown(schedule, instant, zone))
        instant = schedule.next_after(instant)
    return tuple(found)


def planned(
    entries: Iterable[Entry], *, after: datetime, until: datetime | None, zone: ZoneInfo | None, default: ZoneInfo
) -> Iterator[Planned]:
    """Yield the occurrences of all entries with after < instant <= until, in order; of one instant by the entry's name.

    Walls are shown in `zone`; where that is None in the schedule's own, or else `default`. Endless without `until`.
    """

    def instants(entry: Entry) -> Iterator[tuple[datetime, str, Entry]]:
        instant = entry.schedule.next_after(after)
        while instant is not None and (until is None or instant <= until):
            yield instant, entry.name, entry
            instant = entry.schedule.next_after(instant)

    for instant, name, entry in heapq.merge(*map(instants, entries)):
        own = zone or (civil.zone(entry.schedule.zone) if entry.schedule.zone else default)
        yield Planned(name, entry.task, _shown(entry.schedule, instant, own))


def crossing(schedule: Schedule, *, n: int, after: datetime, zone: ZoneInfo) -> Crossing:
    """Return the occurrences around the first change of offset after an instant, of the schedule's zone or else `zone`."""
    change = next_change(civil.zone(schedule.zone) if schedule.zone else zone, after)
    if change is None:
        return Crossing(None, (), upcoming(schedule, n=n, after=after, zone=zone))
    before: list[Upcoming] = []
    instant = schedule.prev_before(change.instant)
    while instant is not None and len(before) < n:
        before.append(_shown(schedule, instant, zone))
        instant = schedule.prev_before(instant)
    return Crossing(
        change,
        tuple(reversed(before)),
        upcoming(schedule, n=n, after=change.instant - MICROSECOND, zone=zone),
    )


def next_change(zone: ZoneInfo, after: datetime) -> Change | None:
    """Return the first change of a zone's offset strictly after an instant; None where there is none."""
    offsets = civil.offsets(zone.key)
    index = offsets.index(_naive(after))
    old, new = offsets.stretch(index), offsets.stretch(index + 1)
    if old is None or new is None:
        return None
    return Change(
        zone=zone.key,
        instant=new.begin.replace(tzinfo=UTC),
        old_wall=new.before,
        new_wall=new.opens,
        old_offset=old.offset,
        new_offset=new.offset,
    )


def read_instant(text: str, zone: ZoneInfo) -> datetime:
    """Return the instant of an ISO text. A text without offset is a wall in `zone`: its first pass, or the end of its gap.

    Raises ValueError for any other text, and for a wall whose instant is not within the years 1 to 9999.
    """
    moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    try:
        return _instant_of(moment, zone)
    except OverflowError:
        raise ValueError(f"{text!r} in {zone.key} is not within the years 1 to 9999 in UTC") from None


def _instant_of(moment: datetime, zone: ZoneInfo) -> datetime:
    if moment.tzinfo is not None:
        return moment.astimezone(UTC)
    offsets = civil.offsets(zone.key)
    instant = next(iter(offsets.passes(moment)), None) or offsets.gap_end(moment)
    if instant is None:  # a wall that is not shown is in a gap, or beyond the first or last instant
        raise OverflowError
    return instant.replace(tzinfo=UTC)


def offset_text(offset: timedelta) -> str:
    """Return an offset from UTC as ISO writes it: ``-05:00``."""
    sign = "-" if offset < timedelta() else "+"
    hours, rest = divmod(abs(offset), timedelta(hours=1))
    minutes, rest = divmod(rest, timedelta(minutes=1))
    seconds = f":{rest.seconds:02}" if rest else ""
    return f"{sign}{hours:02}:{minutes:02}{seconds}"


def _shown(schedule: Schedule, instant: datetime, zone: ZoneInfo) -> Upcoming:
    wall, offset = _wall(instant, zone)
    own = civil.zone(schedule.zone) if schedule.zone else zone
    note = _note(schedule, instant, own)
    if note and own.key != zone.key:
        note = f"in {own.key}: {note}"
    return Upcoming(instant, wall, offset, zone.key, note)


def _note(schedule: Schedule, instant: datetime, zone: ZoneInfo) -> str:
    wall, _ = _wall(instant, zone)
    for mark in schedule.mark(instant).splitlines():  # one line for each part of a union
        wanted, _, passed = mark.partition(" ")
        if passed == "end":
            missing = datetime.fromisoformat(wanted)
            shown = _clock(missing, with_date=missing.date() != wall.date())
            return f"{shown} does not exist: at the end of the gap"
    passes = civil.offsets(zone.key).passes(wall)
    if len(passes) < 2:
        return ""
    which = "first" if passes[0] == _naive(instant) else "second"
    return f"{_clock(wall)} comes twice: {which} of two"


def _clock(wall: datetime, *, with_date: bool = False) -> str:
    """Return what a clock shows, with seconds only where there are any."""
    timespec = "auto" if wall.second or wall.microsecond else "minutes"
    return wall.isoformat(" ", timespec) if with_date else wall.time().isoformat(timespec)


def _wall(instant: datetime, zone: ZoneInfo) -> tuple[datetime, timedelta]:
    try:
        local = instant.astimezone(zone)
    except OverflowError:
        raise InvalidSchedule(
            f"instant {iso(instant)} has no wall in {zone.key} within the years 1 to 9999",
            field="instant",
            text=iso(instant),
        ) from None
    offset = local.utcoffset()
    assert offset is not None  # a ZoneInfo always knows
    return local.replace(tzinfo=None, fold=0), offset


def _naive(instant: datetime) -> datetime:
    return instant.astimezone(UTC).replace(tzinfo=None)

# ruff: noqa: DTZ001, DTZ901 - walls, and instants inside this room, are naive on purpose
"""What a difference leaves, searched in bounded work: `a - b` where `b` is rules, instants and dates.

Cron less cron is a row of walls (`Left`): a wall is left where its date, hour, minute or second is not b's, so that the
search jumps over whole years that are taken away. It holds between changes of offset. At a change `a` and `b` may be
read differently (one follows real time, the other fires once), so no jump passes the edge of a gap or fold, and what
was found is always held against the rules themselves.

Another rule than cron is held against the cron expression that has all of its instants. What remains is stepped over,
STEPS at most. A difference that leaves nothing, or needs more steps than that, is refused at definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import lru_cache
from math import gcd
from zoneinfo import ZoneInfo

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import MICROSECOND, UTC
from celery_tzbeat.schedules import civil, cron
from celery_tzbeat.schedules.civil import DAY, SECOND, Fold, shifted
from celery_tzbeat.schedules.cron import Cron
from celery_tzbeat.schedules.crontabs import CronRule
from celery_tzbeat.schedules.fields import spread
from celery_tzbeat.schedules.intervals import Every
from celery_tzbeat.schedules.moments import At
from celery_tzbeat.schedules.reading import Reading, naive_utc
from celery_tzbeat.schedules.rule import Rule

#: So many steps a search may take at definition, and so many instants and rows of dates may be taken away one by one.
#: A step is a few questions to rules, some 20 µs. Later on a search may take four times as many.
STEPS = 500

#: From these on every part of a difference is looked at when it is defined.
_SAMPLES = tuple(datetime(2026, month, 1, tzinfo=UTC) for month in (1, 4, 7, 10))

#: Since then the offsets of all zones are whole minutes (Monrovia was the last).
_WHOLE_MINUTES = datetime(1973, 1, 1, tzinfo=UTC)

_LAST = datetime.max.replace(tzinfo=UTC)
_FIRST = datetime.min.replace(tzinfo=UTC)


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


@dataclass(frozen=True)
class Dates:
    """Whole dates (holidays), in the zone of what they are taken from."""

    days: frozenset[date]

    @property
    def text(self) -> str:
        return "@dates " + ",".join(day.isoformat() for day in sorted(self.days))

    @property
    def runs(self) -> int:
        """How many rows of neighbouring dates there are."""
        return sum(day == date.min or day - DAY not in self.days for day in self.days)

    def later(self, instant: datetime, zone: ZoneInfo) -> datetime | None:
        """Return where to look on from an instant on one of the dates; None for one that is on none."""
        return self._edge(instant, zone, 1)

    def earlier(self, instant: datetime, zone: ZoneInfo) -> datetime | None:
        """Return where to look on, backward; what is at that instant is on one of the dates still."""
        return self._edge(instant, zone, -1)

    def _edge(self, instant: datetime, zone: ZoneInfo, direction: int) -> datetime | None:
        # A stretch of constant offset ends the run, too: then the next one is asked anew, and no wall date that comes
        # twice (a fold at midnight) confuses the step.
        offsets = civil.offsets(zone.key)
        moment = naive_utc(instant)
        stretch = offsets.stretch(offsets.index(moment))
        assert stretch is not None  # every instant is in one
        wall = shifted(moment, stretch.offset)
        day = wall.date()
        if day not in self.days:
            return None
        midnight = wall.replace(hour=0, minute=0, second=0, microsecond=0)
        count = 1 if direction > 0 else 0
        while (near := shifted(midnight, count * DAY)).date() in self.days and datetime.min < near < datetime.max:
            count += direction
        if direction < 0:
            near = shifted(midnight, (count + 1) * DAY)
        edge = shifted(near, -stretch.offset)
        return (min(edge, stretch.end) if direction > 0 else max(edge, stretch.begin)).replace(tzinfo=UTC)


class Remainder:
    """One rule that is no union and no difference, less rules and dates."""

    def __init__(
        self, text: str, base: Rule, taken: tuple[Rule, ...], dates: tuple[tuple[Dates, ZoneInfo], ...]
    ) -> None:
        self.text, self.base, self.taken, self.dates = text, base, taken, dates
        by_zone: dict[str, list[CronRule]] = {}
        for each in taken:
            if isinstance(each, CronRule) and each.zone is not None:
                by_zone.setdefault(each.zone.key, []).append(each)
        self._limit = 4 * STEPS
        self._zones = {key: OneZone(_cover(base, crons[0]), tuple(crons)) for key, crons in by_zone.items()}

    @property
    def is_empty(self) -> bool:
        """Whether it is known that nothing is left, ever."""
        return self.base in self.taken or any(zone.is_empty and zone.alike for zone in self._zones.values())

    def examine(self) -> None:
        """Raise `InvalidSchedule` where nothing is left, or what is left cannot be found in STEPS steps."""
        if any(zone.is_empty for zone in self._zones.values()):
            raise InvalidSchedule(
                f"difference {self.text!r}: {self.base.text!r} has nothing left, but perhaps at changes of offset, where "
                "gap, fold and kind tell them apart: it is not searched",
                field="difference",
                text=self.text,
            )
        instants = sum(len(each.instants) for each in self.taken if isinstance(each, At))
        if instants > STEPS or sum(dates.runs for dates, _ in self.dates) > STEPS:
            raise InvalidSchedule(
                f"difference {self.text!r} takes away more than {STEPS:,} instants or rows of dates: say them as a crontab",
                field="difference",
                text=self.text,
            )
        if all(isinstance(each, (CronRule, At)) for each in self.taken) and all(
            zone.base is self.base for zone in self._zones.values()
        ):
            return  # each step is a jump: over an instant, over dates, or to the next wall left
        self._limit = STEPS
        for sample in _SAMPLES:
            self.next_after(sample)
            for each in self.taken:  # a row that is taken away begins, and ends, where its rule does
                found, past = each.next_after(sample), each.prev_before(sample)
                if found is not None:
                    self.next_after(max(found, _FIRST + MICROSECOND) - MICROSECOND)
                if past is not None:
                    self.prev_before(min(past, _LAST - MICROSECOND) + MICROSECOND)
        self._limit = 4 * STEPS

    def next_after(self, instant: datetime) -> datetime | None:
        found = self.base.next_after(instant)
        ahead: dict[int, datetime] = {}  # what each rule takes next
        for _ in range(self._limit):
            if found is None:
                return None
            onward = self._later(found, ahead)
            if onward is None:
                return found
            found = self.base.next_after(max(found, onward - MICROSECOND))
        raise self._too_long()

    def prev_before(self, instant: datetime) -> datetime | None:
        found = self.base.prev_before(instant)
        ahead: dict[int, datetime] = {}
        for _ in range(self._limit):
            if found is None:
                return None
            onward = self._earlier(found, ahead)
            if onward is None:
                return found
            found = self.base.prev_before(min(found, onward))
        raise self._too_long()

    def _later(self, found: datetime, ahead: dict[int, datetime]) -> datetime | None:
        """Return an instant before which nothing is left after `found`, which is taken; None for one that is left."""
        for dates, zone in self.dates:
            edge = dates.later(found, zone)
            if edge is not None:
                return edge
        for place, each in enumerate(self.taken):
            if place not in ahead or ahead[place] < found:
                ahead[place] = each.next_after(max(found, _FIRST + MICROSECOND) - MICROSECOND) or _LAST
            if ahead[place] == found:
                jumps = self._jumps(each, found)
                return found if jumps is None else (jumps.later(found) or _LAST)
        return None

    def _earlier(self, found: datetime, ahead: dict[int, datetime]) -> datetime | None:
        """Return an instant after which nothing is left before `found`, which is taken; None for one that is left."""
        for dates, zone in self.dates:
            edge = dates.earlier(found, zone)
            if edge is not None:
                return edge
        for place, each in enumerate(self.taken):
            if place not in ahead or ahead[place] > found:
                ahead[place] = each.prev_before(min(found, _LAST - MICROSECOND) + MICROSECOND) or _FIRST
            if ahead[place] == found:
                jumps = self._jumps(each, found)
                if jumps is None:
                    return found
                edge = jumps.earlier(found)
                return _FIRST if edge is None else edge + MICROSECOND
        return None

    def _jumps(self, each: Rule, found: datetime) -> OneZone | None:
        if not isinstance(each, CronRule) or each.zone is None:
            return None
        zone = self._zones[each.zone.key]
        return zone if zone.base is self.base or found >= _WHOLE_MINUTES else None

    def _too_long(self) -> InvalidSchedule:
        return InvalidSchedule(
            f"difference {self.text!r} takes away more than {self._limit:,} occurrences in a row, which is not searched: "
            "take away dates, or a crontab from a crontab in the same zone",
            field="difference",
            text=self.text,
        )


def _cover(base: Rule, taken: CronRule) -> CronRule:
    """Return the rule to hold against crons in the zone of `taken`: `base`, or a cron that has all of its instants."""
    assert taken.zone is not None
    if isinstance(base, CronRule) and base.zone is not None and base.zone.key == taken.zone.key:
        return base
    seconds = "*"
    if isinstance(base, Every):
        phase = base.phase if isinstance(base.phase, timedelta) else timedelta()
        if base.run_every % SECOND == phase % SECOND == timedelta():
            step = gcd(base.run_every // SECOND, 60)
            seconds = ",".join(map(str, range(phase // SECOND % step, 60, step)))
    elif isinstance(base, CronRule):
        seconds = ",".join(map(str, spread(base.cron.second)))
    fields_of = cron.read(f"{seconds} * * * * *")
    return CronRule(fields_of, zone=taken.zone, gap=None, fold=None, kind="wildcard", days="or")


def examined(
    text: str, base: Rule, taken: Iterable[Rule], dates: Iterable[tuple[Dates, ZoneInfo]]
) -> Remainder | At | None:
    """Return what is left of a rule that is no union and no difference; None where it is known to be nothing, ever.

    `InvalidSchedule` where what is left cannot be found in bounded work.
    """
    found = Remainder(text, base, tuple(taken), tuple(dates))
    if not isinstance(base, At):
        if found.is_empty:
            return None
        found.examine()
        return found
    # Each of a finite row is looked at, once.
    return At(tuple(instant for instant in base.instants if found._later(instant, {}) is None))

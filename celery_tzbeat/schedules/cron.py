# ruff: noqa: DTZ001 - walls, and instants inside this room, are naive on purpose
"""A cron expression: from text to fields, from fields to walls, forward and backward.

It knows nothing of zones. The search jumps from field to field and is bounded: no date that exists at all is more than
40 years from the last one, and one that never comes is refused at definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.schedules import fields
from celery_tzbeat.schedules.fields import ALIASES, MonthDays, WeekDays, spread

#: Which of the two readings a schedule has, or that its spelling decides.
Kind = Literal["auto", "fixed", "wildcard"]
#: How the two day fields are joined: Debian's rule (OR where neither begins with ``*``), or always AND as Celery does.
Days = Literal["or", "and"]

_LENGTHS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
BOUND = 100  # years; see above

#: The days of a month on Monday's column, by the weekday of the 1st (Monday is 0): bit n is day n.
_COLUMN = [sum(1 << day for day in range(1 + (-first) % 7, 32, 7)) for first in range(7)]


@dataclass(frozen=True, slots=True)
class Cron:
    """The fields of one expression, as sets: bit n of an int is the number n."""

    text: str  # 5 or 6 fields, one blank between them, in one spelling
    second: int
    minute: int
    hour: int
    month: int
    month_days: MonthDays
    week_days: WeekDays
    joined_by_or: bool
    fixed: bool  # by spelling: neither the minute nor the hour field begins with *
    columns: tuple[int, ...]  # the days that the day of week field names, by the weekday of the 1st

    @property
    def has_seconds(self) -> bool:
        """Whether the text has six fields."""
        return self.text.count(" ") == 5

    @property
    def simple(self) -> bool:
        """Whether Celery's five fields say all of it."""
        return not self.has_seconds and self.month_days.plain and self.week_days.plain

    @property
    def day_fields_restricted(self) -> bool:
        """Whether neither day field begins with ``*``: only then it matters how they are joined."""
        _, _, _, month_day, _, week_day = self.parts
        return month_day[0] != "*" and week_day[0] != "*"

    @property
    def parts(self) -> tuple[str, str, str, str, str, str]:
        """The fields' texts: second, minute, hour, day of month, month, day of week."""
        found = self.text.split(" ")
        second = found.pop(0) if len(found) == 6 else "0"
        return (second, found[0], found[1], found[2], found[3], found[4])

    def days(self, year: int, month: int) -> int:
        """Return the set of the days of a month that match."""
        if not self.month >> month & 1:
            return 0
        length = _LENGTHS[month]
        if month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0):
            length = 29
        first = date(year, month, 1).weekday()
        month_days, week_days = self.month_days, self.week_days
        by_month = month_days.days
        if not month_days.plain:
            by_month |= _special(month_days, first, length)
        by_week = self.columns[first]
        for weekday in week_days.last:
            by_week |= 1 << _last(weekday, first, length)
        both = by_month | by_week if self.joined_by_or else by_month & by_week
        return both & (2 << length) - 2

    def first_from(self, wall: datetime) -> datetime | None:
        """Return the first matching wall >= `wall` (which has no fraction of a second), None within 100 years."""
        year, month, day = wall.year, wall.month, wall.day
        rest = self.days(year, month) >> day
        if rest & 1:
            clock = self._clock_from(wall.hour, wall.minute, wall.second)
            if clock is not None:
                return datetime(year, month, day, *clock)
        rest >>= 1
        day += 1
        limit = min(year + BOUND, 9999)
        while not rest:
            ahead = self.month >> month + 1
            if ahead:
                month += _lowest(ahead) + 1
            else:
                month, year = _lowest(self.month), year + 1
                if year > limit:
                    return None
            rest, day = self.days(year, month), 0
        return datetime(year, month, day + _lowest(rest), *self._first_clock())

    def last_until(self, wall: datetime) -> datetime | None:
        """Return the last matching wall <= `wall` (which has no fraction of a second), None within 100 years."""
        year, month, day = wall.year, wall.month, wall.day
        days = self.days(year, month)
        if days >> day & 1:
            clock = self._clock_until(wall.hour, wall.minute, wall.second)
            if clock is not None:
                return datetime(year, month, day, *clock)
        rest = days & (1 << day) - 1
        limit = max(year - BOUND, 1)
        while not rest:
            behind = self.month & (1 << month) - 1
            if behind:
                month = behind.bit_length() - 1
            else:
                month, year = self.month.bit_length() - 1, year - 1
                if year < limit:
                    return None
            rest = self.days(year, month)
        return datetime(year, month, rest.bit_length() - 1, *self._last_clock())

    def shortest_gap(self) -> timedelta:
        """Return a time that no two matching walls are nearer than. Looks at the fields only, not at a calendar."""
        hour0, minute0, second0 = self._first_clock()
        hour1, minute1, second1 = self._last_clock()
        first, last = (hour0 * 60 + minute0) * 60 + second0, (hour1 * 60 + minute1) * 60 + second1
        gaps = [self._day_gap() * 86400 - (last - first)]
        gaps += [step * 3600 - (minute1 - minute0) * 60 - (second1 - second0) for step in _steps(self.hour)]
        gaps += [step * 60 - (second1 - second0) for step in _steps(self.minute)]
        gaps += _steps(self.second)
        return timedelta(seconds=min(gaps))

    def _day_gap(self) -> int:
        weekdays, days = spread(self.week_days.days), spread(self.month_days.days)
        if not self.joined_by_or and self.week_days.plain and len(weekdays) < 7:
            return min([*_steps(self.week_days.days), weekdays[0] + 7 - weekdays[-1]])
        if not self.joined_by_or and self.month_days.plain and len(days) < 31:
            around = days[0] + 28 - days[-1]  # over the end of February; less than a day for 1 and 31
            return max(1, min([*_steps(self.month_days.days), around]))
        return 1

    def _first_clock(self) -> tuple[int, int, int]:
        return _lowest(self.hour), _lowest(self.minute), _lowest(self.second)

    def _last_clock(self) -> tuple[int, int, int]:
        return self.hour.bit_length() - 1, self.minute.bit_length() - 1, self.second.bit_length() - 1

    def _clock_from(self, hour: int, minute: int, second: int) -> tuple[int, int, int] | None:
        if self.hour >> hour & 1:
            if self.minute >> minute & 1:
                ahead = self.second >> second
                if ahead:
                    return hour, minute, second + _lowest(ahead)
            ahead = self.minute >> minute + 1
            if ahead:
                return hour, minute + 1 + _lowest(ahead), _lowest(self.second)
        ahead = self.hour >> hour + 1
        if ahead:
            return hour + 1 + _lowest(ahead), _lowest(self.minute), _lowest(self.second)
        return None

    def _clock_until(self, hour: int, minute: int, second: int) -> tuple[int, int, int] | None:
        if self.hour >> hour & 1:
            if self.minute >> minute & 1:
                behind = self.second & (2 << second) - 1
                if behind:
                    return hour, minute, behind.bit_length() - 1
            behind = self.minute & (1 << minute) - 1
            if behind:
                return hour, behind.bit_length() - 1, self.second.bit_length() - 1
        behind = self.hour & (1 << hour) - 1
        if behind:
            return behind.bit_length() - 1, self.minute.bit_length() - 1, self.second.bit_length() - 1
        return None


@lru_cache(maxsize=4096)
def read(text: str, *, days: Days = "or") -> Cron:
    """Return the fields of a text of 5 fields, 6 with leading seconds, or an alias such as ``@daily``.

    `InvalidSchedule` names the field, the text and the remedy; also for a date that never comes (31 February).
    """
    stripped = text.strip()
    if stripped.startswith("@"):
        if stripped.lower() not in ALIASES:
            known = ", ".join(ALIASES)
            raise InvalidSchedule(f"alias {stripped!r} is unknown: there are {known}", field="text", text=stripped)
        stripped = ALIASES[stripped.lower()]
    parts = stripped.split()
    if len(parts) == 5:
        second, (minute, hour, month_day, month, week_day) = "0", parts
    elif len(parts) == 6:
        second, minute, hour, month_day, month, week_day = parts
    else:
        fields_found = "1 field" if len(parts) == 1 else f"{len(parts)} fields"
        raise InvalidSchedule(
            f"text {text!r} has {fields_found}: 5 are wanted (minute, hour, day of month, month, day of week), "
            "or 6 with seconds in front" + (", and no years" if len(parts) == 7 else ""),
            field="text",
            text=text,
        )
    month_days, week_days = fields.read_month_days(month_day), fields.read_week_days(week_day)
    joined = " ".join(parts)
    cron = Cron(
        joined.lower() if month_days.plain and week_days.plain else joined.upper(),
        fields.read_numbers(fields.SECOND, second),
        fields.read_numbers(fields.MINUTE, minute),
        fields.read_numbers(fields.HOUR, hour),
        fields.read_numbers(fields.MONTH, month),
        month_days,
        week_days,
        days == "or" and month_day[0] != "*" and week_day[0] != "*",
        minute[0] != "*" and hour[0] != "*",
        _columns(week_days),
    )
    # All fourteen kinds of year are among any 28 in a row without a century; the first month mostly settles it.
    if not any(cron.days(year, number) for year in range(2000, 2028) for number in spread(cron.month)):
        raise InvalidSchedule(
            f"day of month {month_day!r} never comes in month {month!r} on day of week {week_day!r}",
            field="day of month",
            text=month_day,
        )
    return cron


@lru_cache(maxsize=4096)
def _columns(week_days: WeekDays) -> tuple[int, ...]:
    columns = []
    for first in range(7):
        bits = 0
        for weekday in spread(week_days.days):
            bits |= _column(weekday, first)
        for weekday, ordinal in week_days.nth:
            seven = 0b1111111 << (ordinal - 1) * 7 + 1
            bits |= _column(weekday, first) & seven
        columns.append(bits)
    return tuple(columns)


def _column(weekday: int, first: int) -> int:
    """Return the days of a month that are a weekday (Sunday is 0), by the weekday of the 1st (Monday is 0)."""
    return _COLUMN[(first - weekday + 1) % 7]


def _last(weekday: int, first: int, length: int) -> int:
    return (_column(weekday, first) & (2 << length) - 2).bit_length() - 1


def _special(month_days: MonthDays, first: int, length: int) -> int:
    """Return the days that L, LW and nW name in a month."""
    bits = 1 << length if month_days.last else 0
    if month_days.last_weekday:
        bits |= 1 << _nearest_weekday(length, first, length)
    for wanted in month_days.nearest:
        if wanted <= length:  # 31W in a month of 30 days: no such day
            bits |= 1 << _nearest_weekday(wanted, first, length)
    return bits


def _nearest_weekday(day: int, first: int, length: int) -> int:
    """Return the weekday (Monday to Friday) nearest to a day, without leaving the month."""
    weekday = (first + day - 1) % 7
    if weekday == 5:
        return day - 1 if day > 1 else day + 2
    if weekday == 6:
        return day + 1 if day < length else day - 2
    return day


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _steps(bits: int) -> list[int]:
    values = spread(bits)
    return [later - earlier for earlier, later in pairwise(values)]

# ruff: noqa: DTZ901 - walls, and instants inside this room, are naive on purpose
"""What a difference leaves, searched in bounded work: `a - b` where `b` is rules, instants and dates.

Cron less cron is a row of walls that jumps over whole years (`cron_remainder`); at a change of offset `a` and `b` may be read
differently (one follows real time, the other fires once), so what was found is always held against the rules themselves.

Another rule than cron is held against the cron expression that has all of its instants. What remains is stepped over,
STEPS at most. A difference that leaves nothing, or needs more steps than that, is refused at definition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from math import gcd
from zoneinfo import ZoneInfo

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import MICROSECOND, UTC
from celery_tzbeat.schedules import civil, cron
from celery_tzbeat.schedules.civil import DAY, SECOND, shifted
from celery_tzbeat.schedules.cron_remainder import OneZone
from celery_tzbeat.schedules.crontabs import CronRule
from celery_tzbeat.schedules.fields import spread
from celery_tzbeat.schedules.intervals import Every
from celery_tzbeat.schedules.moments import At
from celery_tzbeat.schedules.reading import naive_utc
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

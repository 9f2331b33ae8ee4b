# ruff: noqa: DTZ001 - walls, and instants inside this room, are naive on purpose
"""`rrule`: RFC 5545 recurrence rules (python-dateutil) as walls, read as fixed times in a zone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from dateutil import rrule as dateutil

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import UTC
from celery_tzbeat.schedules import civil
from celery_tzbeat.schedules.civil import SECOND, Fold, Gap, shifted
from celery_tzbeat.schedules.reading import Reading
from celery_tzbeat.schedules.rule import Rule, lacks_zone, read_policy, read_zone, suffix

if TYPE_CHECKING:
    from celery import Celery

#: Longer than this a rule is not searched for its next wall, in years.
_HORIZON = 120

#: The Gregorian calendar repeats after 400 years, weekdays and all.
_CYCLE_YEARS, _CYCLE = 400, timedelta(days=146_097)

#: More walls than this a COUNT may not have.
_COUNT = 100_000

#: More periods of its FREQ than this two walls may not lie apart (a year of hours), and so many days are looked at.
_PERIODS, _SAMPLED = 9_000, 12

_UNITS = {
    "WEEKLY": timedelta(days=7),
    "DAILY": timedelta(days=1),
    "HOURLY": timedelta(hours=1),
    "MINUTELY": timedelta(minutes=1),
    "SECONDLY": timedelta(seconds=1),
}
_DATE_PARTS = ("BYMONTH", "BYMONTHDAY", "BYYEARDAY", "BYWEEKNO", "BYDAY")
_CLOCK_PARTS = ("BYHOUR", "BYMINUTE", "BYSECOND")
_PARTS = {"FREQ", "INTERVAL", "COUNT", "UNTIL", "WKST", "BYSETPOS", *_DATE_PARTS, *_CLOCK_PARTS}

_START = re.compile(r"DTSTART(?:;TZID=([^:;]+)|;VALUE=DATE-TIME)?:([0-9]{8}T[0-9]{6})(Z?)", re.IGNORECASE)
_STAMP = "%Y%m%dT%H%M%S"


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The walls of one RRULE from its start on.

    dateutil walks from the start of a rule and, for one that never comes again, to the year 9999. So it is given a
    start a little before the wall that is asked for, of the same phase, and moved to the last repetitions of the
    400-year calendar: what never comes is known after a few hundred years at most.
    """

    rule: Any  # dateutil's; of the first wall on
    start: datetime
    freq: str
    interval: int
    counted: tuple[datetime, ...] | None  # all walls, where there is a COUNT

    def first_from(self, wall: datetime) -> datetime | None:
        """Return the first wall >= `wall`, None where there is none within 120 years."""
        wall = max(wall, self.start)
        if self.counted is not None:
            return next((each for each in self.counted if each >= wall), None)
        start = self._start_before(wall, 1)
        shift = _frame(start)
        found = self._moved(start, shift).after(wall + shift, inc=True)
        return None if found is None else found - shift

    def last_until(self, wall: datetime) -> datetime | None:
        """Return the last wall <= `wall`."""
        if wall < self.start:
            return None
        if self.counted is not None:
            return next((each for each in reversed(self.counted) if each <= wall), None)
        back = 1
        while True:
            start = self._start_before(wall, back)
            shift = _frame(start)
            found = self._moved(start, shift).before(wall + shift, inc=True)
            if found is not None and found - shift >= self.start:
                return found - shift  # type: ignore[no-any-return]
            if start <= self.start or wall.year - start.year > _HORIZON:
                return None
            back *= 4

    def _start_before(self, wall: datetime, back: int) -> datetime:
        """Return a start of the same phase, at least `back` intervals before a wall where the rule began by then."""
        if self.freq in _UNITS:
            step = self.interval * _UNITS[self.freq]
            periods = max(0, (wall - self.start) // step - back)
            return self.start + periods * step
        months = self.interval * (12 if self.freq == "YEARLY" else 1)
        passed = (wall.year - self.start.year) * 12 + wall.month - self.start.month
        periods = passed // months - back
        if periods <= 0:
            return self.start
        month = self.start.year * 12 + (self.start.month - 1 if self.freq == "MONTHLY" else 0) + periods * months
        return self.start.replace(year=month // 12, month=month % 12 + 1, day=1)

    def _moved(self, start: datetime, shift: timedelta) -> Any:
        until = self.rule._until
        return self.rule.replace(dtstart=start + shift, until=None if until is None else until + shift)


def _frame(start: datetime) -> timedelta:
    """Return how far to move a rule: whole repetitions of the calendar, the horizon still before the year 9999."""
    return max(0, (9999 - _HORIZON - start.year) // _CYCLE_YEARS) * _CYCLE


class RecurrenceRule(Rule):
    """An RRULE in a zone. Its walls are fixed times: `gap` and `fold` hold."""

    form = "rrule"

    def __init__(
        self,
        recurrence: Recurrence,
        source: str,
        *,
        until: datetime | None,
        zone: ZoneInfo | None,
        gap: Gap | None,
        fold: Fold | None,
        nowfun: Callable[[], datetime] | None = None,
        app: Celery | None = None,
    ) -> None:
        super().__init__(nowfun=nowfun, app=app)
        self.recurrence, self.source, self.until = recurrence, source, until
        self._zone = zone
        self.gap: Gap | None = gap
        self.fold: Fold | None = fold
        self._reading = (
            Reading(recurrence, civil.offsets(zone.key), True, gap or "end", fold or "first")
            if zone is not None
            else None
        )

    @property
    def zone(self) -> ZoneInfo | None:
        return self._zone

    @property
    def text(self) -> str:
        return f"@rrule {self.source}" + suffix(self._zone, gap=self.gap, fold=self.fold)

    @property
    def shortest_gap(self) -> timedelta:
        for part, size in (
            ("BYSECOND", timedelta(seconds=1)),
            ("BYMINUTE", timedelta(minutes=1)),
            ("BYHOUR", timedelta(hours=1)),
        ):
            # One value of a part, and the part above it sets the distance.
            if re.search(rf"{part}=[0-9]+,", self.source):
                return size
        unit = _UNITS.get(self.recurrence.freq)
        if unit is None or "BYDAY=" in self.source:
            return timedelta(days=1) if unit is None or unit >= timedelta(days=1) else unit
        return unit * self.recurrence.interval

    def in_zone(self, zone: tzinfo | str) -> RecurrenceRule:
        return self if self._zone is not None else self._with(zone=civil.zone(zone))

    def with_defaults(self, *, gap: Gap, fold: Fold) -> RecurrenceRule:
        filled_gap = gap if self.gap is None and gap != "end" else self.gap
        filled_fold = fold if self.fold is None and fold != "first" else self.fold
        return self._with(gap=filled_gap, fold=filled_fold)

    def _with(self, **changed: Any) -> RecurrenceRule:
        stated = {"until": self.until, "zone": self._zone, "gap": self.gap, "fold": self.fold}
        return RecurrenceRule(self.recurrence, self.source, **{**stated, **changed}, nowfun=self.nowfun, app=self._app)

    def next_after(self, instant: datetime) -> datetime | None:
        if self._reading is None:
            raise lacks_zone(self)
        found = self._reading.next_after(instant)
        return None if found is not None and self.until is not None and found > self.until else found

    def prev_before(self, instant: datetime) -> datetime | None:
        if self._reading is None:
            raise lacks_zone(self)
        if self.until is not None and instant > self.until:
            instant = self.until + SECOND
        return self._reading.prev_before(instant)

    def mark(self, nominal: datetime) -> str:
        if self._reading is None:
            raise lacks_zone(self)
        return self._reading.mark(nominal)

    def resume(self, nominal: datetime, mark: str) -> datetime:
        if self._reading is None:
            raise lacks_zone(self)
        return self._reading.resume(nominal, mark)

    def describe(self) -> str:
        return f"by {self.source}" + (f", {self._zone.key}" if self._zone is not None else "")

    def _definition(self) -> tuple[object, ...]:
        key = self._zone.key if self._zone is not None else None
        return (self.source, key, self.gap or "end", self.fold or "first")


def rrule(
    given: str | dateutil.rrule,
    *,
    tz: str | tzinfo | None = None,
    gap: Gap | None = None,
    fold: Fold | None = None,
    nowfun: Callable[[], datetime] | None = None,
    app: Celery | None = None,
) -> RecurrenceRule:
    """Return the rule of one RRULE: text (``DTSTART:20260101T090000`` and ``RRULE:FREQ=…`` lines) or dateutil's object.

    DTSTART is a wall in `tz`, in its own TZID, or (with Z) an instant; without any the rule starts on
    1970-01-01T00:00:00, and COUNT, or an INTERVAL above 1, is refused. UNTIL with Z is an instant, else a wall. Several
    rules and exceptions are `|` and `-`, not RDATE and EXDATE. `InvalidSchedule` for anything else, and for a rule
    that never comes.
    """
    read_policy(gap, fold)
    text = given if isinstance(given, str) else _text_of(given)
    zone = read_zone(tz)
    start: datetime | None = None
    parts: dict[str, str] | None = None
    for line in text.upper().replace("TZID=", "tzid=").split():
        if line.startswith("DTSTART"):
            start, zone = _read_start(_original(text, line), zone)
        elif parts is None and line.startswith(("RRULE:", "FREQ=")):
            parts = _read_parts(line.removeprefix("RRULE:"))
        else:
            raise _bad(line, "is not understood: one DTSTART and one RRULE; join rules with | and -")
    if parts is None:
        raise _bad(text, "has no RRULE")
    if start is None and ("COUNT" in parts or parts.get("INTERVAL", "1") != "1"):
        raise _bad(text, "counts from a start, but has no DTSTART")
    begin = start or datetime(1970, 1, 1)
    source = ";".join(f"{name}={value}" for name, value in parts.items())
    until = None
    if parts.get("UNTIL", "").endswith("Z"):
        until = _stamp(parts.pop("UNTIL")[:-1]).replace(tzinfo=UTC)
    return RecurrenceRule(
        _recurrence(parts, begin),
        f"DTSTART:{begin.strftime(_STAMP)} RRULE:{source}",
        until=until,
        zone=zone,
        gap=gap,
        fold=fold,
        nowfun=nowfun,
        app=app,
    )


def _original(text: str, line: str) -> str:
    """Return a line as it was written: zone names have lower case letters."""
    return next(each for each in text.split() if each.upper() == line.upper())


def _text_of(given: object) -> str:
    if not isinstance(given, dateutil.rrule):
        raise InvalidSchedule(
            f"rrule {given!r} is neither text nor a dateutil rrule; join several with | and -", text=str(given)
        )
    source: Any = given  # its stubs hide what it keeps
    start, until = source._dtstart, source._until
    if start.tzinfo is None:
        return str(given)
    zone = civil.zone(start.tzinfo)
    wall_until = None if until is None else until.astimezone(zone).replace(tzinfo=None)
    text = str(given.replace(dtstart=start.replace(tzinfo=None), until=wall_until))
    return text.replace("DTSTART:", f"DTSTART;TZID={zone.key}:")


def _read_start(line: str, zone: ZoneInfo | None) -> tuple[datetime, ZoneInfo | None]:
    read = _START.fullmatch(line)
    if read is None:
        raise _bad(line, "is not a DTSTART such as DTSTART:20260101T090000")
    named, digits, utc = read.groups()
    start = _stamp(digits)
    if utc:
        zone = zone or civil.zone("UTC")
        try:
            return start.replace(tzinfo=UTC).astimezone(zone).replace(tzinfo=None), zone
        except OverflowError:
            raise _bad(line, f"is not within the years 1 to 9999 in {zone.key}") from None
    if named:
        own = civil.zone(named)
        if zone is not None and zone is not own:
            raise InvalidSchedule(f"zone {zone.key!r} is given, but DTSTART says {named!r}", field="zone", text=named)
        zone = own
    return start, zone


def _stamp(digits: str) -> datetime:
    try:
        return datetime.strptime(digits, _STAMP)  # noqa: DTZ007 - a wall, or made aware by the caller
    except ValueError:
        raise _bad(digits, "is not a date and time such as 20260101T090000") from None


def _read_parts(text: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for pair in text.split(";"):
        name, _, value = pair.partition("=")
        if name not in _PARTS or not value or name in parts:
            raise _bad(pair, "is not a part of an RRULE, or is there twice")
        parts[name] = value
    if "COUNT" in parts and "UNTIL" in parts:
        raise _bad(text, "has both COUNT and UNTIL")
    return parts


def _recurrence(parts: dict[str, str], start: datetime) -> Recurrence:
    freq = parts.get("FREQ", "")
    whole = dict(parts)
    # What dateutil takes from its start is stated, as the start is moved about.
    if not whole.keys() & {"BYWEEKNO", "BYYEARDAY", "BYMONTHDAY", "BYDAY"}:
        if freq == "YEARLY":
            whole.setdefault("BYMONTH", str(start.month))
        if freq in ("YEARLY", "MONTHLY"):
            whole["BYMONTHDAY"] = str(start.day)
        elif freq == "WEEKLY":
            whole["BYDAY"] = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")[start.weekday()]
    _refuse_rare(whole)
    rule = _dateutil(whole, start)
    interval = int(whole.get("INTERVAL", "1"))
    recurrence = Recurrence(rule, start, freq, interval, None)
    if freq in ("HOURLY", "MINUTELY", "SECONDLY"):
        # dateutil would walk hours to see that a date never comes; days tell sooner.
        dates = {name: value for name, value in whole.items() if name in _DATE_PARTS}
        if dates:
            daily = Recurrence(_dateutil({"FREQ": "DAILY", **dates}, start), start, "DAILY", 1, None)
            _must_come(daily.first_from(start), parts)
    if "COUNT" in whole:
        if int(whole["COUNT"]) > _COUNT:
            raise _bad(f"COUNT={whole['COUNT']}", f"is above {_COUNT:,}: use UNTIL")
        shift = _frame(start)
        walls = tuple(wall - shift for wall in recurrence._moved(start, shift))
        recurrence = Recurrence(rule, start, freq, interval, walls)
    _must_come(recurrence.first_from(start), parts)
    if recurrence.counted is None:
        _refuse_sparse(recurrence, parts)
    return recurrence


def _refuse_rare(parts: dict[str, str]) -> None:
    """Refuse what dateutil would walk second by second, or minute by minute, over days: seconds of work for one answer."""
    freq = parts.get("FREQ", "")
    slow = {"SECONDLY": (*_DATE_PARTS, "BYHOUR", "BYSETPOS"), "MINUTELY": (*_DATE_PARTS, "BYSETPOS")}.get(freq, ())
    for name in parts:
        if name in slow:
            raise _bad(
                f"FREQ={freq};{name}={parts[name]}",
                f"would be searched {freq[:-2].lower()} by {freq[:-2].lower()} over all that {name} leaves out: use a "
                "crontab (with seconds in front), or FREQ=DAILY with BYHOUR, BYMINUTE and BYSECOND",
            )


def _refuse_sparse(recurrence: Recurrence, parts: dict[str, str]) -> None:
    """Refuse a rule whose walls are more periods of its FREQ apart than a search may walk."""
    unit = _UNITS.get(recurrence.freq)
    if unit is None:
        return  # by month or year: few
    wall = max(recurrence.start, datetime(2000, 1, 1))
    for _ in range(_SAMPLED):
        later = recurrence.first_from(shifted(wall, SECOND))
        if later is None:
            return
        if (later - wall) // (unit * recurrence.interval) > _PERIODS:
            raise _bad(
                ";".join(f"{name}={value}" for name, value in parts.items()),
                f"comes too rarely to be searched {recurrence.freq}: use FREQ=YEARLY or MONTHLY with the same parts, or a "
                "crontab",
            )
        wall = later.replace(hour=23, minute=59, second=59)


def _dateutil(parts: dict[str, str], start: datetime) -> Any:
    text = ";".join(f"{name}={value}" for name, value in parts.items())
    try:
        rule: Any = dateutil.rrulestr(f"RRULE:{text}", dtstart=start)
    except (ValueError, KeyError, TypeError) as error:
        raise _bad(text, f"is refused by dateutil: {error}") from error
    if rule._interval < 1:
        raise _bad(text, "has an INTERVAL below 1")
    return rule


def _must_come(wall: datetime | None, parts: dict[str, str]) -> None:
    if wall is None:
        raise _bad(";".join(f"{name}={value}" for name, value in parts.items()), "never comes")


def _bad(text: str, reason: str) -> InvalidSchedule:
    return InvalidSchedule(f"rrule {text!r} {reason}", field="rrule", text=text)

"""Cron's fields, from text to sets of numbers. Every error names the field, the bad text and the remedy.

A set is an int: bit n says whether n is in it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple, NoReturn

from celery_tzbeat.errors import InvalidSchedule

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
#: Celery takes these, the text form does not.
LONG_NAMES = (
    *("JANUARY", "FEBRUARY", "MARCH", "APRIL", "JUNE", "JULY", "AUGUST"),
    *("SEPTEMBER", "OCTOBER", "NOVEMBER", "DECEMBER"),
    *("SUNDAY", "MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY", "SATURDAY"),
)

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class Field(NamedTuple):
    """One field of cron: its name, its range and the names of its values."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    first: int = 0  # the value of the first name


SECOND = Field("second", 0, 59)
MINUTE = Field("minute", 0, 59)
HOUR = Field("hour", 0, 23)
DAY_OF_MONTH = Field("day of month", 1, 31)
MONTH = Field("month", 1, 12, MONTHS, 1)
DAY_OF_WEEK = Field("day of week", 0, 6, WEEKDAYS)


class MonthDays(NamedTuple):
    """The day of month field: plain days, the last day (L), the last weekday (LW), the weekday nearest to n (nW)."""

    days: int
    last: bool = False
    last_weekday: bool = False
    nearest: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether Celery's own field could say it."""
        return not (self.last or self.last_weekday or self.nearest)


class WeekDays(NamedTuple):
    """The day of week field, Sunday is 0: plain weekdays, the nth of a month (D#n), the last of a month (DL)."""

    days: int
    nth: tuple[tuple[int, int], ...] = ()
    last: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether Celery's own field could say it."""
        return not (self.nth or self.last)


def refuse(field: Field, text: str, reason: str) -> NoReturn:
    """Raise the error of a field: its name, the bad text, what is wrong with it."""
    raise InvalidSchedule(f"{field.name} {text!r} {reason}", field=field.name, text=text)


@lru_cache(maxsize=4096)
def spread(bits: int) -> tuple[int, ...]:
    """Return the members of a set, ascending."""
    return tuple(n for n in range(bits.bit_length()) if bits >> n & 1)


def full(field: Field) -> int:
    """Return the set of all values of a field."""
    return (1 << field.high + 1) - (1 << field.low)


@lru_cache(maxsize=4096)
def read_numbers(field: Field, text: str) -> int:
    """Return the set of a field that is a list of ``*  a  a-b  */n  a/n  a-b/n``."""
    bits = 0
    for term in _terms(field, text):
        bits |= _read_term(field, term)
    return bits


@lru_cache(maxsize=4096)
def read_month_days(text: str) -> MonthDays:
    """Return the day of month field."""
    field, bits, last, last_weekday, nearest = DAY_OF_MONTH, 0, False, False, set()
    for term in _terms(field, text):
        upper = term.upper()
        if upper == "L":
            last = True
        elif upper in ("LW", "WL"):
            if upper == "WL":
                refuse(field, term, "is not known: the last weekday of the month is LW")
            last_weekday = True
        elif upper.endswith("W"):
            nearest.add(_read_value(field, term[:-1], term))
        elif "L" in upper:
            refuse(field, term, "is not supported: L stands alone, for the last day of the month")
        else:
            bits |= _read_term(field, term)
    return MonthDays(bits, last, last_weekday, tuple(sorted(nearest)))


@lru_cache(maxsize=4096)
def read_week_days(text: str) -> WeekDays:
    """Return the day of week field."""
    field, bits, nth, last = DAY_OF_WEEK, 0, set(), set()
    for term in _terms(field, text):
        day, hash_sign, ordinal = term.partition("#")
        if hash_sign:
            if ordinal not in ("1", "2", "3", "4", "5"):
                refuse(field, term, "has no week 1 to 5 after '#': the second Monday is MON#2")
            nth.add((_read_value(field, day, term) % 7, int(ordinal)))
        elif term.upper() == "L":
            refuse(field, term, "says the last of no weekday: the last Friday of the month is FRIL or 5L")
        elif len(term) > 1 and term[-1] in "lL":
            last.add(_read_value(field, term[:-1], term) % 7)
        else:
            bits |= _read_term(field, term)
    return WeekDays(bits, tuple(sorted(nth)), tuple(sorted(last)))


def _terms(field: Field, text: str) -> list[str]:
    if not text.isascii():
        for character in (each for each in text if not each.isascii()):
            refuse(field, text, f"has {character!r} (U+{ord(character):04X}) in it, which is not an ASCII character")
    terms = text.split(",")
    if "" in terms:
        refuse(field, text, "has nothing before, after or between its commas")
    return terms


def _read_term(field: Field, term: str) -> int:
    body, slash, step_text = term.partition("/")
    step = 1
    if slash:
        if not re.fullmatch(r"[0-9]{1,3}", step_text) or int(step_text) == 0:
            refuse(field, term, "has no step of 1 to 999 after '/'")
        step = int(step_text)
    if body == "*":
        values = list(range(field.low, field.high + 1))
    elif "-" in body:
        first, _, last = body.partition("-")
        values = _run(field, _read_value(field, first, term), _read_value(field, last, term))
    else:
        only = _read_value(field, body, term)
        values = list(range(only, field.high + 1)) or [only] if slash else [only]
    bits = 0
    for value in values[::step]:
        bits |= 1 << (value % 7 if field is DAY_OF_WEEK else value)
    return bits


def _run(field: Field, first: int, last: int) -> list[int]:
    if first <= last:
        return list(range(first, last + 1))
    if field is DAY_OF_WEEK and first == 7:  # Sunday is 0, too: 7-2 does not really wrap
        return list(range(last + 1))
    return [*range(first, field.high + 1), *range(field.low, last + 1)]


def _read_value(field: Field, text: str, term: str) -> int:
    upper = text.upper()
    if upper in field.names:
        return field.names.index(upper) + field.first
    if text.isdigit() and len(text) <= 2:
        value = int(text)
        if field.low <= value <= (7 if field is DAY_OF_WEEK else field.high):
            return value
    if text.isdigit():
        refuse(field, term, f"is not in {field.low}-{7 if field is DAY_OF_WEEK else field.high}")
    refuse(field, term, _reason(field, upper, term))


def _reason(field: Field, upper: str, term: str) -> str:
    """Say why a value is refused: other crons' words have their own reasons."""
    if upper == "":
        return "lacks a number"
    if "?" in upper:
        return "is Quartz's word for no choice: write *"
    if upper.startswith("H"):
        return "is Jenkins's hash: choose a number, or use `every` with phase='spread'"
    if upper.startswith("R"):
        return "is a random choice, which two hosts would make differently: choose a number"
    if "*" in upper:
        return "has a '*' that does not stand alone: write * or */n"
    if field is DAY_OF_WEEK and upper[:3] in field.names:
        return f"is not a name: weekdays have three letters, {upper[:3]}"
    if field is MONTH and upper[:3] in field.names:
        return f"is not a name: months have three letters, {upper[:3]}"
    names = f" or {field.names[0]}-{field.names[-1]}" if field.names else ""
    return f"is not a number in {field.low}-{field.high}{names}"

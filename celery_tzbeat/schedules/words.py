"""A cron expression in plain English, for people; nothing is ever parsed from it."""

from __future__ import annotations

from celery_tzbeat.schedules import fields
from celery_tzbeat.schedules.cron import Cron
from celery_tzbeat.schedules.fields import spread

_MONTHS = (
    *("", "January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_ORDINALS = ("", "first", "second", "third", "fourth", "fifth")

#: More clock times than this are given field by field.
_LISTED = 6


def describe(cron: Cron) -> str:
    """Return the expression in words: ``at 02:30, Monday to Friday``."""
    return ", ".join(filter(None, (_clock(cron), _days(cron), _months(cron))))


def _clock(cron: Cron) -> str:
    seconds, minutes, hours = (list(spread(bits)) for bits in (cron.second, cron.minute, cron.hour))
    if len(hours) * len(minutes) * len(seconds) <= _LISTED:
        times = [
            f"{hour:02}:{minute:02}" + (f":{second:02}" if cron.has_seconds else "")
            for hour in hours
            for minute in minutes
            for second in seconds
        ]
        return "at " + _listed(times)
    parts = []
    if cron.has_seconds and seconds != [0]:
        parts.append(_every(seconds, 60, "second"))
    if minutes != [*range(60)] or not parts:
        parts.append(_every(minutes, 60, "minute"))
    if len(hours) < 24:
        parts.append(f"in {_noun('hour', hours)} {_runs([str(hour) for hour in hours], hours)}")
    elif minutes == [0] and not cron.has_seconds:
        return "every hour"
    return " ".join(parts)


def _every(values: list[int], size: int, unit: str) -> str:
    step = values[1] - values[0] if len(values) > 1 else 0
    if step and values == [*range(0, size, step)]:
        # */7 starts anew each hour: "every 7 minutes" would not be true of it
        return f"every {unit}" if step == 1 else f"every {step} {unit}s{'' if size % step == 0 else ' from 0'}"
    return f"at {_noun(unit, values)} {_runs([str(value) for value in values], values)}"


def _days(cron: Cron) -> str:
    by_month, by_week = _month_days(cron), _week_days(cron)
    if by_month and by_week:
        return f"{by_month} {'or' if cron.joined_by_or else 'if it is'} {by_week}"
    return by_month or by_week


def _month_days(cron: Cron) -> str:
    days = cron.month_days
    numbers = list(spread(days.days))
    if len(numbers) == 31:
        return ""
    found = []
    if numbers:
        found.append(f"on {_noun('day', numbers)} {_runs([str(number) for number in numbers], numbers)}")
    found += [f"on the weekday nearest to day {number}" for number in days.nearest]
    if days.last:
        found.append("on the last day")
    if days.last_weekday:
        found.append("on the last weekday")
    return _listed(found) + " of the month"


def _week_days(cron: Cron) -> str:
    days = cron.week_days
    numbers = list(spread(days.days))
    if len(numbers) == 7:
        return ""
    if numbers[:1] == [0] and len(numbers) > 1:
        numbers = [*numbers[1:], 7]  # the week begins on Monday: FRI-SUN is one run
    found = [_runs([_WEEKDAYS[number % 7] for number in numbers], numbers)] if numbers else []
    found += [f"the {_ORDINALS[nth]} {_WEEKDAYS[weekday]} of the month" for weekday, nth in days.nth]
    found += [f"the last {_WEEKDAYS[weekday]} of the month" for weekday in days.last]
    return _listed(found)


def _months(cron: Cron) -> str:
    numbers = list(spread(cron.month))
    if cron.month == fields.full(fields.MONTH):
        return ""
    return "in " + _runs([_MONTHS[number] for number in numbers], numbers)


def _noun(unit: str, values: list[int]) -> str:
    return unit if len(values) == 1 else f"{unit}s"


def _runs(names: list[str], numbers: list[int]) -> str:
    """Return names in a row, three or more neighbours as ``a to b``."""
    found, start = [], 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            run = names[start:place]
            found += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else run
            start = place
    return _listed(found)


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]

"""Schedules that others made, as rules of ours."""

from __future__ import annotations

from datetime import timedelta, tzinfo
from typing import Any

from celery import schedules as celery_schedules

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.schedules import fields
from celery_tzbeat.schedules.civil import Fold, Gap
from celery_tzbeat.schedules.crontabs import CronRule, cron_rule, spelling
from celery_tzbeat.schedules.intervals import every
from celery_tzbeat.schedules.parse import parse
from celery_tzbeat.schedules.rule import Rule, read_policy
from celery_tzbeat.schedules.sun import Sun

_FIELDS = (
    (fields.MINUTE, "minute"),
    (fields.HOUR, "hour"),
    (fields.DAY_OF_MONTH, "day_of_month"),
    (fields.MONTH, "month_of_year"),
    (fields.DAY_OF_WEEK, "day_of_week"),
)


def from_celery(obj: object, *, zone: tzinfo | str, gap: Gap = "end", fold: Fold = "first") -> Rule:
    """Return the rule that means what `obj` means: a rule of ours, or anything ``beat_schedule`` of Celery takes.

    `zone`, `gap` and `fold` hold where `obj` names none: they are the app's. Celery's `crontab` keeps its AND of the
    day fields; its `schedule`, numbers (seconds) and timedeltas become anchored intervals (`every`), and `solar`
    needs ephem, as in Celery. Text is parsed. `InvalidSchedule` for anything else, also for a schedule class of
    somebody else's, whose instants cannot be known.
    """
    read_policy(gap, fold)
    return _rule(obj).in_zone(zone).with_defaults(gap=gap, fold=fold)


def _rule(obj: Any) -> Rule:
    if isinstance(obj, Rule):
        return obj
    if isinstance(obj, str):
        return parse(obj)
    if isinstance(obj, (int, float, timedelta)):
        return every(obj)
    # Exactly these: a subclass may well have changed what is due.
    if type(obj) is celery_schedules.crontab:
        return _crontab(obj)
    if type(obj) is celery_schedules.schedule:
        return every(obj.run_every, nowfun=obj.nowfun)
    if type(obj) is celery_schedules.solar:
        return Sun(obj)
    raise InvalidSchedule(
        f"schedule {obj!r} of class {type(obj).__module__}.{type(obj).__qualname__} cannot be used: give a rule of "
        "celery_tzbeat, a crontab, schedule or solar of Celery, a text such as '@daily Europe/Paris', "
        "seconds, or a timedelta",
        text=str(obj),
    )


def _crontab(obj: celery_schedules.crontab) -> CronRule:
    """Take Celery's text, whose spelling counts, where it means the same to us; else the numbers Celery made of it."""
    numbers = {name: set(getattr(obj, name)) for _, name in _FIELDS}
    try:
        text = " ".join(spelling(field, getattr(obj, f"_orig_{name}")) for field, name in _FIELDS)
        rule = cron_rule(text, days="and", nowfun=obj.nowfun)
        if {name: set(getattr(rule, name, ())) for _, name in _FIELDS} == numbers:
            return rule
    except InvalidSchedule:
        pass
    text = " ".join(spelling(field, numbers[name]) for field, name in _FIELDS)
    return cron_rule(text, days="and", nowfun=obj.nowfun)

"""When: schedules in IANA zones, as pure values. No app, no Redis, no clock."""

from celery_tzbeat.schedules.adoption import from_celery
from celery_tzbeat.schedules.civil import tzdata_version, zone
from celery_tzbeat.schedules.crontabs import crontab
from celery_tzbeat.schedules.intervals import every
from celery_tzbeat.schedules.moments import at, reboot
from celery_tzbeat.schedules.parse import from_dict, occurrences, parse
from celery_tzbeat.schedules.recurrence import rrule

__all__ = [
    "at",
    "crontab",
    "every",
    "from_celery",
    "from_dict",
    "occurrences",
    "parse",
    "reboot",
    "rrule",
    "tzdata_version",
    "zone",
]

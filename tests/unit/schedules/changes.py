"""Where the clocks change: the places around which the properties are tested."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from celery_tzbeat.schedules import civil

UTC = timezone.utc
NIGHTLY = bool(os.environ.get("TZBEAT_NIGHTLY"))


class Change(NamedTuple):
    """One change of offset in one zone: the instant, and the wall before and after it."""

    zone: str
    at: datetime
    before: datetime
    after: datetime


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def changes_of(name: str, first: int, last: int) -> list[Change]:
    """Return the changes of a zone from the beginning of one year to the end of another."""
    offsets = civil.offsets(name)
    found = []
    index = offsets.index(datetime(first, 1, 1))
    while (stretch := offsets.stretch(index)) is not None and stretch.begin.year <= last:
        if stretch.begin.year >= first:
            found.append(Change(name, stretch.begin.replace(tzinfo=UTC), stretch.before, stretch.opens))
        index += 1
    return found


def distinct_changes(first: int, last: int) -> list[Change]:
    """Return all changes of all zones, those that look alike on the wall at one instant once."""
    seen = {}
    for name in sorted(civil.zone_names()):
        for change in changes_of(name, first, last):
            seen.setdefault(change[1:], change)
    return sorted(seen.values(), key=lambda change: (change.at, change.zone))


def missing_dates(name: str, year: int) -> bool:
    """Return whether a zone lacks a whole date in a year."""
    return any(change.after - change.before >= timedelta(hours=24) for change in changes_of(name, year, year))

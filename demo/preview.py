"""The next runs across the coming clock change, as lines for a human. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, tzinfo

from celery_tzbeat.model import UTC, Schedule
from celery_tzbeat.schedules import occurrences

#: No zone that changes at all goes longer without a change.
HORIZON = timedelta(days=400)

#: How much before and after a change is shown.
AROUND = timedelta(days=1, hours=12)


def next_change(zone: tzinfo, after: datetime) -> datetime | None:
    """Return the first instant at which the zone's offset is not what it was at `after`; None if far off."""
    before, step = after, timedelta(days=1)
    while _offset(zone, before + step) == _offset(zone, before):
        before += step
        if before - after > HORIZON:
            return None
    first = before + step
    while first - before > timedelta(seconds=1):
        middle = before + (first - before) / 2
        if _offset(zone, middle) == _offset(zone, before):
            before = middle
        else:
            first = middle
    return first.replace(microsecond=0)


def across_change(schedules: Mapping[str, Schedule], now: datetime) -> Iterator[str]:
    """Yield, for each daily entry in a zone whose clocks change, its runs around the coming change."""
    for name, schedule in schedules.items():
        zone = schedule.zone
        if zone is None or schedule.shortest_gap != timedelta(days=1):
            continue
        change = next_change(zone, now)
        if change is None:
            continue
        runs = list(occurrences(schedule.text, "UTC", after=change - AROUND, until=change + AROUND))
        if runs:
            yield f"{name} ({schedule.text}): {_describe(change, zone)}"
        for nominal in runs:
            local, utc = nominal.astimezone(zone), nominal.astimezone(UTC)
            yield f"    {local:%a %d %b %H:%M %Z}  =  {utc:%a %H:%M} UTC"


def _describe(change: datetime, zone: tzinfo) -> str:
    gained = _offset(zone, change) - _offset(zone, change - timedelta(seconds=1))
    way = "forward" if gained > timedelta() else "back"
    return f"on {change.astimezone(zone):%d %B %Y} the clocks go {way} by {abs(gained)}"


def _offset(zone: tzinfo, instant: datetime) -> timedelta:
    return instant.astimezone(zone).utcoffset() or timedelta()

"""`simulate`: what an app's entries would send in a span of time, for a test to look at."""

from __future__ import annotations

from datetime import datetime

from celery import Celery

from celery_tzbeat.api import Planned, TzBeat
from celery_tzbeat.model import MICROSECOND


def simulate(app: Celery, start: datetime, end: datetime, *, pattern: str = "*") -> list[Planned]:
    """Return every occurrence of the app's entries with start <= instant <= end, in order; of one instant by name.

    `start` and `end` are aware. The same list as `TzBeat.preview` and `tzbeat preview` give: what the schedules say. Nothing
    runs and no store is asked, so no misfire, overlap or failure is in it. A year of a hundred daily entries takes seconds.
    Raises InvalidConfiguration with every problem of the entries, EntryNotFound, ValueError for a naive instant.
    """
    for name, instant in (("start", start), ("end", end)):
        if instant.tzinfo is None:
            raise ValueError(f"{name} is {instant!r}: give it a zone, such as tzinfo=timezone.utc")
    after = start - MICROSECOND
    return list(TzBeat(app, set_scheduler=False).preview(pattern, after=after, until=end))

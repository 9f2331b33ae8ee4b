"""Celery's `solar` as a rule of ours. Needs `ephem`, as it does in Celery."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from celery.exceptions import ImproperlyConfigured
from celery.schedules import solar

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import UTC
from celery_tzbeat.schedules.civil import DAY
from celery_tzbeat.schedules.reading import naive_utc
from celery_tzbeat.schedules.rule import Rule

#: So many days may be without the event (polar night), as in Celery.
_DAYS = 368


class Sun(Rule):
    """Each sunrise, sunset, … at one place, rounded to whole seconds so that every host names the same instant."""

    form = "solar"

    def __init__(self, source: solar) -> None:
        super().__init__(nowfun=source.nowfun)
        self.source = source

    @property
    def text(self) -> str:
        return f"@solar {self.source.event} {self.source.lat} {self.source.lon}"

    @property
    def shortest_gap(self) -> timedelta:
        return timedelta(hours=20)

    def next_after(self, instant: datetime) -> datetime | None:
        """Return the first event after an instant, None where there is none within a year (nor is there ever)."""
        target = naive_utc(instant)
        return self._first(target, 1, lambda event: event > target)

    def prev_before(self, instant: datetime) -> datetime | None:
        """Return the last event before an instant, as `next_after` does."""
        target = naive_utc(instant)
        return self._first(target, -1, lambda event: event < target)

    def _first(self, target: datetime, direction: int, wanted: Callable[[datetime], bool]) -> datetime | None:
        # From the day before, as rounding may move an event over midnight.
        day = target.replace(hour=0, minute=0, second=0, microsecond=0) - direction * DAY
        for _ in range(_DAYS):
            event = self._on(day)
            if event is not None and wanted(event):
                return event.replace(tzinfo=UTC)
            day += direction * DAY
        return None

    def _on(self, day: datetime) -> datetime | None:
        """Return the event of one UTC day.

        ephem's answer varies by a second with the moment it searches from, so that is always midnight: the same event
        has the same instant whoever asks.
        """
        ephem: Any = self.source.ephem
        options = {"use_center": True} if self.source.use_center else {}
        try:
            found = getattr(self.source.cal, self.source.method)(ephem.Sun(), start=ephem.Date(day), **options)
        except ephem.CircumpolarError:
            return None
        event: datetime = found.datetime()
        if event >= day + DAY:
            return None
        return (event + timedelta(microseconds=500_000)).replace(microsecond=0)

    def describe(self) -> str:
        name = self.source.event.replace("_", " ")
        return f"at {name}, latitude {self.source.lat}, longitude {self.source.lon}"

    def _definition(self) -> tuple[object, ...]:
        return (self.source.event, float(self.source.lat), float(self.source.lon))


def sun(*parts: str) -> Sun:
    """Return the rule of the text form's three parts: event, latitude, longitude."""
    if len(parts) != 3:
        raise InvalidSchedule("text '@solar' is followed by event, latitude, longitude", text=" ".join(parts))
    try:
        return Sun(solar(parts[0], float(parts[1]), float(parts[2])))
    except (ValueError, ImproperlyConfigured) as error:
        raise InvalidSchedule(f"text '@solar {' '.join(parts)}': {error}", text=" ".join(parts)) from error

"""`every`: instants at one distance from each other, anchored to 1970-01-01T00:00:00Z."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal

from celery import schedules as celery_schedules

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import EPOCH, MICROSECOND, UTC
from celery_tzbeat.schedules.reading import naive_utc
from celery_tzbeat.schedules.rule import Rule

if TYPE_CHECKING:
    from celery import Celery

Duration = str | int | float | timedelta

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:[0-9]+[dhms])*(?:[0-9]+\.[0-9]{1,6}s)?", re.IGNORECASE)


class Every(Rule, celery_schedules.schedule):
    """The instants 1970-01-01T00:00:00Z + phase + k * period: the same on every host and after a restart.

    It needs no zone. ``phase="spread"`` waits for `named`, and until then has no instants.
    """

    form = "every"

    def __init__(
        self,
        period: timedelta,
        phase: timedelta | Literal["spread"],
        *,
        nowfun: Callable[[], datetime] | None = None,
        app: Celery | None = None,
    ) -> None:
        super().__init__(nowfun=nowfun, app=app)
        self.run_every = period  # Celery's name for it; Sentry and Flower read it
        self.relative = False
        self.phase: timedelta | Literal["spread"] = phase if phase == "spread" else phase % period

    @property
    def text(self) -> str:
        if self.phase == timedelta(0):
            return f"@every {duration_text(self.run_every)}"
        phase = "spread" if isinstance(self.phase, str) else duration_text(self.phase)
        return f"@every {duration_text(self.run_every)} phase={phase}"

    @property
    def shortest_gap(self) -> timedelta:
        return self.run_every

    @property
    def grain(self) -> timedelta:
        for unit in (timedelta(minutes=1), timedelta(seconds=1)):
            if self.run_every % unit == timedelta(0) == self._anchor_phase() % unit:
                return unit
        return MICROSECOND

    def named(self, name: str) -> Every:
        if self.phase != "spread":
            return self
        # In whole seconds where the period is a minute or more, so that the instants are easy to read.
        unit = timedelta(seconds=1) if self.run_every >= timedelta(minutes=1) else timedelta(milliseconds=1)
        places = max(1, self.run_every // unit)
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % places
        return Every(self.run_every, place * unit, nowfun=self.nowfun, app=self._app)

    def next_after(self, instant: datetime) -> datetime | None:
        anchor = self._anchor()
        steps = (naive_utc(instant) - anchor) // self.run_every + 1
        return self._at(steps)

    def prev_before(self, instant: datetime) -> datetime | None:
        steps = -((self._anchor() - naive_utc(instant)) // self.run_every) - 1
        return self._at(steps)

    def count_between(self, after: datetime, until: datetime, limit: int) -> int:
        anchor = self._anchor()
        first, last = ((naive_utc(bound) - anchor) // self.run_every for bound in (after, until))
        return max(0, min(limit, last - first))

    def _at(self, steps: int) -> datetime | None:
        try:
            return (self._anchor() + steps * self.run_every).replace(tzinfo=UTC)
        except OverflowError:
            return None

    def _anchor(self) -> datetime:
        return EPOCH.replace(tzinfo=None) + self._anchor_phase()

    def _anchor_phase(self) -> timedelta:
        if isinstance(self.phase, str):
            raise InvalidSchedule(
                f"phase of {self.text!r} is not settled: it depends on the entry's name, call named(name) first",
                field="phase",
                text="spread",
            )
        return self.phase

    def describe(self) -> str:
        said = f"every {duration_text(self.run_every)}, counted from 1970-01-01T00:00:00Z"
        if self.phase == "spread":
            return f"{said} plus a phase from the entry's name"
        return said if not self.phase else f"{said} plus {duration_text(self._anchor_phase())}"

    def warnings(self) -> tuple[str, ...]:
        if self.run_every % timedelta(days=1):
            return ()
        return (
            f"{self.text!r} is a multiple of 24 h in UTC, which no zone's clock keeps to over a change of offset; "
            "a crontab such as '@daily Europe/Paris' does",
        )

    def _definition(self) -> tuple[object, ...]:
        return (self.run_every, self.phase)


def every(
    period: Duration,
    *,
    phase: Duration = 0,
    nowfun: Callable[[], datetime] | None = None,
    app: Celery | None = None,
) -> Every:
    """Return the rule of the instants 1970-01-01T00:00:00Z + phase + k * period.

    `period` is text (``"1h30m"``: d, h, m, s), seconds, or a timedelta: more than zero, whole microseconds. `phase` is
    the same, of any sign, or ``"spread"``: a hash of the entry's name. ``every("24h")`` is not daily in any zone.
    """
    length = read_duration(period, "interval")
    if length <= timedelta(0):
        raise InvalidSchedule(f"interval {period!r} is not more than zero", field="interval", text=str(period))
    offset = phase if phase == "spread" else read_duration(phase, "phase")
    return Every(length, "spread" if isinstance(offset, str) else offset, nowfun=nowfun, app=app)


def read_duration(given: Duration, field: str) -> timedelta:
    """Return a duration given as text, seconds or timedelta. `InvalidSchedule` names `field`."""
    if isinstance(given, timedelta):
        return given
    if isinstance(given, str):
        text = given.strip()
        if not text or not _DURATION.fullmatch(text):
            raise InvalidSchedule(
                f"{field} {given!r} is not a duration: write it with units, as in 90s, 15m, 1h30m, 2d",
                field=field,
                text=given,
            )
        pairs = re.findall(r"([0-9.]+)([dhms])", text.lower())
        micros = sum(_micros(number) * _UNITS[unit] for number, unit in pairs)
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        if not abs(given) < 10**12:  # true of NaN, too
            raise InvalidSchedule(f"{field} {given!r} s is no usable length", field=field, text=str(given))
        micros = round(given * 10**6)
        if given and not micros:
            raise InvalidSchedule(f"{field} {given!r} s is under a microsecond", field=field, text=str(given))
    else:
        raise InvalidSchedule(
            f"{field} {given!r} is neither text, nor seconds, nor a timedelta", field=field, text=str(given)
        )
    try:
        return timedelta(microseconds=micros)
    except OverflowError:
        raise InvalidSchedule(f"{field} {given!r} is too long", field=field, text=str(given)) from None


def _micros(number: str) -> int:
    whole, _, fraction = number.partition(".")
    return int(whole) * 10**6 + int(fraction.ljust(6, "0") or "0")


def duration_text(length: timedelta) -> str:
    """Return a duration of zero or more in its text form: ``1h30m``, ``0.2s``."""
    seconds, micros = divmod(length // MICROSECOND, 10**6)
    found = []
    for unit, size in _UNITS.items():
        count, seconds = divmod(seconds, size)
        fraction = f".{micros:06}".rstrip("0") if unit == "s" and micros else ""
        if count or fraction:
            found.append(f"{count}{fraction}{unit}")
    return "".join(found) or "0s"

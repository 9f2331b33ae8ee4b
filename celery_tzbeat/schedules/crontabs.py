"""`crontab`: cron's fields read in a zone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from celery import schedules as celery_schedules

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.schedules import civil, cron, fields, words
from celery_tzbeat.schedules.civil import Fold, Gap
from celery_tzbeat.schedules.cron import Cron, Days, Kind
from celery_tzbeat.schedules.reading import Reading
from celery_tzbeat.schedules.rule import Rule, lacks_zone, one_of, read_policy, read_zone, suffix

if TYPE_CHECKING:
    from celery import Celery

#: What Celery takes for a field.
Cronspec = int | str | Iterable[int] | None


class CronRule(Rule):
    """Cron's fields in a zone; this very class where Celery's five fields could not say it (seconds, L, W, #)."""

    form = "cron"

    def __init__(
        self,
        fields_of: Cron,
        *,
        zone: ZoneInfo | None,
        gap: Gap | None,
        fold: Fold | None,
        kind: Kind,
        days: Days,
        nowfun: Callable[[], datetime] | None = None,
        app: Celery | None = None,
    ) -> None:
        super().__init__(nowfun=nowfun, app=app)
        self.cron = fields_of
        self._zone = zone
        self.gap: Gap | None = gap  # None: not stated
        self.fold: Fold | None = fold
        self.kind: Kind = kind
        self.days: Days = days
        self.fixed = fields_of.fixed if kind == "auto" else kind == "fixed"
        self._reading = (
            Reading(fields_of, civil.offsets(zone.key), self.fixed, gap or "end", fold or "first")
            if zone is not None
            else None
        )

    @property
    def zone(self) -> ZoneInfo | None:
        return self._zone

    @property
    def text(self) -> str:
        return self.cron.text + suffix(
            self._zone,
            gap=self.gap,
            fold=self.fold,
            kind=None if self.kind == "auto" else self.kind,
            days=None if self.days == "or" else self.days,
        )

    @property
    def shortest_gap(self) -> timedelta:
        return self.cron.shortest_gap()

    @property
    def grain(self) -> timedelta:
        return timedelta(seconds=1) if self.cron.has_seconds else timedelta(minutes=1)

    def in_zone(self, zone: tzinfo | str) -> CronRule:
        return self if self._zone is not None else self._with(zone=civil.zone(zone))

    def with_defaults(self, *, gap: Gap, fold: Fold) -> CronRule:
        # Stated only where it differs from what silence means, so that texts stay short.
        if not self.fixed:
            return self
        filled_gap = gap if self.gap is None and gap != "end" else self.gap
        filled_fold = fold if self.fold is None and fold != "first" else self.fold
        return self._with(gap=filled_gap, fold=filled_fold)

    def _with(self, **changed: Any) -> CronRule:
        stated = {"zone": self._zone, "gap": self.gap, "fold": self.fold, "kind": self.kind, "days": self.days}
        return type(self)(self.cron, **{**stated, **changed}, nowfun=self.nowfun, app=self._app)

    def next_after(self, instant: datetime) -> datetime | None:
        if self._reading is None:
            raise lacks_zone(self)
        return self._reading.next_after(instant)

    def prev_before(self, instant: datetime) -> datetime | None:
        if self._reading is None:
            raise lacks_zone(self)
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
        return words.describe(self.cron) + (f", {self._zone.key}" if self._zone is not None else "")

    def warnings(self) -> tuple[str, ...]:
        found = []
        if not self.fixed:
            for word, value in (("gap", self.gap), ("fold", self.fold)):
                if value is not None:
                    found.append(
                        f"{word}={value!r} has no effect on {self.cron.text!r}: its minute or hour begins with '*', "
                        "so it follows real time; kind='fixed' makes it a fixed time"
                    )
            minute, hour = self.cron.parts[1:3]
            if self.kind == "auto" and minute.startswith("*") and not hour.startswith("*"):
                found.append(
                    f"{self.cron.text!r} is restricted to some hours but follows real time, as its minute begins with "
                    "'*': what a gap swallows does not run; kind='fixed' or kind='wildcard' says which is meant"
                )
        return tuple(found)

    def _definition(self) -> tuple[object, ...]:
        key = self._zone.key if self._zone is not None else None
        return (self.cron.text, key, self.gap or "end", self.fold or "first", self.fixed, self.days)


class Crontab(CronRule, celery_schedules.crontab):
    """Cron's five fields in a zone: also an instance of Celery's `crontab`, whose attributes read true."""

    def __init__(self, fields_of: Cron, **stated: Any) -> None:
        # Celery's own __init__ would refuse 7, 5/20 and more; what others read of it is set here instead.
        super().__init__(fields_of, **stated)
        _, minute, hour, day_of_month, month_of_year, day_of_week = fields_of.parts
        self._orig_minute, self._orig_hour = minute, hour
        self._orig_day_of_month, self._orig_month_of_year = day_of_month, month_of_year
        self._orig_day_of_week = day_of_week
        self._orig_kwargs: dict[str, Any] = {}
        self.minute, self.hour = set(fields.spread(fields_of.minute)), set(fields.spread(fields_of.hour))
        self.day_of_month = set(fields.spread(fields_of.month_days.days))
        self.month_of_year = set(fields.spread(fields_of.month))
        self.day_of_week = set(fields.spread(fields_of.week_days.days))


def crontab(
    minute: Cronspec = "*",
    hour: Cronspec = "*",
    day_of_week: Cronspec = "*",
    day_of_month: Cronspec = "*",
    month_of_year: Cronspec = "*",
    *,
    tz: str | tzinfo | None = None,
    gap: Gap | None = None,
    fold: Fold | None = None,
    kind: Kind = "auto",
    days: Days | None = None,
    nowfun: Callable[[], datetime] | None = None,
    app: Celery | None = None,
) -> CronRule:
    """Return a rule of cron's fields, in one of two forms.

    *Text*: one argument of exactly 5 blank-separated fields, 6 with leading seconds, or an alias (``@daily``). The day
    fields are joined by OR where neither begins with ``*``. *Celery's form*: anything else keeps Celery's positions and
    keywords, and joins the day fields by AND.

    `tz` is a zone name or tzinfo; without it the rule waits for `in_zone` (the app's timezone). `gap` ("end", "skip")
    and `fold` ("first", "second", "both") say what a fixed time does at a change of offset; `kind` whether it is one
    ("auto": neither the minute nor the hour field begins with ``*``). `InvalidSchedule` names the field and the text.
    """
    given = (minute, hour, day_of_week, day_of_month, month_of_year)
    if isinstance(minute, str) and given[1:] == ("*",) * 4 and _is_text(minute):
        return cron_rule(minute, tz=tz, gap=gap, fold=fold, kind=kind, days=days or "or", nowfun=nowfun, app=app)
    text = " ".join(
        spelling(field, value)
        for field, value in (
            (fields.MINUTE, minute),
            (fields.HOUR, hour),
            (fields.DAY_OF_MONTH, day_of_month),
            (fields.MONTH, month_of_year),
            (fields.DAY_OF_WEEK, day_of_week),
        )
    )
    return cron_rule(text, tz=tz, gap=gap, fold=fold, kind=kind, days=days or "and", nowfun=nowfun, app=app)


def cron_rule(
    text: str,
    *,
    tz: str | tzinfo | None = None,
    gap: Gap | None = None,
    fold: Fold | None = None,
    kind: Kind = "auto",
    days: Days = "or",
    nowfun: Callable[[], datetime] | None = None,
    app: Celery | None = None,
) -> CronRule:
    """Return the rule of a cron text, with every keyword in its one meaning (see `crontab`)."""
    read_policy(gap, fold)
    one_of("kind", kind, ("auto", "fixed", "wildcard"))
    one_of("days", days, ("or", "and"))
    found = cron.read(text, days=days)
    if days == "and" and not found.day_fields_restricted:
        days = "or"  # the same; so Celery's form and the text form give equal texts where they give equal rules
    return (Crontab if found.simple else CronRule)(
        found, zone=read_zone(tz), gap=gap, fold=fold, kind=kind, days=days, nowfun=nowfun, app=app
    )


def _is_text(minute: str) -> bool:
    """Tell the text form from a minute field of Celery's with blanks in it, such as ``0, 30``."""
    parts = minute.split()
    if len(parts) == 1:
        return parts[0].startswith("@")
    return len(parts) in (5, 6) and not all(part.endswith(",") for part in parts[:-1])


def spelling(field: fields.Field, value: Cronspec) -> str:
    """Return the text of a field as Celery takes it: a number, a text, or an iterable of numbers.

    Celery's texts may have blanks and whole names of weekdays and months. Only an iterable that covers the field is
    ``*``; a text such as ``0-23`` keeps its spelling, which decides how the rule is read.
    """
    if value is None:
        return "*"
    if isinstance(value, str):
        text = re.sub(r"\s+", "", value)
        if not text:
            fields.refuse(field, value, "is empty: write * for every one")
        return re.sub(r"[A-Za-z]{4,}", lambda name: _short(field, name[0]), text)
    if isinstance(value, int):
        return str(int(value))
    try:
        numbers = sorted({int(number) for number in value})
    except (TypeError, ValueError):
        raise InvalidSchedule(
            f"{field.name} {value!r} is neither a number, nor a text, nor an iterable of numbers",
            field=field.name,
            text=str(value),
        ) from None
    if not numbers:
        fields.refuse(field, "", "is empty: write * for every one")
    if tuple(numbers) == fields.spread(fields.full(field)):
        return "*"
    return ",".join(map(str, numbers))


def _short(field: fields.Field, name: str) -> str:
    for known in fields.LONG_NAMES:
        if name.upper() == known and known[:3] in field.names:
            return name[:3]
    return name

"""`a | b` and `a - b`: rules made of rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import TypeVar
from zoneinfo import ZoneInfo

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import UTC
from celery_tzbeat.schedules import civil
from celery_tzbeat.schedules.civil import Fold, Gap
from celery_tzbeat.schedules.crontabs import CronRule
from celery_tzbeat.schedules.intervals import Every
from celery_tzbeat.schedules.moments import At, at
from celery_tzbeat.schedules.recurrence import RecurrenceRule
from celery_tzbeat.schedules.remainder import Dates, Remainder, examined
from celery_tzbeat.schedules.rule import Rule, lacks_zone

R = TypeVar("R", bound=Rule)


class Union(Rule):
    """What any of its parts says; occurrences on one instant are one."""

    form = "union"

    def __init__(self, parts: tuple[Rule, ...]) -> None:
        super().__init__()
        flat: list[Rule] = []
        for part in parts:
            flat += part.parts if isinstance(part, Union) else [part]
        self.parts: tuple[Rule, ...] = tuple(dict.fromkeys(flat))

    @property
    def zone(self) -> ZoneInfo | None:
        """The zone of all parts that have one; None where they differ."""
        zones = {part.zone.key: part.zone for part in self.parts if part.zone is not None}
        return next(iter(zones.values())) if len(zones) == 1 else None

    @property
    def text(self) -> str:
        return " | ".join(f"( {part.text} )" if isinstance(part, Difference) else part.text for part in self.parts)

    @property
    def shortest_gap(self) -> timedelta:
        gaps = [part.shortest_gap for part in self.parts]
        return min(*gaps, self.grain) if len(gaps) > 1 else gaps[0]

    @property
    def grain(self) -> timedelta:
        return min(part.grain for part in self.parts)

    def in_zone(self, zone: tzinfo | str) -> Union:
        return self._of(part.in_zone(zone) for part in self.parts)

    def named(self, name: str) -> Union:
        return self._of(part.named(name) for part in self.parts)

    def with_defaults(self, *, gap: Gap, fold: Fold) -> Union:
        return self._of(part.with_defaults(gap=gap, fold=fold) for part in self.parts)

    def _of(self, parts: Iterable[Rule]) -> Union:
        return like(Union(tuple(parts)), self)

    def next_after(self, instant: datetime) -> datetime | None:
        found = [part.next_after(instant) for part in self.parts]
        return min((each for each in found if each is not None), default=None)

    def prev_before(self, instant: datetime) -> datetime | None:
        found = [part.prev_before(instant) for part in self.parts]
        return max((each for each in found if each is not None), default=None)

    def mark(self, nominal: datetime) -> str:
        marks = [part.mark(nominal) for part in self.parts]
        return json.dumps(marks) if any(marks) else ""

    def resume(self, nominal: datetime, mark: str) -> datetime:
        """Return the latest of what the parts say: an occurrence of another part may fall into the time between."""
        marks = json.loads(mark) if mark else []
        if len(marks) != len(self.parts):
            return nominal
        return max(part.resume(nominal, each) for part, each in zip(self.parts, marks, strict=True))

    def warnings(self) -> tuple[str, ...]:
        return tuple(warning for part in self.parts for warning in part.warnings())

    def describe(self) -> str:
        return "; and ".join(part.describe() for part in self.parts)

    def _definition(self) -> tuple[object, ...]:
        return (frozenset(self.parts),)


class Difference(Rule):
    """What `base` says and `without` does not: a rule (its instants) or dates (in `zone`)."""

    form = "difference"

    def __init__(self, base: Rule, without: Rule | Dates, zone: ZoneInfo | None = None) -> None:
        super().__init__()
        self.base, self.without = base, without
        self._zone = base.zone or zone
        self._left: tuple[Remainder | At, ...] | None = None
        if _settled(self):
            self._left = _remainders(self)
        elif not _has_zone(self):
            # Which zone it will be changes nothing of whether anything is left: refused now, not in the zone only.
            self.in_zone(UTC)

    @property
    def zone(self) -> ZoneInfo | None:
        """The zone of the base; of a base without any, the zone in which dates are read."""
        return self._zone

    @property
    def text(self) -> str:
        without = self.without.text
        if isinstance(self.without, (Union, Difference)):
            without = f"( {without} )"
        elif isinstance(self.without, Dates) and self.base.zone is None and self._zone is not None:
            without = f"{without} {self._zone.key}"
        base = f"( {self.base.text} )" if isinstance(self.base, Union) else self.base.text
        return f"{base} - {without}"

    @property
    def shortest_gap(self) -> timedelta:
        return self.base.shortest_gap

    @property
    def grain(self) -> timedelta:
        return self.base.grain

    def in_zone(self, zone: tzinfo | str) -> Difference:
        without = self.without if isinstance(self.without, Dates) else self.without.in_zone(zone)
        own = self._zone or civil.zone(zone)
        return like(Difference(self.base.in_zone(zone), without, own), self)

    def named(self, name: str) -> Difference:
        without = self.without if isinstance(self.without, Dates) else self.without.named(name)
        return like(Difference(self.base.named(name), without, self._zone), self)

    def with_defaults(self, *, gap: Gap, fold: Fold) -> Difference:
        without = self.without
        if not isinstance(without, Dates):
            without = without.with_defaults(gap=gap, fold=fold)
        return like(Difference(self.base.with_defaults(gap=gap, fold=fold), without, self._zone), self)

    def next_after(self, instant: datetime) -> datetime | None:
        found = [part.next_after(instant) for part in self._remainders()]
        return min((each for each in found if each is not None), default=None)

    def prev_before(self, instant: datetime) -> datetime | None:
        found = [part.prev_before(instant) for part in self._remainders()]
        return max((each for each in found if each is not None), default=None)

    def _remainders(self) -> tuple[Remainder | At, ...]:
        if self._left is None:
            if isinstance(self.without, Dates) and self._zone is None:
                raise lacks_zone(self)
            self._left = _remainders(self)
        return self._left

    def mark(self, nominal: datetime) -> str:
        return self.base.mark(nominal)

    def resume(self, nominal: datetime, mark: str) -> datetime:
        return self.base.resume(nominal, mark)

    def warnings(self) -> tuple[str, ...]:
        return self.base.warnings()

    def describe(self) -> str:
        if isinstance(self.without, Dates):
            count = len(self.without.days)
            return f"{self.base.describe()}, except on {count} date{'' if count == 1 else 's'}"
        return f"{self.base.describe()}, except {self.without.describe()}"

    def _definition(self) -> tuple[object, ...]:
        # Whether the zone was given to the dates or to the base changes nothing.
        return (self.base, self.without, self._zone.key if self._zone is not None else None)


@lru_cache(maxsize=1024)
def _remainders(rule: Difference) -> tuple[Remainder | At, ...]:
    """Return what is left, by the parts of what it is taken from. `InvalidSchedule` where that is nothing."""
    found = []
    for base, taken, dates in _rows(rule):
        settled = [(days, zone) for days, zone in dates if zone is not None]
        if len(settled) < len(dates):
            raise lacks_zone(rule)
        found.append(examined(rule.text, base, taken, settled))
    left = tuple(part for part in found if part is not None)
    if not left:
        raise InvalidSchedule(
            f"difference {rule.text!r} leaves nothing: all of it is taken away", field="difference", text=rule.text
        )
    return left


#: A rule that is neither union nor difference, the rules taken away from it, the dates.
_Row = tuple[Rule, tuple[Rule, ...], tuple[tuple[Dates, ZoneInfo | None], ...]]


def _rows(rule: Rule) -> Iterator[_Row]:
    """Yield each part of a rule with everything that is taken away from it: (a | b) - c is a - c | b - c."""
    if isinstance(rule, Union):
        for part in rule.parts:
            yield from _rows(part)
    elif isinstance(rule, Difference):
        for base, taken, dates in _rows(rule.base):
            if isinstance(rule.without, Dates):
                yield base, taken, (*dates, (rule.without, rule.zone))
            else:
                more = rule.without.parts if isinstance(rule.without, Union) else (rule.without,)
                yield base, (*taken, *more), dates
    else:
        yield rule, (), ()


def _leaves(rule: Rule) -> Iterator[Rule]:
    """Yield the rules that a rule is made of."""
    if isinstance(rule, Union):
        for part in rule.parts:
            yield from _leaves(part)
    elif isinstance(rule, Difference):
        yield from _leaves(rule.base)
        if not isinstance(rule.without, Dates):
            yield from _leaves(rule.without)
    else:
        yield rule


def _needs_zone(rule: Rule) -> bool:
    return isinstance(rule, (CronRule, RecurrenceRule))


def _has_zone(rule: Difference) -> bool:
    return any(leaf.zone is not None for leaf in _leaves(rule)) or any(
        zone is not None for _, _, dates in _rows(rule) for _, zone in dates
    )


def _settled(rule: Difference) -> bool:
    """Whether all of a rule has its zone and its phase, so that it can be asked."""
    leaves = list(_leaves(rule))
    return (
        not any(_needs_zone(leaf) and leaf.zone is None for leaf in leaves)
        and not any(isinstance(leaf, Every) and leaf.phase == "spread" for leaf in leaves)
        and not any(zone is None for _, _, dates in _rows(rule) for _, zone in dates)
    )


def difference(base: Rule, without: Rule | date | datetime | Iterable[date | datetime]) -> Difference:
    """Return `base` less a rule, an instant, a date, or a collection of instants and dates."""
    if isinstance(without, Rule):
        return like(Difference(base, without), base)
    items = [without] if isinstance(without, date) else list(without)
    instants = [item for item in items if isinstance(item, datetime)]
    days = [item for item in items if isinstance(item, date) and not isinstance(item, datetime)]
    if len(instants) + len(days) != len(items) or not items:
        raise InvalidSchedule(
            f"what is taken away must be a rule, or one or more dates or datetimes, not {without!r}",
            field="difference",
            text=str(without),
        )
    found = base
    if days:
        found = Difference(found, Dates(frozenset(days)))
    if instants:
        found = Difference(found, at(*instants))
    assert isinstance(found, Difference)
    return like(found, base)


def like(made: R, model: Rule) -> R:
    """Return `made` with the `nowfun` and app of the rule it was made from."""
    made.nowfun, made.app = model.nowfun, model._app
    return made

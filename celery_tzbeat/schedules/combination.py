"""`a | b` and `a - b`: rules made of rules."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import Literal, TypeVar
from zoneinfo import ZoneInfo

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import MICROSECOND, UTC
from celery_tzbeat.schedules import civil
from celery_tzbeat.schedules.civil import DAY, Fold, Gap
from celery_tzbeat.schedules.moments import at
from celery_tzbeat.schedules.rule import Rule, lacks_zone

R = TypeVar("R", bound=Rule)

#: So many occurrences in a row may be taken away by a rule before a difference counts as having no more.
TAKEN_AWAY = 100_000


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


class Dates:
    """Whole dates (holidays), in the zone of what they are taken from."""

    __slots__ = ("days",)

    def __init__(self, days: Iterable[date]) -> None:
        self.days = frozenset(days)

    @property
    def text(self) -> str:
        return "@dates " + ",".join(day.isoformat() for day in sorted(self.days))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dates) and self.days == other.days

    def __hash__(self) -> int:
        return hash(self.days)


class Difference(Rule):
    """What `base` says and `without` does not: a rule (its instants) or dates (in `zone`)."""

    form = "difference"

    def __init__(self, base: Rule, without: Rule | Dates, zone: ZoneInfo | None = None) -> None:
        super().__init__()
        self.base, self.without = base, without
        self._zone = base.zone or zone

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
        """Return the first occurrence after an instant that is left.

        None, too, where a rule takes away 100,000 in a row (dates are stepped over whole, however many).
        """
        found = self.base.next_after(instant)
        taken: datetime | None = None
        for _ in range(TAKEN_AWAY):
            if found is None:
                return None
            if isinstance(self.without, Dates):
                if self._date(found) not in self.without.days:
                    return found
                found = self.base.next_after(self._edge(found, "end") - MICROSECOND)
            else:
                if taken is None or taken < found:
                    taken = self.without.next_after(found - MICROSECOND) or datetime.max.replace(tzinfo=UTC)
                if taken != found:
                    return found
                found = self.base.next_after(found)
        return None

    def prev_before(self, instant: datetime) -> datetime | None:
        """Return the last occurrence before an instant that is left, as `next_after` does."""
        found = self.base.prev_before(instant)
        taken: datetime | None = None
        for _ in range(TAKEN_AWAY):
            if found is None:
                return None
            if isinstance(self.without, Dates):
                if self._date(found) not in self.without.days:
                    return found
                found = self.base.prev_before(self._edge(found, "begin"))
            else:
                if taken is None or taken > found:
                    taken = self.without.prev_before(found + MICROSECOND) or datetime.min.replace(tzinfo=UTC)
                if taken != found:
                    return found
                found = self.base.prev_before(found)
        return None

    def _date(self, instant: datetime) -> date:
        """Return the wall date of an occurrence; of one at the end of a gap, the date that is shown then."""
        if self._zone is None:
            raise lacks_zone(self)
        return instant.astimezone(self._zone).date()

    def _edge(self, instant: datetime, edge: Literal["begin", "end"]) -> datetime:
        """Return where the run of walls of one date around an instant begins or ends.

        A stretch of constant offset ends the run, too: then the next one is asked anew, and no wall date that comes
        twice (a fold at midnight) confuses the step.
        """
        assert self._zone is not None  # _date asked before
        offsets = civil.offsets(self._zone.key)
        moment = instant.astimezone(timezone.utc).replace(tzinfo=None)
        stretch = offsets.stretch(offsets.index(moment))
        assert stretch is not None  # every instant is in one
        midnight = (moment + stretch.offset).replace(hour=0, minute=0, second=0, microsecond=0) - stretch.offset
        found = max(midnight, stretch.begin) if edge == "begin" else min(civil.shifted(midnight, DAY), stretch.end)
        return found.replace(tzinfo=UTC)

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
        found = Difference(found, Dates(days))
    if instants:
        found = Difference(found, at(*instants))
    assert isinstance(found, Difference)
    return like(found, base)


def like(made: R, model: Rule) -> R:
    """Return `made` with the `nowfun` and app of the rule it was made from."""
    made.nowfun, made.app = model.nowfun, model._app
    return made

"""`at`: instants given one by one. `reboot`: none at all."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from itertools import pairwise
from typing import TYPE_CHECKING

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import MICROSECOND, UTC, iso
from celery_tzbeat.schedules import civil
from celery_tzbeat.schedules.civil import Fold, Gap
from celery_tzbeat.schedules.reading import naive_utc
from celery_tzbeat.schedules.rule import Rule, read_policy

if TYPE_CHECKING:
    from celery import Celery


class At(Rule):
    """A finite row of instants, ascending, each once. It needs no zone."""

    form = "at"

    def __init__(
        self,
        instants: tuple[datetime, ...],
        *,
        nowfun: Callable[[], datetime] | None = None,
        app: Celery | None = None,
    ) -> None:
        super().__init__(nowfun=nowfun, app=app)
        self.instants = tuple(sorted(set(instants)))

    @property
    def text(self) -> str:
        return "@at " + ",".join(map(iso, self.instants))

    @property
    def shortest_gap(self) -> timedelta:
        return min((later - earlier for earlier, later in pairwise(self.instants)), default=timedelta.max)

    @property
    def grain(self) -> timedelta:
        whole = not any(instant.microsecond for instant in self.instants)
        return timedelta(seconds=1) if whole else MICROSECOND

    def next_after(self, instant: datetime) -> datetime | None:
        naive_utc(instant)  # refuses a naive one
        place = bisect_right(self.instants, instant)
        return self.instants[place] if place < len(self.instants) else None

    def prev_before(self, instant: datetime) -> datetime | None:
        naive_utc(instant)
        place = bisect_left(self.instants, instant)
        return self.instants[place - 1] if place else None

    def count_between(self, after: datetime, until: datetime, limit: int) -> int:
        count = bisect_right(self.instants, until) - bisect_right(self.instants, after)
        return max(0, min(limit, count))

    def describe(self) -> str:
        if len(self.instants) == 1:
            return f"once, at {iso(self.instants[0])}"
        return f"{len(self.instants)} times, from {iso(self.instants[0])} to {iso(self.instants[-1])}"

    def _definition(self) -> tuple[object, ...]:
        return self.instants


def at(
    *instants: datetime | str,
    tz: str | tzinfo | None = None,
    gap: Gap | None = None,
    fold: Fold | None = None,
    nowfun: Callable[[], datetime] | None = None,
    app: Celery | None = None,
) -> At:
    """Return the rule of one or more instants, as datetimes or ISO texts.

    An aware one is itself. A naive one is a wall and needs `tz`; it is settled here and now as a fixed time, by `gap`
    ("end", "skip") and `fold` ("first", "second", "both"), and does not move when the zone's rules change later.
    """
    read_policy(gap, fold)
    found: list[datetime] = []
    for given in instants:
        moment = _read(given) if isinstance(given, str) else given
        if not isinstance(moment, datetime):
            raise InvalidSchedule(f"instant {given!r} is not a datetime", field="instant", text=str(given))
        if moment.utcoffset() is not None:
            try:
                found.append(moment.astimezone(UTC))
            except OverflowError:
                raise InvalidSchedule(
                    f"instant {moment.isoformat()!r} is not within the years 1 to 9999 in UTC",
                    field="instant",
                    text=moment.isoformat(),
                ) from None
        elif tz is None:
            raise InvalidSchedule(
                f"instant {moment.isoformat()!r} has no zone: make it aware, end its text with Z, or give tz=",
                field="instant",
                text=moment.isoformat(),
            )
        else:
            found += _settled(moment, civil.zone(tz).key, gap or "end", fold or "first")
    if not found:
        raise InvalidSchedule("instant missing: give one or more (a skipped gap leaves none)", field="instant")
    return At(tuple(found), nowfun=nowfun, app=app)


def _read(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        raise InvalidSchedule(
            f"instant {text!r} is not an ISO date and time such as 2026-11-01T05:30:00Z", field="instant", text=text
        ) from None


def _settled(wall: datetime, zone: str, gap: Gap, fold: Fold) -> list[datetime]:
    offsets = civil.offsets(zone)
    passes = offsets.passes(wall)
    if not passes:
        end = offsets.gap_end(wall)
        if end is None:
            raise InvalidSchedule(
                f"instant {wall.isoformat()!r} in {zone} is not within the years 1 to 9999 in UTC",
                field="instant",
                text=wall.isoformat(),
            )
        passes = [end] if gap == "end" else []
    chosen = {"first": passes[:1], "second": passes[-1:], "both": passes}[fold]
    return [instant.replace(tzinfo=UTC) for instant in chosen]


class Reboot(Rule):
    """No instants: the occurrence is the start of a beat where none was alive before, and the beat's to make."""

    form = "reboot"

    @property
    def text(self) -> str:
        return "@reboot"

    @property
    def shortest_gap(self) -> timedelta:
        return timedelta.max

    def next_after(self, instant: datetime) -> datetime | None:
        naive_utc(instant)
        return None

    def prev_before(self, instant: datetime) -> datetime | None:
        naive_utc(instant)
        return None

    def describe(self) -> str:
        return "when a beat starts and none was alive; at no instant known beforehand"

    def _definition(self) -> tuple[object, ...]:
        return ()


def reboot() -> Reboot:
    """Return the rule ``@reboot``: `next_after` is always None, the beat sends it at a cold start."""
    return Reboot()

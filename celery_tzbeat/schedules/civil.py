# ruff: noqa: DTZ001, DTZ901 - walls, and instants inside this room, are naive on purpose
"""Civil time: zones, and the row of stretches of constant offset that each of them is.

Zones come from the PyPI package `tzdata`, never from the system's files, so that two hosts name one wall time alike.
Only offsets from UTC are looked at, never `dst()`, which misleads (Dublin, Casablanca). Inside this module and
`reading` an instant is a *naive UTC* datetime and a wall is a naive datetime, for speed; neither leaves the room.
"""

from __future__ import annotations

import difflib
import io
import struct
import threading
from bisect import bisect_right
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache
from importlib import resources
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

import tzdata

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import UTC

#: What a fixed time does that falls into a gap: fire once at the gap's end, or not at all.
Gap = Literal["end", "skip"]
#: What a fixed time does that comes twice: fire at its first pass, at its second, at both.
Fold = Literal["first", "second", "both"]

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
#: Further than this wall order and instant order never disagree: no zone ever stepped its clock by more than a day.
DISORDER = timedelta(days=2)

#: How far past its last change a zone is asked for another one before its offset counts as final.
_FINAL_AFTER = timedelta(days=400)


def tzdata_version() -> str:
    """Return the IANA version of the zone files in use, such as ``2026f``."""
    return str(tzdata.IANA_VERSION)


@lru_cache(maxsize=1)
def zone_names() -> frozenset[str]:
    """Return every zone name that `zone` accepts."""
    return frozenset(resources.files("tzdata").joinpath("zones").read_text(encoding="ascii").split())


@lru_cache(maxsize=1)
def folded_zone_names() -> dict[str, str]:
    """Return every zone name by its case-folded form."""
    return {name.casefold(): name for name in zone_names()}


def zone(named: str | tzinfo) -> ZoneInfo:
    """Return the zone of that name, or of that tzinfo's name, read from the PyPI `tzdata`.

    The same name gives the same object. It does not pickle: keep the name (`.key`). `InvalidSchedule` for an unknown
    name, with the nearest ones, and for a tzinfo that has none.
    """
    return _load(named if isinstance(named, str) else _name_of(named))


def _name_of(given: tzinfo) -> str:
    # ZoneInfo says `key`, pytz `zone`; datetime.timezone.utc is what Celery has where nothing is configured.
    name = getattr(given, "key", None) or getattr(given, "zone", None)
    if name is None and given == UTC:
        name = "UTC"
    if not isinstance(name, str):
        raise InvalidSchedule(
            f"zone {given!r} has no IANA name: give a name such as 'Europe/Paris'", field="zone", text=str(given)
        )
    return name


def _file(name: str) -> bytes:
    return resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()


@lru_cache(maxsize=1024)
def _load(name: str) -> ZoneInfo:
    if name not in zone_names():
        raise InvalidSchedule(f"zone {name!r} is unknown{nearest_zones(name)}", field="zone", text=name)
    return ZoneInfo.from_file(io.BytesIO(_file(name)), key=name)


def nearest_zones(name: str) -> str:
    """Return the end of an error message: the zone names nearest to `name`, or where to find them all."""
    by_fold = folded_zone_names()
    near = difflib.get_close_matches(name.casefold(), by_fold, n=3, cutoff=0.6)
    if not near:
        return ": zones have IANA names such as 'Europe/Paris' or 'UTC'"
    return ": did you mean " + ", ".join(repr(by_fold[found]) for found in near) + "?"


class Stretch(NamedTuple):
    """A time of constant offset: begin <= instant < end, opens <= wall < closes.

    `before` is the wall at which the stretch before it closed: before < opens is a gap at `begin`, before > opens a
    fold. `after` is the wall at which the next one opens.
    """

    begin: datetime
    end: datetime
    offset: timedelta
    opens: datetime
    closes: datetime
    before: datetime
    after: datetime


class Offsets:
    """The stretches of one zone from year 1 to 9999, in order; those of the footer's rule are found when asked for.

    In every zone of tzdata two changes are days apart (a test holds us to it) and none moves the clock by more than
    one, so that a wall is shown twice at most, and its passes are in neighbouring stretches.
    """

    __slots__ = ("_changes", "_final", "_lock", "_offsets", "_seen", "zone")

    def __init__(self, named: str) -> None:
        self.zone = zone(named)
        self._lock = threading.Lock()
        self._final = False
        # Stretch i goes from change i to change i + 1, at offset i. Both lists only ever grow at their end.
        self._changes = [datetime.min]
        transitions = _transitions(_file(named))
        self._offsets = [self._offset(transitions[0] - SECOND if transitions else datetime(1900, 1, 1))]
        for instant in transitions:
            self._turn(instant)
        # The footer's rule begins where the file's list ends, be the last of it a change of name only (Troll).
        self._seen = transitions[-1] if transitions else datetime(1900, 1, 1)

    def index(self, instant: datetime) -> int:
        """Return the index of the stretch that holds an instant."""
        while instant >= self._changes[-1] and not self._final:
            self._extend()
        return bisect_right(self._changes, instant) - 1

    def stretch(self, index: int) -> Stretch | None:
        """Return the stretch at an index, None before the first and after the last."""
        while index + 1 >= len(self._changes) and not self._final:
            self._extend()
        return _stretch(self, index)

    def passes(self, wall: datetime) -> list[datetime]:
        """Return the instants at which a wall is shown: none in a gap, two in a fold; earliest first."""
        found = []
        index = self.index(shifted(wall, -DISORDER))
        last = self.index(shifted(wall, DISORDER))
        while index <= last:
            stretch = self.stretch(index)
            if stretch is not None and stretch.opens <= wall < stretch.closes:
                found.append(wall - stretch.offset)
            index += 1
        return found

    def gap_end(self, wall: datetime) -> datetime | None:
        """Return the first instant after the gap that a wall is in, None for a wall that is shown."""
        index = self.index(shifted(wall, -DISORDER))
        last = self.index(shifted(wall, DISORDER))
        while index <= last:
            stretch = self.stretch(index)
            if stretch is not None and stretch.before <= wall < stretch.opens:
                return stretch.begin
            index += 1
        return None

    def _offset(self, instant: datetime) -> timedelta:
        offset = instant.replace(tzinfo=UTC).astimezone(self.zone).utcoffset()
        assert offset is not None
        return offset

    def _turn(self, instant: datetime) -> bool:
        """Note a change at an instant, where there is one of offset (most files hold some of name only)."""
        offset = self._offset(instant)
        if offset == self._offsets[-1]:
            return False
        self._offsets.append(offset)  # before the change: a reader in another thread goes by the changes
        self._changes.append(instant)
        return True

    def _extend(self) -> None:
        """Find the next change that the footer's rule makes, by looking at each day; or see that there is none."""
        with self._lock:
            day = self._seen
            limit = min(shifted(day, _FINAL_AFTER), datetime.max.replace(microsecond=0) - DISORDER)
            while day < limit:
                later = min(day + DAY, limit)
                if self._offset(later) != self._offsets[-1]:
                    self._seen = self._first_change(day, later)
                    self._turn(self._seen)
                    return
                day = later
            self._final = True

    def _first_change(self, before: datetime, after: datetime) -> datetime:
        old = self._offsets[-1]
        while after - before > SECOND:
            middle = before + (after - before) // 2 // SECOND * SECOND
            if self._offset(middle) == old:
                before = middle
            else:
                after = middle
        return after


@lru_cache(maxsize=4096)
def _stretch(offsets: Offsets, index: int) -> Stretch | None:
    changes, shifts = offsets._changes, offsets._offsets
    if not 0 <= index < len(changes):
        return None
    begin, offset = changes[index], shifts[index]
    opens = shifted(begin, offset)
    before = shifted(begin, shifts[index - 1]) if index else opens
    if index + 1 < len(changes):
        end = changes[index + 1]
        return Stretch(begin, end, offset, opens, end + offset, before, end + shifts[index + 1])
    closes = shifted(datetime.max, offset)  # a wall whose instant would be in the year 10000 is not shown
    return Stretch(begin, datetime.max, offset, opens, closes, before, closes)


@lru_cache(maxsize=1024)
def offsets(named: str) -> Offsets:
    """Return the offsets of the zone of that name; the same object for the same name."""
    return Offsets(named)


def shifted(moment: datetime, by: timedelta) -> datetime:
    """Return moment + by, held within years 1 to 9999."""
    try:
        return moment + by
    except OverflowError:
        return datetime.max if by > timedelta(0) else datetime.min


def _transitions(file: bytes) -> list[datetime]:
    """Return the instants in the second (64-bit) block of a TZif file (RFC 8536)."""
    header, counts = ">6l", slice(20, 44)
    utc, standard, leaps, times, types, letters = struct.unpack(header, file[counts])
    start = 44 + times * 5 + types * 6 + letters + leaps * 8 + standard + utc
    times = struct.unpack(header, file[start:][counts])[3]
    seconds = struct.unpack_from(f">{times}q", file, start + 44)
    return [datetime(1970, 1, 1) + timedelta(seconds=second) for second in seconds]

"""Expected against received. Pure: schedule texts and two instants on one side, the tasks' file on the other.

Neither number comes from the ledger: a fault of the ledger cannot hide here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from celery_tzbeat.model import from_iso, iso
from celery_tzbeat.schedules import occurrences


class Due(NamedTuple):
    """One occurrence: an entry at a nominal instant."""

    entry: str
    nominal: datetime

    def __str__(self) -> str:
        return f"{self.entry} at {iso(self.nominal)}"


class Arrival(NamedTuple):
    """One run of a task: for which occurrence, and when."""

    due: Due
    at: datetime

    @property
    def late(self) -> timedelta:
        return self.at - self.due.nominal


class Takeover(NamedTuple):
    """How long nobody led after something was done to the leader, and how long at most was promised."""

    what: str
    took: timedelta
    promised: timedelta

    @property
    def kept(self) -> bool:
        return self.took <= self.promised

    @property
    def words(self) -> str:
        return f"takeover  {_seconds(self.took)} after {self.what} (promised: {_seconds(self.promised)})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in one stretch of time."""

    expected: int
    received: int
    lost: tuple[Due, ...]
    doubled: tuple[Due, ...]
    invented: tuple[Due, ...]
    latest: Arrival | None
    takeovers: tuple[Takeover, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong, in words; empty when every promise was kept."""
        found = [f"{len(dues)} {word}" for word, dues in self._wrong if dues]
        found += [takeover.words for takeover in self.takeovers if not takeover.kept]
        if not self.expected:
            found.append("nothing was expected, so nothing was shown")
        return tuple(found)

    def lines(self) -> Iterator[str]:
        """Yield the verdict for a human; the last line begins with ``demo: ok`` or ``demo: FAILED``."""
        yield f"expected  {self.expected:4d}   from the schedules and the clock"
        yield f"received  {self.received:4d}   from what the tasks wrote"
        for word, dues in self._wrong:
            yield f"{word:9s} {len(dues):4d}   {_some(dues)}".rstrip()
        if self.latest is not None:
            yield f"latest    {_seconds(self.latest.late)} after its time: {self.latest.due}"
        for takeover in self.takeovers:
            yield takeover.words + ("" if takeover.kept else "   TOO LATE")
        if self.faults:
            yield f"demo: FAILED, {', '.join(self.faults)}"
        else:
            yield f"demo: ok, {self.expected} expected, {self.received} received, none lost, none doubled"

    @property
    def _wrong(self) -> tuple[tuple[str, tuple[Due, ...]], ...]:
        return ("lost", self.lost), ("doubled", self.doubled), ("invented", self.invented)


def expected_between(texts: Mapping[str, str], after: datetime, until: datetime) -> frozenset[Due]:
    """Return every occurrence with after < nominal <= until, by the text of each entry's schedule."""
    return frozenset(
        Due(entry, nominal)
        for entry, text in texts.items()
        for nominal in occurrences(text, "UTC", after=after, until=until)
    )


def read_arrivals(text: str) -> list[Arrival]:
    """Return what the tasks wrote, in that order; runs that belong to no occurrence are left out."""
    found = []
    for line in text.splitlines():
        fields = json.loads(line)
        if fields["entry"] is not None:
            found.append(Arrival(Due(fields["entry"], from_iso(fields["nominal"])), from_iso(fields["at"])))
    return found


def judge(
    expected: frozenset[Due],
    arrivals: Iterable[Arrival],
    *,
    after: datetime,
    until: datetime,
    takeovers: Iterable[Takeover] = (),
) -> Verdict:
    """Compare: lost and invented for after < nominal <= until, doubled for everything that arrived."""
    arrivals = list(arrivals)
    times = Counter(arrival.due for arrival in arrivals)
    within = [arrival for arrival in arrivals if after < arrival.due.nominal <= until]
    return Verdict(
        expected=len(expected),
        received=len(within),
        lost=_sorted(expected - times.keys()),
        doubled=_sorted(due for due, count in times.items() if count > 1),
        invented=_sorted({arrival.due for arrival in within} - expected),
        latest=max(within, key=lambda arrival: arrival.late, default=None),
        takeovers=tuple(takeovers),
    )


def _sorted(dues: Iterable[Due]) -> tuple[Due, ...]:
    return tuple(sorted(dues, key=lambda due: (due.nominal, due.entry)))


def _some(dues: tuple[Due, ...], shown: int = 3) -> str:
    rest = len(dues) - shown
    return ", ".join(map(str, dues[:shown])) + (f" and {rest} more" if rest > 0 else "")


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():.2f} s"

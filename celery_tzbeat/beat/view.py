"""Whether what looks like a dead worker may be a dead store: how long this leader has seen the store without a break.

A run lease lapses when no heartbeat arrives. That tells of the worker only if heartbeats could arrive: a store that was
restarted, fell back to another master or had its clock moved makes every healthy run look dead. So a lapsed run counts for
as long as its lease and two heartbeats only if in all that time no call of this leader failed, the same server answered,
and its clock went on as ours did.

Pure: no I/O, no clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from celery_tzbeat.clock import Reading
from celery_tzbeat.store.runs import heartbeat_of

#: How far the store's clock may run from ours between two looks, in seconds: more is a jump.
JUMP = 0.5


@dataclass(frozen=True, slots=True)
class _Look:
    time: datetime  # the store's
    asked: float
    answered: float


class View:
    """What one term of office has seen of the store. `lineage` names the process that answered when it began."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last: _Look | None = None
        self.lineage = ""

    @property
    def is_broken(self) -> bool:
        """Whether nothing was seen since the last break."""
        return self._began is None

    def break_off(self) -> None:
        """A call failed, or another server answers: what was seen before tells nothing any more."""
        self._began = self._last = None

    def saw(self, time: datetime, *, asked: Reading, answered: Reading) -> None:
        """The store answered, by its clock at `time`, between two readings of ours. A jump is a break."""
        look = _Look(time, asked.monotonic, answered.monotonic)
        if self._last is not None and _jumped(self._last, look):
            self._began = None
        if self._began is None:
            self._began = look.asked
        self._last = look

    def seconds(self) -> float:
        """Return for how long the view was unbroken when the store answered last."""
        if self._began is None or self._last is None:
            return 0.0
        return self._last.asked - self._began

    def shows_dead(self, run_lease: timedelta) -> bool:
        """Return whether a run whose lease has lapsed is dead by this view."""
        return self.seconds() >= run_lease.total_seconds() + 2 * heartbeat_of(run_lease)


def _jumped(before: _Look, look: _Look) -> bool:
    passed = (look.time - before.time).total_seconds()
    least, most = look.asked - before.answered, look.answered - before.asked
    return not least - JUMP <= passed <= most + JUMP

"""What a run keeps in the ledger for its next attempt: a state of the task's, and how far each of its loops is.

Nothing here raises into the task for the ledger's sake: what cannot be kept is counted, logged, and answered False.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from celery.exceptions import SoftTimeLimitExceeded

from celery_tzbeat.clock import Clock, Reading

from .faults import note

#: The largest checkpoint, in bytes of JSON.
LARGEST = 256 * 1024

#: How long the store is not asked again after it failed, in seconds: a run must not stand still because the store does.
PAUSE = 5.0


class Keeper(Protocol):
    """The part of `store.runs.Runs` that a task's body uses."""

    def checkpoint(self, key: str, token: str, state: bytes) -> bool:
        """Keep a run's checkpoint; False where the run is no longer this token's."""

    def progress(self, key: str, token: str, done: int, total: int | None) -> bool:
        """Keep how far a run is; False where the run is no longer this token's."""


class Line:
    """A run's line to the ledger. After a failed call nothing is asked for PAUSE seconds: each call may take its timeout.

    `keeper` opens this process's own client at its first call: nothing is opened for a task that keeps nothing.
    """

    def __init__(self, key: str, token: str, keeper: Callable[[], Keeper], clock: Clock) -> None:
        self._key = key
        self._token = token
        self._keeper = keeper
        self._clock = clock
        self._failed: Reading | None = None

    def checkpoint(self, state: bytes) -> bool:
        """Keep a checkpoint. Returns whether it is kept."""
        return self._ask(lambda keeper: keeper.checkpoint(self._key, self._token, state))

    def progress(self, done: int, total: int | None) -> bool:
        """Keep a progress. Returns whether it is kept."""
        return self._ask(lambda keeper: keeper.progress(self._key, self._token, done, total))

    def _ask(self, call: Callable[[Keeper], bool]) -> bool:
        if self._failed is not None and self._clock.reading().advance_since(self._failed) < PAUSE:
            return False
        try:
            kept = call(self._keeper())
        except SoftTimeLimitExceeded:  # the task's own limit, which a signal raises wherever it is
            raise
        except Exception as exc:
            self._failed = self._clock.reading()
            note("checkpoint_store", "%s: nothing can be kept now: %s: %s", self._key, type(exc).__name__, exc)
            return False
        self._failed = None
        if not kept:
            # Taken away, or unknown since the store was wiped: the heartbeat finds out which, and tells the run.
            note("lost_token", "%s: nothing is kept: in the ledger this run is not this worker's", self._key)
        return kept


class Checkpoint:
    """A run's checkpoint: `run.checkpoint`. Without a line (outside a run) it is kept in this object only."""

    def __init__(self, line: Line | None = None, kept: bytes | None = None) -> None:
        self._line = line
        form = _read(kept)
        self._state: str | None = form.get("state")
        self._loops: dict[str, int] = dict(form.get("loops") or {})
        self._owed = False

    def load(self, default: Any = None) -> Any:
        """Return the state that was saved last, by this attempt or an earlier one; `default` where none was."""
        return default if self._state is None else json.loads(self._state)

    def save(self, state: Any) -> bool:
        """Keep `state`, whatever JSON can say, up to 256 kB. Returns whether it is kept: the run goes on either way.

        One call to the store, and what `run.each` owes goes with it. Not kept (logged and counted) is what is too large, what
        comes while the store is down, and what comes of a run that was taken away. Raises TypeError or ValueError for what
        JSON cannot say, as `json.dumps` does.
        """
        before, self._state = self._state, json.dumps(state)
        size = len(self._form())
        if size > LARGEST:
            self._state = before
            note("checkpoint_too_large", "a checkpoint of %d bytes is not kept: %d are the most", size, LARGEST)
            return False
        self._owed = True
        return self.flush()

    def reached(self, loop: str) -> int:
        """Return how many items of a loop are done."""
        return self._loops.get(loop, 0)

    def reach(self, loop: str, done: int) -> None:
        """Note how many items of a loop are done; `flush` keeps it."""
        self._loops[loop] = done
        self._owed = True

    def flush(self) -> bool:
        """Keep what is owed. Returns whether nothing is owed any more."""
        if self._owed and (self._line is None or self._line.checkpoint(self._form())):
            self._owed = False
        return not self._owed

    def _form(self) -> bytes:
        form = {"v": 1, "state": self._state, "loops": self._loops}
        return json.dumps({name: value for name, value in form.items() if value}).encode()


def _read(kept: bytes | None) -> dict[str, Any]:
    """Return what a checkpoint says; nothing for one that cannot be read, which is counted."""
    try:
        form = json.loads(kept) if kept else {}
        return form if isinstance(form, dict) else {}
    except ValueError as exc:
        note("checkpoint_unreadable", "a checkpoint cannot be read, the run begins anew: %s", exc)
        return {}

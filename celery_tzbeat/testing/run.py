"""`run_context`: a task's body in a unit test, without a worker, a broker or a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from celery_tzbeat.clock import Clock, SystemClock
from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.model import Occurrence, from_iso
from celery_tzbeat.worker.checkpoint import LARGEST
from celery_tzbeat.worker.run import bind, unbind

#: The nominal of a run whose test names none.
SOME_NOMINAL = from_iso("2026-01-01T00:00:00Z")


class TestedRun:
    """What a body kept and said, as the ledger would have it."""

    __test__ = False

    def __init__(self, kept: bytes | None) -> None:
        self.kept = kept
        self.progress: tuple[int, int | None] | None = None

    @property
    def checkpoint(self) -> Any:
        """The state that was saved last, by this attempt or before; None where none was."""
        state = self._form.get("state")
        return None if state is None else json.loads(state)

    def done(self, loop: str = "") -> int:
        """Return how many items of a loop of `run.each` are done; a loop is named where the task names it."""
        return int((self._form.get("loops") or {}).get(loop, 0))

    @property
    def _form(self) -> dict[str, Any]:
        return dict(json.loads(self.kept)) if self.kept else {}


class _Keeper:
    def __init__(self, tested: TestedRun) -> None:
        self._tested = tested

    def checkpoint(self, key: str, token: str, state: bytes) -> bool:
        assert len(state) <= LARGEST
        self._tested.kept = state
        return True

    def progress(self, key: str, token: str, done: int, total: int | None) -> bool:
        self._tested.progress = (done, total)
        return True


class _Told:
    """Says nothing for `looks` looks, then cancel; and that the time is up, where it is."""

    def __init__(self, looks: int | None, deadline: float | None, clock: Clock) -> None:
        self._looks = looks
        self._deadline = deadline
        self._clock = clock

    @property
    def why(self) -> str:
        if self._looks is not None:
            self._looks -= 1
            if self._looks < 0:
                return "cancel"
        up = self._deadline is not None and self._clock.reading().monotonic >= self._deadline
        return "deadline" if up else ""


@contextmanager
def run_context(
    entry: str,
    *,
    nominal: datetime = SOME_NOMINAL,
    attempt: int = 1,
    epoch: int = 1,
    checkpoint: Any = None,
    resume: TestedRun | None = None,
    cancel_after: int | None = None,
    timeout: float | timedelta | None = None,
    clock: Clock | None = None,
) -> Iterator[TestedRun]:
    """Call a task's body inside as in a worker: `current_run()` is a run of `entry`. Yields what the body keeps.

    `checkpoint` is the state that an earlier attempt saved; `resume` is what an earlier `run_context` yielded, its loops
    included. With ``cancel_after=3`` the run is asked to stop after the task has looked three times: each item of `run.each`
    is a look, and so are `run.cancelled` and `run.raise_if_cancelled`. `timeout` (seconds or timedelta) is the soft limit
    as `run.remaining` and the looks tell it; nothing interrupts the body. No gate, no heartbeat, no retry by policy.
    """
    clock = clock or SystemClock()
    kept = resume.kept if resume is not None else None
    if checkpoint is not None:
        kept = json.dumps({"v": 1, "state": json.dumps(checkpoint)}).encode()
    tested = TestedRun(kept)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    deadline = clock.reading().monotonic + seconds if seconds is not None else None
    ticket = Ticket(
        namespace="tests",
        key=Occurrence(entry, nominal).key,
        entry=entry,
        nominal=nominal,
        epoch=epoch,
        dispatch=1,
        number=0,
        field=0,
    )
    bind(
        ticket,
        attempt=attempt,
        epoch=epoch,
        token="tests",
        deadline=deadline,
        flags=_Told(cancel_after, deadline, clock),
        runs=lambda: _Keeper(tested),
        checkpoint=kept,
        clock=clock,
    )
    try:
        yield tested
    finally:
        unbind()

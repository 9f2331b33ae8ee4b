"""Entries that let nothing run beside an open occurrence of theirs: held before they are built, released afterwards.

The store decides (`Store.hold`), and once more when the message is dispatched: an occurrence may have been opened between.
What waits stands in the ledger; its message is built when it is released, and that needs the entry's definition.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from datetime import datetime

from celery_tzbeat.clock import Clock, Reading
from celery_tzbeat.deliveries import DeadLetter
from celery_tzbeat.model import Occurrence, Unrun
from celery_tzbeat.store.protocol import Answer, Hold, Run, Tracking, Verdict

from .agenda import BUILD_ATTEMPTS, Agenda, Course
from .claims import Claims
from .dispatch import BuildFailed
from .events import Events
from .ledger import Ledger, Replaced
from .paths import Outgoing, Path

logger = logging.getLogger(__name__)

#: How often the leader says that nothing tells it when runs end, in seconds.
WARN_EVERY = 60.0


class Overlap:
    """The overlap policies of one term of office."""

    def __init__(
        self, *, ledger: Ledger, agenda: Agenda, path: Path, claims: Claims, clock: Clock, events: Events
    ) -> None:
        self._ledger = ledger
        self._store = ledger.store
        self._agenda = agenda
        self._path = path
        self._claims = claims
        self._clock = clock
        self._events = events
        self._failures: Counter[str] = Counter()  # builds that failed, by key
        self._held = tuple(name for name, entry in agenda.entries.items() if entry.policy.overlap != "allow_all")
        self._warned_at: Reading | None = None

    def admits(self, course: Course) -> bool:
        """Return whether the course's occurrence may be built now. Where not, the ledger has it, and the course goes on."""
        policy = course.entry.policy
        if policy.overlap == "allow_all":
            return True
        occurrence, cursor = course.occurrence(), self._agenda.cursor(course)
        hold = Hold(occurrence, cursor, course.bucket, policy)
        answer = self._ask(hold)
        if answer.verdict is Verdict.EARLY:
            raise Replaced
        if answer.verdict is Verdict.DONE:
            return True
        self._agenda.done(course)
        if answer.verdict is Verdict.HELD and policy.overlap == "skip":
            at = occurrence.nominal
            self._events.unrun(Unrun("skipped", course.entry.name, at, at, 1, "overlap", cursor))
        return False

    def release(self, run: Run, now: datetime) -> None:
        """Line 7: send what waits, where what it waited for is settled. Line 8: what waited for too long is missed.

        What waits for an entry that this leader does not list waits on: its message cannot be built here.
        """
        assert run.nominal is not None
        if run.deadline <= now:
            self._ledger.settle_run(run, "missed", "waited for longer than catchup_window")
            return
        entry = self._agenda.entries.get(run.entry)
        if entry is None:
            return
        occurrence, cursor = Occurrence(run.entry, run.nominal), self._agenda.positions()[run.entry]
        if self._ask(Hold(occurrence, cursor, run.bucket, run.policy)).verdict is not Verdict.DONE:
            return
        try:
            message = self._path.build(entry, occurrence, epoch=self._ledger.epoch)
        except BuildFailed as failure:
            self._build_failed(run, entry.task, failure)
            return
        if not message.parts:
            self._ledger.settle_run(run, "skipped", "by the task")
            return
        message = replace(message, bucket=run.bucket)
        outgoing = Outgoing(entry, occurrence, cursor, message, Tracking(run.policy, message.eta))
        (answer,) = self._ledger.ask(lambda: self._path.send([outgoing], self._claims, epoch=self._ledger.epoch))
        if answer.verdict is Verdict.DONE and self._path.sends_at_once:
            self._events.sent(occurrence)

    def warn(self) -> None:
        """Say, each minute, that there are such entries and no worker half that tells when their runs end."""
        now = self._clock.reading()
        if not self._held or (self._warned_at is not None and now.advance_since(self._warned_at) < WARN_EVERY):
            return
        self._warned_at = now
        if not self._store.workers():
            logger.warning(
                "no worker half is alive to tell when a run ends: %s (overlap) wait for start_within each time. "
                "TzBeat(app) where the workers' app is made installs it",
                ", ".join(map(repr, self._held[:5])) + (" and more" if len(self._held) > 5 else ""),
                extra={"action": "overlap_without_workers"},
            )

    def _ask(self, hold: Hold) -> Answer:
        return self._ledger.ask(lambda: self._store.hold([hold], epoch=self._ledger.epoch))[0]

    def _build_failed(self, run: Run, task: str, failure: BuildFailed) -> None:
        self._failures[run.key] += 1
        logger.error(
            "entry %r: the message of %s, which waited, could not be built (%d of %d): %s",
            run.entry,
            run.key,
            self._failures[run.key],
            BUILD_ATTEMPTS,
            failure,
            extra={"action": "build_failed", "key": run.key},
        )
        if self._failures[run.key] < BUILD_ATTEMPTS:
            return
        letter = DeadLetter(
            key=run.key,
            entry=run.entry,
            task=task,
            nominal=run.nominal,
            reason="build",
            error=str(failure),
            at=self._clock.now(),
        )
        if self._ledger.settle_run(run, "dead", "build", letter.to_json()) and run.nominal is not None:
            self._events.dead(Occurrence(run.entry, run.nominal), "build")
        del self._failures[run.key]

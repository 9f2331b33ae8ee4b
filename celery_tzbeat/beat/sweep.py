"""What the leader does about occurrences that nobody else moves on: lapsed and abandoned runs, late and waiting messages.

Once a second, from the tick: one call while nothing waits. At most BATCH of each kind, and SWEEPING seconds, a time.

Failure table (lines 14, 25, 26 of the state table):

    call            dies before / reply lost               meanwhile                            a later leader in office
    survey          asked again                            -                                    -
    abandon         the run stays lapsed / is in `due`     beaten, ended, taken over: DECIDED   STALE
    redispatch      stays abandoned / an open claim        started by a copy: DECIDED           STALE; takes the claim over
                    of this term: owed again
    settle_run      stays as it was / DECIDED              started: DECIDED, it runs            STALE
    the view        broken by any failed call: nothing is abandoned for a run lease and two heartbeats

Whether a *lapsed* run is dead is judged by `view` alone. A run that MAIN has seen die, or gave back, stands abandoned
already. By the policy in its record, no entry's definition is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from celery_tzbeat.clock import Clock, Reading
from celery_tzbeat.deliveries import DeadLetter
from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.model import Occurrence
from celery_tzbeat.store.protocol import BATCH, Claimed, Run, Survey, Verdict

from .claims import Claims
from .events import Events
from .ledger import Ledger
from .overlap import Overlap
from .requests import Requests
from .view import View

logger = logging.getLogger(__name__)

#: How often the leader looks, in seconds.
EVERY = 1.0

#: How long a sweep takes at most, but for the call it is in, and how often it looks while more waits, in seconds.
SWEEPING = 0.25


class Sweep:
    """The sweep of one term of office."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        claims: Claims,
        overlap: Overlap,
        requests: Requests,
        clock: Clock,
        progress: Callable[[], None],
        events: Events,
    ) -> None:
        self._ledger = ledger
        self._store = ledger.store
        self._claims = claims
        self._overlap = overlap
        self._requests = requests
        self._clock = clock
        self._progress = progress
        self._events = events
        self._began: Reading | None = None  # the last sweep
        self._is_through = True
        self.view = View()

    @property
    def wait(self) -> float:
        """In how many seconds to sweep again."""
        if self._began is None:
            return 0.0
        every = EVERY if self._is_through else SWEEPING
        return max(0.0, every - self._clock.reading().advance_since(self._began))

    def sweep(self) -> None:
        """Look, where it is time to, and do what waits. Raises StoreUnavailable and Replaced."""
        if self.wait:
            return
        self._began, self._is_through = self._clock.reading(), False
        found = self._survey()
        self._overlap.warn()
        steps: list[Callable[[], None]] = [
            *(lambda run=run: self._lapsed(run) for run in found.lapsed),
            *(lambda run=run: self._due(run, found.time) for run in found.due),
            *(lambda each=each: self._requests.carry_out(each, found.time) for each in found.requests),
        ]
        for step in steps:
            if self._clock.reading().advance_since(self._began) >= SWEEPING:
                return
            step()
            self._progress()
        self._is_through = max(len(found.lapsed), len(found.due), len(found.requests)) < BATCH

    def _survey(self) -> Survey:
        asked, begins = self._clock.reading(), self.view.is_broken
        found = self._store.survey(limit=BATCH)
        self.view.saw(found.time, asked=asked, answered=self._clock.reading())
        self._progress()
        if begins or found.lapsed:
            lineage = self._store.lineage()
            self._progress()
            if lineage != self.view.lineage and not begins:
                self.view.break_off()
            self.view.lineage = lineage
        return found

    def _lapsed(self, run: Run) -> None:
        """Line 25, where the view shows that the run is dead and not the store."""
        if not self.view.shows_dead(run.policy.run_lease):
            return
        answer = self._ledger.ask_one(lambda: self._store.abandon(run, epoch=self._ledger.epoch))
        if answer.verdict is Verdict.DONE:
            logger.warning(
                "the run of %s on %s is abandoned: no heartbeat for its run lease (%g s)",
                run.key,
                run.worker,
                run.policy.run_lease.total_seconds(),
                extra={"action": "run_abandoned", "key": run.key, "worker": run.worker},
            )

    def _due(self, run: Run, now: datetime) -> None:
        match run.state:
            case "waiting":
                self._overlap.release(run, now)
            case "published":
                self._late(run)
            case "abandoned":
                self._abandoned(run, now)

    def _late(self, run: Run) -> None:
        """Line 14: it is not followed any longer; should it still come, it runs."""
        words = f"not started within {run.policy.start_within.total_seconds():g} s"
        if self._ledger.settle_run(run, "lost", words):
            logger.error("%s is lost: %s", run.key, words, extra={"action": "occurrence_lost", "key": run.key})
            if run.nominal is not None:
                self._events.lost(Occurrence(run.entry, run.nominal))

    def _abandoned(self, run: Run, now: datetime) -> None:
        """Line 26: dispatched again, or dead, as its policy says."""
        if run.nominal is None:  # an ordinary message behind the gate: its broker has it, and delivers it again
            self._ledger.settle_run(run, "lost", "its worker is gone; a copy that still comes runs")
            return
        reason, words = end_of(run)
        if not reason:
            try:
                payload = (
                    Parcel.from_bytes(run.payload).again(dispatch=run.order[0] + 1, retries=run.order[1]).to_bytes()
                )
            except Exception as exc:  # whatever its parts raise: of another release, or not written by us
                reason, words = "abandoned", f"its message cannot be read: {type(exc).__name__}: {exc}"
        if reason:
            self._bury(run, reason, words, now)
            return
        answer = self._ledger.ask_one(lambda: self._store.redispatch(run, payload, epoch=self._ledger.epoch))
        if answer.verdict is Verdict.DONE:
            self._claims.add(Claimed(Occurrence(run.entry, run.nominal), run.bucket), payload)
            logger.warning(
                "%s is dispatched again: its run on %s was abandoned",
                run.key,
                run.worker,
                extra={"action": "redispatched", "key": run.key},
            )

    def _bury(self, run: Run, reason: str, words: str, now: datetime) -> None:
        letter = letter_of(run, reason, words, now)
        if self._ledger.settle_run(run, "dead", reason, letter.to_json()) and run.nominal is not None:
            logger.error(
                "%s is dead (%s): %s", run.key, reason, words, extra={"action": "occurrence_dead", "key": run.key}
            )
            self._events.dead(Occurrence(run.entry, run.nominal), reason)


def end_of(run: Run) -> tuple[str, str]:
    """Return why an abandoned run is dead, in one word and in words; ("", "") where it is to be dispatched again."""
    policy = run.policy
    if run.unrun:
        return "", ""
    if policy.delivery == "at_most_once":
        return "abandoned", f"its run on {run.worker} was abandoned, and it is delivered at most once"
    if policy.on_abandoned == "dead_letter":
        return "abandoned", f"its run on {run.worker} was abandoned (on_abandoned is dead_letter)"
    if policy.on_abandoned == "auto" and not run.acks_late:
        words = "and its task acknowledges early (on_abandoned is auto)"
        return "abandoned", f"its run on {run.worker} was abandoned, {words}"
    if run.deliveries >= policy.max_deliveries:
        return "deliveries", f"started {run.deliveries} times without an end (max_deliveries)"
    return "", ""


def letter_of(run: Run, reason: str, words: str, at: datetime) -> DeadLetter:
    """Return the dead letter of a run that its worker cannot write, with the message that the ledger keeps."""
    try:
        headers = Parcel.from_bytes(run.payload).run.headers
    except Exception:  # it is kept as it is
        headers = {}
    return DeadLetter(
        key=run.key,
        entry=run.entry,
        task=str(headers.get("task") or ""),
        nominal=run.nominal,
        reason=reason,
        error=words,
        at=at,
        message=run.payload,
        attempts=run.order[1] + 1,
        worker=run.worker,
        task_id=str(headers.get("id") or ""),
    )

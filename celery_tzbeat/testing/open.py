"""Open occurrences of the store in memory: claims, tracked runs, requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from celery_tzbeat.deliveries import DeadLetter, WorkerPresence
from celery_tzbeat.model import MICROSECOND, Cursor, Occurrence, Pause, Policy
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import (
    BATCH,
    Answer,
    Claim,
    Claimed,
    Hold,
    OpenOccurrence,
    Request,
    Run,
    State,
    Survey,
    Tracking,
    Verdict,
)
from celery_tzbeat.store.runs import SEEN, Order

from .ledger import MemoryLedger, Record


class MemoryOpenOccurrences(MemoryLedger):
    """See `store.protocol.Store` for what each call means."""

    # ---- opening, and claims over other brokers

    def hold(self, holds: Sequence[Hold], *, epoch: int) -> list[Answer]:
        if refusal := self.refused(epoch):
            return [Answer(refusal)] * len(holds)
        return [Answer(self._hold(item, epoch)) for item in holds]

    def _hold(self, item: Hold, epoch: int) -> Verdict:
        occurrence, overlap = item.occurrence, item.policy.overlap
        entry, nominal, now = occurrence.entry, occurrence.nominal, self.clock.now()
        if verdict := self.unopenable(occurrence, item.bucket, item.cursor):
            return verdict
        waits = occurrence.key in self.data.open
        sent_by: list[datetime] = []
        if overlap != "skip" and self.held(occurrence):
            for other in sorted(self.beside(entry, occurrence.key), key=lambda record: record.occurrence.nominal):
                sent_by += self._clear_away(other, nominal, overlap, epoch)
        if not self.held(occurrence):
            return Verdict.DONE
        if overlap == "skip" and not waits:
            self.data.cursors[entry] = item.cursor
            self.data.last[entry] = (nominal, "skipped", now)
            self.note("skipped", entry, nominal, nominal, 1, epoch, "overlap")
            return Verdict.HELD
        if not waits:
            tracking = Tracking(item.policy)
            record = self.open_record(occurrence, item.bucket, item.cursor, "waiting", epoch, tracking)
            record.until = nominal + item.policy.catchup_window
            if overlap == "cancel_other":
                record.sent_by = min([*sent_by, now + item.policy.kill_after])
        self.data.open[occurrence.key].deadline = now
        return Verdict.HELD

    def _clear_away(self, other: Record, nominal: datetime, overlap: str, epoch: int) -> list[datetime]:
        """Return by when at the latest one that is settled here would have been sent, where it says so."""
        settle_as = ""
        if other.state == "waiting":
            if other.nominal is not None and other.nominal < nominal:
                settle_as = "coalesced"
        elif overlap == "cancel_other" and other.state != "running":
            settle_as = "withdrawn"
        elif overlap == "cancel_other" and not other.cancel:
            other.cancel = "overlap"
            self.note("cancel", other.entry, other.nominal, other.nominal, 1, epoch, "overlap")
        if not settle_as:
            return []
        self.settle_record(other, settle_as, epoch, "overlap")
        return [other.sent_by] if other.sent_by is not None else []

    def open_record(
        self,
        occurrence: Occurrence,
        bucket: Bucket,
        cursor: Cursor,
        state: str,
        epoch: int,
        tracking: Tracking | None,
        payload: bytes = b"",
    ) -> Record:
        """Write an occurrence down as unsettled, and move its cursor."""
        record = Record(
            occurrence.key,
            occurrence.entry,
            occurrence.nominal,
            bucket,
            state,
            epoch,
            self.clock.now(),
            payload=payload,
            misfire=occurrence.late,
            policy=tracking.policy if tracking is not None else None,
            eta=tracking.eta if tracking is not None else None,
        )
        if state == "published" and tracking is not None:
            record.deadline = self.late_after(tracking.eta, tracking.policy)
        self.data.open[occurrence.key] = record
        self.advance(occurrence, cursor)
        detail = "misfire" if occurrence.late else ""
        self.note(state, occurrence.entry, occurrence.nominal, occurrence.nominal, 1, epoch, detail)
        return record

    def claim(self, claims: Sequence[Claim], *, epoch: int) -> list[Answer]:
        if refusal := self.refused(epoch):
            return [Answer(refusal)] * len(claims)
        self.data.fence = epoch
        return [Answer(self._claim(claim, epoch)) for claim in claims]

    def _claim(self, claim: Claim, epoch: int) -> Verdict:
        occurrence, tracking = claim.occurrence, claim.tracking
        if verdict := self.unopenable(occurrence, claim.bucket, claim.cursor):
            return verdict
        if tracking is not None and tracking.policy.overlap != "allow_all" and self.held(occurrence):
            return Verdict.HELD
        self.open_record(occurrence, claim.bucket, claim.cursor, "claimed", epoch, tracking, claim.payload)
        return Verdict.DONE

    def confirm(self, claimed: Sequence[Claimed], *, epoch: int) -> list[Answer]:
        if refusal := self.refused(epoch):
            return [Answer(refusal)] * len(claimed)
        return [Answer(self._confirm(item.occurrence, epoch)) for item in claimed]

    def _confirm(self, occurrence: Occurrence, epoch: int) -> Verdict:
        record = self.data.open.get(occurrence.key)
        if record is None or record.state != "claimed":
            return Verdict.DECIDED
        detail = "misfire" if record.misfire else ""
        if record.policy is None:
            self.settle_record(record, "sent", epoch, detail)
        else:
            record.state, record.deadline = "published", self.late_after(record.eta, record.policy)
            self.note("published", record.entry, record.nominal, record.nominal, 1, epoch, detail)
        return Verdict.DONE

    def open_since(self) -> Mapping[str, datetime]:
        return {key: record.deadline for key, record in self.data.open.items() if record.state == "claimed"}

    def reclaim(self, occurrence: Occurrence, *, epoch: int) -> OpenOccurrence | None:
        record = self.data.open.get(occurrence.key)
        if self.refused(epoch) or record is None or record.state != "claimed" or record.epoch >= epoch:
            return None
        before, record.epoch = record.epoch, epoch
        self.note("reclaimed", record.entry, record.nominal, record.nominal, 1, epoch, str(before))
        return record.opened()

    def settle(self, claimed: Claimed, state: State, reason: str, *, epoch: int, letter: str = "") -> Answer:
        if refusal := self.refused(epoch):
            return Answer(refusal)
        record = self.data.open.get(claimed.occurrence.key)
        if record is None or record.state != "claimed":
            return Answer(Verdict.DECIDED)
        self.settle_record(record, state, epoch, reason, letter)
        return Answer(Verdict.DONE)

    def open_occurrences(self) -> list[OpenOccurrence]:
        claims = [record for record in self.data.open.values() if record.state == "claimed"]
        return [record.opened() for record in sorted(claims, key=lambda record: record.deadline)]

    # ---- tracked occurrences

    def workers_lived(self) -> bool:
        return bool(self.data.workers)

    def workers(self) -> list[WorkerPresence]:
        since = self.clock.now() - SEEN
        return [presence for seen, presence in self.data.workers.values() if seen > since]

    def runs(self, entry: str = "") -> list[Run]:
        found = [record for record in self.data.open.values() if record.policy is not None]
        found.sort(key=lambda record: (record.state != "claimed", record.deadline))
        return [record.run() for record in found if entry in ("", record.entry)]

    def survey(self, *, limit: int = BATCH) -> Survey:
        now = self.clock.now()
        found = [record for record in self.data.open.values() if record.policy is not None and record.deadline <= now]
        found.sort(key=lambda record: record.deadline)
        return Survey(
            now,
            lapsed=tuple(record.run() for record in found if record.state == "running")[:limit],
            due=tuple(record.run() for record in found if record.state not in ("claimed", "running"))[:limit],
            requests=tuple(self.data.requests.values())[:limit],
        )

    def abandon(self, run: Run, *, epoch: int) -> Answer:
        if refusal := self.refused(epoch):
            return Answer(refusal)
        record = self.data.open.get(run.key)
        if record is None or (record.state, record.token) != ("running", run.token):
            return Answer(Verdict.DECIDED)
        if record.deadline > self.clock.now():
            return Answer(Verdict.DECIDED)
        return Answer(Verdict.DONE, self.free(record, epoch, "the run lease lapsed"))

    def redispatch(self, run: Run, payload: bytes, *, epoch: int) -> Answer:
        if refusal := self.refused(epoch):
            return Answer(refusal)
        record = self.data.open.get(run.key)
        if record is None or record.state != "abandoned" or record.order.dispatch != run.order[0]:
            return Answer(Verdict.DECIDED)
        record.state, record.order, record.epoch = "claimed", Order(run.order[0] + 1, 0), epoch
        record.payload, record.eta, record.deadline = payload, None, self.clock.now()
        detail = str(record.order.dispatch)
        self.note("redispatched", record.entry, record.nominal, record.nominal, 1, epoch, detail)
        return Answer(Verdict.DONE)

    def settle_run(self, run: Run, state: State, reason: str, *, epoch: int, letter: str = "") -> Answer:
        if refusal := self.refused(epoch):
            return Answer(refusal)
        record = self.data.open.get(run.key)
        if record is None or record.state == "running" or (record.state, record.order) != (run.state, run.order):
            return Answer(Verdict.DECIDED)
        self.settle_record(record, state, epoch, reason, letter)
        return Answer(Verdict.DONE)

    def replay(
        self, request: Request, claimed: Claimed, payload: bytes, *, policy: Policy, dispatch: int, epoch: int
    ) -> Answer:
        if refusal := self.refused(epoch):
            return Answer(refusal)
        occurrence = claimed.occurrence
        if occurrence.key not in self.data.dead or occurrence.key in self.data.open:
            return Answer(Verdict.DECIDED)
        mark = self.data.done.get((occurrence.entry, claimed.bucket), "").split()
        if mark and mark[0] not in ("dead", "sent", "lost"):
            return Answer(Verdict.DECIDED)
        if mark and int(mark[1]) >= dispatch:
            return Answer(Verdict.DECIDED, str(int(mark[1]) + 1))
        self.data.open[occurrence.key] = Record(
            occurrence.key,
            occurrence.entry,
            occurrence.nominal,
            claimed.bucket,
            "claimed",
            epoch,
            self.clock.now(),
            payload=payload,
            policy=policy,
            order=Order(dispatch, 0),
        )
        del self.data.dead[occurrence.key]
        self._answered(request, f"replayed as dispatch {dispatch}")
        self.note("replayed", occurrence.entry, occurrence.nominal, occurrence.nominal, 1, epoch, _who(request))
        return Answer(Verdict.DONE)

    def discard(self, request: Request, key: str, *, epoch: int) -> Answer:
        if refusal := self.refused(epoch):
            return Answer(refusal)
        letter = self.data.dead.pop(key, None)
        if letter is None:
            return Answer(Verdict.DECIDED)
        self._answered(request, "discarded")
        self.note("discarded", _entry_of(letter), None, None, 1, epoch, _who(request))
        return Answer(Verdict.DONE)

    def cancel(self, request: Request, key: str, *, epoch: int) -> Answer:
        if refusal := self.refused(epoch):
            return Answer(refusal)
        record = self.data.open.get(key)
        if record is None:
            return Answer(Verdict.DECIDED)
        if record.state == "running":
            record.cancel = request.by
            self.note("cancel", record.entry, record.nominal, record.nominal, 1, epoch, _who(request))
            words = "asked to stop"
        else:
            self.settle_record(record, "withdrawn", epoch, _who(request))
            words = "withdrawn"
        self._answered(request, words)
        return Answer(Verdict.DONE, words)

    def dead_letter(self, key: str) -> str | None:
        return self.data.dead.get(key)

    def dead_letters(self) -> Mapping[str, str]:
        return dict(self.data.dead)

    # ---- paused entries

    def paused(self) -> Mapping[str, Pause]:
        return dict(self.data.paused)

    def pause(self, entry: str, pause: Pause, request: Request | None, *, epoch: int) -> Answer:
        if refusal := self.refused(epoch):
            return Answer(refusal)
        if request is not None and not self._answered(request, "paused"):
            return Answer(Verdict.DECIDED)
        self.data.paused[entry] = pause
        self.note("paused", entry, None, None, 0, epoch, pause.words)
        return Answer(Verdict.DONE)

    def unpause(self, entry: str, request: Request | None, *, epoch: int) -> Answer:
        if refusal := self.refused(epoch):
            return Answer(refusal)
        if self.data.paused.pop(entry, None) is None:
            return Answer(Verdict.DECIDED)
        if request is not None:
            self._answered(request, "unpaused")
        self.note(
            "unpaused", entry, None, None, 0, epoch, _who(request) if request is not None else "its time has come"
        )
        return Answer(Verdict.DONE)

    # ---- requests of operators

    def ask(self, request: Request) -> str:
        now = self.clock.now()
        id_ = f"{(now - datetime.min.replace(tzinfo=now.tzinfo)) // MICROSECOND}-{len(self.data.requests)}"
        self.data.requests[id_] = replace(request, id=id_)
        return id_

    def answer(self, request: Request, outcome: str, *, epoch: int) -> Answer:
        if refusal := self.refused(epoch):
            return Answer(refusal)
        if not self._answered(request, outcome):
            return Answer(Verdict.DECIDED)
        self.note("answered", "", None, None, 0, epoch, outcome)
        return Answer(Verdict.DONE)

    def outcome(self, id: str) -> str | None:
        return self.data.outcomes.get(id)

    def _answered(self, request: Request, words: str) -> bool:
        if self.data.requests.pop(request.id, None) is None:
            return False
        self.data.outcomes[request.id] = words
        return True


def _who(request: Request) -> str:
    return f"{request.by}: {request.why}" if request.why else request.by


def _entry_of(letter: str) -> str:
    try:
        return DeadLetter.from_json(letter).entry
    except ValueError:
        return ""

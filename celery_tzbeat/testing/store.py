"""A store in memory: the same ledger without a server, for tests and simulations.

Held to the same conformance suite as `RedisStore`. What is pushed stands in `queues`, newest last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from celery_tzbeat.errors import StoreUnreadable
from celery_tzbeat.model import AuditRecord, Cursor, Presence, Unrun
from celery_tzbeat.store.protocol import (
    SCHEMA_NEEDS,
    SCHEMA_WRITTEN,
    Answer,
    Burial,
    Command,
    Dispatch,
    Office,
    Verdict,
    View,
    needs_newer,
)

from .ledger import Now
from .open import MemoryOpenOccurrences


class MemoryStore(MemoryOpenOccurrences):
    """See `store.protocol.Store` for what each call means. One object is one server: share it between beats.

    Does not keep time limits: done marks and beats stay until `wipe`.
    """

    def __init__(
        self,
        clock: Now,
        *,
        max_skew: timedelta = timedelta(seconds=300),
        presence: timedelta = timedelta(hours=1),
    ) -> None:
        super().__init__(clock, max_skew=max_skew)
        self._presence = presence

    @property
    def queues(self) -> Mapping[str, list[bytes]]:
        """What was pushed, by queue, oldest first."""
        return self.data.queues

    def need(self, schema: int) -> None:
        """Mark the store as written by a release that needs `schema`."""
        self.data.needs = schema

    # ---- the leader's transitions

    def take_office(self, epoch: int, holder: str = "", *, oldest_schema: int = SCHEMA_WRITTEN) -> Office | None:
        data = self.data
        if data.fence > epoch:
            return None
        if why := needs_newer(data.needs or 0):
            raise StoreUnreadable(why)
        fresh = data.needs is None
        raised, data.fence = data.fence < epoch, epoch
        data.needs = max(data.needs or 0, min(SCHEMA_NEEDS, oldest_schema))
        if raised:
            self.note("office", "", None, None, 0, epoch, holder)
        return Office(
            time=self.clock.now(), fresh=fresh, cursors=dict(data.cursors), unreadable=(), paused=dict(data.paused)
        )

    def restore(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        data = self.data
        if data.fence > epoch:
            return Verdict.STALE
        if data.needs is not None:
            return Verdict.DECIDED
        data.cursors.update(cursors)
        data.fence, data.needs = epoch, SCHEMA_NEEDS
        self.note("wiped", "", None, None, len(cursors), epoch, "cursors written back")
        return Verdict.DONE

    def place(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        def put() -> Verdict:
            for entry, cursor in cursors.items():
                at = self.data.cursors.get(entry)
                if at is None or at.nominal <= cursor.nominal:
                    if at is None:
                        self.note("new", entry, None, None, 0, epoch, "")
                    elif at.rule != cursor.rule:
                        self.note("changed", entry, at.nominal, cursor.nominal, 0, epoch, "")
                    elif at.nominal < cursor.nominal:
                        self.note("returned", entry, at.nominal, cursor.nominal, 0, epoch, "unlisted too long")
                    self.data.cursors[entry] = cursor
            return Verdict.DONE

        return self.refused(epoch) or put()

    def repair(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        def set_back() -> Verdict:
            for entry, cursor in cursors.items():
                at = self.data.cursors.get(entry)
                if at is not None and at.nominal > self.clock.now() + self._max_skew:
                    self.data.cursors[entry] = cursor
                    self.note("repaired", entry, at.nominal, None, 0, epoch, "the cursor was ahead of the store")
            return Verdict.DONE

        return self.refused(epoch) or set_back()

    def forget(self, entries: Sequence[str], *, epoch: int) -> Verdict:
        def drop() -> Verdict:
            for entry in entries:
                if self.data.cursors.pop(entry, None) is not None:
                    self.note("forgotten", entry, None, None, 0, epoch, "unlisted")
                self.data.last.pop(entry, None)
                self.data.paused.pop(entry, None)
            return Verdict.DONE

        return self.refused(epoch) or drop()

    def dispatch(self, batch: Sequence[Dispatch], *, epoch: int) -> list[Answer]:
        if refusal := self.refused(epoch):
            return [Answer(refusal)] * len(batch)
        self.data.fence = epoch
        return [self._dispatch(item, epoch) for item in batch]

    def _dispatch(self, item: Dispatch, epoch: int) -> Answer:
        occurrence, bucket, tracking = item.occurrence, item.bucket, item.tracking
        if verdict := self.unopenable(occurrence, bucket, item.cursor):
            return Answer(verdict)
        if tracking is not None and tracking.policy.overlap != "allow_all" and self.held(occurrence):
            return Answer(Verdict.HELD)
        for command in item.commands:
            if fault := self._run(command):
                return Answer(Verdict.FAULT, fault)
        detail = "misfire" if occurrence.late else ""
        if tracking is None:
            self.settled(occurrence.entry, occurrence.nominal, bucket, "sent", (1, 0), epoch, detail)
            self.data.cursors[occurrence.entry] = item.cursor
        else:
            self.open_record(occurrence, bucket, item.cursor, "published", epoch, tracking, tracking.payload)
        return Answer(Verdict.DONE)

    def record_unrun(self, rows: Sequence[Unrun], *, epoch: int) -> list[Answer]:
        if refusal := self.refused(epoch):
            return [Answer(refusal)] * len(rows)
        answers = []
        for row in rows:
            verdict = self.undecidable(row.entry, row.last)
            if verdict is None:
                verdict = Verdict.DONE
                self.data.cursors[row.entry] = row.cursor
                self.data.last[row.entry] = (row.last, row.event, self.clock.now())
                self.note(row.event, row.entry, row.first, row.last, row.count, epoch, row.reason)
            answers.append(Answer(verdict))
        return answers

    def bury(self, burial: Burial, *, epoch: int) -> Answer:
        occurrence = burial.occurrence
        verdict = self.refused(epoch) or self.undecidable(occurrence.entry, occurrence.nominal)
        if verdict is None:
            verdict = Verdict.DONE
            self.data.dead[occurrence.key] = burial.letter
            self.data.cursors[occurrence.entry] = burial.cursor
            self.settled(occurrence.entry, occurrence.nominal, burial.bucket, "dead", (1, 0), epoch, burial.reason)
        return Answer(verdict)

    # ---- any beat

    def attend(self, presence: Presence) -> View:
        now = self.clock.now()
        self.data.beats[presence.beat] = (now, presence)
        known = presence.fingerprint in self.data.entries
        needs = self.data.needs
        return View(now, fresh=needs is None, epoch=self.data.fence, entries_known=known, needs=needs or 0)

    def tell_entries(self, fingerprint: str, entries: Mapping[str, str]) -> None:
        self.data.entries[fingerprint] = dict(entries)

    def entries_of(self, fingerprint: str) -> Mapping[str, str]:
        return self.data.entries.get(fingerprint, {})

    def probe(self, command: Command) -> None:
        self._run(command)

    # ---- reading, for operators

    def time(self) -> datetime:
        return self.clock.now()

    def cursors(self) -> Mapping[str, Cursor]:
        return dict(self.data.cursors)

    def last(self) -> Mapping[str, tuple[datetime, str, datetime]]:
        return dict(self.data.last)

    def beats(self) -> list[Presence]:
        seen_since = self.clock.now() - self._presence
        return [presence for seen, presence in self.data.beats.values() if seen >= seen_since]

    def audit(self, *, count: int = 1000) -> list[AuditRecord]:
        return self.data.audit[-count:]

    def _run(self, command: Command) -> str:
        run: Callable[[list[bytes], bytes], None] | None = {"LPUSH": list.append}.get(command.name)
        if run is not None:
            run(self.data.queues[command.keys[0].decode()], command.args[1])
        return ""

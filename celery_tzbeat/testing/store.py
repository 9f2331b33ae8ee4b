"""A store in memory: the same ledger without a server, for tests and simulations.

Held to the same conformance suite as `RedisStore`. What is pushed stands in `queues`, newest last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Protocol

from celery_tzbeat.errors import StoreUnreadable
from celery_tzbeat.model import AuditRecord, Cursor, Occurrence, Presence, Unrun, micros
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import (
    SCHEMA_NEEDS,
    SCHEMA_WRITTEN,
    Answer,
    Burial,
    Claim,
    Claimed,
    Command,
    Dispatch,
    Office,
    OpenOccurrence,
    State,
    Verdict,
    View,
    needs_newer,
)


class Now(Protocol):
    """The server's clock: anything with `now()`, such as `ManualClock`."""

    def now(self) -> datetime: ...


@dataclass
class _Data:
    fence: int = 0
    needs: int | None = None  # None: no schema, the store is new or wiped
    cursors: dict[str, Cursor] = field(default_factory=dict)
    last: dict[str, tuple[datetime, str, datetime]] = field(default_factory=dict)
    done: dict[tuple[str, Bucket], str] = field(default_factory=dict)
    open: dict[str, OpenOccurrence] = field(default_factory=dict)
    since: dict[str, datetime] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    beats: dict[str, tuple[datetime, Presence]] = field(default_factory=dict)
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    audit: list[AuditRecord] = field(default_factory=list)
    queues: defaultdict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))


class MemoryStore:
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
        self._clock = clock
        self._max_skew = max_skew
        self._presence = presence
        self._data = _Data()

    @property
    def queues(self) -> Mapping[str, list[bytes]]:
        """What was pushed, by queue, oldest first."""
        return self._data.queues

    def wipe(self) -> None:
        """Lose everything, as FLUSHALL does."""
        self._data = _Data()

    def need(self, schema: int) -> None:
        """Mark the store as written by a release that needs `schema`."""
        self._data.needs = schema

    # ---- the leader's transitions

    def take_office(self, epoch: int, holder: str = "", *, oldest_schema: int = SCHEMA_WRITTEN) -> Office | None:
        data = self._data
        if data.fence > epoch:
            return None
        if why := needs_newer(data.needs or 0):
            raise StoreUnreadable(why)
        fresh = data.needs is None
        raised, data.fence = data.fence < epoch, epoch
        data.needs = max(data.needs or 0, min(SCHEMA_NEEDS, oldest_schema))
        if raised:
            self._note("office", "", None, None, 0, epoch, holder)
        return Office(time=self._clock.now(), fresh=fresh, cursors=dict(data.cursors), unreadable=())

    def restore(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        data = self._data
        if data.fence > epoch:
            return Verdict.STALE
        if data.needs is not None:
            return Verdict.DECIDED
        data.cursors.update(cursors)
        data.fence, data.needs = epoch, SCHEMA_NEEDS
        self._note("wiped", "", None, None, len(cursors), epoch, "cursors written back")
        return Verdict.DONE

    def place(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        def put() -> Verdict:
            for entry, cursor in cursors.items():
                at = self._data.cursors.get(entry)
                if at is None or at.nominal <= cursor.nominal:
                    if at is None:
                        self._note("new", entry, None, None, 0, epoch, "")
                    elif at.rule != cursor.rule:
                        self._note("changed", entry, at.nominal, cursor.nominal, 0, epoch, "")
                    elif at.nominal < cursor.nominal:
                        self._note("returned", entry, at.nominal, cursor.nominal, 0, epoch, "unlisted too long")
                    self._data.cursors[entry] = cursor
            return Verdict.DONE

        return self._refused(epoch) or put()

    def repair(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        def set_back() -> Verdict:
            for entry, cursor in cursors.items():
                at = self._data.cursors.get(entry)
                if at is not None and at.nominal > self._clock.now() + self._max_skew:
                    self._data.cursors[entry] = cursor
                    self._note("repaired", entry, at.nominal, None, 0, epoch, "the cursor was ahead of the store")
            return Verdict.DONE

        return self._refused(epoch) or set_back()

    def forget(self, entries: Sequence[str], *, epoch: int) -> Verdict:
        def drop() -> Verdict:
            for entry in entries:
                if self._data.cursors.pop(entry, None) is not None:
                    self._note("forgotten", entry, None, None, 0, epoch, "unlisted")
                self._data.last.pop(entry, None)
            return Verdict.DONE

        return self._refused(epoch) or drop()

    def dispatch(self, batch: Sequence[Dispatch], *, epoch: int) -> list[Answer]:
        if refusal := self._refused(epoch):
            return [Answer(refusal)] * len(batch)
        self._data.fence = epoch
        return [self._dispatch(item, epoch) for item in batch]

    def _dispatch(self, item: Dispatch, epoch: int) -> Answer:
        occurrence = item.occurrence
        if verdict := self._undecidable(occurrence.entry, occurrence.nominal):
            return Answer(verdict)
        if (occurrence.entry, item.bucket) in self._data.done or occurrence.key in self._data.open:
            self._data.cursors[occurrence.entry] = item.cursor
            return Answer(Verdict.DECIDED)
        for command in item.commands:
            if fault := self._run(command):
                return Answer(Verdict.FAULT, fault)
        self._data.cursors[occurrence.entry] = item.cursor
        self._settled(occurrence, item.bucket, "sent", 1, epoch, "misfire" if occurrence.late else "")
        return Answer(Verdict.DONE)

    def record_unrun(self, rows: Sequence[Unrun], *, epoch: int) -> list[Answer]:
        if refusal := self._refused(epoch):
            return [Answer(refusal)] * len(rows)
        answers = []
        for row in rows:
            verdict = self._undecidable(row.entry, row.last)
            if verdict is None:
                verdict = Verdict.DONE
                self._data.cursors[row.entry] = row.cursor
                self._data.last[row.entry] = (row.last, row.event, self._clock.now())
                self._note(row.event, row.entry, row.first, row.last, row.count, epoch, row.reason)
            answers.append(Answer(verdict))
        return answers

    def bury(self, burial: Burial, *, epoch: int) -> Answer:
        occurrence = burial.occurrence
        verdict = self._refused(epoch) or self._undecidable(occurrence.entry, occurrence.nominal)
        if verdict is None:
            verdict = Verdict.DONE
            self._data.dead[occurrence.key] = burial.letter
            self._data.cursors[occurrence.entry] = burial.cursor
            self._settled(occurrence, burial.bucket, "dead", 1, epoch, burial.reason)
        return Answer(verdict)

    # ---- claims: other brokers

    def claim(self, claims: Sequence[Claim], *, epoch: int) -> list[Answer]:
        if refusal := self._refused(epoch):
            return [Answer(refusal)] * len(claims)
        self._data.fence = epoch
        return [Answer(self._claim(claim, epoch)) for claim in claims]

    def _claim(self, claim: Claim, epoch: int) -> Verdict:
        occurrence, bucket = claim.occurrence, claim.bucket
        if verdict := self._undecidable(occurrence.entry, occurrence.nominal):
            return verdict
        self._data.cursors[occurrence.entry] = claim.cursor
        if occurrence.key in self._data.open or (occurrence.entry, bucket) in self._data.done:
            return Verdict.DECIDED
        self._data.open[occurrence.key] = OpenOccurrence(occurrence, bucket, "claimed", epoch, 1, claim.payload)
        self._data.since[occurrence.key] = self._clock.now()
        detail = "misfire" if occurrence.late else ""
        self._note("claimed", occurrence.entry, occurrence.nominal, occurrence.nominal, 1, epoch, detail)
        return Verdict.DONE

    def confirm(self, claimed: Sequence[Claimed], *, epoch: int) -> list[Answer]:
        return [self._end_claim(item, "sent", "misfire" if item.occurrence.late else "", epoch) for item in claimed]

    def settle(self, claimed: Claimed, state: State, reason: str, *, epoch: int, letter: str = "") -> Answer:
        answer = self._end_claim(claimed, state, reason, epoch)
        if letter and answer.verdict is Verdict.DONE:
            self._data.dead[claimed.occurrence.key] = letter
        return answer

    def reclaim(self, occurrence: Occurrence, *, epoch: int) -> OpenOccurrence | None:
        found = self._data.open.get(occurrence.key)
        if self._refused(epoch) or found is None or found.epoch >= epoch:
            return None
        self._data.open[occurrence.key] = taken = replace(found, epoch=epoch)
        self._note("reclaimed", occurrence.entry, occurrence.nominal, occurrence.nominal, 1, epoch, str(found.epoch))
        return taken

    def open_occurrences(self) -> list[OpenOccurrence]:
        return list(self._data.open.values())

    # ---- any beat

    def attend(self, presence: Presence) -> View:
        now = self._clock.now()
        self._data.beats[presence.beat] = (now, presence)
        known = presence.fingerprint in self._data.entries
        needs = self._data.needs
        return View(now, fresh=needs is None, epoch=self._data.fence, entries_known=known, needs=needs or 0)

    def tell_entries(self, fingerprint: str, entries: Mapping[str, str]) -> None:
        self._data.entries[fingerprint] = dict(entries)

    def entries_of(self, fingerprint: str) -> Mapping[str, str]:
        return self._data.entries.get(fingerprint, {})

    def probe(self, command: Command) -> None:
        self._run(command)

    # ---- reading, for operators

    def time(self) -> datetime:
        return self._clock.now()

    def cursors(self) -> Mapping[str, Cursor]:
        return dict(self._data.cursors)

    def last(self) -> Mapping[str, tuple[datetime, str, datetime]]:
        return dict(self._data.last)

    def beats(self) -> list[Presence]:
        seen_since = self._clock.now() - self._presence
        return [presence for seen, presence in self._data.beats.values() if seen >= seen_since]

    def open_since(self) -> Mapping[str, datetime]:
        return {key: self._data.since[key] for key in self._data.open}

    def dead_letters(self) -> Mapping[str, str]:
        return dict(self._data.dead)

    def audit(self, *, count: int = 1000) -> list[AuditRecord]:
        return self._data.audit[-count:]

    # ---- the guards, as in prelude.lua

    def _refused(self, epoch: int) -> Verdict | None:
        if self._data.fence > epoch:
            return Verdict.STALE
        return Verdict.WIPED if self._data.needs is None else None

    def _undecidable(self, entry: str, nominal: datetime) -> Verdict | None:
        if nominal > self._clock.now() + self._max_skew:
            return Verdict.EARLY
        at = self._data.cursors.get(entry)
        return Verdict.DECIDED if at is not None and at.nominal >= nominal else None

    def _end_claim(self, claimed: Claimed, state: str, reason: str, epoch: int) -> Answer:
        if refusal := self._refused(epoch):
            return Answer(refusal)
        found = self._data.open.pop(claimed.occurrence.key, None)
        if found is None:
            return Answer(Verdict.DECIDED)
        self._settled(claimed.occurrence, claimed.bucket, state, found.dispatch, epoch, reason)
        return Answer(Verdict.DONE)

    def _settled(
        self, occurrence: Occurrence, bucket: Bucket, state: str, dispatch: int, epoch: int, detail: str
    ) -> None:
        entry, nominal = occurrence.entry, occurrence.nominal
        self._data.done[entry, bucket] = f"{state} {dispatch} 0"
        self._data.last[entry] = (nominal, state, self._clock.now())
        self._note(state, entry, nominal, nominal, 1, epoch, detail)

    def _run(self, command: Command) -> str:
        run: Callable[[list[bytes], bytes], None] | None = {"LPUSH": list.append}.get(command.name)
        if run is not None:
            run(self._data.queues[command.keys[0].decode()], command.args[1])
        return ""

    def _note(
        self,
        event: str,
        entry: str,
        first: datetime | None,
        last: datetime | None,
        count: int,
        epoch: int,
        detail: str,
    ) -> None:
        id_ = f"{micros(self._clock.now()) // 1000}-{len(self._data.audit)}"
        self._data.audit.append(AuditRecord(event, entry, first, last, count, epoch, detail, id_))

"""What a store in memory holds, and how an occurrence is settled in it: `ledger.lua` for `MemoryStore` and `MemoryRuns`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count
from typing import Protocol

from celery_tzbeat.deliveries import DEFAULT_POLICY, WorkerPresence
from celery_tzbeat.model import AuditRecord, Cursor, Occurrence, Pause, Policy, Presence, micros
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import OpenOccurrence, Request, Run, Verdict
from celery_tzbeat.store.runs import Order


class Now(Protocol):
    """The server's clock: anything with `now()`, such as `ManualClock`."""

    def now(self) -> datetime: ...


@dataclass
class Record:
    """An unsettled occurrence; `policy` is None where it is not tracked."""

    key: str
    entry: str
    nominal: datetime | None
    bucket: Bucket
    state: str
    epoch: int
    deadline: datetime  # when the leader must look; of a run, when its lease ends
    payload: bytes = b""
    misfire: bool = False
    policy: Policy | None = None
    order: Order = field(default_factory=lambda: Order(1, 0))
    eta: datetime | None = None
    until: datetime | None = None  # of a waiting one
    sent_by: datetime | None = None  # of a waiting one, with cancel_other
    token: str = ""
    worker: str = ""
    starts: int = 0
    deliveries: int = 0
    acks_late: bool = False
    unrun: bool = False  # abandoned before its body began, its message gone
    ran: Order | None = None  # the order that was started last
    before: Order | None = None  # what `ran` was before that start
    copy: Order | None = None  # the order of a copy that was turned away while it ran
    noted: Order | None = None  # a successor that stands by
    ended: str = ""  # the token whose end left the occurrence open
    cancel: str = ""
    overlap: str = ""  # the token of another run that was counted
    checkpoint: bytes | None = None
    progress: tuple[int, int | None] | None = None

    @property
    def occurrence(self) -> Occurrence:
        assert self.nominal is not None, "an ordinary message is no occurrence"
        return Occurrence(self.entry, self.nominal, self.misfire)

    def opened(self) -> OpenOccurrence:
        return OpenOccurrence(
            self.occurrence,
            self.bucket,
            self.state,
            self.epoch,
            self.order.dispatch,
            self.payload,
            self.policy or DEFAULT_POLICY,
        )

    def run(self) -> Run:
        waits = self.state == "waiting" and self.until is not None
        return Run(
            key=self.key,
            entry=self.entry,
            nominal=self.nominal,
            state=self.state,
            token=self.token,
            worker=self.worker,
            order=(self.order.dispatch, self.order.retries),
            starts=self.starts,
            deliveries=self.deliveries,
            deadline=self.until if waits and self.until is not None else self.deadline,
            acks_late=self.acks_late,
            policy=self.policy or DEFAULT_POLICY,
            payload=self.payload,
            bucket=self.bucket,
            cancelled=bool(self.cancel),
            progress=self.progress,
            unrun=self.unrun,
        )


@dataclass
class Data:
    fence: int = 0
    needs: int | None = None  # None: no schema, the store is new or wiped
    cursors: dict[str, Cursor] = field(default_factory=dict)
    last: dict[str, tuple[datetime, str, datetime]] = field(default_factory=dict)
    done: dict[tuple[str, Bucket], str] = field(default_factory=dict)  # state, dispatch, retries
    open: dict[str, Record] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    beats: dict[str, tuple[datetime, Presence]] = field(default_factory=dict)
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    workers: dict[str, tuple[datetime, WorkerPresence]] = field(default_factory=dict)
    paused: dict[str, Pause] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    audit: list[AuditRecord] = field(default_factory=list)
    queues: defaultdict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))


class MemoryLedger:
    """The data of one server, its clock, and what leaders' and workers' transitions share."""

    def __init__(self, clock: Now, *, max_skew: timedelta) -> None:
        self.clock = clock
        #: What stands in the ledger: for tests that spoil it.
        self.data = Data()
        self._max_skew = max_skew
        self._lives = count(1)
        self._life = next(self._lives)

    def wipe(self) -> None:
        """Lose everything, as FLUSHALL does, or a restart without persistence."""
        self.data = Data()
        self._life = next(self._lives)

    def lineage(self) -> str:
        return str(self._life)

    # ---- the leader's guards, as in prelude.lua

    def refused(self, epoch: int) -> Verdict | None:
        if self.data.fence > epoch:
            return Verdict.STALE
        return Verdict.WIPED if self.data.needs is None else None

    def undecidable(self, entry: str, nominal: datetime) -> Verdict | None:
        if nominal > self.clock.now() + self._max_skew:
            return Verdict.EARLY
        at = self.data.cursors.get(entry)
        return Verdict.DECIDED if at is not None and at.nominal >= nominal else None

    def unopenable(self, occurrence: Occurrence, bucket: Bucket, cursor: Cursor) -> Verdict | None:
        """Return why an occurrence may not be opened. One that waits has moved its cursor already."""
        record = self.data.open.get(occurrence.key)
        verdict = self.undecidable(occurrence.entry, occurrence.nominal)
        if verdict is Verdict.EARLY or (record is not None and record.state == "waiting"):
            return Verdict.EARLY if verdict is Verdict.EARLY else None
        if verdict is None and (record is not None or (occurrence.entry, bucket) in self.data.done):
            self.data.cursors[occurrence.entry] = cursor
            return Verdict.DECIDED
        return verdict

    def advance(self, occurrence: Occurrence, cursor: Cursor) -> None:
        at = self.data.cursors.get(occurrence.entry)
        if at is None or at.nominal < occurrence.nominal:
            self.data.cursors[occurrence.entry] = cursor

    def beside(self, entry: str, key: str) -> list[Record]:
        """Return the open occurrences of an entry other than this one."""
        return [record for record in self.data.open.values() if record.entry == entry and record.key != key]

    def held(self, occurrence: Occurrence) -> bool:
        if not self.beside(occurrence.entry, occurrence.key):
            return False
        record = self.data.open.get(occurrence.key)
        return record is None or record.sent_by is None or self.clock.now() < record.sent_by

    # ---- as in ledger.lua

    def late_after(self, eta: datetime | None, policy: Policy) -> datetime:
        now = self.clock.now()
        return max(now, eta or now) + policy.start_within

    def settled(
        self,
        entry: str,
        nominal: datetime | None,
        bucket: Bucket,
        state: str,
        order: Sequence[int],
        epoch: int,
        detail: str,
    ) -> None:
        self.data.done[entry, bucket] = f"{state} {order[0]} {order[1]}"
        if nominal is not None:
            self.data.last[entry] = (nominal, state, self.clock.now())
        self.note(state, entry, nominal, nominal, 1, epoch, detail)

    def settle_record(self, record: Record, state: str, epoch: int, detail: str, letter: str = "") -> None:
        """Take a record out of the open ones and settle it."""
        if letter:
            self.data.dead[record.key] = letter
        del self.data.open[record.key]
        self.settled(record.entry, record.nominal, record.bucket, state, record.order, epoch, detail)

    def free(self, record: Record, epoch: int, why: str) -> str:
        """Take a run's token away without an end; return the new state."""
        if record.noted is not None:
            record.state, record.order, record.noted = "published", record.noted, None
            record.deadline = self.late_after(None, record.policy or DEFAULT_POLICY)
            event = "succeeded"
        else:
            record.state, record.deadline = "abandoned", self.clock.now()
            event = "abandoned"
        self.note(event, record.entry, record.nominal, record.nominal, 1, epoch, why)
        return record.state

    def note(
        self,
        event: str,
        entry: str,
        first: datetime | None,
        last: datetime | None,
        count: int,
        epoch: int,
        detail: str,
    ) -> None:
        id_ = f"{micros(self.clock.now()) // 1000}-{len(self.data.audit)}"
        self.data.audit.append(AuditRecord(event, entry, first, last, count, epoch, detail, id_))

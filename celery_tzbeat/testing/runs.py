"""The worker's side of the ledger in memory, over a `MemoryStore`; held to the same conformance suite as `RedisRuns`."""

from __future__ import annotations

from collections.abc import Sequence

from celery_tzbeat.deliveries import Ticket, WorkerPresence
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.runs import Beat, End, Ended, Gate, Order, Pulse, Start, Started

from .ledger import MemoryLedger, Record

#: The states that a done mark refuses; `dead` only up to its dispatch.
_REFUSING = frozenset({"done", "dead", "expired", "revoked", "withdrawn", "missed", "coalesced", "skipped"})

#: The ends after which the occurrence stays open.
_GOES_ON = frozenset({"retry", "abandoned", "given_back"})


class MemoryRuns:
    """See `store.runs.Runs` for what each call means. All that share one store share one server."""

    def __init__(self, store: MemoryLedger) -> None:
        self._store = store

    def start(self, start: Start) -> Started:
        policy, order = start.ticket.policy, start.order
        once = policy.delivery == "at_most_once"
        record = self._record(start.ticket)
        if record is None:
            mark = self._mark(start.ticket)
            if refused := self._refused_by_mark(start.ticket, order):
                return Started(Gate.SETTLED, 0, refused)
            if once and order.retries > 0:
                return Started(Gate.SECOND_START)
            if once and not mark:
                return Started(Gate.UNKNOWN)
            return self._begun(start, record)
        if (record.state, record.token) == ("running", start.token):
            return self._won(record)
        gate = self._gate(record, start, once)
        if gate is not None:
            return Started(gate, record.starts, record.state)
        return self._begun(start, record)

    def _begun(self, start: Start, record: Record | None) -> Started:
        if not start.payload and (record is None or not record.payload):
            return Started(Gate.UNKEPT)
        return self._won(self._begin(start, "started"))

    def _won(self, record: Record) -> Started:
        return Started(Gate.WON, record.starts, record.state, record.checkpoint)

    def _gate(self, record: Record, start: Start, once: bool) -> Gate | None:
        """Return what refuses a delivery whose record stands; None where it may start."""
        order = start.order
        if order < record.order:
            return Gate.STALE
        if record.state == "waiting":
            return Gate.LIVE
        if record.state == "running":
            if order == record.order:
                record.copy = order
                return Gate.LIVE
            if record.noted is None or order > record.noted:
                record.noted = order
            return Gate.SUCCESSOR
        refused = not start.redispatchable and not record.unrun
        if record.state == "abandoned" and order == record.order and refused:
            return Gate.LIVE
        if once and record.starts:
            return Gate.SECOND_START
        if not _retry_of(order, record.ran) and record.deliveries >= start.ticket.policy.max_deliveries:
            return Gate.EXHAUSTED
        return None

    def heartbeat(self, beats: Sequence[Beat]) -> list[Pulse]:
        return [self._beat(beat) for beat in beats]

    def _beat(self, beat: Beat) -> Pulse:
        record = self._record(beat.ticket)
        if record is None:
            if self._refused_by_mark(beat.ticket, beat.order):
                return Pulse.LOST
        elif (record.state, record.token) == ("running", beat.token):
            record.deadline = self._store.clock.now() + beat.ticket.policy.run_lease
            return Pulse.CANCEL if record.cancel else Pulse.ALIVE
        elif record.token == beat.token or record.order > beat.order:
            return Pulse.LOST
        elif record.state == "running":
            if record.overlap != beat.token:
                record.overlap = beat.token
                self._note("overlap", beat.ticket, beat.worker)
            return Pulse.OVERLAP
        self._begin(beat, "resumed")
        return Pulse.RESUMED

    def _begin(self, run: Start | Beat, why: str) -> Record:
        ticket, order, now = run.ticket, run.order, self._store.clock.now()
        record = self._record(ticket)
        if record is None:
            bucket = Bucket(ticket.number, ticket.field)
            record = Record(ticket.key, ticket.entry, ticket.nominal, bucket, "running", ticket.epoch, now)
            self._store.data.open[ticket.key] = record
        record.policy = record.policy or ticket.policy
        record.payload = run.payload or record.payload
        if not _retry_of(order, record.ran):
            record.deliveries += 1
        record.starts += 1
        record.state, record.order, record.before, record.ran = "running", order, record.ran, order
        record.token, record.worker, record.acks_late, record.unrun = run.token, run.worker, run.acks_late, False
        if record.noted is not None and record.noted <= order:
            record.noted = None
        record.deadline = now + ticket.policy.run_lease
        self._note(why, ticket, run.worker)
        return record

    def end(self, ends: Sequence[End]) -> list[Ended]:
        return [self._end(end) for end in ends]

    def _end(self, end: End) -> Ended:
        ticket, record = end.ticket, self._record(end.ticket)
        goes_on = end.state in _GOES_ON
        if record is None:
            if goes_on or self._refused_by_mark(ticket, end.order):
                return Ended.DECIDED
            if end.letter:
                self._store.data.dead[ticket.key] = end.letter
            bucket = Bucket(ticket.number, ticket.field)
            self._store.settled(ticket.entry, ticket.nominal, bucket, end.state, end.order, ticket.epoch, end.detail)
            return Ended.DONE
        if (refusal := _refused_end(end, record)) is not None:
            return refusal
        if goes_on:
            self._go_on(end, record)
        else:
            record.order = max(record.order, end.order)
            self._store.settle_record(record, end.state, ticket.epoch, end.detail, end.letter)
        return Ended.DONE

    def _go_on(self, end: End, record: Record) -> None:
        if end.state == "given_back":
            self._give_back(end, record)
            return
        record.ended, record.ran = end.token, end.order
        if end.state == "abandoned":
            self._store.free(record, end.ticket.epoch, end.detail)
            return
        order = Order(end.order.dispatch, end.order.retries + 1)
        record.eta = end.eta
        if record.noted is not None and record.noted > order:
            order, record.eta = record.noted, None
        record.state, record.order, record.noted = "published", order, None
        record.deadline = self._store.late_after(record.eta, end.ticket.policy)
        self._note("retry", end.ticket, end.detail)

    def _give_back(self, end: End, record: Record) -> None:
        record.starts -= 1
        record.deliveries -= int(not _retry_of(end.order, record.before))
        record.state, record.token, record.ran = "published", "", record.before
        record.deadline = self._store.late_after(None, end.ticket.policy)
        self._note("given_back", end.ticket, end.detail)
        if record.copy == end.order:
            record.acks_late, record.unrun = False, True
            self._store.free(record, end.ticket.epoch, "its message was acknowledged meanwhile")

    def attend(self, presence: WorkerPresence) -> None:
        self._store.data.workers[presence.worker] = (self._store.clock.now(), presence)

    def checkpoint(self, key: str, token: str, state: bytes) -> bool:
        record = self._store.data.open.get(key)
        if record is None or (record.state, record.token) != ("running", token):
            return False
        record.checkpoint = state
        return True

    def progress(self, key: str, token: str, done: int, total: int | None) -> bool:
        record = self._store.data.open.get(key)
        if record is None or (record.state, record.token) != ("running", token):
            return False
        record.progress = (done, total)
        return True

    def _record(self, ticket: Ticket) -> Record | None:
        return self._store.data.open.get(ticket.key)

    def _mark(self, ticket: Ticket) -> str:
        return self._store.data.done.get((ticket.entry, Bucket(ticket.number, ticket.field)), "")

    def _refused_by_mark(self, ticket: Ticket, order: Order) -> str:
        """Return the state whose done mark refuses this order; empty where it may run."""
        state, _, rest = self._mark(ticket).partition(" ")
        if state == "dead" and order.dispatch > int(rest.split()[0]):
            return ""
        return state if state in _REFUSING else ""

    def _note(self, event: str, ticket: Ticket, detail: str) -> None:
        self._store.note(event, ticket.entry, ticket.nominal, ticket.nominal, 1, ticket.epoch, detail)


def _retry_of(order: Order, ran: Order | None) -> bool:
    """Return whether a start is Celery's own retry of the last one, which is no further delivery."""
    return ran is not None and order.dispatch == ran.dispatch and order.retries > ran.retries


def _refused_end(end: End, record: Record) -> Ended | None:
    """Return what refuses an end over a record; None where it may be written."""
    if end.state == "given_back":
        return None if (record.state, record.token) == ("running", end.token) else Ended.DECIDED
    goes_on = end.state in _GOES_ON
    later = record.order > end.order
    if not end.token:
        unstarted = end.state in ("expired", "revoked") and record.state == "abandoned"
        return Ended.REFUSED if record.state == "running" or later or unstarted else None
    if goes_on and record.ended == end.token:
        return Ended.DECIDED
    if record.token != end.token:
        if record.state == "running" or (record.ran is not None and record.ran > end.order):
            return Ended.REFUSED
    elif record.state == "running":
        return None
    return Ended.DECIDED if goes_on and (later or record.state == end.state) else None

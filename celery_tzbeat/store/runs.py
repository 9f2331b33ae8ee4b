"""What the worker half asks of the ledger: lines 12 to 24 and 27 of the state table. `protocol` is the leader's.

A worker has no epoch. Its scripts are conditional on the run's *token* (a name that the worker makes up for one start) and on
the delivery's *order*. Races are values. The only exceptions are StoreUnavailable (asked, not known whether it happened:
every call may be repeated with the same token) and StoreUnreadable.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, NamedTuple, Protocol

from celery_tzbeat.deliveries import Ticket, WorkerPresence

#: How long a worker half is seen that does not attend.
SEEN = timedelta(seconds=60)


#: A run lease is this many heartbeats long; a heartbeat comes at least and at most so often, in seconds.
BEATS_PER_LEASE = 6
FASTEST_BEAT, SLOWEST_BEAT = 0.25, 10.0


def heartbeat_of(run_lease: timedelta) -> float:
    """Return the seconds from one heartbeat to the next that keep a run lease."""
    return min(max(run_lease.total_seconds() / BEATS_PER_LEASE, FASTEST_BEAT), SLOWEST_BEAT)


class Order(NamedTuple):
    """Which delivery of one key this is: redispatch and replay raise `dispatch`, Celery's own retry raises `retries`."""

    dispatch: int
    retries: int


class Gate(enum.Enum):
    """What the gate is told about a delivery."""

    WON = "WON"  # start it: the run is this token's
    STALE = "STALE"  # an order that was left behind: acknowledge (line 15)
    LIVE = "LIVE"  # the same order runs elsewhere, or may only be redispatched: acknowledge, the sweep is the takeover
    SETTLED = "SETTLED"  # a done mark refuses it: acknowledge (line 15, 29)
    SUCCESSOR = "SUCCESSOR"  # a higher order than the one that runs: hold it, and ask again (line 16)
    EXHAUSTED = "EXHAUSTED"  # started `max_deliveries` times without a retry: bury it (line 26)
    SECOND_START = "SECOND_START"  # at_most_once, and it was started before: bury it
    UNKNOWN = "UNKNOWN"  # at_most_once, and the ledger knows nothing of it: bury it (line 17)
    UNKEPT = "UNKEPT"  # asked without the payload, and the ledger has none: nothing is written, ask again with it


@dataclass(frozen=True, slots=True)
class Start:
    """A delivery that asks to start."""

    ticket: Ticket
    order: Order
    token: str
    worker: str  # the node's name, for people
    acks_late: bool  # of the task: what `on_abandoned="auto"` goes by
    payload: bytes  # the raw message (`Parcel.to_bytes`): kept until the run is settled, for a redispatch; may be empty

    @property
    def redispatchable(self) -> bool:
        """Whether an abandoned run may be started again without an operator's word (lines 26, 27)."""
        policy = self.ticket.policy
        allowed = policy.on_abandoned == "redispatch" or (policy.on_abandoned == "auto" and self.acks_late)
        return allowed and policy.delivery != "at_most_once"


@dataclass(frozen=True, slots=True)
class Started:
    """The answer to a Start. `starts` counts every start of the key, the present one included."""

    gate: Gate
    starts: int = 0
    state: str = ""  # the state that refused it, for the log
    checkpoint: bytes | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """A live run's heartbeat."""

    ticket: Ticket
    order: Order
    token: str
    worker: str
    acks_late: bool
    payload: bytes


class Pulse(enum.Enum):
    """What a heartbeat is told."""

    ALIVE = "ALIVE"  # the run lease is renewed
    CANCEL = "CANCEL"  # renewed, and somebody asked the run to stop
    RESUMED = "RESUMED"  # the record was gone or lay open: written anew under this token (lines 18, 19)
    OVERLAP = "OVERLAP"  # another token runs the key: both go on, counted (line 18)
    LOST = "LOST"  # the run was taken away: it was settled, or redispatched


#: `given_back`: the start was won and no body began, so it is as if it had not been asked for; the broker delivers again.
EndState = Literal["done", "dead", "revoked", "expired", "retry", "abandoned", "given_back"]


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended, owed until it is written. `token` is empty for what never started (line 13: expired, revoked)."""

    ticket: Ticket
    order: Order
    token: str
    state: EndState
    reason: str = (
        ""  # of dead: exception, retries, permanent, hard_limit, rejected, deliveries, second_start, unknown …
    )
    letter: str = ""  # of dead: the dead letter, JSON (`DeadLetter.to_json`), which holds the raw message
    eta: datetime | None = None  # of retry: when the next attempt is due
    seconds: float | None = None  # how long the body ran

    @property
    def detail(self) -> str:
        """What the audit says of it: why, else how long it ran."""
        return self.reason or (f"{self.seconds:.3f} s" if self.seconds is not None else "")


class Ended(enum.Enum):
    """What an end is told. All but REFUSED mean: nothing is owed any more."""

    DONE = "DONE"
    DECIDED = "DECIDED"  # this end, or another, was written before
    REFUSED = "REFUSED"  # another token runs the key, or a later delivery was started: this run's end no longer counts


class Line(Protocol):
    """Starts that are asked without waiting, and answered in the order in which they were asked. One thread.

    StoreUnavailable and StoreUnreadable from any call mean that this line is of no use any more: close it. What it was asked
    and did not answer may have happened; asked again by the same token it is answered as it would have been.
    """

    def fileno(self) -> int:
        """Return what becomes readable when an answer comes, or the line breaks. Open until `close`, whatever fails."""

    def ask(self, start: Start) -> None:
        """Ask to start a delivery."""

    def answered(self) -> bool:
        """Return whether the next answer is there. Does not wait."""

    def answer(self) -> Started:
        """Return the next answer; waits for it, within the bound of any call."""

    def close(self) -> None:
        """Give the connection up."""


class Runs(Protocol):
    """The worker's side of the ledger. Batches hold at most `protocol.BATCH` items."""

    def start(self, start: Start) -> Started:
        """Ask to start a delivery (lines 12, 15, 16, 17, 27). Repeated with the same token: WON again, `starts` unchanged."""

    def heartbeat(self, beats: Sequence[Beat]) -> list[Pulse]:
        """Renew run leases (lines 18, 19). A lease that lapsed is restored until `abandoned` is written."""

    def end(self, ends: Sequence[End]) -> list[Ended]:
        """Write ends (lines 13, 20 to 24). An end is accepted when the lease lapsed and nobody took the run over."""

    def attend(self, presence: WorkerPresence) -> None:
        """Say that this worker half lives, so that occurrences are tracked."""

    def checkpoint(self, key: str, token: str, state: bytes) -> bool:
        """Keep a run's checkpoint; False where the run is no longer this token's."""

    def progress(self, key: str, token: str, done: int, total: int | None) -> bool:
        """Keep how far a run is, for people; False where the run is no longer this token's."""

"""What a store can be asked, in the ledger's words. `RedisStore` and `testing.MemoryStore` are held to one test suite.

Races are values: a leader that has been replaced is told STALE, an occurrence that is already decided DECIDED. The only
exceptions are StoreUnavailable (asked, not known whether it happened: every call may be repeated) and StoreUnreadable.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from celery_tzbeat.deliveries import DEFAULT_POLICY, WorkerPresence
from celery_tzbeat.model import AuditRecord, Cursor, Occurrence, Pause, Policy, Presence, Unrun

from .keys import Bucket

#: The most occurrences that one script may handle (about 3 ms of the server's time).
BATCH = 100

#: What this release writes, and the least that it asks of whoever shares the store.
SCHEMA_WRITTEN = 1
SCHEMA_NEEDS = 1


def needs_newer(needs: int) -> str:
    """Return why a beat of this release must not lead where the store needs schema `needs`; empty where it may."""
    if needs <= SCHEMA_WRITTEN:
        return ""
    return (
        f"the store needs schema {needs}, this release writes {SCHEMA_WRITTEN}: "
        "upgrade celery_tzbeat on this host; until then this beat stands by"
    )


State = Literal["sent", "dead", "withdrawn", "lost", "missed", "coalesced", "skipped"]


class Verdict(enum.Enum):
    """What a script answered."""

    DONE = "DONE"  # it happened now
    DECIDED = "DECIDED"  # it was decided before: by an earlier leader, or by this call whose reply was lost
    EARLY = "EARLY"  # the nominal is further ahead of the store's clock than tzbeat_max_skew
    FAULT = "FAULT"  # a queue command failed; nothing was recorded
    STALE = "STALE"  # a later leader is in office
    WIPED = "WIPED"  # the store has lost its data since this leader took office
    HELD = "HELD"  # something of the entry is open, and its overlap policy lets nothing run beside it


@dataclass(frozen=True, slots=True)
class Answer:
    """A verdict, and the server's words where it is FAULT."""

    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that kombu would have sent to the broker: captured, to be run inside the dispatching script."""

    name: str
    args: tuple[bytes, ...]
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Tracking:
    """What the ledger keeps of a tracked occurrence until it is settled. Without it, what is sent is settled as `sent`."""

    policy: Policy
    eta: datetime | None = None  # when its message says that it starts no earlier
    payload: bytes = b""  # of a Dispatch: the run's message as it is pushed; a Claim has its own


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An occurrence with its message, ready to be recorded and pushed in one script."""

    occurrence: Occurrence
    cursor: Cursor
    bucket: Bucket
    commands: tuple[Command, ...]
    tracking: Tracking | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """An occurrence of an entry that lets nothing run beside it (overlap), before its message is built."""

    occurrence: Occurrence
    cursor: Cursor
    bucket: Bucket
    policy: Policy


@dataclass(frozen=True, slots=True)
class Burial:
    """An occurrence that cannot be sent: its cursor goes on, a dead letter stays."""

    occurrence: Occurrence
    cursor: Cursor
    bucket: Bucket
    reason: str
    letter: str  # JSON


@dataclass(frozen=True, slots=True)
class Claim:
    """The recorded right to dispatch one occurrence over a broker that is not the store: the payload is kept."""

    occurrence: Occurrence
    bucket: Bucket
    cursor: Cursor
    payload: bytes
    tracking: Tracking | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """An occurrence that was claimed, and the place of its done mark: what it takes to settle it."""

    occurrence: Occurrence
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class OpenOccurrence:
    """An unsettled occurrence as it stands in the ledger: it needs no entry's definition to be moved on."""

    occurrence: Occurrence
    bucket: Bucket
    state: str
    epoch: int
    dispatch: int
    payload: bytes
    policy: Policy = DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class Run:
    """An unsettled tracked occurrence as it stands in the ledger, in any state; `deadline` is when the leader must look.

    An ordinary message behind the gate has an empty `entry` and no `nominal`.
    """

    key: str
    entry: str
    nominal: datetime | None
    state: str
    token: str
    worker: str
    order: tuple[int, int]  # dispatch, retries
    starts: int
    deliveries: int  # starts that no retry asked for
    deadline: datetime
    acks_late: bool
    policy: Policy
    payload: bytes
    bucket: Bucket
    cancelled: bool = False
    progress: tuple[int, int | None] | None = None
    unrun: bool = False  # abandoned before its body began, and nobody has its message any more (line 38)


RequestKind = Literal["cancel", "replay", "discard", "pause", "unpause"]


@dataclass(frozen=True, slots=True)
class Request:
    """What an operator asks of whoever leads. `id` is the store's, empty until it is put.

    `key` is an occurrence's, of pause and unpause an entry's name.
    """

    kind: RequestKind
    key: str
    by: str  # who asks
    why: str
    expires: datetime
    id: str = ""
    detail: str = ""  # of pause: until when (ISO); of unpause: ``catch_up``


@dataclass(frozen=True, slots=True)
class Survey:
    """What waits for the leader, by the store's clock `time`: each list is bounded, the most urgent first."""

    time: datetime
    lapsed: tuple[Run, ...]  # running, and its lease has lapsed
    due: tuple[Run, ...]  # waiting, abandoned, or published and past its `deadline`
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Office:
    """What a leader finds when it takes office."""

    time: datetime  # the store's
    fresh: bool  # the store was empty
    cursors: Mapping[str, Cursor]
    unreadable: tuple[str, ...]  # entries whose cursor could not be read
    paused: Mapping[str, Pause]  # as `Store.paused` returns them


@dataclass(frozen=True, slots=True)
class View:
    """What the store shows any beat, leader or standby."""

    time: datetime
    fresh: bool  # there is no `schema`: the store is new, or was wiped
    epoch: int  # of the leader in office, 0 where there was none
    entries_known: bool  # the entries of this beat's fingerprint stand in the store
    needs: int = 0  # the least schema that a beat has to write to lead here


class Store(Protocol):
    """The ledger. Every method raises StoreUnavailable where it did not get an answer, and may be repeated then."""

    def attend(self, presence: Presence) -> View:
        """Say that this beat lives; return what the store shows."""

    def tell_entries(self, fingerprint: str, entries: Mapping[str, str]) -> None:
        """Say which entries a fingerprint stands for: their short hashes by name. Forgotten with the beats that attend."""

    def entries_of(self, fingerprint: str) -> Mapping[str, str]:
        """Return the entries that a fingerprint stands for; empty where no beat told."""

    def take_office(self, epoch: int, holder: str = "", *, oldest_schema: int = SCHEMA_WRITTEN) -> Office | None:
        """Raise the fence to `epoch` and return what was decided so far; None where a later leader is in office.

        `oldest_schema` is the oldest that a live beat writes: what the store needs is not raised above it, so that no live
        beat is locked out.

        Raises StoreUnreadable where the store needs a newer release.
        """

    def restore(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        """Write a living leader's cursors into a store that was wiped. DONE, DECIDED (it is not wiped) or STALE."""

    def place(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        """Set cursors that no occurrence moves: of new, changed and unlisted entries. Never moves one back."""

    def repair(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        """Set cursors back that stand ahead of the store's clock. Done marks keep what was sent from being sent again."""

    def forget(self, entries: Sequence[str], *, epoch: int) -> Verdict:
        """Drop what is kept of entries that have been unlisted for too long."""

    def dispatch(self, batch: Sequence[Dispatch], *, epoch: int) -> list[Answer]:
        """Push and record at most BATCH occurrences (state table line 1, untracked: settled as `sent`)."""

    def record_unrun(self, rows: Sequence[Unrun], *, epoch: int) -> list[Answer]:
        """Record rows that will not run and move their cursors (line 4)."""

    def bury(self, burial: Burial, *, epoch: int) -> Answer:
        """Settle an occurrence as dead, with a dead letter (line 5)."""

    def claim(self, claims: Sequence[Claim], *, epoch: int) -> list[Answer]:
        """Record the right to publish at most BATCH occurrences over another broker (line 2)."""

    def confirm(self, claimed: Sequence[Claimed], *, epoch: int) -> list[Answer]:
        """Record that at most BATCH claimed occurrences were published; untracked, they are settled as `sent` (line 9)."""

    def reclaim(self, occurrence: Occurrence, *, epoch: int) -> OpenOccurrence | None:
        """Take over an earlier leader's open claim, to send it again (line 11); None where there is none to take."""

    def settle(self, claimed: Claimed, state: State, reason: str, *, epoch: int, letter: str = "") -> Answer:
        """Settle an open claim that is not sent: dead with a letter (line 10), withdrawn. DECIDED where it is none now."""

    # ---- tracked occurrences: what a leader does about runs (lines 14, 25 to 30)

    def workers_lived(self) -> bool:
        """Return whether a worker half lived within the retention: occurrences are tracked then."""

    def workers(self) -> list[WorkerPresence]:
        """Return the worker halves that live."""

    def runs(self, entry: str = "") -> list[Run]:
        """Return the unsettled occurrences of an entry, or of all, the most urgent first."""

    def survey(self, *, limit: int = BATCH) -> Survey:
        """Return what waits for the leader: one call while nothing does, two otherwise."""

    def lineage(self) -> str:
        """Return what is another text when another process or master answers; empty where the server does not tell."""

    def hold(self, holds: Sequence[Hold], *, epoch: int) -> list[Answer]:
        """Record occurrences that must not run beside an open one of their entry: HELD (lines 3, 4, 8).

        `skip`: skipped, as one audit row. `buffer_one`: waiting; an older waiting one is coalesced. `cancel_other`: the same,
        and what runs is asked to stop, what does not run yet is withdrawn. DONE where nothing else of the entry is open (of
        cancel_other also `kill_after` after it was first held): nothing is recorded, send it. Asked again for a waiting
        one, it answers the same way; DECIDED where it is neither waiting nor undecided. `dispatch` and `claim` look again,
        and take a waiting record on (line 7); they answer HELD and record nothing.
        """

    def abandon(self, run: Run, *, epoch: int) -> Answer:
        """Write that a lapsed run is abandoned (line 25); where a successor stands by, it is published instead.

        DECIDED where its token has beaten, ended or gone since `run` was read. Whether the view was unbroken is the
        caller's to judge.
        """

    def redispatch(self, run: Run, payload: bytes, *, epoch: int) -> Answer:
        """Move an abandoned occurrence to claimed, under the next dispatch, which is in `payload` (line 26)."""

    def settle_run(self, run: Run, state: State, reason: str, *, epoch: int, letter: str = "") -> Answer:
        """Settle what stands as it was found: lost (14), missed (8), dead by policy or `max_deliveries` (26).

        DECIDED where its state or order is another since.
        """

    def replay(
        self, request: Request, claimed: Claimed, payload: bytes, *, policy: Policy, dispatch: int, epoch: int
    ) -> Answer:
        """Move a dead occurrence to claimed, under a higher dispatch; letter and request go in the same script (line 28).

        `payload` names the dispatch, `policy` is its ticket's. DECIDED where there is no letter, or the
        occurrence is open; with a number in its detail where the done mark admits only that dispatch and higher ones.
        """

    def discard(self, request: Request, key: str, *, epoch: int) -> Answer:
        """Drop a dead letter; its done mark stays (line 28)."""

    def cancel(self, request: Request, key: str, *, epoch: int) -> Answer:
        """Withdraw what does not run (line 29), or ask what runs to stop (line 30). DECIDED where nothing is open.

        The answer's detail and the request's outcome say which: ``withdrawn`` or ``asked to stop``.
        """

    # ---- paused entries

    def paused(self) -> Mapping[str, Pause]:
        """Return the paused entries. One whose pause cannot be read is paused, with words that say so."""

    def pause(self, entry: str, pause: Pause, request: Request | None, *, epoch: int) -> Answer:
        """Keep that an entry is not walked (line 31), or change its pause; the request goes in the same script.

        DECIDED where the request was carried out before. Without a request: a wiped store is written back.
        """

    def unpause(self, entry: str, request: Request | None, *, epoch: int) -> Answer:
        """Forget that an entry is paused. DECIDED where it is not. Without a request: its `until` has come."""

    # ---- requests of operators, which the leader carries out

    def ask(self, request: Request) -> str:
        """Put a request; return its id. Kept until it is answered; beyond 10,000 the oldest go.

        Repeated after a lost reply it may stand twice.
        """

    def answer(self, request: Request, outcome: str, *, epoch: int) -> Answer:
        """Take a request off with an outcome in words: refused, expired … DECIDED where it was answered before."""

    def outcome(self, id: str) -> str | None:
        """Return what became of a request; None while it waits, and from a day after its answer on."""

    def open_occurrences(self) -> list[OpenOccurrence]:
        """Return the open claims, the oldest first. What is tracked and no claim is in `runs` and `survey`."""

    def open_since(self) -> Mapping[str, datetime]:
        """Return the keys of what is claimed and not settled with the store's time of the claim, for operators."""

    def probe(self, command: Command) -> None:
        """Run one captured queue command beside the epoch key, to see whether broker and store are the same server."""

    def time(self) -> datetime:
        """Return the store's clock."""

    def cursors(self) -> Mapping[str, Cursor]:
        """Return the cursors, for operators; unreadable ones are left out."""

    def last(self) -> Mapping[str, tuple[datetime, str, datetime]]:
        """Return, by entry, the last settled occurrence: nominal, state, and the store's time of settling."""

    def beats(self) -> list[Presence]:
        """Return the beats that live."""

    def dead_letters(self) -> Mapping[str, str]:
        """Return the dead letters, JSON by key."""

    def dead_letter(self, key: str) -> str | None:
        """Return one dead letter, JSON; None where there is none."""

    def audit(self, *, count: int = 1000) -> list[AuditRecord]:
        """Return the newest audit records, oldest first."""

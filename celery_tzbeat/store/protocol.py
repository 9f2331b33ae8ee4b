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

from celery_tzbeat.model import AuditRecord, Cursor, Occurrence, Presence, Unrun

from .keys import Bucket

#: The most occurrences that one script may handle (about 3 ms of the server's time).
BATCH = 100

#: What this release writes, and the least that it asks of whoever shares the store.
SCHEMA_WRITTEN = 1
SCHEMA_NEEDS = 1

State = Literal["sent", "dead", "withdrawn", "lost", "missed", "coalesced", "skipped"]


class Verdict(enum.Enum):
    """What a script answered."""

    DONE = "DONE"  # it happened now
    DECIDED = "DECIDED"  # it was decided before: by an earlier leader, or by this call whose reply was lost
    EARLY = "EARLY"  # the nominal is further ahead of the store's clock than tzbeat_max_skew
    FAULT = "FAULT"  # a queue command failed; nothing was recorded
    STALE = "STALE"  # a later leader is in office
    WIPED = "WIPED"  # the store has lost its data since this leader took office


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
class Dispatch:
    """An occurrence with its message, ready to be recorded and pushed in one script."""

    occurrence: Occurrence
    cursor: Cursor
    bucket: Bucket
    commands: tuple[Command, ...]


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
    cursor: Cursor
    payload: bytes


@dataclass(frozen=True, slots=True)
class OpenOccurrence:
    """An unsettled occurrence as it stands in the ledger."""

    key: str
    entry: str
    nominal: datetime
    state: str
    epoch: int
    dispatch: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Office:
    """What a leader finds when it takes office."""

    time: datetime  # the store's
    fresh: bool  # the store was empty
    cursors: Mapping[str, Cursor]
    unreadable: tuple[str, ...]  # entries whose cursor could not be read


@dataclass(frozen=True, slots=True)
class View:
    """What the store shows any beat, leader or standby."""

    time: datetime
    fresh: bool  # there is no `schema`: the store is new, or was wiped
    epoch: int  # of the leader in office, 0 where there was none


class Store(Protocol):
    """The ledger. Every method raises StoreUnavailable where it did not get an answer, and may be repeated then."""

    def attend(self, presence: Presence) -> View:
        """Say that this beat lives; return what the store shows."""

    def take_office(self, epoch: int, holder: str = "") -> Office | None:
        """Raise the fence to `epoch` and return what was decided so far; None where a later leader is in office.

        Raises StoreUnreadable where the store needs a newer release.
        """

    def restore(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        """Write a living leader's cursors into a store that was wiped. DONE, DECIDED (it is not wiped) or STALE."""

    def place(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        """Set cursors that no occurrence moves: of new, changed and unlisted entries. Never moves one back."""

    def forget(self, entries: Sequence[str], *, epoch: int) -> Verdict:
        """Drop what is kept of entries that have been unlisted for too long."""

    def dispatch(self, batch: Sequence[Dispatch], *, epoch: int) -> list[Answer]:
        """Push and record at most BATCH occurrences (state table line 1, untracked: settled as `sent`)."""

    def record_unrun(self, rows: Sequence[Unrun], *, epoch: int) -> list[Answer]:
        """Record rows that will not run and move their cursors (line 4)."""

    def bury(self, burial: Burial, *, epoch: int) -> Answer:
        """Settle an occurrence as dead, with a dead letter (line 5)."""

    def claim(self, claim: Claim, bucket: Bucket, *, epoch: int) -> Answer:
        """Record the right to publish one occurrence over another broker (line 2)."""

    def confirm(self, occurrence: Occurrence, bucket: Bucket, *, epoch: int) -> Answer:
        """Record that a claimed occurrence was published; untracked, it is settled as `sent` (line 9)."""

    def reclaim(self, occurrence: Occurrence, *, epoch: int) -> OpenOccurrence | None:
        """Take over an earlier leader's open claim, to send it again (line 11); None where there is none to take."""

    def settle(self, occurrence: Occurrence, bucket: Bucket, state: State, reason: str, *, epoch: int) -> Answer:
        """Settle an open claim without a message: withdrawn (line 29), dead, lost … (lines 10, 14)."""

    def open_occurrences(self) -> list[OpenOccurrence]:
        """Return the unsettled occurrences, the most urgent first."""

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

    def audit(self, *, count: int = 1000) -> list[AuditRecord]:
        """Return the newest audit records, oldest first."""

"""What it takes to keep one leader: a provider of leases, and its answers.

A provider answers races with values; it raises `errors.StoreUnavailable` when it could not be asked, and then
what was asked may or may not have happened. Every call is therefore safe to repeat: a bid by the present
holder is granted again under the same epoch, a renewal is a renewal, a second resignation answers False.

An *epoch* is drawn from the server's clock in microseconds at each grant, above every epoch ever granted (the
high-water mark) and above the bidder's own floor. A provider may live on another server than the store; it
knows nothing of the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Granted:
    """The bidder leads, for one lease from when the server worked on the bid."""

    epoch: int
    server_time: datetime


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody leads: bid again when `remaining` is over.

    An empty holder: the server has forgotten an epoch that the bidder had seen (wiped, restored, failed
    over). The lease is kept free for that epoch's leader, who may be alive, for one lease.
    """

    holder: str
    epoch: int
    remaining: timedelta
    server_time: datetime


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody leads."""

    server_time: datetime


@dataclass(frozen=True, slots=True)
class Renewed:
    """The leader goes on, for one lease from when the server worked on the renewal.

    `step_down`: somebody asked this epoch to resign.
    """

    server_time: datetime
    step_down: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease cannot be renewed: `holder` leads at `epoch`.

    Empty and 0: nobody leads, but somebody did meanwhile, or the lease was given back.
    """

    holder: str
    epoch: int
    server_time: datetime


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, for operators: true when the server answered, perhaps not when it is read."""

    holder: str
    epoch: int
    remaining: timedelta
    since: datetime


class Subscription(Protocol):
    """What an elector listens to. A hint: a message may be lost, so a listener asks without one as well."""

    def fileno(self) -> int:
        """Return a descriptor that can be read when there is something to drain; -1 where it is not known."""

    def drain(self) -> bool:
        """Return True if anything was heard on the wake channel, or may have been missed.

        Waits for nothing but a connection, within the provider's timeout. Never raises: a lost connection is
        made anew, in this call or a later one.
        """

    def close(self) -> None:
        """Stop listening."""


class LeaseProvider(Protocol):
    """The server's side of leading: one lease for one namespace. A holder is one process, never empty."""

    def acquire(self, holder: str, *, floor: int) -> Granted | Held:
        """Bid. Granted if nobody leads, or if `holder` leads already (then under the epoch it has).

        A new epoch is above `floor`, the highest epoch the bidder ever saw.
        """

    def renew(self, holder: str, epoch: int) -> Renewed | Lost:
        """Extend the lease of `holder` at `epoch`; both must match.

        A lease that has lapsed, or was wiped, is granted anew under the same epoch if no higher one was
        granted since.
        """

    def renew_late(self, holder: str, epoch: int) -> Renewed | Lost:
        """Extend a lease that is trusted no more: as `renew`, but Lost where the server has forgotten the epoch.

        Another may have led in between, and been forgotten with it.
        """

    def replicated(self, wanted: int) -> int:
        """Return how many replicas have all that the server wrote up to this provider's last call.

        Waits until it is `wanted` of them, at most half as long as any call may take. Raises as every call does.
        """

    def resign(self, holder: str, epoch: int) -> bool:
        """Give the lease back and tell the standbys; False if it was not `holder`'s at `epoch`.

        A renewal still on its way does not bring it back. Returns or raises within a second where names
        resolve at once; may be called in a signal handler, while any other call is going on.
        """

    def ask_to_step_down(self, epoch: int) -> bool:
        """Ask the leader of `epoch` to resign; False if that epoch does not lead.

        Whether it has resigned is seen by asking who leads.
        """

    def look(self) -> Free | Held:
        """Say who leads, without a bid: for an elector that must not bid."""

    def leader(self) -> Leader | None:
        """Say who leads, for operators; may be called from any thread."""

    def listen(self) -> Subscription:
        """Return a new subscription, not connected yet."""

    def close(self) -> None:
        """Close idle connections; a later call opens new ones."""

"""Every key of a namespace: its name, its type, how long it lives.

One hash tag per namespace, so that all keys of a script are in one slot. `CATALOGUE` is the list that a test holds against
what really stands in a store.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from celery_tzbeat.model import MICROSECOND, micros

#: Occurrences kept in one hash of done marks: a hash this small is stored compactly (about 14 bytes a mark).
MARKS_PER_HASH = 100


@dataclass(frozen=True, slots=True)
class KeyKind:
    """A kind of key: its name in the namespace, its Redis type, how long it lives, what it holds."""

    name: str
    type: Literal["string", "hash", "set", "zset", "stream", "channel"]
    lives: str
    holds: str


CATALOGUE: tuple[KeyKind, ...] = (
    KeyKind("leader", "hash", "lease", "the lease: holder, epoch, since, lease, step_down (read by leases/ only)"),
    KeyKind("epoch:granted", "string", "permanent", "the highest epoch ever granted"),
    KeyKind("epoch", "string", "permanent", "the fence: the epoch of the leader in office; lower ones are refused"),
    KeyKind("wake", "channel", "-", "pub/sub: something changed, look again"),
    KeyKind("schema", "hash", "permanent", "written, needs: which releases may use this store"),
    KeyKind(
        "cursor",
        "hash",
        "permanent",
        "entry -> the last nominal decided; unlisted entries go after retention",
    ),
    KeyKind("last", "hash", "permanent", "entry -> nominal, state and store time of the last settled occurrence"),
    KeyKind(
        "done:<entry>:<n>",
        "hash",
        "retention",
        "done marks of 100 nominals: offset -> state, dispatch, retries",
    ),
    KeyKind(
        "occurrence:<key>",
        "hash",
        "while unsettled",
        "an unsettled occurrence: state, order, payload, policy; of its run: token, checkpoint, progress",
    ),
    KeyKind(
        "open", "zset", "permanent", "keys of unsettled occurrences by when the leader must act next; claims first"
    ),
    KeyKind("open:<entry>", "set", "while unsettled", "keys of the entry's unsettled occurrences"),
    KeyKind("live", "zset", "while unsettled", "keys of what runs, by the deadline of its run lease"),
    KeyKind("dead", "hash", "permanent", "key -> dead letter, until it is replayed or discarded"),
    KeyKind("beats", "zset", "permanent", "beats by when they were last seen (store time)"),
    KeyKind("beat:<id>", "string", "15 leases", "a beat's presence"),
    KeyKind("entries:<fingerprint>", "hash", "15 leases", "entry -> short hash, of the beats with this fingerprint"),
    KeyKind(
        "workers",
        "zset",
        "permanent",
        "worker halves by when they were last seen; they go after retention",
    ),
    KeyKind("worker:<id>", "string", "60 s", "a worker half's presence"),
    KeyKind("paused", "hash", "permanent", "entry -> since when it is paused, until when, by whom, why"),
    KeyKind("requests", "stream", "permanent", "what operators ask of the leader, at most 10,000"),
    KeyKind("outcome:<id>", "string", "a day", "what became of a request"),
    KeyKind("audit", "stream", "permanent", "audit records, at most tzbeat_audit_max"),
)


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of a namespace's keys."""

    namespace: str

    def __call__(self, name: str) -> str:
        """Return the full name of a key of this namespace."""
        return f"tzbeat:{{{self.namespace}}}:{name}"

    def type_of(self, key: str) -> str:
        """Return the Redis type that a key must have; empty for one that is not of this namespace, or no key."""
        head = self("")
        if not key.startswith(head):
            return ""
        name = key[len(head) :]
        for kind in CATALOGUE:
            stem, placeholder, _ = kind.name.partition("<")
            if kind.type != "channel" and (name.startswith(stem) if placeholder else name == stem):
                return kind.type
        return ""

    def fixed(self) -> tuple[str, ...]:
        """Return the keys that a namespace has once."""
        return tuple(self(kind.name) for kind in CATALOGUE if "<" not in kind.name and kind.type != "channel")

    def done(self, entry: str, number: int) -> str:
        return self(f"done:{entry}:{number}")

    def occurrence(self, key: str) -> str:
        return self(f"occurrence:{key}")

    def open_of(self, entry: str) -> str:
        return self(f"open:{entry}")

    def beat(self, beat: str) -> str:
        return self(f"beat:{beat}")

    def worker(self, worker: str) -> str:
        return self(f"worker:{worker}")

    def outcome(self, request: str) -> str:
        return self(f"outcome:{request}")

    def entries_of(self, fingerprint: str) -> str:
        return self(f"entries:{fingerprint}")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the done mark of a nominal stands: the number of the hash, and the field in it."""

    number: int
    field: int

    @classmethod
    def of(cls, nominal: datetime, shortest_gap: timedelta) -> Bucket:
        """Return the bucket: a pure function of the nominal and of the schedule's shortest gap."""
        width = max(MARKS_PER_HASH * (shortest_gap // MICROSECOND), 1)
        return cls(*divmod(micros(nominal), width))

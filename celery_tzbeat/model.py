"""The values that rooms hand to each other: frozen, without connections or clocks.

An *instant* is an aware UTC datetime everywhere outside `schedules`. Dict forms carry a version, `v`.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any, Literal, Protocol

UTC = timezone.utc
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

#: The namespace of every task id (a UUIDv5 of this, the beat's namespace and the occurrence's key).
TASK_IDS = uuid.UUID("6b3a5c1e-7d0a-5f6e-9c58-2f6f5d1b7a10")

#: The longest entry name.
NAME_LENGTH = 200


def micros(instant: datetime) -> int:
    """Return an instant as whole microseconds since 1970-01-01T00:00:00Z: the store's form (exact in a double to 2255)."""
    return (instant - EPOCH) // MICROSECOND


def from_micros(value: int) -> datetime:
    """Return the instant of `micros`."""
    return EPOCH + timedelta(microseconds=value)


def iso(instant: datetime) -> str:
    """Return the one text form of an instant: ``2026-11-01T05:30:00Z``, a fraction only where there is one.

    ValueError for a naive instant: read in the host's zone, it would name something else on each host.
    """
    if instant.utcoffset() is None:
        raise ValueError(f"an instant must be aware, {instant!r} has no zone")
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")


def from_iso(text: str) -> datetime:
    """Return the instant of `iso`; ValueError for a text that is none, or names no offset."""
    found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    if found.utcoffset() is None:
        raise ValueError(f"an instant must be aware, {text!r} names no offset")
    return found.astimezone(UTC)


class Schedule(Protocol):
    """A pure rule: which instants. Holds no clock and no app; equal rules are equal values."""

    @property
    def zone(self) -> tzinfo | None:
        """The zone the rule is read in; None for a rule that has none, or has none yet (`in_zone`)."""

    @property
    def text(self) -> str:
        """The rule in one text form, its zone at the end: ``30 2 * * mon-fri America/New_York``."""

    @property
    def shortest_gap(self) -> timedelta:
        """No two occurrences are nearer than this, changes of offset aside. A pure function of the text."""

    def in_zone(self, zone: tzinfo) -> Schedule:
        """Return this rule, read in `zone` where it names none itself."""

    def next_after(self, instant: datetime) -> datetime | None:
        """Return the first instant strictly after `instant`, None where there is none. A naive instant raises."""

    def prev_before(self, instant: datetime) -> datetime | None:
        """Return the last instant strictly before `instant`, None where there is none."""

    def count_between(self, after: datetime, until: datetime, limit: int) -> int:
        """Return how many instants u there are with after < u <= until, counting no further than `limit`."""

    def mark(self, nominal: datetime) -> str:
        """Return what a cursor must remember of an occurrence besides its instant (wall time and pass), as text."""

    def resume(self, nominal: datetime, mark: str) -> datetime:
        """Return the instant from which to go on after `nominal`, were the zone's rules changed meanwhile (`mark`)."""

    def describe(self) -> str:
        """Return the rule in words."""

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned dict form; `schedules.from_dict` reads it."""


Catchup = Literal["latest", "all", "skip"]
Overlap = Literal["allow_all", "skip", "buffer_one", "cancel_other"]
Delivery = Literal["at_least_once", "at_most_once"]
OnAbandoned = Literal["auto", "redispatch", "dead_letter"]
OnStoreDown = Literal["run", "hold"]
Backoff = Literal["exponential", "fixed", "none"]


@dataclass(frozen=True, slots=True)
class Retry:
    """How a failed attempt is tried again, without a line in the task: at most `max_attempts` attempts in all.

    The wait before attempt n + 1 is ``min(max_delay, delay * 2 ** (n - 1))`` for "exponential", `delay` for "fixed", none
    for "none"; with `jitter`, times a factor in [0.5, 1] by the key's hash. `only` and `never` name exception classes by
    their dotted or bare names: with `only`, no other is retried; what `never` names is not.
    """

    max_attempts: int = 3
    delay: timedelta = timedelta(seconds=10)
    backoff: Backoff = "exponential"
    max_delay: timedelta = timedelta(hours=1)
    jitter: bool = True
    only: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """What is decided about an entry's occurrences beyond when they are due. Validated by `policy.read_policy`.

    Every field from `overlap` on travels with the message, where it is not the default (`travelling`).
    """

    misfire_grace: timedelta = timedelta(seconds=60)
    catchup: Catchup = "latest"
    catchup_window: timedelta = timedelta(days=7)
    overlap: Overlap = "allow_all"
    delivery: Delivery = "at_least_once"
    timeout: timedelta | None = None
    kill_after: timedelta = timedelta(seconds=30)
    retry: Retry | None = None
    max_deliveries: int = 5
    run_lease: timedelta = timedelta(seconds=60)
    start_within: timedelta = timedelta(hours=1)
    on_abandoned: OnAbandoned = "auto"
    on_store_down: OnStoreDown | None = None  # None: "run", and "hold" for at_most_once

    @property
    def needs_tracking(self) -> bool:
        """Whether its occurrences are followed to their end even where no worker half tells of it."""
        return self.overlap != "allow_all" or self.delivery == "at_most_once"

    @property
    def holds_when_store_is_down(self) -> bool:
        """Whether a run waits for a store that is down, rather than start without its leave."""
        return (self.on_store_down or ("hold" if self.delivery == "at_most_once" else "run")) == "hold"


def _stable(value: Any) -> Any:
    """Return what tells values apart and is the same in every process: an object's repr may hold its address."""
    if isinstance(value, Mapping):
        return sorted((repr(key), _stable(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return [_stable(part) for part in value]
    plain = isinstance(value, (str, bytes, int, float, datetime, timedelta, type(None)))
    return value if plain else type(value).__qualname__


@dataclass(frozen=True, slots=True)
class Entry:
    """A named definition: a task, its arguments, its schedule, its policy.

    `options` are Celery's (`queue`, `priority`, `expires`, …) exactly as given; whoever publishes copies them first.
    """

    name: str
    task: str
    schedule: Schedule
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: Policy = Policy()

    @property
    def rule(self) -> str:
        """A short hash of what decides the instants: when it changes, the schedule was changed."""
        text = json.dumps(self.schedule.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def fingerprint(self) -> str:
        """A short hash of the whole definition, to tell two beats' entries apart."""
        options, kwargs = _stable(self.options), _stable(self.kwargs)
        text = repr((self.name, self.task, self.rule, _stable(self.args), kwargs, options, self.policy))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One entry at one nominal instant: what must happen once."""

    entry: str
    nominal: datetime
    late: bool = False  # found later than its grace: a misfire that is run nevertheless

    @property
    def key(self) -> str:
        """The identity, and the idempotency key. Never parsed: entry and nominal are stored beside it."""
        return f"{self.entry}@{iso(self.nominal)}"

    def task_id(self, namespace: str) -> str:
        """Return the Celery task id: the same on every host, in every process."""
        return str(uuid.uuid5(TASK_IDS, f"{namespace}\n{self.key}"))


@dataclass(frozen=True, slots=True)
class Lease:
    """One holder's turn as leader. Whether it is still trusted is the elector's to say, at each question."""

    holder: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """Per entry: the last nominal already decided, and what it takes to go on from there.

    `nominal` is a lower bound where nothing was decided yet (a new entry starts from now). `rule` is `Entry.rule` at
    that time; `tzdata` the version of the zone files; `unlisted_for` how long leaders have led without listing the entry.
    """

    nominal: datetime
    rule: str
    mark: str = ""
    tzdata: str = ""
    unlisted_for: timedelta = timedelta()

    def to_text(self) -> str:
        """Return the store's form: the nominal in microseconds first, where scripts read it."""
        return "|".join(
            (
                str(micros(self.nominal)),
                self.rule,
                self.tzdata,
                str(int(self.unlisted_for.total_seconds())),
                self.mark,
            )
        )

    @classmethod
    def from_text(cls, text: str) -> Cursor:
        """Return the cursor of `to_text`; ValueError for any other text."""
        nominal, rule, tzdata, unlisted, mark = text.split("|", 4)
        return cls(
            nominal=from_micros(int(nominal)),
            rule=rule,
            mark=mark,
            tzdata=tzdata,
            unlisted_for=timedelta(seconds=int(unlisted)),
        )


@dataclass(frozen=True, slots=True)
class Unrun:
    """A row of occurrences of one entry that will not run, with the cursor behind it. `count` is exact to 1,000."""

    event: Literal["skipped", "coalesced", "missed"]
    entry: str
    first: datetime
    last: datetime
    count: int
    reason: str
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Pause:
    """An entry is not walked: since `at`, until `until` or, where that is None, until somebody unpauses it."""

    at: datetime
    until: datetime | None
    by: str
    note: str

    def to_json(self) -> str:
        until = iso(self.until) if self.until is not None else None
        return json.dumps({"v": 1, "at": iso(self.at), "until": until, "by": self.by, "note": self.note})

    @classmethod
    def from_json(cls, text: str | bytes) -> Pause:
        """Return the pause of `to_json`. Raises ValueError for any other text."""
        form = json.loads(text)
        try:
            until = from_iso(form["until"]) if form["until"] is not None else None
            return cls(from_iso(form["at"]), until, str(form["by"]), str(form["note"]))
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"not a pause: {type(exc).__name__}: {exc}") from exc

    @property
    def words(self) -> str:
        """Who paused it, until when, and why, for the audit and for people."""
        until = f" until {iso(self.until)}" if self.until is not None else ""
        return f"{self.by}{until}: {self.note}" if self.note else f"{self.by}{until}"


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One appended fact. A row of occurrences that did not run is one record: first, last, count (to 1,000)."""

    event: str  # sent, skipped, coalesced, missed, dead, office, wiped, new, …
    entry: str
    first: datetime | None
    last: datetime | None
    count: int
    epoch: int
    detail: str
    id: str = ""  # the stream's own id; its first part is the store's time in milliseconds


@dataclass(frozen=True, slots=True)
class Presence:
    """What a beat says of itself, so that others (and `health`) can see it."""

    beat: str  # the holder's identity: host, pid and a nonce
    host: str
    pid: int
    version: str
    tzdata: str
    fingerprint: str
    role: Literal["leader", "standby"]
    why: str  # why it does not lead; empty for the leader
    last_tick: datetime
    next_due: datetime | None
    skew: float  # seconds this beat's clock is ahead of the store's
    entries: int
    embedded: bool
    release: str = ""  # tzbeat_release
    schema: int = 1  # of the store, that this beat writes
    path: str = ""  # by which it sends, or would: "same server" or "claims"
    hindered: bool = False  # it could not lead if the leader were gone
    epoch: int = 0  # of the office that it is in; 0 for none, though it may hold the lease

    @property
    def where(self) -> str:
        """Which beat this is, for people: its host and pid, and its release where it names one."""
        return f"{self.host}:{self.pid}" + (f" (release {self.release})" if self.release else "")

    def to_json(self) -> str:
        return json.dumps(
            {
                "v": 1,
                "beat": self.beat,
                "host": self.host,
                "pid": self.pid,
                "version": self.version,
                "tzdata": self.tzdata,
                "fingerprint": self.fingerprint,
                "role": self.role,
                "why": self.why,
                "last_tick": iso(self.last_tick),
                "next_due": iso(self.next_due) if self.next_due else None,
                "skew": self.skew,
                "entries": self.entries,
                "embedded": self.embedded,
                "release": self.release,
                "schema": self.schema,
                "path": self.path,
                "hindered": self.hindered,
                "epoch": self.epoch,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Presence:
        found = json.loads(text)
        return cls(
            beat=found["beat"],
            host=found["host"],
            pid=found["pid"],
            version=found["version"],
            tzdata=found["tzdata"],
            fingerprint=found["fingerprint"],
            role=found["role"],
            why=found["why"],
            last_tick=from_iso(found["last_tick"]),
            next_due=from_iso(found["next_due"]) if found["next_due"] else None,
            skew=found["skew"],
            entries=found["entries"],
            embedded=found["embedded"],
            # a beat of an older release does not say these
            release=found.get("release", ""),
            schema=found.get("schema", 1),
            path=found.get("path", ""),
            hindered=found.get("hindered", False),
            epoch=found.get("epoch", 0),
        )

"""What the service tests look at: the ledger, the beats, and how often and when each message came."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from rabbit import Message

from celery_tzbeat.model import AuditRecord, Presence
from celery_tzbeat.store.redis import RedisStore
from celery_tzbeat.testing.processes import Process, wait_until
from celery_tzbeat.testing.server import LocalServer

SECOND = timedelta(seconds=1)

#: A pulse each second, and an entry whose instants an outage of 20 s covers ten of.
PULSE = {"pulse": {"task": "proj.record", "schedule": 1.0}}
EVEN = {"even": {"task": "proj.record", "schedule": 2.0}}

#: Long enough that a busy machine answers within its sixth.
LEASE = 4


@dataclass
class Bench:
    """A project whose broker is not its store."""

    project: Any
    server: LocalServer  # the store
    namespace: str
    make_inbox: Callable[[str], Any]
    queue: str = field(default_factory=lambda: f"queue-{uuid.uuid4().hex[:8]}")
    inboxes: dict[str, Any] = field(default_factory=dict)

    def write(self, body: str = "", **conf: Any) -> None:
        """Write the app: the queue of this bench is its default queue."""
        own = {"tzbeat_url": self.server.url, "tzbeat_lease": LEASE, "task_default_queue": self.queue}
        self.project.write(body, **{**own, **conf})

    def inbox(self, queue: str = "") -> Any:
        """Return what looks at a queue of this bench, its own one where none is named."""
        queue = queue or self.queue
        if queue not in self.inboxes:
            self.inboxes[queue] = self.make_inbox(queue)
        return self.inboxes[queue]

    def nominals(self, entry: str = "pulse") -> list[datetime]:
        return [message.nominal for message in self.inbox().messages(entry)]

    def start_beats(self, number: int) -> list[Process]:
        """Start beats, the first of which leads; return when all take part."""
        beats = []
        for _ in range(number):
            beats.append(self.project.start_beat())
            if len(beats) == 1:
                beats[0].wait_for_log("leads with epoch", 60)
        wait_until(lambda: all(self.presence(beat) for beat in beats), 60, "all beats to take part")
        return beats

    def store(self) -> RedisStore:
        return RedisStore(
            self.server.url,
            self.namespace,
            timeout=10,
            retention=timedelta(hours=24),
            max_skew=timedelta(minutes=5),
            audit_max=100_000,
            presence=timedelta(seconds=60),
        )

    def ask(self, question: Callable[[RedisStore], Any]) -> Any:
        store = self.store()
        try:
            return question(store)
        finally:
            store.close()

    def presence(self, beat: Process) -> Presence | None:
        """Return what a beat says of itself; None where it has said nothing lately."""
        found = self.ask(lambda store: store.beats())
        return next((presence for presence in found if presence.pid == beat.pid), None)

    def leader(self, beats: Sequence[Process]) -> Process:
        """Return the beat that leads, as soon as one does."""

        def leading() -> Process | None:
            pids = {presence.pid for presence in self.ask(lambda s: s.beats()) if presence.role == "leader"}
            return next((beat for beat in beats if beat.alive and beat.pid in pids), None)

        return wait_until(leading, 30, "a leader")

    def operator(self, command: str) -> dict[str, Any]:
        """Return what an operator's command says, as JSON; nothing else may be said."""
        words = [sys.executable, "-m", "celery", "-A", "proj", "tzbeat", command, "--json"]
        done = self.project.start(*words, name=f"operator{len(self.project.processes)}")
        done.wait(60)
        found: dict[str, Any] = json.loads(done.log)
        return found

    def findings(self, command: str) -> dict[str, str]:
        """Return what a command finds wrong or doubtful, text by id."""
        return {found["id"]: found["text"] for found in self.operator(command)["findings"]}

    def audit(self, event: str = "", entry: str = "") -> list[AuditRecord]:
        records = self.ask(lambda store: store.audit(count=100_000))
        return [r for r in records if event in ("", r.event) and entry in ("", r.entry)]

    def open_claims(self) -> list[str]:
        """Return the keys of the claims that stand open, in order."""
        found = self.ask(lambda store: store.open_occurrences())
        return [o.occurrence.key for o in sorted(found, key=lambda o: o.occurrence.nominal)]

    def lateness(self, entry: str = "") -> list[float]:
        """Return, for each occurrence sent, how long after its nominal the ledger has it as sent, in seconds."""
        sent = [r for r in self.audit("sent", entry) if r.last is not None]
        return [int(r.id.split("-")[0]) / 1000 - r.last.timestamp() for r in sent if r.last is not None]


def now() -> datetime:
    return datetime.now(timezone.utc)


def in_seconds(seconds: float) -> datetime:
    return now().replace(microsecond=0) + timedelta(seconds=seconds)


def sleep_until(instant: datetime) -> None:
    """Wait for an instant of the schedule: here time itself is the condition."""
    while (left := (instant - now()).total_seconds()) > 0:
        time.sleep(left)


def assert_gapless(found: Sequence[datetime], step: float = 1.0) -> None:
    """Each `step` seconds from the first to the last, once, in order."""
    gaps = [(b - a).total_seconds() for a, b in zip(found, found[1:])]
    assert gaps == [step] * (len(found) - 1)


def assert_complete(messages: Iterable[Message], step: float, until: datetime) -> int:
    """Each `step` seconds from the first to `until` came, each under one task id. Return how many copies came."""
    ids: dict[datetime, set[str]] = defaultdict(set)
    counts: Counter[datetime] = Counter()
    for message in messages:
        ids[message.nominal].add(message.id)
        counts[message.nominal] += 1
    first = min(counts)
    wanted = {first + timedelta(seconds=step * n) for n in range(int((until - first).total_seconds() / step) + 1)}
    assert not wanted - set(counts), f"lost: {sorted(wanted - set(counts))}"
    doubled = {str(nominal): found for nominal, found in ids.items() if len(found) > 1}
    assert not doubled, f"sent under several task ids: {doubled}"
    return sum(counts.values()) - len(counts)


def assert_calm(beats: Iterable[Process]) -> None:
    """No beat ended, and none wrote a traceback."""
    for beat in beats:
        assert beat.alive, f"{beat!r} ended"
        assert "Traceback" not in beat.log

"""What the integration tests look at: queues, the ledger, and when each thing happened there.

The audit's record ids carry the server's own clock, so how late an occurrence was needs no worker to be measured.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import libfaketime
import pytest
import redis

from celery_tzbeat.model import AuditRecord, Presence, from_iso
from celery_tzbeat.store.redis import RedisStore
from celery_tzbeat.testing.processes import Process

#: An entry for each second, and the least that a beat needs to start.
PULSE = {"pulse": {"task": "proj.record", "schedule": 1.0}}

#: The namespace of `Celery("proj")` on database 0.
NAMESPACE = "proj/0"


@dataclass(frozen=True)
class Message:
    """One message as it stands in a Redis queue."""

    headers: dict[str, Any]
    properties: dict[str, Any]
    content_type: str
    body: bytes

    @property
    def id(self) -> str:
        return str(self.headers["id"])

    @property
    def task(self) -> str:
        return str(self.headers["task"])

    @property
    def tzbeat(self) -> dict[str, Any]:
        """Our part of the header; empty in a message that is not ours."""
        return dict((self.headers.get("meta") or {}).get("tzbeat") or {})

    @property
    def entry(self) -> str:
        return str(self.tzbeat.get("entry", ""))

    @property
    def nominal(self) -> datetime:
        return from_iso(self.tzbeat["nominal"])

    @property
    def args(self) -> list[Any]:
        return list(json.loads(self.body)[0])


@contextmanager
def connected(url: str) -> Iterator[Any]:
    """A client of the server, for one look or one deed."""
    with redis.Redis.from_url(url) as client:
        yield client


def queued(url: str, queue: str = "celery") -> list[Message]:
    """Return what stands in a queue, oldest first; empty too where the server does not answer."""
    with connected(url) as client:
        texts = client.lrange(queue, 0, -1)
    found = [json.loads(text) for text in reversed(texts)]
    return [Message(m["headers"], m["properties"], m["content-type"], base64.b64decode(m["body"])) for m in found]


def nominals(url: str, entry: str = "pulse") -> list[datetime]:
    """Return the nominals of one entry's messages, in the order in which they were queued."""
    return [message.nominal for message in queued(url) if message.entry == entry]


def counts(url: str) -> Counter[str]:
    """Return how many messages of each entry are queued."""
    return Counter(message.entry for message in queued(url))


@contextmanager
def ledger(url: str, namespace: str = NAMESPACE) -> Iterator[RedisStore]:
    """The project's store, to read from."""
    store = RedisStore(
        url,
        namespace,
        timeout=10,
        retention=timedelta(hours=24),
        max_skew=timedelta(minutes=5),
        audit_max=100_000,
        presence=timedelta(seconds=30),
    )
    try:
        yield store
    finally:
        store.close()


def audit(url: str, event: str = "", entry: str = "", *, namespace: str = NAMESPACE) -> list[AuditRecord]:
    """Return the audit's records, oldest first: all, or those of one event or entry."""
    with ledger(url, namespace) as store:
        records = store.audit(count=100_000)
    return [r for r in records if event in ("", r.event) and entry in ("", r.entry)]


def lateness(url: str, entry: str = "") -> list[float]:
    """Return, for each occurrence sent, how long after its nominal the server recorded it, in seconds."""
    return [
        int(r.id.split("-")[0]) / 1000 - r.last.timestamp() for r in audit(url, "sent", entry) if r.last is not None
    ]


def presence(url: str, beat: Process) -> Presence | None:
    """Return what a beat says of itself; None where it has said nothing, or nothing lately."""
    with ledger(url) as store:
        return next((p for p in store.beats() if p.pid == beat.pid), None)


def terms(beat: Process) -> int:
    """Return how often a beat has taken office."""
    return beat.log.count("leads with epoch")


def refusals(worker: Process, entry: str = "") -> list[str]:
    """Return what a worker's gate has said of deliveries that it did not start: all, or those of one entry."""
    said = (line.partition(" is not run: ") for line in worker.log.splitlines())
    return [why for what, _, why in said if why and (not entry or f" of {entry}@" in what)]


def assert_once_each(found: Sequence[datetime]) -> None:
    """No nominal stands there twice."""
    doubled = [nominal for nominal, count in Counter(found).items() if count > 1]
    assert not doubled, f"sent twice: {doubled}"


def assert_gapless(found: Sequence[datetime], step: float = 1.0) -> None:
    """Each `step` seconds from the first to the last, once, in order."""
    assert_once_each(found)
    gaps = [(b - a).total_seconds() for a, b in zip(found, found[1:], strict=False)]
    assert gaps == [step] * (len(found) - 1)


def faked_clock(spec: str) -> dict[str, str]:
    """Return the variables that give a process another wall clock: ``@2026-10-25 01:10:00`` (UTC) or ``+3600``.

    The monotonic clock stays the real one: waits and leases go on as they are.
    """
    library = next(Path(libfaketime.__file__).parent.rglob("libfaketime.so*"))
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": spec,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "TZ": "UTC",
    }


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Lay variables over this process's own while it starts another that takes none."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield

"""A worker half played by hand: it takes messages off a queue, registers runs in the ledger, and does as a test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import redis

from celery_tzbeat.deliveries import Ticket, WorkerPresence
from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.store.redis_runs import RedisRuns
from celery_tzbeat.store.runs import Beat, End, Ended, EndState, Gate, Order, Pulse, Start
from celery_tzbeat.testing.processes import wait_until

NAMESPACE = "proj/0"


@dataclass
class HandRun:
    """A run that was started by hand."""

    ticket: Ticket
    order: Order
    token: str
    payload: bytes
    acks_late: bool
    gate: Gate

    @property
    def task_id(self) -> str:
        return str(Parcel.from_bytes(self.payload).run.headers["id"])


class HandWorker:
    """Not thread-safe, but for `beating`, which has a thread and a connection of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._started = 0
        self.runs = self._connect()

    def _connect(self) -> RedisRuns:
        return RedisRuns(self._url, NAMESPACE, timeout=1, retention=timedelta(hours=24), audit_max=100_000)

    def attend(self) -> None:
        """Say that a worker half lives: from then on beats track what they send."""
        self.runs.attend(WorkerPresence("hand:1:a", "hand@here", "prefork", "0", 0))

    def take(self, queue: str = "celery") -> bytes | None:
        with redis.Redis.from_url(self._url) as client:
            return client.rpop(queue)  # type: ignore[return-value]

    def start(self, *, acks_late: bool = False, timeout: float = 20, entry: str = "") -> HandRun:
        """Take the next message (of an entry), and start its run."""
        payload: bytes = wait_until(lambda: self._next(entry), timeout, f"a message of {entry or 'any entry'}")
        return self.start_of(payload, acks_late=acks_late)

    def start_of(self, payload: bytes, *, acks_late: bool = False) -> HandRun:
        headers = Parcel.from_bytes(payload).run.headers
        ticket = Ticket.from_headers(headers)
        assert ticket is not None
        self._started += 1
        order, token = Order(ticket.dispatch, headers["retries"]), f"token-{id(self)}-{self._started}"
        started = self.runs.start(Start(ticket, order, token, "hand@here", acks_late, payload))
        return HandRun(ticket, order, token, payload, acks_late, started.gate)

    def end(self, run: HandRun, state: EndState = "done", **more: Any) -> Ended:
        (ended,) = self.runs.end([End(run.ticket, run.order, run.token, state, **more)])
        return ended

    def beat(self, *runs: HandRun, through: RedisRuns | None = None) -> list[Pulse]:
        return (through or self.runs).heartbeat(
            [Beat(run.ticket, run.order, run.token, "hand@here", run.acks_late, run.payload) for run in runs]
        )

    @contextmanager
    def beating(self, *runs: HandRun, every: float = 0.5) -> Iterator[list[Pulse]]:
        """Renew the leases of runs meanwhile, whatever becomes of the server; yields what the beats were told."""
        told: list[Pulse] = []
        over = threading.Event()

        def renew() -> None:
            connection = self._connect()
            while not over.wait(every):
                with suppress(StoreUnavailable):
                    told.extend(self.beat(*runs, through=connection))
            connection.close()

        thread = threading.Thread(target=renew)
        thread.start()
        try:
            yield told
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        self.runs.close()

    def _next(self, entry: str) -> bytes | None:
        while (payload := self.take()) is not None:
            ticket = Ticket.from_headers(Parcel.from_bytes(payload).run.headers)
            if ticket is not None and entry in ("", ticket.entry):
                return payload
        return None

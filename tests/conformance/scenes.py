"""A ledger with a leader in office and workers: what the tests of runs say in one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import redis

from celery_tzbeat.deliveries import DeadLetter, Ticket
from celery_tzbeat.model import Cursor, Occurrence, Policy
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import Claim, Claimed, Command, Dispatch, Hold, Request, Run, Tracking, Verdict
from celery_tzbeat.store.redis import RedisStore
from celery_tzbeat.store.redis_runs import RedisRuns
from celery_tzbeat.store.runs import Beat, End, Ended, EndState, Order, Pulse, Start, Started

SECOND = timedelta(seconds=1)
MOMENT = timedelta(milliseconds=3)

#: Leases and waits that are over after a MOMENT.
SHORT = {"run_lease": timedelta(milliseconds=1), "start_within": timedelta(milliseconds=1)}


@dataclass
class Scene:
    """A store and the workers' side of it. Every step is about one occurrence of `e`, unless it names another."""

    store: Any
    runs: Any
    now: datetime
    let_pass: Callable[[timedelta], None]  # the store's time
    wipe: Callable[[], None]
    forget_marks: Callable[[], None]  # as their time limit does
    epoch: int = 1

    def occurrence(self, second: int = 0) -> Occurrence:
        return Occurrence("e", self.now + second * SECOND)

    def bucket(self, second: int = 0) -> Bucket:
        return Bucket.of(self.now + second * SECOND, SECOND)

    def cursor(self, second: int = 0) -> Cursor:
        return Cursor(self.now + second * SECOND, "rule")

    def claimed(self, second: int = 0) -> Claimed:
        return Claimed(self.occurrence(second), self.bucket(second))

    # ---- the leader

    def publish(self, second: int = 0, *, eta: datetime | None = None, **policy: Any) -> Verdict:
        tracking = Tracking(Policy(**policy), eta, b"message")
        item = Dispatch(
            self.occurrence(second),
            self.cursor(second),
            self.bucket(second),
            (Command("LPUSH", (b"celery", b"message"), (b"celery",)),),
            tracking,
        )
        return self.store.dispatch([item], epoch=self.epoch)[0].verdict

    def claim(self, second: int = 0, *, eta: datetime | None = None, **policy: Any) -> Verdict:
        item = Claim(
            self.occurrence(second),
            self.bucket(second),
            self.cursor(second),
            b"message",
            Tracking(Policy(**policy), eta),
        )
        return self.store.claim([item], epoch=self.epoch)[0].verdict

    def confirm(self, second: int = 0) -> Verdict:
        return self.store.confirm([self.claimed(second)], epoch=self.epoch)[0].verdict

    def hold(self, second: int = 0, **policy: Any) -> Verdict:
        item = Hold(self.occurrence(second), self.cursor(second), self.bucket(second), Policy(**policy))
        return self.store.hold([item], epoch=self.epoch)[0].verdict

    def run(self, second: int = 0) -> Run:
        (found,) = (run for run in self.store.runs() if run.key == self.occurrence(second).key)
        return found

    def abandon(self) -> Verdict:
        return self.store.abandon(self.run(), epoch=self.epoch).verdict

    def redispatch(self) -> Verdict:
        return self.store.redispatch(self.run(), b"again", epoch=self.epoch).verdict

    def ask(self, kind: Any, key: str = "", *, why: str = "for a test") -> Request:
        id_ = self.store.ask(Request(kind, key or self.occurrence().key, "somebody", why, self.now + 300 * SECOND))
        (found,) = (request for request in self.store.survey().requests if request.id == id_)
        return found

    def letter(self, reason: str = "exception") -> str:
        return DeadLetter(
            self.occurrence().key, "e", "task", self.now, reason, "error", self.now, b"message", attempts=1
        ).to_json()

    # ---- the workers

    def ticket(self, second: int = 0, *, dispatch: int = 1, **policy: Any) -> Ticket:
        occurrence, bucket = self.occurrence(second), self.bucket(second)
        return Ticket(
            "test/0",
            occurrence.key,
            "e",
            occurrence.nominal,
            self.epoch,
            dispatch,
            bucket.number,
            bucket.field,
            Policy(**policy),
        )

    def start(
        self,
        token: str = "t",
        order: tuple[int, int] = (1, 0),
        second: int = 0,
        *,
        late: bool = True,
        payload: bytes = b"message",
        **policy: Any,
    ) -> Started:
        ticket = self.ticket(second, dispatch=order[0], **policy)
        return self.runs.start(Start(ticket, Order(*order), token, "worker", late, payload))

    def beat(self, token: str = "t", order: tuple[int, int] = (1, 0), *, late: bool = True, **policy: Any) -> Pulse:
        ticket = self.ticket(dispatch=order[0], **policy)
        return self.runs.heartbeat([Beat(ticket, Order(*order), token, "worker", late, b"message")])[0]

    def end(
        self,
        state: EndState = "done",
        token: str = "t",
        order: tuple[int, int] = (1, 0),
        *,
        reason: str = "",
        letter: str = "",
        eta: datetime | None = None,
        **policy: Any,
    ) -> Ended:
        ticket = self.ticket(dispatch=order[0], **policy)
        return self.runs.end([End(ticket, Order(*order), token, state, reason, letter, eta, 1.5)])[0]

    # ---- what stands in the ledger

    @property
    def state(self) -> str:
        """The state of the occurrence: of its record; where that is gone, of its last settling in the audit."""
        for run in self.store.runs():
            if run.key == self.occurrence().key:
                return run.state
        return self.events[-1] if self.events else ""

    @property
    def events(self) -> list[str]:
        return [record.event for record in self.store.audit() if record.entry == "e"]


def scene_on(url: str, *, timeout: float = 5.0) -> Scene:
    """Return a scene on a server; whoever asks closes its store and its runs."""
    store = RedisStore(
        url,
        "test/0",
        timeout=timeout,
        retention=timedelta(days=1),
        max_skew=timedelta(seconds=300),
        audit_max=10_000,
        presence=timedelta(seconds=150),
    )
    runs = RedisRuns(url, "test/0", timeout=timeout, retention=timedelta(days=1), audit_max=10_000)

    def let_pass(span: timedelta) -> None:
        until = store.time() + span
        while store.time() <= until:
            pass

    def wipe() -> None:
        with redis.Redis.from_url(url) as client:
            client.flushall()

    def forget_marks() -> None:
        with redis.Redis.from_url(url) as client:
            for key in client.keys("tzbeat:*:done:*"):
                client.delete(key)

    store.take_office(1)
    return Scene(store, runs, store.time().replace(microsecond=0), let_pass, wipe, forget_marks)

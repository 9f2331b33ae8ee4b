"""The two ways of a message to the broker, one of which a term of office takes.

*Same server*: broker and store are one Redis, so one script records the occurrence and pushes its message. *Claims*: any
other broker; the claim is recorded with the message, the message is published, the claim is confirmed (`claims`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from numbers import Real
from typing import Protocol

from celery import Celery
from redis.exceptions import ReadOnlyError, ResponseError

from celery_tzbeat.clock import Clock
from celery_tzbeat.envelopes import ETA, EXPIRES, Envelope, Parcel
from celery_tzbeat.errors import BrokerUnavailable, StoreUnavailable, StoreUnreadable
from celery_tzbeat.model import Cursor, Entry, Occurrence
from celery_tzbeat.store.client import cannot_serve
from celery_tzbeat.store.protocol import Answer, Claim, Claimed, Command, Dispatch, Store, Tracking, Verdict

from .capture import Capture
from .claims import Claims
from .dispatch import Builder, BuildFailed, Message

#: What the probe says: it chooses the path where the URLs do not.
ONE_SERVER = "what the store's connection pushes arrives through the broker's"
TWO_SERVERS = "what the store's connection pushes does not arrive through the broker's"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An occurrence with its message, ready to be recorded and sent; `cursor` stands behind it.

    With `tracking` the ledger follows the run; without it what is sent is settled.
    """

    entry: Entry
    occurrence: Occurrence
    cursor: Cursor
    message: Message
    tracking: Tracking | None = None


class Path(Protocol):
    """How a term builds and sends. `name` and `why` are for operators."""

    name: str
    why: str
    sends_at_once: bool  # whether what is recorded is sent, too

    def build(self, entry: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        """Return the message of an occurrence. Raises BuildFailed or StoreUnavailable."""

    def send(self, batch: Sequence[Outgoing], claims: Claims, *, epoch: int) -> list[Answer]:
        """Record a batch and have it sent. DONE: the ledger has it, and whoever leads sees to the message."""


class SameServerPath:
    """Record and push in one script."""

    name = "same server"
    sends_at_once = True

    def __init__(self, builder: Builder, store: Store) -> None:
        self.why = ONE_SERVER
        self._builder = builder
        self._store = store

    def build(self, entry: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        return self._builder.build(entry, occurrence, epoch=epoch)

    def send(self, batch: Sequence[Outgoing], claims: Claims, *, epoch: int) -> list[Answer]:
        return self._store.dispatch(
            [Dispatch(o.occurrence, o.cursor, o.message.bucket, _commands(o.message), _with_payload(o)) for o in batch],
            epoch=epoch,
        )


class ClaimsPath:
    """Claim, publish, confirm."""

    name = "claims"
    sends_at_once = False

    def __init__(self, app: Celery, builder: Builder, store: Store, clock: Clock) -> None:
        self.why = ""
        self._app = app
        self._builder = builder
        self._store = store
        self._clock = clock

    def build(self, entry: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        message = self._builder.build(entry, occurrence, epoch=epoch)
        parcel = Parcel(_envelopes(message), self._clock.now(), counted_headers(self._app, entry))
        try:
            return replace(message, payload=parcel.to_bytes())
        except Exception as exc:
            raise BuildFailed(f"a header or property cannot be kept in the ledger: {exc}") from exc

    def send(self, batch: Sequence[Outgoing], claims: Claims, *, epoch: int) -> list[Answer]:
        answers = self._store.claim(
            [Claim(o.occurrence, o.message.bucket, o.cursor, o.message.payload, o.tracking) for o in batch],
            epoch=epoch,
        )
        for outgoing, answer in zip(batch, answers, strict=True):
            if answer.verdict is Verdict.DONE:
                claims.add(Claimed(outgoing.occurrence, outgoing.message.bucket), outgoing.message.payload)
        return answers


def counted_headers(app: Celery, entry: Entry) -> tuple[str, ...]:
    """Return the headers of the entry's messages that are counted from when they are sent: a relative expiry or delay."""
    counted = []
    expires = entry.options.get("expires", getattr(app.tasks.get(entry.task), "expires", None))
    if isinstance(expires, (Real, timedelta)):
        counted.append(EXPIRES)
    if entry.options.get("countdown"):  # 0 is none to Celery: an `eta` beside it stays
        counted.append(ETA)
    return tuple(counted)


def same_server_probe(capture: Capture, run: Callable[[Command], None], nonce: str, queues: Iterable[str] = ()) -> str:
    """Return why the broker's connection and the store's do not lead to the same keys; empty where they do.

    One script through the store's connection pushes a captured message; it is looked for through a new one of the broker's
    (an old one may hold on to a master that was replaced). The script names the keys of `queues`, too: rules of access, key
    prefixes and slots are tried with it. A refusal is an answer; StoreUnavailable is raised where either does not answer.
    Nothing stays on either server: what could not be taken back is gone after 10 s.
    """
    capture.reset()
    queue = f"tzbeat-probe-{nonce}"
    try:
        capture.producer.publish(nonce, exchange="", routing_key=queue, serializer="json", retry=False)
        pushed = next(command for command in capture.take() if command.keys)
        keys = capture.keys_of(queues)
    except Exception as exc:
        capture.reset()
        raise BrokerUnavailable(f"the broker does not answer: {exc}") from exc
    try:
        run(replace(pushed, keys=(*pushed.keys, *keys)))
    except StoreUnreadable as exc:
        return f"the store refuses to push to the broker's queues: {exc}"
    found: bytes | None = None
    try:
        found = capture.pop(queue)
    except Exception as exc:
        capture.reset()
        if isinstance(exc, ResponseError) and not cannot_serve(str(exc)) and not isinstance(exc, ReadOnlyError):
            return f"the broker refuses to show what the store pushed: {exc}"
        raise BrokerUnavailable(f"the broker does not answer: {exc}") from exc
    finally:
        if found is None:
            with suppress(StoreUnavailable, StoreUnreadable):
                run(Command("DEL", pushed.keys, pushed.keys))
    return "" if found == pushed.args[1] else TWO_SERVERS


def _with_payload(outgoing: Outgoing) -> Tracking | None:
    tracking = outgoing.tracking
    return replace(tracking, payload=outgoing.message.kept) if tracking is not None else None


def _commands(message: Message) -> tuple[Command, ...]:
    return tuple(part for part in message.parts if isinstance(part, Command))


def _envelopes(message: Message) -> tuple[Envelope, ...]:
    return tuple(part for part in message.parts if isinstance(part, Envelope))

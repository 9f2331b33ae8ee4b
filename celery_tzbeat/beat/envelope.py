"""A message as any broker takes it: captured before it is sent, kept in the ledger, sent later or again.

kombu hands a channel two things: what to prepare a message from, and where to publish it. `RecordingChannel` keeps both
instead of publishing; everything else (declaring queues) goes to the broker as always.

Seam: `prepare_message` and `basic_publish` of kombu's channels, called by `Producer._publish`; a contract test holds them.
"""

from __future__ import annotations

import base64
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from celery import Celery
from kombu.utils.json import dumps, loads

from celery_tzbeat.model import from_iso, iso

#: Headers that hold an instant, which was counted from the time of building where the entry gave a duration.
COUNTED = EXPIRES, ETA = ("expires", "eta")


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message: its parts as kombu prepares them, and where it goes. `body` is what travels, as bytes."""

    body: bytes
    content_type: str | None
    content_encoding: str | None
    headers: dict[str, Any]
    properties: dict[str, Any]
    priority: int | None
    exchange: str
    routing_key: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "body": base64.b64encode(self.body).decode(),
            "content_type": self.content_type,
            "content_encoding": self.content_encoding,
            "headers": self.headers,
            "properties": self.properties,
            "priority": self.priority,
            "exchange": self.exchange,
            "routing_key": self.routing_key,
        }

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Envelope:
        return cls(**{**form, "body": base64.b64decode(form["body"])})

    def later(self, by: timedelta, counted: tuple[str, ...]) -> Envelope:
        """Return the envelope with the named headers moved: a relative expiry or countdown is counted anew.

        The property `expiration`, for how long RabbitMQ keeps the message, is counted from when it is sent by itself. Celery
        sets it with each `expires`: where that is an instant, what has passed of it since is taken off, to 0 at least.
        """
        moved = {
            name: iso(from_iso(self.headers[name]) + by) for name in counted if isinstance(self.headers.get(name), str)
        }
        sent = replace(self, headers={**self.headers, **moved}) if moved else self
        kept_for = self.properties.get("expiration")
        if kept_for is None or EXPIRES in counted or not self.headers.get(EXPIRES):
            return sent
        left = max(timedelta(), timedelta(milliseconds=int(kept_for)) - by)
        return replace(sent, properties={**self.properties, "expiration": str(left // timedelta(milliseconds=1))})


@dataclass(frozen=True, slots=True)
class Parcel:
    """The messages of one occurrence as the ledger keeps them with a claim."""

    envelopes: tuple[Envelope, ...]
    built_at: datetime
    counted: tuple[str, ...]  # those headers of COUNTED that the entry gave as a duration

    def to_bytes(self) -> bytes:
        form = {
            "v": 1,
            "envelopes": [envelope.to_dict() for envelope in self.envelopes],
            "built_at": iso(self.built_at),
            "counted": list(self.counted),
        }
        return bytes(dumps(form).encode())

    @classmethod
    def from_bytes(cls, payload: bytes) -> Parcel:
        form = loads(payload)
        return cls(
            envelopes=tuple(Envelope.from_dict(part) for part in form["envelopes"]),
            built_at=from_iso(form["built_at"]),
            counted=tuple(form["counted"]),
        )

    def at(self, now: datetime) -> tuple[Envelope, ...]:
        """Return the envelopes as they are to be sent now."""
        return tuple(envelope.later(now - self.built_at, self.counted) for envelope in self.envelopes)


class RecordingChannel:
    """A channel that keeps what would be published in `captured`, in order."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.captured: list[Envelope] = []

    def prepare_message(
        self,
        body: Any,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
    ) -> Envelope:
        raw = body if isinstance(body, bytes) else str(body).encode()
        return Envelope(
            raw, content_type, content_encoding, dict(headers or {}), dict(properties or {}), priority, "", ""
        )

    def basic_publish(self, message: Envelope, exchange: str = "", routing_key: str = "", **_: Any) -> None:
        self.captured.append(replace(message, exchange=exchange or "", routing_key=routing_key or ""))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class Recording:
    """A bounded broker connection of beat's own, with a producer whose messages are kept instead of sent.

    For any broker. `timeout` bounds connecting, in seconds. Not thread-safe.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self._connection: Any = None
        self._producer: Any = None

    @property
    def producer(self) -> Any:
        """The producer to hand to `apply_entry`; connects where there is no connection."""
        if self._producer is None:
            self._connection = bounded_connection(self._app, self._timeout)
            channel = RecordingChannel(self._connection.default_channel)
            self._producer = self._app.amqp.Producer(channel, auto_declare=False)
        return self._producer

    def take(self) -> tuple[Envelope, ...]:
        """Return what was captured since the last call, and forget it."""
        channel = self.producer.channel
        taken, channel.captured = tuple(channel.captured), []
        return taken

    def clear(self) -> None:
        """Forget what was captured: what a build that failed may have left."""
        self.producer.channel.captured.clear()

    def broker_answers(self) -> bool:
        """Return whether a new connection to the broker can be made now, within the bound."""
        self.reset()
        return why_no_connection(self._app, self._timeout) is None

    def reset(self) -> None:
        """Drop the connection, and with it what kombu believes to be declared; the next use makes a new one."""
        connection, self._connection, self._producer = self._connection, None, None
        drop(connection)


def bounded_connection(app: Celery, timeout: float, **options: Any) -> Any:
    """Return a connection of ours to the broker that waits for nothing longer than `timeout` seconds.

    Of several brokers each is tried once, which takes twice the `timeout` at most.
    """
    configured = app.connection_for_write()
    scheme, brokers = configured.transport_cls, max(1, len(configured.alt))
    timeout_each = timeout if brokers <= 2 else timeout * 2 / brokers
    bounds: dict[str, Any] = {"max_retries": 0, "interval_start": 0, **options}
    transport: Any = None
    if scheme in ("redis", "rediss", "sentinel"):
        from .capture import BoundedSentinelTransport, BoundedTransport, redis_bounds

        transport = BoundedTransport
        if scheme == "sentinel":
            # Its list names no brokers but sentinels: one attempt asks them all.
            transport, brokers, timeout_each = BoundedSentinelTransport, 1, timeout
        bounds |= {**redis_bounds(app, timeout), "socket_connect_timeout": timeout_each}
    elif scheme in ("amqp", "amqps", "pyamqp"):
        bounds |= {"read_timeout": timeout, "write_timeout": timeout, "confirm_publish": True}
    elif scheme.lower() == "sqs":
        bounds["client-config"] = sqs_bounds(app, timeout)
    connection = app.connection_for_write(transport=transport, transport_options=bounds, connect_timeout=timeout_each)
    # kombu's own loop over the brokers ends with the first one that hangs.
    for left in reversed(range(brokers)):
        if transport is not None:
            connection.transport_cls = transport  # of a further URL, and of redis+socket://, kombu takes the URL's own
        try:
            connection.ensure_connection(max_retries=0, timeout=timeout_each)
            break
        except Exception:
            if not left:
                raise
            connection.maybe_switch_next()
    return connection


def sqs_bounds(app: Celery, timeout: float) -> dict[str, Any]:
    """Return botocore's configuration that bounds each call; its own waits a minute, five times."""
    own = (app.conf.broker_transport_options or {}).get("client-config") or {}
    return {**own, "connect_timeout": timeout, "read_timeout": timeout, "retries": {"total_max_attempts": 1}}


def why_no_connection(app: Celery, timeout: float) -> Exception | None:
    """Return what a new connection to the broker fails with now, within the bound; None where it is taken."""
    connection = None
    try:
        connection = bounded_connection(app, timeout)
        connection.default_channel  # noqa: B018 - opening a channel is the question
    except Exception as exc:
        return exc
    finally:
        drop(connection)
    return None


def drop(connection: Any) -> None:
    """Close a connection that may be broken, and wait for nothing."""
    if connection is not None:
        with suppress(Exception):
            connection.collect(socket_timeout=0.1)

"""A channel that keeps messages instead of sending them, for any broker; and connections that wait for nothing long.

kombu hands a channel two things: what to prepare a message from, and where to publish it. `RecordingChannel` keeps both
(`Envelope`) instead of publishing; everything else (declaring queues) goes to the broker as always.

Seam: `prepare_message` and `basic_publish` of kombu's channels, called by `Producer._publish`; a contract test holds them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from celery import Celery

from celery_tzbeat.envelopes import Envelope


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

"""A kombu channel that hands over what it would have written to the queue.

`super().apply_entry` builds the message with all of Celery's semantics (routing, priority, expiry, signals, headers of
others); this channel keeps the final commands, wire payload included, so that the ledger can run them in the very script
that records the occurrence. Everything else (declaring queues, reading bindings) goes to the broker as always.

Seam: `kombu.transport.redis.Channel._put`, `_put_fanout`, `conn_or_acquire`, `_connparams` and `_q_for_pri`, for Sentinel
those of `SentinelChannel`; a contract test holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from celery import Celery
from kombu import Connection
from kombu.transport import redis as kombu_redis

from celery_tzbeat.store.client import never_again
from celery_tzbeat.store.protocol import Command


class Unrouted(Exception):
    """A message that was published reached no queue."""


class _Recorder:
    """Stands where `_put` expects a client: keeps the writes, lets the one read through, refuses all else."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def lpush(self, key: str, *values: Any) -> None:
        self._keep("LPUSH", key, *values)

    def pexpire(self, key: str, millis: int) -> None:
        self._keep("PEXPIRE", key, millis)

    def publish(self, topic: str, payload: Any) -> None:
        self._keep("PUBLISH", topic, payload)

    def smembers(self, key: str) -> Any:
        return self._channel._create_client().smembers(key)

    def pipeline(self) -> _Recorder:
        return self

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def execute(self) -> None:
        return None

    def _keep(self, name: str, key: str, *rest: Any) -> None:
        whole = _bytes(self._channel.global_keyprefix) + _bytes(key)
        keys = () if name == "PUBLISH" else (whole,)
        self._channel.captured.append(Command(name, (whole, *map(_bytes, rest)), keys))


class _Bounded:
    """redis-py would retry a failed exchange for minutes; ours fails within its bound."""

    def _connparams(self, *args: Any, **kwargs: Any) -> Any:
        return {**super()._connparams(*args, **kwargs), "retry": never_again()}  # type: ignore[misc]


class BoundedChannel(_Bounded, kombu_redis.Channel):
    pass


class BoundedSentinelChannel(_Bounded, kombu_redis.SentinelChannel):
    pass


class BoundedTransport(kombu_redis.Transport):
    Channel = BoundedChannel


class BoundedSentinelTransport(kombu_redis.SentinelTransport):
    Channel = BoundedSentinelChannel


class _Capturing:
    """Keeps what would be pushed or published in `captured`, in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.captured: list[Command] = []
        self.unrouted: list[str] = []
        self._capturing = False
        super().__init__(*args, **kwargs)

    def basic_publish(self, message: Any, exchange: str, routing_key: str, **kwargs: Any) -> Any:
        before = len(self.captured)
        result = super().basic_publish(message, exchange, routing_key, **kwargs)  # type: ignore[misc]
        if len(self.captured) == before and message.get("headers", {}).get("task"):
            self.unrouted.append(f"exchange {exchange!r} with routing key {routing_key!r} reaches no queue")
        return result

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        with self._captured_writes():
            super()._put(queue, message, **kwargs)  # type: ignore[misc]

    def _put_fanout(self, exchange: str, message: Any, routing_key: str, **kwargs: Any) -> None:
        with self._captured_writes():
            super()._put_fanout(exchange, message, routing_key, **kwargs)  # type: ignore[misc]

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        if self._capturing:
            yield _Recorder(self)
        else:
            with super().conn_or_acquire(client) as real:  # type: ignore[misc]
                yield real

    @contextmanager
    def _captured_writes(self) -> Iterator[None]:
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False


class CaptureChannel(_Capturing, BoundedChannel):
    pass


class SentinelCaptureChannel(_Capturing, BoundedSentinelChannel):
    pass


class CaptureTransport(kombu_redis.Transport):
    Channel = CaptureChannel


class SentinelCaptureTransport(kombu_redis.SentinelTransport):
    Channel = SentinelCaptureChannel


def redis_bounds(app: Celery, timeout: float) -> dict[str, Any]:
    """Return the transport options that bound each exchange with a Redis broker, and with its sentinels."""
    bounds = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry_on_timeout": False,
        "max_retries": 0,  # kombu would wait 2 s and more between attempts to connect, older ones for ever
    }
    own = (app.conf.broker_transport_options or {}).get("sentinel_kwargs") or {}
    sentinels = max(1, len(app.connection_for_write().alt))
    share = {"socket_timeout": timeout / sentinels, "socket_connect_timeout": timeout / sentinels}
    return {**bounds, "sentinel_kwargs": {**own, **share, "retry": never_again()}}


class Capture:
    """A bounded broker connection of beat's own, with a producer whose messages are kept instead of sent.

    `timeout` bounds each exchange with the broker, in seconds. Not thread-safe.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self._connection: Connection | None = None
        self._producer: Any = None

    @property
    def producer(self) -> Any:
        """The producer to hand to `apply_entry`; connects where there is no connection."""
        if self._producer is None:
            self._connection = self._app.connection_for_write(
                transport_options=redis_bounds(self._app, self._timeout),
                connect_timeout=self._timeout,
            )
            # Set afterwards: of redis+socket:// kombu reads the transport from the URL whatever is given.
            sentinel = self._connection.transport_cls == "sentinel"
            self._connection.transport_cls = SentinelCaptureTransport if sentinel else CaptureTransport
            self._producer = self._app.amqp.Producer(self._connection.default_channel, auto_declare=False)
        return self._producer

    @property
    def channel(self) -> Any:
        return self.producer.channel

    def take(self) -> tuple[Command, ...]:
        """Return what was captured since the last call, and forget it. Raises Unrouted where a task reached no queue."""
        channel = self.channel
        taken: tuple[Command, ...] = tuple(channel.captured)
        channel.captured = []
        unrouted, channel.unrouted = channel.unrouted, []
        if unrouted:
            self.reset()  # the bindings may have gone with the store: the next message declares its queue anew
            raise Unrouted(unrouted[0])
        return taken

    def clear(self) -> None:
        """Forget what was captured: what a build that failed may have left."""
        self.channel.captured.clear()
        self.channel.unrouted.clear()

    def broker_answers(self) -> bool:
        """Return whether the broker answers now, within the bound: tells a broken broker from a broken entry."""
        try:
            self.channel._create_client().ping()
        except Exception:
            self.reset()
            return False
        return True

    def pop(self, queue: str) -> bytes | None:
        """Take one message off a queue through the broker's own connection."""
        found: bytes | None = self.channel._create_client().rpop(queue)
        return found

    def keys_of(self, queues: Iterable[str]) -> tuple[bytes, ...]:
        """Return the keys that messages to these queues may be pushed to, one for each step of priority."""
        channel = self.channel
        return tuple(
            _bytes(channel.global_keyprefix) + _bytes(channel._q_for_pri(queue, step))
            for queue in queues
            for step in channel.priority_steps
        )

    def reset(self) -> None:
        """Drop the connection; the next use makes a new one."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(Exception):  # it is broken: that is why it is dropped
                connection.release()


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()

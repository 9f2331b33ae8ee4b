"""Sends envelopes to a broker that is not the store, and says what is known of each afterwards.

What a broker says of a message is one of three: it has it (confirmed), it does not have it (returned or refused: *not
sent*), or nothing, because the wire failed (*unknown*: the same id is sent again). No blind retry; every wait is bounded.

RabbitMQ, when short of memory or disk, says `connection.blocked` to who publishes, and reads no further; what was written
it takes when that is over. A new connection may publish one message each time, and each would be a copy then: so the
blocked one is kept, and nothing is sent until the broker says that it is over or the connection is lost. (py-amqp sets TCP
keepalive: a peer that is gone without a word is found out within minutes.)
"""

from __future__ import annotations

import enum
import logging
import struct
from typing import Any

from amqp.exceptions import ChannelError, FrameSyntaxError, MessageNacked, NotFound, RecoverableChannelError
from celery import Celery

from celery_tzbeat.envelopes import Envelope
from celery_tzbeat.errors import BrokerUnavailable

from .envelope import bounded_connection, drop

logger = logging.getLogger(__name__)

BLOCKED = "the broker does not answer: it is short of memory or disk and blocks who publishes (connection.blocked)"


class Fate(enum.Enum):
    """What is known of a message after publishing it."""

    CONFIRMED = "confirmed"
    NOT_SENT = "not sent"  # returned as unroutable, or refused by the broker


class Publisher:
    """A bounded connection of beat's own for sending. `timeout` bounds each exchange, in seconds. Not thread-safe.

    On AMQP a message is confirmed when the broker has it (persistent and in a durable queue: on disk) and could route it.
    On other transports it is confirmed when the transport took it.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self._connection: Any = None
        self._speaks_amqp = False
        self._homeless = False  # the last envelope was returned, or its exchange does not exist
        self._blocked = False

    def publish(self, envelope: Envelope) -> tuple[Fate, str]:
        """Send one envelope. Return its fate and the broker's words. Raises BrokerUnavailable where it is unknown.

        Where there was no queue for it and Celery knows one, that is declared, and the envelope sent once more: the first
        was not sent for certain.
        """
        self._hear()
        fate, words = self._publish(envelope)
        if self._homeless and self._declare_again(envelope):
            return self._publish(envelope)
        return fate, words

    def _publish(self, envelope: Envelope) -> tuple[Fate, str]:
        self._homeless = False
        try:
            channel = self._channel()
            message = channel.prepare_message(
                envelope.body,
                envelope.priority,
                envelope.content_type,
                envelope.content_encoding,
                dict(envelope.headers),
                dict(envelope.properties),
            )
            channel.basic_publish(
                message,
                exchange=envelope.exchange,
                routing_key=envelope.routing_key,
                mandatory=True,
                immediate=False,
                timeout=self._timeout,
                confirm_timeout=self._timeout,
            )
        except Exception as exc:
            if self._blocked and isinstance(exc, TimeoutError):
                raise BrokerUnavailable(BLOCKED) from exc
            connected = self._connection is not None
            self.reset()
            if connected and _is_refusal(exc):
                self._homeless = isinstance(exc, NotFound)
                return Fate.NOT_SENT, f"{type(exc).__name__}: {exc}"
            raise BrokerUnavailable(f"the broker does not answer: {type(exc).__name__}: {exc}") from exc
        if self._homeless:
            place = f"exchange {envelope.exchange!r}, routing key {envelope.routing_key!r}"
            return Fate.NOT_SENT, f"returned as unroutable: {place}"
        return Fate.CONFIRMED, ""

    def reset(self) -> None:
        """Drop the connection; the next message makes a new one."""
        connection, self._connection = self._connection, None
        self._blocked = False
        drop(connection)

    def _channel(self) -> Any:
        if self._connection is None:
            self._connection = bounded_connection(self._app, self._timeout)
            events = getattr(self._connection.default_channel, "events", None)
            self._speaks_amqp = events is not None
            if events is not None:
                events["basic_return"].add(self._on_return)
                self._connection.connection.on_blocked = self._on_blocked
                self._connection.connection.on_unblocked = self._on_unblocked
        return self._connection.default_channel

    def _hear(self) -> None:
        """Take in what an AMQP broker said since the last message. Raises StoreUnavailable while it blocks us.

        A connection that it closed meanwhile is dropped before anything is sent over it: that makes no message late.
        """
        if self._connection is None or not self._speaks_amqp:
            return
        blocked = self._blocked
        try:
            while True:
                self._connection.drain_events(timeout=0)
        except TimeoutError:  # that was all
            pass
        except Exception:
            self.reset()
        if self._blocked:
            raise BrokerUnavailable(BLOCKED)
        if blocked:
            self.reset()  # an answer to the message that was stuck would be taken for that to the next one

    def _on_blocked(self, reason: str) -> None:
        self._blocked = True

    def _on_unblocked(self) -> None:
        self._blocked = False

    def _on_return(self, exc: Any, exchange: str, routing_key: str, message: Any) -> None:
        self._homeless = True

    def _declare_again(self, envelope: Envelope) -> bool:
        """Declare the queues of Celery's that the envelope may be for, and were deleted; return whether there are any."""
        queues = [queue for queue in self._app.amqp.queues.values() if _may_take(queue, envelope)]
        try:
            for queue in queues:
                queue(self._channel()).declare()
        except Exception as exc:
            logger.warning("the queue for %r could not be declared again: %s", envelope.routing_key, exc)
            self.reset()
            return False
        return bool(queues)


def _may_take(queue: Any, envelope: Envelope) -> bool:
    if not envelope.exchange:
        return bool(queue.name == envelope.routing_key)
    exchange = queue.exchange
    if exchange is None or exchange.name != envelope.exchange:
        return False
    return bool(exchange.type != "direct" or queue.routing_key == envelope.routing_key)


def _is_refusal(exc: Exception) -> bool:
    """Return whether an error of a whole connection says that the broker has not got this very message, and never will.

    AMQP says so: a closed channel (no such exchange, no permission), a nack, a header that cannot be encoded. Elsewhere
    only Python's own errors before anything left are that plain: what Redis or SQS call an error of the channel may as
    well be a server that cannot serve at the moment (READONLY, OOM), and the message must not die of that.
    """
    if type(exc) is RecoverableChannelError:  # py-amqp before 5.4 calls a write that timed out so
        return False
    refusals = (ChannelError, FrameSyntaxError, MessageNacked, TypeError, UnicodeError, OverflowError, struct.error)
    return isinstance(exc, refusals)

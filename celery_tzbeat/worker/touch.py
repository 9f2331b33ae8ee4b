"""Keeping a Redis broker from delivering again what runs here: the visibility timeout of held messages is put off.

Celery's Redis transport gives a message to another worker when it was not acknowledged for the visibility timeout. The gate
refuses that copy, but acknowledging it takes the original's place among the unacknowledged ones, too. So the heartbeat sets
the time of what is live or parked anew, with the worker's own clock (kombu compares with its own), and only of entries that
are there still: an acknowledged one is not revived. Messages without our header are left alone.

Seam: kombu's Redis channel, `unacked_index_key` and `_get_pool`; without them nothing is touched, and copies are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from celery_tzbeat.clock import Clock
from celery_tzbeat.store.client import never_again

#: The bound of one exchange with the broker, in seconds: the heartbeat must not wait for a broker that hangs.
TIMEOUT = 1.0


class Toucher:
    """Used by the heartbeat's thread alone, with a connection of its own. `unacked` returns Celery's requests."""

    def __init__(self, unacked: Callable[[], Iterable[Any]], consumer: Any, clock: Clock) -> None:
        self._unacked = unacked
        self._consumer = consumer
        self._clock = clock
        self._connection: Any = None
        self._client: Any = None
        self._index = ""

    def touch(self) -> None:
        """Put off the redelivery of what is held. Raises what redis-py raises."""
        tags = [request.message.delivery_tag for request in self._unacked()]
        if not tags or not self._connected():
            return
        now = self._clock.now().timestamp()
        self._client.zadd(self._index, dict.fromkeys(tags, now), xx=True)

    def _connected(self) -> bool:
        """Follow the consumer to the broker that it is connected to; False for a broker that needs no touch."""
        connection = self._consumer.connection
        if connection is None or self._consumer.task_consumer is None:
            return False
        if connection is not self._connection:
            self._connection, self._client = connection, None
            channel = self._consumer.task_consumer.channel
            if hasattr(channel, "unacked_index_key") and hasattr(channel, "_get_pool"):
                pool = channel._get_pool()
                bounds = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT, "retry": never_again()}
                pool.connection_kwargs.update(bounds)
                self._client, self._index = channel.Client(connection_pool=pool), channel.unacked_index_key
        return self._client is not None

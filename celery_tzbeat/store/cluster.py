"""A store on a Redis or Valkey Cluster: connections to whichever node serves the namespace's one slot.

All keys of a namespace carry one hash tag, so they are in one slot, and one node serves them all. That node is looked for
each time a connection is made: after a failover, or when the slot was moved, a call fails, and the next one finds the new
node. So everything else (scripts, pipelines, pub/sub, one bound for each call) is as with a single server. redis-py's own
`RedisCluster` is not used: it retries by itself, in loops whose time is not bounded.

    what happens                            what is seen
    -----------------------------------     ---------------------------------------------------------------------
    the node dies                           the call fails; then no node of the URL names another until one is elected
    the node is replaced, or demoted        MOVED, READONLY or a closed connection; the next call asks who serves the slot
    the slot is moved away                  TRYAGAIN, ASK or MOVED until it is there: the store is down meanwhile
    too few nodes are left                  CLUSTERDOWN: the store is down meanwhile
    a node of the URL is down, or asked     the next one is asked; each new connection begins with another one, so a
    in vain, or knows an old owner          node that knows an old state does not hold things up for long

Seam: `connect` and `_sock` of redis-py's connections; a contract test holds them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import redis
from redis.crc import key_slot
from redis.exceptions import ConnectionError, RedisError

#: The schemes of a cluster, and what they are without the cluster.
SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}

#: Where a node listens unless its address says otherwise.
PORT = 6379

Address = tuple[str, int]


def is_cluster(url: str) -> bool:
    """Return whether a URL names a cluster."""
    return url.partition("://")[0] in SCHEMES


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """``redis+cluster://[user:password@]host[:port][,host[:port]…][/0][?option=…]``: some nodes of a cluster.

    ``rediss+cluster://`` is the same over TLS. `options` is what redis-py reads in the rest of the URL, for all nodes.
    """

    nodes: tuple[Address, ...]
    options: Mapping[str, Any]

    @classmethod
    def read(cls, url: str) -> ClusterUrl:
        """Return what a URL says. Raises ValueError."""
        parts = urlsplit(url)
        login, at, hosts = parts.netloc.rpartition("@")
        if parts.path.strip("/") not in ("", "0"):
            raise ValueError(f"a cluster has no database {parts.path.strip('/')!r}, only 0; leave it out")
        nodes = []
        for host in hosts.split(","):
            node = urlsplit(f"//{host}")
            if not node.hostname:
                raise ValueError("a node of the cluster has no host")
            nodes.append((node.hostname, node.port or PORT))
        query = f"?{parts.query}" if parts.query else ""
        plain = f"{SCHEMES[parts.scheme]}://{login}{at}node{query}"
        options = cast(Any, redis.connection).parse_url(plain)  # redis-py gives it no types
        return cls(tuple(nodes), {name: value for name, value in options.items() if name not in ("host", "port", "db")})


class Owner:
    """Which node serves the slot of a key. `timeout` bounds asking all nodes of the URL together, in seconds."""

    def __init__(self, url: ClusterUrl, key: str, options: Mapping[str, Any], *, timeout: float) -> None:
        self.slot = key_slot(key.encode())
        #: The node that was named last, None before.
        self.address: Address | None = None
        self._nodes = deque(url.nodes)
        share = timeout / len(url.nodes)
        self._options = {**options, **url.options, "socket_timeout": share, "socket_connect_timeout": share}

    def find(self) -> Address:
        """Return the node's address. Raises ConnectionError where no node of the URL knows it."""
        failure: Exception | None = None
        for _ in range(len(self._nodes)):
            node = self._nodes[0]
            self._nodes.rotate(-1)
            try:
                found = self._named_by(node)
            except (RedisError, OSError) as exc:
                failure = exc
                continue
            if found is not None:
                self.address = found
                return found
        raise ConnectionError(
            f"no node of the cluster tells who serves slot {self.slot}: {failure or 'nobody does'}"
        ) from failure

    def _named_by(self, node: Address) -> Address | None:
        host, port = node
        pool = redis.ConnectionPool(**{**self._options, "host": host, "port": port})
        with redis.Redis(connection_pool=pool) as client:
            try:
                shards: Any = client.execute_command(
                    "CLUSTER", "SLOTS"
                )  # in two words: redis-py leaves the reply as it is
            finally:
                pool.disconnect()
        for first, last, (named, at, *_), *_ in shards:
            if first <= self.slot <= last:
                # A node that does not know its own address says nothing, or "?".
                return (named.decode() if named and named != b"?" else host), int(at)
        return None


class _ToTheOwner:
    """A connection that goes to the owner of the slot each time it is made."""

    def __init__(self, *, owner: Owner, **options: Any) -> None:
        self._owner = owner
        super().__init__(**options)

    def connect(self) -> None:
        if self._sock is None:  # type: ignore[attr-defined]
            self.host, self.port = self._owner.find()
        super().connect()  # type: ignore[misc]


class _Connection(_ToTheOwner, redis.Connection):
    pass


class _SSLConnection(_ToTheOwner, redis.SSLConnection):
    pass


class OwnersPool(redis.ConnectionPool):
    """Connections to the owner of one slot."""

    def __init__(self, owner: Owner, **options: Any) -> None:
        self._owner = owner
        super().__init__(owner=owner, **options)

    @property
    def master_address(self) -> Address | None:
        """The node that was named last: what listens to another one listens in vain."""
        return self._owner.address


def client_of_the_owner(
    url: ClusterUrl, key: str, options: Mapping[str, Any], greeting: Mapping[str, Callable[[Any], None]]
) -> redis.Redis:
    """Return a client of the node that serves the slot of `key`, found when it connects. `options` as for a server."""
    owner = Owner(url, key, options, timeout=options["socket_timeout"])
    chosen = dict(url.options)
    tls = chosen.pop("connection_class", None) is not None
    pool = OwnersPool(
        owner, **{**options, **chosen, **greeting}, connection_class=_SSLConnection if tls else _Connection
    )
    return redis.Redis(connection_pool=pool)

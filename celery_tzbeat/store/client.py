"""The only maker of Redis clients.

kombu's and redis-py's own defaults wait and retry for minutes (10 retries of 5 s each): a call that outlives the lease is
worse than one that fails. Ours asks once, within a bound; whoever called decides whether to ask again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from celery_tzbeat.errors import InvalidConfiguration, StoreDamaged, StoreUnavailable, StoreUnreadable

from .cluster import ClusterUrl, OwnersPool, client_of_the_owner, is_cluster
from .keys import Keys

#: What a server says when it cannot serve now, though it answers: all of it means *store down*, nothing is fatal.
#: redis-py knows some of these words, makes a class of each, and takes it off the text (LOADING is a ConnectionError there).
_CANNOT_SERVE_ERRORS = (ClusterDownError, MasterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)
_CANNOT_SERVE = re.compile(
    r"(?<![A-Z])(READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|NOREPLICAS|OOM|MISCONF|TRYAGAIN|BUSY|UNBLOCKED)(?![A-Z])"
)
#: What a node of a cluster says that has not got the keys; newer redis-py makes it an AskError, or one of its subclasses.
_ELSEWHERE = re.compile(r"^(MOVED|ASK) \d")

#: Every error that a call may end with.
CALL_ERRORS: tuple[type[Exception], ...] = (RedisError, OSError)

#: What is served as a store, in words.
SERVED = "redis://, rediss://, unix://, sentinel:// or redis+cluster://"

#: Where a sentinel listens unless its address says otherwise.
SENTINEL_PORT = 26379


def make_client(
    url: str, *, timeout: float, client_name: str = "", key: str = "", on_connect: Callable[[], None] | None = None
) -> redis.Redis:
    """Return a client that connects at its first call and never retries by itself.

    `timeout` bounds connecting and each reply, in seconds; asking all sentinels, or all nodes of a cluster, together takes no
    longer than asking one server. Looking up a host's name is not bounded: that is the system's resolver. Values come back
    as bytes. `key` is any of the keys that it will be asked for: of a cluster the node that serves their slot answers.
    `on_connect` is called for each new connection to the server, and may raise RedisError to refuse it. Raises
    InvalidConfiguration for a scheme that is not served, ValueError for a URL that cannot be read.
    """
    address = redis_url(url)
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": never_again(),
        "health_check_interval": 0,
        "client_name": client_name or None,
        "decode_responses": False,
    }
    if not address.startswith("unix"):  # refused by redis-py for a socket file
        options["socket_keepalive"] = True
    greeting = {"redis_connect_func": _greeting(on_connect)} if on_connect is not None else {}
    if is_cluster(address):
        return client_of_the_owner(ClusterUrl.read(address), key, options, greeting)
    if address.startswith("sentinel"):
        return _client_of_the_master(SentinelUrl.read(address), options, greeting)
    return redis.Redis.from_url(address, **options, **greeting)


def _greeting(on_connect: Callable[[], None]) -> Callable[[Any], None]:
    def greet(connection: Any) -> None:
        connection.on_connect()  # what redis-py would do
        on_connect()

    return greet


def never_again() -> Retry:
    """Return redis-py's word for no retries; the default waits and retries for minutes."""
    return Retry(NoBackoff(), 0)


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """``sentinel://[user:password@]host[:port][,host[:port]…][/db]?master_name=…``: the master that these sentinels name.

    kombu's list (``sentinel://one;sentinel://two/0``) is read, too: user, password and database are the first one's there.
    User and password are the master's; a sentinel's own are ``sentinel_username`` and ``sentinel_password``.
    """

    sentinels: tuple[tuple[str, int], ...]
    master: str
    db: int
    username: str | None
    password: str | None
    sentinel_username: str | None
    sentinel_password: str | None
    min_other_sentinels: int

    @classmethod
    def read(cls, url: str, options: Mapping[str, Any] | None = None) -> SentinelUrl:
        """Return what a URL says, and kombu's transport options where it does not say. Raises ValueError."""
        first, *others = (urlsplit(part) for part in url.split(";"))
        foreign = sorted({part.scheme for part in others} - {"sentinel"})
        if foreign:
            raise ValueError(f"a list of sentinels holds {foreign[0]}://")
        query = dict(parse_qsl(first.query, strict_parsing=bool(first.query)))
        for name in query:
            if name not in ("master_name", "sentinel_username", "sentinel_password", "min_other_sentinels"):
                raise ValueError(f"{name} is not an option of sentinel://")
        options = options or {}
        own = options.get("sentinel_kwargs") or {}
        db = first.path.strip("/") or "0"
        if not db.isdecimal():
            raise ValueError(f"the database {db!r} is not a number")
        hosts = [host for part in (first, *others) for host in part.netloc.rpartition("@")[2].split(",")]
        return cls(
            sentinels=tuple(_host_and_port(host) for host in hosts),
            master=str(query.get("master_name") or options.get("master_name") or ""),
            db=int(db),
            username=_unquoted(first.netloc.rpartition("@")[0].partition(":")[0]),
            password=_unquoted(first.netloc.rpartition("@")[0].partition(":")[2]),
            sentinel_username=query.get("sentinel_username") or own.get("username"),
            sentinel_password=query.get("sentinel_password") or own.get("password"),
            min_other_sentinels=int(query.get("min_other_sentinels") or options.get("min_other_sentinels") or 0),
        )

    def __str__(self) -> str:
        """Return the URL as it is read back: all that is known in one text."""
        user, password = quote(self.username or "", safe=""), quote(self.password or "", safe="")
        login = f"{user}:{password}@" if password else f"{user}@" if user else ""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.sentinels)
        query = {
            "master_name": self.master,
            "sentinel_username": self.sentinel_username,
            "sentinel_password": self.sentinel_password,
            "min_other_sentinels": self.min_other_sentinels,
        }
        said = urlencode({name: value for name, value in query.items() if value})
        return f"sentinel://{login}{hosts}/{self.db}{'?' if said else ''}{said}"

    def same_master(self, other: SentinelUrl) -> bool:
        """Return whether both ask the same sentinels for the same master, so that they follow one failover alike."""
        return (self.master, set(self.sentinels), self.db) == (other.master, set(other.sentinels), other.db)


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a sentinel has no host")
    return parts.hostname, parts.port or SENTINEL_PORT


def _unquoted(text: str) -> str | None:
    return unquote(text) or None


class _MasterPool(SentinelConnectionPool):
    """Connections to whatever the sentinels call the master when each is made; those to the sentinels end with them."""

    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                sentinel.connection_pool.disconnect()


def _client_of_the_master(url: SentinelUrl, options: dict[str, Any], greeting: dict[str, Any]) -> redis.Redis:
    if not url.master:
        raise ValueError("sentinel:// needs the master's name: add ?master_name=…")
    share = options["socket_timeout"] / len(url.sentinels)
    manager = cast(Any, Sentinel)(  # redis-py gives it no types
        url.sentinels,
        min_other_sentinels=url.min_other_sentinels,
        sentinel_kwargs={
            **options,
            "socket_timeout": share,
            "socket_connect_timeout": share,
            "retry": never_again(),
            "decode_responses": True,  # redis-py compares the names that sentinels say with text
            "username": url.sentinel_username,
            "password": url.sentinel_password,
        },
    )
    client: redis.Redis = manager.master_for(
        url.master,
        connection_pool_class=_MasterPool,
        **options,
        **greeting,
        db=url.db,
        username=url.username,
        password=url.password,
    )
    return client


def redis_url(url: str) -> str:
    """Return `url` in redis-py's spelling; sentinel:// as `SentinelUrl` writes it, that of a cluster as it is.

    kombu writes a socket as ``redis+socket:///path?virtual_host=0``, and ``ssl_cert_reqs=CERT_REQUIRED``.
    """
    scheme = url.partition("://")[0]
    if is_cluster(url):
        return url
    if scheme in ("redis", "rediss", "unix"):
        return re.sub(r"(?<=[?&]ssl_cert_reqs=)CERT_(\w+)", lambda found: found[1].lower(), url)
    if scheme == "redis+socket":
        parts = urlsplit(url)
        db = parse_qs(parts.query).get("virtual_host", ["0"])[0]
        return f"unix://{unquote(parts.path)}?db={db}"
    if scheme == "sentinel":
        return str(SentinelUrl.read(url))
    raise InvalidConfiguration(
        [f"tzbeat_url {hide_password(url)!r}: the scheme {scheme!r} is not served as a store yet; use {SERVED}"]
    )


def hide_password(url: str) -> str:
    """Return `url` fit for a log: no password."""
    url = re.sub(r"(://[^:@/?;]*):[^?;]*@", r"\1:**@", url)  # up to the last @: a password may hold one, or a slash
    return re.sub(r"(?<=[?&])(\w*password)=[^&;]*", r"\1=**", url)


def cannot_serve(message: str) -> bool:
    """Return whether a server's error text says *not now* rather than *wrong*."""
    return _CANNOT_SERVE.search(message) is not None


def unavailable(client: redis.Redis, exc: Exception) -> StoreUnavailable | None:
    """Return what to raise for an error of a call; None where the error is not about availability.

    Drops the client's connections: a demoted master keeps its connections open, and a reply may still be on its way.
    """
    elsewhere = isinstance(exc, AskError) or _ELSEWHERE.match(str(exc)) is not None
    not_now = elsewhere or isinstance(exc, _CANNOT_SERVE_ERRORS) or cannot_serve(str(exc))
    if isinstance(exc, ResponseError) and not not_now:
        return None
    client.connection_pool.disconnect()
    hint = ""
    if elsewhere and not isinstance(client.connection_pool, OwnersPool):
        hint = "; it is a node of a cluster: name it as redis+cluster://"
    return StoreUnavailable(f"the store does not serve: {type(exc).__name__}: {exc}{hint}")


def unreadable(
    client: redis.Redis, exc: Exception, keys: Keys, named: Iterable[object] = (), *, whose: str = "the store"
) -> StoreUnreadable:
    """Return what to raise for an error that is not about availability; it says which key is damaged, where one is.

    `named` are the keys of the call; those that `keys` has once are looked at in any case.
    """
    if "WRONGTYPE" in str(exc):
        with suppress(*CALL_ERRORS):
            if found := damage(client, keys, named):
                return StoreDamaged(found)
    return StoreUnreadable(f"{whose} answered with an error: {exc}")


def damage(client: redis.Redis, keys: Keys, named: Iterable[object] = ()) -> str:
    """Return which keys have another type than they must have, and what to do; empty where all are right."""
    wanted = {key: keys.type_of(key) for key in (*keys.fixed(), *(key for key in named if isinstance(key, str)))}
    checked = [key for key, type_ in wanted.items() if type_]
    with client.pipeline(transaction=False) as pipe:
        for key in checked:
            pipe.type(key)
        found = [answer.decode() for answer in pipe.execute()]
    wrong = [
        f"the key {key!r} is a {type_} and must be a {wanted[key]} (WRONGTYPE): somebody else has written it; "
        f"rename it (RENAME) to keep it, or delete it"
        for key, type_ in zip(checked, found, strict=True)
        if type_ not in ("none", wanted[key])
    ]
    return "; ".join(wrong)

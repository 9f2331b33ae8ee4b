"""The only maker of Redis clients.

kombu's and redis-py's own defaults wait and retry for minutes (10 retries of 5 s each): a call that outlives the lease is
worse than one that fails. Ours asks once, within a bound; whoever called decides whether to ask again.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from celery_tzbeat.errors import InvalidConfiguration, StoreUnavailable

#: What a server says when it cannot serve now, though it answers: all of it means *store down*, nothing is fatal.
#: redis-py knows some of these words, makes a class of each, and takes it off the text (LOADING is a ConnectionError there).
_CANNOT_SERVE_ERRORS = (ClusterDownError, MasterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)
_CANNOT_SERVE = re.compile(
    r"(?<![A-Z])(READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|NOREPLICAS|OOM|MISCONF|TRYAGAIN|BUSY|UNBLOCKED)(?![A-Z])"
)

#: Every error that a call may end with.
CALL_ERRORS: tuple[type[Exception], ...] = (RedisError, OSError)


def make_client(url: str, *, timeout: float, client_name: str = "") -> redis.Redis:
    """Return a client that connects at its first call and never retries by itself.

    `timeout` bounds connecting and each reply, in seconds. Values come back as bytes. Raises InvalidConfiguration for a
    scheme that is not served.
    """
    address = redis_url(url)
    keepalive = (
        {} if address.startswith("unix") else {"socket_keepalive": True}
    )  # refused by redis-py for a socket file
    return redis.Redis.from_url(
        address,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        **keepalive,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        client_name=client_name or None,
        decode_responses=False,
    )


def redis_url(url: str) -> str:
    """Return `url` in redis-py's spelling.

    kombu writes a socket as ``redis+socket:///path?virtual_host=0``, and ``ssl_cert_reqs=CERT_REQUIRED``.
    """
    scheme = url.partition("://")[0]
    if scheme in ("redis", "rediss", "unix"):
        return re.sub(r"(?<=[?&]ssl_cert_reqs=)CERT_(\w+)", lambda found: found[1].lower(), url)
    if scheme == "redis+socket":
        parts = urlsplit(url)
        db = parse_qs(parts.query).get("virtual_host", ["0"])[0]
        return f"unix://{unquote(parts.path)}?db={db}"
    raise InvalidConfiguration(
        [
            f"tzbeat_url {hide_password(url)!r}: the scheme {scheme!r} is not served as a store yet; "
            "use redis://, rediss:// or unix://"
        ]
    )


def hide_password(url: str) -> str:
    """Return `url` fit for a log: no password."""
    url = re.sub(r"(://[^:@/?]*):[^?]*@", r"\1:**@", url)  # up to the last @: a password may hold one, or a slash
    return re.sub(r"(?<=[?&])(\w*password)=[^&;]*", r"\1=**", url)


def cannot_serve(message: str) -> bool:
    """Return whether a server's error text says *not now* rather than *wrong*."""
    return _CANNOT_SERVE.search(message) is not None


def unavailable(client: redis.Redis, exc: Exception) -> StoreUnavailable | None:
    """Return what to raise for an error of a call; None where the error is not about availability.

    Drops the client's connections: a demoted master keeps its connections open, and a reply may still be on its way.
    """
    not_now = isinstance(exc, _CANNOT_SERVE_ERRORS) or cannot_serve(str(exc))
    if isinstance(exc, ResponseError) and not not_now:
        return None
    client.connection_pool.disconnect()
    return StoreUnavailable(f"the store does not serve: {type(exc).__name__}: {exc}")

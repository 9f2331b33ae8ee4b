"""Leases on Redis or Valkey: each answer is one script (`lua/`), each purpose has a connection of its own.

The elector's thread, the operators' calls and each subscription never share a connection; a resignation opens
a fresh one, because it is sent from a signal handler that may have interrupted any of the others.

Not promised: that an acknowledged grant outlives a failover to a replica that had not received it. Epochs
stay monotone then, and the leader that is alive goes on under its own (see `acquire.lua`), unless it is cut
off with the old master: `replicated` (WAIT) lets it see that, and the elector gives way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta
from importlib import resources
from typing import Any, Protocol

import redis
from redis.exceptions import NoScriptError

from celery_tzbeat.model import from_micros
from celery_tzbeat.store.client import CALL_ERRORS, make_client, unavailable, unreadable
from celery_tzbeat.store.keys import Keys

from .protocol import Free, Granted, Held, Leader, Lost, Renewed

#: The longest wait for each step of a resignation (connecting, each reply), in seconds.
RESIGN_TIMEOUT = 0.3


class Connect(Protocol):
    """How a client is made: `store.client.make_client`, or a test's own."""

    def __call__(self, url: str, *, timeout: float, client_name: str = "", key: str = "") -> redis.Redis: ...


class RedisLeases:
    """The lease of one namespace (a `LeaseProvider`). Makes no connection before it is asked something."""

    def __init__(self, url: str, *, namespace: str, lease: timedelta, connect: Connect = make_client) -> None:
        self._url = url
        self._connect = connect
        self._lease_ms = lease // timedelta(milliseconds=1)
        self._timeout = lease.total_seconds() / 7  # a call that failed leaves time for others before trust ends
        self._replicas_ms = self._lease_ms // 14  # the server waits for its replicas so long: the reply comes in time
        self._keys = keys = Keys(namespace)
        self._leader, self._granted, self._wake = keys("leader"), keys("epoch:granted"), keys("wake")
        self._elector = self._client(self._timeout)
        self._operators = self._client(self._timeout)

    def acquire(self, holder: str, *, floor: int) -> Granted | Held:
        answer, epoch, now, *rest = self._call(
            self._elector, "acquire", (self._leader, self._granted), (holder, self._lease_ms, floor)
        )
        if answer == b"GRANTED":
            return Granted(int(epoch), from_micros(int(now)))
        return Held(rest[0].decode(), int(epoch), _milliseconds(rest[1]), from_micros(int(now)))

    def renew(self, holder: str, epoch: int) -> Renewed | Lost:
        return self._renew(holder, epoch, 1)

    def renew_late(self, holder: str, epoch: int) -> Renewed | Lost:
        return self._renew(holder, epoch, 0)

    def _renew(self, holder: str, epoch: int, trusted: int) -> Renewed | Lost:
        args = (holder, self._lease_ms, epoch, trusted)
        answer, detail, now, *rest = self._call(self._elector, "renew", (self._leader, self._granted), args)
        if answer == b"RENEWED":
            return Renewed(from_micros(int(now)), step_down=int(detail) == 1)
        return Lost(rest[0].decode(), int(detail), from_micros(int(now)))

    def replicated(self, wanted: int) -> int:
        # WAIT counts from the last call of its connection; the elector's thread alone uses this client, and has one.
        return int(self._ask(self._elector, lambda client: client.wait(wanted, self._replicas_ms)))

    def resign(self, holder: str, epoch: int) -> bool:
        client = self._client(min(self._timeout, RESIGN_TIMEOUT))
        try:
            keys = (self._leader, self._granted, self._wake)
            return bool(self._call(client, "resign", keys, (holder, epoch, "resigned")))
        finally:
            client.close()

    def ask_to_step_down(self, epoch: int) -> bool:
        return bool(self._call(self._operators, "step_down", (self._leader, self._wake), (epoch, "step down")))

    def look(self) -> Free | Held:
        answer, *rest = self._call(self._elector, "look", (self._leader,))
        if answer == b"FREE":
            return Free(from_micros(int(rest[0])))
        epoch, now, holder, remaining, _since = rest
        return Held(holder.decode(), int(epoch), _milliseconds(remaining), from_micros(int(now)))

    def leader(self) -> Leader | None:
        answer, *rest = self._call(self._operators, "look", (self._leader,))
        if answer == b"FREE" or not rest[2]:
            return None
        epoch, _now, holder, remaining, since = rest
        return Leader(holder.decode(), int(epoch), _milliseconds(remaining), from_micros(int(since)))

    def listen(self) -> RedisSubscription:
        return RedisSubscription(
            lambda: self._client(self._timeout),
            self._wake,
            # Of a client that follows Sentinel, or a slot of a cluster: the master that it asked last.
            master=lambda: getattr(self._elector.connection_pool, "master_address", None),
        )

    def close(self) -> None:
        self._elector.close()
        self._operators.close()

    def _call(self, client: redis.Redis, script: str, keys: tuple[str, ...], args: tuple[str | int, ...] = ()) -> Any:
        text, sha = _SCRIPTS[script]

        def call(client: redis.Redis) -> Any:
            try:
                return client.evalsha(sha, len(keys), *keys, *args)
            except NoScriptError:
                return client.eval(text, len(keys), *keys, *args)

        return self._ask(client, call)

    def _ask(self, client: redis.Redis, call: Callable[[redis.Redis], Any]) -> Any:
        try:
            return call(client)
        except CALL_ERRORS as exc:
            down = unavailable(client, exc)
            raise down or unreadable(client, exc, self._keys, whose="the lease's server") from exc

    def _client(self, timeout: float) -> redis.Redis:
        return self._connect(self._url, timeout=timeout, client_name="tzbeat-leases", key=self._leader)


class RedisSubscription:
    """Pub/sub on the wake channel (a `Subscription`), with a connection of its own. For one thread.

    The channel also carries what the store says to beats (`look`): it is heard as well. Subscribes anew where `master` has
    changed: an old master that hangs, or is gone without a word, keeps the connection and says nothing.
    """

    def __init__(
        self, connect: Callable[[], redis.Redis], channel: str, *, master: Callable[[], object] = lambda: None
    ) -> None:
        self._connect = connect
        self._channel = channel
        self._master = master
        self._subscribed_at: object = None
        self._client: Any = None
        self._pubsub: Any = None

    def fileno(self) -> int:
        # redis-py has no public way to it.
        socket = getattr(getattr(self._pubsub, "connection", None), "_sock", None)
        return socket.fileno() if socket is not None else -1

    def drain(self) -> bool:
        try:
            if self._pubsub is not None and self._subscribed_at != self._master():
                self.close()
            if self._pubsub is None:
                self._subscribe()
                return True  # what was said before went unheard
            heard = False
            # Confirmations count as messages to redis-py: only None says that nothing is left.
            while (message := self._pubsub.get_message(timeout=0)) is not None:
                heard = heard or message["type"] == "message"
            return heard
        except CALL_ERRORS:
            self.close()
            return False

    def close(self) -> None:
        pubsub, client = self._pubsub, self._client
        self._pubsub = self._client = None
        if pubsub is not None:
            pubsub.close()
        if client is not None:
            client.close()

    def _subscribe(self) -> None:
        self._client = self._connect()
        self._pubsub = self._client.pubsub()
        self._pubsub.subscribe(self._channel)
        self._subscribed_at = self._master()


def _read(name: str) -> tuple[str, str]:
    """Return a script's text, and its SHA-1, the name that EVALSHA wants."""
    text = (resources.files(__package__) / "lua" / f"{name}.lua").read_text("utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


#: Read when imported: a signal handler reads no files.
_SCRIPTS = {name: _read(name) for name in ("acquire", "renew", "resign", "step_down", "look")}


def _milliseconds(value: bytes | int) -> timedelta:
    return timedelta(milliseconds=int(value))

"""How scripts are called: the base of everything that asks the ledger in Redis or Valkey.

A script is `lua/<name>.lua` behind its prelude, the leader's (the fence) or the worker's, and `ledger.lua`; some stand alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.exceptions import ConnectionError, NoScriptError

from celery_tzbeat.errors import StoreUnavailable

from .client import CALL_ERRORS, cannot_serve, make_client, unavailable, unreadable
from .keys import Keys
from .protocol import Answer, Verdict

Word = str | bytes | int

#: Scripts that stand alone, without a prelude: what they write is the caller's own.
_ALONE = frozenset({"attend", "attend_worker", "keep_of_run", "probe"})

#: What stands before a worker's scripts; every other one has the leader's.
_WORKER = ("worker_prelude", "ledger")
_PRELUDES = {"start": (*_WORKER, "worker_runs"), "heartbeat": (*_WORKER, "worker_runs"), "end": _WORKER}
_LEADER = ("prelude", "ledger")

#: What a pool is told of the command that a connection is for: nothing, from redis-py 5.3 on.
_CONNECTION_FOR = ("EVALSHA",) if redis.VERSION < (5, 3) else ()


class RedisCalls:
    """Calls of scripts in one namespace, each asked once, within a bound. One thread at a time.

    With `tells_reconnection` a call whose connection was closed meanwhile raises StoreUnavailable, and the next one connects.
    """

    def __init__(
        self, url: str, namespace: str, *, timeout: float, client_name: str, tells_reconnection: bool = False
    ) -> None:
        self.keys = Keys(namespace)
        self._client = make_client(
            url,
            timeout=timeout,
            client_name=client_name,
            key=self.keys("epoch"),
            on_connect=self._refuse_silent_reconnection if tells_reconnection else None,
        )
        self._connected = False  # as far as the last call told

    def close(self) -> None:
        """Drop the connections; the next call connects anew."""
        self._connected = False
        self._client.close()

    def _run(self, script: str, keys: Sequence[Word], args: Sequence[Word]) -> Any:
        def call(client: redis.Redis) -> Any:
            connection = taken(client)
            try:
                send_script(connection, script, keys, args)
                return connection.read_response()
            except NoScriptError:
                pass
            finally:
                client.connection_pool.release(connection)
            return client.eval(_script(script)[0], len(keys), *keys, *args)

        return self._ask(call, keys)

    def _ask(self, call: Any, keys: Sequence[Word] = ()) -> Any:
        try:
            answer = call(self._client)
        except CALL_ERRORS as exc:
            down = unavailable(self._client, exc)
            self._connected = down is None
            raise down or unreadable(self._client, exc, self.keys, keys) from exc
        self._connected = True
        return answer

    def _refuse_silent_reconnection(self) -> None:
        """Fail the call that finds its connection closed: redis-py would make another, and tell nobody.

        It may lead to another master, which lacks what was written last. Who called must know before anything is written
        there (`lineage`).
        """
        if self._connected:
            self._connected = False
            raise ConnectionError("the server closed the connection")


def taken(client: redis.Redis) -> Any:
    """Return a connection of the client's pool, to be given back (`release`). Raises what connecting raises."""
    return client.connection_pool.get_connection(*_CONNECTION_FOR)


def send_script(connection: Any, script: str, keys: Sequence[Word], args: Sequence[Word]) -> None:
    """Send what `client.evalsha` would; the reply is to be read.

    That takes half the time of redis-py's generic call (retries, callbacks, metrics), and a gate asks before each task, in
    the worker's loop. Seam: a pool's `get_connection` and `release`, and of a connection `pack_command`,
    `send_packed_command` and `read_response`, which drops itself where anything is left unread.
    """
    sha = _script(script)[1]
    connection.send_packed_command(connection.pack_command("EVALSHA", sha, len(keys), *keys, *args))


@cache
def _script(name: str) -> tuple[str, str]:
    """Return a script's text, its preludes included, and its SHA-1 (which is the name that EVALSHA wants)."""
    folder = resources.files(__package__) / "lua"
    before = () if name in _ALONE else _PRELUDES.get(name, _LEADER)
    text = "".join((folder / f"{part}.lua").read_text("utf-8") for part in (*before, name))
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def answers_of(reply: Sequence[bytes]) -> list[Answer]:
    answers = []
    for item in reply:
        verdict, _, detail = item.decode(errors="replace").partition(" ")
        if verdict == "FAULT" and cannot_serve(detail):
            raise StoreUnavailable(f"the store does not serve: {detail}")
        answers.append(Answer(Verdict(verdict), detail))
    return answers


def text_of(value: bytes) -> str:
    """Return what a key holds as text, whatever it is: garbage in the store must end neither a beat nor a command."""
    return value.decode(errors="replace")


def millis(span: timedelta) -> int:
    """Return a span in whole milliseconds: the store's unit for how long."""
    return span // timedelta(milliseconds=1)

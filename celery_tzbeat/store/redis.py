"""The ledger in Redis or Valkey: one script a transition, in `lua/`, each behind `prelude.lua` (the fence and the audit)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import redis
from redis.exceptions import ConnectionError, NoScriptError

from celery_tzbeat.errors import StoreUnavailable, StoreUnreadable
from celery_tzbeat.model import MICROSECOND, AuditRecord, Cursor, Occurrence, Presence, Unrun, from_micros, micros

from .client import CALL_ERRORS, cannot_serve, damage, make_client, unavailable, unreadable
from .keys import Bucket, Keys
from .protocol import (
    BATCH,
    SCHEMA_NEEDS,
    SCHEMA_WRITTEN,
    Answer,
    Burial,
    Claim,
    Claimed,
    Command,
    Dispatch,
    Office,
    OpenOccurrence,
    State,
    Verdict,
    View,
    needs_newer,
)

logger = logging.getLogger(__name__)

Word = str | bytes | int
T = TypeVar("T")

#: Cursors written by one script when a whole set of them is written.
CURSORS_PER_SCRIPT = 500

#: Scripts that any beat may run: they stand alone, without the leader's prelude.
_ALONE = frozenset({"attend", "probe"})


class RedisStore:
    """See `protocol.Store` for what each call means.

    With `tells_reconnection` a call whose connection was closed meanwhile raises StoreUnavailable, and the next one connects.
    `timeout` bounds each call in seconds; nothing is retried here. One thread at a time: each thread has its own store.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        timeout: float,
        retention: timedelta,
        max_skew: timedelta,
        audit_max: int,
        presence: timedelta,
        tells_reconnection: bool = False,
    ) -> None:
        self.keys = Keys(namespace)
        self._client = make_client(
            url,
            timeout=timeout,
            client_name="tzbeat-store",
            key=self.keys("epoch"),
            on_connect=self._refuse_silent_reconnection if tells_reconnection else None,
        )
        self._connected = False  # as far as the last call told
        self._max_skew = max_skew // MICROSECOND
        self._audit_max = audit_max
        self._retention = _millis(retention)
        self._presence = _millis(presence)

    # ---- the leader's scripts

    def take_office(self, epoch: int, holder: str = "", *, oldest_schema: int = SCHEMA_WRITTEN) -> Office | None:
        needs = min(SCHEMA_NEEDS, oldest_schema)
        reply = self._lead("take_office", epoch, args=(SCHEMA_WRITTEN, SCHEMA_WRITTEN, needs, holder))
        verdict = reply[0].decode()
        if verdict == "STALE":
            return None
        if verdict == "NEEDS":
            raise StoreUnreadable(needs_newer(int(reply[1])))
        cursors, unreadable = _read_cursors(zip(reply[3::2], reply[4::2], strict=True))
        return Office(
            time=from_micros(int(reply[1])),
            fresh=reply[2] == b"1",
            cursors=cursors,
            unreadable=unreadable,
        )

    def restore(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        # The first script writes the schema and thereby ends the wiped state; the rest are placed.
        items = list(cursors.items())
        first, rest = items[:CURSORS_PER_SCRIPT], items[CURSORS_PER_SCRIPT:]
        reply = self._lead("restore", epoch, args=(SCHEMA_WRITTEN, SCHEMA_NEEDS, len(first), *_flat_cursors(first)))
        verdict = Verdict(reply.decode())
        if verdict is Verdict.DONE and rest:
            return self.place(dict(rest), epoch=epoch)
        return verdict

    def place(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        return self._in_parts("place", cursors, epoch)

    def repair(self, cursors: Mapping[str, Cursor], *, epoch: int) -> Verdict:
        return self._in_parts("repair", cursors, epoch)

    def forget(self, entries: Sequence[str], *, epoch: int) -> Verdict:
        return Verdict(self._lead("forget", epoch, args=(len(entries), *entries)).decode())

    def dispatch(self, batch: Sequence[Dispatch], *, epoch: int) -> list[Answer]:
        keys: list[Word] = []
        queues: dict[bytes, None] = {}
        args: list[Word] = [len(batch)]
        for item in batch:
            occurrence = item.occurrence
            keys += (
                self.keys.done(occurrence.entry, item.bucket.number),
                self.keys.occurrence(occurrence.key),
            )
            args += (
                occurrence.entry,
                micros(occurrence.nominal),
                item.bucket.field,
                item.cursor.to_text(),
                "misfire" if occurrence.late else "",
                len(item.commands),
            )
            for command in item.commands:
                args += (1 + len(command.args), command.name, *command.args)
                queues.update(dict.fromkeys(command.keys))
        return _answers(self._lead("dispatch", epoch, keys=(*keys, *queues), args=args))

    def record_unrun(self, rows: Sequence[Unrun], *, epoch: int) -> list[Answer]:
        args: list[Word] = [len(rows)]
        for row in rows:
            args += (
                row.event,
                row.entry,
                micros(row.first),
                micros(row.last),
                row.count,
                row.reason,
                row.cursor.to_text(),
            )
        return _answers(self._lead("record_unrun", epoch, args=args))

    def bury(self, burial: Burial, *, epoch: int) -> Answer:
        occurrence = burial.occurrence
        reply = self._lead(
            "bury",
            epoch,
            keys=(self.keys.done(occurrence.entry, burial.bucket.number), self.keys("dead")),
            args=(
                occurrence.key,
                occurrence.entry,
                micros(occurrence.nominal),
                burial.bucket.field,
                burial.cursor.to_text(),
                burial.reason,
                burial.letter,
            ),
        )
        return Answer(Verdict(reply.decode()))

    # ---- claims: other brokers

    def claim(self, claims: Sequence[Claim], *, epoch: int) -> list[Answer]:
        keys: list[Word] = [self.keys("open")]
        args: list[Word] = [len(claims)]
        for claim in claims:
            occurrence, bucket = claim.occurrence, claim.bucket
            keys += self._claim_keys(occurrence, bucket)
            args += (
                occurrence.key,
                occurrence.entry,
                micros(occurrence.nominal),
                claim.cursor.to_text(),
                claim.payload,
                bucket.number,
                bucket.field,
                "misfire" if occurrence.late else "",
            )
        return _answers(self._lead("claim", epoch, keys=keys, args=args))

    def confirm(self, claimed: Sequence[Claimed], *, epoch: int) -> list[Answer]:
        keys: list[Word] = [self.keys("open")]
        args: list[Word] = [len(claimed)]
        for item in claimed:
            occurrence = item.occurrence
            keys += self._claim_keys(occurrence, item.bucket)
            args += (occurrence.key, occurrence.entry, micros(occurrence.nominal), item.bucket.field)
        return _answers(self._lead("confirm", epoch, keys=keys, args=args))

    def reclaim(self, occurrence: Occurrence, *, epoch: int) -> OpenOccurrence | None:
        reply = self._lead(
            "reclaim",
            epoch,
            keys=(self.keys.occurrence(occurrence.key),),
            args=(occurrence.entry, micros(occurrence.nominal)),
        )
        if reply[0] != b"DONE":
            return None
        _, dispatch, payload, number, field = reply
        return OpenOccurrence(
            occurrence, Bucket(int(number), int(field)), "claimed", epoch, int(dispatch), bytes(payload)
        )

    def settle(self, claimed: Claimed, state: State, reason: str, *, epoch: int, letter: str = "") -> Answer:
        occurrence = claimed.occurrence
        record, of_entry, done = self._claim_keys(occurrence, claimed.bucket)
        reply = self._lead(
            "settle",
            epoch,
            keys=(record, self.keys("open"), of_entry, done, self.keys("dead")),
            args=(
                occurrence.key,
                occurrence.entry,
                micros(occurrence.nominal),
                claimed.bucket.field,
                state,
                reason,
                letter,
            ),
        )
        return Answer(Verdict(reply.decode()))

    def open_occurrences(self) -> list[OpenOccurrence]:
        keys = [_text(key) for key in self._ask(lambda c: c.zrange(self.keys("open"), 0, -1))]
        records: list[dict[bytes, bytes]] = []
        for start in range(0, len(keys), BATCH):
            part = [self.keys.occurrence(key) for key in keys[start : start + BATCH]]
            records += self._ask(lambda c, part=part: self._records(c, part), part)
        found = []
        for key, record in zip(keys, records, strict=True):
            if record:  # it may have been settled since the list was read
                try:
                    found.append(_open_occurrence(record))
                except (KeyError, ValueError, OverflowError) as exc:
                    logger.error(
                        "the record of %r cannot be read and is left alone: %s: %s",
                        key,
                        type(exc).__name__,
                        exc,
                        extra={"action": "occurrence_unreadable", "key": key},
                    )
        return found

    def _records(self, client: redis.Redis, keys: Sequence[str]) -> list[dict[bytes, bytes]]:
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(key)
            return list(pipe.execute())

    # ---- any beat

    def attend(self, presence: Presence) -> View:
        reply = self._run(
            "attend",
            (
                self.keys("epoch"),
                self.keys("schema"),
                self.keys("beats"),
                self.keys.beat(presence.beat),
                self.keys.entries_of(presence.fingerprint),
            ),
            (presence.beat, presence.to_json(), self._presence),
        )
        time, fresh, epoch, known, needs = reply
        return View(
            from_micros(int(time)),
            fresh=fresh == b"1",
            epoch=int(epoch),
            entries_known=known == b"1",
            needs=int(needs),
        )

    def tell_entries(self, fingerprint: str, entries: Mapping[str, str]) -> None:
        key, items = self.keys.entries_of(fingerprint), list(entries.items())

        def tell(client: redis.Redis) -> None:
            with client.pipeline(transaction=True) as pipe:
                pipe.delete(key)
                for start in range(0, len(items), 1000):
                    pipe.hset(key, mapping=dict(items[start : start + 1000]))
                pipe.pexpire(key, self._presence)
                pipe.execute()

        if items:
            self._ask(tell)

    def entries_of(self, fingerprint: str) -> Mapping[str, str]:
        key = self.keys.entries_of(fingerprint)
        found = self._ask(lambda c: c.hgetall(key), [key])
        return {_text(name): _text(value) for name, value in found.items()}

    def probe(self, command: Command) -> None:
        self._run("probe", (self.keys("epoch"), *command.keys), (command.name, *command.args))

    def lineage(self) -> str:
        """Return what is another text when the store may have lost its last writes: another process or master answers.

        Empty where the server does not tell.
        """
        try:
            server, replication = (self._ask(lambda c, part=part: c.info(part)) for part in ("server", "replication"))
        except StoreUnreadable:  # the user may not ask
            return ""
        return f"{server.get('run_id')} {replication.get('master_replid')}"

    def damage(self) -> str:
        """Return which of the keys that a namespace has once have another type, and what to do; empty where none has."""
        try:
            found: str = self._ask(lambda c: damage(c, self.keys))
        except StoreUnreadable:  # the user may not ask
            return ""
        return found

    def is_empty(self) -> bool:
        """Return whether the store is new, or has lost everything (`View.fresh`)."""
        return not self._ask(lambda c: c.exists(self.keys("schema")))

    # ---- reading, for operators

    def time(self) -> datetime:
        seconds, rest = self._ask(lambda c: c.time())
        return from_micros(int(seconds) * 1_000_000 + int(rest))

    def cursors(self) -> Mapping[str, Cursor]:
        return _read_cursors(self._ask(lambda c: c.hgetall(self.keys("cursor"))).items())[0]

    def last(self) -> Mapping[str, tuple[datetime, str, datetime]]:
        found = {}
        for entry, text in self._ask(lambda c: c.hgetall(self.keys("last"))).items():
            with suppress(ValueError, OverflowError):  # unreadable: nothing is said of it
                nominal, state, at = text.decode().split("|")
                found[entry.decode()] = (from_micros(int(nominal)), state, from_micros(int(at) * 1000))
        return found

    def beats(self) -> list[Presence]:
        names = [name.decode() for name in self._ask(lambda c: c.zrange(self.keys("beats"), 0, -1))]
        if not names:
            return []
        texts = self._ask(lambda c: c.mget([self.keys.beat(name) for name in names]))
        return [presence for text in texts if text and (presence := _read_presence(text)) is not None]

    def open_since(self) -> Mapping[str, datetime]:
        found = self._ask(lambda c: c.zrange(self.keys("open"), 0, -1, withscores=True))
        return {_text(key): from_micros(int(millis) * 1000) for key, millis in found}

    def dead_letters(self) -> Mapping[str, str]:
        letters = self._ask(lambda c: c.hgetall(self.keys("dead")))
        return {_text(key): _text(letter) for key, letter in letters.items()}

    def audit(self, *, count: int = 1000) -> list[AuditRecord]:
        found = self._ask(lambda c: c.xrevrange(self.keys("audit"), count=count))
        records = []
        for id_, fields in reversed(found):
            with suppress(ValueError, KeyError, OverflowError):  # not a record of ours
                records.append(_audit_record(id_.decode(), fields))
        return records

    def close(self) -> None:
        """Drop the connections; the next call connects anew."""
        self._connected = False
        self._client.close()

    # ---- calling

    def _claim_keys(self, occurrence: Occurrence, bucket: Bucket) -> tuple[str, str, str]:
        return (
            self.keys.occurrence(occurrence.key),
            self.keys.open_of(occurrence.entry),
            self.keys.done(occurrence.entry, bucket.number),
        )

    def _in_parts(self, script: str, cursors: Mapping[str, Cursor], epoch: int) -> Verdict:
        """Run a leader's script over cursors, some at a time; return the first verdict that is not DONE."""
        items = list(cursors.items())
        for start in range(0, len(items), CURSORS_PER_SCRIPT):
            part = items[start : start + CURSORS_PER_SCRIPT]
            verdict = Verdict(self._lead(script, epoch, args=(len(part), *_flat_cursors(part))).decode())
            if verdict is not Verdict.DONE:
                return verdict
        return Verdict.DONE

    def _lead(self, script: str, epoch: int, *, keys: Iterable[Word] = (), args: Iterable[Word] = ()) -> Any:
        """Run a leader's script: the keys and arguments of `prelude.lua` come first."""
        head = [self.keys(name) for name in ("epoch", "schema", "cursor", "last", "audit")]
        return self._run(script, (*head, *keys), (epoch, self._max_skew, self._audit_max, self._retention, *args))

    def _run(self, script: str, keys: Sequence[Word], args: Sequence[Word]) -> Any:
        text, sha = _script(script)

        def call(client: redis.Redis) -> Any:
            try:
                return client.evalsha(sha, len(keys), *keys, *args)
            except NoScriptError:
                return client.eval(text, len(keys), *keys, *args)

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


@cache
def _script(name: str) -> tuple[str, str]:
    """Return a script's text, its prelude included, and its SHA-1 (which is the name that EVALSHA wants)."""
    folder = resources.files(__package__) / "lua"
    text = (folder / f"{name}.lua").read_text("utf-8")
    if name not in _ALONE:
        text = (folder / "prelude.lua").read_text("utf-8") + text
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _answers(reply: Sequence[bytes]) -> list[Answer]:
    answers = []
    for item in reply:
        verdict, _, detail = item.decode(errors="replace").partition(" ")
        if verdict == "FAULT" and cannot_serve(detail):
            raise StoreUnavailable(f"the store does not serve: {detail}")
        answers.append(Answer(Verdict(verdict), detail))
    return answers


def _flat_cursors(items: Iterable[tuple[str, Cursor]]) -> Iterable[str]:
    for entry, cursor in items:
        yield entry
        yield cursor.to_text()


def _read_cursors(items: Iterable[tuple[bytes, bytes]]) -> tuple[dict[str, Cursor], tuple[str, ...]]:
    cursors, unreadable = {}, []
    for entry, text in items:
        try:
            cursors[entry.decode()] = Cursor.from_text(text.decode())
        except (ValueError, OverflowError):
            unreadable.append(entry.decode(errors="replace"))
    return cursors, tuple(unreadable)


def _open_occurrence(record: Mapping[bytes, bytes]) -> OpenOccurrence:
    late = record[b"detail"] == b"misfire"
    return OpenOccurrence(
        Occurrence(record[b"entry"].decode(), from_micros(int(record[b"nominal"])), late),
        Bucket(int(record[b"number"]), int(record[b"field"])),
        state=record[b"state"].decode(),
        epoch=int(record[b"epoch"]),
        dispatch=int(record[b"dispatch"]),
        payload=record[b"payload"],
    )


def _read_presence(text: bytes) -> Presence | None:
    """Return what a beat says of itself; None for what a much newer release may say: it must end no older beat."""
    try:
        return Presence.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _audit_record(id_: str, fields: Mapping[bytes, bytes]) -> AuditRecord:
    text = {name.decode(): value.decode() for name, value in fields.items()}
    return AuditRecord(
        event=text["event"],
        entry=text["entry"],
        first=from_micros(int(text["first"])) if text["first"] else None,
        last=from_micros(int(text["last"])) if text["last"] else None,
        count=int(text["count"]),
        epoch=int(text["epoch"]),
        detail=text["detail"],
        id=id_,
    )


def _text(value: bytes) -> str:
    """Return what a key holds as text, whatever it is: garbage in the store must end neither a beat nor a command."""
    return value.decode(errors="replace")


def _millis(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)

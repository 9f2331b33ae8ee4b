"""The ledger in Redis or Valkey: one script a transition, in `lua/`, each behind `prelude.lua` (the fence and the audit)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

import redis

from celery_tzbeat.errors import StoreUnreadable
from celery_tzbeat.model import AuditRecord, Cursor, Presence, Unrun, from_micros, micros

from .calls import Word, answers_of, millis, text_of
from .client import damage
from .protocol import (
    SCHEMA_NEEDS,
    SCHEMA_WRITTEN,
    Answer,
    Burial,
    Command,
    Dispatch,
    Office,
    Verdict,
    View,
    needs_newer,
)
from .records import pauses_of, tracking_words
from .redis_open import OpenOccurrences

#: Cursors written by one script when a whole set of them is written.
CURSORS_PER_SCRIPT = 500


class RedisStore(OpenOccurrences):
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
        super().__init__(
            url,
            namespace,
            timeout=timeout,
            retention=retention,
            max_skew=max_skew,
            audit_max=audit_max,
            tells_reconnection=tells_reconnection,
        )
        self._presence = millis(presence)

    # ---- the leader's scripts

    def take_office(self, epoch: int, holder: str = "", *, oldest_schema: int = SCHEMA_WRITTEN) -> Office | None:
        needs = min(SCHEMA_NEEDS, oldest_schema)
        reply = self._lead(
            "take_office",
            epoch,
            keys=(self.keys("paused"),),
            args=(SCHEMA_WRITTEN, SCHEMA_WRITTEN, needs, holder),
        )
        verdict = reply[0].decode()
        if verdict == "STALE":
            return None
        if verdict == "NEEDS":
            raise StoreUnreadable(needs_newer(int(reply[1])))
        cursors, unreadable = _read_cursors(zip(reply[3][::2], reply[3][1::2], strict=True))
        return Office(
            time=from_micros(int(reply[1])),
            fresh=reply[2] == b"1",
            cursors=cursors,
            unreadable=unreadable,
            paused=pauses_of(zip(reply[4][::2], reply[4][1::2], strict=True)),
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
        return Verdict(self._lead("forget", epoch, keys=(self.keys("paused"),), args=(len(entries), *entries)).decode())

    def dispatch(self, batch: Sequence[Dispatch], *, epoch: int) -> list[Answer]:
        keys: list[Word] = []
        queues: dict[bytes, None] = {}
        args: list[Word] = [len(batch)]
        for item in batch:
            occurrence, bucket = item.occurrence, item.bucket
            keys += self._keys_of(occurrence.key, occurrence.entry, bucket)
            args += (
                occurrence.key,
                occurrence.entry,
                micros(occurrence.nominal),
                item.cursor.to_text(),
                bucket.number,
                bucket.field,
                "misfire" if occurrence.late else "",
                *tracking_words(item.tracking),
                item.tracking.payload if item.tracking is not None else b"",
                len(item.commands),
            )
            for command in item.commands:
                args += (1 + len(command.args), command.name, *command.args)
                queues.update(dict.fromkeys(command.keys))
        return answers_of(self._lead("dispatch", epoch, keys=(*keys, *queues), args=args))

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
        return answers_of(self._lead("record_unrun", epoch, args=args))

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
        return {text_of(name): text_of(value) for name, value in found.items()}

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

    def audit(self, *, count: int = 1000) -> list[AuditRecord]:
        found = self._ask(lambda c: c.xrevrange(self.keys("audit"), count=count))
        records = []
        for id_, fields in reversed(found):
            with suppress(ValueError, KeyError, OverflowError):  # not a record of ours
                records.append(_audit_record(id_.decode(), fields))
        return records

    # ---- calling

    def _in_parts(self, script: str, cursors: Mapping[str, Cursor], epoch: int) -> Verdict:
        """Run a leader's script over cursors, some at a time; return the first verdict that is not DONE."""
        items = list(cursors.items())
        for start in range(0, len(items), CURSORS_PER_SCRIPT):
            part = items[start : start + CURSORS_PER_SCRIPT]
            verdict = Verdict(self._lead(script, epoch, args=(len(part), *_flat_cursors(part))).decode())
            if verdict is not Verdict.DONE:
                return verdict
        return Verdict.DONE


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

"""The ledger in Redis or Valkey: one script a transition, in `lua/`, each behind `prelude.lua` (the fence and the audit)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import redis
from redis.exceptions import NoScriptError

from celery_tzbeat.errors import StoreUnavailable, StoreUnreadable
from celery_tzbeat.model import MICROSECOND, AuditRecord, Cursor, Occurrence, Presence, Unrun, from_micros, micros

from .client import CALL_ERRORS, cannot_serve, make_client, unavailable
from .keys import Bucket, Keys
from .protocol import (
    SCHEMA_NEEDS,
    SCHEMA_WRITTEN,
    Answer,
    Burial,
    Claim,
    Command,
    Dispatch,
    Office,
    OpenOccurrence,
    State,
    Verdict,
    View,
)

Word = str | bytes | int
T = TypeVar("T")

#: Cursors written by one script when a whole set of them is written.
CURSORS_PER_SCRIPT = 500

#: Scripts that any beat may run: they stand alone, without the leader's prelude.
_ALONE = frozenset({"attend", "probe"})


class RedisStore:
    """See `protocol.Store` for what each call means.

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
    ) -> None:
        self.keys = Keys(namespace)
        self._client = make_client(url, timeout=timeout, client_name="tzbeat-store")
        self._max_skew = max_skew // MICROSECOND
        self._audit_max = audit_max
        self._retention = _millis(retention)
        self._presence = _millis(presence)

    # ---- the leader's scripts

    def take_office(self, epoch: int, holder: str = "") -> Office | None:
        reply = self._lead("take_office", epoch, args=(SCHEMA_WRITTEN, SCHEMA_WRITTEN, SCHEMA_NEEDS, holder))
        verdict = reply[0].decode()
        if verdict == "STALE":
            return None
        if verdict == "NEEDS":
            raise StoreUnreadable(
                f"the store of namespace {self.keys.namespace!r} needs schema {reply[1].decode()}, this release writes "
                f"{SCHEMA_WRITTEN}: upgrade celery_tzbeat on this host; until then this beat stands by"
            )
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
        verdict = Verdict.DONE
        items = list(cursors.items())
        for start in range(0, len(items), CURSORS_PER_SCRIPT):
            part = items[start : start + CURSORS_PER_SCRIPT]
            reply = self._lead("place", epoch, args=(len(part), *_flat_cursors(part)))
            verdict = Verdict(reply.decode())
            if verdict is not Verdict.DONE:
                return verdict
        return verdict

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

    def claim(self, claim: Claim, bucket: Bucket, *, epoch: int) -> Answer:
        occurrence = claim.occurrence
        reply = self._lead(
            "claim",
            epoch,
            keys=self._open_keys(occurrence, bucket),
            args=(
                occurrence.key,
                occurrence.entry,
                micros(occurrence.nominal),
                claim.cursor.to_text(),
                claim.payload,
                bucket.field,
            ),
        )
        return Answer(Verdict(reply.decode()))

    def confirm(self, occurrence: Occurrence, bucket: Bucket, *, epoch: int) -> Answer:
        reply = self._lead(
            "confirm",
            epoch,
            keys=self._open_keys(occurrence, bucket),
            args=(occurrence.key, occurrence.entry, micros(occurrence.nominal), bucket.field),
        )
        return Answer(Verdict(reply.decode()))

    def reclaim(self, occurrence: Occurrence, *, epoch: int) -> OpenOccurrence | None:
        reply = self._lead(
            "reclaim",
            epoch,
            keys=(self.keys.occurrence(occurrence.key),),
            args=(occurrence.entry, micros(occurrence.nominal)),
        )
        if reply[0] != b"DONE":
            return None
        return OpenOccurrence(
            key=occurrence.key,
            entry=occurrence.entry,
            nominal=occurrence.nominal,
            state="claimed",
            epoch=epoch,
            dispatch=int(reply[1]),
            payload=reply[2],
        )

    def settle(self, occurrence: Occurrence, bucket: Bucket, state: State, reason: str, *, epoch: int) -> Answer:
        reply = self._lead(
            "settle",
            epoch,
            keys=self._open_keys(occurrence, bucket),
            args=(
                occurrence.key,
                occurrence.entry,
                micros(occurrence.nominal),
                bucket.field,
                state,
                reason,
            ),
        )
        return Answer(Verdict(reply.decode()))

    def open_occurrences(self) -> list[OpenOccurrence]:
        keys = [key.decode() for key in self._ask(lambda c: c.zrange(self.keys("open"), 0, -1))]
        found = []
        for key in keys:
            record = self._ask(lambda c, key=key: c.hgetall(self.keys.occurrence(key)))
            if record:  # it may have been settled since the list was read
                found.append(
                    OpenOccurrence(
                        key=key,
                        entry=record[b"entry"].decode(),
                        nominal=from_micros(int(record[b"nominal"])),
                        state=record[b"state"].decode(),
                        epoch=int(record[b"epoch"]),
                        dispatch=int(record[b"dispatch"]),
                        payload=record[b"payload"],
                    )
                )
        return found

    # ---- any beat

    def attend(self, presence: Presence) -> View:
        reply = self._run(
            "attend",
            (
                self.keys("epoch"),
                self.keys("schema"),
                self.keys("beats"),
                self.keys.beat(presence.beat),
            ),
            (presence.beat, presence.to_json(), self._presence),
        )
        return View(time=from_micros(int(reply[0])), fresh=reply[1] == b"1", epoch=int(reply[2]))

    def probe(self, command: Command) -> None:
        self._run("probe", (self.keys("epoch"), command.keys[0]), (command.name, *command.args))

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
        beats = []
        for text in texts:
            with suppress(ValueError, KeyError, TypeError):  # written by somebody else, or by another release
                beats += [Presence.from_json(text)] if text else []
        return beats

    def dead_letters(self) -> Mapping[str, str]:
        letters = self._ask(lambda c: c.hgetall(self.keys("dead")))
        return {key.decode(): letter.decode() for key, letter in letters.items()}

    def audit(self, *, count: int = 1000) -> list[AuditRecord]:
        found = self._ask(lambda c: c.xrevrange(self.keys("audit"), count=count))
        records = []
        for id_, fields in reversed(found):
            with suppress(ValueError, KeyError, OverflowError):  # not a record of ours
                records.append(_audit_record(id_.decode(), fields))
        return records

    def close(self) -> None:
        """Drop the connections; the next call connects anew."""
        self._client.close()

    # ---- calling

    def _open_keys(self, occurrence: Occurrence, bucket: Bucket) -> tuple[str, ...]:
        return (
            self.keys.occurrence(occurrence.key),
            self.keys("open"),
            self.keys.open_of(occurrence.entry),
            self.keys.done(occurrence.entry, bucket.number),
        )

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

        return self._ask(call)

    def _ask(self, call: Any) -> Any:
        try:
            return call(self._client)
        except CALL_ERRORS as exc:
            down = unavailable(self._client, exc)
            raise down or StoreUnreadable(f"the store answered with an error: {exc}") from exc


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


def _millis(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)

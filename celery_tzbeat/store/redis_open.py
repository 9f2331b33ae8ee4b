"""Open occurrences in Redis or Valkey: claims, tracked runs, requests; what a leader does until each is settled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import redis

from celery_tzbeat.deliveries import WorkerPresence
from celery_tzbeat.model import Occurrence, from_micros, micros

from .calls import Word, answers_of, millis, text_of
from .protocol import (
    BATCH,
    Answer,
    Claim,
    Claimed,
    Hold,
    OpenOccurrence,
    Run,
    State,
    Survey,
    Verdict,
)
from .records import open_occurrence, policy_text, readable, request_of, run_of, tracking_words
from .redis_lead import answer_of, named
from .redis_requests import Requests

#: How far in milliseconds claims stand before everything else in `open` (ledger.lua).
CLAIMS_FIRST = 10**13


class OpenOccurrences(Requests):
    """See `protocol.Store` for what each call means."""

    # ---- opening, and claims over other brokers

    def hold(self, holds: Sequence[Hold], *, epoch: int) -> list[Answer]:
        answers: list[Answer] = []
        for part in _each_entry_once(holds):
            answers += self._hold(part, epoch)
        return answers

    def _hold(self, holds: Sequence[Hold], epoch: int) -> list[Answer]:
        keys: list[Word] = []
        args: list[Word] = [len(holds)]
        beside: list[Word] = []
        opened = self._open_of([item.occurrence.entry for item in holds])
        for item in holds:
            occurrence, bucket, policy = item.occurrence, item.bucket, item.policy
            others = [found for found in opened[occurrence.entry] if found.occurrence.key != occurrence.key]
            keys += self._keys_of(occurrence.key, occurrence.entry, bucket)
            args += (
                *named(occurrence),
                item.cursor.to_text(),
                bucket.number,
                bucket.field,
                _detail(occurrence),
                policy_text(policy),
                millis(policy.start_within),
                policy.overlap,
                micros(occurrence.nominal + policy.catchup_window) // 1000,
                millis(policy.kill_after) if policy.overlap == "cancel_other" else "",
                len(others),
            )
            for other in others:
                beside += (
                    self.keys.occurrence(other.occurrence.key),
                    self.keys.done(occurrence.entry, other.bucket.number),
                )
                args += (other.occurrence.key, micros(other.occurrence.nominal), other.bucket.field)
        return answers_of(self._lead("hold", epoch, keys=(*keys, *beside), args=args))

    def _open_of(self, entries: Sequence[str]) -> Mapping[str, list[OpenOccurrence]]:
        def ask(client: redis.Redis) -> Any:
            with client.pipeline(transaction=False) as pipe:
                for entry in entries:
                    pipe.smembers(self.keys.open_of(entry))
                return pipe.execute()

        found: dict[str, list[OpenOccurrence]] = {entry: [] for entry in entries}
        members = self._found([key for members in self._ask(ask) for key in members])
        for one in readable(members, lambda _, record: open_occurrence(record)):
            found[one.occurrence.entry].append(one)
        for opened in found.values():
            opened.sort(key=lambda one: one.occurrence.nominal)
        return found

    def claim(self, claims: Sequence[Claim], *, epoch: int) -> list[Answer]:
        keys: list[Word] = []
        args: list[Word] = [len(claims)]
        for claim in claims:
            occurrence, bucket = claim.occurrence, claim.bucket
            keys += self._keys_of(occurrence.key, occurrence.entry, bucket)
            args += (
                *named(occurrence),
                claim.cursor.to_text(),
                claim.payload,
                bucket.number,
                bucket.field,
                _detail(occurrence),
                *tracking_words(claim.tracking),
            )
        return answers_of(self._lead("claim", epoch, keys=keys, args=args))

    def confirm(self, claimed: Sequence[Claimed], *, epoch: int) -> list[Answer]:
        keys: list[Word] = []
        args: list[Word] = [len(claimed)]
        for item in claimed:
            keys += self._keys_of(item.occurrence.key, item.occurrence.entry, item.bucket)
            args += (*named(item.occurrence), item.bucket.field)
        return answers_of(self._lead("confirm", epoch, keys=keys, args=args))

    def reclaim(self, occurrence: Occurrence, *, epoch: int) -> OpenOccurrence | None:
        key = self.keys.occurrence(occurrence.key)
        reply = self._lead("reclaim", epoch, keys=(key,), args=(occurrence.entry, micros(occurrence.nominal)))
        if reply[0] != b"DONE":
            return None
        record = dict(zip(reply[1::2], reply[2::2], strict=True))
        return open_occurrence(record)

    def settle(self, claimed: Claimed, state: State, reason: str, *, epoch: int, letter: str = "") -> Answer:
        occurrence = claimed.occurrence
        reply = self._lead(
            "settle",
            epoch,
            keys=(*self._keys_of(occurrence.key, occurrence.entry, claimed.bucket), self.keys("dead")),
            args=(*named(occurrence), claimed.bucket.field, state, reason, letter),
        )
        return Answer(Verdict(reply.decode()))

    # ---- tracked occurrences

    def abandon(self, run: Run, *, epoch: int) -> Answer:
        reply = self._lead(
            "abandon",
            epoch,
            keys=(self.keys.occurrence(run.key),),
            args=(*_of_run(run), run.token),
        )
        return answer_of(reply)

    def redispatch(self, run: Run, payload: bytes, *, epoch: int) -> Answer:
        reply = self._lead(
            "redispatch",
            epoch,
            keys=(self.keys.occurrence(run.key),),
            args=(*_of_run(run), run.order[0], payload),
        )
        return Answer(Verdict(reply.decode()))

    def settle_run(self, run: Run, state: State, reason: str, *, epoch: int, letter: str = "") -> Answer:
        reply = self._lead(
            "settle_run",
            epoch,
            keys=(*self._keys_of(run.key, run.entry, run.bucket), self.keys("dead")),
            args=(*_of_run(run), run.bucket.field, state, reason, letter, run.state, *run.order),
        )
        return Answer(Verdict(reply.decode()))

    def workers_lived(self) -> bool:
        newest = self._ask(lambda c: c.zrevrange(self.keys("workers"), 0, 0, withscores=True))
        return bool(newest) and newest[0][1] > micros(self.time()) // 1000 - self._retention

    def workers(self) -> list[WorkerPresence]:
        names = [name.decode() for name in self._ask(lambda c: c.zrange(self.keys("workers"), 0, -1))]
        if not names:
            return []
        found = []
        for text in self._ask(lambda c: c.mget([self.keys.worker(name) for name in names])):
            with suppress(ValueError, KeyError, TypeError):  # of a much newer release: nothing is said of it
                if text:
                    found.append(WorkerPresence.from_json(text))
        return found

    # ---- reading what is open

    def time(self) -> datetime:
        seconds, rest = self._ask(lambda c: c.time())
        return from_micros(int(seconds) * 1_000_000 + int(rest))

    def open_occurrences(self) -> list[OpenOccurrence]:
        keys = self._ask(lambda c: c.zrangebyscore(self.keys("open"), "-inf", 0))  # claims stand before everything else
        claims = [(key, record) for key, record in self._found(keys) if record.get(b"state") == b"claimed"]
        return list(readable(claims, lambda _, record: open_occurrence(record)))

    def open_since(self) -> Mapping[str, datetime]:
        found = self._ask(lambda c: c.zrangebyscore(self.keys("open"), "-inf", 0, withscores=True))
        return {text_of(key): from_micros((int(score) + CLAIMS_FIRST) * 1000) for key, score in found}

    def runs(self, entry: str = "") -> list[Run]:
        scores = self._ask(lambda c: c.zrange(self.keys("open"), 0, -1, withscores=True))
        if entry:
            ours = self._ask(lambda c: c.smembers(self.keys.open_of(entry)))
            scores = [(key, score) for key, score in scores if key in ours]
        return self._runs(scores)

    def survey(self, *, limit: int = BATCH) -> Survey:
        def ask(client: redis.Redis) -> Any:
            with client.pipeline(transaction=False) as pipe:
                pipe.time()
                pipe.zrange(self.keys("live"), 0, limit - 1, withscores=True)
                pipe.zrangebyscore(self.keys("open"), 0, "+inf", start=0, num=limit, withscores=True)
                pipe.xrange(self.keys("requests"), count=limit)
                return pipe.execute()

        (seconds, rest), live, opened, requests = self._ask(ask)
        time = from_micros(int(seconds) * 1_000_000 + int(rest))
        now = micros(time) // 1000
        # What runs stands in both: whatever happens to `live`, a run whose lease lapsed is found.
        scores = {key: score for key, score in (*opened, *live) if score <= now}
        found = sorted(self._runs(list(scores.items())), key=lambda run: run.deadline)
        return Survey(
            time,
            lapsed=tuple(run for run in found if run.state == "running"),
            due=tuple(run for run in found if run.state not in ("claimed", "running")),
            requests=tuple(request_of(id_, fields) for id_, fields in requests),
        )

    def _runs(self, scores: Sequence[tuple[bytes, float]]) -> list[Run]:
        at = dict(scores)
        found = self._found([key for key, _ in scores])
        tracked = [(key, record) for key, record in found if b"policy" in record]
        return list(readable(tracked, lambda key, record: run_of(text_of(key), record, at[key])))


def _of_run(run: Run) -> tuple[str, str, Word]:
    return run.key, run.entry, micros(run.nominal) if run.nominal is not None else ""


def _detail(occurrence: Occurrence) -> str:
    return "misfire" if occurrence.late else ""


def _each_entry_once(holds: Sequence[Hold]) -> Iterator[list[Hold]]:
    """Yield the holds in their order, no entry twice in a part: the second must find what the first has left."""
    part: list[Hold] = []
    for item in holds:
        if any(item.occurrence.entry == before.occurrence.entry for before in part):
            yield part
            part = []
        part.append(item)
    if part:
        yield part

"""What all of a leader's scripts share in Redis or Valkey: how they are called, and how records are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import redis

from celery_tzbeat.model import MICROSECOND, Occurrence, micros

from .calls import RedisCalls, Word, millis, text_of
from .keys import Bucket
from .protocol import BATCH, Answer, Verdict


class LeadersCalls(RedisCalls):
    """The base of a leader's store."""

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        timeout: float,
        retention: timedelta,
        max_skew: timedelta,
        audit_max: int,
        tells_reconnection: bool = False,
    ) -> None:
        super().__init__(
            url, namespace, timeout=timeout, client_name="tzbeat-store", tells_reconnection=tells_reconnection
        )
        self._max_skew = max_skew // MICROSECOND
        self._audit_max = audit_max
        self._retention = millis(retention)

    def _found(self, keys: Sequence[bytes]) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the records of keys; what was settled since the keys were read is left out."""
        records: list[dict[bytes, bytes]] = []
        for start in range(0, len(keys), BATCH):
            part = [self.keys.occurrence(text_of(key)) for key in keys[start : start + BATCH]]
            records += self._ask(lambda c, part=part: self._records(c, part), part)
        return [(key, record) for key, record in zip(keys, records, strict=True) if record]

    def _records(self, client: redis.Redis, keys: Sequence[str]) -> list[dict[bytes, bytes]]:
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(key)
            return list(pipe.execute())

    def _keys_of(self, key: str, entry: str, bucket: Bucket) -> tuple[str, str, str]:
        return (self.keys.occurrence(key), self.keys.open_of(entry), self.keys.done(entry, bucket.number))

    def _lead(self, script: str, epoch: int, *, keys: Iterable[Word] = (), args: Iterable[Word] = ()) -> Any:
        """Run a leader's script: the keys and arguments of `prelude.lua` come first."""
        head = [self.keys(name) for name in ("epoch", "schema", "cursor", "last", "audit", "open", "live")]
        return self._run(script, (*head, *keys), (epoch, self._max_skew, self._audit_max, self._retention, *args))


def named(occurrence: Occurrence) -> tuple[str, str, int]:
    return occurrence.key, occurrence.entry, micros(occurrence.nominal)


def answer_of(reply: Sequence[bytes]) -> Answer:
    verdict, *detail = reply
    return Answer(Verdict(verdict.decode()), detail[0].decode() if detail else "")

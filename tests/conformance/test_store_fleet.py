"""What stores promise for fleets of unlike beats: entries told by fingerprint, cursors set back, the schema's two words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis

from celery_tzbeat.errors import StoreUnreadable
from celery_tzbeat.model import Cursor, Occurrence, Presence
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import SCHEMA_NEEDS, SCHEMA_WRITTEN, Answer, Command, Dispatch, Verdict
from celery_tzbeat.store.redis import CURSORS_PER_SCRIPT, RedisStore
from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.server import LocalServer
from celery_tzbeat.testing.store import MemoryStore

pytestmark = pytest.mark.server

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
SCHEMA = "tzbeat:{test/0}:schema"


def open_redis(url: str, *, presence: timedelta = 150 * SECOND) -> RedisStore:
    return RedisStore(
        url,
        "test/0",
        timeout=1.0,
        retention=DAY,
        max_skew=300 * SECOND,
        audit_max=100_000,
        presence=presence,
    )


@dataclass
class Ground:
    store: Any
    now: datetime
    wipe: Callable[[], Any]
    need: Callable[[int], Any]

    def attend(self, fingerprint: str = "f") -> Any:
        return self.store.attend(
            Presence("b:1:n", "b", 1, "0", "2026c", fingerprint, "standby", "", self.now, None, 0.0, 1, False)
        )

    def cursor(self, ahead: timedelta, rule: str = "rule") -> Cursor:
        return Cursor(self.now + ahead, rule)

    def put(self, **cursors: timedelta) -> None:
        """Write cursors as a leader would have, at a time when the store's clock stood elsewhere."""
        assert self.store.place({n: self.cursor(a) for n, a in cursors.items()}, epoch=5) is Verdict.DONE


@pytest.fixture(params=["memory", "redis"])
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    if request.param == "memory":
        clock = ManualClock(datetime(2026, 11, 30, 12, tzinfo=timezone.utc))
        memory = MemoryStore(clock)
        yield Ground(memory, clock.now(), memory.wipe, memory.need)
        return
    server: LocalServer = request.getfixturevalue("empty_server")
    store = open_redis(server.url)
    with redis.Redis.from_url(server.url) as client:
        now = store.time().replace(microsecond=0)
        yield Ground(store, now, client.flushall, lambda schema: client.hset(SCHEMA, "needs", schema))
    store.close()


# ---- entries by fingerprint


def test_entries_are_known_once_they_were_told(ground: Ground) -> None:
    assert not ground.attend().entries_known
    assert ground.store.entries_of("f") == {}
    ground.store.tell_entries("f", {"a name with / and ü": "1", "b": "2"})
    assert ground.attend().entries_known
    assert not ground.attend("g").entries_known
    assert ground.store.entries_of("f") == {"a name with / and ü": "1", "b": "2"}


def test_telling_entries_again_is_a_repeat_and_leaves_none_of_the_old(ground: Ground) -> None:
    ground.store.tell_entries("f", {"a": "1", "b": "2"})
    ground.store.tell_entries("f", {"b": "3"})
    ground.store.tell_entries("f", {"b": "3"})
    assert ground.store.entries_of("f") == {"b": "3"}


def test_thousands_of_entries_are_told_whole(ground: Ground) -> None:
    many = {f"entry {n}": str(n) for n in range(2500)}
    ground.store.tell_entries("f", many)
    assert ground.store.entries_of("f") == many


def test_no_entries_are_told_as_none(ground: Ground) -> None:
    ground.store.tell_entries("f", {})
    assert ground.store.entries_of("f") == {}


def test_what_was_told_is_gone_with_a_wipe_and_told_anew(ground: Ground) -> None:
    ground.store.tell_entries("f", {"a": "1"})
    ground.wipe()
    assert not ground.attend().entries_known


def test_entries_live_as_long_as_a_beat_with_their_fingerprint_attends(empty_server: LocalServer) -> None:
    store = open_redis(empty_server.url)
    ground = Ground(store, store.time(), store.close, lambda _: None)
    with redis.Redis.from_url(empty_server.url) as client:
        key = store.keys.entries_of("f")
        store.tell_entries("f", {"a": "1"})
        assert 140_000 < client.pttl(key) <= 150_000
        client.pexpire(key, 1000)
        ground.attend("g")
        assert client.pttl(key) <= 1000
        ground.attend("f")
        assert client.pttl(key) > 140_000
    store.close()


# ---- cursors ahead of the store


def test_a_cursor_ahead_of_the_store_is_set_back_and_the_audit_says_from_where(ground: Ground) -> None:
    ground.store.take_office(5)
    ground.put(ahead=DAY, near=200 * SECOND, past=-60 * SECOND)
    back = {name: ground.cursor(0 * SECOND) for name in ("ahead", "near", "past", "unknown")}
    assert ground.store.repair(back, epoch=5) is Verdict.DONE
    assert {name: cursor.nominal - ground.now for name, cursor in ground.store.cursors().items()} == {
        "ahead": 0 * SECOND,
        "near": 200 * SECOND,  # within the skew allowed: a leader may have decided it
        "past": -60 * SECOND,
    }
    records = [record for record in ground.store.audit() if record.event == "repaired"]
    assert [(record.entry, record.first, record.epoch) for record in records] == [("ahead", ground.now + DAY, 5)]


def test_repairing_again_is_a_repeat(ground: Ground) -> None:
    ground.store.take_office(5)
    ground.put(ahead=DAY)
    for _ in range(2):
        assert ground.store.repair({"ahead": ground.cursor(0 * SECOND)}, epoch=5) is Verdict.DONE
    assert [record.event for record in ground.store.audit()].count("repaired") == 1


def test_a_leader_that_was_replaced_and_one_of_a_wiped_store_repair_nothing(ground: Ground) -> None:
    ground.store.take_office(5)
    ground.put(ahead=DAY)
    ground.store.take_office(6)
    assert ground.store.repair({"ahead": ground.cursor(0 * SECOND)}, epoch=5) is Verdict.STALE
    assert ground.store.cursors()["ahead"].nominal == ground.now + DAY
    ground.wipe()
    assert ground.store.repair({"ahead": ground.cursor(0 * SECOND)}, epoch=6) is Verdict.WIPED
    assert ground.store.cursors() == {}


def test_more_cursors_than_one_script_takes_are_repaired(ground: Ground) -> None:
    ground.store.take_office(5)
    names = [f"e{n}" for n in range(CURSORS_PER_SCRIPT + 10)]
    ground.put(**dict.fromkeys(names, DAY))
    assert ground.store.repair({name: ground.cursor(0 * SECOND) for name in names}, epoch=5) is Verdict.DONE
    assert {cursor.nominal for cursor in ground.store.cursors().values()} == {ground.now}


def test_what_was_sent_before_its_cursor_was_set_back_is_not_sent_again(ground: Ground) -> None:
    ground.store.take_office(5)
    sent = ground.now - 10 * SECOND

    def dispatch() -> list[Answer]:
        push = Command("LPUSH", (b"celery", b"payload"), (b"celery",))
        item = Dispatch(Occurrence("e", sent), Cursor(sent, "rule"), Bucket.of(sent, SECOND), (push,))
        answers: list[Answer] = ground.store.dispatch([item], epoch=5)
        return answers

    assert dispatch() == [Answer(Verdict.DONE)]
    ground.put(e=DAY)
    ground.store.repair({"e": ground.cursor(-60 * SECOND)}, epoch=5)
    assert dispatch() == [Answer(Verdict.DECIDED)]
    assert ground.store.cursors()["e"].nominal == sent


# ---- the schema


def test_any_beat_sees_what_the_store_needs(ground: Ground) -> None:
    assert ground.attend().needs == 0
    ground.store.take_office(5)
    assert ground.attend().needs == SCHEMA_NEEDS
    ground.need(SCHEMA_WRITTEN + 1)
    assert ground.attend().needs == SCHEMA_WRITTEN + 1


def test_a_store_that_needs_a_newer_release_is_not_taken_and_its_fence_stays(ground: Ground) -> None:
    ground.store.take_office(5)
    ground.need(SCHEMA_WRITTEN + 1)
    with pytest.raises(StoreUnreadable, match=f"needs schema {SCHEMA_WRITTEN + 1}, this release writes .* upgrade"):
        ground.store.take_office(6)
    assert ground.attend().epoch == 5
    ground.need(SCHEMA_WRITTEN)
    assert ground.store.take_office(6) is not None


def test_what_the_store_needs_rises_no_further_than_the_oldest_live_beat_writes(ground: Ground) -> None:
    ground.store.take_office(5, oldest_schema=SCHEMA_NEEDS - 1)
    assert ground.attend().needs == SCHEMA_NEEDS - 1
    ground.store.take_office(6, oldest_schema=SCHEMA_NEEDS)
    assert ground.attend().needs == SCHEMA_NEEDS
    ground.store.take_office(7, oldest_schema=SCHEMA_NEEDS - 1)
    assert ground.attend().needs == SCHEMA_NEEDS, "it never falls by itself"


def test_a_newer_release_raises_what_is_written_at_once_and_what_is_needed_when_no_older_beat_lives(
    empty_server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_redis(empty_server.url)
    store.take_office(5)
    with redis.Redis.from_url(empty_server.url) as client:
        assert client.hgetall(SCHEMA) == {b"written": b"1", b"needs": b"1"}
        with monkeypatch.context() as newer:
            newer.setattr("celery_tzbeat.store.redis.SCHEMA_WRITTEN", 3)
            newer.setattr("celery_tzbeat.store.redis.SCHEMA_NEEDS", 2)
            store.take_office(6, oldest_schema=1)
            assert client.hgetall(SCHEMA) == {b"written": b"3", b"needs": b"1"}
        assert store.take_office(7) is not None, "a rollback while the store needs no more"
        assert client.hgetall(SCHEMA) == {b"written": b"3", b"needs": b"1"}
        with monkeypatch.context() as newer:
            newer.setattr("celery_tzbeat.store.redis.SCHEMA_WRITTEN", 3)
            newer.setattr("celery_tzbeat.store.redis.SCHEMA_NEEDS", 2)
            store.take_office(8, oldest_schema=3)
            assert client.hgetall(SCHEMA) == {b"written": b"3", b"needs": b"2"}
    with pytest.raises(StoreUnreadable, match="needs schema 2, this release writes 1"):
        store.take_office(9)
    store.close()

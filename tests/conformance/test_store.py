"""One suite for every store: what `Store` promises, row by row of the failure tables. Rows only a server can show follow."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis

from celery_tzbeat.errors import StoreDamaged, StoreUnavailable, StoreUnreadable
from celery_tzbeat.model import Cursor, Occurrence, Presence, Unrun
from celery_tzbeat.store.keys import CATALOGUE, Bucket
from celery_tzbeat.store.protocol import (
    BATCH,
    Answer,
    Burial,
    Claim,
    Claimed,
    Command,
    Dispatch,
    OpenOccurrence,
    Verdict,
)
from celery_tzbeat.store.redis import RedisStore
from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.server import LocalServer
from celery_tzbeat.testing.store import MemoryStore

pytestmark = pytest.mark.server

UTC = timezone.utc
SECOND = timedelta(seconds=1)
RETENTION = timedelta(hours=24)


def open_redis(url: str, **changes: Any) -> RedisStore:
    options = {
        "timeout": 1.0,
        "retention": RETENTION,
        "max_skew": timedelta(seconds=300),
        "audit_max": 100_000,
        "presence": timedelta(seconds=150),
    }
    return RedisStore(url, "test/0", **{**options, **changes})


@dataclass
class Ledger:
    """A store under test, the queue behind it, and a way to lose its data."""

    store: Any
    now: datetime
    pushed: Callable[[], list[bytes]]
    wipe: Callable[[], None]
    need: Callable[[int], None]


@pytest.fixture(params=["memory", "redis"])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    if request.param == "memory":
        clock = ManualClock(datetime(2026, 11, 30, 12, tzinfo=UTC))
        memory = MemoryStore(clock)
        yield Ledger(memory, clock.now(), lambda: list(memory.queues["celery"]), memory.wipe, memory.need)
        return
    server: LocalServer = request.getfixturevalue("empty_server")
    store = open_redis(server.url)
    with redis.Redis.from_url(server.url) as client:
        yield Ledger(
            store,
            store.time().replace(microsecond=0),
            lambda: list(reversed(client.lrange("celery", 0, -1))),
            client.flushall,
            lambda schema: client.hset("tzbeat:{test/0}:schema", "needs", schema),
        )
    store.close()


def cursor(nominal: datetime) -> Cursor:
    return Cursor(nominal=nominal, rule="rule", mark="mark|with|bars", tzdata="2026.6")


def dispatch(entry: str, nominal: datetime, *payloads: bytes, late: bool = False) -> Dispatch:
    return Dispatch(
        occurrence=Occurrence(entry, nominal, late),
        cursor=cursor(nominal),
        bucket=Bucket.of(nominal, SECOND),
        commands=tuple(Command("LPUSH", (b"celery", p), (b"celery",)) for p in payloads or (entry.encode(),)),
    )


def unrun(event: Any, entry: str, first: datetime, last: datetime, count: int) -> Unrun:
    return Unrun(event, entry, first, last, count, "for a test", cursor(last))


def claim(entry: str, nominal: datetime, payload: bytes = b"payload", *, late: bool = False) -> Claim:
    return Claim(Occurrence(entry, nominal, late), Bucket.of(nominal, SECOND), cursor(nominal), payload)


def claimed(entry: str, nominal: datetime, *, late: bool = False) -> Claimed:
    return Claimed(Occurrence(entry, nominal, late), Bucket.of(nominal, SECOND))


def verdicts(answers: list[Answer]) -> list[Verdict]:
    return [answer.verdict for answer in answers]


def events(ledger: Ledger) -> list[tuple[str, str]]:
    return [(record.event, record.entry) for record in ledger.store.audit()]


# ---- taking office: the fence


def test_a_leader_on_an_empty_store_is_told_so(ledger: Ledger) -> None:
    office = ledger.store.take_office(5, "me")
    assert office is not None
    assert office.fresh
    assert office.cursors == {}
    assert events(ledger) == [("office", "")]


def test_taking_office_again_with_the_same_epoch_is_a_repeat_and_no_second_term(ledger: Ledger) -> None:
    ledger.store.take_office(5)
    office = ledger.store.take_office(5)
    assert office is not None
    assert not office.fresh
    assert events(ledger) == [("office", "")]


def test_a_lower_epoch_does_not_take_office(ledger: Ledger) -> None:
    ledger.store.take_office(5)
    assert ledger.store.take_office(4) is None


def test_a_successor_finds_what_was_decided(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.dispatch([dispatch("a", ledger.now)], epoch=1)
    office = ledger.store.take_office(2)
    assert office is not None
    assert office.cursors == {"a": cursor(ledger.now)}


def test_a_store_that_needs_a_newer_release_is_left_alone(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.need(99)
    with pytest.raises(StoreUnreadable, match="99"):
        ledger.store.take_office(2)


def every_transition(ledger: Ledger, epoch: int) -> dict[str, list[Verdict]]:
    store, now = ledger.store, ledger.now
    one, bucket = Occurrence("claimed", now), Bucket.of(now, SECOND)
    return {
        "dispatch": verdicts(store.dispatch([dispatch("x", now), dispatch("y", now)], epoch=epoch)),
        "record_unrun": verdicts(store.record_unrun([unrun("skipped", "z", now, now, 1)], epoch=epoch)),
        "bury": verdicts([store.bury(Burial(Occurrence("b", now), cursor(now), bucket, "build", "{}"), epoch=epoch)]),
        "place": [store.place({"p": cursor(now)}, epoch=epoch)],
        "forget": [store.forget(["p"], epoch=epoch)],
        "claim": verdicts(store.claim([claim("claimed", now), claim("another", now)], epoch=epoch)),
        "confirm": verdicts(store.confirm([Claimed(one, bucket), claimed("another", now)], epoch=epoch)),
        "settle": verdicts([store.settle(Claimed(one, bucket), "dead", "unroutable", epoch=epoch, letter="{}")]),
        "repair": [store.repair({"a": cursor(now)}, epoch=epoch)],
    }


def test_no_transition_of_an_earlier_leader_does_anything(ledger: Ledger) -> None:
    ledger.store.take_office(2)
    before = events(ledger)
    for name, answers in every_transition(ledger, epoch=1).items():
        assert set(answers) == {Verdict.STALE}, name
    assert ledger.store.restore({}, epoch=1) is Verdict.STALE
    assert ledger.store.reclaim(Occurrence("claimed", ledger.now), epoch=1) is None
    assert ledger.pushed() == []
    assert ledger.store.cursors() == {}
    assert ledger.store.open_occurrences() == []
    assert ledger.store.dead_letters() == {}
    assert events(ledger) == before


def test_no_transition_does_anything_in_a_store_that_was_wiped(ledger: Ledger) -> None:
    ledger.store.take_office(2)
    ledger.wipe()
    for name, answers in every_transition(ledger, epoch=2).items():
        assert set(answers) == {Verdict.WIPED}, name
    assert ledger.pushed() == []
    assert events(ledger) == []


# ---- lines 1 and 37: dispatch


def test_an_occurrence_is_pushed_and_recorded_at_once(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    answers = ledger.store.dispatch([dispatch("a", ledger.now, b"message")], epoch=1)
    assert verdicts(answers) == [Verdict.DONE]
    assert ledger.pushed() == [b"message"]
    assert ledger.store.cursors()["a"] == cursor(ledger.now)
    nominal, state, at = ledger.store.last()["a"]
    assert (nominal, state) == (ledger.now, "sent")
    assert at >= ledger.now
    record = ledger.store.audit()[-1]
    assert (record.event, record.entry, record.first, record.last, record.count, record.epoch) == (
        "sent",
        "a",
        ledger.now,
        ledger.now,
        1,
        1,
    )


def test_a_lost_reply_and_the_same_batch_again_push_nothing_twice(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    batch = [dispatch("a", ledger.now), dispatch("b", ledger.now)]
    ledger.store.dispatch(batch, epoch=1)
    assert verdicts(ledger.store.dispatch(batch, epoch=1)) == [Verdict.DECIDED] * 2
    assert sorted(ledger.pushed()) == [b"a", b"b"]
    assert events(ledger).count(("sent", "a")) == 1


def test_two_leaders_with_the_same_occurrence_send_it_once(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.dispatch([dispatch("a", ledger.now)], epoch=1)
    ledger.store.take_office(2)
    assert verdicts(ledger.store.dispatch([dispatch("a", ledger.now)], epoch=2)) == [Verdict.DECIDED]
    assert ledger.pushed() == [b"a"]


def test_an_occurrence_behind_the_cursor_is_decided(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.dispatch([dispatch("a", ledger.now)], epoch=1)
    answers = ledger.store.dispatch([dispatch("a", ledger.now - SECOND)], epoch=1)
    assert verdicts(answers) == [Verdict.DECIDED]
    assert ledger.pushed() == [b"a"]


def test_a_done_mark_decides_where_the_cursor_was_lost(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.dispatch([dispatch("a", ledger.now)], epoch=1)
    ledger.store.forget(["a"], epoch=1)
    answers = ledger.store.dispatch([dispatch("a", ledger.now)], epoch=1)
    assert verdicts(answers) == [Verdict.DECIDED]
    assert ledger.store.cursors()["a"] == cursor(ledger.now)
    assert ledger.pushed() == [b"a"]


def test_a_nominal_too_far_ahead_of_the_stores_clock_is_refused_by_each_script(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ahead = ledger.now + timedelta(seconds=310)
    bucket = Bucket.of(ahead, SECOND)
    one = Occurrence("a", ahead)
    near = dispatch("b", ledger.now + timedelta(seconds=290))
    assert verdicts(ledger.store.dispatch([dispatch("a", ahead), near], epoch=1)) == [
        Verdict.EARLY,
        Verdict.DONE,
    ]
    assert verdicts(ledger.store.record_unrun([unrun("missed", "a", ledger.now, ahead, 9)], epoch=1)) == [Verdict.EARLY]
    assert ledger.store.bury(Burial(one, cursor(ahead), bucket, "build", "{}"), epoch=1).verdict is (Verdict.EARLY)
    claims = [claim("a", ahead), claim("c", ledger.now + timedelta(seconds=290))]
    assert verdicts(ledger.store.claim(claims, epoch=1)) == [Verdict.EARLY, Verdict.DONE]
    assert "a" not in ledger.store.cursors()
    assert [found.occurrence.entry for found in ledger.store.open_occurrences()] == ["c"]


def test_an_occurrence_of_several_messages_goes_out_whole(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.dispatch([dispatch("a", ledger.now, b"one", b"two")], epoch=1)
    assert ledger.pushed() == [b"one", b"two"]
    assert events(ledger).count(("sent", "a")) == 1


def test_a_misfire_that_runs_says_so_in_the_audit(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.dispatch([dispatch("a", ledger.now, late=True)], epoch=1)
    assert ledger.store.audit()[-1].detail == "misfire"


def test_names_with_any_text_are_kept_as_they_are(ledger: Ledger) -> None:
    name = "proj.add(1, 2) | ärger {x}: 'quoted' \U0001f4a3"
    ledger.store.take_office(1)
    ledger.store.dispatch([dispatch(name, ledger.now)], epoch=1)
    assert list(ledger.store.cursors()) == [name]
    assert ledger.store.audit()[-1].entry == name


# ---- lines 4 and 5


def test_a_row_that_does_not_run_is_one_record_and_moves_the_cursor(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    first, last = ledger.now - 100 * SECOND, ledger.now - SECOND
    row = unrun("coalesced", "a", first, last, 100)
    assert verdicts(ledger.store.record_unrun([row], epoch=1)) == [Verdict.DONE]
    assert verdicts(ledger.store.record_unrun([row], epoch=1)) == [Verdict.DECIDED]
    records = [record for record in ledger.store.audit() if record.event == "coalesced"]
    assert [(r.first, r.last, r.count, r.detail) for r in records] == [(first, last, 100, "for a test")]
    assert ledger.store.cursors()["a"].nominal == last
    assert ledger.pushed() == []


def test_an_occurrence_that_cannot_be_built_leaves_a_letter_once_and_the_cursor_goes_on(
    ledger: Ledger,
) -> None:
    ledger.store.take_office(1)
    one = Occurrence("a", ledger.now)
    burial = Burial(one, cursor(ledger.now), Bucket.of(ledger.now, SECOND), "build", '{"v": 1}')
    assert ledger.store.bury(burial, epoch=1).verdict is Verdict.DONE
    assert ledger.store.bury(burial, epoch=1).verdict is Verdict.DECIDED
    assert ledger.store.dead_letters() == {one.key: '{"v": 1}'}
    assert ledger.store.last()["a"][1] == "dead"
    assert events(ledger).count(("dead", "a")) == 1
    assert verdicts(ledger.store.dispatch([dispatch("a", ledger.now)], epoch=1)) == [Verdict.DECIDED]


# ---- cursors without occurrences


def test_a_placed_cursor_never_goes_back(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.place({"a": cursor(ledger.now)}, epoch=1)
    ledger.store.place({"a": cursor(ledger.now - SECOND)}, epoch=1)
    assert ledger.store.cursors()["a"].nominal == ledger.now
    changed = Cursor(ledger.now, "another rule")
    ledger.store.place({"a": changed}, epoch=1)
    assert ledger.store.cursors()["a"] == changed
    assert events(ledger).count(("new", "a")) == 1


def test_more_cursors_than_one_script_takes_are_all_placed(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    many = {f"entry {i}": cursor(ledger.now) for i in range(1203)}
    assert ledger.store.place(many, epoch=1) is Verdict.DONE
    assert ledger.store.cursors() == many


def test_a_leader_that_lives_through_a_wipe_writes_its_cursors_back(ledger: Ledger) -> None:
    ledger.store.take_office(7)
    ledger.store.dispatch([dispatch("a", ledger.now)], epoch=7)
    ledger.wipe()
    many = {"a": cursor(ledger.now), **{f"entry {i}": cursor(ledger.now) for i in range(700)}}
    assert ledger.store.restore(many, epoch=7) is Verdict.DONE
    assert ledger.store.restore({}, epoch=7) is Verdict.DECIDED
    assert ledger.store.cursors() == many
    assert verdicts(ledger.store.dispatch([dispatch("a", ledger.now)], epoch=7)) == [Verdict.DECIDED]
    assert ledger.store.take_office(6) is None


def test_forgotten_entries_leave_nothing(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.dispatch([dispatch("a", ledger.now), dispatch("b", ledger.now)], epoch=1)
    assert ledger.store.forget(["a", "never there"], epoch=1) is Verdict.DONE
    assert list(ledger.store.cursors()) == list(ledger.store.last()) == ["b"]
    assert events(ledger).count(("forgotten", "a")) == 1


# ---- lines 2, 9, 10, 11, 14, 29: claims


def test_a_claim_is_open_until_it_is_confirmed(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    assert verdicts(ledger.store.claim([claim("a", ledger.now)], epoch=1)) == [Verdict.DONE]
    assert ledger.store.cursors()["a"] == cursor(ledger.now)
    assert ledger.store.open_occurrences() == [
        OpenOccurrence(
            Occurrence("a", ledger.now),
            Bucket.of(ledger.now, SECOND),
            "claimed",
            epoch=1,
            dispatch=1,
            payload=b"payload",
        )
    ]
    assert "a" not in ledger.store.last()
    assert verdicts(ledger.store.confirm([claimed("a", ledger.now)], epoch=1)) == [Verdict.DONE]
    assert ledger.store.open_occurrences() == []
    assert ledger.store.last()["a"][1] == "sent"
    assert events(ledger)[-2:] == [("claimed", "a"), ("sent", "a")]
    assert ledger.pushed() == []


def test_a_payload_is_kept_byte_for_byte_and_a_misfire_stays_one(ledger: Ledger) -> None:
    payload = bytes(range(256)) * 40
    ledger.store.take_office(1)
    ledger.store.claim([claim("a", ledger.now, payload, late=True)], epoch=1)
    (found,) = ledger.store.open_occurrences()
    assert (found.payload, found.occurrence.late) == (payload, True)
    ledger.store.confirm([claimed("a", ledger.now, late=True)], epoch=1)
    assert [(r.event, r.detail) for r in ledger.store.audit()][-2:] == [("claimed", "misfire"), ("sent", "misfire")]


def test_what_is_open_says_since_when_and_a_takeover_does_not_make_it_younger(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.claim([claim("a", ledger.now - 3 * SECOND), claim("b", ledger.now)], epoch=1)
    since = ledger.store.open_since()
    keys = {name: Occurrence(name, at).key for name, at in (("a", ledger.now - 3 * SECOND), ("b", ledger.now))}
    assert set(since) == set(keys.values())
    assert all(abs(at - ledger.store.time()) < 5 * SECOND for at in since.values()), "since the claim, not the nominal"
    ledger.store.take_office(2)
    ledger.store.reclaim(Occurrence("a", ledger.now - 3 * SECOND), epoch=2)
    ledger.store.confirm([claimed("b", ledger.now)], epoch=2)
    assert ledger.store.open_since() == {keys["a"]: since[keys["a"]]}


def test_a_whole_batch_is_claimed_and_confirmed_by_one_call_each(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    names = [f"entry {i:03}" for i in range(BATCH)]
    claims = [claim(name, ledger.now, name.encode() * 100) for name in names]
    assert verdicts(ledger.store.claim(claims, epoch=1)) == [Verdict.DONE] * BATCH
    found = ledger.store.open_occurrences()
    assert {item.occurrence.entry: item.payload for item in found} == {name: name.encode() * 100 for name in names}
    batch = [claimed(name, ledger.now) for name in names]
    assert verdicts(ledger.store.confirm(batch, epoch=1)) == [Verdict.DONE] * BATCH
    assert ledger.store.open_occurrences() == []
    assert {state for _, state, _ in ledger.store.last().values()} == {"sent"}


def test_more_open_claims_than_a_batch_are_all_found(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    names = {f"entry {i}" for i in range(2 * BATCH + 7)}
    for name in names:
        ledger.store.claim([claim(name, ledger.now, name.encode())], epoch=1)
    found = ledger.store.open_occurrences()
    assert {item.occurrence.entry for item in found} == {item.payload.decode() for item in found} == names


def test_a_batch_is_answered_each_for_itself(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.dispatch([dispatch("sent", ledger.now)], epoch=1)
    batch = [claim("sent", ledger.now), claim("new", ledger.now), claim("far", ledger.now + timedelta(days=1))]
    assert verdicts(ledger.store.claim(batch, epoch=1)) == [Verdict.DECIDED, Verdict.DONE, Verdict.EARLY]
    answers = ledger.store.confirm([claimed("sent", ledger.now), claimed("new", ledger.now)], epoch=1)
    assert verdicts(answers) == [Verdict.DECIDED, Verdict.DONE]


def test_an_empty_batch_is_answered_by_nothing(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    assert ledger.store.claim([], epoch=1) == ledger.store.confirm([], epoch=1) == []


def test_a_claim_whose_reply_was_lost_is_decided_and_stands_open(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    batch = [claim("a", ledger.now), claim("b", ledger.now)]
    ledger.store.claim(batch, epoch=1)
    assert verdicts(ledger.store.claim(batch, epoch=1)) == [Verdict.DECIDED] * 2
    assert [(found.occurrence.entry, found.epoch) for found in ledger.store.open_occurrences()] == [("a", 1), ("b", 1)]
    assert events(ledger).count(("claimed", "a")) == 1


def test_a_confirmation_whose_reply_was_lost_is_decided(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.claim([claim("a", ledger.now)], epoch=1)
    ledger.store.confirm([claimed("a", ledger.now)], epoch=1)
    assert verdicts(ledger.store.confirm([claimed("a", ledger.now)], epoch=1)) == [Verdict.DECIDED]
    assert events(ledger).count(("sent", "a")) == 1


def test_what_was_never_claimed_cannot_be_confirmed_or_settled(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    never = claimed("never", ledger.now)
    assert verdicts(ledger.store.confirm([never], epoch=1)) == [Verdict.DECIDED]
    assert ledger.store.settle(never, "dead", "unroutable", epoch=1, letter="{}").verdict is Verdict.DECIDED
    assert (ledger.store.last(), ledger.store.dead_letters()) == ({}, {})


def test_a_claim_cannot_be_claimed_or_dispatched_again_open_or_confirmed(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.claim([claim("a", ledger.now)], epoch=1)
    for confirmed in (False, True):
        if confirmed:
            ledger.store.confirm([claimed("a", ledger.now)], epoch=1)
        ledger.store.forget(["a"], epoch=1)  # even without its cursor
        assert verdicts(ledger.store.claim([claim("a", ledger.now)], epoch=1)) == [Verdict.DECIDED]
        assert ledger.store.cursors()["a"] == cursor(ledger.now)
        assert verdicts(ledger.store.dispatch([dispatch("a", ledger.now)], epoch=1)) == [Verdict.DECIDED]
    assert ledger.pushed() == []
    assert ledger.store.open_occurrences() == []


def test_the_next_leader_takes_an_open_claim_over_with_its_payload_and_only_once(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.claim([claim("a", ledger.now)], epoch=1)
    one = Occurrence("a", ledger.now)
    ledger.store.take_office(2)
    taken = ledger.store.reclaim(one, epoch=2)
    assert taken == OpenOccurrence(
        one, Bucket.of(ledger.now, SECOND), "claimed", epoch=2, dispatch=1, payload=b"payload"
    )
    assert ledger.store.reclaim(one, epoch=2) is None
    assert verdicts(ledger.store.confirm([claimed("a", ledger.now)], epoch=1)) == [Verdict.STALE]
    assert verdicts(ledger.store.confirm([claimed("a", ledger.now)], epoch=2)) == [Verdict.DONE]
    record = next(record for record in ledger.store.audit() if record.event == "reclaimed")
    assert (record.entry, record.first, record.epoch, record.detail) == ("a", ledger.now, 2, "1")
    assert ledger.store.reclaim(one, epoch=3) is None


def test_a_claim_of_a_leaders_own_epoch_is_in_its_own_hands(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.claim([claim("a", ledger.now)], epoch=1)
    assert ledger.store.reclaim(Occurrence("a", ledger.now), epoch=1) is None
    assert [found.epoch for found in ledger.store.open_occurrences()] == [1]


def test_a_claim_outlives_the_deletion_of_its_entry(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.claim([claim("a", ledger.now)], epoch=1)
    ledger.store.forget(["a"], epoch=1)
    ledger.store.take_office(2)
    assert ledger.store.reclaim(Occurrence("a", ledger.now), epoch=2) is not None
    assert verdicts(ledger.store.confirm([claimed("a", ledger.now)], epoch=2)) == [Verdict.DONE]


@pytest.mark.parametrize("state", ["withdrawn", "dead", "lost"])
def test_an_open_claim_can_be_settled_without_a_message(ledger: Ledger, state: Any) -> None:
    ledger.store.take_office(1)
    ledger.store.claim([claim("a", ledger.now)], epoch=1)
    one = claimed("a", ledger.now)
    assert ledger.store.settle(one, state, "for a test", epoch=1).verdict is Verdict.DONE
    assert ledger.store.settle(one, state, "for a test", epoch=1).verdict is Verdict.DECIDED
    assert ledger.store.open_occurrences() == []
    assert ledger.store.last()["a"][1] == state
    assert (ledger.store.audit()[-1].event, ledger.store.audit()[-1].detail) == (state, "for a test")
    assert ledger.store.dead_letters() == {}
    assert verdicts(ledger.store.claim([claim("a", ledger.now)], epoch=1)) == [Verdict.DECIDED]
    assert verdicts(ledger.store.confirm([one], epoch=1)) == [Verdict.DECIDED]


def test_a_claim_that_is_settled_as_dead_leaves_its_letter_once(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.claim([claim("a", ledger.now)], epoch=1)
    one = claimed("a", ledger.now)
    ledger.store.settle(one, "dead", "unroutable", epoch=1, letter='{"v": 1}')
    assert ledger.store.settle(one, "dead", "unroutable", epoch=1, letter="another").verdict is Verdict.DECIDED
    assert ledger.store.dead_letters() == {one.occurrence.key: '{"v": 1}'}
    assert events(ledger).count(("dead", "a")) == 1


# ---- any beat


def presence(beat: str, **changes: Any) -> Presence:
    values = {
        "beat": beat,
        "host": "host",
        "pid": 1,
        "version": "0",
        "tzdata": "2026.6",
        "fingerprint": "f",
        "role": "standby",
        "why": "somebody leads",
        "last_tick": datetime(2026, 1, 1, tzinfo=UTC),
        "next_due": None,
        "skew": 0.5,
        "entries": 3,
        "embedded": False,
    }
    return Presence(**{**values, **changes})


def test_beats_that_attend_are_seen_and_see_the_store(ledger: Ledger) -> None:
    view = ledger.store.attend(presence("one"))
    assert view.fresh
    assert view.epoch == 0
    assert abs(view.time - ledger.now) < timedelta(seconds=60)
    ledger.store.take_office(3)
    view = ledger.store.attend(presence("two", role="leader", next_due=ledger.now))
    assert not view.fresh
    assert view.epoch == 3
    assert sorted(beat.beat for beat in ledger.store.beats()) == ["one", "two"]
    assert ledger.store.attend(presence("two")) is not None
    assert len(ledger.store.beats()) == 2


# ---- what only a server can show


@pytest.fixture
def store(empty_server: LocalServer) -> Iterator[RedisStore]:
    store = open_redis(empty_server.url)
    yield store
    store.close()


@pytest.fixture
def client(empty_server: LocalServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(empty_server.url) as client:
        yield client


def test_a_queue_of_the_wrong_type_is_a_fault_of_one_entry_and_leaves_no_record(
    store: RedisStore, client: redis.Redis
) -> None:
    client.set("celery", "not a list")
    store.take_office(1)
    now = store.time()
    good = Dispatch(
        Occurrence("good", now),
        cursor(now),
        Bucket.of(now, SECOND),
        (Command("LPUSH", (b"other", b"x"), (b"other",)),),
    )
    answers = store.dispatch([dispatch("bad", now), good], epoch=1)
    assert verdicts(answers) == [Verdict.FAULT, Verdict.DONE]
    assert "WRONGTYPE" in answers[0].detail
    assert list(store.cursors()) == ["good"]
    client.delete("celery")
    assert verdicts(store.dispatch([dispatch("bad", now)], epoch=1)) == [Verdict.DONE]


def test_a_ledger_key_of_the_wrong_type_leaves_a_message_without_a_record_never_the_other_way(
    store: RedisStore, client: redis.Redis
) -> None:
    store.take_office(1)
    now = store.time()
    client.delete("tzbeat:{test/0}:last")
    client.set("tzbeat:{test/0}:last", "not a hash")
    with pytest.raises(StoreUnreadable, match="WRONGTYPE"):
        store.dispatch([dispatch("a", now)], epoch=1)
    assert client.llen("celery") == 1
    assert verdicts(store.dispatch([dispatch("a", now)], epoch=1)) == [Verdict.DECIDED]  # no flood


@pytest.mark.parametrize(
    "name",
    ["epoch", "schema", "cursor", "last", "audit", "beats", "open", "done:{bucket}", "entries:f", "open:a"],
)
def test_a_key_of_another_type_is_named_with_what_to_do(store: RedisStore, client: redis.Redis, name: str) -> None:
    store.take_office(1)
    now = store.time()
    name = name.format(bucket=f"a:{Bucket.of(now, SECOND).number}")
    key = f"tzbeat:{{test/0}}:{name}"
    wanted, wrong = store.keys.type_of(key), "list"
    client.delete(key)
    client.lpush(key, "somebody else's")

    def use() -> None:
        store.attend(presence("b"))
        store.entries_of("f")
        store.take_office(1)
        if name.startswith("open"):
            store.claim([claim("a", now)], epoch=1)
            store.open_occurrences()
        store.dispatch([dispatch("a", now)], epoch=1)
        store.beats()

    with pytest.raises(StoreDamaged, match=rf"'{re.escape(key)}' is a {wrong} and must be a {wanted}.*rename it"):
        use()
    assert (key in store.damage()) is (":" not in name)  # those of one entry are named by the call that meets them
    client.rename(key, "aside")
    store.take_office(1)
    assert verdicts(store.dispatch([dispatch("b", now)], epoch=1)) in ([Verdict.DONE], [Verdict.WIPED])
    assert store.damage() == ""


def test_a_full_server_is_a_store_that_does_not_serve_and_nothing_is_half_done(
    make_server: Callable[..., LocalServer],
) -> None:
    server = make_server()
    store = open_redis(server.url)
    with redis.Redis.from_url(server.url) as client:
        store.take_office(1)
        now = store.time()
        client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="OOM"):
            store.dispatch([dispatch("a", now)], epoch=1)
        assert client.llen("celery") == 0
        assert store.cursors() == {}
        client.config_set("maxmemory", "0")
        assert verdicts(store.dispatch([dispatch("a", now)], epoch=1)) == [Verdict.DONE]
    store.close()


def test_a_server_that_is_gone_is_unavailable_and_found_again(server: LocalServer) -> None:
    store = open_redis(server.url)
    store.take_office(1)
    server.stop()
    with pytest.raises(StoreUnavailable):
        store.time()
    server.restart()
    assert store.time()
    store.close()


def test_a_frozen_server_is_unavailable_within_the_bound_and_the_call_may_have_happened(
    server: LocalServer,
) -> None:
    store = open_redis(server.url, timeout=0.3)
    store.take_office(1)
    now = store.time()
    server.freeze()
    with pytest.raises(StoreUnavailable):
        store.dispatch([dispatch("a", now)], epoch=1)
    server.thaw()
    answers = store.dispatch([dispatch("a", now)], epoch=1)
    assert answers[0].verdict in (Verdict.DONE, Verdict.DECIDED)
    with redis.Redis.from_url(server.url) as client:
        assert client.llen("celery") == 1
    store.close()


def test_a_demoted_master_is_unavailable_and_its_successor_goes_on(
    make_server: Callable[..., LocalServer],
) -> None:
    """-READONLY on a connection that stays open; then the promoted replica serves what it had received."""
    old = make_server()
    new = make_server(replica_of=old)
    with redis.Redis.from_url(old.url) as at_old, redis.Redis.from_url(new.url) as at_new:
        store = open_redis(old.url)
        store.take_office(1)
        now = store.time()
        store.dispatch([dispatch("a", now)], epoch=1)
        while not at_old.wait(1, 100):
            pass
        at_new.replicaof("NO", "ONE")
        at_old.replicaof("127.0.0.1", str(new.port))
        with pytest.raises(StoreUnavailable, match="READONLY"):
            store.dispatch([dispatch("b", now)], epoch=1)
        promoted = open_redis(new.url)
        assert verdicts(promoted.dispatch([dispatch("a", now), dispatch("b", now)], epoch=1)) == [
            Verdict.DECIDED,
            Verdict.DONE,
        ]
        store.close()
        promoted.close()


def test_a_restart_with_persistence_forgets_nothing(aof_server: LocalServer) -> None:
    store = open_redis(aof_server.url)
    store.take_office(1)
    now = store.time()
    store.dispatch([dispatch("a", now)], epoch=1)
    aof_server.stop()
    aof_server.restart()
    assert verdicts(store.dispatch([dispatch("a", now)], epoch=1)) == [Verdict.DECIDED]
    store.close()


def test_a_restart_without_persistence_is_a_wipe(server: LocalServer) -> None:
    store = open_redis(server.url)
    store.take_office(1)
    now = store.time()
    store.dispatch([dispatch("a", now)], epoch=1)
    server.restart(wipe=True)
    assert verdicts(store.dispatch([dispatch("a", now)], epoch=1)) == [Verdict.WIPED]
    store.close()


def test_scripts_are_loaded_again_when_the_server_forgot_them(store: RedisStore, client: redis.Redis) -> None:
    store.take_office(1)
    client.script_flush()
    assert store.take_office(2) is not None


def test_every_key_has_a_ttl_or_is_one_of_the_permanent_ones(store: RedisStore, client: redis.Redis) -> None:
    store.take_office(1)
    now = store.time()
    bucket = Bucket.of(now, SECOND)
    store.attend(presence("one"))
    store.tell_entries("f", {"a": "hash"})
    store.dispatch([dispatch("a", now)], epoch=1)
    store.record_unrun([unrun("skipped", "b", now, now, 1)], epoch=1)
    store.bury(Burial(Occurrence("c", now), cursor(now), bucket, "build", "{}"), epoch=1)
    store.claim([claim("claimed", now), claim("unroutable", now), claim("confirmed", now)], epoch=1)
    store.settle(claimed("unroutable", now), "dead", "unroutable", epoch=1, letter="{}")
    store.confirm([claimed("confirmed", now)], epoch=1)
    kinds = {kind.name.partition("<")[0]: kind for kind in CATALOGUE}
    for key in client.keys("tzbeat:*"):
        name = key.decode().removeprefix("tzbeat:{test/0}:")
        kind = kinds.get(name) or kinds[name.partition(":")[0] + ":"]
        assert client.type(key).decode() == kind.type, name
        assert (client.pttl(key) > 0) == (kind.lives not in ("permanent", "while unsettled")), name
    store.confirm([claimed("claimed", now)], epoch=1)
    assert client.keys("tzbeat:*:open*") == client.keys("tzbeat:*:occurrence:*") == []


def test_a_day_of_an_every_second_entry_costs_less_than_2_mb_beside_the_audit(
    store: RedisStore, client: redis.Redis
) -> None:
    store.take_office(1)
    client.config_set("activedefrag", "no")
    before = client.info("memory")["used_memory"]
    start = store.time() - timedelta(days=1)
    marks: dict[int, dict[str, str]] = defaultdict(dict)
    # 2 of 24 hours, to be quick: 72 hashes of 100 marks
    for second in range(7200):
        bucket = Bucket.of(start + second * SECOND, SECOND)
        marks[bucket.number][str(bucket.field)] = "s 1 0"
    for number, found in marks.items():
        client.hset(f"tzbeat:{{test/0}}:done:every second:{number}", mapping=found)
        client.pexpire(f"tzbeat:{{test/0}}:done:every second:{number}", 86_400_000)
    used = client.info("memory")["used_memory"] - before
    assert used * 12 < 2_000_000


def test_an_unreadable_cursor_is_reported_and_the_others_are_read(store: RedisStore, client: redis.Redis) -> None:
    store.take_office(1)
    store.place({"good": cursor(store.time())}, epoch=1)
    client.hset("tzbeat:{test/0}:cursor", "bad", b"\xff\x00garbage")
    office = store.take_office(2)
    assert office is not None
    assert list(office.cursors) == ["good"]
    assert office.unreadable == ("bad",)


def test_the_audit_keeps_no_more_than_it_is_told(empty_server: LocalServer) -> None:
    store = open_redis(empty_server.url, audit_max=100)
    store.take_office(1)
    now = store.time()
    for hundred in range(50):
        nominals = (now - timedelta(days=1) + (100 * hundred + second) * SECOND for second in range(100))
        store.record_unrun([unrun("skipped", "a", nominal, nominal, 1) for nominal in nominals], epoch=1)
    assert len(store.audit(count=10_000)) < 400
    store.close()


def test_open_claims_are_found_in_the_order_in_which_they_were_made(store: RedisStore, client: redis.Redis) -> None:
    store.take_office(1)
    now = store.time()
    for i, name in enumerate("zyx"):
        store.claim([claim(name, now + i * SECOND)], epoch=1)
        claimed_at = store.time()
        while store.time() - claimed_at < timedelta(milliseconds=1):
            pass
    assert [found.occurrence.entry for found in store.open_occurrences()] == ["z", "y", "x"]


def test_a_claim_whose_record_cannot_be_read_is_left_alone_and_named_and_the_others_are_found(
    store: RedisStore, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    store.take_office(1)
    now = store.time()
    store.claim([claim(name, now) for name in ("whole", "torn", "odd", "foreign")], epoch=1)
    keys = {name: Occurrence(name, now).key for name in ("torn", "odd", "foreign")}
    client.hdel(store.keys.occurrence(keys["torn"]), "payload")
    client.hset(store.keys.occurrence(keys["odd"]), "nominal", "soon")
    client.hset(store.keys.occurrence(keys["foreign"]), "entry", b"\xff")
    client.zadd(store.keys("open"), {b"\xff\xfe": 1})
    assert [found.occurrence.entry for found in store.open_occurrences()] == ["whole"]
    for key in keys.values():
        assert f"the record of {key!r} cannot be read" in caplog.text
    assert set(keys.values()) < set(store.open_since()), "health names them"
    client.hset(store.keys("dead"), b"\xff", b"\xff")
    assert store.dead_letters() == {"\ufffd": "\ufffd"}


def test_a_claim_settled_while_the_list_is_read_is_left_out(store: RedisStore, client: redis.Redis) -> None:
    store.take_office(1)
    store.claim([claim("a", store.time())], epoch=1)
    client.zadd("tzbeat:{test/0}:open", {"gone@2026-01-01T00:00:00Z": 0})
    assert [found.occurrence.entry for found in store.open_occurrences()] == ["a"]


@pytest.mark.parametrize("call", ["claim", "confirm"])
def test_a_frozen_server_may_have_claimed_or_confirmed_and_asking_again_tells(server: LocalServer, call: str) -> None:
    store = open_redis(server.url, timeout=0.3)
    store.take_office(1)
    now = store.time()
    if call == "confirm":
        store.claim([claim("a", now)], epoch=1)
    server.freeze()
    with pytest.raises(StoreUnavailable):
        store.claim([claim("a", now)], epoch=1) if call == "claim" else store.confirm([claimed("a", now)], epoch=1)
    server.thaw()
    store.claim([claim("a", now)], epoch=1)
    answers = store.confirm([claimed("a", now)], epoch=1)
    assert answers[0].verdict in (Verdict.DONE, Verdict.DECIDED)
    assert store.open_occurrences() == []
    assert [record.event for record in store.audit()].count("sent") == 1
    store.close()


def test_a_changed_schedule_and_a_returning_entry_are_in_the_audit(ledger: Ledger) -> None:
    ledger.store.take_office(1)
    ledger.store.place({"a": Cursor(ledger.now, "one rule"), "b": Cursor(ledger.now, "rule")}, epoch=1)
    later = ledger.now + SECOND
    ledger.store.place({"a": Cursor(later, "another rule"), "b": Cursor(later, "rule")}, epoch=1)
    ledger.store.place({"b": Cursor(later, "rule", unlisted_for=SECOND)}, epoch=1)
    records = [(r.event, r.entry, r.first, r.last) for r in ledger.store.audit() if r.event in ("changed", "returned")]
    assert records == [("changed", "a", ledger.now, later), ("returned", "b", ledger.now, later)]


def test_records_that_cannot_be_read_are_left_out_and_the_others_are_read(
    store: RedisStore, client: redis.Redis
) -> None:
    prefix = "tzbeat:{test/0}:"
    store.take_office(1)
    now = store.time()
    store.attend(presence("good"))
    store.dispatch([dispatch("good", now)], epoch=1)
    client.set(f"{prefix}beat:bad", "garbage", px=60_000)
    client.set(f"{prefix}beat:other", '{"v": 9}', px=60_000)
    client.zadd(f"{prefix}beats", {"bad": 9e12, "other": 9e12})
    client.xadd(f"{prefix}audit", {"a": "b"})
    client.hset(f"{prefix}last", "bad", "garbage")
    assert [beat.beat for beat in store.beats()] == ["good"]
    assert [record.event for record in store.audit()] == ["office", "sent"]
    assert list(store.last()) == ["good"]

"""A leader's term: every row of the failure table in its module, and what happens to messages that cannot be built."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from term_bench import APP, NOW, SECOND, Beat, entry, key, leader

from celery_tzbeat.beat.dispatch import Message
from celery_tzbeat.beat.ledger import Replaced
from celery_tzbeat.beat.paths import ClaimsPath
from celery_tzbeat.beat.term import PUBLISHING, REBUILT_AFTER
from celery_tzbeat.envelopes import Envelope
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import Cursor, Entry, Occurrence
from celery_tzbeat.schedules import at, every, parse, zone
from celery_tzbeat.store.protocol import BATCH, Command
from celery_tzbeat.testing import ManualClock, MemoryStore


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="celery_tzbeat")


# ---- beginning


def test_a_new_entry_is_placed_before_anything_else_and_starts_from_now() -> None:
    beat = leader(entry())
    assert beat.network.calls == ["place", "survey", "lineage", "open_occurrences"]
    assert beat.store.cursors()["e"].nominal == NOW
    assert beat.after(1) == 1.0
    assert beat.pushed() == beat.sent == [key(1)]


def test_a_new_entry_starts_from_the_stores_clock_where_that_is_ahead() -> None:
    beat = Beat(entry(), store=MemoryStore(ManualClock(NOW + 20 * SECOND)))
    beat.take_office()
    beat.term.work()
    assert beat.store.cursors()["e"].nominal == NOW + 20 * SECOND


def test_work_says_how_long_nothing_will_be_due() -> None:
    assert leader(entry(schedule=every("2s"))).after(1.25) == 0.75
    assert leader(entry(schedule=at(NOW))).after(15) == 1.0  # to the next sweep


def test_a_successor_goes_on_from_what_the_ledger_says() -> None:
    first = leader(entry())
    first.after(3)
    second = Beat(entry(), store=first.store, clock=first.clock)
    second.take_office(2)
    second.after(2)
    assert second.pushed() == [key(i) for i in (1, 2, 3, 4, 5)]


# ---- the failure table: place


@pytest.mark.parametrize("when", ["before", "after"])
def test_place_is_asked_again_and_is_a_repeat(when: str) -> None:
    beat = leader(entry(), worked=False)
    beat.network.fail(when, "place")
    with pytest.raises(StoreUnavailable):
        beat.after(1)
    beat.after(1)
    assert beat.network.calls[:2] == ["place", "place"]
    assert beat.store.cursors()["e"].nominal == NOW + 2 * SECOND
    assert beat.pushed() == [key(1), key(2)]
    assert [r.event for r in beat.store.audit()].count("new") == 1


# ---- record_unrun


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_row_is_recorded_once_and_before_what_follows_it(when: str) -> None:
    beat = leader(entry(catchup="skip", misfire_grace=5 * SECOND))
    beat.network.fail(when, "record_unrun")
    with pytest.raises(StoreUnavailable):
        beat.after(20)
    assert beat.pushed() == []
    beat.term.work()
    assert beat.events("sent") == [("skipped", "e", 14)]
    assert beat.pushed() == [key(i) for i in range(15, 21)]
    assert len(beat.unrun) == (1 if when == "before" else 0)  # who did not see it happen does not tell


# ---- dispatch


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_batch_whose_reply_was_lost_is_sent_again_as_it_was_built(when: str) -> None:
    beat = leader(entry("a"), entry("b"))
    beat.network.fail(when, "dispatch", times=3)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            beat.after(0 if beat.builder.built else 1)
    beat.term.work()
    assert beat.builder.built == [key(1, "a"), key(1, "b")]
    assert beat.pushed() == [key(1, "a"), key(1, "b")]
    assert beat.events() == [("sent", "a", 1), ("sent", "b", 1)]
    beat.after(1)
    assert beat.pushed()[2:] == [key(2, "a"), key(2, "b")]


def test_a_leader_that_dies_before_or_after_the_dispatch_leaves_nothing_to_its_successor_twice() -> None:
    for when in ("before", "after"):
        first = leader(entry())
        first.network.fail(when, "dispatch")
        with pytest.raises(StoreUnavailable):
            first.after(1)
        second = Beat(entry(), store=first.store, clock=first.clock)
        second.take_office(2)
        second.term.work()
        assert second.pushed() == [key(1)], when


def test_a_queue_that_refuses_puts_off_its_own_entry_only() -> None:
    beat = leader(entry("bad", at(NOW + SECOND)), entry("good"))
    original = beat.builder.build

    def build(given: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        beat.builder.queue = "wrong" if given.name == "bad" and beat.clock.now() < NOW + 8 * SECOND else "q"
        return original(given, occurrence, epoch=epoch)

    beat.builder.build = build  # type: ignore[method-assign]
    tried = []
    for second in range(1, 11):
        before = beat.builder.built.count(key(1, "bad"))
        beat.after(1)
        if beat.builder.built.count(key(1, "bad")) > before:
            tried.append(second)
        assert key(second, "good") in beat.pushed()
    assert tried == [1, 2, 4, 8]
    assert key(1, "bad") in beat.pushed()
    assert beat.store.cursors()["bad"].nominal == NOW + SECOND
    assert beat.dead == []


# ---- a later leader in office


@pytest.mark.parametrize("call", ["place", "record_unrun", "dispatch", "bury"])
def test_a_term_ends_at_whichever_call_meets_a_later_leader(call: str) -> None:
    grace = SECOND if call == "record_unrun" else 60 * SECOND
    beat = leader(entry(misfire_grace=grace), worked=call != "place")
    if call == "bury":
        beat.builder.fails = lambda occurrence: True
        for wait in (1, 1, 2, 4):
            beat.after(wait)
    beat.network.before[call] = lambda: beat.store.take_office(2) and None
    before = beat.events()
    with pytest.raises(Replaced):
        beat.after(8)
    assert beat.network.calls[-1] == call
    assert beat.pushed() == []
    assert beat.events() == before
    assert (beat.sent, beat.dead) == ([], [])


# ---- building


def failing(times: int) -> Beat:
    beat = leader(entry("bad", at(NOW + SECOND, NOW + 100 * SECOND)), entry("good"))
    beat.builder.fails = lambda occurrence: (
        occurrence.key == key(1, "bad") and beat.builder.built.count(occurrence.key) <= times
    )
    return beat


def test_a_message_that_can_be_built_at_the_fifth_attempt_is_sent() -> None:
    beat = failing(4)
    for _ in range(20):
        beat.after(1)
    assert beat.builder.built.count(key(1, "bad")) == 5
    assert key(1, "bad") in beat.sent
    assert beat.dead == []


def test_the_fifth_failure_makes_a_dead_letter_and_the_cursor_goes_on() -> None:
    beat = failing(5)
    tried = []
    for second in range(1, 101):
        built = len(beat.builder.built)
        beat.after(1)
        if key(1, "bad") in beat.builder.built[built:]:
            tried.append(second)
        assert beat.sent[-1] == key(second, "good") or second == 100
    assert tried == [1, 2, 4, 8, 16]
    assert beat.dead == [(key(1, "bad"), "build")]
    letter = json.loads(beat.store.dead_letters()[key(1, "bad")])
    assert {name: value for name, value in letter.items() if value} == {
        "v": 1,
        "key": key(1, "bad"),
        "entry": "bad",
        "task": "proj.task",
        "nominal": "2026-11-30T12:00:01Z",
        "reason": "build",
        "error": "ValueError: no",
        "at": "2026-11-30T12:00:16Z",
    }
    assert beat.events("sent") == [("dead", "bad", 1)]
    assert key(100, "bad") in beat.sent


def test_each_occurrence_has_five_attempts_of_its_own() -> None:
    beat = leader(entry("bad", every("10s")))
    beat.builder.fails = lambda occurrence: True
    for _ in range(40):
        beat.after(1)
    assert beat.builder.built == [key(10, "bad")] * 5 + [key(20, "bad")] * 4
    assert [k for k, _ in beat.dead] == [key(10, "bad")]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_burial_whose_reply_was_lost_happens_once(when: str) -> None:
    beat = failing(100)
    beat.network.fail(when, "bury")
    for _ in range(15):
        beat.after(1)
    with pytest.raises(StoreUnavailable):
        beat.after(1)
    assert beat.after(1) == 0.0
    beat.after(0)
    assert beat.events("sent") == [("dead", "bad", 1)]
    assert key(17, "good") in beat.sent
    assert list(beat.store.dead_letters()) == [key(1, "bad")]


def test_a_broker_that_does_not_answer_is_nobodys_failure() -> None:
    beat = leader(entry("a"), entry("b"))
    beat.builder.broker_down = lambda occurrence: occurrence.entry == "b" and beat.builder.built.count(key(1, "b")) <= 7
    for _ in range(7):
        with pytest.raises(StoreUnavailable):
            beat.after(0 if beat.builder.built else 1)
    beat.term.work()
    assert sorted(beat.pushed()) == [key(1, "a"), key(1, "b")]
    assert beat.builder.built.count(key(1, "a")) == 1
    assert beat.dead == []


def test_without_a_message_the_occurrence_is_skipped_by_the_task() -> None:
    beat = leader(entry())
    beat.builder.declines = lambda occurrence: occurrence.nominal == NOW + SECOND
    beat.after(2)
    (record,) = (r for r in beat.store.audit() if r.event == "skipped")
    assert (record.first, record.last, record.count, record.detail) == (NOW + SECOND, NOW + SECOND, 1, "by the task")
    assert [row.reason for row in beat.unrun] == ["by the task"]
    assert beat.pushed() == [key(2)]
    assert beat.builder.built == [key(1), key(2)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_the_task_declined_is_recorded_once(when: str) -> None:
    beat = leader(entry())
    beat.builder.declines = lambda occurrence: True
    beat.network.fail(when, "record_unrun")
    with pytest.raises(StoreUnavailable):
        beat.after(1)
    beat.term.work()
    assert beat.events() == [("skipped", "e", 1)]
    beat.after(1)
    assert beat.events() == [("skipped", "e", 1)] * 2


# ---- a store that was wiped


@pytest.mark.parametrize("call", ["place", "record_unrun", "dispatch", "bury"])
def test_at_whichever_call_a_wiped_store_is_met_the_cursors_are_written_back(call: str) -> None:
    beat = leader(entry(misfire_grace=SECOND), entry("other", every("1h")), worked=call != "place")
    if call == "bury":
        beat.builder.fails = lambda occurrence: True
        for wait in (1, 1, 2, 4):
            beat.after(wait)
    beat.network.before[call] = beat.store.wipe
    beat.after(8)
    assert beat.network.calls.count("restore") == 1
    assert set(beat.store.cursors()) == {"e", "other"}
    assert len(beat.pushed()) == len(set(beat.pushed()))
    # What does not run is recorded though the cursors came back before it was.
    covered = sum(row.count for row in beat.unrun) + len(beat.dead) + len(beat.pushed())
    cursor = beat.store.cursors()["e"].nominal
    assert covered == (cursor - NOW) / SECOND


def test_what_was_sent_before_the_wipe_is_not_sent_again() -> None:
    beat = leader(entry())
    beat.after(3)
    beat.store.wipe()
    beat.after(2)
    assert beat.pushed() == [key(4), key(5)]


def test_a_wiped_store_that_another_leader_found_first_is_left_to_it() -> None:
    beat = leader(entry())
    beat.store.wipe()
    beat.store.take_office(2)
    with pytest.raises(Replaced):
        beat.after(1)
    assert beat.pushed() == []


def test_a_leader_that_is_not_sure_to_lead_writes_nothing_into_a_wiped_store() -> None:
    """It may have been replaced while it was frozen; the fence that would say so is gone."""
    beat = leader(entry())
    beat.after(3)
    beat.network.fail("before", "dispatch")
    with pytest.raises(StoreUnavailable):
        beat.after(1)
    beat.store.wipe()
    beat.trusted = False
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="wiped"):
            beat.after(0.5)
    assert (beat.store.cursors(), beat.pushed()) == ({}, [])
    beat.trusted = True  # under the same epoch: nobody led meanwhile
    while beat.term.work() == 0.0:
        pass
    assert beat.pushed() == [key(4), key(5)]


def test_unlisted_entries_are_written_back_too() -> None:
    beat = leader(entry("e"), entry("old"))
    beat = Beat(entry("e"), store=beat.store, clock=beat.clock)
    beat.take_office(2)
    beat.term.work()
    beat.store.wipe()
    beat.after(1)
    assert set(beat.store.cursors()) == {"e", "old"}


# ---- wrong clocks


def test_what_a_clock_far_ahead_made_due_ends_the_term_and_is_not_lost() -> None:
    for policy in ({"catchup": "skip"}, {"catchup": "all"}, {"catchup": "latest"}):
        server = ManualClock(NOW)
        beat = Beat(entry(schedule=every("1h"), **policy), store=MemoryStore(server))
        beat.take_office()
        beat.term.work()
        beat.clock.set_wall(NOW + timedelta(days=1))
        for _ in range(3):
            try:
                beat.term.work()
            except Replaced:
                break
        else:
            pytest.fail(f"{policy}: the term goes on with what a wrong clock judged")
        beat.clock.set_wall(NOW)
        beat.take_office(2)
        server.advance(3600)
        beat.after(3600)
        assert beat.pushed() == [Occurrence("e", NOW + timedelta(hours=1)).key], policy
        assert beat.events("sent") == [], policy


# ---- unlisted entries


def unlisting(clock: ManualClock | None = None) -> Beat:
    before = Beat(entry("e", every("1h")), entry("old"), clock=clock)
    before.take_office()
    before.term.work()
    beat = Beat(entry("e", every("1h")), store=before.store, clock=before.clock)
    beat.take_office(2)
    beat.term.work()
    return beat


def unlisted_for(beat: Beat) -> timedelta:
    return beat.store.cursors()["old"].unlisted_for


def test_unlisted_entries_add_up_the_time_that_leaders_led_without_them() -> None:
    beat = unlisting()
    beat.after(59)
    assert unlisted_for(beat) == timedelta()
    beat.after(1)
    assert unlisted_for(beat) == timedelta(seconds=60)
    for _ in range(4):
        beat.after(60)
    assert unlisted_for(beat) == timedelta(seconds=300)
    successor = Beat(entry("e", every("1h")), store=beat.store, clock=beat.clock)
    successor.clock.advance(100_000)  # nobody led
    successor.take_office(3)
    successor.term.work()
    assert unlisted_for(successor) == timedelta(seconds=300)
    successor.after(60)
    assert unlisted_for(successor) == timedelta(seconds=360)


def test_time_in_which_this_beat_could_not_lead_counts_for_two_rounds_at_most() -> None:
    beat = unlisting()
    beat.after(100_000)
    assert unlisted_for(beat) == timedelta(seconds=120)


def test_after_the_retention_unlisted_entries_are_forgotten() -> None:
    beat = unlisting()
    for _ in range(1440):
        assert "old" in beat.store.cursors()
        beat.after(60)
    assert "old" not in beat.store.cursors()
    assert ("forgotten", "old", 0) in beat.events()
    beat.after(60)
    assert beat.network.calls.count("forget") == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["place", "forget"])
def test_counting_goes_on_after_a_lost_call(call: str, when: str) -> None:
    beat = unlisting()
    for _ in range(1439 if call == "forget" else 0):
        beat.after(60)
    beat.network.fail(when, call)
    with pytest.raises(StoreUnavailable):
        beat.after(60)
    beat.after(0)
    if call == "forget":
        assert "old" not in beat.store.cursors()
    else:
        assert unlisted_for(beat) == timedelta(seconds=60)


# ---- bounds


def test_no_script_handles_more_than_a_batch() -> None:
    beat = leader(*(entry(f"e{i}", every("10s")) for i in range(250)))
    beat.after(10)
    assert beat.network.batches == [BATCH, BATCH, 50]
    assert len(set(beat.pushed())) == 250


def test_a_tick_yields_after_a_while_of_publishing_and_goes_on_at_the_next() -> None:
    beat = leader(*(entry(f"e{i}", every("10s")) for i in range(30)))
    beat.builder.takes = PUBLISHING / 2.5
    assert beat.after(10) == 0.0
    assert 0 < len(beat.pushed()) < 30
    ticks = 1
    while beat.term.work() == 0.0:
        ticks += 1
    assert ticks > 5
    assert len(set(beat.pushed())) == len(beat.pushed()) >= 30


def test_a_long_outage_of_many_entries_is_worked_off_in_bounded_steps_that_count_as_progress() -> None:
    """Else the lease is lost in the middle of it, and the next leader begins again, for ever."""
    rule = parse("* * * * *").in_zone(zone("UTC"))
    beat = leader(*(entry(f"e{i}", rule) for i in range(20)))
    beat.progress = 0
    beat.after(86_400)
    while beat.term.work() == 0.0:
        pass
    assert beat.network.calls.count("record_unrun") >= 9
    assert beat.progress >= 20
    assert sum(event == "coalesced" for event, _, _ in beat.events()) == 20
    assert len(beat.pushed()) == 20 * 3  # the newest misfired one, and the two within the grace


def test_what_is_on_time_stays_on_time_while_the_misfires_of_others_are_judged() -> None:
    rule = parse("* * * * * *").in_zone(zone("UTC"))
    entries = [entry(f"e{i}", rule, misfire_grace=SECOND) for i in range(6)]
    beat = leader(*entries, entry("prompt", at(NOW + timedelta(hours=1)), misfire_grace=SECOND, catchup="skip"))
    original = beat.network.store.record_unrun

    def slow(rows: Any, *, epoch: int) -> Any:
        beat.clock.advance(2)
        return original(rows, epoch=epoch)

    beat.store.record_unrun = slow  # type: ignore[method-assign]
    beat.after(3600)
    for _ in range(10):
        beat.term.work()
    assert key(3600, "prompt") in beat.pushed()


def test_progress_is_made_by_batches_and_calls() -> None:
    beat = leader(entry())
    beat.progress = 0
    beat.after(1)
    assert beat.progress >= 3  # a look, a batch, a call


def test_an_unreadable_cursor_makes_its_entry_new() -> None:
    beat = Beat(entry())
    office = beat.store.take_office(1)
    assert office is not None
    beat.take_office(1)
    beat.term.begin(type(office)(NOW, False, {"e": Cursor(NOW - 30 * SECOND, entry().rule)}, ("x",), {}))
    beat.term.work()
    assert len(beat.pushed()) == 30


def test_a_batch_takes_no_more_messages_when_it_is_heavy() -> None:
    """A slow link must carry a batch within the bound of one call, or it is sent again for ever."""
    beat = leader(*(entry(f"e{i}") for i in range(9)))
    light = beat.builder.build
    sizes: list[int] = []

    def build(given: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        message = light(given, occurrence, epoch=epoch)
        (command,) = message.parts
        assert isinstance(command, Command)
        return Message((Command("LPUSH", (b"q", command.args[1] + b" " * 400_000), command.keys),), message.bucket)

    beat.builder.build = build  # type: ignore[method-assign]
    beat.network.before["dispatch"] = lambda: None
    dispatch = beat.store.dispatch
    beat.store.dispatch = lambda batch, *, epoch: sizes.append(len(batch)) or dispatch(batch, epoch=epoch)  # type: ignore[method-assign,assignment,func-returns-value]
    beat.after(1)
    assert sizes == [3, 3, 3]
    assert len(beat.pushed()) == 9


# ---- by claims


class ByClaims(Beat):
    """A leader whose broker is not the store."""

    def __init__(self, *entries: Entry, **options: Any) -> None:
        super().__init__(*entries, **options)
        self.path = ClaimsPath(APP, self, self.network, self.clock)  # type: ignore[arg-type]

    def build(self, given: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        message = self.builder.build(given, occurrence, epoch=epoch)
        parts = tuple(Envelope(occurrence.key.encode(), None, None, {}, {}, None, "", "q") for _ in message.parts)
        return Message(parts, message.bucket)

    @property
    def arrived(self) -> list[str]:
        return self.broker.bodies

    @property
    def open(self) -> list[str]:
        return [found.occurrence.key for found in self.store.open_occurrences()]


def claiming(*entries: Entry, **options: Any) -> ByClaims:
    beat = ByClaims(*entries, **options)
    beat.take_office()
    beat.term.work()
    return beat


def tried(beat: ByClaims, seconds: int) -> None:
    """Work once a second, whatever fails."""
    for _ in range(seconds):
        with suppress(StoreUnavailable):
            beat.after(1)


def test_by_claims_what_is_due_is_claimed_sent_and_confirmed_in_one_tick() -> None:
    beat = claiming(entry("a"), entry("b"))
    beat.network.calls.clear()
    assert beat.after(1) == 1.0
    assert beat.network.calls == ["survey", "claim", "confirm"]
    assert beat.arrived == beat.sent == [key(1, "a"), key(1, "b")]
    assert beat.events("claimed") == [("sent", "a", 1), ("sent", "b", 1)]
    assert beat.open == []


def test_by_claims_no_batch_is_larger_than_one_script_takes() -> None:
    beat = claiming(*(entry(f"e{i}", every("10s")) for i in range(250)))
    beat.after(10)
    assert beat.network.calls.count("claim") == beat.network.calls.count("confirm") == 3
    assert len(set(beat.arrived)) == 250


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_claim_whose_reply_was_lost_is_sent_once(when: str) -> None:
    beat = claiming(entry("a"), entry("b"))
    beat.network.fail(when, "claim", times=3)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            beat.after(0 if beat.builder.built else 1)
    beat.term.work()
    assert sorted(beat.arrived) == sorted(beat.sent) == [key(1, "a"), key(1, "b")]
    assert beat.builder.built == [key(1, "a"), key(1, "b")]
    assert beat.open == []
    beat.after(1)
    assert beat.arrived[2:] == [key(2, "a"), key(2, "b")]


def test_a_claim_that_arrives_when_it_was_given_up_is_sent() -> None:
    """A frozen store serves its connections in any order: the claim that was given up may come after the look for it."""
    beat = claiming(entry())
    late: list[Any] = []
    original = beat.store.claim

    def hold(claims: Any, *, epoch: int) -> Any:
        late.append(claims)
        beat.store.claim = again  # type: ignore[method-assign]
        raise StoreUnavailable("a timeout")

    def again(claims: Any, *, epoch: int) -> Any:
        original(late[0], epoch=epoch)  # it comes just before the second one
        return original(claims, epoch=epoch)

    beat.store.claim = hold  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        beat.after(1)
    beat.after(0.5)
    assert beat.arrived == [key(1)]
    assert beat.open == []


def test_a_successor_sends_open_claims_first_of_all() -> None:
    first = claiming(entry("a"), entry("b", every("3s")))
    first.broker.always = "lose"
    tried(first, 3)
    second = ByClaims(entry("a"), entry("b", every("3s")), store=first.store, clock=first.clock)
    second.take_office(2)
    second.after(0.5)
    assert second.arrived[:2] == [key(1, "a"), key(3, "b")]
    assert second.arrived[2:] == [key(2, "a"), key(3, "a")]
    assert second.open == []
    first.broker.always = "take"
    with pytest.raises(Replaced):
        first.after(10)


def test_the_claim_of_an_entry_that_the_successor_does_not_list_is_sent() -> None:
    first = claiming(entry("gone"))
    first.broker.always = "lose"
    tried(first, 1)
    second = ByClaims(entry("other"), store=first.store, clock=first.clock)
    second.take_office(2)
    second.term.work()
    assert second.arrived == [key(1, "gone")]


def test_the_messages_of_an_entry_stay_in_order_when_the_wire_breaks() -> None:
    beat = claiming(entry("a"), entry("b"))
    beat.broker.always = "lose"
    tried(beat, 5)
    beat.broker.always = "take"
    tried(beat, 10)
    for name in "ab":
        arrived = [at for at in beat.arrived if at.startswith(name)]
        assert arrived == [key(second, name) for second in range(1, 16)]


def test_an_outage_of_the_broker_leaves_one_open_claim_of_an_entry() -> None:
    beat = claiming(entry("a"), entry("b"))
    beat.broker.always = "lose"
    tried(beat, 300)
    assert len(beat.open) == 2
    assert beat.term.cut_off


def test_what_is_refused_for_long_keeps_its_entry_and_no_other_waiting() -> None:
    beat = claiming(entry("bad", every("5s")), entry("good"))
    beat.broker.before = lambda envelope: setattr(
        beat.broker, "always", "refuse" if envelope.body.startswith(b"bad") else "take"
    )
    for second in range(1, 71):
        beat.after(1)
        assert beat.arrived[-1] == key(second, "good")
    assert beat.dead == [(key(5, "bad"), "unroutable")]
    assert beat.open == [key(10, "bad")]


def test_by_claims_work_says_when_a_claim_is_tried_again() -> None:
    beat = claiming(entry(schedule=every("1h")))
    beat.broker.script.append("refuse")
    assert beat.after(3600) == 1.0
    assert beat.after(0.25) == 0.75


@pytest.mark.parametrize("call", ["claim", "confirm", "settle"])
def test_by_claims_a_term_ends_at_whichever_call_meets_a_later_leader(call: str) -> None:
    beat = claiming(entry())
    if call == "settle":
        beat.broker.always = "refuse"
    beat.network.before[call] = lambda: beat.store.take_office(2) and None
    with pytest.raises(Replaced):
        tried(beat, 80)
    assert beat.network.calls[-1] == call
    assert (beat.sent, beat.dead) == ([], [])


@pytest.mark.parametrize("call", ["claim", "confirm"])
def test_by_claims_at_whichever_call_a_wiped_store_is_met_nothing_is_sent_twice(call: str) -> None:
    beat = claiming(entry())
    beat.network.before[call] = beat.store.wipe
    for _ in range(5):
        beat.after(1)
    assert beat.arrived == [key(i) for i in range(1, 6)]
    assert beat.network.calls.count("restore") == 1
    assert beat.open == []


def test_by_claims_without_a_message_the_occurrence_is_skipped_by_the_task() -> None:
    beat = claiming(entry())
    beat.builder.declines = lambda occurrence: True
    beat.after(1)
    assert (beat.arrived, beat.events()) == ([], [("skipped", "e", 1)])


def test_a_claim_far_ahead_of_the_stores_clock_ends_the_term() -> None:
    server = ManualClock(NOW)
    beat = ByClaims(entry(schedule=every("1h")), store=MemoryStore(server))
    beat.take_office()
    beat.term.work()
    beat.clock.set_wall(NOW + timedelta(days=1))
    with pytest.raises(Replaced):
        tried(beat, 3)
    assert (beat.arrived, beat.open) == ([], [])


def test_claims_of_another_path_are_sent_by_a_leader_that_now_shares_the_server() -> None:
    first = claiming(entry("a"))
    first.broker.always = "lose"
    tried(first, 1)
    second = Beat(entry("a"), store=first.store, clock=first.clock)
    second.take_office(2)
    second.after(1)
    assert second.broker.bodies == [key(1, "a")]
    assert second.pushed() == [key(2, "a")]


def test_a_batch_that_waited_long_is_built_anew_under_the_same_keys() -> None:
    """A relative expiry counts from when the message is sent: one built before an outage would arrive dead."""
    beat = leader(entry())
    beat.network.fail("before", "dispatch", times=9)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            beat.after(1)
    assert beat.builder.built == [key(1)]  # within seconds: as it was built
    with pytest.raises(StoreUnavailable):
        beat.after(REBUILT_AFTER)
    assert beat.builder.built == [key(1), key(1)]
    beat.network.fails.clear()
    beat.term.work()
    assert beat.pushed()[0] == key(1)
    assert len(set(beat.pushed())) == len(beat.pushed())


# ---- a tick yields


@pytest.mark.parametrize("call", ["place", "repair"])
def test_cursors_that_take_long_to_write_are_written_over_several_ticks_before_anything_is_sent(call: str) -> None:
    entries = [entry(f"e{i:04}", every("1s")) for i in range(2_600)]
    beat = leader(*entries, worked=call == "repair")
    if call == "repair":
        beat.term.work()
        ahead = {e.name: Cursor(NOW + timedelta(days=1), e.rule) for e in entries}
        beat.store.place(ahead, epoch=1)
        beat.take_office(2)
    beat.network.calls.clear()

    def slow() -> None:
        beat.clock.advance(0.1)
        beat.network.before[call] = slow

    slow()
    ticks = []
    while not beat.pushed():
        before = beat.network.calls.count(call)
        beat.term.work()
        ticks.append(beat.network.calls.count(call) - before)
        beat.clock.advance(0.2)
    assert ticks[:2] == [3, 3]
    assert sum(ticks) == 6

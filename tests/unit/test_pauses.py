"""Paused entries: the leader's side, row by row of the failure table of `beat.pauses`."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from term_bench import NOW, SECOND, Beat, entry, key, leader

from celery_tzbeat.beat.ledger import Replaced
from celery_tzbeat.beat.pauses import CATCH_UP
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import Pause, iso
from celery_tzbeat.schedules import every
from celery_tzbeat.store.protocol import Request, RequestKind


def ask(beat: Beat, kind: RequestKind, name: str = "e", *, detail: str = "") -> str:
    expires = beat.clock.now() + timedelta(hours=1)
    return beat.store.ask(Request(kind, name, "somebody", "because", expires, detail=detail))


def paused_leader(until: datetime | None = None, **policy: object) -> Beat:
    """A leader whose every-second entry is paused behind the second 3."""
    beat = leader(entry(**policy))
    beat.after(3)
    asked = ask(beat, "pause", detail=iso(until) if until is not None else "")
    beat.term._sweep._began = None  # its second has come
    beat.term.work()
    assert beat.store.outcome(asked) == "paused"
    assert beat.pushed() == [key(1), key(2), key(3)]
    return beat


def rows(beat: Beat) -> list[tuple[str, str, str, int, str]]:
    return [(row.event, iso(row.first), iso(row.last), row.count, row.reason) for row in beat.unrun]


# ---- pause


def test_a_paused_entry_is_not_sent_and_others_are() -> None:
    beat = leader(entry(), entry("other", every("10s")))
    beat.after(1)
    ask(beat, "pause")
    for _ in range(30):
        beat.after(1)
    assert [each for each in beat.pushed() if each.startswith("e@")] == [key(1)]  # it is seen within a second
    assert len([each for each in beat.pushed() if each.startswith("other@")]) == 3
    assert beat.store.cursors()["e"].nominal == NOW + SECOND
    assert beat.store.paused()["e"] == Pause(NOW + 2 * SECOND, None, "somebody", "because")


def test_a_paused_entry_is_not_what_is_due_next() -> None:
    beat = paused_leader()
    assert beat.term.next_due is None
    assert beat.after(60) == 1.0  # to the next sweep: no busy loop over what stands still


def test_what_stood_ready_when_it_was_paused_is_not_sent() -> None:
    beat = leader(*(entry(f"e{n:03}", every("1h")) for n in range(300)))
    beat.builder.takes = 0.01  # 25 a tick
    beat.after(3600)
    sent = len(beat.pushed())
    assert sent < 300
    for n in range(300):
        ask(beat, "pause", f"e{n:03}")
    for _ in range(30):
        beat.after(1)
    assert len(beat.store.paused()) == 300
    assert len(beat.pushed()) <= sent + 100  # what was built already


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_pause_whose_call_is_lost_is_carried_out_once(when: str) -> None:
    beat = leader(entry())
    beat.after(1)
    asked = ask(beat, "pause")
    beat.network.fail(when, "pause")
    with pytest.raises(StoreUnavailable):
        beat.after(1)
    for _ in range(5):
        beat.after(1)
    assert beat.store.outcome(asked) == "paused"
    assert [record.event for record in beat.store.audit()].count("paused") == 1
    assert beat.term.next_due is None


def test_the_next_leader_leaves_it_paused() -> None:
    first = paused_leader()
    second = Beat(entry(), store=first.store, clock=first.clock)
    second.take_office(2)
    second.after(60)
    assert second.pushed() == [key(1), key(2), key(3)]
    ask(second, "unpause")
    second.after(1)
    second.after(1)
    assert second.pushed()[3:] == [key(65)]


@pytest.mark.parametrize(
    ("kind", "name", "detail", "answer"),
    [
        ("pause", "nobody", "", "the leader has no entry of this name"),
        ("pause", "e", iso(NOW), "its end has passed"),
        ("pause", "e", "soon", "its end cannot be read: 'soon'"),
        ("unpause", "e", "", "it is not paused"),
        ("a later release's", "e", "", "the leader's release cannot do that: \"a later release's\""),
    ],
)
def test_what_cannot_be_done_is_answered_with_words(kind: RequestKind, name: str, detail: str, answer: str) -> None:
    beat = leader(entry())
    asked = ask(beat, kind, name, detail=detail)
    beat.after(1)
    assert beat.store.outcome(asked) == answer
    assert beat.store.survey().requests == ()


def test_a_second_pause_changes_note_and_end() -> None:
    beat = paused_leader()
    ask(beat, "pause", detail=iso(NOW + 100 * SECOND))
    beat.after(1)
    assert beat.store.paused()["e"].until == NOW + 100 * SECOND


# ---- unpause


def test_unpaused_it_goes_on_from_now_and_says_what_it_left_out() -> None:
    beat = paused_leader()
    beat.after(1000)
    asked = ask(beat, "unpause")
    beat.after(1)
    assert beat.store.outcome(asked) == "unpaused"
    assert rows(beat) == [("skipped", iso(NOW + 4 * SECOND), iso(NOW + 1004 * SECOND), 1000, "paused")]
    beat.after(2)
    assert beat.pushed()[3:] == [key(1005), key(1006)]
    assert beat.store.paused() == {}
    assert [record.event for record in beat.store.audit()][-5:] == ["paused", "skipped", "unpaused", "sent", "sent"]


def test_with_catch_up_what_was_left_out_is_judged_as_after_an_outage() -> None:
    beat = paused_leader(misfire_grace=timedelta(seconds=5))
    beat.after(100)
    ask(beat, "unpause", detail=CATCH_UP)
    beat.after(1)
    beat.after(0)
    assert rows(beat) == [("coalesced", iso(NOW + 4 * SECOND), iso(NOW + 97 * SECOND), 94, "catchup=latest")]
    assert beat.pushed()[3:] == [key(second) for second in range(98, 105)]  # the newest misfired one, and six in grace


def test_unpaused_before_anything_was_left_out_it_goes_on() -> None:
    beat = leader(entry(schedule=every("1h")))
    ask(beat, "pause")
    beat.after(1)
    ask(beat, "unpause")
    beat.after(1)
    assert beat.unrun == []
    beat.after(3600)
    assert len(beat.pushed()) == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["record_unrun", "unpause"])
def test_an_unpause_whose_call_is_lost_is_carried_out_once(when: str, call: str) -> None:
    beat = paused_leader()
    beat.after(10)
    asked = ask(beat, "unpause")
    beat.network.fail(when, call)
    with pytest.raises(StoreUnavailable):
        beat.after(1)
    beat.after(1)
    beat.after(1)
    assert beat.store.outcome(asked) == "unpaused"
    recorded = [
        (record.event, record.count) for record in beat.store.audit() if record.event in ("skipped", "unpaused")
    ]
    assert recorded == [("skipped", 11), ("unpaused", 0)]
    assert beat.pushed()[3:] == [key(15), key(16)]


def test_a_leader_that_dies_between_the_row_and_the_unpause_leaves_the_rest_to_the_next() -> None:
    first = paused_leader()
    first.after(10)
    asked = ask(first, "unpause")
    first.network.fail("before", "unpause")
    with pytest.raises(StoreUnavailable):
        first.after(1)
    second = Beat(entry(), store=first.store, clock=first.clock)
    second.take_office(2)
    second.after(5)
    assert second.store.outcome(asked) == "unpaused"
    counts = [record.count for record in second.store.audit() if record.event == "skipped"]
    assert counts == [11, 5]
    with pytest.raises(Replaced):
        first.after(1)


def test_it_goes_on_by_itself_when_its_time_has_come() -> None:
    beat = paused_leader(until=NOW + 20 * SECOND)
    assert beat.after(10) == 1.0
    assert beat.after(6.5) == 0.5  # it wakes for the end of the pause
    beat.after(0.5)
    assert beat.store.paused() == {}
    assert rows(beat) == [("skipped", iso(NOW + 4 * SECOND), iso(NOW + 20 * SECOND), 17, "paused")]
    beat.after(1)
    assert beat.pushed()[3:] == [key(21)]
    assert [record.detail for record in beat.store.audit() if record.event == "unpaused"] == ["its time has come"]


def test_what_was_in_flight_when_it_was_paused_and_unpaused_is_sent_once() -> None:
    beat = leader(entry())
    beat.network.fail("before", "dispatch", times=3)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            beat.after(0.4 if beat.builder.built else 1)
    ask(beat, "pause")
    ask(beat, "unpause")
    beat.network.fail("before", "dispatch", times=0)
    for _ in range(4):
        beat.after(1)
    pushed = beat.pushed()
    assert len(pushed) == len(set(pushed))
    assert len(beat.agenda._heap) == 1


# ---- a store that is wiped


def test_a_leader_that_lives_through_a_wipe_writes_the_pauses_back() -> None:
    beat = paused_leader()
    beat.store.wipe()
    beat.after(1)
    ask(beat, "cancel")  # the next script finds the store wiped
    beat.after(1)
    beat.term.write_back()
    assert set(beat.store.paused()) == {"e"}
    beat.after(5)
    assert beat.pushed() == []  # the queue was wiped, too, and nothing came since


def test_a_leader_that_takes_office_anew_after_a_wipe_remembers() -> None:
    beat = paused_leader()
    remembered = dict(beat.term.paused)
    beat.store.wipe()
    assert beat.store.restore(beat.term.positions(), epoch=2).name == "DONE"
    office = beat.store.take_office(2)
    assert office is not None
    beat.take_office(2)
    beat.term.begin(office, remembered)
    beat.after(5)
    assert set(beat.store.paused()) == {"e"}
    assert beat.pushed() == []

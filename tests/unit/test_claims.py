"""Open claims, a call at a time: every row of the failure table in `beat.claims`, on a store in memory."""

from __future__ import annotations

import base64
import json
import logging
from contextlib import suppress
from datetime import datetime, timedelta, timezone

import pytest
from network import Network
from scripted import Does, ScriptedBroker

from celery_tzbeat.beat.claims import REFUSALS, Claims, Outdated
from celery_tzbeat.envelopes import Envelope, Parcel
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import Cursor, Occurrence, Policy
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import BATCH, Claim, Claimed, Tracking, Verdict
from celery_tzbeat.testing import ManualClock, MemoryStore

UTC = timezone.utc
SECOND = timedelta(seconds=1)
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)

#: When a message that is always refused is tried, in seconds; at the last time it is given up.
TRIED = [0, 1, 3, 7, 15, 31, 63]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="celery_tzbeat")


class Office:
    """A leader's claims, and what stands around them."""

    def __init__(
        self,
        *script: Does,
        epoch: int = 1,
        clock: ManualClock | None = None,
        store: MemoryStore | None = None,
        broker: ScriptedBroker | None = None,
    ) -> None:
        self.clock = clock or ManualClock(NOW)
        self.store = store or MemoryStore(self.clock)
        self.broker = broker or ScriptedBroker(*script)
        self.epoch = epoch
        self.progress = 0
        self.trusted = True
        self.sent: list[str] = []
        self.dead: list[tuple[str, str]] = []
        self.network = Network(self.store)
        assert self.store.take_office(epoch)
        self.claims = Claims(
            epoch=epoch,
            store=self.network,  # type: ignore[arg-type]
            publisher=self.broker,  # type: ignore[arg-type]
            clock=self.clock,
            progress=self._progressed,
            trusted=lambda: self.trusted,
            sent=lambda occurrence: self.sent.append(occurrence.key),
            dead=lambda occurrence, reason: self.dead.append((occurrence.key, reason)),
        )

    def _progressed(self) -> None:
        self.progress += 1

    def claim(
        self, *names: str, messages: int = 1, payload: bytes | None = None, tracking: Tracking | None = None
    ) -> None:
        """Claim an occurrence of each entry in the store, and owe it."""
        for name in names:
            occurrence = Occurrence(name, self.clock.now())
            claimed = Claimed(occurrence, Bucket.of(occurrence.nominal, SECOND))
            kept = payload or parcel(name, messages, self.clock.now())
            claim = Claim(occurrence, claimed.bucket, Cursor(occurrence.nominal, "rule"), kept, tracking)
            (answer,) = self.store.claim([claim], epoch=self.epoch)
            assert answer.verdict is Verdict.DONE
            self.claims.add(claimed, kept)

    def work(self, *, after: float = 0.0, seconds: float = 10.0) -> bool:
        self.clock.advance(after)
        return self.claims.work(seconds=seconds)

    def successor(self, *script: Does) -> Office:
        """Return the next leader: in office, and it has looked at what stands open."""
        office = Office(*script, epoch=self.epoch + 1, clock=self.clock, store=self.store, broker=self.broker)
        office.claims.take_over(seconds=10)
        return office

    @property
    def open(self) -> list[str]:
        return [found.occurrence.entry for found in self.store.open_occurrences()]

    def events(self, *events: str) -> list[tuple[str, str]]:
        return [(r.event, r.entry) for r in self.store.audit() if r.event in events]


def parcel(name: str, messages: int, now: datetime) -> bytes:
    bodies = [name.encode()] if messages == 1 else [f"{name} {i}".encode() for i in range(messages)]
    headers = {"task": f"proj.{name}"}
    return Parcel(tuple(Envelope(body, None, None, headers, {}, None, "", "q") for body in bodies), now, ()).to_bytes()


def key(name: str) -> str:
    return Occurrence(name, NOW).key


def attempts(office: Office, name: str, *, seconds: int) -> list[int]:
    """Work once a second; return at which seconds the message of an entry was tried."""
    tried = []
    for second in range(seconds + 1):
        before = office.broker.asked.count(name)
        with suppress(StoreUnavailable):
            office.work(after=1 if second else 0)
        tried += [second] * (office.broker.asked.count(name) - before)
    return tried


# ---- when nothing fails


def test_what_is_claimed_is_published_and_confirmed() -> None:
    office = Office()
    office.claim("a", "b")
    assert office.work()
    assert office.broker.bodies == ["a", "b"]
    assert office.sent == [key("a"), key("b")]
    assert office.open == []
    assert office.network.calls == ["confirm"]
    assert len(office.claims) == 0


def test_with_nothing_owed_nobody_is_asked() -> None:
    office = Office()
    assert office.work()
    assert (office.network.calls, office.broker.asked) == ([], [])
    assert office.claims.next_try == float("inf")


def test_an_occurrence_of_several_messages_is_confirmed_when_all_are_sent() -> None:
    office = Office("take", "lose")
    office.claim("a", messages=3)
    with pytest.raises(StoreUnavailable):
        office.work()
    assert office.open == ["a"]
    assert office.work(after=1)
    assert office.broker.bodies == ["a 0", "a 0", "a 1", "a 2"]
    assert office.sent == [key("a")]


# ---- bounds


def test_no_more_than_a_batch_is_published_and_not_confirmed() -> None:
    office = Office()
    names = [f"e{i}" for i in range(2 * BATCH + 50)]
    office.claim(*names)
    assert office.work()
    assert office.network.batches == [BATCH, BATCH, 50]
    assert office.broker.bodies == names
    assert office.open == []


def test_while_the_store_does_not_confirm_nothing_more_is_published() -> None:
    office = Office()
    office.claim(*(f"e{i}" for i in range(BATCH + 50)))
    office.network.fail("before", "confirm", times=10)
    for _ in range(10):
        with pytest.raises(StoreUnavailable):
            office.work(after=0.25)
    assert len(office.broker.taken) == BATCH
    assert office.work(after=0.25)
    assert len(set(office.broker.bodies)) == len(office.broker.bodies) == BATCH + 50
    assert office.open == []


def test_work_ends_when_its_time_is_over_and_confirms_what_it_sent() -> None:
    office = Office()
    office.broker.before = lambda envelope: office.clock.advance(0.1)
    office.claim(*(f"e{i}" for i in range(10)))
    assert not office.work(seconds=0.25)
    assert office.broker.bodies == ["e0", "e1", "e2"]
    assert len(office.sent) == 3
    assert not office.work(seconds=0.0)
    assert len(office.sent) == 4
    while not office.work(seconds=0.25):
        pass
    assert len(office.sent) == 10


def test_each_message_and_each_call_is_progress() -> None:
    office = Office("take", "lose")
    office.claim("a", "b")
    with pytest.raises(StoreUnavailable):
        office.work()
    assert office.progress == 3  # a message taken, one lost, and a confirmation


# ---- the wire breaks: it is not known whether the broker has it


@pytest.mark.parametrize("does", ["lose", "take and lose"])
def test_a_broken_wire_puts_the_message_off_and_sends_it_again_under_its_id(does: Does) -> None:
    office = Office(does)
    office.claim("a")
    with pytest.raises(StoreUnavailable, match="the broker does not answer"):
        office.work()
    assert office.open == ["a"]
    assert office.claims.cut_off
    assert office.claims.next_try == 1.0
    assert office.work(after=0.9)
    assert office.sent == []
    assert office.work(after=0.1)
    assert office.sent == [key("a")]
    assert not office.claims.cut_off
    assert {envelope.body for envelope in office.broker.taken} == {b"a"}
    assert len(office.broker.taken) == (2 if does == "take and lose" else 1)


def test_while_the_wire_is_broken_it_is_tried_after_1_2_4_and_so_on_to_60_seconds() -> None:
    office = Office()
    office.broker.always = "lose"
    office.claim("a")
    assert attempts(office, "a", seconds=250) == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    assert (office.dead, office.open) == ([], ["a"])


def test_what_was_sent_before_the_wire_broke_is_confirmed_at_once() -> None:
    office = Office("take", "take", "lose")
    office.claim("a", "b", "c", "d")
    with pytest.raises(StoreUnavailable):
        office.work()
    assert office.sent == [key("a"), key("b")]
    assert office.open == ["c", "d"]
    assert office.work()  # the next one is tried at once, the broken one later
    assert office.open == ["c"]


def test_a_message_that_breaks_every_wire_holds_up_no_other() -> None:
    office = Office()
    office.broker.before = lambda envelope: setattr(
        office.broker, "always", "lose" if envelope.body == b"poison" else "take"
    )
    office.claim("poison", *(f"e{i}" for i in range(5)))
    attempts(office, "poison", seconds=3)
    assert office.open == ["poison"]


def test_a_clock_that_is_set_back_does_not_put_a_message_off_for_longer() -> None:
    office = Office("lose")
    office.claim("a")
    with pytest.raises(StoreUnavailable):
        office.work()
    office.clock.set_wall(NOW - timedelta(seconds=200))
    assert office.work(after=1)
    assert office.sent == [key("a")]


def test_what_waits_is_told_by_entry() -> None:
    office = Office("lose", "take", "refuse")
    office.claim("a", "b", "c")
    for _ in range(2):
        with suppress(StoreUnavailable):
            office.work()
    office.clock.advance(0.25)
    assert office.claims.waits() == {"a": 0.75, "c": 0.75}


# ---- the broker says no


def test_what_is_refused_five_times_and_for_a_minute_is_a_dead_letter_with_its_message() -> None:
    office = Office()
    office.broker.always = "refuse"
    office.claim("a")
    assert attempts(office, "a", seconds=300) == TRIED
    assert office.dead == [(key("a"), "unroutable")]
    assert (office.open, office.sent) == ([], [])
    letter = json.loads(office.store.dead_letters()[key("a")])
    assert base64.b64decode(letter.pop("message")) == parcel("a", 1, NOW)
    assert {name: value for name, value in letter.items() if value} == {
        "v": 1,
        "key": key("a"),
        "entry": "a",
        "task": "proj.a",
        "nominal": "2026-11-30T12:00:00Z",
        "reason": "unroutable",
        "error": "returned as unroutable",
        "at": "2026-11-30T12:01:03Z",
    }
    assert office.events("dead", "sent") == [("dead", "a")]


def test_what_is_taken_at_the_last_attempt_is_sent() -> None:
    office = Office(*["refuse"] * (len(TRIED) - 1))
    office.claim("a")
    attempts(office, "a", seconds=TRIED[-1])
    assert (office.sent, office.dead) == ([key("a")], [])


def test_a_minute_of_refusals_that_were_few_is_no_dead_letter_yet() -> None:
    office = Office(*["refuse"] * (REFUSALS - 1), "take")
    office.claim("a")
    for _ in range(REFUSALS - 1):
        assert office.work(after=60)
    assert (office.open, office.dead) == (["a"], [])
    assert office.work(after=60)
    assert office.sent == [key("a")]


def test_a_refusal_holds_up_no_other_message() -> None:
    office = Office("take", "refuse")
    office.claim("a", "b", "c")
    assert office.work()
    assert office.broker.bodies == ["a", "c"]
    assert office.open == ["b"]


def test_a_broken_wire_is_no_refusal() -> None:
    office = Office(*["refuse"] * 4, *["lose"] * 4)
    office.claim("a")
    attempts(office, "a", seconds=300)
    assert (office.sent, office.dead) == ([key("a")], [])


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_could_not_be_buried_is_buried_later_and_never_sent_again(when: str) -> None:
    office = Office(*["refuse"] * len(TRIED))  # and then the broker would take it
    office.claim("a")
    office.network.fail(when, "settle")
    attempts(office, "a", seconds=TRIED[-1] - 1)
    with pytest.raises(StoreUnavailable):
        office.work(after=1)
    assert office.work(after=0.25)
    assert (office.broker.taken, office.open) == ([], [])
    assert list(office.store.dead_letters()) == [key("a")]
    assert office.events("dead", "sent") == [("dead", "a")]


def test_a_message_that_cannot_be_read_is_a_dead_letter_and_no_crash() -> None:
    office = Office()
    office.claim("a", payload=b'{"v": 99}')
    office.claim("b")
    attempts(office, "a", seconds=TRIED[-1])
    assert office.sent == [key("b")]
    letter = json.loads(office.store.dead_letters()[key("a")])
    assert "cannot be read" in letter["error"]
    assert letter["task"] == ""
    assert base64.b64decode(letter["message"]) == b'{"v": 99}'


# ---- taking over


def test_taking_over_ends_when_its_time_is_over_and_goes_on_where_it_was() -> None:
    office = Office()
    office.claim(*(f"e{i}" for i in range(25)))
    heir = Office(epoch=2, clock=office.clock, store=office.store, broker=office.broker)
    heir.network.before_each["reclaim"] = lambda: heir.clock.advance(0.1)
    taken = []
    while not heir.claims.take_over(seconds=0.95):
        taken.append(len(heir.claims))
    assert (taken, len(heir.claims)) == ([10, 20], 25)
    assert heir.network.calls.count("open_occurrences") == 1
    assert heir.work()
    assert heir.broker.bodies == [f"e{i}" for i in range(25)]


# ---- confirm


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_confirmation_whose_reply_was_lost_is_asked_again_and_nothing_is_sent_twice(when: str) -> None:
    office = Office()
    office.claim("a", "b")
    office.network.fail(when, "confirm", times=3)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            office.work()
    assert office.work()
    assert office.broker.bodies == ["a", "b"]
    assert office.sent == [key("a"), key("b")]
    assert office.events("sent") == [("sent", "a"), ("sent", "b")]


# ---- a later leader in office


def test_a_replaced_leader_learns_it_at_the_confirmation_and_settles_nothing() -> None:
    office = Office()
    office.claim("a")
    office.network.before["confirm"] = lambda: office.store.take_office(2)
    with pytest.raises(Outdated):
        office.work()
    assert (office.sent, office.open) == ([], ["a"])


def test_a_replaced_leader_buries_nothing() -> None:
    office = Office(*["refuse"] * len(TRIED))
    office.claim("a")
    attempts(office, "a", seconds=TRIED[-1] - 1)
    office.store.take_office(2)
    with pytest.raises(Outdated):
        office.work(after=1)
    assert (office.dead, office.store.dead_letters(), office.open) == ([], {}, ["a"])


def test_a_leader_that_was_frozen_while_publishing_sends_nothing_more() -> None:
    office = Office()
    office.claim("a", "b", "c")

    def freeze(envelope: Envelope) -> None:
        office.trusted = envelope.body != b"b"

    office.broker.before = freeze
    assert not office.work()
    assert office.broker.bodies == ["a", "b"]
    assert office.open == ["c"]  # in trust again under the same epoch, it goes on
    office.trusted = True
    office.broker.before = lambda envelope: None
    assert office.work()
    assert office.broker.bodies == ["a", "b", "c"]


# ---- a store that was wiped


def test_after_a_wipe_what_is_owed_is_sent_and_nothing_is_confirmed() -> None:
    office = Office()
    office.claim("a", "b")
    office.store.wipe()
    assert office.work()
    assert office.broker.bodies == ["a", "b"]
    assert office.sent == [key("a"), key("b")]
    assert (office.store.audit(), office.store.last()) == ([], {})
    assert office.work()
    assert len(office.claims) == 0


# ---- taking over


@pytest.mark.parametrize("does", ["lose", "take and lose"])
def test_the_next_leader_sends_the_stored_message_of_an_open_claim(does: Does) -> None:
    first = Office(does)
    first.claim("a")
    with pytest.raises(StoreUnavailable):
        first.work()
    second = first.successor()
    assert second.network.calls == ["open_occurrences", "reclaim"]
    assert second.work()
    assert set(second.broker.bodies) == {"a"}
    assert second.sent == [key("a")]
    assert second.open == []
    assert second.events("reclaimed", "sent") == [("reclaimed", "a"), ("sent", "a")]
    with pytest.raises(Outdated):
        first.work(after=1)


def test_a_leader_takes_over_its_own_claim_whose_reply_was_lost() -> None:
    office = Office()
    occurrence = Occurrence("a", NOW)
    claim = Claim(occurrence, Bucket.of(NOW, SECOND), Cursor(NOW, "rule"), parcel("a", 1, NOW))
    office.network.fail("after", "claim")
    with pytest.raises(StoreUnavailable):
        office.network.claim([claim], epoch=1)
    office.claims.take_over(seconds=10)
    assert "reclaim" not in office.network.calls
    assert office.work()
    assert office.sent == [key("a")]


@pytest.mark.parametrize(
    ("when", "name"), [("before", "open_occurrences"), ("before", "reclaim"), ("after", "reclaim")]
)
def test_taking_over_goes_on_after_a_lost_call_and_owes_each_once(when: str, name: str) -> None:
    first = Office()
    first.claim("a", "b")
    second = Office(epoch=2, clock=first.clock, store=first.store, broker=first.broker)
    second.network.fail(when, name)
    with pytest.raises(StoreUnavailable):
        second.claims.take_over(seconds=10)
    second.claims.take_over(seconds=10)
    second.claims.take_over(seconds=10)
    assert second.work()
    assert second.broker.bodies == ["a", "b"]
    assert sorted(second.sent) == [key("a"), key("b")]


def test_what_is_published_and_not_confirmed_is_not_taken_over_again() -> None:
    office = Office()
    office.claim("a")
    office.network.fail("before", "confirm")
    with pytest.raises(StoreUnavailable):
        office.work()
    office.claims.take_over(seconds=10)
    assert office.work()
    assert office.broker.bodies == ["a"]


def test_a_replaced_leader_takes_nothing_over() -> None:
    first = Office()
    first.claim("a")
    second = Office(epoch=2, clock=first.clock, store=first.store, broker=first.broker)
    first.store.take_office(3)
    second.claims.take_over(seconds=10)
    assert len(second.claims) == 0
    assert first.events("reclaimed") == []


def test_a_leader_between_claim_and_death_costs_one_message() -> None:
    first = Office()
    first.claim("a")
    second = first.successor()
    second.work()
    assert second.broker.bodies == ["a"]


def test_a_leader_that_dies_after_publishing_costs_a_copy() -> None:
    first = Office()
    first.claim("a")
    first.network.fail("before", "confirm")
    with pytest.raises(StoreUnavailable):
        first.work()
    second = first.successor()
    second.work()
    assert second.broker.bodies == ["a", "a"]


def test_a_leader_that_dies_after_confirming_leaves_nothing() -> None:
    first = Office()
    first.claim("a")
    first.network.fail("after", "confirm")
    with pytest.raises(StoreUnavailable):
        first.work()
    second = first.successor()
    second.work()
    assert second.broker.bodies == ["a"]


# ---- a signal in the middle


def test_a_signal_that_ends_the_process_passes_through() -> None:
    """Celery's handler raises SystemExit wherever it is: a failure of the store afterwards must not swallow it."""
    office = Office()
    office.claim("a", "b")

    def end(envelope: Envelope) -> None:
        if envelope.body == b"b":
            office.store.take_office(2)
            raise SystemExit

    office.broker.before = end
    office.network.fail("before", "confirm")
    with pytest.raises(SystemExit):
        office.work()


# ---- at most once


AT_MOST_ONCE = Tracking(Policy(delivery="at_most_once"))


@pytest.mark.parametrize("when", ["", "before", "after"])
def test_what_a_dead_leader_may_have_sent_is_not_sent_again_but_dead(when: str) -> None:
    first = Office()
    first.claim("a", tracking=AT_MOST_ONCE)
    first.claim("b", tracking=Tracking(Policy()))
    second = Office(epoch=2, clock=first.clock, store=first.store)
    if when:
        second.network.fail(when, "settle")
        with pytest.raises(StoreUnavailable):
            second.claims.take_over(seconds=60)
    second.claims.take_over(seconds=60)
    second.work()
    assert second.broker.bodies == ["b"]
    assert second.dead == ([(key("a"), "doubtful")] if when != "after" else [])
    letter = json.loads(second.store.dead_letters()[key("a")])
    assert (letter["reason"], base64.b64decode(letter["message"])) == ("doubtful", parcel("a", 1, NOW))
    assert [(run.key, run.state) for run in second.store.runs()] == [(key("b"), "published")]


def test_a_claim_of_ones_own_whose_reply_was_lost_is_sent_at_most_once_or_not() -> None:
    office = Office()
    occurrence = Occurrence("a", NOW)
    bucket = Bucket.of(NOW, SECOND)
    claim = Claim(occurrence, bucket, Cursor(NOW, "rule"), parcel("a", 1, NOW), AT_MOST_ONCE)
    office.store.claim([claim], epoch=office.epoch)  # and the reply is lost: it was never sent
    office.claims.take_over(seconds=60)
    office.work()
    assert len(office.broker.taken) == 1
    assert office.store.dead_letters() == {}

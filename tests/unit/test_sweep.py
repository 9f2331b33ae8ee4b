"""The leader's sweep on a store in memory: every row of its failure table, and what it costs while nothing waits."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from network import Network
from scripted import ScriptedBroker

from celery_tzbeat.beat.agenda import Agenda
from celery_tzbeat.beat.dispatch import BuildFailed, Message
from celery_tzbeat.beat.events import Events
from celery_tzbeat.beat.ledger import Replaced
from celery_tzbeat.beat.paths import SameServerPath
from celery_tzbeat.beat.sweep import SWEEPING, end_of
from celery_tzbeat.beat.term import Term
from celery_tzbeat.deliveries import DeadLetter, Ticket, WorkerPresence
from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import Cursor, Entry, Occurrence, Policy, Unrun
from celery_tzbeat.schedules import at, every
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import BATCH, Burial, Command, Request, RequestKind, Run
from celery_tzbeat.store.runs import Beat, End, EndState, Order, Start
from celery_tzbeat.testing import ManualClock, MemoryRuns, MemoryStore

UTC = timezone.utc
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LEASE = timedelta(seconds=3)

#: What an early-acknowledged run with a lease of 3 s is dispatched again by.
REDISPATCH = {"run_lease": LEASE, "on_abandoned": "redispatch"}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="celery_tzbeat")


def ticket_of(entry: Entry, occurrence: Occurrence, epoch: int) -> Ticket:
    bucket = Bucket.of(occurrence.nominal, entry.schedule.shortest_gap)
    return Ticket(
        "proj/0",
        occurrence.key,
        entry.name,
        occurrence.nominal,
        epoch,
        1,
        bucket.number,
        bucket.field,
        entry.policy,
    )


class Builder:
    """Builds messages as kombu pushes them."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.built: list[str] = []

    def build(self, entry: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        self.built.append(occurrence.key)
        if entry.name in self.fails:
            raise BuildFailed("ValueError: no")
        ticket = ticket_of(entry, occurrence, epoch)
        form = {
            "body": occurrence.key,
            "content-type": "text/plain",
            "content-encoding": "utf-8",
            "headers": {
                "task": entry.task,
                "id": occurrence.task_id("proj/0"),
                "retries": 0,
                "meta": {"tzbeat": ticket.to_header()},
            },
            "properties": {"delivery_info": {"exchange": "", "routing_key": "q"}, "delivery_tag": "t"},
        }
        push = Command("LPUSH", (b"q", json.dumps(form).encode()), (b"q",))
        return Message((push,), Bucket(ticket.number, ticket.field))


class Scene:
    """A leader on the same server, and workers."""

    def __init__(self, *entries: Entry) -> None:
        self.clock = ManualClock(NOW)
        self.store = MemoryStore(self.clock)
        self.runs = MemoryRuns(self.store)
        self.network = Network(self.store)
        self.builder = Builder()
        self.broker = ScriptedBroker()
        self.entries = {entry.name: entry for entry in entries}
        self.unrun: list[Unrun] = []
        self.dead: list[tuple[str, str]] = []
        self.lost: list[str] = []
        self.tokens = 0
        self.epoch = 0
        self.lead()

    def lead(self) -> Term:
        """Let the next leader take office."""
        self.epoch += 1
        office = self.store.take_office(self.epoch)
        assert office is not None
        self.term = Term(
            epoch=self.epoch,
            store=self.network,  # type: ignore[arg-type]
            agenda=Agenda(self.entries, "2026c"),
            path=SameServerPath(self.builder, self.network),  # type: ignore[arg-type]
            publisher=self.broker,  # type: ignore[arg-type]
            clock=self.clock,
            retention=timedelta(hours=24),
            max_skew=timedelta(seconds=300),
            progress=lambda: None,
            trusted=lambda: True,
            tracks=lambda: True,
            events=Events(
                sent=lambda _: None,
                unrun=self.unrun.append,
                dead=lambda occurrence, reason: self.dead.append((occurrence.key, reason)),
                lost=lambda occurrence: self.lost.append(occurrence.key),
            ),
        )
        self.term.begin(office)
        return self.term

    def ticks(self, seconds: float, *, beating: tuple[Beat, ...] = ()) -> None:
        """Let time pass, a tick each second; failed calls are what a ticker makes of them."""
        for _ in range(round(seconds)):
            self.clock.advance(1)
            if beating:
                self.runs.heartbeat(beating)
            self.tick()

    def tick(self) -> None:
        try:
            self.term.work()
        except StoreUnavailable:
            self.term.lose_sight()

    def message(self) -> bytes:
        """Take the oldest message off the queue; else the oldest that the publisher sent."""
        if self.store.queues["q"]:
            return self.store.queues["q"].pop(0)
        return Parcel((self.broker.taken.pop(0),), NOW, ()).to_bytes()

    def start(self, *, acks_late: bool = False) -> Beat:
        """Start the next message's run; return its heartbeat."""
        payload = self.message()
        headers = Parcel.from_bytes(payload).run.headers
        ticket = Ticket.from_headers(headers)
        assert ticket is not None
        self.tokens += 1
        order = Order(ticket.dispatch, headers["retries"])
        start = Start(ticket, order, f"token{self.tokens}", "w", acks_late, payload)
        assert self.runs.start(start).gate.name == "WON"
        return Beat(ticket, order, start.token, "w", acks_late, payload)

    def end(self, run: Beat, state: EndState = "done") -> str:
        return self.runs.end([End(run.ticket, run.order, run.token, state)])[0].name

    def states(self) -> list[str]:
        return sorted(run.state for run in self.store.runs())

    def letters(self) -> list[DeadLetter]:
        return [DeadLetter.from_json(text) for text in self.store.dead_letters().values()]

    def ask(self, kind: RequestKind, key: str, *, expires: datetime = NOW + timedelta(hours=1)) -> str:
        return self.store.ask(Request(kind, key, "me", "because", expires))

    def events(self, *names: str) -> list[str]:
        return [record.event for record in self.store.audit() if record.event in names]


def entry(name: str = "e", schedule: Any = None, **policy: Any) -> Entry:
    return Entry(name, "proj.task", schedule or at(NOW + 2 * SECOND), policy=Policy(**policy))


def key(second: int = 2, name: str = "e") -> str:
    return Occurrence(name, NOW + second * SECOND).key


def running(**policy: Any) -> tuple[Scene, Beat]:
    """Return a leader that has seen the store for long, and a run that has just begun."""
    scene = Scene(entry(schedule=at(NOW + 60 * SECOND), **policy))
    scene.ticks(60)
    return scene, scene.start()


# ---- what it costs


def test_while_nothing_waits_it_is_one_call_a_second() -> None:
    scene = Scene(entry(schedule=at(NOW + timedelta(hours=1))))
    scene.ticks(5)
    scene.network.calls.clear()
    for _ in range(100):
        scene.clock.advance(0.1)
        scene.tick()
    assert scene.network.calls == ["survey"] * 10


def test_while_runs_live_it_is_one_call_a_second_too() -> None:
    scene, run = running(**REDISPATCH)
    scene.network.calls.clear()
    scene.ticks(10, beating=(run,))
    assert scene.network.calls == ["survey"] * 10


def test_it_does_no_more_than_a_batch_a_time_and_goes_on_soon() -> None:
    scene = Scene(*(entry(f"e{n}", start_within=SECOND) for n in range(BATCH + 50)))
    scene.ticks(2)
    scene.clock.advance(5)
    scene.tick()
    assert len(scene.lost) == BATCH
    assert scene.term.work() <= SWEEPING
    scene.clock.advance(SWEEPING)
    scene.tick()
    assert len(scene.lost) == BATCH + 50


# ---- lapsed runs


def test_a_run_whose_worker_died_is_dispatched_again_after_its_lease() -> None:
    scene, run = running(**REDISPATCH)
    scene.ticks(5)
    assert scene.events("abandoned", "redispatched") == ["abandoned", "redispatched"]
    again = scene.start()
    assert (again.ticket.key, again.order) == (run.ticket.key, Order(2, 0))
    assert Parcel.from_bytes(again.payload).run.headers["id"] == Parcel.from_bytes(run.payload).run.headers["id"]
    assert scene.end(again) == "DONE"
    assert (scene.states(), scene.letters()) == ([], [])


def test_a_run_that_beats_is_left_alone() -> None:
    scene, run = running(**REDISPATCH)
    scene.ticks(100, beating=(run,))
    assert scene.states() == ["running"]


def test_a_new_leader_waits_until_it_has_seen_the_store_for_a_lease_and_two_heartbeats() -> None:
    scene, _ = running(**REDISPATCH)
    scene.clock.advance(60)
    scene.lead()
    scene.ticks(4)
    assert scene.states() == ["running"]
    scene.ticks(2)
    assert scene.events("redispatched") == ["redispatched"]


@pytest.mark.parametrize("call", ["survey", "dispatch"])
def test_after_any_failed_call_nothing_is_dead_for_a_lease_and_two_heartbeats(call: str) -> None:
    scene, _ = running(**REDISPATCH)
    other = Entry("other", "proj.task", every("1s"))
    scene.entries["other"] = other
    scene.lead()
    scene.ticks(2)
    scene.network.fail("before", call)
    scene.ticks(5)
    assert scene.states().count("running") == 1
    scene.ticks(3)
    assert "redispatched" in scene.events("redispatched")


def test_a_jump_of_the_servers_clock_makes_nothing_dead() -> None:
    scene, run = running(**REDISPATCH)
    ahead = ManualClock(scene.clock.now())
    scene.store._clock = ahead
    ahead.advance(3600)
    for _ in range(8):
        ahead.advance(1)
        scene.ticks(1, beating=(run,))
    assert scene.states() == ["running"]


def test_another_server_makes_nothing_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, run = running(**REDISPATCH)
    scene.clock.advance(4)
    monkeypatch.setattr(type(scene.store), "lineage", lambda self: "another master")
    scene.tick()  # it looks, since something lapsed
    scene.ticks(5, beating=(run,))
    assert scene.states() == ["running"]


def test_a_run_that_beats_between_the_survey_and_the_script_lives() -> None:
    scene, run = running(**REDISPATCH)
    scene.network.before["abandon"] = lambda: scene.runs.heartbeat([run])
    scene.ticks(4)
    assert "abandon" in scene.network.calls
    assert scene.states() == ["running"]


def test_a_run_that_ends_between_the_survey_and_the_script_is_done() -> None:
    scene, run = running(**REDISPATCH)
    scene.network.before["abandon"] = lambda: scene.end(run)
    scene.ticks(10)
    assert scene.events("abandoned", "redispatched", "done") == ["done"]


# ---- each call lost


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["survey", "abandon", "redispatch", "confirm", "lineage", "open_occurrences"])
def test_a_call_that_is_lost_is_made_again_and_the_run_is_dispatched_once(call: str, when: str) -> None:
    scene, _ = running(**REDISPATCH)
    scene.network.fail(when, call, 2)
    scene.ticks(30)
    assert len(scene.broker.taken) == 1
    assert scene.events("redispatched") == ["redispatched"]
    assert scene.end(scene.start()) == "DONE"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["abandon", "redispatch", "confirm"])
def test_a_leader_that_dies_over_a_call_leaves_it_to_the_next(call: str, when: str) -> None:
    scene, _ = running(**REDISPATCH)
    scene.network.fail(when, call)
    for _ in range(10):
        scene.clock.advance(1)
        before = scene.network.fails[when, call]
        with suppress(StoreUnavailable):
            scene.term.work()
        if not scene.network.fails[when, call] and before:
            break
    scene.lead()
    scene.ticks(30)
    assert {envelope.headers["meta"]["tzbeat"]["dispatch"] for envelope in scene.broker.taken} == {2}
    assert len(scene.broker.taken) <= 2  # one task id, and the gate takes one of them
    assert scene.events("redispatched") == ["redispatched"]


@pytest.mark.parametrize("call", ["abandon", "redispatch"])
def test_a_leader_that_was_replaced_changes_nothing(call: str) -> None:
    scene, _ = running(**REDISPATCH)
    scene.network.before[call] = lambda: scene.store.take_office(99)
    with pytest.raises(Replaced):
        scene.ticks(10)
    assert scene.broker.taken == []


# ---- abandoned: the policy's affair


def run_with(policy: Policy, *, acks_late: bool = False, deliveries: int = 1) -> Run:
    return Run(
        key="k",
        entry="e",
        nominal=NOW,
        state="abandoned",
        token="t",
        worker="w",
        order=(1, 0),
        starts=deliveries,
        deliveries=deliveries,
        deadline=NOW,
        acks_late=acks_late,
        policy=policy,
        payload=b"",
        bucket=Bucket(0, 0),
    )


@pytest.mark.parametrize(
    ("policy", "acks_late", "deliveries", "reason"),
    [
        ({}, False, 1, "abandoned"),
        ({}, True, 1, ""),
        ({}, True, 4, ""),
        ({}, True, 5, "deliveries"),
        ({"on_abandoned": "redispatch"}, False, 1, ""),
        ({"on_abandoned": "redispatch"}, False, 5, "deliveries"),
        ({"on_abandoned": "redispatch", "max_deliveries": 1}, True, 1, "deliveries"),
        ({"on_abandoned": "dead_letter"}, True, 1, "abandoned"),
        ({"delivery": "at_most_once"}, True, 1, "abandoned"),
    ],
)
def test_the_policy_says_what_becomes_of_an_abandoned_run(
    policy: dict[str, Any], acks_late: bool, deliveries: int, reason: str
) -> None:
    assert end_of(run_with(Policy(**policy), acks_late=acks_late, deliveries=deliveries))[0] == reason


@pytest.mark.parametrize("policy", [{}, {"delivery": "at_most_once"}, {"on_abandoned": "dead_letter"}])
def test_a_start_that_was_given_back_and_whose_message_is_gone_is_sent_again_whatever_the_policy(
    policy: dict[str, Any],
) -> None:
    run = replace(run_with(Policy(**policy), acks_late=False, deliveries=0), unrun=True)
    assert end_of(run) == ("", "")


def test_a_run_of_a_poisonous_task_is_a_dead_letter_after_max_deliveries() -> None:
    scene, run = running(max_deliveries=3, **REDISPATCH)
    for _ in range(2):
        scene.end(run, "abandoned")
        scene.ticks(3)
        run = scene.start()
    scene.end(run, "abandoned")
    scene.ticks(3)
    (letter,) = scene.letters()
    assert (letter.reason, letter.message, letter.task) == ("deliveries", run.payload, "proj.task")
    assert scene.dead == [(run.ticket.key, "deliveries")]
    assert scene.states() == []


def test_a_message_that_cannot_be_read_any_more_is_a_dead_letter() -> None:
    scene, run = running(**REDISPATCH)
    garbage = Beat(run.ticket, run.order, run.token, "w", False, b"garbage")
    scene.store.wipe()
    scene.lead()
    scene.runs.heartbeat([garbage])  # written anew from what the worker has
    scene.ticks(10)
    (letter,) = scene.letters()
    assert "cannot be read" in letter.error
    assert letter.message == b"garbage"


def test_an_ordinary_message_behind_the_gate_is_left_to_its_broker() -> None:
    scene = Scene()
    scene.ticks(60)
    ticket = Ticket("proj/0", "order-42", "", None, 0, 1, 1, 2, Policy(run_lease=LEASE))
    start = Start(ticket, Order(1, 0), "t", "w", True, b"{}")
    scene.runs.start(start)
    scene.ticks(6)
    assert (scene.states(), scene.broker.taken, scene.letters()) == ([], [], [])
    assert scene.runs.start(Start(ticket, Order(1, 0), "t2", "w", True, b"{}")).gate.name == "WON"


# ---- late


def test_what_nobody_started_within_start_within_is_lost() -> None:
    scene = Scene(entry(start_within=timedelta(seconds=10)))
    scene.ticks(11)
    assert scene.lost == []
    scene.ticks(2)
    assert scene.lost == [key()]
    assert (scene.states(), scene.events("lost")) == ([], ["lost"])
    assert scene.end(scene.start()) == "DONE"  # should it still come, it runs


def test_what_starts_between_the_survey_and_the_script_is_not_lost() -> None:
    scene = Scene(entry(start_within=timedelta(seconds=5), run_lease=timedelta(hours=1)))
    scene.network.before["settle_run"] = scene.start
    scene.ticks(20)
    assert (scene.states(), scene.lost) == (["running"], [])


# ---- requests


def dead_scene() -> tuple[Scene, Beat]:
    scene, run = running()
    scene.end(run, "abandoned")
    scene.ticks(2)
    assert len(scene.letters()) == 1
    return scene, run


def test_a_request_is_carried_out_once_and_answered() -> None:
    scene, run = dead_scene()
    id_ = scene.ask("replay", run.ticket.key)
    scene.ticks(3)
    assert (scene.store.outcome(id_) or "").startswith("replayed")
    again = scene.start()
    assert again.order == Order(2, 0)
    assert Parcel.from_bytes(again.payload).run.headers["id"] != Parcel.from_bytes(run.payload).run.headers["id"]
    assert Parcel.from_bytes(again.payload).run.body == Parcel.from_bytes(run.payload).run.body
    scene.end(again)
    scene.ticks(5)
    assert (scene.states(), scene.letters(), scene.broker.taken) == ([], [], [])


@pytest.mark.parametrize(
    ("kind", "key_", "words"),
    [
        ("cancel", "nothing@2026", "nothing of this key is open"),
        ("replay", "nothing@2026", "there is no dead letter of this key"),
        ("discard", "nothing@2026", "there is no dead letter of this key"),
    ],
)
def test_what_is_not_there_is_answered_so(kind: RequestKind, key_: str, words: str) -> None:
    scene = Scene()
    id_ = scene.ask(kind, key_)
    scene.ticks(2)
    assert scene.store.outcome(id_) == words


def test_an_expired_request_is_not_carried_out() -> None:
    scene, run = dead_scene()
    id_ = scene.ask("discard", run.ticket.key, expires=scene.clock.now())
    scene.ticks(2)
    assert scene.store.outcome(id_) == "expired"
    assert len(scene.letters()) == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "call"), [("replay", "replay"), ("replay", "dead_letter"), ("discard", "discard"), ("replay", "confirm")]
)
def test_a_request_whose_call_is_lost_is_carried_out_once(kind: RequestKind, call: str, when: str) -> None:
    scene, run = dead_scene()
    id_ = scene.ask(kind, run.ticket.key)
    scene.network.fail(when, call)
    scene.ticks(10)
    assert scene.store.outcome(id_) is not None
    assert scene.letters() == []
    assert len(scene.broker.taken) == (1 if kind == "replay" else 0)


def test_a_letter_without_a_message_is_replayed_by_building_anew() -> None:
    scene = Scene(entry(schedule=at(NOW + 2 * SECOND)))
    scene.builder.fails.add("e")
    scene.ticks(60)
    (letter,) = scene.letters()
    assert (letter.reason, letter.message) == ("build", b"")
    refused = scene.ask("replay", letter.key)
    scene.ticks(2)
    assert "still cannot be built" in (scene.store.outcome(refused) or "")
    scene.builder.fails.clear()
    scene.ask("replay", letter.key)
    scene.ticks(2)
    again = scene.start()
    assert (again.ticket.key, again.order) == (letter.key, Order(2, 0))
    assert scene.letters() == []


def test_a_letter_that_cannot_be_read_is_refused_in_words() -> None:
    scene = Scene(entry())
    nominal = NOW + SECOND
    burial = Burial(Occurrence("e", nominal), Cursor(nominal, "r"), Bucket(0, 0), "build", '{"entry": "e"}')
    scene.store.bury(burial, epoch=scene.epoch)
    id_ = scene.ask("replay", Occurrence("e", nominal).key)
    scene.ticks(2)
    assert "cannot be read" in (scene.store.outcome(id_) or "")


def test_a_published_one_is_withdrawn_and_a_run_is_asked_to_stop() -> None:
    scene = Scene(entry("a"), entry("b"))
    scene.ticks(2)
    run = scene.start()
    other = next(found.key for found in scene.store.runs() if found.key != run.ticket.key)
    ids = [scene.ask("cancel", run.ticket.key), scene.ask("cancel", other)]
    scene.ticks(2)
    assert [scene.store.outcome(id_) for id_ in ids] == ["asked to stop", "withdrawn"]
    assert scene.runs.heartbeat([run])[0].name == "CANCEL"


# ---- overlap


def overlapping(policy: str, **more: Any) -> tuple[Scene, Beat]:
    """Return a leader whose entry is due each second, with a run of its first occurrence."""
    scene = Scene(entry(schedule=every("1s"), overlap=policy, run_lease=timedelta(hours=1), **more))
    scene.tick()
    scene.ticks(1)
    return scene, scene.start()


def test_skip_records_what_does_not_run_and_builds_nothing() -> None:
    scene, run = overlapping("skip")
    scene.ticks(3)
    assert [(row.event, row.reason, row.count) for row in scene.unrun] == [("skipped", "overlap", 1)] * 3
    assert scene.builder.built == [run.ticket.key]
    scene.end(run)
    scene.ticks(1)
    assert scene.start().ticket.key == key(5)


def test_buffer_one_keeps_the_newest_waiting() -> None:
    scene, run = overlapping("buffer_one")
    scene.ticks(3)
    assert scene.states() == ["running", "waiting"]
    assert scene.events("coalesced") == ["coalesced"] * 2
    assert scene.builder.built == [run.ticket.key]
    scene.end(run)
    scene.tick()
    scene.ticks(1)
    assert scene.start().ticket.key in (key(4), key(5))


def test_cancel_other_stops_the_run_and_waits_for_its_end() -> None:
    scene, run = overlapping("cancel_other", kill_after=timedelta(seconds=60))
    scene.ticks(2)
    assert scene.runs.heartbeat([run])[0].name == "CANCEL"
    assert scene.store.queues["q"] == []
    scene.end(run, "revoked")
    scene.ticks(1)
    assert scene.store.queues["q"] != []


def test_what_waits_and_cannot_be_built_is_a_dead_letter_at_the_fifth_failure() -> None:
    scene, run = overlapping("buffer_one")
    scene.entries["e"] = entry(schedule=at(NOW), overlap="buffer_one")  # nothing more is due
    scene.ticks(1)
    scene.lead()
    scene.tick()
    scene.builder.fails.add("e")
    scene.end(run)
    scene.ticks(6)
    (letter,) = scene.letters()
    assert (letter.reason, letter.key) == ("build", key(2))
    assert scene.states() == []


def test_what_waits_for_an_entry_that_is_not_listed_waits_on() -> None:
    scene, run = overlapping("buffer_one")
    scene.ticks(1)
    listed, scene.entries = scene.entries, {}
    scene.lead()
    scene.end(run)
    scene.ticks(3)
    assert scene.states() == ["waiting"]
    scene.entries = listed
    scene.lead()
    scene.ticks(2)
    assert scene.store.queues["q"] != []


def test_without_a_worker_half_it_says_so_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="celery_tzbeat")
    scene = Scene(entry(schedule=at(NOW + timedelta(hours=1)), overlap="skip"))
    scene.ticks(150)

    def warnings() -> int:
        return sum(getattr(record, "action", "") == "overlap_without_workers" for record in caplog.records)

    assert warnings() == 3
    scene.runs.attend(WorkerPresence("w", "w@h", "prefork", "0", 0))
    scene.ticks(1)
    before = warnings()
    scene.ticks(50)
    assert warnings() == before

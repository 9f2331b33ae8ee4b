"""One beat's tick, a step at a time: when it may lead, when it gives way, and what it says of itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from scripted import ScriptedBroker

from celery_tzbeat.beat.agenda import Agenda
from celery_tzbeat.beat.dispatch import Message
from celery_tzbeat.beat.events import Events
from celery_tzbeat.beat.paths import ClaimsPath, Path, SameServerPath
from celery_tzbeat.beat.ticker import LONGEST_WAIT, RETRY, Changes, Identity, Ticker
from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.envelopes import Envelope
from celery_tzbeat.errors import BrokerUnavailable, StoreDamaged, StoreUnavailable
from celery_tzbeat.leases.elector import Elector
from celery_tzbeat.model import Cursor, Entry, Occurrence, Policy, Presence
from celery_tzbeat.schedules import every
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import SCHEMA_WRITTEN, Command, Request
from celery_tzbeat.store.runs import Order, Start
from celery_tzbeat.testing import ManualClock, MemoryLeases, MemoryRuns, MemoryStore

UTC = timezone.utc
SECOND = timedelta(seconds=1)
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
LEASE = 10.0
MAX_SKEW = timedelta(seconds=300)
APP = Celery("proj", set_as_current=False)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="celery_tzbeat")


class World:
    """A server, and beats on it."""

    def __init__(self) -> None:
        self.server_clock = ManualClock(NOW)
        self.store = MemoryStore(self.server_clock, max_skew=MAX_SKEW)
        self.leases = MemoryLeases(self.server_clock, timedelta(seconds=LEASE))
        self.beats: list[Beat] = []
        self.two_servers = False

    def beat(self, name: str = "one", **options: Any) -> Beat:
        self.beats.append(Beat(self, name, **options))
        return self.beats[-1]

    def advance(self, seconds: float) -> None:
        self.server_clock.advance(seconds)
        for beat in self.beats:
            beat.clock.advance(seconds)

    def pushed(self) -> list[str]:
        return [payload.decode() for payload in self.store.queues["q"]]


class Beat:
    """A ticker with an elector that is stepped by hand, and a way to the store that can be cut."""

    def __init__(self, world: World, name: str, *, skew: float = 0.0, entries: tuple[Entry, ...] | None = None) -> None:
        self.world = world
        self.down: bool | str = False
        self.broker_down = False
        self.cannot_declare = False
        self.broker = ScriptedBroker()
        self.probes = 0  # how often the beat asked whether broker and store are the same
        self.calls: list[str] = []
        self.changes: list[tuple[str, object]] = []
        self.clock = ManualClock(world.server_clock.now() + timedelta(seconds=skew))
        self.elector = Elector(
            world.leases,
            holder=name,
            lease=timedelta(seconds=LEASE),
            clock=self.clock,
            on_change=lambda: None,
            max_skew=MAX_SKEW,
        )
        self.same_server = SameServerPath(self, self)  # type: ignore[arg-type]
        self.by_claims = ClaimsPath(APP, self, self, self.clock)  # type: ignore[arg-type]
        entries = entries if entries is not None else (Entry("e", "proj.task", every("10s")),)
        self.ticker = Ticker(
            identity=Identity(name, f"host of {name}", 7, "0.1", "fingerprint", embedded=True),
            store=self,  # type: ignore[arg-type]
            elector=self.elector,
            agenda=Agenda({e.name: e for e in entries}, "2026c"),
            publisher=self.broker,  # type: ignore[arg-type]
            clock=self.clock,
            lease=timedelta(seconds=LEASE),
            retention=timedelta(days=1),
            max_skew=MAX_SKEW,
            choose_path=self._choose_path,
            events=Events(sent=lambda _: None, unrun=lambda _: None, dead=lambda *_: None, lost=lambda _: None),
            changes=Changes(
                leading=lambda epoch: self.changes.append(("leads", epoch)),
                standing_by=lambda why: self.changes.append(("stands by", why)),
            ),
        )

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.world.store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if self.down:
                raise StoreUnavailable(self.down if isinstance(self.down, str) else "connection refused")
            return method(*args, **kwargs)

        return call

    def _choose_path(self) -> Path:
        self.probes += 1
        if self.broker_down:
            raise BrokerUnavailable("the broker does not answer")
        return self.by_claims if self.world.two_servers else self.same_server

    def build(self, given: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        if self.cannot_declare:
            raise BrokerUnavailable("the broker does not answer")
        bucket = Bucket.of(occurrence.nominal, given.schedule.shortest_gap)
        body = occurrence.key.encode()
        if self.world.two_servers:
            return Message((Envelope(body, None, None, {}, {}, None, "", "q"),), bucket)
        return Message((Command("LPUSH", (b"q", body), (b"q",)),), bucket)

    def step(self) -> float:
        """Step the tick, then the elector, then the tick again, as their threads would."""
        self.ticker.step()
        self.elector.step()
        return self.ticker.step()

    @property
    def leads(self) -> bool:
        return self.elector.lease() is not None

    @property
    def presence(self) -> Presence:
        return next(p for p in self.world.store.beats() if p.beat == self.elector.holder)


def key(second: int) -> str:
    return Occurrence("e", NOW + second * SECOND).key


def run(world: World, seconds: int) -> None:
    for _ in range(seconds):
        world.advance(1)
        for beat in world.beats:
            beat.step()


# ---- leader and standby


def test_making_a_ticker_asks_nobody() -> None:
    beat = World().beat()
    assert (beat.calls, beat.probes) == ([], 0)
    assert not beat.leads


def test_it_asks_for_the_lease_only_after_it_has_seen_the_store() -> None:
    beat = World().beat()
    beat.elector.step()
    assert not beat.leads
    beat.step()
    assert beat.leads
    asked = [call for call in beat.calls if call not in ("attend", "tell_entries", "beats")]
    assert asked == ["workers_lived", "take_office", "place", "survey", "lineage", "open_occurrences"]
    assert beat.calls[0] == "attend"


def test_a_leader_sends_what_is_due() -> None:
    world = World()
    beat = world.beat()
    beat.step()
    run(world, 20)
    assert world.pushed() == [key(10), key(20)]
    assert [kind for kind, _ in beat.changes] == ["leads"]


def test_a_standby_attends_and_sends_nothing() -> None:
    world = World()
    one, two = world.beat("one"), world.beat("two")
    one.step()
    two.step()
    run(world, 30)
    assert (one.leads, two.leads) == (True, False)
    assert set(two.calls) == {"attend"}
    assert len(two.calls) in range(7, 12)  # each third of the lease
    assert two.changes == []
    assert world.pushed() == [key(10), key(20), key(30)]


def test_a_step_says_how_long_to_wait_at_most_a_second() -> None:
    world = World()
    beat = world.beat()
    beat.step()
    assert beat.ticker.step() == LONGEST_WAIT
    world.advance(9.75)
    beat.step()
    assert beat.ticker.step() == 0.25


def test_a_beat_without_entries_leads_and_has_nothing_to_do() -> None:
    world = World()
    beat = world.beat(entries=())
    assert beat.step() == LONGEST_WAIT
    assert beat.leads


# ---- reasons not to lead


@pytest.mark.parametrize(("skew", "side"), [(301, "ahead of"), (-301, "behind"), (86_400, "ahead of")])
def test_a_beat_whose_clock_is_too_far_off_does_not_lead(skew: float, side: str) -> None:
    world = World()
    beat = world.beat(skew=skew)
    beat.step()
    run(world, 5)
    assert not beat.leads
    assert f"{abs(skew)} s {side}" in beat.presence.why
    assert beat.presence.role == "standby"
    assert world.pushed() == []
    beat.clock.set_wall(world.server_clock.now())
    run(world, 3)
    assert beat.leads


@pytest.mark.parametrize("skew", [299, -299])
def test_a_beat_whose_clock_is_off_by_less_may_lead(skew: float) -> None:
    beat = World().beat(skew=skew)
    beat.step()
    assert beat.leads


def test_a_leader_whose_clock_goes_wrong_gives_way() -> None:
    world = World()
    one, two = world.beat("one"), world.beat("two")
    one.step()
    two.step()
    one.clock.set_wall(one.clock.now() + timedelta(days=1))
    run(world, 5)
    assert (one.leads, two.leads) == (False, True)
    assert [kind for kind, _ in one.changes] == ["leads", "stands by"]
    run(world, 20)
    assert world.pushed() == [key(10), key(20)]


def test_a_beat_whose_broker_is_another_server_leads_and_sends_by_claims() -> None:
    world = World()
    world.two_servers = True
    beat = world.beat()
    beat.step()
    run(world, 25)
    assert beat.leads
    assert beat.presence.path == "claims"
    assert world.pushed() == []
    assert beat.broker.bodies == [key(10), key(20)]
    assert world.store.open_occurrences() == []


def test_a_beat_that_does_not_know_its_path_does_not_lead() -> None:
    world = World()
    beat = world.beat()
    beat.broker_down = True
    run(world, 30)
    assert not beat.leads
    assert beat.presence.path == ""
    assert world.pushed() == []
    beat.broker_down = False
    run(world, 5)
    assert beat.leads


def test_a_path_that_has_changed_begins_the_term_anew_and_leaves_no_claim_open() -> None:
    world = World()
    world.two_servers = True
    beat = world.beat(entries=(Entry("e", "proj.task", every("1s")),))
    beat.step()
    beat.broker.always = "lose"
    run(world, 4)
    assert [found.occurrence.key for found in world.store.open_occurrences()] == [key(1)]
    world.two_servers = False  # the broker has moved to the store's server, as the next failure shows
    run(world, 4)
    beat.broker.always = "take"
    run(world, 8)
    assert beat.broker.bodies == [key(1)]
    assert world.pushed() == [key(i) for i in range(2, 17)]
    assert world.store.open_occurrences() == []
    assert beat.calls.count("take_office") == 2


def test_a_leader_whose_broker_alone_does_not_answer_leaves_leading_to_a_standby() -> None:
    world = World()
    world.two_servers = True
    one, two = world.beat("one"), world.beat("two")
    one.step()
    two.step()
    run(world, 5)
    one.broker.always = "lose"
    run(world, 45)
    assert (one.leads, two.leads) == (False, True)
    assert "broker does not answer" in " ".join(str(why) for kind, why in one.changes if kind == "stands by")
    assert two.broker.bodies == [key(i) for i in (10, 20, 30, 40, 50)]
    assert world.store.open_occurrences() == []


def test_a_lone_leader_whose_broker_does_not_answer_leads_on_and_sends_when_it_does() -> None:
    world = World()
    world.two_servers = True
    beat = world.beat()
    beat.step()
    beat.broker.always = "lose"
    run(world, 45)
    assert beat.leads
    beat.broker.always = "take"
    run(world, 35)
    assert beat.broker.bodies == [key(i) for i in range(10, 81, 10)]
    assert [kind for kind, _ in beat.changes] == ["leads"]


def test_a_lone_leader_that_cannot_even_build_leads_on_and_sends_when_the_broker_answers() -> None:
    # As a beat that starts while its broker is down: no queue is declared yet, and that takes the broker.
    world = World()
    world.two_servers = True
    beat = world.beat()
    beat.step()
    beat.cannot_declare = True
    run(world, 45)
    assert beat.leads
    beat.cannot_declare = False
    run(world, 2)
    assert beat.broker.bodies == [key(i) for i in range(10, 41, 10)]
    assert [kind for kind, _ in beat.changes] == ["leads"]


def test_a_leader_that_cannot_build_leaves_leading_to_a_standby() -> None:
    world = World()
    world.two_servers = True
    one, two = world.beat("one"), world.beat("two")
    one.step()
    two.step()
    run(world, 5)
    one.cannot_declare = True
    run(world, 45)
    assert (one.leads, two.leads) == (False, True)
    assert two.broker.bodies == [key(i) for i in (10, 20, 30, 40, 50)]


def test_the_broker_is_asked_once_and_again_after_a_failure() -> None:
    world = World()
    beat = world.beat()
    beat.step()
    run(world, 20)
    assert beat.probes == 1
    beat.down = "connection refused"
    run(world, 5)
    beat.down = ""
    run(world, 3)
    assert beat.probes == 2


def test_a_store_that_needs_a_newer_release_is_left_to_others() -> None:
    world = World()
    world.store.take_office(1)
    world.store.need(99)
    beat = world.beat()
    run(world, 30)
    assert not beat.leads
    assert "99" in beat.elector.why
    assert "take_office" not in beat.calls
    assert world.pushed() == []


def test_a_store_that_comes_to_need_a_newer_release_in_between_has_a_whole_lease_to_find_one() -> None:
    world = World()
    world.store.take_office(1)
    beat = world.beat()
    beat.ticker.step()
    world.store.need(99)
    beat.elector.step()
    beat.elector.step()
    run(world, int(LEASE) - 1)
    assert not beat.leads
    assert world.pushed() == []


# ---- the fence


def test_a_leader_that_meets_a_later_one_in_office_gives_way_at_once() -> None:
    world = World()
    beat = world.beat(entries=(Entry("e", "proj.task", every("1s")),))
    beat.step()
    beat.ticker.step()
    lease = beat.elector.lease()
    assert lease is not None
    world.store.take_office(lease.epoch + 5)
    world.advance(1)
    assert beat.ticker.step() == 0.0
    beat.ticker.step()
    assert not beat.leads
    assert [kind for kind, _ in beat.changes] == ["leads", "stands by"]
    assert world.pushed() == []


def test_a_lease_below_the_fence_does_not_take_office_and_the_next_one_is_above_it() -> None:
    world = World()
    beat = world.beat()
    beat.ticker.step()
    beat.elector.step()  # has the lease, has not taken office
    fence = 2**60
    world.store.take_office(fence)
    beat.ticker.step()
    assert "place" not in beat.calls
    run(world, 25)  # the fence's leader, whom nobody knows, may live: one lease is left to it
    lease = beat.elector.lease()
    assert lease is not None
    assert lease.epoch > fence
    assert world.pushed() == [key(20)]


def test_trust_that_comes_back_under_the_same_epoch_goes_on_with_the_same_term() -> None:
    world = World()
    beat = world.beat()
    beat.step()
    lease = beat.elector.lease()
    world.leases.unavailable = True
    run(world, 15)
    assert not beat.leads
    world.leases.unavailable = False
    run(world, 5)
    assert beat.elector.lease() == lease
    assert beat.calls.count("take_office") == 1
    assert [kind for kind, _ in beat.changes] == ["leads", "stands by", "leads"]
    assert world.pushed() == [key(10), key(20)]


def test_a_new_epoch_is_a_new_term() -> None:
    world = World()
    one, two = world.beat("one"), world.beat("two")
    one.step()
    first = one.elector.lease()
    assert first is not None
    world.leases.ask_to_step_down(first.epoch)
    run(world, 5)
    assert two.leads
    second = two.elector.lease()
    assert second is not None
    world.leases.ask_to_step_down(second.epoch)
    run(world, 15)
    assert one.leads
    assert one.calls.count("take_office") == 2
    assert [kind for kind, _ in one.changes] == ["leads", "stands by", "leads"]
    assert world.pushed() == [key(10), key(20)]


# ---- a store that does not answer


def test_a_store_that_is_down_at_the_start_is_waited_for() -> None:
    world = World()
    beat = world.beat()
    beat.down = "connection refused"
    assert beat.step() == RETRY
    run(world, 30)
    assert not beat.leads
    beat.down = ""
    run(world, 2)
    assert beat.leads
    assert world.store.cursors()["e"].nominal >= NOW + 30 * SECOND


def test_a_short_outage_ends_no_term() -> None:
    world = World()
    beat = world.beat()
    beat.step()
    run(world, 8)
    beat.down = "connection refused"
    run(world, 4)
    assert world.pushed() == []
    beat.down = ""
    run(world, 1)
    assert world.pushed() == [key(10)]
    assert beat.calls.count("take_office") == 1
    assert len(beat.changes) == 1


def test_a_leader_that_is_helpless_for_a_lease_leaves_leading_to_another() -> None:
    world = World()
    one, two = world.beat("one"), world.beat("two")
    one.step()
    two.step()
    one.down = True
    run(world, int(LEASE) + 6)
    assert (one.leads, two.leads) == (False, True)
    assert "connection refused" in one.elector.why
    run(world, 10)
    assert world.pushed() == [key(10), key(20)]


def test_a_damaged_key_makes_no_leaders_alternate(said: Callable[[], list[tuple[str, str]]]) -> None:
    world = World()
    one, two = world.beat("one"), world.beat("two")
    one.step()
    two.step()
    run(world, 5)
    dispatch = world.store.dispatch

    def damaged(*_: Any, **__: Any) -> Any:
        raise StoreDamaged("the key 'last' is a string and must be a hash")

    world.store.dispatch = damaged  # type: ignore[method-assign]
    said()
    run(world, 65)
    assert [kind for kind, _ in (*one.changes, *two.changes)] == ["leads"]
    assert said() == [("WARNING", "the key 'last' is a string and must be a hash")]
    world.store.dispatch = dispatch  # type: ignore[method-assign]
    run(world, 2)
    assert world.pushed() == [key(i) for i in range(10, 71, 10)]


def test_a_lone_beat_that_was_helpless_leads_again_within_a_lease() -> None:
    world = World()
    beat = world.beat()
    beat.step()
    beat.down = "connection refused"
    run(world, 30)
    assert not beat.leads
    beat.down = ""
    run(world, int(LEASE) + 2)
    assert beat.leads
    assert world.pushed() == [key(10), key(20), key(30), key(40)]


# ---- a store that was wiped


def test_a_leader_that_sees_a_wiped_store_writes_its_cursors_back() -> None:
    world = World()
    beat = world.beat()
    beat.step()
    run(world, 12)
    world.store.wipe()
    run(world, 5)
    assert world.store.cursors()["e"].nominal == NOW + 10 * SECOND
    assert beat.calls.count("take_office") == 1
    run(world, 5)
    assert world.pushed() == [key(20)]


def test_a_leader_that_takes_office_anew_on_a_wiped_store_remembers_what_is_paused() -> None:
    world = World()
    beat = world.beat()
    beat.step()
    world.store.ask(Request("pause", "e", "somebody", "because", NOW + timedelta(hours=1)))
    for _ in range(3):
        world.advance(1)
        beat.step()
    assert set(world.store.paused()) == {"e"}
    world.store.wipe()
    world.advance(60)
    world.leases.acquire("two", floor=0)  # another gets the lease, and dies before it takes office
    world.advance(60)
    for _ in range(30):
        world.advance(1)
        beat.step()
    assert beat.calls.count("take_office") == 2
    assert set(world.store.paused()) == {"e"}
    assert world.pushed() == []


def test_a_standby_touches_no_wiped_store() -> None:
    world = World()
    one, two = world.beat("one"), world.beat("two")
    one.step()
    two.step()
    world.store.wipe()
    for _ in range(5):
        world.advance(1)
        two.step()
    assert set(two.calls) == {"attend", "tell_entries"}
    assert world.store.cursors() == {}


def test_a_beat_on_an_empty_store_starts_from_now() -> None:
    world = World()
    beat = world.beat()
    world.advance(5)
    beat.step()
    assert world.store.cursors() == {
        "e": Cursor(NOW + 5 * SECOND, beat.ticker._agenda.entries["e"].rule, tzdata="2026c")
    }


# ---- presence


def test_presence_of_a_leader() -> None:
    world = World()
    beat = world.beat(skew=2)
    beat.step()
    run(world, 5)
    lease = beat.elector.lease()
    assert lease is not None
    assert beat.presence == Presence(
        beat="one",
        host="host of one",
        pid=7,
        version="0.1",
        tzdata="2026c",
        fingerprint="fingerprint",
        role="leader",
        why="",
        last_tick=NOW + 6 * SECOND,
        next_due=NOW + 10 * SECOND,
        skew=2.0,
        entries=1,
        embedded=True,
        schema=SCHEMA_WRITTEN,
        path="same server",
        epoch=lease.epoch,
    )


def test_presence_of_a_standby_says_why_and_promises_nothing() -> None:
    world = World()
    one, two = world.beat("one"), world.beat("two", skew=-1.5)
    one.step()
    two.step()
    run(world, 8)
    lease = one.elector.lease()
    assert lease is not None
    presence = two.presence
    assert (presence.role, presence.why) == ("standby", f"one leads at epoch {lease.epoch}")
    assert (presence.next_due, presence.skew) == (None, -1.5)


def test_presence_tells_a_change_of_role_at_once() -> None:
    world = World()
    beat = world.beat()
    beat.ticker.step()
    assert beat.presence.role == "standby"
    beat.elector.step()
    beat.ticker.step()
    assert beat.presence.role == "leader"


# ---- progress


def test_every_step_is_progress_also_one_that_fails() -> None:
    world = World()
    beat = world.beat()
    beat.step()
    for _ in range(5):
        world.advance(LEASE * 0.8)
        beat.ticker.step()
        beat.elector.step()
    assert beat.leads
    world.advance(LEASE * 0.8)
    world.advance(LEASE * 0.8)
    beat.elector.step()  # no tick for more than a lease
    assert not beat.leads
    assert "no progress" in beat.elector.why


def test_a_tick_that_fails_for_no_foreseen_reason_ends_no_beat_and_leaves_the_lease_to_others() -> None:
    """Garbage in the store, or a fault of ours: a beat stands by and says so; the next one may fare better."""
    world = World()
    beat = world.beat()
    beat.step()
    assert beat.leads
    attend, world.store.attend = world.store.attend, lambda presence: int("garbage")  # type: ignore[assignment,method-assign,return-value]
    world.advance(LEASE / 2)
    for _ in range(3):
        beat.step()
    assert not beat.leads
    assert "garbage" in beat.elector.why
    world.store.attend = attend  # type: ignore[method-assign]
    world.advance(LEASE)
    for _ in range(3):
        beat.step()
    assert beat.leads


# ---- what the log says


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """Return what was said at info and above, with its level, and forget it."""
    caplog.set_level(logging.INFO, logger="celery_tzbeat.beat")

    def take() -> list[tuple[str, str]]:
        found = [(r.levelname, r.getMessage()) for r in caplog.records if "outages" in r.name]
        caplog.clear()
        return found

    return take


def test_each_reason_of_an_outage_is_said_once_and_its_end_once(said: Callable[[], list[tuple[str, str]]]) -> None:
    world = World()
    beat = world.beat()
    beat.step()
    for why in ("connection refused", "timed out", "connection refused", "LOADING"):
        beat.down = why
        run(world, 5)
    beat.down = ""
    run(world, 3)
    reasons = [("WARNING", "connection refused"), ("WARNING", "timed out"), ("WARNING", "LOADING")]
    assert said() == [*reasons, ("INFO", "the store answers again")]
    beat.down = "timed out"
    run(world, 5)
    assert said() == [("WARNING", "timed out")]


def test_words_that_differ_each_time_do_not_fill_the_log(said: Callable[[], list[tuple[str, str]]]) -> None:
    world = World()
    beat = world.beat()
    for second in range(60):
        beat.down = f"no route, request {second}"
        run(world, 1)
    assert len(said()) == 10


@pytest.mark.parametrize("by_claims", [False, True], ids=["probe", "claims"])
def test_a_broker_that_answers_again_is_said_once_it_did_and_not_before(
    said: Callable[[], list[tuple[str, str]]], by_claims: bool
) -> None:
    world = World()
    world.two_servers = by_claims
    beat = world.beat()
    beat.step()
    if by_claims:
        beat.broker.always = "lose"
        run(world, 45)  # between two attempts a step succeeds, and tells nothing of the broker
        assert said() == [("WARNING", "the broker does not answer")]
        beat.broker.always = "take"
        run(world, 35)
    else:
        beat.down = "connection refused"
        run(world, 5)
        beat.down, beat.broker_down = "", True
        run(world, 5)
        assert said() == [("WARNING", "connection refused"), ("WARNING", "the broker does not answer")]
        beat.broker_down = False
        run(world, 15)
    assert ("INFO", "the broker answers again") in (found := said())
    assert [level for level, _ in found] == ["INFO"] * len(found)
    run(world, 60)
    assert said() == []


# ---- what a leader may take for dead


def with_a_run() -> tuple[World, Beat]:
    """Return a leader that has seen the store for 20 s, and a run that has just begun and never beats."""
    world = World()
    world.two_servers = True
    beat = world.beat()
    run(world, 20)
    ticket = Ticket("proj/0", "order-42", "", None, 0, 1, 1, 2, Policy(run_lease=timedelta(seconds=3)))
    MemoryRuns(world.store).start(Start(ticket, Order(1, 0), "token", "worker", True, b"{}"))
    return world, beat


def is_abandoned(world: World) -> bool:
    return "abandoned" in [record.event for record in world.store.audit()]


def test_a_store_that_did_not_answer_breaks_the_view() -> None:
    world, beat = with_a_run()
    beat.down = "connection refused"
    run(world, 1)
    beat.down = ""
    run(world, 4)
    assert not is_abandoned(world)
    run(world, 3)
    assert is_abandoned(world)


def test_a_broker_that_does_not_answer_says_nothing_of_the_store() -> None:
    world, beat = with_a_run()
    beat.broker.always = "lose"
    run(world, 5)
    assert is_abandoned(world)

"""The elector, a step at a time: every row of the failure table in its module, no threads, no waiting."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Literal, TypeVar

import pytest

from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.leases.elector import AFTER_LAPSE, POLL, Elector
from celery_tzbeat.leases.protocol import Free, Granted, Held, Leader, Lost, Renewed, Subscription
from celery_tzbeat.model import Lease
from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.leases import MemoryLeases

LEASE = 10.0
TRUST = 9.0
START = datetime(2026, 11, 1, 5, 30, tzinfo=timezone.utc)

Answer = TypeVar("Answer")


class Network:
    """What lies between an elector and its provider: delays, lost requests, lost replies."""

    def __init__(self, server: MemoryLeases) -> None:
        self.server = server
        self.calls: list[str] = []
        self.on_the_way: Callable[[], None] = lambda: None
        self.on_the_way_back: Callable[[], None] = lambda: None
        self.lose: Literal["", "request", "reply"] = ""

    def _carry(self, name: str, ask: Callable[[], Answer]) -> Answer:
        self.calls.append(name)
        self.on_the_way()
        if self.lose == "request":
            raise StoreUnavailable("the request was lost")
        answer = ask()
        self.on_the_way_back()
        if self.lose == "reply":
            raise StoreUnavailable("the reply was lost")
        return answer

    def acquire(self, holder: str, *, floor: int) -> Granted | Held:
        return self._carry("acquire", lambda: self.server.acquire(holder, floor=floor))

    def renew(self, holder: str, epoch: int) -> Renewed | Lost:
        return self._carry("renew", lambda: self.server.renew(holder, epoch))

    def renew_late(self, holder: str, epoch: int) -> Renewed | Lost:
        return self._carry("renew", lambda: self.server.renew_late(holder, epoch))

    def replicated(self, wanted: int) -> int:
        return self._carry("replicated", lambda: self.server.replicated(wanted))

    def resign(self, holder: str, epoch: int) -> bool:
        return self._carry("resign", lambda: self.server.resign(holder, epoch))

    def look(self) -> Free | Held:
        return self._carry("look", self.server.look)

    def ask_to_step_down(self, epoch: int) -> bool:
        return self.server.ask_to_step_down(epoch)

    def leader(self) -> Leader | None:
        return self.server.leader()

    def listen(self) -> Subscription:
        return self.server.listen()

    def close(self) -> None:
        """Nothing to close."""


class Beat:
    """A host: its clocks, its network, its elector."""

    def __init__(self, world: World, name: str, *, rate: float = 1.0, replicas: int = 0) -> None:
        self.clock = ManualClock(START)
        self.rate = rate
        self.network = Network(world.server)
        self.changes: list[bool] = []
        self.elector = Elector(
            self.network,
            holder=name,
            lease=timedelta(seconds=LEASE),
            clock=self.clock,
            on_change=lambda: self.changes.append(self.leads),
            max_skew=timedelta(seconds=300),
            replicas=replicas,
        )
        self.elector.permit("")

    @property
    def leads(self) -> bool:
        return self.elector.lease() is not None

    @property
    def lease(self) -> Lease:
        found = self.elector.lease()
        assert found is not None, self.elector.why
        return found

    def step(self) -> float:
        return self.elector.step()


class World:
    """One server, some beats, and time that passes for all of them."""

    def __init__(self) -> None:
        self.server_clock = ManualClock(START)
        self.server = MemoryLeases(self.server_clock, timedelta(seconds=LEASE))
        self.beats: list[Beat] = []

    def beat(self, name: str, *, rate: float = 1.0, replicas: int = 0) -> Beat:
        self.beats.append(Beat(self, name, rate=rate, replicas=replicas))
        return self.beats[-1]

    def pass_time(self, seconds: float, *, asleep: Beat | None = None) -> None:
        """Let time pass; ticks are at work on every host but the one that sleeps."""
        self.server_clock.advance(seconds)
        for beat in self.beats:
            if beat is asleep:
                beat.clock.suspend(seconds * beat.rate)
            else:
                beat.clock.advance(seconds * beat.rate)
                beat.elector.progress()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def leader(world: World) -> Beat:
    beat = world.beat("a")
    beat.step()
    assert beat.leads
    beat.network.calls.clear()
    return beat


@pytest.fixture
def standby(world: World, leader: Beat) -> Beat:
    beat = world.beat("b")
    beat.step()
    assert not beat.leads
    beat.network.calls.clear()
    return beat


# In quiet times.


def test_without_a_permit_it_looks_and_does_not_bid(world: World) -> None:
    beat = world.beat("a")
    beat.elector.permit("the first plan is not made")
    assert beat.step() == POLL
    assert beat.network.calls == ["look"]
    assert beat.elector.why == "the first plan is not made"


def test_an_elector_begins_without_a_permit(world: World) -> None:
    elector = Elector(
        world.server,
        holder="a",
        lease=timedelta(seconds=LEASE),
        clock=world.server_clock,
        on_change=lambda: None,
        max_skew=timedelta(seconds=300),
    )
    elector.step()
    assert elector.why == "starting"
    assert elector.lease() is None


def test_a_first_bid_makes_a_leader_that_renews_at_a_third(world: World) -> None:
    beat = world.beat("a")
    assert beat.elector.why
    assert beat.step() == pytest.approx(LEASE / 3)
    assert beat.elector.why == ""
    assert beat.lease.holder == "a"
    assert beat.changes == [True]
    for _ in range(10):
        world.pass_time(beat.step())
    assert beat.changes == [True]
    assert beat.network.calls == ["look", "acquire"] + ["renew"] * 10


def test_a_standby_names_the_leader_and_polls_each_second(standby: Beat, leader: Beat) -> None:
    assert standby.step() == POLL
    assert standby.elector.why == f"a leads at epoch {leader.lease.epoch}"


def test_a_standby_takes_over_5_ms_after_the_lease_lapsed(world: World, leader: Beat, standby: Beat) -> None:
    world.pass_time(LEASE - 0.3)
    assert standby.step() == pytest.approx(0.3 + AFTER_LAPSE)
    old = leader.elector._term
    assert old is not None
    world.pass_time(0.3 + AFTER_LAPSE)
    standby.step()
    assert standby.lease.epoch > old.lease.epoch
    assert not leader.leads


def test_a_step_tells_when_leadership_ends(world: World, leader: Beat, standby: Beat) -> None:
    world.pass_time(LEASE + 1)
    standby.step()
    assert leader.step() == 0.0
    assert leader.changes == [True, False]
    assert leader.step() == POLL
    assert leader.elector.why.startswith("b leads")


# Trust.


def test_trust_ends_a_tenth_before_the_lease(world: World, leader: Beat) -> None:
    world.pass_time(TRUST - 0.001)
    assert leader.leads
    world.pass_time(0.002)
    assert not leader.leads
    assert leader.elector.why


def test_a_slow_reply_does_not_stretch_the_lease(world: World) -> None:
    beat = world.beat("a")
    beat.network.on_the_way_back = lambda: world.pass_time(4)
    wait = beat.step()
    assert wait == 0.0  # a third is over
    world.pass_time(TRUST - 4 - 0.001)
    assert beat.leads
    world.pass_time(0.002)
    assert not beat.leads


def test_a_reply_slower_than_the_trust_makes_no_leader(world: World) -> None:
    beat = world.beat("a")
    beat.step()
    beat.network.on_the_way_back = lambda: world.pass_time(TRUST)
    beat.step()
    assert not beat.leads
    assert "ran out" in beat.elector.why
    beat.network.on_the_way_back = lambda: None
    beat.step()
    assert beat.leads


def test_a_suspended_host_does_not_believe_when_it_wakes(world: World, leader: Beat, standby: Beat) -> None:
    leader.clock.suspend(3600)
    assert not leader.leads
    world.server_clock.advance(3600)
    standby.clock.advance(3600)
    standby.elector.progress()
    standby.step()
    assert standby.leads
    leader.step()
    assert not leader.leads


def test_a_stopped_process_does_not_believe_when_it_wakes(world: World, leader: Beat, standby: Beat) -> None:
    world.pass_time(LEASE + 1)  # without a step of the leader's
    standby.step()
    assert standby.leads
    assert not leader.leads


def test_a_wall_clock_that_went_back_counts_as_0(world: World, leader: Beat) -> None:
    leader.clock.set_wall(START - timedelta(minutes=4))
    assert leader.leads
    world.pass_time(TRUST + 0.1)
    assert not leader.leads


def test_a_wall_clock_that_went_forward_ends_trust_until_the_next_renewal(leader: Beat) -> None:
    leader.clock.set_wall(START + timedelta(minutes=4))
    assert not leader.leads
    assert leader.step() == pytest.approx(LEASE / 3)
    assert leader.leads
    assert leader.elector.skew == pytest.approx(240)


# Lost requests and replies.


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_bid_that_failed_is_made_again(world: World, lost: Literal["request", "reply"]) -> None:
    beat = world.beat("a")
    beat.step()
    beat.elector.permit("wait")
    beat.step()
    beat.elector.permit("")
    beat.network.lose = lost
    assert 0 < beat.step() <= POLL
    assert not beat.leads
    assert beat.elector.why == f"the {lost} was lost"
    beat.network.lose = ""
    epoch = found.epoch if (found := world.server.leader()) else 0
    beat.step()
    assert beat.leads
    if lost == "reply":
        assert beat.lease.epoch == epoch


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_renewal_that_failed_leaves_the_trust_of_the_one_before(
    world: World, leader: Beat, lost: Literal["request", "reply"]
) -> None:
    before = leader.lease
    world.pass_time(LEASE / 3)
    leader.network.lose = lost
    assert 0 < leader.step() <= POLL
    assert leader.lease == before
    world.pass_time(TRUST - LEASE / 3)
    assert not leader.leads
    leader.step()
    assert leader.changes == [True, False]
    leader.network.lose = ""
    leader.step()
    assert leader.lease == before  # nobody led meanwhile


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_resignation_that_failed_is_made_again(
    world: World, leader: Beat, standby: Beat, lost: Literal["request", "reply"]
) -> None:
    leader.network.lose = lost
    leader.elector.permit("not now")
    leader.step()
    assert not leader.leads
    leader.network.lose = ""
    leader.step()
    assert leader.elector.why == "not now"
    assert world.server.leader() is None
    standby.step()
    assert standby.leads


def test_retries_are_short_and_bounded(world: World, leader: Beat) -> None:
    world.server.unavailable = True
    waits = [leader.step() for _ in range(12)]
    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(0.05)
    assert waits[-1] == POLL
    world.server.unavailable = False
    leader.step()
    world.server.unavailable = True
    assert leader.step() == pytest.approx(0.05)


def test_a_server_that_was_gone_for_long_finds_the_same_leader_at_the_same_epoch(
    world: World, leader: Beat, standby: Beat
) -> None:
    before = leader.lease
    world.server.unavailable = True
    for _ in range(100):
        world.pass_time(1)
        leader.step()
        standby.step()
    assert not leader.leads
    world.server.unavailable = False
    leader.step()
    standby.step()
    assert leader.lease == before
    assert not standby.leads


# Resigning.


def test_resign_now_ends_belief_and_gives_the_lease_back(world: World, leader: Beat, standby: Beat) -> None:
    assert leader.elector.resign_now()
    assert not leader.leads
    assert leader.elector.why == "resigned"
    assert not leader.elector.resign_now()
    standby.step()
    assert standby.leads
    calls = list(leader.network.calls)
    assert leader.step() == POLL
    assert leader.network.calls == calls == ["resign"]


def test_resign_now_of_a_standby_asks_nothing(standby: Beat) -> None:
    assert not standby.elector.resign_now()
    assert standby.network.calls == []


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), RuntimeError("reentrant call")])
def test_resign_now_raises_nothing_and_tries_once(leader: Beat, error: Exception) -> None:
    def fail() -> None:
        raise error

    leader.network.on_the_way = fail
    assert not leader.elector.resign_now()
    assert not leader.elector.resign_now()
    assert not leader.leads
    assert leader.network.calls == ["resign"]


@pytest.mark.parametrize("moment", ["on_the_way", "on_the_way_back"])
def test_a_renewal_in_flight_does_not_undo_a_resignation(
    world: World, leader: Beat, moment: Literal["on_the_way", "on_the_way_back"]
) -> None:
    def resign() -> None:
        setattr(leader.network, moment, lambda: None)
        assert leader.elector.resign_now()

    setattr(leader.network, moment, resign)
    leader.step()
    assert leader.network.calls[:2] == ["renew", "resign"]
    assert not leader.leads
    assert world.server.leader() is None


def test_a_renewal_gives_back_what_resign_now_could_not(world: World, leader: Beat) -> None:
    def resign_in_vain() -> None:
        leader.network.on_the_way_back = lambda: None
        leader.network.lose = "request"
        assert not leader.elector.resign_now()
        leader.network.lose = ""

    leader.network.on_the_way_back = resign_in_vain
    leader.step()
    assert not leader.leads
    assert world.server.leader() is None


@pytest.mark.parametrize("moment", ["on_the_way", "on_the_way_back"])
def test_a_bid_granted_after_resign_now_is_given_back(
    world: World, moment: Literal["on_the_way", "on_the_way_back"]
) -> None:
    beat = world.beat("a")
    beat.elector.permit("wait")
    beat.step()
    beat.elector.permit("")

    def resign() -> None:
        setattr(beat.network, moment, lambda: None)
        assert not beat.elector.resign_now()

    setattr(beat.network, moment, resign)
    beat.step()
    assert beat.network.calls == ["look", "acquire", "resign"]
    assert not beat.leads
    assert beat.changes == []
    assert world.server.leader() is None


# Reasons not to lead.


def test_a_leader_whose_permit_is_withdrawn_resigns(world: World, leader: Beat, standby: Beat) -> None:
    leader.elector.permit("the parent is gone")
    assert not leader.leads  # before any step
    leader.step()
    assert leader.network.calls == ["resign"]
    assert leader.changes == [True, False]
    standby.step()
    assert standby.leads
    assert leader.step() == POLL
    assert leader.elector.why == "the parent is gone"


def test_a_permit_that_comes_back_before_the_step_changes_nothing(leader: Beat) -> None:
    before = leader.lease
    leader.elector.permit("for a moment")
    leader.elector.permit("")
    assert leader.lease == before
    leader.step()
    assert leader.network.calls == ["renew"]


def test_without_progress_for_one_lease_it_stops_renewing(world: World, leader: Beat, standby: Beat) -> None:
    for _ in range(4):
        world.server_clock.advance(3)
        leader.clock.advance(3)
        leader.step()
    assert not leader.leads
    assert leader.elector.why == "the tick made no progress for 10 s"
    assert leader.network.calls == ["renew"] * 3
    leader.step()
    assert "resign" not in leader.network.calls
    assert "acquire" not in leader.network.calls
    standby.step()
    assert not standby.leads  # it is left to lapse
    world.server_clock.advance(LEASE)
    standby.step()
    assert standby.leads
    leader.elector.progress()
    leader.step()
    assert leader.elector.why.startswith("b leads")


def test_a_standby_without_progress_does_not_bid(world: World, standby: Beat) -> None:
    world.server_clock.advance(LEASE + 1)
    standby.clock.advance(LEASE + 1)
    assert standby.step() == POLL
    assert "no progress" in standby.elector.why
    standby.elector.progress()
    standby.step()
    assert standby.leads


@pytest.mark.parametrize(("minutes", "side"), [(6, "ahead of"), (-6, "behind")])
def test_a_host_with_a_wrong_clock_does_not_bid(world: World, minutes: int, side: str) -> None:
    beat = world.beat("a")
    beat.clock.set_wall(START + timedelta(minutes=minutes))
    assert beat.step() == POLL
    assert beat.network.calls == ["look"]
    assert beat.elector.skew == pytest.approx(60 * minutes)
    assert f"360 s {side} the server's" in beat.elector.why
    assert "tzbeat_max_skew (300 s)" in beat.elector.why
    beat.clock.set_wall(START + timedelta(minutes=4))
    beat.step()
    assert beat.leads


def test_a_leader_whose_clock_is_set_wrong_resigns(world: World, leader: Beat, standby: Beat) -> None:
    leader.clock.set_wall(START - timedelta(hours=1))
    leader.step()
    assert leader.network.calls == ["renew", "resign"]
    assert not leader.leads
    standby.step()
    assert standby.leads


def test_a_bid_that_shows_a_wrong_clock_is_given_back(world: World, leader: Beat, standby: Beat) -> None:
    leader.elector.resign_now()
    standby.clock.set_wall(START + timedelta(days=1))
    standby.step()
    assert standby.network.calls == ["acquire", "resign"]
    assert not standby.leads
    assert standby.changes == []
    assert standby.step() == POLL
    assert world.server.leader() is None


def test_the_skew_is_measured_half_way(world: World) -> None:
    beat = world.beat("a")
    beat.network.on_the_way = beat.network.on_the_way_back = lambda: world.pass_time(1)
    beat.step()
    assert beat.elector.skew == pytest.approx(0)


def test_a_lease_below_the_stores_epoch_is_given_back_for_one_above(world: World, leader: Beat) -> None:
    fence = leader.lease.epoch + 10**9
    leader.elector.raise_floor(fence)
    assert not leader.leads
    for _ in range(15):
        world.pass_time(min(leader.step(), POLL))
    assert leader.lease.epoch > fence


# Stepping down.


def test_a_leader_that_is_asked_to_step_down_hands_over(world: World, leader: Beat, standby: Beat) -> None:
    assert world.server.ask_to_step_down(leader.lease.epoch)
    leader.step()
    assert not leader.leads
    assert leader.elector.why == "was asked to step down"
    leader.step()
    assert leader.network.calls == ["renew", "resign", "look"]
    standby.step()
    assert standby.leads
    leader.step()
    assert leader.elector.why.startswith("b leads")


def test_a_leader_that_stepped_down_takes_over_at_once_when_its_successor_dies(
    world: World, leader: Beat, standby: Beat
) -> None:
    world.server.ask_to_step_down(leader.lease.epoch)
    leader.step()
    standby.step()
    leader.step()  # sees the successor
    standby.elector.resign_now()
    leader.step()
    assert leader.leads


def test_a_leader_that_stepped_down_leads_again_when_nobody_took_over(world: World, leader: Beat) -> None:
    epoch = leader.lease.epoch
    world.server.ask_to_step_down(epoch)
    waited = 0.0
    while not leader.leads or leader.lease.epoch == epoch:
        wait = leader.step()
        world.pass_time(wait)
        waited += wait
        assert waited < 20
    assert waited == pytest.approx(LEASE + LEASE / 3, abs=POLL)


# The server.


def test_a_wipe_leaves_a_leader_that_lives_in_office(world: World, leader: Beat, standby: Beat) -> None:
    before = leader.lease
    world.server.wipe()
    assert standby.step() == POLL
    assert "forgot" in standby.elector.why
    world.pass_time(LEASE / 3)
    standby.step()
    leader.step()
    standby.step()
    assert leader.lease == before
    assert not standby.leads


def test_after_a_wipe_a_dead_leader_is_replaced_one_lease_later(world: World, standby: Beat) -> None:
    world.server.wipe()
    waited = 0.0
    while not standby.leads:
        wait = standby.step()
        if not standby.leads:
            world.pass_time(wait)
            waited += wait
    assert waited == pytest.approx(LEASE, abs=0.01)


def test_when_the_servers_clock_goes_forward_epochs_still_rise(world: World, leader: Beat, standby: Beat) -> None:
    """Two may believe until the old one's trust ends; the old one never renews."""
    old = leader.lease
    world.server_clock.set_wall(world.server_clock.now() + timedelta(seconds=200))
    standby.step()
    assert standby.lease.epoch > old.epoch
    leader.step()
    assert not leader.leads
    assert standby.leads


def test_when_the_servers_clock_goes_forward_an_hour_it_differs_from_everybodys(
    world: World, leader: Beat, standby: Beat
) -> None:
    """Clocks that the server's disagrees with are too wrong to lead by: said, not guessed away."""
    world.server_clock.set_wall(world.server_clock.now() + timedelta(hours=1))
    leader.step()
    standby.step()
    assert not leader.leads
    assert not standby.leads
    assert "3600 s behind" in leader.elector.why
    world.server_clock.set_wall(world.server_clock.now() - timedelta(hours=1))
    seen = max(leader.elector._seen, standby.elector._seen)
    for _ in range(30):
        world.pass_time(min(leader.step(), POLL))
    assert leader.lease.epoch > seen


def test_when_the_servers_clock_goes_back_the_leader_goes_on(world: World, leader: Beat, standby: Beat) -> None:
    before = leader.lease
    world.server_clock.set_wall(world.server_clock.now() - timedelta(seconds=200))
    leader.step()
    assert leader.lease == before
    assert standby.step() == POLL


def test_when_the_servers_clock_goes_back_a_dead_leader_is_replaced_one_lease_later(
    world: World, leader: Beat, standby: Beat
) -> None:
    old = leader.lease
    world.server_clock.set_wall(world.server_clock.now() - timedelta(seconds=200))
    waited = 0.0
    while not standby.leads:
        wait = standby.step()
        if not standby.leads:
            world.pass_time(wait)
            waited += wait
    assert waited == pytest.approx(LEASE, abs=0.01)
    assert standby.lease.epoch > old.epoch


def test_an_error_that_nobody_foresaw_does_not_end_the_thread(leader: Beat) -> None:
    def fail() -> None:
        raise RuntimeError("WRONGTYPE")

    leader.network.on_the_way = fail
    assert leader.elector._step_whatever_happens() == POLL
    leader.clock.advance(TRUST)
    assert leader.elector.why == "the elector failed: RuntimeError: WRONGTYPE"
    leader.network.on_the_way = lambda: None
    leader.elector.step()
    assert leader.leads


# Everything at once.


@pytest.mark.parametrize("seed", range(60))
def test_two_electors_never_both_believe(seed: int) -> None:
    """Slow and lost calls, pauses, suspends, wrong wall clocks, uneven rates, resignations, in any order.

    While one elector's call is on its way, time passes and the others step.
    """
    chance = random.Random(seed)
    world = World()
    beats = world.beats
    for name in "abc":
        world.beat(name, rate=chance.uniform(0.96, 1.04))
    waiting: set[str] = set()
    told: list[int] = []

    def check() -> None:
        believers = [beat for beat in beats if beat.leads]
        assert len(believers) <= 1, [beat.lease for beat in believers]
        for beat in believers:
            if not told or told[-1] != beat.lease.epoch:
                told.append(beat.lease.epoch)

    def pass_time(longest: float) -> None:
        for _ in range(4):
            world.pass_time(chance.uniform(0, longest / 4))
            check()

    def step(beat: Beat) -> None:
        if beat.elector.holder in waiting:
            return  # its call is on its way
        waiting.add(beat.elector.holder)
        beat.network.lose = chance.choice(("", "", "", "", "request", "reply"))
        try:
            beat.step()
        finally:
            waiting.discard(beat.elector.holder)
        check()

    def delay() -> None:
        pass_time(chance.choice((0.01, 0.1, 2.0, 12.0)))
        if chance.random() < 0.3:
            step(chance.choice(beats))

    for turn in range(250):
        for beat in beats:
            beat.network.on_the_way = beat.network.on_the_way_back = delay
        pass_time(chance.choice((0.1, 1.0, 4.0)))
        beat = chance.choice(beats)
        deed = chance.random()
        if deed < 0.80:
            step(beat)
        elif deed < 0.85:
            world.pass_time(chance.uniform(0, 20), asleep=beat)
        elif deed < 0.90:
            beat.clock.set_wall(world.server_clock.now() + timedelta(seconds=chance.uniform(-400, 400)))
        elif deed < 0.95:
            beat.elector.permit(chance.choice(("", "", "not now")))
        elif deed < 0.97 and beat.leads:
            world.server.ask_to_step_down(beat.lease.epoch)
        else:
            beat.elector.resign_now()
            beats.remove(beat)
            world.beat(f"{turn}", rate=chance.uniform(0.96, 1.04))
        check()
    assert told == sorted(told)
    assert len(told) > 3


# Replicas (tzbeat_wait_replicas).


def go_on(world: World, *beats: Beat, seconds: float) -> None:
    for _ in range(round(seconds / 0.5)):
        world.pass_time(0.5)
        for beat in beats:
            beat.step()


def test_without_the_setting_no_replica_is_asked_for(world: World) -> None:
    beat = world.beat("a")
    beat.step()
    go_on(world, beat, seconds=30)
    assert beat.leads
    assert "replicated" not in beat.network.calls


def test_a_leader_whose_grants_are_replicated_leads_on(world: World) -> None:
    world.server.replicas = 2
    beat = world.beat("a", replicas=2)
    beat.step()
    assert beat.network.calls == ["look", "acquire", "replicated"]
    go_on(world, beat, seconds=60)
    assert beat.changes == [True]


def test_a_replica_that_lags_for_less_than_a_lease_is_not_noticed(world: World) -> None:
    world.server.replicas = 1
    beat = world.beat("a", replicas=1)
    beat.step()
    for _ in range(3):
        world.server.replicas = 0
        go_on(world, beat, seconds=LEASE - 1)
        world.server.replicas = 1
        go_on(world, beat, seconds=1)
    assert beat.changes == [True]


def test_a_whole_lease_of_fewer_replicas_ends_each_beats_term_and_the_last_bids_when_they_are_back(
    world: World,
) -> None:
    """Each beat has one lease to find out; then nobody leads, and says why, until enough replicas have it."""
    world.server.replicas = 1
    one, two = world.beat("one", replicas=1), world.beat("two", replicas=1)
    one.step()
    two.step()
    world.server.replicas = 0
    go_on(world, one, two, seconds=LEASE + 1)
    assert (one.leads, two.leads) == (False, True)
    why = "0 of the 1 replica(s) that tzbeat_wait_replicas asks for had what was written, for 10 s"
    assert one.elector.why == why
    go_on(world, one, two, seconds=60)
    assert (one.changes, two.changes) == ([True, False], [True, False])
    assert (one.elector.why, two.elector.why) == (why, why)
    world.server.replicas = 1
    go_on(world, one, seconds=0.5)
    assert one.leads


def test_a_server_that_does_not_tell_of_its_replicas_has_none_and_the_renewals_count(world: World) -> None:
    world.server.replicas = 1
    beat = world.beat("a", replicas=1)
    beat.step()
    asked = beat.network.calls.count("renew")
    carry = beat.network._carry

    def refuse(name: str, ask: Callable[[], Answer]) -> Answer:
        if name == "replicated":
            raise StoreUnavailable("WAIT is not permitted")
        return carry(name, ask)

    beat.network._carry = refuse  # type: ignore[method-assign]
    go_on(world, beat, seconds=LEASE - 1)
    assert beat.leads
    assert beat.network.calls.count("renew") > asked
    go_on(world, beat, seconds=2)
    assert not beat.leads
    assert "(WAIT is not permitted)" in beat.elector.why


def test_fewer_replicas_in_an_earlier_term_do_not_count(world: World) -> None:
    world.server.replicas = 0
    beat = world.beat("a", replicas=1)
    beat.step()
    go_on(world, beat, seconds=LEASE - 2)
    beat.elector.permit("not now")
    go_on(world, beat, seconds=LEASE)
    beat.elector.permit("")
    go_on(world, beat, seconds=LEASE - 2)
    assert beat.leads

"""One suite for every provider of leases: in memory, and on a real server."""

from __future__ import annotations

import re
import select
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Protocol

import pytest
import redis

from celery_tzbeat.clock import SystemClock
from celery_tzbeat.errors import StoreDamaged, StoreUnavailable
from celery_tzbeat.leases.elector import Elector
from celery_tzbeat.leases.protocol import Free, Granted, Held, LeaseProvider, Lost, Renewed
from celery_tzbeat.leases.redis import RedisLeases
from celery_tzbeat.model import from_micros
from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.leases import MemoryLeases
from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.server import LocalServer

pytestmark = pytest.mark.server

LEASE = timedelta(seconds=10)
START = datetime(2026, 11, 1, 5, 30, tzinfo=timezone.utc)
LEADER, GRANTED = "tzbeat:{test}:leader", "tzbeat:{test}:epoch:granted"


class Server(Protocol):
    """A provider, and what can happen to its server."""

    leases: LeaseProvider

    def lapse(self) -> None: ...
    def wipe(self) -> None: ...
    def forget_since(self, epoch: int) -> None: ...
    def go_back_an_hour(self) -> None: ...
    def go_away(self) -> None: ...


class MemoryServer:
    def __init__(self) -> None:
        self.clock = ManualClock(START)
        self.memory = MemoryLeases(self.clock, LEASE)
        self.leases: LeaseProvider = self.memory

    def lapse(self) -> None:
        self.clock.advance(LEASE.total_seconds())

    def wipe(self) -> None:
        self.memory.wipe()

    def forget_since(self, epoch: int) -> None:
        self.memory.wipe()
        self.memory._mark = epoch

    def go_back_an_hour(self) -> None:
        self.clock.set_wall(self.clock.now() - timedelta(hours=1))

    def go_away(self) -> None:
        self.memory.unavailable = True


class RedisServer:
    def __init__(self, server: LocalServer) -> None:
        self.server = server
        self.client = redis.Redis.from_url(server.url)
        self.client.flushall()
        self.leases: LeaseProvider = RedisLeases(server.url, namespace="test", lease=LEASE)

    def lapse(self) -> None:
        self.client.delete(LEADER)

    def wipe(self) -> None:
        self.client.flushall()

    def forget_since(self, epoch: int) -> None:
        self.client.flushall()
        self.client.set(GRANTED, epoch)

    def go_back_an_hour(self) -> None:
        # A key's end is an instant of its clock: seen from an hour earlier, it is an hour further away.
        self.client.pexpire(LEADER, LEASE + timedelta(hours=1))

    def go_away(self) -> None:
        self.leases.close()
        self.leases = RedisLeases("redis://127.0.0.1:1/0", namespace="test", lease=LEASE)


@pytest.fixture(scope="module")
def local_server() -> Iterator[LocalServer]:
    with LocalServer() as server:
        yield server


@pytest.fixture
def on_redis(local_server: LocalServer) -> Iterator[RedisServer]:
    server = RedisServer(local_server)
    yield server
    server.leases.close()
    server.client.close()


@pytest.fixture(params=["memory", "redis"])
def server(request: pytest.FixtureRequest) -> Server:
    if request.param == "memory":
        return MemoryServer()
    found: RedisServer = request.getfixturevalue("on_redis")
    return found


def granted(answer: Granted | Held) -> int:
    assert isinstance(answer, Granted), answer
    return answer.epoch


# Bids.


def test_the_first_bid_is_granted_and_the_epoch_is_the_servers_time(server: Server) -> None:
    answer = server.leases.acquire("a", floor=0)
    assert isinstance(answer, Granted)
    assert from_micros(answer.epoch) == answer.server_time


def test_a_second_bidder_is_told_who_leads_and_for_how_long(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    answer = server.leases.acquire("b", floor=0)
    assert isinstance(answer, Held)
    assert (answer.holder, answer.epoch) == ("a", epoch)
    assert LEASE - timedelta(seconds=2) < answer.remaining <= LEASE


def test_a_bid_repeated_after_a_lost_reply_gets_the_same_epoch(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    assert granted(server.leases.acquire("a", floor=0)) == epoch
    assert isinstance(server.leases.acquire("b", floor=0), Held)


def test_every_grant_is_above_every_grant_before(server: Server) -> None:
    epochs = []
    for turn in range(20):
        holder = f"holder-{turn}"
        epochs.append(granted(server.leases.acquire(holder, floor=0)))
        assert server.leases.resign(holder, epochs[-1])
    assert epochs == sorted(set(epochs))


def test_an_epoch_rises_although_the_servers_clock_is_behind_the_mark(server: Server) -> None:
    far = 4_000_000_000_000_000
    server.forget_since(far)
    assert granted(server.leases.acquire("a", floor=0)) == far + 1


def test_the_lease_passes_on_when_it_lapses(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    server.lapse()
    assert granted(server.leases.acquire("b", floor=epoch)) > epoch
    assert isinstance(server.leases.renew("a", epoch), Lost)


def test_nobody_waits_longer_than_one_lease_when_the_servers_clock_went_back(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    server.go_back_an_hour()
    looked = server.leases.look()
    assert isinstance(looked, Held)
    assert looked.remaining <= LEASE
    answer = server.leases.acquire("b", floor=epoch)
    assert isinstance(answer, Held)
    assert answer.remaining <= LEASE
    server.lapse()
    assert granted(server.leases.acquire("b", floor=epoch)) > epoch


# Renewals.


def test_a_renewal_extends(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    answer = server.leases.renew("a", epoch)
    assert isinstance(answer, Renewed)
    assert not answer.step_down
    assert isinstance(server.leases.acquire("b", floor=0), Held)


@pytest.mark.parametrize(("holder", "off"), [("b", 0), ("a", -1), ("a", 1), ("b", 1)])
def test_holder_and_epoch_must_both_match(server: Server, holder: str, off: int) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    answer = server.leases.renew(holder, epoch + off)
    assert isinstance(answer, Lost)
    assert (answer.holder, answer.epoch) == ("a", epoch)
    assert not server.leases.resign(holder, epoch + off)
    assert isinstance(server.leases.renew("a", epoch), Renewed)


def test_a_lapsed_lease_is_renewed_under_its_epoch_if_nobody_led_since(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    server.lapse()
    assert isinstance(server.leases.renew("a", epoch), Renewed)
    answer = server.leases.acquire("b", floor=epoch)
    assert isinstance(answer, Held)
    assert (answer.holder, answer.epoch) == ("a", epoch)


def test_a_lapsed_lease_is_lost_if_somebody_led_and_lapsed_since(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    server.lapse()
    granted(server.leases.acquire("b", floor=epoch))
    server.lapse()
    answer = server.leases.renew("a", epoch)
    assert isinstance(answer, Lost)
    assert (answer.holder, answer.epoch) == ("", 0)


# Resignations.


def test_a_resigned_lease_is_free_at_once(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    assert server.leases.resign("a", epoch)
    assert isinstance(server.leases.look(), Free)
    assert granted(server.leases.acquire("b", floor=epoch)) > epoch


def test_a_second_resignation_does_nothing_to_the_next_leader(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    server.leases.resign("a", epoch)
    following = granted(server.leases.acquire("a", floor=epoch))
    assert not server.leases.resign("a", epoch)
    assert isinstance(server.leases.renew("a", following), Renewed)


def test_a_renewal_in_flight_does_not_bring_a_resigned_lease_back(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    server.leases.resign("a", epoch)
    assert isinstance(server.leases.renew("a", epoch), Lost)
    assert isinstance(server.leases.look(), Free)


# Stepping down.


def test_the_leader_hears_at_its_next_renewal_that_it_was_asked_to_step_down(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    assert server.leases.ask_to_step_down(epoch)
    for _ in range(2):
        answer = server.leases.renew("a", epoch)
        assert isinstance(answer, Renewed)
        assert answer.step_down


def test_a_request_to_step_down_is_for_one_epoch(server: Server) -> None:
    assert not server.leases.ask_to_step_down(1)
    epoch = granted(server.leases.acquire("a", floor=0))
    assert not server.leases.ask_to_step_down(epoch - 1)
    assert server.leases.ask_to_step_down(epoch)
    server.leases.resign("a", epoch)
    following = granted(server.leases.acquire("a", floor=epoch))
    answer = server.leases.renew("a", following)
    assert isinstance(answer, Renewed)
    assert not answer.step_down


# A server that forgets.


def test_a_leader_that_lives_through_a_wipe_goes_on_under_its_epoch(server: Server) -> None:
    server.forget_since(4_000_000_000_000_000)  # the server's clock alone would not reach it
    epoch = granted(server.leases.acquire("a", floor=0))
    server.wipe()
    assert isinstance(server.leases.renew("a", epoch), Renewed)
    server.lapse()
    assert granted(server.leases.acquire("b", floor=0)) > epoch


def test_after_a_wipe_a_standby_leaves_the_leader_it_saw_one_lease_to_renew(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    server.wipe()
    answer = server.leases.acquire("b", floor=epoch)
    assert isinstance(answer, Held)
    assert (answer.holder, answer.epoch) == ("", epoch)
    assert answer.remaining <= LEASE
    assert server.leases.leader() is None
    assert not server.leases.ask_to_step_down(epoch)
    assert isinstance(server.leases.renew("a", epoch), Renewed)
    answer = server.leases.acquire("b", floor=epoch)
    assert isinstance(answer, Held)
    assert (answer.holder, answer.epoch) == ("a", epoch)


def test_after_a_wipe_a_standby_leads_when_the_leader_is_dead(server: Server) -> None:
    epoch = granted(server.leases.acquire("a", floor=0))
    server.wipe()
    assert isinstance(server.leases.acquire("b", floor=epoch), Held)
    server.lapse()
    following = granted(server.leases.acquire("b", floor=epoch))
    assert following > epoch
    assert isinstance(server.leases.renew("a", epoch), Lost)


def test_a_failover_that_lost_the_last_grant_leaves_its_leader_one_lease_to_renew(server: Server) -> None:
    old = granted(server.leases.acquire("z", floor=0))
    server.lapse()
    epoch = granted(server.leases.acquire("a", floor=old))
    server.forget_since(old)
    assert isinstance(server.leases.acquire("b", floor=epoch), Held)
    assert isinstance(server.leases.renew("a", epoch), Renewed)


def test_an_epoch_is_above_the_floor_also_on_an_empty_server(server: Server) -> None:
    far = 4_000_000_000_000_000
    assert isinstance(server.leases.acquire("a", floor=far), Held)
    server.lapse()
    assert granted(server.leases.acquire("a", floor=far)) == far + 1


# Looking, listening, failing.


def test_operators_see_who_leads_since_when(server: Server) -> None:
    assert server.leases.leader() is None
    answer = server.leases.acquire("a", floor=0)
    assert isinstance(answer, Granted)
    found = server.leases.leader()
    assert found is not None
    assert (found.holder, found.epoch, found.since) == ("a", answer.epoch, answer.server_time)
    assert timedelta(0) < found.remaining <= LEASE


def test_a_look_is_no_bid(server: Server) -> None:
    assert isinstance(server.leases.look(), Free)
    epoch = granted(server.leases.acquire("a", floor=0))
    answer = server.leases.look()
    assert isinstance(answer, Held)
    assert (answer.holder, answer.epoch) == ("a", epoch)


@pytest.mark.parametrize("deed", ["resign", "ask_to_step_down"])
def test_a_resignation_and_a_request_to_step_down_are_heard(server: Server, deed: str) -> None:
    subscription = server.leases.listen()
    assert subscription.drain()  # what was said before went unheard
    epoch = granted(server.leases.acquire("a", floor=0))
    drain_for(0.05, subscription.drain)
    if deed == "resign":
        server.leases.resign("a", epoch)
    else:
        server.leases.ask_to_step_down(epoch)
    if subscription.fileno() >= 0:
        poller = select.poll()
        poller.register(subscription.fileno(), select.POLLIN)
        assert poller.poll(5000)
    assert subscription.drain()
    assert not subscription.drain()
    subscription.close()
    subscription.close()


def drain_for(seconds: float, drain: object) -> None:
    """Read confirmations, which arrive a moment after subscribing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert callable(drain)
        drain()


def test_a_server_that_is_gone_is_an_error_of_its_own(server: Server) -> None:
    server.go_away()
    for call in (
        lambda: server.leases.acquire("a", floor=0),
        lambda: server.leases.renew("a", 1),
        lambda: server.leases.resign("a", 1),
        lambda: server.leases.ask_to_step_down(1),
        lambda: server.leases.look(),
        lambda: server.leases.leader(),
    ):
        with pytest.raises(StoreUnavailable):
            call()


# What only a real server shows.


def test_the_lease_expires_and_the_mark_does_not(on_redis: RedisServer) -> None:
    epoch = granted(on_redis.leases.acquire("a", floor=0))
    assert 0 < int(on_redis.client.pttl(LEADER)) <= 10_000
    assert int(on_redis.client.pttl(GRANTED)) == -1
    assert int(on_redis.client.get(GRANTED) or 0) == epoch
    assert set(on_redis.client.keys("*")) == {LEADER.encode(), GRANTED.encode()}


def test_a_standby_with_a_shorter_lease_does_not_shorten_the_leaders(on_redis: RedisServer) -> None:
    granted(on_redis.leases.acquire("a", floor=0))
    short = RedisLeases(on_redis.server.url, namespace="test", lease=timedelta(seconds=2))
    before = short.acquire("b", floor=0)
    on_redis.go_back_an_hour()
    after = short.acquire("b", floor=0)
    short.close()
    for answer in (before, after):
        assert isinstance(answer, Held)
        assert timedelta(seconds=5) < answer.remaining <= LEASE


def test_a_leader_key_without_an_end_gets_one(on_redis: RedisServer) -> None:
    granted(on_redis.leases.acquire("a", floor=0))
    on_redis.client.persist(LEADER)
    answer = on_redis.leases.acquire("b", floor=0)
    assert isinstance(answer, Held)
    assert answer.remaining == LEASE
    assert 0 < int(on_redis.client.pttl(LEADER)) <= 10_000


def test_scripts_that_the_server_forgot_are_sent_again(on_redis: RedisServer) -> None:
    epoch = granted(on_redis.leases.acquire("a", floor=0))
    on_redis.client.script_flush()
    assert isinstance(on_redis.leases.renew("a", epoch), Renewed)
    on_redis.client.script_flush()
    assert on_redis.leases.resign("a", epoch)


def test_calls_to_a_frozen_server_are_bounded(on_redis: RedisServer) -> None:
    leases = RedisLeases(on_redis.server.url, namespace="test", lease=timedelta(seconds=3))
    epoch = granted(leases.acquire("a", floor=0))
    on_redis.server.freeze()
    try:
        for call, bound in (
            (lambda: leases.renew("a", epoch), 0.5),
            (lambda: leases.resign("a", epoch), 1.0),
        ):
            asked = time.monotonic()
            with pytest.raises(StoreUnavailable):
                call()
            assert time.monotonic() - asked < bound + 0.4  # a busy machine
    finally:
        on_redis.server.thaw()
        leases.close()


def test_a_subscription_survives_a_restart_of_the_server() -> None:
    with LocalServer() as server:
        leases = RedisLeases(server.url, namespace="test", lease=LEASE)
        subscription = leases.listen()
        assert subscription.drain()
        server.stop()
        drain_for(0.3, subscription.drain)
        assert not subscription.drain()
        server.start()
        assert subscription.drain()  # made anew, something may have been missed
        drain_for(0.05, subscription.drain)
        leases.resign("a", granted(leases.acquire("a", floor=0)))
        wait_until(subscription.drain, 5, "the resignation to be heard")
        subscription.close()
        leases.close()


# Electors in threads of their own.


def elector(on_redis: RedisServer, holder: str, lease: timedelta = LEASE) -> tuple[Elector, LeaseProvider]:
    leases = RedisLeases(on_redis.server.url, namespace="test", lease=lease)
    made = Elector(
        leases,
        holder=holder,
        lease=lease,
        clock=SystemClock(),
        on_change=lambda: None,
        max_skew=timedelta(minutes=5),
    )
    made.start()
    return made, leases


def until(condition: object, seconds: float = 15.0) -> float:
    """Return how long it took until the condition held."""
    assert callable(condition)
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.0005)
    return time.monotonic() - start


@pytest.fixture
def pair(on_redis: RedisServer) -> Iterator[tuple[Elector, Elector]]:
    """A leader and its standby."""
    (leader, leases), (standby, others) = elector(on_redis, "a"), elector(on_redis, "b")
    leader.permit("")
    until(lambda: leader.lease() is not None)
    standby.permit("")
    until(lambda: "a leads" in standby.why)
    time.sleep(0.1)  # it listens by now
    yield leader, standby
    for each in (leader, standby):
        each.stop()
    leases.close()
    others.close()


def test_a_resignation_wakes_the_standby(pair: tuple[Elector, Elector]) -> None:
    leader, standby = pair
    assert leader.resign_now()
    assert leader.lease() is None
    assert until(lambda: standby.lease() is not None) < 0.5  # it would poll within 1 s


def test_a_request_to_step_down_is_obeyed_at_once(on_redis: RedisServer, pair: tuple[Elector, Elector]) -> None:
    leader, standby = pair
    lease = leader.lease()
    assert lease is not None
    assert on_redis.leases.ask_to_step_down(lease.epoch)
    assert until(lambda: standby.lease() is not None) < 1.0  # a renewal would come within 3.3 s
    assert leader.lease() is None


def test_a_withdrawn_permit_wakes_the_elector(pair: tuple[Elector, Elector]) -> None:
    leader, standby = pair
    leader.permit("the schedule cannot be read")
    assert leader.lease() is None
    assert until(lambda: standby.lease() is not None) < 0.5


def test_a_flood_on_the_wake_channel_is_no_flood_of_renewals(
    on_redis: RedisServer, pair: tuple[Elector, Elector]
) -> None:
    on_redis.client.config_resetstat()
    start = time.monotonic()
    while (flooded := time.monotonic() - start) < 0.5:
        on_redis.client.publish("tzbeat:{test}:wake", "look")
    asked = on_redis.client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert asked <= 2 * (flooded / 0.05 + 2)
    assert pair[0].lease() is not None


def test_an_elector_survives_a_restart_of_its_server(on_redis: RedisServer) -> None:
    alone, leases = elector(on_redis, "a", lease=timedelta(seconds=2))
    alone.permit("")
    until(lambda: alone.lease() is not None)
    before = alone.lease()
    on_redis.server.stop()
    until(lambda: alone.lease() is None)
    assert alone.why.startswith("the store does not serve")
    on_redis.server.start()
    until(lambda: alone.progress() or alone.lease() is not None)
    after = alone.lease()
    assert before is not None
    assert after is not None
    assert after.epoch > before.epoch  # the server came back empty: another might have led meanwhile
    alone.stop()
    leases.close()


@pytest.mark.parametrize("key", [LEADER, GRANTED])
def test_a_key_of_another_type_is_named_with_what_to_do(on_redis: RedisServer, key: str) -> None:
    on_redis.client.lpush(key, "somebody else's")
    with pytest.raises(StoreDamaged, match=re.escape(f"the key {key!r} is a list and must be a")):
        on_redis.leases.acquire("a", floor=0)


# Replicas.


def test_without_a_replica_none_has_what_was_written(server: Server) -> None:
    server.leases.acquire("a", floor=0)
    assert server.leases.replicated(1) == 0


def test_a_server_that_is_gone_tells_nothing_of_its_replicas(server: Server) -> None:
    server.go_away()
    with pytest.raises(StoreUnavailable):
        server.leases.replicated(1)


@pytest.fixture
def replicated_server() -> Iterator[tuple[LocalServer, LocalServer]]:
    with LocalServer() as primary, LocalServer(replica_of=primary) as replica:
        yield primary, replica


def test_a_replica_counts_that_has_what_was_written_and_a_frozen_one_does_not(
    replicated_server: tuple[LocalServer, LocalServer],
) -> None:
    primary, replica = replicated_server
    leases = RedisLeases(primary.url, namespace="test", lease=timedelta(seconds=2))
    wait_until(lambda: isinstance(leases.acquire("a", floor=0), Granted) and leases.replicated(1) == 1, 10, "it")
    replica.freeze()
    leases.acquire("a", floor=0)
    asked = time.monotonic()
    assert leases.replicated(1) == 0
    assert time.monotonic() - asked < 2 / 7, "it waited longer than a call may take"
    leases.look()  # a look writes nothing: what the frozen one lacks was written before
    assert leases.replicated(1) == 0
    replica.thaw()
    wait_until(lambda: leases.look() and leases.replicated(1) == 1, 10, "the replica to have caught up")
    leases.close()


def test_a_leader_without_its_replica_gives_way_after_a_lease_and_leads_again_when_it_is_back(
    replicated_server: tuple[LocalServer, LocalServer],
) -> None:
    primary, replica = replicated_server
    leases = RedisLeases(primary.url, namespace="test", lease=timedelta(seconds=1))
    beat = Elector(
        leases,
        holder="a",
        lease=timedelta(seconds=1),
        clock=SystemClock(),
        on_change=lambda: None,
        max_skew=timedelta(minutes=5),
        replicas=1,
    )
    beat.start()
    try:
        beat.permit("")
        until(lambda: beat.lease() is not None)
        replica.freeze()
        frozen = time.monotonic()

        def gave_way() -> bool:
            beat.progress()
            return beat.lease() is None and "tzbeat_wait_replicas" in beat.why

        until(gave_way)
        assert 0.6 < time.monotonic() - frozen < 4
        until(lambda: leases.leader() is None)
        replica.thaw()
        until(lambda: (beat.progress(), beat.lease() is not None)[1])
    finally:
        beat.stop()
        leases.close()

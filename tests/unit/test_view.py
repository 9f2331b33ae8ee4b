"""When a lapsed run lease tells of the worker, and when of the store."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from celery_tzbeat.beat.view import View
from celery_tzbeat.store.runs import heartbeat_of
from celery_tzbeat.testing import ManualClock

NOW = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)
LEASE = timedelta(seconds=60)


class Leader:
    """Looks at a store whose clock runs with ours, but for `store_ahead` seconds."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOW)
        self.view = View()
        self.store_ahead = 0.0
        self.reply_takes = 0.0

    def looks(self, seconds: float, *, every: float = 1.0) -> None:
        """Look each `every` seconds, for so long."""
        for _ in range(round(seconds / every)):
            self.clock.advance(every)
            asked, time = self.clock.reading(), self.clock.now()
            self.clock.advance(self.reply_takes)
            time += timedelta(seconds=self.store_ahead)
            self.view.saw(time, asked=asked, answered=self.clock.reading())


@pytest.fixture
def leader() -> Leader:
    return Leader()


def test_a_new_leader_has_seen_nothing(leader: Leader) -> None:
    assert leader.view.is_broken
    assert leader.view.seconds() == 0.0
    assert not leader.view.shows_dead(LEASE)


@pytest.mark.parametrize(("seconds", "dead"), [(80, False), (81, True), (3600, True)])
def test_a_run_is_dead_after_its_lease_and_two_heartbeats_in_unbroken_view(
    leader: Leader, seconds: float, dead: bool
) -> None:
    leader.looks(seconds)  # the first look sees no time pass
    assert leader.view.shows_dead(LEASE) is dead


@pytest.mark.parametrize(
    ("lease", "beat"), [(1.5, 0.25), (0.6, 0.25), (3.0, 0.5), (60.0, 10.0), (600.0, 10.0), (3600.0, 10.0)]
)
def test_a_heartbeat_is_a_sixth_of_the_lease_within_bounds(lease: float, beat: float) -> None:
    assert heartbeat_of(timedelta(seconds=lease)) == beat


def test_a_failed_call_breaks_the_view_for_a_lease_and_two_heartbeats(leader: Leader) -> None:
    leader.looks(1000)
    leader.view.break_off()
    assert leader.view.is_broken
    leader.looks(80)
    assert not leader.view.shows_dead(LEASE)
    leader.looks(1)
    assert leader.view.shows_dead(LEASE)


@pytest.mark.parametrize("jump", [-86400.0, -1.0, 1.0, 60.0])
def test_a_jump_of_the_stores_clock_breaks_the_view(leader: Leader, jump: float) -> None:
    leader.looks(1000)
    leader.store_ahead = jump
    leader.looks(80)
    assert not leader.view.shows_dead(LEASE)
    leader.looks(1)
    assert leader.view.shows_dead(LEASE)


def test_a_clock_that_was_always_off_or_drifts_does_not(leader: Leader) -> None:
    leader.store_ahead = 250.0
    for _ in range(100):
        leader.store_ahead += 0.001
        leader.looks(1)
    assert leader.view.shows_dead(LEASE)


def test_slow_replies_are_no_jump(leader: Leader) -> None:
    leader.looks(50)
    leader.reply_takes = 1.5
    leader.looks(20)
    leader.reply_takes = 0.0
    leader.looks(20)
    assert leader.view.shows_dead(LEASE)


def test_a_host_that_slept_sees_a_jump(leader: Leader) -> None:
    leader.looks(1000)
    leader.store_ahead += 30.0  # our monotonic clock stood still meanwhile
    leader.looks(1)
    assert leader.view.seconds() == 0.0


def test_rare_looks_are_no_break(leader: Leader) -> None:
    leader.looks(90, every=30)
    leader.looks(30, every=30)
    assert leader.view.shows_dead(LEASE)

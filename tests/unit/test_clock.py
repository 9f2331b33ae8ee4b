"""ManualClock: three clocks that move as told."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from celery_tzbeat.clock import Reading
from celery_tzbeat.testing.clock import ManualClock

START = datetime(2026, 11, 1, 5, 30, tzinfo=timezone.utc)


def test_advance_moves_all_three_clocks() -> None:
    clock = ManualClock(START)
    before = clock.reading()
    clock.advance(2.5)
    assert clock.now() == START + timedelta(seconds=2.5)
    assert clock.reading() == Reading(before.monotonic + 2.5, before.boottime + 2.5, before.wall + 2.5)


def test_suspend_leaves_the_monotonic_clock_standing() -> None:
    clock = ManualClock(START)
    before = clock.reading()
    clock.suspend(60)
    after = clock.reading()
    assert (after.monotonic, after.boottime, after.wall) == (
        before.monotonic,
        before.boottime + 60,
        before.wall + 60,
    )
    assert after.advance_since(before) == 60


def test_a_stepped_wall_clock_leaves_the_other_two_alone() -> None:
    clock = ManualClock(START)
    before = clock.reading()
    clock.set_wall(START - timedelta(hours=1))
    assert clock.now() == START - timedelta(hours=1)
    assert clock.reading() == Reading(before.monotonic, before.boottime, before.wall - 3600)
    assert clock.reading().advance_since(before) == 0


def test_any_zone_is_read_as_utc() -> None:
    clock = ManualClock(START.astimezone(timezone(timedelta(hours=2))))
    assert clock.now() == START
    assert clock.now().tzinfo is timezone.utc
    assert clock.reading().wall == START.timestamp()


def test_a_naive_instant_is_refused() -> None:
    with pytest.raises(ValueError, match="naive"):
        ManualClock(datetime(2026, 11, 1))
    with pytest.raises(ValueError, match="naive"):
        ManualClock(START).set_wall(datetime(2026, 11, 1))


@pytest.mark.parametrize("move", ["advance", "suspend"])
def test_time_does_not_go_back(move: str) -> None:
    clock = ManualClock(START)
    with pytest.raises(ValueError, match="set_wall"):
        getattr(clock, move)(-1)
    assert clock.now() == START

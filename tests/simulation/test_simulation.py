"""Beats that crash, hang, sleep and lose replies at any call: nothing is sent twice, nothing is lost, nothing is early.

A failure names its fault or its seed; `TZBEAT_NIGHTLY=1` runs every call of every beat, and many more seeds.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from checker import violations
from simulated import ENTRIES, LEASE, MAX_SKEW, START, TIMEOUT, Fault, Room, Trace, What, World

from celery_tzbeat.model import Unrun
from celery_tzbeat.store.protocol import Answer, Dispatch, Office, Verdict
from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.store import MemoryStore

NIGHTLY = bool(os.environ.get("TZBEAT_NIGHTLY"))
SEEDS = 3000 if NIGHTLY else 40

#: These wait for their own reasons; every other message is as late as its beat, not later.
OWN_DELAYS = ("shy", "broken")

#: By how much a message may be late, by what happened (design: section 2, first row): seconds, and the longest of the fault.
PROMISED: dict[What, tuple[float, float]] = {
    "crash before": (LEASE + 1, 2),
    "crash after": (LEASE + 1, 2),
    "request lost": (TIMEOUT + 1, 0),
    "reply lost": (TIMEOUT + 1, 0),
    "freeze before": (LEASE + 1, 15),
    "freeze after": (LEASE + 1, 15),
    "hang before": (2 * LEASE + 1, 25),
    "hang after": (2 * LEASE + 1, 25),
    "wipe before": (1, 0),
    "wipe after": (TIMEOUT + 1, 0),
}
#: A lost message puts off the tick that sends; skews and the steps of the tick come on top.
SLACK = 2.0


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of failures are meant to be logged here: to nobody."""
    caplog.set_level(logging.CRITICAL, logger="celery_tzbeat")


Call = tuple[int, Room, int, str]


def calls_of_a_run_without_faults() -> list[Call]:
    return World().run(25 if NIGHTLY else 8).calls


def first_calls_of_a_successor(fault: Fault) -> list[Call]:
    """Return what the beat calls that takes over from the one that `fault` stops: it has misfires to record."""
    calls = World(faults=[fault]).run(30).calls
    taken = next(i for i, (number, _, _, name) in enumerate(calls) if name == "take_office" and number != fault.beat)
    number = calls[taken][0]
    return [call for call in calls[taken:] if call[0] == number][: 60 if NIGHTLY else 12]


def dispatch_call(n: int) -> int:
    """Return which of the first leader's calls its `n`th dispatch is."""
    return [c for number, _, c, name in calls_of_a_run_without_faults() if (number, name) == (0, "dispatch")][n]


def test_without_faults_one_beat_leads_from_the_start_and_everything_is_sent_on_the_second() -> None:
    trace = World().run(120)
    assert violations(trace, lateness=timedelta(), but=OWN_DELAYS) == []
    assert [(name, fresh) for _, name, _, fresh in trace.offices] == [("beat0", True)]
    assert {start for _, _, start in trace.starts} == {START}
    assert {spec.name for spec in ENTRIES} == {message.entry for message in trace.sent}
    assert sum(message.entry == "pulse" for message in trace.sent) == 120
    assert [noted.record.event for noted in trace.audit if noted.record.entry == "broken"].count("dead") == 2


@pytest.mark.parametrize("what", PROMISED)
def test_at_every_call_of_a_successor_that_finds_misfires(what: What) -> None:
    promised, seconds = PROMISED[what]
    first = Fault(0, "store", dispatch_call(3), "freeze before", 15)
    calls = first_calls_of_a_successor(first)
    assert "record_unrun" in {name for _, _, _, name in calls}
    for number, room, call, name in calls:
        trace = World(faults=[first, Fault(number, room, call, what, seconds)]).run(70)
        lateness = timedelta(seconds=promised + LEASE + 1 + SLACK)
        found = violations(trace, lateness=lateness, but=OWN_DELAYS)
        assert found == [], f"{what} at call {call} to the {room} ({name}) of beat{number}"


@pytest.mark.parametrize("what", PROMISED)
def test_at_every_call_of_the_leader(what: What) -> None:
    promised, seconds = PROMISED[what]
    for number, room, call, name in calls_of_a_run_without_faults():
        if number and not NIGHTLY:
            continue
        trace = World(faults=[Fault(number, room, call, what, seconds)]).run(60)
        found = violations(trace, lateness=timedelta(seconds=promised + SLACK), but=OWN_DELAYS)
        assert found == [], f"{what} at call {call} to the {room} ({name}) of beat{number}"


def eventful(seed: int, **options: object) -> Trace:
    """Return a run of 90 s in which everything may happen, and 70 s in which things settle."""
    chooser = random.Random(f"plan {seed}")
    world = World(seed=seed, chance=0.02, latency=True, **options)  # type: ignore[arg-type]
    world.at(90, lambda: setattr(world, "chance", 0.0))
    match seed % 4:
        case 1:
            rooms: tuple[Room, ...] = chooser.choice((("store", "lease"), ("store",), ("lease",)))
            world.outage(chooser.uniform(5, 60), chooser.choice((2, 8, 15, 25)), *rooms)
        case 2:
            step = timedelta(seconds=chooser.choice((-15, -5, 5, 15)))
            clock = world.server_clock
            world.at(chooser.uniform(5, 80), lambda: clock.set_wall(clock.now() + step))
        case 3:
            both = chooser.random() < 0.7
            world.at(chooser.uniform(5, 80), lambda: world.wipe(leases=both))
    return world.run(160)


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 10):
        assert violations(eventful(seed)) == [], f"seed {seed}"


def test_a_seed_gives_the_same_run_again() -> None:
    assert eventful(7).lines == eventful(7).lines
    assert eventful(7).lines != eventful(11).lines


@pytest.mark.parametrize("seed", range(5))
def test_five_beats_killed_at_random_send_everything_once(seed: int) -> None:
    world = World(beats=5, skews=(0.0, 1.0, -1.0, 2.0, -2.0), seed=seed, latency=True)
    chooser = random.Random(seed)

    def kill() -> None:
        host = chooser.choice([host for host in world.hosts if not host.dead])
        world.crash(host, restart_after=chooser.uniform(0.5, 10))

    for second in range(5, 90, 8):
        world.at(second, kill)
    assert violations(world.run(150)) == []


# ---- the checker is no decoration: a ledger that breaks a promise is found out


class Unfenced(MemoryStore):
    """Believes whoever comes, whatever was decided."""

    def take_office(self, epoch: int, holder: str = "", **options: Any) -> Office | None:
        return super().take_office(max(epoch, self.data.fence), holder, **options)

    def refused(self, epoch: int) -> Verdict | None:
        return None

    def undecidable(self, entry: str, nominal: object) -> Verdict | None:
        return None

    def _dispatch(self, item: Dispatch, epoch: int) -> Answer:
        self.data.done.pop((item.occurrence.entry, item.bucket), None)
        return super()._dispatch(item, epoch)


class Forgetful(MemoryStore):
    """Tells a new leader of no cursor."""

    def take_office(self, epoch: int, holder: str = "", **options: Any) -> Office | None:
        office = super().take_office(epoch, holder, **options)
        return office and Office(office.time, office.fresh, {}, (), {})


class Silent(MemoryStore):
    """Moves the cursor over what does not run, and records nothing."""

    def record_unrun(self, rows: Sequence[Unrun], *, epoch: int) -> list[Answer]:
        before = len(self.data.audit)
        answers = super().record_unrun(rows, epoch=epoch)
        del self.data.audit[before:]
        return answers


class Boastful(MemoryStore):
    """Records as sent what it does not push, now and then."""

    def _dispatch(self, item: Dispatch, epoch: int) -> Answer:
        if item.occurrence.nominal.second == 30:
            item = Dispatch(item.occurrence, item.cursor, item.bucket, ())
        return super()._dispatch(item, epoch)


class Miscounting(MemoryStore):
    """Counts one too many."""

    def record_unrun(self, rows: Sequence[Unrun], *, epoch: int) -> list[Answer]:
        return super().record_unrun(
            [Unrun(r.event, r.entry, r.first, r.last, r.count + 1, r.reason, r.cursor) for r in rows], epoch=epoch
        )


class Markless(MemoryStore):
    """Forgets done marks and lets cursors go back: the two together are what keeps a lost reply harmless."""

    def undecidable(self, entry: str, nominal: object) -> Verdict | None:
        return None

    def settled(self, *settlement: Any) -> None:
        super().settled(*settlement)
        self.data.done.clear()


@pytest.mark.parametrize(
    ("ledger", "what", "complaint"),
    [
        (Unfenced, "freeze before", "twice"),
        (Markless, "reply lost", "twice"),
        (Forgetful, "crash before", "neither sent nor recorded"),
        (Silent, "crash before", "neither sent nor recorded"),
        (Boastful, "", "neither sent nor recorded"),
        (Miscounting, "crash before", "it counts"),
    ],
)
def test_the_checker_finds_out_a_ledger_that(ledger: Callable[..., MemoryStore], what: Any, complaint: str) -> None:
    faults = [Fault(0, "store", dispatch_call(7), what, 15)] if what else []

    def make(clock: ManualClock) -> MemoryStore:
        return ledger(clock, max_skew=MAX_SKEW)

    found = violations(World(faults=faults, make_store=make).run(60))
    assert any(complaint in sentence for sentence in found), found


def test_the_checker_finds_out_a_beat_that_sends_too_early_or_too_late() -> None:
    trace = World().run(30)
    trace.sent[5].at += timedelta(seconds=20)
    trace.sent[6].clock -= timedelta(seconds=20)
    found = violations(trace, lateness=timedelta(seconds=1), but=OWN_DELAYS)
    assert any("late, at most" in sentence for sentence in found)
    assert any("before its time" in sentence for sentence in found)

"""The same beats and a broker that is not the store: every due instant reaches the broker, copies have a reason and one id.

A failure names its fault or its seed; `TZBEAT_NIGHTLY=1` runs every call of every beat, and many more seeds.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from checker import violations
from simulated import ENTRIES, LEASE, MAX_SKEW, START, TIMEOUT, Fault, Room, Spec, Trace, What, World
from test_simulation import OWN_DELAYS, PROMISED, SLACK

from celery_tzbeat.beat.publisher import Fate
from celery_tzbeat.envelopes import Envelope
from celery_tzbeat.model import Occurrence
from celery_tzbeat.store.protocol import Answer, Claim, Claimed, OpenOccurrence, Verdict
from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.store import MemoryStore

NIGHTLY = bool(os.environ.get("TZBEAT_NIGHTLY"))
SEEDS = 3000 if NIGHTLY else 20
PULSE = Spec("pulse", "@every 1s")

#: As without claims; a message whose wire broke, or that was refused, is tried again a second later.
BY_CLAIMS: dict[What, tuple[float, float]] = {
    **{what: (seconds + 1, longest) for what, (seconds, longest) in PROMISED.items()},
    "request late": (TIMEOUT + 2, TIMEOUT + 2.2),
    "refused": (2, 0),
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of failures are meant to be logged here: to nobody."""
    caplog.set_level(logging.CRITICAL, logger="celery_tzbeat")


Call = tuple[int, Room, int, str]


def world(*specs: Spec, **options: Any) -> World:
    return World(specs or ENTRIES, claims=True, **options)


def can_happen(what: What, room: Room) -> bool:
    return room == "broker" if what == "refused" else room != "lease" if what == "request late" else True


def copies(trace: Trace) -> list[tuple[str, datetime]]:
    """Return what arrived more than once."""
    arrived = [(sent.entry, sent.nominal) for sent in trace.sent]
    return sorted({one for one in arrived if arrived.count(one) > 1})


def nominals(trace: Trace, entry: str) -> list[float]:
    """Return the nominals of an entry's messages as they arrived, in seconds of the run."""
    return [(sent.nominal - START).total_seconds() for sent in trace.sent if sent.entry == entry]


def audited(trace: Trace, event: str, entry: str) -> list[float]:
    return [
        (noted.record.first - START).total_seconds()
        for noted in trace.audit
        if (noted.record.event, noted.record.entry) == (event, entry) and noted.record.first
    ]


# ---- without a fault


def test_without_faults_everything_arrives_once_and_on_the_second() -> None:
    trace = world().run(120)
    assert violations(trace, lateness=timedelta(), but=OWN_DELAYS) == []
    assert copies(trace) == []
    assert [(name, fresh) for _, name, _, fresh in trace.offices] == [("beat0", True)]
    assert {spec.name for spec in ENTRIES} == {message.entry for message in trace.sent}
    assert [noted.record.event for noted in trace.audit if noted.record.entry == "broken"].count("dead") == 2


def test_without_faults_latency_makes_no_copies() -> None:
    for seed in range(5):
        trace = world(latency=True, seed=seed).run(60)
        assert violations(trace, lateness=timedelta(seconds=8), but=OWN_DELAYS) == [], seed
        assert copies(trace) == [], seed


# ---- a fault at every call


def calls_of_a_run_without_faults() -> list[Call]:
    return world().run(25 if NIGHTLY else 3).calls


@pytest.mark.parametrize("what", BY_CLAIMS)
def test_at_every_call_of_the_leader(what: What) -> None:
    calls = [call for call in calls_of_a_run_without_faults() if NIGHTLY or call[0] == 0]
    assert {(room, name) for _, room, _, name in calls} >= {
        ("store", "claim"),
        ("store", "confirm"),
        ("broker", "publish"),
        ("store", "open_occurrences"),
    }
    promised, seconds = BY_CLAIMS[what]
    for number, room, call, name in calls:
        if not can_happen(what, room) or (not NIGHTLY and room == "broker" and call % 3):
            continue
        trace = world(faults=[Fault(number, room, call, what, seconds)]).run(35)
        found = violations(trace, lateness=timedelta(seconds=promised + SLACK), but=OWN_DELAYS)
        assert found == [], f"{what} at call {call} to the {room} ({name}) of beat{number}"


def calls_of_a_successor(first: Fault) -> list[Call]:
    calls = world(faults=[first]).run(30).calls
    taken = next(i for i, (number, _, _, name) in enumerate(calls) if name == "take_office" and number != first.beat)
    number = calls[taken][0]
    return [call for call in calls[taken:] if call[0] == number][: 80 if NIGHTLY else 24]


@pytest.mark.parametrize("what", BY_CLAIMS)
@pytest.mark.parametrize("name", ["publish", "confirm"])
def test_at_every_call_of_a_successor_that_finds_claims_and_misfires(name: str, what: What) -> None:
    promised, seconds = BY_CLAIMS[what]
    room: Room = "broker" if name == "publish" else "store"
    call = [c for number, _, c, found in calls_of_a_run_without_faults() if (number, found) == (0, name)][-1]
    first = Fault(0, room, call, "freeze before", 15)
    calls = calls_of_a_successor(first)
    assert {"reclaim", "record_unrun", "publish", "confirm"} <= {name for *_, name in calls}
    for number, room, call, name in calls[:: 1 if NIGHTLY else 3]:
        if can_happen(what, room):
            trace = world(faults=[first, Fault(number, room, call, what, seconds)]).run(60)
            lateness = timedelta(seconds=promised + LEASE + 1 + SLACK)
            found = violations(trace, lateness=lateness, but=OWN_DELAYS)
            assert found == [], f"{what} at call {call} to the {room} ({name}) of beat{number}"


# ---- seeds


def eventful(seed: int) -> Trace:
    """Return a run of 90 s in which everything may happen, and 100 s in which things settle."""
    chooser = random.Random(f"claims {seed}")
    made = world(seed=seed, chance=0.02, latency=True)
    made.at(90, lambda: setattr(made, "chance", 0.0))
    match seed % 4:
        case 1:
            rooms: tuple[Room, ...] = chooser.choice((("broker",), ("store", "broker"), ("store", "lease", "broker")))
            made.outage(chooser.uniform(5, 60), chooser.choice((2, 8, 15, 25)), *rooms)
        case 2:
            step = timedelta(seconds=chooser.choice((-15, -5, 5, 15)))
            clock = made.server_clock
            made.at(chooser.uniform(5, 80), lambda: clock.set_wall(clock.now() + step))
        case 3:
            both = chooser.random() < 0.7
            made.at(chooser.uniform(5, 80), lambda: made.wipe(leases=both))
    return made.run(190)


@pytest.mark.parametrize("first", range(0, SEEDS, 4))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 4):
        assert violations(eventful(seed)) == [], f"seed {seed}"


def test_a_seed_gives_the_same_run_again() -> None:
    assert eventful(3).lines == eventful(3).lines


@pytest.mark.parametrize("seed", range(5))
def test_five_beats_killed_at_random_lose_nothing(seed: int) -> None:
    made = world(beats=5, skews=(0.0, 1.0, -1.0, 2.0, -2.0), seed=seed, latency=True)
    chooser = random.Random(seed)

    def kill() -> None:
        host = chooser.choice([host for host in made.hosts if not host.dead])
        made.crash(host, restart_after=chooser.uniform(0.5, 10))

    for second in range(5, 90, 8):
        made.at(second, kill)
    assert violations(made.run(150)) == []


# ---- outages


@pytest.mark.parametrize("rooms", [("broker",), ("store", "broker"), ("store", "lease", "broker")], ids="+".join)
@pytest.mark.parametrize("length", [0.5, 5, 20, 45])
def test_an_outage_makes_late_and_loses_nothing(length: float, rooms: tuple[Room, ...]) -> None:
    made = world()
    made.outage(25.2, length, *rooms)
    trace = made.run(150)
    late = timedelta(seconds=2 * length + 2 * LEASE)
    assert violations(trace, lateness=late, but=OWN_DELAYS) == []
    assert nominals(trace, "pulse")[:120] == list(range(1, 121))
    assert copies(trace) == []
    assert not any(25.2 <= (sent.at - START).total_seconds() < 25.2 + length for sent in trace.sent)


def test_an_outage_of_the_broker_leaves_one_open_claim_of_an_entry() -> None:
    made = world(PULSE, Spec("other", "@every 2s"))
    made.outage(5.2, 60, "broker")
    found: list[OpenOccurrence] = []
    made.at(60, lambda: found.extend(made.store.open_occurrences()))
    trace = made.run(150)
    assert sorted(item.occurrence.entry for item in found) == ["other", "pulse"]
    assert violations(trace, lateness=timedelta(seconds=130)) == []


def test_an_outage_longer_than_the_grace_is_judged_by_the_policy_when_it_is_over() -> None:
    made = world(Spec("latest", "@every 1s", grace=5), Spec("all", "@every 1s", grace=5, catchup="all"))
    made.outage(10.2, 20, "broker")
    trace = made.run(90)
    assert violations(trace, lateness=timedelta(seconds=45)) == []
    assert nominals(trace, "all")[:85] == list(range(1, 86))
    assert nominals(trace, "latest")[:11] == list(range(1, 12))  # what was claimed is sent, whatever the policy
    assert audited(trace, "coalesced", "latest") != []


def test_a_leader_whose_way_to_the_broker_alone_is_cut_leaves_leading_to_another() -> None:
    made = world()
    made.at(25.2, lambda: made.hosts[0].cut.add("broker"))
    trace = made.run(120)
    assert violations(trace, lateness=timedelta(seconds=2 * LEASE + 5), but=OWN_DELAYS) == []
    assert trace.leaders != ["beat0"]


def test_a_lone_beat_cut_off_from_the_broker_sends_when_it_is_back() -> None:
    made = world(beats=1)
    made.outage(25.2, 30, "broker")
    trace = made.run(150)
    assert violations(trace, lateness=timedelta(seconds=65), but=OWN_DELAYS) == []
    assert len(trace.offices) == 1


# ---- refusals


def test_what_the_broker_refuses_for_a_minute_is_a_dead_letter_and_the_others_are_on_time() -> None:
    lost = Spec("lost", "@every 100s")
    made = world(PULSE, lost, refuses=lambda entry, nominal: entry == "lost")
    trace = made.run(300)
    assert violations(trace, lateness=timedelta()) == []
    assert nominals(trace, "lost") == []
    assert audited(trace, "dead", "lost") == [20, 120, 220]
    assert {entry for entry, _ in trace.refusals} == {"lost"}
    assert set(made.store.dead_letters()) == {
        Occurrence("lost", START + timedelta(seconds=second)).key for second in (20, 120, 220)
    }


def test_an_entry_that_is_refused_for_long_piles_up_no_claims() -> None:
    made = world(Spec("lost", "@every 1s"), refuses=lambda *_: made.now < 100e6)
    found: list[int] = []
    for second in range(5, 100, 5):
        made.at(second, lambda: found.append(len(made.store.open_occurrences())))
    trace = made.run(250)
    assert max(found) == 1
    assert violations(trace) == []
    assert audited(trace, "dead", "lost") == [1]


def test_a_queue_that_is_missing_for_less_than_a_minute_makes_no_dead_letter() -> None:
    made = world(Spec("late", "@every 2s"), PULSE, refuses=lambda entry, _: entry == "late" and 10e6 <= made.now < 55e6)
    trace = made.run(150)
    assert violations(trace, lateness=timedelta(seconds=65)) == []
    assert len([refused for refused in trace.refusals if refused[0] == "late"]) == 6
    assert audited(trace, "dead", "late") == []
    assert nominals(trace, "late")[:60] == list(range(2, 122, 2))


def test_a_leader_that_dies_between_two_refusals_starts_no_count_too_low() -> None:
    made = world(Spec("lost", "@every 100s"), PULSE, refuses=lambda entry, _: entry == "lost")
    made.at(22.5, lambda: made.crash(made.hosts[0], 5))
    trace = made.run(200)
    assert violations(trace) == []
    assert audited(trace, "dead", "lost") == [20, 120]


# ---- claims of others


def crash_between_claim_and_confirm(*specs: Spec, then: tuple[Spec, ...]) -> Trace:
    """Let the leader die with an open claim of second 10; the next leader is of a newer deploy."""
    made = world(*specs, beats=1)
    made.outage(9.8, 5, "broker")
    made.at(11, lambda: made.crash(made.hosts[0], 2, then))
    return made.run(60)


def test_the_claim_of_an_entry_that_the_next_leader_lacks_is_sent() -> None:
    trace = crash_between_claim_and_confirm(Spec("deleted", "@every 10s"), PULSE, then=(PULSE,))
    assert nominals(trace, "deleted") == [10]
    assert trace.open == []


def test_the_claim_of_an_entry_whose_schedule_was_changed_is_sent() -> None:
    changed = Spec("edited", "@every 7s")
    trace = crash_between_claim_and_confirm(Spec("edited", "@every 10s"), then=(changed,))
    assert nominals(trace, "edited")[0] == 10
    assert len(set(nominals(trace, "edited"))) == len(nominals(trace, "edited"))
    assert trace.open == []


def test_a_claim_is_sent_however_old_it_is() -> None:
    old = Spec("old", "@every 10s", grace=1, catchup="skip")
    made = world(old, beats=1)
    made.outage(9.8, 5, "broker")
    made.at(11, lambda: made.crash(made.hosts[0], 100))
    trace = made.run(180)
    assert nominals(trace, "old")[0] == 10
    assert violations(trace) == []


def test_a_leader_frozen_in_the_middle_of_a_batch_sends_one_late_copy_at_most() -> None:
    specs = tuple(Spec(f"e{i}", "@every 10s") for i in range(20))
    publish = 8  # of 20
    trace = world(*specs, faults=[Fault(0, "broker", publish, "freeze before", 30)]).run(90)
    assert violations(trace, lateness=timedelta(seconds=LEASE + 2)) == []
    assert len(copies(trace)) in range(1, publish + 1)  # sent and not confirmed, and the one it was frozen with
    assert [sent.beat for sent in trace.sent if not sent.trusted] == ["beat0"]


def test_a_store_that_is_lost_after_publishing_leaves_no_more_than_a_batch_to_send_again() -> None:
    specs = tuple(Spec(f"e{i}", "@every 10s") for i in range(150))
    made = world(*specs, beats=1, faults=[Fault(0, "store", call, "request lost") for call in range(8, 14)])
    trace = made.run(60)
    assert violations(trace, lateness=timedelta(seconds=25)) == []


# ---- the checker is no decoration: a ledger or a broker that breaks a promise is found out


class Unlisted(MemoryStore):
    """Tells nobody what stands open."""

    def open_occurrences(self) -> list[OpenOccurrence]:
        return []


class Unfenced(MemoryStore):
    """Believes whoever comes, whatever was decided."""

    def refused(self, epoch: int) -> Verdict | None:
        return None

    def undecidable(self, entry: str, nominal: datetime) -> Verdict | None:
        return None

    def _claim(self, claim: Claim, epoch: int) -> Verdict:
        self.data.done.pop((claim.occurrence.entry, claim.bucket), None)
        return super()._claim(claim, epoch)


class Hasty(MemoryStore):
    """Settles a claim when it is made."""

    def claim(self, claims: Sequence[Claim], *, epoch: int) -> list[Answer]:
        answers = super().claim(claims, epoch=epoch)
        self.confirm([Claimed(claim.occurrence, claim.bucket) for claim in claims], epoch=epoch)
        return answers


class Endless(MemoryStore):
    """Says that it confirmed, and leaves the claim open."""

    def confirm(self, claimed: Sequence[Claimed], *, epoch: int) -> list[Answer]:
        return [Answer(Verdict.DONE) for _ in claimed]


@pytest.mark.parametrize(
    ("ledger", "what", "name", "complaint"),
    [
        (Unlisted, "crash before", "publish", "never settled"),
        (Unfenced, "freeze before", "claim", "still open"),
        (Hasty, "crash before", "publish", "recorded as sent, and was not"),
        (Endless, "", "", "still open"),
    ],
)
def test_the_checker_finds_out_a_ledger_that(
    ledger: Callable[..., MemoryStore], what: Any, name: str, complaint: str
) -> None:
    faults = []
    if what:
        calls = [
            (room, c) for number, room, c, found in calls_of_a_run_without_faults() if (number, found) == (0, name)
        ]
        faults = [Fault(0, calls[2][0], calls[2][1], what, 15)]

    def make(clock: ManualClock) -> MemoryStore:
        return ledger(clock, max_skew=MAX_SKEW)

    found = violations(world(faults=faults, make_store=make).run(60))
    assert any(complaint in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("times", "complaint"), [(0, "recorded as sent, and was not"), (2, "knew that the broker had")]
)
def test_the_checker_finds_out_a_broker_that_loses_or_doubles(times: int, complaint: str) -> None:
    made = world()
    publish = made.broker.publish

    def bad(envelope: Envelope) -> tuple[Fate, str]:
        answer = publish(envelope)
        if made.now > 20e6:
            made.broker.arrived[:] = made.broker.arrived * times
        return answer

    made.broker.publish = bad  # type: ignore[method-assign]
    found = violations(made.run(40))
    assert any(complaint in sentence for sentence in found), found

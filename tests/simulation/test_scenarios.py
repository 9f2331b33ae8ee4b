"""Stories that people told of schedulers in production, on three beats of ours: what goes wrong is named in each test."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import timedelta, timezone

import pytest
from checker import violations
from simulated import ENTRIES, LEASE, MAX_SKEW, START, Spec, Trace, World

UTC = timezone.utc
DAY = 86400.0
PULSE = Spec("pulse", "@every 1s")
OWN_DELAYS = ("shy", "broken")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="celery_tzbeat")


def seconds(trace: Trace, entry: str) -> list[float]:
    """Return the nominals of an entry's messages, in seconds of the run."""
    return [(sent.nominal - START).total_seconds() for sent in trace.sent if sent.entry == entry]


def when(trace: Trace, entry: str) -> list[float]:
    """Return when they were sent."""
    return [(sent.at - START).total_seconds() for sent in trace.sent if sent.entry == entry]


def at(second: float) -> str:
    """Return a crontab, in UTC, of the time of day at a second of the run."""
    moment = START + timedelta(seconds=second)
    return f"{moment.second} {moment.minute} {moment.hour} * * * UTC"


# ---- the lease


@pytest.mark.parametrize("suspended", [False, True], ids=["stopped", "asleep"])
def test_a_leader_stopped_right_before_an_instant_is_replaced_and_wakes_up_harmless(suspended: bool) -> None:
    world = World()
    world.at(29.9, lambda: world.hosts[0].freeze(60, suspended=suspended))
    trace = world.run(120)
    assert violations(trace, lateness=timedelta(seconds=LEASE + 1), but=OWN_DELAYS) == []
    assert trace.alive == ["beat0", "beat1", "beat2"]
    assert next(name for _, name, _, _ in trace.offices) == "beat0"
    assert len(trace.offices) == 2
    assert [kind for kind, _ in world.hosts[0].changes] == ["leads", "stands by"]


def test_a_lock_deleted_by_hand_or_taken_by_a_stranger_stops_nothing_for_long() -> None:
    world = World((PULSE,))
    world.at(30, world.leases.wipe)
    world.at(60, world.leases.wipe)
    world.at(60, lambda: world.leases.acquire("a stranger", floor=0))
    trace = world.run(120)
    assert violations(trace, lateness=timedelta(seconds=2 * LEASE + 1)) == []
    assert seconds(trace, "pulse")[:119] == list(range(1, 120))


def test_two_leaders_by_a_jump_of_the_servers_clock_send_nothing_twice() -> None:
    world = World()
    step = timedelta(seconds=2 * LEASE)
    for second in (20, 40, 60):
        world.at(second, lambda: world.server_clock.set_wall(world.server_clock.now() + step))
    assert violations(world.run(120), lateness=timedelta(seconds=LEASE + 1), but=OWN_DELAYS) == []


# ---- failover


@pytest.mark.parametrize("length", [0.5, 5, 20, 45])
def test_after_an_outage_of_the_server_some_beat_leads_and_makes_up(length: float) -> None:
    world = World()
    world.outage(25, length)
    trace = world.run(150)
    assert violations(trace, lateness=timedelta(seconds=length + 5), but=OWN_DELAYS) == []
    assert trace.alive == ["beat0", "beat1", "beat2"]
    assert not any(25 <= (sent.at - START).total_seconds() < 25 + length for sent in trace.sent)


def test_a_server_that_is_down_when_the_beats_start_is_waited_for() -> None:
    world = World()
    world.outage(0, 20)
    trace = world.run(90)
    assert violations(trace, lateness=timedelta(seconds=3), but=OWN_DELAYS) == []
    assert 20 <= (trace.offices[0][0] - START).total_seconds() < 25


def test_what_came_due_during_the_election_is_sent_by_the_new_leader() -> None:
    world = World((Spec("once", at(60)), Spec("minutely", "* * * * * UTC")))
    world.at(58, lambda: world.crash(world.hosts[0]))
    trace = world.run(150)
    assert violations(trace) == []
    assert seconds(trace, "once") == [60]
    assert when(trace, "once")[0] <= 58 + LEASE + 1
    assert not trace.sent[0].late


def test_a_leader_whose_way_to_the_store_is_cut_leaves_leading_to_another() -> None:
    """The lease's server is another one, and answers: nothing but the beat itself can notice."""
    world = World()
    world.at(25, lambda: world.hosts[0].cut.add("store"))
    trace = world.run(120)
    assert violations(trace, lateness=timedelta(seconds=2 * LEASE + 1), but=OWN_DELAYS) == []
    assert trace.leaders != ["beat0"]
    assert "store does not answer" in world.hosts[0].elector.why or "leads at epoch" in world.hosts[0].elector.why


def test_a_leader_that_is_cut_off_from_the_lease_only_is_replaced() -> None:
    world = World()
    world.at(25, lambda: world.hosts[0].cut.add("lease"))
    trace = world.run(120)
    assert violations(trace, lateness=timedelta(seconds=LEASE + 1), but=OWN_DELAYS) == []
    assert trace.leaders != ["beat0"]


def test_a_lone_beat_that_was_cut_off_for_long_leads_again() -> None:
    world = World(beats=1)
    world.outage(25, 30, "store")
    trace = world.run(150)
    assert violations(trace, lateness=timedelta(seconds=30 + LEASE + 2), but=OWN_DELAYS) == []


# ---- no duplicates


def test_restarts_within_the_grace_repeat_nothing_and_new_entries_start_from_now() -> None:
    nightly = Spec("nightly", at(10), grace=3600)
    world = World((nightly,), beats=1)
    newer = (nightly, *(Spec(f"new {i}", f"@every {i}m", grace=3600) for i in (20, 30, 60)))
    for i, specs in enumerate(((nightly,), (nightly,), (nightly,), newer, newer)):
        world.at(1800 + 60 * i, lambda specs=specs: world.crash(world.hosts[-1], 5, specs))  # type: ignore[misc]
    trace = world.run(2200)
    assert seconds(trace, "nightly") == [10]
    assert {sent.entry for sent in trace.sent} == {"nightly"}


def test_editing_other_entries_does_not_send_an_entry_again() -> None:
    world = World((PULSE, Spec("other", "@every 10m")), beats=1)
    for i in range(20):
        specs = (PULSE, Spec("other", f"@every {11 + i}m"))
        world.at(5.05 + 2 * i, lambda specs=specs: world.crash(world.hosts[-1], 0.1, specs))  # type: ignore[misc]
    trace = world.run(80)
    assert seconds(trace, "pulse")[:78] == list(range(1, 79))


# ---- edited entries


def deploy(world: World, *specs: Spec) -> None:
    """Replace every beat by one with these entries, one after another."""
    for i, host in enumerate([host for host in world.hosts if not host.dead]):
        world.at(world.now / 1e6 + i, lambda host=host: world.crash(host, 2, specs))  # type: ignore[misc]


def test_a_schedule_made_shorter_is_in_force_at_once() -> None:
    world = World((Spec("e", "@every 1h", grace=15),))
    world.at(100, lambda: deploy(world, Spec("e", "* * * * * UTC", grace=15)))
    assert seconds(world.run(210), "e") == [140, 200]  # :32:00 and :33:00; :30 and :31 were before the edit


def test_a_time_moved_to_a_later_one_is_sent_at_the_later_one_only() -> None:
    world = World((Spec("e", at(130)),))
    world.at(60, lambda: deploy(world, Spec("e", at(200))))
    assert seconds(world.run(260), "e") == [200]


def test_a_time_moved_into_the_past_is_not_sent() -> None:
    world = World((Spec("e", at(3600)),))
    world.at(1800, lambda: deploy(world, Spec("e", at(600))))
    assert seconds(world.run(1900), "e") == []


def test_an_instant_within_a_rolling_deploy_that_changes_the_schedule_is_not_lost() -> None:
    world = World((Spec("e", "@every 10s"),))
    world.at(19, lambda: deploy(world, Spec("e", "@every 4s")))
    # From the cursor on, since the grace of an edit reaches back to it: the deploy took until 27.
    trace = world.run(60)
    assert seconds(trace, "e")[:9] == [10, 12, 16, 20, 24, 28, 32, 36, 40]
    assert when(trace, "e")[1] > 25


def test_an_entry_that_is_taken_out_stops_and_goes_on_where_it_was_when_it_returns() -> None:
    world = World((PULSE, Spec("e", "@every 10s", grace=5)))
    world.at(25, lambda: deploy(world, PULSE))
    world.at(75, lambda: deploy(world, PULSE, Spec("e", "@every 10s", grace=5)))
    trace = world.run(130)
    gone = [s for s, sent in zip(when(trace, "e"), seconds(trace, "e")) if 40 <= s < 75]
    assert gone == []
    unrun = [noted.record for noted in trace.audit if noted.record.event == "coalesced"]
    assert sorted(seconds(trace, "e")) == seconds(trace, "e")
    assert (
        sum(record.count for record in unrun) + len(seconds(trace, "e")) == 13
    )  # 10, 20 … 130: none is unaccounted for
    assert seconds(trace, "pulse")[:125] == list(range(1, 126))


def test_an_empty_configuration_by_mistake_forgets_nothing() -> None:
    world = World((PULSE,))
    world.at(20, lambda: deploy(world))
    world.at(50, lambda: world.trace.lines.append(f"cursors: {sorted(world.store.cursors())}"))
    world.run(60)
    assert "cursors: ['pulse']" in world.trace.lines


def test_the_first_in_line_that_cannot_be_sent_does_not_keep_the_others_waiting() -> None:
    world = World((Spec("a", at(2), fails_for=lambda _: True), Spec("b", at(3)), Spec("c", at(13))))
    trace = world.run(40)
    assert (when(trace, "b"), when(trace, "c")) == ([3], [13])
    assert [noted.record.event for noted in trace.audit if noted.record.entry == "a"] == ["new", "dead"]


def test_sixty_zones_are_each_on_time() -> None:
    zones = ["Pacific/Pago_Pago", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Kiritimati"]
    specs = (
        *(Spec(f"{zone} {i}", f"*/5 * * * * {zone}") for zone in zones for i in range(12)),
        Spec("seven", "@every 7s"),
    )
    trace = World(specs, beats=1, skews=(0.0,)).run(1000)
    assert violations(trace, lateness=timedelta()) == []
    assert {tuple(seconds(trace, spec.name)) for spec in specs[:-1]} == {(20.0, 320.0, 620.0, 920.0)}


# ---- a store that lost its data


def restored(trace: Trace) -> list[int]:
    return [noted.record.count for noted in trace.audit if noted.record.event == "wiped"]


def test_a_living_leader_writes_the_cursors_back_and_nothing_is_sent_twice_or_lost() -> None:
    world = World()
    world.at(30.5, world.wipe)
    trace = world.run(90)
    assert violations(trace, lateness=timedelta(seconds=1), but=OWN_DELAYS) == []
    assert restored(trace) == [len(ENTRIES)]
    assert len(trace.starts) == len(ENTRIES)


@pytest.mark.parametrize("length", [3, 8, 15, 40])
def test_a_server_that_restarts_without_its_data_is_filled_by_the_leader_that_lived_through_it(length: float) -> None:
    world = World()
    world.outage(30.5, length)
    world.at(31, world.wipe)
    trace = world.run(120)
    # a lease more where trust ran out: another might have led, and a server that forgot leaves time for it
    bound = timedelta(seconds=length + 5 + (LEASE if length >= LEASE / 2 else 0))
    assert violations(trace, lateness=bound, but=OWN_DELAYS) == []
    assert restored(trace) == [len(ENTRIES)]
    assert len(trace.starts) == len(ENTRIES)


def test_a_leader_that_was_frozen_does_not_come_back_into_a_wiped_store() -> None:
    """A led, froze, B led on, everything is wiped, A wakes: B leads on, and nothing of what it sent comes again."""
    world = World()
    world.at(20, lambda: world.hosts[0].freeze(40))
    world.at(59.99, world.wipe)
    trace = world.run(120)
    assert violations(trace, lateness=timedelta(seconds=2 * LEASE + 1), but=OWN_DELAYS) == []
    assert [name for _, name, _, _ in trace.offices].count("beat0") == 1


def test_two_wipes_in_a_row_are_two_wipes() -> None:
    world = World()
    for second in (30.5, 30.6, 33.0):
        world.at(second, world.wipe)
    trace = world.run(90)
    assert violations(trace) == []
    assert len(trace.starts) == len(ENTRIES)


def test_a_beat_that_finds_an_empty_store_sends_nothing_that_was_due_before() -> None:
    world = World(beats=1)
    world.at(30.5, lambda: (world.crash(world.hosts[0], 5), world.wipe()))
    trace = world.run(90)
    assert violations(trace) == []
    assert not any(
        sent.nominal < START + timedelta(seconds=35.5) and sent.at > START + timedelta(seconds=31)
        for sent in trace.sent
    )


# ---- wrong clocks


@pytest.mark.parametrize("skew", [DAY, -DAY, 400.0, -400.0])
def test_a_beat_with_a_wrong_clock_does_not_lead_and_says_why(skew: float) -> None:
    world = World(beats=2, skews=(skew, 0.0))
    trace = world.run(60)
    trace.skew = timedelta(seconds=1)  # of the one that may lead
    assert violations(trace, lateness=timedelta(seconds=1), but=OWN_DELAYS) == []
    assert trace.leaders == ["beat1"]
    assert "more than tzbeat_max_skew" in world.hosts[0].elector.why
    (presence,) = (p for p in world.store.beats() if p.beat == "beat0")
    assert presence.role == "standby"


@pytest.mark.parametrize("jump", [DAY, 3600.0, -DAY])
@pytest.mark.parametrize("second", [25.0, 25.0005, 25.5])
def test_a_leader_whose_clock_jumps_gives_way_and_the_schedule_goes_on(jump: float, second: float) -> None:
    world = World(latency=True)

    def turn() -> None:
        leader = world.leader()
        assert leader is not None
        leader.clock.set_wall(leader.clock.now() + timedelta(seconds=jump))

    world.at(second, turn)
    trace = world.run(90)
    nothing_from_tomorrow = [sent for sent in trace.sent if sent.nominal > sent.at + MAX_SKEW]
    assert nothing_from_tomorrow == []
    found = violations(trace, lateness=timedelta(seconds=LEASE + 2), but=OWN_DELAYS)
    if jump < 0:  # what was on its way when the clock went back arrives "before its time"
        found = [sentence for sentence in found if "own clock" not in sentence]
    assert found == []


def test_a_clock_that_jumps_ahead_and_back_within_a_tick_leaves_no_trace() -> None:
    world = World()

    def there_and_back() -> None:
        clock = world.hosts[0].clock
        clock.set_wall(clock.now() + timedelta(days=1))
        world.hosts[0].tick.nudge()
        world.at(world.now / 1e6 + 0.4, lambda: clock.set_wall(clock.now() - timedelta(days=1)))

    for second in (20.0, 40.0):
        world.at(second + 0.3, there_and_back)
    trace = world.run(90)
    assert violations(trace, lateness=timedelta(seconds=LEASE + 2), but=OWN_DELAYS) == []


def every_presence(world: World) -> Iterable[tuple[str, str]]:
    return ((p.beat, p.role) for p in world.store.beats())


def test_every_beat_is_seen_with_its_role() -> None:
    world = World()
    world.run(20)
    assert dict(every_presence(world)) == {"beat0": "leader", "beat1": "standby", "beat2": "standby"}
    assert all(
        p.why == ("" if p.role == "leader" else "beat0 leads at epoch " + p.why.split()[-1])
        for p in world.store.beats()
    )

"""Beats that crash, hang and lose replies while workers run what they send: nothing that lives is taken for dead.

The workers are simple and never cut off alone: they beat each half second while the server answers, end what they run, or
die in the middle. So whatever is taken from a living one was the leader's mistake, and what a dead one ran has to run again.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from simulated import Broker, Host, Room, Spec, World

from celery_tzbeat.beat.dispatch import Message
from celery_tzbeat.beat.publisher import Fate
from celery_tzbeat.deliveries import Ticket, WorkerPresence
from celery_tzbeat.envelopes import Envelope, Parcel
from celery_tzbeat.model import Entry, Occurrence, Policy
from celery_tzbeat.schedules import every
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import Command
from celery_tzbeat.store.runs import Beat, End, Gate, Order, Pulse, Start
from celery_tzbeat.testing import MemoryRuns

NIGHTLY = bool(os.environ.get("TZBEAT_NIGHTLY"))
SEEDS = 600 if NIGHTLY else 24

POLICY = Policy(run_lease=timedelta(seconds=3), on_abandoned="redispatch", max_deliveries=1000)
BEAT_EVERY = 0.5

#: How long workers take to be back when the server is: less than the two heartbeats that a leader grants.
RECONNECTING = 0.7


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="celery_tzbeat")


class Tracked(Spec):
    """An entry whose occurrences are followed."""

    def entry(self) -> Entry:
        return Entry(self.name, "proj.task", every("5s"), policy=POLICY)


SPECS = (Tracked("one", "@every 5s"), Tracked("two", "@every 5s"))


def wire(plain: bytes, headers: dict[str, Any]) -> bytes:
    """Return a message as it stands in a queue, which the world reads as well."""
    form = {
        **json.loads(plain),
        "body": plain.decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers,
        "properties": {"delivery_info": {"exchange": "", "routing_key": "q"}},
    }
    return json.dumps(form).encode()


class TicketedHost(Host):
    """A beat whose messages carry their tickets."""

    def build(self, entry: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        plain = super().build(entry, occurrence, epoch=epoch)
        (part,) = plain.parts
        body = part.body if isinstance(part, Envelope) else part.args[1]
        bucket = Bucket.of(occurrence.nominal, entry.schedule.shortest_gap)
        place = (bucket.number, bucket.field)
        ticket = Ticket("ns", occurrence.key, entry.name, occurrence.nominal, epoch, 1, *place, entry.policy)
        headers = {"id": occurrence.key, "retries": 0, "meta": {"tzbeat": ticket.to_header()}}
        if isinstance(part, Envelope):
            return Message((Envelope(body, None, "utf-8", headers, {}, None, "", "q"),), bucket)
        return Message((Command("LPUSH", (b"q", wire(body, headers)), (b"q",)),), bucket)


class WireBroker(Broker):
    def publish(self, envelope: Envelope) -> tuple[Fate, str]:
        self.arrived.append(wire(envelope.body, envelope.headers))
        return Fate.CONFIRMED, ""


class RunsWorld(World):
    make_host = TicketedHost


@dataclass
class Living:
    """A run whose worker lives."""

    beat: Beat
    ends: float
    dies: bool
    beats_at: float


@dataclass
class Crew:
    """The workers, and what must not happen to them."""

    world: World
    random: random.Random
    living: dict[str, Living] = field(default_factory=dict)
    died: dict[str, int] = field(default_factory=dict)  # the dispatch that died, by key
    done: dict[str, datetime] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    taken: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.runs = MemoryRuns(self.world.store)
        self.step()

    def step(self) -> None:
        now = self.world.now / 1e6
        if "store" in self.world.down:
            for run in self.living.values():
                run.beats_at = now + RECONNECTING
        else:
            self.runs.attend(WorkerPresence("w", "w@h", "prefork", "0", len(self.living)))
            for sent in self.world.trace.sent[self.taken :]:
                self.take(sent.body, now)
            self.taken = len(self.world.trace.sent)
            for key, run in list(self.living.items()):
                self.go_on(key, run, now)
        self.world.at(now + 0.25, self.step)

    def take(self, body: bytes, now: float) -> None:
        payload = wire(json.loads(body)["body"].encode(), json.loads(body)["headers"])
        headers = Parcel.from_bytes(payload).run.headers
        ticket = Ticket.from_headers(headers)
        assert ticket is not None
        self.tokens += 1
        order, token = Order(ticket.dispatch, headers["retries"]), f"token{self.tokens}"
        if self.runs.start(Start(ticket, order, token, "w", True, payload)).gate is not Gate.WON:
            return
        if ticket.key in self.living:
            self.wrong.append(f"{ticket.key} started twice at a time, at {now:.2f} s")
        if ticket.key in self.done and not self.world.trace.wipes:
            self.wrong.append(f"{ticket.key} started after it was done, at {now:.2f} s")
        beat = Beat(ticket, order, token, "w", True, payload)
        dies = now < 90 and self.random.random() < 0.3
        self.living[ticket.key] = Living(beat, now + self.random.uniform(0.5, 12), dies, now)

    def go_on(self, key: str, run: Living, now: float) -> None:
        if now >= run.ends:
            del self.living[key]
            if run.dies:
                self.died[key] = run.beat.order.dispatch
                return
            self.runs.end([End(run.beat.ticket, run.beat.order, run.beat.token, "done")])
            self.done[key] = self.world.instant()
        elif now >= run.beats_at:
            run.beats_at = now + BEAT_EVERY
            (pulse,) = self.runs.heartbeat([run.beat])
            if pulse in (Pulse.LOST, Pulse.OVERLAP):
                self.wrong.append(f"{key} was taken from a living worker, at {now:.2f} s: {pulse.name}")
                del self.living[key]

    def violations(self) -> Iterable[str]:
        yield from self.wrong
        if not self.done:
            yield "nothing ran"
        forgotten = max(self.world.trace.wipes, default=None)
        for key, dispatch in self.died.items():
            if key not in self.done and forgotten is None:
                yield f"{key} died under dispatch {dispatch} and was never done"
        for run in self.world.store.runs():
            if run.state in ("abandoned", "running") and run.key not in self.living:
                yield f"{run.key} is {run.state} at the end, and nobody runs it"


def eventful(seed: int, *, claims: bool) -> Crew:
    """Return what became of 90 s in which everything may happen, and 70 s in which things settle."""
    chooser = random.Random(f"runs {seed}")
    world = RunsWorld(SPECS, seed=seed, chance=0.02, latency=True, claims=claims)
    world.broker = WireBroker(lambda entry, nominal: False)
    crew = Crew(world, chooser)
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
            world.at(chooser.uniform(5, 80), world.wipe)
    world.run(160)
    return crew


def test_without_faults_what_dies_runs_again_and_what_lives_is_left_alone() -> None:
    world = RunsWorld(SPECS)
    world.broker = WireBroker(lambda entry, nominal: False)
    crew = Crew(world, random.Random("no faults"))
    world.run(160)
    assert list(crew.violations()) == []
    assert len(crew.died) > 5


@pytest.mark.parametrize("claims", [False, True], ids=["same server", "claims"])
@pytest.mark.parametrize("first", range(0, SEEDS, 4))
def test_seeds(first: int, claims: bool) -> None:
    for seed in range(first, first + 4):
        assert list(eventful(seed, claims=claims).violations()) == [], f"seed {seed}"


def jumps_of_the_servers_clock() -> Crew:
    """Return what becomes of runs while the server's clock goes 4 s ahead about every 2 s."""
    world = RunsWorld(SPECS)
    world.broker = WireBroker(lambda entry, nominal: False)
    crew, clock = Crew(world, random.Random("jumps")), world.server_clock
    for number in range(40):
        world.at(20 + 1.93 * number, lambda: clock.set_wall(clock.now() + timedelta(seconds=4)))
    world.run(160)
    return crew


def test_a_clock_that_jumps_kills_nothing() -> None:
    assert list(jumps_of_the_servers_clock().violations()) == []


def test_a_leader_that_believes_any_lapsed_lease_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker is no checker where it finds nothing."""
    monkeypatch.setattr("celery_tzbeat.beat.view.View.shows_dead", lambda self, run_lease: True)
    assert any("living" in line for line in jumps_of_the_servers_clock().violations())

"""A leader in office on a store in memory: its term is stepped by hand, and calls to the store can be lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery
from network import Network
from scripted import ScriptedBroker

from celery_tzbeat.beat.agenda import Agenda
from celery_tzbeat.beat.dispatch import BuildFailed, Message
from celery_tzbeat.beat.events import Events
from celery_tzbeat.beat.paths import Path, SameServerPath
from celery_tzbeat.beat.term import Term
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import Entry, Occurrence, Policy, Unrun
from celery_tzbeat.schedules import every
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import Command
from celery_tzbeat.testing import ManualClock, MemoryStore

UTC = timezone.utc
SECOND = timedelta(seconds=1)
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
RETENTION = timedelta(hours=24)
APP = Celery("proj", set_as_current=False)


def entry(name: str = "e", schedule: Any = None, **policy: Any) -> Entry:
    return Entry(name, "proj.task", schedule or every("1s"), policy=Policy(**policy))


@dataclass
class Builder:
    """Builds what it is told to; counts."""

    clock: ManualClock
    built: list[str] = field(default_factory=list)
    fails: Callable[[Occurrence], bool] = lambda occurrence: False
    declines: Callable[[Occurrence], bool] = lambda occurrence: False
    broker_down: Callable[[Occurrence], bool] = lambda occurrence: False
    takes: float = 0.0
    queue: str = "q"

    def build(self, given: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        self.built.append(occurrence.key)
        self.clock.advance(self.takes)
        if self.broker_down(occurrence):
            raise StoreUnavailable("the broker does not answer")
        if self.fails(occurrence):
            raise BuildFailed("ValueError: no")
        payload = f"{occurrence.key} {epoch}".encode()
        commands = () if self.declines(occurrence) else (Command("LPUSH", (b"q", payload), (self.queue.encode(),)),)
        return Message(commands, Bucket.of(occurrence.nominal, given.schedule.shortest_gap))


class Faulty(MemoryStore):
    """A store in which commands on some queues fail, as on a key of another type."""

    def _run(self, command: Command) -> str:
        return "WRONGTYPE" if command.keys[0] == b"wrong" else super()._run(command)


class Beat:
    """A leader and all it needs."""

    def __init__(self, *entries: Entry, store: MemoryStore | None = None, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock(NOW)
        self.store = store or Faulty(self.clock)
        self.network = Network(self.store)
        self.builder = Builder(self.clock)
        self.broker = ScriptedBroker()
        self.path: Path = SameServerPath(self.builder, self.network)  # type: ignore[arg-type]
        self.progress = 0
        self.trusted = True
        self.tracks = False
        self.sent: list[str] = []
        self.unrun: list[Unrun] = []
        self.dead: list[tuple[str, str]] = []
        self.lost: list[str] = []
        self.agenda = Agenda({e.name: e for e in entries}, "2026c")

    def take_office(self, epoch: int = 1) -> Term:
        office = self.store.take_office(epoch)
        assert office is not None
        self.term = Term(
            epoch=epoch,
            store=self.network,  # type: ignore[arg-type]
            agenda=self.agenda,
            path=self.path,
            publisher=self.broker,  # type: ignore[arg-type]
            clock=self.clock,
            retention=RETENTION,
            max_skew=timedelta(seconds=300),
            progress=self._progressed,
            trusted=lambda: self.trusted,
            tracks=lambda: self.tracks,
            events=Events(
                sent=lambda occurrence: self.sent.append(occurrence.key),
                unrun=self.unrun.append,
                dead=lambda occurrence, reason: self.dead.append((occurrence.key, reason)),
                lost=lambda occurrence: self.lost.append(occurrence.key),
            ),
        )
        self.term.begin(office)
        return self.term

    def _progressed(self) -> None:
        self.progress += 1

    def after(self, seconds: float) -> float:
        self.clock.advance(seconds)
        return self.term.work()

    def pushed(self, queue: str = "q") -> list[str]:
        return [payload.decode().split()[0] for payload in self.store.queues[queue]]

    def events(self, *but: str) -> list[tuple[str, str, int]]:
        skip = {"office", "new", *but}
        return [(r.event, r.entry, r.count) for r in self.store.audit() if r.event not in skip]


def leader(*entries: Entry, worked: bool = True) -> Beat:
    beat = Beat(*entries)
    beat.take_office()
    if worked:
        beat.term.work()
    return beat


def key(second: int, name: str = "e") -> str:
    return Occurrence(name, NOW + second * SECOND).key

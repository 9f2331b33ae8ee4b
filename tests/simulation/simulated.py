"""A world of several beats on one common time, in which anything may break at any call; a seed gives one run.

Each beat is two actors, the tick and the elector's thread, as in life. An actor runs on a thread of its own, but only one
thread runs at a time: whoever waits hands over to the world, which lets time pass and wakes the next one. So a beat can
be frozen in the middle of a call, while others go on, and go on itself with what it knew; and a run repeats exactly.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, TypeVar, get_args

from celery import Celery

from celery_tzbeat.beat.agenda import Agenda
from celery_tzbeat.beat.dispatch import BuildFailed, Message
from celery_tzbeat.beat.events import Events
from celery_tzbeat.beat.paths import ClaimsPath, Path, SameServerPath
from celery_tzbeat.beat.publisher import Fate
from celery_tzbeat.beat.ticker import Changes, Identity, Ticker
from celery_tzbeat.envelopes import Envelope
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.leases.elector import Elector
from celery_tzbeat.model import AuditRecord, Catchup, Cursor, Entry, Occurrence, Policy, from_iso, iso
from celery_tzbeat.schedules import parse, zone
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import Command, Office, OpenOccurrence, Verdict
from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.leases import MemoryLeases
from celery_tzbeat.testing.store import MemoryStore

UTC = timezone.utc
#: 20 s before 01:30 in New York, on the day on which that time comes twice.
START = datetime(2026, 11, 1, 5, 29, 40, tzinfo=UTC)
LEASE = 10.0
TIMEOUT = 1.5  # how long a beat waits for a reply that does not come
MAX_SKEW = timedelta(seconds=300)

T = TypeVar("T")
Room = Literal["store", "lease", "broker"]
What = Literal[
    "crash before",
    "crash after",
    "request lost",
    "reply lost",
    "freeze before",
    "freeze after",
    "hang before",
    "hang after",
    "request late",  # it arrives when the beat has given it up
    "refused",  # by a broker that does not take the message
    "wipe before",
    "wipe after",  # and the reply is lost
]
#: What may happen by chance at any call: a wipe is planned.
BY_CHANCE: dict[Room, tuple[What, ...]] = {
    "lease": get_args(What)[:8],
    "store": get_args(What)[:9],
    "broker": get_args(What)[:10],
}

APP = Celery("simulated", set_as_current=False)


@dataclass(frozen=True)
class Spec:
    """An entry as the checker knows it: text and policy."""

    name: str
    text: str
    grace: float = 60.0
    catchup: Catchup = "latest"
    window: float = 7 * 86400.0
    fails_until: float = 0.0  # building raises up to this second of the run
    fails_for: Callable[[datetime], bool] = lambda nominal: False  # and always for these
    declines: Callable[[datetime], bool] = lambda nominal: False  # the task chooses not to send these

    def entry(self) -> Entry:
        return Entry(
            name=self.name,
            task="proj.task",
            schedule=parse(self.text).in_zone(zone("UTC")),
            policy=Policy(timedelta(seconds=self.grace), self.catchup, timedelta(seconds=self.window)),
        )


ENTRIES = (
    Spec("pulse", "@every 1s"),
    Spec("seven", "@every 7s"),
    Spec("cron", "*/10 * * * * *"),
    Spec("daily", "30 1 * * * America/New_York"),
    Spec("latest", "@every 2s", grace=3),
    Spec("all", "@every 5s", grace=3, catchup="all"),
    Spec("skip", "@every 3s", grace=3, catchup="skip"),
    Spec("window", "@every 4s", grace=2, catchup="all", window=8),
    Spec("shy", "@every 9s", fails_until=8),
    Spec("broken", "@every 10s", fails_for=lambda nominal: nominal.second == 0),
    Spec("declining", "@every 6s", declines=lambda nominal: nominal.second % 4 == 0),
)


@dataclass(frozen=True)
class Fault:
    """Something that happens at the `call`th call (from 1) to a room by the beat of this number."""

    beat: int
    room: Room
    call: int
    what: What
    seconds: float = 0.0
    suspended: bool = False  # a frozen host is asleep: its monotonic clock stands still, too


@dataclass
class Sent:
    """A message that reached the queue."""

    entry: str
    nominal: datetime
    late: bool
    epoch: int
    beat: str
    at: datetime  # true time
    clock: datetime  # the sender's
    trusted: bool  # the sender's lease was, when it was sent
    body: bytes
    given_up: bool  # the sender had given it up when it arrived
    acknowledged: bool = False  # the sender learned of it


@dataclass(frozen=True)
class Noted:
    """An audit record, with the clock of the beat that wrote it."""

    record: AuditRecord
    at: datetime
    clock: datetime
    trusted: bool  # the beat's lease was

    @property
    def epoch(self) -> int:
        return self.record.epoch


@dataclass
class Trace:
    """All that was seen from outside of the beats."""

    specs: tuple[Spec, ...]
    sent: list[Sent] = field(default_factory=list)
    audit: list[Noted] = field(default_factory=list)
    starts: list[tuple[datetime, str, datetime]] = field(default_factory=list)  # when, entry, from where it is counted
    offices: list[tuple[datetime, str, int, bool]] = field(default_factory=list)  # when, beat, epoch, fresh
    wipes: list[datetime] = field(default_factory=list)
    calls: list[tuple[int, Room, int, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    skew: timedelta = timedelta()  # the greatest of any beat
    end: datetime = START
    claims: bool = False  # messages go by claims to a broker that is not the store
    refusals: list[tuple[str, datetime]] = field(default_factory=list)  # by the broker: entry, nominal
    open: list[OpenOccurrence] = field(default_factory=list)  # at the end
    leaders: list[str] = field(default_factory=list)  # at the end
    alive: list[str] = field(default_factory=list)  # at the end


class Killed(BaseException):
    """This beat's process is gone."""


class Actor:
    """A thread that runs only when the world says so."""

    def __init__(self, world: World, host: Host, body: Callable[[Actor], None]) -> None:
        self.host = host
        self.ticket = 0  # the only valid wake-up
        self.idle = False  # waits for something to do, not for an answer
        self.urgent = False
        self.ended = False
        self._world = world
        self._body = body
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        world.wake_at(world.now, self)

    def wait(self, seconds: float) -> None:
        self._world.wake_at(self._world.now + math.ceil(round(seconds * 1e6, 3)), self)
        self._world.turn.release()
        self._go.acquire()
        if self.host.dead:
            raise Killed

    def rest(self, seconds: float) -> None:
        """Wait for something to do."""
        if not self.urgent:
            self.idle = True
            self.wait(max(seconds, 0.001))
            self.idle = False
        else:
            self.wait(0.001)
        self.urgent = False

    def nudge(self) -> None:
        """End its rest."""
        self.urgent = True
        if self.idle:
            self._world.wake_at(self._world.now, self)

    def resume(self) -> None:
        """Let it run until it waits; called by the world."""
        self._go.release()
        self._world.turn.acquire()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.host.dead:
                self._body(self)
        except Killed:
            pass
        except BaseException as exc:
            self._world.failure = exc
        self.ended = True
        self._world.turn.release()


class SteppedElector(Elector):
    """An elector whose thread is an actor."""

    thread: Actor | None = None

    def _wake(self) -> None:
        if self.thread is not None:
            self.thread.nudge()


class Through:
    """What lies between a beat and a server: every call of a room goes through `Host.call`."""

    def __init__(self, host: Host, room: Room, server: Any) -> None:
        self._host, self._room, self._server = host, room, server

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._server(), name)
        return lambda *args, **kwargs: self._host.call(self._room, name, lambda: method(*args, **kwargs), args, kwargs)


class Broker:
    """Takes what is published, but for what it `refuses`. What goes wrong on the way to it is a `Fault`."""

    def __init__(self, refuses: Callable[[str, datetime], bool]) -> None:
        self.arrived: list[bytes] = []
        self._refuses = refuses

    def publish(self, envelope: Envelope) -> tuple[Fate, str]:
        if self._refuses(*occurrence_of(envelope)):
            return Fate.NOT_SENT, "returned as unroutable"
        self.arrived.append(envelope.body)
        return Fate.CONFIRMED, ""


def occurrence_of(envelope: Envelope) -> tuple[str, datetime]:
    body = json.loads(envelope.body)
    return body["entry"], from_iso(body["nominal"])


class Host:
    """A beat: its clocks, its ways to the servers, its two actors."""

    def __init__(self, world: World, number: int, skew: float, specs: Iterable[Spec]) -> None:
        self.name = f"beat{number}"
        self.number = number
        self.dead = False
        self.frozen_until = 0
        self.suspended = False
        self.counts: dict[Room, int] = {"store": 0, "lease": 0, "broker": 0}
        self.cut: set[Room] = set()  # rooms it cannot reach
        self.clock = ManualClock(world.instant() + timedelta(seconds=skew))
        self.changes: list[tuple[str, object]] = []
        self._world = world
        self._specs = {spec.name: spec for spec in specs}
        self.elector = SteppedElector(
            Through(self, "lease", lambda: world.leases),  # type: ignore[arg-type]
            holder=self.name,
            lease=timedelta(seconds=LEASE),
            clock=self.clock,
            on_change=lambda: self.tick.nudge(),
            max_skew=MAX_SKEW,
        )
        store: Any = Through(self, "store", lambda: world.store)
        path: Path = SameServerPath(self, store)  # type: ignore[arg-type]
        if world.trace.claims:
            path = ClaimsPath(APP, self, store, self.clock)  # type: ignore[arg-type]
        self.ticker = Ticker(
            identity=Identity(self.name, self.name, number, "0", "f", embedded=False),
            store=store,
            elector=self.elector,
            agenda=Agenda({spec.name: spec.entry() for spec in specs}, world.tzdata),
            publisher=Through(self, "broker", lambda: world.broker),  # type: ignore[arg-type]
            clock=self.clock,
            lease=timedelta(seconds=LEASE),
            retention=timedelta(hours=24),
            max_skew=MAX_SKEW,
            choose_path=lambda: path,
            events=Events(sent=lambda _: None, unrun=lambda _: None, dead=lambda *_: None, lost=lambda _: None),
            changes=Changes(
                leading=lambda epoch: self.changes.append(("leads", epoch)),
                standing_by=lambda why: self.changes.append(("stands by", why)),
            ),
        )
        self.tick = Actor(world, self, self._tick)
        self.elector.thread = Actor(world, self, self._elect)

    def _tick(self, actor: Actor) -> None:
        while True:
            wait = self.ticker.step()
            actor.rest(wait)
            self.elector.progress()

    def _elect(self, actor: Actor) -> None:
        while True:
            actor.rest(max(self.elector.step(), 0.05))

    def build(self, entry: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        """Build as the spec says; the payload names the occurrence (a `Builder`)."""
        spec = self._specs[entry.name]
        if self._world.now < spec.fails_until * 1e6 or spec.fails_for(occurrence.nominal):
            raise BuildFailed("ValueError: cannot be built")
        bucket = Bucket.of(occurrence.nominal, entry.schedule.shortest_gap)
        if spec.declines(occurrence.nominal):
            return Message((), bucket)
        payload = {
            "entry": entry.name,
            "nominal": iso(occurrence.nominal),
            "late": occurrence.late,
            "epoch": epoch,
            "id": occurrence.task_id("simulated"),
        }
        body = json.dumps(payload).encode()
        if self._world.trace.claims:
            return Message((Envelope(body, "application/json", "utf-8", {}, {}, None, "", "q"),), bucket)
        return Message((Command("LPUSH", (b"q", body), (b"q",)),), bucket)

    # ---- what may happen at a call

    def call(self, room: Room, name: str, ask: Callable[[], T], args: Any, kwargs: Any) -> T:
        world = self._world
        actor = self.elector.thread if room == "lease" else self.tick
        assert actor is not None
        self.counts[room] += 1
        fault = world.fault(self, room, name)
        what = fault.what if fault else ""
        before, after = world.latencies()
        world.log(f"{self.name} {room}.{name} {what}")
        if before:
            actor.wait(before)
        if what.endswith(" before") or what == "request lost":
            self._suffer(actor, fault)
        if room in self.cut or room in world.down:
            actor.wait(TIMEOUT)
            raise StoreUnavailable(f"the {room} does not answer")
        if what == "request late":
            assert fault is not None
            world.at(world.now / 1e6 + fault.seconds, lambda: world.arrive(self, room, name, ask, args))
            actor.wait(TIMEOUT)
            raise StoreUnavailable(what)
        answer: Any = (Fate.NOT_SENT, "refused") if what == "refused" else ask()
        if room == "broker" and answer[0] is Fate.NOT_SENT:
            world.trace.refusals.append(occurrence_of(args[0]))
        news = world.observe(self, name, args, answer)
        if what.endswith(" after") or what == "reply lost":
            self._suffer(actor, fault)
        if after:
            actor.wait(after)
        for sent in news:
            sent.acknowledged = True
        return answer  # type: ignore[no-any-return]

    def _suffer(self, actor: Actor, fault: Fault | None) -> None:
        assert fault is not None
        if fault.what.startswith("crash"):
            self._world.crash(self, fault.seconds)
            raise Killed
        if fault.what.startswith("wipe"):
            self._world.wipe()
            if fault.what == "wipe before":
                return
        if fault.what.endswith((" lost", "wipe after")):
            actor.wait(TIMEOUT)
            raise StoreUnavailable(fault.what)
        if fault.what.startswith("freeze"):
            self.freeze(fault.seconds, suspended=fault.suspended)
        actor.wait(fault.seconds)

    def freeze(self, seconds: float, *, suspended: bool = False) -> None:
        """Stop the whole process (or put the host to sleep) for a while; its clocks go on."""
        self.frozen_until = self._world.now + int(seconds * 1e6)
        self.suspended = suspended


class World:
    """One server, some beats, one time. Build it, plan what happens `at` which second, `run` it."""

    make_host: type[Host] = Host

    def __init__(
        self,
        specs: tuple[Spec, ...] = ENTRIES,
        *,
        beats: int = 3,
        skews: tuple[float, ...] = (0.0, 1.5, -2.0),
        faults: Iterable[Fault] = (),
        chance: float = 0.0,
        latency: bool = False,
        seed: int = 0,
        make_store: Callable[[ManualClock], MemoryStore] = lambda clock: MemoryStore(clock, max_skew=MAX_SKEW),
        claims: bool = False,
        refuses: Callable[[str, datetime], bool] = lambda entry, nominal: False,
    ) -> None:
        self.now = 0  # microseconds since START
        self.turn = threading.Semaphore(0)
        self.failure: BaseException | None = None
        self.random = random.Random(seed)
        self.server_clock = ManualClock(START)
        self.store = make_store(self.server_clock)
        self.leases = MemoryLeases(self.server_clock, timedelta(seconds=LEASE))
        self.down: set[Room] = set()
        self.tzdata = "2026c"
        self.broker = Broker(refuses)
        self.trace = Trace(specs, skew=timedelta(seconds=max(map(abs, skews[:beats]), default=0)), claims=claims)
        self.hosts: list[Host] = []
        self.chance = chance
        self.latency = latency
        self._skews = skews
        self._faults = {(fault.beat, fault.room, fault.call): fault for fault in faults}
        self._heap: list[tuple[int, int, Actor | Callable[[], None], int]] = []
        self._order = 0
        self._seen = 0
        for number in range(beats):
            # The first one is there before the others: a run without faults has one leader only.
            self.at(0.1 * number, self.start)

    def instant(self) -> datetime:
        return START + timedelta(microseconds=self.now)

    def at(self, second: float, action: Callable[[], object]) -> None:
        """Plan an action at a second of the run."""
        self._push(int(second * 1e6), lambda: (action(), None)[1])

    def start(self, specs: tuple[Spec, ...] | None = None, skew: float | None = None) -> Host:
        """Start one more beat now."""
        number = len(self.hosts)
        skew = self._skews[number % len(self._skews)] if skew is None else skew
        self.hosts.append(self.make_host(self, number, skew, specs or self.trace.specs))
        return self.hosts[-1]

    def crash(self, host: Host, restart_after: float = 0.0, specs: tuple[Spec, ...] | None = None) -> None:
        """Kill a beat; start another after a while (0: never)."""
        self.log(f"{host.name} crashes")
        host.dead = True
        for actor in (host.tick, host.elector.thread):
            assert actor is not None
            self.wake_at(self.now, actor)
        if restart_after:
            self.at(self.now / 1e6 + restart_after, lambda: self.start(specs))

    def wipe(self, *, leases: bool = True) -> None:
        """FLUSHALL."""
        self.log("wipe")
        self.trace.wipes.append(self.instant())
        self.store.wipe()
        self._seen = 0
        if leases:
            self.leases.wipe()

    def outage(self, begin: float, seconds: float, *rooms: Room) -> None:
        """Plan that no beat reaches these rooms (none named: store and lease) for a while."""
        named: tuple[Room, ...] = rooms or ("store", "lease")
        self.at(begin, lambda: self.down.update(named))
        self.at(begin + seconds, lambda: self.down.difference_update(named))

    def leader(self) -> Host | None:
        return next((h for h in self.hosts if not h.dead and h.elector.lease() is not None), None)

    def run(self, seconds: float) -> Trace:
        """Let the time up to this second of the run pass; to be called once."""
        end = int(seconds * 1e6)
        while self._heap and self._heap[0][0] <= end:
            at, _, what, ticket = heapq.heappop(self._heap)
            self._pass(at)
            if not isinstance(what, Actor):
                what()
            elif what.ticket == ticket and not what.ended:
                if what.host.frozen_until > self.now and not what.host.dead:
                    self.wake_at(what.host.frozen_until, what)
                else:
                    what.resume()
            if self.failure is not None:
                break
        self._pass(end)
        self.trace.end = self.instant()
        self.trace.leaders = [h.name for h in self.hosts if not h.dead and h.elector.lease() is not None]
        self.trace.alive = [h.name for h in self.hosts if not h.dead and not h.tick.ended]
        self.trace.open = self.store.open_occurrences()
        self._end()
        return self.trace

    def _end(self) -> None:
        for host in self.hosts:
            host.dead = True
            for actor in (host.tick, host.elector.thread):
                if actor is not None and not actor.ended:
                    actor.resume()
        if self.failure is not None:
            raise self.failure

    def _pass(self, at: int) -> None:
        seconds = (at - self.now) / 1e6
        if seconds <= 0:
            return
        self.now = at
        self.server_clock.advance(seconds)
        for host in self.hosts:
            if host.suspended and host.frozen_until >= at:
                host.clock.suspend(seconds)
            else:
                host.clock.advance(seconds)

    def wake_at(self, at: int, actor: Actor) -> None:
        actor.ticket += 1
        self._push(at, actor, actor.ticket)

    def _push(self, at: int, what: Actor | Callable[[], None], ticket: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._heap, (max(at, self.now), self._order, what, ticket))

    # ---- what goes wrong, and what is seen

    def fault(self, host: Host, room: Room, name: str) -> Fault | None:
        call = host.counts[room]
        self.trace.calls.append((host.number, room, call, name))
        planned = self._faults.get((host.number, room, call))
        if planned is not None or not self.chance or self.random.random() >= self.chance:
            return planned
        what = self.random.choice(BY_CHANCE[room])
        seconds = self.random.choice((0.5, 4.0, 9.5, 12.0, 25.0)) if not what.endswith("lost") else 0.0
        if what == "request late":
            seconds += TIMEOUT
        return Fault(host.number, room, call, what, seconds, suspended=self.random.random() < 0.3)

    def latencies(self) -> tuple[float, float]:
        if not self.latency:
            return 0.0, 0.0
        choose = self.random.choice
        return choose((0.0, 0.0, 0.001, 0.02, 0.2)), choose((0.0, 0.0, 0.001, 0.02, 0.2))

    def log(self, line: str) -> None:
        self.trace.lines.append(f"{self.now / 1e6:10.6f} {line}")

    def arrive(self, host: Host, room: Room, name: str, ask: Callable[[], object], args: Any) -> None:
        """Let a request that was given up reach its server."""
        if room not in self.down:
            self.log(f"{host.name} {room}.{name} arrives late")
            self.observe(host, name, args, ask(), given_up=True)

    def observe(self, host: Host, name: str, args: Any, answer: Any, *, given_up: bool = False) -> list[Sent]:
        """Note what a call did: consume the queue, read the new audit records."""
        trace, at, clock = self.trace, self.instant(), host.clock.now()
        trusted = host.elector.lease() is not None
        news = []
        for queue in (*self.store.queues.values(), self.broker.arrived):
            for body in queue:
                p = json.loads(body)
                nominal, how = from_iso(p["nominal"]), (p["late"], p["epoch"], host.name, at, clock, trusted)
                news.append(Sent(p["entry"], nominal, *how, body, given_up))
                self.log(f"  {p['entry']}@{p['nominal']}{' late' if p['late'] else ''}")
            queue.clear()
        trace.sent += news
        records = self.store.audit(count=10**9)
        for record in records[self._seen :]:
            trace.audit.append(Noted(record, at, clock, trusted))
            if record.event != "sent":
                self.log(f"  {record.event} {record.entry} {record.first} {record.last} {record.count} {record.detail}")
        self._seen = len(records)
        if name == "take_office" and isinstance(answer, Office):
            trace.offices.append((at, host.name, args[0], answer.fresh))
        if name == "place":
            placed: Mapping[str, Cursor] = args[0]
            known = {noted.record.entry for noted in trace.audit[-len(placed) - 1 :] if noted.at == at}
            trace.starts += [(at, entry, cursor.nominal) for entry, cursor in placed.items() if entry in known]
        if name == "restore" and answer is Verdict.DONE:
            begun = {entry for _, entry, _ in trace.starts}
            trace.starts += [(at, entry, cursor.nominal) for entry, cursor in args[0].items() if entry not in begun]
        return news

"""The two paths of a message: what is built, what is recorded, and which durations are counted anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from typing import Any

import pytest
from celery import Celery
from celery.signals import before_task_publish
from scripted import ScriptedBroker

from celery_tzbeat import Scheduler
from celery_tzbeat.beat.claims import Claims
from celery_tzbeat.beat.dispatch import Builder, BuildFailed
from celery_tzbeat.beat.envelope import Recording
from celery_tzbeat.beat.paths import ClaimsPath, Outgoing, SameServerPath, counted_headers
from celery_tzbeat.envelopes import Envelope, Parcel
from celery_tzbeat.model import Cursor, Entry, Occurrence
from celery_tzbeat.schedules import every
from celery_tzbeat.store.protocol import Command, Verdict
from celery_tzbeat.testing import ManualClock, MemoryStore

NOW = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("proj", broker="memory://", set_as_current=False)

    @made.task(name="proj.expiring", expires=30, shared=False)
    def expiring() -> None: ...

    yield made
    made.close()


def entry(task: str = "proj.add", **options: Any) -> Entry:
    return Entry("e", task, every("1m"), args=(1, 2), options=options)


class Scene:
    """A path by claims, with Celery's own way of building on a broker in memory, and a leader's claims."""

    def __init__(self, app: Celery) -> None:
        self.clock = ManualClock(NOW)
        self.store = MemoryStore(self.clock)
        self.store.take_office(1)
        self.broker = ScriptedBroker()
        scheduler = Scheduler(app, lazy=True)
        self.recording = Recording(app, timeout=1)
        builder = Builder(app, self.recording, "proj/0", scheduler.apply_entry, ending=lambda: scheduler.closed)
        scheduler.send_with(builder)
        self.scheduler = scheduler
        self.path = ClaimsPath(app, builder, self.store, self.clock)
        self.claims = Claims(
            epoch=1,
            store=self.store,
            publisher=self.broker,  # type: ignore[arg-type]
            clock=self.clock,
            progress=lambda: None,
            trusted=lambda: True,
            sent=lambda _: None,
            dead=lambda *_: None,
        )

    def outgoing(self, given: Entry, nominal: datetime = NOW) -> Outgoing:
        occurrence = Occurrence(given.name, nominal)
        message = self.path.build(given, occurrence, epoch=1)
        return Outgoing(given, occurrence, Cursor(nominal, "rule"), message)


@pytest.fixture
def scene(app: Celery) -> Iterator[Scene]:
    made = Scene(app)
    yield made
    made.recording.reset()


# ---- by claims


def test_a_claim_keeps_the_message_that_celery_built(scene: Scene) -> None:
    outgoing = scene.outgoing(entry(queue="mine", priority=5))
    (answer,) = scene.path.send([outgoing], scene.claims, epoch=1)
    assert answer.verdict is Verdict.DONE
    assert scene.broker.taken == []  # sent by whoever works the claims
    (found,) = scene.store.open_occurrences()
    (kept,) = Parcel.from_bytes(found.payload).envelopes
    assert (kept.routing_key, kept.priority) == ("mine", 5)
    assert kept.headers["id"] == outgoing.occurrence.task_id("proj/0")
    assert kept.headers["meta"]["tzbeat"]["key"] == outgoing.occurrence.key
    assert kept.headers["periodic_task_name"] == "e"


def test_what_is_claimed_is_owed_and_sent(scene: Scene) -> None:
    scene.path.send([scene.outgoing(entry())], scene.claims, epoch=1)
    assert scene.claims.work(seconds=1)
    assert len(scene.broker.taken) == 1
    assert scene.store.open_occurrences() == []


def test_what_is_decided_or_early_is_not_owed(scene: Scene) -> None:
    batch = [scene.outgoing(entry()), scene.outgoing(entry()), scene.outgoing(entry(), NOW + timedelta(days=1))]
    answers = scene.path.send(batch, scene.claims, epoch=1)
    assert [answer.verdict for answer in answers] == [Verdict.DONE, Verdict.DECIDED, Verdict.EARLY]
    assert len(scene.claims) == 1


def test_a_replaced_leader_owes_nothing(scene: Scene) -> None:
    scene.store.take_office(2)
    (answer,) = scene.path.send([scene.outgoing(entry())], scene.claims, epoch=1)
    assert answer.verdict is Verdict.STALE
    assert len(scene.claims) == 0


@pytest.mark.parametrize("bad", [object(), {1, 2}], ids=["object", "set"])
def test_a_header_that_cannot_be_kept_fails_the_entry_and_says_so(scene: Scene, bad: object) -> None:
    with pytest.raises(BuildFailed, match="a header or property cannot be kept in the ledger"):
        scene.outgoing(entry(headers={"bad": bad}))
    assert scene.outgoing(entry()).message.payload  # and leaves nothing behind


def test_arguments_that_cannot_be_serialised_fail_the_entry(scene: Scene) -> None:
    with pytest.raises(BuildFailed):
        scene.outgoing(Entry("e", "proj.add", every("1m"), args=(object(),)))


@pytest.fixture
def exiting() -> Iterator[None]:
    """A hook of somebody's that ends the process, or a signal whose handler does so."""

    def leave(**_: Any) -> None:
        raise SystemExit("no tenant today")

    before_task_publish.connect(leave)
    yield
    before_task_publish.disconnect(leave)


@pytest.mark.usefixtures("exiting")
def test_a_hook_that_exits_fails_the_entry_and_does_not_end_beat(scene: Scene) -> None:
    with pytest.raises(BuildFailed, match="SystemExit: no tenant today"):
        scene.outgoing(entry())


@pytest.mark.usefixtures("exiting")
def test_a_beat_that_was_told_to_end_while_building_ends(scene: Scene) -> None:
    scene.scheduler.close()
    with pytest.raises(SystemExit):
        scene.outgoing(entry())


def test_the_size_of_a_message_is_what_goes_to_the_store(scene: Scene) -> None:
    message = scene.outgoing(entry()).message
    assert message.size == len(message.payload) > 500


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({"expires": 60}, {"expires": "2026-11-30T14:01:00Z"}),
        ({"expires": datetime(2026, 11, 30, 13, tzinfo=timezone.utc)}, {"expires": "2026-11-30T13:00:00+00:00"}),
        ({"countdown": 30}, {"eta": "2026-11-30T14:00:30Z"}),
        ({"eta": datetime(2026, 11, 30, 13, tzinfo=timezone.utc)}, {"eta": "2026-11-30T13:00:00+00:00"}),
        ({"countdown": 30, "expires": 60}, {"eta": "2026-11-30T14:00:30Z", "expires": "2026-11-30T14:01:00Z"}),
        ({}, {"eta": None, "expires": None}),
    ],
    ids=["expires 60", "expires at", "countdown", "eta", "both", "none"],
)
def test_a_claim_that_is_two_hours_old_counts_durations_anew(
    app: Celery, scene: Scene, options: dict[str, Any], moved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "now", scene.clock.now)  # Celery counts from its own clock
    scene.path.send([scene.outgoing(entry(**options))], scene.claims, epoch=1)
    scene.clock.advance(7200)
    assert scene.claims.work(seconds=1)
    (sent,) = scene.broker.taken
    assert {name: sent.headers[name] for name in moved} == moved


# ---- on the same server


class Pushing:
    """A builder whose messages are ready to be pushed, and one that is not ours to push."""

    def build(self, given: Entry, occurrence: Occurrence, *, epoch: int) -> Any:
        raise NotImplementedError


def test_on_the_same_server_record_and_push_are_one_call(scene: Scene) -> None:
    path = SameServerPath(Pushing(), scene.store)  # type: ignore[arg-type]
    outgoing = scene.outgoing(entry())
    pushed = Command("LPUSH", (b"q", b"message"), (b"q",))
    message = type(outgoing.message)((pushed,), outgoing.message.bucket)
    given = Outgoing(outgoing.entry, outgoing.occurrence, outgoing.cursor, message)
    answers = path.send([given], scene.claims, epoch=1)
    assert [answer.verdict for answer in answers] == [Verdict.DONE]
    assert scene.store.queues["q"] == [b"message"]
    assert (len(scene.claims), scene.store.open_occurrences()) == (0, [])


def test_the_paths_tell_operators_which_they_are(scene: Scene) -> None:
    same = SameServerPath(Pushing(), scene.store)  # type: ignore[arg-type]
    assert (same.name, same.sends_at_once) == ("same server", True)
    assert (scene.path.name, scene.path.sends_at_once) == ("claims", False)
    assert "arrives through the broker's" in same.why


# ---- which durations are counted anew


@pytest.mark.parametrize(
    ("given", "counted"),
    [
        (lambda: entry(), ()),
        (lambda: entry(expires=60), ("expires",)),
        (lambda: entry(expires=0.5), ("expires",)),
        (lambda: entry(expires=timedelta(minutes=1)), ("expires",)),
        (lambda: entry(expires=NOW), ()),
        (lambda: entry(expires="2026-11-30T12:00:00Z"), ()),
        (lambda: entry(expires=Fraction(90)), ("expires",)),
        (lambda: entry(countdown=5), ("eta",)),
        (lambda: entry(countdown=0, eta=NOW), ()),
        (lambda: entry(eta=NOW), ()),
        (lambda: entry(countdown=5, expires=9), ("expires", "eta")),
        (lambda: entry("proj.expiring"), ("expires",)),
        (lambda: entry("proj.expiring", expires=NOW), ()),
        (lambda: entry("proj.unknown", expires=3), ("expires",)),
    ],
)
def test_durations_are_counted_anew_and_instants_are_not(
    app: Celery, given: Callable[[], Entry], counted: tuple[str, ...]
) -> None:
    assert counted_headers(app, given()) == counted


def test_an_envelope_among_commands_is_left_to_the_other_path(scene: Scene) -> None:
    envelope = Envelope(b"x", None, None, {}, {}, None, "", "q")
    outgoing = scene.outgoing(entry())
    message = type(outgoing.message)((envelope,), outgoing.message.bucket)
    path = SameServerPath(Pushing(), scene.store)  # type: ignore[arg-type]
    path.send([Outgoing(outgoing.entry, outgoing.occurrence, outgoing.cursor, message)], scene.claims, epoch=1)
    assert dict(scene.store.queues) == {}

"""The other beats as the leader sees them: who should lead in its place, whose entries differ, and what it does about it."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_tzbeat.beat.agenda import Agenda
from celery_tzbeat.beat.dispatch import Message
from celery_tzbeat.beat.events import Events
from celery_tzbeat.beat.fleet import alive, differing_entries, newer_standby, oldest_schema
from celery_tzbeat.beat.paths import SameServerPath
from celery_tzbeat.beat.ticker import WARN_EVERY, Changes, Identity, Ticker
from celery_tzbeat.entries import Reading
from celery_tzbeat.errors import StoreUnavailable, StoreUnreadable
from celery_tzbeat.leases.elector import Elector
from celery_tzbeat.model import Cursor, Entry, Occurrence, Presence
from celery_tzbeat.schedules import every
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import SCHEMA_WRITTEN, Command
from celery_tzbeat.testing import ManualClock, MemoryLeases, MemoryStore

UTC = timezone.utc
SECOND = timedelta(seconds=1)
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
LEASE = 10
MAX_SKEW = timedelta(seconds=300)
THERE = ("here", "there")


def a_presence(**changes: Any) -> Presence:
    values: dict[str, Any] = {
        "beat": "b:1:n",
        "host": "b",
        "pid": 1,
        "version": "0.1",
        "tzdata": "2026c",
        "fingerprint": "f",
        "role": "standby",
        "why": "",
        "last_tick": NOW,
        "next_due": None,
        "skew": 0.0,
        "entries": 1,
        "embedded": False,
    }
    return Presence(**{**values, **changes})


# ---- who lives


def test_a_beat_lives_while_it_ticked_within_a_lease_by_the_stores_clock() -> None:
    ticked = a_presence(last_tick=NOW - 10 * SECOND)
    silent = a_presence(last_tick=NOW - 11 * SECOND)
    ahead = a_presence(last_tick=NOW + 90 * SECOND, skew=100.0)
    long_ago_by_a_clock_ahead = a_presence(last_tick=NOW + 80 * SECOND, skew=100.0)
    behind = a_presence(last_tick=NOW - 105 * SECOND, skew=-100.0)
    beats = [ticked, silent, ahead, long_ago_by_a_clock_ahead, behind]
    assert alive(beats, now=NOW, within=10 * SECOND) == [ticked, ahead, behind]


# ---- who should lead


@pytest.mark.parametrize(
    ("own", "others", "found"),
    [
        ("1", ["2"], "2"),
        ("1", ["2", "10", "9"], "10"),  # as versions, not as texts
        ("2026.11.3", ["2026.11.4rc1"], "2026.11.4rc1"),
        ("2026.11.4", ["2026.11.4rc1"], None),
        ("2", ["1", "2", "2.0"], None),
        ("2", [""], None),
        ("", ["2"], None),
        ("1", ["not a version", "2"], "2"),
        ("not a version", ["2"], None),
        ("1", [], None),
    ],
)
def test_the_newest_release_above_the_own_should_lead(own: str, others: list[str], found: str | None) -> None:
    newer = newer_standby(own, [a_presence(release=release) for release in others])
    assert (newer.release if newer else None) == found


def test_a_beat_that_leads_or_that_could_not_lead_is_no_standby_to_hand_over_to() -> None:
    beats = [a_presence(release="2", role="leader"), a_presence(release="3", hindered=True)]
    assert newer_standby("1", beats) is None


def test_the_oldest_schema_of_all_that_live_counts() -> None:
    assert oldest_schema([], 3) == 3
    assert oldest_schema([a_presence(schema=2), a_presence(schema=1)], 3) == 1
    assert oldest_schema([a_presence(schema=4)], 3) == 3, "never above the own"


# ---- whose entries differ


def test_entries_that_differ_are_named_by_how_they_do() -> None:
    one = {"same": "1", "changed": "1", "removed": "1", "renamed": "2"}
    other = {"same": "1", "changed": "9", "added": "1", "renamed anew": "2"}
    assert differing_entries(one, other, where=THERE) == (
        "only here: 'removed', 'renamed'; only there: 'added', 'renamed anew'; defined differently: 'changed'"
    )
    assert differing_entries(one, one, where=THERE) == ""


def test_of_many_names_the_first_are_listed() -> None:
    many = {f"e{n}": "1" for n in range(9)}
    assert differing_entries(many, {}, where=THERE) == "only here: 'e0', 'e1', 'e2', 'e3', 'e4' and 4 more"


# ---- what a ticker does about it


class World:
    """A server, and beats on it that are stepped by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOW)
        self.store = MemoryStore(self.clock, max_skew=MAX_SKEW)
        self.leases = MemoryLeases(self.clock, timedelta(seconds=LEASE))
        self.beats: list[Beat] = []

    def beat(self, name: str, **options: Any) -> Beat:
        self.beats.append(Beat(self, name, **options))
        self.beats[-1].step()
        return self.beats[-1]

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1)
            for beat in self.beats:
                beat.clock.advance(1)
            for beat in self.beats:
                beat.step()

    def leaders_of(self, seconds: int) -> list[str]:
        """Let time pass; return who led after each second, each change once."""
        found: list[str] = []
        for _ in range(seconds):
            self.run(1)
            leading = " and ".join(beat.name for beat in self.beats if beat.leads) or "nobody"
            if not found or found[-1] != leading:
                found.append(leading)
        return found

    def end(self, beat: Beat) -> None:
        """End a beat at once: it says nothing, and its lease lapses."""
        self.beats.remove(beat)

    def pushed(self) -> list[str]:
        return [payload.decode() for payload in self.store.queues["q"]]


class Beat:
    """A ticker and its elector on the world's store."""

    def __init__(self, world: World, name: str, *, release: str = "", tzdata: str = "2026c", **entries: str) -> None:
        self.world, self.name = world, name
        self.failure: Exception | None = None  # of taking office
        self.clock = ManualClock(world.clock.now())
        self.elector = Elector(
            world.leases,
            holder=name,
            lease=timedelta(seconds=LEASE),
            clock=self.clock,
            on_change=lambda: None,
            max_skew=MAX_SKEW,
        )
        listed = {n: Entry(n, "proj.task", every(text)) for n, text in (entries or {"e": "10s"}).items()}
        path = SameServerPath(self, self)  # type: ignore[arg-type]
        self.ticker = Ticker(
            identity=Identity(name, name, 7, "0.1", Reading(listed).fingerprint, embedded=False, release=release),
            store=self,  # type: ignore[arg-type]
            elector=self.elector,
            agenda=Agenda(listed, tzdata),
            publisher=None,  # type: ignore[arg-type]
            clock=self.clock,
            lease=timedelta(seconds=LEASE),
            retention=timedelta(days=1),
            max_skew=MAX_SKEW,
            choose_path=lambda: path,
            events=Events(sent=lambda _: None, unrun=lambda _: None, dead=lambda *_: None, lost=lambda _: None),
            changes=Changes(leading=lambda _: None, standing_by=lambda _: None),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world.store, name)

    def take_office(self, epoch: int, holder: str = "", **more: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        return self.world.store.take_office(epoch, holder, **more)

    def build(self, given: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        bucket = Bucket.of(occurrence.nominal, given.schedule.shortest_gap)
        return Message((Command("LPUSH", (b"q", occurrence.key.encode()), (b"q",)),), bucket)

    def step(self) -> None:
        self.ticker.step()
        self.elector.step()
        self.ticker.step()

    @property
    def leads(self) -> bool:
        return self.elector.lease() is not None

    @property
    def presence(self) -> Presence:
        return next(p for p in self.world.store.beats() if p.beat == self.name)


def keys(*seconds: int, entry: str = "e") -> list[str]:
    return [Occurrence(entry, NOW + second * SECOND).key for second in seconds]


def test_a_leader_hands_over_to_a_newer_release_within_a_lease_and_the_old_one_takes_over_when_that_is_gone() -> None:
    world = World()
    old = world.beat("old", release="1")
    world.run(1)
    new = world.beat("new", release="2")
    assert world.leaders_of(LEASE + 2)[-1] == "new"
    assert world.leaders_of(60) == ["new"]
    assert "hands over" not in old.presence.why
    world.end(new)
    assert world.leaders_of(15) == ["new", "old"] or world.leaders_of(1) == ["old"]
    world.run(5)
    due = keys(*range(10, 100, 10))
    assert world.pushed()[: len(due)] == due


def test_while_it_hands_over_the_old_leader_says_why() -> None:
    world = World()
    old = world.beat("old", release="1")
    world.beat("new", release="2")
    for _ in range(LEASE + 3):
        world.run(1)
        if not old.leads:
            break
    world.run(1)
    assert old.presence.why == "hands over to new:7 (release 2): this beat is of release 1"
    assert old.presence.hindered


def test_among_several_old_beats_the_newest_leads_in_the_end() -> None:
    world = World()
    for name in ("a", "b", "c"):
        world.beat(name, release="1")
    world.run(5)
    world.beat("new", release="2")
    world.run(4 * LEASE)
    assert world.leaders_of(40) == ["new"]


@pytest.mark.parametrize("failure", [StoreUnavailable("cut off"), StoreUnreadable("not understood")])
def test_a_newer_standby_that_cannot_lead_is_handed_over_to_once(failure: Exception) -> None:
    world = World()
    old = world.beat("old", release="1")
    world.run(1)
    new = world.beat("new", release="2")
    new.failure = failure
    found = world.leaders_of(6 * LEASE)
    assert found.count("old") == 2
    assert old.leads
    assert world.leaders_of(60) == ["old"]
    due = keys(*range(10, 110, 10))
    assert world.pushed()[: len(due)] == due


def test_a_newer_standby_that_did_lead_is_handed_over_to_again() -> None:
    world = World()
    old = world.beat("old", release="1")
    new = world.beat("new", release="2")
    world.run(3 * LEASE)
    assert new.leads
    world.leases.ask_to_step_down(new.elector.lease().epoch)  # type: ignore[union-attr]
    assert "old" in world.leaders_of(LEASE)
    world.run(2 * LEASE)
    assert new.leads
    assert not old.leads


def test_a_newer_standby_whose_clock_is_wrong_is_not_handed_over_to() -> None:
    world = World()
    world.beat("old", release="1")
    new = world.beat("new", release="2")
    new.clock.set_wall(NOW + timedelta(days=1))
    world.run(5)
    assert new.presence.hindered
    assert world.leaders_of(40) == ["old"]
    new.clock.set_wall(world.clock.now())
    assert world.leaders_of(2 * LEASE)[-1] == "new"


def test_a_beat_that_was_asked_to_step_down_is_not_handed_over_to_meanwhile() -> None:
    world = World()
    old, new = world.beat("old", release="1"), world.beat("new", release="2")
    world.run(3 * LEASE)
    assert new.leads
    world.leases.ask_to_step_down(new.elector.lease().epoch)  # type: ignore[union-attr]
    found = world.leaders_of(LEASE - 1)
    assert found[-1] == "old"
    assert len(found) <= 2
    assert old.leads


def test_of_beats_without_a_release_whoever_leads_goes_on() -> None:
    world = World()
    world.beat("old")
    world.beat("new", release="2")
    assert world.leaders_of(40) == ["old"]


def warnings(caplog: pytest.LogCaptureFixture, action: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "action", "") == action]


def test_the_leader_names_the_entries_of_others_that_differ_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.beat("one", kept="10s", changed="10s", gone="10s")
    world.beat("two", kept="10s", changed="20s", added="10s")
    world.run(int(WARN_EVERY) * 3)
    found = warnings(caplog, "entries_differ")
    assert len(found) == 3
    assert set(found) == {
        "the beat two:7 has other entries, and only the leader's run: "
        "only here: 'gone'; only there: 'added'; defined differently: 'changed'"
    }


def test_a_beat_that_does_not_tell_its_entries_differs_in_what_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.beat("one")
    world.store.attend(a_presence(fingerprint="older release"))
    world.run(LEASE)
    (found,) = warnings(caplog, "entries_differ")
    assert found.endswith("only the leader's run: which ones is not known")


def test_a_beat_without_entries_lacks_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.beat("one")
    world.store.attend(a_presence(fingerprint="none", entries=0))
    world.run(LEASE)
    (found,) = warnings(caplog, "entries_differ")
    assert found.endswith("only here: 'e'")


def test_the_leader_says_that_another_has_other_zone_files(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.beat("one")
    world.beat("two", tzdata="2026z")
    world.run(int(WARN_EVERY) + 15)
    assert warnings(caplog, "tzdata_differs") == ["the beat two:7 has zone files 2026z, the leader 2026c"] * 2
    assert not warnings(caplog, "entries_differ")


def test_beats_that_agree_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.beat("one")
    world.beat("two")
    world.run(90)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING and "empty" not in r.getMessage()] == []


# ---- the schema


def test_a_store_that_needs_a_newer_release_is_never_bid_for_and_led_again_when_it_needs_it_no_more() -> None:
    world = World()
    beat = world.beat("one")
    assert beat.leads
    world.store.need(SCHEMA_WRITTEN + 1)
    world.run(LEASE)
    assert not beat.leads
    assert beat.presence.role == "standby"
    assert "upgrade celery_tzbeat on this host" in beat.presence.why
    assert beat.presence.hindered
    assert world.leaders_of(3 * LEASE) == ["nobody"]
    world.store.need(SCHEMA_WRITTEN)
    assert world.leaders_of(LEASE)[-1] == "one"


def test_what_the_store_needs_rises_only_as_far_as_the_oldest_live_beat_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    asked: list[int] = []
    take_office = world.store.take_office

    def note(*args: Any, oldest_schema: int, **kwargs: Any) -> Any:
        asked.append(oldest_schema)
        return take_office(*args, oldest_schema=oldest_schema, **kwargs)

    monkeypatch.setattr(world.store, "take_office", note)
    world.store.attend(a_presence(schema=SCHEMA_WRITTEN - 1))
    beat = world.beat("one")
    world.run(2 * LEASE)
    world.end(beat)
    world.beat("two")
    world.run(2 * LEASE)
    assert asked == [SCHEMA_WRITTEN - 1, SCHEMA_WRITTEN]


# ---- clocks


def test_a_leader_whose_clock_jumps_a_day_ahead_sends_nothing_early_and_the_standby_goes_on() -> None:
    world = World()
    one, two = world.beat("one"), world.beat("two")
    world.run(15)
    one.clock.set_wall(one.clock.now() + timedelta(days=1))
    world.run(10)
    assert two.leads
    one.clock.set_wall(world.clock.now())
    world.run(20)
    assert world.pushed() == keys(10, 20, 30, 40)
    assert two.leads


def test_a_clock_that_jumps_within_a_tick_judges_nothing() -> None:
    # Between the question whether it leads and the look at what is due: what is due in 200 s is not early to the store.
    world = World()
    beat = world.beat("one", e="200s")
    world.run(1)
    term = beat.ticker._term
    assert term is not None
    beat.clock.set_wall(beat.clock.now() + timedelta(seconds=250))
    term.work()
    assert world.pushed() == []
    beat.clock.set_wall(world.clock.now())
    world.run(250)
    assert world.pushed() == keys(200 - NOW.timestamp() % 200 or 200, entry="e")


def test_what_was_put_off_by_a_clock_a_day_ahead_is_sent_when_the_clock_is_right_again() -> None:
    world = World()
    beat = world.beat("one", e="100s")
    world.run(1)
    term = beat.ticker._term
    beat.clock.set_wall(beat.clock.now() + timedelta(days=1))
    beat.ticker.step()
    beat.clock.set_wall(world.clock.now())
    world.run(3)
    assert beat.leads
    assert beat.ticker._term is not term


def test_a_cursor_ahead_of_the_store_is_set_back_when_a_leader_takes_office_and_what_is_due_next_runs() -> None:
    world = World()
    one = world.beat("one")
    world.run(15)
    rule = one.ticker._agenda.entries["e"].rule
    world.store.data.cursors["e"] = Cursor(NOW + timedelta(days=1), rule)
    world.end(one)
    world.beat("two")
    world.run(30)
    (repaired,) = [record for record in world.store.audit() if record.event == "repaired"]
    assert (repaired.entry, repaired.first) == ("e", NOW + timedelta(days=1))
    assert world.pushed() == keys(10, 30, 40)  # 20: the lease had not lapsed, and nothing says that it was owed


def test_a_leader_goes_on_when_the_clocks_of_store_and_host_are_set_back_together() -> None:
    world = World()
    beat = world.beat("one")
    world.run(25)
    earlier = NOW - timedelta(hours=1)
    for clock in (world.clock, beat.clock):
        clock.set_wall(earlier)
    world.run(25)
    assert beat.leads
    (repaired,) = [record for record in world.store.audit() if record.event == "repaired"]
    assert repaired.first == NOW + 20 * SECOND
    assert world.pushed() == keys(10, 20) + [Occurrence("e", earlier + n * SECOND).key for n in (10, 20)]

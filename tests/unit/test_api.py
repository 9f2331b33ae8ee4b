"""`TzBeat`: what it does to an app, what it previews, and what it finds in a ledger written for the purpose."""

from __future__ import annotations

import json
import re
from contextlib import closing
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import amqp
import pytest
import redis
from celery import Celery

from celery_tzbeat.api import Finding, TzBeat, health, preflight
from celery_tzbeat.beat.scheduler import configuration, open_store
from celery_tzbeat.errors import EntryNotFound, InvalidConfiguration, InvalidSchedule, StoreUnavailable
from celery_tzbeat.leases.redis import RedisLeases
from celery_tzbeat.model import Cursor, Occurrence, Presence, Unrun
from celery_tzbeat.schedules import tzdata_version
from celery_tzbeat.settings import Settings
from celery_tzbeat.store.keys import Bucket, Keys
from celery_tzbeat.store.protocol import Burial, Claim
from celery_tzbeat.store.redis_open import CLAIMS_FIRST
from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.server import LocalServer

pytestmark = pytest.mark.server

UTC = timezone.utc
DEFAULT = "celery.beat:PersistentScheduler"
NEW_YORK = "America/New_York"

#: A broker that is not there.
BROKEN = "amqp://me:secret@127.0.0.1:9//"


def an_app(url: str = "redis://localhost:1/0", **conf: Any) -> Celery:
    app = Celery("proj", set_as_current=False)
    entries = {
        "nightly": {"task": "proj.add", "schedule": f"30 2 * * * {NEW_YORK}", "args": ("secret" * 20,)},
        "tick": {"task": "proj.add", "schedule": 60},
    }
    app.conf.update({"broker_url": url, "result_expires": None, "beat_schedule": entries, "tzbeat_lease": 2, **conf})

    @app.task(name="proj.add", shared=False)
    def add(*args: Any) -> None: ...

    return app


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def ids(findings: list[Finding] | tuple[Finding, ...]) -> list[str]:
    return [finding.id for finding in findings]


# ---- on an app


def test_making_one_reads_and_writes_no_configuration() -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object("no_such_module_anywhere")
    TzBeat(app)
    assert not app.configured


def test_the_scheduler_is_set_where_the_user_set_none() -> None:
    app = an_app()
    TzBeat(app)
    assert app.conf.beat_scheduler == "celery_tzbeat:Scheduler"


def test_an_app_that_is_configured_already_gets_its_scheduler_at_once() -> None:
    app = an_app()
    assert app.conf.beat_scheduler == DEFAULT
    TzBeat(app)
    assert app.conf.beat_scheduler == "celery_tzbeat:Scheduler"


@pytest.mark.parametrize("given", ["other:Scheduler", DEFAULT])
def test_a_scheduler_that_the_user_set_later_is_kept(given: str) -> None:
    app = Celery("proj", set_as_current=False)
    TzBeat(app)
    app.conf.beat_scheduler = given
    assert app.conf.beat_scheduler == given
    app.conf.broker_url = "redis://localhost:1/0"
    assert app.conf.beat_scheduler == given


@pytest.mark.parametrize("given", ["other:Scheduler", DEFAULT])
def test_a_scheduler_in_a_namespaced_settings_object_is_kept(given: str) -> None:
    app = Celery("proj", set_as_current=False)
    TzBeat(app)
    app.config_from_object(SimpleNamespace(CELERY_BEAT_SCHEDULER=given), namespace="CELERY")
    assert app.conf.beat_scheduler == given


def test_a_namespaced_settings_object_without_a_scheduler_gets_ours() -> None:
    app = Celery("proj", set_as_current=False)
    TzBeat(app)
    app.config_from_object(SimpleNamespace(CELERY_TIMEZONE="UTC", DEBUG=True), namespace="CELERY")
    assert app.conf.beat_scheduler == "celery_tzbeat:Scheduler"


# ---- entries


def test_entries_are_those_that_a_beat_reads() -> None:
    app = an_app()
    assert TzBeat(app).entries() == configuration(app)[1].entries


def test_entries_added_when_the_app_is_finalized_are_seen() -> None:
    app = an_app()

    @app.on_after_finalize.connect
    def add(sender: Celery, **_: Any) -> None:
        sender.add_periodic_task(10.0, sender.signature("proj.add"), name="late")

    assert "late" in TzBeat(app).entries()


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    tz = TzBeat(an_app())
    assert tz.get("nightly").task == "proj.add"
    with pytest.raises(EntryNotFound, match="no entry is named 'nightli'; did you mean 'nightly'"):
        tz.get("nightli")
    with pytest.raises(EntryNotFound, match="the app has no entries"):
        TzBeat(an_app(beat_schedule={})).get("x")


def test_a_module_that_cannot_be_imported_is_a_problem_of_the_configuration() -> None:
    tz = TzBeat(an_app(imports=["no_such_module_anywhere"]))
    with pytest.raises(InvalidConfiguration, match="cannot be imported: ModuleNotFoundError"):
        tz.entries()
    assert "tzbeat.E003" in ids(tz.check())


# ---- previews


def preview(schedule: str, after: str, n: int = 1, zone: str | None = None) -> list[tuple[str, str, str]]:
    found = TzBeat(an_app()).next(schedule, n=n, after=at(after), zone=zone)
    return [(each.to_dict()["instant"], each.wall.isoformat(), each.note) for each in found]


def test_what_falls_into_a_gap_is_marked() -> None:
    assert preview(f"30 2 * * * {NEW_YORK}", "2026-03-08T00:00", n=2) == [
        ("2026-03-08T07:00:00Z", "2026-03-08T03:00:00", "02:30 does not exist: at the end of the gap"),
        ("2026-03-09T06:30:00Z", "2026-03-09T02:30:00", ""),
    ]


def test_what_comes_twice_is_marked_at_each_pass() -> None:
    assert preview(f"30 1 * * * {NEW_YORK} fold=both", "2026-11-01T00:00", n=3) == [
        ("2026-11-01T05:30:00Z", "2026-11-01T01:30:00", "01:30 comes twice: first of two"),
        ("2026-11-01T06:30:00Z", "2026-11-01T01:30:00", "01:30 comes twice: second of two"),
        ("2026-11-02T06:30:00Z", "2026-11-02T01:30:00", ""),
    ]


def test_a_wildcard_is_marked_in_a_fold_too() -> None:
    assert [note for _, _, note in preview(f"30 * * * * {NEW_YORK}", "2026-11-01T05:00", n=3)] == [
        "01:30 comes twice: first of two",
        "01:30 comes twice: second of two",
        "",
    ]


def test_a_day_that_never_was_is_named_with_its_date() -> None:
    (found,) = preview("0 12 30 12 * Pacific/Apia", "2011-12-20T00:00")
    assert found == (
        "2011-12-30T10:00:00Z",
        "2011-12-31T00:00:00",
        "2011-12-30 12:00 does not exist: at the end of the gap",
    )


def test_walls_may_be_shown_in_another_zone_than_the_schedules() -> None:
    (found,) = preview(f"30 2 * * * {NEW_YORK}", "2026-03-08T00:00", zone="Asia/Tokyo")
    assert found == (
        "2026-03-08T07:00:00Z",
        "2026-03-08T16:00:00",
        "in America/New_York: 02:30 does not exist: at the end of the gap",
    )


def test_a_text_without_a_zone_is_read_in_the_one_given_else_in_the_apps() -> None:
    assert preview("@daily", "2026-07-01T00:00", zone="Asia/Tokyo")[0][0] == "2026-07-01T15:00:00Z"
    tz = TzBeat(an_app(timezone="Europe/Paris"))
    assert tz.next("@daily", n=1, after=at("2026-07-01T00:00"))[0].instant == at("2026-07-01T22:00")


def test_next_starts_from_now_and_ends_where_the_schedule_does() -> None:
    tz = TzBeat(an_app(), clock=ManualClock(at("2026-07-01T00:00")))
    assert tz.next("nightly", n=1)[0].instant == at("2026-07-01T06:30")
    assert len(tz.next("@at 2026-08-01T00:00:00Z")) == 1
    assert tz.next("@at 2026-06-01T00:00:00Z") == ()


def test_previews_work_beside_bad_entries_and_settings() -> None:
    bad = {"bad": {"task": "proj.add", "schedule": "61 * * * *"}, "good": {"task": "proj.add", "schedule": 60}}
    tz = TzBeat(an_app(beat_schedule=bad, tzbeat_lease=0))
    assert len(tz.next("good", n=3)) == 3


def test_a_text_that_was_meant_as_a_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(InvalidSchedule, match="did you mean 'nightly'") as caught:
        TzBeat(an_app()).next("nightli")
    assert caught.value.text == "nightli"


def test_around_a_change_of_offset() -> None:
    found = TzBeat(an_app()).across_change("nightly", n=2, after=at("2026-03-01T00:00"))
    assert [each.instant for each in found.before] == [at("2026-03-06T07:30"), at("2026-03-07T07:30")]
    assert [each.instant for each in found.after] == [at("2026-03-08T07:00"), at("2026-03-09T06:30")]
    assert found.to_dict()["change"] == {
        "zone": NEW_YORK,
        "instant": "2026-03-08T07:00:00Z",
        "old_wall": "2026-03-08T02:00:00",
        "new_wall": "2026-03-08T03:00:00",
        "old_offset": "-05:00",
        "new_offset": "-04:00",
        "text": "clocks go forward from 02:00 to 03:00: times from 02:00 to before 03:00 do not exist",
    }


def test_a_half_hour_change_and_one_over_midnight_are_told_apart() -> None:
    tz = TzBeat(an_app())
    howe = tz.across_change("@daily Australia/Lord_Howe", after=at("2026-03-01T00:00")).change
    assert howe is not None
    assert howe.text == "clocks go back from 02:00 to 01:30: times from 01:30 to before 02:00 come twice"
    apia = tz.across_change("@daily Pacific/Apia", after=at("2011-12-20T00:00")).change
    assert apia is not None
    assert apia.text.startswith("clocks go forward from 2011-12-30 00:00 to 2011-12-31 00:00")


def test_a_zone_that_changes_no_more_has_no_change() -> None:
    found = TzBeat(an_app()).across_change("@daily UTC", after=at("2026-03-01T00:00"))
    assert found.change is None
    assert found.before == ()
    assert len(found.after) == 3


# ---- the ledger


class Ground:
    """An app on an emptied server, and what a beat would have written there."""

    def __init__(self, url: str, **conf: Any) -> None:
        self.app = an_app(url, **conf)
        self.settings = Settings.read(self.app)
        self.tz = TzBeat(self.app)
        self.store = open_store(self.settings)
        self.leases = RedisLeases(url, namespace=self.settings.namespace, lease=self.settings.lease)

    def lead(self, holder: str = "host:1:a") -> int:
        granted = self.leases.acquire(holder, floor=0)
        epoch: int = granted.epoch
        self.store.take_office(epoch, holder)
        return epoch

    def attend(self, beat: str = "host:1:a", *, ago: float = 0, **changes: Any) -> None:
        values: dict[str, Any] = {
            "beat": beat,
            "host": beat.split(":")[0],
            "pid": 1,
            "version": "0",
            "tzdata": tzdata_version(),
            "fingerprint": "f",
            "role": "leader",
            "why": "",
            "last_tick": self.store.time() - timedelta(seconds=ago),
            "next_due": None,
            "skew": 0.0,
            "entries": 2,
            "embedded": False,
        }
        self.store.attend(Presence(**{**values, **changes}))

    def cursor(self, name: str, *, ahead: timedelta) -> Cursor:
        return Cursor(nominal=self.store.time() + ahead, rule=self.tz.get(name).rule, tzdata=tzdata_version())


@pytest.fixture
def ground(empty_server: LocalServer) -> Any:
    found = Ground(empty_server.url)
    with closing(found.store), closing(found.leases):
        yield found


def test_a_beat_that_leads_on_time_is_healthy(ground: Ground) -> None:
    epoch = ground.lead()
    ground.attend()
    ground.store.place({"tick": ground.cursor("tick", ahead=timedelta(seconds=-3))}, epoch=epoch)
    health = ground.tz.health()
    assert health.findings == ()
    assert health.ok
    found = health.to_dict()
    assert (found["leader"], found["epoch"]) == ("host:1:a", epoch)
    assert found["time"].endswith("Z")


def test_nobody_leading_is_not_healthy_and_the_standbys_say_why(ground: Ground) -> None:
    health = ground.tz.health()
    assert ids(health.findings) == ["tzbeat.E302"]
    assert "no beat is alive" in health.findings[0].hint
    ground.attend(role="standby", why="its clock is wrong")
    assert "host:1: its clock is wrong" in ground.tz.health().findings[0].hint


def test_a_leader_that_does_not_tick_is_not_healthy(ground: Ground) -> None:
    ground.lead()
    assert ids(ground.tz.health().findings) == ["tzbeat.E303"]
    ground.attend(ago=5)
    (found,) = ground.tz.health().findings
    assert found.id == "tzbeat.E303"
    assert "has not ticked for 5 s" in found.text


def test_a_leader_whose_clock_differs_within_bounds_ticks_nevertheless(ground: Ground) -> None:
    ground.lead()
    ground.attend(ago=100, skew=-100.0)
    assert ground.tz.health().ok


def test_what_is_due_and_not_sent_is_named(ground: Ground) -> None:
    epoch = ground.lead()
    ground.attend()
    ground.store.place({"tick": ground.cursor("tick", ahead=timedelta(seconds=-130))}, epoch=epoch)
    (found,) = ground.tz.health().findings
    assert found.id == "tzbeat.E304"
    assert "'tick' since " in found.text


def test_what_is_claimed_and_not_sent_is_named_though_its_cursor_has_moved(empty_server: LocalServer) -> None:
    yearly = {"yearly": {"task": "proj.add", "schedule": 365 * 86_400}}  # by its cursor it is on time
    ground = Ground(empty_server.url, broker_url=BROKEN, tzbeat_url=empty_server.url, beat_schedule=yearly)
    with closing(ground.store), closing(ground.leases):
        epoch = ground.lead()
        ground.attend()
        occurrence = Occurrence("yearly", ground.store.time().replace(microsecond=0))
        bucket = Bucket.of(occurrence.nominal, timedelta(days=365))
        cursor = ground.cursor("yearly", ahead=timedelta())
        ground.store.claim([Claim(occurrence, bucket, cursor, b"message")], epoch=epoch)
        assert ground.tz.health().ok, "what was claimed just now may be on its way"

        since = (ground.store.time() - timedelta(seconds=20)).timestamp() * 1000 - CLAIMS_FIRST
        with redis.Redis.from_url(empty_server.url) as client:
            client.zadd(ground.store.keys("open"), {occurrence.key: since})
        claimed, broker = ground.tz.health().findings
        assert claimed.id == "tzbeat.E304"
        assert f"claimed and not sent: '{occurrence.key}' since" in claimed.text
        assert broker.id == "tzbeat.E307"
        assert broker.text.startswith("the broker 'amqp://me:**@127.0.0.1:9//' does not answer: ")

        ground.app.conf.broker_url = "memory://"
        assert ids(ground.tz.health().findings) == ["tzbeat.E304"], "a broker that answers explains nothing"


def test_an_entry_that_is_changed_here_is_not_overdue(ground: Ground) -> None:
    epoch = ground.lead()
    ground.attend()
    cursor = Cursor(nominal=ground.store.time() - timedelta(hours=1), rule="another")
    ground.store.place({"tick": cursor}, epoch=epoch)
    assert ground.tz.health().ok


def test_a_beats_clock_that_is_off_is_named_with_host_and_seconds(ground: Ground) -> None:
    ground.lead()
    ground.attend()
    ground.attend("faraway:2:b", role="standby", skew=-400.0)
    (found,) = ground.tz.health().findings
    assert found.id == "tzbeat.E305"
    assert found.text.startswith(
        "beat faraway:1: its clock is 400 s behind the store's, more than tzbeat_max_skew (300 s)"
    )


def test_this_hosts_clock_is_compared_with_the_stores(ground: Ground) -> None:
    ground.lead()
    ground.attend()
    tz = TzBeat(ground.app, clock=ManualClock(ground.store.time() + timedelta(seconds=1000)))
    (found,) = tz.health().findings
    assert found.id == "tzbeat.E305"
    assert re.match(r"this host: its clock is (1000|99\d) s ahead of the store.s", found.text)


def test_health_of_a_wrong_configuration_names_the_problems() -> None:
    health = TzBeat(an_app(tzbeat_lease=0)).health()
    assert not health.ok
    assert ids(health.findings) == ["tzbeat.E001"]


def test_health_and_check_without_a_store() -> None:
    tz = TzBeat(an_app())
    assert ids(tz.health().findings) == ["tzbeat.E301"]
    (found,) = tz.check()
    assert (found.id, found.severity) == ("tzbeat.W201", "warning")
    assert "redis://localhost:1/0" in found.text


def test_check_lists_what_stops_a_beat_and_nothing_of_it_twice() -> None:
    bad = {"a": {"task": "proj.add", "schedule": "61 * * * *"}, "b": {"task": "proj.add", "schedule": 60, "args": "x"}}
    app = an_app(beat_schedule=bad, tzbeat_lease=0)
    with pytest.raises(InvalidConfiguration) as caught:
        configuration(app)
    errors = [finding.text for finding in TzBeat(app).check() if finding.severity == "error"]
    assert errors == list(caught.value.problems)


def test_check_warns_of_doubtful_schedules(ground: Ground) -> None:
    ground.app.conf.beat_schedule = {
        "no zone": {"task": "proj.add", "schedule": "30 2 * * *"},
        "restricted": {"task": "proj.add", "schedule": f"*/5 2-4 * * * {NEW_YORK}"},
        "unknown": {"task": "proj.missing", "schedule": 60},
        "fine": {"task": "proj.add", "schedule": f"30 2 * * * {NEW_YORK}"},
    }
    found = {finding.id: finding for finding in ground.tz.check()}
    assert set(found) == {"tzbeat.W101", "tzbeat.W102", "tzbeat.W103", "tzbeat.W206"}
    assert found["tzbeat.W101"].text.startswith("entry 'restricted': ")
    assert found["tzbeat.W102"].text.startswith("no zone given, so UTC is used (Celery's default")
    assert found["tzbeat.W102"].text.endswith(": no zone")
    assert "'proj.missing'" in found["tzbeat.W103"].text


def test_check_leaves_out_with_a_warning_where_strict_is_false() -> None:
    bad = {"a": {"task": "proj.add", "schedule": "61 * * * *"}}
    assert ids(TzBeat(an_app(beat_schedule=bad, tzbeat_strict=False)).check()) == ["tzbeat.W104", "tzbeat.W201"]


def by_id(ground: Ground) -> dict[str, Finding]:
    return {finding.id: finding for finding in ground.tz.check()}


@pytest.mark.parametrize(
    ("broker", "id", "words"),
    [
        (BROKEN, "tzbeat.W210", "the broker 'amqp://me:**@127.0.0.1:9//' does not answer: "),
        (f"{BROKEN};amqp://127.0.0.1:10//", "tzbeat.W210", "does not answer: "),
        ("redis://:secret@127.0.0.1:9/0", "tzbeat.W210", "the broker 'redis://:**@127.0.0.1:9/0' does not answer: "),
        (
            "rabbitmq://127.0.0.1",
            "tzbeat.E006",
            "its transport cannot be loaded: KeyError: 'No such transport: rabbitmq",
        ),
        ("memory://", "tzbeat.W211", "no worker gets what it sends"),
    ],
)
def test_check_asks_a_broker_that_is_not_the_store(ground: Ground, broker: str, id: str, words: str) -> None:
    found = {finding.id: finding for finding in TzBeat(an_app(broker, tzbeat_url=ground.settings.url)).check()}
    assert words in found[id].text
    assert found[id].hint
    assert (found[id].severity == "error") is (id == "tzbeat.E006")
    assert "secret" not in found[id].text + found[id].hint


@pytest.mark.parametrize(
    ("says", "refused"),
    [
        (amqp.exceptions.AccessRefused("Login was refused"), True),
        (amqp.exceptions.NotAllowed("vhost nosuch not found"), True),
        (redis.AuthenticationError("invalid username-password pair or user is disabled."), True),
        (ConnectionRefusedError(111, "Connection refused"), False),
        (amqp.exceptions.ConnectionForced("broker shut down"), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_a_broker_that_refuses_us_is_told_from_one_that_is_not_there(says: Exception, refused: bool) -> None:
    assert preflight.broker_refuses(says) is refused


def test_a_broker_that_answers_is_no_finding(ground: Ground, make_server: Any) -> None:
    app = an_app(make_server(appendonly=True).url, tzbeat_url=ground.settings.url)
    assert not {"tzbeat.E006", "tzbeat.W210", "tzbeat.W211"} & set(ids(TzBeat(app).check()))


def test_check_warns_of_beats_that_differ_and_names_what_differs(ground: Ground) -> None:
    ground.attend("one:1:a", fingerprint="f1", tzdata="2020a", role="standby")
    ground.attend("two:1:b", fingerprint="f2", role="standby", release="2.1")
    ground.attend("gone:1:c", fingerprint="f3", ago=60)
    ground.store.tell_entries("f1", {"kept": "1", "changed": "1", "gone": "1"})
    ground.store.tell_entries("f2", {"kept": "1", "changed": "2", "added": "1"})
    found = by_id(ground)
    assert set(found) == {"tzbeat.W202", "tzbeat.W203", "tzbeat.W206"}
    assert found["tzbeat.W202"].text == (
        "the beats alive have different entries: f1 on one:1; f2 on two:1 (release 2.1) "
        "(only with the first: 'gone'; only with the second: 'added'; defined differently: 'changed')"
    )
    assert found["tzbeat.W203"].text.startswith("the beats alive have different zone files: 2020a on one:1; 2")


def test_check_names_nothing_where_a_beat_does_not_tell_its_entries(ground: Ground) -> None:
    ground.attend("one:1:a", fingerprint="f1", role="standby")
    ground.attend("two:1:b", fingerprint="f2", role="standby")
    ground.store.tell_entries("f1", {"kept": "1"})
    assert by_id(ground)["tzbeat.W202"].text == "the beats alive have different entries: f1 on one:1; f2 on two:1"


def own_entries(ground: Ground) -> tuple[str, dict[str, str]]:
    reading = configuration(ground.app)[1]
    return reading.fingerprint, {name: entry.fingerprint for name, entry in reading.entries.items()}


def test_check_warns_where_the_leader_has_other_entries_than_this_code_and_names_them(ground: Ground) -> None:
    _, own = own_entries(ground)
    ground.attend(fingerprint="older", release="1.9")
    ground.store.tell_entries("older", {"tick": own["tick"], "nightly": "another", "removed": "x"})
    found = by_id(ground)
    assert "tzbeat.W202" not in found, "there is but one beat"
    assert found["tzbeat.W208"].text == (
        "the leader host:1 (release 1.9) has other entries than this code: "
        "only with it: 'removed'; defined differently: 'nightly'"
    )


def test_check_says_that_it_does_not_know_what_a_leader_of_an_older_kind_has(ground: Ground) -> None:
    ground.attend(fingerprint="older")
    assert by_id(ground)["tzbeat.W208"].text.endswith("has other entries than this code: not known which")
    ground.attend(fingerprint="older", entries=0)
    assert by_id(ground)["tzbeat.W208"].text.endswith("only in this code: 'nightly', 'tick'")


def test_check_does_not_warn_of_a_leader_with_this_codes_entries_nor_of_a_standby(ground: Ground) -> None:
    fingerprint, _ = own_entries(ground)
    ground.attend(fingerprint=fingerprint)
    assert "tzbeat.W208" not in by_id(ground)
    ground.attend("two:1:b", fingerprint="newer", role="standby")
    assert set(by_id(ground)) == {"tzbeat.W202", "tzbeat.W206"}


def test_what_a_beat_of_an_older_release_says_is_read_and_what_nobody_understands_is_left_out(ground: Ground) -> None:
    ground.attend("one:1:a")
    ground.attend("two:1:b")
    ground.attend("three:1:c")
    keys = ground.store.keys
    with redis.Redis.from_url(ground.settings.url) as client:
        said = json.loads(client.get(keys.beat("one:1:a")))
        for name in ("release", "schema", "path", "hindered", "epoch"):
            del said[name]
        client.set(keys.beat("one:1:a"), json.dumps(said))
        client.set(keys.beat("two:1:b"), '{"v": 9, "identity": {}}')
        client.set(keys.beat("three:1:c"), "\x00")
    (old,) = ground.tz.beats()
    assert (old.beat, old.release, old.schema, old.path, old.hindered, old.epoch) == ("one:1:a", "", 1, "", False, 0)


def test_check_warns_of_cursors_ahead_of_the_stores_clock(ground: Ground) -> None:
    epoch = ground.lead()
    ground.store.place({"tick": ground.cursor("tick", ahead=timedelta(days=1))}, epoch=epoch)
    found = {finding.id: finding for finding in ground.tz.check()}
    assert found["tzbeat.W204"].text.endswith(": tick")


def test_check_warns_of_a_server_that_evicts_and_keeps_nothing(empty_server: LocalServer, make_server: Any) -> None:
    evicting = make_server(args=("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"))
    assert ids(TzBeat(an_app(evicting.url)).check()) == ["tzbeat.W205", "tzbeat.W206"]
    assert ids(TzBeat(an_app(make_server(appendonly=True).url)).check()) == []


def test_check_names_a_key_of_another_type(ground: Ground) -> None:
    with redis.Redis.from_url(ground.settings.url) as client:
        client.set(Keys(ground.settings.namespace)("audit"), "not a stream")
    found = by_id(ground)["tzbeat.E007"]
    assert ":audit' is a string and must be a stream" in found.text


def test_check_warns_of_fewer_replicas_than_a_leader_asks_for(make_server: Any) -> None:
    primary = make_server(appendonly=True)
    app = an_app(primary.url)
    app.conf.tzbeat_wait_replicas = 1
    (found,) = TzBeat(app).check()
    assert found.id == "tzbeat.W212"
    assert "has 0 replica(s), tzbeat_wait_replicas asks for 1" in found.text
    make_server(replica_of=primary)
    assert ids(TzBeat(app).check()) == []


def test_check_warns_of_a_store_that_is_written_differently(ground: Ground) -> None:
    ground.app.conf.tzbeat_url = ground.settings.url.replace("127.0.0.1", "localhost")
    assert "tzbeat.W207" in ids(ground.tz.check())
    ground.app.conf.broker_url = "amqp://guest:secret@localhost:1//"
    assert "tzbeat.W207" not in ids(ground.tz.check()), "a broker that is no Redis is meant to be another"


def test_the_route_is_found_out_as_a_beat_does(ground: Ground, make_server: Any) -> None:
    url = ground.settings.url
    assert ground.tz.route().to_dict() == {
        "name": "same server",
        "why": "what the store's connection pushes arrives through the broker's",
    }
    spelled = an_app(url, tzbeat_url=url.replace("127.0.0.1", "localhost"))
    assert TzBeat(spelled).route().name == "same server"
    other = TzBeat(an_app(url, tzbeat_url=make_server().url)).route()
    assert (other.name, other.why) == (
        "claims",
        "what the store's connection pushes does not arrive through the broker's",
    )
    rabbit = TzBeat(an_app("amqp://guest:secret@localhost:1//", tzbeat_url=url)).route()
    assert (rabbit.name, rabbit.why) == ("claims", "the broker 'amqp://guest:**@localhost:1//' is not a Redis")
    database = TzBeat(an_app(url, tzbeat_url=url[:-1] + "3")).route()
    assert (database.name, database.why) == ("claims", "the broker uses database 0, the store database 3")
    with redis.Redis.from_url(url) as client:
        assert client.keys("*probe*") == []


def test_the_route_is_not_known_where_nobody_answers_or_the_settings_are_wrong() -> None:
    down = TzBeat(an_app()).route()
    assert down.to_dict()["name"] is None
    assert "does not answer" in down.why
    assert TzBeat(an_app(tzbeat_lease=0)).route().name == ""


def test_where_entries_stand(ground: Ground) -> None:
    epoch = ground.lead()
    now = ground.store.time().replace(microsecond=0)
    earlier = now - timedelta(minutes=1)
    row = Unrun("missed", "tick", earlier, earlier, 1, "older", ground.cursor("tick", ahead=timedelta(seconds=-30)))
    ground.store.record_unrun([row], epoch=epoch)
    cursor = ground.cursor("tick", ahead=timedelta(0))
    occurrence = Occurrence("tick", now)
    letter = {"v": 1, "key": occurrence.key, "entry": "tick", "nominal": "n", "reason": "build", "error": "E"}
    burial = Burial(occurrence, cursor, Bucket.of(now, timedelta(minutes=1)), "build", json.dumps(letter))
    ground.store.bury(burial, epoch=epoch)
    nightly, tick = ground.tz.standings()
    assert (nightly.entry.name, nightly.cursor, nightly.last) == ("nightly", None, None)
    assert tick.last is not None
    assert (tick.last.nominal, tick.last.state) == (now, "dead")
    assert tick.dead_letters == tick.audit == ()
    full = ground.tz.standing("tick")
    assert [each["reason"] for each in full.dead_letters] == ["build"]
    assert [record.event for record in full.audit] == ["missed", "dead"]
    assert full.in_full()["cursor"]["rule"] == ground.tz.get("tick").rule
    assert ground.tz.standing("nightly").audit == ()


def test_arguments_are_shortened(ground: Ground) -> None:
    assert "secret" * 4 not in ground.tz.standing("nightly").in_full()["args"]


def test_a_pattern_selects_entries(ground: Ground) -> None:
    assert [each.entry.name for each in ground.tz.standings("n*")] == ["nightly"]
    with pytest.raises(EntryNotFound, match="did you mean 'tick'"):
        ground.tz.standings("tik")


def test_a_name_with_glob_characters_is_found_as_it_is(ground: Ground) -> None:
    ground.app.conf.beat_schedule = {"a[1]": {"task": "proj.add", "schedule": 60}}
    assert [each.entry.name for each in ground.tz.standings("a[1]")] == ["a[1]"]


def test_a_schedule_that_is_over_says_so(ground: Ground) -> None:
    ground.app.conf.beat_schedule = {
        "over": {"task": "proj.add", "schedule": "@at 2020-01-01T00:00:00Z"},
        "to come": {"task": "proj.add", "schedule": "@at 2200-01-01T00:00:00Z"},
    }
    over, to_come = ground.tz.standings()
    assert (over.next_due, over.over) == (None, True)
    assert (to_come.next_due, to_come.over) == (datetime(2200, 1, 1, tzinfo=UTC), False)


def test_the_next_due_of_an_entry_lies_behind_its_cursor(ground: Ground) -> None:
    epoch = ground.lead()
    ahead = ground.tz.next("tick", n=1)[0].instant
    entry = ground.tz.get("tick")
    ground.store.place({"tick": Cursor(nominal=ahead, rule=entry.rule)}, epoch=epoch)
    assert ground.tz.standing("tick").next_due == ahead + timedelta(minutes=1)


def test_asking_a_leader_to_step_down(ground: Ground) -> None:
    assert ground.tz.leader() is None
    assert not ground.tz.step_down()
    epoch = ground.lead()
    leader = ground.tz.leader()
    assert leader is not None
    assert (leader.holder, leader.epoch) == ("host:1:a", epoch)
    assert not ground.tz.step_down(timeout=timedelta(seconds=0.1)), "nobody renews, and so nobody heard it"
    assert ground.tz.step_down(), "its lease has lapsed"
    assert ground.tz.leader() is None


def test_beats(ground: Ground) -> None:
    ground.attend("one:1:a")
    assert [beat.beat for beat in ground.tz.beats()] == ["one:1:a"]


def test_calls_that_need_a_store_that_is_down_say_so() -> None:
    tz = TzBeat(an_app())
    for call in (tz.leader, tz.beats, tz.step_down, tz.standings, lambda: tz.standing("tick")):
        with pytest.raises(StoreUnavailable):
            call()  # type: ignore[operator]
    assert [each.entry.name for each in tz.standings(ledger=False)] == ["nightly", "tick"]
    assert tz.standing("tick", ledger=False).next_due is not None


def test_a_server_that_forbids_commands_is_a_finding(ground: Ground) -> None:
    with redis.Redis.from_url(ground.settings.url) as client:
        client.acl_setuser("weak", enabled=True, passwords=["+p"], keys=["*"], commands=["+time"])
        url = ground.settings.url.replace("redis://", "redis://weak:p@")
        try:
            tz = TzBeat(an_app(url))
            assert ids(tz.health().findings) == ["tzbeat.E301"]
            (found,) = tz.check()
        finally:
            client.acl_deluser("weak")
    assert found.id == "tzbeat.W201"
    assert ":p@" not in found.text


def test_check_warns_where_celery_beat_would_start_another_scheduler() -> None:
    (found, _) = TzBeat(an_app(), set_scheduler=False).check()
    assert (found.id, found.severity) == ("tzbeat.W209", "warning")
    assert DEFAULT in found.text
    assert "TzBeat(app)" in found.hint
    assert "tzbeat.W209" in ids(TzBeat(an_app(beat_scheduler="no.such:Thing")).check())
    for ours in ("tzbeat", "celery_tzbeat:Scheduler", "celery_tzbeat.beat.scheduler:Scheduler"):
        assert "tzbeat.W209" not in ids(TzBeat(an_app(beat_scheduler=ours)).check())


def test_looking_at_an_app_leaves_its_scheduler_alone() -> None:
    app = an_app()
    TzBeat(app, set_scheduler=False)
    assert app.conf.beat_scheduler == DEFAULT


def test_a_server_that_does_not_know_us_is_an_error_of_check(ground: Ground) -> None:
    url = ground.settings.url.replace("redis://", "redis://nobody:p@")
    (found,) = TzBeat(an_app(url)).check()
    assert (found.id, found.severity) == ("tzbeat.E004", "error")
    assert ":p@" not in found.text


def test_a_database_that_is_none_is_an_error_of_check(ground: Ground) -> None:
    base = ground.settings.url.rpartition("/")[0] if ground.settings.url.count("/") > 2 else ground.settings.url
    for database in ("abc", "99999"):
        found = TzBeat(an_app(f"{base}/{database}")).check()
        assert "tzbeat.E005" in ids(found), found
        assert "tzbeat.W201" not in ids(found)


def test_a_dead_letter_that_cannot_be_read_is_left_out_and_counted(ground: Ground) -> None:
    with redis.Redis.from_url(ground.settings.url) as client:
        for number, letter in enumerate(["garbage", "[]", "{}", '{"entry": "tick", "reason": "x"}']):
            client.hset(ground.store.keys("dead"), f"tick@{number}", letter)  # type: ignore[attr-defined]
    standing = ground.tz.standing("tick")
    assert [letter["reason"] for letter in standing.dead_letters] == ["x"]
    assert standing.in_full()["unreadable_dead_letters"] == 3


def test_health_says_which_beats_fell_silent(ground: Ground) -> None:
    ground.attend("one:7:a", role="leader", ago=20)
    hint = ground.tz.health().findings[0].hint
    assert hint.startswith("1 beat(s) said something within the last 30 s (one:1 20 s ago)")
    assert "cannot write" in hint


def test_health_names_what_keeps_the_server_from_writing(ground: Ground) -> None:
    with redis.Redis.from_url(ground.settings.url) as client:
        client.config_set("maxmemory", 1)
        try:
            (_, found) = ground.tz.health().findings
        finally:
            client.config_set("maxmemory", 0)
    assert found.id == "tzbeat.E306"
    assert "maxmemory is reached" in found.text


@pytest.mark.parametrize(
    ("info", "guard", "word"),
    [
        ({"role": "slave"}, None, "READONLY"),
        ({"rdb_last_bgsave_status": "err"}, "yes", "MISCONF"),
        ({"aof_last_write_status": "err"}, None, "MISCONF"),
        ({"loading": 1}, None, "LOADING"),
    ],
)
def test_what_info_tells_of_refused_writes_is_understood(info: dict[str, Any], guard: str | None, word: str) -> None:
    ((reason, _),) = health._reasons(info, guard)
    assert word in reason


def test_a_server_that_takes_writes_gives_no_reason() -> None:
    fine = {"role": "master", "used_memory": 5, "maxmemory": 0, "rdb_last_bgsave_status": "err"}
    assert not list(health._reasons(fine, "no"))

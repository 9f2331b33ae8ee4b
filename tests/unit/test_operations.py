"""Operators' calls and commands about runs and dead letters, on a ledger written for the purpose; a leader played by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_tzbeat.api import TzBeat
from celery_tzbeat.api.workers import of_workers
from celery_tzbeat.beat.scheduler import open_store
from celery_tzbeat.cli import tzbeat
from celery_tzbeat.deliveries import DeadLetter, WorkerPresence
from celery_tzbeat.errors import OccurrenceNotFound, StoreUnavailable
from celery_tzbeat.model import Cursor, Entry, Occurrence, Pause, Policy
from celery_tzbeat.schedules import every
from celery_tzbeat.settings import Settings
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import Burial, Command, Dispatch, Tracking
from celery_tzbeat.testing.server import LocalServer

UTC = timezone.utc
NOW = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
MINUTE = timedelta(minutes=1)
DOWN = "redis://localhost:1/0"


def an_app(url: str) -> Celery:
    app = Celery("proj", set_as_current=False)
    app.conf.update(broker_url=url, result_expires=None, beat_schedule={}, tzbeat_lease=1)
    return app


@pytest.fixture
def app(empty_server: LocalServer) -> Celery:
    return an_app(empty_server.url)


@pytest.fixture
def store(app: Celery) -> Iterator[Any]:
    with closing(open_store(Settings.read(app))) as made:
        made.take_office(1)
        yield made


@pytest.fixture
def tz(app: Celery) -> TzBeat:
    return TzBeat(app, set_scheduler=False)


def key(minute: int, entry: str = "a") -> str:
    return Occurrence(entry, NOW + minute * MINUTE).key


def bury(store: Any, minute: int, entry: str = "a", reason: str = "build", text: str = "") -> None:
    occurrence = Occurrence(entry, NOW + minute * MINUTE)
    letter = DeadLetter(
        occurrence.key,
        entry,
        "proj.add",
        occurrence.nominal,
        reason,
        "it broke",
        occurrence.nominal,
        b"raw",
        "Traceback",
    )
    bucket = Bucket.of(occurrence.nominal, MINUTE)
    burial = Burial(occurrence, Cursor(occurrence.nominal, "r"), bucket, reason, text or letter.to_json())
    assert store.bury(burial, epoch=1).verdict.name == "DONE"


def publish(store: Any, minute: int, entry: str = "a") -> None:
    occurrence = Occurrence(entry, NOW + minute * MINUTE)
    push = Command("LPUSH", (b"q", b"{}"), (b"q",))
    bucket = Bucket.of(occurrence.nominal, MINUTE)
    cursor = Cursor(occurrence.nominal, "r")
    dispatch = Dispatch(occurrence, cursor, bucket, (push,), Tracking(Policy(), payload=b"{}"))
    assert store.dispatch([dispatch], epoch=1)[0].verdict.name == "DONE"


def run(app: Celery, *args: str, typed: str = "") -> Result:
    obj = CLIContext(app=app, no_color=False, workdir=None)
    return CliRunner().invoke(tzbeat, args, obj=obj, input=typed or None)


def answer(app: Celery, *args: str) -> Any:
    return json.JSONDecoder().raw_decode(run(app, *args, "--json").stdout)[0]


def asked(store: Any) -> list[tuple[str, str, str]]:
    return [(request.kind, request.key, request.why) for request in store.survey().requests]


# ---- runs, cancel


def test_runs_are_those_of_an_entry_or_of_all(tz: TzBeat, store: Any, app: Celery) -> None:
    publish(store, 1, "a")
    publish(store, 1, "b")
    assert {found.key for found in tz.runs()} == {key(1, "a"), key(1, "b")}
    assert [found.key for found in tz.runs("b")] == [key(1, "b")]
    assert tz.run(key(1)).state == "published"
    with pytest.raises(OccurrenceNotFound):
        tz.run(key(9))
    (row,) = answer(app, "runs", "a")["runs"]
    assert (row["key"], row["state"], row["attempt"], row["done"]) == (key(1), "published", 1, None)
    assert key(1) in run(app, "runs").output


def test_cancel_by_entry_asks_for_each_open_one_and_names_who_asks(tz: TzBeat, store: Any) -> None:
    publish(store, 1)
    publish(store, 2)
    publish(store, 3, "b")
    found = tz.cancel("a", why="not today")
    assert {each.key for each in found} == {key(1), key(2)}
    assert all(each.outcome is None and not each.is_done and each.id for each in found)
    requests = store.survey().requests
    assert {(each.kind, each.key, each.why) for each in requests} == {
        ("cancel", key(1), "not today"),
        ("cancel", key(2), "not today"),
    }
    assert all("@" in each.by and each.expires > store.time() for each in requests)


def test_what_is_not_open_cannot_be_cancelled(tz: TzBeat, app: Celery, store: Any) -> None:
    with pytest.raises(OccurrenceNotFound, match="nothing of 'a' is open"):
        tz.cancel("a")
    assert run(app, "cancel", "a").exit_code == 2
    assert asked(store) == []


def test_waiting_ends_without_an_answer(tz: TzBeat, store: Any, app: Celery) -> None:
    publish(store, 1)
    (found,) = tz.cancel(key(1), wait=timedelta(seconds=0.3))
    assert found.outcome is None


def test_waiting_ends_with_the_answer(tz: TzBeat, store: Any) -> None:
    publish(store, 1)
    (found,) = tz.cancel(key(1))
    (request,) = store.survey().requests
    store.cancel(request, request.key, epoch=1)
    assert store.outcome(found.id) == "withdrawn"
    publish(store, 2)

    class Leader:
        """A clock at whose second reading a leader has answered."""

        def __init__(self) -> None:
            self.readings = 0

        def now(self) -> datetime:
            return datetime.now(UTC)

        def reading(self) -> Any:
            self.readings += 1
            for waiting in store.survey().requests:
                store.answer(waiting, "refused: no", epoch=1)
            from celery_tzbeat.clock import SystemClock

            return SystemClock().reading()

    impatient = TzBeat(tz.app, clock=Leader(), set_scheduler=False)
    (refused,) = impatient.cancel(key(2), wait=timedelta(seconds=20))
    assert (refused.outcome, refused.is_done) == ("refused: no", False)


def test_a_command_says_whether_it_was_carried_out(store: Any, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, 1)
    module = sys.modules["celery_tzbeat.cli.runs"]  # the command has its name
    monkeypatch.setattr(module, "patience", lambda tz, wait: timedelta(seconds=0.2) if wait else None)
    assert run(app, "cancel", key(1), "--why", "x").exit_code == 0
    late = run(app, "cancel", key(1), "--wait")
    assert late.exit_code == 1
    assert "no answer yet" in late.output
    (row, *_) = answer(app, "cancel", key(1))["requests"]
    assert (row["kind"], row["key"], row["outcome"]) == ("cancel", key(1), None)


# ---- dead letters


def test_letters_are_listed_by_filter_the_oldest_first(tz: TzBeat, store: Any, app: Celery) -> None:
    bury(store, 1, "a")
    bury(store, 1, "b", "abandoned")
    bury(store, 2, "a", "abandoned")
    bury(store, 3, "a")
    assert [found.key for found in tz.dead.list(entry="a")] == [key(1), key(2), key(3)]
    assert [found.key for found in tz.dead.list(reason="abandoned")] == [key(1, "b"), key(2)]
    assert [found.key for found in tz.dead.list(since=NOW + 2 * MINUTE)] == [key(2), key(3)]
    assert [found.key for found in tz.dead.list(entry="a", limit=2)] == [key(1), key(2)]
    assert tz.dead.list(entry="c") == []
    rows = answer(app, "dead", "list", "--entry", "a", "--reason", "build", "--limit", "1")["letters"]
    assert [(row["key"], row["reason"], row["has_message"]) for row in rows] == [(key(1), "build", True)]
    assert key(1, "b") in run(app, "dead", "list").output


def test_a_letter_that_cannot_be_read_is_counted(tz: TzBeat, store: Any, app: Celery) -> None:
    bury(store, 1)
    bury(store, 2, text="garbage")
    assert [found.key for found in tz.dead.list()] == [key(1)]
    assert tz.dead.unreadable() == 1
    assert answer(app, "dead", "list")["unreadable"] == 1
    assert "1 dead letter(s) cannot be read" in run(app, "dead", "list").output
    assert run(app, "dead", "show", key(2)).exit_code == 1


def test_a_letter_is_shown_in_full(tz: TzBeat, store: Any, app: Celery) -> None:
    bury(store, 1)
    assert tz.dead.show(key(1)).message == b"raw"
    with pytest.raises(OccurrenceNotFound):
        tz.dead.show(key(2))
    text = run(app, "dead", "show", key(1)).output
    assert "it broke" in text
    assert "Traceback" in text
    assert "3 bytes" in text
    full = answer(app, "dead", "show", key(1))
    assert (full["message"], full["traceback"], full["has_message"]) == ("cmF3", "Traceback", True)
    assert run(app, "dead", "show", key(2)).exit_code == 2


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_many_are_asked_for_at_once_by_filter_and_limit(tz: TzBeat, store: Any, verb: str) -> None:
    for minute in range(5):
        bury(store, minute)
    bury(store, 9, "b")
    ask = getattr(tz.dead, verb)
    dry = ask(entry="a", limit=3, dry_run=True)
    assert [each.key for each in dry] == [key(0), key(1), key(2)]
    assert asked(store) == []
    ask(entry="a", limit=3, why="fixed")
    assert asked(store) == [(verb, key(n), "fixed") for n in range(3)]


def test_a_key_without_a_letter_asks_for_nothing(tz: TzBeat, store: Any) -> None:
    bury(store, 1)
    with pytest.raises(OccurrenceNotFound):
        tz.dead.replay(key(1), key(2))
    assert asked(store) == []


@pytest.mark.parametrize(
    ("args", "typed", "asks"),
    [
        (("replay", "KEY"), "", True),
        (("replay",), "n\n", False),
        (("replay",), "y\n", True),
        (("replay", "--yes"), "", True),
        (("replay", "--yes", "--dry-run"), "", False),
        (("discard", "KEY"), "n\n", False),
        (("discard", "KEY"), "y\n", True),
        (("discard", "KEY", "--yes"), "", True),
    ],
)
def test_the_commands_ask_back_before_they_ask_for_much(
    store: Any, app: Celery, args: tuple[str, ...], typed: str, asks: bool
) -> None:
    bury(store, 1)
    run(app, "dead", *(key(1) if arg == "KEY" else arg for arg in args), typed=typed)
    assert asked(store) == ([(args[0], key(1), "")] if asks else [])


def test_nothing_that_matches_is_no_error(app: Celery, store: Any) -> None:
    found = run(app, "dead", "replay", "--entry", "a", "--yes")
    assert (found.exit_code, found.output) == (0, "nothing matches\n")


@pytest.mark.parametrize("args", [("list", "--since", "yesterday"), ("replay", "k", "--entry", "a"), ("replay", "k")])
def test_wrong_usage(app: Celery, store: Any, args: tuple[str, ...]) -> None:
    assert run(app, "dead", *args).exit_code == 2


def test_without_the_store_the_exit_code_says_so() -> None:
    app = an_app(DOWN)
    for args in (("runs",), ("cancel", "k"), ("dead", "list"), ("dead", "show", "k"), ("dead", "replay", "k")):
        assert run(app, *args).exit_code == 3
    with pytest.raises(StoreUnavailable):
        TzBeat(app, set_scheduler=False).dead.list()


# ---- findings about workers


def entry(name: str = "e", **policy: Any) -> Entry:
    return Entry(name, "proj.add", every("1m"), policy=Policy(**policy))


def a_worker(pool: str) -> WorkerPresence:
    return WorkerPresence("h:1:a", "celery@h", pool, "0", 0)


@pytest.mark.parametrize(
    ("policy", "pools", "ids"),
    [
        ({}, [], []),
        ({"overlap": "skip"}, [], ["tzbeat.W213"]),
        ({"delivery": "at_most_once"}, [], ["tzbeat.W213"]),
        ({"overlap": "skip"}, ["prefork"], []),
        ({"timeout": MINUTE}, [], []),
        ({"timeout": MINUTE}, ["prefork"], []),
        ({"timeout": MINUTE}, ["prefork", "thread"], ["tzbeat.W214"]),
        ({"timeout": MINUTE}, ["solo"], ["tzbeat.W214"]),
        ({"timeout": MINUTE, "overlap": "skip"}, ["gevent"], ["tzbeat.W214"]),
    ],
)
def test_what_the_policies_need_of_the_workers(policy: dict[str, Any], pools: list[str], ids: list[str]) -> None:
    found = of_workers({"e": entry(**policy)}, [a_worker(pool) for pool in pools])
    assert [finding.id for finding in found] == ids


# ---- pauses


@pytest.fixture
def listed(app: Celery) -> None:
    app.conf.beat_schedule = {
        name: {"task": "celery.backend_cleanup", "schedule": "0 3 * * * UTC"} for name in ("a", "b")
    }


@pytest.mark.usefixtures("listed")
def test_a_pause_is_a_request_with_note_and_end(tz: TzBeat, store: Any, app: Celery) -> None:
    until = datetime(2100, 1, 1, tzinfo=timezone.utc)
    (found,) = tz.pause("a", note="stocktaking", until=until)
    assert (found.kind, found.key, found.is_done) == ("pause", "a", False)
    (request,) = store.survey().requests
    assert (request.why, request.detail) == ("stocktaking", "2100-01-01T00:00:00Z")
    given = answer(app, "pause", "b", "--until", "2100-01-01T00:00Z")["requests"]
    assert [(each["kind"], each["key"], each["outcome"]) for each in given] == [("pause", "b", None)]
    assert store.survey().requests[1].detail == "2100-01-01T00:00:00Z"


@pytest.mark.usefixtures("listed")
def test_an_unpause_may_catch_up_and_may_be_of_an_entry_that_is_listed_no_longer(
    tz: TzBeat, store: Any, app: Celery
) -> None:
    store.pause("gone", Pause(NOW, None, "somebody", "moving"), None, epoch=1)
    assert run(app, "unpause", "gone", "--catch-up", "--why", "moved").exit_code == 0
    assert asked(store) == [("unpause", "gone", "moved")]
    assert store.survey().requests[0].detail == "catch_up"
    tz.unpause("a")
    assert store.survey().requests[1].detail == ""


@pytest.mark.usefixtures("listed")
def test_what_is_paused_is_shown(tz: TzBeat, store: Any, app: Celery) -> None:
    store.pause("a", Pause(NOW, NOW + MINUTE, "somebody", "stocktaking"), None, epoch=1)
    assert tz.paused()["a"].note == "stocktaking"
    listed = run(app, "list", "a").output
    assert "paused by somebody until" in listed
    assert "stocktaking" in listed
    assert "stocktaking" in run(app, "show", "a").output
    assert answer(app, "list", "a")["entries"][0]["paused"]["by"] == "somebody"
    assert answer(app, "list", "b")["entries"][0]["paused"] is None


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("pause", "c"), "no entry is named 'c'"),
        (("unpause", "c"), "no entry is named 'c'"),
        (("pause", "a", "--until", "2020-01-01T00:00Z"), "which is past"),
        (("pause", "a", "--until", "soon"), "--until 'soon' is not an ISO date"),
    ],
)
def test_a_pause_that_cannot_be_is_refused_and_nothing_is_asked(
    app: Celery, store: Any, args: tuple[str, ...], words: str
) -> None:
    found = run(app, *args)
    assert found.exit_code == 2
    assert words in found.output
    assert store.survey().requests == ()


def test_a_pause_until_a_naive_instant_is_refused(tz: TzBeat) -> None:
    with pytest.raises(ValueError, match="give it a zone"):
        tz.pause("a", until=datetime(2100, 1, 1))


def test_a_pause_that_cannot_be_read_is_a_pause(tz: TzBeat, store: Any, app: Celery) -> None:
    with closing(redis.Redis.from_url(app.conf.broker_url)) as client:
        client.hset("tzbeat:{proj/0}:paused", "a", "{}")
    assert "cannot be read" in tz.paused()["a"].note

"""The entries: from where they come, and what is said of those that cannot be used."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import crontab as celery_crontab
from celery.schedules import schedule as celery_schedule

from celery_tzbeat import crontab, every
from celery_tzbeat.beat.scheduler import configuration
from celery_tzbeat.entries import CLEANUP, Reading, read_entries
from celery_tzbeat.errors import InvalidConfiguration
from celery_tzbeat.model import NAME_LENGTH, Policy
from celery_tzbeat.settings import Settings

UTC = timezone.utc
NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)


def an_app(beat_schedule: Any = None, **conf: Any) -> Celery:
    app = Celery("proj", set_as_current=False)
    app.conf.update({"broker_url": "redis://localhost:6379/0", "result_expires": None, **conf})
    if beat_schedule is not None:
        app.conf.beat_schedule = beat_schedule

    @app.task(name="proj.add", shared=False)
    def add(*args: Any) -> None: ...

    return app


def read(app: Celery) -> Reading:
    return read_entries(app, Settings.read(app))


def entry_problems(**entry: Any) -> list[str]:
    given = {"task": "proj.add", "schedule": 60, **entry}
    return list(read(an_app({"nightly": {k: v for k, v in given.items() if v is not ...}})).problems)


def test_everything_celery_takes_is_taken() -> None:
    app = an_app(
        {
            "number": {"task": "proj.add", "schedule": 30, "args": (1, 2)},
            "timedelta": {"task": "proj.add", "schedule": timedelta(minutes=5), "args": [1]},
            "schedule": {"task": "proj.add", "schedule": celery_schedule(60), "relative": True},
            "crontab": {"task": "proj.add", "schedule": celery_crontab("30", "2")},
            "text": {"task": "proj.add", "schedule": "@daily Europe/Paris", "kwargs": {"a": 1}},
            "ours": {"task": "proj.add", "schedule": crontab("30 2 * * *", tz="Asia/Tokyo"), "options": {"queue": "q"}},
            "celery's": ScheduleEntry(name="x", task="proj.add", schedule=celery_schedule(60), args=(1,)),
        }
    )
    found = read(app)
    assert not found.problems
    assert set(found.entries) == {"number", "timedelta", "schedule", "crontab", "text", "ours", "celery's"}
    assert found.entries["number"].args == (1, 2)
    assert found.entries["timedelta"].args == (1,)
    assert found.entries["text"].schedule.next_after(NOON) == datetime(2026, 7, 1, 22, tzinfo=UTC)
    assert found.entries["crontab"].schedule.text == "30 2 * * * UTC"
    assert dict(found.entries["ours"].options) == {"queue": "q"}


def test_a_schedule_without_a_zone_is_read_in_the_apps() -> None:
    app = an_app({"a": {"task": "proj.add", "schedule": "30 2 * * *"}}, timezone="Europe/Paris")
    assert read(app).entries["a"].schedule.text == "30 2 * * * Europe/Paris"


def test_gap_and_fold_of_the_settings_hold_where_a_schedule_states_none() -> None:
    schedules = {
        "a": {"task": "proj.add", "schedule": "30 2 * * * Europe/Paris"},
        "b": {"task": "proj.add", "schedule": "30 2 * * * Europe/Paris gap=end"},
    }
    found = read(an_app(schedules, tzbeat_gap="skip")).entries
    assert found["a"].schedule.text == "30 2 * * * Europe/Paris gap=skip"
    assert found["b"].schedule.text == "30 2 * * * Europe/Paris gap=end"


def test_a_periodic_task_takes_its_policy_from_a_keyword() -> None:
    app = an_app()
    app.add_periodic_task(
        crontab("30 2 * * *", tz="Europe/Paris"),
        app.signature("proj.add", args=(1, 2)),
        name="nightly",
        policy={"catchup": "all", "misfire_grace": 5},
        queue="slow",
    )
    entry = read(app).entries["nightly"]
    assert entry.policy == Policy(misfire_grace=timedelta(seconds=5), catchup="all")
    assert dict(entry.options) == {"queue": "slow"}
    assert "policy" in app.conf.beat_schedule["nightly"]["options"], "the user's own options were changed"


def test_the_name_that_celery_makes_up_is_a_name_like_any_other() -> None:
    app = an_app()
    app.add_periodic_task(10.0, app.signature("proj.add", args=(1, 2)))
    (name,) = read(app).entries
    assert name.startswith("proj.add(")


def test_the_policy_of_the_app_holds_where_an_entry_states_none() -> None:
    schedules = {
        "a": {"task": "proj.add", "schedule": 60},
        "b": {"task": "proj.add", "schedule": 60, "policy": {"misfire_grace": 5}},
    }
    found = read(an_app(schedules, tzbeat_policy={"catchup": "skip"})).entries
    assert found["a"].policy == Policy(catchup="skip")
    assert found["b"].policy == Policy(timedelta(seconds=5), "skip")


def test_celerys_deadline_holds_for_crontabs_only() -> None:
    schedules = {
        "cron": {"task": "proj.add", "schedule": celery_crontab("0", "4")},
        "interval": {"task": "proj.add", "schedule": 60},
    }
    found = read(an_app(schedules, beat_cron_starting_deadline=3600)).entries
    assert found["cron"].policy.catchup_window == timedelta(hours=1)
    assert found["interval"].policy == Policy()


def test_the_backend_cleanup_is_there_where_the_backend_needs_it() -> None:
    day = {"result_expires": 86400}
    needed = read(an_app(result_backend="file:///tmp", **day)).entries
    assert needed[CLEANUP].schedule.text.startswith("0 4 * * *")
    assert CLEANUP not in read(an_app(result_backend="redis://localhost:6379/0", **day)).entries
    assert CLEANUP not in read(an_app(result_backend="file:///tmp")).entries
    own = {CLEANUP: {"task": CLEANUP, "schedule": 60}}
    assert read(an_app(own, result_backend="file:///tmp", **day)).entries[CLEANUP].schedule == every(60)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"schedule": "30 2 * * * Europe/Pariss"}, "zone 'Europe/Pariss' is unknown: did you mean 'Europe/Paris'"),
        ({"schedule": "0 0 31 2 *"}, "day of month '31' never comes in month '2'"),
        ({"schedule": "61 * * * *"}, "minute '61' is not in 0-59"),
        ({"schedule": ""}, "text of the schedule is empty"),
        ({"schedule": -5}, "interval"),
        ({"schedule": object()}, "cannot be used"),
        ({"schedule": ...}, "there is no 'schedule'"),
        ({"policy": {"misfire_grac": 5}}, "policy 'misfire_grac' is unknown; did you mean 'misfire_grace'?"),
        ({"policy": {"after": "other"}}, "policy 'after' is not built in this release"),
        ({"options": {"policy": {"catchup": "never"}}}, "policy catchup 'never' is unknown"),
        ({"args": "text"}, "args is 'text'; give a list or a tuple"),
        ({"args": 5}, "args is 5; give a list or a tuple"),
        ({"kwargs": [1]}, "kwargs is [1]; give a dict"),
        ({"options": "fast"}, "options is 'fast'; give a dict"),
        ({"task": ...}, "task is None; give the task's name"),
        ({"task": ""}, "task is ''; give the task's name"),
        ({"schedul": 60}, "'schedul' is unknown; did you mean 'schedule'?"),
        ({"enabled": True}, "'enabled' is unknown"),
        (
            {"options": {"expires": timedelta(hours=1)}},
            "option expires is datetime.timedelta(seconds=3600); give seconds",
        ),
        ({"options": {"expires": "soon"}}, "option expires is 'soon'; give seconds, or a datetime"),
        ({"options": {"priority": "high"}}, "option priority is 'high'; give a whole number from 0 to 255"),
        ({"options": {"priority": 256}}, "option priority is 256; give a whole number"),
        ({"options": {"countdown": "5"}}, "option countdown is '5'; give seconds"),
        ({"options": {"queue": 5}}, "option queue is 5; give the queue's name"),
        ({"task": "m\ud800"}, "give the task's name"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_entrys_name(entry: dict[str, Any], sentence: str) -> None:
    (found,) = entry_problems(**entry)
    assert found.startswith("entry 'nightly': ")
    assert sentence in found


def test_a_deadline_that_is_no_duration_is_refused() -> None:
    app = an_app({"a": {"task": "proj.add", "schedule": celery_crontab("0")}}, beat_cron_starting_deadline="1h")
    (found,) = read(app).problems
    assert found == "entry 'a': beat_cron_starting_deadline is '1h'; give seconds or a timedelta"


@pytest.mark.parametrize("name", ["", "x" * (NAME_LENGTH + 1), 5])
def test_a_name_is_a_text_of_bounded_length(name: Any) -> None:
    (found,) = read(an_app({name: {"task": "proj.add", "schedule": 60}})).problems
    assert found.endswith(f"a name is a text of 1 to {NAME_LENGTH} characters")


def test_what_is_no_entry_and_what_is_no_schedule_of_entries() -> None:
    assert read(an_app({"a": "proj.add"})).problems == (
        "entry 'a': it is 'proj.add'; give a dict with 'task' and 'schedule'",
    )
    assert read(an_app(["a"])).problems == ("beat_schedule is ['a']; give a dict of entries by name",)


def test_two_of_each_fault_make_one_message_that_lists_them_all() -> None:
    app = an_app(
        {
            "zone 1": {"task": "proj.add", "schedule": "@daily Nowhere/A"},
            "zone 2": {"task": "proj.add", "schedule": "@daily Nowhere/B"},
            "date 1": {"task": "proj.add", "schedule": "0 0 31 2 *"},
            "date 2": {"task": "proj.add", "schedule": "0 0 30 2 *"},
            "field 1": {"task": "proj.add", "schedule": "61 * * * *"},
            "field 2": {"task": "proj.add", "schedule": "* 25 * * *"},
            "policy 1": {"task": "proj.add", "schedule": 60, "policy": {"catchup": "x"}},
            "policy 2": {"task": "proj.add", "schedule": 60, "policy": {"grace": 1}},
            "args 1": {"task": "proj.add", "schedule": 60, "args": "a"},
            "args 2": {"task": "proj.add", "schedule": 60, "args": "b"},
            "good": {"task": "proj.add", "schedule": 60},
        },
        tzbeat_lease=0,
        tzbeat_lese=1,
    )
    with pytest.raises(InvalidConfiguration) as caught:
        configuration(app)
    text = str(caught.value)
    assert len(caught.value.problems) == 12
    for kind in ("zone", "date", "field", "policy", "args"):
        for number in (1, 2):
            assert f"entry '{kind} {number}': " in text
    assert "tzbeat_lease" in text
    assert "tzbeat_lese" in text
    assert "good" not in text


def test_one_entry_may_have_several_faults() -> None:
    assert len(entry_problems(schedule="61 * * * *", args="x", kwargs=5, policy={"catchup": "x"})) == 4


def test_bad_entries_are_left_out_where_strict_is_false() -> None:
    app = an_app(
        {"bad": {"task": "proj.add", "schedule": "61 * * * *"}, "good": {"task": "proj.add", "schedule": 60}},
        tzbeat_strict=False,
    )
    assert set(configuration(app)[1].entries) == {"good"}


def test_an_unknown_task_is_noted_and_with_strict_tasks_refused() -> None:
    schedules = {"a": {"task": "proj.missing", "schedule": 60}}
    found = read(an_app(schedules))
    assert set(found.entries) == {"a"}
    assert found.unknown_tasks == ("entry 'a': task 'proj.missing' is not known to this process",)
    with pytest.raises(InvalidConfiguration, match="tzbeat_strict is 'tasks'"):
        configuration(an_app(schedules, tzbeat_strict="tasks"))


def test_an_unknown_timezone_of_the_app_is_one_problem_not_a_traceback() -> None:
    app = an_app({"a": {"task": "proj.add", "schedule": "@daily"}}, timezone="Mars/Phobos")
    with pytest.raises(InvalidConfiguration) as caught:
        configuration(app)
    assert len(caught.value.problems) == 1


def test_equal_definitions_have_one_fingerprint_and_others_another() -> None:
    first = {"a": {"task": "proj.add", "schedule": 60, "args": (1,)}}
    assert read(an_app(first)).fingerprint == read(an_app(dict(first))).fingerprint
    for change in ({"schedule": 61}, {"args": (2,)}, {"task": "proj.other"}, {"policy": {"catchup": "all"}}):
        other = {"a": {**first["a"], **change}}
        assert read(an_app(other)).fingerprint != read(an_app(first)).fingerprint


def test_an_entry_at_reboot_is_refused_until_a_beat_would_send_it() -> None:
    app = Celery("proj", broker="redis://localhost", set_as_current=False)
    app.conf.beat_schedule = {"once": {"task": "t", "schedule": "@reboot"}}
    (problem,) = read_entries(app, Settings.read(app)).problems
    assert "'once'" in problem
    assert "@reboot" in problem
    assert "not built" in problem


def test_a_fingerprint_tells_arguments_apart_and_is_the_same_in_every_process() -> None:
    def fingerprint(**definition: object) -> str:
        app = Celery("proj", broker="redis://localhost", set_as_current=False)
        app.conf.beat_schedule = {"e": {"task": "t", "schedule": 60, **definition}}
        return read_entries(app, Settings.read(app)).fingerprint

    assert fingerprint(kwargs={"a": 1}) != fingerprint(kwargs={"a": 2})
    assert fingerprint(options={"queue": "a"}) != fingerprint(options={"queue": "b"})
    assert fingerprint(args=[BeatLazyFunc(lambda: 1)]) == fingerprint(args=[BeatLazyFunc(lambda: 1)])
    assert fingerprint(kwargs={"a": {1: "x", "y": 2}}) == fingerprint(kwargs={"a": {"y": 2, 1: "x"}})


@pytest.mark.parametrize("name", ["m\ud800", "m\n", "m\x00"])
def test_a_name_that_cannot_be_stored_or_shown_is_refused_by_its_repr(name: str) -> None:
    (found,) = read(an_app({name: {"task": "proj.add", "schedule": 60}})).problems
    assert found == f"entry {name!r}: a name has printable characters only: it is in keys, logs and commands"
    found.encode()


def test_options_that_celery_can_send_are_taken() -> None:
    options = {
        "expires": NOON,
        "priority": 9,
        "countdown": 1.5,
        "queue": "q",
        "eta": None,
        "headers": {},
        "anything": 1,
    }
    assert not entry_problems(options=options)
    assert not entry_problems(options={"expires": 60})
    assert not entry_problems(options={"expires": "2026-07-01T12:00:00Z"})


class Hostile(dict):  # type: ignore[type-arg]
    def get(self, *_: Any) -> Any:
        raise RuntimeError("no\ud800")


def test_whatever_an_entry_raises_while_it_is_read_is_a_problem_of_that_entry_alone() -> None:
    class Schedule(celery_schedule):
        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError("by zero")

        __hash__ = None  # type: ignore[assignment]

        def __repr__(self) -> str:
            raise ZeroDivisionError("by zero")

    schedules = {
        "hostile": Hostile(task="proj.add", schedule=60),
        "schedule": {"task": "proj.add", "schedule": Schedule(60)},
        "fine": {"task": "proj.add", "schedule": 60},
    }
    found = read(an_app(schedules))
    assert list(found.entries) == ["fine"]
    one, other = found.problems
    assert one == "entry 'hostile': it cannot be read: RuntimeError: no\\ud800"
    assert other == "entry 'schedule': it cannot be read: ZeroDivisionError: by zero"

"""The command line, in this process: arguments, output, exit codes. Real commands are in integration/test_commands.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_tzbeat.beat.scheduler import open_store
from celery_tzbeat.cli import tzbeat
from celery_tzbeat.model import Presence
from celery_tzbeat.settings import Settings
from celery_tzbeat.testing.server import LocalServer

NEW_YORK = "America/New_York"
OURS = "celery_tzbeat:Scheduler"
DOWN = "redis://localhost:1/0"


def an_app(**conf: Any) -> Celery:
    app = Celery("proj", set_as_current=False)
    entries = {
        "nightly": {"task": "proj.add", "schedule": f"30 2 * * * {NEW_YORK}", "args": ("secret" * 20,)},
        "tick": {"task": "proj.add", "schedule": 60},
    }
    app.conf.update(
        {"broker_url": DOWN, "result_expires": None, "beat_schedule": entries, "beat_scheduler": OURS, **conf}
    )

    @app.task(name="proj.add", shared=False)
    def add(*args: Any) -> None: ...

    return app


def run(*args: str, app: Celery | None = None, color: bool = False) -> Result:
    obj = CLIContext(app=app or an_app(), no_color=False, workdir=None)
    return CliRunner().invoke(tzbeat, args, obj=obj, color=color)


def answer(*args: str, app: Celery | None = None) -> Any:
    # Click before 8.2 mixes standard error into what it calls stdout, behind the JSON.
    return json.JSONDecoder().raw_decode(run(*args, "--json", app=app).stdout)[0]


def test_the_group_has_the_name_that_celery_shows() -> None:
    assert tzbeat.name == "tzbeat"
    assert set(tzbeat.commands) == {
        "cancel",
        "check",
        "dead",
        "health",
        "leader",
        "list",
        "next",
        "pause",
        "preview",
        "runs",
        "show",
        "unpause",
    }


def test_importing_the_commands_imports_nothing_heavy() -> None:
    heavy = ("redis", "tabulate", "celery_tzbeat.api", "celery_tzbeat.model", "celery_tzbeat.beat")
    code = f"import celery_tzbeat.cli, sys; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        *("cancel", "check", "health", "leader", "list", "next", "pause", "preview", "runs", "show", "unpause"),
        *("dead list", "dead show", "dead replay", "dead discard"),
    ],
)
def test_each_command_documents_its_exit_codes(command: str) -> None:
    found = run(*command.split(), "--help")
    assert found.exit_code == 0
    assert "Exit codes: 0 " in found.output
    assert "--json" in found.output


def test_a_mistyped_command_is_answered_with_the_nearest() -> None:
    found = run("lst")
    assert found.exit_code == 2
    assert "list" in found.output


# ---- next


def test_next_shows_both_clocks_and_marks_the_gap() -> None:
    found = run("next", "nightly", "-n", "2", "--from", "2026-03-08")
    assert found.exit_code == 0
    first, second = found.output.splitlines()[2:]
    assert first.split("  ") == [
        "Sun 2026-03-08 03:00:00 -04:00",
        "2026-03-08T07:00:00Z",
        "02:30 does not exist: at the end of the gap",
    ]
    assert second.split() == ["Mon", "2026-03-09", "02:30:00", "-04:00", "2026-03-09T06:30:00Z"]


def test_next_marks_the_passes_of_a_fold() -> None:
    found = run("next", "30 1 * * * America/New_York fold=both", "-n", "2", "--from", "2026-11-01")
    assert "first of two" in found.output
    assert "second of two" in found.output


def test_the_words_of_a_text_need_no_quotes() -> None:
    joined = answer("next", "30", "2", "1", "*", "*", "Europe/Paris", "-n", "1", "--from", "2026-07-01T00:00Z")
    assert joined["text"] == "30 2 1 * * Europe/Paris"
    assert joined["occurrences"][0]["instant"] == "2026-07-01T00:30:00Z"


def test_from_counts_itself_and_is_read_in_the_zone_where_it_has_no_offset() -> None:
    def first(start: str) -> Any:
        return answer("next", f"0 12 * * * {NEW_YORK}", "-n", "1", "--from", start)["occurrences"][0]["instant"]

    assert first("2026-07-01T12:00") == first("2026-07-01T16:00Z") == "2026-07-01T16:00:00Z"
    assert first("2026-07-01T16:00:01Z") == "2026-07-02T16:00:00Z"
    assert first("2026-07-01T12:00-04:00") == "2026-07-01T16:00:00Z"


def test_from_may_be_a_time_that_a_gap_swallows() -> None:
    found = answer("next", f"0 3 * * * {NEW_YORK}", "-n", "1", "--from", "2026-03-08T02:30")
    assert found["occurrences"][0]["instant"] == "2026-03-08T07:00:00Z"


def test_preview_shows_all_entries_in_order_each_in_its_own_zone() -> None:
    found = run("preview", "--from", "2026-03-08T06:58Z", "--until", "2026-03-08T07:00Z")
    assert found.exit_code == 0
    rows = [re.split(r"  +", line) for line in found.output.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        ["2026-03-08T06:58:00Z", "tick"],
        ["2026-03-08T06:59:00Z", "tick"],
        ["2026-03-08T07:00:00Z", "nightly"],
        ["2026-03-08T07:00:00Z", "tick"],
    ]
    assert rows[2][2:] == ["Sun 2026-03-08 03:00:00 -04:00", NEW_YORK, "02:30 does not exist: at the end of the gap"]


def test_preview_chooses_by_glob_counts_and_shows_one_zone() -> None:
    found = answer("preview", "n*", "--from", "2026-07-01", "-n", "2", "--tz", "Europe/Berlin")["occurrences"]
    assert [(each["entry"], each["task"], each["zone"]) for each in found] == [
        ("nightly", "proj.add", "Europe/Berlin")
    ] * 2
    assert [each["wall"] for each in found] == ["2026-07-01T08:30:00", "2026-07-02T08:30:00"]
    assert len(answer("preview")["occurrences"]) == 20


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nigthly",), "nightly"),
        (("--until", "tomorrow"), "--until 'tomorrow' is not an ISO date"),
        (("--from", "2026-13-01"), "--from '2026-13-01' is not an ISO date"),
        (("--tz", "Europe/Atlantis"), "Atlantis"),
    ],
)
def test_preview_names_what_it_cannot_read(args: tuple[str, ...], words: str) -> None:
    found = run("preview", *args)
    assert found.exit_code == 2
    assert words in found.output


def test_preview_of_nothing_says_so() -> None:
    found = run("preview", "nightly", "--from", "2026-07-01T06:31Z", "--until", "2026-07-01T07:00Z")
    assert (found.exit_code, found.output) == (0, "nightly: no occurrence\n")


def test_next_as_json() -> None:
    found = answer("next", "nightly", "-n", "1", "--from", "2026-07-01")
    assert found == {
        "text": "nightly",
        "occurrences": [
            {
                "instant": "2026-07-01T06:30:00Z",
                "wall": "2026-07-01T02:30:00",
                "offset": "-04:00",
                "zone": NEW_YORK,
                "note": "",
            }
        ],
        "change": None,
    }


def test_across_dst_names_the_change_between_what_comes_before_and_after() -> None:
    found = run("next", "nightly", "--across-dst", "--from", "2026-03-01")
    lines = found.output.splitlines()[2:]
    assert len(lines) == 7
    assert lines[3].startswith("--- change of offset ---")
    assert "2026-03-08T07:00:00Z" in lines[3]
    assert "clocks go forward from 02:00 to 03:00" in lines[3]
    as_json = answer("next", "nightly", "--across-dst", "--from", "2026-03-01", "-n", "1")
    assert len(as_json["occurrences"]) == 2
    assert as_json["change"]["new_wall"] == "2026-03-08T03:00:00"


def test_across_dst_in_a_zone_without_changes_says_so() -> None:
    found = run("next", "@daily UTC", "--across-dst")
    assert found.exit_code == 0
    assert "UTC changes its offset no more" in found.output


def test_a_schedule_without_further_occurrences_is_no_error() -> None:
    found = run("next", "@at 2020-01-01T00:00:00Z")
    assert (found.exit_code, found.output) == (0, "@at 2020-01-01T00:00:00Z: no occurrence\n")


@pytest.mark.parametrize(
    ("text", "field", "bad"),
    [
        ("77 * * * *", "minute", "77"),
        ("0 /1 * * *", "hour", "/1"),
        ("1,,2 * * * *", "minute", "1,,2"),
        ("0 12 31 4 *", "day of month", "31"),
        ("@daily Europe/Pariss", "zone", "Europe/Pariss"),
        ("* * * *", "text", "* * * *"),
        ("", "text", ""),
        ("−5 * * * *", "minute", "−5"),
    ],
)
def test_a_bad_text_is_answered_with_field_and_text(text: str, field: str, bad: str) -> None:
    found = run("next", text)
    assert found.exit_code == 2, found.output
    assert f"field: {field}, text: {bad!r}" in found.output
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    "args",
    [("next",), ("next", "@daily", "-n", "0"), ("next", "@daily", "--from", "soon"), ("next", "@daily", "--tz", "X")],
)
def test_wrong_usage_of_next(args: tuple[str, ...]) -> None:
    assert run(*args).exit_code == 2


# ---- what a store that is down, a wrong configuration and an unknown name lead to


def test_list_works_without_the_store_and_says_so() -> None:
    found = run("list")
    assert found.exit_code == 0
    assert "the store does not serve" in found.output
    assert [line.split()[0] for line in found.output.splitlines() if NEW_YORK in line] == ["nightly"]
    as_json = answer("list", "n*")
    assert "does not serve" in as_json["store"]
    (entry,) = as_json["entries"]
    assert set(entry) == {"name", "task", "schedule", "zone", "next_due", "over", "last", "paused"}
    assert entry["zone"] == NEW_YORK


def test_show_without_the_store_shows_what_is_known_and_fails() -> None:
    found = run("show", "nightly")
    assert found.exit_code == 3
    assert "at 02:30, America/New_York" in found.output
    assert "secret" * 4 not in found.output
    assert len(answer("show", "nightly")["next"]) == 5


def test_leader_needs_the_store() -> None:
    for args in (("leader",), ("leader", "--step-down"), ("leader", "--json")):
        found = run(*args)
        assert found.exit_code == 3
        assert "the store does not serve" in found.output
        assert "Traceback" not in found.output


def test_health_and_check_answer_without_the_store() -> None:
    assert run("health").exit_code == 1
    assert answer("health")["findings"][0]["id"] == "tzbeat.E301"
    assert run("check").exit_code == 0
    assert run("check", "--strict").exit_code == 1
    found = answer("check")
    assert found["ok"]
    assert [finding["id"] for finding in found["findings"]] == ["tzbeat.W201"]
    assert found["settings"]["tzbeat_lease"] == 10.0
    assert found["path"]["name"] is None
    assert "does not answer" in found["path"]["why"]


@pytest.mark.parametrize("args", [("list",), ("show", "tick"), ("leader",), ("health",), ("check",)])
def test_a_wrong_configuration_is_told_not_raised(args: tuple[str, ...]) -> None:
    found = run(*args, app=an_app(tzbeat_lease=0, tzbeat_lese=3))
    assert found.exit_code == 1
    assert "tzbeat_lease is 0; the least is 1 s" in found.output
    assert "did you mean 'tzbeat_lease'" in found.output
    assert "Traceback" not in found.output


@pytest.mark.parametrize("args", [("list", "nightli"), ("show", "nightli")])
def test_an_unknown_name_is_answered_with_the_nearest(args: tuple[str, ...]) -> None:
    found = run(*args)
    assert found.exit_code == 2
    assert "did you mean 'nightly'?" in found.output


def test_check_prints_the_settings_in_force_without_passwords() -> None:
    found = run("check", app=an_app(tzbeat_url="redis://me:secret@localhost:1/0", tzbeat_lease=4))
    assert "redis://me:**@localhost:1/0" in found.output
    assert "secret" not in found.output
    assert ["tzbeat_lease", "4", "s"] in [line.split() for line in found.output.splitlines()]


def test_check_says_by_which_path_a_beat_would_send_and_why() -> None:
    app = an_app(broker_url="amqp://me:secret@localhost:1//", tzbeat_url=DOWN)
    why = "the broker 'amqp://me:**@localhost:1//' is not a Redis"
    assert f"sends by the path: claims ({why})\n" in run("check", app=app).output
    assert answer("check", app=app)["path"] == {"name": "claims", "why": why}
    assert "sends by the path: not known (" in run("check").output


def test_leader_shows_the_release_and_path_of_each_beat(empty_server: LocalServer) -> None:
    app = an_app(broker_url=empty_server.url, tzbeat_release="2.1")
    with closing(open_store(Settings.read(app))) as store:
        for beat, more in (("one:1:a", {"release": "2.1", "path": "claims"}), ("two:2:b", {})):
            store.attend(
                Presence(
                    beat=beat,
                    host="h",
                    pid=1,
                    version="0",
                    tzdata="2026c",
                    fingerprint="f",
                    role="standby",
                    why="a reason",
                    last_tick=store.time(),
                    next_due=None,
                    skew=0.0,
                    entries=2,
                    embedded=False,
                    **more,  # type: ignore[arg-type]
                )
            )
    found = run("leader", app=app)
    assert found.exit_code == 1
    lines = [re.split(r"  +", line.strip()) for line in found.output.splitlines()]
    assert ["beat", "role", "release", "entries", "path", "last tick", "clock", "why"] in lines
    (one,), (two,) = ([line for line in lines if line[0] == name] for name in ("one:1:a", "two:2:b"))
    assert (one[:5], one[-1]) == (["one:1:a", "standby", "2.1", "2", "claims"], "a reason")
    assert two[:5] == ["two:2:b", "standby", "-", "2", "-"]
    assert [beat["release"] for beat in answer("leader", app=app)["beats"]] == ["2.1", ""]


def test_colours_are_for_terminals_only() -> None:
    assert "\x1b[" in run("health", color=True).output
    assert "\x1b[" not in run("health").output


def test_faults_of_ours_are_not_hidden() -> None:
    class Broken:
        on_after_configure: Any = None

    found = CliRunner().invoke(tzbeat, ["list"], obj=CLIContext(app=Broken(), no_color=False, workdir=None))
    assert isinstance(found.exception, AttributeError)


def test_options_that_an_app_adds_to_every_command_are_taken() -> None:
    app = an_app()
    seen: list[Any] = []
    from celery.signals import user_preload_options
    from click import Option

    def note(options: Any, **_: Any) -> None:
        seen.append(options)

    user_preload_options.connect(note)
    app.user_options["preload"].add(Option(("-Z", "--zeal")))
    tzbeat.params.append(Option(("-Z", "--zeal")))
    try:
        assert run("--zeal", "5", "check", app=app).exit_code == 0
    finally:
        tzbeat.params.pop()
        user_preload_options.disconnect(note)
    assert seen == [{"zeal": "5"}]


@pytest.mark.parametrize("start", ["9999-12-31T23:00", "0001-01-01T00:00"])
@pytest.mark.parametrize("zone", ["America/Bogota", "Asia/Tokyo"])
def test_next_from_the_ends_of_the_calendar_is_an_answer_or_wrong_usage(start: str, zone: str) -> None:
    found = run("next", "0 0 * * *", "--from", start, "--tz", zone)
    assert found.exit_code in (0, 2), found.output
    assert not isinstance(found.exception, (OverflowError, AssertionError))
    if (start[:4], zone) in (("9999", "America/Bogota"), ("0001", "Asia/Tokyo")):
        assert found.exit_code == 2
        assert "of the years 1 to 9999" in found.output


def test_check_sees_the_scheduler_that_celery_beat_would_start() -> None:
    app = an_app(beat_scheduler="celery.beat:PersistentScheduler")
    assert "tzbeat.W209" in [finding["id"] for finding in answer("check", app=app)["findings"]]

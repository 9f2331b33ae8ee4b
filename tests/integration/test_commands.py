"""``celery -A proj tzbeat …`` as operators run it: real processes, a real server, real beats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.server import LocalServer

ENTRIES = """
app.conf.beat_schedule = {
    "nightly": {"task": "proj.record", "schedule": "30 2 * * * America/New_York"},
    "tick": {"task": "proj.record", "schedule": 1},
}
"""

#: A beat that is up has asked for the lease after so many seconds, on a busy machine.
START = 30


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Operator:
    """Runs commands in a project's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def celery(self, *args: str, **env: str) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "celery", *args],
            cwd=self.directory,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in done.stdout + done.stderr
        return Answer(done.returncode, done.stdout, done.stderr)

    def __call__(self, *args: str, **env: str) -> Answer:
        return self.celery("-A", "proj", "tzbeat", *args, **env)


@pytest.fixture
def tzbeat(project: Any) -> Operator:
    project.write(ENTRIES, result_expires=None)
    return Operator(project.directory)


def test_the_commands_are_listed_by_celery(tzbeat: Operator) -> None:
    found = tzbeat.celery("--help")
    assert found.code == 0
    assert "tzbeat" in found.out


def test_the_module_adds_nothing_heavy_to_other_celery_commands(tzbeat: Operator) -> None:
    found = tzbeat.celery("--version", PYTHONPROFILEIMPORTTIME="1")
    loaded = {line.rpartition("|")[2].strip() for line in found.err.splitlines()}
    assert "celery_tzbeat.cli.schedule" in loaded
    assert not loaded & {"redis", "tabulate", "celery_tzbeat.api", "celery_tzbeat.model", "celery_tzbeat.schedules"}


def test_previews_need_neither_app_nor_store(tzbeat: Operator, server: LocalServer) -> None:
    server.kill()
    text = tzbeat.celery("tzbeat", "next", "30 2 * * * America/New_York", "--from", "2026-03-08", "-n", "1")
    assert text.code == 0
    assert "02:30 does not exist: at the end of the gap" in text.out
    name = tzbeat("next", "nightly", "--across-dst", "--from", "2026-10-01", "--json")
    assert name.code == 0
    assert name.json["change"]["instant"] == "2026-11-01T06:00:00Z"
    assert tzbeat("next", "0 12 31 4 *").code == 2


def test_without_a_beat(tzbeat: Operator) -> None:
    checked = tzbeat("check", "--json")
    assert checked.code == 0
    assert [finding["id"] for finding in checked.json["findings"]] == ["tzbeat.W206"]
    assert tzbeat("check", "--strict").code == 1
    health = tzbeat("health", "--json")
    assert (health.code, health.json["findings"][0]["id"]) == (1, "tzbeat.E302")
    leader = tzbeat("leader", "--json")
    assert leader.code == 1
    assert leader.json == {"holder": None, "epoch": None, "remaining": None, "since": None, "beats": []}
    stepped = tzbeat("leader", "--step-down")
    assert (stepped.code, stepped.err) == (1, "Error: nobody leads: there is nobody to step down\n")
    listed = tzbeat("list", "--json")
    assert listed.code == 0
    assert [(entry["name"], entry["last"]) for entry in listed.json["entries"]] == [("nightly", None), ("tick", None)]


@pytest.mark.parametrize("state", ["killed", "frozen"])
def test_with_the_store_down(tzbeat: Operator, server: LocalServer, state: str) -> None:
    server.kill() if state == "killed" else server.freeze()
    codes = {
        args: tzbeat(*args).code
        for args in (("list",), ("show", "tick"), ("leader",), ("leader", "--step-down"), ("health",), ("check",))
    }
    assert list(codes.values()) == [0, 3, 3, 3, 1, 0], codes
    assert "the store does not serve" in tzbeat("list").err
    assert tzbeat("health", "--json").json["findings"][0]["id"] == "tzbeat.E301"


def test_a_wrong_configuration_is_one_list_for_check_and_for_beat(project: Any) -> None:
    project.write(
        """
app.conf.beat_schedule = {
    "zone": {"task": "proj.record", "schedule": "@daily Europe/Pariss"},
    "date": {"task": "proj.record", "schedule": "0 0 31 2 *"},
}
""",
        tzbeat_lese=5,
    )
    found = Operator(project.directory)("check", "--json")
    assert found.code == 1
    problems = [finding["text"] for finding in found.json["findings"] if finding["severity"] == "error"]
    assert len(problems) == 3
    beat = project.start_beat()
    assert beat.wait(START) != 0
    for problem in problems:
        assert problem in beat.log


def test_a_module_that_fails_to_import_is_a_finding(project: Any) -> None:
    project.write(ENTRIES, imports=["broken"])
    (project.directory / "broken.py").write_text("1 / 0\n")
    run = Operator(project.directory)
    assert "ZeroDivisionError" in run("list").err
    assert run("list").code == 1
    assert run("check", "--json").json["findings"][0]["id"] == "tzbeat.E003"


def test_with_beats_running(tzbeat: Operator, project: Any) -> None:
    beats = [project.start_beat("one"), project.start_beat("two")]
    wait_until(lambda: len(tzbeat("leader", "--json").json["beats"]) == 2, START, "both beats to be seen")
    wait_until(lambda: tzbeat("health").code == 0, START, "health")

    led = tzbeat("leader", "--json").json
    assert led["holder"].split(":")[1] in {str(beat.pid) for beat in beats}
    assert 0 < led["remaining"] <= 2
    assert datetime.fromisoformat(led["since"].replace("Z", "+00:00")) < datetime.now(timezone.utc)
    assert {beat["entries"] for beat in led["beats"]} == {2}

    wait_until(lambda: len(project.received()) == 0 and tzbeat("list").out.count(" sent") >= 1, START, "one sent")
    shown = tzbeat("show", "tick", "--json").json
    assert shown["last"]["state"] == "sent"
    assert shown["cursor"]["nominal"] >= shown["last"]["nominal"]
    assert {record["event"] for record in shown["audit"]} >= {"sent"}
    assert shown["dead_letters"] == []
    checked = tzbeat("check", "--json").json
    assert [finding["id"] for finding in checked["findings"]] == ["tzbeat.W206"]

    stepped = tzbeat("leader", "--step-down")
    assert stepped.code == 0, stepped.err
    assert f"{led['holder']} (epoch {led['epoch']}) leads no longer" in stepped.out
    wait_until(lambda: (tzbeat("leader", "--json").json["epoch"] or 0) > led["epoch"], START, "the next leader")
    assert tzbeat("leader", "--json").json["holder"] != led["holder"]
    assert all(beat.alive for beat in beats), "a beat that steps down stands by"

    for beat in beats:
        beat.freeze()
    wait_until(lambda: tzbeat("health").code == 1, START, "health to notice that nobody leads")
    assert tzbeat("health", "--json").json["findings"][0]["id"] == "tzbeat.E302"
    late = wait_until(
        lambda: [f for f in tzbeat("health", "--json").json["findings"] if f["id"] == "tzbeat.E304"],
        START,
        "what is due and not sent",
    )
    assert "'tick' since " in late[0]["text"]
    for beat in beats:
        beat.thaw()
    wait_until(lambda: tzbeat("health").code == 0, START, "health again")


def test_the_only_beat_leads_again_after_stepping_down(tzbeat: Operator, project: Any) -> None:
    project.start_beat()
    wait_until(lambda: tzbeat("leader").code == 0, START, "a leader")
    led = tzbeat("leader", "--json").json
    assert tzbeat("leader", "--step-down").code == 0
    wait_until(lambda: (tzbeat("leader", "--json").json["epoch"] or 0) > led["epoch"], START, "its next term")


def test_an_entry_that_cannot_be_built_shows_in_health_though_a_beat_leads(project: Any) -> None:
    project.write(
        """
app.conf.beat_schedule = {
    "broken": {"task": "proj.record", "schedule": 1, "options": {"serializer": "no-such"}},
    "tick": {"task": "proj.record", "schedule": 1},
}
""",
        result_expires=None,
    )
    project.start_beat()
    run = Operator(project.directory)
    late = wait_until(
        lambda: [f for f in run("health", "--json").json["findings"] if f["id"] == "tzbeat.E304"],
        START,
        "what is due and not sent",
    )
    assert "'broken' since " in late[0]["text"]
    assert "tick" not in late[0]["text"]
    assert run("leader").code == 0


def test_two_beats_with_different_entries_are_told_apart(project: Any) -> None:
    project.write(ENTRIES, result_expires=None)
    project.start_beat("old")
    run = Operator(project.directory)
    wait_until(lambda: len(run("leader", "--json").json["beats"]) == 1, START, "the old beat")
    project.write(ENTRIES.replace('"schedule": 1}', '"schedule": 2}'), result_expires=None)
    project.start_beat("new")
    found = wait_until(
        lambda: [f for f in run("check", "--json").json["findings"] if f["id"] == "tzbeat.W202"],
        START,
        "the difference",
    )
    assert "the beats alive have different entries" in found[0]["text"]
    assert run("check", "--strict").code == 1

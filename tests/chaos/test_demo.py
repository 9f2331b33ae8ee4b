"""The demo judges rightly, sees a broken fence, and leaves nothing running."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import psutil
import pytest

from celery_tzbeat import crontab, every
from celery_tzbeat.testing.processes import Process, wait_until
from demo.preview import across_change, next_change
from demo.verdict import Arrival, Due, Takeover, expected_between, judge, read_arrivals

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
START = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)
UNTIL = START + 10 * SECOND


def arrivals(*dues: Due, late: float = 0.1) -> list[Arrival]:
    return [Arrival(due, due.nominal + timedelta(seconds=late)) for due in dues]


def expected() -> frozenset[Due]:
    return expected_between({"pulse": "@every 1s", "stock": "@every 5s"}, START, UNTIL)


def verdict_of(found: list[Arrival], **options: object):
    return judge(expected(), found, after=START, until=UNTIL, **options)


class TestExpected:
    def test_the_stretch_is_open_at_its_start_and_closed_at_its_end(self) -> None:
        assert len(expected()) == 12
        assert Due("pulse", START) not in expected()
        assert Due("stock", UNTIL) in expected()


class TestVerdict:
    def test_everything_once_is_ok(self) -> None:
        verdict = verdict_of(arrivals(*expected()))
        assert verdict.faults == ()
        assert list(verdict.lines())[-1] == "demo: ok, 12 expected, 12 received, none lost, none doubled"

    def test_what_did_not_come_is_lost(self) -> None:
        missing = Due("pulse", START + 3 * SECOND)
        verdict = verdict_of(arrivals(*expected() - {missing}))
        assert verdict.lost == (missing,)
        assert list(verdict.lines())[-1] == "demo: FAILED, 1 lost"

    def test_what_came_twice_is_doubled_even_outside_the_stretch(self) -> None:
        before, within = Due("pulse", START - SECOND), Due("pulse", START + SECOND)
        verdict = verdict_of(arrivals(*expected(), within, before, before))
        assert verdict.doubled == (before, within)
        assert verdict.received == 13
        assert list(verdict.lines())[-1] == "demo: FAILED, 2 doubled"

    def test_a_doubled_one_does_not_stand_in_for_a_lost_one(self) -> None:
        missing, twice = Due("pulse", START + 3 * SECOND), Due("pulse", START + 4 * SECOND)
        verdict = verdict_of(arrivals(*expected() - {missing}, twice))
        assert verdict.received == verdict.expected
        assert verdict.faults == ("1 lost", "1 doubled")

    def test_what_no_schedule_names_is_invented(self) -> None:
        invented = Due("stock", START + 3 * SECOND)
        verdict = verdict_of(arrivals(*expected(), invented))
        assert verdict.invented == (invented,)
        assert verdict.faults == ("1 invented",)

    def test_what_lies_outside_the_stretch_is_neither_lost_nor_invented(self) -> None:
        verdict = verdict_of(arrivals(*expected(), Due("pulse", START), Due("pulse", UNTIL + SECOND)))
        assert verdict.faults == ()
        assert verdict.received == 12

    def test_nothing_at_all_is_no_success(self) -> None:
        assert judge(frozenset(), [], after=START, until=UNTIL).faults

    def test_the_latest_is_told_and_is_no_fault(self) -> None:
        late = arrivals(Due("stock", START + 5 * SECOND), late=7.5)
        verdict = verdict_of([*arrivals(*expected() - {late[0].due}), *late])
        assert verdict.faults == ()
        assert "latest    7.50 s after its time: stock at 2026-11-30T12:00:05Z" in list(verdict.lines())

    def test_a_takeover_later_than_promised_is_a_fault(self) -> None:
        takeovers = [Takeover("a kill", 3 * SECOND, 4 * SECOND), Takeover("a stop", 2 * SECOND, SECOND)]
        verdict = verdict_of(arrivals(*expected()), takeovers=takeovers)
        assert verdict.faults == ("takeover  2.00 s after a stop (promised: 1.00 s)",)
        assert [line for line in verdict.lines() if line.startswith("takeover")] == [
            "takeover  3.00 s after a kill (promised: 4.00 s)",
            "takeover  2.00 s after a stop (promised: 1.00 s)   TOO LATE",
        ]

    def test_many_faults_are_told_in_few_words(self) -> None:
        lines = list(verdict_of([]).lines())
        assert any(line.startswith("lost") and line.endswith("and 9 more") for line in lines)


class TestPreview:
    def test_the_coming_change_is_found_to_the_second(self) -> None:
        instant = datetime(2027, 3, 14, 7, tzinfo=timezone.utc)
        assert next_change(ZoneInfo("America/New_York"), START) == instant
        assert next_change(ZoneInfo("America/New_York"), instant - SECOND) == instant
        assert next_change(ZoneInfo("America/New_York"), instant) > instant

    def test_a_zone_without_changes_has_none(self) -> None:
        assert next_change(ZoneInfo("Asia/Kolkata"), START) is None

    def test_the_runs_around_a_gap_are_told(self) -> None:
        lines = list(across_change({"till": crontab("30 2 * * *", tz="America/New_York")}, START))
        assert lines == [
            "till (30 2 * * * America/New_York): on 14 March 2027 the clocks go forward by 1:00:00",
            "    Sat 13 Mar 02:30 EST  =  Sat 07:30 UTC",
            "    Sun 14 Mar 03:00 EDT  =  Sun 07:00 UTC",
            "    Mon 15 Mar 02:30 EDT  =  Mon 06:30 UTC",
        ]

    def test_what_has_no_zone_or_runs_often_is_left_out(self) -> None:
        often = crontab("*/10 * * * *", tz="America/New_York")
        assert list(across_change({"pulse": every("1s"), "often": often}, START)) == []


class TestArrivals:
    def test_they_are_read_from_what_the_tasks_wrote(self) -> None:
        lines = [
            {"entry": "pulse", "nominal": "2026-11-30T12:00:01Z", "at": "2026-11-30T12:00:01.250000+00:00"},
            {"entry": None, "nominal": None, "at": "2026-11-30T12:00:02+00:00"},
        ]
        found = read_arrivals("".join(json.dumps(line) + "\n" for line in lines))
        assert found == [Arrival(Due("pulse", START + SECOND), START + timedelta(seconds=1.25))]
        assert found[0].late == timedelta(seconds=0.25)


def start_demo(tmp_path: Path, *args: str) -> Process:
    argv = [sys.executable, "-u", "-m", "demo", *args]
    return Process(argv, log=tmp_path / "demo.log", name="demo", cwd=ROOT)


def descendants(process: Process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.timeout(240)
def test_it_passes(tmp_path: Path) -> None:
    with start_demo(tmp_path) as demo:
        status = demo.wait(200)
    assert status == 0, demo.tail()
    assert demo.log.splitlines()[-1].startswith("demo: ok, "), demo.tail()


@pytest.mark.timeout(240)
def test_a_broken_fence_does_not_pass(tmp_path: Path) -> None:
    with start_demo(tmp_path, "--app", "tests.chaos.unfenced_app") as demo:
        status = demo.wait(200)
    last = demo.log.splitlines()[-1]
    assert status == 1, demo.tail()
    assert last.startswith("demo: FAILED"), demo.tail()
    assert " doubled" in last, demo.tail()


@pytest.mark.parametrize("how", ["interrupt", "terminate"])
def test_nothing_is_left_running_when_it_is_ended_early(tmp_path: Path, how: str) -> None:
    with start_demo(tmp_path) as demo:
        demo.wait_for_log("leads with epoch", 60)
        started = descendants(demo)
        assert len(started) >= 5
        getattr(demo, how)()
        assert demo.wait(30) == {"interrupt": 130, "terminate": 143}[how]
        wait_until(lambda: not any(child.is_running() for child in started), 10, "all processes to be gone")


def test_nothing_is_left_running_when_an_app_is_broken(tmp_path: Path) -> None:
    with start_demo(tmp_path, "--app", "no_such_app") as demo:
        assert demo.wait(60) == 1
    assert demo.log.splitlines()[-1].startswith("demo: FAILED")

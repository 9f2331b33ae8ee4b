"""The night when 02:30 comes twice: real beats whose clock is faked, Celery's own beside ours.

The server keeps the real clock, which is why `tzbeat_max_skew` is raised: only these tests do that.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from evidence import counts, faked_clock, nominals, queued

from celery_tzbeat.testing.processes import wait_until

# Europe/Berlin, 2026-10-25: at 03:00 CEST (01:00Z) the clocks go back. 02:30 is at 00:30Z, and again at 01:30Z.
BEFORE_THE_FIRST = "@2026-10-25 00:29:50"
IN_THE_SECOND_PASS = "@2026-10-25 01:10:00"
BEFORE_THE_SECOND = "@2026-10-25 01:29:50"
HALF_PAST_TWO = datetime(2026, 10, 25, 0, 30, tzinfo=timezone.utc)
HALF_PAST_TWO_AGAIN = datetime(2026, 10, 25, 1, 30, tzinfo=timezone.utc)

BODY = """
from celery.schedules import crontab
app.conf.beat_schedule = {
    "daily": {"task": "proj.record", "schedule": crontab(hour=2, minute=30)},
    "control": {"task": "proj.record", "schedule": 1.0},
}
"""
OURS = {"timezone": "Europe/Berlin", "tzbeat_max_skew": 20 * 366 * 86_400}
STOCK = {
    "timezone": "Europe/Berlin",
    "beat_scheduler": "celery.beat:PersistentScheduler",
    "beat_max_loop_interval": 1,
}


def test_in_the_second_pass_a_daily_job_is_not_sent_where_celery_floods_the_queue(
    make_project: Any, make_server: Any
) -> None:
    ours, stock = make_project(make_server().url), make_project(make_server().url)
    ours.write(BODY, **OURS)
    stock.write(BODY, **STOCK)
    celerys_own = stock.start_beat(env=faked_clock(IN_THE_SECOND_PASS), args=["-s", str(stock.directory / "file")])
    beat = ours.start_beat(env=faked_clock(IN_THE_SECOND_PASS))
    # Their messages carry no entry's name: told apart from the control entry's by their number.
    wait_until(lambda: len(queued(stock.url)) >= 100, 60, "Celery's scheduler to send one daily job over and over")
    celerys_own.kill()
    wait_until(lambda: counts(ours.url)["control"] >= 8, 60, "the control entry's messages")
    assert counts(ours.url)["daily"] == 0
    assert beat.stop() == 0


def test_a_daily_job_is_sent_at_its_first_pass_and_not_again_at_its_second(project: Any) -> None:
    project.write(BODY, **OURS)
    beat = project.start_beat(env=faked_clock(BEFORE_THE_FIRST))
    wait_until(lambda: (seen := nominals(project.url, "control")) and seen[-1] > HALF_PAST_TWO, 60, "02:30 to pass")
    wait_until(lambda: len(nominals(project.url, "control")) >= 12, 20, "more control messages")
    assert nominals(project.url, "daily") == [HALF_PAST_TWO]
    beat.kill()

    beat = project.start_beat(env=faked_clock(BEFORE_THE_SECOND))
    wait_until(lambda: nominals(project.url, "control")[-1] > HALF_PAST_TWO_AGAIN, 60, "02:30 to pass again")
    wait_until(lambda: nominals(project.url, "control")[-1].second >= 5, 20, "more control messages")
    assert nominals(project.url, "daily") == [HALF_PAST_TWO]
    assert beat.stop() == 0

"""Public reports from people who run periodic jobs, as scenarios (numbers: reports/field-reports.md)."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone

import pytest
from celery import schedules as celery_schedules
from changes import utc

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.schedules import at, crontab, every, from_celery, from_dict, parse, rrule
from celery_tzbeat.schedules.rule import Rule

UTC = timezone.utc


def following(rule: Rule, after: str, count: int) -> list[str]:
    """Return the next occurrences as ``2024-03-31T01:00`` in UTC; seconds only where there are any."""
    found, instant = [], utc(after)
    for _ in range(count):
        upcoming = rule.next_after(instant)
        assert upcoming is not None
        assert upcoming > instant
        found.append(upcoming.strftime("%Y-%m-%dT%H:%M" if not upcoming.second else "%Y-%m-%dT%H:%M:%S"))
        instant = upcoming
    return found


def test_001_a_daily_job_inside_the_spring_gap_runs_once_when_the_gap_ends() -> None:
    rule = crontab(minute=30, hour=2, tz="Europe/Paris")
    assert following(rule, "2024-03-30T01:30", 2) == ["2024-03-31T01:00", "2024-04-01T00:30"]
    skipping = crontab(minute=30, hour=2, tz="Europe/Paris", gap="skip")
    assert following(skipping, "2024-03-30T01:30", 1) == ["2024-04-01T00:30"]


def test_003_a_fixed_time_in_the_repeated_hour_runs_at_its_first_pass_unless_asked_otherwise() -> None:
    first = parse("0 2 * * * Europe/Berlin")
    assert following(first, "2023-10-28T00:00", 2) == ["2023-10-29T00:00", "2023-10-30T01:00"]
    second = parse("0 2 * * * Europe/Berlin fold=second")
    assert following(second, "2023-10-28T00:00", 2) == ["2023-10-29T01:00", "2023-10-30T01:00"]
    both = parse("0 2 * * * Europe/Berlin fold=both")
    assert following(both, "2023-10-28T00:00", 2) == ["2023-10-29T00:00", "2023-10-29T01:00"]


def test_005_an_hourly_job_runs_each_real_hour_of_the_repeated_one() -> None:
    rule = parse("0 * * * * US/Pacific")
    assert following(rule, "2026-11-01T07:00", 4) == [f"2026-11-01T{hour:02}:00" for hour in (8, 9, 10, 11)]


@pytest.mark.parametrize("asked", ["2025-03-08T21:04", "2025-03-09T08:00"])
def test_007_the_first_day_after_the_change_is_on_time(asked: str) -> None:
    rule = parse("4 16 * * * America/New_York")
    assert following(rule, asked, 2) == ["2025-03-09T20:04", "2025-03-10T20:04"]


def test_009_forward_backward_and_match_agree_over_a_change_of_half_an_hour() -> None:
    rule = parse("0 * * * * Australia/Lord_Howe")
    assert following(rule, "2019-10-05T15:13", 1) == ["2019-10-05T16:00"]
    assert rule.prev_before(utc("2019-10-05T16:00")) == utc("2019-10-05T14:30")
    assert rule.count_between(utc("2019-10-05T15:29"), utc("2019-10-05T15:30"), 10) == 0


def test_011_a_gap_at_midnight_swallows_no_month() -> None:
    rule = parse("0 9 10 * * America/Sao_Paulo")
    assert following(rule, "2018-10-17T12:00", 2) == ["2018-11-10T11:00", "2018-12-10T11:00"]


def test_013_the_search_goes_forward_at_the_fold() -> None:
    helsinki = following(parse("30 * * * * Europe/Helsinki"), "2017-10-28T23:45", 50)
    assert helsinki[:4] == [f"2017-10-29T0{hour}:30" for hour in (0, 1, 2, 3)]
    london = following(parse("0 1-23/2 * * * Europe/London"), "2024-10-26T22:00", 50)
    assert london[:3] == ["2024-10-27T00:00", "2024-10-27T03:00", "2024-10-27T05:00"]


def test_015_a_day_of_23_hours_hides_no_weekday() -> None:
    assert following(parse("0 12 * * sun Europe/Berlin"), "2022-03-24T11:00", 1) == ["2022-03-27T10:00"]
    assert following(parse("0 0 * * mon-fri America/Chicago"), "2021-03-12T06:00", 1) == ["2021-03-15T05:00"]
    assert following(parse("* * * */3 * America/New_York"), "2015-02-15T05:00", 1) == ["2015-04-01T04:00"]


def test_018_the_answer_never_depends_on_the_hour_of_the_start() -> None:
    rule = parse("0 7 * * * America/Los_Angeles")
    for hour in range(24):
        fires = following(rule, f"2025-04-18T{hour:02}:00", 2)
        assert fires[-2 if hour >= 14 else -1] == "2025-04-19T14:00"
        assert (fires[0] == "2025-04-18T14:00") == (hour < 14)


@pytest.mark.parametrize("zone", ["Asia/Shanghai", "Pacific/Kiritimati", "Pacific/Pago_Pago"])
def test_020_the_first_and_last_years_of_the_calendar_overflow_nothing(zone: str) -> None:
    rule = parse(f"0 9 * * * {zone}")
    assert rule.next_after(datetime.min.replace(tzinfo=UTC)) is not None
    assert rule.next_after(datetime.max.replace(tzinfo=UTC)) is None
    assert rule.prev_before(datetime.max.replace(tzinfo=UTC)) is not None
    assert rule.prev_before(datetime.min.replace(tzinfo=UTC)) is None
    assert every(7).prev_before(datetime.min.replace(tzinfo=UTC)) is None
    assert every(7).next_after(datetime.max.replace(tzinfo=UTC)) is None


def test_022_the_zone_of_the_host_has_no_effect() -> None:
    script = (
        "from datetime import datetime, timezone; from celery_tzbeat.schedules import occurrences as o\n"
        "t = lambda s: datetime.fromisoformat(s + '+00:00')\n"
        "for x in ('30 1 * * *', '1 1 * * *'):\n"
        "    print(*o(x, 'UTC', after=t('2022-10-30T00:30'), until=t('2022-10-30T02:30')))\n"
    )
    environment = {**os.environ, "TZ": "Europe/London", "PYTHONTZPATH": "/nonexistent"}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split("\n")[:2] == ["2022-10-30 01:30:00+00:00", "2022-10-30 01:01:00+00:00"]


@pytest.mark.parametrize("text", ["0 12 31 4 *", "0 12 30 2 *", "0 0 31W 2,4 *"])
def test_025_a_date_that_never_comes_is_refused_within_a_second(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(InvalidSchedule, match="never comes"):
        parse(text)
    assert time.process_time() - begin < 1


def test_027_ranges_wrap() -> None:
    assert following(parse("0 23-6 * * * UTC"), "2024-06-01T22:00", 9) == [
        "2024-06-01T23:00",
        *(f"2024-06-02T0{hour}:00" for hour in range(7)),
        "2024-06-02T23:00",
    ]
    days = following(parse("0 8 * * fri-mon UTC"), "2024-06-04T00:00", 5)
    assert [day[8:10] for day in days] == ["07", "08", "09", "10", "14"]
    months = following(parse("0 0 1 10-2 * UTC"), "2024-01-15T00:00", 6)
    assert [month[5:7] for month in months] == ["02", "10", "11", "12", "01", "02"]


def test_029_the_day_fields_are_joined_by_and_in_celerys_form_and_by_or_in_text() -> None:
    objects = (
        crontab(minute=0, hour=0, day_of_month=2, day_of_week=0, tz="UTC"),
        from_celery(celery_schedules.crontab(minute=0, hour=0, day_of_month=2, day_of_week=0), zone="UTC"),
        parse("0 0 2 * 0 UTC days=and"),
    )
    for rule in objects:
        assert following(rule, "2026-07-03T00:00", 1) == ["2026-08-02T00:00"]
        assert rule == objects[0]
    assert following(parse("0 0 2 * 0 UTC"), "2026-07-03T00:00", 1) == ["2026-07-05T00:00"]


@pytest.mark.parametrize("text", ["0 /1 *", "77 * * * *", "* * * *", "1,,2 * * * *", "", "\N{MINUS SIGN}5 * * * *"])
def test_031_bad_text_is_refused_with_a_reason_within_a_tenth_of_a_second(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(InvalidSchedule) as refused:
        parse(text)
    assert time.process_time() - begin < 0.1
    assert len(str(refused.value)) > 20


EVERY_FORM = [
    crontab("30 2 * * mon-fri", tz="America/New_York", gap="skip", fold="both"),
    crontab("*/20 30 2 * * *", tz="Europe/Paris"),
    crontab("0 9 LW * 5L", tz="Asia/Tokyo"),
    crontab(minute=0, hour={1, 2}, day_of_month=2, day_of_week="monday", tz="UTC"),
    crontab("*/5 2 * * *", tz="UTC", kind="fixed"),
    every("15m", phase="2m"),
    every(0.2),
    at("2030-11-01T05:30:00Z", "2031-11-01T05:30:00.250000Z"),
    rrule("DTSTART:20260101T090000\nRRULE:FREQ=MONTHLY;BYDAY=-1FR", tz="Europe/Rome", gap="skip"),
    crontab("@daily", tz="Europe/Paris") | every("6h"),
    crontab("@daily", tz="Europe/Paris") - datetime(2026, 12, 25).date(),
    (crontab("@daily", tz="Europe/Paris") | every("6h")) - [datetime(2026, 12, 25).date(), utc("2026-12-24T00:00")],
    crontab("@daily", tz="Europe/Paris") | (every("6h") - every("12h")),
    from_celery(celery_schedules.crontab(hour="*/2"), zone="Africa/Cairo"),
]


@pytest.mark.parametrize("rule", EVERY_FORM, ids=lambda rule: rule.text[:30])
def test_084_five_generations_of_saving_lose_nothing(rule: Rule) -> None:
    def ten(of: Rule) -> list[datetime]:
        walk = itertools.accumulate(
            range(10), lambda instant, _: instant and of.next_after(instant), initial=utc("2026-06-01")
        )
        return list(walk)

    ways = (
        lambda each: from_dict(each.to_dict()),
        lambda each: parse(each.text),
        lambda each: pickle.loads(pickle.dumps(each)),
        copy.copy,
        copy.deepcopy,
    )
    for way in ways:
        generation = rule
        for _ in range(5):
            generation = way(generation)
            assert generation == rule
            assert hash(generation) == hash(rule)
            assert type(generation) is type(rule)
            assert generation.text == rule.text
            assert generation.zone is rule.zone
        assert ten(generation) == ten(rule)


def test_104_a_spread_phase_keeps_a_thousand_entries_from_one_instant() -> None:
    phases = {every("5m", phase="spread").named(f"tenant-{number}").phase for number in range(1000)}
    assert len(phases) > 250
    assert all(isinstance(phase, timedelta) and timedelta(0) <= phase < timedelta(minutes=5) for phase in phases)

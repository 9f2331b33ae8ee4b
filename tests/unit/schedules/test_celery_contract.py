"""What Celery, and what reads Celery's schedules (Sentry, Flower), asks of a rule."""

from __future__ import annotations

import pickle
import random
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery import schedules as celery_schedules
from changes import changes_of, utc

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.schedules import at, crontab, every, from_celery, parse, reboot, zone
from celery_tzbeat.schedules.rule import Rule

UTC = timezone.utc


def under(rule: Any, now: datetime) -> Any:
    rule.nowfun = lambda: now
    return rule


RULES = [
    lambda: crontab("30 1,2 * * *", tz="America/New_York"),
    lambda: crontab("*/20 * * * *", tz="America/New_York", fold="both"),
    lambda: crontab("15 */10 2 * * *", tz="America/New_York"),
    lambda: every("7m"),
    lambda: at("2026-11-01T05:30:00Z", "2026-11-01T06:30:00Z"),
    lambda: crontab("30 1 * * *", tz="America/New_York") | every("1h"),
    lambda: every("30m") - every("1h"),
]


@pytest.mark.parametrize("made", RULES)
def test_is_due_and_remaining_estimate_agree_with_next_after(made: Any) -> None:
    rule, draw = made(), random.Random(7)
    for change in changes_of("America/New_York", 2026, 2026):
        for _ in range(60):
            last = change.at + timedelta(seconds=draw.randrange(-40_000, 40_000))
            now = last + timedelta(seconds=draw.randrange(0, 9000))
            upcoming = rule.next_after(last)
            due, wait = under(rule, now).is_due(last.astimezone(zone("America/New_York")))
            assert due == (upcoming is not None and upcoming <= now)
            if upcoming is not None:
                assert rule.remaining_estimate(last) == upcoming - now
                following = rule.next_after(now)
                if following is not None:
                    assert wait == (following - now).total_seconds() > 0


def test_a_rule_that_has_no_more_is_never_due_and_asked_again_in_a_day() -> None:
    for rule in (reboot(), at("2020-01-01T00:00:00Z")):
        now = utc("2026-06-01T00:00")
        assert under(rule, now).is_due(utc("2026-05-01T00:00")) == (False, 86400.0)
        assert rule.remaining_estimate(utc("2026-05-01T00:00")) == timedelta(days=1)


def test_a_rule_without_a_zone_is_read_in_the_apps_timezone_by_celery_only() -> None:
    app = Celery("contract", set_as_current=False)
    app.conf.timezone = "Asia/Tokyo"
    rule = crontab("0 9 * * *", app=app, nowfun=lambda: utc("2026-06-01T00:00"))
    assert rule.zone is None
    assert str(rule.tz) == "Asia/Tokyo"
    assert rule.is_due(utc("2026-05-31T12:00")).is_due
    assert not rule.is_due(utc("2026-06-01T00:00")).is_due
    with pytest.raises(InvalidSchedule, match="zone of '0 9 \\* \\* \\*' is not known"):
        rule.next_after(utc("2026-06-01T00:00"))


def test_naive_instants_are_utc_to_is_due_and_refused_by_next_after() -> None:
    rule = under(crontab("0 9 * * *", tz="UTC"), datetime(2026, 6, 1, 9, 0))
    assert rule.is_due(datetime(2026, 6, 1, 8, 0)) == (True, 86400.0)
    for asked in (rule.next_after, rule.prev_before, every(5).next_after, reboot().next_after):
        with pytest.raises(ValueError, match="aware"):
            asked(datetime(2026, 6, 1))


def sentry_reads(rule: Any) -> str:
    """Build the text as sentry_sdk.integrations.celery.beat does."""
    return (
        f"{rule._orig_minute} {rule._orig_hour} {rule._orig_day_of_month} "
        f"{rule._orig_month_of_year} {rule._orig_day_of_week}"
    )


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (crontab("30 2 * * mon-fri", tz="Europe/Paris"), "30 2 * * mon-fri"),
        (crontab(minute=30, hour={2, 14}, tz="Europe/Paris"), "30 2,14 * * *"),
        (crontab("@daily", tz="Europe/Paris"), "0 0 * * *"),
        (crontab(minute=range(60), hour="0-23", tz="Europe/Paris"), "* 0-23 * * *"),
        (
            from_celery(celery_schedules.crontab(minute="*/5", day_of_week="monday"), zone="Europe/Paris"),
            "*/5 * * * mon",
        ),
    ],
)
def test_sentry_reads_the_five_fields_and_the_zone(rule: Rule, text: str) -> None:
    assert isinstance(rule, celery_schedules.crontab)
    assert sentry_reads(rule) == text
    assert str(rule.tz) == "Europe/Paris"


@pytest.mark.parametrize(
    "text",
    [
        "0 30 2 * * * UTC",
        "0 0 L * * UTC",
        "0 0 * * MON#1 UTC",
        "@daily UTC | @every 1h",
        "@daily UTC - @every 7h",
        "@reboot",
    ],
)
def test_what_five_fields_cannot_say_is_no_crontab_of_celerys(text: str) -> None:
    rule = parse(text)
    assert isinstance(rule, celery_schedules.BaseSchedule)
    assert not isinstance(rule, (celery_schedules.crontab, celery_schedules.schedule))


def test_an_interval_is_a_schedule_of_celerys() -> None:
    rule = every("90m")
    assert isinstance(rule, celery_schedules.schedule)
    assert rule.seconds == 5400
    assert rule.human_seconds == "1.50 hours"


def test_celerys_numbers_of_a_field_are_there() -> None:
    rule = crontab("5/20 22-2 * * 5-7")
    assert isinstance(rule, celery_schedules.crontab)
    assert (rule.minute, rule.hour, rule.day_of_week) == ({5, 25, 45}, {22, 23, 0, 1, 2}, {5, 6, 0})
    assert rule.month_of_year == set(range(1, 13))


@pytest.mark.parametrize(
    "theirs",
    [
        celery_schedules.crontab(),
        celery_schedules.crontab(0, 3),
        celery_schedules.crontab("0, 30", "9-17"),
        celery_schedules.crontab(minute="*/15", hour="22-2", day_of_week="mon,wednesday"),
        celery_schedules.crontab(0, 0, "sun", "1-7", "jan,june"),
        celery_schedules.crontab(minute=[0, 30], hour={1, 2}),
        celery_schedules.crontab(minute="0-59/7", hour="20-4/3"),
    ],
)
def test_celerys_crontab_and_ours_of_the_same_arguments_are_one_rule(theirs: Any) -> None:
    adopted = from_celery(theirs, zone="Europe/Paris")
    ours = crontab(
        theirs._orig_minute,
        theirs._orig_hour,
        theirs._orig_day_of_week,
        theirs._orig_day_of_month,
        theirs._orig_month_of_year,
        tz="Europe/Paris",
        days="and",
    )
    assert adopted == ours
    for name in ("minute", "hour", "day_of_month", "month_of_year", "day_of_week"):
        assert getattr(adopted, name) == getattr(theirs, name)


def test_a_set_that_covers_its_field_is_a_star_and_a_text_keeps_its_spelling() -> None:
    assert crontab(minute=0, hour=range(24)).text == "0 * * * *"
    assert crontab(minute=0, hour="0-23").text == "0 0-23 * * *"
    assert from_celery(celery_schedules.crontab(0, set(range(24))), zone="UTC").text == "0 * * * * UTC"
    assert from_celery(celery_schedules.crontab(0, "0-23"), zone="UTC").text == "0 0-23 * * * UTC"


def test_text_is_one_argument_of_five_or_six_fields_and_nothing_else_is() -> None:
    assert crontab("0 9 * * mon").text == "0 9 * * mon"
    assert crontab("5 0 9 * * mon").text == "5 0 9 * * mon"
    assert crontab("@weekly").text == "0 0 * * 0"
    assert crontab("0, 30").text == "0,30 * * * *"
    assert crontab("0, 10, 20, 30, 40").text == "0,10,20,30,40 * * * *"
    assert crontab("0", "9", "mon").text == "0 9 * * mon"  # Celery's third position is the day of week
    with pytest.raises(InvalidSchedule, match="day of week"):
        crontab("0 9 * * mon Europe/Paris")


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (300, "@every 5m"),
        (0.5, "@every 0.5s"),
        (timedelta(days=1), "@every 1d"),
        (celery_schedules.schedule(90), "@every 1m30s"),
        ("@daily", "0 0 * * * Asia/Tokyo"),
        ("@daily Europe/Paris", "0 0 * * * Europe/Paris"),
        (crontab("@daily", tz="Europe/Paris"), "0 0 * * * Europe/Paris"),
        (crontab("@daily"), "0 0 * * * Asia/Tokyo"),
        (celery_schedules.solar("sunset", 48.85, 2.35), "@solar sunset 48.85 2.35"),
    ],
)
def test_what_beat_schedule_takes_is_taken(theirs: Any, text: str) -> None:
    assert from_celery(theirs, zone="Asia/Tokyo").text == text


def test_the_apps_gap_and_fold_hold_where_a_fixed_time_states_none() -> None:
    def adopted(rule: Any) -> str:
        return from_celery(rule, zone="UTC", gap="skip", fold="both").text

    assert adopted(celery_schedules.crontab(0, 3)) == "0 3 * * * UTC gap=skip fold=both"
    assert adopted(crontab("0 3 * * *", gap="end")) == "0 3 * * * UTC gap=end fold=both"
    assert adopted(crontab("*/5 * * * *")) == "*/5 * * * * UTC"


class Foreign(celery_schedules.crontab):  # type: ignore[misc]
    """A class of somebody else's, whose is_due may say anything."""


@pytest.mark.parametrize("foreign", [None, True, object(), Foreign(), [1], b"@daily", timedelta(0), -5, float("nan")])
def test_anything_else_is_refused_and_the_message_says_what_is_taken(foreign: Any) -> None:
    with pytest.raises(InvalidSchedule):
        from_celery(foreign, zone="UTC")
    with pytest.raises(InvalidSchedule, match=r"Foreign cannot be used: give a rule of celery_tzbeat, a crontab"):
        from_celery(Foreign(), zone="UTC")


def test_sunsets_come_once_a_day_and_strictly_later() -> None:
    rule = from_celery(celery_schedules.solar("sunset", 48.85, 2.35), zone="UTC")
    instant, found = utc("2026-06-01T00:00"), []
    for _ in range(30):
        upcoming = rule.next_after(instant)
        assert upcoming is not None
        assert upcoming > instant
        assert rule.next_after(upcoming - timedelta(microseconds=1)) == upcoming
        found.append(upcoming)
        instant = upcoming
    assert [each.date().day for each in found] == list(range(1, 31))
    assert [rule.prev_before(each) for each in found[1:]] == found[:-1]


def test_the_polar_night_has_no_sunrise() -> None:
    rule = from_celery(celery_schedules.solar("sunrise", 78.2, 15.6), zone="UTC")
    upcoming = rule.next_after(utc("2026-11-30T00:00"))
    assert upcoming is not None
    assert upcoming.month == 2
    assert rule.prev_before(upcoming).month == 10  # type: ignore[union-attr]


def test_nowfun_outlives_pickling_and_is_no_part_of_equality() -> None:
    rule = crontab("@daily", tz="UTC", nowfun=datetime.now)
    assert pickle.loads(pickle.dumps(rule)).nowfun == datetime.now
    assert rule == crontab("@daily", tz="UTC")


def test_celerys_persistent_schedule_can_keep_a_rule_of_every_form() -> None:
    from celery.beat import ScheduleEntry

    app = Celery("contract", set_as_current=False)
    entry = ScheduleEntry("e", "t", utc("2026-06-01T00:00"), 0, crontab("@daily", tz="UTC"), (), {}, {}, app=app)
    kept = pickle.loads(pickle.dumps(entry))
    assert kept.schedule == entry.schedule
    assert entry.schedule == parse("0 0 * * * UTC")
    assert parse("0 0 * * * UTC") != parse("0 0 * * * Europe/Paris")
    assert crontab("@daily", tz="UTC") != celery_schedules.crontab(0, 0)

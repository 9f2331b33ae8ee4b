"""What a difference leaves: held against the two rows of instants themselves, and found in a bounded number of steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from typing import Any

import pytest

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.schedules import at, crontab, every, parse, remainder
from celery_tzbeat.schedules.combination import Difference
from celery_tzbeat.schedules.rule import Rule

UTC = timezone.utc
MICROSECOND = timedelta(microseconds=1)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def walk(rule: Rule, after: datetime, until: datetime) -> Iterator[datetime]:
    found = rule.next_after(after)
    while found is not None and found <= until:
        yield found
        found = rule.next_after(found)


def walk_back(rule: Rule, before: datetime, until: datetime) -> Iterator[datetime]:
    found = rule.prev_before(before)
    while found is not None and found >= until:
        yield found
        found = rule.prev_before(found)


def some_cron(draw: random.Random, zone: str) -> str:
    minute = draw.choice(["*", "*/15", "*/30", "0", "30", "0,30", "15-45/15"])
    hour = draw.choice(["*", "*", "*/2", "0-23", "1-3", "2", "0", "22-3", "1,2"])
    days = draw.choice(["* * *", "* * *", "* * sun", "1-7 * *", "* 3,10 *", "*/2 * sat,sun", "29 * mon", "8-14 * 0"])
    fixed = minute[0] != "*" and hour[0] != "*"
    words = draw.choice(["", " fold=both", " fold=second", " gap=skip", " gap=skip fold=both"]) if fixed else ""
    words += draw.choice(["", "", " kind=fixed fold=second", " kind=wildcard"]) if not words else ""
    return f"{minute} {hour} {days} {zone}{words}"


#: Forward and back by an hour, by half an hour, over midnight, a whole date that is missing; no change.
PLACES = [
    ("Europe/Paris", "2026-03-27", "2026-03-31"),
    ("Europe/Paris", "2026-10-23", "2026-10-27"),
    ("Australia/Lord_Howe", "2026-04-03", "2026-04-07"),
    ("Asia/Beirut", "2026-03-27", "2026-03-31"),
    ("Asia/Beirut", "2026-10-23", "2026-10-27"),
    ("Pacific/Apia", "2011-12-28", "2012-01-02"),
    ("UTC", "2028-02-26", "2028-03-03"),
]


@pytest.mark.parametrize(("zone", "begin", "end"), PLACES)
def test_what_is_left_is_what_one_row_has_and_the_others_have_not(zone: str, begin: str, end: str) -> None:
    draw, after, until, asked = random.Random(f"{zone} {begin}"), utc(begin), utc(end), 0
    for _ in range(40):
        base = parse(draw.choice([some_cron(draw, zone)] * 4 + ["@every 15m", "@every 2h phase=30m"]))
        taken = [parse(some_cron(draw, draw.choice([zone] * 4 + ["UTC"]))) for _ in range(draw.choice([1, 1, 2]))]
        rule = base
        try:
            for each in taken:
                rule = rule - each
        except InvalidSchedule:
            continue
        if any(each.zone != base.zone for each in taken) and not base.text.startswith("@every"):
            continue  # a crontab in another zone is not jumped over
        asked += 1
        gone = set(itertools.chain(*(walk(each, after, until) for each in taken)))
        expected = [instant for instant in walk(base, after, until) if instant not in gone]
        assert list(walk(rule, after, until)) == expected, rule.text
        assert list(walk_back(rule, until + MICROSECOND, after + MICROSECOND))[::-1] == expected, rule.text
    assert asked > 20


@pytest.mark.parametrize(
    "text",
    [
        "* * * * * - * * * * *",
        "@daily - @daily",
        "@daily UTC - 0 0,12 * * * UTC",
        "0 0 29 2 * - 0 0 29 2 *",
        "0 0 29 2 * Europe/Paris - * * * 2 * Europe/Paris",
        "@every 1s - @every 1s",
        "@every 1m - * * * * * UTC",
        "@every 1s - @every 2s - @every 2s phase=1s",
        "* * * * * * UTC - */2 * * * * * UTC - 1/2 * * * * * UTC",
        "0 12 * * * America/New_York - 0 16,17 * * * UTC",
        "0 12 * * * Europe/Paris kind=wildcard - 0 12 * * * Europe/Paris",
        "0 9 * * * UTC | ( @daily - @daily )",
        "( @daily | @hourly ) - 0 * * * *",
        "@daily UTC - @rrule DTSTART:20200101T000000 RRULE:FREQ=DAILY UTC",
    ],
)
def test_a_difference_that_leaves_nothing_is_refused_at_definition(text: str) -> None:
    with pytest.raises(InvalidSchedule, match="difference") as refused:
        parse(text)
    assert refused.value.field == "difference"


def test_what_would_leave_nothing_in_the_zone_it_is_put_in_is_refused_there() -> None:
    rule = parse("0 12 * * * - 0 12 * * * UTC")
    assert rule.in_zone("Asia/Tokyo").next_after(utc("2026-01-01")) == utc("2026-01-01T03:00")
    with pytest.raises(InvalidSchedule, match="leaves nothing"):
        rule.in_zone("UTC")


def test_a_part_of_a_union_of_which_nothing_is_left_is_no_reason_to_refuse_the_rest() -> None:
    rule = parse("( @daily UTC | 0 12 * * * UTC ) - @daily UTC")
    assert rule.next_after(utc("2026-01-01T12:00")) == utc("2026-01-02T12:00")


def steps_of(rule: Rule, monkeypatch: pytest.MonkeyPatch, ask: Any) -> int:
    """Return how many questions a search puts to the rules that a difference is made of."""
    count = 0
    for name in ("_later", "_earlier"):
        original = getattr(remainder.Remainder, name)

        def counted(*given: Any, original: Any = original) -> Any:
            nonlocal count
            count += 1
            return original(*given)

        monkeypatch.setattr(remainder.Remainder, name, counted)
    ask()
    return count


@pytest.mark.parametrize(
    ("text", "after", "following", "before", "preceding"),
    [
        ("* * * * * * UTC - * * * 24-26 12 * UTC", "2026-12-23T23:59:59", "2026-12-27", "2026-12-27", "2026-12-23T23:59:59"),
        ("*/4 * * * * UTC - */2 * * 12 * UTC", "2026-11-30T23:57", "2027-01-01", "2026-12-31", "2026-11-30T23:56"),
        ("@every 1s - * * * * 12 * Europe/Paris", "2026-12-25", "2026-12-31T23:00", "2026-12-25", "2026-11-30T22:59:59"),
        ("@every 2s - */2 * * 24-26 12 * UTC", "2026-12-24", "2026-12-27", "2026-12-26", "2026-12-23T23:59:58"),
        ("* * 29 2 * UTC - * * * 2 tue-sun UTC", "2026-01-01", "2044-02-29", "2044-01-01", "2016-02-29T23:59"),
        ("* * * * * UTC - * * * 1-11 * UTC - * * * 12 1-6 UTC", "2026-01-01", "2026-12-06", "2026-12-01", "2025-12-28T23:59"),
    ],
)  # fmt: skip
def test_a_row_that_is_taken_away_is_jumped_over_however_long_it_is(
    text: str, after: str, following: str, before: str, preceding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = parse(text)
    found: list[Any] = []
    count = steps_of(rule, monkeypatch, lambda: found.append(rule.next_after(utc(after))))
    count += steps_of(rule, monkeypatch, lambda: found.append(rule.prev_before(utc(before))))
    assert found == [utc(following), utc(preceding)]
    assert count < 100


def test_a_search_that_would_take_too_many_steps_says_so_instead_of_ending_silently() -> None:
    rule = every("1s") - at("2026-01-01T00:00:00Z")
    assert isinstance(rule, Difference)
    (part,) = remainder_parts(rule)
    part._limit = 1
    with pytest.raises(InvalidSchedule, match="takes away more than 1 occurrences in a row"):
        part.next_after(utc("2025-12-31T23:59:59"))


def remainder_parts(rule: Difference) -> tuple[Any, ...]:
    return rule._remainders()


def test_more_single_instants_or_rows_of_dates_than_are_stepped_over_are_refused() -> None:
    begin = utc("2026-01-01")
    with pytest.raises(InvalidSchedule, match="more than 500 instants"):
        every("1s") - [begin + timedelta(seconds=n) for n in range(501)]
    with pytest.raises(InvalidSchedule, match="rows of dates"):
        crontab("@daily", tz="UTC") - [date(2026, 1, 1) + timedelta(days=2 * n) for n in range(501)]
    whole = crontab("@daily", tz="UTC") - [date(2026, 1, 1) + timedelta(days=n) for n in range(5000)]
    assert whole.next_after(begin - MICROSECOND) == begin + timedelta(days=5000)
    assert whole.prev_before(begin + timedelta(days=5000)) == begin - timedelta(days=1)


def test_a_finite_row_may_be_taken_away_whole_and_then_has_no_more() -> None:
    rule = at(*(utc("2026-01-01") + timedelta(days=n) for n in range(3)))
    left = rule - crontab("@daily", tz="UTC")
    assert left.next_after(utc("2025-01-01")) is None
    assert (rule - [date(2026, 1, 2)]).in_zone("UTC").next_after(utc("2026-01-01")) == utc("2026-01-03")

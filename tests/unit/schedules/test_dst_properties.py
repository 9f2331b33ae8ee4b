"""Properties of every schedule around every change of offset since 2000, against the brute-force oracle.

A seeded sample in the normal run; `TZBEAT_NIGHTLY=1` walks all of it.
"""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import oracle
import pytest
from changes import NIGHTLY, Change, changes_of, distinct_changes, missing_dates, utc
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_tzbeat.schedules import civil, occurrences, parse

WINDOW = timedelta(days=3)

#: Kinds of change that a sample must not miss: half an hour, two hours, midnight, a whole date, negative DST, Ramadan.
TELLING = [
    *("America/New_York", "Australia/Lord_Howe", "Antarctica/Troll", "America/Havana", "America/Sao_Paulo"),
    *("Asia/Beirut", "Africa/Cairo", "Pacific/Apia", "Europe/Dublin", "Africa/Casablanca", "America/Scoresbysund"),
    *("Asia/Pyongyang", "America/Caracas", "Asia/Gaza", "America/St_Johns", "Africa/Monrovia", "Pacific/Fakaofo"),
]
CHANGES = (
    distinct_changes(2000, 2037)
    if NIGHTLY
    else [change for name in TELLING for years in ((2009, 2012), (2023, 2025)) for change in changes_of(name, *years)]
)


def near(change: Change, draw: random.Random) -> str:
    """Return an expression that has something to say about a change."""
    hours = sorted({(moment.hour + step) % 24 for moment in (change.before, change.after) for step in (-1, 0, 1)})
    minutes = sorted({0, 59, change.before.minute, change.after.minute, draw.randrange(60), draw.randrange(60)})
    minute = draw.choice(["0", "30", "*/15", "*", f"{draw.randrange(60)}", ",".join(map(str, minutes)), "7/20", "0-59"])
    hour = draw.choice(["*", "0-23", f"{draw.choice(hours)}", ",".join(map(str, hours)), "*/2", "22-2", "20-4/3"])
    day = draw.choice(["*", "*", "*", str(change.before.day), str(change.after.day), "L", "15W", "*/2"])
    weekday = draw.choice(["*", "*", "*", "SUN", "FRI-MON", f"{draw.randrange(7)}#{draw.randrange(1, 6)}", "6L", "*/3"])
    return f"{minute} {hour} {day} * {weekday}"


def assert_all_hold(text: str, change: Change, gap: str, fold: str) -> None:
    begin, finish = change.at - WINDOW, change.at + WINDOW
    truth = oracle.occurrences(text, change.zone, begin, finish, gap, fold)
    rule = parse(text).in_zone(change.zone).with_defaults(gap=gap, fold=fold)

    # None missed, none invented, each strictly later than the last.
    forward = list(occurrences(text, change.zone, after=begin, until=finish, gap=gap, fold=fold))
    assert forward == truth
    assert all(earlier < later for earlier, later in zip(forward, forward[1:], strict=False))

    # Backward is forward turned round.
    backward, instant = [], rule.prev_before(finish + timedelta(microseconds=1))
    while instant is not None and instant > begin:
        backward.append(instant)
        instant = rule.prev_before(instant)
    assert backward[::-1] == truth

    # From any instant, not only from one occurrence to the next.
    for minutes in range(-200, 200, 17):
        asked = change.at + timedelta(minutes=minutes, microseconds=minutes)
        assert rule.next_after(asked) == next((each for each in truth if each > asked), rule.next_after(finish))
        before = [each for each in truth if each < asked]
        if before:
            assert rule.prev_before(asked) == before[-1]
    assert rule.count_between(begin, finish, 10_000) == len(truth)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    change=st.sampled_from(CHANGES),
    seed=st.integers(0, 10**6),
    gap=st.sampled_from(["end", "skip"]),
    fold=st.sampled_from(["first", "second", "both"]),
)
@example(
    Change("Pacific/Apia", utc("2011-12-30T10:00"), datetime(2011, 12, 30), datetime(2011, 12, 31)), 1, "end", "first"
)
def test_next_and_prev_give_what_the_oracle_gives_around_a_change(
    change: Change, seed: int, gap: str, fold: str
) -> None:
    assert_all_hold(near(change, random.Random(seed)), change, gap, fold)


@pytest.mark.skipif(not NIGHTLY, reason="TZBEAT_NIGHTLY=1 walks every change of every zone since 2000")
@pytest.mark.timeout(0)
def test_every_change_of_every_zone_since_2000_is_as_the_oracle_says() -> None:
    for number, change in enumerate(CHANGES):
        draw = random.Random(number)
        for gap, fold in (("end", "first"), ("end", "second"), ("skip", "both")):
            assert_all_hold(near(change, draw), change, gap, fold)


def daily_years() -> list[tuple[str, int]]:
    """Return zones and years in which their clocks change: all, or a hundred; to read every zone takes long."""
    names = sorted(civil.zone_names())
    if NIGHTLY:
        return [(name, year) for name in names for year in range(2000, 2038) if changes_of(name, year, year)]
    draw = random.Random(20261130)
    found: set[tuple[str, int]] = set()
    while len(found) < 100:
        name, year = draw.choice(names), draw.randrange(2000, 2038)
        if changes_of(name, year, year):
            found.add((name, year))
    return sorted(found)


@pytest.mark.timeout(0 if NIGHTLY else 180)
def test_a_daily_job_fires_365_or_366_times_a_year_where_no_whole_date_is_missing() -> None:
    for name, year in daily_years():
        if missing_dates(name, year):
            continue
        begin, finish = (
            civil.offsets(name).passes(datetime(each, 1, 1))[:1] or [civil.offsets(name).gap_end(datetime(each, 1, 1))]
            for each in (year, year + 1)
        )
        assert begin[0] is not None
        assert finish[0] is not None
        second = timedelta(seconds=1)
        after, until = (each[0].replace(tzinfo=utc("2000-01-01").tzinfo) - second for each in (begin, finish))
        days = 366 if year % 4 == 0 and (year % 100 or year % 400 == 0) else 365
        for text in ("30 2 * * *", "0 0 * * *"):
            assert parse(text).in_zone(name).count_between(after, until, 400) == days, (name, year, text)


def test_beyond_2037_the_footer_of_the_zone_file_holds() -> None:
    for change in changes_of("Europe/Paris", 2060, 2060) + changes_of("America/Santiago", 2090, 2090):
        assert_all_hold("0,15,30,45 0-23 * * *", change, "end", "first")


def test_offsets_with_seconds_before_1972_are_kept() -> None:
    [change] = changes_of("Africa/Monrovia", 1972, 1972)
    assert change.after - change.before == timedelta(minutes=44, seconds=30)
    # By hand: at UTC-00:44:30 the clock went from 00:00 to 00:44:30 on 7 January.
    found = occurrences(
        "0,30,50 0 * * *", "Africa/Monrovia", after=utc("1972-01-06T12:00"), until=utc("1972-01-08T12:00")
    )
    assert list(found) == [
        utc("1972-01-07T00:44:30"),
        utc("1972-01-07T00:50"),
        *(utc(f"1972-01-08T00:{minute}") for minute in ("00", "30", "50")),
    ]
    before = occurrences("0 12 * * *", "Africa/Monrovia", after=utc("1972-01-05T00:00"), until=utc("1972-01-06T00:00"))
    assert list(before) == [utc("1972-01-05T12:44:30")]

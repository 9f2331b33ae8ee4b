"""What runs, what runs late, what is recorded as not run: the judgement, and where an entry goes on."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_tzbeat.model import Catchup, Cursor, Entry, Policy, Schedule, Unrun
from celery_tzbeat.schedules import at, every, occurrences, parse, zone
from celery_tzbeat.schedules.plan import COUNTED, Judgement, Start, cursor_at, judge, start_of
from celery_tzbeat.schedules.rule import Rule

UTC = timezone.utc
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
NOW = datetime(2026, 11, 30, 12, 0, 0, 500_000, tzinfo=UTC)  # half a second past an occurrence of most rules here
TOP = NOW.replace(microsecond=0)
TZDATA = "2026c"
RETENTION = DAY


def entry(schedule: Any = None, **policy: Any) -> Entry:
    return Entry("e", "proj.task", schedule or every("1s"), policy=Policy(**policy))


def judged(given: Entry, after: datetime, now: datetime = NOW) -> Judgement:
    return judge(given, after, now=now, tzdata=TZDATA)


def to_run(given: Entry, judgement: Judgement) -> list[datetime]:
    found = []
    u = given.schedule.next_after(judgement.after)
    while u is not None and u <= judgement.until:
        found.append(u)
        u = given.schedule.next_after(u)
    return found


def late(given: Entry, judgement: Judgement) -> list[datetime]:
    limit = judgement.late_until
    return [u for u in to_run(given, judgement) if limit is not None and u <= limit]


# ---- grace


def test_what_is_due_and_within_its_grace_runs_and_nothing_is_recorded() -> None:
    given = entry()
    judgement = judged(given, TOP - 3 * SECOND)
    assert to_run(given, judgement) == [TOP - 2 * SECOND, TOP - SECOND, TOP]
    assert judgement == Judgement(TOP - 3 * SECOND, NOW)


@pytest.mark.parametrize("catchup", ["latest", "all", "skip"])
def test_the_edge_of_the_grace_is_on_time(catchup: Catchup) -> None:
    given = entry(at(TOP), misfire_grace=MINUTE, catchup=catchup)
    on_time = judged(given, TOP - DAY, now=TOP + MINUTE)
    assert to_run(given, on_time) == [TOP]
    assert (on_time.late_until, on_time.rows) == (None, ())
    misfired = judged(given, TOP - DAY, now=TOP + MINUTE + timedelta(microseconds=1))
    assert late(given, misfired) == to_run(given, misfired) == ([] if catchup == "skip" else [TOP])


def test_nothing_due_is_nothing_to_do() -> None:
    given = entry(at(TOP))
    assert judged(given, TOP) == Judgement(TOP, NOW)
    assert judged(given, TOP - DAY, now=TOP - SECOND) == Judgement(TOP - DAY, TOP - SECOND)


def test_without_grace_only_this_very_instant_is_on_time() -> None:
    given = entry(misfire_grace=timedelta())
    assert to_run(given, judged(given, TOP - SECOND, now=TOP)) == [TOP]
    assert late(given, judged(given, TOP - SECOND, now=TOP)) == []
    assert late(given, judged(given, TOP - SECOND, now=NOW)) == [TOP]


# ---- catch-up


def test_back_after_90_s_an_every_second_entry_sends_60_and_the_newest_misfired_one_29_are_coalesced() -> None:
    given = entry()
    judgement = judged(given, TOP - 90 * SECOND)
    assert len(to_run(given, judgement)) == 61
    assert late(given, judgement) == [TOP - 60 * SECOND]
    (row,) = judgement.rows
    assert (row.event, row.count) == ("coalesced", 29)
    assert (row.first, row.last) == (TOP - 89 * SECOND, TOP - 61 * SECOND)
    assert row.cursor == cursor_at(given, row.last, tzdata=TZDATA)


def test_one_misfire_alone_runs_and_coalesces_nothing() -> None:
    given = entry(every("1h"))
    judgement = judged(given, TOP - HOUR, now=TOP + 10 * MINUTE)
    assert late(given, judgement) == [TOP]
    assert judgement.rows == ()


def test_all_runs_every_misfire_one_by_one() -> None:
    given = entry(catchup="all")
    judgement = judged(given, TOP - 90 * SECOND)
    assert len(to_run(given, judgement)) == 90
    assert len(late(given, judgement)) == 30
    assert judgement.rows == ()


def test_skip_runs_no_misfire() -> None:
    given = entry(catchup="skip")
    judgement = judged(given, TOP - 90 * SECOND)
    assert len(to_run(given, judgement)) == 60
    assert late(given, judgement) == []
    assert [(row.event, row.count, row.last) for row in judgement.rows] == [("skipped", 30, TOP - 60 * SECOND)]


@pytest.mark.parametrize(("catchup", "runs"), [("latest", 1), ("all", 7), ("skip", 0)])
def test_what_is_older_than_the_window_is_missed_whatever_the_catchup(catchup: Catchup, runs: int) -> None:
    given = entry(every("1d"), catchup=catchup)
    now = datetime(2026, 11, 30, 12, tzinfo=UTC)
    judgement = judged(given, now - 30 * DAY, now=now)
    assert len(to_run(given, judgement)) == runs
    missed = judgement.rows[0]
    assert (missed.event, missed.count) == ("missed", 23)
    assert missed.last < now - 7 * DAY <= missed.last + DAY


def test_the_edge_of_the_window_is_not_missed() -> None:
    given = entry(at(TOP), catchup_window=HOUR)
    assert late(given, judged(given, TOP - DAY, now=TOP + HOUR)) == [TOP]
    beyond = judged(given, TOP - DAY, now=TOP + HOUR + timedelta(microseconds=1))
    assert to_run(given, beyond) == []
    assert [row.event for row in beyond.rows] == ["missed"]


@pytest.mark.parametrize("catchup", ["latest", "all", "skip"])
def test_the_edge_of_the_grace_is_on_time_also_behind_what_is_missed(catchup: Catchup) -> None:
    given = entry(at(TOP - 2 * HOUR, TOP - MINUTE), catchup=catchup, catchup_window=HOUR)
    judgement = judged(given, TOP - DAY, now=TOP)
    assert [(row.event, row.last) for row in judgement.rows] == [("missed", TOP - 2 * HOUR)]
    assert (to_run(given, judgement), late(given, judgement)) == ([TOP - MINUTE], [])


def test_a_lost_monthly_run_is_an_alert_and_no_surprise() -> None:
    given = entry(parse("0 3 1 * *").in_zone(zone("UTC")))
    judgement = judged(given, datetime(2026, 10, 1, 3, tzinfo=UTC))
    assert to_run(given, judgement) == []
    assert [(row.event, row.first, row.count) for row in judgement.rows] == [
        ("missed", datetime(2026, 11, 1, 3, tzinfo=UTC), 1)
    ]


# ---- bounded work


class Counted:
    """A schedule that counts the steps of its rule."""

    def __init__(self, rule: Schedule) -> None:
        self.rule, self.steps = rule, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def next_after(self, instant: datetime) -> datetime | None:
        self.steps += 1
        return self.rule.next_after(instant)

    def prev_before(self, instant: datetime) -> datetime | None:
        self.steps += 1
        return self.rule.prev_before(instant)

    count_between = Rule.count_between  # as those rules count that have no formula for it


@pytest.mark.parametrize("catchup", ["latest", "all", "skip"])
@pytest.mark.parametrize("outage", [DAY, 6 * DAY, 30 * DAY, 3000 * DAY])
def test_an_outage_of_any_length_takes_a_bounded_number_of_steps(catchup: Catchup, outage: timedelta) -> None:
    schedule = Counted(parse("* * * * * *").in_zone(zone("America/New_York")))
    judgement = judged(entry(schedule, catchup=catchup), TOP - outage)
    assert schedule.steps <= 2 * COUNTED + 10
    assert [row.count for row in judgement.rows] == [COUNTED] * len(judgement.rows)


@pytest.mark.parametrize("count", [999, 1000, 1001])
def test_a_row_is_counted_exactly_up_to_1000(count: int) -> None:
    given = entry(catchup="skip", misfire_grace=timedelta())
    (row,) = judged(given, NOW.replace(microsecond=0) - count * SECOND).rows
    assert row.count == min(count, 1000)
    assert (row.first, row.last) == (TOP - (count - 1) * SECOND, TOP)


# ---- against brute force

RULES = (
    every("1s"),
    every("7s", phase="3s"),
    every("13m"),
    parse("*/5 * * * *").in_zone(zone("America/New_York")),
    parse("30 1 * * *").in_zone(zone("America/New_York")),
    parse("30 1 * * *").in_zone(zone("America/New_York")).with_defaults(gap="end", fold="both"),
    parse("15 * * * * | 45 1-3 * * *").in_zone(zone("Australia/Lord_Howe")),
)


def expected(
    given: Entry, after: datetime, now: datetime
) -> tuple[list[datetime], list[datetime], list[tuple[str, int]]]:
    """Return what runs, what of it late, and the rows, by looking at every occurrence."""
    due = []
    u = given.schedule.next_after(after)
    while u is not None and u <= now:
        due.append(u)
        u = given.schedule.next_after(u)
    policy = given.policy
    on_time = [u for u in due if now - u <= policy.misfire_grace]
    misfired = [u for u in due if now - u > policy.misfire_grace]
    missed = [u for u in misfired if now - u > policy.catchup_window]
    misfired = misfired[len(missed) :]
    run = {"all": misfired, "latest": misfired[-1:], "skip": []}[policy.catchup]
    rest = misfired[: len(misfired) - len(run)]
    rows = [("missed", len(missed)), ("skipped" if policy.catchup == "skip" else "coalesced", len(rest))]
    return run + on_time, run, [(event, min(count, COUNTED)) for event, count in rows if count]


@settings(deadline=None, max_examples=200)
@given(
    rule=st.sampled_from(RULES),
    catchup=st.sampled_from(["latest", "all", "skip"]),
    grace=st.integers(0, 4000),
    window=st.integers(0, 8000),
    now=st.datetimes(datetime(2026, 10, 31, 12), datetime(2026, 11, 2)).map(lambda naive: naive.replace(tzinfo=UTC)),
    ago=st.integers(0, 12_000),
)
def test_the_judgement_is_what_looking_at_every_occurrence_gives(
    rule: Schedule, catchup: Catchup, grace: int, window: int, now: datetime, ago: int
) -> None:
    given = entry(rule, misfire_grace=grace * SECOND, catchup=catchup, catchup_window=(grace + window) * SECOND)
    after = now - ago * SECOND
    judgement = judged(given, after, now)
    run, run_late, rows = expected(given, after, now)
    assert to_run(given, judgement) == run
    assert late(given, judgement) == run_late
    assert [(row.event, row.count) for row in judgement.rows] == rows
    assert _contiguous(given, after, judgement)


def _contiguous(given: Entry, after: datetime, judgement: Judgement) -> bool:
    """Return whether the rows follow on each other from `after`, and the runs from the last of them."""
    for row in judgement.rows:
        if given.schedule.next_after(after) != row.first or row.cursor.nominal != row.last:
            return False
        after = row.last
    return given.schedule.next_after(after) == given.schedule.next_after(judgement.after)


@given(
    ago=st.integers(0, 5000),
    pauses=st.lists(st.integers(0, 2000), max_size=5),
    catchup=st.sampled_from(["all", "skip"]),
)
def test_judging_in_several_ticks_accounts_for_the_same_occurrences(
    ago: int, pauses: list[int], catchup: Catchup
) -> None:
    given = entry(every("10s"), catchup=catchup)
    after = start = TOP - ago * SECOND
    now, seen = NOW, 0
    for pause in [0, *pauses]:
        now += pause * SECOND
        judgement = judged(given, after, now)
        seen += len(to_run(given, judgement)) + sum(row.count for row in judgement.rows)
        after = now
    assert seen == given.schedule.count_between(start, now, 10**6)


# ---- where an entry goes on


def start(given: Entry, cursor: Cursor | None, now: datetime = NOW, tzdata: str = TZDATA) -> Start:
    return start_of(given, cursor, now=now, retention=RETENTION, tzdata=tzdata)


def test_a_new_entry_starts_from_now_and_says_so() -> None:
    given = entry()
    assert start(given, None) == Start(NOW, Cursor(NOW, given.rule, tzdata=TZDATA))


def test_a_known_entry_goes_on_from_its_cursor_and_writes_nothing() -> None:
    given = entry()
    assert start(given, cursor_at(given, TOP - 30 * DAY, tzdata=TZDATA)) == Start(TOP - 30 * DAY)


def test_a_weekend_without_any_beat_makes_nothing_new() -> None:
    given = entry(every("1h"))
    begun = start(given, cursor_at(given, TOP - 3 * DAY, tzdata=TZDATA))
    judgement = judged(given, begun.after)
    assert to_run(given, judgement) == [TOP - HOUR, TOP]
    assert [(row.event, row.count) for row in judgement.rows] == [("coalesced", 70)]


def nine_to_eight(now: datetime) -> tuple[Entry, Start]:
    def daily(hour: int) -> Entry:
        return entry(parse(f"0 {hour} * * *").in_zone(zone("UTC")))

    nine, eight = daily(9), daily(8)
    return eight, start(eight, cursor_at(nine, datetime(2026, 11, 29, 9, tzinfo=UTC), tzdata=TZDATA), now=now)


def test_an_edit_at_half_past_8_from_9_to_8_sends_nothing_today() -> None:
    now = datetime(2026, 11, 30, 8, 30, tzinfo=UTC)
    eight, begun = nine_to_eight(now)
    assert begun.place == Cursor(begun.after, eight.rule, tzdata=TZDATA)
    assert to_run(eight, judged(eight, begun.after, now)) == []
    assert judged(eight, begun.after, now).rows == ()
    assert eight.schedule.next_after(begun.after) == datetime(2026, 12, 1, 8, tzinfo=UTC)


def test_an_edit_within_the_grace_of_its_new_time_sends_it() -> None:
    now = datetime(2026, 11, 30, 8, 0, 20, tzinfo=UTC)
    eight, begun = nine_to_eight(now)
    assert to_run(eight, judged(eight, begun.after, now)) == [datetime(2026, 11, 30, 8, tzinfo=UTC)]


def test_an_edit_never_goes_back_behind_the_cursor() -> None:
    before, after = entry(every("10s")), entry(every("5s"))
    begun = start(after, cursor_at(before, TOP, tzdata=TZDATA))
    assert begun.after == TOP


def test_an_entry_that_comes_back_within_the_retention_goes_on_and_is_listed_again() -> None:
    given = entry()
    cursor = replace(cursor_at(given, TOP - HOUR, tzdata=TZDATA), unlisted_for=RETENTION - SECOND)
    assert start(given, cursor) == Start(TOP - HOUR, replace(cursor, unlisted_for=timedelta()))


def test_an_entry_that_comes_back_after_the_retention_is_new() -> None:
    given = entry()
    cursor = replace(cursor_at(given, TOP - HOUR, tzdata=TZDATA), unlisted_for=RETENTION)
    assert start(given, cursor) == start(given, None)


# ---- another tzdata


class Moved:
    """A schedule whose zone has changed its rules: the same walls, an hour later in UTC."""

    def __init__(self, rule: Schedule, by: timedelta) -> None:
        self.rule, self.by = rule, by

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def next_after(self, instant: datetime) -> datetime | None:
        found = self.rule.next_after(instant - self.by)
        return found and found + self.by

    def resume(self, nominal: datetime, mark: str) -> datetime:
        return max(nominal, self.rule.resume(nominal, mark) + self.by)


@pytest.mark.parametrize("by", [HOUR, -HOUR, timedelta()])
def test_another_tzdata_never_fires_one_wall_time_twice(by: timedelta) -> None:
    rule = parse("30 2 * * *").in_zone(zone("America/New_York"))
    fired = rule.next_after(TOP)
    assert fired is not None
    cursor = cursor_at(entry(rule), fired, tzdata="old")
    assert cursor.mark
    moved = entry(Moved(rule, by))
    begun = start(moved, cursor, now=fired + 2 * HOUR)
    tomorrow = rule.next_after(fired)
    assert tomorrow is not None
    assert moved.schedule.next_after(begun.after) == tomorrow + by
    if by > timedelta():  # without the mark, the moved wall time would fire a second time
        assert (
            moved.schedule.next_after(start(moved, replace(cursor, mark=""), now=fired + 2 * HOUR).after) == fired + by
        )


def test_the_same_tzdata_does_not_ask_to_resume() -> None:
    rule = parse("30 2 * * *").in_zone(zone("America/New_York"))
    fired = rule.next_after(TOP)
    assert fired is not None
    given = entry(Moved(rule, HOUR))
    assert start(given, cursor_at(given, fired, tzdata=TZDATA)).after == fired


def test_a_row_of_the_past_carries_the_mark_of_its_last_occurrence() -> None:
    rule: Any = parse("30 2 * * *").in_zone(zone("America/New_York"))
    given = entry(rule, catchup="skip")
    (row,) = judged(given, TOP - 3 * DAY).rows
    assert isinstance(row, Unrun)
    assert row.cursor.mark == rule.mark(row.last) != ""
    assert isinstance(rule.zone, tzinfo)
    assert row.count == len(list(occurrences(rule.text, "UTC", after=TOP - 3 * DAY, until=NOW)))

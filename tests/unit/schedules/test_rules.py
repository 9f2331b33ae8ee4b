"""Rules: text forms, intervals, instants, recurrences, combinations, and what a cursor keeps of them."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone

import pytest
from changes import utc
from dateutil import rrule as dateutil

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import Schedule
from celery_tzbeat.schedules import at, civil, crontab, every, from_dict, parse, reboot, rrule
from celery_tzbeat.schedules.cron import read
from celery_tzbeat.schedules.reading import Reading
from celery_tzbeat.schedules.rule import Rule

UTC = timezone.utc


def following(rule: Rule, after: datetime, count: int) -> list[datetime]:
    found: list[datetime] = []
    while len(found) < count and (upcoming := rule.next_after(found[-1] if found else after)) is not None:
        found.append(upcoming)
    return found


# -- intervals


def test_an_interval_is_anchored_to_1970_wherever_one_starts() -> None:
    rule = every("90m")
    assert rule.next_after(utc("1970-01-01T00:00")) == utc("1970-01-01T01:30")
    assert rule.next_after(utc("2021-03-14T04:00:00.000001")) == utc("2021-03-14T04:30")
    assert rule.next_after(utc("2021-03-14T04:30")) == utc("2021-03-14T06:00")
    assert rule.prev_before(utc("2021-03-14T04:30")) == utc("2021-03-14T03:00")
    assert rule.prev_before(utc("1969-12-31T23:00")) == utc("1969-12-31T22:30")


def test_an_interval_may_be_a_fraction_of_a_second_and_never_drifts() -> None:
    rule = every(0.2)
    found = following(rule, utc("2026-06-01T00:00"), 5)
    assert found == [utc("2026-06-01T00:00") + timedelta(milliseconds=200 * n) for n in range(1, 6)]
    assert rule.count_between(utc("2026-06-01T00:00"), utc("2026-06-02T00:00"), 10**6) == 432_000
    assert rule.count_between(utc("2026-06-01T00:00"), utc("2026-06-02T00:00"), 1000) == 1000
    assert rule.count_between(utc("2026-06-02T00:00"), utc("2026-06-01T00:00"), 1000) == 0


def test_a_phase_moves_all_instants_and_counts_modulo_the_period() -> None:
    assert every("1h", phase="5m").next_after(utc("2026-06-01T00:00")) == utc("2026-06-01T00:05")
    assert every("1h", phase=timedelta(minutes=-55)) == every("1h", phase=300) == every("1h", phase="65m")


def test_a_spread_phase_needs_a_name_and_is_the_same_for_the_same_name() -> None:
    rule = every("1h", phase="spread")
    with pytest.raises(InvalidSchedule, match="named"):
        rule.next_after(utc("2026-06-01T00:00"))
    assert rule.named("a") == rule.named("a") != rule.named("b")
    assert parse(rule.text) == rule
    assert parse(rule.named("a").text) == rule.named("a")
    union = (rule | crontab("@daily", tz="UTC")).named("a")
    assert union == rule.named("a") | crontab("@daily", tz="UTC")


@pytest.mark.parametrize(
    "bad", [0, -1, "0s", "5", "", "m", "1y", "1h-5m", "1.5h", float("inf"), 1e-9, None, timedelta(0)]
)
def test_an_interval_that_is_none_is_refused(bad: object) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        every(bad)  # type: ignore[arg-type]
    assert refused.value.field == "interval"


def test_a_whole_number_of_days_warns_that_it_is_not_daily() -> None:
    assert "@daily" in every("24h").warnings()[0]
    assert every("23h").warnings() == ()


# -- instants


def test_instants_are_sorted_and_each_is_there_once() -> None:
    rule = at("2026-12-01T00:00:00Z", "2026-11-01T05:30:00Z", utc("2026-12-01T00:00"))
    assert rule.text == "@at 2026-11-01T05:30:00Z,2026-12-01T00:00:00Z"
    assert following(rule, utc("2026-01-01T00:00"), 9) == [utc("2026-11-01T05:30"), utc("2026-12-01T00:00")]
    assert rule.prev_before(utc("2026-12-01T00:00")) == utc("2026-11-01T05:30")
    assert rule.count_between(utc("2026-11-01T05:30"), utc("2027-01-01T00:00"), 9) == 1


def test_a_naive_instant_is_a_wall_and_needs_a_zone() -> None:
    with pytest.raises(InvalidSchedule, match="no zone"):
        at(datetime(2026, 11, 1, 1, 30))
    new_york = "America/New_York"
    fold, gap = datetime(2026, 11, 1, 1, 30), datetime(2026, 3, 8, 2, 30)
    assert at(fold, tz=new_york).instants == (utc("2026-11-01T05:30"),)
    assert at(fold, tz=new_york, fold="both").instants == (utc("2026-11-01T05:30"), utc("2026-11-01T06:30"))
    assert at(gap, tz=new_york).instants == (utc("2026-03-08T07:00"),)
    with pytest.raises(InvalidSchedule, match="skipped gap"):
        at(gap, tz=new_york, gap="skip")


def test_reboot_has_no_instants_and_says_so() -> None:
    rule = parse("@reboot")
    assert rule == reboot()
    assert rule.next_after(utc("2026-01-01T00:00")) is None
    assert "no instant" in rule.describe()


# -- recurrences

RECURRENCES = [
    "FREQ=DAILY;INTERVAL=3",
    "FREQ=WEEKLY;INTERVAL=2;BYDAY=TU,TH;WKST=SU",
    "FREQ=WEEKLY;INTERVAL=3",
    "FREQ=MONTHLY;BYDAY=-1FR",
    "FREQ=MONTHLY;INTERVAL=5",
    "FREQ=MONTHLY;BYMONTHDAY=-1",
    "FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-2",
    "FREQ=YEARLY;INTERVAL=2",
    "FREQ=YEARLY;BYWEEKNO=1,53;BYDAY=MO",
    "FREQ=YEARLY;BYYEARDAY=1,200,366",
    "FREQ=HOURLY;INTERVAL=7",
    "FREQ=HOURLY;INTERVAL=5;BYMONTH=6",
    "FREQ=MINUTELY;INTERVAL=95;BYHOUR=9,10,11",
    "FREQ=DAILY;COUNT=5000",
    "FREQ=DAILY;UNTIL=20260620T000000",
]


@pytest.mark.parametrize("text", RECURRENCES)
@pytest.mark.parametrize("start", [datetime(2015, 1, 31, 9, 30), datetime(1999, 3, 1, 2, 0)])
def test_a_recurrence_in_utc_gives_what_dateutil_gives(text: str, start: datetime) -> None:
    rule = rrule(f"DTSTART:{start:%Y%m%dT%H%M%S}\nRRULE:{text}", tz="UTC")
    whole = dateutil.rrulestr(f"RRULE:{text}", dtstart=start)
    asked = datetime(2025, 11, 3, 4, 5)
    theirs = [each.replace(tzinfo=UTC) for each in whole.xafter(asked, count=12)]
    assert following(rule, asked.replace(tzinfo=UTC), 12) == theirs
    for earlier, later in zip(theirs, theirs[1:], strict=False):
        assert rule.prev_before(later) == earlier
        assert later - earlier >= rule.shortest_gap
    first = next(iter(whole)).replace(tzinfo=UTC)
    assert rule.prev_before(first) is None
    assert rule.next_after(utc("1980-01-01T00:00")) == first


def test_the_walls_of_a_recurrence_are_fixed_times_in_their_zone() -> None:
    text = "DTSTART:20260301T023000 RRULE:FREQ=DAILY"
    assert following(rrule(text, tz="America/New_York"), utc("2026-03-07T12:00"), 2) == [
        utc("2026-03-08T07:00"),
        utc("2026-03-09T06:30"),
    ]
    assert following(rrule(text, tz="America/New_York", gap="skip"), utc("2026-03-07T12:00"), 1) == [
        utc("2026-03-09T06:30")
    ]


def test_a_recurrence_takes_its_zone_from_dtstart_and_its_end_from_until() -> None:
    rule = rrule("DTSTART;TZID=America/New_York:20260301T090000\nRRULE:FREQ=DAILY;UNTIL=20260303T140000Z")
    assert rule.zone is civil.zone("America/New_York")
    assert following(rule, utc("2026-01-01T00:00"), 9) == [utc(f"2026-03-0{day}T14:00") for day in (1, 2, 3)]
    assert rule.prev_before(utc("2030-01-01T00:00")) == utc("2026-03-03T14:00")
    assert parse(rule.text) == rule
    assert rrule("DTSTART:20260301T090000Z\nRRULE:FREQ=DAILY").zone is civil.zone("UTC")
    with pytest.raises(InvalidSchedule, match="DTSTART says"):
        rrule("DTSTART;TZID=America/New_York:20260301T090000\nRRULE:FREQ=DAILY", tz="UTC")


def test_dateutils_own_object_is_taken() -> None:
    naive = dateutil.rrule(dateutil.WEEKLY, dtstart=datetime(2026, 1, 5, 9), byweekday=dateutil.MO)
    assert following(rrule(naive, tz="UTC"), utc("2026-06-01T12:00"), 1) == [utc("2026-06-08T09:00")]
    aware = dateutil.rrule(
        dateutil.DAILY, dtstart=datetime(2026, 1, 5, 9, tzinfo=civil.zone("Asia/Tokyo")), until=utc("2026-01-06T00:00")
    )
    assert following(rrule(aware), utc("2026-01-01T00:00"), 9) == [utc("2026-01-05T00:00"), utc("2026-01-06T00:00")]


@pytest.mark.parametrize(
    "bad",
    [
        "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=SECONDLY;BYMONTH=2;BYMONTHDAY=30",
        "DTSTART:20260106T090000 RRULE:FREQ=DAILY;INTERVAL=7;BYDAY=MO",
        "FREQ=DAILY;COUNT=3",
        "FREQ=DAILY;INTERVAL=2",
        "FREQ=DAILY;INTERVAL=0",
        "DTSTART:20260106T090000 RRULE:FREQ=DAILY;COUNT=3;UNTIL=20270101T000000",
        "DTSTART:20260106T090000 RRULE:FREQ=DAILY;COUNT=200000",
        "FREQ=DAILY;BYEASTER=0",
        "FREQ=SOMETIMES",
        "RRULE:FREQ=DAILY EXDATE:20260106T090000",
        "DTSTART:20261306T090000 RRULE:FREQ=DAILY",
        "",
    ],
)
def test_a_recurrence_that_is_none_or_never_comes_is_refused(bad: str) -> None:
    with pytest.raises(InvalidSchedule, match="rrule"):
        rrule(bad, tz="UTC")


# -- combinations


def test_a_union_has_an_instant_of_two_parts_once() -> None:
    rule = crontab("0 */6 * * *", tz="UTC") | every("4h")
    hours = [each.hour for each in following(rule, utc("2026-06-01T00:00"), 8)]
    assert hours == [4, 6, 8, 12, 16, 18, 20, 0]
    assert rule.count_between(utc("2026-06-01T00:00"), utc("2026-06-02T00:00"), 99) == 8
    assert rule.prev_before(utc("2026-06-01T08:00")) == utc("2026-06-01T06:00")


def test_a_union_does_not_care_for_order_or_repetition() -> None:
    a, b, c = crontab("@daily", tz="UTC"), every("4h"), every("5h")
    assert a | b == b | a
    assert (a | b) | c == a | (b | c)
    assert hash(a | b) == hash(b | a)
    assert (a | a).count_between(utc("2026-06-01T00:00"), utc("2026-06-03T00:00"), 9) == 2


def test_a_date_takes_away_what_falls_on_it_in_the_rules_zone() -> None:
    rule = crontab("0 23 * * *", tz="America/New_York") - date(2026, 12, 25)
    assert following(rule, utc("2026-12-24T12:00"), 2) == [utc("2026-12-25T04:00"), utc("2026-12-27T04:00")]
    assert rule.prev_before(utc("2026-12-27T04:00")) == utc("2026-12-25T04:00")
    bound = (crontab("0 23 * * *") - [date(2026, 12, 25)]).in_zone(civil.zone("America/New_York"))
    assert following(bound, utc("2026-12-24T12:00"), 2) == following(rule, utc("2026-12-24T12:00"), 2)


def test_an_instant_or_a_rule_takes_away_what_falls_on_the_same_instant() -> None:
    daily = crontab("@daily", tz="UTC")
    assert following(daily - utc("2026-06-02T00:00"), utc("2026-06-01T00:00"), 1) == [utc("2026-06-03T00:00")]
    working = daily - crontab("0 0 * * sat,sun", tz="UTC")
    assert working.count_between(utc("2026-05-31T23:00"), utc("2026-06-14T23:00"), 99) == 10
    assert working.prev_before(utc("2026-06-08T00:00")) == utc("2026-06-05T00:00")


def test_an_interval_less_dates_reads_them_in_the_zone_it_is_put_in() -> None:
    rule = every("6h") - date(2026, 6, 16)
    with pytest.raises(InvalidSchedule, match="zone"):
        rule.next_after(utc("2026-06-01T00:00"))
    tokyo = rule.in_zone(civil.zone("Asia/Tokyo"))
    assert following(tokyo, utc("2026-06-15T06:00"), 2) == [utc("2026-06-15T12:00"), utc("2026-06-16T18:00")]
    assert parse(tokyo.text) == tokyo
    assert tokyo.text == "@every 6h - @dates 2026-06-16 Asia/Tokyo"


def test_a_second_by_second_rule_less_a_year_of_dates_is_stepped_over_whole() -> None:
    year = [date(2026, 1, 1) + timedelta(days=n) for n in range(365)]
    rule = (every(1) - year).in_zone("Europe/Paris")
    assert rule.next_after(utc("2026-01-01T06:00")) == utc("2026-12-31T23:00")
    assert rule.prev_before(utc("2026-12-31T23:00")) == utc("2025-12-31T22:59:59")


def test_what_is_taken_away_must_be_rules_dates_or_instants() -> None:
    with pytest.raises(InvalidSchedule, match="taken away"):
        every(5) - ["2026-12-25"]  # type: ignore[list-item]
    with pytest.raises(InvalidSchedule, match="taken away"):
        every(5) - []
    with pytest.raises(TypeError):
        every(5) | 5  # type: ignore[operator]


# -- text and dict forms


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("  0\t9  *   * 1-5 UTC", "0 9 * * 1-5 UTC"),
        ("@DAILY UTC", "0 0 * * * UTC"),
        ("0 0 * * MON UTC", "0 0 * * mon UTC"),
        ("0 0 * * mon#2 UTC", "0 0 * * MON#2 UTC"),
        ("30 2 * * * UTC gap=end fold=first", "30 2 * * * UTC"),
        ("30 2 * * * UTC kind=fixed", "30 2 * * * UTC"),
        ("30 2 * * * UTC days=and", "30 2 * * * UTC"),
        ("@every 90m UTC", "@every 1h30m"),
        ("( @daily UTC )", "@daily UTC"),
        ("@daily UTC | @every 1h", "@every 1h | @daily UTC"),
    ],
)
def test_texts_that_say_the_same_are_equal_rules(text: str, same: str) -> None:
    assert parse(text) == parse(same)
    assert hash(parse(text)) == hash(parse(same))


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("30 2 * * * UTC", "30 2 * * * Europe/Paris"),
        ("30 2 * * * UTC", "30 2 * * *"),
        ("30 2 * * * UTC", "30 2 * * * UTC gap=skip"),
        ("30 2 * * * UTC", "30 2 * * * UTC fold=both"),
        ("30 2 * * * UTC", "30 2 * * * UTC kind=wildcard"),
        ("0 0 13 * 5 UTC", "0 0 13 * 5 UTC days=and"),
        ("@every 1h", "@every 1h phase=1m"),
        ("@daily UTC - @every 7h", "@daily UTC | @every 7h"),
    ],
)
def test_texts_that_say_something_else_are_not(text: str, other: str) -> None:
    assert parse(text) != parse(other)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("@daily Europe/Nowhere", "zone"),
        ("@daily utc", "zone"),
        ("@fortnightly", "text"),
        ("@daily UTC phase=5m", "phase"),
        ("@every 5m gap=skip", "gap"),
        ("@daily UTC gap=skip gap=end", "gap"),
        ("@daily UTC kind=loose", "kind"),
        ("@dates 2026-12-25", "text"),
        ("@daily UTC | @dates 2026-12-25", "text"),
        ("@daily UTC - @dates 2026-13-25", "date"),
        ("@daily UTC -", "text"),
        ("| @daily UTC", "text"),
        ("( @daily UTC", "text"),
        ("@daily UTC )", "text"),
        ("@reboot now", "text"),
        ("@every 5m 6m", "text"),
        ("@solar noon 1 2", "text"),
        ("@solar sunset 1", "text"),
    ],
)
def test_text_that_cannot_be_read_names_its_field(text: str, field: str) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        parse(text)
    assert refused.value.field == field


def test_an_unknown_zone_comes_with_the_nearest_names() -> None:
    with pytest.raises(InvalidSchedule, match="did you mean 'America/New_York'"):
        crontab("@daily", tz="america/newyork")
    with pytest.raises(InvalidSchedule, match="no IANA name"):
        crontab("@daily", tz=timezone(timedelta(hours=2)))


def test_a_dict_form_of_another_version_or_kind_is_refused() -> None:
    form = parse("@daily UTC").to_dict()
    assert form == {"v": 1, "kind": "cron", "text": "0 0 * * * UTC"}
    for changed in ({"v": 2}, {"kind": "every"}, {"kind": "lunar"}, {"text": 5}):
        with pytest.raises(InvalidSchedule):
            from_dict({**form, **changed})


def test_every_rule_is_a_schedule_of_the_model() -> None:
    rules: list[Schedule] = [parse("@daily UTC"), every(5), at(utc("2026-01-01T00:00")), reboot()]
    assert all(rule.text for rule in rules)


# -- words and warnings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("30 2 * * mon-fri America/New_York", "at 02:30, Monday to Friday, America/New_York"),
        ("*/15 9-17 * * 1-5 UTC", "every 15 minutes in hours 9 to 17, Monday to Friday, UTC"),
        ("0 * * * * UTC", "every hour, UTC"),
        ("* * * * * UTC", "every minute, UTC"),
        ("* * * * * * UTC", "every second, UTC"),
        ("0 0 13 * FRI UTC", "at 00:00, on day 13 of the month or Friday, UTC"),
        ("0 0 LW * * UTC", "at 00:00, on the last weekday of the month, UTC"),
        ("0 12 * * MON#2 UTC", "at 12:00, the second Monday of the month, UTC"),
        ("0 12 * jan,mar-may fri-sun UTC", "at 12:00, Friday to Sunday, in January and March to May, UTC"),
        ("*/7 * * * * UTC", "every 7 minutes from 0, UTC"),
        ("30 0-23 * * * UTC", "at minute 30, UTC"),
    ],
)
def test_a_crontab_in_words(text: str, words: str) -> None:
    assert parse(text).describe() == words


def test_warnings_speak_of_what_has_no_effect_and_of_what_is_easily_misread() -> None:
    assert crontab("30 2 * * *", gap="end").warnings() == ()
    assert "gap='end' has no effect" in crontab("*/5 * * * *", gap="end").warnings()[0]
    assert "fold='both' has no effect" in crontab("0 * * * *", fold="both").warnings()[0]
    assert "a gap swallows" in crontab("*/5 2 * * *").warnings()[0]
    assert crontab("*/5 2 * * *", kind="wildcard").warnings() == crontab("*/5 2 * * *", kind="fixed").warnings() == ()


def test_wildcard_said_outright_is_kept_where_the_spelling_says_fixed() -> None:
    rule = parse("30 1 * * * America/New_York kind=wildcard")
    assert following(rule, utc("2026-10-31T12:00"), 2) == [utc("2026-11-01T05:30"), utc("2026-11-01T06:30")]


# -- the shortest gap


@pytest.mark.parametrize(
    ("text", "gap"),
    [
        ("* * * * *", timedelta(minutes=1)),
        ("*/7 * * * *", timedelta(minutes=4)),
        ("59,0 * * * *", timedelta(minutes=1)),
        ("59 23,0 * * *", timedelta(hours=1)),
        ("0 0,23 * * *", timedelta(hours=1)),
        ("30 2 * * *", timedelta(days=1)),
        ("0 0 * * mon", timedelta(days=7)),
        ("0 0 1 * *", timedelta(days=28)),
        ("0 0 1,31 * *", timedelta(days=1)),
        ("*/25 * * * * *", timedelta(seconds=10)),
        ("59,0 59,0 23,0 * * *", timedelta(seconds=1)),
    ],
)
def test_the_shortest_gap_is_told_from_the_fields(text: str, gap: timedelta) -> None:
    rule = parse(f"{text} UTC")
    assert rule.shortest_gap == gap
    found = following(rule, utc("2024-02-01T00:00"), 300)
    assert min(later - earlier for earlier, later in zip(found, found[1:], strict=False)) >= gap


# -- what a cursor keeps


def test_a_mark_says_the_wall_and_the_pass() -> None:
    rule = parse("30 1,2 * * * America/New_York fold=both")
    assert rule.mark(utc("2026-06-01T05:30")) == "2026-06-01T01:30:00 only"
    assert rule.mark(utc("2026-11-01T05:30")) == "2026-11-01T01:30:00 first"
    assert rule.mark(utc("2026-11-01T06:30")) == "2026-11-01T01:30:00 second"
    assert rule.mark(utc("2026-03-08T07:00")) == "2026-03-08T02:30:00 end"
    assert rule.mark(utc("2026-06-01T05:31")) == ""
    assert parse("*/5 * * * * America/New_York").mark(utc("2026-06-01T05:30")) == ""
    assert parse("10,20 2 * * * America/New_York").mark(utc("2026-03-08T07:00")) == "2026-03-08T02:20:00 end"


def reading(text: str, zone: str, gap: str = "end", fold: str = "first") -> Reading:
    return Reading(read(text), civil.offsets(zone), True, gap, fold)  # type: ignore[arg-type]


def test_a_zone_whose_rules_change_fires_no_wall_time_twice() -> None:
    # Two zones stand for one zone before and after an update of the tzdata.
    before, after = reading("30 9 * * *", "Etc/GMT+4"), reading("30 9 * * *", "Etc/GMT+5")
    fired = utc("2026-06-01T13:30")
    mark = before.mark(fired)
    assert after.next_after(fired) == utc("2026-06-01T14:30")  # 09:30 once more
    assert after.next_after(after.resume(fired, mark)) == utc("2026-06-02T14:30")
    assert before.next_after(before.resume(fired, mark)) == utc("2026-06-02T13:30")


def test_a_zone_whose_clock_is_moved_forward_loses_nothing_that_was_not_fired() -> None:
    before, after = reading("0 0-23 * * *", "Etc/GMT+5"), reading("0 0-23 * * *", "Etc/GMT+4")
    fired = utc("2026-06-01T14:00")
    assert after.resume(fired, before.mark(fired)) == fired


def test_what_fired_at_the_end_of_a_gap_that_is_no_more_does_not_fire_again() -> None:
    before, after = reading("30 2 * * *", "America/New_York"), reading("30 2 * * *", "Etc/GMT+5")
    fired = utc("2026-03-08T07:00")
    assert after.next_after(fired) == utc("2026-03-08T07:30")
    assert after.next_after(after.resume(fired, before.mark(fired))) == utc("2026-03-09T07:30")


@pytest.mark.parametrize("fold", ["first", "second", "both"])
def test_what_fired_once_does_not_fire_again_because_its_hour_now_comes_twice(fold: str) -> None:
    before = reading("30 1 * * *", "Etc/GMT+4", fold=fold)
    after = reading("30 1 * * *", "America/New_York", fold=fold)
    fired = utc("2026-11-01T05:30")
    assert after.next_after(after.resume(fired, before.mark(fired))) == utc("2026-11-02T06:30")


def test_what_fired_at_the_first_of_two_passes_still_fires_at_the_second() -> None:
    both = reading("30 1 * * *", "America/New_York", fold="both")
    first = utc("2026-11-01T05:30")
    assert both.next_after(both.resume(first, both.mark(first))) == utc("2026-11-01T06:30")


def test_combined_rules_keep_the_marks_of_their_parts() -> None:
    rule = parse("30 9 * * * Europe/Paris | @every 1h") - date(2026, 12, 25)
    fired = utc("2026-06-01T07:30")
    assert rule.mark(fired) == '["2026-06-01T09:30:00 only", ""]'
    assert rule.resume(fired, rule.mark(fired)) == fired
    assert rule.resume(fired, "") == fired


@pytest.mark.parametrize(
    "text",
    [
        "FREQ=SECONDLY;BYMONTH=2",
        "FREQ=SECONDLY;BYMONTHDAY=29;BYMONTH=2;BYDAY=MO",
        "FREQ=SECONDLY;BYHOUR=3",
        "FREQ=MINUTELY;BYDAY=MO",
        "FREQ=MINUTELY;BYYEARDAY=366",
        "FREQ=HOURLY;BYMONTH=2;BYMONTHDAY=29",
        "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=29;BYDAY=MO",
    ],
)
def test_a_recurrence_that_would_be_walked_for_seconds_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(InvalidSchedule, match="crontab"):
        rrule(f"DTSTART:20260101T000000\nRRULE:{text}", tz="UTC")


def test_a_rare_recurrence_said_by_the_year_is_taken() -> None:
    rule = rrule("DTSTART:20260101T000000\nRRULE:FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29;BYDAY=MO", tz="UTC")
    assert rule.next_after(utc("2026-01-01T00:00")) == utc("2044-02-29T00:00")


ENDS = [
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))),
    datetime.max.replace(tzinfo=UTC),
    datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
    datetime.min.replace(tzinfo=UTC),
]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Bogota", "Pacific/Kiritimati"])
@pytest.mark.parametrize(
    "text",
    ["@daily", "* * * * * *", "@every 7h", "@at 2026-01-01T00:00:00Z", "@daily - @dates 9999-12-31,0001-01-01",
     "@daily - 0 0 29 * *", "@every 1h - 0 0-5 * * *", "@daily | @every 1h"],
)  # fmt: skip
def test_at_both_ends_of_the_calendar_there_is_an_answer(text: str, zone: str) -> None:
    rule = parse(text).in_zone(zone)
    for end in ENDS:
        for found in (rule.next_after(end), rule.prev_before(end)):
            assert found is None or found.tzinfo is UTC
    assert rule.next_after(ENDS[1]) is None
    assert rule.prev_before(ENDS[3]) is None
    assert rule.next_after(ENDS[3]) is not None


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00"])
def test_an_instant_outside_the_calendar_is_refused(text: str) -> None:
    with pytest.raises(InvalidSchedule, match="within the years 1 to 9999"):
        parse(f"@at {text}")


def test_a_wall_whose_instant_is_outside_the_calendar_is_refused() -> None:
    for wall, zone in (("9999-12-31T23:59:59", "America/Bogota"), ("0001-01-01T00:00:00", "Asia/Tokyo")):
        with pytest.raises(InvalidSchedule, match="within the years 1 to 9999"):
            at(wall, tz=zone)
    with pytest.raises(InvalidSchedule, match="within the years 1 to 9999"):
        rrule("DTSTART:00010101T000000Z\nRRULE:FREQ=DAILY", tz="America/Bogota")

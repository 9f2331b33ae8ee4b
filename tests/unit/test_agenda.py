"""The heap of what is due next, and the queue of what is due and judged."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_tzbeat.beat.agenda import LOOK_STEPS, Agenda, Course
from celery_tzbeat.model import Cursor, Entry, Policy, Unrun
from celery_tzbeat.schedules import at, every, parse, zone

UTC = timezone.utc
SECOND = timedelta(seconds=1)
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
RETENTION = timedelta(days=1)


def entry(name: str, schedule: Any, **policy: Any) -> Entry:
    return Entry(name, "proj.task", schedule, policy=Policy(**policy))


def agenda(*entries: Entry, since: datetime = NOW, known: bool = True) -> Agenda:
    """Return the agenda of a term that begins at `since`; what is `known` was decided up to then."""
    made = Agenda({e.name: e for e in entries}, "2026c")
    cursors = {e.name: Cursor(since, e.rule, tzdata="2026c") for e in entries} if known else {}
    made.open(cursors, now=since, retention=RETENTION)
    return made


def ready(made: Agenda) -> list[tuple[str, datetime]]:
    return [(course.entry.name, course.occurrence().nominal) for course in made.ready]


def take(made: Agenda) -> Course:
    return made.ready.popleft()


def drain(made: Agenda) -> list[tuple[str, datetime]]:
    """Send everything that is ready; return it in order."""
    found = []
    while made.ready:
        course = take(made)
        found.append((course.entry.name, course.occurrence().nominal))
        made.done(course)
    return found


# ---- order


def test_what_is_due_first_is_ready_first() -> None:
    made = agenda(entry("c", at(NOW + 3 * SECOND)), entry("a", at(NOW + SECOND)), entry("b", at(NOW + 2 * SECOND)))
    made.look(NOW + 5 * SECOND)
    assert [name for name, _ in ready(made)] == ["a", "b", "c"]


def test_entries_due_at_one_instant_keep_the_order_of_their_definition() -> None:
    made = agenda(*(entry(name, every("10s")) for name in "dacb"))
    made.look(NOW + 10 * SECOND)
    assert [name for name, _ in ready(made)] == ["d", "a", "c", "b"]


def test_what_is_not_due_stays_where_it_is() -> None:
    made = agenda(entry("a", every("10s")))
    assert made.look(NOW + 9 * SECOND) == []
    assert ready(made) == []
    assert made.next_due == NOW + 10 * SECOND


def test_an_instant_is_due_when_the_clock_shows_it() -> None:
    made = agenda(entry("a", every("10s")))
    made.look(NOW + 10 * SECOND)
    assert ready(made) == [("a", NOW + 10 * SECOND)]


def test_next_due_is_the_earliest_of_heap_and_queue() -> None:
    made = agenda(entry("a", every("10s")), entry("b", every("15s")))
    assert made.next_due == NOW + 10 * SECOND
    made.look(NOW + 12 * SECOND)
    assert made.next_due == NOW + 10 * SECOND  # ready, and not yet sent
    drain(made)
    assert made.next_due == NOW + 15 * SECOND


def test_without_anything_to_come_nothing_is_due_next() -> None:
    made = agenda(entry("a", at(NOW + SECOND)))
    made.look(NOW + SECOND)
    assert drain(made) == [("a", NOW + SECOND)]
    assert made.next_due is None
    assert agenda().next_due is None


def test_occurrences_of_one_entry_come_one_by_one_in_order() -> None:
    made = agenda(entry("a", every("1s")), entry("b", every("2s")))
    made.look(NOW + 4 * SECOND)
    assert len(made.ready) == 2
    sent = drain(made)
    assert [u for name, u in sent if name == "a"] == [NOW + i * SECOND for i in (1, 2, 3, 4)]
    assert [u for name, u in sent if name == "b"] == [NOW + i * SECOND for i in (2, 4)]


# ---- judged once


def test_slow_publishing_makes_no_misfire() -> None:
    made = agenda(entry("a", every("1s"), misfire_grace=5 * SECOND))
    made.look(NOW + 5 * SECOND)
    made.done(take(made))
    # Two minutes later the other four are still to be sent; meanwhile 115 more have come, and are misfires.
    rows = made.look(NOW + 120 * SECOND)
    assert rows == []
    assert [u for _, u in drain(made)] == [NOW + i * SECOND for i in (2, 3, 4, 5)]
    rows = made.look(NOW + 120 * SECOND)
    assert [(row.first, row.last) for row in rows] == [(NOW + 6 * SECOND, NOW + 113 * SECOND)]
    assert [u for _, u in drain(made)] == [NOW + i * SECOND for i in range(114, 121)]


def test_what_was_judged_late_stays_late_and_what_follows_is_not() -> None:
    made = agenda(entry("a", every("1s"), misfire_grace=2 * SECOND, catchup="all"))
    made.look(NOW + 4 * SECOND)
    late = []
    while made.ready:
        late.append(take(made))
        assert late[-1].occurrence().late is (late[-1].next is not None and late[-1].next < NOW + 2 * SECOND)
        made.done(late[-1])
    assert len(late) == 4


def test_a_misfire_that_is_put_off_is_not_judged_again() -> None:
    made = agenda(entry("a", every("1h"), misfire_grace=SECOND))
    assert made.look(NOW + timedelta(hours=3, seconds=30))[0].count == 2
    made.put_off(take(made), NOW + timedelta(hours=3, seconds=30))
    assert made.look(NOW + timedelta(hours=3, seconds=31)) == []
    assert made.ready[0].occurrence().late
    assert ready(made) == [("a", NOW + timedelta(hours=3))]


def test_rows_come_before_what_runs_and_the_entry_goes_on_behind_them() -> None:
    made = agenda(entry("a", every("1s"), catchup="skip"))
    (row,) = made.look(NOW + 90 * SECOND)
    assert (row.event, row.count, row.last) == ("skipped", 29, NOW + 29 * SECOND)
    assert ready(made) == [("a", NOW + 30 * SECOND)]


# ---- put off


def test_what_is_put_off_waits_1_2_4_and_so_on_up_to_60_s() -> None:
    made = agenda(entry("a", at(NOW + SECOND)))
    now = NOW + SECOND
    waits = []
    for _ in range(9):
        made.look(now)
        made.put_off(take(made), now)
        assert made.next_due is not None
        waits.append((made.next_due - now).total_seconds())
        made.look(made.next_due - timedelta(microseconds=1))
        assert ready(made) == []
        now = made.next_due
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_an_entry_that_is_put_off_keeps_nobody_waiting() -> None:
    made = agenda(entry("bad", every("1s")), entry("good", every("1s")))
    for second in range(1, 60):
        now = NOW + second * SECOND
        made.look(now)
        for _ in range(len(made.ready)):
            course = take(made)
            if course.entry.name == "bad":
                made.put_off(course, now)
            else:
                assert course.occurrence().nominal == now
                made.done(course)
    assert ready(made) == []


def test_success_ends_the_back_off() -> None:
    made = agenda(entry("a", every("10s")))
    made.look(NOW + 10 * SECOND)
    for wait in (1, 2):
        made.put_off(take(made), NOW + 10 * SECOND)
        made.look(NOW + (10 + wait) * SECOND)
    course = take(made)
    course.build_failures = 3
    made.done(course)
    assert (course.put_offs, course.build_failures) == (0, 0)
    made.look(NOW + 20 * SECOND)
    made.put_off(take(made), NOW + 20 * SECOND)
    assert made.next_due == NOW + 21 * SECOND


# ---- bounded looks


def test_a_look_judges_so_much_and_the_next_one_goes_on_with_the_same_now() -> None:
    rule = parse("* * * * * *").in_zone(zone("UTC"))
    made = agenda(*(entry(f"e{i}", rule, misfire_grace=SECOND) for i in range(10)))
    now = NOW + timedelta(hours=1)
    looks: list[list[Unrun]] = []
    while made.behind(now):
        looks.append(made.look(now))
        assert sum(row.count for row in looks[-1]) <= LOOK_STEPS + 1000
    assert len(looks) == 5
    assert sorted(row.entry for rows in looks for row in rows) == [f"e{i}" for i in range(10)]
    assert len(made.ready) == 10


def test_a_look_at_many_that_are_on_time_is_bounded_too() -> None:
    made = agenda(*(entry(f"e{i}", every("10s")) for i in range(LOOK_STEPS + 5)))
    now = NOW + 10 * SECOND
    made.look(now)
    assert (len(made.ready), made.behind(now)) == (LOOK_STEPS, True)
    made.look(now)
    assert (len(made.ready), made.behind(now)) == (LOOK_STEPS + 5, False)


# ---- cursors


def test_a_term_begins_with_the_cursors_of_new_entries_to_be_written() -> None:
    new = entry("new", every("10s"))
    made = Agenda({"new": new}, "2026c")
    assert made.open({}, now=NOW, retention=RETENTION) == {"new": Cursor(NOW, new.rule, tzdata="2026c")}
    assert made.open({"new": Cursor(NOW, new.rule)}, now=NOW, retention=RETENTION) == {}


def test_a_second_term_forgets_the_first() -> None:
    a = entry("a", every("10s"))
    made = agenda(a)
    made.look(NOW + 20 * SECOND)
    made.open({"a": Cursor(NOW + 10 * SECOND, a.rule)}, now=NOW + 20 * SECOND, retention=RETENTION)
    assert ready(made) == []
    made.look(NOW + 20 * SECOND)
    assert drain(made) == [("a", NOW + 20 * SECOND)]


def test_positions_are_what_the_ledger_knows_not_what_was_merely_judged() -> None:
    a = entry("a", every("1s"), misfire_grace=SECOND)
    made = agenda(a)
    (row,) = made.look(NOW + 60 * SECOND)
    assert made.positions()["a"].nominal == NOW
    made.recorded(row)
    assert made.positions() == {"a": row.cursor}
    course = take(made)
    nominal = course.occurrence().nominal
    assert made.positions() == {"a": row.cursor}
    made.done(course)
    assert made.positions()["a"].nominal == nominal


def test_the_cursor_behind_an_occurrence_carries_its_mark() -> None:
    rule = parse("30 1 * * *").in_zone(zone("America/New_York"))
    made = agenda(entry("a", rule), since=datetime(2026, 11, 1, tzinfo=UTC))
    made.look(datetime(2026, 11, 1, 5, 30, tzinfo=UTC))
    found = made.cursor(made.ready[0])
    assert found == Cursor(
        datetime(2026, 11, 1, 5, 30, tzinfo=UTC),
        rule=made.entries["a"].rule,
        mark="2026-11-01T01:30:00 first",
        tzdata="2026c",
    )


@pytest.mark.parametrize("known", [True, False])
def test_a_new_entry_and_a_known_one_start_strictly_after_now(known: bool) -> None:
    made = agenda(entry("a", every("10s")), known=known)
    assert made.next_due == NOW + 10 * SECOND


class Broken:
    """A schedule that cannot answer beyond an instant."""

    def __init__(self, rule: Any, until: datetime) -> None:
        self._rule, self._until = rule, until

    def next_after(self, instant: datetime) -> datetime | None:
        if instant >= self._until:
            raise ValueError("no")
        return self._rule.next_after(instant)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)


def test_a_schedule_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    at_once, later = Broken(every("1s"), NOW), Broken(every("1s"), NOW + 2 * SECOND)
    entries = {"at once": at_once, "later": later, "good": every("1s")}
    agenda = Agenda({name: Entry(name, "t", rule) for name, rule in entries.items()}, "x")
    agenda.open({}, now=NOW, retention=timedelta(days=1))
    sent = []
    for second in range(1, 5):
        agenda.look(NOW + second * SECOND)
        while agenda.ready:
            course = agenda.ready.popleft()
            sent.append((course.entry.name, second))
            agenda.done(course)
    assert [second for name, second in sent if name == "good"] == [1, 2, 3, 4]
    assert [second for name, second in sent if name == "later"] == [1, 2]
    assert not any(name == "at once" for name, _ in sent)
    assert "'at once'" in caplog.text
    assert "'later'" in caplog.text

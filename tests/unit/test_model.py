"""The values: identities, and text forms that come back as they were."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_tzbeat.model import (
    EPOCH,
    NAME_LENGTH,
    Cursor,
    Entry,
    Occurrence,
    Policy,
    Presence,
    from_iso,
    from_micros,
    iso,
    micros,
)
from celery_tzbeat.schedules import every, parse

UTC = timezone.utc
FOLD = datetime(2026, 11, 1, 5, 30, tzinfo=UTC)

instants = st.datetimes(datetime(1970, 1, 1), datetime(2255, 1, 1)).map(lambda naive: naive.replace(tzinfo=UTC))
words = st.text("abcdef0123456789.", max_size=12)


# ---- instants


def test_an_instant_has_one_text() -> None:
    assert iso(FOLD) == "2026-11-01T05:30:00Z"
    assert iso(FOLD + timedelta(microseconds=250_000)) == "2026-11-01T05:30:00.250000Z"
    assert iso(FOLD.astimezone(timezone(timedelta(hours=-4)))) == iso(FOLD)


@given(instants)
def test_texts_and_numbers_of_instants_come_back(instant: datetime) -> None:
    assert from_iso(iso(instant)) == instant
    assert from_micros(micros(instant)) == instant
    assert float(micros(instant)) == micros(instant)  # exact in a double, as Lua has it


@given(instants, instants)
def test_numbers_are_ordered_as_the_instants(one: datetime, other: datetime) -> None:
    assert (micros(one) < micros(other)) == (one < other)


def test_before_1970_counts_down() -> None:
    assert micros(EPOCH - timedelta(microseconds=1)) == -1
    assert from_micros(-1) == EPOCH - timedelta(microseconds=1)


@pytest.mark.parametrize("refuse", [micros, iso])
def test_a_naive_instant_is_refused(refuse: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        refuse(datetime(2026, 11, 1, 5, 30))  # type: ignore[operator]


@pytest.mark.parametrize("text", ["2026-11-01T05:30:00", "2026-11-01", "", "soon"])
def test_a_text_without_an_offset_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_iso(text)


# ---- occurrences


def test_the_key_is_entry_and_instant_in_utc() -> None:
    assert Occurrence("nightly", FOLD).key == "nightly@2026-11-01T05:30:00Z"
    assert Occurrence("proj.add(1, 2)", FOLD).key == "proj.add(1, 2)@2026-11-01T05:30:00Z"


def test_being_late_is_no_part_of_the_identity() -> None:
    assert Occurrence("a", FOLD, late=True).key == Occurrence("a", FOLD).key
    assert Occurrence("a", FOLD, late=True).task_id("ns") == Occurrence("a", FOLD).task_id("ns")


def test_the_task_id_is_the_same_everywhere_and_for_ever() -> None:
    assert Occurrence("nightly", FOLD).task_id("proj/0") == "750a424b-1ccb-594c-a951-a37b4a589f3f"
    assert uuid.UUID(Occurrence("nightly", FOLD).task_id("proj/0")).version == 5


def test_other_entries_instants_and_namespaces_have_other_task_ids() -> None:
    ids = {
        Occurrence(e, u).task_id(ns) for e in ("a", "b") for u in (FOLD, FOLD + timedelta(hours=1)) for ns in ("m", "n")
    }
    assert len(ids) == 8


def test_the_two_passes_of_one_wall_time_are_two_occurrences() -> None:
    assert Occurrence("a", FOLD).key != Occurrence("a", FOLD + timedelta(hours=1)).key


# ---- cursors


@given(instants, words, st.text(max_size=30), words, st.integers(0, 10**7))
def test_a_cursor_comes_back_as_it_was(nominal: datetime, rule: str, mark: str, tzdata: str, unlisted: int) -> None:
    cursor = Cursor(nominal, rule, mark, tzdata, timedelta(seconds=unlisted))
    assert Cursor.from_text(cursor.to_text()) == cursor


def test_a_mark_may_hold_the_separator() -> None:
    cursor = Cursor(FOLD, "rule", "a|b||c", "2026c")
    assert cursor.to_text() == f"{micros(FOLD)}|rule|2026c|0|a|b||c"
    assert Cursor.from_text(cursor.to_text()) == cursor


def test_the_text_of_a_cursor_begins_with_its_number_where_scripts_read_it() -> None:
    assert Cursor(FOLD, "rule").to_text().split("|")[0] == str(micros(FOLD)) == "1793511000000000"


@pytest.mark.parametrize("text", ["", "1", "x|r|t|0|", "1|r|t|x|m", "1|r|t", "{}", "\x00\xff"])
def test_any_other_text_is_no_cursor(text: str) -> None:
    with pytest.raises(ValueError):
        Cursor.from_text(text)


def test_a_cursor_of_a_naive_instant_cannot_be_written() -> None:
    with pytest.raises(TypeError):
        Cursor(datetime(2026, 11, 1), "rule").to_text()


# ---- entries


def test_the_rule_is_what_decides_the_instants_and_nothing_else() -> None:
    one = Entry("a", "proj.task", every("10s"))
    assert one.rule == Entry("b", "proj.other", every("10s"), args=(1,), policy=Policy(catchup="skip")).rule
    assert one.rule != Entry("a", "proj.task", every("11s")).rule
    paris, berlin = (Entry("a", "t", parse(f"0 3 * * * {name}")) for name in ("Europe/Paris", "Europe/Berlin"))
    assert paris.rule != berlin.rule


def test_the_rule_does_not_change_between_releases() -> None:
    assert Entry("a", "t", parse("30 2 * * mon-fri America/New_York")).rule == "ab238d267e6f"


def test_the_fingerprint_tells_definitions_apart() -> None:
    one = Entry("a", "proj.task", every("10s"))
    others = (
        Entry("b", "proj.task", every("10s")),
        Entry("a", "proj.other", every("10s")),
        Entry("a", "proj.task", every("11s")),
        Entry("a", "proj.task", every("10s"), args=(1,)),
        Entry("a", "proj.task", every("10s"), kwargs={"x": 1}),
        Entry("a", "proj.task", every("10s"), options={"queue": "q"}),
        Entry("a", "proj.task", every("10s"), policy=Policy(catchup="all")),
    )
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 8
    assert one.fingerprint == Entry("a", "proj.task", every("10s")).fingerprint


def test_policy_has_the_defaults_of_the_design() -> None:
    assert Policy() == Policy(timedelta(seconds=60), "latest", timedelta(days=7))
    assert NAME_LENGTH == 200


# ---- presence


@pytest.mark.parametrize("next_due", [None, FOLD])
def test_presence_comes_back_as_it_was(next_due: datetime | None) -> None:
    presence = Presence(
        beat="host:1:abc",
        host="hôst",
        pid=1,
        version="0.1",
        tzdata="2026c",
        fingerprint="f",
        role="standby",
        why='"quoted"',
        last_tick=FOLD,
        next_due=next_due,
        skew=-0.25,
        entries=3,
        embedded=True,
    )
    assert Presence.from_json(presence.to_json()) == presence
    assert Presence.from_json(presence.to_json().encode()) == presence

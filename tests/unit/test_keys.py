"""Every key has a kind in the catalogue; done marks lie a hundred to a hash."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime, timedelta, timezone
from inspect import getmembers, isfunction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_tzbeat.model import EPOCH, from_micros, micros
from celery_tzbeat.schedules import at, every, parse, zone
from celery_tzbeat.schedules.rule import Rule
from celery_tzbeat.store.keys import CATALOGUE, MARKS_PER_HASH, Bucket, Keys

UTC = timezone.utc
SECOND = timedelta(seconds=1)
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)

instants = st.datetimes(datetime(1970, 1, 1), datetime(2255, 1, 1)).map(lambda naive: naive.replace(tzinfo=UTC))
gaps = st.integers(1, 10**13).map(lambda n: timedelta(microseconds=n))


# ---- names


def test_all_keys_of_a_namespace_are_in_one_slot() -> None:
    keys = Keys("proj/0")
    names = [
        keys("epoch"),
        keys.done("e}{x", 7),
        keys.occurrence("e@2026-11-01T05:30:00Z"),
        keys.open_of("e"),
        keys.beat("b"),
    ]
    assert {re.match(r"[^{]*\{([^}]+)\}", name)[1] for name in names} == {"proj/0"}  # type: ignore[index]
    assert len(set(names)) == len(names)


def test_the_catalogue_names_every_kind_once() -> None:
    names = [kind.name for kind in CATALOGUE]
    assert len(set(names)) == len(names)
    assert all(kind.lives and kind.holds for kind in CATALOGUE)


def test_every_name_that_can_be_made_is_in_the_catalogue() -> None:
    keys = Keys("n")
    made = {
        keys.done("<entry>", 0).replace(":0", ":<n>"),
        keys.occurrence("<key>"),
        keys.open_of("<entry>"),
        keys.beat("<id>"),
        keys.entries_of("<fingerprint>"),
        keys.worker("<id>"),
        keys.outcome("<id>"),
    }
    assert made <= {keys(kind.name) for kind in CATALOGUE}
    asking = {"type_of", "fixed"}  # these make no name
    assert len(made) == len({name for name, _ in getmembers(Keys, isfunction) if not name.startswith("_")} - asking)


def test_names_of_entries_are_never_cut() -> None:
    assert Keys("n").done("proj.add(1, 2)", 3) == "tzbeat:{n}:done:proj.add(1, 2):3"


# ---- buckets


@given(instants, gaps)
def test_a_bucket_is_a_pure_function_and_stands_for_one_nominal(nominal: datetime, gap: timedelta) -> None:
    bucket = Bucket.of(nominal, gap)
    assert bucket == Bucket.of(from_micros(micros(nominal)), gap)
    width = MARKS_PER_HASH * (gap // timedelta(microseconds=1))
    assert bucket.number * width + bucket.field == micros(nominal)
    assert 0 <= bucket.field < width


def test_buckets_stay_where_they_are_between_releases() -> None:
    assert Bucket.of(NOON, SECOND) == Bucket(17_960_400, 0)
    assert Bucket.of(EPOCH, SECOND) == Bucket(0, 0)
    assert Bucket.of(EPOCH + 99 * SECOND, SECOND) == Bucket(0, 99_000_000)
    assert Bucket.of(EPOCH + 100 * SECOND, SECOND) == Bucket(1, 0)


@pytest.mark.parametrize(
    "rule",
    [
        every("1s"),
        every("7s", phase="3s"),
        every("13m"),
        parse("*/10 * * * * *").in_zone(zone("UTC")),
        parse("*/5 * * * *").in_zone(zone("America/New_York")),
        parse("30 1 * * *").in_zone(zone("America/New_York")),
        parse("0,1 9 * * mon").in_zone(zone("UTC")),
    ],
    ids=lambda rule: rule.text,
)
def test_no_hash_holds_more_than_a_hundred_marks(rule: Rule) -> None:
    counts: Counter[int] = Counter()
    u = NOON
    for _ in range(1500):
        found = rule.next_after(u)
        assert found is not None
        u = found
        counts[Bucket.of(u, rule.shortest_gap).number] += 1
    assert max(counts.values()) <= MARKS_PER_HASH


@pytest.mark.parametrize("rule", [at(NOON), parse("@reboot")], ids=["once", "reboot"])
def test_a_rule_without_gaps_has_buckets_too(rule: Rule) -> None:
    bucket = Bucket.of(NOON, rule.shortest_gap)
    assert (bucket.number, bucket.field) == (0, micros(NOON))

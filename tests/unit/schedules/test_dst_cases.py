"""The public cases: every rule of civil time, in 40 zones. `cases/dst_public.json` is data of the specification."""

from __future__ import annotations

import hashlib
import itertools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import iso
from celery_tzbeat.schedules import occurrences, tzdata_version

BOOK = json.loads((Path(__file__).parents[2] / "cases" / "dst_public.json").read_text(encoding="utf-8"))
CASES = [pytest.param(case, id=case["id"]) for case in BOOK["cases"]]


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def ask(case: dict[str, Any]) -> list[str]:
    found = occurrences(
        case["expr"],
        case["zone"],
        after=instant(case["after_utc"]),
        until=instant(case["until_utc"]),
        gap=case["gap"],
        fold=case["fold"],
    )
    return [iso(each) for each in itertools.islice(found, case.get("count"))]


@pytest.mark.parametrize("case", CASES)
def test_the_case_holds(case: dict[str, Any]) -> None:
    if case.get("outcome") == "error":
        with pytest.raises(ValueError):
            ask(case)
    elif case.get("outcome") == "never_or_error":
        with pytest.raises(InvalidSchedule, match="never comes"):
            ask(case)
    elif "expected_sha256" in case:
        found = ask(case)
        assert len(found) == case["expected_count"]
        assert hashlib.sha256("\n".join(found).encode()).hexdigest() == case["expected_sha256"]
    else:
        assert ask(case) == case["expected"]


def test_the_zone_files_are_those_of_the_cases() -> None:
    assert tzdata_version() in BOOK["tzdata"] or tzdata_version() > "2026f"


@pytest.mark.parametrize(
    ("text", "field", "bad"),
    [
        ("60 * * * *", "minute", "60"),
        ("* 24 * * *", "hour", "24"),
        ("* * 0 * *", "day of month", "0"),
        ("* * * 13 *", "month", "13"),
        ("* * * * 8", "day of week", "8"),
        ("* * * *", "text", "* * * *"),
        ("*/0 * * * *", "minute", "*/0"),
        ("0 0 * * MON#6", "day of week", "MON#6"),
        ("", "text", ""),
        ("a * * * *", "minute", "a"),
        ("-1 * * * *", "minute", "-1"),
        ("1,,2 * * * *", "minute", "1,,2"),
    ],
)
def test_what_is_refused_names_the_field_and_the_text(text: str, field: str, bad: str) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        occurrences(text, "UTC", after=instant("2024-01-01T00:00:00Z"), until=instant("2024-01-02T00:00:00Z"))
    assert refused.value.field == field
    assert refused.value.text == bad
    assert field in str(refused.value)
    assert bad in str(refused.value)


def test_a_bad_call_raises_at_once_and_not_at_the_first_step() -> None:
    good = {"after": instant("2024-01-01T00:00:00Z"), "until": instant("2024-01-02T00:00:00Z")}
    with pytest.raises(InvalidSchedule, match="Europe/Nowhere"):
        occurrences("@daily", "Europe/Nowhere", **good)
    with pytest.raises(InvalidSchedule, match="gap 'shift'"):
        occurrences("@daily", "UTC", **good, gap="shift")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="aware"):
        occurrences("@daily", "UTC", after=datetime(2024, 1, 1), until=good["until"])

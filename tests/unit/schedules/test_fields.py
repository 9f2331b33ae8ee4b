"""Cron's fields: every range and step of every field, held against a walk around the field and against the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from celery_tzbeat.schedules import fields, parse
from tests import oracle

FIELDS: list[tuple[fields.Field, str]] = [
    (fields.SECOND, "second"),
    (fields.MINUTE, "minute"),
    (fields.HOUR, "hour"),
    (fields.DAY_OF_MONTH, "dom"),
    (fields.MONTH, "month"),
    (fields.DAY_OF_WEEK, "dow"),
]


def around(field: fields.Field, first: int, last: int, step: int) -> set[int]:
    """Walk from `first` to `last`, over the end of the field where need be, and take each `step`-th value."""
    if field is fields.DAY_OF_WEEK and (first, last) == (0, 7):
        row = list(range(8))  # the whole week: from Sunday to Sunday
    else:
        if field is fields.DAY_OF_WEEK and first == 7 > last:
            first = 0
        row = [first]
        while row[-1] != last:
            if row[-1] >= field.high and not (field is fields.DAY_OF_WEEK and last == 7):
                row.append(field.low)
            else:
                row.append(row[-1] + 1)
    return {value % 7 if field is fields.DAY_OF_WEEK else value for value in row[::step]}


@pytest.mark.parametrize(("field", "name"), FIELDS, ids=[name for _, name in FIELDS])
def test_every_range_with_every_step_is_the_walk_around_its_field(field: fields.Field, name: str) -> None:
    high = 7 if field is fields.DAY_OF_WEEK else field.high
    for first in range(field.low, high + 1):
        for last in range(field.low, high + 1):
            for step, suffix in ((1, ""), (1, "/1"), (2, "/2"), (3, "/3"), (5, "/5")):
                text = f"{first}-{last}{suffix}"
                found = set(fields.spread(read(field, text)))
                assert found == around(field, first, last, step), text
                if not (first == 7 > last and name != "dow"):  # the oracle reads 7 as Sunday in every field
                    assert found == oracle.parse_numbers(name, text), text


def read(field: fields.Field, text: str) -> int:
    found: Any = fields.read_numbers(field, text)
    return int(found)


def test_seven_is_sunday_in_the_day_of_week_only() -> None:
    rule: Any = parse("0 7-2 * 7-3 * UTC")
    assert fields.spread(rule.cron.hour) == (0, 1, 2, *range(7, 24))
    assert fields.spread(rule.cron.month) == (1, 2, 3, *range(7, 13))
    assert fields.spread(read(fields.DAY_OF_WEEK, "7-2")) == (0, 1, 2)

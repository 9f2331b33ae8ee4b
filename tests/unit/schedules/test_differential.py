"""cronsim and croniter as witnesses, in UTC, outside the faults they are known for."""

from __future__ import annotations

import itertools
import random
from datetime import datetime, timezone

import pytest
from croniter import croniter
from cronsim import CronSim

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.schedules import parse

UTC = timezone.utc
COUNT = 8


def some(draw: random.Random, low: int, high: int) -> str:
    """Return a field that all three read alike: no wrap, no whole field spelled out, no a/n, no a-a."""
    first = draw.randrange(low, high)
    last = draw.randrange(first + 1, high + 1)
    if (first, last) == (low, high):
        first, last = low + 1, high
    return draw.choice(
        ["*", "*", f"*/{draw.randrange(2, 8)}", f"{first}", f"{first},{last}", f"{first}-{last}"]
        + ([f"{first}-{last}/2"] if last > first + 2 else [])
    )


def expressions(seed: int, count: int, days: list[str], weekdays: list[str]) -> list[str]:
    draw = random.Random(seed)
    return [
        f"{some(draw, 0, 59)} {some(draw, 0, 23)} {draw.choice([*days, some(draw, 1, 28)])} "
        f"{some(draw, 1, 12)} {draw.choice([*weekdays, some(draw, 0, 6)])}"
        for _ in range(count)
    ]


STARTS = [datetime(2024, 2, 27, 22, 41, 7, tzinfo=UTC), datetime(2026, 12, 30, 3, 59, tzinfo=UTC)]


def test_cronsim_agrees_in_utc() -> None:
    texts = expressions(1, 200, ["L"], ["MON#2", "5L", "FRI#5"])
    for text, start in itertools.product(texts, STARTS):
        rule = parse(f"{text} UTC")
        instant, ours = start, []
        for _ in range(COUNT):
            found = rule.next_after(instant)
            assert found is not None
            ours.append(found)
            instant = found
        assert ours == list(itertools.islice(CronSim(text, start), COUNT)), text


def test_cronsim_agrees_backward_in_utc() -> None:
    for text, start in itertools.product(expressions(2, 100, ["L"], ["MON#2"]), STARTS):
        rule, instant, ours = parse(f"{text} UTC"), start, []
        for _ in range(COUNT):
            found = rule.prev_before(instant)
            assert found is not None
            ours.append(found)
            instant = found
        assert ours == list(itertools.islice(CronSim(text, start, reverse=True), COUNT)), text


def test_croniter_agrees_in_utc() -> None:
    for text, start in itertools.product(expressions(3, 150, ["l"], []), STARTS):
        day, weekday = text.split()[2], text.split()[4]
        if day != "*" and weekday != "*" and (day[0] == "*" or weekday[0] == "*"):
            continue  # croniter joins */2 with OR
        rule, instant, ours = parse(f"{text} UTC"), start, []
        for _ in range(COUNT):
            found = rule.next_after(instant)
            assert found is not None
            ours.append(found)
            instant = found
        theirs = croniter(text, start)
        assert ours == [theirs.get_next(datetime) for _ in range(COUNT)], text


@pytest.mark.parametrize(
    "text", ["0 0 L-3 * *", "0 0 * * L", "0 0 ? * *", "H * * * *", "R * * * *", "0 0 1 1 * * 2030"]
)
def test_what_others_take_and_we_do_not_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(InvalidSchedule):
        parse(text)

"""`testing.simulate`: every occurrence of an app's entries in a span of time."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery

from celery_tzbeat.errors import EntryNotFound, InvalidConfiguration
from celery_tzbeat.schedules import occurrences
from celery_tzbeat.testing import simulate

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
START = datetime(2026, 1, 1, tzinfo=timezone.utc)
END = datetime(2027, 1, 1, tzinfo=timezone.utc)


def an_app(entries: dict[str, Any], **conf: Any) -> Celery:
    app = Celery("proj", set_as_current=False)
    app.conf.update(result_expires=None, **conf)
    app.conf.beat_schedule = {
        name: {"task": "celery.backend_cleanup", "schedule": schedule} for name, schedule in entries.items()
    }
    return app


def test_a_year_is_what_each_schedule_says_in_order() -> None:
    texts = {"b": ("30 2 * * *", BERLIN), "a": ("30 2 * * *", BERLIN), "c": ("0 9 * * mon-fri", NEW_YORK)}
    found = simulate(an_app({name: f"{text} {zone}" for name, (text, zone) in texts.items()}), START, END)
    wanted = {
        (instant, name)
        for name, (text, zone) in texts.items()
        for instant in occurrences(text, zone, after=START, until=END)
    }
    assert [(each.instant, each.entry) for each in found] == sorted(wanted)
    night_of_the_gap = [each for each in found if each.upcoming.note and each.instant.month == 3]
    assert [each.entry for each in night_of_the_gap] == ["a", "b"]


def test_both_ends_count() -> None:
    app = an_app({"each minute": "* * * * * UTC"})
    assert [each.instant for each in simulate(app, START, START + timedelta(minutes=1))] == [
        START,
        START + timedelta(minutes=1),
    ]
    assert simulate(app, START, START - timedelta(seconds=1)) == []


def test_no_store_is_needed_and_a_glob_chooses() -> None:
    app = an_app({"one": "0 0 * * * UTC", "two": "0 0 * * * UTC"}, broker_url="amqp://nowhere")
    assert {each.entry for each in simulate(app, START, END, pattern="t*")} == {"two"}
    with pytest.raises(EntryNotFound, match="did you mean 'two'"):
        simulate(app, START, END, pattern="twoo")


def test_bad_entries_and_naive_instants_are_named() -> None:
    with pytest.raises(InvalidConfiguration, match="61"):
        simulate(an_app({"bad": "61 * * * *"}), START, END)
    with pytest.raises(ValueError, match=r"end is .*: give it a zone"):
        simulate(an_app({}), START, END.replace(tzinfo=None))


def test_an_app_without_entries_sends_nothing() -> None:
    assert simulate(an_app({}), START, END) == []

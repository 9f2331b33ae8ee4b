"""Zones: where they come from, and that our stretches are what zoneinfo says, in each of them."""

from __future__ import annotations

import random
import zoneinfo
from datetime import datetime, timedelta, timezone

import pytest
from changes import changes_of

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.schedules import civil, tzdata_version, zone

UTC = timezone.utc
NAMES = sorted(civil.zone_names())


def test_zones_come_from_the_package_and_one_name_is_one_object() -> None:
    paris = zone("Europe/Paris")
    assert paris.key == "Europe/Paris"
    assert zone(zoneinfo.ZoneInfo("Europe/Paris")) is paris
    assert zone(UTC) is zone("UTC")
    assert tzdata_version()[:2] == "20"


def test_the_systems_zone_files_are_not_looked_at(tmp_path: object) -> None:
    before = zoneinfo.TZPATH
    zoneinfo.reset_tzpath(to=[str(tmp_path)])
    try:
        assert zone("Asia/Tokyo").utcoffset(datetime(2026, 1, 1)) == timedelta(hours=9)
        assert (str(tmp_path),) == zoneinfo.TZPATH
    finally:
        zoneinfo.reset_tzpath(to=before)


@pytest.mark.parametrize("name", ["", "Europe", "Europe/Nowhere", "../etc/passwd", "/etc/localtime", "localtime"])
def test_a_name_that_is_no_zone_is_refused(name: str) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        zone(name)
    assert refused.value.field == "zone"
    assert repr(name) in str(refused.value)


def test_two_changes_are_days_apart_in_every_zone() -> None:
    for name in NAMES:
        changes = changes_of(name, 1, 2040)
        for earlier, later in zip(changes, changes[1:], strict=False):
            assert later.at - earlier.at > timedelta(days=4), name
        for change in changes:
            assert abs(change.after - change.before) <= timedelta(days=1), name


def test_the_stretches_are_what_zoneinfo_says_in_every_zone() -> None:
    draw = random.Random(2026)
    for name in NAMES:
        offsets, own = civil.offsets(name), zone(name)
        moments = [
            datetime(draw.randrange(1850, 2045), 1, 1) + timedelta(seconds=draw.randrange(31_000_000))
            for _ in range(15)
        ]
        moments += [
            change.at.replace(tzinfo=None) + timedelta(seconds=step)
            for change in changes_of(name, 2005, 2006)
            for step in (-1, 0)
        ]
        for moment in moments:
            stretch = offsets.stretch(offsets.index(moment))
            assert stretch is not None
            assert stretch.begin <= moment < stretch.end
            assert stretch.offset == moment.replace(tzinfo=UTC).astimezone(own).utcoffset(), (name, moment)


def test_a_wall_has_no_pass_in_a_gap_and_two_in_a_fold() -> None:
    offsets = civil.offsets("America/New_York")
    assert offsets.passes(datetime(2026, 3, 8, 2, 30)) == []
    assert offsets.gap_end(datetime(2026, 3, 8, 2, 30)) == datetime(2026, 3, 8, 7)
    assert offsets.passes(datetime(2026, 11, 1, 1, 30)) == [datetime(2026, 11, 1, 5, 30), datetime(2026, 11, 1, 6, 30)]
    assert offsets.passes(datetime(2026, 6, 1, 1, 30)) == [datetime(2026, 6, 1, 5, 30)]
    assert offsets.gap_end(datetime(2026, 6, 1, 1, 30)) is None

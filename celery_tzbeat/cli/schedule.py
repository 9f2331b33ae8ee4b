"""What is due: `next`, `list`, `show`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import click

from .output import (
    NoStore,
    WrongUsage,
    answering,
    json_option,
    print_json,
    print_pairs,
    print_table,
    tz_of,
    value_text,
)

if TYPE_CHECKING:
    from celery_tzbeat.api import Crossing, Standing, TzBeat, Upcoming


@click.command(name="next")
@click.argument("words", nargs=-1, required=True, metavar="TEXT|NAME")
@click.option("-n", "count", type=click.IntRange(1, 1000), help="How many; 10, and with --across-dst 3 on each side.")
@click.option("--tz", "zone", metavar="ZONE", help="Where walls are shown, and a text without a zone is read.")
@click.option("--across-dst", is_flag=True, help="Show those around the next change of offset.")
@click.option("--from", "start", metavar="INSTANT", help="From this instant on (ISO; without an offset: in the zone).")
@json_option
@click.pass_obj
@answering
def next_(
    obj: Any,
    words: tuple[str, ...],
    count: int | None,
    zone: str | None,
    across_dst: bool,
    start: str | None,
    as_json: bool,
) -> None:
    """Show the next occurrences of an entry, or of a schedule text.

    NAME is an entry's; what is no entry's name is read as a text: '30 2 * * mon-fri America/New_York', '@every 15m',
    '@daily Europe/Paris'. Shown is what the schedule says; the ledger is not asked.

    \b
    Exit codes: 0 fine, 1 the app's modules cannot be imported, 2 the text cannot be read.
    """
    tz = tz_of(obj)
    text = " ".join(words)
    after = _start(tz, start, text, zone) if start else None
    crossing: Crossing | None = None
    if across_dst:
        crossing = tz.across_change(text, n=count or 3, after=after, zone=zone)
        occurrences = (*crossing.before, *crossing.after)
    else:
        occurrences = tz.next(text, n=count or 10, after=after, zone=zone)
    if as_json:
        change = crossing.to_dict()["change"] if crossing else None
        print_json({"text": text, "occurrences": [each.to_dict() for each in occurrences], "change": change})
        return
    if not occurrences:
        click.echo(f"{text}: no occurrence")
        return
    rows = [_row(each) for each in (crossing.before if crossing else occurrences)]
    if crossing:
        if crossing.change:
            rows.append(_change_row(crossing, occurrences[0].zone))
        rows += [_row(each) for each in crossing.after]
    print_table((f"in {occurrences[0].zone}", "UTC", ""), rows)
    if crossing and crossing.change is None:
        click.echo(f"\n{occurrences[0].zone} changes its offset no more; these are the next occurrences.")


def _start(tz: TzBeat, text: str, schedule: str, zone: str | None) -> datetime:
    """Return just before the instant of ``--from``, which itself counts."""
    from celery_tzbeat.model import MICROSECOND

    return _instant("--from", text, tz.zone_of(schedule, zone), earlier=MICROSECOND)


def _instant(option: str, text: str, zone: ZoneInfo, *, earlier: timedelta) -> datetime:
    from celery_tzbeat.api.timetable import read_instant

    try:
        return read_instant(text, zone) - earlier
    except (ValueError, OverflowError) as exc:
        example = "2026-03-08T00:00 or 2026-03-08T05:00Z"
        raise WrongUsage(
            f"{option} {text!r} is not an ISO date and time of the years 1 to 9999 in UTC, such as {example}"
        ) from exc


def _row(each: Upcoming) -> Sequence[str]:
    from celery_tzbeat.api.timetable import offset_text
    from celery_tzbeat.model import iso

    wall = f"{each.wall:%a} {each.wall.isoformat(' ')} {offset_text(each.offset)}"
    return (wall, iso(each.instant), each.note)


def _change_row(crossing: Crossing, zone: str) -> Sequence[str]:
    from celery_tzbeat.model import iso

    assert crossing.change is not None
    where = "" if crossing.change.zone == zone else f"in {crossing.change.zone}: "
    return ("--- change of offset ---", iso(crossing.change.instant), f"{where}{crossing.change.text}")


@click.command(name="preview")
@click.argument("pattern", default="*", metavar="[NAME|GLOB]")
@click.option("-n", "count", type=click.IntRange(1, 100_000), help="At most so many; 20 without --until.")
@click.option("--tz", "zone", metavar="ZONE", help="Where all walls are shown; else each in its schedule's own zone.")
@click.option("--from", "start", metavar="INSTANT", help="From this instant on (ISO; without an offset: in the zone).")
@click.option("--until", "end", metavar="INSTANT", help="Up to this instant.")
@json_option
@click.pass_obj
@answering
def preview(
    obj: Any, pattern: str, count: int | None, zone: str | None, start: str | None, end: str | None, as_json: bool
) -> None:
    """Show what all entries have to come, in order; of those whose names match a glob.

    Shown is what the schedules say; the ledger is not asked. Instants without an offset are read in the zone of --tz, or
    else the app's.

    \b
    Exit codes: 0 fine, 1 the configuration is wrong, 2 no entry has this name, an instant or a zone cannot be read.
    """
    from celery_tzbeat.model import MICROSECOND, iso
    from celery_tzbeat.schedules import zone as read_zone
    from celery_tzbeat.settings import app_timezone

    tz = tz_of(obj)
    read_in = read_zone(zone or app_timezone(tz.app))
    after = _instant("--from", start, read_in, earlier=MICROSECOND) if start else None
    until = _instant("--until", end, read_in, earlier=timedelta()) if end else None
    found = list(tz.preview(pattern, after=after, until=until, n=count or (None if until else 20), zone=zone))
    if as_json:
        print_json({"occurrences": [each.to_dict() for each in found]})
        return
    if not found:
        click.echo(f"{pattern}: no occurrence")
        return
    rows = [
        (iso(each.instant), each.entry, _row(each.upcoming)[0], each.upcoming.zone, each.upcoming.note)
        for each in found
    ]
    print_table(("UTC", "name", "wall", "zone", ""), rows)


@click.command(name="list")
@click.argument("pattern", default="*", metavar="[NAME|GLOB]")
@json_option
@click.pass_obj
@answering
def list_(obj: Any, pattern: str, as_json: bool) -> None:
    """List the entries: what is due next, and how the last occurrence ended.

    Works without the store: then it says so, and leaves out what is last.

    \b
    Exit codes: 0 fine, 1 the configuration is wrong, 2 no entry has this name.
    """
    from celery_tzbeat.api.findings import NO_ANSWER

    tz = tz_of(obj)
    problem: str | None = None
    try:
        standings = tz.standings(pattern)
    except NO_ANSWER as exc:
        problem = str(exc)
        standings = tz.standings(pattern, ledger=False)
    if as_json:
        print_json({"entries": [standing.to_dict() for standing in standings], "store": problem or "ok"})
        return
    print_table(
        ("name", "task", "schedule", "zone", "next (local)", "next (UTC)", "last", "state"),
        [_standing_row(standing) for standing in standings],
    )
    if problem:
        click.echo(f"\n{problem}; without it nothing is known of what was last.", err=True)


def _standing_row(standing: Standing) -> Sequence[str]:
    from celery_tzbeat.model import iso

    entry, due, last = standing.entry, standing.next_due, standing.last
    return (
        entry.name,
        entry.task,
        entry.schedule.text,
        standing.zone or "-",
        _local(due, standing) if due else "-",
        iso(due) if due else ("over" if standing.over else "never"),
        iso(last.nominal) if last else "-",
        f"paused by {standing.pause.words}" if standing.pause else last.state if last else "-",
    )


def _local(due: datetime, standing: Standing) -> str:
    zone = standing.entry.schedule.zone
    return due.astimezone(zone).isoformat(" ") if zone else "-"


@click.command(name="show")
@click.argument("name")
@json_option
@click.pass_obj
@answering
def show(obj: Any, name: str, as_json: bool) -> None:
    """Show one entry in full. Arguments are shortened, since they may hold secrets.

    \b
    Exit codes: 0 fine, 1 the configuration is wrong, 2 no entry has this name, 3 the store did not answer (what is
    known without it is printed nevertheless).
    """
    from celery_tzbeat.api.findings import NO_ANSWER

    tz = tz_of(obj)
    problem: Exception | None = None
    try:
        standing = tz.standing(name)
    except NO_ANSWER as exc:
        problem = exc
        standing = tz.standing(name, ledger=False)
    upcoming = tz.next(name, n=5)
    if as_json:
        print_json(
            {
                **standing.in_full(),
                "next": [each.to_dict() for each in upcoming],
                "store": str(problem) if problem else "ok",
            }
        )
    else:
        _print_entry(standing, upcoming)
    if problem:
        raise NoStore(str(problem)) from problem


def _print_entry(standing: Standing, upcoming: Sequence[Upcoming]) -> None:
    from celery_tzbeat.model import iso

    full = standing.in_full()
    cursor, last, policy = full["cursor"], full["last"], full["policy"]
    print_pairs(
        [
            ("name", full["name"]),
            ("task", full["task"]),
            ("schedule", full["schedule"]),
            ("in words", full["words"]),
            ("zone", full["zone"] or "none needed"),
            ("args", full["args"]),
            ("kwargs", full["kwargs"]),
            ("options", full["options"]),
            *((f"policy {key}", value_text(value)) for key, value in policy.items()),
            ("cursor", f"{cursor['nominal']} {cursor['mark']}".strip() if cursor else "-"),
            ("last", f"{last['nominal']} {last['state']}, settled {last['at']}" if last else "-"),
            ("paused", f"since {iso(standing.pause.at)} by {standing.pause.words}" if standing.pause else "no"),
        ]
    )
    click.echo("\nnext")
    print_table((f"in {upcoming[0].zone}" if upcoming else "wall", "UTC", ""), [_row(each) for each in upcoming])
    _section(
        "dead letters",
        ("nominal", "reason", "error"),
        ([letter.get(word, "") for word in ("nominal", "reason", "error")] for letter in full["dead_letters"]),
    )
    if full["unreadable_dead_letters"]:
        click.echo(f"\n{full['unreadable_dead_letters']} dead letter(s) of the namespace cannot be read: left out")
    _section(
        "audit",
        ("at", "event", "first", "last", "count", "epoch", "detail"),
        (
            [record[word] or "" for word in ("at", "event", "first", "last", "count", "epoch", "detail")]
            for record in full["audit"]
        ),
    )


def _section(title: str, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    found = list(rows)
    if found:
        click.echo(f"\n{title}")
        print_table(headers, found)

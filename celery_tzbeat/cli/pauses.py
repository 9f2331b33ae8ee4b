"""Entries that are not to be sent for a while: `pause`, `unpause`."""

from __future__ import annotations

from typing import Any

import click

from .output import WrongUsage, answering, json_option, tz_of
from .runs import patience, print_asked, wait_option, why_option


@click.command(name="pause")
@click.argument("name")
@click.option("--note", default="", metavar="TEXT", help="Why, for whoever finds it paused.")
@click.option("--until", metavar="INSTANT", help="Until then (ISO; without an offset: in the app's zone).")
@wait_option
@json_option
@click.pass_obj
@answering
def pause(obj: Any, name: str, note: str, until: str | None, wait: bool, as_json: bool) -> None:
    """Send nothing of an entry until it is unpaused, or until an instant. What is under way goes on.

    The request is kept, and carried out by whoever leads within an hour.

    \b
    Exit codes: 0 asked (--wait: paused), 1 --wait: not paused, or the configuration is wrong, 2 no entry has this name,
    or the instant is past, 3 the store did not answer.
    """
    from celery_tzbeat.api.timetable import read_instant
    from celery_tzbeat.errors import TzBeatError
    from celery_tzbeat.schedules import zone
    from celery_tzbeat.settings import app_timezone

    tz = tz_of(obj)
    try:
        end = read_instant(until, zone(app_timezone(tz.app))) if until else None
    except (ValueError, OverflowError) as exc:
        raise WrongUsage(f"--until {until!r} is not an ISO date and time, such as 2026-03-08T05:00Z") from exc
    try:
        asked = tz.pause(name, note=note, until=end, wait=patience(tz, wait))
    except TzBeatError:
        raise
    except ValueError as exc:
        raise WrongUsage(str(exc)) from exc
    print_asked(asked, as_json, wait)


@click.command(name="unpause")
@click.argument("name")
@click.option(
    "--catch-up", is_flag=True, help="Judge what was not sent meanwhile by the entry's policy, as after an outage."
)
@why_option
@wait_option
@json_option
@click.pass_obj
@answering
def unpause(obj: Any, name: str, catch_up: bool, why: str, wait: bool, as_json: bool) -> None:
    """Let a paused entry go on from now; what was not sent meanwhile is recorded as skipped.

    \b
    Exit codes: 0 asked (--wait: unpaused), 1 --wait: it was not paused, or the configuration is wrong, 2 no entry has this
    name, 3 the store did not answer.
    """
    tz = tz_of(obj)
    print_asked(tz.unpause(name, catch_up=catch_up, why=why, wait=patience(tz, wait)), as_json, wait)

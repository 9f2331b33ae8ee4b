"""Dead letters: `dead list`, `dead show`, `dead replay`, `dead discard`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .output import Wrong, WrongUsage, answering, json_option, print_json, print_pairs, print_table, tz_of
from .runs import patience, print_asked, wait_option, why_option

if TYPE_CHECKING:
    from celery_tzbeat.api import TzBeat

F = TypeVar("F", bound=Callable[..., Any])


@click.group(name="dead")
def dead() -> None:
    """See, replay or discard dead letters: permanent failures, kept with their messages."""


def filters(command: F) -> F:
    """Add the options that choose letters."""
    return _decorated(
        command,
        click.option("--entry", metavar="NAME", help="Of this entry."),
        click.option("--reason", metavar="WORD", help="Died of this: exception, retries, hard_limit, abandoned, ..."),
        click.option("--since", metavar="INSTANT", help="Died at or after this instant (ISO)."),
        click.option("--limit", type=click.IntRange(1), help="At most so many, the oldest first."),
    )


def _decorated(command: F, *decorators: Callable[[F], F]) -> F:
    """Decorate so that the help shows the options in the order given."""
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def _chosen(tz: TzBeat, entry: str | None, reason: str | None, since: str | None, limit: int | None) -> dict[str, Any]:
    from celery_tzbeat.api.timetable import read_instant
    from celery_tzbeat.schedules import zone
    from celery_tzbeat.settings import app_timezone

    try:
        after = read_instant(since, zone(app_timezone(tz.app))) if since else None
    except (ValueError, OverflowError) as exc:
        raise WrongUsage(f"--since {since!r} is not an ISO date and time, such as 2026-03-08T05:00Z") from exc
    return {"entry": entry, "reason": reason, "since": after, "limit": limit}


@dead.command(name="list")
@filters
@json_option
@click.pass_obj
@answering
def list_(obj: Any, entry: str | None, reason: str | None, since: str | None, limit: int | None, as_json: bool) -> None:
    """List the dead letters, the oldest first.

    \b
    Exit codes: 0 fine, 1 the configuration is wrong, 2 a filter cannot be read, 3 the store did not answer.
    """
    from celery_tzbeat.api.operations import letter_dict

    tz = tz_of(obj)
    letters = tz.dead
    found = [letter_dict(letter) for letter in letters.list(**_chosen(tz, entry, reason, since, limit))]
    unreadable = letters.unreadable()
    if as_json:
        print_json({"letters": found, "unreadable": unreadable})
        return
    print_table(
        ("key", "reason", "died", "attempts", "task", "error"),
        [
            (each["key"], each["reason"], each["at"], each["attempts"], each["task"], each["error"][:60])
            for each in found
        ],
    )
    if unreadable:
        click.echo(f"\n{unreadable} dead letter(s) cannot be read: left out", err=True)


@dead.command(name="show")
@click.argument("key")
@json_option
@click.pass_obj
@answering
def show(obj: Any, key: str, as_json: bool) -> None:
    """Show one dead letter: why, where and when, and the traceback.

    With --json the original message, too (base64): it may hold secrets.

    \b
    Exit codes: 0 fine, 1 the letter cannot be read, 2 there is none of this key, 3 the store did not answer.
    """
    from celery_tzbeat.api.operations import letter_dict

    try:
        letter = tz_of(obj).dead.show(key)
    except ValueError as exc:
        raise Wrong(f"the dead letter of {key!r} cannot be read: {exc}") from exc
    if as_json:
        print_json({**letter_dict(letter), **json.loads(letter.to_json())})
        return
    full = letter_dict(letter)
    print_pairs(
        [(name, "-" if value in (None, "") else value) for name, value in full.items() if name != "has_message"]
    )
    print_pairs([("message", f"{len(letter.message)} bytes" if letter.message else "none: replayed by building anew")])
    if letter.traceback:
        click.echo(f"\n{letter.traceback}")


def asking(command: F) -> F:
    """Add what `replay` and `discard` share."""
    return _decorated(
        command,
        click.argument("keys", nargs=-1, metavar="[KEY]..."),
        filters,
        click.option("--dry-run", is_flag=True, help="Show which would be chosen; ask for nothing."),
        click.option("--yes", is_flag=True, help="Do not ask back."),
        why_option,
        wait_option,
        json_option,
    )


@dead.command(name="replay")
@asking
@click.pass_obj
@answering
def replay(obj: Any, /, **options: Any) -> None:
    """Send dead letters again: of these keys, or all that the filters choose.

    Each is a new dispatch under a new task id; the leader sends it, within an hour. Without keys it asks back, unless --yes.

    \b
    Exit codes: 0 asked (--wait: sent), 1 --wait: not sent, 2 there is no letter of this key, 3 the store did not answer.
    """
    _ask(obj, "replay", **options)


@dead.command(name="discard")
@asking
@click.pass_obj
@answering
def discard(obj: Any, /, **options: Any) -> None:
    """Drop dead letters for good: of these keys, or all that the filters choose. Without --yes it asks back.

    \b
    Exit codes: 0 asked (--wait: dropped), 1 --wait: not dropped, 2 there is no letter of this key, 3 the store did
    not answer.
    """
    _ask(obj, "discard", **options)


def _ask(
    obj: Any,
    verb: str,
    *,
    keys: tuple[str, ...],
    entry: str | None,
    reason: str | None,
    since: str | None,
    limit: int | None,
    dry_run: bool,
    yes: bool,
    why: str,
    wait: bool,
    as_json: bool,
) -> None:
    if keys and (entry or reason or since):
        raise WrongUsage("give keys, or filters: not both")
    tz = tz_of(obj)
    ask = getattr(tz.dead, verb)
    chosen = ask(*keys, **_chosen(tz, entry, reason, since, limit), dry_run=True)
    if dry_run or not chosen:
        if as_json:
            print_json({"requests": [each.to_dict() for each in chosen]})
        else:
            click.echo("\n".join(each.key for each in chosen) or "nothing matches")
        return
    if not yes and (verb == "discard" or not keys):
        click.confirm(f"{verb} {len(chosen)} dead letter(s)?", abort=True, err=True)
    asked = ask(*(each.key for each in chosen), why=why, wait=patience(tz, wait))
    print_asked(asked, as_json, wait)

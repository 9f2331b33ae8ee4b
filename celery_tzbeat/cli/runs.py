"""What is under way, and how to stop it: `runs`, `cancel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .output import WRONG, answering, json_option, print_json, print_table, tz_of

if TYPE_CHECKING:
    from datetime import timedelta

    from celery_tzbeat.api import Asked, TzBeat

why_option = click.option("--why", default="", metavar="TEXT", help="The reason, for the audit.")
wait_option = click.option("--wait", is_flag=True, help="Wait for the leader's answer, a lease and 5 s at most.")


def patience(tz: TzBeat, wait: bool) -> timedelta | None:
    """Return for how long to wait for the leader: until another has taken over, were it killed just now."""
    from datetime import timedelta

    return tz.settings().lease + timedelta(seconds=5) if wait else None


def print_asked(asked: Sequence[Asked], as_json: bool, waited: bool) -> None:
    """Print what was asked and answered; exit with 1 where it was waited for and not carried out."""
    if as_json:
        print_json({"requests": [each.to_dict() for each in asked]})
    elif asked:
        answers = [(each.key, each.outcome or ("no answer yet" if waited else "asked")) for each in asked]
        print_table(("key", "answer"), answers)
    else:
        click.echo("nothing matches")
    if waited and not all(each.is_done for each in asked):
        raise click.exceptions.Exit(WRONG)


@click.command(name="runs")
@click.argument("name", default="", metavar="[NAME]")
@json_option
@click.pass_obj
@answering
def runs(obj: Any, name: str, as_json: bool) -> None:
    """List the occurrences of an entry, or of all, that are under way.

    That is those which are tracked: a worker half is alive, or the entry's policy needs it. States: waiting, claimed,
    published, running, abandoned.

    \b
    Exit codes: 0 fine, 1 the configuration is wrong, 3 the store did not answer.
    """
    from celery_tzbeat.api.operations import run_dict

    found = [run_dict(run) for run in tz_of(obj).runs(name)]
    if as_json:
        print_json({"runs": found})
        return
    print_table(
        ("key", "state", "attempt", "starts", "worker", "progress", "until", ""),
        [
            (
                run["key"],
                run["state"],
                run["attempt"],
                run["starts"],
                run["worker"] or "-",
                "-" if run["done"] is None else f"{run['done']} of {run['total'] or '?'}",
                run["deadline"],
                "asked to stop" if run["cancelled"] else "",
            )
            for run in found
        ],
    )


@click.command(name="cancel")
@click.argument("key", metavar="KEY|NAME")
@why_option
@wait_option
@json_option
@click.pass_obj
@answering
def cancel(obj: Any, key: str, why: str, wait: bool, as_json: bool) -> None:
    """Withdraw what does not run yet, and ask what runs to stop: one occurrence, or all that is open of an entry.

    The request is kept, and carried out by whoever leads within an hour. A task that runs stops when it heeds that, or
    where its pool can end it.

    \b
    Exit codes: 0 asked (--wait: carried out), 1 --wait: not carried out, 2 nothing of it is open, 3 the store did
    not answer.
    """
    tz = tz_of(obj)
    print_asked(tz.cancel(key, why=why, wait=patience(tz, wait)), as_json, wait)

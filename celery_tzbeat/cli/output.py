"""How commands answer: as tables or JSON, and errors as one message with the documented exit code."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from celery_tzbeat.api import Finding, TzBeat

F = TypeVar("F", bound=Callable[..., Any])

#: The exit code of a command that found something wrong.
WRONG = 1

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON; instants are UTC and end in Z.")


class Wrong(click.ClickException):
    """Something is wrong that the user asked about, or that stands in the way."""

    exit_code = WRONG


class WrongUsage(click.ClickException):
    """A name that is unknown, or a text that cannot be read."""

    exit_code = 2


class NoStore(click.ClickException):
    """The store did not answer."""

    exit_code = 3


def tz_of(obj: Any) -> TzBeat:
    """Return the face of the app that celery's own command line has found (``-A``)."""
    from celery_tzbeat.api import TzBeat

    return TzBeat(obj.app, set_scheduler=False)


def answering(command: F) -> F:
    """Turn the errors that a user can do something about into a message and an exit code; others are our faults."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click's own affairs; the last one is a reader that has seen enough
        except Exception as exc:
            failure = _failure(exc)
            if failure is None:
                raise
            raise failure from exc

    return guarded  # type: ignore[return-value]


def _failure(exc: Exception) -> click.ClickException | None:
    from celery_tzbeat.api.findings import NO_ANSWER
    from celery_tzbeat.errors import (
        EntryNotFound,
        InvalidConfiguration,
        InvalidSchedule,
        OccurrenceNotFound,
        StoreUnavailable,
        StoreUnreadable,
    )

    match exc:
        case InvalidSchedule():
            return WrongUsage(f"{exc}\nfield: {exc.field}, text: {exc.text!r}")
        case EntryNotFound() | OccurrenceNotFound():
            return WrongUsage(str(exc))
        case InvalidConfiguration():
            return Wrong(str(exc))
        case StoreUnavailable() | StoreUnreadable():
            return NoStore(str(exc))
    if isinstance(exc, NO_ANSWER):
        return NoStore(f"the store refuses: {type(exc).__name__}: {exc}")
    return None


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table, nothing but its heads where there are no rows."""
    from tabulate import tabulate

    click.echo(tabulate(list(rows), headers=list(headers), tablefmt="simple", disable_numparse=True))


def print_pairs(pairs: Iterable[tuple[str, Any]]) -> None:
    """Print names and values, one a line."""
    from tabulate import tabulate

    click.echo(tabulate(list(pairs), tablefmt="plain", disable_numparse=True))


def print_findings(obj: Any, findings: Sequence[Finding]) -> None:
    """Print findings with their hints; colours only on a terminal, and not with ``--no-color``."""
    for finding in findings:
        colour = "red" if finding.severity == "error" else "yellow"
        word = obj.style(f"{finding.severity:<8}", fg=colour)
        obj.echo(f"{word} {finding.id}  {finding.text}")
        if finding.hint:
            obj.echo(f"         hint: {finding.hint}")


def value_text(value: Any) -> str:
    """Return a value for people; floats are durations in seconds."""
    return f"{value:g} s" if isinstance(value, float) else str(value)

"""What is wrong: `check` before a beat starts, `health` while beats run."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from .output import WRONG, answering, json_option, print_findings, print_json, print_pairs, tz_of, value_text

if TYPE_CHECKING:
    from celery_tzbeat.api import TzBeat


@click.command(name="check")
@click.option("--strict", is_flag=True, help="Fail on warnings, too.")
@json_option
@click.pass_obj
@answering
def check(obj: Any, strict: bool, as_json: bool) -> None:
    """Find what is wrong or doubtful before a beat starts: settings, entries, the store and its server, the broker.

    Says by which path a beat would send, too: 'same server' where the broker is the store, 'claims' elsewhere.

    Errors are what stops a beat, or keeps it from sending until somebody mends it. A store or broker that does not
    answer is a warning: a beat waits for it.

    \b
    Exit codes: 0 no errors (--strict: nothing at all), 1 otherwise.
    """
    tz = tz_of(obj)
    findings = tz.check()
    errors = sum(finding.severity == "error" for finding in findings)
    ok = not (findings if strict else errors)
    settings = _settings(tz)
    route = tz.route()
    if as_json:
        shown = [finding.to_dict() for finding in findings]
        print_json({"ok": ok, "settings": settings, "path": route.to_dict(), "findings": shown})
    else:
        print_pairs((name, _value_text(value)) for name, value in settings.items())
        click.echo(f"\nsends by the path: {route.name or 'not known'} ({route.why})\n")
        print_findings(obj, findings)
        obj.echo(f"{errors} error(s), {len(findings) - errors} warning(s)")
    if not ok:
        raise click.exceptions.Exit(WRONG)


def _settings(tz: TzBeat) -> dict[str, Any]:
    """Return the settings in force by name, durations in seconds; empty where they cannot be used."""
    from celery_tzbeat.api.standing import policy_dict
    from celery_tzbeat.errors import InvalidConfiguration
    from celery_tzbeat.store.client import hide_password

    try:
        settings = tz.settings()
    except InvalidConfiguration:
        return {}
    found: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name in ("url", "lock"):
            value = hide_password(value)
        elif field.name == "policy":
            value = policy_dict(value)
        elif isinstance(value, timedelta):
            value = value.total_seconds()
        found[f"tzbeat_{field.name}"] = value
    return found


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value_text(part)}" for name, part in value.items())
    return value_text(value)


@click.command(name="health")
@json_option
@click.pass_obj
@answering
def health(obj: Any, as_json: bool) -> None:
    """Say whether a beat leads and is on time, and whether the clocks agree.

    \b
    Exit codes: 0 healthy; 1 not: nobody leads, the leader does not tick, something is due or claimed and was not sent,
    a clock (this host's or a beat's) is off by more than tzbeat_max_skew, the store did not answer, or the
    configuration is wrong.
    """
    found = tz_of(obj).health()
    if as_json:
        print_json(found.to_dict())
    else:
        if found.leader is not None:
            click.echo(f"{found.leader.holder} leads with epoch {found.leader.epoch}")
        print_findings(obj, found.findings)
        obj.echo(obj.style("healthy", fg="green") if found.ok else obj.style("not healthy", fg="red"))
    if not found.ok:
        raise click.exceptions.Exit(WRONG)

"""Who leads: `leader`."""

from __future__ import annotations

import json
from typing import Any

import click

from .output import WRONG, Wrong, answering, json_option, print_json, print_pairs, print_table, tz_of


@click.command(name="leader")
@click.option("--step-down", is_flag=True, help="Ask the leader to resign, and wait until it leads no longer.")
@json_option
@click.pass_obj
@answering
def leader(obj: Any, step_down: bool, as_json: bool) -> None:
    """Say which beat leads, and which stand by.

    The beat that stepped down stands by for one lease; where no other is alive, it leads again then.

    \b
    Exit codes: 0 a beat leads (--step-down: the one that led no longer does), 1 nobody leads (--step-down: nobody
    led, or it leads still), 3 the store did not answer.
    """
    from celery_tzbeat.model import iso

    tz = tz_of(obj)
    led = tz.leader() if step_down else None
    if step_down:
        if led is None:
            raise Wrong("nobody leads: there is nobody to step down")
        if not tz.step_down():
            raise Wrong(f"{led.holder} still leads with epoch {led.epoch}; it may hang: look at its log")
    present, beats = tz.leader(), tz.beats()
    if as_json:
        print_json(
            {
                "holder": present.holder if present else None,
                "epoch": present.epoch if present else None,
                "remaining": present.remaining.total_seconds() if present else None,
                "since": iso(present.since) if present else None,
                "beats": [json.loads(beat.to_json()) for beat in beats],
            }
        )
    else:
        if led is not None:
            click.echo(f"{led.holder} (epoch {led.epoch}) leads no longer\n")
        if present is None:
            click.echo("nobody leads")
        else:
            print_pairs(
                [
                    ("leader", present.holder),
                    ("epoch", present.epoch),
                    ("remaining", f"{present.remaining.total_seconds():.1f} s"),
                    ("since", iso(present.since)),
                ]
            )
        if beats:
            click.echo("")
            print_table(
                ("beat", "role", "release", "entries", "path", "last tick", "clock", "why"),
                [
                    (
                        beat.beat,
                        # a beat that ended keeps the role it had when it said so last: the lease knows better
                        "leader" if present is not None and beat.beat == present.holder else "standby",
                        beat.release or "-",
                        beat.entries,
                        beat.path or "-",
                        iso(beat.last_tick),
                        f"{beat.skew:+.3f} s",
                        beat.why,
                    )
                    for beat in beats
                ],
            )
    if present is None and not step_down:
        raise click.exceptions.Exit(WRONG)

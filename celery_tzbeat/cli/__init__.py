"""``celery -A proj tzbeat …``: thin faces over `api.TzBeat`.

Every `celery` call imports this package, so it imports click alone; what a command needs it imports when it runs.
"""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import handle_preload_options
from click_didyoumean import DYMGroup  # type: ignore[import-untyped]

from .checks import check, health
from .dead import dead
from .operate import leader
from .pauses import pause, unpause
from .runs import cancel, runs
from .schedule import list_, next_, preview, show


@click.group(name="tzbeat", cls=DYMGroup)
@click.pass_context
@handle_preload_options
def tzbeat(ctx: click.Context, **_preload: Any) -> None:
    """See what beat will do, and how it does.

    \b
    Exit codes of all commands:
      0  fine
      1  something is wrong: configuration, health, nobody leads
      2  wrong usage: an unknown name, a schedule text that cannot be read
      3  the store did not answer
    """


for _command in (check, list_, show, next_, preview, pause, unpause, runs, cancel, dead, leader, health):
    tzbeat.add_command(_command)

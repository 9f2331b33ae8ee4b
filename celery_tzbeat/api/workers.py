"""What the entries' policies need of the workers that are alive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from celery_tzbeat.deliveries import WorkerPresence
from celery_tzbeat.model import Entry

from .findings import Finding, listed, warning

#: The pools that can end a task from outside. Elsewhere a task has to look at `run.cancelled` and `run.remaining`.
ENDS_TASKS = frozenset({"prefork", "processes"})


def of_workers(entries: Mapping[str, Entry], workers: Sequence[WorkerPresence]) -> Iterator[Finding]:
    """Return which policies nobody keeps, by the worker halves that are alive now."""
    followed = sorted(name for name, entry in entries.items() if entry.policy.needs_tracking)
    if followed and not workers:
        yield warning(
            "W213",
            f"no worker half is alive, and the policy (overlap, delivery) needs one: {listed(followed)}. Nothing tells when "
            "their runs end: each waits for start_within of the one before",
            "make TzBeat(app) where the workers' app is made, and start the workers",
        )
    limited = sorted(name for name, entry in entries.items() if entry.policy.timeout is not None)
    powerless = sorted(f"{each.node} ({each.pool})" for each in workers if each.pool not in ENDS_TASKS)
    if limited and powerless:
        yield warning(
            "W214",
            f"a timeout is the task's own affair in these workers' pools: {listed(powerless)}; it is set for "
            f"{listed(limited)}",
            "let the task look at run.cancelled, or use the prefork pool",
        )

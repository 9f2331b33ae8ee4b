"""Redis restarted with its data, across starts, middles and ends of runs; a beat leads and sweeps meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

from gated import Gated

from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.server import LocalServer

if TYPE_CHECKING:
    from conftest import Project

SECOND = timedelta(seconds=1)


def test_a_restart_of_the_store_starts_nothing_twice_and_abandons_nothing_that_lives(
    project: Project, make_server: Callable[..., LocalServer]
) -> None:
    ledger = make_server(appendonly=True)
    gated = Gated(project, store=ledger.url)
    project.start_beat().wait_for_log("leads with epoch", 60)
    gated.start_worker("one", pool="threads", concurrency=10)
    gated.start_worker("two", pool="threads", concurrency=10)
    keys = [f"k{n}" for n in range(40)]
    dice = random.Random(20261130)
    for key in keys[:15]:
        gated.send("late_work", key, dice.uniform(1, 12), run_lease=3 * SECOND)
    wait_until(lambda: len(gated.said(what="start")) >= 10, 60, "runs to begin")
    ledger.kill()
    for key in keys[15:]:
        gated.send("late_work", key, dice.uniform(0.1, 3), run_lease=3 * SECOND)
    ends = len(gated.said(what="end"))
    wait_until(lambda: len(gated.said(what="end")) >= ends + 5, 60, "runs to end without the store")
    ledger.start()
    for key in keys:
        gated.wait_for_mark(key, "d", 120)
    starts = [line["entry"] for line in gated.said(what="start")]
    assert sorted(starts) == sorted(keys)
    with closing(gated.store()) as store:
        events = {record.event for record in store.audit(count=10_000)}
    assert not events & {"abandoned", "overlap"}

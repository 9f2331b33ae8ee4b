"""Beats, workers and the server are down for three days: their clocks are moved, the data of the server are kept."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest
from evidence import NAMESPACE, connected, environment, faked_clock, ledger, queued, refusals
from gated import Gated
from hands import HandWorker

from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.server import LocalServer

if TYPE_CHECKING:
    from conftest import Project

DAY = 86_400
SOON = 60

#: Each due once. "running" and "early" are in the middle when all goes down, and may run again, or not, as their tasks
#: acknowledge. "unstarted" goes to a queue of its own, which nobody reads before the three days.
BODY = """
from celery_tzbeat import at

due = at({due!r})
app.conf.beat_schedule = {{
    "done": {{"task": "proj.late_work", "schedule": due}},
    "unstarted": {{"task": "proj.stubborn", "schedule": due, "args": [0.0], "options": {{"queue": "later"}}}},
    "running": {{"task": "proj.late_work", "schedule": due, "args": [0.0, 600], "policy": {{"run_lease": 2}}}},
    "early": {{"task": "proj.stubborn", "schedule": due, "args": [0.0, 600], "policy": {{"run_lease": 2}}}},
}}
"""


@pytest.mark.parametrize("retention", [7 * DAY, DAY], ids=["7 days", "the default of 24 h"])
def test_after_three_days_what_is_unsettled_runs_and_what_is_done_runs_again_only_beyond_the_retention(
    make_project: Callable[[str], Project], make_server: Callable[..., LocalServer], retention: int
) -> None:
    server = make_server(appendonly=True)
    project = make_project(server.url)
    due = datetime.now(timezone.utc) + timedelta(seconds=12)
    conf = {"tzbeat_namespace": NAMESPACE, "result_expires": None}
    if retention != DAY:
        conf["tzbeat_retention"] = retention
    gated = Gated(project, body=BODY.format(due=due.isoformat()), **conf)
    hand = HandWorker(server.url)
    hand.attend()  # from then on beats track what they send
    hand.close()
    project.start_beat()
    wait_until(lambda: len(queued(server.url)) == 3 and queued(server.url, "later"), SOON, "all to be sent")
    with connected(server.url) as client:
        (copy,) = (text for text in client.lrange("celery", 0, -1) if b'"entry": "done"' in text)
    gated.start_worker("before", concurrency=3, args=["-Q", "celery"])
    gated.wait_for("done", "end")
    gated.wait_for("running", "start")
    gated.wait_for("early", "start")

    def states() -> dict[str, str]:
        with ledger(server.url) as store:
            return {run.entry: run.state for run in store.runs()}

    unsettled = {"unstarted": "published", "running": "running", "early": "running"}
    wait_until(lambda: states() == unsettled, SOON, "the end to be recorded")
    project.kill_all()
    server.kill()

    later = faked_clock(f"+{3 * DAY}")
    with environment(**later):
        server.start()
    with connected(server.url) as client:
        client.lpush("celery", copy)
    project.start_beat(env=later)
    worker = gated.start_worker("after", env=later, args=["-Q", "celery,later"])
    gated.wait_for("unstarted", "end", SOON)
    gated.wait_for("running", "end", SOON)
    if retention > 3 * DAY:
        wait_until(lambda: refusals(worker, "done"), SOON, "the gate to refuse the copy")
        assert refusals(worker, "done") == ["settled (done)"]
    else:
        gated.wait_for("done", "end", SOON, count=2)
    wait_until(lambda: states() == {}, SOON, "nothing to be left")
    starts = {name: len(gated.said(name, "start")) for name in ("done", "unstarted", "running", "early")}
    assert starts == {"done": 1 if retention > 3 * DAY else 2, "unstarted": 1, "running": 2, "early": 1}
    assert gated.letters()["early"].reason == "abandoned"
    assert all(line["at"] > due.timestamp() + 3 * DAY for line in gated.said("unstarted"))

"""Paused entries with real beats: within a second, across a killed leader, asked for while no beat lives."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timedelta, timezone
from typing import Any

from evidence import audit, connected, nominals, presence

from celery_tzbeat.testing.processes import wait_until

ENTRIES = """
app.conf.beat_schedule = {
    "pulse": {"task": "proj.record", "schedule": 1},
    "other": {"task": "proj.record", "schedule": 1},
}
"""


def tzbeat(project: Any, *args: str) -> Any:
    """Run a command of ours in the project's directory; return its JSON."""
    command = project.start(sys.executable, "-m", "celery", "-A", "proj", "tzbeat", *args, "--json")
    assert command.wait(60) == 0, command.log
    return json.loads(command.log)


def test_a_paused_entry_stays_so_when_its_leader_is_killed_and_goes_on_when_it_is_unpaused(project: Any) -> None:
    project.write(ENTRIES)
    beats = [project.start_beat() for _ in range(2)]
    wait_until(lambda: all(presence(project.url, beat) for beat in beats), 60, "both beats to take part")
    wait_until(lambda: len(nominals(project.url, "pulse")) >= 2, 30, "pulses")

    assert tzbeat(project, "pause", "pulse", "--note", "stocktaking", "--wait")["requests"][0]["outcome"] == "paused"
    paused_at = datetime.now(timezone.utc)
    (row,) = tzbeat(project, "list", "pulse")["entries"]
    assert row["paused"]["note"] == "stocktaking"
    others = len(nominals(project.url, "other"))
    leader = next(beat for beat in beats if beat.pid == leading(project))
    leader.kill()
    wait_until(lambda: len(nominals(project.url, "other")) >= others + 8, 40, "eight others, by the second beat")
    assert max(nominals(project.url, "pulse")) <= paused_at + timedelta(seconds=1)

    assert tzbeat(project, "unpause", "pulse", "--wait")["requests"][0]["outcome"] == "unpaused"
    before = len(nominals(project.url, "pulse"))
    wait_until(lambda: len(nominals(project.url, "pulse")) >= before + 2, 20, "pulses again")
    found = nominals(project.url, "pulse")
    assert len(found) == len(set(found))
    (skipped,) = audit(project.url, "skipped")
    assert (skipped.entry, skipped.detail) == ("pulse", "paused")
    sent_or_skipped = len(found) + skipped.count
    assert sent_or_skipped == (max(found) - min(found)).total_seconds() + 1, "each second is sent, or in the row"


def test_what_is_asked_while_no_beat_lives_is_done_by_the_next_leader(project: Any) -> None:
    project.write(ENTRIES)
    beat = project.start_beat()
    wait_until(lambda: len(nominals(project.url, "pulse")) >= 1, 60, "a pulse")
    beat.terminate()
    assert beat.wait(20) == 0
    sent = len(nominals(project.url, "pulse"))
    until = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(seconds=12)
    assert tzbeat(project, "pause", "pulse", "--until", until.isoformat())["requests"][0]["outcome"] is None
    project.start_beat()
    wait_until(lambda: len(nominals(project.url, "pulse")) >= sent + 2, 60, "pulses after the pause")
    assert min(nominals(project.url, "pulse")[sent:]) > until
    assert time.time() >= until.timestamp()
    assert len(audit(project.url, "unpaused")) == 1


def leading(project: Any) -> int:
    with connected(project.url) as client:
        holder = client.hget("tzbeat:{proj/0}:leader", "holder")
    return int(holder.split(b":")[-2])

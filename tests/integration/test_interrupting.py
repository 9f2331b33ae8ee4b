"""Each cell of the table of docs/reference/tasks.md, "Interrupting": what ends a run in which pool, and what does not.

One worker a pool goes through all rows. A pool that cannot do a thing lets the body go on to its end, and `check` says so.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gated import Gated

from celery_tzbeat.testing.processes import wait_until

if TYPE_CHECKING:
    from conftest import Project

WAIT = timedelta(seconds=30)
DOCS = Path(__file__).parents[2] / "docs"

BODY = '''
import ctypes, signal
from celery.exceptions import SoftTimeLimitExceeded
from celery_tzbeat.errors import Cancelled


@app.task(bind=True)
def looks(self, seconds):
    """Look between two items whether to stop."""
    say(self, "start")
    try:
        for _ in current_run().each(range(int(seconds * 20))):
            time.sleep(0.05)
    except (SoftTimeLimitExceeded, Cancelled) as exc:
        say(self, "stop", why=type(exc).__name__)
        raise
    say(self, "end")


@app.task(bind=True)
def sleeps(self, seconds, goes_on=False):
    """Never look; `goes_on` swallows what is raised, too."""
    say(self, "start")
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            time.sleep(max(0.0, ends - time.monotonic()))
        except SoftTimeLimitExceeded as exc:
            say(self, "stop", why=type(exc).__name__)
            if not goes_on:
                raise
    say(self, "end")


@app.task(bind=True)
def in_c(self, seconds):
    """One long call into C, which keeps the GIL and which no signal ends."""
    say(self, "start")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ctypes.PyDLL(None).sleep(seconds)
    say(self, "end")
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
'''


@dataclass(frozen=True)
class Column:
    """What the page says of one pool."""

    pool: str
    raises: bool  # `timeout` raises in the body by itself
    kills: bool  # `kill_after` kills a run that yields
    kills_c: bool  # a body in one long call into C is killed


COLUMNS = [
    Column("prefork", raises=True, kills=True, kills_c=True),
    Column("threads", raises=False, kills=False, kills_c=False),
    Column("gevent", raises=False, kills=True, kills_c=False),
    Column("solo", raises=False, kills=False, kills_c=False),
]


class Bench(Gated):
    """A worker, a beat that carries out what operators ask, and limits as a beat makes them of a policy."""

    def limited(self, task: str, entry: str, *args: Any, timeout: float, kill_after: float) -> None:
        """Send a run with a policy's limits (test_dispatch has that they are these)."""
        spans = {"timeout": timedelta(seconds=timeout), "kill_after": timedelta(seconds=kill_after)}
        limits = {"soft_time_limit": timeout, "time_limit": timeout + kill_after}
        self.send(task, entry, *args, options=limits, **spans)

    def begun(self, task: str, entry: str, *args: Any, **policy: Any) -> None:
        self.send(task, entry, *args, run_lease=timedelta(seconds=1.5), **policy)
        self.wait_for(entry, "start")
        self.wait_for_state(entry, "running")

    def words(self, entry: str) -> list[str]:
        return [line["what"] for line in self.said(entry)]


@pytest.mark.parametrize("column", COLUMNS, ids=[column.pool for column in COLUMNS])
def test_what_ends_a_run_in_this_pool(project: Project, column: Column) -> None:
    bench = Bench(project, body=BODY)
    project.start_beat()
    worker = bench.start_worker(pool=column.pool, concurrency=4)
    tz = bench.tz(beat_schedule={"limited": {"task": "proj.looks", "schedule": 60.0, "policy": {"timeout": 5}}})
    with closing(bench.store()) as store:
        wait_until(store.workers, 30, "the worker half to be seen")
    assert ("tzbeat.W214" in {finding.id for finding in tz.check()}) is not column.raises

    # `timeout` is seen by `run.each`; in prefork the signal may be faster than the look.
    bench.limited("looks", "seen", 20, timeout=0.5, kill_after=20)
    # `timeout` raises in the body by itself.
    bench.limited("sleeps", "raised", 2, timeout=0.5, kill_after=20)
    # `kill_after` kills a run: the hard limit.
    bench.limited("sleeps", "limited", 2, True, timeout=0.5, kill_after=0.5)
    bench.wait_for_mark("seen", "x")
    bench.wait_for_mark("raised", "x" if column.raises else "d")
    bench.wait_for_mark("limited", "x" if column.kills else "d")
    letters = bench.letters()
    assert bench.words("seen") == ["start", "stop"]
    assert letters["seen"].reason == "exception"
    assert "SoftTimeLimitExceeded" in letters["seen"].error
    assert bench.words("raised") == ["start", "stop" if column.raises else "end"]
    assert ("end" in bench.words("limited")) is not column.kills
    assert ("stop" in bench.words("limited")) is column.raises
    assert {name: letter.reason for name, letter in letters.items() if name == "limited"} == (
        {"limited": "hard_limit"} if column.kills else {}
    )

    # `run.each` sees a cancel; a body that does not look is killed `kill_after` later, or ends as it ends.
    bench.begun("looks", "asked", 60)
    assert tz.cancel("asked", wait=WAIT)[0].outcome == "asked to stop"
    bench.wait_for_mark("asked", "r")
    assert bench.said("asked", "stop")[0]["why"] == "Cancelled"
    bench.begun("sleeps", "deaf", 5, kill_after=timedelta(seconds=0.5))
    assert tz.cancel("deaf", wait=WAIT)[0].outcome == "asked to stop"
    # What is written of a greenlet that was killed: test_a_greenlet_that_is_killed_is_revoked.
    marks = {"prefork": "r", "gevent": "rd"}.get(column.pool, "d")
    wait_until(lambda: (mark := bench.mark("deaf")) and mark in marks, 30, "its end to be written")
    assert bench.words("deaf") == (["start"] if column.kills else ["start", "end"])

    # A body in one long call into C.
    bench.limited("in_c", "c", 3 if not column.kills_c else 60, timeout=0.5, kill_after=0.5)
    if column.kills_c:
        bench.wait_for_mark("c", "x")
        assert bench.letters()["c"].reason == "hard_limit"
        assert bench.words("c") == ["start"]
    else:
        bench.wait_for("c", "end")
        wait_until(lambda: bench.mark("c"), 30, "the end of it to be written")

    # The worker lives through all that; `run.each` sees its shutdown.
    bench.begun("looks", "last", 60)
    worker.terminate()
    assert bench.wait_for("last", "stop")[0]["why"] == "Cancelled"
    worker.wait(30)
    assert bench.record("last")["state"] == "published"


def test_a_greenlet_that_is_killed_is_revoked(project: Project) -> None:
    bench = Bench(project, body=BODY)
    project.start_beat()
    bench.start_worker(pool="gevent", concurrency=4)
    bench.begun("sleeps", "deaf", 60, kill_after=timedelta(seconds=0.5))
    bench.tz().cancel("deaf")
    wait_until(lambda: bench.mark("deaf"), 30, "its end to be written")
    assert bench.words("deaf") == ["start"]
    assert bench.mark("deaf") == "r"


def test_the_columns_are_those_of_the_page() -> None:
    section = (DOCS / "reference" / "tasks.md").read_text().split("## Interrupting")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    head, table = rows[0], {row[0].replace("`", ""): row for row in rows[2:]}
    for column in COLUMNS:
        (place,) = (place for place, name in enumerate(head) if column.pool in name.split(", "))
        said = {name: row[place] for name, row in table.items()}
        assert said["run.cancelled, run.each see a cancel"] == said["they see a shutdown"] == "yes"
        assert said["timeout is seen by run.each and raise_if_cancelled"] == "yes"
        assert (said["timeout raises in the body by itself"] == "yes") is column.raises
        assert (said["kill_after kills a run"] != "no") is column.kills
        assert (said["a body in one long call into C"] != "neither") is column.kills_c
    assert len(table) == 6

"""What goes wrong beside a task on a real worker: its result is unchanged, and there are a log line and a counter for it.

A checkpoint of 10 MB, a frozen store and a token lost to a checkpoint are in test_tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from gated import Gated

from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.server import LocalServer

if TYPE_CHECKING:
    from conftest import Project

BODY = """
from celery_tzbeat.worker import faults
from celery_tzbeat.worker.install import WorkerHalf


@app.task
def tally():
    \"\"\"What was counted in this process, which is MAIN in threads.\"\"\"
    return {**WorkerHalf.current.counts, **faults.counts}


@app.task(bind=True)
def goes_on(self, seconds=0.0, until=""):
    say(self, "start")
    time.sleep(seconds)
    while until and not os.path.exists(f"{until} {current_run().attempt}"):
        time.sleep(0.02)
    say(self, "end")
    return self.request.hostname


@app.task(bind=True, max_retries="3")
def mistaken(self):
    \"\"\"Its limit is no number, as only who notes its end finds.\"\"\"
    raise ZeroDivisionError("its own")


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@app.task
def speechless():
    raise Unspeakable()
"""


class Bench(Gated):
    def start(self, name: str) -> Any:
        return self.start_worker(name, pool="threads", concurrency=4, args=("-Q", f"celery,{name}"))

    def tally(self, worker: str) -> dict[str, int]:
        return dict(self.app.send_task("proj.tally", queue=worker).get(timeout=30))


def test_a_run_whose_token_was_lost_ends_as_it_would_and_its_end_does_not_count(project: Project) -> None:
    bench = Bench(project, body=BODY)
    project.start_beat().wait_for_log("leads with epoch", 30)
    one = bench.start("one")
    enough = project.directory / "enough for attempt"
    result = bench.send("goes_on", "k", 0.0, str(enough), run_lease=timedelta(seconds=1.5), on_abandoned="redispatch")
    bench.wait_for("k", "start")
    one.freeze()
    two = bench.start("two")
    bench.wait_for("k", "start", count=2)
    one.thaw()
    one.wait_for_log("was settled, or given to another worker, while it runs here", 30)
    Path(f"{enough} 1").touch()
    assert result.get(timeout=30).startswith("one")
    one.wait_for_log("ended as done, but it was given to another meanwhile", 30)
    counted = bench.tally("one")
    assert (counted["lost"], counted["ends_refused"]) == (1, 1)
    assert bench.record("k")["state"] == "running"
    Path(f"{enough} 2").touch()
    bench.wait_for_mark("k", "d")
    assert [(line["worker"][:3], line["attempt"]) for line in bench.said("k", "end")] == [("one", 1), ("two", 2)]
    assert "given to another" not in two.log


def test_a_hook_that_raises_changes_nothing_of_the_result(project: Project) -> None:
    bench = Bench(project, body=BODY)
    worker = bench.start("one")
    bench.send("mistaken", "end")
    with closing(redis.Redis.from_url(project.url)) as backend:
        stored = json.loads(wait_until(lambda: backend.get("celery-task-meta-id-end"), 30, "its result"))
    assert (stored["status"], stored["result"]["exc_type"]) == ("FAILURE", "ZeroDivisionError")
    assert stored["result"]["exc_message"] == ["its own"]
    worker.wait_for_log(f"how {bench.ticket('end').key} ended could not be noted", 30)
    header = {**bench.ticket("gate").to_header(), "epoch": "first"}
    options = {"queue": "one", "headers": {"meta": {"tzbeat": header}}}
    assert bench.app.send_task("proj.goes_on", **options).get(timeout=30).startswith("one")
    worker.wait_for_log("runs without the gate", 30)
    counted = bench.tally("one")
    assert counted["errors"] >= 1
    assert counted["unreadable"] == 1


def test_a_failure_whose_text_cannot_be_had_is_a_dead_letter_as_any_other(project: Project) -> None:
    bench = Bench(project, body=BODY)
    worker = bench.start("one")
    bench.send("speechless", "k")
    worker.wait_for_log("raised unexpected: Unspeakable()", 30)
    bench.wait_for_mark("k", "x", 5)
    assert bench.letters()["k"].reason == "exception"


def test_a_store_that_does_not_answer_changes_nothing_of_the_result(
    project: Project, make_server: Callable[..., LocalServer]
) -> None:
    ledger = make_server()
    bench = Bench(project, store=ledger.url, body=BODY)
    worker = bench.start("one")
    bench.send("goes_on", "before").get(timeout=30)
    ledger.freeze()
    assert bench.send("goes_on", "k", 1.0).get(timeout=30).startswith("one")
    worker.wait_for_log("the store does not answer the gate", 30)
    ledger.thaw()
    bench.wait_for_mark("k", "d")
    worker.wait_for_log("the store answers the heartbeat again", 30)
    counted = bench.tally("one")
    assert counted["started_blind"] == 1
    assert counted["store_failed"] >= 2

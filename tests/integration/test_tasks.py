"""What a task can do about its run, on real workers: resume, stop, retry, give up, be sent twice."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
import redis
from celery import Celery
from gated import GIVES_BACK, Gated
from on_brokers import FAILS, play_retries

from celery_tzbeat import idempotent
from celery_tzbeat.deliveries import DeadLetter
from celery_tzbeat.model import iso
from celery_tzbeat.store.keys import Keys
from celery_tzbeat.testing.processes import Process, wait_until
from celery_tzbeat.testing.server import LocalServer

if TYPE_CHECKING:
    from conftest import Project

NAMESPACE = "n"
PATIENCE = 90.0

BODY = '''
import time
from celery_tzbeat import Permanent, TzBeat, current_run


tz = TzBeat(app)


def say(what):
    """Append one line with one write."""
    run = current_run()
    line = json.dumps({{"what": what, "key": run.key, "attempt": run.attempt, "at": time.time()}}) + "\\n"
    file = os.open({said!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


@app.task(acks_late={acks_late!r})
def walk(items, seconds):
    for item in current_run().each(range(items)):
        say(item)
        time.sleep(seconds)
    return items


@app.task
def fails(kind):
    say("start")
    raise {{"os": OSError, "value": ValueError, "permanent": Permanent}}[kind]("no use")


@app.task
def too_much():
    kept = current_run().checkpoint.save("x" * 10_000_000)
    say(f"kept {{kept}}")
    return "worked"
'''


class Bench:
    """A project with the worker half, a broker and a ledger, and what its tasks say."""

    def __init__(self, project: Project, *, store: str = "", acks_late: bool = True, **conf: Any) -> None:
        self.project = project
        self.store = store or project.url
        self._said = project.directory / "said.jsonl"
        self._conf = {
            "tzbeat_namespace": NAMESPACE,
            "tzbeat_url": self.store,
            "result_backend": project.url,
            "broker_connection_retry_on_startup": True,
            **conf,
        }
        self._body = BODY.format(said=str(self._said), acks_late=acks_late)
        project.write(self._body, **self._conf)
        self.app = Celery("proj", broker=project.url, backend=project.url, set_as_current=False)
        self.keys = Keys(NAMESPACE)

    def schedule(self, task: str, args: tuple[Any, ...], **policy: Any) -> str:
        """Have a beat send one occurrence; return its key. It must lead before that is due: a new entry starts from now."""
        at = (datetime.now(timezone.utc) + timedelta(seconds=15)).replace(microsecond=0)
        entry = {"task": f"proj.{task}", "schedule": f"@at {iso(at)}", "args": args, "policy": policy}
        self.project.write(self._body, **self._conf, beat_schedule={"e": entry})
        self.project.start_beat()
        return f"e@{iso(at)}"

    def start_worker(self, **options: Any) -> Process:
        worker = self.project.start_worker(pool="prefork", **options)
        worker.wait_for_log("ready.", PATIENCE)
        return worker

    def said(self) -> list[dict[str, Any]]:
        if not self._said.exists():
            return []
        return [json.loads(line) for line in self._said.read_text().splitlines()]

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        """Wait until the tasks have said so many lines."""
        return wait_until(lambda: found if len(found := self.said()) >= count else None, PATIENCE, f"{count} lines")

    def letter(self, key: str) -> DeadLetter:
        """Wait for the dead letter of a key."""
        with closing(redis.Redis.from_url(self.store)) as client:
            raw = wait_until(lambda: client.hget(self.keys("dead"), key), PATIENCE, f"a dead letter of {key}")
        return DeadLetter.from_json(raw)

    def letters(self) -> int:
        with closing(redis.Redis.from_url(self.store)) as client:
            return int(client.hlen(self.keys("dead")))

    def state(self, key: str) -> str:
        """What an occurrence is in the ledger; empty where it is settled, or unknown."""
        with closing(redis.Redis.from_url(self.store)) as client:
            return (client.hget(self.keys.occurrence(key), "state") or b"").decode()

    def progress(self, key: str) -> tuple[int, int] | None:
        """What is told of an unsettled run, (done, total)."""
        with closing(redis.Redis.from_url(self.store)) as client:
            found = client.hget(self.keys.occurrence(key), "progress")
        return tuple(map(int, found.split())) if found else None  # type: ignore[return-value]

    def wait_for_end(self, key: str) -> None:
        with closing(redis.Redis.from_url(self.store)) as client:
            wait_until(lambda: not client.exists(self.keys.occurrence(key)), PATIENCE, f"the end of {key}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_loop_that_is_killed_three_times_leaves_out_nothing_and_repeats_one_a_kill(
    project: Project, seed: int
) -> None:
    bench, moments = Bench(project), random.Random(seed)
    worker = bench.start_worker()
    key = bench.schedule("walk", (1000, 0.005), run_lease=1.5)
    kills = sorted(moments.sample(range(50, 950), 3))
    for kill_at in kills:
        lines = bench.wait_for(kill_at)
        worker.kill()
        done, total = wait_until(lambda: bench.progress(key), PATIENCE, "a progress")
        assert 0 < done <= len(lines) + 50
        assert total == 1000
        worker = bench.start_worker()
    wait_until(lambda: len({line["what"] for line in bench.said()}) == 1000, PATIENCE, "all items")
    bench.wait_for_end(key)
    lines = bench.said()
    times = Counter(line["what"] for line in lines)
    assert set(times) == set(range(1000))
    assert len(lines) <= 1003, [item for item, count in times.items() if count > 1]
    assert {line["key"] for line in lines} == {key}
    assert max(line["attempt"] for line in lines) == 4


@pytest.mark.parametrize("acks_late", [True, False], ids=["acks_late", "acks_early"])
def test_a_worker_that_shuts_down_hands_its_loop_on_at_once(project: Project, acks_late: bool) -> None:
    bench = Bench(project, acks_late=acks_late)
    first, _ = bench.start_worker(), bench.start_worker()
    key = bench.schedule("walk", (300, 0.02))
    lines = bench.wait_for(50)
    for worker in (first,) if "received" in first.log else project.processes[1:2]:
        worker.terminate()
        worker.wait(30)
    bench.wait_for(300)
    bench.wait_for_end(key)
    lines = bench.said()
    assert [line["what"] for line in lines] == list(range(300)), "each once, in order"
    assert {line["attempt"] for line in lines} == {1, 2}
    gaps = [after["at"] - before["at"] for before, after in zip(lines, lines[1:])]
    assert max(gaps) < 10, "the next attempt waits for no lease"
    assert bench.letters() == 0


# ---- giving up


def test_a_failure_is_tried_again_by_the_policy_and_is_one_dead_letter_when_that_is_used_up(project: Project) -> None:
    bench = Bench(project)
    bench.start_worker()
    key = bench.schedule("fails", ("os",), retry={"max_attempts": 3, "delay": 0.5, "backoff": "fixed", "jitter": False})
    letter = bench.letter(key)
    lines = bench.said()
    assert [line["attempt"] for line in lines] == [1, 2, 3]
    assert all(after["at"] - before["at"] >= 0.5 for before, after in zip(lines, lines[1:]))
    assert (letter.reason, letter.attempts) == ("retries", 3)
    assert "OSError" in letter.error
    assert bench.letters() == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("permanent", "permanent"), ("value", "exception")],
)
def test_what_is_not_worth_another_attempt_is_a_dead_letter_at_once(project: Project, kind: str, reason: str) -> None:
    bench = Bench(project)
    bench.start_worker()
    key = bench.schedule("fails", (kind,), retry={"max_attempts": 3, "delay": 0, "never": ["ValueError"]})
    letter = bench.letter(key)
    assert len(bench.said()) == 1
    assert (letter.reason, letter.attempts) == (reason, 1)


def test_each_retry_policy_makes_its_attempts_under_one_key(project: Project) -> None:
    gated = Gated(project, body=FAILS)
    play_retries(gated, [gated.start_worker("one"), gated.start_worker("two")])


def test_a_delay_above_the_visibility_timeout_multiplies_nothing_also_when_its_worker_is_killed(
    project: Project,
) -> None:
    bench = Bench(project, broker_transport_options={**GIVES_BACK, "visibility_timeout": 4}, tzbeat_retention=7200)
    workers = [bench.start_worker(), bench.start_worker()]
    retry = {"max_attempts": 2, "delay": 14, "backoff": "fixed", "jitter": False}
    bench.app.send_task("proj.fails", ("os",), headers=idempotent("k", policy={"retry": retry}))
    wait_until(lambda: bench.state("k") == "published", PATIENCE, "the end of the first attempt to be written")
    holder = wait_until(
        lambda: next((w for w in workers if w.log.count("] received") > w.log.count("Retry in 14")), None),
        PATIENCE,
        "a worker to have the message of the second",
    )
    holder.kill()
    letter = bench.letter("k")
    first, second = bench.said()
    assert (first["attempt"], second["attempt"], letter.attempts) == (1, 2, 2)
    assert second["at"] - first["at"] >= 14
    assert bench.letters() == 1


# ---- messages with a key


def test_of_two_messages_with_one_key_one_is_started(project: Project) -> None:
    bench = Bench(project)
    bench.start_worker(concurrency=2)
    send = bench.app.send_task
    first = send("proj.walk", (20, 0.05), headers=idempotent("order-42"))
    send("proj.walk", (20, 0.05), headers=idempotent("order-42"))
    assert first.get(timeout=PATIENCE) == 20
    bench.wait_for_end("order-42")
    send("proj.walk", (20, 0.05), headers=idempotent("order-42"))  # after it is done
    other = send("proj.walk", (5, 0), headers=idempotent("order-43"))
    assert other.get(timeout=PATIENCE) == 5
    assert Counter(line["key"] for line in bench.said()) == {"order-42": 20, "order-43": 5}
    assert bench.letters() == 0


# ---- what goes wrong beside a task


def test_a_checkpoint_of_10_mb_changes_nothing_of_the_result(project: Project) -> None:
    bench = Bench(project)
    worker = bench.start_worker()
    assert bench.app.send_task("proj.too_much", headers=idempotent("k")).get(timeout=PATIENCE) == "worked"
    assert [line["what"] for line in bench.said()] == ["kept False"]
    line = worker.wait_for_log("is not kept: 262144 are the most", PATIENCE)
    assert "fault 'checkpoint_too_large', 1 so far" in line


@pytest.mark.timeout(300)
def test_a_store_that_is_frozen_for_30_s_changes_nothing_of_the_result(
    project: Project, make_server: Callable[..., LocalServer]
) -> None:
    ledger = make_server()
    bench = Bench(project, store=ledger.url)
    worker = bench.start_worker()
    running = bench.app.send_task("proj.walk", (450, 0.1), headers=idempotent("k"))
    before = len(bench.wait_for(20))
    ledger.freeze()
    assert "fault 'checkpoint_store', 1 so far" in worker.wait_for_log("nothing can be kept now", PATIENCE)
    bench.wait_for(before + 200)  # 20 s and more, less what the calls that fail take
    ledger.thaw()
    assert running.get(timeout=PATIENCE) == 450
    assert [line["what"] for line in bench.said()] == list(range(450))
    bench.wait_for_end("k")
    assert bench.letters() == 0


def test_a_run_whose_token_is_lost_goes_on_and_its_checkpoints_are_not_kept(project: Project) -> None:
    bench = Bench(project)
    worker = bench.start_worker()
    running = bench.app.send_task("proj.walk", (200, 0.05), headers=idempotent("k", policy={"run_lease": 1.5}))
    bench.wait_for(10)
    with closing(redis.Redis.from_url(bench.store)) as client:
        client.hset(bench.keys.occurrence("k"), mapping={"token": "another", "worker": "elsewhere"})
    line = worker.wait_for_log("in the ledger this run is not this worker's", PATIENCE)
    assert "fault 'lost_token', 1 so far" in line
    assert running.get(timeout=PATIENCE) == 200

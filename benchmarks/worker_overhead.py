"""What the worker half costs: no-op throughput of a real worker with it and without it, and the gate's script against PING.

    python -m benchmarks.worker_overhead [--tasks 20000] [--rounds 2]

Nothing need be running: the server is its own. Before the first round a beat's own scripts push the messages, each with its
ticket, and open its occurrence in the ledger; every round starts from that same snapshot. Then a `celery worker -P prefork
-c 2` runs them all. A round is four such workers, in the order with, without, without, with, so that a machine that gets
slower or quicker meanwhile does not favour one. Each neighbouring pair gives one ratio.

Throughput is counted by the tasks themselves: each appends its number and the time to one file (16 bytes, some µs, the same
on both sides), which asks the server for nothing, as INCR would, and counts what was executed, not what was fetched, as a
queue's length would. It is what ran between the 10 % and the 90 % mark, so starts and stops of workers are outside.

What makes the cost look as large as it can be: the task does nothing, results are ignored, the worker logs warnings only, and
broker and ledger are one server on the host of the worker. Tasks that do something pay the same time per task, not the same
share.

Figures are ratios within one run. Tasks per second of two runs, or of two machines, say nothing about each other. The exit
status is 0 unless a task ran twice or not at all, or its end was not written: speed fails nothing.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import median

import redis
from celery import Celery

from celery_tzbeat import TzBeat
from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.model import Cursor, Occurrence, Policy
from celery_tzbeat.store.keys import Bucket, Keys
from celery_tzbeat.store.protocol import BATCH, Command, Dispatch, Tracking, Verdict
from celery_tzbeat.store.redis import RedisStore
from celery_tzbeat.store.redis_runs import RedisRuns
from celery_tzbeat.store.runs import Gate, Order, Start
from celery_tzbeat.testing.processes import Process, wait_until, worker
from celery_tzbeat.testing.server import LocalServer

#: What is aimed at, printed beside what was measured.
LEAST_RATIO, MOST_PINGS = 0.75, 4.0

NAMESPACE = "bench"
EPOCH = 1
QUEUE = "celery"

#: The occurrences are those of so many entries, a second apart.
ENTRIES = 100
GAP = timedelta(seconds=1)
FIRST = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)
RETENTION, AUDIT_MAX = timedelta(days=1), 100_000

#: A worker that runs nothing for so long, in seconds, is given up.
STALLED = 30.0

# ---- the app of the worker: this module, with these variables set

app = Celery("bench", broker=os.environ.get("TZBEAT_BENCH_BROKER", "redis://127.0.0.1:6379/0"))
app.conf.update(task_ignore_result=True, tzbeat_namespace=NAMESPACE, broker_connection_retry_on_startup=True)
if os.environ.get("TZBEAT_BENCH_HALF"):
    TzBeat(app)

RAN = struct.Struct(
    "=qd"
)  # a task's number, and when it ran in monotonic seconds: one clock for all processes of a host
_ran: list[int] = []  # the file, opened by each process once


@app.task(name="nothing")  # by name: this module is __main__ where messages are made
def nothing(number: int) -> None:
    """Say that it ran: one write to a file, which no other can come into the middle of."""
    if not _ran:
        _ran.append(os.open(os.environ["TZBEAT_BENCH_RAN"], os.O_WRONLY | os.O_APPEND))
    os.write(_ran[0], RAN.pack(number, time.monotonic()))


# ---- the messages, as a beat leaves them


def ticket_of(number: int) -> Ticket:
    entry, nominal = f"entry {number % ENTRIES}", FIRST + number // ENTRIES * GAP
    bucket = Bucket.of(nominal, GAP)
    return Ticket(NAMESPACE, Occurrence(entry, nominal).key, entry, nominal, EPOCH, 1, bucket.number, bucket.field)


def prepare(server: LocalServer, tasks: int) -> bytes:
    """Fill queue and ledger as a beat would; return the server's snapshot of both."""
    store = RedisStore(
        server.url,
        NAMESPACE,
        timeout=30,
        retention=RETENTION,
        max_skew=timedelta(days=36500),
        audit_max=AUDIT_MAX,
        presence=timedelta(seconds=30),
    )
    with closing(store), closing(redis.Redis.from_url(server.url)) as client:
        for number in range(tasks):
            send(ticket_of(number), number)
        messages = client.lrange(QUEUE, 0, -1)[::-1]
        client.delete(QUEUE)
        assert store.take_office(EPOCH) is not None
        for start in range(0, tasks, BATCH):
            numbers = range(start, min(start + BATCH, tasks))
            answers = store.dispatch([dispatch_of(ticket_of(n), messages[n]) for n in numbers], epoch=EPOCH)
            assert all(answer.verdict is Verdict.DONE for answer in answers), answers
        client.save()
    return (server.data / "dump.rdb").read_bytes()


def send(ticket: Ticket, number: int) -> None:
    assert ticket.occurrence is not None
    headers = {"meta": {"tzbeat": ticket.to_header()}, "periodic_task_name": ticket.entry}
    nothing.apply_async((number,), task_id=ticket.occurrence.task_id(NAMESPACE), headers=headers)


def dispatch_of(ticket: Ticket, message: bytes) -> Dispatch:
    assert ticket.occurrence is not None
    return Dispatch(
        ticket.occurrence,
        Cursor(ticket.occurrence.nominal, "bench"),
        Bucket(ticket.number, ticket.field),
        (Command("LPUSH", (QUEUE.encode(), message), (QUEUE.encode(),)),),
        Tracking(Policy(), payload=message),
    )


# ---- one worker


@dataclass(frozen=True)
class Outcome:
    """What one worker did. `faults` is empty where each task ran once, and its end was written."""

    rate: float  # tasks per second between the marks
    faults: list[str]


def measure(server: LocalServer, snapshot: bytes, tasks: int, half: bool) -> Outcome:
    """Run all tasks by one worker, with the worker half or without it."""
    server.kill()
    (server.data / "dump.rdb").write_bytes(snapshot)
    server.start()
    with tempfile.TemporaryDirectory(prefix="tzbeat-bench-") as directory:
        ran = Path(directory, "ran")
        ran.touch()
        env = {
            "TZBEAT_BENCH_BROKER": server.url,
            "TZBEAT_BENCH_HALF": "1" if half else "",
            "TZBEAT_BENCH_RAN": str(ran),
        }
        process = worker(
            "benchmarks.worker_overhead",
            log=Path(directory, "worker.log"),
            cwd=Path(__file__).parents[1],
            env=env,
            pool="prefork",
            concurrency=2,
            loglevel="WARNING",
        )
        with process:
            wait_for_all(process, ran, tasks)
            process.stop(timeout=60)  # in order: what is owed is written, and what is in hand ends
        runs = sorted(RAN.iter_unpack(ran.read_bytes()), key=lambda run: run[1])
        times = Counter(number for number, _ in runs)
        faults = [
            *([f"{missing} not at all"] if (missing := tasks - len(times)) else []),
            *([f"{twice} more than once"] if (twice := sum(n > 1 for n in times.values())) else []),
            *([f"{unwritten} without an end"] if half and (unwritten := tasks - marks(server, tasks)) else []),
        ]
        if faults:
            print(process.tail(), file=sys.stderr)
    first, last = len(runs) // 10, len(runs) * 9 // 10
    seconds = runs[last][1] - runs[first][1] if runs else 0.0
    return Outcome((last - first) / seconds if seconds else 0.0, faults)


def wait_for_all(process: Process, ran: Path, tasks: int) -> None:
    """Return when as many tasks have run, or none has for long."""
    seen, seen_at = 0, time.monotonic()

    def all_or_stalled() -> bool:
        nonlocal seen, seen_at
        now = time.monotonic()
        size = ran.stat().st_size
        if size != seen:
            seen, seen_at = size, now
        return size >= tasks * RAN.size or now > seen_at + STALLED or not process.alive

    wait_until(all_or_stalled, timeout=3600, description="the worker to run all tasks")


def marks(server: LocalServer, tasks: int) -> int:
    """Return how many tasks are done in the ledger's eyes."""
    keys = Keys(NAMESPACE)
    hashes = {keys.done(ticket.entry, ticket.number) for ticket in map(ticket_of, range(tasks))}
    with closing(redis.Redis.from_url(server.url)) as client:
        return sum(value.startswith(b"d ") for key in hashes for value in client.hvals(key))


# ---- the gate's script alone


class Pinging(RedisRuns):
    """The gate's own connection, which can also be asked for a PONG."""

    def ping(self) -> None:
        self._ask(lambda client: client.ping())


def gate_in_pings(server: LocalServer, snapshot: bytes, tasks: int) -> list[float]:
    """Return what a start costs in PINGs, by turns of a hundred each through one connection."""
    server.kill()
    (server.data / "dump.rdb").write_bytes(snapshot)
    server.start()
    with closing(redis.Redis.from_url(server.url)) as client:
        messages = client.lrange(QUEUE, 0, -1)[::-1]
    runs = Pinging(server.url, NAMESPACE, timeout=30, retention=RETENTION, audit_max=AUDIT_MAX)

    def start(number: int) -> None:
        order, token = Order(1, 0), f"{number:032x}"
        started = runs.start(Start(ticket_of(number), order, token, "bench@host", False, messages[number]))
        assert started.gate is Gate.WON, started

    found = []
    with closing(runs):
        runs.ping()
        for first in range(0, min(tasks, 3000) - 99, 100):
            starts = [timed(start, number) for number in range(first, first + 100)]
            pings = [timed(runs.ping) for _ in range(100)]
            found.append(median(starts) / median(pings))
    return found


def timed(call: Callable[..., None], *args: int) -> float:
    began = time.perf_counter()
    call(*args)
    return time.perf_counter() - began


# ---- all of it


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} (of {len(values)}: {min(values):.2f} to {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description="What the worker half costs, as ratios within one run.")
    parser.add_argument("--tasks", type=int, default=20_000, help="tasks that each worker runs (default: 20000)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of four workers (default: 2)")
    options = parser.parse_args()
    ratios: list[float] = []
    faults = 0
    with LocalServer() as server:
        app.conf.broker_url = server.url
        snapshot = prepare(server, options.tasks)
        print(f"{options.tasks} no-op tasks for each worker, prefork, 2 processes", flush=True)
        for _ in range(options.rounds):
            for first in (True, False):
                rates = {}
                for half in (first, not first):
                    outcome = measure(server, snapshot, options.tasks, half)
                    rates[half] = outcome.rate
                    faults += len(outcome.faults)
                    name = "with the worker half" if half else "without"
                    print(f"{name:22}{outcome.rate:7.0f} tasks/s  {', '.join(outcome.faults)}", flush=True)
                if rates[False]:
                    ratios.append(rates[True] / rates[False])
        pings = gate_in_pings(server, snapshot, options.tasks)
    if ratios:
        print(f"throughput, with / without   {spread(ratios)}   target ≥ {LEAST_RATIO}")
    if pings:
        print(f"the gate's script / PING     {spread(pings)}   target ≤ {MOST_PINGS:g}")
    print("each task ran once" if not faults else "tasks ran twice, or not at all, or their ends were not written")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""Messages with our header, sent as a beat would, to real workers; and what the ledger and the tasks say of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import redis
from celery import Celery

from celery_tzbeat.api import TzBeat
from celery_tzbeat.deliveries import DeadLetter, Ticket
from celery_tzbeat.model import Occurrence, Policy
from celery_tzbeat.store.keys import Bucket, Keys
from celery_tzbeat.store.redis import RedisStore
from celery_tzbeat.testing.processes import Process, wait_until

if TYPE_CHECKING:
    from conftest import Project

NAMESPACE = "n"

#: Options of a Redis broker that gives messages back after 5 s, and looks for them each second (kombu: each 100 s).
GIVES_BACK = {"visibility_timeout": 5, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
NOMINAL = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)

BODY = '''
import time
from celery_tzbeat import TzBeat, current_run

tz = TzBeat(app)


def say(task, what, **more):
    """Append one line: who, what, when."""
    run = current_run()
    line = {{"what": what, "at": time.time(), "mono": time.monotonic(), "entry": run.entry, "attempt": run.attempt,
             "retries": task.request.retries, "pid": os.getpid(), "worker": task.request.hostname, **more}}
    file = os.open({said!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(line) + "\\n").encode())
    os.close(file)


@app.task(bind=True)
def work(self, seconds=0.0):
    """Work for so long, and stop when asked to."""
    say(self, "start")
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(min(0.05, max(0.0, ends - time.monotonic())))
        why = current_run().why
        if why:
            say(self, "stop", why=why)
            current_run().raise_if_cancelled()
    say(self, "end")
    return "worked"


def toil(task, seconds, first):
    """Work for so long, whatever is said; the first attempt for `first` where that is given."""
    say(task, "start")
    time.sleep(seconds if first is None or current_run().attempt > 1 else first)
    say(task, "end")


@app.task(bind=True)
def stubborn(self, seconds, first=None):
    toil(self, seconds, first)


@app.task(bind=True, acks_late=True)
def late_work(self, seconds=0.0, first=None):
    toil(self, seconds, first)


@app.task(bind=True)
def broken(self):
    say(self, "start")
    raise ZeroDivisionError("broken")


@app.task(bind=True, max_retries=None)
def retrying(self, times, how="raise"):
    say(self, "start")
    if self.request.retries < times:
        say(self, "retry")
        if how == "raise":
            self.retry(countdown=0)
        self.retry(countdown=0, throw=False)
'''


class Gated:
    """A project whose workers have the worker half, with a ledger of its own or on the broker's server."""

    def __init__(self, project: Project, *, store: str = "", body: str = "", **conf: Any) -> None:
        self.project = project
        self.url = store or project.url
        self.namespace = str(conf.get("tzbeat_namespace", NAMESPACE))
        self._said = project.directory / "said.jsonl"
        conf = {
            "tzbeat_namespace": self.namespace,
            "tzbeat_url": self.url,
            "result_backend": project.url,
            "broker_connection_retry_on_startup": True,
            **conf,
        }
        project.write(BODY.format(said=str(self._said)).replace("{{", "{").replace("}}", "}") + body, **conf)
        self.app = Celery("proj", broker=project.url, backend=conf["result_backend"], set_as_current=False)
        self.keys = Keys(self.namespace)

    def start_worker(self, name: str = "", *, pool: str = "prefork", concurrency: int = 2, **options: Any) -> Process:
        """Start a worker and wait until it takes messages."""
        worker = self.project.start_worker(name, pool=pool, concurrency=concurrency, **options)
        worker.wait_for_log("ready.", 60)
        return worker

    def open_queue(self, *, workers: int) -> None:
        """Have workers that were started on another queue (`-Q`) take from the default one, too: so many that run."""
        ask = self.app.control.add_consumer
        wait_until(lambda: len(ask("celery", reply=True, limit=workers)) == workers, 30, "the queue to be consumed")

    def ticket(self, entry: str, *, dispatch: int = 1, **policy: Any) -> Ticket:
        """Return the ticket of an entry's one occurrence."""
        bucket, key = Bucket.of(NOMINAL, timedelta(minutes=1)), Occurrence(entry, NOMINAL).key
        return Ticket(self.namespace, key, entry, NOMINAL, 1, dispatch, bucket.number, bucket.field, Policy(**policy))

    def send(
        self,
        task: str,
        entry: str,
        *args: Any,
        dispatch: int = 1,
        options: Mapping[str, Any] | None = None,
        **policy: Any,
    ) -> Any:
        """Send a message of an entry's occurrence; returns Celery's result."""
        ticket = self.ticket(entry, dispatch=dispatch, **policy)
        headers = {"meta": {"tzbeat": ticket.to_header()}, "periodic_task_name": entry}
        return self.app.send_task(f"proj.{task}", args, task_id=f"id-{entry}", headers=headers, **(options or {}))

    def said(self, entry: str = "", what: str = "") -> list[dict[str, Any]]:
        """Return what tasks have said, in order; `plain` is the entry of messages without our header."""
        if not self._said.exists():
            return []
        lines = [json.loads(line) for line in self._said.read_text().splitlines()]
        return [line for line in lines if entry in ("", line["entry"] or "plain") and what in ("", line["what"])]

    def wait_for(self, entry: str, what: str, timeout: float = 30, *, count: int = 1) -> list[dict[str, Any]]:
        """Return what a task said, once it has said it so often."""
        return wait_until(
            lambda: found if len(found := self.said(entry, what)) >= count else None, timeout, f"{entry} to say {what}"
        )

    def mark(self, entry: str) -> str:
        """Return the letter of a done mark; empty where there is none."""
        ticket = self.ticket(entry)
        with closing(redis.Redis.from_url(self.url)) as client:
            found = client.hget(self.keys.done(ticket.entry, ticket.number), str(ticket.field))
        return found.decode()[:1] if found else ""

    def wait_for_mark(self, entry: str, letter: str, timeout: float = 30) -> None:
        wait_until(lambda: self.mark(entry) == letter, timeout, f"{entry} to be settled as {letter}")

    def record(self, entry: str) -> dict[str, str]:
        """Return an unsettled occurrence's record; empty where there is none."""
        with closing(redis.Redis.from_url(self.url)) as client:
            found = client.hgetall(self.keys.occurrence(self.ticket(entry).key))
        return {name.decode(): value.decode(errors="replace") for name, value in found.items()}

    def wait_for_state(self, entry: str, state: str, timeout: float = 30) -> None:
        wait_until(lambda: self.record(entry).get("state") == state, timeout, f"{entry} to be {state}")

    def letters(self) -> dict[str, DeadLetter]:
        """Return the dead letters by entry."""
        with closing(redis.Redis.from_url(self.url)) as client:
            found = client.hgetall(self.keys("dead"))
        return {letter.entry: letter for letter in map(DeadLetter.from_json, found.values())}

    def tz(self, **conf: Any) -> TzBeat:
        """Return what an operator has; `conf` is laid over the settings. A beat carries out what is asked."""
        app = Celery("proj", broker=self.project.url, set_as_current=False)
        app.conf.update(
            tzbeat_namespace=NAMESPACE, tzbeat_url=self.url, tzbeat_lease=2, result_expires=None, beat_schedule={}
        )
        app.conf.update(conf)
        return TzBeat(app, set_scheduler=False)

    def store(self, *, leads: bool = True) -> RedisStore:
        """Return a store as a leader has it, in office with epoch 1; or to read from, beside a beat. To be closed."""
        store = RedisStore(
            self.url,
            self.namespace,
            timeout=5,
            retention=timedelta(days=1),
            max_skew=timedelta(days=3650),
            audit_max=100_000,
            presence=timedelta(seconds=30),
        )
        if leads:
            store.take_office(1)
        return store

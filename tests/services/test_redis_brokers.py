"""Brokers other than RabbitMQ that are not the store: a Redis of its own, another database, files."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from observe import EVEN, PULSE, SECOND, Bench, assert_calm, assert_complete, assert_gapless, now, sleep_until
from rabbit import Message

from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.server import LocalServer

FAST = {"fast": {"task": "proj.record", "schedule": 0.2}}


@dataclass
class RedisInbox:
    """Shows what stands in one queue of a Redis, oldest first."""

    url: str
    queue: str
    _seen: list[Message] = field(default_factory=list)

    def messages(self, entry: str = "") -> list[Message]:
        with redis.Redis.from_url(self.url) as client:
            texts = client.lrange(self.queue, 0, -1)
        for text in list(reversed(texts))[len(self._seen) :]:
            form = json.loads(text)
            self._seen.append(Message(form["headers"], form["properties"], base64.b64decode(form["body"])))
        return [message for message in self._seen if entry in ("", message.entry)]


def bench_on(make_project: Callable[[str], Any], broker: str, store: LocalServer) -> Bench:
    database = broker.rpartition("/")[2]
    return Bench(make_project(broker), store, f"proj/{database}", lambda queue: RedisInbox(broker, queue))


@pytest.mark.parametrize("where", ["another database", "another server"])
def test_the_same_promises_hold_on_a_redis_that_is_not_the_store(
    make_project: Callable[[str], Any], make_server: Callable[..., LocalServer], where: str
) -> None:
    store = make_server(appendonly=True)
    broker = make_server().url if where == "another server" else store.url.replace("/0", "/1")
    bench = bench_on(make_project, broker, store)
    bench.write(beat_schedule={**PULSE, **FAST})
    beats = bench.start_beats(2)
    why = "the broker uses database 1" if where == "another database" else "does not arrive through the broker's"
    assert "sends by the path 'claims'" in beats[0].log
    assert why in beats[0].log
    wait_until(lambda: len(bench.nominals("fast")) >= 15, 60, "messages")
    assert_gapless(bench.nominals("fast"), 0.2)
    assert_gapless(bench.nominals("pulse"))

    beats[0].kill()
    beats[1].wait_for_log("leads with epoch", 30)
    until = now() + 3 * SECOND
    wait_until(lambda: bench.nominals("fast")[-1] > until, 60, "messages by the next leader")
    assert assert_complete(bench.inbox().messages("fast"), 0.2, until) <= 1
    assert assert_complete(bench.inbox().messages("pulse"), 1.0, until - SECOND) <= 1
    assert not redis.Redis.from_url(broker).keys("tzbeat-probe-*"), "probes are taken out again"
    assert_calm(beats[1:])


@pytest.mark.parametrize("trouble", ["out of memory", "read-only", "frozen"])
def test_a_redis_broker_that_cannot_serve_for_a_while_is_waited_for(
    make_project: Callable[[str], Any], make_server: Callable[..., LocalServer], trouble: str
) -> None:
    store, broker = make_server(), make_server()
    bench = bench_on(make_project, broker.url, store)
    bench.write(beat_schedule=EVEN)
    beats = bench.start_beats(2)
    wait_until(lambda: bench.nominals("even"), 60, "a message")
    before = bench.nominals("even")[-1]
    until = before + 21 * SECOND
    with redis.Redis.from_url(broker.url) as client:
        if trouble == "frozen":
            broker.freeze()
            sleep_until(until)
            broker.thaw()
        elif trouble == "read-only":
            # Not a replica: one that asks a master in vain would lose what it has when it finds one.
            client.config_set("min-replicas-max-lag", 10)
            client.config_set("min-replicas-to-write", 1)
            sleep_until(until)
            client.config_set("min-replicas-to-write", 0)
        else:
            client.config_set("maxmemory", 1)
            sleep_until(until)
            client.config_set("maxmemory", 0)
    wait_until(lambda: max(bench.nominals("even")) > until + 4 * SECOND, 60, "messages after it")
    wait_until(lambda: not bench.open_claims(), 60, "the claims to be confirmed")
    found = bench.inbox().messages("even")
    copies = assert_complete(found, 2.0, until + 2 * SECOND)
    assert copies <= 2
    assert not bench.audit("dead")
    assert_calm(beats)


def test_files_are_a_broker_for_development(
    make_project: Callable[[str], Any], server: LocalServer, tmp_path: Path
) -> None:
    folder = tmp_path / "queue"
    folder.mkdir()
    bench = Bench(make_project("filesystem://"), server, "proj/0", lambda queue: None)
    folders = dict.fromkeys(("data_folder_in", "data_folder_out", "control_folder"), str(folder))
    bench.write(beat_schedule=PULSE, broker_transport_options=folders)
    worker = bench.project.start_worker()
    beats = bench.start_beats(1)
    received = wait_until(lambda: len(r := bench.project.received()) >= 3 and r, 60, "tasks")
    assert len({r["id"] for r in received}) == len(received)
    assert "sends by the path 'claims': the broker 'filesystem://' is not a Redis" in beats[0].log
    assert_calm(beats)
    assert worker.alive

"""What only a server can show of runs: restarts, a server that does not answer, keys, scripts, what a call costs."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from importlib import resources
from typing import Any

import pytest
import redis
from kombu.asynchronous import Hub
from scenes import MOMENT, SHORT, Scene, scene_on

from celery_tzbeat.deliveries import WorkerPresence
from celery_tzbeat.errors import StoreUnavailable, StoreUnreadable
from celery_tzbeat.model import Policy
from celery_tzbeat.store.keys import CATALOGUE
from celery_tzbeat.store.protocol import BATCH, Verdict
from celery_tzbeat.store.redis_runs import RedisLine
from celery_tzbeat.store.runs import Beat, End, Ended, Gate, Order, Pulse, Start, Started
from celery_tzbeat.testing.server import LocalServer

PREFIX = "tzbeat:{test/0}:"


@pytest.fixture
def scene(empty_server: LocalServer) -> Iterator[Scene]:
    made = scene_on(empty_server.url)
    yield made
    made.store.close()
    made.runs.close()


@pytest.fixture
def client(empty_server: LocalServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(empty_server.url) as client:
        yield client


@pytest.fixture
def open_scene() -> Iterator[Callable[..., Scene]]:
    opened: list[Scene] = []

    def make(url: str, **options: Any) -> Scene:
        opened.append(scene_on(url, **options))
        return opened[-1]

    yield make
    for made in opened:
        made.store.close()
        made.runs.close()


# ---- restarts


def test_a_restart_with_persistence_in_the_middle_of_a_run_starts_nothing_twice(
    aof_server: LocalServer, open_scene: Callable[..., Scene]
) -> None:
    scene = open_scene(aof_server.url)
    scene.publish(**SHORT)
    scene.start(**SHORT)
    aof_server.stop()
    with pytest.raises(StoreUnavailable):
        scene.beat()
    aof_server.restart()
    assert scene.start("u").gate is Gate.LIVE  # the lease has lapsed long ago: no time limit decides who runs
    assert scene.beat() is Pulse.ALIVE
    aof_server.stop()
    with pytest.raises(StoreUnavailable):
        scene.end()
    aof_server.restart()
    assert scene.end() is Ended.DONE  # owed until it is written
    aof_server.stop()
    aof_server.restart()
    assert scene.end() is Ended.DECIDED
    assert scene.start("u").gate is Gate.SETTLED
    assert scene.events.count("started") == 1


def test_a_restart_without_persistence_is_healed_by_the_next_heartbeat(
    server: LocalServer, open_scene: Callable[..., Scene]
) -> None:
    scene = open_scene(server.url)
    scene.publish()
    scene.start()
    server.restart(wipe=True)
    assert scene.store.is_empty()
    assert scene.beat() is Pulse.RESUMED
    assert scene.start("u").gate is Gate.LIVE
    assert scene.end() is Ended.DONE


@pytest.mark.parametrize("call", ["start", "beat", "end"])
def test_a_frozen_server_may_have_heard_and_asking_again_tells(
    server: LocalServer, open_scene: Callable[..., Scene], call: str
) -> None:
    scene = open_scene(server.url, timeout=0.5)
    scene.publish()
    if call != "start":
        scene.start()
    steps = {"start": scene.start, "beat": scene.beat, "end": scene.end}
    server.freeze()
    with pytest.raises(StoreUnavailable):
        steps[call]()
    server.thaw()
    if call == "start":
        started = scene.start()
        assert (started.gate, started.starts) == (Gate.WON, 1)
    elif call == "beat":
        assert scene.beat() is Pulse.ALIVE
    else:
        assert scene.end() in (Ended.DONE, Ended.DECIDED)
        assert scene.events.count("done") == 1


def test_a_worker_stopped_past_its_lease_hears_that_it_has_lost(scene: Scene) -> None:
    scene.publish(**SHORT)
    scene.start("a", **SHORT)
    scene.let_pass(MOMENT)  # stopped
    scene.abandon()
    scene.start("b")
    assert scene.beat("a") is Pulse.LOST or scene.beat("a") is Pulse.OVERLAP
    assert scene.end("done", "a") is Ended.REFUSED
    assert not scene.runs.checkpoint(scene.occurrence().key, "a", b"late")


def test_scripts_that_the_server_forgot_are_sent_again(scene: Scene, client: redis.Redis) -> None:
    scene.publish()
    client.script_flush()
    assert scene.start().gate is Gate.WON
    client.script_flush()
    assert scene.beat() is Pulse.ALIVE
    client.script_flush()
    assert scene.end() is Ended.DONE


def test_a_server_that_does_not_serve_is_unavailable(scene: Scene, client: redis.Redis) -> None:
    scene.publish()
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreUnavailable, match="does not serve"):
            scene.start()
    finally:
        client.config_set("maxmemory", "0")
    assert scene.start().gate is Gate.WON


# ---- keys and scripts


def test_no_key_without_a_time_limit_outside_the_permanent_ones(scene: Scene, client: redis.Redis) -> None:
    scene.publish()
    scene.start()
    scene.claim(1)
    scene.publish(2)
    scene.hold(3, overlap="buffer_one")
    scene.store.answer(scene.ask("cancel", "x"), "nothing", epoch=1)
    scene.ask("replay", "y")
    scene.runs.attend(WorkerPresence("w", "n", "prefork", "0", 0))
    kinds = {kind.name.partition("<")[0]: kind for kind in CATALOGUE}
    seen = set()
    for key in client.keys("tzbeat:*"):
        name = key.decode().removeprefix(PREFIX)
        kind = kinds.get(name) or kinds[name.partition(":")[0] + ":"]
        seen.add(kind.name)
        assert client.type(key).decode() == kind.type, name
        assert (client.pttl(key) > 0) == (kind.lives not in ("permanent", "while unsettled")), name
    assert {"live", "workers", "worker:<id>", "requests", "outcome:<id>"} <= seen


def test_what_is_settled_leaves_nothing_unsettled(scene: Scene, client: redis.Redis) -> None:
    scene.publish()
    scene.start()
    scene.runs.checkpoint(scene.occurrence().key, "t", b"state")
    scene.end()
    assert client.keys("tzbeat:*:open*") == client.keys("tzbeat:*:occurrence:*") == client.keys("tzbeat:*:live") == []


def test_the_mark_of_a_run_is_small_and_says_state_and_order(scene: Scene, client: redis.Redis) -> None:
    scene.publish()
    scene.start("t", (1, 3))
    scene.end("done", "t", (1, 3))
    (key,) = client.keys("tzbeat:*:done:*")
    assert list(client.hgetall(key).values()) == [b"d 1 3"]


def test_a_run_whose_live_entry_is_gone_is_found_by_open(scene: Scene, client: redis.Redis) -> None:
    scene.publish(**SHORT)
    scene.start(**SHORT)
    client.delete(f"{PREFIX}live")
    scene.let_pass(MOMENT)
    (run,) = scene.store.survey().lapsed
    assert scene.store.abandon(run, epoch=1).verdict is Verdict.DONE


def test_a_worker_that_is_long_gone_is_forgotten(scene: Scene, client: redis.Redis) -> None:
    scene.runs.attend(WorkerPresence("old", "n", "prefork", "0", 0))
    two_days_ago = int((scene.now - timedelta(days=2)).timestamp() * 1000)
    client.zadd(f"{PREFIX}workers", {"old": two_days_ago})
    assert not scene.store.workers_lived()
    scene.runs.attend(WorkerPresence("new", "n", "prefork", "0", 0))
    assert client.zrange(f"{PREFIX}workers", 0, -1) == [b"new"]
    assert scene.store.workers_lived()


def test_what_a_newer_worker_or_request_says_ends_nothing(scene: Scene, client: redis.Redis) -> None:
    client.set(f"{PREFIX}worker:odd", "{}", px=60_000)
    client.zadd(f"{PREFIX}workers", {"odd": int(scene.now.timestamp() * 1000)})
    assert scene.store.workers() == []
    client.hset(f"{PREFIX}dead", "odd", "not a letter")
    request = scene.ask("discard", "odd")
    assert scene.store.discard(request, "odd", epoch=1).verdict is Verdict.DONE


def test_a_key_of_another_type_is_unreadable_and_not_down(scene: Scene, client: redis.Redis) -> None:
    client.set(f"{PREFIX}occurrence:{scene.occurrence().key}", "not a hash")
    with pytest.raises(StoreUnreadable, match="WRONGTYPE"):
        scene.start()


def test_an_end_is_heard_on_the_wake_channel(scene: Scene, client: redis.Redis) -> None:
    heard = client.pubsub(ignore_subscribe_messages=True)
    heard.subscribe(f"{PREFIX}wake")
    scene.publish()
    scene.start()
    scene.end()
    scene.ask("cancel")
    heard.get_message(timeout=1)  # the subscription
    words = [message["data"] for message in iter(lambda: heard.get_message(timeout=0.2), None)]
    assert words == [b"settled", b"request"]
    heard.close()


def test_no_script_uses_what_an_old_or_clustered_server_lacks() -> None:
    for file in (resources.files("celery_tzbeat.store") / "lua").iterdir():
        text = file.read_text("utf-8")
        assert not re.search(r"cmsgpack|HEXPIRE|HPEXPIRE|FUNCTION|FCALL|'KEYS'", text), file.name
        assert text.startswith("-- "), file.name


def test_the_server_clock_jumping_is_the_leaders_to_judge_and_a_heartbeat_restores_all(
    scene: Scene, client: redis.Redis
) -> None:
    """A jump ahead by an hour is every deadline an hour in the past: all lapse, nobody is abandoned by a script alone."""
    scene.publish()
    scene.start()
    hour_ago = (datetime.now(timezone.utc) - timedelta(hours=1)).timestamp() * 1000
    for name in ("live", "open"):
        client.zadd(f"{PREFIX}{name}", {scene.occurrence().key: hour_ago})
    assert [run.token for run in scene.store.survey().lapsed] == ["t"]
    assert scene.start("u").gate is Gate.LIVE
    assert scene.beat() is Pulse.ALIVE
    assert scene.store.survey().lapsed == ()


# ---- a line


def start_of(scene: Scene, second: int, token: str) -> Start:
    return Start(scene.ticket(second), Order(1, 0), token, "worker", True, b"message")


def read(line: RedisLine, count: int) -> list[Started]:
    """Return answers, each when `fileno` says that there is one."""
    found: list[Started] = []
    while len(found) < count:
        if not line.answered():
            assert select.select([line.fileno()], [], [], 5)[0], "no answer came"
        found.append(line.answer())
    return found


@pytest.fixture
def line(scene: Scene) -> Iterator[RedisLine]:
    scene.runs.attend(WorkerPresence("w", "n", "prefork", "0", 0))
    for second in range(20):
        scene.publish(-second)
    scene.runs.start(start_of(scene, 0, "known"))  # so that the server has the script
    made = scene.runs.line()
    yield made
    made.close()


def test_starts_on_a_line_are_answered_in_the_order_in_which_they_were_asked(scene: Scene, line: RedisLine) -> None:
    assert not line.answered()
    for second in range(20):
        line.ask(start_of(scene, -second, f"t{second}"))
    answers = read(line, 20)
    assert [started.gate for started in answers] == [Gate.LIVE] + [Gate.WON] * 19
    assert not line.answered()
    assert scene.runs.start(start_of(scene, -5, "t5")) == answers[5]


def test_a_line_to_a_server_that_forgot_the_script_is_of_no_use(
    scene: Scene, line: RedisLine, client: redis.Redis
) -> None:
    client.script_flush()
    line.ask(start_of(scene, -1, "t"))
    with pytest.raises(StoreUnavailable, match="NoScript"):
        read(line, 1)
    assert scene.runs.start(start_of(scene, -1, "t")).gate is Gate.WON
    again = scene.runs.line()
    again.ask(start_of(scene, -2, "t"))
    assert read(again, 1)[0].gate is Gate.WON
    again.close()


def test_a_line_that_is_cut_says_so_and_what_was_asked_is_asked_again(
    scene: Scene, line: RedisLine, client: redis.Redis
) -> None:
    line.ask(start_of(scene, -1, "t"))
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    with pytest.raises(StoreUnavailable):
        read(line, 2)  # the answer may have come before the end
    started = scene.runs.start(start_of(scene, -1, "t"))
    assert (started.gate, started.starts) == (Gate.WON, 1)


def test_a_line_to_a_server_that_hangs_waits_within_the_bound(
    server: LocalServer, open_scene: Callable[..., Scene]
) -> None:
    scene = open_scene(server.url, timeout=0.3)
    scene.publish()
    line = scene.runs.line()
    server.freeze()
    line.ask(start_of(scene, 0, "t"))
    assert not line.answered()
    with pytest.raises(StoreUnavailable):
        line.answer()
    line.close()
    server.thaw()
    assert scene.runs.start(start_of(scene, 0, "t")).starts == 1


def test_a_broken_line_leaves_nothing_with_the_loop_though_a_child_of_the_pool_has_its_socket(
    server: LocalServer, open_scene: Callable[..., Scene]
) -> None:
    scene = open_scene(server.url, timeout=0.3)
    scene.publish()
    hub, calls = Hub(), 0

    def readable() -> None:
        nonlocal calls
        calls += 1

    line = scene.runs.line()
    hub.add_reader(line.fileno(), readable)
    inherited = os.dup(line._connection._sock.fileno())
    server.freeze()
    line.ask(start_of(scene, 0, "t"))
    server.kill()  # it has not read the question, so the connection is reset, and redis-py closes its socket
    with pytest.raises(StoreUnavailable):
        read(line, 1)
    hub.remove_reader(line.fileno())
    line.close()
    assert hub.poller.poll(0) in ([], None)
    assert calls == 0
    os.close(inherited)
    hub.close()
    server.restart()


# ---- what it costs


def test_a_batch_costs_a_few_commands_a_run(scene: Scene, client: redis.Redis) -> None:
    """Commands, not time: each is 1 to 3 microseconds of the server's, so a batch of a hundred is about 3 ms."""
    tickets = [scene.ticket(second) for second in range(-BATCH, 0)]

    def commands(call: Callable[[], object]) -> float:
        client.config_resetstat()
        call()
        stats = client.info("commandstats")
        return sum(found["calls"] for name, found in stats.items() if "eval" not in name) / BATCH

    def start() -> None:
        for ticket in tickets:
            scene.runs.start(Start(ticket, Order(1, 0), ticket.key, "worker", True, b"message"))

    beats = [Beat(ticket, Order(1, 0), ticket.key, "worker", True, b"message") for ticket in tickets]
    ends = [End(ticket, Order(1, 0), ticket.key, "done") for ticket in tickets]
    for second in range(-BATCH, 0):
        scene.publish(second)
    assert commands(start) < 11
    assert commands(lambda: scene.runs.heartbeat(beats)) < 4
    assert commands(lambda: scene.runs.end(ends)) < 10


def test_a_policy_travels_through_the_record(scene: Scene) -> None:
    policy = {"overlap": "skip", "timeout": timedelta(seconds=2), "on_abandoned": "redispatch", "max_deliveries": 2}
    scene.publish(**policy)
    assert scene.run().policy == Policy(**policy)

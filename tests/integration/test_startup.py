"""What stops a beat at its start, what keeps it from leading, and the ways to start one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from evidence import NAMESPACE, PULSE, assert_gapless, audit, connected, nominals, presence, queued

from celery_tzbeat.testing.processes import Process, wait_until

BAD = {
    "zone one": {"task": "proj.record", "schedule": "30 2 * * * Europe/Berlinn"},
    "zone two": {"task": "proj.record", "schedule": "@daily Mars/Olympus"},
    "day one": {"task": "proj.record", "schedule": "0 0 31 2 * UTC"},
    "day two": {"task": "proj.record", "schedule": "0 12 31 4,6 * UTC"},
    "minute one": {"task": "proj.record", "schedule": "61 * * * * UTC"},
    "minute two": {"task": "proj.record", "schedule": "0,75 3 * * * UTC"},
    "policy one": {"task": "proj.record", "schedule": 60, "policy": {"catchup": "lastest"}},
    "policy two": {"task": "proj.record", "schedule": 60, "policy": {"misfire_grase": 5}},
}


def refused(beat: Process) -> str:
    """Return the log of a beat that does not start."""
    assert beat.wait(40) not in (0, None)
    return beat.log


def test_a_bad_schedule_stops_the_start_with_one_message_that_lists_all_problems(project: Any) -> None:
    project.write(beat_schedule={**PULSE, **BAD})
    log = refused(project.start_beat())
    assert "8 problems" in log
    for name in BAD:
        assert f"  - entry {name!r}:" in log
    assert "did you mean 'latest'?" in log
    assert "did you mean 'misfire_grace'?" in log
    assert "'pulse'" not in log.split("problems")[1].split("check")[0]
    assert queued(project.url) == []


@pytest.mark.parametrize(
    ("broker", "words"),
    [
        ("redis://127.0.0.1:{port}/1", "the broker uses database 1, the store database 0"),
        ("redis://127.0.0.1:{port}/1;redis://127.0.0.1:9/1", "names several brokers"),
    ],
    ids=["another-database", "several-urls"],
)
def test_a_broker_that_is_not_the_stores_redis_is_sent_to_by_claims(
    make_project: Any, server: Any, broker: str, words: str
) -> None:
    project = make_project(broker.format(port=server.port))
    project.write(beat_schedule=PULSE, tzbeat_url=server.url, tzbeat_namespace=NAMESPACE)
    beat = project.start_beat()
    queue = server.url[:-1] + "1"
    wait_until(lambda: len(nominals(queue)) >= 3, 40, "pulses")
    assert_gapless(nominals(queue))
    path = beat.wait_for_log("sends by the path 'claims'", 10)
    assert words in path
    assert queued(server.url) == []
    assert (present := presence(server.url, beat))
    assert present.path == "claims"
    assert {record.event for record in audit(server.url, entry="pulse")} == {"new", "claimed", "sent"}


def test_a_broker_that_does_not_answer_keeps_no_beat_from_starting_and_is_named_without_its_password(
    make_project: Any, server: Any
) -> None:
    project = make_project("amqp://guest:secret@127.0.0.1:9/")
    project.write(beat_schedule=PULSE, tzbeat_url=server.url, tzbeat_namespace=NAMESPACE)
    beat = project.start_beat()
    path = beat.wait_for_log("sends by the path 'claims'", 40)
    assert "the broker 'amqp://guest:**@127.0.0.1:9/' is not a Redis" in path
    beat.wait_for_log("the broker does not answer", 20)
    assert beat.alive
    assert "secret" not in beat.log


def test_a_store_on_another_server_than_the_broker_is_found_out_by_the_probe(
    make_project: Any, make_server: Any
) -> None:
    broker, store = make_server(), make_server()
    project = make_project(broker.url)
    project.write(beat_schedule=PULSE, tzbeat_url=store.url)
    beat = project.start_beat()
    wait_until(lambda: len(nominals(broker.url)) >= 3, 40, "pulses")
    assert "does not arrive through the broker's" in beat.wait_for_log("sends by the path 'claims'", 10)
    assert_gapless(nominals(broker.url))
    assert queued(store.url) == []
    for url in (broker.url, store.url):
        with connected(url) as client:
            wait_until(lambda client=client: not client.keys("*tzbeat-probe*"), 15, "the probe's message to expire")


@pytest.mark.parametrize("name", ["tzbeat", "celery_tzbeat:Scheduler"])
def test_the_scheduler_is_found_by_its_short_and_its_full_name(project: Any, name: str) -> None:
    project.write(beat_schedule=PULSE, beat_scheduler=name)
    beat = project.start_beat()
    wait_until(lambda: nominals(project.url), 30, "a pulse")
    assert f"lease {2:g} s" in beat.log
    assert beat.stop() == 0


def test_beat_neither_reads_nor_writes_a_local_file(project: Any) -> None:
    project.write(beat_schedule=PULSE, module="proj")
    directory = project.directory / "read-only"
    directory.mkdir()
    (directory / "celerybeat-schedule").write_bytes(b"\x00 not a shelve \xff" * 100)
    directory.chmod(0o555)
    before = {p.name: (p.stat().st_size, p.stat().st_mtime_ns) for p in directory.iterdir()}
    project.start(
        *("sh", "-c", 'cd read-only && exec "$0" -m celery -A proj beat --pidfile= -S tzbeat', sys.executable),
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    )
    wait_until(lambda: len(nominals(project.url)) >= 2, 30, "pulses")
    assert {p.name: (p.stat().st_size, p.stat().st_mtime_ns) for p in directory.iterdir()} == before
    directory.chmod(0o755)


def test_the_help_of_celery_beat_needs_neither_server_nor_schedule(make_project: Any) -> None:
    project = make_project("redis://127.0.0.1:9/0")
    project.write(beat_schedule=BAD)
    shown = project.start(sys.executable, "-m", "celery", "-A", "proj", "beat", "--help")
    assert shown.wait(30) == 0
    assert "--scheduler" in shown.log
    assert "problem" not in shown.log


def test_an_invalid_entry_is_left_out_where_strict_is_off(project: Any) -> None:
    project.write(beat_schedule={**PULSE, **BAD}, tzbeat_strict=False)
    beat = project.start_beat()
    wait_until(lambda: nominals(project.url), 30, "a pulse")
    for name in BAD:
        assert f"left out: entry {name!r}" in beat.log


@pytest.mark.server
def test_a_server_on_a_unix_socket_is_broker_and_store(make_project: Any, make_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = make_server(args=("--unixsocket", str(path)))
    project = make_project(f"redis+socket://{path}")
    project.write(beat_schedule=PULSE)
    project.start_beat()
    wait_until(lambda: len(nominals(server.url)) >= 2, 30, "pulses")
    project.start_worker()
    wait_until(lambda: len(project.received()) >= 2, 30, "a worker on the same socket")


@pytest.mark.server
def test_a_password_with_odd_characters_opens_broker_and_store_and_is_not_logged(
    make_project: Any, server: Any
) -> None:
    password = "p/w:@ü%"
    with connected(server.url) as client:
        client.config_set("requirepass", password)
    url = server.url.replace("127.0.0.1", f":{quote(password, safe='')}@127.0.0.1")
    project = make_project(url)
    project.write(beat_schedule=PULSE)
    beat = project.start_beat()
    wait_until(lambda: len(nominals(url)) >= 2, 30, "pulses")
    assert beat.stop() == 0
    assert password not in beat.log
    assert quote(password, safe="") not in beat.log


def test_a_beat_inside_a_worker_leads_and_ends_when_the_worker_is_killed(project: Any) -> None:
    project.write(beat_schedule=PULSE)
    worker = project.start_worker(args=["-B", "--scheduler", "tzbeat"])
    worker.wait_for_log("leads with epoch", 40)
    wait_until(lambda: len(project.received()) >= 3, 20, "pulses run by the same worker")
    standby = project.start_beat()
    wait_until(lambda: presence(project.url, standby), 30, "the standby")
    # Not the group: the worker alone, as the kernel's killer of memory hogs would.
    os.kill(worker.pid, 9)
    standby.wait_for_log("leads with epoch", 15)
    assert "the worker that this embedded beat belongs to is gone" in worker.log
    ran = [from_header["nominal"] for from_header in project.received()]
    waiting = [nominal.isoformat() for nominal in nominals(project.url)]
    assert len(set(ran)) == len(ran)
    wait_until(lambda: len(nominals(project.url)) >= len(waiting) + 2, 10, "pulses by the standby")

    # One that is asked to end hands over like any other.
    standby.terminate()
    worker = project.start_worker(args=["-B", "--scheduler", "tzbeat"])
    worker.wait_for_log("leads with epoch", 40)
    seen = len(project.received())
    wait_until(lambda: len(project.received()) >= seen + 2, 20, "pulses run by the same worker")
    assert worker.stop() == 0
    with connected(project.url) as client:
        assert not client.exists("tzbeat:{proj/0}:leader"), "its lease was given back"
    keys = [line["key"] for line in project.received()]
    assert len(set(keys)) == len(keys)

"""The server stops, freezes, restarts, turns read-only or loses everything; or all beats are down for a while."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import psutil
import pytest
from evidence import (
    NAMESPACE,
    PULSE,
    assert_gapless,
    audit,
    connected,
    ledger,
    nominals,
    presence,
    queued,
    terms,
)

from celery_tzbeat.model import from_iso
from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.server import LocalServer

SECOND = timedelta(seconds=1)
EVEN = {"even": {"task": "proj.record", "schedule": 2.0}}


def daily_at(instant: datetime) -> str:
    """Return the text of a daily schedule that is due at `instant`, a whole second."""
    return f"{instant.second} {instant.minute} {instant.hour} * * * UTC"


def in_seconds(seconds: float) -> datetime:
    return datetime.now(timezone.utc).replace(microsecond=0) + timedelta(seconds=seconds)


def sleep_until(instant: datetime) -> None:
    """Wait for an instant of the schedule: here time itself is the condition."""
    while (left := (instant - datetime.now(timezone.utc)).total_seconds()) > 0:
        time.sleep(left)


def stopped(server: LocalServer, until: datetime) -> None:
    server.kill()
    sleep_until(until)
    server.start()


def frozen(server: LocalServer, until: datetime) -> None:
    server.freeze()
    sleep_until(until)
    server.thaw()


def restarted(server: LocalServer, until: datetime) -> None:
    server.restart()
    sleep_until(until)


@pytest.mark.parametrize("outage", [stopped, frozen, restarted])
def test_ten_due_instants_of_an_outage_are_all_sent_and_none_twice(
    make_project: Any, aof_server: LocalServer, outage: Callable[[LocalServer, datetime], None]
) -> None:
    project = make_project(aof_server.url)
    daily = in_seconds(22)
    project.write(beat_schedule={**EVEN, "daily": {"task": "proj.record", "schedule": daily_at(daily)}})
    beats = [project.start_beat(), project.start_beat()]
    wait_until(lambda: nominals(project.url, "even"), 20, "the first message")
    wait_until(lambda: all(presence(project.url, beat) for beat in beats), 20, "both beats")
    descriptors = [psutil.Process(beat.pid).num_fds() for beat in beats]

    before = nominals(project.url, "even")[-1]
    until = max(before + timedelta(seconds=21), daily + SECOND)
    outage(aof_server, until)
    wait_until(lambda: nominals(project.url, "even")[-1] >= until + timedelta(seconds=4), 30, "messages after it")

    found = nominals(project.url, "even")
    assert_gapless(found, 2.0)
    assert sum(before < nominal <= until for nominal in found) >= 10
    assert nominals(project.url, "daily") == [daily]
    assert all(beat.alive for beat in beats), "a beat ended"
    assert "Traceback" not in beats[0].log + beats[1].log
    for beat, before_it in zip(beats, descriptors, strict=True):
        assert psutil.Process(beat.pid).num_fds() <= before_it + 4, "connections are left open"


def test_what_a_frozen_server_carries_out_when_it_thaws_is_not_sent_again(project: Any, server: LocalServer) -> None:
    # Ten a second: the call that the freeze catches is nearly always one that sends, and its reply is lost.
    project.write(beat_schedule={"fast": {"task": "proj.record", "schedule": 0.1}})
    beat = project.start_beat()
    wait_until(lambda: len(nominals(project.url, "fast")) >= 5, 30, "messages")
    for _ in range(6):
        server.freeze()
        time.sleep(1)
        server.thaw()
        until = datetime.now(timezone.utc) + SECOND
        wait_until(lambda until=until: nominals(project.url, "fast")[-1] > until, 20, "messages go on")
    assert_gapless(nominals(project.url, "fast"), 0.1)
    assert beat.alive


def test_a_server_that_turns_into_a_replica_and_back_is_led_again(project: Any, server: LocalServer) -> None:
    project.write(beat_schedule=PULSE)
    beats = [project.start_beat(), project.start_beat()]
    wait_until(lambda: len(nominals(project.url)) >= 2, 30, "pulses")
    with connected(project.url) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "9")
        try:
            demoted_at = len(nominals(project.url))
            sleep_until(in_seconds(6))
            assert len(nominals(project.url)) == demoted_at, "written to a replica"
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")
    wait_until(lambda: len(nominals(project.url)) >= demoted_at + 9, 20, "pulses after it")
    assert_gapless(nominals(project.url))
    assert all(beat.alive for beat in beats)
    assert "the store does not serve: ReadOnlyError" in beats[0].log + beats[1].log
    assert "Traceback" not in beats[0].log + beats[1].log


def test_a_wiped_store_under_a_living_leader_gets_its_cursors_back_and_nothing_is_sent_twice(project: Any) -> None:
    far = in_seconds(-3600)
    project.write(beat_schedule={**PULSE, "daily": {"task": "proj.record", "schedule": daily_at(far)}})
    leader = project.start_beat()
    leader.wait_for_log("leads with epoch", 30)
    standby = project.start_beat()
    wait_until(lambda: presence(project.url, standby), 30, "the standby")
    wait_until(lambda: len(nominals(project.url)) >= 3, 30, "pulses")
    with ledger(project.url) as store:
        cursor = store.cursors()["daily"]

    with connected(project.url) as client:
        transaction = client.pipeline(transaction=True)
        transaction.lrange("celery", 0, -1)
        transaction.flushall()
        texts = transaction.execute()[0]
    before = [from_iso(json.loads(text)["headers"]["meta"]["tzbeat"]["nominal"]) for text in reversed(texts)]

    wait_until(lambda: len(nominals(project.url)) >= 3, 20, "pulses after the wipe")
    with ledger(project.url) as store:
        assert store.cursors()["daily"] == cursor
    assert audit(project.url, "wiped")
    assert (terms(leader), terms(standby)) == (1, 0), "the leader led on"
    assert_gapless([*before, *nominals(project.url)])

    leader.kill()
    standby.wait_for_log("leads with epoch", 15)
    seen = len(nominals(project.url))
    wait_until(lambda: len(nominals(project.url)) >= seen + 3, 15, "pulses by the next leader")
    assert_gapless([*before, *nominals(project.url)])
    assert nominals(project.url, "daily") == []


def test_after_90_seconds_without_a_beat_the_grace_runs_and_the_audit_says_what_was_coalesced(project: Any) -> None:
    daily = in_seconds(20)
    project.write(beat_schedule={**PULSE, "daily": {"task": "proj.record", "schedule": daily_at(daily)}})
    beats = [project.start_beat() for _ in range(3)]
    wait_until(lambda: len(nominals(project.url)) >= 2, 18, "pulses")
    wait_until(lambda: all(presence(project.url, beat) for beat in beats), 15, "all three beats")
    for beat in beats:
        beat.kill()
    before = nominals(project.url)
    assert nominals(project.url, "daily") == []
    sleep_until(before[-1] + timedelta(seconds=90))
    beats = [project.start_beat() for _ in range(3)]
    wait_until(lambda: nominals(project.url)[-1] > datetime.now(timezone.utc) - 2 * SECOND, 30, "the beats to catch up")

    after = nominals(project.url)[len(before) :]
    (row,) = audit(project.url, "coalesced", "pulse")
    assert row.first == before[-1] + SECOND
    assert row.first is not None
    assert row.last is not None
    assert row.count == (row.last - row.first).total_seconds() + 1
    assert after[0] == row.last + SECOND, "the newest misfired one runs"
    assert_gapless(after)
    judged_at = datetime.fromtimestamp(int(row.id.split("-")[0]) / 1000, timezone.utc)
    in_grace = [nominal for nominal in after if nominal <= judged_at]
    assert 60 <= len(in_grace) <= 63, "60 in grace, the newest misfired, and what came due while judging"
    assert [r.last for r in audit(project.url, "sent", "pulse") if r.detail == "misfire"] == [after[0]]

    assert nominals(project.url, "daily") == [daily]
    assert [r.detail for r in audit(project.url, "sent", "daily")] == ["misfire"]
    assert len({message.id for message in queued(project.url)}) == len(queued(project.url))


def test_a_beat_waits_for_a_server_that_is_down_and_gets_over_killed_connections_and_broken_cursors(
    make_project: Any, aof_server: LocalServer
) -> None:
    project = make_project(aof_server.url)
    project.write(beat_schedule={**PULSE, **EVEN})
    with connected(project.url) as client:
        client.hset(f"tzbeat:{{{NAMESPACE}}}:cursor", mapping={"even": b"\xff\x00", "gone": "{}"})
    aof_server.kill()
    beat = project.start_beat()
    wait_until(lambda: "the store does not serve" in beat.log, 30, "the beat to say that nobody answers")
    aof_server.start()
    wait_until(lambda: len(nominals(project.url, "even")) >= 2, 20, "messages")
    assert "the cursor of entry 'even' cannot be read" in beat.log
    for _ in range(3):
        with connected(project.url) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        seen = len(nominals(project.url))
        wait_until(lambda seen=seen: len(nominals(project.url)) >= seen + 2, 20, "messages go on")
    assert_gapless(nominals(project.url))
    assert_gapless(nominals(project.url, "even"), 2.0)
    assert beat.stop() == 0
    assert "Traceback" not in beat.log


def test_a_damaged_key_is_named_by_one_leader_and_nothing_is_lost_once_it_is_mended(
    project: Any, server: LocalServer
) -> None:
    project.write(beat_schedule=PULSE)
    beats = [project.start_beat()]
    beats[0].wait_for_log("leads with epoch", 30)
    beats.append(project.start_beat())
    wait_until(lambda: presence(server.url, beats[1]), 30, "the standby")
    wait_until(lambda: len(nominals(server.url)) >= 2, 20, "pulses")
    key = f"tzbeat:{{{NAMESPACE}}}:cursor"
    with connected(server.url) as client:
        client.rename(key, "aside")
        client.set(key, "somebody else's")
        line = beats[0].wait_for_log("and must be a hash", 10)
        assert f"the key {key!r} is a string" in line
        time.sleep(7)  # more than three leases: as long as it would take to pass the lease round
        assert (terms(beats[0]), terms(beats[1])) == (1, 0)
        client.rename("aside", key)
    beats[0].wait_for_log("the store answers again", 10)
    seen = len(nominals(server.url))
    wait_until(lambda: len(nominals(server.url)) >= seen + 3, 20, "pulses go on")
    assert_gapless(nominals(server.url))
    assert beats[0].log.count("and must be a hash") == 1
    assert all(beat.alive for beat in beats)
    assert "Traceback" not in beats[0].log + beats[1].log

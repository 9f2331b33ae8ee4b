"""Hosts whose clock is wrong: they do not lead, they say so, and nothing is sent before its time."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from evidence import (
    NAMESPACE,
    PULSE,
    assert_gapless,
    audit,
    connected,
    counts,
    environment,
    faked_clock,
    lateness,
    ledger,
    nominals,
    presence,
    queued,
    terms,
)

from celery_tzbeat.api import TzBeat
from celery_tzbeat.model import Cursor, from_iso, iso
from celery_tzbeat.testing.processes import wait_until

HOUR, DAY = 3600, 86_400

CURSOR = "tzbeat:{proj/0}:cursor"


class Dial:
    """The wall clock of running processes, to be turned from outside; their monotonic clock stays the real one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.turn(0)

    def turn(self, seconds: float) -> None:
        """Set the clock so far ahead of the real one, for every process with `env`."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{seconds:+g}\n")
        new.replace(self._path)

    @property
    def env(self) -> dict[str, str]:
        found = faked_clock("")
        del found["FAKETIME"]  # it would count before the file
        return {**found, "FAKETIME_TIMESTAMP_FILE": str(self._path), "FAKETIME_NO_CACHE": "1"}


@pytest.fixture
def dial(tmp_path: Path) -> Dial:
    return Dial(tmp_path / "clock")


def test_beside_a_beat_a_day_ahead_the_healthy_one_leads_and_nothing_is_early(project: Any) -> None:
    hourly = {"hourly": {"task": "proj.record", "schedule": 3600}}
    project.write(beat_schedule={**PULSE, **hourly})
    ahead = project.start_beat(env=faked_clock(f"+{DAY}"))
    wait_until(lambda: (p := presence(project.url, ahead)) and "86400 s ahead of" in p.why, 40, "it to say so")
    healthy = project.start_beat()
    healthy.wait_for_log("leads with epoch", 40)
    wait_until(lambda: len(nominals(project.url)) >= 5, 20, "pulses")
    found = presence(project.url, ahead)
    assert found is not None
    assert found.role == "standby"
    assert abs(found.skew - DAY) < 5
    assert "tzbeat_max_skew (300 s)" in found.why
    ahead.wait_for_log("86400 s ahead of", 10)
    assert terms(ahead) == 0

    # Not even when nobody else is left.
    assert healthy.stop() == 0
    seen = len(nominals(project.url))
    time.sleep(4)
    assert len(nominals(project.url)) == seen
    assert terms(ahead) == 0
    assert min(lateness(project.url)) >= 0
    assert_gapless(nominals(project.url))


def test_while_all_clocks_are_wrong_nobody_leads_and_afterwards_what_was_due_is_made_good(project: Any) -> None:
    # The server's clock cannot be set: that all beats are an hour off is the same to them.
    project.write(beat_schedule=PULSE)
    beat = project.start_beat()
    wait_until(lambda: len(nominals(project.url)) >= 2, 40, "pulses")
    beat.kill()
    seen = len(nominals(project.url))
    wrong = [project.start_beat(env=faked_clock(f"{sign}{HOUR}")) for sign in "+-"]
    for beat, side in zip(wrong, ("ahead of", "behind"), strict=True):
        words = f"3600 s {side}"
        wait_until(
            lambda beat=beat, words=words: (p := presence(project.url, beat)) and words in p.why, 40, "it to say so"
        )
    time.sleep(4)
    assert len(nominals(project.url)) == seen
    assert [terms(beat) for beat in wrong] == [0, 0]
    for beat in wrong:
        assert beat.stop() == 0

    healthy = project.start_beat()
    healthy.wait_for_log("leads with epoch", 40)
    wait_until(lambda: nominals(project.url)[-1].timestamp() > time.time() - 2, 20, "the beat to catch up")
    assert_gapless(nominals(project.url))
    assert min(lateness(project.url)) >= 0
    assert not audit(project.url, "coalesced")


# ---- clocks that jump while a beat leads


#: Entries that would be sent at once by a beat a day ahead: soon, later, and with each way to catch up.
NEAR = """
from datetime import datetime, timedelta
from celery_tzbeat import at, every
soon = datetime.fromisoformat({now!r})
app.conf.beat_schedule.update({{
    **{{
        f"{{word}} {{name}}": {{"task": "proj.record", "schedule": schedule, "policy": {{"catchup": word}}}}
        for word in ("latest", "all", "skip")
        for name, schedule in (
            ("hourly", every("1h")), ("daily", every("1d")), ("minutely", every("1m")),
            ("in 200 s", at(soon + timedelta(seconds=200))), ("in 2 h", at(soon + timedelta(hours=2))),
        )
    }},
    "every second, all": {{"task": "proj.record", "schedule": 1.0, "policy": {{"catchup": "all"}}}},
}})
"""


def assert_nothing_early(project: Any) -> None:
    store = store_of(project)
    assert min(lateness(store)) >= 0
    with ledger(store) as found:
        now = found.time()
        assert all(cursor.nominal <= now for cursor in found.cursors().values())
    assert not [name for name in counts(project.url) if " in " in name]
    assert not audit(store, "coalesced") + audit(store, "skipped") + audit(store, "missed")


def store_of(project: Any) -> str:
    """Return the URL of the project's store; the broker's, where it is no other."""
    return str(getattr(project, "store", project.url))


@pytest.mark.parametrize("split", [False, True], ids=["one-server", "split"])
def test_a_leader_whose_clock_jumps_a_day_ahead_for_10_s_gives_way_to_a_healthy_standby_and_nothing_is_early(
    make_project: Any, server: Any, dial: Dial, split: bool
) -> None:
    lease = 4  # which a busy machine keeps
    now = datetime.now(timezone.utc).replace(microsecond=0)
    project = make_project(f"{server.url[:-1]}1" if split else server.url)
    project.store = server.url
    conf = {"tzbeat_url": server.url, "tzbeat_namespace": NAMESPACE} if split else {}
    pulse = {"pulse": {**PULSE["pulse"], "options": {"expires": 600}}}
    project.write(
        NEAR.format(now=now.isoformat()), beat_schedule=pulse, result_expires=None, tzbeat_lease=lease, **conf
    )
    jumping = project.start_beat(env=dial.env)
    jumping.wait_for_log("leads with epoch", 40)
    healthy = project.start_beat()
    wait_until(lambda: presence(server.url, healthy), 40, "the standby")
    wait_until(lambda: len(nominals(project.url)) >= 3, 20, "pulses")

    before = terms(jumping)
    dial.turn(DAY)
    jumped = time.monotonic()
    healthy.wait_for_log("leads with epoch", 20)
    assert time.monotonic() - jumped < lease + 2, "a lease, and the time of a tick"
    wait_until(lambda: (p := presence(server.url, jumping)) and "86400 s ahead of" in p.why, 10, "it to say so")
    time.sleep(max(0.0, jumped + 10 - time.monotonic()))
    assert_nothing_early(project)
    assert terms(jumping) == before, "it led while its clock was wrong"
    dial.turn(0)
    seen = len(nominals(project.url))
    wait_until(lambda: len(nominals(project.url)) >= seen + 3, 10, "the next due instants")
    wait_until(lambda: (p := presence(server.url, jumping)) and not p.hindered, 10, "it to be fit again")

    # It is as good as any other now.
    assert healthy.stop() == 0
    wait_until(lambda: terms(jumping) > before, 20, "it to lead again")
    seen = len(nominals(project.url))
    wait_until(lambda: len(nominals(project.url)) >= seen + 3, 10, "pulses")
    messages = queued(project.url)
    sent = {message.tzbeat["key"]: message.id for message in messages}
    assert len(set(sent.values())) == len(sent), "each under one task id"
    # By claims what was on its way when the leader changed may come as a copy.
    assert len(messages) - len(sent) <= (2 if split else 0)
    for entry in ("pulse", "every second, all"):
        assert_gapless(sorted({*nominals(project.url, entry)}))
    for message in messages:
        if message.entry == "pulse":
            by_its_nominal = from_iso(message.headers["expires"]) - message.nominal
            assert timedelta(seconds=599) < by_its_nominal < timedelta(seconds=660), "counted by a clock that is right"
    assert_nothing_early(project)
    assert "Traceback" not in jumping.log


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_lone_leader_whose_clock_jumps_about_makes_good_what_was_due(project: Any, dial: Dial, jump: int) -> None:
    now = datetime.now(timezone.utc).replace(microsecond=0)
    project.write(NEAR.format(now=now.isoformat()), beat_schedule=dict(PULSE), result_expires=None)
    project.start_beat(env=dial.env)
    wait_until(lambda: len(nominals(project.url)) >= 3, 40, "pulses")
    for _ in range(5):  # each time in another moment of its tick
        dial.turn(jump)
        time.sleep(1.3)
        dial.turn(0)
        seen = len(nominals(project.url))
        wait_until(lambda seen=seen: len(nominals(project.url)) > seen, 15, "the next due instant")
    wait_until(lambda: nominals(project.url)[-1].timestamp() > time.time() - 2, 15, "it to catch up")
    for entry in ("pulse", "every second, all"):
        assert_gapless(nominals(project.url, entry))
    assert_nothing_early(project)


# ---- cursors ahead of the store's clock


def test_a_cursor_that_is_ahead_of_the_store_is_named_by_check_set_back_by_the_next_leader_and_reported(
    project: Any,
) -> None:
    project.write(beat_schedule={**PULSE, "other": PULSE["pulse"]})
    beat = project.start_beat()
    wait_until(lambda: len(nominals(project.url)) >= 3, 40, "pulses")
    assert beat.stop() == 0
    seen = len(nominals(project.url))
    with ledger(project.url) as store, connected(project.url) as client:
        cursor = store.cursors()["pulse"]
        ahead = cursor.nominal + timedelta(days=1)
        client.hset(CURSOR, "pulse", Cursor(ahead, cursor.rule, tzdata=cursor.tzdata).to_text())
    warned = {finding.id: finding.text for finding in TzBeat(app_of(project)).check()}["tzbeat.W204"]
    assert warned.endswith(f"at most at {iso(ahead)}: pulse")

    beat = project.start_beat()
    said = beat.wait_for_log("ahead of the store's clock", 40)
    assert f"the cursor of entry 'pulse' stands at {iso(ahead)}" in said
    wait_until(lambda: len(nominals(project.url)) >= seen + 4, 20, "pulses")
    (repaired,) = audit(project.url, "repaired")
    assert (repaired.entry, repaired.first) == ("pulse", ahead)
    assert_gapless(nominals(project.url, "other"))
    found = nominals(project.url)
    assert len(set(found)) == len(found)
    assert_gapless(found[seen:])
    assert "tzbeat.W204" not in {finding.id for finding in TzBeat(app_of(project)).check()}


def test_a_leader_goes_on_when_the_clocks_of_server_and_host_are_set_back_by_an_hour(
    make_project: Any, make_server: Any, dial: Dial
) -> None:
    with environment(**dial.env):
        server = make_server()
    project = make_project(server.url)
    dial.turn(HOUR)
    # Servers whose clock is read from a file are slow: a lease that is not lost by that.
    project.write(beat_schedule=PULSE, tzbeat_lease=6, result_expires=None)
    beat = project.start_beat(env=dial.env)
    wait_until(lambda: len(nominals(project.url)) >= 3, 40, "pulses")
    before = nominals(project.url)
    assert before[-1].timestamp() > time.time() + HOUR - 60
    dial.turn(0)
    beat.wait_for_log("ahead of the store's clock", 20)
    wait_until(lambda: len(nominals(project.url)) >= len(before) + 5, 20, "pulses by the clock as it is now")
    after = [nominal for nominal in nominals(project.url) if nominal.timestamp() < time.time() + 60]
    assert_gapless(after)
    assert_gapless([nominal for nominal in nominals(project.url) if nominal not in after])
    assert [record.entry for record in audit(project.url, "repaired")] == ["pulse"]


def app_of(project: Any) -> Any:
    """Return the project's app as this process reads it."""
    namespace: dict[str, Any] = {"__name__": "proj"}
    exec(compile((project.directory / "proj.py").read_text(), "proj.py", "exec"), namespace)
    app = namespace["app"]
    app.set_current()
    return app

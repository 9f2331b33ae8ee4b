"""Old and new releases side by side on real beats: deploy, rollback, hand-over, and what `check` and the leader say of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import tzdata
from evidence import (
    NAMESPACE,
    PULSE,
    assert_gapless,
    assert_once_each,
    connected,
    faked_clock,
    lateness,
    ledger,
    nominals,
    presence,
    queued,
    terms,
)

import celery_tzbeat
from celery_tzbeat.beat.ticker import WARN_EVERY
from celery_tzbeat.model import Presence
from celery_tzbeat.testing.processes import Process, wait_until

#: The lease of the fixture's projects, in seconds; a beat is not due to be up sooner than START.
LEASE = 2
START = 60


def findings(project: Any) -> dict[str, str]:
    """Return what `celery tzbeat check` finds with the code that stands there now, text by id."""
    ours = str(Path(celery_tzbeat.__file__).parents[1])
    paths = os.pathsep.join(path for path in (ours, os.environ.get("PYTHONPATH", "")) if path)
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "proj", "tzbeat", "check", "--json"],
        cwd=project.directory,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {found["id"]: found["text"] for found in json.loads(done.stdout)["findings"]}


def start(project: Any, name: str = "", **options: Any) -> Process:
    """Start a beat and return when it takes part."""
    beat: Process = project.start_beat(name, **options)
    wait_until(lambda: present(project, beat), START, "the beat to take part")
    return beat


def present(project: Any, beat: Process) -> Presence | None:
    return presence(getattr(project, "store", project.url), beat)


def leads(project: Any, beat: Process) -> bool:
    found = present(project, beat)
    return found is not None and found.role == "leader" and found.epoch > 0


def seconds_until(condition: Any, timeout: float, description: str) -> float:
    began = time.monotonic()
    wait_until(condition, timeout, description)
    return time.monotonic() - began


# ---- a whole deploy and its rollback


def write_release(project: Any, version: int, first_due: datetime, **conf: Any) -> None:
    """Write a release of the app: under load, with one entry for each way in which releases differ."""
    every_second = {"task": "proj.record", "schedule": 1.0}
    entries: dict[str, Any] = {f"load {n}": every_second for n in range(20)}
    entries["args differ"] = {**every_second, "args": [f"v{version}"]}
    entries["schedule differs"] = {**every_second, "schedule": float(version)}
    entries["name of v1" if version == 1 else "name of v2"] = every_second
    entries["only in v1" if version == 1 else "only in v2"] = every_second
    # One for each second of the deploy, due once: edited in every way but its instant.
    body = f"""
from datetime import datetime, timedelta
from celery_tzbeat import at
first = datetime.fromisoformat({first_due.isoformat()!r})
app.conf.beat_schedule.update({{
    f"due {{n}}": {{"task": "proj.record", "schedule": at(first + timedelta(seconds=n)), "args": ["v{version}"]}}
    for n in range(90)
}})
"""
    project.write(body, beat_schedule=entries, result_expires=None, tzbeat_release=str(version), **conf)


NAMED = (
    "'name of v1', 'only in v1'",
    "'name of v2', 'only in v2'",
    "defined differently: 'args differ', 'due 0'",
)


@pytest.mark.parametrize("split", [False, True], ids=["one-server", "split"])
def test_a_rolling_deploy_and_its_rollback_under_load_lose_and_double_nothing(
    make_project: Any, server: Any, split: bool
) -> None:
    project = make_project(f"{server.url[:-1]}1" if split else server.url)
    project.store = server.url
    conf = {"tzbeat_url": server.url, "tzbeat_namespace": NAMESPACE} if split else {}
    first_due = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(seconds=10)

    write_release(project, 1, first_due, **conf)
    old = [start(project, "v1-a"), start(project, "v1-b")]
    wait_until(lambda: any(leads(project, beat) for beat in old), START, "v1 to lead")
    wait_until(lambda: len(nominals(project.url, "due 1")) == 1, 60, "the deploy's time")
    assert not {"tzbeat.W202", "tzbeat.W208"} & set(findings(project))

    # The code of v2 is there, its beats are not yet.
    write_release(project, 2, first_due, **conf)
    said = findings(project)["tzbeat.W208"]
    assert "(release 1) has other entries than this code" in said
    assert all(words in said for words in NAMED)

    new = start(project, "v2")
    assert seconds_until(lambda: leads(project, new), 20, "v2 to lead") < 3 * LEASE + 2
    # The old ones still stand by.
    found = findings(project)
    assert "tzbeat.W208" not in found
    assert all(words in found["tzbeat.W202"] for words in NAMED)
    assert "(release 1)" in found["tzbeat.W202"]
    assert "(release 2)" in found["tzbeat.W202"]
    warned = new.wait_for_log("has other entries, and only the leader's run", 10)
    assert "only here: 'name of v2', 'only in v2'; only there: 'name of v1', 'only in v1'" in warned
    handed = next(beat for beat in old if terms(beat))
    assert "hands over to" in handed.log
    assert "(release 2): this beat is of release 1" in handed.log
    for beat in old:
        assert beat.stop() == 0
    wait_until(lambda: not {"tzbeat.W202", "tzbeat.W208"} & set(findings(project)), 30, "nothing to differ")
    seen = len(nominals(project.url, "only in v2"))
    wait_until(lambda: len(nominals(project.url, "only in v2")) >= seen + 3, 20, "pulses of v2 alone")

    # And back.
    write_release(project, 1, first_due, **conf)
    back = start(project, "v1-c")
    said = findings(project)["tzbeat.W208"]
    assert "(release 2) has other entries than this code" in said
    assert all(words in said for words in NAMED)
    assert leads(project, new), "an older standby is not handed over to"
    new.terminate()
    wait_until(lambda: leads(project, back), 20, "v1 to lead again")
    assert new.wait(10) == 0
    seen = len(nominals(project.url, "only in v1"))
    wait_until(lambda: len(nominals(project.url, "only in v1")) >= seen + 3, 20, "pulses of v1 again")
    assert back.stop() == 0
    assert not {"tzbeat.W202", "tzbeat.W208"} & set(findings(project))

    for n in range(20):
        assert_gapless(nominals(project.url, f"load {n}"))
    assert min(lateness(project.store)) >= 0, "nothing is early"
    messages = queued(project.url)
    assert len({message.tzbeat["key"] for message in messages}) == len(messages), "nothing twice"
    # Whoever led sent its own definition, and each instant was one's or the other's.
    versions = {m.tzbeat["epoch"]: m.args[0] for m in messages if m.entry == "args differ"}
    assert list(dict.fromkeys(versions.values())) in (["v1", "v2", "v1"], ["v1", "v2"])
    assert_gapless(nominals(project.url, "args differ"))
    last = nominals(project.url, "load 0")[-1]
    for n in range(90):
        sent = [m for m in messages if m.entry == f"due {n}"]
        if first_due + timedelta(seconds=n) <= last:
            assert [m.nominal for m in sent] == [first_due + timedelta(seconds=n)]
            assert sent[0].args == [versions[sent[0].tzbeat["epoch"]]]
    # Every second of v1, every other of v2.
    differing = nominals(project.url, "schedule differs")
    assert_once_each(differing)
    evens = [nominal for nominal in differing if nominal.timestamp() % 2 == 0]
    assert_gapless(sorted(evens), 2.0)
    # What v2 does not list waits, and comes late after the rollback; what v1 does not list ends.
    for name in ("name of v1", "only in v1"):
        assert_gapless(nominals(project.url, name))
    for name in ("name of v2", "only in v2"):
        assert_gapless(nominals(project.url, name))
        assert {versions[m.tzbeat["epoch"]] for m in messages if m.entry == name} == {"v2"}


# ---- who leads


def test_the_newest_release_leads_after_a_deploy_and_an_old_one_when_that_is_gone(project: Any) -> None:
    for version in ("9", "10"):
        project.write(beat_schedule=PULSE, tzbeat_release=version)
        beats = [start(project, f"v{version}-{n}") for n in range(2)]
        wait_until(lambda beats=beats: any(leads(project, beat) for beat in beats), START, f"{version} to lead")
        if version == "9":
            old = beats
    leader = next(beat for beat in beats if leads(project, beat))
    assert sum(terms(beat) for beat in beats) == 1, "of equal releases none hands over"
    for beat in beats:
        beat.kill()
    taken = seconds_until(lambda: any(leads(project, beat) for beat in old), 20, "an old one to lead")
    assert taken < 2 * LEASE + 2
    seen = len(nominals(project.url))
    wait_until(lambda: len(nominals(project.url)) >= seen + 3, 20, "pulses")
    assert_gapless(nominals(project.url))
    assert leader.returncode == -9


def test_of_beats_that_name_no_release_whoever_leads_goes_on(project: Any) -> None:
    project.write(beat_schedule=PULSE)
    old = start(project)
    wait_until(lambda: leads(project, old), START, "it to lead")
    project.write(beat_schedule={**PULSE, "new": PULSE["pulse"]}, tzbeat_release="2")
    new = start(project)
    old.wait_for_log("(release 2) has other entries, and only the leader's run: only there: 'new'", 4 * LEASE + 5)
    time.sleep(3 * LEASE)
    assert leads(project, old)
    assert terms(new) == 0


def test_a_newer_release_on_a_host_with_a_wrong_clock_changes_nothing(project: Any) -> None:
    project.write(beat_schedule=PULSE, tzbeat_release="1")
    old = start(project)
    wait_until(lambda: leads(project, old), START, "it to lead")
    project.write(beat_schedule=PULSE, tzbeat_release="2")
    new = start(project, env=faked_clock("+86400"))
    wait_until(lambda: (p := present(project, new)) and p.hindered and p.why, 20, "it to say that it cannot lead")
    seen = len(nominals(project.url))
    wait_until(lambda: len(nominals(project.url)) >= seen + 5 * LEASE, 40, "five leases")
    assert terms(old) == 1
    assert terms(new) == 0
    assert_gapless(nominals(project.url))


def test_a_newer_release_that_cannot_write_to_the_store_is_handed_over_to_once(project: Any, server: Any) -> None:
    # It may attend and hold the lease, and fails when it takes office: the cursors are not its to touch.
    own = ("leader", "epoch", "epoch:granted", "schema", "beats", "beat:*", "entries:*")
    with connected(server.url) as client:
        client.acl_setuser(
            *("weak", True, False),
            passwords=["+p"],
            categories=["+@all"],
            keys=["tzbeat-probe*", *(f"tzbeat:*:{name}" for name in own)],
            channels=["*"],
        )
    project.write(beat_schedule=PULSE, tzbeat_release="1")
    old = start(project)
    wait_until(lambda: leads(project, old), START, "it to lead")
    project.write(beat_schedule=PULSE, tzbeat_release="2", tzbeat_url=server.url.replace("redis://", "redis://weak:p@"))
    new = start(project)
    wait_until(lambda: "hands over to" in old.log, 30, "the hand-over")
    new.wait_for_log("the store answered with an error", 20)
    wait_until(lambda: leads(project, old), 20, "the old one to lead again")
    seen = len(nominals(project.url))
    wait_until(lambda: len(nominals(project.url)) >= seen + 6 * LEASE, 40, "six leases")
    assert terms(old) == 2
    assert terms(new) == 0
    assert new.alive
    assert_gapless(nominals(project.url))


# ---- the schema


def test_beside_a_store_that_needs_a_newer_release_a_beat_stands_by_and_says_so_and_leads_when_it_does_not(
    project: Any,
) -> None:
    project.write(beat_schedule=PULSE)
    beats = [start(project), start(project)]
    wait_until(lambda: len(nominals(project.url)) >= 2, START, "pulses")
    with connected(project.url) as client:
        client.hset("tzbeat:{proj/0}:schema", "needs", 2)
        for beat in beats:
            said = "the store needs schema 2, this release writes 1: upgrade celery_tzbeat on this host"
            wait_until(lambda beat=beat, said=said: (p := present(project, beat)) and said in p.why, 20, "it to say so")
            beat.wait_for_log(said, 20)
        seen = len(nominals(project.url))
        time.sleep(3 * LEASE)
        assert len(nominals(project.url)) == seen
        assert not client.exists("tzbeat:{proj/0}:leader"), "nobody bids"
        client.hset("tzbeat:{proj/0}:schema", "needs", 1)
    wait_until(lambda: any(leads(project, beat) for beat in beats), 20, "a leader")
    wait_until(lambda: len(nominals(project.url)) >= seen + 12, 20, "what was due meanwhile")
    assert_gapless(nominals(project.url))
    assert all(beat.alive for beat in beats)


def test_beside_beats_of_an_older_and_of_an_unknown_kind_a_beat_leads_and_check_works(project: Any) -> None:
    project.write(beat_schedule=PULSE, tzbeat_release="2")
    with ledger(project.url) as store, connected(project.url) as client:
        now = store.time()
        old = Presence("old:1:a", "old", 1, "0.1", "2020a", "f0", "standby", "", now, None, 0.0, 3, False)
        said = json.loads(old.to_json())
        for word in ("release", "schema", "path", "hindered", "epoch"):
            del said[word]
        far = (now + timedelta(seconds=60)).isoformat().replace("+00:00", "Z")  # it lives on through this test
        for name, text in (("old:1:a", json.dumps({**said, "last_tick": far})), ("alien:1:b", '{"v": 2, "who": "x"}')):
            client.zadd(store.keys("beats"), {name: time.time() * 1000 + 60_000})
            client.set(store.keys.beat(name), text, ex=120)
    beat = start(project)
    wait_until(lambda: len(nominals(project.url)) >= 3, START, "pulses")
    beat.wait_for_log("the beat old:1 has other entries, and only the leader's run: which ones is not known", 20)
    beat.wait_for_log("the beat old:1 has zone files 2020a", 5)
    assert {"tzbeat.W202", "tzbeat.W203"} <= set(findings(project))
    assert_gapless(nominals(project.url))
    assert "Traceback" not in beat.log


# ---- zone files


def test_beats_with_different_zone_files_are_named_by_the_leader_and_by_check(project: Any) -> None:
    # Another version of the package `tzdata`, first on the path: what another image would have.
    package = project.directory / "other" / "tzdata"
    package.mkdir(parents=True)
    original = Path(tzdata.__file__).parent
    for part in original.iterdir():
        if part.name not in ("__init__.py", "__pycache__"):
            (package / part.name).symlink_to(part)
    text = (original / "__init__.py").read_text()
    (package / "__init__.py").write_text(text.replace(tzdata.IANA_VERSION, "2099z"))
    paths = os.pathsep.join([str(package.parent), str(project.directory), str(Path(celery_tzbeat.__file__).parents[1])])
    project.write(beat_schedule={**PULSE, "nightly": {"task": "proj.record", "schedule": "30 2 * * * Europe/Paris"}})
    leader = start(project)
    wait_until(lambda: leads(project, leader), START, "it to lead")
    other = start(project, env={"PYTHONPATH": paths})
    found = present(project, other)
    assert found is not None
    assert found.tzdata == "2099z"
    warned = leader.wait_for_log("has zone files 2099z", 4 * LEASE + 5)
    assert f"the leader {tzdata.IANA_VERSION}" in warned
    text = findings(project)["tzbeat.W203"]
    assert f"2099z on {found.where}" in text
    assert "tzbeat.W202" not in findings(project), "their entries are the same"
    leader.terminate()
    wait_until(lambda: leads(project, other), 20, "the other to lead")
    wait_until(lambda: len(nominals(project.url)) >= 8, 20, "pulses")
    assert_gapless(nominals(project.url))
    assert WARN_EVERY == 60
    assert leader.log.count("has zone files") == 1

"""Whether a beat leads, on time, while beats run: `overall_health`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery import Celery

from celery_tzbeat.beat.fleet import alive
from celery_tzbeat.beat.scheduler import open_store
from celery_tzbeat.clock import Clock
from celery_tzbeat.leases.protocol import Leader
from celery_tzbeat.model import Cursor, Entry, Presence, iso
from celery_tzbeat.schedules import tzdata_version
from celery_tzbeat.schedules.plan import start_of
from celery_tzbeat.settings import Settings, broker_url
from celery_tzbeat.store.client import CALL_ERRORS, hide_password

from .findings import NO_ANSWER, Finding, ask_broker, asked, client_of, configured, error, leases_of, listed, servers_of

#: Later than this, what is due counts as not sent in time.
LATE = timedelta(seconds=5)

#: The parts of INFO that tell whether a server takes writes.
_INFO = ("memory", "replication", "persistence")


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a beat leads, on time. `time` is the store's clock, None where it did not answer."""

    ok: bool
    leader: Leader | None
    time: datetime | None
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "leader": self.leader.holder if self.leader else None,
            "epoch": self.leader.epoch if self.leader else None,
            "time": iso(self.time) if self.time else None,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def overall_health(app: Celery, clock: Clock) -> Health:
    """Return whether a beat leads, on time, with clocks that agree; every finding is an error."""
    settings, reading, findings = configured(app)
    findings = [finding for finding in findings if finding.severity == "error"]
    if settings is None:
        return Health(False, None, None, tuple(findings))
    leader: Leader | None = None
    time: datetime | None = None
    try:
        with closing(open_store(settings)) as store, closing(leases_of(settings)) as leases:
            before, time, after = clock.now(), store.time(), clock.now()
            beats, cursors, claimed = store.beats(), store.cursors(), store.open_since()
            leader = leases.leader()
    except NO_ANSWER as exc:
        findings.append(error("E301", f"{servers_of(settings)}: {exc}", "start the server, or correct tzbeat_url"))
        return Health(False, None, time, tuple(findings))
    leading = list(_leadership(leader, beats, time, settings))
    if leading:
        leading += _no_writes(settings)
    findings += leading
    unsent = [*_overdue(reading.entries, cursors, time, settings), *_unsent(claimed, time)]
    findings += unsent
    if leading or unsent:
        findings += _no_broker(app, settings)
    findings += _clocks(beats, before + (after - before) / 2 - time, settings)
    return Health(not findings, leader, time, tuple(findings))


def _leadership(
    leader: Leader | None, beats: Sequence[Presence], time: datetime, settings: Settings
) -> Iterator[Finding]:
    if leader is None:
        living = alive(beats, now=time, within=settings.lease)
        reasons = [f"{beat.host}:{beat.pid}: {beat.why}" for beat in living if beat.why]
        yield error("E302", "nobody leads: nothing is sent", "; ".join(reasons) or _silent(beats, time, settings))
        return
    presence = next((beat for beat in beats if beat.beat == leader.holder), None)
    hint = "the lease goes to a standby when the leader makes no progress; look at its log"
    if presence is None:
        yield error("E303", f"the leader {leader.holder} has said nothing to the store", hint)
    elif (age := time - last_tick(presence)) > settings.lease:
        yield error("E303", f"the leader {leader.holder} has not ticked for {age.total_seconds():.0f} s", hint)


def _silent(beats: Sequence[Presence], time: datetime, settings: Settings) -> str:
    """Return what is known where no beat has ticked within a lease: one that cannot write may be alive nevertheless."""
    if not beats:
        return (
            "no beat is alive that could write to the store: start one with `celery -A <app> beat`, or look at its log"
        )
    ages = sorted(((time - last_tick(beat)).total_seconds(), f"{beat.host}:{beat.pid}") for beat in beats)
    said = listed([f"{who} {age:.0f} s ago" for age, who in ages])
    span = (settings.lease * 15).total_seconds()
    return (
        f"{len(beats)} beat(s) said something within the last {span:g} s ({said}): they ended, hang, or cannot write to "
        "the store; look at their logs, or start one with `celery -A <app> beat`"
    )


def _no_writes(settings: Settings) -> Iterator[Finding]:
    """Ask each server for what makes it refuse writes. Writes nothing; a server that does not tell is passed over."""
    for url in dict.fromkeys((settings.url, settings.lock)):
        try:
            with closing(client_of(settings, url)) as client:
                info = {key: value for part in _INFO for key, value in client.info(part).items()}
                guard = asked(client, "stop-writes-on-bgsave-error")
        except CALL_ERRORS:
            continue
        for reason, hint in _reasons(info, guard):
            yield error("E306", f"{hide_password(url)!r} takes no writes: {reason}", hint)


def _reasons(info: Mapping[str, Any], guard: str | None) -> Iterator[tuple[str, str]]:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if most and used >= most and info.get("maxmemory_policy", "noeviction") == "noeviction":
        yield (
            f"maxmemory is reached ({used:,} of {most:,} bytes: OOM)",
            "raise maxmemory, or remove what fills the server",
        )
    if info.get("role") == "slave" and int(info.get("slave_read_only", 1)):
        yield "it is a replica (READONLY)", "name the primary in broker_url, tzbeat_url or tzbeat_lock"
    if info.get("loading"):
        yield "it is loading its data (LOADING)", "wait until it has"
    if info.get("rdb_last_bgsave_status", "ok") != "ok" and guard != "no":
        yield "its last save failed (MISCONF)", "see the server's log: its disk may be full"
    if info.get("aof_last_write_status", "ok") != "ok":
        yield "its last write to the append-only file failed (MISCONF)", "see the server's log: its disk may be full"


def _overdue(
    entries: Mapping[str, Entry], cursors: Mapping[str, Cursor], time: datetime, settings: Settings
) -> Iterator[Finding]:
    late: list[tuple[datetime, str]] = []
    for name, entry in entries.items():
        cursor = cursors.get(name)
        if cursor is None or cursor.rule != entry.rule:
            continue  # new or changed here: a leader with this code places it first
        start = start_of(entry, cursor, now=time, retention=settings.retention, tzdata=tzdata_version())
        due = entry.schedule.next_after(start.after)
        if due is not None and time - due > LATE:
            late.append((due, name))
    if late:
        said = [f"{name!r} since {iso(due)}" for due, name in sorted(late)]
        yield error(
            "E304",
            f"due and not sent: {listed(said)}",
            "look at the leader's log; its entries may be other ones (`celery tzbeat check`)",
        )


def _unsent(claimed: Mapping[str, datetime], time: datetime) -> Iterator[Finding]:
    late = sorted((since, key) for key, since in claimed.items() if time - since > LATE)
    if late:
        said = [f"{key!r} since {iso(since)}" for since, key in late]
        yield error(
            "E304",
            f"claimed and not sent: {listed(said)}",
            "the broker does not take it; it is sent when it does. Look at the leader's log",
        )


def _no_broker(app: Celery, settings: Settings) -> Iterator[Finding]:
    """Ask the broker, as seen from this host, where something is wrong that it may explain."""
    failure = ask_broker(app, settings)
    if failure is not None:
        yield error(
            "E307",
            f"the broker {hide_password(broker_url(app))!r} does not answer: {type(failure).__name__}: {failure}",
            "start the broker, or correct broker_url (`celery tzbeat check`); nothing that was due is lost meanwhile",
        )


def _clocks(beats: Iterable[Presence], own: timedelta, settings: Settings) -> Iterator[Finding]:
    skews = [(f"beat {beat.host}:{beat.pid}", beat.skew) for beat in beats]
    for who, skew in [("this host", own.total_seconds()), *skews]:
        if abs(skew) > settings.max_skew.total_seconds():
            side = "ahead of" if skew > 0 else "behind"
            yield error(
                "E305",
                f"{who}: its clock is {abs(skew):.0f} s {side} the store's, more than tzbeat_max_skew "
                f"({settings.max_skew.total_seconds():g} s) allows",
                "set the clock (NTP); a beat there does not lead until then",
            )


def last_tick(beat: Presence) -> datetime:
    """Return when a beat ticked last by the store's clock; it says so by its own."""
    return beat.last_tick - timedelta(seconds=beat.skew)

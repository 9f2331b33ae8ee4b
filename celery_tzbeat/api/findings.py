"""What is wrong or doubtful: before a beat starts (`check`), and while beats run (`overall_health`).

    tzbeat.E001   a setting                                tzbeat.E002   an entry
    tzbeat.E003   the app's modules cannot be imported     tzbeat.E004   the store, or the lease's server, refuses us
    tzbeat.E005   a database that is none                  tzbeat.E006   a key of another type in the store
    tzbeat.W101   a schedule's author may not have meant it
    tzbeat.W102   no zone given: the app's is used         tzbeat.W103   a task that this process does not know
    tzbeat.W104   an entry is left out (tzbeat_strict = False)
    tzbeat.W201   the store, or the lease's server, does not answer
    tzbeat.W202   beats with different entries             tzbeat.W203   beats with different zone files
    tzbeat.W204   a cursor ahead of the store's clock      tzbeat.W205   the server may evict keys
    tzbeat.W206   the server keeps nothing on disk         tzbeat.W207   broker and store are written differently
    tzbeat.W208   the leader has other entries than this code
    tzbeat.W210   fewer replicas than tzbeat_wait_replicas
    tzbeat.E301   the store, or the lease's server, does not answer
    tzbeat.W209   beat_scheduler is not ours
    tzbeat.E302   nobody leads                             tzbeat.E303   the leader does not tick
    tzbeat.E304   something is due and was not sent        tzbeat.E305   a clock is off by more than tzbeat_max_skew
    tzbeat.E306   the store, or the lease's server, takes no writes

The number after a letter never changes its meaning. E3xx come from `overall_health` only.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from celery import Celery
from celery.beat import ScheduleEntry
from celery.utils.imports import load_extension_class_names, symbol_by_name

from celery_tzbeat.beat.capture import Capture
from celery_tzbeat.beat.fleet import alive, differing_entries
from celery_tzbeat.beat.paths import ONE_SERVER, ClaimsPath, SameServerPath, same_server_probe
from celery_tzbeat.beat.scheduler import Scheduler, open_store, queues_of
from celery_tzbeat.clock import Clock
from celery_tzbeat.entries import CLEANUP, Reading, read_entries
from celery_tzbeat.errors import InvalidSchedule, StoreUnavailable, StoreUnreadable
from celery_tzbeat.leases.protocol import Leader
from celery_tzbeat.leases.redis import RedisLeases
from celery_tzbeat.model import Cursor, Entry, Presence, iso
from celery_tzbeat.schedules import from_celery, tzdata_version
from celery_tzbeat.schedules.plan import start_of
from celery_tzbeat.schedules.rule import Rule
from celery_tzbeat.settings import Settings, why_two_servers
from celery_tzbeat.store.client import CALL_ERRORS, hide_password, make_client, redis_url
from celery_tzbeat.store.keys import Keys
from celery_tzbeat.store.protocol import Store

#: Later than this, what is due counts as not sent in time.
LATE = timedelta(seconds=5)

#: How many names a finding lists.
LISTED = 5

#: What a store or lease server answers with when it does not serve, and what it says when it refuses (ACL).
NO_ANSWER: tuple[type[Exception], ...] = (StoreUnavailable, StoreUnreadable, *CALL_ERRORS)

#: What a server says that does not know us.
_REFUSED = re.compile(
    r"AuthenticationError|AuthenticationWrongNumber|NOAUTH|WRONGPASS|invalid username-password|"
    r"invalid password|without any password configured",
    re.IGNORECASE,
)
_NO_DATABASE = re.compile(r"DB index is out of range|invalid DB index|SELECT is not allowed", re.IGNORECASE)

#: The parts of INFO that tell whether a server takes writes.
_INFO = ("memory", "replication", "persistence")

#: Any two zones: a schedule that is equal when read in either needs no zone, or names its own.
_TWO_ZONES = ("Pacific/Kiritimati", "Pacific/Pago_Pago")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (error) or doubtful (warning), under a stable id, with what to do about it."""

    id: str
    severity: Literal["error", "warning"]
    text: str
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "severity": self.severity, "text": self.text, "hint": self.hint}


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


@dataclass(frozen=True, slots=True)
class Route:
    """The path by which a beat of this code would send, and why that one. `name` is empty where it is not known."""

    name: str
    why: str

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name or None, "why": self.why}


def route(app: Celery) -> Route:
    """Return the path to the broker, found out as a beat does: from the URLs, or else by a probe.

    Raises nothing; asks the store and the broker once each, within a sixth of the lease.
    """
    settings, _ = Settings.examine(app)
    if settings is None:
        return Route("", "the settings cannot be used")
    if why := why_two_servers(app, settings):
        return Route(ClaimsPath.name, why)
    capture = Capture(app, timeout=settings.call_timeout)
    try:
        with closing(open_store(settings)) as store:
            why = same_server_probe(capture, store.probe, uuid.uuid4().hex, queues_of(app, ()))
    except NO_ANSWER as exc:
        return Route("", str(exc))
    finally:
        capture.reset()
    return Route(ClaimsPath.name, why) if why else Route(SameServerPath.name, ONE_SERVER)


def check(app: Celery) -> list[Finding]:
    """Return every finding that can be made without starting a beat, errors first."""
    settings, reading, findings = _configured(app)
    findings += _scheduler(app)
    findings += _schedules(app, reading)
    if settings is not None:
        findings += _unknown_tasks(reading, settings)
        findings += _spellings(app, settings)
        findings += _of_the_store(settings, reading)
    return sorted(findings, key=lambda finding: finding.severity != "error")


def overall_health(app: Celery, clock: Clock) -> Health:
    """Return whether a beat leads, on time, with clocks that agree; every finding is an error."""
    settings, reading, findings = _configured(app)
    findings = [finding for finding in findings if finding.severity == "error"]
    if settings is None:
        return Health(False, None, None, tuple(findings))
    leader: Leader | None = None
    time: datetime | None = None
    try:
        with closing(open_store(settings)) as store, closing(_leases(settings)) as leases:
            before, time, after = clock.now(), store.time(), clock.now()
            beats, cursors = store.beats(), store.cursors()
            leader = leases.leader()
    except NO_ANSWER as exc:
        findings.append(_error("E301", f"{_servers(settings)}: {exc}", "start the server, or correct tzbeat_url"))
        return Health(False, None, time, tuple(findings))
    leading = list(_leadership(leader, beats, time, settings))
    if leading:
        leading += _no_writes(settings)
    findings += leading
    findings += _overdue(reading.entries, cursors, time, settings)
    findings += _clocks(beats, before + (after - before) / 2 - time, settings)
    return Health(not findings, leader, time, tuple(findings))


def import_modules(app: Celery) -> str:
    """Import what a beat of this app would import, and finalize it. Return what failed, empty where nothing did."""
    try:
        app.loader.import_default_modules()
        app.finalize()
    except Exception as exc:
        return f"the app's modules cannot be imported: {type(exc).__name__}: {exc}"
    return ""


def no_settings() -> Settings:
    """Return the defaults, to read entries with where the settings cannot be used."""
    return Settings(url="", namespace="", lock="")


# ---- configuration


def _configured(app: Celery) -> tuple[Settings | None, Reading, list[Finding]]:
    """Return what a beat would use (no settings where one is wrong), and the list of problems that stops it."""
    failed = import_modules(app)
    findings = [_error("E003", failed, "import them in a shell to see where it fails")] if failed else []
    settings, problems = Settings.examine(app)
    lenient = settings is not None and settings.strict is False
    findings += [_error("E001", problem, "correct the setting; no beat starts with it") for problem in problems]
    reading = read_entries(app, settings or no_settings())
    if problems:
        settings = None  # a store that nobody may have meant is not asked
    for problem in reading.problems:
        if lenient:
            findings.append(_warning("W104", f"left out: {problem}", "correct the entry; tzbeat_strict is False"))
        else:
            findings.append(_error("E002", problem, "correct the entry; no beat starts with it"))
    return settings, reading, findings


def _scheduler(app: Celery) -> Iterator[Finding]:
    given = app.conf.beat_scheduler
    try:
        aliases = dict(load_extension_class_names("celery.beat_schedulers"))
        ours = issubclass(symbol_by_name(given, aliases), Scheduler)
    except Exception as exc:
        failed = f" ({type(exc).__name__}: {exc})"
        ours = False
    else:
        failed = ""
    if not ours:
        yield _warning(
            "W209",
            f"beat_scheduler is {given!r}{failed}: `celery beat` starts that, and nothing of celery_tzbeat",
            "make TzBeat(app) where the app is made, set beat_scheduler = 'celery_tzbeat:Scheduler', or start "
            "`celery beat -S tzbeat`",
        )


def _schedules(app: Celery, reading: Reading) -> Iterator[Finding]:
    without_zone = []
    for name, entry in sorted(reading.entries.items()):
        if isinstance(entry.schedule, Rule):
            for warning in entry.schedule.warnings():
                yield _warning(
                    "W101", f"entry {name!r}: {warning}", "`celery tzbeat next --across-dst` shows what it does"
                )
        if name != CLEANUP and _needs_zone(app.conf.beat_schedule.get(name)):
            without_zone.append(name)
    if without_zone:
        origin = "the app's timezone" if app.conf.timezone else "Celery's default, as the app sets no timezone"
        yield _warning(
            "W102",
            f"no zone given, so {app.conf.timezone or 'UTC'} is used ({origin}): {_listed(without_zone)}",
            "name the zone in the schedule: crontab('30 2 * * *', tz='Europe/Paris')",
        )


def _needs_zone(given: Any) -> bool:
    """Return whether a definition as given would be read in the app's zone."""
    schedule = given.schedule if isinstance(given, ScheduleEntry) else (given or {}).get("schedule")
    try:
        one, other = (from_celery(schedule, zone=zone) for zone in _TWO_ZONES)
    except InvalidSchedule:
        return False
    return one != other


def _unknown_tasks(reading: Reading, settings: Settings) -> Iterator[Finding]:
    if settings.strict == "tasks":
        return  # they are errors already
    for text in reading.unknown_tasks:
        yield _warning(
            "W103", text, "list its module in `imports`, or correct the name; tzbeat_strict='tasks' makes it an error"
        )


def _spellings(app: Celery, settings: Settings) -> Iterator[Finding]:
    broker = app.conf.broker_write_url or app.conf.broker_url
    if why_two_servers(app, settings) or settings.url.startswith("sentinel://") or app.conf.broker_use_ssl:
        return  # they are meant to be two, whatever they are called; or cannot be written alike
    if isinstance(broker, str) and redis_url(broker) != redis_url(settings.url):
        yield _warning(
            "W207",
            f"broker {hide_password(broker)!r} and store {hide_password(settings.url)!r} are written differently; "
            "each beat tries whether they are one server, and sends by the path 'claims' where they are not",
            "where they are one server, leave tzbeat_url out, so that the broker's is used",
        )


# ---- the store, asked before a beat starts


def _of_the_store(settings: Settings, reading: Reading) -> list[Finding]:
    found: list[Finding] = list(_databases(settings))
    if found:
        return found
    try:
        with closing(open_store(settings)) as store, closing(_leases(settings)) as leases:
            if damage := store.damage():
                return [*found, _error("E006", damage, "until then no beat sends anything")]
            time, beats, cursors = store.time(), store.beats(), store.cursors()
            leases.leader()
        found += _differing(alive(beats, now=time, within=settings.lease), store, reading)
        found += _ahead(cursors, time, settings)
        found += _of_the_server(settings)
        found += _replicas(settings)
    except NO_ANSWER as exc:
        if refused := _refusal(exc, settings):
            return [*found, refused]
        hint = "a beat waits until it answers; start the server, or correct tzbeat_url"
        found.append(_warning("W201", f"{_servers(settings)}: {exc}", hint))
    return found


def _databases(settings: Settings) -> Iterator[Finding]:
    for url in dict.fromkeys((settings.url, settings.lock)):
        parts = urlsplit(redis_url(url))
        database = unquote(parts.path).strip("/") if parts.scheme in ("redis", "rediss") else ""
        if database and not database.isdecimal():
            yield _error(
                "E005",
                f"{hide_password(url)!r} names the database {database!r}, which is no number",
                "a Redis database is a number such as 0; to keep apps apart set tzbeat_namespace",
            )


def _refusal(exc: BaseException, settings: Settings) -> Finding | None:
    """Return what is wrong where a server answered, and waiting for it will not help."""
    told: list[str] = []
    cause: BaseException | None = exc
    while cause is not None and len(told) < 10:
        told.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    text = " | ".join(told)
    if _REFUSED.search(text):
        hint = "correct the user and password in broker_url, tzbeat_url or tzbeat_lock, or the server's ACL"
        return _error("E004", f"{_servers(settings)} refuses us: {exc}", hint)
    if _NO_DATABASE.search(text):
        return _error("E005", f"{_servers(settings)}: {exc}", "choose a database that the server has, such as 0")
    return None


def _differing(beats: Sequence[Presence], store: Store, reading: Reading) -> Iterator[Finding]:
    for id, attribute, what, hint in (
        ("W202", "fingerprint", "entries", "deploy one release to all; only the leader's entries run"),
        ("W203", "tzdata", "zone files", "install one version of tzdata everywhere"),
    ):
        groups: dict[str, list[str]] = {}
        for beat in beats:
            groups.setdefault(getattr(beat, attribute), []).append(beat.where)
        if len(groups) > 1:
            said = "; ".join(f"{value} on {_listed(sorted(hosts))}" for value, hosts in sorted(groups.items()))
            yield _warning(id, f"the beats alive have different {what}: {said}{_by_name(id, groups, store)}", hint)
    own = {name: entry.fingerprint for name, entry in reading.entries.items()}
    for beat in beats:
        if beat.role == "leader" and beat.fingerprint != reading.fingerprint:
            told = store.entries_of(beat.fingerprint)
            names = differing_entries(told, own, where=("with it", "in this code")) if told or not beat.entries else ""
            text = f"the leader {beat.where} has other entries than this code: {names or 'not known which'}"
            yield _warning("W208", text, "after a deploy, restart the beats")


def _by_name(id: str, groups: Mapping[str, Sequence[str]], store: Store) -> str:
    """Return which entries differ between the first two groups of beats."""
    if id != "W202":
        return ""
    one, other = (store.entries_of(fingerprint) for fingerprint in sorted(groups)[:2])
    if not one or not other:
        return ""  # it has none, or its beat is of an older release and does not tell
    names = differing_entries(one, other, where=("with the first", "with the second"))
    return f" ({names})" if names else ""


def _ahead(cursors: Mapping[str, Cursor], time: datetime, settings: Settings) -> Iterator[Finding]:
    ahead = sorted(name for name, cursor in cursors.items() if cursor.nominal > time + settings.max_skew)
    if ahead:
        latest = max(cursors[name].nominal for name in ahead)
        yield _warning(
            "W204",
            f"cursors ahead of the store's clock ({iso(time)}), at most at {iso(latest)}: {_listed(ahead)}",
            "the next leader sets them back to now; see whether the server's clock went back",
        )


def _of_the_server(settings: Settings) -> Iterator[Finding]:
    with closing(_client(settings, settings.url)) as client:
        memory, persistence = client.info("memory"), client.info("persistence")
        saves = _asked(client, "save")
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and memory.get("maxmemory", 0):
        yield _warning(
            "W205",
            f"the server may evict keys: maxmemory-policy is {policy}; a lost done mark lets an occurrence run twice",
            "set maxmemory-policy noeviction",
        )
    if not persistence.get("aof_enabled") and saves == "":
        yield _warning(
            "W206",
            "the server keeps nothing on disk (no appendonly, no save): after its restart every entry starts from now",
            "set appendonly yes",
        )


def _replicas(settings: Settings) -> Iterator[Finding]:
    if not settings.wait_replicas:
        return
    with closing(_client(settings, settings.lock)) as client:
        connected = int(client.info("replication").get("connected_slaves", 0))
    if connected < settings.wait_replicas:
        yield _warning(
            "W210",
            f"the lease's server has {connected} replica(s), tzbeat_wait_replicas asks for {settings.wait_replicas}: "
            "each beat stops leading after a lease without them",
            "attach the replicas, or lower tzbeat_wait_replicas",
        )


def _asked(client: Any, parameter: str) -> str | None:
    """Return a server parameter; None where the server does not tell (managed ones do not)."""
    try:
        value = client.config_get(parameter).get(parameter)
    except CALL_ERRORS:
        return None
    return None if value is None else str(value)


# ---- health


def _leadership(
    leader: Leader | None, beats: Sequence[Presence], time: datetime, settings: Settings
) -> Iterator[Finding]:
    if leader is None:
        living = alive(beats, now=time, within=settings.lease)
        reasons = [f"{beat.host}:{beat.pid}: {beat.why}" for beat in living if beat.why]
        yield _error("E302", "nobody leads: nothing is sent", "; ".join(reasons) or _silent(beats, time, settings))
        return
    presence = next((beat for beat in beats if beat.beat == leader.holder), None)
    hint = "the lease goes to a standby when the leader makes no progress; look at its log"
    if presence is None:
        yield _error("E303", f"the leader {leader.holder} has said nothing to the store", hint)
    elif (age := time - _last_tick(presence)) > settings.lease:
        yield _error("E303", f"the leader {leader.holder} has not ticked for {age.total_seconds():.0f} s", hint)


def _silent(beats: Sequence[Presence], time: datetime, settings: Settings) -> str:
    """Return what is known where no beat has ticked within a lease: one that cannot write may be alive nevertheless."""
    if not beats:
        return (
            "no beat is alive that could write to the store: start one with `celery -A <app> beat`, or look at its log"
        )
    ages = sorted(((time - _last_tick(beat)).total_seconds(), f"{beat.host}:{beat.pid}") for beat in beats)
    said = _listed([f"{who} {age:.0f} s ago" for age, who in ages])
    span = (settings.lease * 15).total_seconds()
    return (
        f"{len(beats)} beat(s) said something within the last {span:g} s ({said}): they ended, hang, or cannot write to "
        "the store; look at their logs, or start one with `celery -A <app> beat`"
    )


def _no_writes(settings: Settings) -> Iterator[Finding]:
    """Ask each server for what makes it refuse writes. Writes nothing; a server that does not tell is passed over."""
    for url in dict.fromkeys((settings.url, settings.lock)):
        try:
            with closing(_client(settings, url)) as client:
                info = {key: value for part in _INFO for key, value in client.info(part).items()}
                guard = _asked(client, "stop-writes-on-bgsave-error")
        except CALL_ERRORS:
            continue
        for reason, hint in _reasons(info, guard):
            yield _error("E306", f"{hide_password(url)!r} takes no writes: {reason}", hint)


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
        yield _error(
            "E304",
            f"due and not sent: {_listed(said)}",
            "look at the leader's log; its entries may be other ones (`celery tzbeat check`)",
        )


def _clocks(beats: Iterable[Presence], own: timedelta, settings: Settings) -> Iterator[Finding]:
    skews = [(f"beat {beat.host}:{beat.pid}", beat.skew) for beat in beats]
    for who, skew in [("this host", own.total_seconds()), *skews]:
        if abs(skew) > settings.max_skew.total_seconds():
            side = "ahead of" if skew > 0 else "behind"
            yield _error(
                "E305",
                f"{who}: its clock is {abs(skew):.0f} s {side} the store's, more than tzbeat_max_skew "
                f"({settings.max_skew.total_seconds():g} s) allows",
                "set the clock (NTP); a beat there does not lead until then",
            )


def _last_tick(beat: Presence) -> datetime:
    """Return when a beat ticked last by the store's clock; it says so by its own."""
    return beat.last_tick - timedelta(seconds=beat.skew)


# ---- words


def _client(settings: Settings, url: str) -> Any:
    key = Keys(settings.namespace)("epoch")
    return make_client(url, timeout=settings.call_timeout, client_name="tzbeat-check", key=key)


def _leases(settings: Settings) -> RedisLeases:
    return RedisLeases(settings.lock, namespace=settings.namespace, lease=settings.lease)


def _servers(settings: Settings) -> str:
    if settings.lock == settings.url:
        return f"store {hide_password(settings.url)!r}"
    return f"store {hide_password(settings.url)!r} or lease server {hide_password(settings.lock)!r}"


def _listed(items: Sequence[str]) -> str:
    shown = ", ".join(items[:LISTED])
    return shown if len(items) <= LISTED else f"{shown} and {len(items) - LISTED} more"


def _error(id: str, text: str, hint: str) -> Finding:
    return Finding(f"tzbeat.{id}", "error", text, hint)


def _warning(id: str, text: str, hint: str) -> Finding:
    return Finding(f"tzbeat.{id}", "warning", text, hint)

"""What can be found without starting a beat: `check`, and the path to the broker (`route`)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from celery import Celery
from celery.beat import ScheduleEntry
from celery.utils.imports import load_extension_class_names, symbol_by_name

from celery_tzbeat.beat.capture import Capture
from celery_tzbeat.beat.fleet import alive, differing_entries
from celery_tzbeat.beat.paths import ONE_SERVER, ClaimsPath, SameServerPath, same_server_probe
from celery_tzbeat.beat.scheduler import Scheduler, open_store, queues_of
from celery_tzbeat.entries import CLEANUP, Reading
from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import Cursor, Presence, iso
from celery_tzbeat.schedules import from_celery
from celery_tzbeat.schedules.rule import Rule
from celery_tzbeat.settings import Settings, broker_url, why_two_servers
from celery_tzbeat.store.client import hide_password, redis_url
from celery_tzbeat.store.protocol import Store

from .findings import (
    NO_ANSWER,
    Finding,
    ask_broker,
    asked,
    client_of,
    configured,
    error,
    leases_of,
    listed,
    servers_of,
    warning,
)
from .workers import of_workers

#: What a store says that does not know us.
_REFUSED = re.compile(
    r"AuthenticationError|AuthenticationWrongNumber|NOAUTH|WRONGPASS|invalid username-password|"
    r"invalid password|without any password configured",
    re.IGNORECASE,
)
#: What a broker says that waits for somebody else. RabbitMQ says NOT_ALLOWED of a virtual host that it has not.
_BROKER_REFUSED = re.compile(r"ACCESS_REFUSED|NOT_ALLOWED|AccessRefused|NotAllowed")
_NO_DATABASE = re.compile(r"DB index is out of range|invalid DB index|SELECT is not allowed", re.IGNORECASE)

#: Any two zones: a schedule that is equal when read in either needs no zone, or names its own.
_TWO_ZONES = ("Pacific/Kiritimati", "Pacific/Pago_Pago")


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
    settings, reading, findings = configured(app)
    findings += _scheduler(app)
    findings += _schedules(app, reading)
    if settings is not None:
        findings += _unknown_tasks(reading, settings)
        findings += _spellings(app, settings)
        findings += _of_the_broker(app, settings)
        findings += _of_the_store(settings, reading)
    return sorted(findings, key=lambda finding: finding.severity != "error")


# ---- the app


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
        yield warning(
            "W209",
            f"beat_scheduler is {given!r}{failed}: `celery beat` starts that, and nothing of celery_tzbeat",
            "make TzBeat(app) where the app is made, set beat_scheduler = 'celery_tzbeat:Scheduler', or start "
            "`celery beat -S tzbeat`",
        )


def _schedules(app: Celery, reading: Reading) -> Iterator[Finding]:
    without_zone = []
    for name, entry in sorted(reading.entries.items()):
        if isinstance(entry.schedule, Rule):
            for doubt in entry.schedule.warnings():
                yield warning(
                    "W101", f"entry {name!r}: {doubt}", "`celery tzbeat next --across-dst` shows what it does"
                )
        if name != CLEANUP and _needs_zone(app.conf.beat_schedule.get(name)):
            without_zone.append(name)
    if without_zone:
        origin = "the app's timezone" if app.conf.timezone else "Celery's default, as the app sets no timezone"
        yield warning(
            "W102",
            f"no zone given, so {app.conf.timezone or 'UTC'} is used ({origin}): {listed(without_zone)}",
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
        yield warning(
            "W103", text, "list its module in `imports`, or correct the name; tzbeat_strict='tasks' makes it an error"
        )


def _spellings(app: Celery, settings: Settings) -> Iterator[Finding]:
    broker = broker_url(app)
    if why_two_servers(app, settings) or settings.url.startswith("sentinel://") or app.conf.broker_use_ssl:
        return  # they are meant to be two, whatever they are called; or cannot be written alike
    if redis_url(broker) != redis_url(settings.url):
        yield warning(
            "W207",
            f"broker {hide_password(broker)!r} and store {hide_password(settings.url)!r} are written differently; "
            "each beat tries whether they are one server, and sends by the path 'claims' where they are not",
            "where they are one server, leave tzbeat_url out, so that the broker's is used",
        )


# ---- the broker, where it is not the store by its URL


def _of_the_broker(app: Celery, settings: Settings) -> Iterator[Finding]:
    shown = hide_password(broker_url(app))
    if broker_url(app).partition("://")[0] == "memory":
        yield warning(
            "W211",
            f"the broker {shown!r} is inside the beat's process: no worker gets what it sends",
            "for development use filesystem:// or a Redis; memory:// is for tests within one process",
        )
        return
    failure = ask_broker(app, settings)
    if failure is None:
        return
    text = f"{type(failure).__name__}: {failure}"
    if isinstance(failure, (ImportError, KeyError)):
        hint = "correct the scheme of broker_url, or install the package that its transport needs: celery[sqs], say"
        yield error("E006", f"the broker {shown!r}: its transport cannot be loaded: {text}", hint)
    elif broker_refuses(failure):
        hint = "correct user, password and virtual host in broker_url, or what the broker allows"
        yield error("E006", f"the broker {shown!r} refuses us: {text}", hint)
    else:
        hint = "a beat keeps what is due until it answers; start the broker, or correct broker_url"
        yield warning("W210", f"the broker {shown!r} does not answer: {text}", hint)


def broker_refuses(failure: Exception) -> bool:
    """Return whether a broker answered, and waiting for it will not help."""
    text = f"{type(failure).__name__}: {failure}"
    return bool(_BROKER_REFUSED.search(text) or _REFUSED.search(text))


# ---- the store, asked before a beat starts


def _of_the_store(settings: Settings, reading: Reading) -> list[Finding]:
    found: list[Finding] = list(_databases(settings))
    if found:
        return found
    try:
        with closing(open_store(settings)) as store, closing(leases_of(settings)) as leases:
            if damage := store.damage():
                return [error("E007", damage, "until then no beat sends anything")]
            time, beats, cursors = store.time(), store.beats(), store.cursors()
            leases.leader()
        found += _differing(alive(beats, now=time, within=settings.lease), store, reading)
        found += of_workers(reading.entries, store.workers())
        found += _ahead(cursors, time, settings)
        found += _of_the_server(settings)
        found += _replicas(settings)
    except NO_ANSWER as exc:
        if refused := _refusal(exc, settings):
            return [*found, refused]
        hint = "a beat waits until it answers; start the server, or correct tzbeat_url"
        found.append(warning("W201", f"{servers_of(settings)}: {exc}", hint))
    return found


def _databases(settings: Settings) -> Iterator[Finding]:
    for url in dict.fromkeys((settings.url, settings.lock)):
        parts = urlsplit(redis_url(url))
        database = unquote(parts.path).strip("/") if parts.scheme in ("redis", "rediss") else ""
        if database and not database.isdecimal():
            yield error(
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
        return error("E004", f"{servers_of(settings)} refuses us: {exc}", hint)
    if _NO_DATABASE.search(text):
        return error("E005", f"{servers_of(settings)}: {exc}", "choose a database that the server has, such as 0")
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
            said = "; ".join(f"{value} on {listed(sorted(hosts))}" for value, hosts in sorted(groups.items()))
            yield warning(id, f"the beats alive have different {what}: {said}{_by_name(id, groups, store)}", hint)
    own = {name: entry.fingerprint for name, entry in reading.entries.items()}
    for beat in beats:
        if beat.role == "leader" and beat.fingerprint != reading.fingerprint:
            told = store.entries_of(beat.fingerprint)
            names = differing_entries(told, own, where=("with it", "in this code")) if told or not beat.entries else ""
            text = f"the leader {beat.where} has other entries than this code: {names or 'not known which'}"
            yield warning("W208", text, "after a deploy, restart the beats")


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
        yield warning(
            "W204",
            f"cursors ahead of the store's clock ({iso(time)}), at most at {iso(latest)}: {listed(ahead)}",
            "the next leader sets them back to now; see whether the server's clock went back",
        )


def _of_the_server(settings: Settings) -> Iterator[Finding]:
    with closing(client_of(settings, settings.url)) as client:
        memory, persistence = client.info("memory"), client.info("persistence")
        saves = asked(client, "save")
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and memory.get("maxmemory", 0):
        yield warning(
            "W205",
            f"the server may evict keys: maxmemory-policy is {policy}; a lost done mark lets an occurrence run twice",
            "set maxmemory-policy noeviction",
        )
    if not persistence.get("aof_enabled") and saves == "":
        yield warning(
            "W206",
            "the server keeps nothing on disk (no appendonly, no save): after its restart every entry starts from now",
            "set appendonly yes",
        )


def _replicas(settings: Settings) -> Iterator[Finding]:
    if not settings.wait_replicas:
        return
    with closing(client_of(settings, settings.lock)) as client:
        connected = int(client.info("replication").get("connected_slaves", 0))
    if connected < settings.wait_replicas:
        yield warning(
            "W212",
            f"the lease's server has {connected} replica(s), tzbeat_wait_replicas asks for {settings.wait_replicas}: "
            "each beat stops leading after a lease without them",
            "attach the replicas, or lower tzbeat_wait_replicas",
        )

"""What is wrong or doubtful: before a beat starts (`check`), and while beats run (`overall_health`).

    tzbeat.E001   a setting                                tzbeat.E002   an entry
    tzbeat.E003   the app's modules cannot be imported     tzbeat.E004   the store, or the lease's server, refuses us
    tzbeat.E005   a database that is none                  tzbeat.E006   the broker refuses us, or its transport is missing
    tzbeat.E007   a key of another type in the store
    tzbeat.W101   a schedule's author may not have meant it
    tzbeat.W102   no zone given: the app's is used         tzbeat.W103   a task that this process does not know
    tzbeat.W104   an entry is left out (tzbeat_strict = False)
    tzbeat.W201   the store, or the lease's server, does not answer
    tzbeat.W202   beats with different entries             tzbeat.W203   beats with different zone files
    tzbeat.W204   a cursor ahead of the store's clock      tzbeat.W205   the server may evict keys
    tzbeat.W206   the server keeps nothing on disk         tzbeat.W207   broker and store are written differently
    tzbeat.W208   the leader has other entries than this code
    tzbeat.W209   beat_scheduler is not ours               tzbeat.W210   the broker does not answer
    tzbeat.W211   the broker is inside the beat's process  tzbeat.W212   fewer replicas than tzbeat_wait_replicas
    tzbeat.W213   a policy that nothing tells of           tzbeat.W214   a timeout that a worker's pool cannot keep
    tzbeat.E301   the store, or the lease's server, does not answer
    tzbeat.E302   nobody leads                             tzbeat.E303   the leader does not tick
    tzbeat.E304   something is due and was not sent        tzbeat.E305   a clock is off by more than tzbeat_max_skew
    tzbeat.E306   the store, or the lease's server, takes no writes
    tzbeat.E307   the broker does not answer

The number after a letter never changes its meaning. E3xx come from `overall_health` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from celery import Celery

from celery_tzbeat.beat.envelope import why_no_connection
from celery_tzbeat.entries import Reading, read_entries
from celery_tzbeat.errors import StoreUnavailable, StoreUnreadable
from celery_tzbeat.leases.redis import RedisLeases
from celery_tzbeat.settings import Settings, broker_url
from celery_tzbeat.store.client import CALL_ERRORS, hide_password, make_client
from celery_tzbeat.store.keys import Keys

#: How many names a finding lists.
LISTED = 5

#: What a store or lease server answers with when it does not serve, and what it says when it refuses (ACL).
NO_ANSWER: tuple[type[Exception], ...] = (StoreUnavailable, StoreUnreadable, *CALL_ERRORS)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (error) or doubtful (warning), under a stable id, with what to do about it."""

    id: str
    severity: Literal["error", "warning"]
    text: str
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "severity": self.severity, "text": self.text, "hint": self.hint}


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


def configured(app: Celery) -> tuple[Settings | None, Reading, list[Finding]]:
    """Return what a beat would use (no settings where one is wrong), and the list of problems that stops it."""
    failed = import_modules(app)
    findings = [error("E003", failed, "import them in a shell to see where it fails")] if failed else []
    settings, problems = Settings.examine(app)
    lenient = settings is not None and settings.strict is False
    findings += [error("E001", problem, "correct the setting; no beat starts with it") for problem in problems]
    reading = read_entries(app, settings or no_settings())
    if problems:
        settings = None  # a store that nobody may have meant is not asked
    for problem in reading.problems:
        if lenient:
            findings.append(warning("W104", f"left out: {problem}", "correct the entry; tzbeat_strict is False"))
        else:
            findings.append(error("E002", problem, "correct the entry; no beat starts with it"))
    return settings, reading, findings


# ---- what both ask and say


def asked(client: Any, parameter: str) -> str | None:
    """Return a server parameter; None where the server does not tell (managed ones do not)."""
    try:
        value = client.config_get(parameter).get(parameter)
    except CALL_ERRORS:
        return None
    return None if value is None else str(value)


def ask_broker(app: Celery, settings: Settings) -> Exception | None:
    """Return why the broker takes no connection; None where it does, or is by its URL the store, which is asked anyway."""
    if broker_url(app) == settings.url:
        return None
    return why_no_connection(app, settings.call_timeout)


def client_of(settings: Settings, url: str) -> Any:
    """Return a client of ours to the store's or the lease's server; of a cluster, to the node that has our keys."""
    key = Keys(settings.namespace)("epoch")
    return make_client(url, timeout=settings.call_timeout, client_name="tzbeat-check", key=key)


def leases_of(settings: Settings) -> RedisLeases:
    """Return the lease's server as the settings say, with connections of its own."""
    return RedisLeases(settings.lock, namespace=settings.namespace, lease=settings.lease)


def servers_of(settings: Settings) -> str:
    """Return in words which servers were asked; no passwords."""
    if settings.lock == settings.url:
        return f"store {hide_password(settings.url)!r}"
    return f"store {hide_password(settings.url)!r} or lease server {hide_password(settings.lock)!r}"


def listed(items: Sequence[str]) -> str:
    """Return the first LISTED items in words, and how many more there are."""
    shown = ", ".join(items[:LISTED])
    return shown if len(items) <= LISTED else f"{shown} and {len(items) - LISTED} more"


def error(id: str, text: str, hint: str) -> Finding:
    return Finding(f"tzbeat.{id}", "error", text, hint)


def warning(id: str, text: str, hint: str) -> Finding:
    return Finding(f"tzbeat.{id}", "warning", text, hint)

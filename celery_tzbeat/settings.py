"""The settings `tzbeat_*`: read once from `app.conf`, checked together, frozen.

`Settings.read` is the only interpreter of `app.conf` for our own names. Every problem is reported at once; an unknown name
is refused with the nearest right one, a name of a later release by saying so.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta, tzinfo
from typing import Any, Literal, cast

from celery import Celery
from kombu.utils.url import parse_url
from packaging.version import InvalidVersion, Version

from .errors import InvalidConfiguration, InvalidPolicy
from .model import Policy
from .policy import nearest, read_policy, read_span
from .store.client import SERVED, SentinelUrl, hide_password, make_client, redis_url
from .store.cluster import is_cluster

PREFIX = "tzbeat_"

#: Settings of the design whose behaviour later releases bring: refused, never ignored.
NOT_BUILT = frozenset(
    {
        "alert_rules",
        "alerts",
        "database",
        "dynamic",
        "events",
        "history",
        "http",
        "redact",
        "schedule_file",
        "shadow",
    }
)

#: Celery's Redis transport redelivers what was not acknowledged for so long.
VISIBILITY_TIMEOUT = timedelta(hours=1)

#: Shortest lease: a store call is bounded by a sixth of it.
SHORTEST_LEASE = timedelta(seconds=1)

#: The most that `max_skew` counts for when it is held against the retention.
SKEW_COUNTED = timedelta(hours=1)


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True)
class Settings:
    """What the `tzbeat_*` settings say. Durations are given as seconds or `timedelta`."""

    url: str
    namespace: str
    lock: str
    lease: timedelta = timedelta(seconds=10)
    policy: Policy = DEFAULT_POLICY
    gap: Literal["end", "skip"] = "end"
    fold: Literal["first", "second", "both"] = "first"
    retention: timedelta = timedelta(hours=24)
    max_skew: timedelta = timedelta(seconds=300)
    audit_max: int = 100_000
    strict: bool | Literal["tasks"] = True
    release: str = ""
    wait_replicas: int = 0
    drain_timeout: timedelta = timedelta(seconds=10)

    @property
    def call_timeout(self) -> float:
        """The bound of one exchange with the store or the broker, in seconds: a hung call must not outlive the lease."""
        return self.lease.total_seconds() / 6

    @classmethod
    def read(cls, app: Celery) -> Settings:
        """Return the settings of `app`. Raises InvalidConfiguration with every problem found."""
        settings, problems = cls.examine(app)
        if settings is None or problems:
            raise InvalidConfiguration(problems)
        return settings

    @classmethod
    def examine(cls, app: Celery) -> tuple[Settings | None, list[str]]:
        """Return the settings as far as they can be used (None: not at all) and all problems."""
        problems = list(_unknown_names(app))
        reader = _Reader(app, problems)
        given_url, lock = reader.text("url"), reader.text("lock")
        url = given_url or _default_url(app, problems)
        namespace = reader.text("namespace") or _default_namespace(app, problems)
        _refuse(problems, namespace is not None and _bad_namespace(namespace))
        _refuse(problems, url and _bad_url("tzbeat_url" if given_url else "broker_url", url))
        _refuse(problems, lock and _bad_url("tzbeat_lock", lock))
        try:
            app_timezone(app)
        except InvalidConfiguration as exc:
            problems += exc.problems
        settings = cls(
            url=url or "",
            namespace=namespace or "",
            lock=lock or url or "",
            lease=reader.duration("lease", _default(cls, "lease"), at_least=SHORTEST_LEASE),
            policy=reader.policy(app),
            gap=reader.choice("gap", "end", ("end", "skip")),
            fold=reader.choice("fold", "first", ("first", "second", "both")),
            retention=reader.duration("retention", _default(cls, "retention")),
            max_skew=reader.duration("max_skew", _default(cls, "max_skew")),
            audit_max=reader.count("audit_max", _default(cls, "audit_max")),
            strict=reader.choice("strict", True, (True, False, "tasks")),
            release=reader.release(),
            wait_replicas=reader.count("wait_replicas", 0, at_least=0),
            drain_timeout=reader.duration("drain_timeout", _default(cls, "drain_timeout")),
        )
        _refuse(problems, app.conf.task_always_eager and "task_always_eager is set: tasks would run inside beat")
        _refuse(problems, _retention_too_short(app, settings))
        return (settings if url and namespace else None), problems


def app_timezone(app: Celery) -> tzinfo:
    """Return the app's timezone. Raises InvalidConfiguration for one that Celery does not find."""
    try:
        return cast(tzinfo, app.timezone)
    except Exception as exc:  # whatever zoneinfo raises for a name: it is not always the same
        raise InvalidConfiguration(
            [f"timezone {app.conf.timezone!r} is unknown; give an IANA name such as 'Europe/Paris'"]
        ) from exc


class _Reader:
    """Reads single settings and notes what is wrong with them."""

    def __init__(self, app: Celery, problems: list[str]) -> None:
        self._conf = app.conf
        self._problems = problems

    def _value(self, name: str) -> Any:
        return self._conf.get(PREFIX + name)

    def text(self, name: str) -> str | None:
        value = self._value(name)
        if value is None or (isinstance(value, str) and value):
            return value
        self._problems.append(f"{PREFIX}{name} is {value!r}; give a text that is not empty")
        return None

    def duration(self, name: str, default: timedelta, *, at_least: timedelta = timedelta(microseconds=1)) -> timedelta:
        value = self._value(name)
        if value is None:
            return default
        try:
            span = read_span(PREFIX + name, value)
        except InvalidPolicy as exc:
            self._problems.append(str(exc))
            return default
        if span < at_least:
            self._problems.append(f"{PREFIX}{name} is {value!r}; the least is {at_least.total_seconds():g} s")
            return default
        return span

    def count(self, name: str, default: int, *, at_least: int = 1) -> int:
        value = self._value(name)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
            return value
        self._problems.append(f"{PREFIX}{name} is {value!r}; give a whole number, {at_least} or more")
        return default

    def choice(self, name: str, default: Any, words: tuple[Any, ...]) -> Any:
        value = self._value(name)
        if value is None:
            return default
        if any(value is word or (isinstance(word, str) and value == word) for word in words):
            return value
        choices = ", ".join(repr(word) for word in words)
        self._problems.append(f"{PREFIX}{name} is {value!r}; it is one of {choices}")
        return default

    def release(self) -> str:
        value = self.text("release")
        if value is None:
            return ""
        try:
            return str(Version(value))
        except InvalidVersion:
            self._problems.append(
                f"{PREFIX}release is {value!r}; give a version that can be compared, such as '2026.11.3' (PEP 440)"
            )
            return ""

    def policy(self, app: Celery) -> Policy:
        try:
            return read_policy(self._value("policy"), default=DEFAULT_POLICY)
        except InvalidPolicy as exc:
            self._problems.append(f"{PREFIX}policy: {exc}")
            return DEFAULT_POLICY


def _default(cls: type[Settings], name: str) -> Any:
    return next(f.default for f in fields(cls) if f.name == name)


def _refuse(problems: list[str], problem: str | bool | None) -> None:
    if problem:
        problems.append(str(problem))


def _unknown_names(app: Celery) -> Iterable[str]:
    known = {f.name for f in fields(Settings)}
    seen = set()
    namespace = f"{app.namespace.rstrip('_')}_" if app.namespace else ""
    for key in app.conf:
        name = key.lower()
        for prefix in {"celery_", namespace.lower()} - {""}:
            if name.startswith(prefix + PREFIX):
                name = name[len(prefix) :]
        if not name.startswith(PREFIX) or key in seen:
            continue
        seen.add(key)
        short = name[len(PREFIX) :]
        if short in NOT_BUILT:
            yield f"{name} is not built in this release of celery_tzbeat; leave it out"
        elif short in known and key not in (name, namespace + (name.upper() if namespace.isupper() else name)):
            yield f"{key} is not read; write {namespace + name.upper() if namespace.isupper() else name}"
        elif short not in known:
            yield f"{name} is not a setting{nearest(name, [PREFIX + k for k in known])}"


def broker_url(app: Celery) -> str:
    """Return the URL that beats send to; several brokers as kombu writes them, with semicolons."""
    url = app.conf.broker_write_url or app.conf.broker_url or "amqp://"  # which is kombu's default
    return url if isinstance(url, str) else ";".join(url)


def _is_redis(url: str) -> bool:
    return url.partition("://")[0] in ("redis", "rediss", "unix", "redis+socket", "sentinel")


def _is_sentinel(url: str) -> bool:
    return url.startswith("sentinel://")


def _several(url: str) -> bool:
    """Return whether a URL is a list of brokers; a list of sentinels leads to one."""
    return ";" in url and not _is_sentinel(url)


def _default_url(app: Celery, problems: list[str]) -> str | None:
    """Return the broker's URL as the store's, where it says all that a connection needs."""
    url = broker_url(app)
    shown = hide_password(url)
    if not _is_redis(url):
        problem = f"tzbeat_url is not set and the broker {shown!r} is not a Redis"
    elif _several(url):
        problem = f"tzbeat_url is not set and broker_url {shown!r} names several brokers"
    elif app.conf.broker_use_ssl and _is_sentinel(url):
        problem = "tzbeat_url is not set, and the broker's broker_use_ssl is not served for a store behind Sentinel"
    elif app.conf.broker_use_ssl and url.startswith(("redis://", "rediss://")):
        problems.append(
            "broker_use_ssl is set and tzbeat_url is not: the store would be reached without what it says; "
            f"set tzbeat_url = {hide_password(_with_ssl(url, app.conf.broker_use_ssl))!r}"
        )
        return None
    elif _is_sentinel(url):
        try:
            return str(SentinelUrl.read(url, app.conf.broker_transport_options))
        except ValueError as exc:
            problems.append(f"broker_url {shown!r} cannot be used as the store: {exc}")
            return None
    else:
        return url
    problems.append(f"{problem}; set tzbeat_url to the Redis that is to keep the ledger")
    return None


def _with_ssl(url: str, options: Any) -> str:
    """Return the URL that says what `broker_use_ssl` says."""
    rest = url.partition("://")[2]
    given = options if isinstance(options, Mapping) else {}
    words = {name: value for name, value in given.items() if str(name).startswith("ssl_") and value is not None}
    needed = words.get("ssl_cert_reqs", ssl.CERT_REQUIRED)
    name = ssl.VerifyMode(needed).name if isinstance(needed, int) else str(needed)
    words = {
        "ssl_cert_reqs": name.removeprefix("CERT_").lower(),
        **{k: v for k, v in words.items() if k != "ssl_cert_reqs"},
    }
    said = "&".join(f"{name}={value}" for name, value in words.items())
    return f"rediss://{rest}{'&' if '?' in rest else '?'}{said}"


def _default_namespace(app: Celery, problems: list[str]) -> str | None:
    if not app.main or app.main == "__main__":
        problems.append(
            "tzbeat_namespace is not set and the app has no name to take it from; "
            'set tzbeat_namespace, or give the app a name: Celery("proj")'
        )
        return None
    return f"{app.main}/{database_of(broker_url(app)) or '0'}"


def _bad_url(name: str, url: str) -> str | None:
    """Return what is wrong with the URL of a store, as far as can be seen without connecting."""
    shown = hide_password(url)
    if not _is_redis(url) and not is_cluster(url):
        return f"{name} {shown!r}: the scheme {url.partition('://')[0]!r} is not served as a store yet; use {SERVED}"
    if _several(url):
        return f"{name} {shown!r} names several servers; name the one that is to keep the ledger"
    try:
        make_client(url, timeout=1).connection_pool.make_connection()
    except Exception as exc:  # redis-py raises what its parts raise: ValueError, TypeError, RedisError
        return f"{name} {shown!r} cannot be used: {exc}"
    return None


def _bad_namespace(namespace: str) -> str | None:
    if "{" in namespace or "}" in namespace or not namespace.isprintable():
        return f"tzbeat_namespace is {namespace!r}; leave out braces and control characters"
    return None


def database_of(url: str) -> str:
    """Return the database (or virtual host) that a broker or store URL names, as text; ``0`` where it names none."""
    try:
        if _is_sentinel(url):
            return str(SentinelUrl.read(url).db)
        parts = parse_url(redis_url(url.split(";")[0])) if _is_redis(url) else parse_url(url.split(";")[0])
    except (ValueError, TypeError):  # its port is no number, or a part stands in it twice: `_bad_url` tells
        return "0"
    if parts.get("transport") == "unix":
        return str(parts.get("db") or "0")
    return str(parts.get("virtual_host") or "0").strip("/") or "0"


def why_two_servers(app: Celery, settings: Settings) -> str:
    """Return why broker and store are not one Redis, as far as the URLs tell; empty where the probe has to tell."""
    write, read = broker_url(app), app.conf.broker_read_url or app.conf.broker_url
    read = read if isinstance(read, str) else ";".join(read or ())
    shown, url = hide_password(write), settings.url
    if _several(write) or _several(read):
        return f"broker_url {shown!r} names several brokers"
    if not _is_redis(write):
        return f"the broker {shown!r} is not a Redis"
    if is_cluster(url):
        return "the store is a cluster"
    if read != write:
        return "broker_read_url and broker_write_url differ"
    if database_of(write) != database_of(url):
        return f"the broker uses database {database_of(write)}, the store database {database_of(url)}"
    if _is_sentinel(write) != _is_sentinel(url):
        one, other = ("broker", "store") if _is_sentinel(write) else ("store", "broker")
        return f"the {one} follows Sentinel and the {other} does not"
    if _is_sentinel(write):
        broker, store = SentinelUrl.read(write, app.conf.broker_transport_options), SentinelUrl.read(url)
        if not broker.same_master(store):
            return "broker and store ask other sentinels, or for another master"
    return ""


def _retention_too_short(app: Celery, settings: Settings) -> str | None:
    visible = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    timeout = timedelta(seconds=visible) if isinstance(visible, (int, float)) else VISIBILITY_TIMEOUT
    least = timeout + min(settings.max_skew, SKEW_COUNTED)
    if settings.retention > least:
        return None
    return (
        f"tzbeat_retention ({settings.retention}) must be longer than the broker's visibility timeout ({timeout}) "
        f"plus tzbeat_max_skew ({settings.max_skew}): a message that comes back later would find no done mark"
    )

"""The entries of an app, from Celery's own sources: `beat_schedule`, `add_periodic_task`, and `celery.backend_cleanup`.

All of them end up in `app.conf.beat_schedule`, so that is what is read; `read_entries` names every problem at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from numbers import Real
from typing import Any

from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import crontab as celery_crontab
from kombu import Exchange, Queue

from .errors import InvalidConfiguration, InvalidEntry, InvalidPolicy, InvalidSchedule
from .model import NAME_LENGTH, Entry
from .policy import nearest, read_policy, read_span
from .schedules import from_celery, reboot
from .settings import Settings, app_timezone

CLEANUP = "celery.backend_cleanup"

#: What an entry of `beat_schedule` may say. `relative` is accepted and changes nothing: intervals are anchored.
WORDS = frozenset({"task", "schedule", "args", "kwargs", "options", "relative", "policy"})


@dataclass(frozen=True, slots=True)
class Reading:
    """The entries that can be used, by name, and what is wrong with the others."""

    entries: Mapping[str, Entry]
    problems: tuple[str, ...] = ()
    unknown_tasks: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A short hash of all definitions: two beats with the same one have the same entries."""
        text = "\n".join(f"{name} {entry.fingerprint}" for name, entry in sorted(self.entries.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_entries(app: Celery, settings: Settings) -> Reading:
    """Return the entries of `app`. Does no I/O and raises nothing for a bad entry: it is among the problems."""
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    unknown: list[str] = []
    listed = app.conf.beat_schedule or {}
    if not isinstance(listed, Mapping):
        return Reading({}, (f"beat_schedule is {listed!r}; give a dict of entries by name",))
    for name, given in {**_cleanup(app), **listed}.items():
        found: list[str] = []
        entry = None
        try:
            entry = _read_entry(app, settings, name, given, found)
        except Exception as exc:
            found.append(_problem(name, _told(exc)))
        problems += found
        if entry is None or found:
            continue
        if entry.task not in app.tasks:
            unknown.append(f"entry {name!r}: task {entry.task!r} is not known to this process")
        entries[name] = entry
    if settings.strict == "tasks":
        problems += [f"{text} (tzbeat_strict is 'tasks')" for text in unknown]
    return Reading(entries, tuple(problems), tuple(unknown))


def _cleanup(app: Celery) -> dict[str, Any]:
    """Celery's own nightly entry, where the result backend does not expire results by itself."""
    if not app.conf.result_expires or app.backend.supports_autoexpire:
        return {}
    return {
        CLEANUP: {
            "task": CLEANUP,
            "schedule": celery_crontab("0", "4", "*"),
            "options": {"expires": 12 * 3600},
        }
    }


def _read_entry(app: Celery, settings: Settings, name: Any, given: Any, problems: list[str]) -> Entry | None:
    if isinstance(given, ScheduleEntry):
        given = {
            "task": given.task,
            "schedule": given.schedule,
            "args": given.args,
            "kwargs": given.kwargs,
            "options": given.options,
        }

    def part(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (InvalidSchedule, InvalidPolicy) as exc:
            refuse(str(exc))
        except Exception as exc:  # one entry must not keep the others, or the check, from being read
            refuse(_told(exc))
        return None

    def refuse(message: str) -> None:
        problems.append(_problem(name, message))

    if not isinstance(name, str) or not name or len(name) > NAME_LENGTH:
        refuse(f"a name is a text of 1 to {NAME_LENGTH} characters")
        return None
    if not name.isprintable():  # nor are half a surrogate pair, NUL and line ends
        refuse("a name has printable characters only: it is in keys, logs and commands")
        return None
    if not isinstance(given, Mapping):
        refuse(f"it is {given!r}; give a dict with 'task' and 'schedule'")
        return None
    for word in given:
        if word not in WORDS:
            refuse(f"{word!r} is unknown{nearest(str(word), WORDS)}")
    task = given.get("task")
    if not isinstance(task, str) or not task or not task.isprintable():
        refuse(f"task is {task!r}; give the task's name")
    if "schedule" not in given:
        refuse("there is no 'schedule'")
        return None
    options_given = given.get("options") or {}
    if not isinstance(options_given, Mapping):
        refuse(f"options is {options_given!r}; give a dict")
        options_given = {}
    options = dict(options_given)
    for problem in _bad_options(options):
        refuse(problem)
    policy_given = given.get("policy", options.pop("policy", None))
    schedule = part(lambda: _schedule(app, settings, name, given["schedule"]))
    policy = part(
        lambda: read_policy(
            policy_given,
            default=settings.policy,
            deadline=_deadline(app) if isinstance(schedule, celery_crontab) else None,
        )
    )
    args, kwargs = given.get("args") or (), given.get("kwargs") or {}
    if isinstance(args, (str, bytes)) or not isinstance(args, (list, tuple)):
        refuse(f"args is {args!r}; give a list or a tuple")
    if not isinstance(kwargs, Mapping):
        refuse(f"kwargs is {kwargs!r}; give a dict")
    if problems:
        return None
    return Entry(name, str(task), schedule, tuple(args), dict(kwargs), options, policy)


def _problem(name: Any, message: str) -> str:
    try:
        return str(InvalidEntry(str(name), message))
    except Exception:
        return str(InvalidEntry(object.__repr__(name), message))


def _told(exc: Exception) -> str:
    try:
        return f"it cannot be read: {type(exc).__name__}: {exc}".encode(errors="backslashreplace").decode()
    except Exception:
        return f"it cannot be read: {type(exc).__name__}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    if isinstance(value, str):
        try:
            datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return False
        return True
    return isinstance(value, datetime)


def _is_priority(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 255


#: Options that Celery could not send as they are, found out at each occurrence only: what they must be, and in words.
_OPTIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "expires": (lambda value: _is_number(value) or _is_time(value), "seconds, or a datetime"),
    "eta": (_is_time, "a datetime"),
    "countdown": (_is_number, "seconds"),
    "time_limit": (_is_number, "seconds"),
    "soft_time_limit": (_is_number, "seconds"),
    "priority": (_is_priority, "a whole number from 0 to 255 (Redis: 0 to 9)"),
    "queue": (lambda value: isinstance(value, (str, Queue)), "the queue's name"),
    "exchange": (lambda value: isinstance(value, (str, Exchange)), "the exchange's name"),
    "routing_key": (lambda value: isinstance(value, str), "a text"),
    "serializer": (lambda value: isinstance(value, str), "the serializer's name"),
    "headers": (lambda value: isinstance(value, Mapping), "a dict"),
}


def _bad_options(options: Mapping[Any, Any]) -> Iterator[str]:
    for name, (fits, wanted) in _OPTIONS.items():
        value = options.get(name)
        if value is not None and not fits(value):
            seconds = f": {value.total_seconds():g}" if isinstance(value, timedelta) and "seconds" in wanted else ""
            yield f"option {name} is {value!r}; give {wanted}{seconds}"


def _schedule(app: Celery, settings: Settings, name: str, given: Any) -> Any:
    rule = from_celery(given, zone=_zone(app), gap=settings.gap, fold=settings.fold)
    if rule == reboot():
        raise InvalidSchedule("@reboot is read, but not built in this release: no beat would send it", text="@reboot")
    return rule.named(name) if hasattr(rule, "named") else rule


def _zone(app: Celery) -> tzinfo:
    """Return the app's timezone; UTC for one that is unknown, which is a problem of the settings."""
    try:
        return app_timezone(app)
    except InvalidConfiguration:
        return timezone.utc


def _deadline(app: Celery) -> timedelta | None:
    seconds = app.conf.beat_cron_starting_deadline
    return None if seconds is None else read_span("beat_cron_starting_deadline", seconds)

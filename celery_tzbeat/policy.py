"""Policies as users write them: read word by word, checked together, refused in a sentence that names the remedy.

`read_policy` is the only maker of a `Policy` from what a user wrote.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, get_args

from .errors import InvalidPolicy
from .model import Backoff, Catchup, Delivery, OnAbandoned, OnStoreDown, Overlap, Policy, Retry

#: Policy keys of the design whose behaviour later releases bring: refused, never ignored.
POLICY_NOT_BUILT = frozenset({"after", "after_timeout", "expect_within", "jitter", "pause_on_failure"})

#: The shortest run lease: six heartbeats of a quarter of a second.
SHORTEST_RUN_LEASE = timedelta(seconds=1.5)


def read_policy(given: Any, *, default: Policy, deadline: timedelta | None = None) -> Policy:
    """Return the policy that `given` (a mapping, a Policy or None) makes of `default`.

    A Policy says every word itself; a mapping those that it has. `deadline` is Celery's `beat_cron_starting_deadline` where
    it applies: the window where none is given. Raises InvalidPolicy for a key or value that is unknown, impossible or not
    built yet.
    """
    changes: dict[str, Any] = {}
    if isinstance(given, Policy):
        given = _parts(given)
    elif given is not None and not isinstance(given, Mapping):
        raise InvalidPolicy(f"policy is {given!r}; give a dict or a Policy")
    elif deadline is not None:
        changes["catchup_window"] = deadline
        changes["misfire_grace"] = min(default.misfire_grace, deadline)
    for key, value in (given or {}).items():
        if key in POLICY_NOT_BUILT:
            raise InvalidPolicy(f"policy {key!r} is not built in this release of celery_tzbeat; leave it out")
        if key not in _READERS:
            raise InvalidPolicy(f"policy {key!r} is unknown{nearest(str(key), _READERS)}")
        changes[key] = _READERS[key](f"policy {key}", value)
    return _agreeing(replace(default, **changes))


def read_span(name: str, value: Any) -> timedelta:
    """Return a duration given as seconds or timedelta. Raises InvalidPolicy, with `name`, for anything else."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return timedelta(seconds=value)
        except (OverflowError, ValueError):  # infinite, not a number, or longer than timedelta can say
            pass
    raise InvalidPolicy(f"{name} is {value!r}; give seconds or a timedelta")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest known word, or a list of all."""
    known = sorted(known)
    found = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; known are {', '.join(known)}"


def _parts(value: Policy | Retry) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _agreeing(policy: Policy) -> Policy:
    """Return the policy where its words agree with each other."""
    if policy.catchup_window < policy.misfire_grace:
        raise InvalidPolicy(
            f"policy catchup_window ({policy.catchup_window}) is shorter than misfire_grace ({policy.misfire_grace}); "
            "raise the window or lower the grace"
        )
    if policy.delivery == "at_most_once":
        for key, instead in (("retry", "None"), ("on_abandoned", "'dead_letter'"), ("on_store_down", "'hold'")):
            if getattr(policy, key) in (None, "auto", "dead_letter", "hold"):
                continue
            raise InvalidPolicy(
                f"policy {key} is {getattr(policy, key)!r} and delivery is 'at_most_once', which never starts a second time; "
                f"set {key} to {instead}, or delivery to 'at_least_once'"
            )
    return policy


# ---- words


def _span(least: timedelta, wanted: str) -> Callable[[str, Any], timedelta]:
    def read(name: str, value: Any) -> timedelta:
        span = read_span(name, value)
        if span < least:
            raise InvalidPolicy(f"{name} is {value!r}; give {wanted}")
        return span

    return read


def _word(form: Any) -> Callable[[str, Any], str]:
    words: tuple[str, ...] = get_args(form)

    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise InvalidPolicy(f"{name} {value!r} is unknown{nearest(str(value), words)}")
        return value

    return read


def _or_none(read: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else read(name, value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise InvalidPolicy(f"{name} is {value!r}; give a whole number, 1 or more")


def _bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidPolicy(f"{name} is {value!r}; give True or False")


def _names(name: str, value: Any) -> tuple[str, ...]:
    """Return the names of exception classes, given as texts or as the classes themselves."""
    listed = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_name_of(name, word) for word in listed)


def _name_of(name: str, word: Any) -> str:
    if isinstance(word, str) and word:
        return word
    if isinstance(word, type) and issubclass(word, BaseException):
        return f"{word.__module__}.{word.__qualname__}"
    raise InvalidPolicy(f"{name} has {word!r}; give names of exception classes, or the classes")


def _retry(name: str, value: Any) -> Retry:
    if isinstance(value, Retry):
        value = _parts(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = {"max_attempts": value}
    elif not isinstance(value, Mapping):
        raise InvalidPolicy(f"{name} is {value!r}; give a Retry, a dict, or how many attempts there are in all")
    for key in value:
        if key not in _RETRY_READERS:
            raise InvalidPolicy(f"{name} {key!r} is unknown{nearest(str(key), _RETRY_READERS)}")
    retry = Retry(**{key: _RETRY_READERS[key](f"{name} {key}", part) for key, part in value.items()})
    if retry.max_delay < retry.delay:
        raise InvalidPolicy(
            f"{name} max_delay ({retry.max_delay}) is shorter than delay ({retry.delay}); raise it or lower the delay"
        )
    return retry


_ABOVE_NOTHING = _span(timedelta(microseconds=1), "more than 0 seconds")
_NOT_NEGATIVE = _span(timedelta(), "0 or more seconds")

_RETRY_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_attempts": _count,
    "delay": _NOT_NEGATIVE,
    "backoff": _word(Backoff),
    "max_delay": _NOT_NEGATIVE,
    "jitter": _bool,
    "only": _names,
    "never": _names,
}

_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "misfire_grace": _NOT_NEGATIVE,
    "catchup": _word(Catchup),
    "catchup_window": read_span,
    "overlap": _word(Overlap),
    "delivery": _word(Delivery),
    "timeout": _or_none(_ABOVE_NOTHING),
    "kill_after": _NOT_NEGATIVE,
    "retry": _or_none(_retry),
    "max_deliveries": _count,
    "run_lease": _span(SHORTEST_RUN_LEASE, f"{SHORTEST_RUN_LEASE.total_seconds():g} or more seconds: six heartbeats"),
    "start_within": _ABOVE_NOTHING,
    "on_abandoned": _word(OnAbandoned),
    "on_store_down": _or_none(_word(OnStoreDown)),
}

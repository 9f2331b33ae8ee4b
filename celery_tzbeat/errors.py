"""Everything that this package raises on purpose.

    TzBeatError
    ├── InvalidSchedule      (ValueError)   a schedule text or argument that cannot be read
    ├── InvalidPolicy        (ValueError)   a policy word or value that cannot be followed
    ├── InvalidEntry         (ValueError)   an entry of ``beat_schedule`` that cannot be used
    ├── InvalidConfiguration (ValueError)   every problem of settings and entries, at once
    ├── EntryNotFound        (LookupError)  no entry has this name
    ├── OccurrenceNotFound   (LookupError)  nothing of this key or entry is open, or dead
    ├── StoreUnavailable                    the store did not answer, or answered that it cannot serve now
    │   └── BrokerUnavailable               the broker did not, or said so
    ├── StoreUnreadable                     the store holds what this release must not touch
    │   └── StoreDamaged                    a key has another type than it must have
    ├── Permanent                           raised in a task: no retry, a dead letter at once
    └── Cancelled                           raised in a task that was asked to stop

Races are not errors: a claim that somebody else won is a value (`celery_tzbeat.store.Verdict`).
"""

from __future__ import annotations

from collections.abc import Sequence


class TzBeatError(Exception):
    """The root of all errors of celery_tzbeat."""


class InvalidSchedule(TzBeatError, ValueError):
    """A schedule that cannot be read; names the field, the text and the remedy.

    `field` is one of second, minute, hour, day of month, month, day of week, zone, gap, fold, kind, days, interval, text …
    """

    def __init__(self, message: str, *, field: str = "text", text: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.text = text


class InvalidPolicy(TzBeatError, ValueError):
    """A policy key or value that is unknown, impossible, or not built in this release."""


class InvalidEntry(TzBeatError, ValueError):
    """An entry that cannot be used; the message names the entry."""

    def __init__(self, entry: str, message: str) -> None:
        super().__init__(f"entry {entry!r}: {message}")
        self.entry = entry


class InvalidConfiguration(TzBeatError, ValueError):
    """All problems of the settings and the entries, one line each, so that one start shows them all."""

    def __init__(self, problems: Sequence[str]) -> None:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__(
            f"celery_tzbeat cannot start: {len(problems)} {noun}\n{lines}\n"
            "`celery -A <app> tzbeat check` prints the same list without starting a beat."
        )
        self.problems = tuple(problems)


class EntryNotFound(TzBeatError, LookupError):
    """No entry has this name; the message offers the nearest one."""


class OccurrenceNotFound(TzBeatError, LookupError):
    """Nothing of this key or entry is open (cancel, run), or no dead letter has this key (dead letters)."""


class StoreUnavailable(TzBeatError):
    """The store did not answer in time, or said that it cannot serve now. What was asked may or may not have happened."""


class BrokerUnavailable(StoreUnavailable):
    """The broker did not answer in time: whether it has the message is not known. A beat waits as for the store."""


class StoreUnreadable(TzBeatError):
    """The store answers, but holds what this release cannot or must not touch: a newer schema, a key of another type."""


class StoreDamaged(StoreUnreadable):
    """A key of the namespace has another Redis type than it must have: no beat can go on until an operator mends it."""


class Permanent(TzBeatError):
    """Raised in a task: this failure will not pass, so there is no retry; the run ends in the dead letters at once."""


class Cancelled(TzBeatError):
    """Raised in a task by `run.raise_if_cancelled`: somebody asked this run to stop. The run ends as revoked."""

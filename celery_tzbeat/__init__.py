"""Celery beat on as many hosts as you like.

The public names. They are imported when first used, because every `celery` command imports this package for its
entry points.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import TzBeat
    from .beat.scheduler import Scheduler
    from .errors import (
        BrokerUnavailable,
        Cancelled,
        EntryNotFound,
        InvalidConfiguration,
        InvalidEntry,
        InvalidPolicy,
        InvalidSchedule,
        Permanent,
        StoreDamaged,
        StoreUnavailable,
        StoreUnreadable,
        TzBeatError,
    )
    from .model import Policy, Retry
    from .schedules import at, crontab, every, rrule
    from .signals import (
        beat_leading,
        beat_standing_by,
        occurrence_dead,
        occurrence_lost,
        occurrence_sent,
        occurrences_unrun,
    )
    from .worker.idempotency import idempotent
    from .worker.run import current_run

__version__ = "0.1.0"

_HOMES = {
    "TzBeat": "api",
    "Scheduler": "beat.scheduler",
    "BrokerUnavailable": "errors",
    "Cancelled": "errors",
    "EntryNotFound": "errors",
    "InvalidConfiguration": "errors",
    "InvalidEntry": "errors",
    "InvalidPolicy": "errors",
    "InvalidSchedule": "errors",
    "OccurrenceNotFound": "errors",
    "Permanent": "errors",
    "StoreDamaged": "errors",
    "StoreUnavailable": "errors",
    "StoreUnreadable": "errors",
    "TzBeatError": "errors",
    "Policy": "model",
    "Retry": "model",
    "at": "schedules",
    "crontab": "schedules",
    "every": "schedules",
    "rrule": "schedules",
    "beat_leading": "signals",
    "beat_standing_by": "signals",
    "occurrence_dead": "signals",
    "occurrence_lost": "signals",
    "occurrence_sent": "signals",
    "occurrences_unrun": "signals",
    "idempotent": "worker.idempotency",
    "current_run": "worker.run",
}

__all__ = [
    "BrokerUnavailable",
    "Cancelled",
    "EntryNotFound",
    "InvalidConfiguration",
    "InvalidEntry",
    "InvalidPolicy",
    "InvalidSchedule",
    "OccurrenceNotFound",
    "Permanent",
    "Policy",
    "Retry",
    "Scheduler",
    "StoreDamaged",
    "StoreUnavailable",
    "StoreUnreadable",
    "TzBeat",
    "TzBeatError",
    "at",
    "beat_leading",
    "beat_standing_by",
    "crontab",
    "current_run",
    "every",
    "idempotent",
    "occurrence_dead",
    "occurrence_lost",
    "occurrence_sent",
    "occurrences_unrun",
    "rrule",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

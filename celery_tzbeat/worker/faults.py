"""What went wrong beside a task, in this process: counted and logged, never raised into the task.

A hook of ours must not change a task's result. It catches its own errors and notes them here.
"""

from __future__ import annotations

import logging
from collections import Counter

from celery_tzbeat.clock import Clock, Reading, SystemClock

logger = logging.getLogger(__name__)

#: The least time between two log lines of one word, in seconds: a store that is down fails every call.
QUIET = 60.0

#: How often each word was noted since this process began.
counts: Counter[str] = Counter()

_said: dict[str, Reading] = {}


def note(word: str, message: str, *args: object, clock: Clock | None = None) -> None:
    """Count a fault under `word`, and log it unless that word was logged within the last minute. Raises nothing."""
    counts[word] += 1
    now = (clock or SystemClock()).reading()
    if word in _said and now.advance_since(_said[word]) < QUIET:
        return
    _said[word] = now
    logger.warning(message + " (fault %r, %d so far)", *args, word, counts[word], extra={"action": f"fault_{word}"})

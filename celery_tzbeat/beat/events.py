"""Whom a term of office tells what happened; called on the tick's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_tzbeat.model import Occurrence, Unrun


@dataclass(frozen=True, slots=True)
class Events:
    """A callable for each kind of news. `dead` is told the reason, too."""

    sent: Callable[[Occurrence], None]
    unrun: Callable[[Unrun], None]
    dead: Callable[[Occurrence, str], None]
    lost: Callable[[Occurrence], None]

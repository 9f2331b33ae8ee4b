"""Entries that have a cursor but are not listed by this leader: forgotten after `retention` of leading without them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from celery_tzbeat.clock import Clock
from celery_tzbeat.model import Cursor
from celery_tzbeat.store.protocol import BATCH

from .ledger import Ledger

#: How often leaders add up for how long they have led without listing an entry.
UNLISTED_EVERY = timedelta(seconds=60)


class Unlisted:
    """The unlisted entries of one term of office."""

    def __init__(self, ledger: Ledger, clock: Clock, retention: timedelta) -> None:
        self._ledger = ledger
        self._clock = clock
        self._retention = retention
        self._at = clock.now()
        #: Their cursors, by entry.
        self.cursors: Mapping[str, Cursor] = {}

    def begin(self, cursors: Mapping[str, Cursor]) -> None:
        self.cursors, self._at = cursors, self._clock.now()

    def count(self) -> None:
        """Add up, each minute; forget those that were unlisted for `retention`."""
        elapsed = self._clock.now() - self._at
        if not self.cursors or elapsed < UNLISTED_EVERY:
            return
        counted = {
            name: replace(cursor, unlisted_for=cursor.unlisted_for + min(elapsed, 2 * UNLISTED_EVERY))
            for name, cursor in self.cursors.items()
        }
        gone = [name for name, cursor in counted.items() if cursor.unlisted_for >= self._retention]
        kept = {name: cursor for name, cursor in counted.items() if name not in gone}
        store, epoch = self._ledger.store, self._ledger.epoch
        if kept:
            self._ledger.obey(lambda: store.place(kept, epoch=epoch))
        for start in range(0, len(gone), BATCH):
            part = gone[start : start + BATCH]
            self._ledger.obey(lambda part=part: store.forget(part, epoch=epoch))  # type: ignore[misc]
        self.cursors, self._at = kept, self._clock.now()

"""What operators ask of whoever leads (cancel, pause, replay …), and what they look at: runs and dead letters.

What is asked is kept in the store: it is accepted while no beat is alive, carried out by the next leader, once, and answered
with words. After `EXPIRES` it is answered `expired` instead.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from celery_tzbeat.clock import Clock, Waker
from celery_tzbeat.deliveries import DeadLetter
from celery_tzbeat.errors import OccurrenceNotFound
from celery_tzbeat.model import iso
from celery_tzbeat.store.protocol import Request, RequestKind, Run, Store

#: A request that no leader has carried out for so long is not carried out any more.
EXPIRES = timedelta(hours=1)

#: How often an answer is looked for, in seconds.
LOOK_EVERY = 0.1


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the leader's answer: None while it waits. `id` is empty where nothing was asked (`dry_run`)."""

    kind: RequestKind
    key: str
    id: str = ""
    outcome: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the leader carried it out; False also while it waits."""
        return self.outcome is not None and self.outcome.startswith(CARRIED_OUT)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "key": self.key, "id": self.id or None, "outcome": self.outcome}


#: How the answer to a request begins that was carried out; any other says why it was not.
CARRIED_OUT = ("withdrawn", "asked to stop", "replayed", "discarded", "paused", "unpaused")


class Desk:
    """Puts requests, and waits for answers. `open_store` connects anew for each call."""

    def __init__(self, open_store: Callable[[], AbstractContextManager[Store]], clock: Clock) -> None:
        self.open_store = open_store
        self._clock = clock

    def ask(
        self, kind: RequestKind, keys: Iterable[str], *, why: str, wait: timedelta | None, detail: str = ""
    ) -> tuple[Asked, ...]:
        """Ask for something about each key; with `wait`, look so long for the answers. Raises StoreUnavailable."""
        with self.open_store() as store:
            expires, by = store.time() + EXPIRES, caller()
            asked = [Asked(kind, key, store.ask(Request(kind, key, by, why, expires, detail=detail))) for key in keys]
            return tuple(self._answers(store, asked, wait) if wait is not None else asked)

    def _answers(self, store: Store, asked: Sequence[Asked], wait: timedelta) -> list[Asked]:
        began, found = self._clock.reading(), list(asked)
        with closing(Waker()) as waker:
            while True:
                found = [
                    each if each.outcome is not None else replace(each, outcome=store.outcome(each.id))
                    for each in found
                ]
                late = self._clock.reading().advance_since(began) >= wait.total_seconds()
                if late or all(each.outcome is not None for each in found):
                    return found
                waker.wait(LOOK_EVERY)


class DeadLetters:
    """`tz.dead`: permanent failures, kept until they are replayed or discarded.

    Filters: the entry's name, the reason (one word, see `deliveries.DeadLetter`), and `since` when it died; each matches
    all where it is left out. The oldest come first.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def list(
        self,
        *,
        entry: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        limit: int | None = None,
    ) -> Sequence[DeadLetter]:
        """Return the letters that match, at most `limit`. One that cannot be read is left out (`unreadable`)."""
        found = [
            letter
            for letter in self._letters()[0]
            if (entry is None or letter.entry == entry)
            and (reason is None or letter.reason == reason)
            and (since is None or letter.at >= since)
        ]
        return found[:limit]

    def unreadable(self) -> int:
        """Return how many letters cannot be read: of another release, or damaged. Nothing drops them."""
        return self._letters()[1]

    def show(self, key: str) -> DeadLetter:
        """Return one letter. Raises OccurrenceNotFound, or ValueError where it cannot be read."""
        with self._desk.open_store() as store:
            text = store.dead_letter(key)
        if text is None:
            raise _no_letter(key)
        return DeadLetter.from_json(text)

    def replay(
        self,
        *keys: str,
        entry: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        why: str = "",
        wait: timedelta | None = None,
    ) -> tuple[Asked, ...]:
        """Ask that letters be sent again: each a higher dispatch of its key, under a new task id.

        Those of `keys`; without keys, those that the filters match. Raises OccurrenceNotFound for a key without a letter,
        and then asks for nothing. `dry_run` asks for nothing and returns what would be asked.
        """
        found = self._keys(keys, entry, reason, since, limit)
        return self._asked("replay", found, dry_run=dry_run, why=why, wait=wait)

    def discard(
        self,
        *keys: str,
        entry: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        why: str = "",
        wait: timedelta | None = None,
    ) -> tuple[Asked, ...]:
        """Ask that letters be dropped, with their messages; else as `replay`. What is dropped never comes back."""
        found = self._keys(keys, entry, reason, since, limit)
        return self._asked("discard", found, dry_run=dry_run, why=why, wait=wait)

    def _asked(
        self, kind: RequestKind, keys: Iterable[str], *, dry_run: bool, why: str, wait: timedelta | None
    ) -> tuple[Asked, ...]:
        if dry_run:
            return tuple(Asked(kind, key) for key in keys)
        return self._desk.ask(kind, keys, why=why, wait=wait)

    def _keys(
        self,
        keys: Sequence[str],
        entry: str | None,
        reason: str | None,
        since: datetime | None,
        limit: int | None,
    ) -> Sequence[str]:
        if not keys:
            return [letter.key for letter in self.list(entry=entry, reason=reason, since=since, limit=limit)]
        with self._desk.open_store() as store:
            for key in keys:
                if store.dead_letter(key) is None:
                    raise _no_letter(key)
        return keys[:limit]

    def _letters(self) -> tuple[Sequence[DeadLetter], int]:
        with self._desk.open_store() as store:
            return _readable(store.dead_letters().values())


def letter_dict(letter: DeadLetter) -> dict[str, Any]:
    """Return the row of a list: without message and traceback."""
    return {
        "key": letter.key,
        "entry": letter.entry,
        "task": letter.task,
        "nominal": iso(letter.nominal) if letter.nominal else None,
        "reason": letter.reason,
        "error": letter.error,
        "at": iso(letter.at),
        "attempts": letter.attempts,
        "worker": letter.worker,
        "task_id": letter.task_id,
        "has_message": bool(letter.message),
    }


def run_dict(run: Run) -> dict[str, Any]:
    """Return an unsettled occurrence, without its message."""
    done, total = run.progress or (None, None)
    return {
        "key": run.key,
        "entry": run.entry,
        "nominal": iso(run.nominal) if run.nominal else None,
        "state": run.state,
        "worker": run.worker,
        "dispatch": run.order[0],
        "attempt": run.order[1] + 1,
        "starts": run.starts,
        "deadline": iso(run.deadline),
        "cancelled": run.cancelled,
        "done": done,
        "total": total,
    }


def caller() -> str:
    """Return who asks, as the audit shows it: user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a uid without a name
        user = f"uid {os.getuid()}" if hasattr(os, "getuid") else "?"
    return f"{user}@{socket.gethostname()}"


def _readable(texts: Iterable[str]) -> tuple[list[DeadLetter], int]:
    """Return the letters that can be read, the oldest first, and how many cannot."""
    found, unreadable = [], 0
    for text in texts:
        try:
            found.append(DeadLetter.from_json(text))
        except (ValueError, RecursionError):
            unreadable += 1
    return sorted(found, key=lambda letter: (letter.at, letter.key)), unreadable


def _no_letter(key: str) -> OccurrenceNotFound:
    return OccurrenceNotFound(f"there is no dead letter of {key!r}; `tzbeat dead list` shows which there are")

"""Where an entry stands: its definition, what is due next, and what the ledger says of it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

from celery_tzbeat.model import AuditRecord, Cursor, Entry, Pause, Policy, from_micros, iso
from celery_tzbeat.store.protocol import Store

#: The newest audit records of the namespace that are looked through, and those of one entry that are shown.
AUDIT_READ = 1000
AUDIT_SHOWN = 10

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 24
_short.maxdict = _short.maxlist = _short.maxtuple = 6


@dataclass(frozen=True, slots=True)
class Last:
    """The last settled occurrence of an entry."""

    nominal: datetime
    state: str
    at: datetime  # the store's time of settling


@dataclass(frozen=True, slots=True)
class Standing:
    """An entry, and as far as the ledger was asked, what it says. `next_due` is strictly after now and after the cursor."""

    entry: Entry
    next_due: datetime | None
    over: bool = False  # nothing is due any more, though something was
    cursor: Cursor | None = None
    last: Last | None = None
    pause: Pause | None = None
    dead_letters: tuple[Mapping[str, Any], ...] = ()
    audit: tuple[AuditRecord, ...] = ()
    unreadable: int = 0  # dead letters of the namespace that cannot be read, whose entry is not known therefore

    @property
    def zone(self) -> str:
        """The zone's name, empty for a schedule that needs none."""
        return str(self.entry.schedule.zone or "")

    def to_dict(self) -> dict[str, Any]:
        """Return the row of a list: no arguments, no policy."""
        return {
            "name": self.entry.name,
            "task": self.entry.task,
            "schedule": self.entry.schedule.text,
            "zone": self.zone or None,
            "next_due": iso(self.next_due) if self.next_due else None,
            "over": self.over,
            "last": last_dict(self.last),
            "paused": pause_dict(self.pause),
        }

    def in_full(self) -> dict[str, Any]:
        """Return everything; of arguments and options only short texts, since they may hold secrets."""
        return {
            **self.to_dict(),
            "words": self.entry.schedule.describe(),
            "args": _short.repr(self.entry.args),
            "kwargs": _short.repr(dict(self.entry.kwargs)),
            "options": _short.repr(dict(self.entry.options)),
            "policy": policy_dict(self.entry.policy),
            "cursor": cursor_dict(self.cursor),
            "dead_letters": list(self.dead_letters),
            "unreadable_dead_letters": self.unreadable,
            "audit": [audit_dict(record) for record in self.audit],
        }


def plain_standing(entry: Entry, *, now: datetime) -> Standing:
    """Return what can be said without the ledger."""
    upcoming = entry.schedule.next_after(now)
    return Standing(entry, upcoming, over=upcoming is None and entry.schedule.prev_before(now) is not None)


def ledger_of(standings: Sequence[Standing], store: Store, *, in_full: bool = False) -> list[Standing]:
    """Return the standings with what the ledger says; `in_full` with dead letters and audit records."""
    cursors, last, paused = store.cursors(), store.last(), store.paused()
    letters, unreadable = _readable(store.dead_letters() if in_full else {})
    audit = store.audit(count=AUDIT_READ) if in_full else []
    found = []
    for standing in standings:
        name, upcoming = standing.entry.name, standing.next_due
        cursor = cursors.get(name)
        if cursor is not None and upcoming is not None and cursor.nominal >= upcoming:
            upcoming = standing.entry.schedule.next_after(cursor.nominal)
        found.append(
            replace(
                standing,
                next_due=upcoming,
                cursor=cursor,
                last=Last(*last[name]) if name in last else None,
                pause=paused.get(name),
                dead_letters=tuple(_letters_of(name, letters)),
                unreadable=unreadable,
                audit=tuple(record for record in audit if record.entry == name)[-AUDIT_SHOWN:],
            )
        )
    return found


def audit_time(record: AuditRecord) -> datetime:
    """Return the store's time of an audit record, to the millisecond."""
    return from_micros(int(record.id.partition("-")[0]) * 1000)


def last_dict(last: Last | None) -> dict[str, Any] | None:
    if last is None:
        return None
    return {"nominal": iso(last.nominal), "state": last.state, "at": iso(last.at)}


def pause_dict(pause: Pause | None) -> dict[str, Any] | None:
    if pause is None:
        return None
    until = iso(pause.until) if pause.until is not None else None
    return {"since": iso(pause.at), "until": until, "by": pause.by, "note": pause.note}


def policy_dict(policy: Policy) -> dict[str, Any]:
    """Return a policy with durations in seconds."""
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}
    return {k: v.total_seconds() if hasattr(v, "total_seconds") else v for k, v in values.items()}


def cursor_dict(cursor: Cursor | None) -> dict[str, Any] | None:
    if cursor is None:
        return None
    return {
        "nominal": iso(cursor.nominal),
        "rule": cursor.rule,
        "mark": cursor.mark,
        "tzdata": cursor.tzdata,
        "unlisted_for": cursor.unlisted_for.total_seconds(),
    }


def audit_dict(record: AuditRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "at": iso(audit_time(record)),
        "event": record.event,
        "entry": record.entry,
        "first": iso(record.first) if record.first else None,
        "last": iso(record.last) if record.last else None,
        "count": record.count,
        "epoch": record.epoch,
        "detail": record.detail,
    }


def _readable(letters: Mapping[str, str]) -> tuple[list[dict[str, Any]], int]:
    """Return the dead letters that can be read, and how many cannot. Keys are never parsed."""
    found, unreadable = [], 0
    for text in letters.values():
        try:
            letter = json.loads(text)
        except (ValueError, RecursionError):
            letter = None
        if isinstance(letter, dict) and isinstance(letter.get("entry"), str):
            found.append(letter)
        else:
            unreadable += 1
    return found, unreadable


def _letters_of(name: str, letters: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an entry's dead letters by nominal."""
    return sorted(
        (letter for letter in letters if letter["entry"] == name), key=lambda letter: str(letter.get("nominal"))
    )

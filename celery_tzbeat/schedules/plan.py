"""What to do with what is due: (entry, cursor, now) -> a judgement. Pure, and the only place that decides it.

Two questions. `start_of`: from which instant does an entry go on, when a leader takes office? `judge`: of all that is due
now, what runs, what runs late, and what is recorded as not run? Design: section 5, *misfire_grace*, *catchup*,
*catchup_window*, and the paragraph on new, changed and returning entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from celery_tzbeat.model import MICROSECOND, Cursor, Entry, Unrun

#: A row is counted exactly up to here.
COUNTED = 1000


@dataclass(frozen=True, slots=True)
class Start:
    """Where an entry goes on: strictly after `after`. `place` is the cursor to write at once, where one is needed."""

    after: datetime
    place: Cursor | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is due of one entry, judged once.

    Occurrences after `after` and up to `until` are to run, one by one; those up to `late_until` run though they misfired.
    `rows` have to be recorded before the first of them is sent.
    """

    after: datetime
    until: datetime
    late_until: datetime | None = None
    rows: tuple[Unrun, ...] = ()


def cursor_at(entry: Entry, nominal: datetime, *, tzdata: str, rule: str | None = None) -> Cursor:
    """Return the cursor of an entry whose occurrence at `nominal` has been decided."""
    return Cursor(
        nominal=nominal,
        rule=rule or entry.rule,
        mark=entry.schedule.mark(nominal),
        tzdata=tzdata,
    )


def start_of(entry: Entry, cursor: Cursor | None, *, now: datetime, retention: timedelta, tzdata: str) -> Start:
    """Return where `entry` goes on, given its stored cursor (None: it has none, or none that can be read).

    A new entry starts from now, and so does one that leaders have led without for `retention`. A changed schedule starts
    at the later of its cursor and `now` less its grace: an edit never runs the past, and a hand-over within the grace
    loses nothing. Where the zone files changed, an occurrence that merely moved is not a new one (`Schedule.resume`).
    """
    if cursor is None or cursor.unlisted_for >= retention:
        return Start(now, Cursor(nominal=now, rule=entry.rule, tzdata=tzdata))
    if cursor.rule != entry.rule:
        after = max(cursor.nominal, now - entry.policy.misfire_grace)
        return Start(after, Cursor(nominal=after, rule=entry.rule, tzdata=tzdata))
    after = cursor.nominal
    if cursor.mark and cursor.tzdata != tzdata:
        after = entry.schedule.resume(cursor.nominal, cursor.mark)
    if cursor.unlisted_for:
        return Start(after, Cursor(cursor.nominal, cursor.rule, cursor.mark, cursor.tzdata))
    return Start(after)


def judge(entry: Entry, after: datetime, *, now: datetime, tzdata: str) -> Judgement:
    """Judge all occurrences u of `entry` with after < u <= now. Bounded work for an outage of any length.

    In grace (u >= now - misfire_grace) all run. Of the misfired ones `catchup` decides; what is older than
    `catchup_window` is missed whatever it says. Counting a row is bounded by COUNTED steps.
    """
    policy, schedule = entry.policy, entry.schedule
    on_time_from = now - policy.misfire_grace
    first = schedule.next_after(after)
    if first is None or first >= on_time_from:
        return Judgement(after, now)

    rows: list[Unrun] = []

    def row(event: Literal["skipped", "coalesced", "missed"], first: datetime, last: datetime, reason: str) -> None:
        count = schedule.count_between(first, last, COUNTED - 1) + 1
        cursor = cursor_at(entry, last, tzdata=tzdata)
        rows.append(Unrun(event, entry.name, first, last, count, reason, cursor))

    window_from = now - policy.catchup_window
    if first < window_from:
        last = _last_before(entry, window_from, not_before=first)
        row("missed", first, last, "older than catchup_window")
        after = last
        following = schedule.next_after(after)
        if following is None or following >= on_time_from:
            return Judgement(after, now, rows=tuple(rows))
        first = following

    newest = _last_before(entry, on_time_from, not_before=first)
    if policy.catchup == "all":
        return Judgement(after, now, late_until=newest, rows=tuple(rows))
    if policy.catchup == "skip":
        row("skipped", first, newest, "catchup=skip")
        return Judgement(newest, now, rows=tuple(rows))
    if first < newest:
        last = _last_before(entry, newest, not_before=first)
        row("coalesced", first, last, "catchup=latest")
        after = last
    return Judgement(after, now, late_until=newest, rows=tuple(rows))


def skipped_until(entry: Entry, after: datetime, *, now: datetime, tzdata: str, reason: str) -> Unrun | None:
    """Return the row of all occurrences u with after < u <= now, as skipped; None where there are none. Bounded work."""
    first = entry.schedule.next_after(after)
    if first is None or first > now:
        return None
    last = _last_before(entry, now + MICROSECOND, not_before=first)
    count = entry.schedule.count_between(first, last, COUNTED - 1) + 1
    return Unrun("skipped", entry.name, first, last, count, reason, cursor_at(entry, last, tzdata=tzdata))


def _last_before(entry: Entry, instant: datetime, *, not_before: datetime) -> datetime:
    """Return the last occurrence before `instant`; there is one, at `not_before` at the earliest."""
    found = entry.schedule.prev_before(instant)
    return not_before if found is None else max(found, not_before)

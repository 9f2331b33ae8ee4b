"""What is due next: a heap of the entries' next occurrences, and the queue of those that are due and judged.

Cost grows with what is due, not with what exists. Plain memory, rebuilt from the ledger's cursors at each term of office.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from celery_tzbeat.model import Cursor, Entry, Occurrence, Unrun
from celery_tzbeat.schedules.plan import COUNTED, cursor_at, judge, skipped_until, start_of
from celery_tzbeat.store.keys import Bucket

logger = logging.getLogger(__name__)

#: Attempts at building a message before the occurrence is a dead letter, and the waits between them.
BUILD_ATTEMPTS = 5
BACKOFF_FIRST = timedelta(seconds=1)
BACKOFF_LONGEST = timedelta(seconds=60)

#: One look judges entries until it has spent so many steps: one for each entry, one for each occurrence that it counted.
LOOK_STEPS = 2 * COUNTED


@dataclass(slots=True)
class Course:
    """One entry's way through time during a term of office."""

    entry: Entry
    cursor: Cursor  # as it stands in the ledger
    after: datetime  # everything up to here is decided
    next: datetime | None = None
    judged_until: datetime | None = None  # due up to here: judged, never again a misfire
    late_until: datetime | None = None  # up to here: misfired, run nevertheless
    put_offs: int = 0
    build_failures: int = 0
    place: int = 0  # the number of its place in the heap: any other there is an old one

    @property
    def bucket(self) -> Bucket:
        """The place of that occurrence's done mark."""
        assert self.next is not None
        return Bucket.of(self.next, self.entry.schedule.shortest_gap)

    def occurrence(self) -> Occurrence:
        """Return the occurrence to send next; there is one."""
        assert self.next is not None
        late = self.late_until is not None and self.next <= self.late_until
        return Occurrence(self.entry.name, self.next, late=late)


@dataclass(slots=True)
class Agenda:
    """The courses of all entries.

    `open` fills it at the start of a term; `look` moves what is due to `ready`; the term takes from `ready`, and says
    `done`, `put_off` or `wait` of each, and `recorded` of each row. A paused entry's course stands still.
    """

    entries: Mapping[str, Entry]
    tzdata: str
    ready: deque[Course] = field(default_factory=deque)
    _paused: set[str] = field(default_factory=set)
    _courses: dict[str, Course] = field(default_factory=dict)
    _heap: list[tuple[datetime, int, Course]] = field(default_factory=list)
    _order: int = 0

    def open(
        self, cursors: Mapping[str, Cursor], *, now: datetime, retention: timedelta, paused: Collection[str] = ()
    ) -> dict[str, Cursor]:
        """Begin a term: every entry goes on from its cursor. Return the cursors that have to be written first."""
        self._paused = set(paused)
        self.ready.clear()
        self._heap.clear()
        self._courses.clear()
        places: dict[str, Cursor] = {}
        for name, entry in self.entries.items():
            start = start_of(entry, cursors.get(name), now=now, retention=retention, tzdata=self.tzdata)
            if start.place is not None:
                places[name] = start.place
            course = Course(entry=entry, cursor=start.place or cursors[name], after=start.after)
            self._courses[name] = course
            self._follow(course)
        return places

    def look(self, now: datetime) -> list[Unrun]:
        """Judge what has become due by `now`, the oldest first, for LOOK_STEPS. Return the rows to record before sending.

        Where it was not enough (`behind`), look again with the same `now`: a long look must not make misfires.
        """
        rows: list[Unrun] = []
        steps = 0
        while self.behind(now) and steps < LOOK_STEPS:
            course = heapq.heappop(self._heap)[2]
            course.place = 0
            steps += 1
            if course.next is not None and (course.judged_until is None or course.next > course.judged_until):
                try:
                    judgement = judge(course.entry, course.after, now=now, tzdata=self.tzdata)
                except Exception:
                    self._fails(course)
                    continue
                rows += judgement.rows
                steps += sum(row.count for row in judgement.rows)
                course.after = judgement.after
                course.judged_until, course.late_until = judgement.until, judgement.late_until
                course.next = self._next(course)
            if course.next is not None and course.next <= now:
                self.ready.append(course)
            else:
                self._push(course)
        return rows

    def behind(self, now: datetime) -> bool:
        """Return whether something is due by `now` that was not looked at."""
        first = self._first
        return first is not None and first <= now

    def recorded(self, row: Unrun) -> None:
        """A row stands in the ledger, and its cursor with it."""
        self._courses[row.entry].cursor = row.cursor

    def done(self, course: Course) -> None:
        """The course's occurrence is decided: go on to its next one."""
        assert course.next is not None
        course.cursor, course.after = self.cursor(course), course.next
        course.put_offs = course.build_failures = 0
        self._follow(course)

    def put_off(self, course: Course, now: datetime) -> None:
        """The course's occurrence could not be sent: it stays due, and is tried again after a while (1 s to 60 s)."""
        wait = min(BACKOFF_FIRST * 2 ** min(course.put_offs, 10), BACKOFF_LONGEST)
        course.put_offs += 1
        self._push_at(now + wait, course)

    def wait(self, course: Course, until: datetime) -> None:
        """The course's occurrence has to wait for something else of its entry: it stays due."""
        self._push_at(until, course)

    def cursor(self, course: Course) -> Cursor:
        """Return the cursor behind the course's occurrence."""
        assert course.next is not None
        return cursor_at(course.entry, course.next, tzdata=self.tzdata, rule=course.cursor.rule)

    def positions(self) -> dict[str, Cursor]:
        """Return the cursors of all entries as this term knows them, to write back into a wiped store."""
        return {name: course.cursor for name, course in self._courses.items()}

    @property
    def next_due(self) -> datetime | None:
        """When something is due next; in the past where something is due and not yet sent."""
        nexts = [course.next for course in self.ready if course.next is not None]
        if (first := self._first) is not None:
            nexts.append(first)
        return min(nexts, default=None)

    def pause(self, name: str) -> None:
        """Let an entry's course stand still. What of it was built goes its way."""
        self._paused.add(name)
        if (course := self._courses.get(name)) is not None:
            course.place = 0
            self.ready = deque(each for each in self.ready if each is not course)

    def skipped(self, name: str, now: datetime) -> Unrun | None:
        """Return the row of what a paused entry has not sent by now; None where that is nothing."""
        course = self._courses.get(name)
        if course is None:
            return None
        return skipped_until(course.entry, course.after, now=now, tzdata=self.tzdata, reason="paused")

    def resume(self, name: str, after: datetime | None) -> None:
        """Let an entry's course go on: from `after`, or else from where it stands, by the rules for what misfired."""
        self._paused.discard(name)
        if (course := self._courses.get(name)) is not None:
            course.after = course.after if after is None else max(course.after, after)
            course.judged_until = course.late_until = None
            course.put_offs = course.build_failures = 0
            self._follow(course)

    @property
    def _first(self) -> datetime | None:
        """When the first course in the heap is due; old places before it are dropped."""
        while self._heap and self._heap[0][1] != self._heap[0][2].place:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _follow(self, course: Course) -> None:
        course.next = self._next(course)
        if course.entry.name in self._paused:
            return
        if course.next is not None and course.judged_until is not None and course.next <= course.judged_until:
            self.ready.append(course)
        else:
            self._push(course)

    def _next(self, course: Course) -> datetime | None:
        try:
            return course.entry.schedule.next_after(course.after)
        except Exception:
            self._fails(course)
            return None

    def _fails(self, course: Course) -> None:
        """One schedule that cannot answer must not stop the others; it is asked again at the next term."""
        logger.exception(
            "entry %r: its schedule fails, and nothing of it is sent in this term of office",
            course.entry.name,
            extra={"action": "schedule_failed", "entry": course.entry.name},
        )

    def _push(self, course: Course) -> None:
        if course.next is not None:
            self._push_at(course.next, course)

    def _push_at(self, at: datetime, course: Course) -> None:
        if course.entry.name in self._paused:
            return
        self._order += 1
        course.place = self._order
        heapq.heappush(self._heap, (at, self._order, course))

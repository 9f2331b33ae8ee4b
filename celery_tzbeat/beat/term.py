"""One leader's term of office: from taking office with an epoch until it is lost.

Failure table (what happens when it dies, or a reply is lost, at each call):

    call            dies before            dies after / reply lost           other side paused, later leader in office
    take_office     next leader takes it   the fence is ours; asked again    None: stand by
    place           next leader places     the same cursors again: no-op     STALE
    record_unrun    next leader judges     DECIDED: the row stands once      STALE
    build           nothing has left       nothing has left                  -
    dispatch        stays due              sent again as built: DECIDED      STALE: nothing pushed
    claim, confirm  see `claims`
    bury            stays due              DECIDED                           STALE

After any StoreUnavailable the same call is made again, with the same content, as long as the lease is trusted. WIPED: the
cursors that this term knows are written back first. The term never asks whether it still leads, each script does; only
`write_back` asks, since a wiped store has lost the fence as well.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

from celery_tzbeat.clock import Clock, Reading
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import Cursor, Occurrence, Unrun, iso
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import BATCH, Answer, Burial, Office, Store, Verdict

from .agenda import BUILD_ATTEMPTS, Agenda, Course
from .claims import Claims, Outdated
from .dispatch import BuildFailed
from .paths import Outgoing, Path
from .publisher import Publisher

logger = logging.getLogger(__name__)

#: How long a tick publishes before it yields, so that Celery's own ping stays alive.
PUBLISHING = 0.25

#: A batch that could not be sent for so long is built anew: a relative expiry is counted from when it is sent, in seconds.
REBUILT_AFTER = 5.0

#: A batch takes no more messages when it has so many bytes: a slow link must carry it within the bound of one call.
BATCH_BYTES = 1_000_000

#: Cursors are written so many at once, about 5 ms of the server's time.
CURSORS_AT_ONCE = 500

#: A new entry starts from the later of this host's clock and the store's, where they agree so far. A store further off
#: (which only a raised tzbeat_max_skew lets lead) tells nothing about this host's time.
CLOCKS_AGREE = timedelta(seconds=300)

#: How often leaders add up for how long they have led without listing an entry.
UNLISTED_EVERY = timedelta(seconds=60)


class Replaced(Exception):
    """This term is over: a later leader is in office, or what it judged cannot stand."""


@dataclass(frozen=True, slots=True)
class Events:
    """Whom the term tells what happened; called on the tick's thread."""

    sent: Callable[[Occurrence], None]
    unrun: Callable[[Unrun], None]
    dead: Callable[[Occurrence, str], None]


class Term:
    """A leader in office under one epoch. Made by `begin`; `work` is called at every tick."""

    def __init__(
        self,
        *,
        epoch: int,
        store: Store,
        agenda: Agenda,
        path: Path,
        publisher: Publisher,
        clock: Clock,
        retention: timedelta,
        max_skew: timedelta,
        progress: Callable[[], None],
        trusted: Callable[[], bool],
        events: Events,
    ) -> None:
        self.epoch = epoch
        self._store = store
        self._agenda = agenda
        self.path = path
        self._clock = clock
        self._retention = retention
        self._max_skew = max_skew
        self._progress = progress
        self._trusted = trusted
        self._events = events
        self._repairs: dict[str, Cursor] = {}
        self._places: dict[str, Cursor] = {}
        self._rows: deque[Unrun] = deque()
        self._in_flight: list[tuple[Course, Outgoing]] = []
        self._claims = Claims(
            epoch=epoch,
            store=store,
            publisher=publisher,
            clock=clock,
            progress=progress,
            trusted=trusted,
            sent=events.sent,
            dead=events.dead,
        )
        self._cannot_build = False  # since the broker did not answer when it was asked last
        self._claims_known = False  # whether what stands open in the ledger is owed here
        self._built_at = clock.reading()
        self._unlisted: dict[str, Cursor] = {}
        self._unlisted_at = clock.now()
        self._looking_at: datetime | None = None  # the `now` of a look that is not through yet

    def begin(self, office: Office) -> None:
        """Go on from what the ledger says was decided."""
        now = self._clock.now()
        if timedelta() < office.time - now <= CLOCKS_AGREE:
            now = office.time
        self._repairs = {
            name: Cursor(nominal=now, rule=cursor.rule, tzdata=cursor.tzdata)
            for name, cursor in office.cursors.items()
            if cursor.nominal > office.time + self._max_skew
        }
        for name in self._repairs:
            logger.error(
                "the cursor of entry %r stands at %s, ahead of the store's clock: it is set back to now",
                name,
                iso(office.cursors[name].nominal),
                extra={"action": "cursor_repaired", "entry": name},
            )
        cursors = {**office.cursors, **self._repairs}
        self._places = self._agenda.open(cursors, now=now, retention=self._retention)
        self._unlisted = {name: cursor for name, cursor in cursors.items() if name not in self._agenda.entries}
        self._unlisted_at = self._clock.now()
        for name in office.unreadable:
            logger.error(
                "the cursor of entry %r cannot be read: the entry starts from now",
                name,
                extra={"action": "cursor_unreadable", "entry": name},
            )

    @property
    def next_due(self) -> datetime | None:
        return self._agenda.next_due

    @property
    def cut_off(self) -> bool:
        """Whether what is due cannot be built or sent, since the broker does not answer."""
        return self._claims.cut_off or self._cannot_build

    @property
    def broker_answers(self) -> bool:
        """Whether the broker took, or refused, the last message that was published to it."""
        return self._claims.broker_answers is True

    def work(self) -> float:
        """Record and send what is due, for at most PUBLISHING seconds. Return how long nothing will be due, in seconds.

        Raises Replaced, or StoreUnavailable; what was unfinished is done at the next call.
        """
        began = self._clock.reading()
        if self._in_flight and began.advance_since(self._built_at) >= REBUILT_AFTER:
            self._agenda.ready.extendleft(course for course, _ in reversed(self._in_flight))
            self._in_flight = []
        if not self._settle_places(began):
            return 0.0
        if not self._send_claims(began):
            return 0.0
        self._count_unlisted()
        through = False
        while not through:
            through = self._look()
            self._record_rows()
            while self._in_flight or self._agenda.ready:
                if not self._in_flight:
                    self._build_batch()
                self._send_in_flight()
                if not self._send_claims(began) or self._clock.reading().advance_since(began) >= PUBLISHING:
                    return 0.0
            if not through and self._clock.reading().advance_since(began) >= PUBLISHING:
                return 0.0
        due = self._agenda.next_due
        wait = (due - self._clock.now()).total_seconds() if due is not None else float("inf")
        return max(0.0, min(wait, self._claims.next_try))

    def positions(self) -> dict[str, Cursor]:
        """Return the cursors as this term knows them."""
        return {**self._unlisted, **self._agenda.positions()}

    def write_back(self) -> None:
        """Write what this term knows into a store that has lost it. Raises Replaced, or StoreUnavailable.

        A wiped store has no fence: it cannot refuse a leader that was replaced while it was frozen, and whose cursors are
        old. So this is the one call that needs the lease's trust. Without it the term waits: if trust comes back under
        this epoch, it was never replaced.
        """
        if not self._trusted():
            raise StoreUnavailable("the store was wiped, and this beat no longer knows whether it leads")
        logger.error(
            "the store was wiped while this beat led: writing the cursors back",
            extra={"action": "store_wiped", "epoch": self.epoch},
        )
        if self._store.restore(self.positions(), epoch=self.epoch) is Verdict.STALE:
            raise Replaced
        self._progress()

    # ---- the steps

    def _settle_places(self, began: Reading) -> bool:
        """Write the cursors that no occurrence moves; return whether that is through."""
        for write, cursors in ((self._store.repair, self._repairs), (self._store.place, self._places)):
            while cursors:
                if not self._left(began):
                    return False
                part = dict(islice(cursors.items(), CURSORS_AT_ONCE))
                self._obey(lambda write=write, part=part: write(part, epoch=self.epoch))  # type: ignore[misc]
                for name in part:
                    del cursors[name]
        return True

    def _left(self, began: Reading) -> float:
        """Return the seconds that are left to a step that `began` then."""
        return max(0.0, PUBLISHING - self._clock.reading().advance_since(began))

    def _look(self) -> bool:
        """Judge some of what is due; return whether that was all of it.

        Nothing where the lease is not trusted now that the clock was read: the clock may have jumped, a day say, and what
        is not too far ahead for the store's guard would be sent before its time.
        """
        now = self._looking_at or self._clock.now()
        if not self._trusted():
            self._looking_at = None
            return True
        self._rows += self._agenda.look(now)
        self._looking_at = now if self._agenda.behind(now) else None
        self._progress()
        return self._looking_at is None

    def _record_rows(self) -> None:
        while self._rows:
            batch = [self._rows[i] for i in range(min(BATCH, len(self._rows)))]
            answers = self._ask(lambda batch=batch: self._store.record_unrun(batch, epoch=self.epoch))  # type: ignore[misc]
            for row, answer in zip(batch, answers, strict=True):
                if answer.verdict is Verdict.EARLY:
                    raise Replaced  # judged by a clock that is ahead: begin anew, once it is right
                self._rows.popleft()
                self._agenda.recorded(row)
                if answer.verdict is Verdict.DONE:
                    self._events.unrun(row)

    def _build_batch(self) -> None:
        """Build up to BATCH messages; what cannot be built is put off, buried or skipped by itself."""
        began, size = self._clock.reading(), 0
        owed = self._claims.waits()
        self._built_at = began
        while self._agenda.ready and len(self._in_flight) < BATCH and size < BATCH_BYTES:
            course = self._agenda.ready[0]
            if course.entry.name in owed:  # its messages stay in order
                self._agenda.ready.popleft()
                self._agenda.wait(course, self._clock.now() + timedelta(seconds=owed[course.entry.name]))
                continue
            occurrence = course.occurrence()
            try:
                message = self.path.build(course.entry, occurrence, epoch=self.epoch)
            except BuildFailed as failure:
                self._cannot_build = False
                self._build_failed(course, occurrence, failure)
                continue
            except StoreUnavailable:
                self._cannot_build = True
                raise
            self._cannot_build = False
            if not message.parts:
                self._not_sent_by_task(course, occurrence)
                continue
            self._agenda.ready.popleft()
            size += message.size
            outgoing = Outgoing(course.entry, occurrence, self._agenda.cursor(course), message)
            self._in_flight.append((course, outgoing))
            if self._clock.reading().advance_since(began) >= PUBLISHING:
                break
        self._progress()

    def _send_in_flight(self) -> None:
        if not self._in_flight:
            return
        batch = [outgoing for _, outgoing in self._in_flight]
        self._claims_known = self._claims_known and self.path.sends_at_once  # until the reply has come
        answers = self._ask(lambda: self.path.send(batch, self._claims, epoch=self.epoch))
        # DECIDED may be a claim of ours, recorded after it was given up: then it is owed here, and only the ledger knows it.
        claimed_late = any(answer.verdict is Verdict.DECIDED for answer in answers) and not self.path.sends_at_once
        self._claims_known = not claimed_late
        now = self._clock.now()
        in_flight, self._in_flight = self._in_flight, []
        for (course, outgoing), answer in zip(in_flight, answers, strict=True):
            match answer.verdict:
                case Verdict.DONE:
                    self._agenda.done(course)
                    if self.path.sends_at_once:
                        self._events.sent(outgoing.occurrence)
                case Verdict.DECIDED:
                    self._agenda.done(course)
                case _:  # EARLY: this host's clock is far ahead; FAULT: the queue refused it
                    logger.error(
                        "entry %r: the occurrence at %s was not sent: %s",
                        course.entry.name,
                        iso(outgoing.occurrence.nominal),
                        answer.detail or answer.verdict.name,
                        extra={"action": "dispatch_refused", "key": outgoing.occurrence.key},
                    )
                    self._agenda.put_off(course, now)
        if any(answer.verdict is Verdict.EARLY for answer in answers):
            raise Replaced  # judged by a clock that is ahead: begin anew, once it is right

    def _send_claims(self, began: Reading) -> bool:
        """Send what is claimed and not surely sent, the earlier leaders' first of all. Return whether that is through."""
        try:
            if not self._claims_known:
                self._claims_known = self._claims.take_over(seconds=self._left(began))
            return self._claims_known and self._claims.work(seconds=self._left(began))
        except Outdated:
            raise Replaced from None

    def _build_failed(self, course: Course, occurrence: Occurrence, failure: BuildFailed) -> None:
        """Line 5: the entry alone backs off; at the fifth failure the occurrence is dead, and the cursor goes on."""
        course.build_failures += 1
        last = course.build_failures >= BUILD_ATTEMPTS
        logger.error(
            "entry %r: the message of %s could not be built (%d of %d): %s",
            course.entry.name,
            iso(occurrence.nominal),
            course.build_failures,
            BUILD_ATTEMPTS,
            failure,
            exc_info=failure.__cause__ if last or course.build_failures == 1 else None,
            extra={"action": "build_failed", "key": occurrence.key},
        )
        if not last:
            self._agenda.ready.popleft()
            self._agenda.put_off(course, self._clock.now())
            return
        letter = json.dumps(
            {
                "v": 1,
                "key": occurrence.key,
                "entry": course.entry.name,
                "task": course.entry.task,
                "nominal": iso(occurrence.nominal),
                "reason": "build",
                "error": str(failure),
                "at": iso(self._clock.now()),
            }
        )
        burial = Burial(
            occurrence,
            self._agenda.cursor(course),
            Bucket.of(occurrence.nominal, course.entry.schedule.shortest_gap),
            reason="build",
            letter=letter,
        )
        answer = self._ask(lambda: [self._store.bury(burial, epoch=self.epoch)])[0]
        if answer.verdict is Verdict.EARLY:
            raise Replaced
        self._agenda.ready.popleft()
        self._agenda.done(course)
        if answer.verdict is Verdict.DONE:
            self._events.dead(occurrence, "build")

    def _not_sent_by_task(self, course: Course, occurrence: Occurrence) -> None:
        row = Unrun(
            "skipped",
            course.entry.name,
            occurrence.nominal,
            occurrence.nominal,
            1,
            "by the task",
            self._agenda.cursor(course),
        )
        answer = self._ask(lambda: self._store.record_unrun([row], epoch=self.epoch))[0]
        if answer.verdict is Verdict.EARLY:
            raise Replaced
        self._agenda.ready.popleft()
        self._agenda.done(course)
        if answer.verdict is Verdict.DONE:
            self._events.unrun(row)

    def _count_unlisted(self) -> None:
        """Entries that have a cursor but are not listed here: forgotten after `retention` of leading without them."""
        elapsed = self._clock.now() - self._unlisted_at
        if not self._unlisted or elapsed < UNLISTED_EVERY:
            return
        counted = {
            name: Cursor(c.nominal, c.rule, c.mark, c.tzdata, c.unlisted_for + min(elapsed, 2 * UNLISTED_EVERY))
            for name, c in self._unlisted.items()
        }
        gone = [name for name, cursor in counted.items() if cursor.unlisted_for >= self._retention]
        kept = {name: cursor for name, cursor in counted.items() if name not in gone}
        if kept:
            self._obey(lambda: self._store.place(kept, epoch=self.epoch))
        for start in range(0, len(gone), BATCH):
            self._obey(lambda start=start: self._store.forget(gone[start : start + BATCH], epoch=self.epoch))  # type: ignore[misc]
        self._unlisted, self._unlisted_at = kept, self._clock.now()

    # ---- asking the store

    def _ask(self, call: Callable[[], Sequence[Answer]]) -> Sequence[Answer]:
        """Make a call of a batch; write the cursors back first where the store was wiped. Raises Replaced."""
        for _ in range(2):
            answers = call()
            self._progress()
            verdicts = {answer.verdict for answer in answers}
            if Verdict.STALE in verdicts:
                raise Replaced
            if Verdict.WIPED not in verdicts:
                return answers
            self.write_back()
        raise Replaced  # wiped twice within one batch: begin anew

    def _obey(self, call: Callable[[], Verdict]) -> None:
        self._ask(lambda: [Answer(call())])

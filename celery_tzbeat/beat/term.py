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

After any StoreUnavailable the same call is made again, with the same content, as long as the lease is trusted. WIPED: see
`ledger`. The term never asks whether it still leads, each script does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from itertools import islice

from celery_tzbeat.clock import Clock, Reading
from celery_tzbeat.deliveries import DeadLetter
from celery_tzbeat.errors import BrokerUnavailable
from celery_tzbeat.model import Cursor, Entry, Occurrence, Pause, Unrun, iso
from celery_tzbeat.store.protocol import BATCH, Burial, Office, Store, Tracking, Verdict

from .agenda import BUILD_ATTEMPTS, Agenda, Course
from .claims import Claims, Outdated
from .dispatch import BuildFailed, Message
from .events import Events
from .ledger import Ledger, Replaced
from .overlap import Overlap
from .paths import Outgoing, Path
from .pauses import Pauses
from .publisher import Publisher
from .requests import Requests
from .sweep import Sweep
from .unlisted import Unlisted

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
        tracks: Callable[[], bool],
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
        self._tracks = tracks
        self._ledger = Ledger(
            epoch=epoch,
            store=store,
            positions=self.positions,
            progress=progress,
            trusted=trusted,
            written_back=lambda: self._pauses.write_back(),
        )
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
        self._overlap = Overlap(
            ledger=self._ledger, agenda=agenda, path=path, claims=self._claims, clock=clock, events=events
        )
        self._pauses = Pauses(ledger=self._ledger, agenda=agenda, clock=clock, told=events.unrun)
        self._sweep = Sweep(
            ledger=self._ledger,
            claims=self._claims,
            overlap=self._overlap,
            requests=Requests(ledger=self._ledger, agenda=agenda, path=path, claims=self._claims, pauses=self._pauses),
            clock=clock,
            progress=progress,
            events=events,
        )
        self._cannot_build = False  # since the broker did not answer when it was asked last
        self._claims_known = False  # whether what stands open in the ledger is owed here
        self._built_at = clock.reading()
        self._unlisted = Unlisted(self._ledger, clock, retention)
        self._looking_at: datetime | None = None  # the `now` of a look that is not through yet

    def begin(self, office: Office, lost: Mapping[str, Pause] | None = None) -> None:
        """Go on from what the ledger says was decided. `lost` are the pauses that a wiped store has lost."""
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
        self._pauses.begin(office.paused, lost or {})
        self._places = self._agenda.open(cursors, now=now, retention=self._retention, paused=self.paused)
        self._unlisted.begin({name: cursor for name, cursor in cursors.items() if name not in self._agenda.entries})
        for name in office.unreadable:
            logger.error(
                "the cursor of entry %r cannot be read: the entry starts from now",
                name,
                extra={"action": "cursor_unreadable", "entry": name},
            )

    @property
    def next_due(self) -> datetime | None:
        return self._agenda.next_due

    def lose_sight(self) -> None:
        """A call to the store failed: what looks like a dead worker may be that."""
        self._sweep.view.break_off()

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
        self._sweep_ledger()
        if not self._send_claims(began):
            return 0.0
        self._unlisted.count()
        self._pauses.settle()
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
        due = min((each for each in (self._agenda.next_due, self._pauses.next_end) if each is not None), default=None)
        wait = (due - self._clock.now()).total_seconds() if due is not None else float("inf")
        return max(0.0, min(wait, self._claims.next_try, self._sweep.wait))

    @property
    def paused(self) -> Mapping[str, Pause]:
        return self._pauses.paused

    def positions(self) -> dict[str, Cursor]:
        """Return the cursors as this term knows them."""
        return {**self._unlisted.cursors, **self._agenda.positions()}

    def write_back(self) -> None:
        """Write what this term knows into a store that has lost it. Raises Replaced, or StoreUnavailable."""
        self._ledger.write_back()

    # ---- the steps

    def _settle_places(self, began: Reading) -> bool:
        """Write the cursors that no occurrence moves; return whether that is through."""
        for write, cursors in ((self._store.repair, self._repairs), (self._store.place, self._places)):
            while cursors:
                if not self._left(began):
                    return False
                part = dict(islice(cursors.items(), CURSORS_AT_ONCE))
                self._ledger.obey(lambda write=write, part=part: write(part, epoch=self.epoch))  # type: ignore[misc]
                for name in part:
                    del cursors[name]
        return True

    def _left(self, began: Reading) -> float:
        """Return the seconds that are left to a step that `began` then."""
        return max(0.0, PUBLISHING - self._clock.reading().advance_since(began))

    def _sweep_ledger(self) -> None:
        known, self._claims_known = self._claims_known, False  # until the replies have come: a redispatch is a claim
        self._sweep.sweep()
        self._claims_known = known

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
            answers = self._ledger.ask(lambda batch=batch: self._store.record_unrun(batch, epoch=self.epoch))  # type: ignore[misc]
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
            if not self._overlap.admits(course):
                self._agenda.ready.popleft()
                continue
            occurrence = course.occurrence()
            try:
                message = self.path.build(course.entry, occurrence, epoch=self.epoch)
            except BuildFailed as failure:
                self._cannot_build = False
                self._build_failed(course, occurrence, failure)
                continue
            except BrokerUnavailable:
                self._cannot_build = True
                raise
            self._cannot_build = False
            if not message.parts:
                self._not_sent_by_task(course, occurrence)
                continue
            self._agenda.ready.popleft()
            size += message.size
            tracking = self._tracking(course.entry, message)
            outgoing = Outgoing(course.entry, occurrence, self._agenda.cursor(course), message, tracking)
            self._in_flight.append((course, outgoing))
            if self._clock.reading().advance_since(began) >= PUBLISHING:
                break
        self._progress()

    def _send_in_flight(self) -> None:
        if not self._in_flight:
            return
        batch = [outgoing for _, outgoing in self._in_flight]
        self._claims_known = self._claims_known and self.path.sends_at_once  # until the reply has come
        answers = self._ledger.ask(lambda: self.path.send(batch, self._claims, epoch=self.epoch))
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
                case Verdict.HELD:  # opened since it was admitted
                    self._agenda.wait(course, now)
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

    def _tracking(self, entry: Entry, message: Message) -> Tracking | None:
        followed = entry.policy.needs_tracking or self._tracks()
        return Tracking(entry.policy, message.eta) if followed and not message.for_everybody else None

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
        letter = DeadLetter(
            key=occurrence.key,
            entry=course.entry.name,
            task=course.entry.task,
            nominal=occurrence.nominal,
            reason="build",
            error=str(failure),
            at=self._clock.now(),
        )
        cursor = self._agenda.cursor(course)
        burial = Burial(occurrence, cursor, course.bucket, reason="build", letter=letter.to_json())
        answer = self._ledger.ask(lambda: [self._store.bury(burial, epoch=self.epoch)])[0]
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
        answer = self._ledger.ask(lambda: self._store.record_unrun([row], epoch=self.epoch))[0]
        if answer.verdict is Verdict.EARLY:
            raise Replaced
        self._agenda.ready.popleft()
        self._agenda.done(course)
        if answer.verdict is Verdict.DONE:
            self._events.unrun(row)

"""One beat's tick: leader or standby, and what each does. Knows Celery no more than the `Term` does.

`step` never waits (but for answers within their bounds) and never raises for a store or broker that is down: it says how
long nothing will be due. Whoever calls it waits, and calls again: `scheduler.Scheduler`, or a simulation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from celery_tzbeat.clock import Clock, Reading
from celery_tzbeat.errors import BrokerUnavailable, StoreDamaged, StoreUnavailable, StoreUnreadable
from celery_tzbeat.leases.elector import Elector
from celery_tzbeat.model import Pause, Presence
from celery_tzbeat.store.protocol import SCHEMA_WRITTEN, Store, Verdict, needs_newer

from .agenda import Agenda
from .events import Events
from .fleet import alive, differing_entries, newer_standby, oldest_schema
from .ledger import Replaced
from .outages import Outages
from .paths import Path
from .publisher import Publisher
from .term import Term

logger = logging.getLogger(__name__)

#: The longest that a tick waits: Celery's remote control calls a beat stalled that does not return, in seconds.
LONGEST_WAIT = 1.0

#: How often a leader says that other beats have other entries, in seconds.
WARN_EVERY = 60.0

#: Where a leader's own entries are, and a standby's.
HERE = ("here", "there")

#: The wait after a store or broker did not answer, in seconds.
RETRY = 0.25


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this beat is, as it says in `beats`."""

    beat: str
    host: str
    pid: int
    version: str
    fingerprint: str
    embedded: bool
    release: str = ""


@dataclass(frozen=True, slots=True)
class Changes:
    """Whom the ticker tells that this beat leads, or leads no longer; called on the tick's thread."""

    leading: Callable[[int], None]
    standing_by: Callable[[str], None]


class Ticker:
    """Decides at each step what this beat does.

    `choose_path` finds out whether broker and store are the same server, and returns the path to send by; it is asked before
    the first term and after every call that failed, and may raise StoreUnavailable.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        store: Store,
        elector: Elector,
        agenda: Agenda,
        publisher: Publisher,
        clock: Clock,
        lease: timedelta,
        retention: timedelta,
        max_skew: timedelta,
        choose_path: Callable[[], Path],
        events: Events,
        changes: Changes,
    ) -> None:
        self._identity = identity
        self._store = store
        self._elector = elector
        self._agenda = agenda
        self._publisher = publisher
        self._clock = clock
        self._lease = lease.total_seconds()
        self._attend_every = lease / 3
        self._retention = retention
        self._max_skew = max_skew.total_seconds()
        self._choose_path = choose_path
        self._events = events
        self._changes = changes
        self._term: Term | None = None
        self._told: int | None = None  # the epoch that `changes` was last told of
        self._helpless_since: Reading | None = None  # leads since then, and no step succeeded
        self._abstention = ""  # why this beat leaves leading to others for one lease
        self._abstains_since = clock.reading()
        self._attended_at: datetime | None = None
        self._attended_as = ("", False)  # role, whether hindered
        self._skew = 0.0
        self._store_time = clock.now()
        self._fingerprints = {name: entry.fingerprint for name, entry in agenda.entries.items()}
        self._yielded_to: set[str] = set()
        self._has_standby = False  # when this beat looked last
        self._looked_at: Reading | None = None  # at the fleet
        self._warned_at: Reading | None = None  # that beats differ
        self._hindrance = "has not reached the store yet"
        self._store_is_fresh = False
        self._tracks = False  # whether worker halves tell the ledger what becomes of occurrences
        self._outages = Outages()
        #: The path by which this beat sends, or would.
        self.path: Path | None = None  # None: not known, or not since the connection was lost
        # The first plan, made before the lease is asked for; every term makes its own from the ledger's cursors.
        agenda.open({}, now=clock.now(), retention=retention)

    def step(self) -> float:
        """Do what is due, as leader or standby. Return for how many seconds nothing will be, at most LONGEST_WAIT."""
        self._elector.progress()
        try:
            wait = self._step()
        except (StoreUnavailable, StoreUnreadable) as exc:
            self._store_failed(exc)
            wait = RETRY
        except Exception as exc:  # a fault of ours, or garbage in the store: a beat stands by, it does not end
            if self._store_failed(StoreUnreadable(f"a tick failed: {type(exc).__name__}: {exc}")):
                logger.exception("a tick failed", extra={"action": "tick_failed"})
            wait = LONGEST_WAIT
        else:
            self._outages.over("store")
            if self._broker_answers:
                self._outages.over("broker")
            if self._elector.lease() is None or not self._cut_off:  # a step in which nothing was sent tells nothing
                self._helpless_since = None
        self._elector.progress()
        return min(wait, LONGEST_WAIT)

    def _store_failed(self, exc: StoreUnavailable | StoreUnreadable) -> bool:
        """Take a failed step for what it is; return whether its reason is new."""
        new = self._outages.failed(exc)
        self._hindrance = str(exc)
        self.path = None
        if self._term is not None and not isinstance(exc, BrokerUnavailable):
            self._term.lose_sight()
        now = self._clock.reading()
        if self._elector.lease() is None:
            self._helpless_since = None
        elif self._helpless_since is None:
            self._helpless_since = now
        helpless = self._helpless_since is not None and now.advance_since(self._helpless_since) >= self._lease
        if self._cut_off and not self._has_standby:
            helpless = False  # the store would hand the lease back to this beat, a lease later
        if isinstance(exc, StoreDamaged):
            self._helpless_since = None  # each beat would find the same, and pass the lease on
        elif helpless or isinstance(exc, StoreUnreadable):
            # Another beat may fare better: one of another release, or one whose way to the store or broker is not cut.
            self._abstention, self._abstains_since = self._hindrance, now
            self._elector.permit(self._hindrance)
        return new

    @property
    def _broker_answers(self) -> bool:
        """Whether a step that succeeded tells it: a path that was found by a probe, or a message that was published."""
        if self.path is None or self._elector.lease() is None:
            return False
        return self.path.sends_at_once or (self._term is not None and self._term.broker_answers)

    @property
    def _cut_off(self) -> bool:
        return self._term is not None and self._term.cut_off

    def _step(self) -> float:
        self._attend()
        lease = self._elector.lease()
        if lease is None:
            self._stand_by()
            self._see_who_leads()
            return LONGEST_WAIT
        if self.path is None:
            return RETRY
        if self._term is None or self._term.epoch != lease.epoch or self._term.path is not self.path:
            self._take_office(lease.epoch, self.path)
        if self._term is None:
            return RETRY
        if self._told != self._term.epoch:
            self._told = self._term.epoch
            self._outages.forget("broker")
            self._changes.leading(self._told)
        try:
            self._look_at_fleet()
            if self._store_is_fresh:
                self._term.write_back()
                self._store_is_fresh = False
            return self._term.work()
        except Replaced:
            self._attended_at = None  # look at once who is in office: the elector gives this lease back
            self._term = None
            self._stand_by()
            return 0.0

    def _attend(self) -> None:
        """Say that this beat lives, look at the store, and say whether this beat may lead."""
        role: Literal["leader", "standby"] = "leader" if self._elector.lease() is not None else "standby"
        now = self._clock.now()
        said = (role, self._is_hindered)
        if (
            self._attended_at is not None
            and self._attended_as == said
            and not self._hindrance
            and timedelta() <= now - self._attended_at < self._attend_every
        ):
            return
        view = self._store.attend(self._presence(role, now))
        self._attended_at, self._attended_as = now, said
        self._store_is_fresh = view.fresh
        self._skew = (self._clock.now() - view.time).total_seconds()
        if self._store_time - view.time > timedelta(seconds=self._max_skew):
            self._term = None  # the store's clock was set back: what was decided may lie ahead of it (`Term.begin`)
        self._store_time = view.time
        self._tracks = role == "leader" and self._store.workers_lived()
        self._elector.raise_floor(view.epoch)
        if self._term is not None and self._term.epoch < view.epoch:
            self._term = None  # another has led since
        if not view.entries_known:
            self._store.tell_entries(self._identity.fingerprint, self._fingerprints)
        if self.path is None:
            self.path = self._choose_path()
        if self._clock.reading().advance_since(self._abstains_since) >= self._lease:
            self._abstention = ""
        self._hindrance = needs_newer(view.needs) or self._abstention
        if abs(self._skew) > self._max_skew:
            side = "ahead of" if self._skew > 0 else "behind"
            self._hindrance = (
                f"this host's clock is {abs(self._skew):.0f} s {side} the store's, "
                f"more than tzbeat_max_skew ({self._max_skew:g} s) allows"
            )
            self._term = None  # what it put off by this clock may stand at any time: begin anew, once it is right
        self._elector.permit(self._hindrance)

    def _take_office(self, epoch: int, path: Path) -> None:
        lost: Mapping[str, Pause] = {}
        if self._term is not None and self._store.restore(self._term.positions(), epoch=epoch) is Verdict.DONE:
            lost = self._term.paused
            logger.error(
                "the store of this namespace has lost its data: going on from where this beat was when it led last",
                extra={"action": "store_wiped", "epoch": epoch},
            )
        office = self._store.take_office(
            epoch, self._identity.beat, oldest_schema=oldest_schema(self._alive(), SCHEMA_WRITTEN)
        )
        self._term = None
        if office is None:
            self._attended_at = None
            return
        if office.fresh:
            logger.warning(
                "the store of this namespace is empty: every entry starts from now",
                extra={"action": "store_empty"},
            )
        term = Term(
            epoch=epoch,
            store=self._store,
            agenda=self._agenda,
            path=path,
            publisher=self._publisher,
            clock=self._clock,
            retention=self._retention,
            max_skew=timedelta(seconds=self._max_skew),
            progress=self._elector.progress,
            trusted=lambda: self._elector.lease() is not None,
            tracks=lambda: self._tracks,
            events=self._events,
        )
        term.begin(office, lost)
        self._term = term
        self._store_is_fresh = False
        self._looked_at = None

    def _alive(self) -> list[Presence]:
        """Return the other beats that live."""
        lease = timedelta(seconds=self._lease)
        beats = alive(self._store.beats(), now=self._store_time, within=lease)
        return [beat for beat in beats if beat.beat != self._identity.beat]

    def _look_at_fleet(self) -> None:
        """Hand over to a standby of a newer release; say, not more often than each minute, whose entries differ."""
        now = self._clock.reading()
        if self._looked_at is not None and now.advance_since(self._looked_at) < self._lease:
            return
        self._looked_at = now
        beats = self._alive()
        self._has_standby = any(beat.role == "standby" and not beat.hindered for beat in beats)
        newer = newer_standby(self._identity.release, [beat for beat in beats if beat.beat not in self._yielded_to])
        if newer is not None:
            self._yielded_to.add(newer.beat)  # once: where it did not take the chance, yielding again would not help
            self._abstention = f"hands over to {newer.where}: this beat is of release {self._identity.release}"
            self._abstains_since = now
            self._attended_at = None  # withdraw at the next step
        if self._warned_at is not None and now.advance_since(self._warned_at) < WARN_EVERY:
            return
        for beat in beats:
            if beat.fingerprint != self._identity.fingerprint:
                self._warned_at = now
                told = self._store.entries_of(beat.fingerprint)
                names = "" if beat.entries and not told else differing_entries(self._fingerprints, told, where=HERE)
                logger.warning(
                    "the beat %s has other entries, and only the leader's run: %s",
                    beat.where,
                    names or "which ones is not known",
                    extra={"action": "entries_differ", "beat": beat.beat},
                )
            if beat.tzdata != self._agenda.tzdata:
                self._warned_at = now
                logger.warning(
                    "the beat %s has zone files %s, the leader %s",
                    beat.where,
                    beat.tzdata,
                    self._agenda.tzdata,
                    extra={"action": "tzdata_differs", "beat": beat.beat},
                )

    def _see_who_leads(self) -> None:
        """A standby that did take the chance may be handed over to once more."""
        now = self._clock.reading()
        if not self._yielded_to or (self._looked_at is not None and now.advance_since(self._looked_at) < self._lease):
            return
        self._looked_at = now
        self._yielded_to -= {beat.beat for beat in self._alive() if beat.epoch}

    def _stand_by(self) -> None:
        """Lead no longer. The term is kept until a later leader is seen: what it knows is needed where the store loses it."""
        if self._told is not None:
            self._told = None
            self._changes.standing_by(self._elector.why)

    @property
    def _is_hindered(self) -> bool:
        """Whether this beat could not lead, if nobody did."""
        return bool(self._hindrance or self._elector.hindrance())

    def _presence(self, role: Literal["leader", "standby"], now: datetime) -> Presence:
        return Presence(
            beat=self._identity.beat,
            host=self._identity.host,
            pid=self._identity.pid,
            version=self._identity.version,
            tzdata=self._agenda.tzdata,
            fingerprint=self._identity.fingerprint,
            role=role,
            why="" if role == "leader" else (self._hindrance or self._elector.why),
            last_tick=now,
            next_due=self._agenda.next_due if role == "leader" else None,
            skew=round(self._elector.skew, 3),
            entries=len(self._agenda.entries),
            embedded=self._identity.embedded,
            release=self._identity.release,
            schema=SCHEMA_WRITTEN,
            path=self.path.name if self.path is not None else "",
            hindered=self._is_hindered,
            epoch=self._told or 0,
        )

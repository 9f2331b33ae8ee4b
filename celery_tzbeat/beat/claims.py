"""Open claims: occurrences that are recorded and whose message the broker does not surely have. Sent until it has.

Failure table (lines 2, 9, 10, 11 of the state table; each row leaves at most a copy under the same task id):

    dies / reply lost                   who goes on                            what the broker may see
    before the claim                    next leader: it is still due           one message
    claimed, not published              next leader sends the stored payload   one message
    published, reply lost               this leader, 1..60 s later             two copies, one task id
    published, not confirmed, dies      next leader sends the stored payload   two copies, one task id
    confirmed, reply lost               DECIDED: it is settled                 one message
    returned or refused by the broker   this leader, 1..60 s later; five       none
                                        times and for a minute: dead
    dead, reply lost                    DECIDED: it is not sent again          none
    claimed at most once, dies          next leader: dead (doubtful)           one message, or none
    frozen while publishing, woken      next leader has sent it; a late copy   two copies, one task id
    the store is wiped                  this leader publishes, confirms none   one message

Misfire, pause, edit and rename do not touch a claim: the ledger holds all that it takes to send it. An entry's next
occurrence is claimed when nothing of the entry is owed any more (`waits`): its messages stay in order, and an outage of the
broker leaves one open claim of an entry, not one of each occurrence.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from celery_tzbeat.clock import Clock, Reading
from celery_tzbeat.deliveries import DeadLetter
from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import Occurrence, iso
from celery_tzbeat.store.protocol import BATCH, Claimed, OpenOccurrence, Store, Verdict

from .agenda import BACKOFF_FIRST, BACKOFF_LONGEST
from .publisher import Fate, Publisher

logger = logging.getLogger(__name__)

#: So often, and for so many seconds since the first time, a broker must have returned or refused a message before the
#: occurrence is a dead letter: what a queue that is missing for a while refuses arrives when it is back.
REFUSALS = 5
REFUSED_FOR = 60.0


class Outdated(Exception):
    """A later leader is in office."""


@dataclass(slots=True)
class _Owed:
    claimed: Claimed
    payload: bytes
    since: Reading  # when it was claimed, or tried last
    wait: float = 0.0  # seconds from then on
    put_offs: int = 0
    refusals: int = 0
    refused_since: Reading | None = None
    given_up: bool = False  # refused often and long enough
    words: str = ""  # the last refusal

    def waits(self, now: Reading) -> float:
        """Return the seconds until it may be tried. Not by the wall clock alone: one that is set back must not hold it."""
        return max(0.0, round(self.wait - now.advance_since(self.since), 6))


class Claims:
    """The open claims of one term of office. One thread."""

    def __init__(
        self,
        *,
        epoch: int,
        store: Store,
        publisher: Publisher,
        clock: Clock,
        progress: Callable[[], None],
        trusted: Callable[[], bool],
        sent: Callable[[Occurrence], None],
        dead: Callable[[Occurrence, str], None],
    ) -> None:
        self._epoch = epoch
        self._store = store
        self._publisher = publisher
        self._clock = clock
        self._progress = progress
        self._trusted = trusted
        self._tell_sent = sent
        self._tell_dead = dead
        self._owed: dict[str, _Owed] = {}
        self._published: deque[Claimed] = deque()  # and not confirmed: never more than BATCH
        self._left_open: deque[OpenOccurrence] = deque()  # in the ledger, and not looked at yet
        #: Whether the broker answered when it was asked last; None: it was not asked yet.
        self.broker_answers: bool | None = None

    def __len__(self) -> int:
        return len(self._owed) + len(self._published)

    def add(self, claimed: Claimed, payload: bytes) -> None:
        """Owe the message of an occurrence that this term has claimed."""
        self._owed[claimed.occurrence.key] = _Owed(claimed, payload, self._clock.reading())

    def take_over(self, *, seconds: float) -> bool:
        """Owe what stands open in the ledger: earlier leaders' claims, and own ones whose reply was lost.

        For about `seconds`, at least one; return whether that was all. Call it again where it was not, or was not answered.
        """
        began = self._clock.reading()
        # Asked for anew after a call that was not answered: what that took over is this epoch's, and not owed here yet.
        left, self._left_open = self._left_open or deque(self._store.open_occurrences()), deque()
        known = {*self._owed, *(item.occurrence.key for item in self._published)}
        while left:
            found = left.popleft()
            if found.state == "claimed" and found.occurrence.key not in known:
                self._take(found)
            if left and self._clock.reading().advance_since(began) >= seconds:
                self._left_open = left
                return False
        return True

    def _take(self, found: OpenOccurrence) -> None:
        taken: OpenOccurrence | None = found
        if found.epoch != self._epoch:
            if found.policy.delivery == "at_most_once":
                # Not reclaimed first: as a claim of this term it would be sent, were the next call lost.
                owed = _Owed(Claimed(found.occurrence, found.bucket), found.payload, self._clock.reading())
                self._bury(owed, "doubtful", "a leader that is gone may have sent it, and it is delivered at most once")
                return
            taken = self._store.reclaim(found.occurrence, epoch=self._epoch)
            self._progress()
        if taken is not None:
            logger.warning(
                "the claim of %s was left open: its message is sent again under its task id",
                found.occurrence.key,
                extra={"action": "claim_taken_over", "key": found.occurrence.key},
            )
            self.add(Claimed(taken.occurrence, taken.bucket), taken.payload)

    def work(self, *, seconds: float) -> bool:
        """Confirm what was sent, and send what is owed, for about `seconds`. Return whether all that could be sent is.

        Raises StoreUnavailable where store or broker does not answer, Outdated where a later leader is in office.
        """
        self._confirm()  # first: what a lost store leaves unconfirmed is a batch, however long it is lost
        began = self._clock.reading()
        due = [owed for owed in self._owed.values() if not owed.waits(began)]
        failure: StoreUnavailable | None = None
        while due and failure is None:
            if not self._trusted():  # this host may have been asleep: what it sends now is another's, too
                break
            failure = self._send(due.pop(0))
            if len(self._published) >= BATCH:
                self._confirm()
            if self._clock.reading().advance_since(began) >= seconds:
                break
        # Not in a `finally`: SystemExit from a signal's handler passes here, and must not become a store's failure.
        self._confirm()
        if failure is not None:
            raise failure
        return not due

    @property
    def cut_off(self) -> bool:
        """Whether the broker did not answer when it was asked last."""
        return self.broker_answers is False

    def waits(self) -> Mapping[str, float]:
        """Return the entries of which something is owed, with the seconds until it is tried again."""
        now = self._clock.reading()
        waits: dict[str, float] = {}
        for owed in self._owed.values():
            entry = owed.claimed.occurrence.entry
            waits[entry] = max(waits.get(entry, 0.0), owed.waits(now))
        return waits

    @property
    def next_try(self) -> float:
        """In how many seconds something that is owed is to be tried again; infinite where nothing is owed."""
        now = self._clock.reading()
        return min((owed.waits(now) for owed in self._owed.values()), default=float("inf"))

    def _send(self, owed: _Owed) -> StoreUnavailable | None:
        """Send one message, or put it off. Return why the broker's answer is not known, where it is not."""
        if owed.given_up:  # it could not be buried then
            self._bury(owed, "unroutable", owed.words)
            return None
        try:
            envelopes = Parcel.from_bytes(owed.payload).at(self._clock.now())
        except Exception as exc:  # whatever its parts raise: of another release, or not written by us
            self._refused(owed, f"the message kept in the ledger cannot be read: {type(exc).__name__}: {exc}")
            return None
        for envelope in envelopes:
            try:
                fate, words = self._publisher.publish(envelope)
            except StoreUnavailable as failure:
                self.broker_answers = False
                self._put_off(owed)
                return failure
            finally:
                self._progress()
            self.broker_answers = True
            if fate is Fate.NOT_SENT:
                self._refused(owed, words)
                return None
        del self._owed[owed.claimed.occurrence.key]
        self._published.append(owed.claimed)
        return None

    def _put_off(self, owed: _Owed) -> None:
        owed.since = self._clock.reading()
        owed.wait = min(BACKOFF_FIRST * 2 ** min(owed.put_offs, 10), BACKOFF_LONGEST).total_seconds()
        owed.put_offs += 1

    def _refused(self, owed: _Owed, words: str) -> None:
        occurrence = owed.claimed.occurrence
        now = self._clock.reading()
        owed.refusals += 1
        owed.refused_since = owed.refused_since or now
        owed.words = words
        logger.error(
            "entry %r: the broker did not take the message of %s (time %d, given up after %d and %g s): %s",
            occurrence.entry,
            iso(occurrence.nominal),
            owed.refusals,
            REFUSALS,
            REFUSED_FOR,
            words,
            extra={"action": "publish_refused", "key": occurrence.key},
        )
        if owed.refusals >= REFUSALS and now.advance_since(owed.refused_since) >= REFUSED_FOR:
            owed.given_up = True
            self._bury(owed, "unroutable", words)
        else:
            self._put_off(owed)

    def _bury(self, owed: _Owed, reason: str, words: str) -> None:
        """Lines 10, 11: what the broker does not take, or may have, becomes a dead letter, with its message."""
        occurrence = owed.claimed.occurrence
        letter = DeadLetter(
            key=occurrence.key,
            entry=occurrence.entry,
            task=_task_of(owed.payload),
            nominal=occurrence.nominal,
            reason=reason,
            error=words,
            at=self._clock.now(),
            message=owed.payload,
        )
        answer = self._store.settle(owed.claimed, "dead", reason, epoch=self._epoch, letter=letter.to_json())
        self._progress()
        self._heed(answer.verdict)
        self._owed.pop(occurrence.key, None)  # a doubtful one was never owed
        if answer.verdict is Verdict.DONE:
            self._tell_dead(occurrence, reason)

    def _confirm(self) -> None:
        while self._published:
            batch = list(islice(self._published, BATCH))
            answers = self._store.confirm(batch, epoch=self._epoch)
            self._progress()
            for claimed, answer in zip(batch, answers, strict=True):
                self._heed(answer.verdict)
                self._published.popleft()
                self._tell_sent(claimed.occurrence)

    def _heed(self, verdict: Verdict) -> None:
        if verdict is Verdict.STALE:
            raise Outdated
        # WIPED: there is no claim left to settle; the message was sent, which is what counts


def _task_of(payload: bytes) -> str:
    """Return the task's name; empty where the message cannot be read."""
    try:
        return str(Parcel.from_bytes(payload).run.headers.get("task") or "")
    except Exception:  # it is kept as it is
        return ""

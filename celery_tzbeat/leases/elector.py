"""Who leads, as one beat sees it.

A beat is a standby or a leader. A *standby* bids when the leader's time is up, at once when it hears a
resignation, and at least once a second. A *leader* renews each third of its lease. Between two answers of the
server it acts on trust:

    asked                                            trust ends       the server lets go, at the earliest
      |-- lease - lease/10, by the greatest advance ------|----------------|
      |   of this host's three clocks                     |                |
      |       | the server worked on it                   |                | another may lead from here

Trust counts from *before* the request was sent, so a slow reply cannot stretch it. Of monotonic, boottime and
wall clock the one that went furthest counts, so a host that slept does not believe when it wakes; a wall
clock that went back counts as 0. The tenth left over is for clocks that run at different rates. Nobody's
clock is compared with anybody's but the server's.

When a lease ends:

    what happens                  the old leader                            the next one bids
    ------------                  --------------                            -----------------
    close(), permit withdrawn,    does not believe from that moment, then   when it hears it, else
    clock off, asked to step      resigns; asked to step down: abstains     within 1 s
    down                          for one lease, or until another leads
    killed, cut off               trust ends                                5 ms after the lease lapsed,
    stopped, suspended            trust has ended when it wakes; renews:    else within 1 s more
                                  Lost, or nobody led since
    no progress for one lease     does not believe, does not renew          as above
    reply to a bid lost           bids again: the same epoch                -
    reply to a renewal lost       trust goes on from the one before         -
    reply to a resignation lost   has stopped believing already             -
    server gone                   trust ends; renews when it is back        nobody does meanwhile
    too few replicas have what    leads on for one lease; then resigns,     when it hears it; it too
    was written for one lease     and bids again when enough have           leads for one lease at most
    server wiped, failed over     trusted yet: renews, the same epoch;      one lease later (`Held` by "")
                                  no more: Lost, and bids as anybody
    server's clock went forward   may believe until its trust ends          at once: two may believe
    server's clock went back      renews                                    one lease later, not more
    all its clocks stood still    believes too long                         as if killed: two may believe

Where two may believe, and where a grant was lost with a failed-over server, the epoch decides: the store
refuses the lower one. No correctness rests on `lease()`.

A renewal or a bid may be on its way when `resign_now` is called. The renewal finds the high-water mark raised
and is refused. The bid is given back when its reply comes; if the process is gone by then, its lease lapses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from celery_tzbeat.clock import Clock, Reading, Waker
from celery_tzbeat.errors import StoreUnavailable, StoreUnreadable
from celery_tzbeat.model import Lease
from celery_tzbeat.threads import start_thread

from .protocol import Granted, Held, LeaseProvider, Lost, Renewed

logger = logging.getLogger(__name__)

#: A standby asks at least this often, and a beat that may not bid looks, in seconds.
POLL = 1.0

#: A standby bids so long after the leader's time is up, in seconds.
AFTER_LAPSE = 0.005

#: The first wait after a call that failed, doubled each time up to POLL or a sixth of the lease, in seconds.
FIRST_RETRY = 0.05

#: At least this long between two questions, however much is said on the wake channel, in seconds.
BREATH = 0.05


@dataclass(frozen=True, slots=True)
class _Term:
    """A lease, and a look at the clocks from before it was asked for."""

    lease: Lease
    asked: Reading


class Elector:
    """Bids, renews and resigns for one beat.

    `step` makes one decision and waits for nothing but the server's answer; `start` runs it in a thread of
    its own. One thread steps; the other methods may be called from any thread at any time, and take no lock.
    """

    def __init__(
        self,
        provider: LeaseProvider,
        *,
        holder: str,
        lease: timedelta,
        clock: Clock,
        on_change: Callable[[], None],
        max_skew: timedelta,
        replicas: int = 0,
    ) -> None:
        """Make an elector that may not bid yet (see `permit`); asks the provider nothing.

        `on_change` is called from the stepping thread when leadership has begun or ended; it must not block. `replicas` is
        how many must have each grant and renewal: where fewer had for a whole lease, it stands down until they have.
        """
        self.holder = holder
        #: How far this host's wall clock is ahead of the server's, in seconds; 0 until it was measured.
        self.skew = 0.0
        self._provider = provider
        self._lease = lease.total_seconds()
        self._trust = self._lease - self._lease / 10
        self._clock = clock
        self._on_change = on_change
        self._max_skew = max_skew.total_seconds()
        self._replicas = replicas
        # Each of these has one writer or goes one way only: no lock is needed (nor usable in a signal
        # handler).
        self._term: _Term | None = None
        self._leads = False  # as `on_change` last told
        self._why = "has not bid yet"
        self._refusal = "starting"
        self._progress = clock.reading()
        self._measured = False
        self._seen = 0  # the highest epoch any answer named
        self._fence = 0  # the highest epoch the store named
        self._abstains_since: Reading | None = None
        self._fewer_since: Reading | None = None  # in this term, fewer replicas than wanted had what was written
        self._too_few = ""  # so for a whole lease; until enough have it
        self._failures = 0
        self._over = False
        self._resigned = False
        self._waker: Waker | None = None
        self._urgent = False
        self._stopped = False
        self._running = False

    def lease(self) -> Lease | None:
        """Return the lease if it is trusted now. It may not be when it is used: a write carries the epoch."""
        term = self._term
        if term is None or self._over or self._refusal or term.lease.epoch < self._fence:
            return None
        if self._clock.reading().advance_since(term.asked) >= self._trust:
            return None
        return term.lease

    @property
    def why(self) -> str:
        """Why this beat does not lead, in words; empty when it does."""
        if self.lease() is not None:
            return ""
        if self._over:
            return "resigned"
        return self._refusal or self._why or "trust in the lease ran out before it was renewed"

    def progress(self) -> None:
        """Say that the tick got somewhere; without it for one lease, this beat neither renews nor bids."""
        self._progress = self._clock.reading()

    def permit(self, why: str) -> None:
        """Permit to lead (empty), or say why this beat must not. A leader that loses its permit resigns."""
        changed = why != self._refusal
        if not why:
            self.progress()
        self._refusal = why
        if changed:
            self._wake()

    def raise_floor(self, epoch: int) -> None:
        """Say that the store knows `epoch`: a lease below it is given back, bids go above it."""
        if epoch > self._fence:
            self._fence = epoch
            self._wake()

    def resign_now(self) -> bool:
        """Stop leading for good; return True if this call gave the lease back.

        For a signal handler: the first line is what counts, no lock is taken, nothing is raised; bounded by
        the provider's `resign`, once. A lease that could not be given back lapses.
        """
        self._over = True
        self._wake()
        term = self._term
        if term is None or self._resigned:
            return False
        try:
            return self._provider.resign(self.holder, term.lease.epoch)
        except Exception:  # whatever it is, the process must be able to exit
            return False
        finally:
            self._resigned = True

    def step(self) -> float:
        """Decide once: bid, renew, resign or look. Return in how many seconds the next step is wanted."""
        if self._over:
            return POLL
        term = self._term
        try:
            wait = self._stand_by() if term is None else self._go_on(term)
            self._failures = 0
        except (StoreUnavailable, StoreUnreadable) as exc:
            self._why = str(exc)
            wait = min(FIRST_RETRY * 2 ** min(self._failures, 10), POLL, self._lease / 6)
            self._failures += 1
        self._tell()
        return wait

    def start(self) -> None:
        """Step in a daemon thread until `resign_now`: a real one, also where gevent has patched threads."""
        if self._waker is None:
            self._ended = Waker()
            self._running = True
            self._waker = Waker()
            start_thread(self._run, name="tzbeat-elector")

    def stop(self) -> None:
        """End the thread without resigning: for tests. Waits for a call to the server that is going on."""
        self._stopped = True
        if self._waker is not None:
            while self._running:
                self._wake()
                self._ended.wait(1)
            self._waker.close()
            self._ended.close()

    # A leader's step, and a standby's.

    def _go_on(self, term: _Term) -> float:
        if self._stalled():
            self._term = None
            self._why = self.hindrance()
            return POLL
        if why := self._objection(term.lease):
            return self._resign(term.lease, why)
        asked = self._clock.reading()
        # Once trust ran out another may have led, and a server that forgot it all would not know.
        trusted = asked.advance_since(term.asked) < self._trust
        renew = self._provider.renew if trusted else self._provider.renew_late
        answer = renew(self.holder, term.lease.epoch)
        if isinstance(answer, Lost):
            self._see(answer.epoch)
            self._term = None
            self._why = f"lost the lease of epoch {term.lease.epoch}"
            return 0.0
        return self._hold(_Term(term.lease, asked), answer)

    def _stand_by(self) -> float:
        if self.hindrance() or not self._measured:
            self._look()
            if why := self.hindrance():
                self._why = why
                return POLL
        asked = self._clock.reading()
        answer = self._provider.acquire(self.holder, floor=max(self._seen, self._fence))
        self._see(answer.epoch)
        if isinstance(answer, Held):
            self._measure(asked, answer.server_time)
            self._why = _who_leads(answer)
            return min(POLL, answer.remaining.total_seconds() + AFTER_LAPSE)
        self._abstains_since = self._fewer_since = None
        return self._hold(_Term(Lease(self.holder, answer.epoch), asked), answer)

    def _look(self) -> None:
        """Learn skew and epoch without a bid; give back what a lost reply may have left us with."""
        asked = self._clock.reading()
        found = self._provider.look()
        self._measure(asked, found.server_time)
        if self._too_few:
            self._count_replicas()
        if not isinstance(found, Held):
            return
        self._see(found.epoch)
        if found.holder not in ("", self.holder):
            self._abstains_since = None
        elif found.holder == self.holder and self.hindrance() and not self._stalled():
            self._provider.resign(self.holder, found.epoch)

    def _hold(self, term: _Term, answer: Granted | Renewed) -> float:
        """Believe in a term that the server has just affirmed, unless there is a reason not to lead."""
        self._measure(term.asked, answer.server_time)
        if why := self._objection(term.lease):
            return self._resign(term.lease, why)
        if isinstance(answer, Renewed) and answer.step_down:
            self._abstains_since = self._clock.reading()
            return self._resign(term.lease, "was asked to step down")
        self._why = ""
        self._term = term
        if self._replicas:
            self._count_replicas()  # after it believes: a replica that is lost stops nobody at once
            if self._too_few:
                return self._resign(term.lease, self._too_few)
        if self._over:
            # `resign_now` came since the request, and may not know of this term. It sets its flag, then looks
            # for a term; here it is the other way round: one of the two sees the other.
            self._provider.resign(self.holder, term.lease.epoch)
            return POLL
        return max(0.0, self._lease / 3 - self._clock.reading().advance_since(term.asked))

    def _resign(self, lease: Lease, why: str) -> float:
        """Stop believing, then tell the server; where it did not hear, `_look` tells it again."""
        self._term = None
        self._why = why
        self._provider.resign(lease.holder, lease.epoch)
        return 0.0

    # Reasons not to lead.

    def hindrance(self) -> str:
        """Return why this beat must not bid now; empty if it may."""
        if self._refusal:
            return self._refusal
        if self._stalled():
            return f"the tick made no progress for {self._lease:g} s"
        if self._measured and abs(self.skew) > self._max_skew:
            side = "ahead of" if self.skew > 0 else "behind"
            return (
                f"this host's clock is {abs(self.skew):.0f} s {side} the server's, "
                f"more than tzbeat_max_skew ({self._max_skew:g} s) allows"
            )
        if self._too_few:
            return self._too_few
        since = self._abstains_since
        if since is not None and self._clock.reading().advance_since(since) < self._lease:
            return "was asked to step down"
        return ""

    def _objection(self, lease: Lease) -> str:
        """Return why this beat must not lead under `lease`; empty if it may."""
        if lease.epoch < self._fence:
            return f"the store knows epoch {self._fence}, the lease is of epoch {lease.epoch}"
        return self.hindrance()

    def _stalled(self) -> bool:
        # A suspended host made no progress and could not: only time in which this process could run counts.
        return self._clock.reading().monotonic - self._progress.monotonic > self._lease

    # What answers teach.

    def _see(self, epoch: int) -> None:
        self._seen = max(self._seen, epoch)

    def _measure(self, asked: Reading, server_time: datetime) -> None:
        """Measure the skew: the server's clock against ours, half-way between request and reply."""
        halfway = (asked.wall + self._clock.reading().wall) / 2
        self.skew = halfway - server_time.timestamp()
        self._measured = True

    def _count_replicas(self) -> None:
        """Note whether enough replicas have what was written; a server that does not tell has none."""
        try:
            found, words = self._provider.replicated(self._replicas), ""
        except (StoreUnavailable, StoreUnreadable) as exc:
            found, words = 0, f" ({exc})"
        now = self._clock.reading()
        if found >= self._replicas:
            self._fewer_since, self._too_few = None, ""
            return
        self._fewer_since = self._fewer_since or now
        if self._too_few or now.advance_since(self._fewer_since) >= self._lease:
            self._too_few = (
                f"{found} of the {self._replicas} replica(s) that tzbeat_wait_replicas asks for had what was written, "
                f"for {self._lease:g} s{words}"
            )

    def _tell(self) -> None:
        lease = self.lease()
        if (lease is not None) == self._leads:
            return
        self._leads = lease is not None
        if lease is not None:
            logger.debug("leads at epoch %s", lease.epoch, extra={"action": "leads", "epoch": lease.epoch})
        else:
            logger.debug("leads no longer: %s", self.why, extra={"action": "stands_by"})
        self._on_change()

    # The thread.

    def _run(self) -> None:
        waker = self._waker
        assert waker is not None
        subscription = self._provider.listen()
        while not (self._over or self._stopped):
            self._urgent = False
            wanted = self._step_whatever_happens()
            waker.wait(min(wanted, BREATH))
            if self._urgent or wanted <= BREATH:
                continue
            if self._failures:
                waker.wait(wanted - BREATH)  # a subscription would wait for the same server
            elif not subscription.drain():
                waker.wait(wanted - BREATH, also=(subscription.fileno(),))
                subscription.drain()
        subscription.close()
        self._running = False
        self._ended.wake()

    def _step_whatever_happens(self) -> float:
        try:
            return self.step()
        except Exception as exc:
            logger.exception("the elector failed and goes on", extra={"action": "elector_failed"})
            self._why = f"the elector failed: {type(exc).__name__}: {exc}"
            return POLL

    def _wake(self) -> None:
        self._urgent = True
        if self._waker is not None:
            self._waker.wake()


def _who_leads(held: Held) -> str:
    if held.holder:
        return f"{held.holder} leads at epoch {held.epoch}"
    return f"the lease server forgot epoch {held.epoch}, whose leader has one lease to renew"

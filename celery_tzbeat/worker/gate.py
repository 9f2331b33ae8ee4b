"""The gate: in MAIN, between a delivery and the body of its task, the ledger is asked once whether this delivery may start.

`request` is how Celery comes to ask; messages without our header pass through untouched.

| what the ledger says, or what fails | what happens to the delivery |
| --- | --- |
| WON | it runs, with a heartbeat |
| STALE, LIVE, SETTLED | acknowledged, it does not run: the ledger has the payload, the sweep is the takeover |
| SUCCESSOR: its predecessor still runs | parked, asked again each 10 to 50 ms, requeued after 10 min |
| EXHAUSTED, SECOND_START, UNKNOWN | a dead letter, acknowledged |
| Celery calls it expired or revoked | written so |
| the store does not answer: `run` | it runs under its own token, which the first heartbeat that arrives registers |
| the store does not answer: `hold`, at_most_once | parked as a successor is |
| the store hangs | 0.5 s once; until the heartbeat hears from it again nobody else asks |
| a header of ours that cannot be read | logged and counted, it runs as any other message |
| a bug in here | logged and counted, it runs as if the store were down |
| connection lost, or shutdown, while parked or asked for | dropped, a start given back: the broker delivers it again |
| MAIN killed between the claim and the body | the lease lapses: abandoned |
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from typing import Any
from uuid import uuid4

from celery.exceptions import Retry
from celery.worker import state as worker_state

from celery_tzbeat.clock import Clock
from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.errors import StoreUnavailable, StoreUnreadable
from celery_tzbeat.model import UTC
from celery_tzbeat.store.runs import End, EndState, Gate, Order, Runs, Start, Started

from . import outcome
from .asking import Asking
from .cancel import Board
from .heartbeat import Heart, Held

logger = logging.getLogger(__name__)

#: A parked delivery asks again after so long, in seconds: soon at first, since the end of a run that has asked for its retry
#: is under way; then as long again as it has waited, up to the second. After the third it goes back to its queue.
ASK_SOON, ASK_AGAIN, PARKED_AT_MOST = 0.01, 0.05, 600.0

#: The name under which a claimed message tells the body's process what was claimed, in the request's `properties`.
CLAIM = "tzbeat"

#: Why the gate buries a delivery, by the ledger's word.
BURIED = {Gate.EXHAUSTED: "deliveries", Gate.SECOND_START: "second_start", Gate.UNKNOWN: "unknown"}


@dataclass(eq=False)
class Delivery:
    """One delivered message of ours, as long as its request lives."""

    ticket: Ticket
    order: Order
    token: str
    payload: Callable[[], bytes]  # the raw message (`Parcel.to_bytes`), put together when it is first asked for
    run: Held | None = None
    asked: bool = False  # the ledger is, or was, asked without waiting: it comes again with what there is of an answer
    answer: Started | None = None
    parked_at: float | None = None  # monotonic seconds
    taken: EndState | None = None  # somebody took the run away
    finished: bool = False  # its child stored a success before it was lost

    @property
    def kept(self) -> bool:
        """Whether the ledger is to have this message already: the first attempt of what a leader has dispatched."""
        return self.ticket.nominal is not None and self.order.retries == 0


class Entrance:
    """What stands behind every gated request of one worker. `consumer` is Celery's; set again at each connection.

    `runs` opens a ledger by namespace; its calls come from whichever thread a pool asks in.
    """

    def __init__(
        self,
        *,
        consumer: Any,
        runs: Callable[[str], Runs],
        namespace: str,
        heart: Heart,
        board: Board,
        clock: Clock,
        counts: Counter[str],
        at_acceptance: bool,
        stop_body: Callable[[], BaseException],
        asking: Asking | None = None,
    ) -> None:
        self.consumer = consumer
        self.at_acceptance = at_acceptance
        self.stop_body = stop_body
        self.heart = heart
        self.board = board
        self.counts = counts
        self.clock = clock
        self._asking = asking  # where Celery has an event loop to come back to
        self.parked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._unanswered: dict[str, Start] = {}  # by token, of what is parked: it may have been won, and nobody knows
        self._runs = runs
        self._ledgers: dict[str, Runs] = {}
        self._namespace = namespace

    def delivery_of(self, request: Any) -> Delivery | None:
        """Return our side of a request; None for a message that is not ours, or cannot be read."""
        if CLAIM not in request.__dict__:
            request.__dict__[CLAIM] = self._read(request)
        found: Delivery | None = request.__dict__[CLAIM]
        return found

    def asks(self, request: Any, process: Callable[[Any], None]) -> bool:
        """Ask without waiting, for a request that has its place in the pool; `process` it when the answer is there.

        False where the gate is to ask when Celery does (`Request.revoked`), and wait: always right, and slower.
        """
        if self._asking is None:
            return False
        if self._asking.ended:
            return self.delivery_of(request) is not None  # dropped, as what was out: its message is not acknowledged
        if request.expires or request.stamped_headers or request.id in worker_state.revoked:
            return False  # Celery has its own to say to these first
        delivery = self.delivery_of(request)
        if delivery is None or delivery.asked or delivery.ticket.namespace != self._namespace:
            return False

        def answered(started: Started | None) -> None:
            delivery.answer = started
            process(request)

        holds = delivery.ticket.policy.holds_when_store_is_down
        if self.heart.down and not holds:
            return False
        try:
            start = self._start_of(request, delivery)
            # What is to be held gives its place to the next that waits for one, and that to the next: never from within.
            ask = self._asking.put_off if self.heart.down else self._asking.ask
            delivery.asked = ask(start, answered) or (holds and self._asking.put_off(start, answered))
        except Exception:
            self.counts["errors"] += 1
            logger.exception("tzbeat: the gate cannot ask for %s without waiting", delivery.ticket.key)
        return delivery.asked

    def give_back(self) -> None:
        """Take the starts back whose requests are dropped when Celery's event loop ends: of what is asked for, and parked.

        Their messages are not acknowledged, and the broker delivers them again.
        """
        unanswered, self._unanswered = self._unanswered, {}
        for start in list(unanswered.values()):
            self._give_back(start)
        for start, started in self._asking.settle() if self._asking is not None else ():
            if started is None or started.gate is Gate.WON:
                self._give_back(start)

    def admits(self, request: Any, delivery: Delivery) -> bool:
        """Ask whether a delivery may start now, and see to it where it may not."""
        try:
            started = self._ask(request, delivery)
        except Exception:
            self.counts["errors"] += 1
            logger.exception("tzbeat: the gate failed for %s", delivery.ticket.key)
            started = None
        if started is None:
            if delivery.ticket.policy.holds_when_store_is_down:
                self._unanswered[delivery.token] = self._start_of(request, delivery)
                return self._park(request, delivery)
            self.counts["started_blind"] += 1
            self._won(request, delivery, Started(Gate.WON))
            self.heart.beat_soon()
            return True
        self._unanswered.pop(delivery.token, None)
        if started.gate is Gate.WON:
            self._won(request, delivery, started)
            return True
        if started.gate is Gate.SUCCESSOR:
            return self._park(request, delivery)
        self._unpark(request, delivery)
        self.counts[started.gate.value.lower()] += 1
        if started.gate in BURIED:
            reason = BURIED[started.gate]
            error = f"refused by the gate: {started.gate.value.lower()} after {started.starts} starts"
            self.bury(request, delivery, reason, error, attempts=started.starts)
        logger.info(
            "tzbeat: %s[%s] of %s is not run: %s%s",
            request.name,
            request.id,
            delivery.ticket.key,
            started.gate.value.lower(),
            f" ({started.state})" if started.state else "",
        )
        worker_state.task_ready(request)
        request.acknowledge()
        return False

    def turned_away(self, request: Any, delivery: Delivery, state: EndState) -> None:
        """Write that Celery itself dropped a delivery that did not start."""
        is_out = delivery.asked and (delivery.answer is None or delivery.answer.gate is Gate.WON)
        may_have_started = is_out or delivery.token in self._unanswered
        self._unpark(request, delivery)
        if delivery.run is None:
            token = delivery.token if may_have_started else ""
            self.heart.owe(None, End(delivery.ticket, delivery.order, token, state))

    def bury(self, request: Any, delivery: Delivery, reason: str, error: str, *, attempts: int = 0) -> None:
        """Write a dead letter for a delivery that did not start."""
        text = outcome.letter(
            delivery.ticket,
            reason,
            error,
            task=request.task.name,
            at=self.clock.now(),
            message=delivery.payload(),
            attempts=attempts,
            worker=request.hostname,
            task_id=request.id,
        )
        self.heart.owe(None, End(delivery.ticket, delivery.order, "", "dead", reason=reason, letter=text))

    def ended(
        self,
        request: Any,
        delivery: Delivery,
        exc: BaseException | None,
        traceback: str = "",
        eta: datetime | None = None,
    ) -> None:
        """Write how a run ended; the first word counts. Without `exc` the body returned."""
        run = delivery.run
        if run is None or run.end is not None:
            return
        retried = self.board.retried(run.row) if run.row is not None else None
        reason = text = ""
        state: EndState = "done"
        if retried is not None:
            state, eta = "retry", datetime.fromtimestamp(retried.eta, UTC) if retried.eta else None
        elif delivery.taken == "revoked":
            state = "revoked"
        elif exc is not None and not delivery.finished:
            policy = delivery.ticket.policy.retry
            limits = (request.task.max_retries, policy.max_attempts - 1 if policy is not None else None)
            state, reason = outcome.of_exception(
                exc,
                taken=delivery.taken,
                asked=run.asked_at is not None,
                shutting_down=self.board.shutting_down,
                last=any(limit is not None and 0 < limit <= run.order.retries for limit in limits),
            )
            if isinstance(exc, Retry):
                eta = outcome.due_of(exc, self.clock.now())
        if state == "dead":
            text = outcome.letter(
                delivery.ticket,
                reason,
                outcome.text_of(exc) if exc is not None else "",
                task=request.task.name,
                at=self.clock.now(),
                message=delivery.payload(),
                traceback=traceback,
                attempts=run.starts,
                worker=request.hostname,
                task_id=request.id,
            )
        seconds = self.clock.reading().monotonic - run.began
        self.heart.owe(
            run,
            End(run.ticket, run.order, run.token, state, reason=reason, letter=text, eta=eta, seconds=seconds),
        )

    # ---- parts

    def _read(self, request: Any) -> Delivery | None:
        try:
            message = request.message
            ticket = Ticket.from_headers(message.headers)
            if ticket is None:
                return None
            if not ticket.namespace:  # an ordinary message behind the gate belongs to the worker it comes to
                ticket = replace(ticket, namespace=self._namespace)
            retries = int(request.request_dict.get("retries") or 0)
            payload = cache(partial(outcome.raw_message, message, self.clock.now()))
            return Delivery(ticket, Order(ticket.dispatch, retries), uuid4().hex, payload)
        except Exception as exc:
            self.counts["unreadable"] += 1
            logger.warning("tzbeat: message %s runs without the gate: %s", request.id, exc)
            return None

    def _ask(self, request: Any, delivery: Delivery) -> Started | None:
        """Return the ledger's answer, waiting where it is not there yet; None where it has none."""
        started, delivery.asked, delivery.answer = delivery.answer, False, None
        if self.heart.down and started is None:
            return None
        if started is not None and started.gate is not Gate.UNKEPT:
            return started
        ticket = delivery.ticket
        ledger = self._ledgers.get(ticket.namespace)
        if ledger is None:
            ledger = self._ledgers[ticket.namespace] = self._runs(ticket.namespace)
        start = self._start_of(request, delivery)
        try:
            started = started or ledger.start(start)
            return ledger.start(replace(start, payload=delivery.payload())) if started.gate is Gate.UNKEPT else started
        except (StoreUnavailable, StoreUnreadable) as exc:
            self.counts["store_failed"] += 1
            logger.warning("tzbeat: the store does not answer the gate: %s", exc)
            self.heart.store_failed()
            return None

    def _start_of(self, request: Any, delivery: Delivery) -> Start:
        return Start(
            delivery.ticket,
            delivery.order,
            delivery.token,
            request.hostname,
            bool(request.task.acks_late),
            b"" if delivery.kept else delivery.payload(),
        )

    def _won(self, request: Any, delivery: Delivery, started: Started) -> None:
        self._unpark(request, delivery)
        now = self.clock.reading().monotonic
        row = self.board.take()
        delivery.run = run = Held(
            ticket=delivery.ticket,
            order=delivery.order,
            token=delivery.token,
            worker=request.hostname,
            acks_late=bool(request.task.acks_late),
            payload=delivery.payload,
            row=row,
            request=weakref.ref(request),
            began=now,
            starts=started.starts,
        )
        claim = {
            "ticket": delivery.ticket.to_header(),
            "token": delivery.token,
            "attempt": max(started.starts, 1),
            "row": list(row) if row is not None else None,
            "deadline": _deadline(request, delivery.ticket, now),
            "checkpoint": started.checkpoint,
        }
        # A dict of our own: Celery's is the message's, which may go back to its queue.
        request.request_dict["properties"] = {**(request.request_dict.get("properties") or {}), CLAIM: claim}
        self.heart.hold(run)

    def _park(self, request: Any, delivery: Delivery) -> bool:
        """Hold a delivery back and ask again; False, as `admits` says it."""
        now = self.clock.reading().monotonic
        consumer = self.consumer
        if delivery.parked_at is None:
            delivery.parked_at = now
            self.parked.add(request)
            self.counts["parked"] += 1
            if consumer.qos is not None:
                consumer.qos.increment_eventually()  # it must not take the place of one that can run
        elif now > delivery.parked_at + PARKED_AT_MOST:
            if start := self._unanswered.get(delivery.token):
                self._give_back(start)
            self._unpark(request, delivery)
            worker_state.task_ready(request)
            request.reject(requeue=True)
            return False
        pause = min(ASK_AGAIN, max(ASK_SOON, now - delivery.parked_at))
        connection = consumer.connection

        def again() -> None:
            # Of a connection that is gone the broker delivers it again; so it does when the worker ends.
            if consumer.connection is connection and not self.board.shutting_down and request in self.parked:
                consumer.on_task_request(request)

        if self.at_acceptance and not getattr(consumer.pool, "is_green", False):
            self.heart.later(pause, again)  # a pool thread must not touch the loop's timer
        else:
            consumer.timer.call_after(pause, again)
        return False

    def _give_back(self, start: Start) -> None:
        self.heart.owe(None, End(start.ticket, start.order, start.token, "given_back"))

    def _unpark(self, request: Any, delivery: Delivery) -> None:
        self._unanswered.pop(delivery.token, None)
        if delivery.parked_at is not None and request in self.parked:
            self.parked.discard(request)
            if self.consumer.qos is not None:
                self.consumer.qos.decrement_eventually()
        delivery.parked_at = None


def _deadline(request: Any, ticket: Ticket, now: float) -> float | None:
    """Return when a run is to stop by itself: the soft limit of the message, of the policy, of the task, in that order."""
    hard, soft = request.time_limits or (None, None)
    policy = ticket.policy.timeout
    seconds = soft or (policy.total_seconds() if policy is not None else None) or request.task.soft_time_limit
    seconds = seconds or hard or request.task.time_limit
    return now + seconds if seconds else None

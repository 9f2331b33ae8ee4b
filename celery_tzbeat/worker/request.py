"""A task's own Request of Celery's with the gate in front: mixed in, so that whatever else it does it still does.

Seam: `Request.revoked()`, called just before a request goes to its pool; True means *do not run*. In the pools that take
requests before they can run them (threads, gevent) it is `Request.on_accepted()`, called where the body starts, which must
raise to keep the body from running. How a run ended is heard from the callbacks that a pool makes. Contract tests hold them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from billiard.exceptions import TimeLimitExceeded
from celery.exceptions import Retry
from celery.worker import state as worker_state

from celery_tzbeat.store.runs import EndState

from . import outcome
from .gate import Delivery, Entrance

if TYPE_CHECKING:
    from celery.worker.request import Request as CeleryRequest
else:
    CeleryRequest = object

logger = logging.getLogger(__name__)


class GatedRequest(CeleryRequest):
    """Mixed in front of a task's own Request. Its hooks see to Celery's work first, and never raise of their own."""

    entrance: Entrance

    def revoked(self) -> bool:
        delivery = self.entrance.delivery_of(self)
        if delivery is None:
            return bool(super().revoked())
        if super().revoked():
            self._noting(self.entrance.turned_away, delivery, "expired" if self.maybe_expire() else "revoked")
            return True
        if self not in worker_state.reserved_requests:
            return False  # asked at receipt, on account of `expires`: it does not run yet
        self.__dict__["on_success"] = self._on_success
        return not (self.entrance.at_acceptance or self.entrance.admits(self, delivery))

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        entrance = self.entrance
        if entrance.at_acceptance:
            delivery = entrance.delivery_of(self)
            if delivery is not None and not entrance.admits(self, delivery):
                raise entrance.stop_body()
        super().on_accepted(pid, time_accepted)

    def _on_success(self, failed__retval__runtime: Any, **kwargs: Any) -> Any:
        """Stands in the instance, where the class made by Celery cannot shadow it."""
        self.__dict__.pop("on_success", None)
        exc: BaseException | None = None
        if not isinstance(failed__retval__runtime, tuple):  # pools without processes hand over the ExceptionInfo itself
            exc = SystemExit("the body was ended")
        elif failed__retval__runtime[0]:
            exc = outcome.unwrapped(failed__retval__runtime[1].exception)
        elif failed__retval__runtime[2] is None:  # a greenlet that was killed; what returned took its time
            exc = SystemExit("the body was ended")
        try:
            return self.on_success(failed__retval__runtime, **kwargs)
        finally:
            self._end(exc)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        exc = outcome.unwrapped(exc_info.exception)
        try:
            return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        finally:
            self._end(exc, str(exc_info.traceback or ""))

    def on_timeout(self, soft: bool, timeout: float) -> None:
        try:
            super().on_timeout(soft, timeout)
        finally:
            if not soft:
                self._end(TimeLimitExceeded(timeout))

    def terminate(self, pool: Any, signal: Any = None) -> None:
        if self.time_start:
            self._take("revoked")  # said before: a greenlet is gone, and its callback was called, when this returns
        super().terminate(pool, signal)
        if self._already_revoked:
            self._take("revoked")
            self._end(None)

    def cancel(self, pool: Any, signal: Any = None, **options: Any) -> None:
        self._take("abandoned")  # written when the child is gone, not before
        super().cancel(pool, signal, **options)  # emit_retry, from Celery 5.7 on

    def reject(self, requeue: bool = False) -> None:
        if requeue:  # Celery gives the message back (`acks_on_failure_or_timeout`): another start is wished for
            self._take("abandoned")
        super().reject(requeue)

    def _success_was_stored(self) -> Any:
        found = super()._success_was_stored()
        delivery = self.entrance.delivery_of(self)
        if found and delivery is not None:
            delivery.finished = True
        return found

    def _retry_worker_lost(self, exc: BaseException, exc_info: Any) -> bool:
        sent = bool(super()._retry_worker_lost(exc, exc_info))
        if sent:
            self._end(Retry(exc=exc, when=self.task.default_retry_delay))
        return sent

    def _take(self, state: EndState) -> None:
        delivery = self.entrance.delivery_of(self)
        if delivery is not None and delivery.taken is None:
            delivery.taken = state

    def _end(self, exc: BaseException | None, traceback: str = "") -> None:
        delivery = self.entrance.delivery_of(self)
        if delivery is not None:
            self._noting(self.entrance.ended, delivery, exc, traceback)

    def _noting(self, note: Callable[..., None], delivery: Delivery, *args: Any) -> None:
        try:
            note(self, delivery, *args)
        except Exception:
            self.entrance.counts["errors"] += 1
            logger.exception("tzbeat: how %s ended could not be noted", delivery.ticket.key)

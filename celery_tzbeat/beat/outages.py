"""What the log says while nothing can be sent: each reason once, and once that it is over."""

from __future__ import annotations

import logging
from typing import Literal

from celery_tzbeat.errors import BrokerUnavailable, StoreUnavailable, StoreUnreadable

logger = logging.getLogger(__name__)

Whose = Literal["store", "broker"]

#: So many reasons of one outage are said at warning; the others, whose words may differ each time, at debug.
SAID = 10


class Outages:
    """The outages of store and broker that last, with what was said of each. A beat's failures come many times a second."""

    def __init__(self) -> None:
        self._said: dict[Whose, set[str]] = {"store": set(), "broker": set()}

    def failed(self, exc: StoreUnavailable | StoreUnreadable) -> bool:
        """Say why a step failed; return whether this is new since the last end of an outage."""
        said = self._said["broker" if isinstance(exc, BrokerUnavailable) else "store"]
        new = str(exc) not in said and len(said) < SAID
        if new:
            said.add(str(exc))
        (logger.warning if new else logger.debug)("%s", exc, extra={"action": "store_unavailable"})
        return new

    def over(self, whose: Whose) -> None:
        """Say that one of the two answers again, where it did not."""
        if self._said[whose]:
            logger.info("the %s answers again", whose, extra={"action": f"{whose}_answers"})
            self.forget(whose)

    def forget(self, whose: Whose) -> None:
        """Let the reasons be said once more, without a word of its end: it may not have ended."""
        self._said[whose].clear()

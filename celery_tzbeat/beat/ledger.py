"""The store as one term of office asks it: under its epoch, until it is replaced; a wiped store is written back first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import Cursor
from celery_tzbeat.store.protocol import Answer, Run, State, Store, Verdict

logger = logging.getLogger(__name__)


class Replaced(Exception):
    """This term is over: a later leader is in office, or what it judged cannot stand."""


class Ledger:
    """Asks, and heeds what a script refuses.

    `positions` are the cursors that this term knows; `written_back` writes what else it knows, once they stand again.
    """

    def __init__(
        self,
        *,
        epoch: int,
        store: Store,
        positions: Callable[[], Mapping[str, Cursor]],
        progress: Callable[[], None],
        trusted: Callable[[], bool],
        written_back: Callable[[], None],
    ) -> None:
        self.epoch = epoch
        self.store = store
        self._positions = positions
        self._progress = progress
        self._trusted = trusted
        self._written_back = written_back

    def ask(self, call: Callable[[], Sequence[Answer]]) -> Sequence[Answer]:
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

    def ask_one(self, call: Callable[[], Answer]) -> Answer:
        """Make a call about one occurrence; else as `ask`."""
        return self.ask(lambda: [call()])[0]

    def settle_run(self, run: Run, state: State, reason: str, letter: str = "") -> bool:
        """Settle an occurrence as it was found; return whether it stood so still, and is settled by this call."""
        answer = self.ask_one(lambda: self.store.settle_run(run, state, reason, epoch=self.epoch, letter=letter))
        return answer.verdict is Verdict.DONE

    def obey(self, call: Callable[[], Verdict]) -> None:
        """Make a call whose only news are that this term is over, or that the store was wiped."""
        self.ask(lambda: [Answer(call())])

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
        if self.store.restore(self._positions(), epoch=self.epoch) is Verdict.STALE:
            raise Replaced
        self._written_back()
        self._progress()

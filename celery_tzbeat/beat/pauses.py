"""Paused entries in one term of office: not walked, until somebody unpauses them or their time has come.

What stands in the store under `paused` outlives a leader; the agenda follows it. After a call whose reply was lost the
store is read again.

    call                     dies before                    dies after / reply lost          later leader in office
    pause                    the next leader pauses         paused; read again               STALE
    record_unrun (unpause)   the next leader records it     DECIDED: the row stands once     STALE
    unpause                  paused still, and the next     unpaused; read again             STALE
                             leader records what came since

An open occurrence is not touched: what was sent runs, what is claimed is sent, what waits for another follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from celery_tzbeat.clock import Clock
from celery_tzbeat.model import Pause, Unrun
from celery_tzbeat.store.protocol import Answer, Request, Verdict

from .agenda import Agenda
from .ledger import Ledger, Replaced

#: The `detail` of a request to unpause after which what was not sent meanwhile is judged as misfired.
CATCH_UP = "catch_up"


class Pauses:
    """The paused entries of one term. `told` hears of each row that was recorded."""

    def __init__(self, *, ledger: Ledger, agenda: Agenda, clock: Clock, told: Callable[[Unrun], None]) -> None:
        self._ledger = ledger
        self._store = ledger.store
        self._agenda = agenda
        self._clock = clock
        self._told = told
        self._paused: dict[str, Pause] = {}
        self._unsure = False  # a reply was lost: the store may have another
        self._ending: dict[
            str, tuple[datetime, Unrun | None]
        ] = {}  # from when each goes on, and what was skipped before

    def begin(self, found: Mapping[str, Pause], lost: Mapping[str, Pause]) -> None:
        """Take up the pauses that the store has, and write back those that it has lost. Raises Replaced."""
        self._paused = {**lost, **found}
        for name in lost:
            self._write(name)

    @property
    def paused(self) -> Mapping[str, Pause]:
        return self._paused

    def pause(self, request: Request, until: datetime | None, now: datetime) -> None:
        """Pause an entry, or change its pause. `now` is the store's clock."""
        pause = Pause(now, until, request.by, request.why)
        self._ask(lambda: self._store.pause(request.key, pause, request, epoch=self._ledger.epoch))
        self._paused[request.key] = pause
        self._agenda.pause(request.key)

    def unpause(self, request: Request) -> bool:
        """Let an entry go on, from now or by its catch-up; return whether it was paused."""
        return self._unpause(request.key, request, catch_up=request.detail == CATCH_UP)

    def settle(self) -> None:
        """Follow the store where a reply was lost; let go on whose time has come."""
        if self._unsure:
            found = self._store.paused()
            for name in found.keys() - self._paused.keys():
                self._agenda.pause(name)
            for name in self._paused.keys() - found.keys():
                self._agenda.resume(name, self._ending.pop(name, (None, None))[0])
            self._paused, self._unsure = dict(found), False
        now = self._clock.now()
        for name in [name for name, pause in self._paused.items() if pause.until is not None and pause.until <= now]:
            self._unpause(name, None, catch_up=False)

    def write_back(self) -> None:
        """Write the pauses into a store that has lost them. Raises Replaced."""
        for name in self._paused:
            self._write(name)

    def _write(self, name: str) -> None:
        if self._store.pause(name, self._paused[name], None, epoch=self._ledger.epoch).verdict is Verdict.STALE:
            raise Replaced

    @property
    def next_end(self) -> datetime | None:
        """When the next pause ends by itself."""
        return min((pause.until for pause in self._paused.values() if pause.until is not None), default=None)

    def _unpause(self, name: str, request: Request | None, *, catch_up: bool) -> bool:
        if name in self._paused and not catch_up:
            if name not in self._ending:  # once: asked again after a lost reply, it is the same row
                now = self._clock.now()
                self._ending[name] = now, self._agenda.skipped(name, now)
            self._record(self._ending[name][1])
        answer = self._ask(lambda: self._store.unpause(name, request, epoch=self._ledger.epoch))
        after, _ = self._ending.pop(name, (None, None))
        known = self._paused.pop(name, None) is not None
        if known:
            self._agenda.resume(name, after)
        return known or answer.verdict is Verdict.DONE

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        self._unsure = True
        answer = self._ledger.ask_one(call)
        self._unsure = False
        return answer

    def _record(self, row: Unrun | None) -> None:
        if row is None:
            return
        answer = self._ledger.ask_one(lambda: self._store.record_unrun([row], epoch=self._ledger.epoch)[0])
        if answer.verdict is Verdict.EARLY:
            raise Replaced  # judged by a clock that is ahead: begin anew, once it is right
        self._agenda.recorded(row)
        if answer.verdict is Verdict.DONE:
            self._told(row)

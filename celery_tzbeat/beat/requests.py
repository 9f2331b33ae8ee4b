"""What operators asked of whoever leads: carried out once, answered with words.

A request stands in the store until it is answered, so a leader that dies over one leaves it to the next. The script that
carries one out takes it off; repeated after a lost reply it finds nothing left to do, and the first answer stands.
"""

from __future__ import annotations

import logging
import uuid
from datetime import datetime

from celery_tzbeat.deliveries import DeadLetter, Ticket
from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import Occurrence, from_iso
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import Claimed, Request, Verdict

from .agenda import Agenda
from .claims import Claims
from .dispatch import BuildFailed
from .ledger import Ledger
from .paths import Path
from .pauses import Pauses

logger = logging.getLogger(__name__)


class Refused(Exception):
    """A request that cannot be carried out; its text is the answer."""


class Requests:
    """Carries out requests in one term of office."""

    def __init__(self, *, ledger: Ledger, agenda: Agenda, path: Path, claims: Claims, pauses: Pauses) -> None:
        self._ledger = ledger
        self._store = ledger.store
        self._agenda = agenda
        self._path = path
        self._claims = claims
        self._pauses = pauses

    def carry_out(self, request: Request, now: datetime) -> None:
        """Do what is asked, or answer why not. `now` is the store's clock. Raises StoreUnavailable and Replaced."""
        words = ""
        try:
            if request.expires <= now:
                raise Refused("expired")
            self._do(request, now)
        except Refused as refusal:
            words = str(refusal)
            self._ledger.ask_one(lambda: self._store.answer(request, words, epoch=self._ledger.epoch))
        logger.info(
            "%s %s, asked by %s (%s): %s",
            request.kind,
            request.key,
            request.by,
            request.why or "no reason given",
            words or "done",
            extra={"action": "request", "kind": request.kind, "key": request.key, "by": request.by},
        )

    def _do(self, request: Request, now: datetime) -> None:
        epoch = self._ledger.epoch
        match request.kind:
            case "cancel":
                answer = self._ledger.ask_one(lambda: self._store.cancel(request, request.key, epoch=epoch))
                if answer.verdict is Verdict.DECIDED:
                    raise Refused("nothing of this key is open")
            case "discard":
                answer = self._ledger.ask_one(lambda: self._store.discard(request, request.key, epoch=epoch))
                if answer.verdict is Verdict.DECIDED:
                    raise Refused("there is no dead letter of this key")
            case "replay":
                self._replay(request)
            case "pause":
                self._pause(request, now)
            case "unpause":
                if not self._pauses.unpause(request):
                    raise Refused("it is not paused")
            case _:
                raise Refused(f"the leader's release cannot do that: {request.kind!r}")

    def _pause(self, request: Request, now: datetime) -> None:
        if request.key not in self._agenda.entries:
            raise Refused("the leader has no entry of this name")
        try:
            until = from_iso(request.detail) if request.detail else None
        except ValueError:
            raise Refused(f"its end cannot be read: {request.detail!r}") from None
        if until is not None and until <= now:
            raise Refused("its end has passed")
        self._pauses.pause(request, until, now)

    def _replay(self, request: Request) -> None:
        text = self._store.dead_letter(request.key)
        if text is None:
            raise Refused("there is no dead letter of this key")
        try:
            letter = DeadLetter.from_json(text)
        except ValueError as exc:
            raise Refused(f"its letter cannot be read: {exc}") from exc
        if letter.nominal is None:
            raise Refused("it is no occurrence of an entry: publish the message anew")
        occurrence = Occurrence(letter.entry, letter.nominal)
        try:
            parcel = Parcel.from_bytes(letter.message or self._built(occurrence))
            ticket = Ticket.from_headers(parcel.run.headers)
        except (StoreUnavailable, Refused):
            raise
        except Exception as exc:  # whatever its parts raise: of another release, or not written by us
            raise Refused(f"its message cannot be read: {type(exc).__name__}: {exc}") from exc
        if ticket is None:
            raise Refused("its message does not say of which occurrence it is")
        claimed, task_id = Claimed(occurrence, Bucket(ticket.number, ticket.field)), str(uuid.uuid4())
        dispatch = ticket.dispatch + 1
        while True:
            payload = parcel.anew(dispatch=dispatch, task_id=task_id).to_bytes()
            answer = self._ledger.ask_one(
                lambda dispatch=dispatch, payload=payload: self._store.replay(  # type: ignore[misc]
                    request, claimed, payload, policy=ticket.policy, dispatch=dispatch, epoch=self._ledger.epoch
                )
            )
            if answer.verdict is Verdict.DONE:
                self._claims.add(claimed, payload)
                return
            if not answer.detail.isdigit() or int(answer.detail) <= dispatch:
                raise Refused("it is dead no longer")
            dispatch = int(answer.detail)  # the least that its done mark admits

    def _built(self, occurrence: Occurrence) -> bytes:
        """Return the message of a letter that has none, built anew."""
        entry = self._agenda.entries.get(occurrence.entry)
        if entry is None:
            raise Refused("it has no message, and the leader does not list its entry")
        try:
            message = self._path.build(entry, occurrence, epoch=self._ledger.epoch)
        except BuildFailed as failure:
            raise Refused(f"its message still cannot be built: {failure}") from failure
        if not message.kept:
            raise Refused("its task chose not to send a message")
        return message.kept

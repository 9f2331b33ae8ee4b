"""What operators ask of a leader, and the dead letters that they ask about, in Redis or Valkey."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from celery_tzbeat.errors import StoreUnreadable
from celery_tzbeat.model import Pause, Policy, micros

from .calls import millis, text_of
from .keys import Bucket
from .protocol import Answer, Claimed, Request, Verdict
from .records import entry_of, pauses_of, policy_text
from .redis_lead import LeadersCalls, answer_of, named

#: How long what became of a request is kept.
OUTCOMES_KEPT = timedelta(days=1)

#: The most requests that are kept.
REQUESTS_KEPT = 10_000


class Requests(LeadersCalls):
    """See `protocol.Store` for what each call means."""

    def dead_letter(self, key: str) -> str | None:
        letter = self._ask(lambda c: c.hget(self.keys("dead"), key))
        return text_of(letter) if letter is not None else None

    def dead_letters(self) -> Mapping[str, str]:
        letters = self._ask(lambda c: c.hgetall(self.keys("dead")))
        return {text_of(key): text_of(letter) for key, letter in letters.items()}

    def replay(
        self, request: Request, claimed: Claimed, payload: bytes, *, policy: Policy, dispatch: int, epoch: int
    ) -> Answer:
        occurrence, bucket = claimed.occurrence, claimed.bucket
        reply = self._lead(
            "replay",
            epoch,
            keys=(
                *self._keys_of(occurrence.key, occurrence.entry, bucket),
                self.keys("dead"),
                *self._request_keys(request),
            ),
            args=(
                *named(occurrence),
                bucket.number,
                bucket.field,
                dispatch,
                payload,
                policy_text(policy),
                millis(policy.start_within),
                request.id,
                _who(request),
                millis(OUTCOMES_KEPT),
            ),
        )
        return answer_of(reply)

    def discard(self, request: Request, key: str, *, epoch: int) -> Answer:
        letter = self.dead_letter(key)
        reply = self._lead(
            "discard",
            epoch,
            keys=(self.keys("dead"), *self._request_keys(request)),
            args=(key, entry_of(letter), "", request.id, _who(request), millis(OUTCOMES_KEPT)),
        )
        return Answer(Verdict(reply.decode()))

    def cancel(self, request: Request, key: str, *, epoch: int) -> Answer:
        # Entry and bucket of a key never change: they may be read before.
        name = self.keys.occurrence(key)
        (record,) = self._ask(lambda c: self._records(c, [name]), [name])
        if not record:
            return Answer(Verdict.DECIDED)
        entry, bucket = record[b"entry"].decode(), Bucket(int(record[b"number"]), int(record[b"field"]))
        reply = self._lead(
            "cancel",
            epoch,
            keys=(*self._keys_of(key, entry, bucket), *self._request_keys(request)),
            args=(
                key,
                entry,
                record[b"nominal"],
                bucket.field,
                request.id,
                request.by,
                _who(request),
                millis(OUTCOMES_KEPT),
            ),
        )
        return answer_of(reply)

    def paused(self) -> Mapping[str, Pause]:
        found = self._ask(lambda c: c.hgetall(self.keys("paused")), [self.keys("paused")])
        return pauses_of(found.items())

    def pause(self, entry: str, pause: Pause, request: Request | None, *, epoch: int) -> Answer:
        return self._of_pause("pause", request, (entry, pause.to_json(), pause.words), epoch=epoch)

    def unpause(self, entry: str, request: Request | None, *, epoch: int) -> Answer:
        detail = _who(request) if request is not None else "its time has come"
        return self._of_pause("unpause", request, (entry, detail), epoch=epoch)

    def _of_pause(self, script: str, request: Request | None, words: tuple[str, ...], *, epoch: int) -> Answer:
        id_ = request.id if request is not None else ""
        reply = self._lead(
            script,
            epoch,
            keys=(self.keys("paused"), self.keys("requests"), self.keys.outcome(id_ or "none")),
            args=(*words, id_, millis(OUTCOMES_KEPT)),
        )
        return Answer(Verdict(reply.decode()))

    def ask(self, request: Request) -> str:
        fields = {
            "kind": request.kind,
            "key": request.key,
            "by": request.by,
            "why": request.why,
            "expires": micros(request.expires),
            "detail": request.detail,
        }
        id_: bytes = self._ask(lambda c: c.xadd(self.keys("requests"), fields, maxlen=REQUESTS_KEPT, approximate=True))
        with suppress(StoreUnreadable):  # no right to the channel: the leader finds it within its second
            self._ask(lambda c: c.publish(self.keys("wake"), "request"))
        return id_.decode()

    def answer(self, request: Request, outcome: str, *, epoch: int) -> Answer:
        reply = self._lead(
            "answer",
            epoch,
            keys=self._request_keys(request),
            args=(request.id, outcome, millis(OUTCOMES_KEPT)),
        )
        return Answer(Verdict(reply.decode()))

    def outcome(self, id: str) -> str | None:
        words = self._ask(lambda c: c.get(self.keys.outcome(id)))
        return words.decode() if words is not None else None

    def _request_keys(self, request: Request) -> tuple[str, str]:
        return self.keys("requests"), self.keys.outcome(request.id)


def _who(request: Request) -> str:
    return f"{request.by}: {request.why}" if request.why else request.by

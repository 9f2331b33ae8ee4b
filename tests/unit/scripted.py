"""A broker that does as it is told: takes a message, refuses it, or breaks the wire before or after it took it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from celery_tzbeat.beat.publisher import BrokerUnavailable, Fate
from celery_tzbeat.envelopes import Envelope

Does = Literal["take", "refuse", "lose", "take and lose"]


class ScriptedBroker:
    """A `Publisher`. What `script` names is done first, one for each message; then `always`."""

    def __init__(self, *script: Does) -> None:
        self.script: deque[Does] = deque(script)
        self.always: Does = "take"
        self.taken: list[Envelope] = []
        self.asked: list[str] = []
        self.before: Callable[[Envelope], None] = lambda envelope: None

    def publish(self, envelope: Envelope) -> tuple[Fate, str]:
        self.asked.append(envelope.body.decode())
        self.before(envelope)
        does = self.script.popleft() if self.script else self.always
        if does.startswith("take"):
            self.taken.append(envelope)
        if does.endswith("lose"):
            raise BrokerUnavailable("the broker does not answer")
        return (Fate.NOT_SENT, "returned as unroutable") if does == "refuse" else (Fate.CONFIRMED, "")

    @property
    def bodies(self) -> list[str]:
        """What it took, in order."""
        return [envelope.body.decode() for envelope in self.taken]

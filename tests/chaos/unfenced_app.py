"""The demo's app with the fence taken away from its beats, to show that the demo sees it.

In the beat's process only: the scripts that take office and dispatch ask neither for the epoch nor for what is
decided, and a beat that led once believes for ever that it leads.
"""

from __future__ import annotations

import hashlib
from typing import Any

from celery.signals import beat_init

from celery_tzbeat.leases.elector import Elector
from celery_tzbeat.model import Lease
from celery_tzbeat.store import calls
from demo.app import app

__all__ = ["app"]

#: What the scripts ask before they let a leader in and before they push, and what they take for the answer here.
GUARDS = {
    "take_office": {"if fence > epoch then return { 'STALE' } end": ""},
    "dispatch": {
        "local refusal = refused()": "local refusal = nil",
        "if decided(entry, nominal) then return 'DECIDED' end": "",
        "if state or redis.call('HEXISTS', done, field) == 1 then": "if false then",
    },
}


@beat_init.connect
def take_the_fence_away(**_: Any) -> None:
    original = calls._script

    def unfenced(name: str) -> tuple[str, str]:
        text, sha = original(name)
        if name not in GUARDS:
            return text, sha
        for guard, nothing in GUARDS[name].items():
            assert text.count(guard) == 1, f"{name}.lua has changed: {guard!r}"
            text = text.replace(guard, nothing)
        return text, hashlib.sha1(text.encode()).hexdigest()

    calls._script = unfenced
    believed: dict[Elector, Lease] = {}
    honest = Elector.lease

    def lease(self: Elector) -> Lease | None:
        if (found := honest(self)) is not None:
            believed[self] = found
        return believed.get(self)

    Elector.lease = lease

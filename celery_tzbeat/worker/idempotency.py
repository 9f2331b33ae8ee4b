"""`idempotent(key)`: an ordinary message behind the same gate as an occurrence.

Such a ticket has no entry, no nominal, and no namespace: the worker takes its own. Its done mark has a place that every
caller finds from the key alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.model import Policy
from celery_tzbeat.policy import read_policy

#: The longest key, in characters.
KEY_LENGTH = 255

_OF_AN_OCCURRENCE = re.compile(r"@\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z(#\S*)?$")


def idempotent(key: str, *, policy: Policy | Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return headers that put a message behind the gate: ``task.apply_async(headers=idempotent("order-42"))``.

    Among the messages with one key no two run at once, and none starts after one is recorded done, for `tzbeat_retention`
    after that: whatever task they are for, whoever sent them. Needs workers with `TzBeat(app)`; others run each of them.
    `policy` may say what an entry's does (timeout, retry, max_deliveries …); what concerns schedules and overlap has no
    effect. Raises ValueError for a key that is none or an occurrence's, InvalidPolicy for a policy that cannot be followed.
    """
    if not isinstance(key, str) or not 0 < len(key) <= KEY_LENGTH or not key.isprintable():
        raise ValueError(f"an idempotency key is a printable text of 1 to {KEY_LENGTH} characters, not {key!r}")
    if _OF_AN_OCCURRENCE.search(key):
        raise ValueError(f"{key!r} is the key of an occurrence, which is taken; add a word to it: {key + ' mail'!r}")
    number, field = _place(key)
    ticket = Ticket(
        namespace="",
        key=key,
        entry="",
        nominal=None,
        epoch=0,
        dispatch=1,
        number=number,
        field=field,
        policy=read_policy(policy, default=Policy()),
    )
    return {"meta": {"tzbeat": ticket.to_header()}}


def _place(key: str) -> tuple[int, int]:
    """Return the place of a key's done mark: 53 bits each, which a double holds; no two keys share one."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11, int.from_bytes(digest[8:16], "big") >> 11

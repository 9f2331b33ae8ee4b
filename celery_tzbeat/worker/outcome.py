"""How a run ended, as MAIN sees it: from what Celery hands to a request's callbacks to an `End`, and to a dead letter.

The order of what counts: a next attempt that was published (it will come, and a mark would refuse it); that somebody took the
run away (revoked, shut down); then what the body raised.

| what MAIN sees | state, reason |
| --- | --- |
| success, `Ignore` | done |
| `Retry`; a published attempt, whatever came after it | retry |
| `Terminated`, or SystemExit of a child that a signal of ours ended | revoked; abandoned in a shutdown |
| `Cancelled`: an operator asked for it / the worker shuts down / neither | revoked / abandoned / dead(exception) |
| WorkerLostError, any end of a child in a cold shutdown, any end that gave the message back | abandoned |
| `Reject(requeue=False)` | dead(rejected) |
| TimeLimitExceeded | dead(hard_limit) |
| `Permanent` | dead(permanent) |
| the last attempt's exception, MaxRetriesExceededError | dead(retries) |
| any other exception | dead(exception) |
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject, Retry
from kombu import Message
from kombu.utils.json import dumps

from celery_tzbeat.deliveries import DeadLetter, Ticket
from celery_tzbeat.envelopes import Envelope, Parcel
from celery_tzbeat.errors import Cancelled, Permanent
from celery_tzbeat.model import UTC
from celery_tzbeat.store.runs import EndState

from .wire import TRAVELLED

#: What a dead letter keeps of an error's text and of a traceback, in characters: their ends.
ERROR_LENGTH, TRACEBACK_LENGTH = 1_000, 16_000

#: What a delivered message has among its properties and an envelope elsewhere (py-amqp takes no name twice), or not at all.
NO_PROPERTIES = frozenset(
    ("application_headers", "content_type", "content_encoding", "priority", "delivery_tag", "delivery_info")
)


def unwrapped(exc: BaseException) -> BaseException:
    """Return the exception itself where billiard packed it with its traceback."""
    return exc.exc if isinstance(exc, ExceptionWithTraceback) else exc


def text_of(exc: BaseException) -> str:
    """Return an exception's class and text. A text that cannot be had is the task's fault, and no reason to lose its end."""
    try:
        return f"{type(exc).__name__}: {exc}"
    except Exception as why:
        return f"{type(exc).__name__}: its text raises {type(why).__name__}"


def of_exception(
    exc: BaseException, *, taken: EndState | None, asked: bool, shutting_down: bool, last: bool
) -> tuple[EndState, str]:
    """Return the state and reason of a run whose body, or child, ended with `exc`.

    `taken` says as what somebody took the run away (revoked, abandoned); `asked` that an operator asked it to stop; `last`
    that no Celery retry was left.
    """
    if isinstance(exc, Ignore):
        return "done", ""
    if isinstance(exc, Retry):
        return "retry", ""
    if isinstance(exc, Reject):
        return ("abandoned", "") if exc.requeue else ("dead", "rejected")
    if taken is not None:
        return taken, ""
    if isinstance(exc, Terminated):
        return "revoked", ""
    if isinstance(exc, (SystemExit, KeyboardInterrupt, WorkerLostError)):
        return "abandoned", ""
    if isinstance(exc, Cancelled) and (asked or shutting_down):
        return ("revoked" if asked else "abandoned"), ""
    if isinstance(exc, TimeLimitExceeded):
        return "dead", "hard_limit"
    if isinstance(exc, Permanent):
        return "dead", "permanent"
    if last or isinstance(exc, MaxRetriesExceededError):
        return "dead", "retries"
    return "dead", "exception"


def due_of(retry: Retry, now: datetime) -> datetime | None:
    """Return when a Celery retry is due; None for at once, and for what cannot be read."""
    when = retry.when
    if isinstance(when, datetime):
        return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
    if isinstance(when, (int, float)) and when > 0:
        return now + timedelta(seconds=when)
    return None


def letter(
    ticket: Ticket,
    reason: str,
    error: str,
    *,
    task: str,
    at: datetime,
    message: bytes,
    traceback: str = "",
    attempts: int = 0,
    worker: str = "",
    task_id: str = "",
) -> str:
    """Return the dead letter's JSON, with ends of long texts only."""
    return DeadLetter(
        key=ticket.key,
        entry=ticket.entry,
        task=task,
        nominal=ticket.nominal,
        reason=reason,
        error=error[-ERROR_LENGTH:],
        at=at,
        message=message,
        traceback=traceback[-TRACEBACK_LENGTH:],
        attempts=attempts,
        worker=worker,
        task_id=task_id,
    ).to_json()


def raw_message(message: Message, now: datetime) -> bytes:
    """Return a delivered message as `Parcel.from_bytes` reads it, its body byte for byte.

    Of kombu's virtual transports (Redis, SQS) that is the very text that was in the queue. Seam: `Message._raw`; without
    it the parts are put together, the body as it travelled (`wire`). Where that is not known and kombu has decompressed it,
    the header that says how it was compressed is left out.
    """
    raw = getattr(message, "_raw", None)
    if isinstance(raw, dict) and "properties" in raw:
        return bytes(dumps(raw).encode())
    given = message.properties or {}
    properties = {name: value for name, value in given.items() if name not in NO_PROPERTIES}
    place: dict[str, Any] = message.delivery_info or {}
    travelled = getattr(message, TRAVELLED, None)
    body = message.body if travelled is None else travelled
    plain = travelled is None and not message.errors  # what could not be decompressed is as it was
    left_out = ("redelivered", "compression") if plain else ("redelivered",)
    envelope = Envelope(
        body=bytes(body) if isinstance(body, (bytes, bytearray, memoryview)) else str(body).encode(),
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        headers={n: v for n, v in (message.headers or {}).items() if n not in left_out},
        properties=properties,
        priority=given.get("priority"),
        exchange=place.get("exchange") or "",
        routing_key=place.get("routing_key") or "",
    )
    return Parcel((envelope,), now, ()).to_bytes()

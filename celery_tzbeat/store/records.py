"""What stands in the ledger's records, and how it is read: the one place that knows their fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from celery_tzbeat.deliveries import DeadLetter, policy_from_dict, policy_to_dict
from celery_tzbeat.model import EPOCH, Occurrence, Pause, Policy, from_micros, micros

from .calls import Word, millis, text_of
from .keys import Bucket
from .protocol import OpenOccurrence, Request, Run, Tracking

logger = logging.getLogger(__name__)

T = TypeVar("T")


def readable(
    found: Iterable[tuple[bytes, Mapping[bytes, bytes]]], read: Callable[[bytes, Mapping[bytes, bytes]], T]
) -> Iterator[T]:
    """Return what can be read of records; one that cannot is named in the log and left alone: it must stop no leader."""
    for key, record in found:
        try:
            yield read(key, record)
        except (KeyError, ValueError, OverflowError, TypeError, AttributeError) as exc:
            logger.error(
                "the record of %r cannot be read and is left alone: %s: %s",
                text_of(key),
                type(exc).__name__,
                exc,
                extra={"action": "occurrence_unreadable", "key": text_of(key)},
            )


def policy_text(policy: Policy) -> str:
    """Return the form in which a record keeps a policy."""
    return json.dumps(policy_to_dict(policy))


def tracking_words(tracking: Tracking | None) -> tuple[Word, ...]:
    """Return policy, start_within, eta and alone, as the scripts that open an occurrence read them."""
    if tracking is None:
        return "", "", "", "0"
    policy, eta = tracking.policy, tracking.eta
    return (
        policy_text(policy),
        millis(policy.start_within),
        micros(eta) // 1000 if eta is not None else "",
        "0" if policy.overlap == "allow_all" else "1",
    )


def _policy(record: Mapping[bytes, bytes]) -> Policy:
    return policy_from_dict(json.loads(record.get(b"policy") or "{}"))


def open_occurrence(record: Mapping[bytes, bytes]) -> OpenOccurrence:
    """Return the occurrence that a record keeps."""
    entry, nominal = record[b"entry"].decode(), from_micros(int(record[b"nominal"]))
    return OpenOccurrence(
        Occurrence(entry, nominal, late=record[b"detail"] == b"misfire"),
        Bucket(int(record[b"number"]), int(record[b"field"])),
        state=record[b"state"].decode(),
        epoch=int(record[b"epoch"]),
        dispatch=int(record[b"dispatch"]),
        payload=record[b"payload"],
        policy=_policy(record),
    )


def run_of(key: str, record: Mapping[bytes, bytes], score: float) -> Run:
    """Return the tracked occurrence that a record keeps; `score` is its place in `open` or `live`."""
    state = record[b"state"].decode()
    late = record[b"until"] if state == "waiting" else int(score)
    progress = record.get(b"progress", b"").decode().split()
    return Run(
        key=key,
        entry=record[b"entry"].decode(),
        nominal=from_micros(int(record[b"nominal"])) if record[b"nominal"] else None,
        state=state,
        token=record.get(b"token", b"").decode(),
        worker=record.get(b"worker", b"").decode(),
        order=(int(record[b"dispatch"]), int(record.get(b"retries", 0))),
        starts=int(record.get(b"starts", 0)),
        deliveries=int(record.get(b"deliveries", 0)),
        deadline=from_micros(max(0, int(late)) * 1000),
        acks_late=record.get(b"late") == b"1",
        unrun=record.get(b"late") == b"2",
        policy=_policy(record),
        payload=record[b"payload"],
        bucket=Bucket(int(record[b"number"]), int(record[b"field"])),
        cancelled=b"cancel" in record,
        progress=(int(progress[0]), int(progress[1]) if len(progress) > 1 else None) if progress else None,
    )


def request_of(id_: bytes, fields: Mapping[bytes, bytes]) -> Request:
    """Return the request that a record of the stream keeps."""
    text = {name.decode(): value.decode() for name, value in fields.items()}
    return Request(
        kind=cast(Any, text["kind"]),  # of a newer release: whoever carries it out refuses it
        key=text["key"],
        by=text["by"],
        why=text["why"],
        expires=from_micros(int(text["expires"])),
        id=id_.decode(),
        detail=text.get("detail", ""),  # an older release says none
    )


def entry_of(letter: str | None) -> str:
    """Return the entry that a dead letter names; empty where the letter cannot be read."""
    try:
        return DeadLetter.from_json(letter or "").entry
    except ValueError:
        return ""


def pauses_of(items: Iterable[tuple[bytes, bytes]]) -> dict[str, Pause]:
    """Return the pauses by entry. One that cannot be read stands: whoever wrote it wanted nothing to be sent."""
    found = {}
    for entry, text in items:
        try:
            pause = Pause.from_json(text)
        except (ValueError, RecursionError):
            pause = Pause(EPOCH, None, "?", "this pause cannot be read: pause or unpause the entry")
        found[entry.decode(errors="replace")] = pause
    return found

"""A message as any broker takes it: captured before it is sent, kept in the ledger, sent later or again.

`Envelope` is one message, `Parcel` what the ledger keeps of an occurrence. Values only: no connection, no clock.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from kombu.utils.json import dumps, loads

from celery_tzbeat.model import EPOCH, from_iso, iso

#: Headers that hold an instant, which was counted from the time of building where the entry gave a duration.
COUNTED = EXPIRES, ETA = ("expires", "eta")

#: The property that tells RabbitMQ for how long to keep a message.
EXPIRATION = "expiration"


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message: its parts as kombu prepares them, and where it goes. `body` is what travels, as bytes."""

    body: bytes
    content_type: str | None
    content_encoding: str | None
    headers: dict[str, Any]
    properties: dict[str, Any]
    priority: int | None
    exchange: str
    routing_key: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "body": base64.b64encode(self.body).decode(),
            "content_type": self.content_type,
            "content_encoding": self.content_encoding,
            "headers": self.headers,
            "properties": self.properties,
            "priority": self.priority,
            "exchange": self.exchange,
            "routing_key": self.routing_key,
        }

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Envelope:
        return cls(**{**form, "body": base64.b64decode(form["body"])})

    @classmethod
    def from_wire(cls, form: dict[str, Any]) -> Envelope:
        """Return the envelope of a message as kombu writes it to a Redis queue (its JSON, decoded).

        What belongs to one delivery (delivery tag, `redelivered`) is left out. Raises KeyError for any other form.
        """
        properties = dict(form["properties"])
        place = properties.pop("delivery_info")
        properties.pop("delivery_tag", None)
        body, encoding = form["body"], properties.pop("body_encoding", None)
        return cls(
            body=base64.b64decode(body) if encoding == "base64" else str(body).encode(),
            content_type=form["content-type"],
            content_encoding=form["content-encoding"],
            headers={name: value for name, value in form["headers"].items() if name != "redelivered"},
            properties=properties,
            priority=properties.get("priority"),
            exchange=place["exchange"] or "",
            routing_key=place["routing_key"] or "",
        )

    def later(self, by: timedelta, counted: tuple[str, ...]) -> Envelope:
        """Return the envelope with the named headers moved: a relative expiry or countdown is counted anew.

        The property `expiration`, for how long RabbitMQ keeps the message, is counted from when it is sent by itself. Celery
        sets it with each `expires`: where that is an instant, what has passed of it since is taken off, to 0 at least.
        """
        moved = {
            name: iso(from_iso(self.headers[name]) + by) for name in counted if isinstance(self.headers.get(name), str)
        }
        sent = replace(self, headers={**self.headers, **moved}) if moved else self
        kept_for = self.properties.get(EXPIRATION)
        if kept_for is None or EXPIRES in counted or not self.headers.get(EXPIRES):
            return sent
        left = max(timedelta(), timedelta(milliseconds=int(kept_for)) - by)
        return replace(sent, properties={**self.properties, EXPIRATION: str(left // timedelta(milliseconds=1))})


@dataclass(frozen=True, slots=True)
class Parcel:
    """The messages of one occurrence as the ledger keeps them with a claim."""

    envelopes: tuple[Envelope, ...]
    built_at: datetime
    counted: tuple[str, ...]  # those headers of COUNTED that the entry gave as a duration

    def to_bytes(self) -> bytes:
        form = {
            "v": 1,
            "envelopes": [envelope.to_dict() for envelope in self.envelopes],
            "built_at": iso(self.built_at),
            "counted": list(self.counted),
        }
        return bytes(dumps(form).encode())

    @classmethod
    def from_bytes(cls, payload: bytes) -> Parcel:
        """Return the parcel of `to_bytes`, or of one message as kombu writes it to a Redis queue.

        Raises whatever its parts raise for any other content.
        """
        form = loads(payload)
        if "envelopes" not in form:
            return cls((Envelope.from_wire(form),), EPOCH, ())
        return cls(
            envelopes=tuple(Envelope.from_dict(part) for part in form["envelopes"]),
            built_at=from_iso(form["built_at"]),
            counted=tuple(form["counted"]),
        )

    @property
    def run(self) -> Envelope:
        """The message that is the run: the first one. A task may send others with it."""
        return self.envelopes[0]

    def again(self, *, dispatch: int, retries: int) -> Parcel:
        """Return the run's message alone, as a later dispatch of it carries it: under the same task id."""
        return self._dispatched(dispatch, {"retries": retries})

    def anew(self, *, dispatch: int, task_id: str) -> Parcel:
        """Return the run's message alone, for a replay: under a new task id, its attempts, delay and expiry forgotten."""
        old = self.run.headers.get("id")
        ours = {name: task_id for name in ("id", "root_id") if old is not None and self.run.headers.get(name) == old}
        fresh = {**ours, "retries": 0, ETA: None, EXPIRES: None}
        (run,) = self._dispatched(dispatch, fresh, correlation_id=task_id).envelopes
        properties = {name: value for name, value in run.properties.items() if name != EXPIRATION}
        return Parcel((replace(run, properties=properties),), self.built_at, ())

    def _dispatched(self, dispatch: int, headers: dict[str, Any], **properties: Any) -> Parcel:
        run = self.run
        meta = run.headers.get("meta") or {}
        ticket = {**(meta.get("tzbeat") or {}), "dispatch": dispatch}
        changed = replace(
            run,
            headers={**run.headers, **headers, "meta": {**meta, "tzbeat": ticket}},
            properties={**run.properties, **properties},
        )
        return Parcel((changed,), self.built_at, ())

    def at(self, now: datetime) -> tuple[Envelope, ...]:
        """Return the envelopes as they are to be sent now."""
        return tuple(envelope.later(now - self.built_at, self.counted) for envelope in self.envelopes)

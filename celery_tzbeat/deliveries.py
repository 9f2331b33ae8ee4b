"""What a message carries of its occurrence, who may run it, and what is left where it cannot be run: frozen values.

Between `model` and the rooms that use them: beat writes a `Ticket` into the message, the worker half reads it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from .model import Occurrence, Policy, Retry, from_iso, iso

#: The version of the header `meta.tzbeat`.
TICKET_VERSION = 1

#: The fields of a policy that a message carries, where they differ from the defaults.
TRAVELLING = (
    "overlap",
    "delivery",
    "timeout",
    "kill_after",
    "retry",
    "max_deliveries",
    "run_lease",
    "start_within",
    "on_abandoned",
    "on_store_down",
)

DEFAULT_POLICY = Policy()


def policy_to_dict(policy: Policy) -> dict[str, Any]:
    """Return what a message carries of a policy: the fields of TRAVELLING that are not the default; spans in seconds."""
    if policy is DEFAULT_POLICY:  # the usual one: nothing to compare
        return {}
    return {
        name: _plain(getattr(policy, name))
        for name in TRAVELLING
        if getattr(policy, name) != getattr(DEFAULT_POLICY, name)
    }


def policy_from_dict(form: Mapping[str, Any]) -> Policy:
    """Return the policy of `policy_to_dict`; a field of a later release is passed over."""
    if not form:
        return DEFAULT_POLICY
    spans = ("timeout", "kill_after", "run_lease", "start_within")
    given: dict[str, Any] = {name: value for name, value in form.items() if name in TRAVELLING}
    given |= {name: timedelta(seconds=given[name]) for name in spans if given.get(name) is not None}
    if given.get("retry") is not None:
        known = {f.name for f in fields(Retry)}
        retry = {name: value for name, value in given["retry"].items() if name in known}
        for name in ("delay", "max_delay"):
            if name in retry:
                retry[name] = timedelta(seconds=retry[name])
        for name in ("only", "never"):
            if name in retry:
                retry[name] = tuple(retry[name])
        given["retry"] = Retry(**retry)
    return Policy(**given)


def _plain(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Retry):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(Retry)}
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Ticket:
    """The header `meta.tzbeat`: which occurrence a message is the run of, and by which policy.

    `number` and `field` are the place of the done mark (`store.keys.Bucket`). `dispatch` is raised by each redispatch and
    replay. An ordinary message behind the gate (`idempotent`) has an empty `entry` and no `nominal`.
    """

    namespace: str
    key: str
    entry: str
    nominal: datetime | None
    epoch: int
    dispatch: int
    number: int
    field: int
    policy: Policy = DEFAULT_POLICY

    @property
    def occurrence(self) -> Occurrence | None:
        """The occurrence, None for an ordinary message behind the gate."""
        return Occurrence(self.entry, self.nominal) if self.nominal is not None else None

    def to_header(self) -> dict[str, Any]:
        """Return the header's value, plain for JSON."""
        return {
            "v": TICKET_VERSION,
            "namespace": self.namespace,
            "key": self.key,
            "entry": self.entry,
            "nominal": iso(self.nominal) if self.nominal is not None else None,
            "epoch": self.epoch,
            "dispatch": self.dispatch,
            "bucket": self.number,
            "field": self.field,
            **({"policy": policy} if (policy := policy_to_dict(self.policy)) else {}),
        }

    @classmethod
    def from_headers(cls, headers: Mapping[str, Any] | None) -> Ticket | None:
        """Return the ticket in a message's headers; None for a message without one.

        Raises ValueError for a header of ours that cannot be read.
        """
        meta = (headers or {}).get("meta")
        form = meta.get("tzbeat") if isinstance(meta, Mapping) else None
        if not isinstance(form, Mapping) or "key" not in form:
            return None
        try:
            return cls(
                namespace=str(form["namespace"]),
                key=str(form["key"]),
                entry=str(form["entry"]),
                nominal=from_iso(form["nominal"]) if form["nominal"] else None,
                epoch=int(form["epoch"]),
                dispatch=int(form["dispatch"]),
                number=int(form["bucket"]),
                field=int(form["field"]),
                policy=policy_from_dict(form.get("policy") or {}),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise ValueError(f"the header meta.tzbeat cannot be read: {type(exc).__name__}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A permanent failure, kept until it is replayed or discarded. `message` is the raw message (`Parcel.to_bytes`).

    A letter without a message (it could not be built) is replayed by building anew. `reason` is one word: build, unroutable,
    exception, retries, permanent, hard_limit, rejected, abandoned, deliveries, second_start, doubtful, unknown, unknown_task,
    undecodable.
    """

    key: str
    entry: str
    task: str
    nominal: datetime | None
    reason: str
    error: str
    at: datetime
    message: bytes = b""
    traceback: str = ""
    attempts: int = 0
    worker: str = ""
    task_id: str = ""

    def to_json(self) -> str:
        return json.dumps(
            {
                "v": 1,
                "key": self.key,
                "entry": self.entry,
                "task": self.task,
                "nominal": iso(self.nominal) if self.nominal is not None else None,
                "reason": self.reason,
                "error": self.error,
                "at": iso(self.at),
                "message": base64.b64encode(self.message).decode() if self.message else None,
                "traceback": self.traceback,
                "attempts": self.attempts,
                "worker": self.worker,
                "task_id": self.task_id,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> DeadLetter:
        """Return the letter of `to_json`; of an older release's, what it says. Raises ValueError for any other text."""
        form = json.loads(text)
        try:
            return cls(
                key=form["key"],
                entry=form["entry"],
                task=form.get("task") or "",
                nominal=from_iso(form["nominal"]) if form.get("nominal") else None,
                reason=form["reason"],
                error=form.get("error") or "",
                at=from_iso(form["at"]),
                message=base64.b64decode(form["message"]) if form.get("message") else b"",
                traceback=form.get("traceback") or "",
                attempts=form.get("attempts", 0),
                worker=form.get("worker") or "",
                task_id=form.get("task_id") or "",
            )
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"not a dead letter: {type(exc).__name__}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class WorkerPresence:
    """What a worker half says of itself."""

    worker: str  # host, pid and a nonce
    node: str  # Celery's node name
    pool: str
    version: str
    running: int

    def to_json(self) -> str:
        return json.dumps({"v": 1, **{f.name: getattr(self, f.name) for f in fields(self)}})

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerPresence:
        form = json.loads(text)
        return cls(**{f.name: form[f.name] for f in fields(cls)})

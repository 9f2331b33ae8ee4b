"""From an occurrence to a message: the only place that publishes occurrences.

Building and sending fail differently. Until the message is captured nothing has left, so an exception means *not sent*,
and it is this entry's own affair (`BuildFailed`). How a message is sent is `paths`.

The first message is the run of the occurrence, and carries its `Ticket`. What a task sends besides (a chain of its own, a
second queue) is ordinary: behind the gate it would be refused as a copy. So is what goes to every worker (a fanout), and
its occurrence is not tracked. Such a message tells of its occurrence, and has no key.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol

from celery import Celery
from celery.beat import ScheduleEntry
from kombu.utils.json import dumps, loads

from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.envelopes import Envelope
from celery_tzbeat.errors import BrokerUnavailable
from celery_tzbeat.model import Entry, Occurrence, from_iso
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import Command

#: What a message that is not the run tells of its occurrence.
TOLD = ("v", "namespace", "entry", "nominal", "epoch")


class BuildFailed(Exception):
    """An entry's message could not be built; `__cause__` is what was raised."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one occurrence becomes: what was captured (nothing: the task chose not to send), and its done mark's place.

    `payload` is what the ledger keeps with a claim; empty where the path needs none. `eta` is when the run starts at the
    earliest, by its message; None for at once.
    """

    parts: tuple[Command | Envelope, ...]
    bucket: Bucket
    payload: bytes = b""
    eta: datetime | None = None

    @property
    def kept(self) -> bytes:
        """What the ledger keeps of the run, in a form that `Parcel.from_bytes` reads."""
        first = self.parts[0] if self.parts else None
        return first.args[1] if isinstance(first, Command) else self.payload

    @property
    def for_everybody(self) -> bool:
        """Whether it is published to whoever listens: there is no one run of it to follow."""
        first = self.parts[0] if self.parts else None
        return isinstance(first, Command) and first.name == "PUBLISH"

    @property
    def size(self) -> int:
        """The bytes that go to the store."""
        return len(self.payload) + sum(
            len(arg) for part in self.parts if isinstance(part, Command) for arg in part.args
        )


class Outlet(Protocol):
    """Where `apply_entry` publishes to while building: it keeps what it is given (`Capture`, `Recording`)."""

    @property
    def producer(self) -> Any: ...

    def clear(self) -> None: ...

    def take(self) -> tuple[Command, ...] | tuple[Envelope, ...]: ...

    def broker_answers(self) -> bool: ...


class Builder:
    """Builds the message of an occurrence through Celery's own `apply_entry`.

    `apply_entry` is `Scheduler.apply_entry` (Sentry and OpenTelemetry hook it there), which swallows exceptions; the
    scheduler notes them with `note_failure`, and `build` raises them. `ending` says whether this beat was told to end:
    SystemExit comes from the handler of a signal then, else from a hook of somebody's.
    """

    def __init__(
        self,
        app: Celery,
        outlet: Outlet,
        namespace: str,
        apply_entry: Callable[..., Any],
        *,
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._outlet = outlet
        self._namespace = namespace
        self._apply_entry = apply_entry
        self._ending = ending
        self._failure: BaseException | None = None

    def note_failure(self, failure: BaseException) -> None:
        """Keep what building raised; called from inside `apply_entry`."""
        self._failure = failure

    def build(self, entry: Entry, occurrence: Occurrence, *, epoch: int) -> Message:
        """Return the message. Raises BuildFailed (the entry's fault) or BrokerUnavailable."""
        bucket = Bucket.of(occurrence.nominal, entry.schedule.shortest_gap)
        failure: BaseException | None
        try:
            self._outlet.clear()
            self._failure = None
            celery_entry = self._celery_entry(entry, occurrence, bucket, epoch)
            self._apply_entry(celery_entry, producer=self._outlet.producer)
            failure, parts = self._failure, self._outlet.take()
        except SystemExit as exc:
            if self._ending():
                raise
            failure, parts = exc, ()
        except Exception as exc:
            failure, parts = exc, ()
        if failure is None:
            return _message(entry, tuple(parts), bucket)
        if not self._outlet.broker_answers():
            raise BrokerUnavailable(f"the broker does not answer: {failure}") from failure
        raise BuildFailed(f"{type(failure).__name__}: {failure}") from failure

    def _celery_entry(self, entry: Entry, occurrence: Occurrence, bucket: Bucket, epoch: int) -> ScheduleEntry:
        """Return Celery's entry for one occurrence, with options of its own: what is written there must not stay."""
        options = copy.deepcopy(dict(entry.options))
        headers = dict(options.get("headers") or {})
        meta = headers.get("meta")
        ticket = Ticket(
            namespace=self._namespace,
            key=occurrence.key,
            entry=entry.name,
            nominal=occurrence.nominal,
            epoch=epoch,
            dispatch=1,
            number=bucket.number,
            field=bucket.field,
            policy=entry.policy,
        )
        options["headers"] = {
            **headers,
            "periodic_task_name": entry.name,
            "meta": {**(meta if isinstance(meta, dict) else {}), "tzbeat": ticket.to_header()},
        }
        options["task_id"] = occurrence.task_id(self._namespace)
        options.setdefault("retry", False)  # nothing is sent while building, so there is nothing to retry
        if entry.policy.timeout is not None:
            soft = entry.policy.timeout.total_seconds()
            options.setdefault("soft_time_limit", soft)
            options.setdefault("time_limit", soft + entry.policy.kill_after.total_seconds())
        return ScheduleEntry(
            name=entry.name,
            task=entry.task,
            schedule=entry.schedule,
            args=entry.args,
            kwargs=dict(entry.kwargs),
            options=options,
            last_run_at=occurrence.nominal,
            app=self._app,
        )


def _message(entry: Entry, parts: tuple[Command | Envelope, ...], bucket: Bucket) -> Message:
    """Return the message of what was captured: only the first part carries the ticket, a fanout none."""
    made = Message(parts, bucket)
    if made.for_everybody:
        return replace(made, parts=tuple(map(_without_ticket, parts)))
    if len(parts) > 1:
        made = replace(made, parts=(parts[0], *map(_without_ticket, parts[1:])))
    if parts and not entry.options.keys().isdisjoint(("eta", "countdown")):
        first = parts[0]
        eta = (first.headers if isinstance(first, Envelope) else loads(first.args[1])["headers"]).get("eta")
        made = replace(made, eta=from_iso(eta) if eta else None)
    return made


def _without_ticket(part: Command | Envelope) -> Command | Envelope:
    if isinstance(part, Envelope):
        return replace(part, headers=_bare(part.headers))
    if part.name == "PEXPIRE":
        return part
    form = loads(part.args[1])
    form["headers"] = _bare(form["headers"])
    return replace(part, args=(part.args[0], dumps(form).encode()))


def _bare(headers: dict[str, Any]) -> dict[str, Any]:
    """Return headers that tell of the occurrence and are no ticket: without a key there is nothing to ask the gate for."""
    meta = dict(headers.get("meta") or {})
    told = {name: value for name, value in (meta.pop("tzbeat", None) or {}).items() if name in TOLD}
    return {**headers, "meta": {**meta, "tzbeat": told} if told else meta}


def no_subscriptions_for_results() -> None:
    """Keep Celery from subscribing to the result backend for every message that beat sends.

    Otherwise a frozen result backend holds each send for some 27 s. Beat never waits for a result.
    """
    from celery._state import _set_task_join_will_block

    _set_task_join_will_block(True)

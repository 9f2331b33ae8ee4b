"""RabbitMQ as the tests see it: a virtual host of their own on a server that others may use, and what stands in queues."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import amqp

from celery_tzbeat.model import from_iso

ADDRESS = ("127.0.0.1", 5672)
USER = "guest"

#: Virtual hosts of this suite: ``tzbeat-tests-<pid of the test process>-<when that started>``.
PREFIX = "tzbeat-tests-"


def control(*words: str) -> str:
    """Run rabbitmqctl; RuntimeError with its words where it fails."""
    done = subprocess.run(["rabbitmqctl", "--quiet", *words], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"rabbitmqctl {' '.join(words)}: {done.stderr or done.stdout}")
    return done.stdout


@contextmanager
def virtual_host() -> Iterator[str]:
    """Make a virtual host, and remove it; those of test processes that were killed are removed, too."""
    for name in control("list_vhosts").split():
        pid, _, started = name.removeprefix(PREFIX).partition("-")
        if name.startswith(PREFIX) and pid.isdecimal() and start_of(pid) != started:
            remove_virtual_host(name)
    name = f"{PREFIX}{os.getpid()}-{start_of(os.getpid())}"
    control("add_vhost", name)
    try:
        control("set_permissions", "-p", name, USER, ".*", ".*", ".*")
        yield name
    finally:
        remove_virtual_host(name)


def remove_virtual_host(name: str) -> None:
    """Remove a virtual host; it is no error where another test process was quicker."""
    try:
        control("delete_vhost", name)
    except RuntimeError:
        if name in control("list_vhosts").split():
            raise


def start_of(pid: int | str) -> str:
    """Return when a process started, in ticks since the boot: it tells a process from a later one with its number.

    Empty where there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


@dataclass(frozen=True)
class Message:
    """One message as it came out of a queue."""

    headers: dict[str, Any]
    properties: dict[str, Any]
    body: bytes

    @classmethod
    def of(cls, found: Any) -> Message:
        """Return what py-amqp made of a message, its body as it travelled."""
        body = found.body if isinstance(found.body, bytes) else found.body.encode()
        properties = dict(found.properties)
        return cls(properties.pop("application_headers", {}), properties, body)

    @property
    def id(self) -> str:
        return str(self.headers["id"])

    @property
    def tzbeat(self) -> dict[str, Any]:
        return dict((self.headers.get("meta") or {}).get("tzbeat") or {})

    @property
    def entry(self) -> str:
        return str(self.tzbeat.get("entry", ""))

    @property
    def nominal(self) -> datetime:
        return from_iso(self.tzbeat["nominal"])

    @property
    def args(self) -> list[Any]:
        return list(json.loads(self.body)[0])


@dataclass
class Inbox:
    """Takes messages out of one queue, past any proxy, and keeps them in the order in which they stood there."""

    vhost: str
    queue: str
    _taken: list[Message] = field(default_factory=list)
    _connection: Any = None

    def messages(self, entry: str = "") -> list[Message]:
        """Return all that has come so far; nothing where there is no such queue (yet)."""
        with suppress(amqp.exceptions.NotFound):
            channel = self._channel()
            while (found := channel.basic_get(self.queue, no_ack=True)) is not None:
                self._taken.append(Message.of(found))
        return [message for message in self._taken if entry in ("", message.entry)]

    def look(self) -> list[Message]:
        """Return what stands in the queue, and leave it there."""
        channel, found = self._channel(), []
        while (message := channel.basic_get(self.queue, no_ack=False)) is not None:
            found.append(message)
        for message in found:
            channel.basic_reject(message.delivery_tag, requeue=True)
        return [Message.of(message) for message in found]

    def put(self, message: Message) -> None:
        """Put a message at the end of the queue."""
        properties = {**message.properties, "application_headers": message.headers}
        self._channel().basic_publish(amqp.Message(message.body, **properties), "", self.queue)

    def declare(self, exchange: str) -> None:
        """Make the (durable) queue, bound to an exchange by its own name."""
        channel = self._channel()
        channel.queue_declare(self.queue, durable=True, auto_delete=False)
        channel.queue_bind(self.queue, exchange, self.queue)

    def delete_queue(self) -> None:
        """Delete the (classic) queue; what stood in it has been taken out, so nothing is lost with it."""
        while True:
            self.messages()
            try:
                self._channel().queue_delete(self.queue, if_empty=True)
            except amqp.exceptions.PreconditionFailed:
                continue
            except amqp.exceptions.NotFound:
                pass
            return

    def close(self) -> None:
        """Delete the queue, whatever stands in it, and disconnect."""
        with suppress(amqp.exceptions.NotFound):
            self._channel().queue_delete(self.queue)
        self._connection.close()

    def _channel(self) -> Any:
        if self._connection is None or not self._connection.connected:
            self._connection = amqp.Connection("{}:{}".format(*ADDRESS), virtual_host=self.vhost, connect_timeout=20)
            self._connection.connect()
        return self._connection.channel(1)  # the same one, or a new one where an error has closed it

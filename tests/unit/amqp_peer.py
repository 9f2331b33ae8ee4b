"""As much of an AMQP broker as publishing one message takes: what it answers to a message is the test's to say.

For the contracts, which are to hold with each version of kombu and py-amqp, where no RabbitMQ is. What RabbitMQ itself
does is the service suite's matter.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

METHOD, HEADER, BODY = 1, 2, 3

QUEUE_DECLARE, CONFIRM_SELECT = (50, 10), (85, 10)

#: What the peer says to a published message: methods by class, number and arguments.
ACK = [(60, 80, struct.pack(">QB", 1, 0))]
NACK = [(60, 120, struct.pack(">QB", 1, 0))]


def short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


NOT_FOUND = [(20, 40, struct.pack(">H", 404) + short("NOT_FOUND - no exchange") + struct.pack(">HH", 60, 40))]
RETURN = [(60, 50, struct.pack(">H", 312) + short("NO_ROUTE") + short("") + short("celery"))]

#: What it says to a connection, not to a message.
BLOCKED = (10, 60, short("low on memory"))
UNBLOCKED = (10, 61, b"")

Method = tuple[int, int, bytes]


class Peer:
    """Listens on `port` and answers in threads, as a context manager.

    `published` is the number of messages it got; `heard` are the methods, by class and number.
    """

    def __init__(self, says: list[Method]) -> None:
        self.published = 0
        self.heard: list[tuple[int, int]] = []
        self._says = says
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def __enter__(self) -> Peer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for end in [self._listening, *self._connections]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._thread.join(timeout=5)

    def tell(self, method: Method) -> None:
        """Say something to every connection."""
        cls, number, arguments = method
        payload = struct.pack(">HH", cls, number) + arguments
        for end in self._connections:
            with suppress(OSError):
                end.sendall(struct.pack(">BHI", METHOD, 0, len(payload)) + payload + b"\xce")

    def hang_up(self) -> None:
        """Close every connection."""
        for end in self._connections:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._connections.append(connection)
                threading.Thread(target=self._speak_until_the_end, args=(connection,), daemon=True).start()

    def _speak_until_the_end(self, wire: socket.socket) -> None:
        with suppress(OSError, EOFError):
            self._speak(wire)

    def _speak(self, wire: socket.socket) -> None:
        def receive(size: int) -> bytes:
            data = b""
            while len(data) < size:
                more = wire.recv(size - len(data))
                if not more:
                    raise EOFError
                data += more
            return data

        def send(kind: int, channel: int, payload: bytes) -> None:
            wire.sendall(struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce")

        def say(channel: int, cls: int, method: int, arguments: bytes = b"") -> None:
            send(METHOD, channel, struct.pack(">HH", cls, method) + arguments)

        answers: dict[tuple[int, int], Callable[[int], None]] = {
            (10, 11): lambda channel: say(channel, 10, 30, struct.pack(">HIH", 100, 131072, 0)),  # start-ok: tune
            (10, 40): lambda channel: say(channel, 10, 41, short("")),  # open
            (20, 10): lambda channel: say(channel, 20, 11, struct.pack(">I", 0)),  # channel open
            (40, 10): lambda channel: say(channel, 40, 11),  # exchange declare
            (50, 20): lambda channel: say(channel, 50, 21),  # queue bind
            (85, 10): lambda channel: say(channel, 85, 11),  # confirm select
            (50, 10): lambda channel: say(channel, 50, 11, short("celery") + struct.pack(">II", 0, 0)),  # queue declare
        }
        assert receive(8) == b"AMQP\x00\x00\x09\x01"
        properties = self._table({"publisher_confirms": True})
        mechanisms = b"PLAIN AMQPLAIN"
        say(
            0,
            10,
            10,
            b"\x00\x09"
            + self._table({}, capabilities=properties)
            + struct.pack(">I", len(mechanisms))
            + mechanisms
            + struct.pack(">I", 5)
            + b"en_US",
        )
        while True:
            kind, channel, size = struct.unpack(">BHI", receive(7))
            payload = receive(size + 1)[:-1]
            if kind == METHOD:
                method = struct.unpack(">HH", payload[:4])
                self.heard.append(method)
                if method in answers:
                    answers[method](channel)
            elif kind == BODY:
                self.published += 1
                for cls, number, arguments in self._says:
                    say(0 if cls == 10 else channel, cls, number, arguments)
                    if (cls, number) == (60, 50):  # a returned message comes with its content
                        send(HEADER, channel, struct.pack(">HHQH", 60, 0, 1, 0))
                        send(BODY, channel, b"x")

    @staticmethod
    def _table(flags: dict[str, bool], **tables: bytes) -> bytes:
        fields = b"".join(short(name) + b"t" + bytes([value]) for name, value in flags.items())
        fields += b"".join(short(name) + b"F" + table for name, table in tables.items())
        return struct.pack(">I", len(fields)) + fields

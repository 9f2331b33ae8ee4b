"""A TCP proxy between beat and a broker, to do to the one connection what must not be done to a server that others use."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from contextlib import suppress

#: How often a pump looks whether it is to go on, in seconds.
LOOK = 0.02


class Proxy:
    """Forwards 127.0.0.1:`port` to `target`. A context manager; the port stays the same.

    `hang`: connections are accepted and stay open, nothing is forwarded; what was sent meanwhile goes on at `resume`.
    `refuse`: connections are cut, new ones refused. `cut`: connections are cut, new ones served at once.
    `slow`: each piece takes some time more.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._flows = threading.Event()
        self._flows.set()
        self._over = False
        self._lag = 0.0
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.port = 0
        self.accepted = 0

    def __enter__(self) -> Proxy:
        self._listen()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over = True
        self.refuse()
        self._flows.set()

    def hang(self) -> None:
        self._flows.clear()

    def slow(self, seconds: float) -> None:
        """Hold up each piece for so long, in both directions, until `resume`."""
        self._lag = seconds

    def refuse(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):  # wakes the thread that accepts, which would keep the port otherwise
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for end in sockets:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def resume(self) -> None:
        self._lag = 0.0
        self._flows.set()
        if self._listener is None:
            self._listen()

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Below the range of outgoing ports: a client that asks for a port of its own range can be connected to itself.
        for _ in range(1000):
            try:
                listener.bind(("127.0.0.1", self.port or random.randrange(10_000, 32_000)))
                break
            except OSError:
                if self.port:
                    raise
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            if self._listener is not listener:
                near.close()
                return
            self.accepted += 1
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        with self._lock:
            self._sockets.add(near)
        self._flows.wait()
        try:
            far = socket.create_connection(self._target, timeout=10)
        except OSError:
            self._close(near)
            return
        far.settimeout(None)
        with self._lock:
            cut = near not in self._sockets
            if not cut:
                self._sockets.add(far)
        if cut:
            far.close()
            return
        threading.Thread(target=self._pump, args=(near, far), daemon=True).start()
        self._pump(far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while not self._over:
                self._flows.wait()
                data = source.recv(65536)
                self._flows.wait()
                time.sleep(self._lag)
                if not data:
                    break
                sink.sendall(data)
        self._close(source)
        self._close(sink)

    def _close(self, end: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(end)
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()

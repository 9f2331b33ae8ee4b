"""pytest-celery without Docker: its brokers, backends and workers as processes of this host, and a beat beside them.

Import the fixtures where they are to replace pytest-celery's own (``from celery_tzbeat.testing.vendor import *`` in a
conftest or a test module); all else is pytest-celery's: `celery_setup`, nodes, clusters, its tasks. Needs the extra
``pytest-celery``; Redis or Valkey as `testing.server` finds it; for RabbitMQ its own package.

What pytest-celery asks of a container is asked of a stand-in for docker's object (`Machine`). The fixtures that name images,
networks and volumes have no effect.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal as signals
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from pytest_celery import CeleryTestContainer, CeleryTestNode, CeleryWorkerContainer, RabbitMQContainer, RedisContainer
from pytest_docker_tools.wrappers.container import wait_for_callable

from . import vendor_app
from .processes import Process, wait_until
from .server import NoServer, free_port, server_executable

__all__ = [
    "celery_beat",
    "default_beat_command",
    "default_beat_container",
    "default_rabbitmq_broker",
    "default_rabbitmq_broker_cls",
    "default_redis_backend",
    "default_redis_backend_cls",
    "default_redis_broker",
    "default_redis_broker_cls",
    "default_worker_container",
    "default_worker_container_cls",
]

#: How long a process may take to be ready, in seconds: RabbitMQ on a busy host is the slowest.
READY_TIMEOUT = 120

_LOOPBACK = "127.0.0.1"


class Machine:
    """One program that can be started again, in the shape of docker's container object.

    `ports` maps a container's port (``6379/tcp``) to the one on the loopback. The log goes on over restarts. Signals but
    SIGKILL go to the program alone; SIGKILL, `pause` and `unpause` to its whole group, as a container's do. `kill` returns
    when all of it is gone: a child that outlives its worker by a moment holds the broker's connection, and a message with it.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        directory: Path,
        env: Mapping[str, str] | None = None,
        ports: Mapping[str, int] | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"{name}-{self.id[:6]}"
        self.ports = dict(ports or {})
        self._argv = [word.replace("%h", self.id[:12]) for word in argv]
        self._directory = directory
        paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        self._env = {**(env or {}), "PATH": os.pathsep.join(paths)}
        self._log = directory / f"{self.name}.log"
        address = ":".join([_LOOPBACK, *map(str, list(self.ports.values())[:1])])
        self.attrs: dict[str, Any] = {
            "Config": {"Hostname": address, "Env": [f"{key}={value}" for key, value in self._env.items()]},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {
                "Networks": {"loopback": {"IPAddress": _LOOPBACK}},
                "Ports": {
                    inside: [{"HostIp": _LOOPBACK, "HostPort": str(port)}] for inside, port in self.ports.items()
                },
            },
        }
        self.start()

    @property
    def status(self) -> str:
        return "running" if self.process.alive else "exited"

    def start(self) -> None:
        self.process = Process(self._argv, log=self._log, name=self.name, cwd=self._directory, env=self._env)

    def reload(self) -> None:
        """Nothing to do: the status is read from the process each time."""

    def logs(self) -> bytes:
        return self._log.read_bytes()

    def kill(self, signal: str | int | None = None) -> None:
        number = signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal or signals.SIGKILL)
        if number is signals.SIGKILL:
            self.process.kill()
            group = self.process.pid
            wait_until(lambda: not _lives(group), READY_TIMEOUT, f"the group of {self.name} to end")
        else:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def stop(self, timeout: float = 10) -> None:
        self.process.stop(timeout)

    def restart(self, timeout: float = 10) -> None:
        self.stop(timeout)
        self.start()

    def pause(self) -> None:
        self.process.freeze()

    def unpause(self) -> None:
        self.process.thaw()

    def exec_run(self, command: str | Sequence[str]) -> tuple[int, bytes]:
        """Run a command beside the program, with its directory and variables."""
        argv = shlex.split(command) if isinstance(command, str) else command
        done = subprocess.run(
            argv,
            cwd=self._directory,
            env={**os.environ, **self._env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.returncode, done.stdout


def _lives(group: int) -> bool:
    """Return whether any process of a group does more than wait to be reaped."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError, PermissionError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                return True
    return False


class _OnThisHost:
    """What differs for pytest-celery's containers when they are processes of this host."""

    _container: Machine

    def get_open_tcp_ports(self) -> list[str]:
        return [inside.split("/")[0] for inside, port in self._container.ports.items() if _listens(port)]

    def get_addr(self, port: str) -> tuple[str, int]:
        return _LOOPBACK, self._container.ports[port]

    def pause(self) -> None:
        """Stop the whole group where it stands (SIGSTOP): it keeps its sockets and its beliefs."""
        self._container.pause()

    def unpause(self) -> None:
        self._container.unpause()

    def restart(self, timeout: float = 10) -> None:
        """End in order, at the latest after `timeout` seconds, start again, and return when it is ready."""
        self._container.restart(timeout)
        _ready(self)

    def teardown(self) -> None:
        """End the whole group at once. May be called again."""
        self._container.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex((_LOOPBACK, port)) == 0


class RedisProcess(_OnThisHost, RedisContainer):
    """A Redis or Valkey of its own, with no data kept over a restart unless its command says so."""

    @property
    def host_url(self) -> str:
        return str(self.url)

    @classmethod
    def launch(cls, command: Sequence[str], directory: Path) -> RedisProcess:
        """Start a server by pytest-celery's command for it. Returns at once."""
        port = free_port()
        argv = [server_executable(), *command[1:], "--port", str(port), "--bind", _LOOPBACK, "--dir", str(directory)]
        return cls(Machine("redis", argv, directory=directory, ports={"6379/tcp": port}))


class RabbitMQProcess(_OnThisHost, RabbitMQContainer):
    """A RabbitMQ node of its own beside any other on this host; its data stay over a restart.

    Erlang's port mapper (epmd) is started where none runs, and stays when the node is gone.
    """

    @property
    def host_url(self) -> str:
        return str(self.url)

    @classmethod
    def launch(cls, directory: Path) -> RabbitMQProcess:
        """Start a node. Returns at once."""
        port = free_port()
        for name, text in (("enabled_plugins", "[]."), ("env.conf", ""), ("rabbitmq.conf", "")):
            (directory / name).write_text(text)
        env = {
            "ERL_CRASH_DUMP": str(directory / "erl_crash.dump"),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "env.conf"),  # the host's own would win over all that follows
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
            "RABBITMQ_NODENAME": f"vendor-{uuid.uuid4().hex[:8]}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": _LOOPBACK,
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(directory / "data"),
            "RABBITMQ_LOG_BASE": str(directory),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
        }
        return cls(Machine("rabbitmq", [_rabbitmq()], directory=directory, env=env, ports={"5672/tcp": port}))


def _rabbitmq() -> str:
    """Return the server's own script: the one on PATH may insist on being root (Debian)."""
    for candidate in ("/usr/lib/rabbitmq/bin/rabbitmq-server", shutil.which("rabbitmq-server")):
        if candidate is not None and os.access(candidate, os.X_OK):
            return candidate
    raise NoServer("no rabbitmq-server: install RabbitMQ (Debian: apt-get install rabbitmq-server)")


class WorkerProcess(_OnThisHost, CeleryWorkerContainer):
    """A worker with the worker half, in a directory with the app that pytest-celery wrote for it."""

    @classmethod
    def app_module(cls) -> ModuleType:
        return vendor_app

    @classmethod
    def launch(
        cls, command: Sequence[str], content: Mapping[str, bytes], env: Mapping[str, str], directory: Path
    ) -> WorkerProcess:
        """Write what the worker needs into `directory` and start it there. Returns at once."""
        for name, text in content.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)
        return cls(Machine("worker", _celery(command), directory=directory, env=_importing(directory, env)))


class BeatProcess(_OnThisHost, CeleryTestContainer):
    """A beat of the worker's app, in the worker's directory."""

    @classmethod
    def command(cls, *args: str, **_: Any) -> list[str]:
        return ["celery", "-A", "app", "beat", "--pidfile=", "--loglevel=INFO", *args]

    @property
    def ready_prompt(self) -> str:
        return "beat: Starting..."

    @classmethod
    def launch(cls, command: Sequence[str], env: Mapping[str, str], directory: Path) -> BeatProcess:
        """Start a beat. Returns at once; several may run side by side."""
        return cls(Machine("beat", _celery(command), directory=directory, env=_importing(directory, env)))


def _celery(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", *command] if command[0] == "celery" else list(command)


def _importing(directory: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's variables, with its directory importable, and what this process can import."""
    paths = [str(directory), os.environ.get("PYTHONPATH", "")]
    return {**env, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _ready(container: Any) -> Any:
    wait_for_callable(f"Waiting for {container.name} to be ready", container.ready, timeout=READY_TIMEOUT)
    return container


def _directory(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    return made


# ---- fixtures, each in the place of pytest-celery's of that name


@pytest.fixture
def default_redis_broker_cls() -> type[RedisContainer]:
    return RedisProcess


@pytest.fixture
def default_redis_broker(
    default_redis_broker_cls: type[RedisProcess], default_redis_broker_command: list[str], tmp_path: Path
) -> Iterator[RedisProcess]:
    container = default_redis_broker_cls.launch(default_redis_broker_command, _directory(tmp_path, "broker"))
    try:
        yield _ready(container)
    finally:
        container.teardown()


@pytest.fixture
def default_redis_backend_cls() -> type[RedisContainer]:
    return RedisProcess


@pytest.fixture
def default_redis_backend(
    default_redis_backend_cls: type[RedisProcess], default_redis_backend_command: list[str], tmp_path: Path
) -> Iterator[RedisProcess]:
    container = default_redis_backend_cls.launch(default_redis_backend_command, _directory(tmp_path, "backend"))
    try:
        yield _ready(container)
    finally:
        container.teardown()


@pytest.fixture
def default_rabbitmq_broker_cls() -> type[RabbitMQContainer]:
    return RabbitMQProcess


@pytest.fixture
def default_rabbitmq_broker(
    default_rabbitmq_broker_cls: type[RabbitMQProcess], tmp_path: Path
) -> Iterator[RabbitMQProcess]:
    container = default_rabbitmq_broker_cls.launch(_directory(tmp_path, "broker"))
    try:
        yield _ready(container)
    finally:
        container.teardown()


@pytest.fixture
def default_worker_container_cls() -> type[CeleryWorkerContainer]:
    return WorkerProcess


@pytest.fixture
def default_worker_container(
    default_worker_container_cls: type[WorkerProcess],
    default_worker_command: list[str],
    default_worker_initial_content: dict[str, bytes],
    default_worker_env: dict[str, str],
    tmp_path: Path,
) -> Iterator[WorkerProcess]:
    container = default_worker_container_cls.launch(
        default_worker_command, default_worker_initial_content, default_worker_env, _directory(tmp_path, "worker")
    )
    try:
        yield _ready(container)
    finally:
        container.teardown()


@pytest.fixture
def default_beat_command() -> list[str]:
    """The command of a beat; the app's `beat_scheduler` says which scheduler."""
    return BeatProcess.command()


@pytest.fixture
def default_beat_container(
    default_beat_command: list[str],
    default_worker_env: dict[str, str],
    default_worker_container: WorkerProcess,
    tmp_path: Path,
) -> Iterator[BeatProcess]:
    container = BeatProcess.launch(default_beat_command, default_worker_env, tmp_path / "worker")
    try:
        yield _ready(container)
    finally:
        container.teardown()


@pytest.fixture
def celery_beat(default_beat_container: BeatProcess, celery_setup_app: Any) -> CeleryTestNode:
    """A beat of the setup's app, as one more node: pytest-celery has none."""
    return CeleryTestNode(default_beat_container, celery_setup_app)

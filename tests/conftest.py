"""What all tests share: servers of our own, and a project of real beats and workers in a temporary directory.

No test uses a server that was not started for it. `TZBEAT_TEST_SERVER` names another binary for them all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import redis
import servers_from_packages
from celery._state import _set_task_join_will_block
from kombu.transport import memory

import celery_tzbeat
from celery_tzbeat.testing import processes
from celery_tzbeat.testing.processes import Process
from celery_tzbeat.testing.server import LocalServer, server_executable

# The demo is not part of the package. Last in the path: where celery_tzbeat is installed, that one is tested.
sys.path.append(str(Path(__file__).parents[1]))

EXECUTABLE = os.environ.get("TZBEAT_TEST_SERVER")

APP = '''\
"""Written by the fixture `project`."""
import json, os
from celery import Celery

app = Celery("proj", broker={url!r})
app.conf.update({conf!r})


@app.task(bind=True)
def record(self, *args, **kwargs):
    """Append what arrived to a file, one line with one write."""
    meta = (self.request.headers or {{}}).get("meta") or self.request.get("meta") or {{}}
    found = {{"args": args, "kwargs": kwargs, "id": self.request.id, **meta.get("tzbeat", {{}})}}
    line = json.dumps(found) + "\\n"
    file = os.open({received!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


'''


class Project:
    """A directory with a Celery app in it, and the beats and workers that a test starts there.

    All of them are killed when the test ends; the ends of their logs are shown when it failed.
    """

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = url
        self.processes: list[Process] = []
        self._received = directory / "received.jsonl"

    def write(self, body: str = "", *, module: str = "proj", **conf: Any) -> None:
        """Write an app module: broker, `conf`, the task `<module>.record`, then `body`, which goes on from there.

        The scheduler is ours and the lease 2 s where `conf` says nothing else.
        """
        conf = {"beat_scheduler": "celery_tzbeat:Scheduler", "tzbeat_lease": 2, **conf}
        text = APP.format(url=self.url, conf=conf, received=str(self._received)) + body
        (self.directory / f"{module}.py").write_text(text)

    def start_beat(
        self,
        name: str = "",
        *,
        app: str = "proj",
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        scheduler: str | None = None,
    ) -> Process:
        """Start a beat; returns at once."""
        name = name or f"beat{len(self.processes)}"
        return self._started(
            processes.beat(
                app,
                log=self.directory / f"{name}.log",
                name=name,
                cwd=self.directory,
                env=self._env(env),
                scheduler=scheduler,
                args=args,
            )
        )

    def start_worker(
        self,
        name: str = "",
        *,
        app: str = "proj",
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        pool: str = "solo",
        concurrency: int = 1,
    ) -> Process:
        """Start a worker; returns at once."""
        name = name or f"worker{len(self.processes)}"
        return self._started(
            processes.worker(
                app,
                log=self.directory / f"{name}.log",
                name=name,
                cwd=self.directory,
                env=self._env(env),
                pool=pool,
                concurrency=concurrency,
                args=args,
            )
        )

    def start(self, *argv: str, name: str = "", env: Mapping[str, str] | None = None) -> Process:
        """Start any other program there; returns at once."""
        name = name or f"process{len(self.processes)}"
        log = self.directory / f"{name}.log"
        return self._started(Process(argv, log=log, name=name, cwd=self.directory, env=self._env(env)))

    def received(self) -> list[dict[str, Any]]:
        """Return what `proj.record` has written: args, kwargs, id, and the fields of our header."""
        if not self._received.exists():
            return []
        return [json.loads(line) for line in self._received.read_text().splitlines()]

    def kill_all(self) -> None:
        """End every process of this project at once."""
        for process in self.processes:
            process.kill()

    def _started(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def _env(self, env: Mapping[str, str] | None) -> dict[str, str]:
        """Return a child's variables: it imports the same celery_tzbeat as the test, installed or not."""
        ours = Path(celery_tzbeat.__file__).parents[1]
        installed = "site-packages" in ours.parts
        paths = [str(self.directory), "" if installed else str(ours), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(path for path in paths if path), **(env or {})}


def pytest_report_header() -> str:
    """Say what is tested on: the cell of the matrix. A server that was asked for and is not there ends the run."""
    binary = Path(EXECUTABLE or server_executable())
    said = servers_from_packages.version(binary)
    if " v=" not in said:
        raise pytest.UsageError(f"TZBEAT_TEST_SERVER={binary} is no server: {said}")
    packages = " ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
    return f"tested on: {packages}, {said.partition(' sha=')[0]}"


#: The projects and servers of a test: the ends of their logs are shown below its failure.
MADE = pytest.StashKey[list["Project | LocalServer"]]()


@pytest.fixture(autouse=True)
def _empty_memory_broker() -> None:
    """What earlier tests declared and sent on ``memory://`` stays in the process: it is none of this test's."""
    _set_task_join_will_block(False)  # a beat in an earlier test waits for no result; this one may
    memory.Transport.global_state.clear()
    memory.Channel.queues.clear()
    memory.Channel.events.clear()


@pytest.fixture
def make_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., LocalServer]]:
    """Start servers with any of LocalServer's options; they are gone after the test."""
    with ExitStack() as stack:

        def make(**options: Any) -> LocalServer:
            options.setdefault("executable", EXECUTABLE)
            server = stack.enter_context(LocalServer(**options))
            request.node.stash.setdefault(MADE, []).append(server)
            return server

        yield make


@pytest.fixture
def server(make_server: Callable[..., LocalServer]) -> LocalServer:
    """A server of this test alone, to do anything to."""
    return make_server()


@pytest.fixture
def aof_server(make_server: Callable[..., LocalServer]) -> LocalServer:
    """A server of this test alone whose data survive a kill."""
    return make_server(appendonly=True)


@pytest.fixture(scope="session")
def session_server() -> Iterator[LocalServer]:
    """One server for the whole session: not to be killed, frozen or configured, and never empty."""
    with LocalServer(executable=EXECUTABLE) as server:
        yield server


@pytest.fixture
def empty_server(session_server: LocalServer) -> LocalServer:
    """The session's server, emptied of data and of cached scripts: cheap."""
    with redis.Redis.from_url(session_server.url) as client:
        client.flushall()
        client.script_flush()
    return session_server


@pytest.fixture
def make_project(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Project]]:
    """Make projects on any broker URL, each in a directory of its own."""
    projects: list[Project] = []

    def make(url: str) -> Project:
        directory = tmp_path / f"project{len(projects)}"
        directory.mkdir()
        projects.append(Project(directory, url))
        request.node.stash.setdefault(MADE, []).append(projects[-1])
        return projects[-1]

    yield make
    for project in projects:
        project.kill_all()


@pytest.fixture
def project(make_project: Callable[[str], Project], server: LocalServer) -> Project:
    """A project on a server of this test alone."""
    return make_project(server.url)


def tail(process: Process) -> str:
    """Return the end of a log; the directory of a server that was closed, or of a test, may be gone with it."""
    try:
        return process.tail()
    except OSError as error:
        return f"(the log is gone: {error})"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show the ends of the logs of the test's processes below its failure."""
    report = yield
    if report.failed:
        for made in item.stash.get(MADE, []):
            processes_of = made.processes if isinstance(made, Project) else [made.process] if made.port else []
            for process in processes_of:
                report.sections.append((f"end of the log of {process!r}", tail(process)))
    return report

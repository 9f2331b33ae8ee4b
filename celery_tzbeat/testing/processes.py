"""Beats and workers as real processes, so that a test can kill, freeze and end them.

Each process leads a session and process group of its own, so that a signal meant for it (and for what it
forked) reaches nobody else. What is written to standard output and error goes to one log file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from celery_tzbeat.clock import SystemClock, Waker

T = TypeVar("T")

#: How often a condition is looked at while it is waited for, in seconds.
POLL = 0.02

# Run between fork and the real program: ask Linux to kill this process when its parent dies, take the signals that whoever
# started the tests may have ignored (`nohup`, a shell's `&`) as they are meant, then become the program. Not a `preexec_fn`,
# which is unsafe (and from Python 3.12 on a warning) beside threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
for ignored in (signal.SIGHUP, signal.SIGINT):
    signal.signal(ignored, signal.SIG_DFL)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def wait_until(predicate: Callable[[], T | None], timeout: float, description: str) -> T:
    """Return the first true answer of `predicate`; TimeoutError with `description` after `timeout` seconds.

    The predicate is asked at least once, and once more at the end. One that blocks is not interrupted.
    """
    clock, waker = SystemClock(), Waker()
    ends_at = clock.reading().monotonic + timeout
    try:
        while True:
            last = clock.reading().monotonic >= ends_at
            if answer := predicate():
                return answer
            if last:
                raise TimeoutError(f"waited {timeout:g} s in vain: {description}")
            waker.wait(POLL)
    finally:
        waker.close()


class Process:
    """One running program, its process group and its log.

    Started when made; use it as a context manager, or call `kill`, to be sure of its end. On Linux it also
    dies when this process dies, however it dies; elsewhere, or when started from another thread than the main
    one (Linux would count that thread's end as the parent's death), a parent that is killed leaves it
    running.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        name: str = "",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start `argv`; `env` is laid over this process's environment, `log` is appended to."""
        self.argv = tuple(argv)
        self.name = name or Path(argv[0]).name
        self.log_path = log
        command = list(argv)
        if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._popen = subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def __repr__(self) -> str:
        state = "running" if self.alive else f"ended {self.returncode}"
        return f"<Process {self.name} pid {self.pid} {state}>"

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the main process still exists; a frozen one does."""
        return self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """The main process's exit status, negative for a signal; None while it lives."""
        return self._popen.poll()

    @property
    def log(self) -> str:
        """What this process has written so far (not what an earlier one wrote to the same file)."""
        with self.log_path.open("rb") as written:
            written.seek(self._log_start)
            return written.read().decode(errors="replace")

    def wait_for_log(self, text: str, timeout: float) -> str:
        """Return the first line of the log with `text` in it; TimeoutError with the log's end when none came.

        A process that ended without writing it is not waited for.
        """

        found: str | None = None

        def written_or_ended() -> bool:
            nonlocal found
            # Asked before the log is read: what a dying process wrote last counts.
            ended = not self.alive
            found = next((line for line in self.log.splitlines() if text in line), None)
            return found is not None or ended

        with suppress(TimeoutError):
            wait_until(written_or_ended, timeout, text)
        if found is None:
            raise TimeoutError(
                f"waited {timeout:g} s in vain: {self!r} to write {text!r}; its log ends:\n{self.tail()}"
            )
        return found

    def tail(self, lines: int = 40) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.splitlines()[-lines:])

    def terminate(self) -> None:
        """Ask the main process to end in order (SIGTERM). Does not wait; a frozen one obeys when thawed."""
        if self.alive:
            self._popen.terminate()

    def interrupt(self) -> None:
        """Send the main process what Ctrl-C sends (SIGINT). Does not wait."""
        if self.alive:
            self._popen.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End the whole group at once (SIGKILL) and reap the main process. May be called at any time."""
        self._signal_group(signal.SIGKILL)
        self._popen.wait()

    def freeze(self) -> None:
        """Stop the whole group where it stands (SIGSTOP): it keeps its sockets and its beliefs."""
        self._signal_group(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen group run on (SIGCONT)."""
        self._signal_group(signal.SIGCONT)

    def wait(self, timeout: float) -> int:
        """Return the main process's exit status; TimeoutError when it still lives after `timeout` seconds."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"waited {timeout:g} s in vain: {self!r} to end") from None

    def stop(self, timeout: float = 10) -> int:
        """Thaw, ask to end in order, after `timeout` seconds end the group; return the exit status."""
        self.thaw()
        self.terminate()
        try:
            return self.wait(timeout)
        except TimeoutError:
            self.kill()
            return self.wait(timeout)

    def _signal_group(self, number: signal.Signals) -> None:
        # Nobody may be left in the group (macOS says EPERM of a group of zombies).
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def beat(
    app: str,
    *,
    log: Path,
    name: str = "beat",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    scheduler: str | None = None,
    loglevel: str = "INFO",
    args: Sequence[str] = (),
) -> Process:
    """Start ``celery -A app beat`` without a pid file, so that several may run side by side in one directory.

    `scheduler` is the value of ``-S``; None leaves it to the app's `beat_scheduler`. Returns at once: wait
    for what the test needs (a log line, the leader), not for the start.
    """
    chosen = () if scheduler is None else ("-S", scheduler)
    return Process(
        [*_celery(app), "beat", "--pidfile=", "-l", loglevel, *chosen, *args],
        log=log,
        name=name,
        cwd=cwd,
        env=_celery_env(cwd, env),
    )


def worker(
    app: str,
    *,
    log: Path,
    name: str = "worker",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    pool: str = "solo",
    concurrency: int = 1,
    loglevel: str = "INFO",
    args: Sequence[str] = (),
) -> Process:
    """Start ``celery -A app worker`` named ``name@<host>``, without gossip and mingle (they cost a second).

    Returns at once: `wait_for_log("ready.", …)` says when it takes messages.
    """
    pools = ("-P", pool, "-c", str(concurrency))
    return Process(
        [
            *_celery(app),
            "worker",
            "-n",
            f"{name}@%h",
            "-l",
            loglevel,
            "--without-gossip",
            "--without-mingle",
            *pools,
            *args,
        ],
        log=log,
        name=name,
        cwd=cwd,
        env=_celery_env(cwd, env),
    )


def _celery(app: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "celery", "-A", app)


def _celery_env(cwd: Path | None, env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables of a celery command: `cwd` importable, output unbuffered, then the caller's."""
    found = {"PYTHONUNBUFFERED": "1"}
    if cwd is not None:
        paths = [str(cwd), os.environ.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return {**found, **(env or {})}

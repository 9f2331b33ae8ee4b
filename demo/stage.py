"""The processes of the demo: one server, one worker, and beats that come and go."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from celery import Celery

from celery_tzbeat.testing import processes
from celery_tzbeat.testing.processes import Process, wait_until
from celery_tzbeat.testing.server import LocalServer

from .verdict import Arrival, read_arrivals

ROOT = Path(__file__).parents[1]

#: What a beat logs when it has taken office.
LEADS = re.compile(r" leads with epoch (\d+)$", re.MULTILINE)


class Leadership(NamedTuple):
    """A beat that began to lead under an epoch. Whether it still does is not said."""

    beat: Process
    epoch: int


class Stage:
    """Everything that runs for the demo: started on entering, gone on leaving, whatever happened between."""

    def __init__(self, app: str, directory: Path) -> None:
        """Prepare; `app` is a module with a Celery app, as for ``celery -A``."""
        self.app_name = app
        self.beats: list[Process] = []
        self.frozen: set[Process] = set()
        self._directory = directory
        self._received = directory / "received.jsonl"
        self._stack = ExitStack()

    def __enter__(self) -> Stage:
        try:
            self.server = self._stack.enter_context(LocalServer())
            self.worker = self._stack.enter_context(
                processes.worker(
                    self.app_name,
                    log=self._directory / "worker.log",
                    cwd=ROOT,
                    env=self._env,
                    pool="threads",
                    concurrency=4,
                )
            )
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start_beat(self) -> Process:
        """Start one more beat; returns at once."""
        name = f"beat-{len(self.beats) + 1}"
        log = self._directory / f"{name}.log"
        started = processes.beat(self.app_name, log=log, name=name, cwd=ROOT, env=self._env)
        self.beats.append(self._stack.enter_context(started))
        return started

    def freeze(self, beat: Process) -> None:
        beat.freeze()
        self.frozen.add(beat)

    def thaw(self, beat: Process) -> None:
        beat.thaw()
        self.frozen.discard(beat)

    @property
    def standing(self) -> list[Process]:
        """The beats that are alive and not frozen."""
        return [beat for beat in self.beats if beat.alive and beat not in self.frozen]

    def leadership(self) -> Leadership | None:
        """Return who took office last, by the epochs in the beats' logs; epochs only ever rise."""
        found = [Leadership(beat, int(epoch)) for beat in self.beats for epoch in LEADS.findall(beat.log)]
        return max(found, key=lambda leadership: leadership.epoch, default=None)

    def arrivals(self) -> list[Arrival]:
        """Return what the tasks have written so far."""
        return read_arrivals(self._written)

    def drain(self) -> list[Arrival]:
        """End the beats, let the worker do what is queued, end it, and return all that arrived."""
        for beat in self.beats:
            beat.kill()
        with Celery(broker=self.server.url, set_as_current=False) as sender:
            # A run of no occurrence, behind everything else in the queue.
            sender.send_task("demo.app.record")
        wait_until(lambda: '"entry": null' in self._written, 30, "the worker to empty the queue")
        self.worker.stop(timeout=30)  # what it runs it ends
        return self.arrivals()

    @property
    def _written(self) -> str:
        """The whole lines in the tasks' file; one that is just being written is not among them."""
        return self._received.read_text().rpartition("\n")[0] if self._received.exists() else ""

    @property
    def _env(self) -> dict[str, str]:
        return {"TZBEAT_DEMO_BROKER": self.server.url, "TZBEAT_DEMO_RECEIVED": str(self._received)}

"""The ledgers under test: in memory, and on a server of our own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

import pytest
from scenes import Scene, scene_on

from celery_tzbeat.testing import ManualClock, MemoryRuns, MemoryStore
from celery_tzbeat.testing.server import LocalServer


@pytest.fixture(params=["memory", "redis"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    if request.param == "memory":
        clock = ManualClock(datetime(2026, 11, 30, 12, tzinfo=timezone.utc))
        memory = MemoryStore(clock)
        memory.take_office(1)
        yield Scene(
            memory,
            MemoryRuns(memory),
            clock.now(),
            lambda span: clock.advance(span.total_seconds() + 0.001),
            memory.wipe,
            lambda: memory.data.done.clear(),
        )
        return
    server: LocalServer = request.getfixturevalue("empty_server")
    made = scene_on(server.url)
    yield made
    made.store.close()
    made.runs.close()

"""The ledgers under test: in memory, and on a server of our own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest
import redis
from scenes import Scene

from celery_tzbeat.store.redis import RedisStore
from celery_tzbeat.store.redis_runs import RedisRuns
from celery_tzbeat.testing import ManualClock, MemoryRuns, MemoryStore
from celery_tzbeat.testing.server import LocalServer


def scene_on(url: str, *, timeout: float = 5.0) -> Scene:
    """Return a scene on a server; whoever asks closes its store and its runs."""
    store = RedisStore(
        url,
        "test/0",
        timeout=timeout,
        retention=timedelta(days=1),
        max_skew=timedelta(seconds=300),
        audit_max=10_000,
        presence=timedelta(seconds=150),
    )
    runs = RedisRuns(url, "test/0", timeout=timeout, retention=timedelta(days=1), audit_max=10_000)

    def let_pass(span: timedelta) -> None:
        until = store.time() + span
        while store.time() <= until:
            pass

    def wipe() -> None:
        with redis.Redis.from_url(url) as client:
            client.flushall()

    def forget_marks() -> None:
        with redis.Redis.from_url(url) as client:
            for key in client.keys("tzbeat:*:done:*"):
                client.delete(key)

    store.take_office(1)
    return Scene(store, runs, store.time().replace(microsecond=0), let_pass, wipe, forget_marks)


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

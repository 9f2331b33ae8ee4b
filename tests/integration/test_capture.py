"""Building messages against a real server: what reaches no queue is not called the task's choice."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
import redis
from celery import Celery
from kombu import Exchange, Queue

from celery_tzbeat.beat.capture import Capture
from celery_tzbeat.beat.dispatch import Builder, BuildFailed
from celery_tzbeat.beat.scheduler import Scheduler
from celery_tzbeat.model import Entry, Occurrence
from celery_tzbeat.schedules import every
from celery_tzbeat.testing.server import LocalServer

NOON = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)


@pytest.fixture
def builder(empty_server: LocalServer) -> Builder:
    app = Celery("proj", broker=empty_server.url, set_as_current=False)
    app.conf.task_queues = [Queue("news", Exchange("news", type="topic"), routing_key="news.#")]
    app.conf.task_default_queue = "news"
    app.conf.task_default_exchange_type = "topic"
    app.conf.task_default_routing_key = "news.sport"
    scheduler = Scheduler(app, lazy=True)
    builder = Builder(app, Capture(app, timeout=2), "proj/0", scheduler.apply_entry)
    scheduler.send_with(builder)
    return builder


def build(builder: Builder) -> int:
    entry = Entry("e", "proj.task", every(1))
    return len(builder.build(entry, Occurrence("e", NOON), epoch=1).parts)


def test_a_queue_whose_bindings_are_gone_is_unroutable_and_declared_anew(
    builder: Builder, empty_server: LocalServer
) -> None:
    assert build(builder) == 1
    with redis.Redis.from_url(empty_server.url) as client:
        client.delete("_kombu.binding.news")
    with pytest.raises(BuildFailed, match="reaches no queue"):
        build(builder)
    assert build(builder) == 1

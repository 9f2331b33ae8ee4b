"""Runs whose messages come over RabbitMQ: the same gate, other acknowledgements, a message put together from its parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from gated import Gated
from rabbit import ADDRESS

from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.testing.server import LocalServer


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_runs_over_rabbitmq_end_as_over_redis(
    make_project: Callable[[str], Any], server: LocalServer, vhost: str, pool: str
) -> None:
    project = make_project(f"amqp://guest:guest@{ADDRESS[0]}:{ADDRESS[1]}/{vhost}")
    conf: dict[str, Any] = {"result_backend": server.url, "task_default_queue": f"runs-{pool}"}
    gated = Gated(project, store=server.url, **conf)
    gated.app.conf.task_default_queue = f"runs-{pool}"
    gated.start_worker("one", pool=pool)
    gated.start_worker("two", pool=pool)
    gated.send("work", "done", 1.0)
    gated.send("work", "done", 1.0)  # a copy
    gated.send("retrying", "retried", 5)
    gated.send("retrying", "swallowed", 1, "throw=False")
    gated.send("broken", "dead")
    gated.wait_for_mark("done", "d")
    gated.wait_for_mark("retried", "d")
    gated.wait_for_mark("swallowed", "d")
    gated.wait_for_mark("dead", "x")
    assert len(gated.said("done", "start")) == 1
    assert [line["retries"] for line in gated.said("retried", "start")] == list(range(6))
    run = Parcel.from_bytes(gated.letters()["dead"].message).run
    assert json.loads(run.body) == [[], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    assert run.headers["id"] == "id-dead"
    assert run.routing_key == f"runs-{pool}"

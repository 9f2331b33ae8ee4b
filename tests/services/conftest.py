"""The service suite: beats on a real RabbitMQ, or on a Redis that is not the store. `tox run -e services`.

Nothing here is skipped: without a RabbitMQ on 127.0.0.1:5672 that `rabbitmqctl` can control, each test that uses it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from gated import Gated
from observe import Bench
from proxy import Proxy
from rabbit import ADDRESS, Inbox, virtual_host

from celery_tzbeat.testing.server import LocalServer


@pytest.fixture(scope="session")
def vhost() -> Iterator[str]:
    """A virtual host of this run alone."""
    with virtual_host() as name:
        yield name


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy before RabbitMQ, of this test alone."""
    with Proxy(ADDRESS) as proxy:
        yield proxy


@pytest.fixture
def bench(make_project: Callable[[str], Any], aof_server: LocalServer, vhost: str, proxy: Proxy) -> Iterator[Bench]:
    """An app on RabbitMQ behind the proxy, with a store whose data survive a kill, and all that looks at it."""
    project = make_project(f"amqp://guest:guest@127.0.0.1:{proxy.port}/{vhost}")
    bench = Bench(project, aof_server, f"proj/{vhost}", lambda queue: Inbox(vhost, queue))
    bench.inbox()
    yield bench
    project.kill_all()
    for inbox in bench.inboxes.values():
        inbox.close()


@pytest.fixture
def make_gated(make_project: Callable[[str], Any], server: LocalServer, vhost: str) -> Callable[..., Gated]:
    """Make projects on RabbitMQ whose workers have the worker half; each has a queue of its own, and its ledger beside."""

    def make(body: str = "", **conf: Any) -> Gated:
        conf = {"task_default_queue": f"runs-{uuid4().hex[:8]}", **conf}
        project = make_project(f"amqp://guest:guest@{ADDRESS[0]}:{ADDRESS[1]}/{vhost}")
        gated = Gated(project, store=server.url, body=body, result_backend=server.url, **conf)
        gated.app.conf.update({name: conf[name] for name in conf if name.startswith("task_")})
        return gated

    return make

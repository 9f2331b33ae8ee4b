"""pytest-celery's own API with a RabbitMQ node of the test's own, which is restarted, killed and paused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import vendor_tasks
from pytest_celery import CeleryBrokerCluster, CeleryTestNode, CeleryTestSetup, RabbitMQTestBroker, RedisTestBackend
from vendor_setup import *  # noqa: F403
from vendor_setup import PATIENCE, assert_each_once, more

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def celery_broker_cluster(celery_rabbitmq_broker: RabbitMQTestBroker) -> Iterator[CeleryBrokerCluster]:
    cluster = CeleryBrokerCluster(celery_rabbitmq_broker)
    yield cluster
    cluster.teardown()


@pytest.fixture
def ledger(celery_redis_backend: RedisTestBackend) -> dict[str, Any]:
    """The results' Redis keeps it, too."""
    return {"tzbeat_url": celery_redis_backend.config()["url"]}


def test_a_worker_that_is_killed_comes_back(celery_setup: CeleryTestSetup) -> None:
    assert celery_setup.ready(ping=True, control=True, docker=True)
    celery_setup.worker.kill()
    waiting = vendor_tasks.double.s(21).apply_async()
    celery_setup.worker.restart()
    assert waiting.get(timeout=PATIENCE) == 42


def test_a_broker_that_is_restarted_loses_nothing(celery_setup: CeleryTestSetup, celery_beat: CeleryTestNode) -> None:
    more(celery_setup.worker)
    celery_setup.broker.restart()
    more(celery_setup.worker)
    assert_each_once(celery_setup.worker)


def test_a_broker_that_is_killed_and_started_again_loses_nothing(
    celery_setup: CeleryTestSetup, celery_beat: CeleryTestNode
) -> None:
    more(celery_setup.worker)
    celery_setup.broker.kill()
    celery_setup.broker.restart()
    more(celery_setup.worker)
    assert_each_once(celery_setup.worker)


def test_a_broker_that_is_paused_for_longer_than_the_lease_loses_nothing(
    celery_setup: CeleryTestSetup, celery_beat: CeleryTestNode
) -> None:
    more(celery_setup.worker)
    celery_setup.broker.container.pause()
    celery_setup.worker.assert_log_does_not_exist("nothing writes this", timeout=4)
    celery_setup.broker.container.unpause()
    more(celery_setup.worker)
    assert_each_once(celery_setup.worker)

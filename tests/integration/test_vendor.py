"""pytest-celery's own API on processes: worker, beat and broker are killed, restarted and paused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import vendor_tasks
from pytest_celery import (
    CeleryBrokerCluster,
    CeleryTestNode,
    CeleryTestSetup,
    RedisContainer,
    RedisTestBroker,
    ping,
)
from vendor_setup import *  # noqa: F403
from vendor_setup import PATIENCE, assert_each_once, more

from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.vendor import BeatProcess

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def celery_broker_cluster(celery_redis_broker: RedisTestBroker) -> Iterator[CeleryBrokerCluster]:
    cluster = CeleryBrokerCluster(celery_redis_broker)
    yield cluster
    cluster.teardown()


@pytest.fixture
def default_redis_broker_command(default_redis_broker_cls: type[RedisContainer]) -> list[str]:
    """The ledger and the queues are on disk: a restart keeps them."""
    return default_redis_broker_cls.command("--appendonly", "yes", "--appendfsync", "always")


# ---- worker


def test_a_setup_is_ready_in_every_way(celery_setup: CeleryTestSetup) -> None:
    assert celery_setup.ready(ping=True, control=True, docker=True)
    assert len(celery_setup) == 3
    assert ping.s().apply_async().get(timeout=PATIENCE) == "pong"


def test_a_worker_has_its_own_name_and_processes(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    assert worker.hostname() in celery_setup.app.control.ping()[0]
    found = worker.get_running_processes_info(["pid", "cmdline"])
    assert any(worker.hostname().split("@")[1] in " ".join(process["cmdline"] or []) for process in found)


def test_a_worker_that_is_killed_comes_back(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    worker.kill()
    assert worker.container.status == "exited"
    waiting = vendor_tasks.double.s(21).apply_async()
    worker.restart()
    assert waiting.get(timeout=PATIENCE) == 42
    assert celery_setup.ready(ping=True)


def test_a_worker_that_is_told_to_end_ends_in_order(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    worker.kill("SIGTERM")
    worker.assert_log_exists("worker: Warm shutdown", timeout=PATIENCE)
    wait_until(lambda: worker.container.status == "exited", PATIENCE, "the worker to end")
    worker.restart(force=True)
    assert vendor_tasks.double.s(4).apply_async().get(timeout=PATIENCE) == 8


def test_a_worker_that_is_paused_goes_on(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    worker.container.pause()
    waiting = vendor_tasks.double.s(1).apply_async()
    worker.assert_log_does_not_exist("Task vendor_tasks.double", timeout=2)
    worker.container.unpause()
    assert waiting.get(timeout=PATIENCE) == 2


# ---- beat


def test_a_beat_leads_and_a_worker_runs_what_it_sends(
    celery_setup: CeleryTestSetup, celery_beat: CeleryTestNode
) -> None:
    assert celery_beat.ready()
    celery_beat.assert_log_exists("leads with epoch", timeout=PATIENCE)
    more(celery_setup.worker)
    assert_each_once(celery_setup.worker)


def test_a_beat_that_is_killed_and_restarted_sends_each_occurrence_once(
    celery_setup: CeleryTestSetup, celery_beat: CeleryTestNode
) -> None:
    more(celery_setup.worker)
    celery_beat.kill()
    celery_beat.restart()
    more(celery_setup.worker)
    assert_each_once(celery_setup.worker)


@pytest.fixture
def second_beat(
    celery_beat: CeleryTestNode, default_worker_env: dict[str, Any], tmp_path: Any, celery_setup: CeleryTestSetup
) -> Iterator[CeleryTestNode]:
    celery_beat.assert_log_exists("leads with epoch", timeout=PATIENCE)
    container = BeatProcess.launch(BeatProcess.command(), default_worker_env, tmp_path / "worker")
    node = CeleryTestNode(container, celery_setup.app)
    node.assert_log_exists("beat: Starting", timeout=PATIENCE)
    yield node
    node.teardown()


def test_the_second_beat_takes_over_from_a_killed_one(
    celery_setup: CeleryTestSetup, celery_beat: CeleryTestNode, second_beat: CeleryTestNode
) -> None:
    celery_beat.kill()
    second_beat.assert_log_exists("leads with epoch", timeout=PATIENCE)
    more(celery_setup.worker)
    assert_each_once(celery_setup.worker)


def test_the_second_beat_takes_over_from_a_paused_one_which_is_no_leader_when_it_wakes(
    celery_setup: CeleryTestSetup, celery_beat: CeleryTestNode, second_beat: CeleryTestNode
) -> None:
    celery_beat.container.pause()
    second_beat.assert_log_exists("leads with epoch", timeout=PATIENCE)
    more(celery_setup.worker)
    celery_beat.container.unpause()
    more(celery_setup.worker)
    assert_each_once(celery_setup.worker)


# ---- broker


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

"""What the tests by pytest-celery share: an app that beats each second, and what its worker was given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import vendor_tasks
from celery import Celery
from pytest_celery import CeleryBackendCluster, CeleryTestNode, CeleryTestSetup, RedisTestBackend

from celery_tzbeat.model import from_iso
from celery_tzbeat.testing.processes import wait_until
from celery_tzbeat.testing.vendor import *  # noqa: F403

PATIENCE = 60


@pytest.fixture
def celery_backend_cluster(celery_redis_backend: RedisTestBackend) -> Iterator[CeleryBackendCluster]:
    cluster = CeleryBackendCluster(celery_redis_backend)
    yield cluster
    cluster.teardown()


@pytest.fixture
def default_worker_tasks(default_worker_tasks: set[ModuleType]) -> set[ModuleType]:
    return {*default_worker_tasks, vendor_tasks}


@pytest.fixture
def ledger() -> dict[str, Any]:
    """Where the ledger is, where that is not the broker."""
    return {}


@pytest.fixture
def settings(ledger: dict[str, Any]) -> dict[str, Any]:
    """What the app says besides its broker and backend."""
    return {
        **ledger,
        "tzbeat_lease": 2,
        "tzbeat_policy": {"misfire_grace": 600},
        "beat_schedule": {"each second": {"task": "vendor_tasks.beaten", "schedule": "@every 1s"}},
    }


@pytest.fixture
def celery_setup_cls(settings: dict[str, Any]) -> type[CeleryTestSetup]:
    class Setup(CeleryTestSetup):
        @classmethod
        def update_app_config(cls, app: Celery) -> None:
            app.conf.update(settings)

    return Setup


def beaten(node: CeleryTestNode) -> list[datetime]:
    """The nominals that a worker was given, in the order of their starts."""
    return [from_iso(text) for text in re.findall(r"beaten by (\S+Z)", node.logs())]


def more(node: CeleryTestNode) -> None:
    """Wait until a worker was given three occurrences more."""
    before = len(beaten(node))
    wait_until(lambda: len(beaten(node)) >= before + 3, PATIENCE, "three occurrences more")


def assert_each_once(node: CeleryTestNode) -> None:
    """No nominal came twice, and none is missing between the first and the last but three (those may be under way)."""
    found = beaten(node)
    assert len(found) == len(set(found))
    settled = sorted(found)[:-3]
    assert all(later - earlier == timedelta(seconds=1) for earlier, later in pairwise(settled)), settled

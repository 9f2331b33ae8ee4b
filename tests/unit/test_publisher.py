"""Sending envelopes, as far as it can be seen without a RabbitMQ: the service suite and the contracts show the rest."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Queue

from celery_tzbeat.beat.publisher import Fate, Publisher
from celery_tzbeat.envelopes import Envelope
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.testing.server import LocalServer

pytestmark = pytest.mark.server


def envelope(queue: str, body: bytes = b"[[], {}, {}]", **headers: Any) -> Envelope:
    return Envelope(body, "application/json", "utf-8", headers, {"delivery_mode": 2}, None, "", queue)


@pytest.fixture
def make() -> Iterator[Callable[[str], Publisher]]:
    apps: list[Celery] = []
    publishers: list[Publisher] = []

    def make(url: str) -> Publisher:
        apps.append(Celery("proj", broker=url, set_as_current=False))
        publishers.append(Publisher(apps[-1], timeout=1))
        return publishers[-1]

    yield make
    for publisher in publishers:
        publisher.reset()
    for app in apps:
        app.close()


def test_a_transport_that_took_the_message_has_confirmed_it(make: Callable[[str], Publisher]) -> None:
    publisher, queue = make("memory://"), f"q-{uuid.uuid4().hex}"
    bodies = [b"one", b"\xff\x00two", "ärger".encode()]
    for body in bodies:
        assert publisher.publish(envelope(queue, body, number=1)) == (Fate.CONFIRMED, "")
    with Celery("proj", broker="memory://", set_as_current=False).connection_for_read() as connection:
        got = [Queue(queue)(connection.default_channel).get(no_ack=True) for _ in bodies]
    assert [message.body if isinstance(message.body, bytes) else message.body.encode() for message in got] == bodies
    assert got[0].headers == {"number": 1}


def test_sending_leaves_the_envelope_as_it_was(make: Callable[[str], Publisher]) -> None:
    one = envelope("q", x={"deep": 1})
    make("memory://").publish(one)
    assert one == envelope("q", x={"deep": 1})


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "amqp://127.0.0.1:1//"])
def test_a_broker_that_is_not_there_is_unknown_and_not_refused(make: Callable[[str], Publisher], url: str) -> None:
    publisher = make(url)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="the broker does not answer"):
            publisher.publish(envelope("q"))


def test_a_broker_that_comes_back_is_found(make: Callable[[str], Publisher], server: LocalServer) -> None:
    publisher = make(server.url)
    assert publisher.publish(envelope("q"))[0] is Fate.CONFIRMED
    server.stop()
    with pytest.raises(StoreUnavailable):
        publisher.publish(envelope("q"))
    server.restart()
    assert publisher.publish(envelope("q"))[0] is Fate.CONFIRMED


def test_a_frozen_broker_is_unknown_within_the_bound(make: Callable[[str], Publisher], server: LocalServer) -> None:
    publisher = make(server.url)
    assert publisher.publish(envelope("q"))[0] is Fate.CONFIRMED
    server.freeze()
    with pytest.raises(StoreUnavailable):
        publisher.publish(envelope("q"))
    server.thaw()
    assert publisher.publish(envelope("q"))[0] is Fate.CONFIRMED


def test_a_redis_broker_that_cannot_serve_at_the_moment_has_refused_nothing(
    make: Callable[[str], Publisher], make_server: Callable[..., LocalServer]
) -> None:
    """Else five seconds of a full memory, or of a failover, would bury what is due."""
    server = make_server()
    publisher = make(server.url)
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable, match=r"OOM|memory"):
            publisher.publish(envelope("q"))
        client.config_set("maxmemory", "0")
        assert publisher.publish(envelope("q"))[0] is Fate.CONFIRMED
        assert client.llen("q") == 1

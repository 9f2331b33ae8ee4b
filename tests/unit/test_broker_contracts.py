"""What the path of other brokers (claim, publish, confirm) relies on in kombu, py-amqp, Celery and billiard without their
promise. Each test names what to do should it fail one day.

The rest of such contracts is in test_contracts.py. What RabbitMQ itself does is tried in tests/services.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import amqp
import billiard
import pytest
from amqp_peer import ACK, BLOCKED, CONFIRM_SELECT, NACK, NOT_FOUND, QUEUE_DECLARE, RETURN, UNBLOCKED, Peer
from celery import Celery
from celery.beat import EmbeddedService
from celery.schedules import crontab
from kombu import Exchange, Queue
from kombu.transport.virtual import Channel as VirtualChannel
from kombu.utils.url import parse_url

from celery_tzbeat.beat.envelope import Recording, bounded_connection, drop
from celery_tzbeat.beat.publisher import Fate, Publisher
from celery_tzbeat.envelopes import Envelope
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import from_iso
from celery_tzbeat.testing.processes import wait_until

#: Bounds every exchange here, in seconds; and how long one may take that is bounded by it, on a busy machine.
TIMEOUT, SOON = 0.5, 3.0

MakeApp = Callable[..., Celery]


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    """Make apps that are put away after the test."""
    apps: list[Celery] = []

    def make(url: str, **conf: Any) -> Celery:
        app = Celery("proj", broker=url, set_as_current=False)
        app.conf.update(conf)
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.close()


@pytest.fixture
def record() -> Iterator[Callable[..., Envelope]]:
    """Record what Celery would send, as an envelope."""
    recordings: list[Recording] = []

    def record(app: Celery, **options: Any) -> Envelope:
        recordings.append(Recording(app, timeout=TIMEOUT))
        app.send_task("proj.task", (1, "ü"), {"k": None}, producer=recordings[-1].producer, retry=False, **options)
        (envelope,) = recordings[-1].take()
        return envelope

    yield record
    for recording in recordings:
        recording.reset()


def deaf() -> socket.socket:
    """A listener that accepts, as the system does, and never says a word."""
    return socket.create_server(("127.0.0.1", 0))


def published_soon(publisher: Publisher, envelope: Envelope) -> tuple[Fate, str]:
    """Publish as soon as the publisher has heard what it was told."""

    def attempt() -> tuple[Fate, str] | None:
        try:
            return publisher.publish(envelope)
        except StoreUnavailable:
            return None

    return wait_until(attempt, SOON, "the publisher to hear that it may publish again")


class TestExpiry:
    """Fallback: compute `expiration` of each message ourselves as it is sent."""

    def test_celery_makes_of_expires_a_header_with_the_instant_and_a_property_with_what_is_left(
        self, make_app: MakeApp, record: Callable[..., Envelope]
    ) -> None:
        now = datetime.now(timezone.utc)
        for expires in (60, now + timedelta(seconds=60)):
            envelope = record(make_app("memory://"), expires=expires)
            assert abs(from_iso(envelope.headers["expires"]) - now - timedelta(seconds=60)) < timedelta(seconds=5)
            assert 55_000 < int(envelope.properties["expiration"]) <= 60_000
        assert record(make_app("memory://"), expiration=7).properties["expiration"] == "7000"


class TestRecording:
    """Fallback for all of these: read the message in a `before_task_publish` receiver and prepare it from Celery's
    `app.amqp.as_task_v2`; or kombu's batch hook, which gets the same arguments."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"priority": 3},
            {"expires": 60},
            {"headers": {"x": [1]}, "serializer": "pickle"},
            {"queue": "topic", "routing_key": "news.sport"},
            {"compression": "zlib"},
        ],
        ids=["plain", "priority", "expires", "pickle", "topic", "compressed"],
    )
    def test_what_is_recorded_and_published_is_what_celery_would_have_sent(
        self, make_app: MakeApp, record: Callable[..., Envelope], options: dict[str, Any]
    ) -> None:
        topic = Queue("topic", Exchange("news", type="topic"), routing_key="news.#")
        app = make_app("memory://", task_queues=[Queue("celery"), topic])
        name = options.get("queue", "celery")

        def next_message() -> dict[str, Any]:
            with app.connection() as connection:
                connection.default_channel.queue_declare(name)
                message = connection.default_channel.basic_get(name, no_ack=True)
            assert message is not None
            properties = {k: v for k, v in message.properties.items() if k != "delivery_tag"}
            headers = {k: v for k, v in message.headers.items() if k != "expires"}
            kind = (message.content_type, message.content_encoding)
            return {"body": message.body, "headers": headers, "properties": properties, "kind": kind}

        with app.connection() as connection:
            app.send_task(
                "proj.task", (1, "ü"), {"k": None}, task_id="id", producer=app.amqp.Producer(connection), **options
            )
        expected = next_message()

        envelope = record(app, task_id="id", **options)
        kept = Envelope.from_dict(envelope.to_dict())
        publisher = Publisher(app, timeout=TIMEOUT)
        assert publisher.publish(kept) == (Fate.CONFIRMED, "")
        publisher.reset()
        found = next_message()
        for each in (expected, found):
            each["properties"].pop("reply_to")  # the name of this thread's own connection
        assert found == expected

    def test_a_producer_gives_six_parts_by_place_and_the_address_by_name(self, make_app: MakeApp) -> None:
        prepared: list[Any] = []
        published: list[Any] = []

        class Spying(VirtualChannel):
            def __init__(self) -> None:
                self.connection = None

            def prepare_message(self, *args: Any, **kwargs: Any) -> Any:
                prepared.append((len(args), kwargs))
                return "message"

            def basic_publish(self, *args: Any, **kwargs: Any) -> None:
                published.append((args, set(kwargs)))

        producer = make_app("memory://").amqp.Producer(Spying(), auto_declare=False)
        producer.publish({"a": 1}, exchange="", routing_key="celery", serializer="json", retry=False)
        assert prepared == [(6, {})]
        assert published == [
            (("message",), {"exchange", "routing_key", "mandatory", "immediate", "timeout", "confirm_timeout"})
        ]

    def test_a_queue_is_declared_once_in_the_life_of_a_connection(self, make_app: MakeApp) -> None:
        """kombu remembers in `connection.declared_entities`. Fallback: declare the queues ourselves as a term begins."""
        with Peer(ACK) as peer:
            app = make_app(peer.url)
            recording = Recording(app, timeout=TIMEOUT)
            for _ in range(2):
                app.send_task("proj.task", producer=recording.producer, retry=False)
            assert peer.heard.count(QUEUE_DECLARE) == 1
            recording.reset()
            app.send_task("proj.task", producer=recording.producer, retry=False)
            assert peer.heard.count(QUEUE_DECLARE) == 2
            recording.reset()
            assert peer.published == 0


class TestPublishing:
    """Fallback: whatever is no confirm counts as unknown, and the same id is sent again."""

    @pytest.mark.parametrize(
        ("says", "fate", "words"),
        [
            (ACK, Fate.CONFIRMED, ""),
            (NACK, Fate.NOT_SENT, "MessageNacked"),
            (NOT_FOUND, Fate.NOT_SENT, "NOT_FOUND - no exchange"),
            (RETURN + ACK, Fate.NOT_SENT, "returned as unroutable: exchange '', routing key 'celery'"),
        ],
        ids=["ack", "nack", "no-exchange", "returned"],
    )
    def test_what_the_broker_says_of_a_message(
        self, make_app: MakeApp, record: Callable[..., Envelope], says: Any, fate: Fate, words: str
    ) -> None:
        with Peer(says) as peer:
            app = make_app(peer.url)
            envelope = record(app)
            declared = peer.heard.count(QUEUE_DECLARE)
            publisher = Publisher(app, timeout=TIMEOUT)
            found, said = publisher.publish(envelope)
            assert found is fate
            assert words in said
            assert peer.published >= 1
            assert CONFIRM_SELECT in peer.heard, "`confirm_publish` is an option of kombu's transport"
            homeless = "unroutable" in words or "no exchange" in words
            assert (peer.heard.count(QUEUE_DECLARE) > declared) is homeless, "what Celery declares is declared again"
            publisher.reset()

    def test_a_broker_that_says_nothing_is_unknown_and_is_left_at_once(
        self, make_app: MakeApp, record: Callable[..., Envelope]
    ) -> None:
        """`confirm_timeout` and `read_timeout`. Fallback: set the timeout of the socket under it."""
        with Peer([]) as peer:
            app = make_app(peer.url)
            envelope = record(app)
            publisher = Publisher(app, timeout=TIMEOUT)
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="does not answer"):
                publisher.publish(envelope)
            assert time.monotonic() - began < SOON
            assert peer.published == 1, "no blind retry"

    def test_a_broker_that_blocks_who_publishes_gets_no_copies_until_it_does_not(
        self, make_app: MakeApp, record: Callable[..., Envelope]
    ) -> None:
        """`connection.on_blocked`, `on_unblocked`. Fallback: none; it gets a copy at each attempt."""
        says = [BLOCKED]
        with Peer(says) as peer:
            app = make_app(peer.url)
            envelope = record(app)
            publisher = Publisher(app, timeout=TIMEOUT)
            for _ in range(5):
                with pytest.raises(StoreUnavailable, match="blocks who publishes"):
                    publisher.publish(envelope)
            assert peer.published == 1
            says[:] = ACK
            peer.tell(UNBLOCKED)
            assert published_soon(publisher, envelope) == (Fate.CONFIRMED, "")
            assert peer.published == 2
            publisher.reset()

    def test_a_blocked_connection_that_is_lost_is_made_anew(
        self, make_app: MakeApp, record: Callable[..., Envelope]
    ) -> None:
        says = [BLOCKED]
        with Peer(says) as peer:
            app = make_app(peer.url)
            envelope = record(app)
            publisher = Publisher(app, timeout=TIMEOUT)
            with pytest.raises(StoreUnavailable, match="blocks who publishes"):
                publisher.publish(envelope)
            says[:] = ACK
            peer.hang_up()
            assert published_soon(publisher, envelope) == (Fate.CONFIRMED, "")
            publisher.reset()

    def test_a_connection_that_the_broker_closed_between_two_messages_makes_the_second_no_later(
        self, make_app: MakeApp, record: Callable[..., Envelope]
    ) -> None:
        """`Connection.drain_events(timeout=0)`. Fallback: a connection for each message that comes after a while."""
        with Peer(ACK) as peer:
            app = make_app(peer.url)
            envelope = record(app)
            publisher = Publisher(app, timeout=TIMEOUT)
            assert publisher.publish(envelope)[0] is Fate.CONFIRMED
            peer.hang_up()
            assert publisher.publish(envelope) == (Fate.CONFIRMED, "")
            publisher.reset()

    def test_a_connection_is_dropped_without_a_word_to_a_broker_that_says_none(self, make_app: MakeApp) -> None:
        """`Connection.collect`; `release` would wait for the answer. Fallback: close the socket under it."""
        with Peer([]) as peer:
            connection = bounded_connection(make_app(peer.url), TIMEOUT)
            _ = connection.default_channel
            heard = len(peer.heard)
            began = time.monotonic()
            drop(connection)
            assert time.monotonic() - began < TIMEOUT / 2
            assert not connection.connected
            assert len(peer.heard) == heard

    def test_py_amqp_keeps_those_who_want_returned_messages(self, make_app: MakeApp) -> None:
        with Peer(ACK) as peer:
            connection = bounded_connection(make_app(peer.url), TIMEOUT)
            assert connection.default_channel.events["basic_return"] == set()
            drop(connection)

    def test_refusals_are_errors_of_the_channel_and_a_lost_wire_is_none(self) -> None:
        for refusal in (amqp.exceptions.NotFound, amqp.exceptions.AccessRefused, amqp.exceptions.PreconditionFailed):
            assert issubclass(refusal, amqp.exceptions.ChannelError)
        for lost in (amqp.exceptions.ConnectionForced, amqp.exceptions.RecoverableConnectionError, OSError):
            assert not issubclass(lost, amqp.exceptions.ChannelError)
        assert issubclass(amqp.exceptions.MessageNacked, Exception)
        assert issubclass(amqp.exceptions.FrameSyntaxError, Exception)


class TestConnecting:
    """Fallback: try the address with a socket of our own before kombu does."""

    @pytest.mark.parametrize("scheme", ["amqp", "redis"])
    def test_a_broker_that_refuses_is_asked_once(self, make_app: MakeApp, scheme: str) -> None:
        began = time.monotonic()
        with pytest.raises(Exception, match=r"(?i)refused"):
            bounded_connection(make_app(f"{scheme}://127.0.0.1:9//"), TIMEOUT)
        assert time.monotonic() - began < TIMEOUT * 2

    def test_a_broker_that_takes_the_connection_and_says_nothing_is_given_up(self, make_app: MakeApp) -> None:
        with deaf() as listener:
            began = time.monotonic()
            with pytest.raises(Exception, match=r"(?i)timed out"):
                bounded_connection(make_app(f"amqp://127.0.0.1:{listener.getsockname()[1]}//"), TIMEOUT)
            assert time.monotonic() - began < SOON

    def test_the_next_of_several_brokers_is_taken_where_the_first_refuses_or_hangs(self, make_app: MakeApp) -> None:
        """`Connection.alt` and `maybe_switch_next`. Fallback: a connection for each URL of our own."""
        with Peer(ACK) as peer, deaf() as listener:
            hangs = f"amqp://127.0.0.1:{listener.getsockname()[1]}//"
            for first in ("amqp://127.0.0.1:9//", hangs):
                connection = bounded_connection(make_app(f"{first};{peer.url}"), TIMEOUT)
                assert connection.port == peer.port
                drop(connection)

    @pytest.mark.parametrize(
        ("url", "transport"),
        [
            ("redis://127.0.0.1:9/0", "redis"),
            ("rediss://127.0.0.1:9/0", "rediss"),
            ("sentinel://127.0.0.1:9/0", "sentinel"),
            ("amqp://127.0.0.1:9//", "amqp"),
            ("amqps://127.0.0.1:9//", "amqps"),
            ("pyamqp://127.0.0.1:9//", "pyamqp"),
            ("memory://", "memory"),
        ],
    )
    def test_a_connection_names_its_transport_by_the_urls_scheme(
        self, make_app: MakeApp, url: str, transport: str
    ) -> None:
        """Which bounds it is given depends on it. Fallback: read the scheme from the URL."""
        assert make_app(url).connection_for_write().transport_cls == transport

    def test_a_url_comes_apart(self) -> None:
        """Fallback: `urllib.parse`."""
        parts = parse_url("redis://user:secret@host:6380/3")
        assert {"transport": "redis", "hostname": "host", "port": 6380, "virtual_host": "3"}.items() <= parts.items()


class TestCelery:
    def test_defaults_are_the_last_of_the_confs_maps(self, make_app: MakeApp) -> None:
        """So it is told whether the user has set `beat_scheduler`. Fallback: compare with the default's value."""
        app = make_app("memory://", beat_max_loop_interval=7)
        assert app.conf.beat_max_loop_interval == 7  # reads the configuration
        *given, defaults = app.conf.maps
        assert "beat_scheduler" in defaults
        assert any("beat_max_loop_interval" in source for source in given)
        assert not any("beat_scheduler" in source for source in given)

    def test_a_crontab_keeps_its_clock_and_its_app(self, make_app: MakeApp) -> None:
        """Fallback: keep both ourselves; rules that are made from others lose them otherwise."""
        app = make_app("memory://")
        schedule = crontab(nowfun=time.time, app=app)
        assert schedule.nowfun is time.time
        assert schedule._app is schedule.app is app

    def test_a_result_backend_says_whether_results_expire_by_themselves(self, make_app: MakeApp) -> None:
        """Fallback: leave Celery's nightly entry in for every backend; it does no harm."""
        assert make_app("memory://", result_backend="redis://127.0.0.1:9/0").backend.supports_autoexpire is True
        assert make_app("memory://", result_backend="file:///tmp").backend.supports_autoexpire is False


class TestBilliard:
    def test_a_process_knows_who_made_it(self, make_app: MakeApp) -> None:
        """An embedded beat ends with its worker. Fallback: `os.getppid()`, which is 1 where the worker has gone already."""
        assert EmbeddedService(make_app("memory://"))._parent_pid == os.getpid()
        assert billiard.current_process().name == multiprocessing.current_process().name == "MainProcess"

"""What celery_tzbeat relies on in Celery, kombu, redis-py and billiard without their promise.

Each test names what to do should it fail one day.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import celery.beat
import kombu
import pytest
import redis
from billiard import current_process
from celery import Celery
from celery._state import _set_task_join_will_block, task_join_will_block
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.transport import redis as kombu_redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_tzbeat import Scheduler
from celery_tzbeat.beat.capture import Capture, CaptureChannel, SentinelCaptureChannel
from celery_tzbeat.beat.dispatch import Builder, no_subscriptions_for_results
from celery_tzbeat.entries import read_entries
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.leases.redis import RedisSubscription
from celery_tzbeat.model import Occurrence
from celery_tzbeat.settings import Settings
from celery_tzbeat.store.client import make_client, unavailable
from celery_tzbeat.testing.server import LocalServer

pytestmark = pytest.mark.server

NOON = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)

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
def make_capture() -> Iterator[Callable[[Celery], Capture]]:
    captures: list[Capture] = []

    def make(app: Celery) -> Capture:
        captures.append(Capture(app, timeout=1))
        return captures[-1]

    yield make
    for capture in captures:
        capture.reset()


def news(app: Celery) -> None:
    """Two queues behind a topic, declared."""
    topic = Exchange("news", type="topic")
    app.conf.task_queues = [
        Queue("celery"),
        Queue("all", topic, routing_key="news.#"),
        Queue("sport", topic, routing_key="news.sport"),
        Queue("brief", Exchange("brief"), routing_key="brief", expires=60),
    ]
    with app.connection() as connection:
        for queue in app.amqp.queues.values():
            queue.bind(connection).declare()


class TestKombu:
    """Fallback for all of these: kombu's batch hook, `basic_publish(…, _publish_batch=…)`, which hands over the same
    commands; or the path of other brokers: claim, publish, confirm."""

    @pytest.mark.parametrize(
        "options",
        [{}, {"priority": 6}, {"queue": "all", "routing_key": "news.sport"}, {"queue": "brief"}],
        ids=["plain", "priority", "topic", "expiring-queue"],
    )
    @pytest.mark.parametrize("prefix", ["", "pre:"])
    def test_put_writes_through_conn_or_acquire_what_capture_keeps(
        self,
        empty_server: LocalServer,
        make_app: MakeApp,
        make_capture: Callable[[Celery], Capture],
        options: dict[str, Any],
        prefix: str,
    ) -> None:
        app = make_app(empty_server.url, broker_transport_options={"global_keyprefix": prefix})
        news(app)
        capture = make_capture(app)
        with redis.Redis.from_url(empty_server.url) as client:

            def lists() -> dict[bytes, list[Any]]:
                keys = [key for key in client.keys("*") if client.type(key) == b"list"]
                return {key: [stripped(text) for text in client.lrange(key, 0, -1)] for key in keys}

            with app.connection() as connection:
                producer = app.amqp.Producer(connection)
                app.send_task("proj.task", (1,), task_id="id", producer=producer, **options)
            expected = lists()
            expiring = {key for key in expected if client.pttl(key) > 0}
            assert expected
            for key in expected:
                client.delete(key)

            app.send_task("proj.task", (1,), task_id="id", producer=capture.producer, **options)
            assert lists() == {}, "capture must write nothing by itself"
            commands = capture.take()
            for command in commands:
                client.execute_command(command.name, *command.args)
            assert lists() == expected
            assert {key for key in expected if client.pttl(key) > 0} == expiring
            assert set(expected) <= {key for command in commands for key in command.keys}
            assert all(key.startswith(prefix.encode()) for key in expected)

    def test_put_fanout_publishes_through_conn_or_acquire(
        self, empty_server: LocalServer, make_app: MakeApp, make_capture: Callable[[Celery], Capture]
    ) -> None:
        app = make_app(empty_server.url, task_send_sent_event=True)
        capture = make_capture(app)
        app.send_task("proj.task", producer=capture.producer)
        names = [command.name for command in capture.take()]
        assert sorted(names) == ["LPUSH", "PUBLISH"]

    def test_connparams_reach_the_pool_and_bound_each_call(
        self, empty_server: LocalServer, make_app: MakeApp, make_capture: Callable[[Celery], Capture]
    ) -> None:
        capture = make_capture(make_app(empty_server.url))
        client = capture.channel._create_client()
        given = client.connection_pool.connection_kwargs
        assert given["socket_timeout"] == given["socket_connect_timeout"] == 1
        assert isinstance(given["retry"], Retry)
        assert given["retry"]._retries == 0
        assert isinstance(given["retry"]._backoff, NoBackoff)
        assert capture.broker_answers()

    def test_a_broker_that_refuses_is_asked_once(
        self, make_app: MakeApp, make_capture: Callable[[Celery], Capture]
    ) -> None:
        capture = make_capture(make_app("redis://127.0.0.1:9/0"))
        began = time.monotonic()
        with pytest.raises(OperationalError):
            _ = capture.producer
        assert time.monotonic() - began < 1, "kombu waits 2 s and more between its attempts"
        assert not capture.broker_answers()

    def test_the_seams_are_where_capture_overrides_them(self) -> None:
        for channel, kombus in (
            (CaptureChannel, kombu_redis.Channel),
            (SentinelCaptureChannel, kombu_redis.SentinelChannel),
        ):
            for name in ("_put", "_put_fanout", "_connparams", "conn_or_acquire"):
                classes = [cls for cls in channel.__mro__ if name in vars(cls)]
                assert "celery_tzbeat" in classes[0].__module__, f"{channel.__name__}.{name} is not ours"
                assert hasattr(kombus, name), f"kombu has no {kombus.__name__}.{name} any more"
        assert callable(kombu_redis.Channel._create_client)
        assert callable(kombu_redis.Channel._q_for_pri)
        assert isinstance(kombu_redis.Channel.global_keyprefix, str)

    def test_a_prefix_is_put_before_the_keys_of_all_commands_that_are_captured(self) -> None:
        # Capture puts the prefix there itself; kombu's client must agree, or workers look elsewhere.
        prefixed = set(kombu_redis.GlobalKeyPrefixMixin.PREFIXED_SIMPLE_COMMANDS)
        assert {"LPUSH", "PUBLISH", "RPOP", "SMEMBERS"} <= prefixed
        # Before 5.7 kombu knows no queues that expire, and so sends no PEXPIRE.
        assert "PEXPIRE" in prefixed or kombu.VERSION < (5, 7)


def stripped(text: bytes) -> dict[str, Any]:
    """A message without its delivery tag, which is fresh in each."""
    message = json.loads(text)
    assert message["properties"].pop("delivery_tag")
    message["headers"].pop("origin")
    return dict(message)


class TestCelery:
    def test_beat_does_not_subscribe_to_the_results_of_what_it_sends(self, make_app: MakeApp) -> None:
        """Fallback: a thread-local result backend that ignores `on_task_call`, or `ignore_result` for each message."""
        before = task_join_will_block()
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            app = make_app("redis://127.0.0.1:9/0", result_backend=f"redis://127.0.0.1:{deaf.getsockname()[1]}/0")
            try:
                no_subscriptions_for_results()
                assert task_join_will_block()
                app.backend.on_task_call(None, "id")  # would connect, and wait for an answer
            finally:
                _set_task_join_will_block(before)
            deaf.settimeout(0.1)
            with pytest.raises(TimeoutError):
                deaf.accept()

    def test_apply_entry_swallows_and_hands_the_producer_to_apply_async(self, make_app: MakeApp) -> None:
        """Fallback: build with `apply_async` alone, and tell Sentry's users that their monitors see nothing."""
        app = make_app("redis://127.0.0.1:9/0")
        seen: dict[str, Any] = {}

        class Failing(celery.beat.Scheduler):
            def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
                seen.update(producer=producer, advance=advance)
                raise RuntimeError("on purpose")

        entry = celery.beat.ScheduleEntry(name="e", task="proj.task", schedule=1.0, app=app)
        producer = object()
        Failing(app, lazy=True).apply_entry(entry, producer=producer)
        assert seen == {"producer": producer, "advance": False}

    def test_a_service_ticks_at_once_again_after_0_and_closes_when_told_to_end(self, make_app: MakeApp) -> None:
        """Fallback: wait in `tick` and return a small positive number."""
        calls: list[str] = []

        class Recording(celery.beat.Scheduler):
            def setup_schedule(self) -> None:
                calls.append("setup_schedule")

            def tick(self, *args: Any, **kwargs: Any) -> float:
                calls.append("tick")
                if calls.count("tick") == 3:
                    raise SystemExit  # as from the handler of a signal
                return 0.0

            def should_sync(self) -> bool:
                calls.append("should_sync")
                return False

            def close(self) -> None:
                calls.append("close")

        celery.beat.Service(make_app("redis://127.0.0.1:9/0"), scheduler_cls=Recording).start()
        assert calls == ["setup_schedule", "tick", "tick", "tick", "close"]

    def test_sigterm_and_sigint_call_close_inside_the_handler_and_sighup_does_not(self, make_app: MakeApp) -> None:
        """Fallback: handlers of our own, set at the first tick."""
        closed: list[str] = []
        service = celery.beat.Service(make_app("redis://127.0.0.1:9/0"), scheduler_cls=celery.beat.Scheduler)
        service.sync = lambda: closed.append("closed")
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            make_app("redis://127.0.0.1:9/0").Beat(pidfile=None).install_sync_handler(service)
            for number in (signal.SIGTERM, signal.SIGINT):
                handler = signal.getsignal(number)
                assert callable(handler)
                with pytest.raises(SystemExit):
                    handler(number, None)
            assert closed == ["closed", "closed"]
            assert signal.getsignal(signal.SIGHUP) == before[signal.SIGHUP]
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def test_the_banner_makes_a_lazy_scheduler_and_asks_for_its_info(self, make_app: MakeApp) -> None:
        """Fallback: none needed; the banner would merely say less."""
        app = make_app("redis://127.0.0.1:9/0")
        service = celery.beat.Service(app, scheduler_cls=Scheduler)
        assert "tzbeat -> namespace proj/0" in app.Beat(pidfile=None).startup_info(service)
        service.get_scheduler(lazy=True).close()

    def test_an_embedded_beat_is_a_process_of_another_name(self, make_app: MakeApp) -> None:
        """Fallback: compare os.getppid() with the pid of the `worker_init` signal."""
        assert current_process().name == "MainProcess" == multiprocessing.current_process().name
        embedded = celery.beat.EmbeddedService(make_app("redis://127.0.0.1:9/0"))
        assert embedded.name == "Beat"
        assert not isinstance(embedded, threading.Thread)

    def test_a_class_level_patch_of_apply_entry_sees_each_send(
        self,
        empty_server: LocalServer,
        make_app: MakeApp,
        make_capture: Callable[[Celery], Capture],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Sentry patches celery.beat.Scheduler like this, and puts its check-in into the entry's headers.

        Fallback: call the patched function ourselves.
        """
        original = celery.beat.Scheduler.apply_entry
        seen: list[str] = []

        def patched(*args: Any, producer: Any, **kwargs: Any) -> Any:
            scheduler, entry = args
            assert scheduler.app is app
            assert producer is capture.producer
            seen.append(entry.name)
            headers = entry.options.pop("headers", {})
            entry.options["headers"] = {**headers, "sentry-monitor-slug": entry.name, "check-in": len(seen)}
            return original(*args, producer=producer, **kwargs)

        monkeypatch.setattr(celery.beat.Scheduler, "apply_entry", patched)
        schedule = {"daily": {"task": "proj.task", "schedule": 60.0, "options": {"headers": {"own": [1]}}}}
        app = make_app(empty_server.url, beat_schedule=schedule)
        capture = make_capture(app)
        scheduler = Scheduler(app, lazy=True)
        builder = Builder(app, capture, "proj/0", scheduler.apply_entry)
        scheduler.send_with(builder)
        entry = read_entries(app, Settings.read(app)).entries["daily"]

        for number in (1, 2):
            message = builder.build(entry, Occurrence("daily", NOON), epoch=number)
            (command,) = message.parts
            headers = json.loads(command.args[1])["headers"]
            assert headers["check-in"] == number
            assert headers["sentry-monitor-slug"] == "daily"
            assert headers["own"] == [1]
            assert headers["meta"]["tzbeat"]["epoch"] == number
        assert seen == ["daily", "daily"]
        assert schedule["daily"]["options"] == {"headers": {"own": [1]}}, "nothing is written into the user's own"


class TestRedisPy:
    def test_a_subscription_has_a_socket_to_wait_for(self, empty_server: LocalServer) -> None:
        """Fallback: the elector asks once a second; a hand-over then takes so long."""
        subscription = RedisSubscription(lambda: make_client(empty_server.url, timeout=1), "channel")
        try:
            assert subscription.fileno() == -1
            assert subscription.drain()
            assert subscription.fileno() > 0
        finally:
            subscription.close()
        assert subscription.fileno() == -1

    def test_a_connection_is_made_where_its_host_and_port_say_when_it_connects(self, server: LocalServer) -> None:
        """Fallback: none; connections to the owner of a cluster's slot stand on it (`store.cluster`)."""
        connection = redis.Connection(host="127.0.0.1", port=1, socket_timeout=5)
        assert connection._sock is None
        connection.port = server.port
        connection.connect()
        first = connection._sock
        assert first is not None
        connection.port = 1
        connection.connect()
        assert connection._sock is first, "it has connected anew"
        connection.disconnect()
        assert connection._sock is None

    def test_an_error_that_says_not_now_loses_its_code_and_is_told_by_its_class(self, server: LocalServer) -> None:
        """Fallback: compare the texts, as for what Redis 6.2 says from inside a script: it puts words before the code."""

        def is_told(caught: Any, kind: type[Exception], code: str) -> bool:
            return isinstance(caught.value, kind) is not (f"-{code} " in str(caught.value))

        with make_client(server.url, timeout=1) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "9")
            for call in (lambda: client.set("key", 1), lambda: client.eval("return redis.call('SET', 'k', 1)", 0)):
                with pytest.raises(redis.exceptions.ResponseError) as caught:
                    call()
                assert is_told(caught, redis.exceptions.ReadOnlyError, "READONLY")
                assert isinstance(unavailable(client, caught.value), StoreUnavailable)

            client.execute_command("REPLICAOF", "NO", "ONE")
            client.config_set("maxmemory", "1")
            for call in (lambda: client.set("key", 1), lambda: client.eval("return redis.call('SET', 'k', 1)", 0)):
                with pytest.raises(redis.exceptions.ResponseError) as full:
                    call()
                assert is_told(full, redis.exceptions.OutOfMemoryError, "OOM")
                assert isinstance(unavailable(client, full.value), StoreUnavailable)

            client.config_set("maxmemory", "0")
            client.config_set("min-replicas-to-write", "1")
            with pytest.raises(redis.exceptions.ResponseError, match="NOREPLICAS") as alone:
                client.set("key", 1)
            assert isinstance(unavailable(client, alone.value), StoreUnavailable)

            client.config_set("min-replicas-to-write", "0")
            client.lpush("list", 1)
            with pytest.raises(redis.exceptions.ResponseError) as wrong:
                client.get("list")
            assert unavailable(client, wrong.value) is None

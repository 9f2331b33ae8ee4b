"""A message kept in the ledger and sent later is the message that Celery would have sent."""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Producer, Queue

from celery_tzbeat.beat.envelope import Recording, RecordingChannel, sqs_bounds, why_no_connection
from celery_tzbeat.envelopes import Envelope, Parcel

UTC = timezone.utc
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def envelope(**changes: Any) -> Envelope:
    values: dict[str, Any] = {
        "body": b"[[], {}, {}]",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": {"task": "proj.add", "expires": None, "eta": None},
        "properties": {"correlation_id": "id", "delivery_mode": 2},
        "priority": None,
        "exchange": "",
        "routing_key": "celery",
    }
    return Envelope(**{**values, **changes})


def kept(*envelopes: Envelope, counted: tuple[str, ...] = (), built_at: datetime = NOW) -> Parcel:
    """Return a parcel as it comes back from the ledger."""
    return Parcel.from_bytes(Parcel(envelopes, built_at, counted).to_bytes())


# ---- kept and read again


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"body": b""},
        {"body": bytes(range(256)), "content_type": "application/x-python-serialize", "content_encoding": "binary"},
        {"body": pickle.dumps({"a": datetime(2026, 1, 1)})},
        {"content_type": None, "content_encoding": None},
        {"priority": 0},
        {"priority": 9},
        {"exchange": "news", "routing_key": "sport.football"},
        {"headers": {}},
        {"headers": {"nothing": None, "yes": True, "number": 1.5, "big": 2**70, "text": "ärger \U0001f4a3\n\0"}},
        {"headers": {"when": NOW, "day": NOW.date(), "id": uuid.UUID(int=7), "raw": b"\xff\x00", "words": b"utf-8"}},
        {"headers": {"meta": {"tzbeat": {"deep": [1, {"deeper": [None, "x"]}]}}}},
        {"properties": {"expiration": "1500", "reply_to": "somebody", "headers": {}}},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_an_envelope_is_kept_as_it_is(changes: dict[str, Any]) -> None:
    one = envelope(**changes)
    assert kept(one).envelopes == (one,)


def test_a_parcel_keeps_its_envelopes_in_order_with_what_is_counted_and_from_when() -> None:
    one, other = envelope(body=b"one"), envelope(body=b"other")
    built_at = NOW + timedelta(microseconds=123_456)
    assert kept(one, other, counted=("expires",), built_at=built_at) == Parcel((one, other), built_at, ("expires",))


def test_a_parcel_is_text_that_says_its_version() -> None:
    assert json.loads(Parcel((envelope(),), NOW, ()).to_bytes())["v"] == 1


@pytest.mark.parametrize("bad", [object(), {1, 2}, timedelta(seconds=1)])
def test_what_cannot_be_kept_is_refused_when_it_is_kept(bad: object) -> None:
    with pytest.raises(TypeError):
        Parcel((envelope(headers={"bad": bad}),), NOW, ()).to_bytes()


# ---- sent later: what was given as a duration is counted anew


def at(parcel: Parcel, later: timedelta) -> dict[str, Any]:
    (sent,) = parcel.at(NOW + later)
    return sent.headers


def test_what_was_given_as_a_duration_is_counted_from_when_it_is_sent() -> None:
    headers = {"expires": "2026-11-30T12:01:00+00:00", "eta": "2026-11-30T13:00:30+01:00"}
    parcel = kept(envelope(headers=headers), counted=("expires", "eta"))
    assert at(parcel, timedelta(hours=2)) == {"expires": "2026-11-30T14:01:00Z", "eta": "2026-11-30T14:00:30Z"}


def test_what_was_given_as_an_instant_stays() -> None:
    headers = {"expires": "2026-11-30T12:01:00+00:00", "eta": "2026-11-30T13:00:30+01:00"}
    assert at(kept(envelope(headers=headers)), timedelta(hours=2)) == headers
    moved = at(kept(envelope(headers=headers), counted=("eta",)), timedelta(hours=2))
    assert moved["expires"] == headers["expires"]


def expiration(parcel: Parcel, later: timedelta) -> str:
    (sent,) = parcel.at(NOW + later)
    return str(sent.properties["expiration"])


def test_how_long_the_broker_keeps_a_message_agrees_with_its_header() -> None:
    parts = {"headers": {"expires": "2026-11-30T12:01:00Z"}, "properties": {"expiration": "60000"}}
    instant, duration = kept(envelope(**parts)), kept(envelope(**parts), counted=("expires",))
    assert expiration(duration, timedelta(minutes=10)) == "60000"
    assert expiration(instant, timedelta()) == "60000"
    assert expiration(instant, timedelta(seconds=20.5)) == "39500"
    assert expiration(instant, timedelta(minutes=10)) == "0"
    assert expiration(instant, -timedelta(seconds=1)) == "61000"


def test_a_replay_has_no_end_in_its_queue_and_a_redispatch_has_the_old_one() -> None:
    parts = {"headers": {"expires": "2026-11-30T12:01:00Z"}, "properties": {"expiration": "60000", "reply_to": "r"}}
    parcel = Parcel((envelope(**parts),), NOW, ())
    anew, again = parcel.anew(dispatch=2, task_id="two").at(NOW)[0], parcel.again(dispatch=2, retries=0).at(NOW)[0]
    assert anew.properties == {"reply_to": "r", "correlation_id": "two"}
    assert again.properties == {"expiration": "60000", "reply_to": "r"}


def test_an_expiration_that_the_entry_gave_itself_is_counted_anew() -> None:
    parcel = kept(envelope(properties={"expiration": "60000"}))
    assert expiration(parcel, timedelta(minutes=10)) == "60000"


def test_a_sender_whose_clock_is_behind_counts_from_its_own_now() -> None:
    parcel = kept(envelope(headers={"expires": "2026-11-30T12:01:00Z"}), counted=("expires",))
    assert at(parcel, -timedelta(seconds=20)) == {"expires": "2026-11-30T12:00:40Z"}


def test_headers_that_are_not_there_are_not_made() -> None:
    assert at(kept(envelope(headers={"expires": None}), counted=("expires", "eta")), timedelta(hours=1)) == {
        "expires": None
    }


def test_sending_changes_nothing_in_the_parcel() -> None:
    parcel = kept(envelope(headers={"expires": "2026-11-30T12:01:00Z"}), counted=("expires",))
    assert parcel.at(NOW + timedelta(hours=1)) == parcel.at(NOW + timedelta(hours=1))
    assert parcel.envelopes[0].headers == {"expires": "2026-11-30T12:01:00Z"}


# ---- captured from kombu


@pytest.fixture
def channel() -> Iterator[Any]:
    with Connection("memory://") as connection:
        yield connection.default_channel


def test_a_producer_publishes_into_the_recording_and_declares_at_the_broker(channel: Any) -> None:
    recording = RecordingChannel(channel)
    queue = Queue(f"q-{uuid.uuid4().hex}", Exchange(f"x-{uuid.uuid4().hex}", type="direct"), routing_key="sport")
    Producer(recording, auto_declare=False).publish(
        {"a": 1},
        exchange=queue.exchange,
        routing_key="sport",
        serializer="json",
        priority=4,
        headers={"x": "ü"},
        expiration=1.5,
        correlation_id="c",
        declare=[queue],
    )
    assert recording.captured == [
        Envelope(
            body=b'{"a": 1}',
            content_type="application/json",
            content_encoding="utf-8",
            headers={"x": "ü"},
            properties={"delivery_mode": 2, "expiration": "1500", "correlation_id": "c"},
            priority=4,
            exchange=queue.exchange.name,
            routing_key="sport",
        )
    ]
    assert channel.basic_get(queue.name) is None
    assert queue(channel).queue_declare(passive=True).queue == queue.name


@pytest.mark.parametrize(
    "options",
    [
        {"serializer": "json"},
        {"serializer": "pickle"},
        {"serializer": "json", "compression": "zlib"},
        {"serializer": "json", "priority": 7, "headers": {"deep": {"er": [None]}}},
        {"content_type": "text/plain", "content_encoding": "utf-8"},
        {"content_type": "application/data", "content_encoding": "binary"},
    ],
    ids=lambda options: ",".join(map(str, options.values())),
)
def test_what_is_sent_from_the_recording_is_what_would_have_been_sent(channel: Any, options: dict[str, Any]) -> None:
    body: Any = {"words": "ärger", "list": [1, 2]}
    if "content_encoding" in options:
        body = b"\xff\x00raw" if options["content_encoding"] == "binary" else "ärger"
    queue = f"q-{uuid.uuid4().hex}"
    channel.queue_declare(queue)
    recording = RecordingChannel(channel)
    for target in (channel, recording):
        Producer(target, auto_declare=False).publish(body, exchange="", routing_key=queue, **options)
    (recorded,) = recording.captured
    (found,) = kept(recorded).at(NOW)
    message = channel.prepare_message(
        found.body, found.priority, found.content_type, found.content_encoding, found.headers, found.properties
    )
    channel.basic_publish(message, exchange=found.exchange, routing_key=found.routing_key)
    first, second = (channel.basic_get(queue, no_ack=True) for _ in range(2))
    assert first.body == second.body
    assert first.headers == second.headers
    assert (first.content_type, first.content_encoding) == (second.content_type, second.content_encoding)
    tags = ("delivery_tag",)
    assert {k: v for k, v in first.properties.items() if k not in tags} == {
        k: v for k, v in second.properties.items() if k not in tags
    }
    assert first.decode() == second.decode() if options.get("serializer") != "pickle" else first.body == second.body


@pytest.mark.parametrize("kind", ["direct", "topic"])
def test_an_exchange_of_one_test_is_none_of_the_next_ones(channel: Any, kind: str) -> None:
    Exchange("news", type=kind)(channel).declare()


def test_what_is_changed_after_it_was_recorded_does_not_change_the_record(channel: Any) -> None:
    recording, headers = RecordingChannel(channel), {"x": 1}
    Producer(recording, auto_declare=False).publish("x", exchange="", routing_key="q", headers=headers)
    headers["x"] = 2
    assert recording.captured[0].headers == {"x": 1}


# ---- a connection of beat's own


def test_a_recording_takes_what_celery_sends_and_forgets_it(app: Celery) -> None:
    recording = Recording(app, timeout=1)
    app.send_task("proj.add", (1, 2), producer=recording.producer, task_id="one", priority=3, headers={"h": 1})
    app.send_task("proj.add", (3, 4), producer=recording.producer, task_id="two", queue="other")
    one, two = recording.take()
    assert recording.take() == ()
    assert (one.routing_key, one.priority, one.headers["id"], one.headers["h"]) == ("celery", 3, "one", 1)
    assert (two.routing_key, json.loads(two.body)[0]) == ("other", [3, 4])
    assert kept(one, two).envelopes == (one, two)
    recording.reset()


def test_a_recording_that_was_reset_connects_anew(app: Celery) -> None:
    recording = Recording(app, timeout=1)
    first = recording.producer
    assert recording.broker_answers()
    assert recording.producer is not first
    recording.reset()


def test_a_broker_that_is_not_there_does_not_answer() -> None:
    app = Celery("proj", broker="redis://127.0.0.1:1/0", set_as_current=False)
    assert why_no_connection(app, 1) is not None
    app.close()


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("proj", broker="memory://", set_as_current=False)
    yield made
    made.close()


def test_calls_of_sqs_are_bounded_and_the_users_configuration_stays(app: Celery) -> None:
    app.conf.broker_transport_options = {"client-config": {"proxies": {"https": "p"}, "read_timeout": 900}}
    assert sqs_bounds(app, 1.5) == {
        "proxies": {"https": "p"},
        "connect_timeout": 1.5,
        "read_timeout": 1.5,
        "retries": {"total_max_attempts": 1},
    }


def test_two_envelopes_of_one_message_are_equal() -> None:
    assert envelope() == replace(envelope())

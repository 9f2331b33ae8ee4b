"""What a message carries of its occurrence: the ticket on the first message, the policy's limits, what the ledger keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery

from celery_tzbeat import Scheduler
from celery_tzbeat.beat.dispatch import Builder, Message
from celery_tzbeat.beat.envelope import Recording
from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.envelopes import Envelope, Parcel
from celery_tzbeat.model import Entry, Occurrence, Policy, Retry
from celery_tzbeat.schedules import every
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import Command

NOW = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)


@pytest.fixture
def builder() -> Iterator[Builder]:
    app = Celery("proj", broker="memory://", set_as_current=False)

    @app.task(name="proj.twice", shared=False, bind=True)
    def twice(self: Any) -> None: ...

    def apply_async(self: Any, *args: Any, **options: Any) -> Any:
        super(type(app.tasks["proj.twice"]), self).apply_async(*args, **options)
        return super(type(app.tasks["proj.twice"]), self).apply_async(*args, **{**options, "queue": "other"})

    app.finalize()
    type(app.tasks["proj.twice"]).apply_async = apply_async
    recording = Recording(app, timeout=1)
    scheduler = Scheduler(app, lazy=True)
    made = Builder(app, recording, "proj/0", scheduler.apply_entry)
    scheduler.send_with(made)
    yield made
    recording.reset()
    app.close()


def built(builder: Builder, task: str = "proj.add", policy: Policy | None = None, **options: Any) -> Message:
    entry = Entry("e", task, every("1m"), options=options, policy=policy or Policy())
    return builder.build(entry, Occurrence("e", NOW), epoch=7)


def envelopes(message: Message) -> list[Envelope]:
    return [part for part in message.parts if isinstance(part, Envelope)]


def test_a_message_carries_its_ticket_with_the_policy_and_the_place_of_its_mark(builder: Builder) -> None:
    policy = Policy(timeout=timedelta(seconds=90), retry=Retry(max_attempts=5), on_abandoned="redispatch")
    (sent,) = envelopes(built(builder, policy=policy))
    bucket = Bucket.of(NOW, timedelta(minutes=1))
    assert Ticket.from_headers(sent.headers) == Ticket(
        "proj/0", Occurrence("e", NOW).key, "e", NOW, 7, 1, bucket.number, bucket.field, policy
    )


def test_only_the_first_message_of_an_occurrence_is_its_run(builder: Builder) -> None:
    first, second = envelopes(built(builder, "proj.twice", headers={"meta": {"mine": 1}}))
    assert Ticket.from_headers(first.headers) is not None
    assert Ticket.from_headers(second.headers) is None
    assert (second.routing_key, second.headers["meta"]["mine"]) == ("other", 1)
    assert set(second.headers["meta"]["tzbeat"]) == {"v", "namespace", "entry", "nominal", "epoch"}
    assert Ticket.from_headers(second.headers) is None
    assert second.headers["periodic_task_name"] == "e"


@pytest.mark.parametrize(
    ("policy", "options", "limits"),
    [
        ({}, {}, [None, None]),
        ({"timeout": timedelta(seconds=90)}, {}, [120.0, 90.0]),
        ({"timeout": timedelta(seconds=90), "kill_after": timedelta(seconds=5)}, {}, [95.0, 90.0]),
        ({"timeout": timedelta(seconds=90)}, {"time_limit": 100}, [100, 90.0]),
        ({"timeout": timedelta(seconds=90)}, {"soft_time_limit": 10, "time_limit": 20}, [20, 10]),
        ({}, {"soft_time_limit": 10}, [None, 10]),
    ],
)
def test_the_policys_timeout_becomes_celerys_limits_and_the_entrys_own_options_win(
    builder: Builder, policy: dict[str, Any], options: dict[str, Any], limits: list[Any]
) -> None:
    (sent,) = envelopes(built(builder, policy=Policy(**policy), **options))
    assert sent.headers["timelimit"] == limits


def test_the_entrys_options_are_never_written_to(builder: Builder) -> None:
    options: dict[str, Any] = {"headers": {"meta": {"mine": 1}}}
    built(builder, policy=Policy(timeout=timedelta(seconds=1)), **options)
    assert options == {"headers": {"meta": {"mine": 1}}}


def test_a_delay_says_when_the_run_starts_at_the_earliest(builder: Builder) -> None:
    at = NOW + timedelta(hours=1)
    assert built(builder, eta=at).eta == at
    assert built(builder).eta is None
    delayed = built(builder, countdown=600)
    assert delayed.eta is not None
    assert envelopes(delayed)[0].headers["eta"] is not None


class Pushes:
    """An outlet that has captured these commands."""

    producer = None

    def __init__(self, *commands: Command) -> None:
        self._commands = commands

    def clear(self) -> None: ...

    def take(self) -> tuple[Command, ...]:
        return self._commands

    def broker_answers(self) -> bool:
        return True


def wire(name: str = "LPUSH", queue: bytes = b"q", **headers: Any) -> Command:
    form = {"headers": {"meta": {"tzbeat": {"key": "k"}, "mine": 1}, **headers}}
    return Command(name, (queue, json.dumps(form).encode()), (queue,))


def captured(*commands: Command, **options: Any) -> Message:
    builder = Builder(Celery(set_as_current=False), Pushes(*commands), "proj/0", lambda *_, **__: None)
    return built(builder, **options)


def tickets(message: Message) -> list[bool]:
    return [
        "key" in json.loads(part.args[1])["headers"]["meta"].get("tzbeat", {})
        for part in message.parts
        if isinstance(part, Command)
    ]


def test_of_several_pushes_only_the_first_has_the_ticket() -> None:
    first = wire()
    message = captured(first, wire(queue=b"other"), wire("PUBLISH"))
    assert tickets(message) == [True, False, False]
    assert message.parts[0] is first  # byte for byte
    assert json.loads(message.parts[1].args[1])["headers"]["meta"] == {"mine": 1}  # type: ignore[union-attr]


def test_what_goes_to_everybody_has_no_ticket_and_is_nobodys_run() -> None:
    message = captured(wire("PUBLISH"))
    assert tickets(message) == [False]
    assert message.for_everybody
    assert not captured(wire()).for_everybody


def test_a_queues_expiry_passes_untouched() -> None:
    expiry = Command("PEXPIRE", (b"q", b"1000"), (b"q",))
    assert captured(wire(), expiry).parts[1] == expiry


def test_the_delay_is_read_from_what_is_pushed() -> None:
    assert captured(wire(eta="2026-11-30T13:00:00+00:00"), countdown=3600).eta == NOW + timedelta(hours=1)


# ---- dispatched again


def pushed() -> bytes:
    """Return a message as kombu pushes it to a Redis queue, after one redelivery."""
    return json.dumps(
        {
            "body": "W1tdLCB7fSwge31d",
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {
                "id": "one",
                "root_id": "one",
                "task": "proj.add",
                "retries": 0,
                "expires": "2026-11-30T12:01:00+00:00",
                "eta": None,
                "meta": {"tzbeat": {"key": "k", "dispatch": 1}, "mine": 1},
                "redelivered": True,
            },
            "properties": {
                "correlation_id": "one",
                "reply_to": "r",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": "q", "redelivered": True},
                "priority": 3,
                "body_encoding": "base64",
                "delivery_tag": "tag",
            },
        }
    ).encode()


def test_a_pushed_message_is_read_as_a_parcel_without_what_belongs_to_its_delivery() -> None:
    run = Parcel.from_bytes(pushed()).run
    assert run.body == b"[[], {}, {}]"
    assert (run.exchange, run.routing_key, run.priority) == ("", "q", 3)
    assert run.properties == {"correlation_id": "one", "reply_to": "r", "delivery_mode": 2, "priority": 3}
    assert "redelivered" not in run.headers


def test_a_body_that_is_not_encoded_is_read_as_text() -> None:
    form = json.loads(pushed())
    form["body"], form["properties"]["body_encoding"] = "plain", None
    assert Parcel.from_bytes(json.dumps(form).encode()).run.body == b"plain"


def test_dispatched_again_it_is_the_same_task_at_the_same_attempt_under_a_higher_dispatch() -> None:
    before = Parcel.from_bytes(pushed()).run
    again = Parcel.from_bytes(Parcel.from_bytes(pushed()).again(dispatch=2, retries=4).to_bytes()).run
    assert again.body == before.body
    assert again.properties == before.properties
    assert again.headers == {
        **before.headers,
        "retries": 4,
        "meta": {"tzbeat": {"key": "k", "dispatch": 2}, "mine": 1},
    }


def test_replayed_it_is_another_task_whose_expiry_and_attempts_are_forgotten() -> None:
    anew = Parcel.from_bytes(pushed()).anew(dispatch=3, task_id="two").run
    assert anew.body == Parcel.from_bytes(pushed()).run.body
    assert {name: anew.headers[name] for name in ("id", "root_id", "retries", "expires", "eta")} == {
        "id": "two",
        "root_id": "two",
        "retries": 0,
        "expires": None,
        "eta": None,
    }
    assert anew.properties["correlation_id"] == "two"
    assert anew.headers["meta"]["tzbeat"]["dispatch"] == 3


def test_only_the_run_is_dispatched_again() -> None:
    one = Parcel.from_bytes(pushed()).run
    assert Parcel((one, one), NOW, ("expires",)).again(dispatch=2, retries=0).envelopes[1:] == ()

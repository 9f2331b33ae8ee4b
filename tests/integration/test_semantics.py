"""What Celery promises of a message stays true of ours: routing, options, signals, events, and what a task sees."""

from __future__ import annotations

import base64
import json
import pickle
import sys
import time
from datetime import datetime
from typing import Any

import celery
from evidence import NAMESPACE, PULSE, assert_gapless, connected, lateness, ledger, nominals, queued, terms
from packaging.version import Version

from celery_tzbeat.model import Occurrence, from_iso
from celery_tzbeat.testing.processes import wait_until

#: Celery's own apply_entry sets this header since 5.7.
SAYS_THAT_IT_COMES_FROM_BEAT = Version(celery.__version__) >= Version("5.7")

MESSAGES = """
import time
from celery.beat import BeatLazyFunc
from kombu import Exchange, Queue

news = Exchange("news", type="topic")
app.conf.task_queues = [
    Queue("celery", Exchange("celery"), routing_key="celery"),
    Queue("chosen", Exchange("chosen"), routing_key="chosen"),
    Queue("routed", Exchange("routed"), routing_key="routed"),
    Queue("news-all", news, routing_key="news.#"),
    Queue("news-sport", news, routing_key="news.sport"),
    Queue("news-other", news, routing_key="news.other"),
]
app.conf.task_routes = {"proj.routed": {"queue": "routed"}}


@app.task
def routed():
    pass


def entry(task="proj.record", **given):
    return {"task": task, "schedule": 1.0, **given}


app.conf.beat_schedule = {
    "arguments": entry(args=(1, "two"), kwargs={"three": [4]}),
    "lazy": entry(args=[BeatLazyFunc(time.time)], kwargs={"at": BeatLazyFunc(time.time)}),
    "routed": entry("proj.routed"),
    "chosen": entry(options={"queue": "chosen"}),
    "topic": entry(options={"queue": "news-sport", "routing_key": "news.sport"}),
    "urgent": entry(options={"priority": 6}),
    "expiring": entry(options={"expires": 30}),
    "pickled": entry(args=({1, 2},), options={"serializer": "pickle", "queue": "chosen"}),
    "linked": entry(options={"link": record.s("link"), "link_error": record.s("link_error")}),
    "labelled": entry(options={"headers": {"x-team": "blue", "meta": {"own": 1}}}),
    "unknown": entry("elsewhere.task", options={"queue": "chosen"}),
}
SCHEDULE_AT_FIRST = repr(app.conf.beat_schedule)

from celery.signals import after_task_publish, before_task_publish
from celery_tzbeat import beat_leading, occurrence_sent


@before_task_publish.connect
def before(headers=None, **kwargs):
    headers["stamp"] = headers["meta"]["tzbeat"]["nominal"]


def written(**event):
    with open("events.jsonl", "a") as file:
        file.write(json.dumps(event) + "\\n")


@after_task_publish.connect
def after(sender=None, headers=None, **kwargs):
    written(event="after_task_publish", id=headers["id"])


@beat_leading.connect
def leading(sender, holder, epoch, **kwargs):
    written(event="beat_leading", holder=holder, epoch=epoch, sender=sender.__name__)


@occurrence_sent.connect
def sent(sender, entry, key, nominal, late, **kwargs):
    written(
        event="occurrence_sent", entry=entry, key=key, nominal=nominal.isoformat(), late=late,
        unchanged=repr(app.conf.beat_schedule) == SCHEDULE_AT_FIRST,
    )
"""

DECLARE = "from proj import app\nwith app.connection() as c:\n for q in app.amqp.queues.values(): q.bind(c).declare()"


def events_of(project: Any) -> list[dict[str, Any]]:
    path = project.directory / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_message_is_what_celery_would_have_sent(project: Any) -> None:
    project.write(MESSAGES, task_send_sent_event=True)
    assert project.start(sys.executable, "-c", DECLARE).wait(30) == 0

    with connected(project.url) as client, client.pubsub() as events:
        events.psubscribe("/0.celeryev/task.sent")
        beat = project.start_beat()
        began = time.time()
        wait_until(lambda: len(nominals(project.url, "arguments")) >= 3, 40, "three messages each")
        beat.terminate()
        assert beat.wait(10) == 0
        task_sent = set()
        while (told := events.get_message(timeout=1)) is not None:
            if told["type"] == "pmessage":
                task_sent.add(json.loads(base64.b64decode(json.loads(told["data"])["body"]))["uuid"])
    assert {m.id for m in queued(project.url)} <= task_sent

    plain = {name: [m for m in queued(project.url) if m.entry == name] for name in ("arguments", "lazy", "linked")}
    for name, found in plain.items():
        assert len(found) >= 3, name
        assert_gapless([m.nominal for m in found])
    assert plain["arguments"][0].args == [1, "two"]
    assert json.loads(plain["arguments"][0].body)[1] == {"three": [4]}
    for message in plain["lazy"]:
        values = [message.args[0], json.loads(message.body)[1]["at"]]
        assert all(began < value < message.nominal.timestamp() + 2 for value in values)
    assert len({message.args[0] for message in plain["lazy"]}) == len(plain["lazy"]), "evaluated for each message"
    embedded = json.loads(plain["linked"][0].body)[2]
    assert embedded["callbacks"][0]["args"] == ["link"]
    assert embedded["errbacks"][0]["args"] == ["link_error"]

    assert {m.entry for m in queued(project.url, "routed")} == {"routed"}
    assert {m.entry for m in queued(project.url, "chosen")} == {"chosen", "pickled", "unknown"}
    assert nominals_in(project, "news-all", "topic") == nominals_in(project, "news-sport", "topic") != []
    assert queued(project.url, "news-other") == []
    assert {m.entry for m in queued(project.url, "celery\x06\x166")} == {"urgent"}
    assert {m.properties["priority"] for m in queued(project.url, "celery\x06\x166")} == {6}

    pickled = next(m for m in queued(project.url, "chosen") if m.entry == "pickled")
    assert pickled.content_type == "application/x-python-serialize"
    assert list(pickle.loads(pickled.body)[0]) == [{1, 2}]
    expiring = next(m for m in queued(project.url) if m.entry == "expiring")
    left = datetime.fromisoformat(expiring.headers["expires"]) - expiring.nominal
    assert 29 < left.total_seconds() < 33

    labelled = [m for m in queued(project.url) if m.entry == "labelled"]
    assert all(m.headers["x-team"] == "blue" and m.headers["meta"]["own"] == 1 for m in labelled)
    everything = [m for queue in ("celery", "chosen", "routed", "news-all") for m in queued(project.url, queue)]
    for message in everything:
        assert message.headers["periodic_task_name"] == message.entry
        assert message.headers.get("celery_beat_task", False) is SAYS_THAT_IT_COMES_FROM_BEAT
        assert message.headers["stamp"] == message.tzbeat["nominal"], "the change of before_task_publish is in it"
        assert "x-team" not in message.headers or message.entry == "labelled"
        assert message.id == Occurrence(message.entry, message.nominal).task_id(NAMESPACE)
        assert message.tzbeat["namespace"] == NAMESPACE

    events = events_of(project)
    assert [e["sender"] for e in events if e["event"] == "beat_leading"] == ["Scheduler"]
    published = {e["id"] for e in events if e["event"] == "after_task_publish"}
    assert {m.id for m in everything} <= published
    told = [e for e in events if e["event"] == "occurrence_sent"]
    # Its SIGTERM ends Celery's beat wherever that is, so of the last instant some may be sent and not told.
    last = max(m.nominal for m in everything)
    assert {Occurrence(m.entry, m.nominal).key for m in everything if m.nominal < last} <= {e["key"] for e in told}
    assert not any(e["late"] for e in told)
    assert all(e["unchanged"] for e in told), "the user's own beat_schedule was written to"


def nominals_in(project: Any, queue: str, entry: str) -> list[datetime]:
    return [m.nominal for m in queued(project.url, queue) if m.entry == entry]


TASKS = """
import time
from celery import signature
from celery.beat import BeatLazyFunc


def note(task, **more):
    request = task.request
    meta = getattr(request, "meta", None) or {}
    line = json.dumps({
        "task": task.name, "id": request.id, "retries": request.retries,
        "periodic": getattr(request, "periodic_task_name", None), "tzbeat": meta.get("tzbeat"), **more,
    })
    with open("ran.jsonl", "a") as file:
        file.write(line + "\\n")


@app.task(bind=True)
def parent(self, sent_at):
    note(self, sent_at=sent_at)
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    child.delay()
    return "result"


@app.task(bind=True)
def child(self, *args):
    note(self, args=args)


@app.task(bind=True)
def failing(self):
    raise ValueError("on purpose")


@app.task(bind=True)
def failed(self, *args):
    note(self)


@app.task(bind=True)
def expired(self):
    note(self)


@app.on_after_configure.connect
def early(sender, **kwargs):
    sender.add_periodic_task(1.0, record.s("configured"))


@app.on_after_finalize.connect
def late(sender, **kwargs):
    sender.add_periodic_task(1.0, record.s("finalized"), name="a name with / and @ and ü")


app.conf.beat_schedule = {
    "parent": {
        "task": "proj.parent", "schedule": 1.0, "args": [BeatLazyFunc(time.time)],
        "options": {"link": signature("proj.child", args=["linked"])},
    },
    "failing": {"task": "proj.failing", "schedule": 1.0, "options": {"link_error": signature("proj.failed", immutable=True)}},
    "expired": {"task": "proj.expired", "schedule": 1.0, "options": {"expires": -1}},
}
"""


def ran(project: Any, task: str) -> list[dict[str, Any]]:
    path = project.directory / "ran.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in found if line["task"] == f"proj.{task}"]


def test_a_task_sees_its_occurrence_also_when_it_is_retried_and_its_children_do_not(project: Any) -> None:
    # A backend that does not expire results by itself, so that Celery's own nightly entry is there too.
    results = project.directory / "results"
    results.mkdir()
    project.write(TASKS, result_backend=f"file://{results}")
    beat = project.start_beat()
    worker = project.start_worker()
    wait_until(lambda: len([p for p in ran(project, "parent") if p["retries"] == 1]) >= 3, 60, "tasks to run")
    wait_until(lambda: len(ran(project, "failed")) >= 3, 20, "the error links to run")
    wait_until(lambda: len(ran(project, "child")) >= 6, 20, "children and links to run")
    wait_until(lambda: "expired" in worker.log, 20, "an expired message to be thrown away")

    parents = ran(project, "parent")
    for line in parents:
        assert line["periodic"] == "parent"
        assert line["tzbeat"]["entry"] == "parent"
        assert line["tzbeat"]["dispatch"] == 1
        assert line["id"] == Occurrence("parent", from_iso(line["tzbeat"]["nominal"])).task_id(NAMESPACE)
    assert {line["retries"] for line in parents} == {0, 1}
    first, second = (next(p for p in parents if p["retries"] == n) for n in (0, 1))
    assert first == {**second, "retries": 0}, "a retry is the same occurrence under the same id"
    for line in ran(project, "child"):
        assert line["periodic"] is None
        assert line["tzbeat"] is None
    assert {tuple(line["args"]) for line in ran(project, "child")} == {(), ("result", "linked")}
    assert not ran(project, "expired")

    names = {line["entry"] for line in project.received()}
    assert names == {"proj.record('configured')", "a name with / and @ and ü"}
    assert {line["args"][0] for line in project.received()} == {"configured", "finalized"}
    with ledger(project.url) as store:
        assert "celery.backend_cleanup" in store.cursors()
    assert beat.alive
    assert "Traceback" not in beat.log


def test_a_prefix_of_the_brokers_keys_is_kept_and_both_beats_give_an_occurrence_the_same_id(project: Any) -> None:
    project.write(beat_schedule=PULSE, broker_transport_options={"global_keyprefix": "pre:"})
    beats = [project.start_beat()]
    wait_until(lambda: len(queued(project.url, "pre:celery")) >= 2, 40, "pulses")
    beats.append(project.start_beat())
    beats[0].kill()
    beats[1].wait_for_log("leads with epoch", 40)
    seen = len(queued(project.url, "pre:celery"))
    wait_until(lambda: len(queued(project.url, "pre:celery")) >= seen + 3, 20, "pulses by the second beat")
    found = queued(project.url, "pre:celery")
    assert_gapless([m.nominal for m in found])
    assert [m.id for m in found] == [Occurrence("pulse", m.nominal).task_id(NAMESPACE) for m in found]
    assert len({m.tzbeat["epoch"] for m in found}) == 2
    assert queued(project.url) == []
    with connected(project.url) as client:
        assert client.keys("*tzbeat-probe*") == []
    project.start_worker()
    wait_until(lambda: len(project.received()) >= len(found), 40, "a worker to run them")


def test_a_frozen_result_backend_makes_no_occurrence_late(project: Any, make_server: Any) -> None:
    backend = make_server()
    project.write(beat_schedule=PULSE, result_backend=backend.url)
    backend.freeze()
    beat = project.start_beat()
    wait_until(lambda: len(nominals(project.url)) >= 6, 40, "pulses")
    assert_gapless(nominals(project.url))
    late = sorted(lateness(project.url)[1:])
    assert late[len(late) // 2] < 0.1
    assert late[-1] < 1
    assert terms(beat) == 1
    assert beat.stop() == 0

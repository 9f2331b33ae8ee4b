"""Each way to die: one dead letter, with the message byte for byte; and its replay succeeds when the cause is gone.

`WAYS` is the table of them. What a broker returns or refuses (unroutable) needs one that does: tests/services.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from evidence import queued
from gated import NOMINAL, Gated

from celery_tzbeat.deliveries import DeadLetter
from celery_tzbeat.envelopes import Parcel
from celery_tzbeat.model import Cursor, Occurrence, Policy
from celery_tzbeat.store.keys import Bucket
from celery_tzbeat.store.protocol import Claim, Tracking, Verdict
from celery_tzbeat.testing.processes import wait_until

if TYPE_CHECKING:
    from conftest import Project

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "dead-letters.md"


@dataclass(frozen=True)
class Way:
    """One way to die: the reason in the letter, the task that dies of it until it is mended, and the entry's policy.

    `by` is who sends it: the beat by its schedule; or the test, as no beat of this release would.
    """

    reason: str
    task: str
    policy: dict[str, Any] = field(default_factory=dict)
    by: str = "beat"


ONCE = {"delivery": "at_most_once"}

WAYS = [
    Way("exception", "fails"),
    Way("retries", "fails", {"retry": {"max_attempts": 2, "delay": 0, "backoff": "none"}}),
    Way("permanent", "gives_up", {"retry": {"max_attempts": 3, "delay": 0}}),
    Way("rejected", "rejects"),
    Way("hard_limit", "hangs", {"timeout": 0.5, "kill_after": 0.5}),
    Way("abandoned", "crashes"),
    Way("deliveries", "crashes", {"on_abandoned": "redispatch", "max_deliveries": 2}),
    Way("second_start", "asks_again", ONCE),
    Way("build", "works"),
    Way("unknown_task", "newer"),
    Way("undecodable", "works", by="test: in a serializer that the worker does not accept"),
    Way("unknown", "works", ONCE, by="test: nothing is in the ledger, as after a wipe"),
    Way("doubtful", "works", ONCE, by="test: claimed by a leader that is gone"),
]

BODY = """
import signal
from datetime import datetime, timedelta, timezone
from celery.beat import BeatLazyFunc
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery_tzbeat import Permanent, at

DEPLOYED = os.environ.get("DEPLOYED")  # the release that mends what only a deploy can
app.conf.accept_content = ["json", "pickle"] if DEPLOYED else ["json"]


def mended():
    return os.path.exists(os.path.join(os.path.dirname(__file__), "mended"))


def task(deadly, **options):
    \"\"\"Make a task of what it does until it is mended.\"\"\"

    @app.task(bind=True, name=f"proj.{deadly.__name__}", **options)
    def body(self, *args):
        say(self, "start", args=args)
        if not mended():
            deadly(self)
        say(self, "end", args=args)


def works(self): ...
def newer(self): ...
def fails(self): raise ValueError("the API is down")
def gives_up(self): raise Permanent("no such customer")
def rejects(self): raise Reject("not this one", requeue=False)
def crashes(self): os.kill(os.getpid(), signal.SIGKILL)
def asks_again(self): self.retry(countdown=0)


def hangs(self):
    try:
        time.sleep(60)
    except SoftTimeLimitExceeded:
        time.sleep(60)


for deadly in (works, fails, gives_up, crashes, asks_again, hangs):
    task(deadly)
task(rejects, acks_late=True)
if DEPLOYED:
    task(newer)


def argument():
    if not mended():
        raise OSError("the API is down")
    return "build"


due = at((datetime.now(timezone.utc) + timedelta(seconds=8)).isoformat())
app.conf.beat_schedule = {
    reason: {"task": f"proj.{name}", "schedule": due, "args": ["\\u00e9", reason], "policy": policy}
    for reason, name, policy in WAYS
}
app.conf.beat_schedule["build"]["args"] = ["\\u00e9", BeatLazyFunc(argument)]
"""


class Undertaker(Gated):
    """A beat that knows all entries, and a worker whose queue the test looks into before the worker may."""

    def __init__(self, project: Project) -> None:
        entries = [(way.reason, way.task, way.policy) for way in WAYS if way.by == "beat"]
        super().__init__(project, body=f"WAYS = {entries!r}\n" + BODY)
        self.operator = self.tz()
        self.deployed = {"DEPLOYED": "1", "C_FORCE_ROOT": "1"}  # Celery's root would not take pickle

    def claim_of_another_leader(self, entry: str) -> bytes:
        """Leave a claim behind, as a leader does that dies before it hears of the broker; return the message's body."""
        policy, minute = Policy(**ONCE), timedelta(minutes=1)
        self.send("works", entry, "é", entry, **ONCE)
        with closing(redis.Redis.from_url(self.project.url)) as client, closing(self.store()) as store:
            message = client.rpop("celery")
            claim = Claim(
                Occurrence(entry, NOMINAL),
                Bucket.of(NOMINAL, minute),
                Cursor(NOMINAL, "rule"),
                message,
                Tracking(policy, None),
            )
            assert store.claim([claim], epoch=1)[0].verdict is Verdict.DONE
        return Parcel.from_bytes(message).run.body

    def letters_of(self, reasons: set[str]) -> dict[str, DeadLetter]:
        wait_until(lambda: {letter.entry for letter in self.operator.dead.list()} >= reasons, 60, "all to be dead")
        return self.letters()

    def events(self, event: str) -> Counter[str]:
        with closing(self.store()) as store:
            return Counter(record.entry for record in store.audit(count=10_000) if record.event == event)


@pytest.fixture
def undertaker(project: Project) -> Undertaker:
    return Undertaker(project)


def test_each_way_to_die_is_one_letter_whose_replay_succeeds_when_the_cause_is_gone(undertaker: Undertaker) -> None:
    project, bodies = undertaker.project, {}
    reasons = {way.reason for way in WAYS}
    bodies["doubtful"] = undertaker.claim_of_another_leader("doubtful")
    worker = undertaker.start_worker("first", concurrency=4, args=("-Q", "another"))
    with closing(undertaker.store()) as store:
        wait_until(store.workers_lived, 30, "the worker half attends")
    project.start_beat(env=undertaker.deployed)
    undertaker.send("works", "undecodable", "é", "undecodable", options={"serializer": "pickle"})
    undertaker.send("works", "unknown", "é", "unknown", **ONCE)
    messages = wait_until(
        lambda: found if len(found := queued(project.url)) == len(WAYS) - 2 else None, 30, "what is due to be queued"
    )
    bodies |= {message.entry: message.body for message in messages}
    assert {*bodies, "build"} == reasons
    undertaker.open_queue(workers=1)

    letters = undertaker.letters_of(reasons)
    assert {entry: letter.reason for entry, letter in letters.items()} == {reason: reason for reason in reasons}
    for entry, letter in letters.items():
        assert (Parcel.from_bytes(letter.message).run.body if letter.message else None) == bodies.get(entry), entry
    starts = Counter(line["entry"] for line in undertaker.said(what="start"))
    assert starts == {
        **dict.fromkeys(("exception", "permanent", "rejected", "hard_limit", "abandoned", "second_start"), 1),
        **dict.fromkeys(("retries", "deliveries"), 2),
    }

    (project.directory / "mended").touch()
    worker.kill()
    undertaker.start_worker("second", concurrency=4, env=undertaker.deployed)
    asked = undertaker.operator.dead.replay(why="mended", wait=timedelta(seconds=30))
    assert {each.key: each.outcome for each in asked if not each.is_done} == {}
    wait_until(lambda: set(undertaker.events("done")) == reasons, 60, "all to be done")
    assert undertaker.events("dead") == undertaker.events("replayed") == undertaker.events("done") == Counter(reasons)
    assert undertaker.operator.dead.list() == []
    ended = {line["entry"]: line["args"] for line in undertaker.said(what="end")}
    assert ended == {reason: ["é", reason] for reason in reasons}
    assert len(undertaker.said(what="end")) == len(WAYS)


def test_the_ways_are_those_of_the_page() -> None:
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    on_page = {word.strip(" `") for row in rows for word in row.split(",")}
    assert on_page == {way.reason for way in WAYS} | {"unroutable"}

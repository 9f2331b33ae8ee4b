"""What must hold on every broker, with real workers and beats: scenes that are played on Redis (integration) and RabbitMQ
(services).
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import closing
from datetime import timedelta
from itertools import pairwise

from gated import Gated

from celery_tzbeat.model import Retry
from celery_tzbeat.testing.processes import Process, wait_until

#: Seconds that a loaded machine may take for what is done within a few.
SOON = 60

#: A body of `Gated`: a failure that passes, told by how often its key was started.
FAILS = '''
@app.task(bind=True)
def fails(self, until):
    """Fail at each attempt before that one."""
    run = current_run()
    say(self, "start", key=run.key)
    if run.attempt < until:
        raise OSError("not yet")
    say(self, "end", key=run.key)
'''

SECOND = timedelta(seconds=1)

#: By entry: its retry policy, at which attempt it would succeed, and the waits that the policy makes of that, in seconds.
RETRIES: dict[str, tuple[Retry, int, list[float]]] = {
    "none": (Retry(max_attempts=5, backoff="none"), 99, [0, 0, 0, 0]),
    "fixed": (Retry(max_attempts=3, delay=SECOND, backoff="fixed", jitter=False), 99, [1, 1]),
    "exponential": (Retry(max_attempts=4, delay=SECOND / 2, max_delay=SECOND, jitter=False), 99, [0.5, 1, 1]),
    "passes": (Retry(max_attempts=5, delay=SECOND / 2, jitter=False), 3, [0.5, 1]),
}


def play_retries(gated: Gated, workers: list[Process]) -> None:
    """By each policy the attempts are n+1 under one key, as far apart as it says; used up, they are one dead letter."""
    for entry, (retry, until, _) in RETRIES.items():
        gated.send("fails", entry, until, retry=retry)
    for entry, (_, until, _) in RETRIES.items():
        gated.wait_for_mark(entry, "x" if until == 99 else "d", SOON)
    gated.send("work", "last")  # what was multiplied would stand before it
    gated.wait_for_mark("last", "d", SOON)
    log = "".join(worker.log for worker in workers)
    for entry, (_, until, waits) in RETRIES.items():
        starts = gated.said(entry, "start")
        numbers = list(range(1, len(waits) + 2))
        assert [line["attempt"] for line in starts] == numbers, entry
        assert [line["retries"] for line in starts] == [n - 1 for n in numbers], entry
        assert {line["key"] for line in starts} == {gated.ticket(entry).key}
        asked = re.findall(rf"\[id-{entry}\] retry: Retry in ([0-9.]+)s", log)
        assert sorted(map(float, asked)) == waits, entry
        gaps = [after["at"] - before["at"] for before, after in pairwise(starts)]
        assert all(gap >= wait for gap, wait in zip(gaps, waits, strict=True)), (entry, gaps)
        assert len(gated.said(entry, "end")) == (until != 99)
    letters = gated.letters()
    used_up = {entry: len(waits) + 1 for entry, (_, until, waits) in RETRIES.items() if until == 99}
    assert {entry: letter.attempts for entry, letter in letters.items()} == used_up
    assert {(letter.reason, letter.error) for letter in letters.values()} == {("retries", "OSError: not yet")}
    with closing(gated.store()) as store:
        settled = [(r.entry, r.event) for r in store.audit() if r.event in ("dead", "done")]
    assert sorted(settled) == sorted([*((e, "dead") for e in used_up), ("passes", "done"), ("last", "done")])


#: A body of `Gated` by which a beat sends what cannot be done in its second, each second.
OVERLAPPING = """
def each_second(seconds, **policy):
    return {"task": "proj.work", "schedule": 1.0, "args": [seconds], "policy": {"run_lease": 3, **policy}}


app.conf.beat_schedule = {
    "skip": each_second(2.2, overlap="skip"),
    "buffer_one": each_second(2.2, overlap="buffer_one"),
    "cancel_other": each_second(60, overlap="cancel_other", kill_after=3600),
}
"""


def play_overlap(gated: Gated) -> None:
    """No two runs of an entry at once: what comes meanwhile is skipped, waits, or has the other stopped first.

    A worker half must attend: what is sent before is not tracked.
    """
    with closing(gated.store(leads=False)) as store:
        wait_until(store.workers_lived, SOON, "the worker half attends")
    gated.project.start_beat()
    ended_by = {"skip": "end", "buffer_one": "end", "cancel_other": "stop"}
    for entry, how in ended_by.items():
        gated.wait_for(entry, how, SOON, count=3)
    for entry, how in ended_by.items():
        lines = gated.said(entry)
        assert [line["what"] for line in lines[:6]] == ["start", how] * 3, f"{entry}: two at once, or ended otherwise"
        assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)
        assert {line["attempt"] for line in lines} == {1}
    assert {line["why"] for line in gated.said("cancel_other", "stop")} == {"cancel"}
    assert not gated.letters()

    def counted() -> Counter[tuple[str, str]]:
        with closing(gated.store(leads=False)) as store:
            records = store.audit(count=10_000)
        found: Counter[tuple[str, str]] = Counter()
        for record in records:
            found[record.entry, record.event] += record.count
        return found

    wanted = [("skip", "skipped"), ("buffer_one", "coalesced"), ("cancel_other", "revoked")]
    wait_until(lambda: min(counted()[each] for each in wanted) >= 2, SOON, "what became of the others, in the audit")
    for entry, event in [("skip", "coalesced"), ("buffer_one", "skipped"), ("cancel_other", "skipped")]:
        assert not counted()[entry, event]

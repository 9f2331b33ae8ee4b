"""Entries that cannot be sent, beside healthy ones: each is its own affair, and each has an end."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

from evidence import audit, counts, lateness, ledger

from celery_tzbeat.model import Occurrence
from celery_tzbeat.testing.processes import wait_until

HEALTHY = 200

BODY = """
from celery.beat import BeatLazyFunc
from celery_tzbeat import at, occurrence_dead, occurrences_unrun


class Raising(app.Task):
    def apply_async(self, *args, **kwargs):
        raise RuntimeError("apply_async said no")


class Silent(app.Task):
    def apply_async(self, *args, **kwargs):
        return None


@app.task(base=Raising)
def raising():
    pass


@app.task(base=Silent)
def silent():
    pass


due = at({instant!r})
app.conf.beat_schedule = {{
    "unserialisable": {{"task": "proj.record", "schedule": due, "args": [object()]}},
    "lazy": {{"task": "proj.record", "schedule": due, "args": [BeatLazyFunc(lambda: 1 / 0)]}},
    "raising": {{"task": "proj.raising", "schedule": due}},
    "silent": {{"task": "proj.silent", "schedule": due}},
    **{{f"healthy {{n}}": {{"task": "proj.record", "schedule": due}} for n in range({healthy})}},
}}


@occurrence_dead.connect
def dead(sender, entry, key, reason, **kwargs):
    print(f"SIGNAL dead {{entry}} {{key}} {{reason}}")


@occurrences_unrun.connect
def unrun(sender, entry, event, count, reason, **kwargs):
    print(f"SIGNAL unrun {{entry}} {{event}} {{count}} {{reason}}")
"""


def test_entries_that_cannot_be_sent_hold_up_nobody_and_end_as_dead_letters_or_skipped(project: Any) -> None:
    instant = (datetime.now(timezone.utc) + timedelta(seconds=15)).replace(microsecond=0)
    project.write(BODY.format(instant=instant.isoformat(), healthy=HEALTHY))
    beat = project.start_beat()
    wait_until(lambda: sum(counts(project.url).values()) >= HEALTHY, 60, "the healthy ones")
    assert max(lateness(project.url)) < 2
    assert min(lateness(project.url)) >= 0

    # Attempts after 0, 1, 3, 7 and 15 s.
    wait_until(lambda: len(audit(project.url, "dead")) == 3, 40, "the dead letters")
    buried = {record.entry: int(record.id.split("-")[0]) / 1000 for record in audit(project.url, "dead")}
    assert set(buried) == {"unserialisable", "lazy", "raising"}
    assert all(14.5 < at - instant.timestamp() < 25 for at in buried.values())
    with ledger(project.url) as store:
        letters = {key: json.loads(letter) for key, letter in store.dead_letters().items()}
        cursors = store.cursors()
    assert set(letters) == {Occurrence(entry, instant).key for entry in buried}
    errors = {letter["entry"]: letter["error"] for letter in letters.values()}
    assert "serial" in errors["unserialisable"].lower()
    assert "division by zero" in errors["lazy"]
    assert "apply_async said no" in errors["raising"]
    assert {letter["reason"] for letter in letters.values()} == {"build"}
    assert all(cursors[entry].nominal == instant for entry in (*buried, "silent", "healthy 7"))

    (skipped,) = audit(project.url, "skipped")
    assert (skipped.entry, skipped.detail, skipped.first) == ("silent", "by the task", instant)
    found = counts(project.url)
    assert len(found) == HEALTHY
    assert set(found.values()) == {1}
    for entry in buried:
        assert beat.log.count(f"entry '{entry}': the message of") == 5
        assert f"SIGNAL dead {entry} {Occurrence(entry, instant).key} build" in beat.log
    assert "SIGNAL unrun silent skipped 1 by the task" in beat.log

"""Claims that a leader left open: the next one sends them first, as they stand in the ledger."""

from __future__ import annotations

import time
from datetime import timedelta

from observe import PULSE, SECOND, Bench, assert_calm, in_seconds, now, sleep_until
from proxy import Proxy

from celery_tzbeat.model import from_iso
from celery_tzbeat.testing.processes import wait_until

#: The first release's entries; the second's are an argument.
ENTRIES = """
from datetime import datetime
from celery_tzbeat import at

due = at({due!r})
strict = {{"misfire_grace": 1, "catchup": "skip"}}


def entry(*args, **options):
    return {{"task": "proj.record", "schedule": due, "args": args, "options": options, "policy": strict}}


app.conf.beat_schedule = {{
    **{pulse!r},
    "kept": entry(1),
    "edited": entry(1),
    "removed": entry(1),
    "renamed": entry(1),
    "relative": entry(1, expires=100),
    "absolute": entry(1, expires=datetime.fromisoformat({later!r})),
    "delayed": entry(1, countdown=50),
    "run": entry("run", queue={queue!r}, expires=100, countdown=1),
    "warm": {{**entry("warm", queue={queue!r}), "schedule": at({warm!r})}},
}}
"""
CLAIMED = ["absolute", "delayed", "edited", "kept", "relative", "removed", "renamed", "run"]
EDITED = """
app.conf.beat_schedule["edited"] = {"task": "proj.record", "schedule": 3600.0, "args": [2]}
del app.conf.beat_schedule["removed"]
app.conf.beat_schedule["new name"] = app.conf.beat_schedule.pop("renamed")
"""


def test_the_next_leader_first_sends_what_the_last_one_had_claimed_whatever_its_own_entries_say(
    bench: Bench, proxy: Proxy
) -> None:
    due, later = in_seconds(20), in_seconds(86400)
    to_run = f"{bench.queue}-run"
    warm = (due - 4 * SECOND).isoformat()  # declares the queue: that takes a broker that answers
    entries = ENTRIES.format(due=due.isoformat(), later=later.isoformat(), pulse=PULSE, queue=to_run, warm=warm)
    bench.write(entries)
    bench.write(entries + EDITED, module="proj2")
    (first,) = bench.start_beats(1)
    wait_until(lambda: bench.nominals(), 60, "a pulse")
    assert now() < due - 5 * SECOND, "the machine is too busy for this test"
    sleep_until(due - SECOND / 2)
    proxy.hang()
    wait_until(lambda: set(CLAIMED) <= {key.split("@")[0] for key in bench.open_claims()}, 30, "the claims")
    first.kill()
    claimed = bench.open_claims()
    before = len(bench.inbox().messages())
    time.sleep(5)  # beyond the grace of what was claimed
    proxy.resume()
    second = bench.project.start_beat(app="proj2")
    second.wait_for_log("leads with epoch", 60)
    wait_until(
        lambda: len(bench.inbox().messages("pulse")) >= 5 and not set(claimed) & set(bench.open_claims()), 60, "go"
    )

    came = bench.inbox().messages()[before:]
    epochs = [message.tzbeat["epoch"] for message in came]
    assert epochs == sorted(epochs), "the claims of the first leader come first"
    taken_over = {m.tzbeat["key"]: m for m in came if m.tzbeat["epoch"] == epochs[0]}
    (ran_key,) = (key for key in claimed if key.startswith("run@"))
    assert set(claimed) - {ran_key} <= set(taken_over)
    copies = epochs.count(epochs[0]) - len(taken_over)
    assert copies <= 1, "what was on the wire when it hung"
    for key in taken_over:
        assert len({message.id for message in came if message.tzbeat["key"] == key}) == 1
    by_entry = {message.entry: message for message in taken_over.values()}
    assert all(by_entry[name].args == [1] for name in CLAIMED if name != "run")
    assert not [message for message in came if message.args == [2] or message.entry == "new name"]
    # A duration is counted from when the message was sent, an instant is not.
    assert from_iso(by_entry["relative"].headers["expires"]) > due + timedelta(seconds=104)
    assert from_iso(by_entry["delayed"].headers["eta"]) > due + timedelta(seconds=54)
    assert from_iso(by_entry["absolute"].headers["expires"]) == later
    assert sorted(f"{r.entry}" for r in bench.audit("reclaimed") if r.entry != "pulse") == CLAIMED
    assert not [
        r for r in bench.audit() if r.entry in CLAIMED and r.event in ("missed", "skipped", "coalesced", "dead")
    ]
    assert "the claim of kept@" in second.log

    bench.project.start_worker(args=("-Q", to_run))
    ran = wait_until(lambda: len(r := bench.project.received()) >= 2 and r, 60, "a worker to run what was taken over")
    assert sorted(r["args"] for r in ran) == [["run"], ["warm"]]
    assert_calm([second])


def test_a_leader_that_was_frozen_in_the_middle_of_a_batch_leaves_copies_under_the_same_task_ids(bench: Bench) -> None:
    due = in_seconds(15)
    bench.write(
        f"""
from celery_tzbeat import at
due = at({due.isoformat()!r})
app.conf.beat_schedule = {{f"entry {{n}}": {{"task": "proj.record", "schedule": due}} for n in range(400)}}
"""
    )
    beats = bench.start_beats(2)
    assert now() < due, "the machine is too busy for this test"
    wait_until(lambda: len(bench.inbox().messages()) >= 40, 60, "the burst")
    beats[0].freeze()
    assert len(bench.inbox().messages()) < 400, "it was frozen after the burst"
    beats[1].wait_for_log("leads with epoch", 30)
    wait_until(lambda: len({m.entry for m in bench.inbox().messages()}) == 400, 60, "the rest of the burst")
    wait_until(lambda: not bench.open_claims(), 30, "the claims to be confirmed")
    beats[0].thaw()
    beats[0].wait_for_log("stands by", 30)
    time.sleep(2)  # for what must not come

    messages = bench.inbox().messages()
    assert len({m.entry for m in messages}) == 400
    assert len({m.id for m in messages}) == 400, "copies only under the same task id"
    assert len(messages) - 400 <= 100, "at most one batch"
    assert len(bench.audit("sent")) == 400
    assert_calm(beats)


def test_a_claim_whose_message_cannot_be_read_is_reported_and_holds_up_nothing(bench: Bench, proxy: Proxy) -> None:
    bench.write(beat_schedule={**PULSE, "even": {"task": "proj.record", "schedule": 2.0}})
    (first,) = bench.start_beats(1)
    wait_until(lambda: bench.nominals("even") and bench.nominals(), 60, "messages")
    proxy.hang()
    wait_until(lambda: any(key.startswith("even@") for key in bench.open_claims()), 30, "a claim")
    first.kill()
    (key,) = (key for key in bench.open_claims() if key.startswith("even@"))
    store = bench.store()
    store._client.hset(store.keys.occurrence(key), "payload", b'{"v": 9}')
    store.close()
    proxy.resume()
    second = bench.project.start_beat()
    wait_until(lambda: bench.audit("dead", "even"), 120, "the claim to be given up, after 63 s")
    letter = bench.ask(lambda s: s.dead_letters())[key]
    assert "cannot be read" in letter
    assert "entry 'even': the broker did not take the message" in second.log
    seen = len(bench.nominals("even"))
    wait_until(lambda: len(bench.nominals("even")) >= seen + 2, 30, "the entry goes on")
    assert_calm([second])

"""The leader's side of tracked occurrences, line by line of the state table: one suite for `RedisStore` and `MemoryStore`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from scenes import MOMENT, SECOND, SHORT, Scene

from celery_tzbeat.deliveries import WorkerPresence
from celery_tzbeat.model import Policy
from celery_tzbeat.store.protocol import BATCH, Claim, Hold, Tracking, Verdict
from celery_tzbeat.store.runs import Ended, Gate, Pulse

HOUR = timedelta(hours=1)


def lapsed(scene: Scene, **policy: Any) -> None:
    """An occurrence whose run lease has lapsed."""
    scene.publish(**{**SHORT, **policy})
    scene.start(**{**SHORT, **policy})
    scene.let_pass(MOMENT)


def abandoned(scene: Scene, **policy: Any) -> None:
    lapsed(scene, **policy)
    assert scene.abandon() is Verdict.DONE


def dead(scene: Scene) -> None:
    scene.publish()
    scene.start()
    scene.end("dead", reason="exception", letter=scene.letter())


# ---- lines 1, 2 and 9: tracked


def test_line_1_a_tracked_occurrence_is_published_and_stands_open(scene: Scene) -> None:
    assert scene.publish(max_deliveries=3) is Verdict.DONE
    run = scene.run()
    assert (run.state, run.order, run.token, run.starts, run.payload) == ("published", (1, 0), "", 0, b"message")
    assert (run.entry, run.nominal, run.bucket, run.policy) == (
        "e",
        scene.now,
        scene.bucket(),
        Policy(max_deliveries=3),
    )
    assert abs(run.deadline - scene.store.time() - HOUR) < 10 * SECOND
    assert scene.store.cursors()["e"] == scene.cursor()
    assert "e" not in scene.store.last()
    assert scene.events == ["published"]


def test_line_1_a_lost_reply_pushes_nothing_twice(scene: Scene) -> None:
    assert [scene.publish(), scene.publish()] == [Verdict.DONE, Verdict.DECIDED]
    assert scene.events == ["published"]


def test_line_1_a_later_eta_counts_from_there(scene: Scene) -> None:
    scene.publish(eta=scene.now + HOUR)
    assert scene.run().deadline == scene.now + 2 * HOUR


def test_lines_2_and_9_a_tracked_claim_is_published_when_it_is_confirmed(scene: Scene) -> None:
    scene.claim(eta=scene.now + HOUR)
    assert scene.state == "claimed"
    (found,) = scene.store.open_occurrences()
    assert (found.state, found.payload) == ("claimed", b"message")
    assert scene.confirm() is Verdict.DONE
    assert scene.confirm() is Verdict.DECIDED
    run = scene.run()
    assert (run.state, run.payload, run.deadline) == ("published", b"message", scene.now + 2 * HOUR)
    assert scene.store.open_occurrences() == []
    assert scene.events == ["claimed", "published"]


# ---- lines 3, 4, 7 and 8: overlap


@pytest.mark.parametrize("overlap", ["skip", "buffer_one", "cancel_other"])
def test_line_3_nothing_holds_an_entry_of_which_nothing_is_open(scene: Scene, overlap: str) -> None:
    assert scene.hold(overlap=overlap) is Verdict.DONE
    assert scene.events == []
    assert scene.publish(overlap=overlap) is Verdict.DONE


def test_line_4_skip_is_one_audit_row_and_moves_the_cursor(scene: Scene) -> None:
    scene.publish(overlap="skip")
    assert scene.hold(1, overlap="skip") is Verdict.HELD
    assert scene.hold(1, overlap="skip") is Verdict.DECIDED
    assert scene.events == ["published", "skipped"]
    assert scene.store.cursors()["e"] == scene.cursor(1)
    assert [run.key for run in scene.store.runs()] == [scene.occurrence().key]


def test_line_3_buffer_one_keeps_the_newest_waiting(scene: Scene) -> None:
    scene.publish(overlap="buffer_one")
    scene.start()
    assert scene.hold(1, overlap="buffer_one") is Verdict.HELD
    waiting = scene.run(1)
    assert (waiting.state, waiting.deadline) == ("waiting", scene.now + SECOND + timedelta(days=7))
    assert scene.store.cursors()["e"] == scene.cursor(1)
    assert scene.hold(2, overlap="buffer_one") is Verdict.HELD
    assert {run.key: run.state for run in scene.store.runs()} == {
        scene.occurrence().key: "running",
        scene.occurrence(2).key: "waiting",
    }
    assert scene.events == ["published", "started", "waiting", "coalesced", "waiting"]


def test_line_3_two_in_one_call_leave_the_newest(scene: Scene) -> None:
    scene.publish(overlap="buffer_one")
    policy = Policy(overlap="buffer_one")
    holds = [Hold(scene.occurrence(n), scene.cursor(n), scene.bucket(n), policy) for n in (1, 2)]
    assert [answer.verdict for answer in scene.store.hold(holds, epoch=1)] == [Verdict.HELD] * 2
    assert [run.key for run in scene.store.runs() if run.state == "waiting"] == [scene.occurrence(2).key]


def test_line_3_asked_again_a_waiting_one_is_held_and_hides_nothing_behind_it(scene: Scene) -> None:
    scene.publish(overlap="buffer_one", **SHORT)
    scene.hold(1, overlap="buffer_one")
    scene.let_pass(MOMENT)
    assert scene.hold(1, overlap="buffer_one") is Verdict.HELD
    assert [run.state for run in scene.store.survey().due] == ["published", "waiting"]
    assert scene.events == ["published", "waiting"]


@pytest.mark.parametrize("by_claims", [False, True])
def test_line_7_what_waits_is_sent_when_the_other_is_settled(scene: Scene, by_claims: bool) -> None:
    send = scene.claim if by_claims else scene.publish
    scene.publish(overlap="buffer_one")
    scene.start()
    scene.hold(1, overlap="buffer_one")
    assert send(1, overlap="buffer_one") is Verdict.HELD
    scene.end()
    assert scene.hold(1, overlap="buffer_one") is Verdict.DONE
    assert send(1, overlap="buffer_one") is Verdict.DONE
    assert scene.run(1).state == ("claimed" if by_claims else "published")
    assert send(1, overlap="buffer_one") is Verdict.DECIDED
    assert scene.start("u", second=1).gate is Gate.WON


def test_line_7_the_claim_looks_again(scene: Scene) -> None:
    assert scene.hold(1, overlap="skip") is Verdict.DONE
    scene.publish()  # opened between
    assert scene.publish(1, overlap="skip") is Verdict.HELD
    assert scene.claim(1, overlap="skip") is Verdict.HELD
    assert scene.store.cursors()["e"] == scene.cursor()


def test_line_3_cancel_other_asks_what_runs_to_stop_and_is_sent_kill_after_later(scene: Scene) -> None:
    policy = {"overlap": "cancel_other", "kill_after": timedelta(milliseconds=2)}
    scene.publish(**policy)
    scene.start()
    assert scene.hold(1, **policy) is Verdict.HELD
    assert scene.beat() is Pulse.CANCEL
    assert scene.events == ["published", "started", "cancel", "waiting"]
    scene.let_pass(MOMENT)
    assert scene.hold(1, **policy) is Verdict.DONE
    assert scene.publish(1, **policy) is Verdict.DONE
    assert scene.start("u", second=1).gate is Gate.WON


def test_line_3_a_later_one_that_takes_a_waiting_ones_place_waits_no_longer(scene: Scene) -> None:
    scene.publish(overlap="cancel_other")
    scene.start()
    scene.hold(1, overlap="cancel_other", kill_after=timedelta(milliseconds=2))
    scene.hold(2, overlap="cancel_other", kill_after=HOUR)
    scene.let_pass(MOMENT)
    assert scene.hold(2, overlap="cancel_other") is Verdict.DONE


def test_line_3_cancel_other_withdraws_what_does_not_run(scene: Scene) -> None:
    scene.publish(overlap="cancel_other")
    assert scene.hold(1, overlap="cancel_other") is Verdict.DONE
    assert scene.events == ["published", "withdrawn"]
    assert scene.start().gate is Gate.SETTLED


@pytest.mark.parametrize("state", ["missed", "coalesced", "skipped", "dead", "withdrawn"])
def test_line_8_what_waits_may_be_settled(scene: Scene, state: Any) -> None:
    scene.publish(overlap="buffer_one")
    scene.hold(1, overlap="buffer_one")
    found = scene.run(1)
    assert scene.store.settle_run(found, state, "for a test", epoch=1).verdict is Verdict.DONE
    assert scene.store.settle_run(found, state, "for a test", epoch=1).verdict is Verdict.DECIDED
    assert scene.events == ["published", "waiting", state]
    assert scene.start("u", second=1).gate is Gate.SETTLED


def test_line_3_a_nominal_too_far_ahead_of_the_stores_clock_is_refused(scene: Scene) -> None:
    assert scene.hold(400, overlap="skip") is Verdict.EARLY


def test_line_3_what_was_settled_before_is_decided(scene: Scene) -> None:
    scene.publish()
    scene.end("revoked", "")
    assert scene.hold(overlap="buffer_one") is Verdict.DECIDED


# ---- line 14


def test_line_14_what_is_not_started_in_time_is_due_and_lost(scene: Scene) -> None:
    scene.publish(overlap="skip", **SHORT)
    scene.let_pass(MOMENT)
    (due,) = scene.store.survey().due
    assert (due.key, due.state) == (scene.occurrence().key, "published")
    assert scene.store.settle_run(due, "lost", "late", epoch=1).verdict is Verdict.DONE
    assert scene.store.last()["e"][1] == "lost"
    assert scene.hold(1, overlap="skip") is Verdict.DONE  # it counts no longer


def test_line_14_what_has_started_meanwhile_is_not_lost(scene: Scene) -> None:
    scene.publish(**SHORT)
    scene.let_pass(MOMENT)
    (due,) = scene.store.survey().due
    scene.start()
    assert scene.store.settle_run(due, "lost", "late", epoch=1).verdict is Verdict.DECIDED
    scene.end("retry")
    assert scene.store.settle_run(due, "lost", "late", epoch=1).verdict is Verdict.DECIDED  # published, but later
    assert scene.state == "published"


# ---- line 25


def test_line_25_a_lapsed_run_is_found_and_abandoned(scene: Scene) -> None:
    lapsed(scene)
    survey = scene.store.survey()
    (run,) = survey.lapsed
    assert (run.key, run.state, run.token) == (scene.occurrence().key, "running", "t")
    assert survey.due == ()
    assert run.deadline <= survey.time
    answer = scene.store.abandon(run, epoch=1)
    assert (answer.verdict, answer.detail) == (Verdict.DONE, "abandoned")
    assert scene.store.abandon(run, epoch=1).verdict is Verdict.DECIDED
    assert [found.state for found in scene.store.survey().due] == ["abandoned"]
    assert scene.events == ["published", "started", "abandoned"]


def test_line_25_a_noted_successor_is_published_instead(scene: Scene) -> None:
    lapsed(scene)
    assert scene.start("u", (1, 1)).gate is Gate.SUCCESSOR
    answer = scene.store.abandon(scene.run(), epoch=1)
    assert (answer.verdict, answer.detail) == (Verdict.DONE, "published")
    assert scene.run().order == (1, 1)
    assert scene.beat("t") is Pulse.LOST
    assert scene.start("u", (1, 1)).gate is Gate.WON


def test_line_25_a_late_retry_of_the_freed_run_is_decided(scene: Scene) -> None:
    lapsed(scene)
    scene.start("u", (1, 1))
    scene.abandon()
    assert scene.end("retry", "t") is Ended.DECIDED
    assert scene.run().order == (1, 1)


def test_line_25_who_lives_or_has_ended_is_not_abandoned(scene: Scene) -> None:
    scene.publish()
    scene.start()
    run = scene.run()
    assert scene.store.abandon(run, epoch=1).verdict is Verdict.DECIDED
    scene.end()
    assert scene.store.abandon(run, epoch=1).verdict is Verdict.DECIDED
    assert scene.state == "done"


# ---- line 26


def test_line_26_an_abandoned_one_is_claimed_under_the_next_dispatch(scene: Scene) -> None:
    abandoned(scene)
    scene.runs.checkpoint(scene.occurrence().key, "t", b"late")
    found = scene.run()
    assert scene.store.redispatch(found, b"again", epoch=1).verdict is Verdict.DONE
    assert scene.store.redispatch(found, b"again", epoch=1).verdict is Verdict.DECIDED
    (claim,) = scene.store.open_occurrences()
    assert (claim.state, claim.dispatch, claim.payload) == ("claimed", 2, b"again")
    assert scene.start("old", (1, 0)).gate is Gate.STALE
    assert scene.confirm() is Verdict.DONE
    started = scene.start("u", (2, 0))
    assert (started.gate, started.starts) == (Gate.WON, 2)
    assert scene.run().deliveries == 2
    assert scene.events == ["published", "started", "abandoned", "redispatched", "published", "started"]


def test_line_26_the_message_of_a_later_attempt_keeps_its_retries(scene: Scene) -> None:
    scene.publish()
    scene.start("a")
    scene.end("retry", "a")
    scene.start("b", (1, 1))
    scene.end("abandoned", "b", (1, 1))
    scene.redispatch()
    assert scene.start("c", (2, 1)).gate is Gate.WON


def test_line_26_what_a_copy_has_started_is_not_redispatched(scene: Scene) -> None:
    abandoned(scene)
    found = scene.run()
    scene.start("u")
    assert scene.store.redispatch(found, b"again", epoch=1).verdict is Verdict.DECIDED
    assert scene.store.settle_run(found, "dead", "abandoned", epoch=1, letter="{}").verdict is Verdict.DECIDED
    assert scene.store.dead_letters() == {}
    assert scene.run().token == "u"


def test_line_26_by_policy_it_is_dead(scene: Scene) -> None:
    abandoned(scene)
    answer = scene.store.settle_run(scene.run(), "dead", "abandoned", epoch=1, letter=scene.letter("abandoned"))
    assert answer.verdict is Verdict.DONE
    assert list(scene.store.dead_letters()) == [scene.occurrence().key]
    assert scene.start("u").gate is Gate.SETTLED


def test_line_26_a_next_leader_takes_the_claim_over(scene: Scene) -> None:
    abandoned(scene)
    scene.redispatch()
    scene.store.take_office(2)
    taken = scene.store.reclaim(scene.occurrence(), epoch=2)
    assert (taken.dispatch, taken.payload) == (2, b"again")


# ---- line 28


def test_line_28_a_replay_is_a_claim_under_a_higher_dispatch(scene: Scene) -> None:
    dead(scene)
    request = scene.ask("replay")
    options = {"policy": Policy(max_deliveries=2), "epoch": 1}
    lower = scene.store.replay(request, scene.claimed(), b"anew", dispatch=1, **options)
    assert (lower.verdict, lower.detail) == (Verdict.DECIDED, "2")
    assert scene.store.replay(request, scene.claimed(), b"anew", dispatch=2, **options).verdict is Verdict.DONE
    assert scene.store.replay(request, scene.claimed(), b"anew", dispatch=2, **options).verdict is Verdict.DECIDED
    assert scene.store.dead_letters() == {}
    assert scene.store.survey().requests == ()
    assert scene.store.outcome(request.id) == "replayed as dispatch 2"
    assert scene.run().policy == Policy(max_deliveries=2)
    assert (scene.store.audit()[-1].event, scene.store.audit()[-1].detail) == ("replayed", "somebody: for a test")
    # the old copy never wins: neither before the replay runs, nor while, nor after
    assert scene.start("old", (1, 5)).gate is Gate.STALE
    scene.confirm()
    assert scene.start("new", (2, 0)).gate is Gate.WON
    assert scene.start("old", (1, 5)).gate is Gate.STALE
    assert scene.end("done", "new", (2, 0)) is Ended.DONE
    assert scene.start("old", (1, 5)).gate is Gate.SETTLED


def test_line_28_a_replay_may_die_again_and_be_replayed_again(scene: Scene) -> None:
    dead(scene)
    scene.store.replay(scene.ask("replay"), scene.claimed(), b"anew", dispatch=2, policy=Policy(), epoch=1)
    scene.start("new", (2, 0))
    scene.end("dead", "new", (2, 0), letter=scene.letter())
    assert scene.start("copy", (2, 0)).gate is Gate.SETTLED
    answer = scene.store.replay(scene.ask("replay"), scene.claimed(), b"", dispatch=3, policy=Policy(), epoch=1)
    assert answer.verdict is Verdict.DONE


def test_line_28_a_letter_that_outlived_its_mark_does_not_replay_what_is_done_since(scene: Scene) -> None:
    dead(scene)
    scene.forget_marks()
    scene.start("copy")
    scene.end("done", "copy")
    answer = scene.store.replay(scene.ask("replay"), scene.claimed(), b"", dispatch=9, policy=Policy(), epoch=1)
    assert (answer.verdict, answer.detail) == (Verdict.DECIDED, "")


def test_line_28_without_its_record_a_dead_mark_admits_only_a_higher_dispatch(scene: Scene) -> None:
    dead(scene)
    assert scene.start("copy", (1, 1)).gate is Gate.SETTLED
    assert scene.start("replayed", (2, 0)).gate is Gate.WON


def test_line_28_a_discarded_letter_is_gone_and_the_mark_stays(scene: Scene) -> None:
    dead(scene)
    request = scene.ask("discard")
    assert scene.store.discard(request, request.key, epoch=1).verdict is Verdict.DONE
    assert scene.store.discard(request, request.key, epoch=1).verdict is Verdict.DECIDED
    assert scene.store.dead_letters() == {}
    assert scene.store.outcome(request.id) == "discarded"
    assert scene.events[-1] == "discarded"
    assert scene.start("u").gate is Gate.SETTLED


# ---- lines 29 and 30


@pytest.mark.parametrize("state", ["waiting", "claimed", "published", "abandoned"])
def test_line_29_what_does_not_run_is_withdrawn(scene: Scene, state: str) -> None:
    second = 0
    if state == "waiting":
        second = 1
        scene.publish(overlap="buffer_one")
        scene.hold(1, overlap="buffer_one")
    elif state == "claimed":
        scene.claim()
    elif state == "published":
        scene.publish()
    else:
        abandoned(scene)
    key = scene.occurrence(second).key
    request = scene.ask("cancel", key)
    answer = scene.store.cancel(request, key, epoch=1)
    assert (answer.verdict, answer.detail) == (Verdict.DONE, "withdrawn")
    assert scene.store.outcome(request.id) == "withdrawn"
    assert scene.store.cancel(request, key, epoch=1).verdict is Verdict.DECIDED
    assert scene.store.audit()[-1].event == "withdrawn"
    assert scene.start("late", second=second).gate is Gate.SETTLED


def test_line_30_what_runs_is_asked_to_stop(scene: Scene) -> None:
    scene.publish()
    scene.start()
    request = scene.ask("cancel")
    answer = scene.store.cancel(request, request.key, epoch=1)
    assert (answer.verdict, answer.detail) == (Verdict.DONE, "asked to stop")
    assert scene.run().cancelled
    assert [scene.beat(), scene.beat()] == [Pulse.CANCEL] * 2
    assert scene.store.outcome(request.id) == "asked to stop"
    assert scene.end("revoked", reason="cancel") is Ended.DONE


def test_line_30_what_does_not_obey_ends_as_it_ends(scene: Scene) -> None:
    scene.publish()
    scene.start()
    scene.store.cancel(scene.ask("cancel"), scene.occurrence().key, epoch=1)
    assert scene.end("done") is Ended.DONE


def test_line_29_nothing_open_is_decided(scene: Scene) -> None:
    request = scene.ask("cancel")
    assert scene.store.cancel(request, request.key, epoch=1).verdict is Verdict.DECIDED
    assert scene.store.survey().requests == (request,)


# ---- lines 32 to 35


def test_line_32_without_a_beat_runs_go_on(scene: Scene) -> None:
    scene.publish()
    scene.start("a")
    scene.end("abandoned", "a")
    assert scene.start("b").gate is Gate.WON
    scene.store.take_office(2)
    assert scene.beat("b") is Pulse.ALIVE
    assert scene.end("done", "b") is Ended.DONE


def test_line_33_a_main_that_died_owing_an_end_may_run_again(scene: Scene) -> None:
    abandoned(scene)
    scene.redispatch()
    assert scene.start("u", (2, 0)).gate is Gate.WON


def test_line_34_a_lapse_while_the_store_was_away_is_restored_by_the_first_heartbeat(scene: Scene) -> None:
    lapsed(scene)
    assert scene.beat() is Pulse.ALIVE
    assert scene.store.survey().lapsed == ()
    assert scene.end() is Ended.DONE


def test_line_35_a_message_that_the_broker_lost_frees_its_entry(scene: Scene) -> None:
    scene.publish(overlap="skip", **SHORT)
    scene.let_pass(MOMENT)
    assert scene.hold(1, overlap="skip") is Verdict.HELD
    scene.store.settle_run(scene.run(), "lost", "late", epoch=1)
    assert scene.hold(2, overlap="skip") is Verdict.DONE


# ---- line 37


@pytest.mark.parametrize("state", ["done", "dead", "revoked"])
def test_line_37_any_settle_leaves_a_mark_and_nothing_open(scene: Scene, state: Any) -> None:
    scene.publish()
    scene.start()
    scene.end(state, letter=scene.letter() if state == "dead" else "")
    assert scene.store.runs() == []
    survey = scene.store.survey()
    assert (survey.lapsed, survey.due) == ((), ())
    assert scene.store.last()["e"][:2] == (scene.now, state)
    assert scene.events[-1] == state
    assert scene.publish() is Verdict.DECIDED


# ---- the fence, surveys, requests


def test_no_tracked_transition_of_an_earlier_leader_does_anything(scene: Scene) -> None:
    abandoned(scene)
    request, before, run = scene.ask("cancel"), scene.store.runs(), scene.run()
    scene.store.take_office(2)
    store, claimed = scene.store, scene.claimed()
    answers = [
        store.abandon(run, epoch=1),
        store.redispatch(run, b"", epoch=1),
        store.settle_run(run, "dead", "", epoch=1),
        store.cancel(request, request.key, epoch=1),
        store.discard(request, request.key, epoch=1),
        store.replay(request, claimed, b"", policy=Policy(), dispatch=9, epoch=1),
        store.answer(request, "", epoch=1),
        *store.hold([Hold(scene.occurrence(1), scene.cursor(1), scene.bucket(1), Policy(overlap="skip"))], epoch=1),
    ]
    assert [answer.verdict for answer in answers] == [Verdict.STALE] * 8
    assert scene.store.runs() == before
    scene.wipe()
    assert scene.hold(1, overlap="skip") is Verdict.WIPED
    assert scene.store.abandon(run, epoch=2).verdict is Verdict.WIPED


def test_claims_that_cannot_be_sent_hide_nothing_that_is_due(scene: Scene) -> None:
    policy = Policy(**SHORT)
    for second in range(-BATCH, 0):
        claim = Claim(scene.occurrence(second), scene.bucket(second), scene.cursor(second), b"m", Tracking(policy))
        scene.store.claim([claim], epoch=1)
    scene.publish(**SHORT)
    scene.let_pass(MOMENT)
    assert [run.state for run in scene.store.survey().due] == ["published"]
    assert len(scene.store.open_occurrences()) == BATCH


def test_a_survey_is_bounded_and_the_most_urgent_come_first(scene: Scene) -> None:
    for second in range(3):
        scene.publish(second, **SHORT)
        scene.let_pass(MOMENT)
    due = scene.store.survey(limit=2).due
    assert [run.key for run in due] == [scene.occurrence(n).key for n in (0, 1)]


def test_runs_may_be_asked_for_one_entry(scene: Scene) -> None:
    scene.publish()
    assert len(scene.store.runs("e")) == 1
    assert scene.store.runs("another") == []


def test_a_request_is_kept_until_it_is_answered(scene: Scene) -> None:
    request = scene.ask("replay", "no such key", why="")
    assert scene.store.outcome(request.id) is None
    assert (request.kind, request.key, request.by, request.why) == ("replay", "no such key", "somebody", "")
    assert request.expires == scene.now + 300 * SECOND
    assert scene.store.answer(request, "there is no letter", epoch=1).verdict is Verdict.DONE
    assert scene.store.answer(request, "something else", epoch=1).verdict is Verdict.DECIDED
    assert scene.store.outcome(request.id) == "there is no letter"
    assert scene.store.survey().requests == ()


def test_requests_come_in_the_order_in_which_they_were_put(scene: Scene) -> None:
    asked = [scene.ask("cancel", f"key {n}") for n in range(3)]
    assert scene.store.survey().requests == tuple(asked)


def test_workers_that_attend_are_seen(scene: Scene) -> None:
    assert not scene.store.workers_lived()
    assert scene.store.workers() == []
    presence = WorkerPresence("host:1:x", "celery@host", "prefork", "0", 2)
    scene.runs.attend(presence)
    scene.runs.attend(presence)
    assert scene.store.workers_lived()
    assert scene.store.workers() == [presence]

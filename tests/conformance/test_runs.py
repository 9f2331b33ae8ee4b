"""The worker's side of the ledger, line by line of the state table: one suite for `RedisRuns` and `MemoryRuns`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from scenes import MOMENT, SECOND, SHORT, Scene

from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.model import Policy
from celery_tzbeat.store.protocol import BATCH, Claim, Dispatch, Verdict
from celery_tzbeat.store.runs import Beat, End, Ended, Gate, Order, Pulse, Start

ONCE = {"delivery": "at_most_once"}


def abandoned(scene: Scene) -> None:
    """An occurrence whose run has lapsed, and is written down so."""
    scene.publish(**SHORT)
    scene.start(**SHORT)
    scene.let_pass(MOMENT)
    assert scene.abandon() is Verdict.DONE
    assert scene.state == "abandoned"


# ---- line 12


def test_line_12_a_published_occurrence_runs(scene: Scene) -> None:
    scene.publish()
    started = scene.start("t")
    assert (started.gate, started.starts, started.checkpoint) == (Gate.WON, 1, None)
    run = scene.run()
    assert (run.state, run.token, run.worker, run.order, run.starts) == ("running", "t", "worker", (1, 0), 1)
    assert run.acks_late
    assert timedelta() < run.deadline - scene.store.time() <= timedelta(seconds=60)
    assert scene.events == ["published", "started"]


def test_line_12_the_gate_may_be_faster_than_the_confirmation(scene: Scene) -> None:
    scene.claim()
    assert scene.start().gate is Gate.WON
    assert scene.confirm() is Verdict.DECIDED
    assert scene.state == "running"


def test_line_12_a_higher_order_starts_where_nothing_runs(scene: Scene) -> None:
    scene.publish()
    assert scene.start("t", (1, 2)).gate is Gate.WON
    assert scene.run().order == (1, 2)


def test_line_12_a_claim_that_is_not_tracked_is_from_its_start_on(scene: Scene) -> None:
    claim = Claim(scene.occurrence(), scene.bucket(), scene.cursor(), b"message")
    scene.store.claim([claim], epoch=1)
    assert scene.start(max_deliveries=3).gate is Gate.WON
    assert scene.confirm() is Verdict.DECIDED
    assert scene.run().policy == Policy(max_deliveries=3)
    assert scene.end() is Ended.DONE
    assert scene.state == "done"


def test_line_12_the_same_token_again_has_won_with_the_same_numbers(scene: Scene) -> None:
    scene.publish()
    first = scene.start("t")
    assert scene.start("t") == first
    assert scene.run().deliveries == 1
    assert scene.events.count("started") == 1


def test_line_12_starts_count_every_start_and_deliveries_those_that_no_retry_asked_for(scene: Scene) -> None:
    scene.publish()
    scene.start("a", (1, 0))
    scene.end("retry", "a", (1, 0))
    assert scene.start("b", (1, 1)).starts == 2
    scene.end("abandoned", "b", (1, 1))
    assert scene.start("c", (1, 1)).starts == 3
    run = scene.run()
    assert (run.starts, run.deliveries) == (3, 2)


def test_line_12_asked_without_its_message_a_start_needs_the_ledger_s(scene: Scene) -> None:
    scene.publish()
    assert scene.start(payload=b"").gate is Gate.WON
    assert scene.run().payload != b""
    scene.end()
    assert scene.start("u", second=5, payload=b"").gate is Gate.UNKEPT
    assert len(scene.events) == 3  # nothing was written
    assert scene.start("u", second=5).gate is Gate.WON


@pytest.mark.parametrize("policy", [{}, {"delivery": "at_most_once"}])
def test_line_38_a_start_whose_body_never_began_is_returned(scene: Scene, policy: dict[str, Any]) -> None:
    scene.publish(**policy)
    for token in ("a", "b", "c"):
        assert scene.start(token, **policy).starts == 1
        assert scene.end("given_back", token, **policy) is Ended.DONE
        assert scene.state == "published"
    assert scene.end("given_back", "c", **policy) is Ended.DECIDED
    assert scene.start("d", **policy).gate is Gate.WON
    assert scene.end("given_back", "c", **policy) is Ended.DECIDED
    assert (scene.run().starts, scene.run().deliveries, scene.state) == (1, 1, "running")
    assert scene.end("done", "d", **policy) is Ended.DONE
    assert scene.end("given_back", "d", **policy) is Ended.DECIDED
    assert scene.state == "done"


def test_line_38_a_returned_start_of_a_retry_leaves_its_number(scene: Scene) -> None:
    scene.publish()
    scene.start("a", (1, 0))
    scene.end("retry", "a", (1, 0))
    scene.start("b", (1, 1))
    scene.end("given_back", "b", (1, 1))
    assert scene.start("c", (1, 1)).starts == 2
    assert scene.end("done", "c", (1, 1)) is Ended.DONE


def test_line_38_starts_of_a_retry_that_are_given_back_are_no_deliveries(scene: Scene) -> None:
    scene.publish(max_deliveries=1)
    scene.start("a", (1, 0), max_deliveries=1)
    scene.end("retry", "a", (1, 0))
    for token in ("b", "c", "d"):
        assert scene.start(token, (1, 1), max_deliveries=1).gate is Gate.WON
        scene.end("given_back", token, (1, 1))
    assert scene.run().deliveries == 1


def test_line_38_after_a_start_that_is_given_back_the_end_of_an_earlier_run_still_counts(scene: Scene) -> None:
    scene.publish(**SHORT)
    scene.start("a", (1, 0), **SHORT)
    scene.let_pass(MOMENT)
    scene.abandon()
    scene.redispatch()
    scene.start("b", (2, 0))
    scene.end("given_back", "b", (2, 0))
    assert scene.end("done", "a", (1, 0)) is Ended.DONE
    assert scene.start("c", (2, 0)).gate is Gate.SETTLED


@pytest.mark.parametrize("policy", [{}, {"delivery": "at_most_once"}, {"on_abandoned": "dead_letter"}])
def test_line_38_where_a_copy_was_turned_away_meanwhile_the_message_is_sent_again(
    scene: Scene, policy: dict[str, Any]
) -> None:
    scene.publish(**policy)
    scene.start("a", late=False, **policy)
    assert scene.start("copy", late=False, **policy).gate is Gate.LIVE  # so it is acknowledged
    assert scene.end("given_back", "a", **policy) is Ended.DONE
    assert (scene.state, scene.run().unrun) == ("abandoned", True)
    assert scene.store.survey().due[0].unrun
    assert scene.redispatch() is Verdict.DONE
    again = scene.start("b", (2, 0), late=False, **policy)
    assert (again.gate, again.starts) == (Gate.WON, 1)
    assert not scene.run().unrun


def test_line_38_where_a_copy_was_turned_away_one_that_still_comes_runs(scene: Scene) -> None:
    scene.publish()
    scene.start("a", late=False)
    scene.start("copy", late=False)
    scene.end("given_back", "a")
    assert scene.start("b", late=False).gate is Gate.WON
    scene.let_pass(MOMENT)
    assert scene.end("abandoned", "b") is Ended.DONE
    assert not scene.run().unrun


def test_line_38_a_successor_that_stands_by_is_next(scene: Scene) -> None:
    scene.publish()
    scene.start("a")
    scene.start("copy")
    assert scene.start("b", (1, 1)).gate is Gate.SUCCESSOR
    assert scene.end("given_back", "a") is Ended.DONE
    assert scene.state == "published"
    assert scene.start("b", (1, 1)).gate is Gate.WON


# ---- line 13


@pytest.mark.parametrize("state", ["expired", "revoked"])
def test_line_13_what_never_started_is_settled_by_the_gate(scene: Scene, state: str) -> None:
    scene.publish()
    assert scene.end(state, "", reason="by Celery") is Ended.DONE  # type: ignore[arg-type]
    assert scene.end(state, "", reason="by Celery") is Ended.DECIDED  # type: ignore[arg-type]
    assert scene.store.runs() == []
    assert scene.store.last()["e"][1] == state
    assert scene.events == ["published", state]
    assert scene.start().gate is Gate.SETTLED


def test_line_13_a_claim_may_expire_before_it_is_confirmed(scene: Scene) -> None:
    scene.claim()
    assert scene.end("expired", "") is Ended.DONE
    assert scene.confirm() is Verdict.DECIDED


def test_line_13_neither_a_run_nor_an_abandoned_one_expires(scene: Scene) -> None:
    abandoned(scene)
    assert scene.end("revoked", "") is Ended.REFUSED
    assert scene.start("u").gate is Gate.WON
    assert scene.end("expired", "") is Ended.REFUSED
    assert scene.state == "running"


def test_line_13_an_old_copy_does_not_expire_a_later_order(scene: Scene) -> None:
    scene.publish()
    scene.start()
    scene.end("retry")
    assert scene.end("expired", "", (1, 0)) is Ended.REFUSED
    assert scene.state == "published"


def test_line_13_without_a_record_the_mark_is_written(scene: Scene) -> None:
    assert scene.end("revoked", "") is Ended.DONE
    assert scene.start().gate is Gate.SETTLED


# ---- line 15


def test_line_15_a_copy_of_what_runs_is_a_duplicate(scene: Scene) -> None:
    scene.publish()
    scene.start("t")
    before = scene.run()
    found = scene.start("u")
    assert (found.gate, found.state) == (Gate.LIVE, "running")
    assert scene.run() == before


def test_line_15_a_lower_order_is_stale(scene: Scene) -> None:
    scene.publish()
    scene.start("t", (1, 0))
    scene.end("retry", "t")
    assert scene.start("u", (1, 0)).gate is Gate.STALE
    scene.start("v", (1, 1))
    assert scene.start("u", (1, 0)).gate is Gate.STALE
    assert scene.run().token == "v"


@pytest.mark.parametrize("state", ["done", "revoked", "dead"])
def test_line_15_a_mark_refuses(scene: Scene, state: str) -> None:
    scene.publish()
    scene.start()
    scene.end(state, letter=scene.letter() if state == "dead" else "")  # type: ignore[arg-type]
    found = scene.start("u", (1, 7))
    assert (found.gate, found.state) == (Gate.SETTLED, state)
    assert scene.store.runs() == []


def test_line_15_what_waits_is_owed_by_the_leader(scene: Scene) -> None:
    scene.publish(overlap="buffer_one")
    scene.start()
    assert scene.hold(1, overlap="buffer_one") is Verdict.HELD
    assert scene.start("u", second=1).gate is Gate.LIVE


# ---- line 16


def test_line_16_a_successor_waits_for_its_predecessors_token(scene: Scene) -> None:
    scene.publish()
    scene.start("a", (1, 0))
    assert scene.start("b", (1, 1)).gate is Gate.SUCCESSOR
    assert scene.run().token == "a"
    assert scene.end("retry", "a") is Ended.DONE
    won = scene.start("b", (1, 1))
    assert (won.gate, won.starts) == (Gate.WON, 2)


def test_line_16_a_parked_successor_is_the_next_however_its_predecessor_ends(scene: Scene) -> None:
    scene.publish()
    scene.start("a", (1, 0))
    scene.start("b", (1, 1))
    assert scene.end("abandoned", "a") is Ended.DONE
    assert (scene.state, scene.run().order) == ("published", (1, 1))
    assert scene.start("b", (1, 1)).gate is Gate.WON


def test_line_16_of_two_successors_the_later_is_noted(scene: Scene) -> None:
    scene.publish()
    scene.start("a", (1, 0))
    scene.start("c", (2, 0))
    scene.start("b", (1, 1))
    scene.end("retry", "a")
    assert scene.run().order == (2, 0)
    assert scene.start("b", (1, 1)).gate is Gate.STALE


def test_line_16_a_successor_of_what_is_done_is_a_duplicate(scene: Scene) -> None:
    scene.publish()
    scene.start("a", (1, 0))
    scene.start("b", (1, 1))
    scene.end("done", "a")
    assert scene.start("b", (1, 1)).gate is Gate.SETTLED


# ---- line 17


def test_line_17_without_record_and_mark_the_run_is_rebuilt_from_the_message(scene: Scene) -> None:
    started = scene.start("t", max_deliveries=3)
    assert (started.gate, started.starts) == (Gate.WON, 1)
    run = scene.run()
    assert (run.entry, run.nominal, run.bucket, run.payload) == ("e", scene.now, scene.bucket(), b"message")
    assert run.policy == Policy(max_deliveries=3)
    assert scene.end() is Ended.DONE
    assert scene.start("u").gate is Gate.SETTLED


def test_line_17_what_was_settled_as_sent_runs(scene: Scene) -> None:
    scene.store.dispatch([Dispatch(scene.occurrence(), scene.cursor(), scene.bucket(), ())], epoch=1)
    assert scene.start(**ONCE).gate is Gate.WON
    scene.end(**ONCE)
    assert scene.start("u", **ONCE).gate is Gate.SETTLED


def test_line_17_what_was_lost_runs_when_it_still_comes(scene: Scene) -> None:
    scene.publish(**SHORT)
    scene.let_pass(MOMENT)
    assert scene.store.settle_run(scene.run(), "lost", "late", epoch=1).verdict is Verdict.DONE
    assert scene.start().gate is Gate.WON


def test_line_17_at_most_once_does_not_run_what_the_ledger_does_not_know(scene: Scene) -> None:
    assert scene.start(**ONCE).gate is Gate.UNKNOWN
    assert scene.store.runs() == []
    assert scene.end("dead", "", reason="unknown", letter=scene.letter("unknown"), **ONCE) is Ended.DONE
    assert list(scene.store.dead_letters()) == [scene.occurrence().key]


def test_line_17_an_ordinary_message_behind_the_gate_has_a_record_too(scene: Scene) -> None:
    ticket = Ticket("test/0", "order-42", "", None, 0, 1, 7, 3)
    start = Start(ticket, Order(1, 0), "t", "worker", True, b"message")
    assert scene.runs.start(start).gate is Gate.WON
    (run,) = scene.store.runs()
    assert (run.key, run.entry, run.nominal) == ("order-42", "", None)
    assert scene.runs.heartbeat([Beat(ticket, Order(1, 0), "t", "worker", True, b"message")]) == [Pulse.ALIVE]
    assert scene.store.open_occurrences() == []
    assert scene.runs.end([End(ticket, Order(1, 0), "t", "done")]) == [Ended.DONE]
    assert scene.runs.start(start).gate is Gate.SETTLED
    assert "" not in scene.store.last()


# ---- at_most_once


def test_at_most_once_a_key_starts_once(scene: Scene) -> None:
    scene.publish(**ONCE)
    assert scene.start("a", **ONCE).gate is Gate.WON
    assert scene.start("a", **ONCE).gate is Gate.WON  # the same start
    assert scene.start("b", **ONCE).gate is Gate.LIVE
    assert scene.start("b", (1, 1), **ONCE).gate is Gate.SUCCESSOR
    scene.end("retry", "a", **ONCE)
    found = scene.start("b", (1, 1), **ONCE)
    assert (found.gate, found.starts) == (Gate.SECOND_START, 1)
    assert scene.end("dead", "", (1, 1), reason="second_start", letter=scene.letter(), **ONCE) is Ended.DONE
    assert scene.state == "dead"


def test_at_most_once_an_abandoned_run_is_not_started_by_a_copy(scene: Scene) -> None:
    scene.publish(**ONCE)
    scene.start(**ONCE)
    scene.end("abandoned", **ONCE)
    assert scene.start("b", **ONCE).gate is Gate.LIVE
    assert scene.start("b", (1, 1), **ONCE).gate is Gate.SECOND_START


def test_at_most_once_a_retry_whose_record_is_gone_is_a_second_start(scene: Scene) -> None:
    assert scene.start("b", (1, 1), **ONCE).gate is Gate.SECOND_START


# ---- line 18


def test_line_18_a_run_that_started_without_the_store_registers_at_its_first_heartbeat(scene: Scene) -> None:
    scene.publish()
    assert scene.beat("t") is Pulse.RESUMED
    run = scene.run()
    assert (run.state, run.token, run.starts) == ("running", "t", 1)
    assert scene.beat("t") is Pulse.ALIVE
    assert scene.events == ["published", "resumed"]
    assert scene.end() is Ended.DONE


def test_line_18_held_by_another_both_go_on_and_it_is_counted_once(scene: Scene) -> None:
    scene.publish()
    scene.start("a")
    assert [scene.beat("b"), scene.beat("b"), scene.beat("a")] == [Pulse.OVERLAP, Pulse.OVERLAP, Pulse.ALIVE]
    assert scene.events.count("overlap") == 1
    assert scene.end("done", "b") is Ended.REFUSED
    assert scene.end("done", "a") is Ended.DONE
    assert scene.beat("b") is Pulse.LOST


def test_line_18_an_end_may_be_the_first_that_the_store_hears(scene: Scene) -> None:
    scene.publish()
    assert scene.end("done", "never registered") is Ended.DONE
    assert scene.start().gate is Gate.SETTLED


def test_line_18_a_retry_may_be_the_first_that_the_store_hears(scene: Scene) -> None:
    scene.publish()
    assert scene.end("retry", "never registered") is Ended.DONE
    assert (scene.state, scene.run().order) == ("published", (1, 1))
    assert scene.end("retry", "never registered") is Ended.DECIDED


def test_line_18_a_run_of_an_order_left_behind_is_lost(scene: Scene) -> None:
    scene.publish()
    scene.start("a")
    scene.end("retry", "a")
    assert scene.beat("b", (1, 0)) is Pulse.LOST


# ---- line 19


def test_line_19_a_heartbeat_renews_the_lease(scene: Scene) -> None:
    scene.publish()
    scene.start()
    before = scene.run().deadline
    scene.let_pass(MOMENT)
    assert scene.beat() is Pulse.ALIVE
    assert scene.run().deadline > before


def test_line_19_a_lapsed_lease_is_restored_until_abandoned_is_written(scene: Scene) -> None:
    scene.publish(**SHORT)
    scene.start(**SHORT)
    scene.let_pass(MOMENT)
    (lapsed,) = scene.store.survey().lapsed
    assert scene.beat() is Pulse.ALIVE
    assert scene.store.survey().lapsed == ()
    assert scene.store.abandon(lapsed, epoch=1).verdict is Verdict.DECIDED
    assert scene.state == "running"


def test_line_19_after_abandoned_is_written_the_run_is_lost(scene: Scene) -> None:
    abandoned(scene)
    assert scene.beat() is Pulse.LOST
    assert scene.state == "abandoned"


def test_line_19_a_record_that_a_wipe_took_is_written_anew(scene: Scene) -> None:
    scene.publish()
    scene.start()
    scene.wipe()
    assert scene.beat() is Pulse.RESUMED
    assert scene.start("u").gate is Gate.LIVE
    assert scene.beat() is Pulse.ALIVE
    assert scene.end() is Ended.DONE
    assert scene.start("u").gate is Gate.SETTLED


def test_line_19_a_heartbeat_behind_the_end_revives_nothing(scene: Scene) -> None:
    scene.publish()
    scene.start()
    scene.end()
    assert scene.beat() is Pulse.LOST
    assert scene.store.runs() == []


def test_line_19_a_whole_batch_beats_by_one_call(scene: Scene) -> None:
    tickets = [scene.ticket(second) for second in range(-BATCH, 0)]
    for ticket in tickets:
        scene.runs.start(Start(ticket, Order(1, 0), ticket.key, "worker", True, b"message"))
    beats = [Beat(ticket, Order(1, 0), ticket.key, "worker", True, b"message") for ticket in tickets]
    assert scene.runs.heartbeat(beats) == [Pulse.ALIVE] * BATCH
    ends = [End(ticket, Order(1, 0), ticket.key, "done") for ticket in tickets]
    assert scene.runs.end(ends) == [Ended.DONE] * BATCH
    assert scene.runs.heartbeat(beats) == [Pulse.LOST] * BATCH
    assert scene.runs.heartbeat([]) == scene.runs.end([]) == []


# ---- line 20


def test_line_20_a_run_that_is_done_is_settled(scene: Scene) -> None:
    scene.publish()
    scene.start()
    assert scene.end() is Ended.DONE
    assert scene.store.runs() == []
    nominal, state, _ = scene.store.last()["e"]
    assert (nominal, state) == (scene.now, "done")
    assert scene.events == ["published", "started", "done"]
    assert scene.store.audit()[-1].detail == "1.500 s"


def test_line_20_an_end_whose_reply_was_lost_is_decided(scene: Scene) -> None:
    scene.publish()
    scene.start()
    assert [scene.end(), scene.end()] == [Ended.DONE, Ended.DECIDED]
    assert scene.events.count("done") == 1


def test_line_20_done_is_accepted_when_the_lease_has_lapsed(scene: Scene) -> None:
    scene.publish(**SHORT)
    scene.start(**SHORT)
    scene.let_pass(MOMENT)
    assert scene.end() is Ended.DONE


def test_line_20_done_is_accepted_when_the_run_was_abandoned_and_nobody_took_it(scene: Scene) -> None:
    abandoned(scene)
    assert scene.end() is Ended.DONE
    assert scene.state == "done"


def test_line_20_done_is_accepted_when_it_was_redispatched_and_nobody_has_started(scene: Scene) -> None:
    abandoned(scene)
    scene.redispatch()
    assert scene.end() is Ended.DONE
    assert scene.confirm() is Verdict.DECIDED
    assert scene.start("u", (2, 0)).gate is Gate.SETTLED


def test_line_20_done_is_refused_when_another_runs(scene: Scene) -> None:
    abandoned(scene)
    assert scene.start("u").gate is Gate.WON
    assert scene.end("done", "t") is Ended.REFUSED
    assert scene.run().token == "u"


def test_line_20_done_is_refused_when_a_later_order_has_started(scene: Scene) -> None:
    abandoned(scene)
    scene.redispatch()
    scene.start("u", (2, 0))
    scene.end("retry", "u", (2, 0))
    assert scene.end("done", "t") is Ended.REFUSED
    assert scene.run().order == (2, 1)


def test_line_20_an_end_after_a_wipe_is_marked(scene: Scene) -> None:
    scene.publish()
    scene.start()
    scene.wipe()
    assert scene.end() is Ended.DONE
    assert scene.start("u").gate is Gate.SETTLED


# ---- line 21


def test_line_21_a_retry_publishes_the_next_attempt(scene: Scene) -> None:
    scene.publish()
    scene.start()
    scene.runs.checkpoint(scene.occurrence().key, "t", b"state")
    eta = scene.now + 7 * SECOND
    assert scene.end("retry", eta=eta) is Ended.DONE
    run = scene.run()
    assert (run.state, run.order, run.deadline) == ("published", (1, 1), eta + timedelta(hours=1))
    assert scene.store.survey().lapsed == ()
    assert scene.start("u", (1, 1)).checkpoint == b"state"


def test_line_21_a_retry_whose_reply_was_lost_is_decided_also_when_its_successor_runs(scene: Scene) -> None:
    scene.publish()
    scene.start("a")
    assert [scene.end("retry", "a"), scene.end("retry", "a")] == [Ended.DONE, Ended.DECIDED]
    scene.start("b", (1, 1))
    assert scene.end("retry", "a") is Ended.DECIDED
    assert (scene.state, scene.run().token) == ("running", "b")
    assert scene.events.count("retry") == 1


def test_line_21_a_retry_without_a_record_leaves_it_to_its_message(scene: Scene) -> None:
    scene.publish()
    scene.start()
    scene.wipe()
    assert scene.end("retry") is Ended.DECIDED
    assert scene.start("u", (1, 1)).gate is Gate.WON


def test_line_21_a_retry_of_what_was_redispatched_changes_nothing(scene: Scene) -> None:
    abandoned(scene)
    scene.redispatch()
    assert scene.end("retry") is Ended.DECIDED
    assert (scene.state, scene.run().order) == ("claimed", (2, 0))


# ---- lines 22 and 36


def test_line_22_a_permanent_failure_is_a_dead_letter(scene: Scene) -> None:
    scene.publish()
    scene.start()
    assert scene.end("dead", reason="exception", letter=scene.letter()) is Ended.DONE
    assert scene.end("dead", reason="exception", letter="another") is Ended.DECIDED
    assert scene.store.dead_letters() == {scene.occurrence().key: scene.letter()}
    assert scene.store.dead_letter(scene.occurrence().key) == scene.letter()
    assert scene.store.dead_letter("none") is None
    assert (scene.store.audit()[-1].event, scene.store.audit()[-1].detail) == ("dead", "exception")
    assert scene.store.runs() == []


def test_line_36_what_cannot_be_read_is_a_dead_letter_without_a_start(scene: Scene) -> None:
    scene.publish()
    assert scene.end("dead", "", reason="unknown_task", letter=scene.letter("unknown_task")) is Ended.DONE
    assert list(scene.store.dead_letters()) == [scene.occurrence().key]
    assert scene.start().gate is Gate.SETTLED


def test_line_36_a_copy_does_not_bury_what_runs(scene: Scene) -> None:
    scene.publish()
    scene.start()
    assert scene.end("dead", "", reason="unknown_task", letter=scene.letter("unknown_task")) is Ended.REFUSED
    assert scene.store.dead_letters() == {}


# ---- line 23


def test_line_23_a_cancelled_run_is_revoked(scene: Scene) -> None:
    scene.publish()
    scene.start()
    assert scene.end("revoked", reason="cancel") is Ended.DONE
    assert scene.store.last()["e"][1] == "revoked"
    assert scene.start("u", (1, 1)).gate is Gate.SETTLED


# ---- line 24


def test_line_24_what_main_saw_die_is_abandoned_at_once(scene: Scene) -> None:
    scene.publish()
    scene.start()
    assert scene.end("abandoned", reason="the child was lost") is Ended.DONE
    assert scene.end("abandoned") is Ended.DECIDED
    (due,) = scene.store.survey().due
    assert (due.key, due.state) == (scene.occurrence().key, "abandoned")
    assert scene.store.survey().lapsed == ()
    assert scene.beat() is Pulse.LOST


def test_line_24_what_is_gone_cannot_be_abandoned(scene: Scene) -> None:
    assert scene.end("abandoned") is Ended.DECIDED
    assert scene.store.runs() == []


# ---- line 26 at the gate, line 27


def test_line_26_too_many_deliveries_are_exhausted(scene: Scene) -> None:
    scene.publish(max_deliveries=2)
    for token in "ab":
        assert scene.start(token, max_deliveries=2).gate is Gate.WON
        scene.end("abandoned", token)
    found = scene.start("c", max_deliveries=2)
    assert (found.gate, found.starts) == (Gate.EXHAUSTED, 2)
    assert scene.end("dead", "", reason="deliveries", letter=scene.letter("deliveries")) is Ended.DONE
    assert scene.state == "dead"


def test_line_26_retries_do_not_exhaust_deliveries(scene: Scene) -> None:
    scene.publish(max_deliveries=1)
    for retries in range(5):
        assert scene.start(f"t{retries}", (1, retries), max_deliveries=1).gate is Gate.WON
        scene.end("retry", f"t{retries}", (1, retries))


@pytest.mark.parametrize(
    ("on_abandoned", "late", "gate"),
    [
        ("auto", True, Gate.WON),
        ("auto", False, Gate.LIVE),
        ("redispatch", False, Gate.WON),
        ("dead_letter", True, Gate.LIVE),
    ],
)
def test_line_27_an_equal_copy_starts_an_abandoned_run_where_that_is_allowed(
    scene: Scene, on_abandoned: str, late: bool, gate: Gate
) -> None:
    scene.publish(on_abandoned=on_abandoned)
    scene.start("a", late=late, on_abandoned=on_abandoned)
    scene.end("abandoned", "a")
    assert scene.start("b", late=late, on_abandoned=on_abandoned).gate is gate
    assert scene.state == ("running" if gate is Gate.WON else "abandoned")


def test_line_27_a_successor_starts_where_its_predecessor_was_abandoned(scene: Scene) -> None:
    abandoned(scene)
    assert scene.start("b", (1, 1), late=False).gate is Gate.WON


# ---- checkpoints and progress


def test_a_checkpoint_is_kept_by_the_token_alone_and_handed_on(scene: Scene) -> None:
    key = scene.occurrence().key
    scene.publish()
    assert not scene.runs.checkpoint(key, "t", b"early")
    scene.start("t")
    assert scene.runs.checkpoint(key, "t", bytes(range(256)))
    assert not scene.runs.checkpoint(key, "u", b"other")
    scene.end("abandoned", "t")
    assert not scene.runs.checkpoint(key, "t", b"late")
    assert scene.start("u").checkpoint == bytes(range(256))


def test_progress_is_seen_while_it_runs(scene: Scene) -> None:
    key = scene.occurrence().key
    scene.publish()
    scene.start()
    assert scene.run().progress is None
    assert scene.runs.progress(key, "t", 3, None)
    assert scene.run().progress == (3, None)
    assert scene.runs.progress(key, "t", 4, 10)
    assert scene.run().progress == (4, 10)
    assert not scene.runs.progress(key, "u", 9, 10)
    assert not scene.runs.progress("no such key", "t", 9, 10)


# ---- everything down for three days


def test_after_three_days_what_is_unsettled_runs(scene: Scene) -> None:
    scene.publish()
    scene.forget_marks()
    assert scene.start().gate is Gate.WON


def test_after_three_days_what_is_done_does_not_run_while_its_mark_is_kept(scene: Scene) -> None:
    scene.publish()
    scene.start()
    scene.end()
    assert scene.start("u").gate is Gate.SETTLED
    scene.forget_marks()  # a copy older than `tzbeat_retention` runs again, as the guarantee says
    assert scene.start("u").gate is Gate.WON

"""The board: rows of their own, seen by a forked child, never read for another run."""

from __future__ import annotations

import os
from datetime import datetime, timezone

import pytest

from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.worker.cancel import Board, Flags, Retried


def test_a_body_sees_why_it_is_to_stop() -> None:
    board, clock = Board(rows=2), ManualClock(datetime(2026, 11, 30, tzinfo=timezone.utc))
    row, other = board.take(), board.take()
    assert row is not None
    flags = Flags(board, row, 10.0, clock)
    assert (flags.why, flags.deadline) == ("", 10.0)
    clock.advance(10)
    assert flags.why == "deadline"
    board.shut_down()
    assert flags.why == "shutdown"
    board.ask_to_stop(row)
    assert flags.why == "cancel"
    board.tell_lost(row)
    assert flags.why == "lost"
    assert Flags(board, other, None, clock).why == "shutdown"
    assert Flags(None, None, None, clock).why == ""


def test_a_row_is_never_read_for_the_run_before_or_after() -> None:
    board = Board(rows=1)
    first = board.take()
    assert first is not None
    assert board.take() is None
    board.ask_to_stop(first)
    board.note_retry(first, 5.0)
    board.free(first)
    second = board.take()
    assert second is not None
    assert second.place == first.place
    assert not board.asked_to_stop(second)
    assert board.retried(second) is None
    board.note_retry(first, None)  # a body that outlived its end
    assert board.retried(second) is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # beside threads of the test runner
def test_a_forked_child_reads_and_writes_the_same_board() -> None:
    board = Board()
    row = board.take()
    assert row is not None
    board.ask_to_stop(row)
    child = os.fork()
    if not child:
        board.note_retry(row, 1.5)
        os._exit(0 if Flags(board, row, None).why == "cancel" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert board.retried(row) == Retried(1.5)

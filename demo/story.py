"""What is done to the beats, one act after the other, and what is shown meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import TypeVar

from celery_tzbeat.clock import SystemClock
from celery_tzbeat.testing.processes import Process, wait_until

from .stage import Leadership, Stage
from .verdict import Takeover

T = TypeVar("T")

#: How long a new leader is waited for, in seconds: far longer than promised, so that the delay can be told.
PATIENCE = 30.0

#: How long all three beats stay dead, in seconds.
BLACKOUT = 6.0


class Story:
    """Plays the acts on a stage and tells of them, with the seconds since its start."""

    def __init__(self, stage: Stage, *, lease: timedelta, tell: Callable[[str], None]) -> None:
        self._stage = stage
        self._lease = lease
        self._tell = tell
        self._clock = SystemClock()
        self._began = self._clock.reading().monotonic
        self._shown_at = self._began
        self._shown = 0
        self.takeovers: list[Takeover] = []

    # ---- the acts

    def first_leader(self) -> None:
        """Three beats start; one of them leads and the first occurrence arrives."""
        self.say("one server, one worker, three beats start")
        for _ in range(3):
            self._stage.start_beat()
        self._say_who_leads(self._await_leader(0))
        self._until(lambda: bool(self._stage.arrivals()), PATIENCE, "the first occurrence")

    def quiet(self, seconds: float) -> None:
        """Nothing is done; what arrives is shown."""
        ends_at = self._elapsed + seconds
        self._until(lambda: self._elapsed >= ends_at, seconds + PATIENCE, "time")

    def kill_the_leader(self) -> None:
        """kill -9: nobody is told, the lease lapses."""
        leader = self._leader
        self.say(f"kill -9 {leader.beat.name}, the leader")
        killed_at = self._elapsed
        leader.beat.kill()
        self._take_over("the leader was killed", leader, killed_at, self._lease + timedelta(seconds=1))
        self._one_more()

    def freeze_the_leader(self) -> None:
        """SIGSTOP for three leases, then SIGCONT: it wakes with the belief that it leads."""
        leader = self._leader
        span = 3 * self._lease
        self.say(f"freeze {leader.beat.name}, the leader, for three leases ({span.total_seconds():g} s)")
        frozen_at = self._elapsed
        self._stage.freeze(leader.beat)
        self._take_over("the leader was frozen", leader, frozen_at, self._lease + timedelta(seconds=1))
        self.quiet(frozen_at + span.total_seconds() - self._elapsed)
        self.say(f"wake {leader.beat.name}: it was the leader of epoch {leader.epoch}, and is not any more")
        self._stage.thaw(leader.beat)
        self.quiet(4)

    def stop_the_leader(self) -> None:
        """SIGTERM: it gives the lease back, and a standby leads at once."""
        leader = self._leader
        self.say(f"stop {leader.beat.name}, the leader, in order (SIGTERM)")
        stopped_at = self._elapsed
        leader.beat.terminate()
        self._take_over("the leader was stopped", leader, stopped_at, timedelta(seconds=1))
        status = leader.beat.wait(PATIENCE)
        self.say(f"{leader.beat.name} ended with status {status}")
        if status != 0:
            raise RuntimeError(f"{leader.beat.name} was asked to end in order and ended with status {status}")
        self._one_more()

    def kill_all(self) -> None:
        """kill -9 of every beat; nobody is there for a while; then three new ones start."""
        leader = self._leader
        doomed = self._stage.standing
        self.say(f"kill -9 {_names(doomed)}: nobody is left")
        for beat in doomed:
            beat.kill()
        self.quiet(BLACKOUT)
        self.say("three new beats start; what fell due meanwhile comes late, not never")
        for _ in range(3):
            self._stage.start_beat()
        self._say_who_leads(self._await_leader(leader.epoch))

    def arrive(self, complete: Callable[[], bool]) -> None:
        """Wait for what is still under way. What does not come is left to the verdict."""
        try:
            self._until(complete, PATIENCE, "the last occurrences")
        except TimeoutError:
            self.say("something did not come")

    # ---- telling

    def say(self, text: str) -> None:
        """Tell an event."""
        self._tell(f"{self._elapsed:6.1f}  {text}")

    @property
    def now(self) -> datetime:
        return self._clock.now()

    @property
    def _elapsed(self) -> float:
        return self._clock.reading().monotonic - self._began

    @property
    def _leader(self) -> Leadership:
        leader = self._stage.leadership()
        assert leader is not None, "an act before the first leader"
        return leader

    def _await_leader(self, after_epoch: int) -> Leadership:
        """Return the first leader under a later epoch."""

        def later() -> Leadership | None:
            found = self._stage.leadership()
            return found if found is not None and found.epoch > after_epoch else None

        return self._until(later, PATIENCE, "a leader")

    def _take_over(self, what: str, old: Leadership, since: float, promised: timedelta) -> None:
        new = self._await_leader(old.epoch)
        took = timedelta(seconds=self._elapsed - since)
        self.takeovers.append(Takeover(what, took, promised))
        self._say_who_leads(new, f", {took.total_seconds():.2f} s later")

    def _say_who_leads(self, leader: Leadership, more: str = "") -> None:
        self.say(f"{leader.beat.name} leads with epoch {leader.epoch}{more}")

    def _one_more(self) -> None:
        beat = self._stage.start_beat()
        self.say(f"{beat.name} starts in its place")
        self._until(lambda: "beat: Starting..." in beat.log, PATIENCE, f"{beat.name} to start")

    def _until(self, predicate: Callable[[], T | None], timeout: float, description: str) -> T:
        """Wait as `wait_until` does, and show what arrives once a second."""

        def shown() -> T | None:
            self._show()
            return predicate()

        return wait_until(shown, timeout, description)

    def _show(self) -> None:
        if self._clock.reading().monotonic - self._shown_at < 1:
            return
        self._shown_at += 1
        arrivals = self._stage.arrivals()
        fresh, self._shown = arrivals[self._shown :], len(arrivals)
        counted = Counter(arrival.due.entry for arrival in fresh)
        what = "  ".join(f"{entry} x{count}" if count > 1 else entry for entry, count in sorted(counted.items()))
        leader = self._stage.leadership()
        who = leader.beat.name if leader is not None and leader.beat in self._stage.standing else "nobody"
        self._tell(f"        {who:>7} leads | {what or '-'}")


def _names(beats: Iterable[Process]) -> str:
    return ", ".join(beat.name for beat in beats)

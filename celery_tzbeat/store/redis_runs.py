"""The worker's side of the ledger in Redis or Valkey: starts, heartbeats, ends.

Failure table. What is asked by one script is there or is not; a row says what repeating it finds, and who goes on.

    dies / reply lost                       who goes on                              what the ledger shows
    start: before the script                the broker's redelivery, or a sweep      claimed or published
    start: after it, reply lost             asked again by the token: WON            running, one start
    start: after it, MAIN dies              sweep: abandoned, by policy              running until the lease lapses
    heartbeat: lost, or after the deadline  the next one restores the lease          running until `abandoned` is written
    heartbeat after `abandoned`             LOST: another may start                  abandoned, claimed, or running
    end: before the script                  owed: written by MAIN; MAIN dies: sweep  running
    end: reply lost                         asked again: DECIDED                     settled, or published again
    end: lapsed or abandoned, nobody began  accepted                                 settled
    end: another has started                REFUSED: its end no longer counts        the other's run
    store wiped while it runs               heartbeat writes it anew: RESUMED        running, one start
    store wiped before the end              the done mark is written                 settled
    wiped or no persistence, then a copy    UNKNOWN for at_most_once, else WON       running, rebuilt from the message
    started while the store was down        first heartbeat: RESUMED, or OVERLAP     running, by the first that came
    server's clock jumps ahead              leases lapse; the leader's view breaks   running
    server's clock jumps back               leases last longer, by the jump          running
    MAIN stopped past the lease, then goes  heartbeat: ALIVE or LOST; end: above     whatever happened meanwhile
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import redis

from celery_tzbeat.deliveries import Ticket, WorkerPresence
from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.model import micros

from .calls import RedisCalls, Word, millis, send_script, taken
from .client import CALL_ERRORS
from .records import policy_text
from .runs import SEEN, Beat, End, Ended, Gate, Pulse, Start, Started


class RedisRuns(RedisCalls):
    """See `runs.Runs` for what each call means. One namespace: the tickets' must be this one's.

    `timeout` bounds each call in seconds; nothing is retried here. `retention` is how long done marks stay. May be called by
    several threads or greenlets at a time.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        timeout: float,
        retention: timedelta,
        audit_max: int,
    ) -> None:
        super().__init__(url, namespace, timeout=timeout, client_name="tzbeat-runs")
        self._head = [self.keys(name) for name in ("last", "audit", "open", "live")]
        self._audit_max = audit_max
        self._retention = millis(retention)

    def start(self, start: Start) -> Started:
        return started_of(self._run("start", *self.words_of(start)))

    def line(self) -> RedisLine:
        """Return a line of its own connection. Raises StoreUnavailable."""
        return RedisLine(self, self._client)

    def words_of(self, start: Start) -> tuple[Sequence[Word], Sequence[Word]]:
        """Return the keys and arguments of the script `start`."""
        policy = start.ticket.policy
        return (*self._head, *self._keys_of(start.ticket)), (
            self._audit_max,
            self._retention,
            *_run_words(start),
            policy.max_deliveries,
            int(policy.delivery == "at_most_once"),
            int(start.redispatchable),
        )

    def heartbeat(self, beats: Sequence[Beat]) -> list[Pulse]:
        keys: list[Word] = [*self._head]
        args: list[Word] = [self._audit_max, self._retention, len(beats)]
        for beat in beats:
            keys += self._keys_of(beat.ticket)
            args += _run_words(beat)
        return [Pulse(pulse.decode()) for pulse in self._run("heartbeat", keys, args)]

    def end(self, ends: Sequence[End]) -> list[Ended]:
        keys: list[Word] = [*self._head, self.keys("dead"), self.keys("wake")]
        args: list[Word] = [self._audit_max, self._retention, len(ends)]
        for end in ends:
            ticket = end.ticket
            keys += self._keys_of(ticket)
            args += (
                ticket.key,
                ticket.entry,
                _nominal(ticket),
                ticket.epoch,
                ticket.field,
                millis(ticket.policy.start_within),
                *end.order,
                end.token,
                end.state,
                end.detail,
                end.letter,
                micros(end.eta) // 1000 if end.eta is not None else "",
            )
        return [Ended(ended.decode()) for ended in self._run("end", keys, args)]

    def attend(self, presence: WorkerPresence) -> None:
        self._run(
            "attend_worker",
            (self.keys("workers"), self.keys.worker(presence.worker)),
            (presence.worker, presence.to_json(), millis(SEEN), self._retention),
        )

    def checkpoint(self, key: str, token: str, state: bytes) -> bool:
        return self._keep(key, token, "checkpoint", state)

    def progress(self, key: str, token: str, done: int, total: int | None) -> bool:
        return self._keep(key, token, "progress", f"{done} {total}" if total is not None else f"{done}")

    def _keep(self, key: str, token: str, field: str, value: Word) -> bool:
        return bool(self._run("keep_of_run", (self.keys.occurrence(key),), (token, field, value)))

    def _keys_of(self, ticket: Ticket) -> tuple[str, str, str]:
        return (
            self.keys.occurrence(ticket.key),
            self.keys.open_of(ticket.entry),
            self.keys.done(ticket.entry, ticket.number),
        )


class RedisLine:
    """See `runs.Line`. A server that does not know the script yet, say because it was restarted, breaks the line.

    `fileno` is a descriptor of the line's own, open until it is closed. redis-py closes its socket in the middle of a call
    that fails; whoever watched that one could not take it off his epoll any more, where it stays, always readable, for as
    long as a child of the pool lives that was forked meanwhile.
    """

    def __init__(self, runs: RedisRuns, client: redis.Redis) -> None:
        self._runs = runs
        self._client = client
        try:
            self._connection = taken(client)
        except CALL_ERRORS as exc:
            raise _broken(exc) from exc
        try:
            self._fileno = os.dup(self._connection._sock.fileno())
        except Exception as exc:
            client.connection_pool.release(self._connection)
            raise _broken(exc) from exc

    def fileno(self) -> int:
        return self._fileno

    def ask(self, start: Start) -> None:
        try:
            send_script(self._connection, "start", *self._runs.words_of(start))
        except CALL_ERRORS as exc:
            raise _broken(exc) from exc

    def answered(self) -> bool:
        try:
            return bool(self._connection.can_read())
        except CALL_ERRORS as exc:
            raise _broken(exc) from exc

    def answer(self) -> Started:
        try:
            return started_of(self._connection.read_response())
        except CALL_ERRORS as exc:
            raise _broken(exc) from exc

    def close(self) -> None:
        os.close(self._fileno)
        self._connection.disconnect()
        self._client.connection_pool.release(self._connection)


def _broken(exc: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"the store does not serve: {type(exc).__name__}: {exc}")


def started_of(reply: Sequence[bytes]) -> Started:
    """Return what the script `start` answered."""
    words, *checkpoint = reply
    gate, starts, state = words.decode().split(" ")
    return Started(Gate(gate), int(starts), state, (checkpoint[0] or None) if checkpoint else None)


def _nominal(ticket: Ticket) -> Word:
    return micros(ticket.nominal) if ticket.nominal is not None else ""


def _run_words(run: Start | Beat) -> tuple[Word, ...]:
    ticket = run.ticket
    return (
        ticket.key,
        ticket.entry,
        _nominal(ticket),
        ticket.epoch,
        ticket.number,
        ticket.field,
        policy_text(ticket.policy),
        millis(ticket.policy.start_within),
        millis(ticket.policy.run_lease),
        *run.order,
        run.token,
        run.worker,
        int(run.acks_late),
        run.payload,
    )

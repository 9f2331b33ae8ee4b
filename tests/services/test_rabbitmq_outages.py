"""RabbitMQ, the store or both are refused, hung, cut or wiped across ten due instants: late, never lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from observe import EVEN, LEASE, SECOND, Bench, assert_calm, assert_complete, now, sleep_until
from proxy import Proxy

from celery_tzbeat.testing.processes import Process, wait_until
from celery_tzbeat.testing.server import LocalServer

#: An outage lasts so long: ten instants of EVEN.
OUTAGE = timedelta(seconds=20)


def refused(bench: Bench, proxy: Proxy, until: datetime) -> None:
    proxy.refuse()
    wait_for_words(bench)
    sleep_until(until)
    proxy.resume()


def hung(bench: Bench, proxy: Proxy, until: datetime) -> None:
    proxy.hang()
    wait_for_words(bench)
    sleep_until(until)
    proxy.resume()


def cut(bench: Bench, proxy: Proxy, until: datetime) -> None:
    while now() < until:
        proxy.cut()
        sleep_until(min(until, now() + SECOND / 2))


def wait_for_words(bench: Bench) -> None:
    """Wait until a beat that gave way says why: what another one may reach, it did not for a whole lease."""
    wait_until(
        lambda: any("the broker does not answer" in beat.why for beat in bench.ask(lambda store: store.beats())),
        20,
        "a beat to say in its presence that the broker does not answer",
    )


def start(bench: Bench) -> list[Process]:
    """Start two beats that send EVEN, and return when messages have come."""
    bench.write(beat_schedule=EVEN)
    beats = bench.start_beats(2)
    wait_until(lambda: bench.nominals("even"), 60, "the first message")
    return beats


def outcome(bench: Bench, beats: list[Process], before: datetime, until: datetime) -> int:
    """Wait for two messages after the outage, hold the promise against what came; return how many copies came."""
    after = until + timedelta(seconds=5)
    wait_until(lambda: max(bench.nominals("even")) >= after, 60, "messages after it")
    wait_until(lambda: all(n > until for n in open_nominals(bench)), 90, "the claims to be confirmed")
    messages = bench.inbox().messages("even")
    copies = assert_complete(messages, 2.0, after - 2 * SECOND)
    assert sum(before < nominal <= until for nominal in {m.nominal for m in messages}) >= 10
    assert len(bench.audit("sent", "even")) >= len({m.nominal for m in messages}) - 2
    assert not bench.audit("dead")
    assert_calm(beats)
    return copies


def open_nominals(bench: Bench) -> list[datetime]:
    found = bench.ask(lambda store: store.open_occurrences())
    return [o.occurrence.nominal for o in found]


@pytest.mark.parametrize(("outage", "most_copies"), [(refused, 1), (hung, 2), (cut, 10)])
def test_ten_due_instants_without_rabbitmq_all_arrive(
    bench: Bench, proxy: Proxy, outage: Callable[[Bench, Proxy, datetime], None], most_copies: int
) -> None:
    beats = start(bench)
    before = bench.nominals("even")[-1]
    until = before + OUTAGE + SECOND
    outage(bench, proxy, until)
    copies = outcome(bench, beats, before, until)
    # What was in flight when the wire failed is sent again under its task id: one message for each time it failed.
    assert copies <= most_copies
    if outage is cut:  # whether a cut meets a message is chance: a beat finds its connection closed before it sends
        assert proxy.accepted > 2
    else:
        assert "the broker does not answer" in beats[0].log


def test_a_slow_rabbitmq_is_waited_for_and_gets_no_copies(bench: Bench, proxy: Proxy) -> None:
    beats = start(bench)
    before = bench.nominals("even")[-1]
    until = before + OUTAGE + SECOND
    proxy.slow(LEASE / 6 / 5)  # a message and its confirmation take less than the bound of one exchange, not much less
    sleep_until(until)
    proxy.resume()
    assert outcome(bench, beats, before, until) == 0
    assert "the broker does not answer" not in beats[0].log + beats[1].log
    assert max(bench.lateness("even")) < 5


def test_a_deleted_queue_is_declared_again_and_nothing_is_lost_or_doubled(bench: Bench) -> None:
    beats = start(bench)
    before = bench.nominals("even")[-1]
    until = before + OUTAGE + SECOND
    while now() < until:
        bench.inbox().delete_queue()
        sleep_until(min(until, now() + SECOND))
    assert outcome(bench, beats, before, until) == 0
    late = sorted(bench.lateness("even"))
    assert late[len(late) // 2] < 0.5, "it is declared and sent to at once"


def test_a_queue_that_celery_does_not_know_is_missing_for_ten_due_instants_and_all_arrive(bench: Bench) -> None:
    inbox = bench.inbox()
    inbox.declare("amq.direct")
    elsewhere = {
        "task": "proj.record",
        "schedule": 2.0,
        "options": {"exchange": "amq.direct", "routing_key": inbox.queue},
    }
    bench.write(beat_schedule={"even": elsewhere}, task_default_queue="another")
    beats = bench.start_beats(2)
    wait_until(lambda: bench.nominals("even"), 60, "the first message")
    before = bench.nominals("even")[-1]
    until = before + OUTAGE + SECOND
    inbox.delete_queue()
    beats[0].wait_for_log("returned as unroutable: exchange 'amq.direct'", 20)
    sleep_until(until)
    inbox.declare("amq.direct")
    assert outcome(bench, beats, before, until) == 0
    assert not bench.audit("coalesced")
    late = sorted(bench.lateness("even"))
    assert late[-1] > 15, "it was not missing for long enough to be refused five times"


def stopped(server: LocalServer, until: datetime) -> None:
    server.kill()
    sleep_until(until)
    server.start()


def frozen(server: LocalServer, until: datetime) -> None:
    server.freeze()
    sleep_until(until)
    server.thaw()


def restarted(server: LocalServer, until: datetime) -> None:
    server.restart()
    sleep_until(until)


@pytest.mark.parametrize("outage", [stopped, frozen, restarted])
def test_ten_due_instants_without_the_store_all_arrive(
    bench: Bench, outage: Callable[[LocalServer, datetime], None]
) -> None:
    beats = start(bench)
    before = bench.nominals("even")[-1]
    until = before + OUTAGE + SECOND
    outage(bench.server, until)
    copies = outcome(bench, beats, before, until)
    # What was published and not confirmed when the store failed is sent again by a next leader, if there is one.
    assert copies <= 1


def test_store_and_rabbitmq_down_at_once_are_late_and_never_lost(bench: Bench, proxy: Proxy) -> None:
    beats = start(bench)
    before = bench.nominals("even")[-1]
    until = before + OUTAGE + SECOND
    bench.server.kill()
    proxy.refuse()
    sleep_until(until - 5 * SECOND)
    bench.server.start()
    sleep_until(until)
    proxy.resume()
    assert outcome(bench, beats, before, until) <= 1
    assert "the store does not serve" in beats[0].log
    assert "the broker does not answer" in beats[0].log + beats[1].log


DNS = """
import pathlib, socket, time

resolve, resolves = socket.getaddrinfo, pathlib.Path(__file__).with_name("resolves")


def getaddrinfo(host, *args, **kwargs):
    if host == "rabbit.example":
        for _ in range({patience}):
            if resolves.exists():
                break
            time.sleep(0.1)
        if not resolves.exists():
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        host = "127.0.0.1"
    return resolve(host, *args, **kwargs)


socket.getaddrinfo = getaddrinfo
"""


@pytest.mark.parametrize("answer", ["no such name", "none"])
def test_a_name_that_does_not_resolve_delays_and_loses_nothing(bench: Bench, proxy: Proxy, answer: str) -> None:
    # Instead of a name server: an unanswered question to one takes its time, whatever bound a connection has.
    patience = 1 if answer == "no such name" else 80
    resolves = bench.project.directory / "resolves"
    resolves.touch()
    bench.project.url = bench.project.url.replace("127.0.0.1", "rabbit.example")
    bench.write(DNS.format(patience=patience), beat_schedule=EVEN)
    beats = bench.start_beats(2)
    wait_until(lambda: bench.nominals("even"), 60, "the first message")
    before = bench.nominals("even")[-1]
    until = before + OUTAGE + SECOND
    resolves.unlink()
    proxy.cut()
    sleep_until(until)
    resolves.touch()
    assert outcome(bench, beats, before, until) <= 2
    assert "Temporary failure in name resolution" in beats[0].log + beats[1].log
    if answer == "none":
        # Twice a lease in one call: the lease is not held meanwhile.
        assert beats[1].log.count("leads with epoch") >= 1


def test_a_frozen_result_backend_is_not_noticed(bench: Bench, make_server: Callable[..., LocalServer]) -> None:
    results = make_server()
    bench.write(beat_schedule={"fast": {"task": "proj.record", "schedule": 0.2}}, result_backend=results.url)
    results.freeze()
    beats = bench.start_beats(1)
    wait_until(lambda: len(bench.nominals("fast")) >= 40, 60, "messages")
    late = sorted(bench.lateness("fast"))
    assert late[len(late) // 2] < 0.2
    assert late[-1] < 2
    results.thaw()
    assert_calm(beats)

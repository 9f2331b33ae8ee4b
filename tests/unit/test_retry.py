"""The policy's retry, through Celery's own tracer and an in-memory broker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import build_tracer, reset_worker_optimizations, setup_worker_optimizations
from celery.exceptions import Ignore, Reject

from celery_tzbeat.deliveries import Ticket
from celery_tzbeat.errors import Cancelled, Permanent
from celery_tzbeat.model import Policy, Retry
from celery_tzbeat.worker.retry import retry_by_policy, wait_after, worth_retrying
from celery_tzbeat.worker.run import bind, unbind

KEY = "nightly@2026-11-01T05:30:00Z"
NOMINAL = datetime(2026, 11, 1, 5, 30, tzinfo=timezone.utc)
FIXED = Retry(max_attempts=3, delay=timedelta(seconds=30), backoff="fixed", jitter=False)


class Told:
    why = ""


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("proj", broker=f"memory://{uuid.uuid4()}", set_as_current=False)
    app.conf.task_ignore_result = True
    setup_worker_optimizations(app)
    yield app
    unbind()
    reset_worker_optimizations(app)


def a_ticket(retry: Retry | None, **policy: Any) -> Ticket:
    return Ticket("proj/0", KEY, "nightly", NOMINAL, 7, 1, 0, 0, Policy(retry=retry, **policy))


class Traced:
    """What became of one attempt: Celery's state for it, and the messages that it published."""

    def __init__(self, app: Celery, task: Task, ticket: Ticket | None, *, retries: int = 0, why: str = "") -> None:
        retry_by_policy(task)
        if ticket is not None:
            told = Told()
            told.why = why
            bind(ticket, attempt=retries + 1, epoch=7, token="t", flags=told, runs=lambda: None)  # type: ignore[arg-type,return-value]
        headers = {"meta": {"tzbeat": ticket.to_header()}} if ticket is not None else {}
        request = {
            "id": "the-id",
            "args": [],
            "kwargs": {},
            "retries": retries,
            "is_eager": False,
            "called_directly": False,
            "delivery_info": {"exchange": "", "routing_key": "celery"},
            "headers": headers,
            "hostname": "w",
            **headers,
        }
        trace = build_tracer(task.name, task, app=app)
        _, info, _, _ = trace("the-id", (), {}, request)
        self.state = info.state if info is not None else "SUCCESS"
        self.error = info.retval if info is not None else None
        unbind()
        self.sent: list[Any] = []
        with app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
            while True:
                try:
                    self.sent.append(queue.get(block=False))
                except queue.Empty:
                    break

    @property
    def message(self) -> Any:
        (message,) = self.sent
        return message


def failing(app: Celery, exc: Exception, **options: Any) -> Task:
    @app.task(name=f"t{uuid.uuid4()}", **options)
    def task() -> None:
        raise exc

    return task


# ---- the contract


def test_a_failed_body_becomes_celerys_own_retry_of_the_same_key(app: Celery) -> None:
    before = datetime.now(timezone.utc)
    found = Traced(app, failing(app, OSError("gone")), a_ticket(FIXED), retries=1)
    assert found.state == "RETRY"
    assert str(found.error.exc) == "gone"
    headers = found.message.headers
    assert (headers["id"], headers["retries"]) == ("the-id", 2)
    ticket = Ticket.from_headers(headers)
    assert ticket == a_ticket(FIXED)
    wait = datetime.fromisoformat(headers["eta"]) - before
    assert timedelta(seconds=29) < wait < timedelta(seconds=40)


def test_the_last_attempt_fails_with_its_own_error(app: Celery) -> None:
    found = Traced(app, failing(app, OSError("gone")), a_ticket(FIXED), retries=2)
    assert (found.state, found.sent) == ("FAILURE", [])
    assert repr(found.error) == "OSError('gone')"


@pytest.mark.parametrize("limit", [0, 3, None])
def test_the_tasks_own_limit_neither_counts_nor_changes(app: Celery, limit: int | None) -> None:
    task = failing(app, OSError(), max_retries=limit)
    many = Retry(max_attempts=10, backoff="none")
    assert Traced(app, task, a_ticket(many), retries=8).state == "RETRY"
    assert task.max_retries == limit
    assert not hasattr(task, "override_max_retries")


def test_no_wait_is_a_message_without_an_eta(app: Celery) -> None:
    found = Traced(app, failing(app, OSError()), a_ticket(Retry(backoff="none")))
    assert found.message.headers["eta"] is None or datetime.fromisoformat(found.message.headers["eta"]) <= datetime.now(
        timezone.utc
    )


@pytest.mark.parametrize("ticket", [None, a_ticket(None)], ids=["no run", "no retry"])
def test_without_a_policy_nothing_is_changed(app: Celery, ticket: Ticket | None) -> None:
    found = Traced(app, failing(app, OSError()), ticket)
    assert (found.state, found.sent) == ("FAILURE", [])


@pytest.mark.parametrize(
    ("exc", "state"),
    [(Permanent("no"), "FAILURE"), (Cancelled("stop"), "FAILURE"), (Ignore(), "IGNORED"), (Reject(), "REJECTED")],
    ids=["Permanent", "Cancelled", "Ignore", "Reject"],
)
def test_what_is_no_failure_to_try_again_is_left_alone(app: Celery, exc: Exception, state: str) -> None:
    found = Traced(app, failing(app, exc), a_ticket(FIXED))
    assert (found.state, found.sent) == (state, [])


def test_what_stopped_for_a_shutdown_is_sent_again_at_once_with_or_without_a_policy(app: Celery) -> None:
    for retry, retries in ((None, 5), (FIXED, 2)):
        found = Traced(
            app, failing(app, Cancelled("stop"), max_retries=0), a_ticket(retry), retries=retries, why="shutdown"
        )
        assert found.state == "RETRY"
        assert found.message.headers["retries"] == retries + 1


def test_what_may_start_once_only_is_not_sent_again(app: Celery) -> None:
    found = Traced(app, failing(app, Cancelled("stop")), a_ticket(None, delivery="at_most_once"), why="shutdown")
    assert (found.state, found.sent) == ("FAILURE", [])


# ---- every kind of task


def test_a_bound_task(app: Celery) -> None:
    @app.task(bind=True, name="bound")
    def task(self: Task) -> None:
        assert self.request.id == "the-id"
        raise OSError

    assert Traced(app, task, a_ticket(FIXED)).state == "RETRY"


def test_a_class_based_task(app: Celery) -> None:
    class Based(Task):
        name = "based"

        def run(self) -> None:
            raise OSError

    assert Traced(app, app.register_task(Based()), a_ticket(FIXED)).state == "RETRY"


@pytest.mark.parametrize("by_super", [False, True])
def test_a_call_of_ones_own(app: Celery, by_super: bool) -> None:
    class Base(Task):
        entered = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            type(self).entered += 1
            return super().__call__(*args, **kwargs) if by_super else self.run(*args, **kwargs)

    task = failing(app, OSError(), base=Base)
    found = Traced(app, task, a_ticket(FIXED))
    assert found.state == "RETRY"
    assert found.message.headers["retries"] == 1
    assert type(task).entered == 1


def test_what_a_call_makes_of_an_error_is_what_counts(app: Celery) -> None:
    class Forgiving(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return self.run(*args, **kwargs)
            except OSError:
                return None

    found = Traced(app, failing(app, OSError(), base=Forgiving), a_ticket(FIXED))
    assert (found.state, found.sent) == ("SUCCESS", [])


def test_two_tasks_of_one_base_are_each_wrapped_once(app: Celery) -> None:
    class Base(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    for task in (failing(app, OSError(), base=Base), failing(app, OSError(), base=Base)):
        retry_by_policy(task)
        found = Traced(app, task, a_ticket(FIXED))
        assert (found.state, len(found.sent)) == ("RETRY", 1)
    assert "_tzbeat_retries_by_policy" not in vars(Base)


def test_a_tasks_own_retry_comes_first(app: Celery) -> None:
    @app.task(bind=True, max_retries=5, name="own retry")
    def task(self: Task) -> None:
        raise self.retry(countdown=3600, exc=OSError())

    before = datetime.now(timezone.utc)
    found = Traced(app, task, a_ticket(FIXED))
    assert found.state == "RETRY"
    assert datetime.fromisoformat(found.message.headers["eta"]) - before > timedelta(minutes=50)


def test_autoretry_comes_first_and_the_policy_when_it_is_used_up(app: Celery) -> None:
    task = failing(app, OSError(), autoretry_for=(OSError,), retry_kwargs={"countdown": 3600, "max_retries": 1})
    before = datetime.now(timezone.utc)
    first = Traced(app, task, a_ticket(FIXED))
    assert datetime.fromisoformat(first.message.headers["eta"]) - before > timedelta(minutes=50)
    second = Traced(app, task, a_ticket(FIXED), retries=1)
    assert datetime.fromisoformat(second.message.headers["eta"]) - before < timedelta(minutes=2)


def test_a_body_that_calls_another_sees_its_error(app: Celery) -> None:
    inner = failing(app, OSError())
    retry_by_policy(inner)
    seen: list[Exception] = []

    @app.task(name="outer")
    def outer() -> None:
        for call in (inner, inner.run):
            try:
                call()
            except OSError as exc:
                seen.append(exc)

    found = Traced(app, outer, a_ticket(FIXED))
    assert (found.state, found.sent, len(seen)) == ("SUCCESS", [], 2)


def test_a_body_that_calls_itself_sees_its_error(app: Celery) -> None:
    seen: list[Exception] = []

    @app.task(bind=True, name="recursive")
    def task(self: Task, deep: bool = False) -> None:
        if deep:
            raise OSError
        try:
            self.run(deep=True)
        except OSError as exc:
            seen.append(exc)

    found = Traced(app, task, a_ticket(FIXED))
    assert (found.state, found.sent, len(seen)) == ("SUCCESS", [], 1)


# ---- which errors, how long


class Refused(ValueError):
    pass


@pytest.mark.parametrize(
    ("retry", "worth"),
    [
        (Retry(), True),
        (Retry(only=("Refused",)), True),
        (Retry(only=("ValueError",)), True),
        (Retry(only=("builtins.ValueError",)), True),
        (Retry(only=(f"{__name__}.Refused",)), True),
        (Retry(only=("other.Refused",)), False),
        (Retry(only=("OSError", "KeyError")), False),
        (Retry(never=("ValueError",)), False),
        (Retry(never=("KeyError",)), True),
        (Retry(only=("Refused",), never=("Exception",)), False),
    ],
)
def test_which_errors_are_worth_another_attempt(retry: Retry, worth: bool) -> None:
    assert worth_retrying(Refused(), retry) is worth


def seconds(retry: Retry, failures: int) -> float:
    return wait_after(failures, retry, KEY).total_seconds()


def test_waits_double_up_to_the_longest() -> None:
    retry = Retry(delay=timedelta(seconds=10), max_delay=timedelta(seconds=60), jitter=False)
    assert [seconds(retry, n) for n in (1, 2, 3, 4, 5, 5000)] == [10, 20, 40, 60, 60, 60]
    assert [seconds(FIXED, n) for n in (1, 7)] == [30, 30]
    assert seconds(Retry(backoff="none"), 4) == 0


def test_jitter_is_by_the_key_between_a_half_and_one() -> None:
    retry = Retry(delay=timedelta(seconds=100), backoff="fixed")
    waits = {wait_after(1, retry, f"e@{n}").total_seconds() for n in range(200)}
    assert all(50 <= wait <= 100 for wait in waits)
    assert max(waits) - min(waits) > 40
    assert seconds(retry, 1) == seconds(retry, 1) != seconds(retry, 2)

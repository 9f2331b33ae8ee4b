"""The policy's retry, without a line in the task: a failed body becomes Celery's own retry.

What the tracer calls is wrapped: `task.run`, or the class's own `__call__` where there is one, so that what a `__call__`
makes of an exception is what counts. `autoretry_for` wraps `task.run` before us, so the task's own retries come first.

Seam: `build_tracer` calls `task` where `task_has_custom(task, "__call__")`, else `task.run`; a contract test holds it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

from celery import Task
from celery.app.trace import task_has_custom
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject
from celery.exceptions import Retry as RetryAsked

from celery_tzbeat.errors import Cancelled, Permanent
from celery_tzbeat.model import Retry

from .run import Run, current_run

#: What is no failure to try again: what the task asks of Celery, or says itself.
_LEFT_ALONE = (Ignore, Reject, RetryAsked, MaxRetriesExceededError, Permanent, Cancelled)

_MARK = "_tzbeat_retries_by_policy"


def retry_by_policy(task: Task) -> None:
    """Have the body of `task` retried by the policy of its run; a second call changes nothing.

    Must come before the task's tracer is built. A body that runs outside a run, or is called by another body, is left alone.
    """
    if task_has_custom(task, "__call__"):
        cls = type(task)
        if _MARK not in vars(cls):
            cls.__call__ = _of_class(cls.__call__)
            setattr(cls, _MARK, True)
    elif _MARK not in vars(task):
        task.run = _of_task(task, task.run)
        setattr(task, _MARK, True)


def _of_task(task: Task, body: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _attempt(task, lambda: body(*args, **kwargs))

    return run


def _of_class(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def __call__(self: Task, *args: Any, **kwargs: Any) -> Any:
        return _attempt(self, lambda: call(self, *args, **kwargs))

    return __call__


def _attempt(task: Task, body: Callable[[], Any]) -> Any:
    run = current_run()
    if run.ticket is None or task.request.called_directly or not run.begin():
        return body()
    try:
        return body()
    except Exception as exc:
        wait = _wait(run, exc, failures=task.request.retries + 1)
        if wait is None:
            raise
        raise _ask_again(task, exc, wait) from exc


def _wait(run: Run, exc: Exception, *, failures: int) -> timedelta | None:
    """Return how long to wait before the next attempt; None where there is none."""
    assert run.ticket is not None
    if isinstance(exc, Cancelled) and run.why == "shutdown":
        return timedelta()  # it stopped because its worker does: another goes on from its checkpoint
    retry = run.ticket.policy.retry
    if retry is None or failures >= retry.max_attempts or not worth_retrying(exc, retry):
        return None
    return wait_after(failures, retry, run.ticket.key)


def worth_retrying(exc: Exception, retry: Retry) -> bool:
    """Return whether a policy tries again after `exc`. Base classes count, by bare or dotted name."""
    if isinstance(exc, _LEFT_ALONE):
        return False
    names = {name for cls in type(exc).__mro__ for name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")}
    return not names.intersection(retry.never) and (not retry.only or bool(names.intersection(retry.only)))


def wait_after(failures: int, retry: Retry, key: str) -> timedelta:
    """Return the wait before the next attempt of `key`, after so many failures (1 or more); each time the same."""
    if retry.backoff == "none":
        return timedelta()
    wait = retry.delay
    if retry.backoff == "exponential":
        doublings = min(failures - 1, 64)  # beyond, timedelta cannot say it
        seconds = retry.delay.total_seconds() * 2**doublings
        wait = timedelta(seconds=min(seconds, retry.max_delay.total_seconds()))
    return wait * (_factor(key, failures) if retry.jitter else 1.0)


def _factor(key: str, failures: int) -> float:
    """Return a number in [0.5, 1] by a hash: occurrences of one instant do not all come back at one instant."""
    digest = hashlib.sha256(f"{key}\n{failures}".encode()).digest()
    return 0.5 + int.from_bytes(digest[:4], "big") / 0xFFFFFFFF / 2


def _ask_again(task: Task, exc: Exception, wait: timedelta) -> Exception:
    """Publish the next attempt by Celery's own retry; return what it raises, for the tracer.

    `Task.retry` keeps the limit that it is given on the task, where it would be the next run's limit, too: it is put back.
    """
    limit = "override_max_retries"
    before = vars(task).get(limit)
    try:
        asked: Exception = task.retry(
            exc=exc, throw=False, countdown=wait.total_seconds(), max_retries=task.request.retries + 1
        )
    finally:
        if before is None:
            vars(task).pop(limit, None)
        else:
            setattr(task, limit, before)
    return asked

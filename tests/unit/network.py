"""A way to a store on which calls are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_tzbeat.errors import StoreUnavailable
from celery_tzbeat.testing import MemoryStore

#: Calls whose first argument is a batch.
BATCHES = ("claim", "confirm", "dispatch", "record_unrun")


class Network:
    """A way to the store that fails before or after the next call of a name, or lets something happen before it."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.calls: list[str] = []
        self.batches: list[int] = []
        self.fails: dict[tuple[str, str], int] = {}
        self.before: dict[str, Callable[[], object]] = {}
        self.before_each: dict[str, Callable[[], object]] = {}

    def fail(self, when: str, name: str, times: int = 1) -> None:
        self.fails[when, name] = times

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if name in BATCHES:
                self.batches.append(len(args[0]))
            self._maybe_fail("before", name)
            self.before.pop(name, lambda: None)()
            self.before_each.get(name, lambda: None)()
            answer = method(*args, **kwargs)
            self._maybe_fail("after", name)
            return answer

        return call

    def _maybe_fail(self, when: str, name: str) -> None:
        if self.fails.get((when, name), 0):
            self.fails[when, name] -= 1
            raise StoreUnavailable(f"lost {when} {name}")

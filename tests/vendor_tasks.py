"""Tasks that pytest-celery puts into its workers."""

from __future__ import annotations

from celery import shared_task


@shared_task
def double(number: int) -> int:
    return number * 2


@shared_task(bind=True)
def beaten(self) -> None:  # type: ignore[no-untyped-def]
    print(f"beaten by {self.request.meta['tzbeat']['nominal']}", flush=True)

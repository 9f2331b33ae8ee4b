"""For tests of schedules, beats and tasks: a clock that stands still, a store and a lease server in memory, a run, a span."""

from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.leases import MemoryLeases
from celery_tzbeat.testing.run import run_context
from celery_tzbeat.testing.runs import MemoryRuns
from celery_tzbeat.testing.simulate import simulate
from celery_tzbeat.testing.store import MemoryStore

__all__ = ["ManualClock", "MemoryLeases", "MemoryRuns", "MemoryStore", "run_context", "simulate"]

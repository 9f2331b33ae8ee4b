"""For tests of schedules and beats: a clock that stands still, a store and a lease server in memory."""

from celery_tzbeat.testing.clock import ManualClock
from celery_tzbeat.testing.leases import MemoryLeases
from celery_tzbeat.testing.store import MemoryStore

__all__ = ["ManualClock", "MemoryLeases", "MemoryStore"]

"""Threads of the operating system: the elector's and the heartbeat's must run while a task, or a tick, holds all else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def start_thread(run: Callable[[], None], *, name: str) -> None:
    """Start a daemon thread: a real one, also where gevent has made threads greenlets (there without its name)."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        monkey.get_original("_thread", "start_new_thread")(run, ())
    else:
        threading.Thread(target=run, name=name, daemon=True).start()

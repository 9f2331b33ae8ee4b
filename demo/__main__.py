"""`python -m demo`: three beats and a worker as real processes; see `story` for what happens to them.

Ends with ``demo: ok …`` and status 0, or ``demo: FAILED …`` and status 1. Leaves nothing running, also on
Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from celery import Celery
from celery.app.utils import find_app

from celery_tzbeat.model import Schedule

from .preview import across_change
from .stage import Stage
from .story import Story
from .verdict import Verdict, expected_between, judge


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--app", default="demo.app", help="another module with a Celery app, to play the same story with"
    )
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes in this directory")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with _directory(options.logs) as directory, Stage(options.app, directory) as stage:
            try:
                verdict = play(stage, find_app(options.app))
            except Exception as error:
                for process in (stage.worker, *stage.beats):
                    tell(f"--- end of the log of {process!r}\n{process.tail(15)}")
                tell(f"demo: FAILED, {type(error).__name__}: {error}".splitlines()[0])
                return 1
    except KeyboardInterrupt:
        tell("demo: interrupted; nothing is left running")
        return 130
    for line in verdict.lines():
        tell(line)
    return 1 if verdict.faults else 0


def play(stage: Stage, app: Celery) -> Verdict:
    """Play the story and judge it."""
    schedules: dict[str, Schedule] = {name: entry["schedule"] for name, entry in app.conf.beat_schedule.items()}
    lease = timedelta(seconds=app.conf.tzbeat_lease)
    story = Story(stage, lease=lease, tell=tell)
    tell(f"celery_tzbeat: one of three beats leads, by a lease of {lease.total_seconds():g} s. Under a minute.")
    tell("The next runs across the coming clock changes:")
    for line in across_change(schedules, story.now):
        tell(f"  {line}")
    story.first_leader()
    after = story.now
    story.quiet(4)
    story.kill_the_leader()
    story.quiet(2)
    story.freeze_the_leader()
    story.stop_the_leader()
    story.quiet(2)
    story.kill_all()
    story.quiet(4)
    until = story.now
    texts = {name: schedule.text for name, schedule in schedules.items()}
    expected = expected_between(texts, after, until)
    story.arrive(lambda: expected <= {arrival.due for arrival in stage.arrivals()})
    story.say("the beats and the worker end; the verdict:")
    return judge(expected, stage.drain(), after=after, until=until, takeovers=story.takeovers)


def tell(line: str) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def _directory(kept: Path | None) -> Iterator[Path]:
    """Yield a directory for logs: the one that is to be kept, or a temporary one."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="tzbeat-demo-") as temporary:
        yield Path(temporary)


if __name__ == "__main__":
    sys.exit(main())

"""A small shop's Celery app: what runs every second, and what runs once a day in each of its towns.

`python -m demo` starts it, and sets the two variables. Without them it is an app like any other, for
``celery -A demo.app tzbeat list``.
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

from celery_tzbeat import crontab, every
from celery_tzbeat.clock import SystemClock

#: A beat that is dead or hung for so long, in seconds, loses the lead.
LEASE = 3

app = Celery("demo", broker=os.environ.get("TZBEAT_DEMO_BROKER", "redis://127.0.0.1:6379/0"))
app.conf.update(
    beat_scheduler="celery_tzbeat:Scheduler",
    tzbeat_lease=LEASE,
    timezone="UTC",
    task_ignore_result=True,
)

#: Where the tasks write what arrived.
RECEIVED = os.environ.get("TZBEAT_DEMO_RECEIVED", os.devnull)


@app.task(bind=True)
def record(self: Any) -> None:
    """Append which occurrence this is to a file: one line with one write, so that no two lines mix."""
    occurrence = (self.request.get("meta") or {}).get("tzbeat", {})
    line = {
        "entry": occurrence.get("entry"),
        "nominal": occurrence.get("nominal"),
        "at": SystemClock().now().isoformat(),
    }
    file = os.open(RECEIVED, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def entry(schedule: Any) -> dict[str, Any]:
    return {"task": record.name, "schedule": schedule}


app.conf.beat_schedule = {
    # These run while the demo is watched.
    "pulse": entry(every("1s")),
    "stock levels": entry(every("5s")),
    "prices Kolkata": entry(crontab("*/10 * * * * *", tz="Asia/Kolkata")),
    "exchange rates": entry(crontab("3-59/15 * * * * *", tz="America/New_York")),
    # These do not, most probably. Their next runs are shown.
    "close the till New York": entry(crontab("30 2 * * *", tz="America/New_York")),
    "close the till Lisbon": entry(crontab("30 1 * * *", tz="Europe/Lisbon")),
    "close the till Lord Howe": entry(crontab("45 1 * * *", tz="Australia/Lord_Howe")),
    "weekly report": entry(crontab("0 6 * * mon", tz="Asia/Tokyo")),
    "invoices": entry(crontab("0 9 L * *", tz="Europe/Dublin")),
}

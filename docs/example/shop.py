"""The app that the documentation runs: a shop with a till, a stock and a report."""

from celery import Celery

from celery_tzbeat import crontab, every

app = Celery("shop", broker="redis://localhost:6379/0")
app.conf.beat_scheduler = "tzbeat"
app.conf.timezone = "Europe/Berlin"
app.conf.task_ignore_result = True


@app.task
def close_the_till(town: str) -> str:
    return f"the till of {town} is closed"


@app.task
def count_the_stock() -> None:
    pass


@app.task
def report() -> None:
    pass


app.conf.beat_schedule = {
    "till Berlin": {
        "task": "shop.close_the_till",
        "schedule": crontab("30 2 * * *", tz="Europe/Berlin"),
        "args": ("Berlin",),
    },
    "stock": {"task": "shop.count_the_stock", "schedule": every("5s")},
    "report": {
        "task": "shop.report",
        "schedule": "0 9 * * mon-fri America/New_York",
        "policy": {"catchup": "skip", "misfire_grace": 600},
    },
}

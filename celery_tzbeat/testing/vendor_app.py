"""The app that pytest-celery writes for a worker: its template, with both halves of celery_tzbeat.

pytest-celery replaces the three lines that end in None or name the app. Nobody imports this module as an app.
"""

from __future__ import annotations

from celery import Celery

from celery_tzbeat import TzBeat

imports = None

app = Celery("celery_test_app")
config = None

if config:
    app.config_from_object(config)

tz = TzBeat(app)

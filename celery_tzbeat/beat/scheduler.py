"""Celery's contract: what `celery beat` calls, and when.

`__init__` and `setup_schedule` do no I/O: they run for the banner too, and once more inside a signal handler. Everything
begins at the first `tick`. `tick` waits by itself (Celery's own sleep cannot be woken) and returns 0. `close` may come at
any bytecode, from the handler of SIGTERM, in the middle of a tick: it takes no lock and gives the lease back.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterable
from typing import Any

import celery.beat
from billiard import current_process
from celery import Celery

from celery_tzbeat import __version__, signals
from celery_tzbeat.clock import SystemClock, Waker
from celery_tzbeat.entries import Reading, read_entries
from celery_tzbeat.errors import InvalidConfiguration
from celery_tzbeat.leases.elector import Elector
from celery_tzbeat.leases.redis import RedisLeases
from celery_tzbeat.model import Entry, Occurrence, Unrun
from celery_tzbeat.schedules import tzdata_version
from celery_tzbeat.settings import Settings, why_two_servers
from celery_tzbeat.store.redis import RedisStore

from .agenda import Agenda
from .capture import Capture
from .dispatch import Builder, no_subscriptions_for_results
from .envelope import Recording
from .events import Events
from .paths import ClaimsPath, Path, SameServerPath, same_server_probe
from .publisher import Publisher
from .ticker import Changes, Identity, Ticker

logger = logging.getLogger(__name__)

#: A beat that does not lead says why, not more often than this, in seconds.
TELL_WHY_EVERY = 3.0


class Scheduler(celery.beat.Scheduler):
    """`celery beat -S tzbeat`: one of several beats, of which one leads.

    Does not promise to be the leader, nor to be the only one that believes so: the ledger decides each occurrence.
    """

    Entry = celery.beat.ScheduleEntry

    def __init__(self, app: Celery, *args: Any, **kwargs: Any) -> None:
        self._running: _Running | None = None
        self._closed = False
        self._builders: tuple[Builder, ...] = ()
        super().__init__(app, *args, **kwargs)

    # ---- what Celery calls

    def setup_schedule(self) -> None:
        """Nothing: entries are read at the first tick, when the app is complete."""

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Do what is due and wait for what is next, for at most a second; Celery calls again at once.

        Raises InvalidConfiguration at the first call, with every problem of settings and entries; nothing afterwards.
        """
        if self._closed:
            return 1.0
        running = self._running
        if running is None:
            self._running = running = _Running(self)
            running.elector.start()
        if running.orphaned():
            logger.error("the worker that this embedded beat belongs to is gone: beat stops")
            raise SystemExit(0)
        wait = running.ticker.step()
        running.tell_why()
        running.waker.wait(min(wait, self.max_interval))
        running.elector.progress()
        return 0.0

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
        """Celery's, whose failure `apply_entry` would swallow: it is noted for the builder first."""
        try:
            return super().apply_async(entry, producer=producer, advance=advance, **kwargs)
        except Exception as exc:
            for builder in self._builders:
                builder.note_failure(exc)
            raise

    def should_sync(self) -> bool:
        return False

    @property
    def closed(self) -> bool:
        """Whether this beat was told to end."""
        return self._closed

    def close(self) -> None:
        """Give the lease back, within a second; idempotent. What is in flight is fenced, or already recorded."""
        self._closed = True
        if self._running is not None:
            self._running.elector.resign_now()

    @property
    def info(self) -> str:
        settings, problems = Settings.examine(self.app)
        if settings is None or problems:
            return "    . tzbeat -> not configured: see `celery tzbeat check`"
        return f"    . tzbeat -> namespace {settings.namespace}, lease {settings.lease.total_seconds():g} s"

    # ---- what the running parts call

    def send_with(self, *builders: Builder) -> None:
        """Let `builders` hear of failures inside `apply_entry`."""
        self._builders = builders


class _Running:
    """A beat at work: everything that the first tick makes."""

    def __init__(self, scheduler: Scheduler) -> None:
        app = scheduler.app
        settings, entries = configuration(app)
        no_subscriptions_for_results()
        embedded = current_process().name != "MainProcess"
        # The worker that started this process; by now it may be gone already.
        self._parent = getattr(current_process(), "_parent_pid", None) or os.getppid() if embedded else None
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._sender = type(scheduler)
        self._clock = clock = SystemClock()
        self._told_why, self._told_at = "", clock.reading()
        self.waker = Waker()
        capture = Capture(app, timeout=settings.call_timeout)
        recording = Recording(app, timeout=settings.call_timeout)
        self._store = open_store(settings, tells_reconnection=True)
        self._two_servers = why_two_servers(app, settings)
        self._queues = queues_of(app, entries.entries.values())
        capturing, recorded = (
            Builder(app, outlet, settings.namespace, scheduler.apply_entry, ending=lambda: scheduler.closed)
            for outlet in (capture, recording)
        )
        scheduler.send_with(capturing, recorded)
        self._app = app
        self._capturing, self._recorded = capturing, recorded
        self._begin_paths()
        self._lineage = self._told_path = ""
        self.elector = Elector(
            RedisLeases(settings.lock, namespace=settings.namespace, lease=settings.lease),
            holder=self._holder,
            lease=settings.lease,
            clock=clock,
            on_change=self.waker.wake,
            max_skew=settings.max_skew,
            replicas=settings.wait_replicas,
        )
        self._capture = capture
        self._settings = settings
        self.ticker = Ticker(
            identity=Identity(
                beat=self._holder,
                host=socket.gethostname(),
                pid=os.getpid(),
                version=__version__,
                fingerprint=entries.fingerprint,
                embedded=embedded,
                release=settings.release,
            ),
            store=self._store,
            elector=self.elector,
            agenda=Agenda(entries.entries, tzdata_version()),
            publisher=Publisher(app, timeout=settings.call_timeout),
            clock=clock,
            lease=settings.lease,
            retention=settings.retention,
            max_skew=settings.max_skew,
            choose_path=self._choose_path,
            events=Events(sent=self._sent, unrun=self._unrun, dead=self._dead, lost=self._lost),
            changes=Changes(leading=self._leading, standing_by=self._standing_by),
        )

    def orphaned(self) -> bool:
        """An embedded beat outlives a worker that was killed, and would lead on."""
        return self._parent is not None and os.getppid() != self._parent

    def tell_why(self) -> None:
        """Log why this beat does not lead when that has changed: one that says nothing looks hung."""
        why, now = self.elector.why, self._clock.reading()
        if why != self._told_why and now.advance_since(self._told_at) >= TELL_WHY_EVERY:
            self._told_why, self._told_at = why, now
            if why:
                logger.info("does not lead: %s", why, extra={"action": "does_not_lead"})

    def _begin_paths(self) -> None:
        self._same_server = SameServerPath(self._capturing, self._store)
        self._by_claims = ClaimsPath(self._app, self._recorded, self._store, self._clock)

    def _choose_path(self) -> Path:
        """Return the path by which a term is to send. Raises StoreUnavailable where the probe gets no answer.

        Asked after each failed call. Where another process or master answers since, which may lack what was written last, the
        path is a new one: that makes a leader begin anew from the ledger, and what was lost there is sent (again). A store
        that has lost everything is another matter: its leader writes it back.
        """
        lineage = self._store.lineage()
        if lineage and lineage != self._lineage:
            self._lineage = lineage
            if not self._store.is_empty():
                self._begin_paths()
        why = self._two_servers or same_server_probe(self._capture, self._store.probe, uuid.uuid4().hex, self._queues)
        self._by_claims.why = why
        path: Path = self._by_claims if why else self._same_server
        if self._told_path and self.elector.lease() is not None:
            self._tell_path(path)
        return path

    # ---- telling

    def _leading(self, epoch: int) -> None:
        path = self.ticker.path
        logger.info("%s leads with epoch %d", self._holder, epoch, extra={"action": "leading", "epoch": epoch})
        self._told_path = ""
        if path is not None:
            self._tell_path(path)
        signals.beat_leading.send(self._sender, holder=self._holder, epoch=epoch)

    def _tell_path(self, path: Path) -> None:
        words = f"sends by the path {path.name!r}: {path.why}"
        if words != self._told_path:
            self._told_path = words
            logger.info("%s", words, extra={"action": "path", "path": path.name})

    def _standing_by(self, why: str) -> None:
        logger.warning("%s stands by: %s", self._holder, why, extra={"action": "standing_by"})
        signals.beat_standing_by.send(self._sender, holder=self._holder, why=why)

    def _sent(self, occurrence: Occurrence) -> None:
        signals.occurrence_sent.send(
            self._sender,
            entry=occurrence.entry,
            key=occurrence.key,
            nominal=occurrence.nominal,
            late=occurrence.late,
        )

    def _unrun(self, row: Unrun) -> None:
        logger.warning(
            "entry %r: %d occurrence(s) %s, %s to %s: %s",
            row.entry,
            row.count,
            row.event,
            row.first,
            row.last,
            row.reason,
            extra={"action": f"occurrences_{row.event}", "entry": row.entry},
        )
        signals.occurrences_unrun.send(
            self._sender,
            entry=row.entry,
            event=row.event,
            first=row.first,
            last=row.last,
            count=row.count,
            reason=row.reason,
        )

    def _dead(self, occurrence: Occurrence, reason: str) -> None:
        signals.occurrence_dead.send(
            self._sender, entry=occurrence.entry, key=occurrence.key, nominal=occurrence.nominal, reason=reason
        )

    def _lost(self, occurrence: Occurrence) -> None:
        signals.occurrence_lost.send(
            self._sender, entry=occurrence.entry, key=occurrence.key, nominal=occurrence.nominal
        )


def configuration(app: Celery) -> tuple[Settings, Reading]:
    """Return the settings and entries of `app`. Raises InvalidConfiguration with every problem of both.

    With `tzbeat_strict = False` entries that cannot be used are logged and left out.
    """
    settings, problems = Settings.examine(app)
    reading = read_entries(app, settings or Settings(url="", namespace="", lock=""))
    if settings is None or problems:
        raise InvalidConfiguration([*problems, *reading.problems])
    if reading.problems and settings.strict:
        raise InvalidConfiguration(reading.problems)
    for problem in reading.problems:
        logger.error("left out: %s", problem, extra={"action": "entry_invalid"})
    return settings, reading


def queues_of(app: Celery, entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the queues that messages may go to, as far as configuration and entries name them."""
    named = (entry.options.get("queue") for entry in entries)
    return tuple({*app.amqp.queues, *(getattr(queue, "name", queue) for queue in named if queue)})


def open_store(settings: Settings, *, tells_reconnection: bool = False) -> RedisStore:
    """Return a store of this thread's own, as the settings say."""
    return RedisStore(
        settings.url,
        settings.namespace,
        timeout=settings.call_timeout,
        retention=settings.retention,
        max_skew=settings.max_skew,
        audit_max=settings.audit_max,
        presence=15 * settings.lease,
        tells_reconnection=tells_reconnection,
    )

"""`TzBeat`: celery_tzbeat on an app, and the operators' calls. The command line is a thin face over it.

No call needs a beat to be alive, but those that ask who leads say nothing then. Each call opens its own connections and
closes them, asks once, and raises StoreUnavailable where it gets no answer within a sixth of the lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import datetime, timedelta, tzinfo
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery

from celery_tzbeat.beat.pauses import CATCH_UP
from celery_tzbeat.beat.scheduler import configuration, open_store
from celery_tzbeat.clock import Clock, SystemClock, Waker
from celery_tzbeat.entries import Reading, read_entries
from celery_tzbeat.errors import EntryNotFound, InvalidConfiguration, InvalidSchedule, OccurrenceNotFound
from celery_tzbeat.leases.protocol import Leader
from celery_tzbeat.leases.redis import RedisLeases
from celery_tzbeat.model import Entry, Pause, Presence, Schedule, iso
from celery_tzbeat.policy import nearest
from celery_tzbeat.schedules import from_celery
from celery_tzbeat.schedules import zone as read_zone
from celery_tzbeat.settings import Settings, app_timezone
from celery_tzbeat.store.protocol import Run
from celery_tzbeat.worker.install import install

from .findings import Finding, import_modules, no_settings
from .health import Health, overall_health
from .operations import Asked, DeadLetters, Desk
from .preflight import Route, check, route
from .standing import Standing, ledger_of, plain_standing
from .timetable import Change, Crossing, Planned, Upcoming, crossing, planned, upcoming

__all__ = [
    "Asked",
    "Change",
    "Crossing",
    "DeadLetters",
    "Finding",
    "Health",
    "Planned",
    "Route",
    "Standing",
    "TzBeat",
    "Upcoming",
]

#: What `TzBeat` sets where the user set no scheduler.
SCHEDULER = "celery_tzbeat:Scheduler"

#: How often the lease is looked at while a leader is asked to step down, in seconds.
LOOK_EVERY = 0.05


class TzBeat:
    """celery_tzbeat on an app: ``tz = TzBeat(app)`` where the app is made.

    Reads and writes no configuration when made. Once the app is configured it sets `beat_scheduler`, if the user left
    that unset; nothing else. A worker of the app gets the worker half (`worker.install`) when it starts.
    With ``set_scheduler=False`` it only looks: the command line does, so that it sees what `celery beat` would start.
    """

    def __init__(self, app: Celery, *, clock: Clock | None = None, set_scheduler: bool = True) -> None:
        self.app = app
        self._clock = clock or SystemClock()
        if not set_scheduler:
            return
        install(app)
        app.on_after_configure.connect(_set_scheduler, weak=False)
        if app.configured:  # the signal was sent before
            _set_scheduler(app)

    # ---- entries

    def entries(self) -> Mapping[str, Entry]:
        """Return the entries as a beat of this code would read them, by name. Asks no store.

        Imports the modules that the app names, as a beat does. Raises InvalidConfiguration with every problem.
        """
        return self._configuration()[1].entries

    def get(self, name: str) -> Entry:
        """Return one entry. Raises EntryNotFound with the nearest name, or InvalidConfiguration."""
        entries = self.entries()
        if name not in entries:
            raise _not_found(name, entries)
        return entries[name]

    def standings(self, pattern: str = "*", *, ledger: bool = True) -> list[Standing]:
        """Return where the entries stand whose names match a glob, by name.

        Without `ledger` the store is not asked: no cursor, nothing last. Raises EntryNotFound where none matches.
        """
        settings, reading = self._configuration()
        names = matching(pattern, reading.entries)
        found = [plain_standing(reading.entries[name], now=self._clock.now()) for name in names]
        if not ledger:
            return found
        with closing(open_store(settings)) as store:
            return ledger_of(found, store)

    def standing(self, name: str, *, ledger: bool = True) -> Standing:
        """Return where one entry stands, with its dead letters and its newest audit records.

        Of the audit only the namespace's newest 1,000 records are looked through.
        """
        settings, _ = self._configuration()
        found = plain_standing(self.get(name), now=self._clock.now())
        if not ledger:
            return found
        with closing(open_store(settings)) as store:
            return ledger_of([found], store, in_full=True)[0]

    # ---- pauses

    def paused(self) -> Mapping[str, Pause]:
        """Return the paused entries by name, those that this code does not list included."""
        with closing(open_store(self.settings())) as store:
            return store.paused()

    def pause(
        self, name: str, *, note: str = "", until: datetime | None = None, wait: timedelta | None = None
    ) -> tuple[Asked, ...]:
        """Ask the leader to send nothing of an entry until it is unpaused, or until `until` (aware).

        What is open of it already is not touched: it runs. Paused again, the later note and end count. Accepted while no beat
        is alive, and carried out by the next leader within an hour; with `wait`, look so long for its answer. Raises
        EntryNotFound, and ValueError for an `until` that is naive or past.
        """
        if until is not None and until.tzinfo is None:
            raise ValueError(f"until is {until!r}: give it a zone, such as tzinfo=timezone.utc")
        if until is not None and until <= self._clock.now():
            raise ValueError(f"until is {iso(until)}, which is past; leave it out to pause until somebody unpauses")
        detail = iso(until) if until is not None else ""
        return self._desk().ask("pause", [self.get(name).name], why=note, wait=wait, detail=detail)

    def unpause(
        self, name: str, *, catch_up: bool = False, why: str = "", wait: timedelta | None = None
    ) -> tuple[Asked, ...]:
        """Ask the leader to let an entry go on from now: what was not sent meanwhile is one record, skipped.

        With `catch_up` it is judged by the entry's policy instead, as after an outage (misfire_grace, catchup,
        catchup_window). Else as `pause`. Raises EntryNotFound where the entry is neither listed nor paused.
        """
        if name not in self.paused():
            name = self.get(name).name  # the leader says that it is not paused
        return self._desk().ask("unpause", [name], why=why, wait=wait, detail=CATCH_UP if catch_up else "")

    # ---- time

    def next(
        self, text_or_name: str, *, n: int = 10, after: datetime | None = None, zone: str | tzinfo | None = None
    ) -> tuple[Upcoming, ...]:
        """Return the next `n` occurrences of an entry, or else of a schedule text, strictly after `after` (now).

        `zone` is where walls are shown, and where a text that names no zone is read; the default is the schedule's
        own, then the app's. Asks no store: what was decided, skipped or paused is not looked at. Raises InvalidSchedule.
        """
        schedule, shown_in = self._schedule(text_or_name, zone)
        return upcoming(schedule, n=n, after=after or self._clock.now(), zone=shown_in)

    def preview(
        self,
        pattern: str = "*",
        *,
        after: datetime | None = None,
        until: datetime | None = None,
        n: int | None = None,
        zone: str | tzinfo | None = None,
    ) -> Iterator[Planned]:
        """Yield what the entries whose names match a glob have to come, in order: after < instant <= until, at most `n`.

        `after` is now by default. `zone` is where walls are shown: the schedule's own by default, then the app's. It is what
        the schedules say: the store is not asked, so what was decided or skipped is not looked at. Raises ValueError without
        `until` and `n`, EntryNotFound where no name matches, InvalidConfiguration for entries that cannot be used.
        """
        if until is None and n is None:
            raise ValueError("preview has no end: give until, or n")
        entries = self._listed().entries
        chosen = [entries[name] for name in matching(pattern, entries)]
        found = planned(
            chosen,
            after=after or self._clock.now(),
            until=until,
            zone=read_zone(zone) if zone is not None else None,
            default=read_zone(app_timezone(self.app)),
        )
        return islice(found, n)

    def across_change(
        self, text_or_name: str, *, n: int = 3, after: datetime | None = None, zone: str | tzinfo | None = None
    ) -> Crossing:
        """Return the occurrences around the next change of offset, up to `n` before and `n` from it on; else as `next`."""
        schedule, shown_in = self._schedule(text_or_name, zone)
        return crossing(schedule, n=n, after=after or self._clock.now(), zone=shown_in)

    def zone_of(self, text_or_name: str, zone: str | tzinfo | None = None) -> ZoneInfo:
        """Return the zone in which `next` shows walls."""
        return self._schedule(text_or_name, zone)[1]

    # ---- leading

    def leader(self) -> Leader | None:
        """Return who leads; None where nobody does. True when the lease's server answered, perhaps not when it is read."""
        with closing(self._leases()) as leases:
            return leases.leader()

    def beats(self) -> list[Presence]:
        """Return the beats that said within the last 15 leases that they live; a killed one stays so long."""
        with closing(open_store(self.settings())) as store:
            return store.beats()

    def step_down(self, *, timeout: timedelta | None = None) -> bool:
        """Ask the present leader to resign, and wait until it leads no longer. False: nobody leads, or it leads still.

        Waits for a lease and 2 s by default: a leader resigns at its next renewal, and a hung one lapses. The beat that
        resigned stands by for one lease; where no other is alive, it leads again then.
        """
        settings = self.settings()
        bound = timeout if timeout is not None else settings.lease + timedelta(seconds=2)
        with closing(self._leases()) as leases, closing(Waker()) as waker:
            asked = leases.leader()
            if asked is None:
                return False
            began = self._clock.reading()
            leases.ask_to_step_down(asked.epoch)
            while True:
                present = leases.leader()
                if present is None or present.epoch != asked.epoch:
                    return True
                if self._clock.reading().advance_since(began) >= bound.total_seconds():
                    return False
                waker.wait(LOOK_EVERY)

    # ---- runs and dead letters

    def runs(self, entry: str = "") -> list[Run]:
        """Return the unsettled occurrences of an entry, or of all: waiting, claimed, published, running, abandoned."""
        with closing(open_store(self.settings())) as store:
            return store.runs(entry)

    def run(self, key: str) -> Run:
        """Return one unsettled occurrence. Raises OccurrenceNotFound."""
        for run in self.runs():
            if run.key == key:
                return run
        raise OccurrenceNotFound(f"nothing of {key!r} is open")

    def cancel(self, key_or_entry: str, *, why: str = "", wait: timedelta | None = None) -> tuple[Asked, ...]:
        """Ask the leader to withdraw what does not run yet, and to stop what runs: one key, or all that is open of an entry.

        Raises OccurrenceNotFound where nothing is open. With `wait`, look so long for the leader's answer. A run that was
        asked to stop ends when its task heeds that (`run.cancelled`), or its pool can end it.
        """
        open_runs = self.runs()
        keys = [run.key for run in open_runs if run.key == key_or_entry or run.entry == key_or_entry]
        if not keys:
            raise OccurrenceNotFound(f"nothing of {key_or_entry!r} is open: no key, and no entry")
        return self._desk().ask("cancel", keys, why=why, wait=wait)

    @property
    def dead(self) -> DeadLetters:
        """The dead letters: ``tz.dead.list()``, ``show``, ``replay``, ``discard``."""
        return DeadLetters(self._desk())

    # ---- looking after it

    def health(self) -> Health:
        """Return whether a beat leads, on time, with clocks that agree. Raises nothing for a store that is down."""
        return overall_health(self.app, self._clock)

    def check(self) -> list[Finding]:
        """Return what is wrong or doubtful before a beat starts, errors first. Raises nothing."""
        return check(self.app)

    def route(self) -> Route:
        """Return the path by which a beat of this code would send, found out as a beat does. Raises nothing."""
        return route(self.app)

    def settings(self) -> Settings:
        """Return the settings in force. Raises InvalidConfiguration with every problem of theirs."""
        return Settings.read(self.app)

    # ---- parts

    def _configuration(self) -> tuple[Settings, Reading]:
        problem = import_modules(self.app)
        if problem:
            raise InvalidConfiguration([problem])
        return configuration(self.app)

    def _listed(self) -> Reading:
        """Return the entries, also where no store is named. Raises InvalidConfiguration with every problem of theirs."""
        failed = import_modules(self.app)
        reading = read_entries(self.app, Settings.examine(self.app)[0] or no_settings())
        if failed or reading.problems:
            raise InvalidConfiguration([failed, *reading.problems] if failed else [*reading.problems])
        return reading

    def _desk(self) -> Desk:
        settings = self.settings()
        return Desk(lambda: closing(open_store(settings)), self._clock)

    def _leases(self) -> RedisLeases:
        settings = self.settings()
        return RedisLeases(settings.lock, namespace=settings.namespace, lease=settings.lease)

    def _schedule(self, text_or_name: str, zone: str | tzinfo | None) -> tuple[Schedule, ZoneInfo]:
        """Return the schedule of an entry or text, and the zone to show it in. Other entries may be wrong meanwhile."""
        import_modules(self.app)
        settings = Settings.examine(self.app)[0] or no_settings()
        entries = read_entries(self.app, settings).entries
        wanted = read_zone(zone) if zone is not None else None
        default = wanted or app_timezone(self.app)
        if text_or_name in entries:
            schedule: Schedule = entries[text_or_name].schedule
        else:
            try:
                schedule = from_celery(text_or_name, zone=default, gap=settings.gap, fold=settings.fold)
            except InvalidSchedule as exc:
                raise _with_nearest(exc, text_or_name, entries) from None
        return schedule, wanted or read_zone(schedule.zone or default)


def _set_scheduler(sender: Celery, **_: Any) -> None:
    """Set `beat_scheduler` unless the user did; Celery's own default named on purpose counts as the user's."""
    prefix = f"{sender.namespace}_".lower() if sender.namespace else ""
    names = {"beat_scheduler", f"{prefix}beat_scheduler", "celerybeat_scheduler"}
    conf: Any = sender.conf
    *given, _defaults = conf.maps
    if not any(str(key).lower() in names for source in given for key in source):
        conf.beat_scheduler = SCHEDULER


def matching(pattern: str, entries: Mapping[str, Entry]) -> list[str]:
    """Return the names that are, or match, a glob, sorted. Raises EntryNotFound where none does; "*" may match none."""
    names = sorted(name for name in entries if name == pattern or fnmatchcase(name, pattern))
    if not names and pattern != "*":
        raise _not_found(pattern, entries)
    return names


def _not_found(name: str, entries: Mapping[str, Entry]) -> EntryNotFound:
    if not entries:
        return EntryNotFound(f"no entry is named {name!r}: the app has no entries")
    return EntryNotFound(f"no entry is named {name!r}{nearest(name, entries)}")


def _with_nearest(exc: InvalidSchedule, text: str, entries: Mapping[str, Entry]) -> InvalidSchedule:
    """Return the error of a text that may have been meant as an entry's name."""
    near = nearest(text, entries)
    hint = f" (no entry is named {text!r}{near})" if near.startswith("; did you mean") else ""
    return InvalidSchedule(f"{exc}{hint}", field=exc.field, text=exc.text)

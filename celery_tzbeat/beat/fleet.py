"""The other beats, as the leader sees them: who should lead in its place, and whose entries differ.

After a rolling deploy the newest release should lead. Two beats with different entries do no harm to each other (neither
touches the other's cursors), but only the leader's entries run: that has to be said, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from packaging.version import InvalidVersion, Version

from celery_tzbeat.model import Presence

#: How many names a sentence lists.
LISTED = 5


def alive(beats: Iterable[Presence], *, now: datetime, within: timedelta) -> list[Presence]:
    """Return the beats that ticked within a span, by the store's clock: what a beat says outlives it."""
    return [beat for beat in beats if now - (beat.last_tick - timedelta(seconds=beat.skew)) <= within]


def newer_standby(release: str, beats: Iterable[Presence]) -> Presence | None:
    """Return a standby of the newest release above `release` that could lead; None where there is none.

    Beats that name no release are left out of it, and so is everybody where `release` is empty.
    """
    own = _version(release)
    newest: tuple[Version, Presence] | None = None
    for beat in beats:
        version = _version(beat.release)
        if own is None or version is None or version <= own or beat.role == "leader" or beat.hindered:
            continue
        if newest is None or version > newest[0]:
            newest = (version, beat)
    return newest[1] if newest else None


def differing_entries(one: Mapping[str, str], other: Mapping[str, str], *, where: tuple[str, str]) -> str:
    """Return in words how two sets of entries (short hashes by name) differ, by name; empty where they do not.

    `where` says where each set is: "here", "there".
    """
    parts = (
        (f"only {where[0]}", sorted(one.keys() - other.keys())),
        (f"only {where[1]}", sorted(other.keys() - one.keys())),
        ("defined differently", sorted(name for name in one.keys() & other.keys() if one[name] != other[name])),
    )
    return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)


def oldest_schema(beats: Iterable[Presence], own: int) -> int:
    """Return the oldest store schema that any of the beats writes, or `own`."""
    return min([own, *(beat.schema for beat in beats)])


def _version(release: str) -> Version | None:
    try:
        return Version(release) if release else None
    except InvalidVersion:
        return None


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:LISTED])
    return shown if len(names) <= LISTED else f"{shown} and {len(names) - LISTED} more"

"""Celery signals that a beat sends. Receivers run on beat's tick: keep them short; what they raise is logged by Celery.

    beat_leading        sender=Scheduler, holder, epoch                     this beat has taken office
    beat_standing_by    sender=Scheduler, holder, why                       this beat leads no longer
    occurrence_sent     sender=Scheduler, entry, key, nominal, late         a message was handed to the broker
    occurrences_unrun   sender=Scheduler, entry, event, first, last, count, reason    skipped, coalesced or missed
    occurrence_dead     sender=Scheduler, entry, key, nominal, reason       settled as a dead letter, by a beat
    occurrence_lost     sender=Scheduler, entry, key, nominal               no worker started it within start_within

`entry` is the entry's name, instants are aware UTC datetimes. A signal may be lost with the process; the audit is the record.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

beat_leading = Signal(name="beat_leading", providing_args={"holder", "epoch"})
beat_standing_by = Signal(name="beat_standing_by", providing_args={"holder", "why"})
occurrence_sent = Signal(name="occurrence_sent", providing_args={"entry", "key", "nominal", "late"})
occurrences_unrun = Signal(
    name="occurrences_unrun", providing_args={"entry", "event", "first", "last", "count", "reason"}
)
occurrence_dead = Signal(name="occurrence_dead", providing_args={"entry", "key", "nominal", "reason"})
occurrence_lost = Signal(name="occurrence_lost", providing_args={"entry", "key", "nominal"})

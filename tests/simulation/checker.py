"""Was everything that was due sent, once, in time, or recorded as not sent, as its policy allows?

By claims: at least once, a copy only where it was not known whether the broker had the message, or after a hand-over.

What was due is computed from the schedule's text alone (`schedules.occurrences`); nothing here knows how a beat plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from simulated import MAX_SKEW, Noted, Sent, Spec, Trace

from celery_tzbeat.beat.claims import REFUSALS
from celery_tzbeat.schedules import occurrences

SECOND = timedelta(seconds=1)
UNRUN = {"skipped", "coalesced", "missed"}

#: An occurrence so near to the end may still be on its way; a message that cannot be built takes longer to die.
SETTLING = 2 * SECOND
DYING = 22 * SECOND

#: What may be lost at a wipe: what was due while nobody could send. That is two leases and a second at most after one fault,
#: and a lease more where the successor is frozen before it has sent what is due.
FORGOTTEN = 31 * SECOND
#: The same for a message that cannot be built: each leader tries for itself.
FORGOTTEN_UNBUILT = FORGOTTEN + 3 * DYING
#: By claims a leader is longer behind: it claims, sends and confirms each occurrence of an entry before the next.
BEHIND = 25 * SECOND


@dataclass(frozen=True)
class Row:
    """A record of occurrences that did not run, and those it stands for."""

    noted: Noted
    nominals: tuple[datetime, ...]


def violations(trace: Trace, *, lateness: timedelta | None = None, but: tuple[str, ...] = ()) -> list[str]:
    """Return what went wrong, in sentences. `lateness`: the most by which any message may be late, entries `but` apart."""
    found: list[str] = []
    for spec in trace.specs:
        found += _of_entry(trace, spec)
    first_copies = {(sent.entry, sent.nominal): sent for sent in reversed(trace.sent)}
    for sent in first_copies.values():
        if sent.clock < sent.nominal and not trace.claims:  # what was claimed is sent by whoever leads then
            found.append(f"{_key(sent)} was sent before its time by the sender's own clock")
        if sent.at < sent.nominal - MAX_SKEW:
            found.append(f"{_key(sent)} was sent more than the skew before its time")
        if lateness is not None and sent.entry not in but and sent.at - sent.nominal > lateness:
            found.append(f"{_key(sent)} was sent {sent.at - sent.nominal} late, at most {lateness} is promised")
    if len(trace.leaders) != 1:
        found.append(f"at the end there lead {trace.leaders}")
    found += _epochs(trace)
    for left in trace.open:
        if left.occurrence.nominal <= trace.end - trace.skew - SETTLING:
            found.append(f"{left.occurrence.key} is still open at the end")
    return found


def _of_entry(trace: Trace, spec: Spec) -> Iterator[str]:
    sent = [message for message in trace.sent if message.entry == spec.name]
    notes = [noted for noted in trace.audit if noted.record.entry == spec.name]
    starts = [(at, nominal) for at, entry, nominal in trace.starts if entry == spec.name]
    if not starts:
        yield f"{spec.name} never began"
        return
    begin = starts[0][1]
    due = list(occurrences(spec.text, "UTC", after=begin, until=trace.end + trace.skew + SECOND))
    known = set(due)
    rows = [
        Row(noted, tuple(u for u in due if noted.record.first <= u <= noted.record.last))
        for noted in notes
        if noted.record.event in UNRUN and noted.record.first and noted.record.last
    ]
    buried = [noted for noted in notes if noted.record.event == "dead"]
    dead = [noted.record.first for noted in buried]
    unroutable = [noted.record.first for noted in buried if noted.record.detail == "unroutable"]

    for message in sent:
        if message.nominal not in known:
            yield f"{_key(message)} was sent and was not due"
    if trace.claims:
        yield from _copies(trace, spec, sent, notes)
        yield from _claims(trace, spec, sent, notes)
    else:
        yield from _twice(trace, spec, sent, starts)
        yield from _once_recorded(trace, spec, sent, notes)
    for row in rows:
        yield from _row(spec, row, sent)

    sent_nominals = {message.nominal for message in sent}
    unrun = [u for row in rows for u in row.nominals]
    decided = [(u, row.noted) for row in rows for u in row.nominals]
    decided += [(noted.record.first, noted) for noted in buried if noted.record.first]
    for message in sent:
        if message.nominal in unroutable and not (message.acknowledged and message.trusted):
            continue  # the broker took a copy that its sender did not hear of
        if any(u == message.nominal and not _forgotten_successor(trace, noted, message) for u, noted in decided):
            yield f"{_key(message)} was sent, and recorded as not sent"
    if len(set(unrun)) + len(set(dead)) != len({*unrun, *dead}) or (not trace.wipes and len(set(unrun)) != len(unrun)):
        yield f"{spec.name}: occurrences stand in more than one record: {sorted(u for u in unrun if unrun.count(u) > 1)}"
    if dead and not spec.fails_until and not all(spec.fails_for(u) for u in dead if u and u not in unroutable):
        yield f"{spec.name} has dead letters, and could be built"
    for u in unroutable:
        if u and trace.refusals.count((spec.name, u)) < REFUSALS:
            yield f"{spec.name}@{u} is dead, and was refused {trace.refusals.count((spec.name, u))} times only"

    accounted = sent_nominals | set(unrun) | set(dead)
    may_fail = bool(spec.fails_until) or any(map(spec.fails_for, due))
    settled = trace.end - trace.skew - (DYING if may_fail else SETTLING)
    forgotten = (FORGOTTEN_UNBUILT if may_fail else FORGOTTEN) + (BEHIND if trace.claims else timedelta())
    for u in due:
        lost = _lost_with_the_store(trace, starts, u, forgotten) or _claim_lost_with_the_store(trace, notes, u)
        if u <= settled and u not in accounted and not lost:
            yield f"{spec.name}@{u} was neither sent nor recorded"


def _twice(trace: Trace, spec: Spec, sent: list[Sent], starts: list[tuple[datetime, datetime]]) -> Iterator[str]:
    """Nothing goes out twice, and in order; but a wiped store may not know what its sender did not know either."""
    first: dict[datetime, Sent] = {}
    for message in sent:
        earlier = first.setdefault(message.nominal, message)
        if earlier is message:
            continue
        wiped = any(earlier.at <= wipe <= message.at for wipe in trace.wipes)
        begun_anew = any(earlier.at <= at <= message.at and nominal < message.nominal for at, nominal in starts[1:])
        forgotten = _forgotten_successor(trace, earlier, message)
        if not forgotten and not (wiped and (begun_anew or not earlier.acknowledged)):
            yield f"{_key(message)} was sent twice: by {earlier.beat} at {earlier.at}, by {message.beat} at {message.at}"
    for before, after in pairwise(sent):
        if after.nominal < before.nominal and not any(before.at <= wipe <= after.at for wipe in trace.wipes):
            yield f"{_key(after)} was sent after {_key(before)}"


def _copies(trace: Trace, spec: Spec, sent: list[Sent], notes: list[Noted]) -> Iterator[str]:
    """Copies are of one message, and each has a reason; what was confirmed is not sent again; first copies are in order."""
    by_nominal: dict[datetime, list[Sent]] = {}
    for message in sent:
        by_nominal.setdefault(message.nominal, []).append(message)
    confirmed = {noted.record.first: noted.at for noted in reversed(notes) if noted.record.event == "sent"}
    for nominal, copies in by_nominal.items():
        for before, after in pairwise(copies):
            if any(before.at <= wipe <= after.at for wipe in trace.wipes):
                continue
            if after.body != before.body:
                yield f"{_key(after)} is another message than its copy: {before.body!r}, {after.body!r}"
            handed_over = after.beat != before.beat or any(before.at <= at <= after.at for at, *_ in trace.offices)
            not_known = not before.acknowledged or before.given_up or after.given_up
            if not handed_over and not not_known:
                yield f"{_key(after)} was sent again by {after.beat}, which knew that the broker had it"
            in_office = max((office for office in trace.offices if office[0] <= after.at), default=None)
            leads = after.trusted and in_office is not None and in_office[1] == after.beat
            if confirmed.get(nominal, after.at) < after.at and leads and not after.given_up:
                yield f"{_key(after)} was sent again by {after.beat} in office, after it was confirmed"
    refused = {nominal for entry, nominal in trace.refusals if entry == spec.name}
    first = [copies[0] for nominal, copies in by_nominal.items() if nominal not in refused and not copies[0].given_up]
    for before, after in pairwise(first):
        claimed = min(
            (n.at for n in notes if n.record.event == "claimed" and n.record.first == after.nominal), default=None
        )
        forgotten = claimed and any(claimed <= wipe <= after.at for wipe in trace.wipes)
        if after.nominal < before.nominal and not forgotten:
            yield f"{_key(after)} was first sent after {_key(before)}"


def _claims(trace: Trace, spec: Spec, sent: list[Sent], notes: list[Noted]) -> Iterator[str]:
    """Each message was claimed before it was sent, and each claim is settled once: sent where it was, or dead."""
    claims = {noted.record.first: noted for noted in reversed(notes) if noted.record.event == "claimed"}
    for nominal, claim in claims.items():
        if nominal and claim.clock < nominal:
            yield f"{spec.name}@{nominal} was claimed before its time by the claimer's own clock"
    for message in sent:
        claim = claims.get(message.nominal)
        if claim is None or claim.at > message.at:
            yield f"{_key(message)} was sent and not claimed before"
        elif message.late != (claim.record.detail == "misfire"):
            yield f"{_key(message)}: claim and message disagree about whether it was late"
    ends = [noted for noted in notes if noted.record.event in ("sent", "dead")]
    for noted in ends:
        nominal = noted.record.first
        if noted.record.event == "sent" and not any(m.nominal == nominal and m.at <= noted.at for m in sent):
            yield f"{spec.name}@{nominal} was recorded as sent, and was not"
    for nominal, claim in claims.items():
        settled = [noted for noted in ends if noted.record.first == nominal]
        wiped = any(claim.at <= wipe for wipe in trace.wipes)
        if len(settled) > 1 and not wiped:
            yield f"{spec.name}@{nominal} was settled {len(settled)} times"
        if not settled and not wiped and nominal and nominal <= trace.end - trace.skew - SETTLING:
            yield f"{spec.name}@{nominal} was claimed and never settled"


def _claim_lost_with_the_store(trace: Trace, notes: list[Noted], u: datetime) -> bool:
    """A wiped store has forgotten what was claimed; it is lost where the leader that knows it is gone, too."""
    claimed = [noted.at for noted in notes if noted.record.event == "claimed" and noted.record.first == u]
    return any(
        at <= wipe and any(at <= office[0] for office in trace.offices) for at in claimed for wipe in trace.wipes
    )


def _forgotten_successor(trace: Trace, one: Sent | Noted, other: Sent | Noted) -> bool:
    """The lease's server, wiped with the store, may renew a replaced leader that asks before its successor does.

    What the successor did is then known to nobody who leads: the last row of the promises. Only a leader in trust may.
    """
    earlier, later = sorted((one, other), key=lambda found: found.at)
    wiped = any(earlier.at <= wipe <= later.at for wipe in trace.wipes)
    return wiped and later.trusted and later.epoch < earlier.epoch


def _once_recorded(trace: Trace, spec: Spec, sent: list[Sent], notes: list[Noted]) -> Iterator[str]:
    records = [noted.record.first for noted in notes if noted.record.event == "sent"]
    if sorted(message.nominal for message in sent) != sorted(u for u in records if u):
        yield f"{spec.name}: {len(sent)} messages, {len(records)} records of sending"
    late = {noted.record.first for noted in notes if noted.record.detail == "misfire"}
    if late != {message.nominal for message in sent if message.late}:
        yield f"{spec.name}: records and messages disagree about which were late"


def _row(spec: Spec, row: Row, sent: list[Sent]) -> Iterator[str]:
    record, nominals = row.noted.record, row.nominals
    name = f"{spec.name}: {record.event} {record.first} to {record.last}"
    if record.first not in nominals or record.last not in nominals:
        yield f"{name}: its ends were not due"
        return
    if record.count != min(len(nominals), 1000):
        yield f"{name}: it counts {record.count}, there are {len(nominals)}"
    if record.detail == "by the task":
        if len(nominals) != 1 or not spec.declines(nominals[0]):
            yield f"{name}: the task did not decline"
        return
    age = row.noted.clock - nominals[-1]
    if age <= timedelta(seconds=spec.grace):
        yield f"{name}: recorded {age} after its time, within the grace of {spec.grace:g} s"
    match record.event:
        case "missed":
            if row.noted.clock - nominals[-1] <= timedelta(seconds=spec.window):
                yield f"{name}: not older than the window of {spec.window:g} s"
        case "skipped":
            if spec.catchup != "skip":
                yield f"{name}: the policy is {spec.catchup}"
        case "coalesced":
            if spec.catchup != "latest":
                yield f"{name}: the policy is {spec.catchup}"
            if not any(message.nominal > nominals[-1] for message in sent):
                yield f"{name}: nothing later was sent instead"


def _lost_with_the_store(
    trace: Trace, starts: list[tuple[datetime, datetime]], u: datetime, forgotten: timedelta
) -> bool:
    """A beat that finds an empty store starts from now: what was due shortly before is lost, and only then."""
    return any(wipe - forgotten <= u <= nominal for wipe in trace.wipes for at, nominal in starts[1:] if wipe <= at)


def _epochs(trace: Trace) -> Iterator[str]:
    for before, after in pairwise(trace.offices):
        if after[2] < before[2] and not any(before[0] <= wipe <= after[0] for wipe in trace.wipes):
            yield f"{after[1]} took office with epoch {after[2]} after {before[2]}"
    for message in trace.sent:
        if not any(epoch == message.epoch and at <= message.at for at, _, epoch, _ in trace.offices):
            yield f"{_key(message)} was sent by a beat that had not taken office"


def _key(message: Sent) -> str:
    return f"{message.entry}@{message.nominal:%H:%M:%S.%f}"

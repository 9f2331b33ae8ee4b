"""Text forms and dict forms of rules, both ways: ``parse(rule.text) == rule``, ``from_dict(rule.to_dict()) == rule``.

text   = term (("|" | "-") term)*            from left to right, each sign between blanks
term   = "(" text ")" | rule [zone] word*
rule   = 5 or 6 fields | @daily … | @every 15m | @at 2026-11-01T05:30:00Z,… | @rrule … | @reboot
       | @solar sunset 48.85 2.35 | @dates 2026-12-25,…    (the last one only after "-")
word   = gap=skip | fold=both | kind=fixed | days=and | phase=137s
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from typing import Any

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.schedules import civil, fields
from celery_tzbeat.schedules.civil import Fold, Gap
from celery_tzbeat.schedules.combination import Difference, Union
from celery_tzbeat.schedules.crontabs import cron_rule
from celery_tzbeat.schedules.intervals import every
from celery_tzbeat.schedules.moments import at, reboot
from celery_tzbeat.schedules.recurrence import rrule
from celery_tzbeat.schedules.remainder import Dates
from celery_tzbeat.schedules.rule import Rule, read_policy
from celery_tzbeat.schedules.sun import sun

_WORD = re.compile(r"(gap|fold|kind|days|phase)=(.*)", re.DOTALL)
_ZONE = re.compile(r"[A-Za-z_]+/[A-Za-z].*")
_HEADS = ("@every", "@at", "@rrule", "@reboot", "@solar", "@dates")
_ALLOWED = {
    "cron": ("gap", "fold", "kind", "days"),
    "@every": ("phase",),
    "@rrule": ("gap", "fold"),
}


def parse(text: str) -> Rule:
    """Return the rule of a text form. `InvalidSchedule` names the field, the bad text and the remedy."""
    if not isinstance(text, str):
        raise InvalidSchedule(f"text of a schedule wanted, not {text!r}", field="text", text=str(text))
    tokens = text.split()
    if not tokens:
        raise InvalidSchedule("text of the schedule is empty: 5 fields are wanted, or a word such as @daily", text=text)
    rule, rest = _row(tokens)
    if rest:
        raise InvalidSchedule(f"text {text!r} has a {rest[0]!r} too many", text=rest[0])
    return rule


def from_dict(form: Mapping[str, Any]) -> Rule:
    """Return the rule of a dict form. `InvalidSchedule` for a version or kind that this release does not know."""
    if form.get("v") != 1:
        raise InvalidSchedule(
            f"dict form has version {form.get('v')!r}, this release reads 1: upgrade celery_tzbeat",
            field="v",
            text=str(form.get("v")),
        )
    rule = parse(form.get("text", ""))
    if rule.form != form.get("kind"):
        raise InvalidSchedule(
            f"dict form has kind {form.get('kind')!r}, but its text {rule.text!r} is of kind {rule.form!r}",
            field="kind",
            text=str(form.get("kind")),
        )
    return rule


def occurrences(
    text: str,
    zone: str,
    *,
    after: datetime,
    until: datetime,
    gap: Gap = "end",
    fold: Fold = "first",
) -> Iterator[datetime]:
    """Return the occurrences u of a text form with after < u <= until: aware, in UTC, ascending.

    `zone`, `gap` and `fold` hold where the text names none. What is wrong raises here, not at the first step:
    `InvalidSchedule` for the text, the zone or the policy, ValueError for a naive `after` or `until`.
    """
    read_policy(gap, fold)
    rule = parse(text).in_zone(civil.zone(zone)).with_defaults(gap=gap, fold=fold)
    if after.utcoffset() is None or until.utcoffset() is None:
        raise ValueError("after and until must be aware")
    return _walk(rule, after, until)


def _walk(rule: Rule, after: datetime, until: datetime) -> Iterator[datetime]:
    instant = rule.next_after(after)
    while instant is not None and instant <= until:
        yield instant
        instant = rule.next_after(instant)


def _row(tokens: list[str]) -> tuple[Rule, list[str]]:
    """Read terms joined by signs, as far as they go; return the rule and the tokens left."""
    found, tokens = _term(tokens)
    if isinstance(found, tuple):
        raise InvalidSchedule("text '@dates' stands only after '-'", text="@dates")
    rule = found
    while tokens and tokens[0] in ("|", "-"):
        sign, (right, tokens) = tokens[0], _term(tokens[1:])
        if isinstance(right, tuple):
            if sign == "|":
                raise InvalidSchedule("text '@dates' stands only after '-'", text="@dates")
            days, zone = right
            rule = Difference(rule, days, zone)
        else:
            rule = Union((rule, right)) if sign == "|" else Difference(rule, right)
    return rule, tokens


def _term(tokens: list[str]) -> tuple[Rule | tuple[Dates, Any], list[str]]:
    if tokens[:1] == ["("]:
        rule, rest = _row(tokens[1:])
        if rest[:1] != [")"]:
            raise InvalidSchedule("text has a '(' without its ')'", text="(")
        return rule, rest[1:]
    end = next((place for place, token in enumerate(tokens) if token in ("|", "-", "(", ")")), len(tokens))
    if end == 0:
        raise InvalidSchedule("text lacks a schedule beside one of its signs | - ( )", text=" ".join(tokens))
    return _rule(tokens[:end]), tokens[end:]


def _rule(tokens: list[str]) -> Rule | tuple[Dates, Any]:
    parts = list(tokens)
    words: dict[str, str] = {}
    while parts and (word := _WORD.fullmatch(parts[-1])):
        if word[1] in words:
            raise InvalidSchedule(f"{word[1]} is given twice", field=word[1], text=parts[-1])
        words[word[1]] = word[2]
        parts.pop()
    zone = None
    if len(parts) > 1 and _is_zone(parts[-1]):
        zone = civil.zone(parts.pop())
    head = parts[0].lower() if parts else ""
    form = head if head in _HEADS else "cron"
    for name in words:
        if name not in _ALLOWED.get(form, ()):
            raise InvalidSchedule(f"{name} means nothing to {' '.join(parts)!r}", field=name, text=words[name])
    stated: dict[str, Any] = words
    if form == "cron":
        if head.startswith("@") and head not in fields.ALIASES:
            known = ", ".join((*fields.ALIASES, *_HEADS))
            raise InvalidSchedule(f"text {parts[0]!r} is unknown: there are {known}", text=parts[0])
        return cron_rule(" ".join(parts), tz=zone, **stated)
    if form == "@rrule":
        return rrule("\n".join(parts[1:]), tz=zone, **stated)
    argument = _only(parts) if form not in ("@reboot", "@solar") else ""
    if form == "@every":
        return every(argument, **stated)
    if form == "@at":
        return at(*argument.split(","), tz=zone)
    if form == "@dates":
        return Dates(frozenset(_date(day) for day in argument.split(","))), zone
    if form == "@solar":
        return sun(*parts[1:])
    if len(parts) > 1:
        raise InvalidSchedule(f"text '@reboot' is followed by {parts[1]!r}", text=parts[1])
    return reboot()


def _only(parts: list[str]) -> str:
    if len(parts) != 2:
        raise InvalidSchedule(
            f"text {parts[0]!r} is followed by {len(parts) - 1} words, one is wanted", text=" ".join(parts)
        )
    return parts[1]


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidSchedule(f"date {text!r} is not an ISO date such as 2026-12-25", field="date", text=text) from None


def _is_zone(token: str) -> bool:
    """Tell a zone from the last field. What only looks like one counts too, so that the error speaks of zones."""
    if token in civil.zone_names() or _ZONE.fullmatch(token):
        return True
    return token.casefold() in civil.folded_zone_names()

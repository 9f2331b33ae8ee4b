"""What every rule of ours can do: the `Schedule` protocol of `model`, Celery's contract, and the operators.

A rule is a value: nothing that decides its instants changes after it was made. (Celery sets `app` on it; that
decides nothing once the rule is in a zone.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from datetime import date, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from zoneinfo import ZoneInfo

from celery.schedules import BaseSchedule, schedstate

from celery_tzbeat.errors import InvalidSchedule
from celery_tzbeat.model import UTC
from celery_tzbeat.schedules import civil
from celery_tzbeat.schedules.civil import Fold, Gap

if TYPE_CHECKING:
    from celery import Celery

Self = TypeVar("Self", bound="Rule")

#: What Celery's contract says of a rule that has no further occurrence: look again in a day.
NEVER = timedelta(days=1)


class Rule(BaseSchedule):
    """A schedule of ours. Equal rules have equal definitions: the fields, the zone, gap, fold, kind, days.

    `nowfun` and `app` serve Celery's contract only, and are no part of the definition.
    """

    #: The word for this kind of rule in dict forms.
    form: ClassVar[str]

    def __init__(self, *, nowfun: Callable[[], datetime] | None = None, app: Celery | None = None) -> None:
        BaseSchedule.__init__(self, nowfun=nowfun, app=app)

    # -- the rule

    @property
    def zone(self) -> ZoneInfo | None:
        """The zone the rule is read in; None for a rule that needs none, or has none yet (`in_zone`)."""
        return None

    @property
    @abstractmethod
    def text(self) -> str:
        """The rule in its text form: ``parse(rule.text) == rule``."""

    @property
    @abstractmethod
    def shortest_gap(self) -> timedelta:
        """No two occurrences are nearer than this, changes of offset aside; not always the greatest such time."""

    @property
    def grain(self) -> timedelta:
        """Every occurrence is a multiple of this from any other one."""
        return timedelta(seconds=1)

    @abstractmethod
    def next_after(self, instant: datetime) -> datetime | None:
        """Return the first occurrence strictly after an instant, aware, in UTC; None where there is none.

        ValueError for a naive instant, `InvalidSchedule` for a rule that lacks its zone or its name.
        """

    @abstractmethod
    def prev_before(self, instant: datetime) -> datetime | None:
        """Return the last occurrence strictly before an instant, as `next_after` does."""

    @abstractmethod
    def describe(self) -> str:
        """Return the rule in words."""

    @abstractmethod
    def _definition(self) -> tuple[object, ...]:
        """Return what makes two rules of one form equal."""

    def in_zone(self: Self, zone: tzinfo | str) -> Self:
        """Return this rule, read in `zone` where it names none itself."""
        return self

    def named(self: Self, name: str) -> Self:
        """Return this rule with ``phase="spread"`` settled by an entry's name; most rules have nothing to settle."""
        return self

    def with_defaults(self: Self, *, gap: Gap, fold: Fold) -> Self:
        """Return this rule with a gap and fold where it states none itself and they matter."""
        return self

    def warnings(self) -> tuple[str, ...]:
        """Return what its author may not have meant, in sentences. Does not search."""
        return ()

    def count_between(self, after: datetime, until: datetime, limit: int) -> int:
        """Return how many occurrences u there are with after < u <= until, counting no further than `limit`."""
        count, instant = 0, self.next_after(after)
        while instant is not None and instant <= until and count < limit:
            count, instant = count + 1, self.next_after(instant)
        return count

    def mark(self, nominal: datetime) -> str:
        """Return the wall and pass of an occurrence as text, empty where the instant says it all."""
        return ""

    def resume(self, nominal: datetime, mark: str) -> datetime:
        """Return the instant from which to go on after `nominal`, were the zone's rules changed since (`mark`)."""
        return nominal

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned dict form; `from_dict` reads it."""
        return {"v": 1, "kind": self.form, "text": self.text}

    # -- operators

    def __or__(self, other: object) -> Rule:
        """Return the occurrences of both; what falls on one instant is one occurrence."""
        from celery_tzbeat.schedules.combination import Union

        return Union((self, other)) if isinstance(other, Rule) else NotImplemented

    def __sub__(self, other: Rule | date | datetime | Iterable[date | datetime]) -> Rule:
        """Return the occurrences of self that are not in `other`.

        A rule or an (aware) instant takes away what falls on the same instant. A date takes away every occurrence
        whose wall has that date in the zone of self.
        """
        from celery_tzbeat.schedules.combination import difference

        return difference(self, other)

    # -- Celery's contract

    @property
    def tz(self) -> tzinfo:
        """The zone, or else the app's timezone. Sentry reads it."""
        return self.zone or self.app.timezone

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        """Return whether an occurrence came after `last_run_at`, and the seconds to the next one (a day for never).

        It knows no grace and no `beat_cron_starting_deadline`; celery_tzbeat's own beat never asks it.
        """
        rule, now = self.in_zone(self.tz), self._instant(self.now())
        upcoming = rule.next_after(self._instant(last_run_at))
        due = upcoming is not None and upcoming <= now
        if due:
            upcoming = rule.next_after(now)
        wait = NEVER if upcoming is None else upcoming - now
        found: tuple[bool, float] = schedstate(due, wait.total_seconds())
        return found

    def remaining_estimate(self, last_run_at: datetime, *_: object) -> timedelta:
        """Return the time from now to the first occurrence after `last_run_at`, negative where it is overdue."""
        upcoming = self.in_zone(self.tz).next_after(self._instant(last_run_at))
        return NEVER if upcoming is None else upcoming - self._instant(self.now())

    def _instant(self, moment: datetime) -> datetime:
        # Celery hands over naive datetimes, which are UTC, from old schedule files and from some `nowfun`.
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)

    @classmethod
    def from_string(cls, text: str) -> Rule:
        """Return the rule of a text form (`parse`), of whatever class it is."""
        from celery_tzbeat.schedules.parse import parse

        return parse(text)

    # -- a value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self._identity() == other._identity()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        return (self.form, *self._definition())

    def __repr__(self) -> str:
        return f"<{self.text}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.to_dict(), self.nowfun)

    def __copy__(self: Self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return self.__copy__()  # all parts are values


def _restored(form: dict[str, Any], nowfun: Callable[[], datetime] | None) -> Rule:
    """Return a pickled rule. Its name and place are part of every pickle: do not move it."""
    from celery_tzbeat.schedules.parse import from_dict

    rule = from_dict(form)
    rule.nowfun = nowfun
    return rule


def lacks_zone(rule: Rule) -> InvalidSchedule:
    """Return the error of a rule that is asked before it has a zone."""
    return InvalidSchedule(
        f"zone of {rule.text!r} is not known: give tz=, or call in_zone() first", field="zone", text=rule.text
    )


def one_of(field: str, given: object, words: tuple[str, ...]) -> None:
    """Raise `InvalidSchedule` unless `given` is None or one of the words of a keyword."""
    if given is not None and given not in words:
        listed = " or ".join(repr(word) for word in words)
        raise InvalidSchedule(f"{field} {given!r} is not known: {listed}", field=field, text=str(given))


def read_policy(gap: object, fold: object) -> None:
    """Raise `InvalidSchedule` unless gap and fold are words of theirs, or None."""
    one_of("gap", gap, ("end", "skip"))
    one_of("fold", fold, ("first", "second", "both"))


def suffix(zone: ZoneInfo | None, **words: str | None) -> str:
    """Return the end of a text form: the zone, then ``word=value`` of what is stated."""
    parts = [zone.key] if zone is not None else []
    parts += [f"{word}={value}" for word, value in words.items() if value is not None]
    return "".join(" " + part for part in parts)


def read_zone(tz: str | tzinfo | None) -> ZoneInfo | None:
    """Return the zone of a `tz` keyword."""
    return None if tz is None else civil.zone(tz)

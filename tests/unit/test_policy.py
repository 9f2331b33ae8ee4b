from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_tzbeat.deliveries import TRAVELLING, policy_from_dict, policy_to_dict
from celery_tzbeat.errors import InvalidPolicy
from celery_tzbeat.model import Policy, Retry
from celery_tzbeat.policy import _READERS, _RETRY_READERS, POLICY_NOT_BUILT, read_policy


def read(**given: Any) -> Policy:
    return read_policy(given, default=Policy())


def test_every_field_has_a_reader_and_every_reader_a_field() -> None:
    assert list(_READERS) == list(Policy.__dataclass_fields__)
    assert list(_RETRY_READERS) == list(Retry.__dataclass_fields__)
    assert not POLICY_NOT_BUILT & set(_READERS)


def test_a_policy_changes_what_it_names_only() -> None:
    default = Policy(misfire_grace=timedelta(seconds=5), max_deliveries=2)
    changed = Policy(misfire_grace=timedelta(seconds=5), max_deliveries=2, catchup="skip")
    assert read_policy({"catchup": "skip"}, default=default) == changed
    assert read_policy(None, default=default) == default


def test_celerys_deadline_is_the_window_and_bounds_the_grace() -> None:
    found = read_policy(None, default=Policy(), deadline=timedelta(seconds=30))
    assert found.catchup_window == found.misfire_grace == timedelta(seconds=30)


def test_spans_are_seconds_or_timedeltas_also_in_a_policy_that_is_given_whole() -> None:
    whole = Policy(timeout=90, kill_after=0, run_lease=1.5, retry=Retry(delay=2))  # type: ignore[arg-type]
    found = read_policy(whole, default=Policy(max_deliveries=9))
    assert found.timeout == timedelta(seconds=90)
    assert found.kill_after == timedelta()
    assert found.run_lease == timedelta(seconds=1.5)
    assert found.retry == Retry(delay=timedelta(seconds=2))
    assert found.max_deliveries == 5, "a Policy says every word itself"


@pytest.mark.parametrize(
    ("given", "retry"),
    [
        (4, Retry(max_attempts=4)),
        ({"max_attempts": 2, "backoff": "fixed"}, Retry(max_attempts=2, backoff="fixed")),
        (
            {"delay": 5, "max_delay": 60, "jitter": False},
            Retry(delay=timedelta(seconds=5), max_delay=timedelta(minutes=1), jitter=False),
        ),
        (
            {"only": "OSError", "never": ["proj.errors.Refused", KeyError]},
            Retry(only=("OSError",), never=("proj.errors.Refused", "builtins.KeyError")),
        ),
        (Retry(max_attempts=7), Retry(max_attempts=7)),
        (None, None),
    ],
)  # fmt: skip
def test_a_retry_is_a_number_of_attempts_or_a_dict_or_a_retry(given: Any, retry: Retry | None) -> None:
    assert read(retry=given).retry == retry


def test_an_entry_takes_back_what_the_apps_default_says() -> None:
    default = read(retry=3, timeout=60, on_store_down="run")
    found = read_policy(
        {"retry": None, "timeout": None, "on_store_down": None, "delivery": "at_most_once"}, default=default
    )
    assert (found.retry, found.timeout) == (None, None)
    assert found.holds_when_store_is_down


def test_every_word_that_travels_comes_back_as_it_was_read() -> None:
    given = {
        "overlap": "buffer_one",
        "timeout": 90,
        "kill_after": 5,
        "retry": {"max_attempts": 4, "only": ["OSError"]},
        "max_deliveries": 2,
        "run_lease": 3,
        "start_within": 60,
        "on_abandoned": "redispatch",
        "on_store_down": "hold",
    }
    found = read(**given)
    assert policy_from_dict(policy_to_dict(found)) == found
    assert {*given, "delivery"} == set(TRAVELLING)


@pytest.mark.parametrize("word", sorted(POLICY_NOT_BUILT))
def test_words_of_later_releases_are_refused_not_ignored(word: str) -> None:
    with pytest.raises(InvalidPolicy, match=f"'{word}' is not built in this release"):
        read_policy({word: 1}, default=Policy())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"misfire_grac": 5}, "policy 'misfire_grac' is unknown; did you mean 'misfire_grace'?"),
        ({7: 5}, "policy 7 is unknown; known are catchup, catchup_window, delivery, kill_after"),
        ({"misfire_grace": -1}, "policy misfire_grace is -1; give 0 or more seconds"),
        ({"misfire_grace": "60"}, "policy misfire_grace is '60'; give seconds or a timedelta"),
        ({"catchup_window": 5}, "is shorter than misfire_grace"),
        ({"catchup": "lates"}, "policy catchup 'lates' is unknown; did you mean 'latest'?"),
        ({"catchup": None}, "policy catchup None is unknown; known are all, latest, skip"),
        ({"catchup": ["all"]}, "policy catchup ['all'] is unknown"),
        ({"overlap": "skp"}, "policy overlap 'skp' is unknown; did you mean 'skip'?"),
        ({"delivery": "exactly_once"}, "policy delivery 'exactly_once' is unknown; did you mean 'at_least_once'?"),
        ({"on_abandoned": "requeue"}, "policy on_abandoned 'requeue' is unknown; known are auto, dead_letter, redispatch"),
        ({"on_store_down": "wait"}, "policy on_store_down 'wait' is unknown; known are hold, run"),
        ({"timeout": 0}, "policy timeout is 0; give more than 0 seconds"),
        ({"timeout": "1h"}, "policy timeout is '1h'; give seconds or a timedelta"),
        ({"kill_after": -1}, "policy kill_after is -1; give 0 or more seconds"),
        ({"start_within": 0}, "policy start_within is 0; give more than 0 seconds"),
        ({"run_lease": 1}, "policy run_lease is 1; give 1.5 or more seconds: six heartbeats"),
        ({"max_deliveries": 0}, "policy max_deliveries is 0; give a whole number, 1 or more"),
        ({"max_deliveries": True}, "policy max_deliveries is True; give a whole number, 1 or more"),
        ({"retry": "3"}, "policy retry is '3'; give a Retry, a dict, or how many attempts there are in all"),
        ({"retry": True}, "policy retry is True; give a Retry, a dict"),
        ({"retry": 0}, "policy retry max_attempts is 0; give a whole number, 1 or more"),
        ({"retry": {"attempts": 3}}, "policy retry 'attempts' is unknown; did you mean 'max_attempts'?"),
        ({"retry": {"backoff": "linear"}}, "policy retry backoff 'linear' is unknown; known are exponential, fixed, none"),
        ({"retry": {"delay": -1}}, "policy retry delay is -1; give 0 or more seconds"),
        ({"retry": {"delay": 7200}}, "policy retry max_delay (1:00:00) is shorter than delay (2:00:00); raise it or lower"),
        ({"retry": {"jitter": 1}}, "policy retry jitter is 1; give True or False"),
        ({"retry": {"only": [3]}}, "policy retry only has 3; give names of exception classes, or the classes"),
        ({"retry": Retry(max_attempts=0)}, "policy retry max_attempts is 0"),
        (Policy(misfire_grace=timedelta(seconds=-1)), "policy misfire_grace is datetime.timedelta("),
        (Policy(delivery="at_most_once", retry=Retry()), "set retry to None, or delivery to 'at_least_once'"),
        (["latest"], "give a dict or a Policy"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_followed_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(InvalidPolicy) as caught:
        read_policy(given, default=Policy())
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("retry", 2), ("on_abandoned", "redispatch"), ("on_store_down", "run")])
def test_at_most_once_refuses_what_would_start_a_second_time(key: str, value: Any) -> None:
    with pytest.raises(InvalidPolicy, match=f"policy {key} is .* which never starts a second time; set {key} to"):
        read(**{"delivery": "at_most_once", key: value})
    with pytest.raises(InvalidPolicy, match=f"policy {key} is"):  # the app's default says the one, the entry the other
        read_policy({"delivery": "at_most_once"}, default=read(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"), [("on_abandoned", "dead_letter"), ("on_abandoned", "auto"), ("on_store_down", "hold"), ("retry", None)]
)  # fmt: skip
def test_at_most_once_takes_what_starts_once(key: str, value: Any) -> None:
    assert getattr(read(**{"delivery": "at_most_once", key: value}), key) == value

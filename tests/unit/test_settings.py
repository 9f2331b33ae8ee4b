"""The settings: what is read, what is refused and in which sentence, and that all problems are told at once."""

from __future__ import annotations

import ssl
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_tzbeat.errors import InvalidConfiguration
from celery_tzbeat.model import Policy
from celery_tzbeat.settings import NOT_BUILT, Settings, why_two_servers

BROKER = "redis://localhost:6379/0"


def an_app(name: str | None = "proj", **conf: Any) -> Celery:
    app = Celery(name, set_as_current=False)
    app.conf.update({"broker_url": BROKER, **conf})
    return app


def problems(**conf: Any) -> list[str]:
    return Settings.examine(an_app(**conf))[1]


def test_the_defaults() -> None:
    settings = Settings.read(an_app())
    assert settings.url == settings.lock == BROKER
    assert settings.namespace == "proj/0"
    assert settings.lease == timedelta(seconds=10)
    assert settings.retention == timedelta(hours=24)
    assert settings.policy == Policy()
    assert settings.strict is True


def test_durations_are_seconds_or_timedeltas() -> None:
    settings = Settings.read(an_app(tzbeat_lease=2.5, tzbeat_retention=timedelta(hours=3)))
    assert settings.lease == timedelta(seconds=2.5)
    assert settings.retention == timedelta(hours=3)
    assert settings.call_timeout == pytest.approx(2.5 / 6)


def test_the_namespace_tells_apps_and_databases_apart() -> None:
    app = an_app("other", broker_url="redis://localhost:6379/5")
    assert Settings.read(app).namespace == "other/5"


@pytest.mark.parametrize(
    ("conf", "sentence"),
    [
        ({"tzbeat_lease": 0}, "tzbeat_lease is 0; the least is 1 s"),
        ({"tzbeat_lease": -5}, "tzbeat_lease is -5; the least is 1 s"),
        ({"tzbeat_lease": 0.9}, "tzbeat_lease is 0.9; the least is 1 s"),
        ({"tzbeat_lease": "10"}, "tzbeat_lease is '10'; give seconds or a timedelta"),
        ({"tzbeat_lease": True}, "tzbeat_lease is True; give seconds or a timedelta"),
        ({"tzbeat_lease": float("inf")}, "tzbeat_lease is inf; give seconds or a timedelta"),
        ({"tzbeat_lease": float("nan")}, "tzbeat_lease is nan; give seconds or a timedelta"),
        ({"tzbeat_url": ""}, "tzbeat_url is ''; give a text that is not empty"),
        ({"tzbeat_url": 5}, "tzbeat_url is 5; give a text that is not empty"),
        ({"tzbeat_lock": ""}, "tzbeat_lock is ''; give a text that is not empty"),
        ({"tzbeat_lock": "memcached://h"}, "tzbeat_lock 'memcached://h': the scheme 'memcached' is not served"),
        ({"tzbeat_namespace": "a{b}"}, "tzbeat_namespace is 'a{b}'; leave out braces"),
        ({"tzbeat_namespace": "a\nb"}, "leave out braces and control characters"),
        ({"tzbeat_gap": "shift"}, "tzbeat_gap is 'shift'; it is one of 'end', 'skip'"),
        ({"tzbeat_fold": "last"}, "tzbeat_fold is 'last'; it is one of 'first', 'second', 'both'"),
        ({"tzbeat_strict": "yes"}, "tzbeat_strict is 'yes'; it is one of True, False, 'tasks'"),
        ({"tzbeat_strict": 1}, "tzbeat_strict is 1; it is one of True, False, 'tasks'"),
        ({"tzbeat_audit_max": 0}, "tzbeat_audit_max is 0; give a whole number, 1 or more"),
        ({"tzbeat_audit_max": 1.5}, "tzbeat_audit_max is 1.5; give a whole number, 1 or more"),
        ({"tzbeat_wait_replicas": -1}, "tzbeat_wait_replicas is -1; give a whole number, 0 or more"),
        ({"tzbeat_wait_replicas": True}, "tzbeat_wait_replicas is True; give a whole number, 0 or more"),
        ({"tzbeat_max_skew": 0}, "tzbeat_max_skew is 0; the least is 1e-06 s"),
        ({"tzbeat_retention": 3600}, "must be longer than the broker's visibility timeout (1:00:00)"),
        ({"tzbeat_policy": "latest"}, "tzbeat_policy: policy is 'latest'; give a dict or a Policy"),
        ({"tzbeat_policy": {"catchup": "lates"}}, "policy catchup 'lates' is unknown; did you mean 'latest'?"),
        ({"tzbeat_policy": {"misfire_grace": "60"}}, "policy misfire_grace is '60'; give seconds or a timedelta"),
        ({"task_always_eager": True}, "task_always_eager is set: tasks would run inside beat"),
        ({"timezone": "Mars/Phobos"}, "timezone 'Mars/Phobos' is unknown; give an IANA name"),
        ({"broker_url": f"{BROKER};redis://other/0"}, "names several brokers; set tzbeat_url to the Redis"),
        ({"tzbeat_url": f"{BROKER};redis://other/0"}, "names several servers; name the one that is to keep the ledger"),
        ({"broker_use_ssl": True}, "set tzbeat_url = 'rediss://localhost:6379/0?ssl_cert_reqs=required'"),
        (
            {
                "broker_url": "redis://:secret@localhost:6379/0",
                "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_OPTIONAL, "ssl_ca_certs": "/ca.pem"},
            },
            "set tzbeat_url = 'rediss://:**@localhost:6379/0?ssl_cert_reqs=optional&ssl_ca_certs=/ca.pem'",
        ),
        ({"broker_url": "sentinel://one;sentinel://two"}, "sentinel:// needs the master's name: add ?master_name="),
        ({"broker_url": "sentinel://one/x"}, "cannot be used as the store: the database 'x' is not a number"),
        ({"tzbeat_url": "sentinel://one?master=m"}, "cannot be used: master is not an option of sentinel://"),
        ({"broker_url": "sentinel://one", "broker_use_ssl": True}, "is not served for a store behind Sentinel"),
    ],
)
def test_what_is_refused_is_refused_in_a_sentence(conf: dict[str, Any], sentence: str) -> None:
    found = problems(**conf)
    assert len(found) == 1, found
    assert sentence in found[0]


SENTINELS = {"broker_url": "sentinel://:pw@one;sentinel://two:26380", "broker_transport_options": {"master_name": "m"}}


def test_a_broker_behind_sentinel_is_the_store_too_with_all_that_its_options_say() -> None:
    options = {"master_name": "m", "sentinel_kwargs": {"password": "own"}, "min_other_sentinels": 1}
    settings = Settings.read(an_app(**{**SENTINELS, "broker_transport_options": options}))
    assert settings.url == settings.lock
    assert settings.url == (
        "sentinel://:pw@one:26379,two:26380/0?master_name=m&sentinel_password=own&min_other_sentinels=1"
    )
    assert settings.namespace == "proj/0"


@pytest.mark.parametrize(
    ("conf", "why"),
    [
        ({}, ""),
        ({"tzbeat_url": "redis://127.0.0.1:6379/0"}, ""),  # spelled differently: the probe has to tell
        ({"tzbeat_url": "redis://localhost:6379/3"}, "the broker uses database 0, the store database 3"),
        ({"broker_url": f"{BROKER};redis://other/0", "tzbeat_url": BROKER}, "names several brokers"),
        ({"broker_url": [BROKER, "redis://other/0"], "tzbeat_url": BROKER}, "names several brokers"),
        ({"broker_read_url": "redis://other/0"}, "broker_read_url and broker_write_url differ"),
        ({"broker_write_url": "redis://other/0"}, "broker_read_url and broker_write_url differ"),
        ({"broker_url": "amqp://rabbit//", "tzbeat_url": BROKER}, "is not a Redis"),
        (SENTINELS, ""),
        ({**SENTINELS, "tzbeat_url": "sentinel://two:26380,one/0?master_name=m"}, ""),
        ({**SENTINELS, "tzbeat_url": "sentinel://one,two:26380/1?master_name=m"}, "store database 1"),
        ({**SENTINELS, "tzbeat_url": "sentinel://one,two:26380?master_name=n"}, "for another master"),
        ({**SENTINELS, "tzbeat_url": "sentinel://one,three?master_name=m"}, "ask other sentinels"),
        ({**SENTINELS, "tzbeat_url": BROKER}, "the broker follows Sentinel and the store does not"),
        ({"tzbeat_url": "sentinel://one?master_name=m"}, "the store follows Sentinel and the broker does not"),
    ],
)
def test_whether_broker_and_store_may_be_one_server_is_told_from_their_urls(conf: dict[str, Any], why: str) -> None:
    app = an_app(**conf)
    found = why_two_servers(app, Settings.read(app))
    assert why in found
    assert bool(why) == bool(found)


def test_a_broker_that_is_no_redis_needs_a_store() -> None:
    found = problems(broker_url="amqp://user:secret@rabbit//")
    assert found[0].startswith("tzbeat_url is not set and the broker 'amqp://user:**@rabbit//' is not a Redis")
    assert "secret" not in "".join(found)


@pytest.mark.parametrize(
    "url",
    ["redis://localhost:port/0", "redis://localhost/0?socket_timeout=soon", "redis://localhost/0?unknown=1"],
)
def test_a_url_that_cannot_be_used_is_refused_before_anything_connects(url: str) -> None:
    (found,) = problems(broker_url=url, tzbeat_url=url)
    assert found.startswith(f"tzbeat_url {url!r} cannot be used: ")


def test_passwords_are_not_shown() -> None:
    found = problems(tzbeat_url="redis://user:secret@localhost:port/0")
    assert found
    assert "secret" not in "".join(found)


@pytest.mark.parametrize("name", [None, "__main__"])
def test_an_app_without_a_name_needs_a_namespace(name: str | None) -> None:
    app = an_app(name)
    (found,) = Settings.examine(app)[1]
    assert "tzbeat_namespace is not set and the app has no name" in found
    app.conf.tzbeat_namespace = "proj"
    assert Settings.read(app).namespace == "proj"


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        Settings.read(an_app(tzbeat_lease=0, tzbeat_gap="x", tzbeat_lese=3, tzbeat_alerts=["mail"]))
    assert len(caught.value.problems) == 4
    text = str(caught.value)
    assert text.startswith("celery_tzbeat cannot start: 4 problems\n  - ")
    assert "tzbeat check" in text
    for word in ("tzbeat_lease", "tzbeat_gap", "tzbeat_lese", "tzbeat_alerts"):
        assert word in text


@pytest.mark.parametrize("name", list(Settings.__dataclass_fields__))
def test_each_setting_misspelt_by_a_letter_is_refused_with_the_right_name(name: str) -> None:
    misspelt = f"tzbeat_{name[:-1]}z"
    (found,) = problems(**{misspelt: 1})
    assert found == f"{misspelt} is not a setting; did you mean 'tzbeat_{name}'?"


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_settings_of_later_releases_are_refused_not_ignored(name: str) -> None:
    (found,) = problems(**{f"tzbeat_{name}": 1})
    assert found == f"tzbeat_{name} is not built in this release of celery_tzbeat; leave it out"


# ---- spellings


def test_the_namespaced_spelling_of_a_settings_object_is_read() -> None:
    app = Celery("proj", set_as_current=False)
    django = SimpleNamespace(
        CELERY_BROKER_URL=BROKER,
        CELERY_TZBEAT_LEASE=5,
        CELERY_TZBEAT_NAMESPACE="shop",
        CELERY_TZBEAT_POLICY={"catchup": "all"},
        DEBUG=True,
    )
    app.config_from_object(django, namespace="CELERY")
    settings = Settings.read(app)
    assert settings.lease == timedelta(seconds=5)
    assert settings.namespace == "shop"
    assert settings.policy.catchup == "all"


def test_any_namespace_will_do() -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object(SimpleNamespace(MY_BROKER_URL=BROKER, MY_TZBEAT_LEASE=5), namespace="MY")
    assert Settings.read(app).lease == timedelta(seconds=5)


def test_a_misspelt_name_is_refused_in_the_namespaced_spelling_too() -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object(SimpleNamespace(CELERY_BROKER_URL=BROKER, CELERY_TZBEAT_LESE=5), namespace="CELERY")
    assert Settings.examine(app)[1] == ["tzbeat_lese is not a setting; did you mean 'tzbeat_lease'?"]


@pytest.mark.parametrize(
    ("namespace", "key", "right"),
    [
        ("CELERY", "TZBEAT_LEASE", "CELERY_TZBEAT_LEASE"),
        ("MY", "CELERY_TZBEAT_LEASE", "MY_TZBEAT_LEASE"),
        (None, "CELERY_TZBEAT_LEASE", "tzbeat_lease"),
        (None, "TZBEAT_LEASE", "tzbeat_lease"),
    ],
)
def test_a_spelling_that_celery_does_not_read_is_refused_with_the_one_it_reads(
    namespace: str | None, key: str, right: str
) -> None:
    app = Celery("proj", set_as_current=False)
    broker = f"{namespace}_BROKER_URL" if namespace else "broker_url"
    app.config_from_object(SimpleNamespace(**{broker: BROKER, key: 5}), namespace=namespace)
    assert Settings.examine(app)[1] == [f"{key} is not read; write {right}"]


# ---- release


def test_no_release_is_named_by_default() -> None:
    assert Settings.read(an_app()).release == ""


@pytest.mark.parametrize(
    ("given", "read"), [("2026.11.3", "2026.11.3"), ("v1.2", "1.2"), ("1.0.0-rc1", "1.0.0rc1"), ("7", "7")]
)
def test_a_release_is_any_version_that_can_be_compared(given: str, read: str) -> None:
    assert Settings.read(an_app(tzbeat_release=given)).release == read


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            "d34db33f",
            "tzbeat_release is 'd34db33f'; give a version that can be compared, such as '2026.11.3' (PEP 440)",
        ),
        ("", "tzbeat_release is ''; give a text that is not empty"),
        (7, "tzbeat_release is 7; give a text that is not empty"),
    ],
)
def test_a_release_that_cannot_be_compared_is_refused(given: Any, sentence: str) -> None:
    assert problems(tzbeat_release=given) == [sentence]


@pytest.mark.parametrize("url", ["unix:///x.sock?db=9&password=hunter2", "redis://h/3?password=hunter2"])
def test_a_password_in_a_query_is_no_traceback_and_is_not_shown(url: str) -> None:
    for conf in ({"broker_url": url}, {"broker_url": "redis://h/3", "tzbeat_url": url}):
        app = Celery("proj", set_as_current=False)
        app.conf.update(conf)
        _, problems = Settings.examine(app)
        assert "hunter2" not in " ".join(problems)


def test_a_broker_with_tls_by_setting_needs_a_store_url_that_says_so() -> None:
    app = Celery("proj", broker="redis://h/0", set_as_current=False)
    app.conf.broker_use_ssl = {"ssl_cert_reqs": "required"}
    _, problems = Settings.examine(app)
    assert any("broker_use_ssl" in problem and "rediss://h/0" in problem for problem in problems)
    app.conf.tzbeat_url = "rediss://h/0"
    assert not any("broker_use_ssl" in problem for problem in Settings.examine(app)[1])

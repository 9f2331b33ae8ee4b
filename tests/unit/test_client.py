"""Clients: URLs in kombu's spelling, and what a server's error text means."""

from __future__ import annotations

import pytest

from celery_tzbeat.errors import InvalidConfiguration
from celery_tzbeat.store.client import cannot_serve, hide_password, make_client, redis_url


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("redis://host:6380/3", "redis://host:6380/3"),
        ("redis+socket:///run/redis.sock?virtual_host=2", "unix:///run/redis.sock?db=2"),
        ("redis+socket:///run/redis.sock", "unix:///run/redis.sock?db=0"),
        ("rediss://host/0?ssl_cert_reqs=CERT_REQUIRED", "rediss://host/0?ssl_cert_reqs=required"),
        ("rediss://host/0?a=b&ssl_cert_reqs=CERT_NONE", "rediss://host/0?a=b&ssl_cert_reqs=none"),
        ("rediss://host/0?ssl_cert_reqs=optional", "rediss://host/0?ssl_cert_reqs=optional"),
    ],
)
def test_a_url_in_kombus_spelling_is_read_as_kombu_means_it(given: str, read: str) -> None:
    assert redis_url(given) == read
    make_client(given, timeout=1).close()


@pytest.mark.parametrize("url", ["amqp://host//", "sentinel://host/0", "redis+cluster://host", "http://host"])
def test_a_scheme_that_is_not_served_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidConfiguration, match=url.partition("://")[0].replace("+", r"\+")):
        redis_url(url)


def test_no_password_is_shown() -> None:
    assert hide_password("redis://user:s3cret@host:1/0") == "redis://user:**@host:1/0"
    assert hide_password("redis://:s3cret@host:1/0") == "redis://:**@host:1/0"


@pytest.mark.parametrize(
    "text",
    [
        "READONLY You can't write against a read only replica.",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "ERR Error running script: @user_script:1: -OOM command not allowed",
        "LOADING Redis is loading the dataset in memory",
        "MISCONF Errors writing to the AOF file",
        "NOREPLICAS Not enough good replicas to write.",
        "MASTERDOWN Link with MASTER is down",
        "CLUSTERDOWN The cluster is down",
    ],
)
def test_a_server_that_says_not_now_is_down(text: str) -> None:
    assert cannot_serve(text)


@pytest.mark.parametrize(
    "text", ["WRONGTYPE Operation against a key", "NOPERM no permissions", "ERR no such BLOOM key"]
)
def test_a_server_that_says_wrong_is_not(text: str) -> None:
    assert not cannot_serve(text)


@pytest.mark.parametrize(
    "url",
    [
        "unix:///run/redis.sock?db=9&password=hunter2",
        "redis://host/3?password=hunter2",
        "redis://user:p@hunter2/w@host:1/0",
        "redis://:hunter2@host",
    ],
)
def test_no_password_is_shown_wherever_it_stands(url: str) -> None:
    assert "hunter2" not in hide_password(url)

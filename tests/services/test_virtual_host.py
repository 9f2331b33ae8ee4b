"""The suite uses a RabbitMQ that others may use: what it leaves behind when it is killed goes at its next run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rabbit import PREFIX, start_of

#: What rabbitmqctl does with virtual hosts, done with directories: each real call takes a second of a core. As the real
#: one, it fails where it is to add one that is there, or to delete one that is not. A listing takes long: all at once see
#: the same.
RABBITMQCTL = """#!/bin/sh
cd {hosts}
case "$2" in
    list_vhosts) ls; sleep 0.5 ;;
    add_vhost) mkdir "$3" ;;
    delete_vhost) rmdir "$3" ;;
    set_permissions) test -d "$4" ;;
    *) exit 64 ;;
esac
"""

HOLD = """
import sys
from rabbit import virtual_host

with virtual_host() as name:
    print(name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hosts, program = tmp_path / "hosts", tmp_path / "bin" / "rabbitmqctl"
    hosts.mkdir()
    program.parent.mkdir()
    program.write_text(RABBITMQCTL.format(hosts=hosts))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return hosts


def test_virtual_hosts_of_killed_tests_go_at_the_next_run_and_those_of_living_ones_stay(hosts: Path) -> None:
    processes: list[subprocess.Popen[str]] = []

    def start(number: int) -> set[str]:
        """Start processes that each hold a virtual host, all at once; return the names."""
        new = [
            subprocess.Popen(
                [sys.executable, "-c", HOLD],
                cwd=Path(__file__).parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(number)
        ]
        processes.extend(new)
        return {process.stdout.readline().strip() for process in new if process.stdout}

    def there() -> set[str]:
        return {path.name for path in hosts.iterdir()}

    foreign = {"somebodys", f"{PREFIX}of-somebody-else"}
    for name in foreign:
        (hosts / name).mkdir()
    try:
        killed = start(2)
        assert there() == foreign | killed
        for process in processes:
            process.kill()
            process.wait(20)
        (hosts / f"{PREFIX}{os.getpid()}-1").mkdir()  # its process is gone, and we have its number now
        living = start(3)
        assert there() == foreign | living
        for process in processes[2:]:
            process.communicate(timeout=60)
            assert process.returncode == 0
        assert there() == foreign
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert start_of(process.pid).isdecimal()
        assert start_of(process.pid) == start_of(process.pid)
        process.kill()
    assert start_of(process.pid) == ""

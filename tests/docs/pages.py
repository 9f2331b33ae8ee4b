"""The documentation as data: pages, their blocks of code, their tables, links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Languages of blocks that are run; `text` is only shown, and anything else must say why it is not run.
RUN = ("python", "console")
SHOWN = ("text",)

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]+?) -->\s*$")
_FILE = re.compile(r"^# (?P<name>[a-z_]+\.py)\n")
_LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]+)\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, the line it begins on, and why it is not run (empty: it is)."""

    language: str
    text: str
    line: int
    not_run: str = ""

    @property
    def file(self) -> str:
        """The name of the file that the block is, empty for a block to type in: ``# shop.py`` in its first line."""
        found = _FILE.match(self.text) if self.language == "python" else None
        return found["name"] if found else ""


@dataclass(frozen=True)
class Page:
    """One file of the documentation."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def blocks(self) -> list[Block]:
        return list(blocks(self.text))

    @property
    def prose(self) -> str:
        """The text without blocks and inline code."""
        return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", self.text))

    @property
    def links(self) -> list[str]:
        return [found["target"] for found in _LINK.finditer(_FENCE.sub("", self.text))]

    @property
    def anchors(self) -> set[str]:
        """What `#…` may point to, as GitHub names headings."""
        headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", self.text), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def table(self, first_head: str) -> list[list[str]]:
        """Return the rows of the one table whose first column is headed so; cells as they are written."""
        found = []
        for lines in re.findall(r"(?:^\|.*\|$\n?)+", self.text, re.MULTILINE):
            rows = [_cells(line) for line in lines.strip().splitlines()]
            if rows[0][0] == first_head:
                found.append(rows[2:])
        assert len(found) == 1, f"{self.name} has {len(found)} tables headed {first_head!r}"
        return found[0]


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        reason = _NOT_RUN.search(before)
        yield Block(
            found["language"],
            re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            before.count("\n") + 1,
            reason["reason"] if reason else "",
        )


def all_pages() -> list[Page]:
    """Return every page, README first."""
    paths = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(path) for path in [*paths, *sorted((ROOT / "changelog.d").glob("*.md"))]]


def page(name: str) -> Page:
    return Page(ROOT / name)


def code(cell: str) -> str:
    """Return what a cell has between its backticks; the cell must be nothing else."""
    assert re.fullmatch(r"`[^`]+`", cell), f"{cell!r} is not one piece of code"
    return cell[1:-1]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]

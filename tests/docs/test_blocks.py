"""Every block of code in the documentation is run as it stands, page by page, in a directory with the example app."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages import ROOT, RUN, SHOWN, Block, Page, all_pages, blocks
from reader import Reader, commands, matches

import celery_tzbeat
from celery_tzbeat.testing.server import LocalServer

PAGES = [page for page in all_pages() if any(block.language in RUN and not block.not_run for block in page.blocks)]


@pytest.fixture
def reader(tmp_path: Path, server: LocalServer) -> Iterator[Reader]:
    """A reader in a directory with the example app, whose broker is a server of this test alone."""
    for file in (ROOT / "docs" / "example").glob("*.py"):
        shutil.copy(file, tmp_path)
    ours = Path(celery_tzbeat.__file__).parents[1]
    found = Reader(
        tmp_path,
        {
            "CELERY_BROKER_URL": server.url,
            "COLUMNS": "80",
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": "" if "site-packages" in ours.parts else str(ours),
            "PYTHONUNBUFFERED": "1",
        },
    )
    yield found
    found.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_do_what_it_says(page: Page, reader: Reader) -> None:
    for block in page.blocks:
        if block.language in RUN and not block.not_run:
            reader.follow(block)


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.name)
def test_a_block_is_run_or_says_why_it_is_not(page: Page) -> None:
    for block in page.blocks:
        assert block.language in (*RUN, *SHOWN) or block.not_run, f"line {block.line}: {block.language!r}"
        assert not (block.language in SHOWN and block.text.lstrip().startswith("$ ")), f"line {block.line}: a console"


def test_few_blocks_are_not_run() -> None:
    skipped = [(page.name, block.line) for page in all_pages() for block in page.blocks if block.not_run]
    ran = sum(block.language in RUN and not block.not_run for page in all_pages() for block in page.blocks)
    assert len(skipped) <= ran / 3, skipped


# ---- that these tests can fail


def console(text: str) -> Block:
    return Block("console", text, 1)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (console("$ echo one\ntwo\n"), "the page shows"),
        (console("$ false\n"), "status 1"),
        (console("$ echo one\none\nand more\n"), "the page shows"),
        (Block("python", ">>> 1 + 1\n3\n", 1), "Expected"),
        (Block("python", "1 / 0\n", 1), "ZeroDivisionError"),
        (Block("python", "# broken.py\nimport no_such_module\n", 1), "cannot be imported"),
        (console("$ celery -A shop tzbeat next '61 * * * *'\n"), "status 2"),
    ],
    ids=["output", "status", "more-output", "doctest", "exception", "file", "usage"],
)
def test_a_page_that_says_what_is_not_so_is_found_out(reader: Reader, block: Block, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        reader.follow(block)


def test_a_block_may_go_on_from_the_one_before(reader: Reader) -> None:
    reader.follow(console("$ word=spring; mkdir sub; cd sub\n$ sleep 100 &\n"))
    reader.follow(console("$ echo $word; \\\n> pwd\nspring\n…/sub\n"))
    reader.follow(Block("python", "found = [1]\n", 1))
    reader.follow(Block("python", ">>> found\n[1]\n", 1))


def test_an_ellipsis_stands_for_what_it_should() -> None:
    assert matches("a … c\n…\nend", "a b c\n1\n2\nend\n")
    assert matches("…\nend", "end")
    assert not matches("a … c", "a b c d")
    assert not matches("a\n…", "b\n")
    assert not matches("a . c", "a b c")


def test_commands_are_told_from_what_they_print() -> None:
    found: Callable[[str], list[tuple[str, str | None]]] = lambda text: [(c.text, c.shown) for c in commands(text)]  # noqa: E731
    assert found("$ one \\\n> two\nout\n\nout 2\n$ three\n") == [("one \\\ntwo", "out\n\nout 2"), ("three", None)]


def test_a_reason_belongs_to_the_next_block_only() -> None:
    text = "<!-- not run: needs a cluster -->\n```yaml\na: 1\n```\n\n```python\nx\n```\n"
    assert [block.not_run for block in blocks(text)] == ["needs a cluster", ""]

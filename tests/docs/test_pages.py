"""What holds for every page: its links lead somewhere, it promises nothing elsewhere, it speaks of no machine."""

from __future__ import annotations

import re

import pytest
from pages import ROOT, Page, all_pages, blocks, page

PAGES = all_pages()
each_page = pytest.mark.parametrize("found", PAGES, ids=lambda found: found.name)

#: The kinds of fragments.
KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")

#: What betrays the machine that a page was written on. Hosts and directories in examples are invented ones.
MACHINE = re.compile(r"/root\b|/tmp\b|/home/|/Users/|valkey-server:\d")

#: Words that say nothing.
ADVERTISING = re.compile(
    r"\b(powerful|seamless|robust|blazing|simply|effortless|modern|world-class|enterprise|easy|easily)", re.IGNORECASE
)


@each_page
def test_links_lead_somewhere(found: Page) -> None:
    for target in found.links:
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        to = (found.path.parent / path).resolve() if path else found.path
        assert to.exists(), target
        assert to.is_relative_to(ROOT), target
        if anchor:
            assert anchor in Page(to).anchors, target


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [page("README.md").path]
    while waiting:
        path = waiting.pop()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        waiting += [(path.parent / link.split("#")[0]).resolve() for link in Page(path).links if "://" not in link]
    fragments = {found.path for found in PAGES if found.path.parent.name == "changelog.d"}
    assert {found.path for found in PAGES} - fragments <= reached


@each_page
def test_exactly_once_is_said_in_the_table_of_promises_only(found: Page) -> None:
    lines = [line for line in found.text.splitlines() if re.search(r"exactly[ -]once", line, re.IGNORECASE)]
    if found.name == "README.md":
        assert len(lines) == 1
        assert lines[0].startswith("| broker and store are the same Redis, no data lost |")
    else:
        assert lines == []
    assert not re.search(r"exactly\s+once", found.text.replace("\n".join(lines), ""), re.IGNORECASE)


def test_the_table_of_promises_says_of_each_row_what_holds() -> None:
    rows = page("README.md").table("situation")
    states = [row[2].split("**")[1] if row[2].startswith("**") else row[2][:9] for row in rows]
    assert states == ["holds"] * 6


@each_page
def test_no_page_names_a_machine(found: Page) -> None:
    assert MACHINE.findall(found.text) == []


@each_page
def test_no_page_advertises(found: Page) -> None:
    assert ADVERTISING.findall(found.prose) == []


@each_page
def test_a_page_begins_with_its_one_heading(found: Page) -> None:
    fragment = found.path.parent.name == "changelog.d" and found.path.name != "README.md"
    headings = re.findall(r"^# ", re.sub(r"```.*?```", "", found.text, flags=re.DOTALL), re.MULTILINE)
    assert len(headings) == (0 if fragment else 1)
    assert found.text.startswith("# ") != fragment


def test_fragments_are_named_as_their_readme_says() -> None:
    fragments = [path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]
    for path in fragments:
        assert re.fullmatch(rf"\d{{4}}[a-z]?\.({'|'.join(KINDS)})\.md", path.name), path.name
        assert path.read_text("utf-8").strip(), path.name


# ---- that these tests can fail


def test_a_broken_link_a_machine_and_a_second_promise_are_found() -> None:
    for name, text in (
        ("docs/x.md", "see [this](nowhere.md)"),
        ("docs/x.md", "see [this](index.md#no-such-heading)"),
    ):
        found = FakePage(name, text)
        with pytest.raises(AssertionError):
            test_links_lead_somewhere(found)
    with pytest.raises(AssertionError):
        test_no_page_names_a_machine(FakePage("docs/x.md", "look in /home/me/proj"))
    with pytest.raises(AssertionError):
        test_exactly_once_is_said_in_the_table_of_promises_only(FakePage("docs/x.md", "it runs exactly\nonce"))
    with pytest.raises(AssertionError):
        test_no_page_advertises(FakePage("docs/x.md", "A powerful scheduler."))


def test_blocks_are_found_inside_lists() -> None:
    [block] = blocks("1. Do:\n\n   ```console\n   $ true\n   ```\n")
    assert (block.language, block.text, block.line) == ("console", "$ true\n", 3)


class FakePage(Page):
    """A page that stands in no file."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(ROOT / name)
        self.__dict__["text"] = text

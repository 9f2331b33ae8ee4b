"""What the documentation lists is what the code has: settings, policy, keys, signals, errors, events, words, commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from importlib import import_module, resources
from typing import Any, get_args

import click
import pytest
from celery import Celery
from pages import ROOT, Page, code, page

import celery_tzbeat
from celery_tzbeat import errors, signals
from celery_tzbeat.api import TzBeat, findings
from celery_tzbeat.beat.dispatch import Builder
from celery_tzbeat.cli import tzbeat
from celery_tzbeat.deliveries import TICKET_VERSION
from celery_tzbeat.entries import WORDS
from celery_tzbeat.model import Catchup, Delivery, Entry, Occurrence, OnAbandoned, Overlap, Policy
from celery_tzbeat.policy import POLICY_NOT_BUILT
from celery_tzbeat.schedules import parse
from celery_tzbeat.schedules.fields import ALIASES
from celery_tzbeat.schedules.parse import _ALLOWED, _HEADS
from celery_tzbeat.settings import NOT_BUILT, Settings
from celery_tzbeat.store.keys import CATALOGUE
from celery_tzbeat.store.protocol import State
from celery_tzbeat.store.runs import EndState


def shown(value: Any) -> str:
    """Return a default as the tables show it."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        if seconds >= 2 * 86400:
            return f"{seconds / 86400:g} days"
        return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"
    if value is None:
        return "none"
    if isinstance(value, Policy):
        return "`{}`" if value == Policy() else repr(value)
    return f"{value}" if isinstance(value, int) and not isinstance(value, bool) else f"`{value!r}`".replace("'", '"')


def names_in(text: str, heading: str) -> set[str]:
    """Return what stands in backticks in one section of a page."""
    section = re.split(rf"^## {heading}$", text, flags=re.MULTILINE)[1].split("\n## ")[0]
    return set(re.findall(r"`([a-z_]+)`", section))


def first_cells(rows: Iterable[list[str]]) -> list[str]:
    return [code(row[0]) for row in rows]


# ---- settings and policy

#: Settings whose default is another setting, or taken from the app.
DERIVED = {
    "url": "the broker's URL",
    "namespace": "the app's name, `/`, the broker's database",
    "lock": "`tzbeat_url`",
}


def setting_rows(found: Page) -> list[list[str]]:
    """The rows of our own settings; the page on settings has a second table, of Celery's."""
    text = found.text.split("## Settings of Celery")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `tzbeat_") and line.count("|") == 4]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", ["README.md", "docs/reference/settings.md"])
def test_the_table_of_settings_is_that_of_the_code(name: str) -> None:
    rows = setting_rows(page(name))
    assert [(code(row[0]), row[1]) for row in rows] == [
        (f"tzbeat_{field.name}", DERIVED.get(field.name) or shown(field.default)) for field in fields(Settings)
    ]


def test_settings_that_are_not_built_are_named() -> None:
    named = names_in(page("docs/reference/settings.md").text, "Not in this release")
    assert named == {f"tzbeat_{name}" for name in NOT_BUILT}


def test_the_table_of_policy_is_that_of_the_code() -> None:
    rows = page("docs/reference/policy.md").table("key")
    assert [(code(row[0]), row[1].strip("`")) for row in rows] == [
        (field.name, shown(field.default).strip('`"')) for field in fields(Policy)
    ]
    words = {"catchup": Catchup, "overlap": Overlap, "delivery": Delivery, "on_abandoned": OnAbandoned}
    for key, form in words.items():
        row = next(row for row in rows if code(row[0]) == key)
        assert set(re.findall(r"`(\w+)`", row[2])) == set(get_args(form)), key
    assert names_in(page("docs/reference/policy.md").text, "Not in this release") == POLICY_NOT_BUILT


# ---- entries and schedules


def test_the_keys_of_an_entry_are_those_of_the_code() -> None:
    assert set(first_cells(page("docs/reference/entries.md").table("key"))) == WORDS


def test_every_form_of_text_is_in_the_table_with_its_words() -> None:
    rows = page("docs/reference/schedules.md").table("rule")
    heads = {word.split()[0]: row[2] for row in rows for word in re.findall(r"`(@[^`]+)`", row[0])}
    assert set(heads) == {*ALIASES, *_HEADS}
    for head, words in heads.items():
        form = head if head in _HEADS else "cron"
        assert set(re.findall(r"\w+", words)) == set(_ALLOWED.get(form, ())), head


# ---- the store, the audit, signals, headers


def test_the_table_of_keys_is_the_catalogue() -> None:
    rows = page("docs/reference/store.md").table("key")
    assert [(code(name), *rest) for name, *rest in rows] == [
        (kind.name, kind.type, kind.lives, kind.holds) for kind in CATALOGUE
    ]


def test_every_event_of_the_audit_is_in_the_table() -> None:
    scripts = [
        file for file in (resources.files("celery_tzbeat") / "store" / "lua").iterdir() if file.name.endswith(".lua")
    ]
    notes = r"\b(?:note\(|begin\(run, known, record, of_entry, )'(\w+)'"
    noted = {event for script in scripts for event in re.findall(notes, script.read_text("utf-8"))}
    assert noted, "the scripts are not read"
    settled = {*get_args(State), *get_args(EndState)}
    assert set(first_cells(page("docs/reference/audit.md").table("event"))) == noted | settled


def test_every_line_of_the_state_table_that_a_script_serves_is_named() -> None:
    in_table = {int(row[0]) for row in page("docs/explanation/how-it-works.md").table("line")}
    scripts = (resources.files("celery_tzbeat") / "store" / "lua").iterdir()
    headers = " ".join(file.read_text("utf-8") for file in scripts if file.name.endswith(".lua"))
    groups = re.findall(r"(?:state table lines?|\(lines?|\bline) ([\d, ]*\d)", headers)
    served = {int(number) for group in groups for number in re.findall(r"\d+", group)}
    assert served
    assert served <= in_table


def test_every_line_of_the_state_table_about_runs_has_a_test_that_names_it() -> None:
    texts = [file.read_text("utf-8") for file in (ROOT / "tests" / "conformance").glob("test_*.py")]
    named = {int(number) for text in texts for number in re.findall(r"^def test_line_(\d+)_", text, re.MULTILINE)}
    assert {*range(12, 31), *range(32, 38)} <= named  # 31: what changes nothing
    in_table = {int(row[0]) for row in page("docs/explanation/how-it-works.md").table("line")}
    assert {line for line in in_table if line >= 12} <= named


def test_the_table_of_signals_is_that_of_the_code() -> None:
    rows = page("docs/reference/signals.md").table("signal")
    listed = {code(name): set(re.findall(r"`(\w+)`", arguments)) for name, arguments, _ in rows}
    found = {name: signal.providing_args for name, signal in vars(signals).items() if hasattr(signal, "providing_args")}
    assert listed == {name: set(arguments) for name, arguments in found.items()}


def test_the_fields_of_the_header_are_those_of_a_message() -> None:
    class Capture:
        producer = None

        def clear(self) -> None:
            pass

        def take(self) -> tuple[()]:
            return ()

    entries: list[Any] = []
    app = Celery("proj", set_as_current=False)
    builder = Builder(app, Capture(), "proj/0", lambda entry, producer: entries.append(entry))  # type: ignore[arg-type]
    policy = Policy(max_deliveries=2)  # only what differs from the defaults travels
    entry = Entry("e", "proj.t", parse("@every 1s"), options={"headers": {"mine": 1}}, policy=policy)
    builder.build(entry, Occurrence("e", datetime(2026, 1, 1, tzinfo=timezone.utc)), epoch=1)
    headers = entries[0].options["headers"]
    reference = page("docs/reference/headers.md")
    assert {*first_cells(reference.table("header")), "mine"} == set(headers)
    assert first_cells(reference.table("field")) == list(headers["meta"]["tzbeat"])
    assert f"| `v` | {TICKET_VERSION}," in reference.text


# ---- errors and findings


def test_the_table_of_errors_is_the_tree() -> None:
    tree = {
        cls.__name__: next((base.__name__ for base in cls.__bases__ if base is not errors.TzBeatError), "-")
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.TzBeatError)
    }
    rows = page("docs/reference/errors.md").table("error")
    assert {code(name): base.strip("`") for name, base, _ in rows} == tree


def test_every_finding_is_in_the_table() -> None:
    """Those of the module's docstring, which are those that it makes."""
    listed = first_cells(page("docs/reference/errors.md").table("id"))
    rooms = [
        resources.files("celery_tzbeat") / "api" / f"{name}.py"
        for name in ("findings", "preflight", "health", "workers")
    ]
    made = {f"tzbeat.{id}" for room in rooms for id in re.findall(r'"([EW]\d{3})"', room.read_text("utf-8"))}
    assert set(listed) == set(re.findall(r"tzbeat\.[EW]\d{3}", findings.__doc__ or "")) == made
    assert len(listed) == len(set(listed))


# ---- the command line and Python


def test_every_command_is_shown_with_its_help_and_no_other() -> None:
    """The text of the help itself is compared where the blocks of the page are run."""
    text = page("docs/reference/command-line.md").text
    shown = set(re.findall(r"^\$ celery -A shop tzbeat (\w+) --help$", text, re.MULTILINE))
    assert isinstance(tzbeat, click.Group)
    assert shown == set(tzbeat.commands)


def test_the_exit_codes_are_those_of_the_help() -> None:
    rows = page("docs/reference/command-line.md").table("exit code")
    assert rows == [
        [number, meaning] for number, meaning in re.findall(r"^ *(\d)  (.+)$", tzbeat.help or "", re.MULTILINE)
    ]


def test_every_public_name_is_in_the_table() -> None:
    rows = page("docs/reference/python.md").table("name")
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(celery_tzbeat.__all__)


def test_every_call_of_tzbeat_is_in_the_table() -> None:
    rows = page("docs/reference/python.md").table("call")
    listed = {name for row in rows for name in re.findall(r"`(\w+)(?:\.\w+)?\(", row[0])}
    assert sorted(listed) == sorted(name for name in vars(TzBeat) if not name.startswith("_"))


# ---- words

#: The load-bearing words that this release has.
WORDS_THERE = (
    *("entry", "schedule", "zone", "wall", "instant", "gap", "fold", "nominal", "occurrence", "key", "cursor", "tick"),
    *("plan", "lease", "holder", "epoch", "leader", "standby", "claim", "dispatch", "misfire", "grace", "catch-up"),
    *("audit record", "dead letter", "trust", "unlisted"),
)


def test_the_glossary_has_the_words_in_order_and_each_is_something() -> None:
    rows = page("docs/glossary.md").table("word")
    words = [row[0].strip("*") for row in rows]
    assert words == sorted(words)
    assert set(WORDS_THERE) <= set(words)
    for _, _, where in rows:
        module, _, name = code(where).rpartition(".")
        assert hasattr(import_module(module), name), where


def test_the_glossary_names_no_word_as_missing_that_it_explains() -> None:
    found = page("docs/glossary.md")
    missing = re.search(r"do not exist yet: ([^.]+)\.", found.text)
    assert missing is not None
    assert not {row[0].strip("*") for row in found.table("word")} & set(missing[1].split(", "))


# ---- the example and the demo


def test_the_demo_ends_as_the_readme_shows() -> None:
    from demo.verdict import Verdict

    shown = next(block.text for block in page("README.md").blocks if "demo: ok" in block.text)
    counts = re.search(r"(\d+) expected, (\d+) received", shown)
    assert counts is not None
    lines = list(Verdict(int(counts[1]), int(counts[2]), (), (), (), None, ()).lines())
    assert lines[-1] == shown.splitlines()[-1]
    assert set(lines) - set(shown.splitlines()) == {"invented     0"}


def test_the_example_is_a_module_without_anything_that_a_page_does_not_need() -> None:
    tree = ast.parse((ROOT / "docs" / "example" / "shop.py").read_text("utf-8"))
    assert ast.get_docstring(tree)

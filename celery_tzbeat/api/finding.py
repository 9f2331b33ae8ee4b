"""One finding, and the words that findings are made of. Which there are: `findings`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: How many names a finding lists.
LISTED = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (error) or doubtful (warning), under a stable id, with what to do about it."""

    id: str
    severity: Literal["error", "warning"]
    text: str
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "severity": self.severity, "text": self.text, "hint": self.hint}


def listed(items: Sequence[str]) -> str:
    """Return the first LISTED items in words, and how many more there are."""
    shown = ", ".join(items[:LISTED])
    return shown if len(items) <= LISTED else f"{shown} and {len(items) - LISTED} more"


def error(id: str, text: str, hint: str) -> Finding:
    """Return what is wrong. `id` is a letter and a number."""
    return Finding(f"tzbeat.{id}", "error", text, hint)


def warning(id: str, text: str, hint: str) -> Finding:
    """Return what is doubtful. `id` is a letter and a number."""
    return Finding(f"tzbeat.{id}", "warning", text, hint)

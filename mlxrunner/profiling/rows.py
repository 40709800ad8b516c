"""Events as CSV, a row per request, for spreadsheets: a text that one would take for a formula is marked as text."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

Event = Mapping[str, Any]
NESTED = ("divergence", "spans", "verify")
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A cell that begins like this would be run or misread by spreadsheets (OWASP, CSV injection)."""


class Rows:
    """Writes the header and a row per event to `stream` (opened with newline="")."""

    def __init__(self, stream: SupportsWrite[str], fields: list[str]) -> None:
        """`fields`: those of schema.json, in its order."""
        self._fields = [name for name in fields if name not in NESTED]
        self._writer = csv.writer(stream)
        nested = (
            "divergence_index",
            "divergence_role",
            "divergence_part",
            "prefill_chunks",
            "verified_equal",
        )
        self._writer.writerow([*self._fields, *nested])

    def add(self, event: Event) -> None:
        divergence, verify = event["divergence"] or {}, event["verify"] or {}
        nested = [divergence.get("index"), divergence.get("role"), divergence.get("part")]
        chunks = sum(span["name"] == "prefill" for span in event["spans"])
        row = [event[name] for name in self._fields] + nested + [chunks, verify.get("equal")]
        self._writer.writerow(list(map(_cell, row)))


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        text = value.replace("\x00", "")
        return "'" + text if text.startswith(FORMULAS) else text
    return value

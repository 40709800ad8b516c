"""Write events as CSV, a row per request, for spreadsheets."""

from __future__ import annotations

import csv
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from mlxrunner.profiling.schema import Event

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

NESTED = ("line", "divergence", "spans", "verify", "evicted")
"""The fields that are objects or lists; a row has a few of their own fields instead."""
FLAT = [field.name for field in fields(Event) if field.name not in NESTED]
COLUMNS = (
    *FLAT,
    "line_number",
    "divergence_index",
    "divergence_role",
    "divergence_part",
    "prefill_chunks",
    "verified_equal",
    "evicted_tokens",
    "evicted_parked",
)
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""The beginnings of a cell that spreadsheets run or misread (OWASP, CSV injection)."""


class CsvWriter:
    """A writer of a header and a row per event."""

    def __init__(self, stream: SupportsWrite[str]) -> None:
        """Write the header to `stream`, which was opened with newline=""."""
        self._writer = csv.writer(stream)
        self._writer.writerow(COLUMNS)

    def add(self, event: Event) -> None:
        """Write the row of an event."""
        parted, verify = event.divergence, event.verify
        row = [
            *(getattr(event, name) for name in FLAT),
            event.line.number if event.line else None,
            *((parted.index, parted.role, parted.part) if parted else (None, None, None)),
            sum(span.name == "prefill" for span in event.spans),
            verify.equal if verify else None,
            sum(one.tokens for one in event.evicted),
            sum(one.tokens for one in event.evicted if one.parked),
        ]
        self._writer.writerow(map(_cell, row))


def _cell(value: Any) -> Any:
    """Return a value for a cell.

    A text that a spreadsheet would take for a formula is marked as text.
    """
    if isinstance(value, str):
        text = value.replace("\x00", "")
        return "'" + text if text.startswith(FORMULAS) else text
    return value

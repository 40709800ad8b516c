"""Comparison with the files of `tests/golden`."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
IS_UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"


def check(name: str, found: str) -> None:
    """Compare `found` with the golden file `name`, or write that file."""
    file = GOLDEN / name
    if IS_UPDATE:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found)
    assert file.is_file(), f"{file} does not exist: UPDATE_GOLDEN=1 writes it"
    wanted = file.read_text()
    change = difflib.unified_diff(
        wanted.splitlines(), found.splitlines(), f"golden/{name}", "found", lineterm=""
    )
    assert found == wanted, "UPDATE_GOLDEN=1 accepts this change:\n" + "\n".join(change)

"""A terminal that the program runs in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools"))

from screen import Screen

Open = Callable[..., Screen]


@pytest.fixture
def open_screen(tmp_path: Path) -> Iterator[Open]:
    """`open_screen("-m", "mlxrunner", "chat")` or `open_screen(script)`; the user's data are in a folder of the test."""
    screens: list[Screen] = []

    def start(*arguments: str, size: tuple[int, int] = (100, 30), **env: Any) -> Screen:
        screens.append(
            Screen(list(arguments), {"MLXRUNNER_DATA": str(tmp_path / "data"), **env}, size)
        )
        return screens[-1]

    yield start
    for screen in screens:
        screen.child.close(force=True)

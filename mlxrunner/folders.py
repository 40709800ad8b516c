"""Where a user's files are kept, and how they are made: readable by their owner alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def data_folder() -> Path:
    """This program's folder for the user's data, made if need be (mode 0700): `MLXRUNNER_DATA`, or where the system has such things.

    ~/Library/Application Support/mlxrunner on macOS, else $XDG_DATA_HOME/mlxrunner (~/.local/share/mlxrunner). OSError if it can't be made.
    """
    if chosen := os.environ.get("MLXRUNNER_DATA"):
        folder = Path(chosen).expanduser()
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support" / "mlxrunner"
    else:
        folder = (
            Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "mlxrunner"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder

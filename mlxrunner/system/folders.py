"""Find or make the folders of a user's files. Only their owner can read them."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def data_folder() -> Path:
    """Return this program's folder for the user's data, made if necessary with mode 0700.

    It is $MLXRUNNER_DATA if set, ~/Library/Application Support/mlxrunner on macOS, and otherwise
    $XDG_DATA_HOME/mlxrunner (~/.local/share/mlxrunner). Raise OSError if it can't be made.
    """
    if chosen := os.environ.get("MLXRUNNER_DATA"):
        try:
            folder = Path(chosen).expanduser()
        except RuntimeError as error:  # the home of an unknown user
            raise OSError(f"MLXRUNNER_DATA names {chosen}: {error}") from error
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support" / "mlxrunner"
    else:
        folder = (
            Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "mlxrunner"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/mlxrunner, by default in ~/.cache. It may not exist.

    It holds what the program can do without. Raise RuntimeError if there is no home directory.
    """
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "mlxrunner"

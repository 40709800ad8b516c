"""Say how to install a package that an extra of this program has."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of `extra` beside this program.

    A venv that uv made has no pip of its own.
    """
    try:
        wanted = [
            one.partition(";")[0].strip()
            for one in requires("mlxrunner") or ()
            if re.search(rf"extra == ['\"]{extra}['\"]", one)
        ]
    except PackageNotFoundError:  # it runs from a folder of its sources
        wanted = [f"mlxrunner[{extra}]"]
    has_pip = find_spec("pip") is not None
    command = (
        [sys.executable, "-m", "pip", "install"]
        if has_pip
        else ["uv", "pip", "install", "--python", sys.executable]
    )
    return shlex.join([*command, *wanted])

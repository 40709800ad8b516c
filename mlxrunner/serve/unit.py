"""Print the files that let launchd or systemd run the server."""

from __future__ import annotations

import plistlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

UnitKind = Literal["launchd", "systemd"]
UNITS: tuple[UnitKind, ...] = get_args(UnitKind)
LABEL = "mlxrunner.serve"
_SYSTEMD = """\
# ~/.config/systemd/user/mlxrunner.service; then: systemctl --user enable --now mlxrunner
[Unit]
Description=mlxrunner serve: language models for the programs on this machine

[Service]
WorkingDirectory={folder}
ExecStart={command}
Restart=on-failure
TimeoutStopSec={stop}

[Install]
WantedBy=default.target
"""


def unit(kind: UnitKind, command: Sequence[str], folder: Path, *, drain: float) -> str:
    """Return the file for `kind` that runs `command` in `folder`.

    `drain`: the seconds that running requests have to end; parking takes some more.
    """
    stop = int(drain) + 30
    if kind == "systemd":
        place = str(folder).replace("%", "%%")
        return _SYSTEMD.format(command=_quoted(command), folder=place, stop=stop)
    found = plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "WorkingDirectory": str(folder),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ExitTimeOut": stop,
            "StandardErrorPath": str(Path.home() / "Library" / "Logs" / f"{LABEL}.log"),
        },
        sort_keys=False,
    ).decode()
    place = f"~/Library/LaunchAgents/{LABEL}.plist"
    how = f"<!-- {place}; then: launchctl load {place} -->"
    head, _, rest = found.partition("\n")
    return f"{head}\n{how}\n{rest}"


def _quoted(command: Sequence[str]) -> str:
    """Return a command as systemd reads it: % and $ stand for something there."""
    return shlex.join(one.replace("%", "%%").replace("$", "$$") for one in command)

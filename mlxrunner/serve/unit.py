"""Print the files that let launchd or systemd run the server."""

from __future__ import annotations

import plistlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

UnitKind = Literal["launchd", "systemd"]
UNITS: tuple[UnitKind, ...] = get_args(UnitKind)
LABEL = "mlxrunner.serve"
CARRIED = (
    *("LD_PRELOAD", "OPENBLAS_NUM_THREADS"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
    *("MLXRUNNER_CONFIG", "MLXRUNNER_MODEL", "MLXRUNNER_EVENTS"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
)
"""Variables that decide how a server runs; no secrets, which others could read in the file."""
_SYSTEMD = """\
# ~/.config/systemd/user/mlxrunner.service; then: systemctl --user enable --now mlxrunner
{notes}[Unit]
Description=mlxrunner serve: language models for the programs on this machine

[Service]
WorkingDirectory={folder}
{environment}ExecStart={command}
Restart=on-failure
TimeoutStopSec={stop}

[Install]
WantedBy=default.target
"""


def unit(
    kind: UnitKind,
    command: Sequence[str],
    folder: Path,
    *,
    drain: float,
    environment: Mapping[str, str],
    notes: Sequence[str] = (),
) -> str:
    """Return the file for `kind` that runs `command` in `folder`.

    `drain`: the seconds that running requests have to end; parking takes some more.
    `environment`: that of this process. The file gets what of it is in `CARRIED`.
    `notes`: lines of text for the reader of the file.
    """
    stop = int(drain) + 30
    carried = {name: environment[name] for name in CARRIED if name in environment}
    if kind == "systemd":
        place = str(folder).replace("%", "%%")
        lines = "".join(f"Environment={_assigned(*pair)}\n" for pair in carried.items())
        return _SYSTEMD.format(
            notes="".join(f"# {note}\n" for note in notes),
            command=_quoted(command),
            folder=place,
            stop=stop,
            environment=lines,
        )
    found = plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "WorkingDirectory": str(folder),
            **({"EnvironmentVariables": carried} if carried else {}),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ExitTimeOut": stop,
            "StandardErrorPath": str(Path.home() / "Library" / "Logs" / f"{LABEL}.log"),
        },
        sort_keys=False,
    ).decode()
    place = f"~/Library/LaunchAgents/{LABEL}.plist"
    comments = (f"{place}; then: launchctl load {place}", *notes)
    how = "\n".join(f"<!-- {comment} -->" for comment in comments)
    head, _, rest = found.partition("\n")
    return f"{head}\n{how}\n{rest}"


def _quoted(command: Sequence[str]) -> str:
    """Return a command as systemd reads it: % and $ stand for something there."""
    return shlex.join(one.replace("%", "%%").replace("$", "$$") for one in command)


def _assigned(name: str, value: str) -> str:
    """Return a variable as systemd reads it in `Environment=`."""
    for one, instead in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("\n", "\\n")):
        value = value.replace(one, instead)
    return f'"{name}={value}"'

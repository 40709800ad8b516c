"""Find out if this machine runs on its battery."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUPPLIES = Path("/sys/class/power_supply")


def on_battery() -> bool:
    """Return True if the machine runs on its battery; False also if the system does not say."""
    return _macos() if sys.platform == "darwin" else _linux(SUPPLIES)


def _macos() -> bool:
    try:
        result = subprocess.run(["pmset", "-g", "batt"], capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.SubprocessError):
        return False
    return "'Battery Power'" in result.stdout


def _linux(supplies: Path) -> bool:
    """Return True if a battery discharges and no mains supply is online."""
    try:
        known = [
            {name: _read(supply / name) for name in ("type", "online", "status", "scope")}
            for supply in supplies.iterdir()
        ]
    except OSError:
        return False
    if any(supply["type"] in ("Mains", "USB") and supply["online"] == "1" for supply in known):
        return False
    return any(
        s["type"] == "Battery" and s["status"] == "Discharging" and s["scope"] != "Device"
        for s in known
    )


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""

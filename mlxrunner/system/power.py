"""Find out if this machine runs on its battery, and what energy its processors take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUPPLIES = Path("/sys/class/power_supply")
COUNTERS = Path("/sys/class/powercap")


def on_battery() -> bool:
    """Return True if the machine runs on its battery; False also if the system does not say."""
    return _macos() if sys.platform == "darwin" else _linux(SUPPLIES)


class EnergyMeter:
    """Measures the energy that the processor packages take, other programs included.

    Linux counts it (RAPL) and may let only an administrator read it. Other systems do not say.
    """

    def __init__(self, counters: Path = COUNTERS) -> None:
        """Begin to measure."""
        packages = sorted(counters.glob("intel-rapl:*")) if counters.is_dir() else []
        self._last = {
            package: count
            for package in packages
            if package.name.count(":") == 1 and (count := _count(package / "energy_uj")) is not None
        }
        self._joules = 0.0

    def sample(self) -> float | None:
        """Return the joules since the beginning; None if the system does not say.

        Call it every few minutes: the counters begin again at their end.
        """
        for package, before in self._last.items():
            now = _count(package / "energy_uj")
            if now is not None:
                span = _count(package / "max_energy_range_uj") or 0
                self._joules += (now - before + (span if now < before else 0)) / 1e6
                self._last[package] = now
        return self._joules if self._last else None


def _count(file: Path) -> int | None:
    text = _read(file)
    return int(text) if text.isdecimal() else None


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
        return file.read_text().strip()  # opens: of the kernel
    except (OSError, ValueError):
        return ""

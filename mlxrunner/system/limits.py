"""Read what the system says of this machine: memory for this process, battery and energy.

Linux says most: the machine's free memory, the limits of the process (ulimit) and of its cgroup,
and what the processors take. Other systems give no limits.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
MACHINE = "the machine"
ADDRESSES = 2**28
"""Bytes of a limited address space that are reserved for thread stacks, arenas and holes.

These need addresses but no memory.
"""


@dataclass(frozen=True)
class Limit:
    """A limit of the system on this process."""

    name: str
    nbytes: int
    """Bytes that this process can still take before it meets this limit."""


def limits() -> list[Limit]:
    """Return all limits that are set, the smallest first, with the machine's free memory."""
    return sorted([*_machine(), *_process(), *_cgroup()], key=lambda limit: limit.nbytes)


def _machine() -> Iterator[Limit]:
    for line in _lines(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield Limit(MACHINE, int(line.split()[1]) * 1024)


def _process() -> Iterator[Limit]:
    pages = [
        int(number) * os.sysconf("SC_PAGE_SIZE")
        for line in _lines(PROC / "self" / "statm")
        for number in line.split()
    ]
    if len(pages) < 6:
        return
    for name, kind, taken in (
        ("ulimit -v", resource.RLIMIT_AS, pages[0] + ADDRESSES),
        ("ulimit -d", resource.RLIMIT_DATA, pages[5] + ADDRESSES),
    ):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            yield Limit(name, max(0, soft - taken))


def _cgroup() -> Iterator[Limit]:
    """Yield the limits of the process's own group and of those above it.

    In a container the path may be the outer one. Then the root of the container is the group.
    """
    for line in _lines(PROC / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            folder, most, taken = CGROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder, most, taken = (
                CGROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        inner = folder / path.lstrip("/")
        for group in (inner, *inner.parents):
            if group == folder or folder in group.parents:
                yield from _group(group, most, taken)


def _group(group: Path, most: str, taken: str) -> Iterator[Limit]:
    limit, usage = _number(group / most), _number(group / taken)
    if (
        limit is None or usage is None or limit >= 2**60
    ):  # version 1 writes a huge number for no limit
        return
    # The system frees pages of files before it kills a process.
    words = [line.split() for line in _lines(group / "memory.stat")]
    files = sum(
        int(word[1])
        for word in words
        if len(word) == 2 and word[0] in ("inactive_file", "active_file")
    )
    yield Limit("the cgroup", max(0, limit - max(0, usage - files)))


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)[:1])
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()  # opens: of the kernel
    except (OSError, ValueError):
        return []


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

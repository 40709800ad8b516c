"""The machine: the device that MLX computes on, memory for this process, battery and energy.

No other module asks MLX for its device. Linux says most: the machine's free memory, the limits of
the process (ulimit) and of its cgroup, and what the processors take. Other systems give no limits.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrunner.results import logger
from mlxrunner.system import openblas
from mlxrunner.terminal.output import size

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
    for line in _text(PROC / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield Limit(MACHINE, int(line.split()[1]) * 1024)


def _process() -> Iterator[Limit]:
    counts = _text(PROC / "self" / "statm").split()
    pages = [int(count) * os.sysconf("SC_PAGE_SIZE") for count in counts]
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
    for line in _text(PROC / "self" / "cgroup").splitlines():
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
    words = [line.split() for line in _text(group / "memory.stat").splitlines()]
    files = sum(
        int(word[1])
        for word in words
        if len(word) == 2 and word[0] in ("inactive_file", "active_file")
    )
    yield Limit("the cgroup", max(0, limit - max(0, usage - files)))


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    """Return the text of a file of the kernel; "" if it can't be read."""
    try:
        return file.read_text().strip()  # opens: of the kernel
    except (OSError, ValueError):
        return ""


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
            if package.name.count(":") == 1
            and (count := _number(package / "energy_uj")) is not None
        }
        self._joules = 0.0

    def sample(self) -> float | None:
        """Return the joules since the beginning; None if the system does not say.

        Call it every few minutes: the counters begin again at their end.
        """
        for package, before in self._last.items():
            now = _number(package / "energy_uj")
            if now is not None:
                span = _number(package / "max_energy_range_uj") or 0
                self._joules += (now - before + (span if now < before else 0)) / 1e6
                self._last[package] = now
        return self._joules if self._last else None


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
            {name: _text(supply / name) for name in ("type", "online", "status", "scope")}
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


_sharers = 1
"""The processes that plan with the same memory, see `share_memory`."""


def is_gpu() -> bool:
    """Return True if MLX computes on a GPU (Metal or CUDA) by default."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def work_clock() -> Callable[[], float]:
    """Return a function of the seconds that work has taken: differences of it compare costs.

    A CPU that others use, too, takes longer for the same work. So there it is processor time.
    """
    return time.perf_counter if is_gpu() else time.process_time


def backend() -> str:
    """Return "metal", "cuda" or "cpu"."""
    if not is_gpu():
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def preferred_dtype() -> mx.Dtype | None:
    """Return the type to which unquantized weights are converted after loading.

    None keeps them as they are stored.
    """
    return None if is_gpu() else mx.float32


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """Stop the garbage collector for a while.

    It could free an earlier model's arrays between two readings of the memory. The second one would
    then be too low, or even below the first.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def describe() -> dict[str, Any]:
    """Return MLX's description of its device."""
    return dict(mx.device_info())


def memory_bytes() -> tuple[int, int]:
    """Return the machine's memory and the memory available to MLX, in bytes.

    On Metal the latter is the recommended working set. On a CPU it is the available memory, or a
    limit of the process if that is less.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    offered = describe().get("max_recommended_working_set_size") if is_gpu() else None
    return total, int(offered) if offered else _available(total)


def share_memory(among: int) -> None:
    """Plan from now on with the part of the memory that is left to one of `among` processes."""
    global _sharers
    _sharers = among


def offered_bytes() -> int:
    """Return the bytes that a runner may use in all.

    On Metal this is the recommended working set. On a CPU it is nine tenths of the available
    memory, plus the memory that MLX uses already.
    """
    offered = memory_bytes()[1] // _sharers
    return offered if is_gpu() else offered * 9 // 10 + int(mx.get_active_memory())


def hard_limit() -> Limit | None:
    """Return the narrowest limit of this process or its cgroup, or None if there is none.

    The system ends a process that goes beyond it.
    """
    return next((limit for limit in limits() if limit.name != MACHINE), None)


def set_limits(total: int, batch: int) -> None:
    """Set MLX's limits by the plan: `total` bytes in all.

    MLX may keep up to `batch` bytes of freed buffers for the next step.
    """
    mx.set_memory_limit(max(total, offered_bytes()))
    mx.set_cache_limit(max(batch, SMALLEST_CACHE))


SMALLEST_CACHE = 64 * 2**20
_wired: dict[int, int] = {}
"""Bytes to wire for each model in memory, by the identity of the model."""


def wire(model: Any, nbytes: int) -> None:
    """Let MLX wire `nbytes` more, until `model` is freed. Do nothing for 0 bytes.

    A wired buffer stays in the GPU's memory. MLX has one limit for the process, which is the sum of
    what all models ask for, and never more than the device recommends. The limit counts bytes: MLX
    wires buffers in the order in which they are allocated, and the weights come first.
    """
    if nbytes:
        _wired[id(model)] = nbytes
        weakref.finalize(model, _unwire, id(model)).atexit = False
        _set_wired_limit()


def wirable(nbytes: int) -> int:
    """Return how many of `nbytes` MLX is told to wire: none on a CPU."""
    recommended = describe().get("max_recommended_working_set_size") if is_gpu() else None
    return min(nbytes, int(recommended)) if recommended else 0


def _unwire(identity: int) -> None:
    _wired.pop(identity, None)
    _set_wired_limit()


def _set_wired_limit() -> None:
    if is_gpu():
        mx.set_wired_limit(wirable(sum(_wired.values())))


def _available(total: int) -> int:
    return min([total, *(limit.nbytes for limit in limits())])


@dataclass(frozen=True)
class Finding:
    """One line of `mlxrunner doctor`."""

    name: str
    value: str
    ok: bool = True
    advice: str = ""
    """The remedy; "" if there is none."""


def memory() -> Finding:
    """Report the memory, and the limit that lowers it below that of the machine."""
    total, available = memory_bytes()
    limit = None if is_gpu() else next(iter(limits()), None)
    by = (
        f" (limited by {limit.name})"
        if limit and limit.name != MACHINE and limit.nbytes <= available
        else ""
    )
    return Finding("memory", f"{size(total)} in all, {size(available)} for MLX{by}")


WIRES_NOT = "nothing: MLX wires memory on Metal only"


def wired() -> Finding:
    """Report what `wire` keeps in memory on this device."""
    value = f"the weights (wire), at most {size(memory_bytes()[1])}" if is_gpu() else WIRES_NOT
    return Finding("wired memory", value)


def blas() -> Finding:
    """Report the library of matrix products on this device, with advice if it is slow."""
    if is_gpu():
        return Finding("BLAS", f"not needed: matrix products run on {backend()}")
    if platform.system() == "Darwin":
        return Finding("BLAS", "Accelerate")
    loaded = sorted(
        {
            Path(line.split()[-1]).name
            for line in _text(Path("/proc/self/maps")).splitlines()
            if "openblas" in line.lower() and "numpy" not in line
        }
    )
    if loaded:
        return Finding("BLAS", loaded[0])
    library = openblas.find()
    if library is not None:
        remedy = (
            ": unset MLXRUNNER_OPENBLAS; in programs of your own, set"
            if openblas.is_off()
            else " when this program is started with"
        )
        advice = f"about 16 times faster{remedy} LD_PRELOAD={library} OPENBLAS_NUM_THREADS=1"
    else:
        advice = (
            "about 16 times faster with OpenBLAS: apt-get install libopenblas0-pthread, or make in "
            "a clone, then run mlxrunner doctor again"
        )
    return Finding("BLAS", "the wheel's own reference BLAS, slow", ok=False, advice=advice)


@cache
def warn_of_slow_blas() -> None:
    """Log once that matrix products are slow here, unless the user wants it so."""
    found = blas()
    if not (found.ok or openblas.is_off()):
        logger.warning("matrix products run on %s; %s", found.value, found.advice)


def compiler() -> Finding:
    """Report the C++ compiler, with which mx.compile builds fused kernels on a CPU.

    A GPU needs none.
    """
    if is_gpu():
        return Finding("compiler", f"not needed: kernels are compiled by {backend()}")
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if found:
        return Finding("compiler", found)
    return Finding(
        "compiler", "none", ok=False, advice="kernels run unfused, a little slower: install g++"
    )


PACKAGES = ("mlxrunner", "mlx", "mlx-lm", "transformers", "numpy", "sentencepiece")


def findings() -> list[Finding]:
    """Return the findings about device, memory, libraries and versions, in that order."""
    facts = describe()
    name = str(
        facts.get("device_name")
        or facts.get("architecture")
        or platform.processor()
        or platform.machine()
    )
    has_metal = platform.system() != "Darwin" or backend() == "metal"
    remedy = "no Metal: a native arm64 Python on macOS 14 or newer is needed"
    return [
        Finding("device", f"{name} ({platform.system()} {platform.machine()})"),
        Finding("backend", backend(), ok=has_metal, advice="" if has_metal else remedy),
        memory(),
        wired(),
        blas(),
        compiler(),
        Finding("python", platform.python_version()),
        *map(_package, PACKAGES),
    ]


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed", ok=False, advice=f"pip install {name}")

"""Ask which device MLX computes on. No other module asks."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrunner.system import openblas
from mlxrunner.system.limits import MACHINE, Limit, limits
from mlxrunner.terminal.text import size

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
            for line in _maps()
            if "openblas" in line.lower() and "numpy" not in line
        }
    )
    if loaded:
        return Finding("BLAS", loaded[0])
    library = openblas.find()
    if library is not None:
        advice = (
            f"about 16 times faster: unset MLXRUNNER_OPENBLAS; in programs of your own, set "
            f"LD_PRELOAD={library} OPENBLAS_NUM_THREADS=1"
        )
    else:
        advice = (
            "about 16 times faster with OpenBLAS: apt-get install libopenblas0-pthread, or make in "
            "a clone, then run mlxrunner doctor again"
        )
    return Finding("BLAS", "the wheel's own reference BLAS, slow", ok=False, advice=advice)


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


def _maps() -> list[str]:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    return maps.read_text().splitlines()  # opens: of the kernel


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
    found = [
        Finding("device", f"{name} ({platform.system()} {platform.machine()})"),
        Finding("backend", backend()),
        memory(),
        wired(),
        blas(),
        compiler(),
        Finding("python", platform.python_version()),
    ]
    if platform.system() == "Darwin" and backend() != "metal":
        found[1] = Finding(
            "backend",
            backend(),
            ok=False,
            advice="no Metal: a native arm64 Python on macOS 14 or newer is needed",
        )
    return found + [_package(name) for name in PACKAGES]


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed", ok=False, advice=f"pip install {name}")

"""The one module that asks which device MLX computes on, and what follows from it."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrunner.limits import MACHINE, Limit, limits
from mlxrunner.terminal import size


def is_gpu() -> bool:
    """Whether MLX computes on a GPU (Metal or CUDA) by default."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def backend() -> str:
    """ "metal", "cuda" or "cpu"."""
    if not is_gpu():
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def preferred_dtype() -> mx.Dtype | None:
    """The type to which unquantized weights are converted after loading; None: as they are stored.

    The CPU backend has fast matrix products for float32 only.
    """
    return None if is_gpu() else mx.float32


def describe() -> dict[str, Any]:
    """What MLX says of its device."""
    return dict(mx.device_info())


def memory_bytes() -> tuple[int, int]:
    """(in all, available to MLX): the recommended working set on Metal; on a CPU available memory, or less where a limit is set."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    offered = describe().get("max_recommended_working_set_size") if is_gpu() else None
    return total, int(offered) if offered else _available(total)


def offered_bytes() -> int:
    """What a runner may use in all: the recommended working set on Metal; on a CPU nine tenths of the available memory, and what
    MLX has taken already."""
    offered = memory_bytes()[1]
    return offered if is_gpu() else offered * 9 // 10 + int(mx.get_active_memory())


def hard_limit() -> Limit | None:
    """The narrowest limit of this process or its cgroup, beyond which it would be ended; None: there is none."""
    return next((limit for limit in limits() if limit.name != MACHINE), None)


def set_limits(total: int, batch: int) -> None:
    """Tell MLX what was planned: `total` bytes in all, of which `batch` come and go and may be kept for the next step."""
    mx.set_memory_limit(max(total, offered_bytes()))
    mx.set_cache_limit(max(batch, SMALLEST_CACHE))
    recommended = describe().get("max_recommended_working_set_size") if is_gpu() else None
    if recommended:
        mx.set_wired_limit(min(total, int(recommended)))


SMALLEST_CACHE = 64 * 2**20


def _available(total: int) -> int:
    return min([total, *(limit.nbytes for limit in limits())])


@dataclass(frozen=True)
class Finding:
    """One line of `mlxrunner doctor`. `advice` is what to do about it, where something can be done."""

    name: str
    value: str
    ok: bool = True
    advice: str = ""


def memory() -> Finding:
    """Say how much memory there is, and which limit lowers it below what the machine has."""
    total, available = memory_bytes()
    limit = None if is_gpu() else next(iter(limits()), None)
    by = (
        f" (limited by {limit.name})"
        if limit and limit.name != MACHINE and limit.nbytes <= available
        else ""
    )
    return Finding("memory", f"{size(total)} in all, {size(available)} for MLX{by}")


def blas() -> Finding:
    """Whether matrix products on this device run on a fast library, measured and not guessed."""
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
    library = openblas()
    if library is not None:
        advice = f"about 40 times faster: LD_PRELOAD={library} OPENBLAS_NUM_THREADS=1 mlxrunner ..."
    else:
        advice = "about 40 times faster with OpenBLAS: apt-get install libopenblas0-pthread, then run mlxrunner doctor again"
    return Finding("BLAS", "the wheel's own reference BLAS, slow", ok=False, advice=advice)


def openblas() -> Path | None:
    """OpenBLAS as a Linux distribution installs it."""
    places = (
        *Path("/usr/lib").glob("*-linux-gnu/libopenblas.so.0"),
        Path("/usr/lib64/libopenblas.so.0"),
    )
    return next((place for place in places if place.exists()), None)


def compiler() -> Finding:
    """mx.compile builds its fused CPU kernels with the system's C++ compiler; on a GPU it needs none."""
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
    return maps.read_text().splitlines() if maps.exists() else []

"""Describe this machine for `mlxrunner doctor`, with a remedy for each missing thing."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from mlxrunner.system import device
from mlxrunner.system.device import Finding

PACKAGES = ("mlxrunner", "mlx", "mlx-lm", "transformers", "numpy", "sentencepiece")


def findings() -> list[Finding]:
    """Return the findings about device, memory, libraries and versions, in that order."""
    facts = device.describe()
    name = str(
        facts.get("device_name")
        or facts.get("architecture")
        or platform.processor()
        or platform.machine()
    )
    found = [
        Finding("device", f"{name} ({platform.system()} {platform.machine()})"),
        Finding("backend", device.backend()),
        device.memory(),
        device.blas(),
        device.compiler(),
        Finding("python", platform.python_version()),
    ]
    if platform.system() == "Darwin" and device.backend() != "metal":
        found[1] = Finding(
            "backend",
            device.backend(),
            ok=False,
            advice="no Metal: a native arm64 Python on macOS 14 or newer is needed",
        )
    return found + [_package(name) for name in PACKAGES]


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed", ok=False, advice=f"pip install {name}")

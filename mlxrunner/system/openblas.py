"""Find OpenBLAS on Linux, and start the program again with it before a model is loaded.

MLX's wheel for CPUs brings a BLAS that is 16 times slower. A library can only take its place when
the process starts (`LD_PRELOAD`). This module imports next to nothing: it runs first of all.
"""

from __future__ import annotations

import os
import sys

_BEFORE = "MLXRUNNER_OPENBLAS_BEFORE"
"""The variable that hands the new program what its variables were before."""
PRELOAD, THREADS = "LD_PRELOAD", "OPENBLAS_NUM_THREADS"
COMMANDS = frozenset("chat run generate batch worker serve verify bench plan doctor launch".split())
"""The commands that load a model, or say how fast one would be."""


def find() -> str | None:
    """Return the path of OpenBLAS as Linux distributions or `make` install it, else None."""
    from glob import glob

    patterns = (
        "/usr/lib/*-linux-gnu/libopenblas.so.0",
        "/usr/lib64/libopenblas.so.0",
        f"{sys.prefix}/lib/mlxrunner/libopenblas.so",
    )
    return next((path for pattern in patterns for path in sorted(glob(pattern))), None)


def is_off() -> bool:
    """Return True if the user wants no OpenBLAS."""
    return os.environ.get("MLXRUNNER_OPENBLAS") in ("0", "off", "no")


_is_ours = False
"""True in a program that `prefer` started again."""


def for_children() -> dict[str, str]:
    """Return the variables for a child process that loads a model, and is not this program."""
    path = find() if _is_ours else None
    return {} if path is None else variables(path)


def variables(path: str) -> dict[str, str]:
    """Return the variables of the environment that put the library at `path` first.

    One thread is fastest: MLX has its own.
    """
    environment = os.environ
    others, threads = environment.get(PRELOAD), environment.get(THREADS, "1")
    return {PRELOAD: f"{path}:{others}" if others else path, THREADS: threads}


def prefer() -> None:
    """Start this program again with OpenBLAS if it is found and the command needs it, once.

    In the new program, the variables are put back, so that no child process inherits them.
    """
    global _is_ours
    environment = os.environ
    before = environment.pop(_BEFORE, None)
    if before is not None:
        _is_ours = True
        preload, _, threads = before.partition("\n")
        for name, value in ((PRELOAD, preload), (THREADS, threads)):
            environment.pop(name, None)
            if value:
                environment[name] = value
        return
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if is_off() or sys.platform != "linux" or command not in COMMANDS:
        return
    if "blas" in environment.get(PRELOAD, ""):
        return
    path = find()
    if path is None or not sys.executable or not os.access(path, os.R_OK):
        return
    before = f"{environment.get(PRELOAD, '')}\n{environment.get(THREADS, '')}"
    words = [sys.executable, *sys.orig_argv[1:]]
    try:
        os.execve(sys.executable, words, {**environment, **variables(path), _BEFORE: before})
    except OSError:
        return

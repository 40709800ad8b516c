"""The limit of open files (`ulimit -n`), which importing mlx-lm would lower for good.

`mlx_lm.utils` sets it to 2048, and the most it can be raised to again to 4096. A server needs one
open file for each connection.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder:
    """Finds mlx-lm for Python, and lets no code lower the limit while mlx-lm is imported."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification that the other finders have of mlx-lm, and None for others."""
        if name != "mlx_lm":
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(_run_keeping, loader.exec_module)
        return spec


def keep_limit() -> None:
    """Keep the limit when mlx-lm is imported, wherever that is."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _run_keeping(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    import resource

    set_limit = resource.setrlimit

    def raise_only(kind: int, limits: Any) -> None:
        if kind != resource.RLIMIT_NOFILE:
            set_limit(kind, limits)
            return
        soft, hard = resource.getrlimit(kind)
        asked = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
        if soft != resource.RLIM_INFINITY and soft < asked:
            set_limit(kind, (asked, hard))

    resource.setrlimit = raise_only
    try:
        run(module)
    finally:
        resource.setrlimit = set_limit


def limit() -> int:
    """Return the most files that this process may have open; -1 if there is no limit."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return -1 if soft == resource.RLIM_INFINITY else soft

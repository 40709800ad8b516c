"""Mend what importing mlx-lm and transformers does to this process; say how to install a package.

`mlx_lm.utils` sets the limit of open files (`ulimit -n`) to 2048, and the most it can be raised to
again to 4096. A server needs one open file for each connection.

`transformers` reads its 3,000 files, twice, to find out which of them defines which name, and takes
half a second. That is read once, and kept in the cache folder for each version.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Finder:
    """Finds modules of MENDED for Python, and runs each under its function."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification that the other finders have of such a module, else None."""
        if name not in MENDED:
            return None
        others = (finder for finder in sys.meta_path if finder is not cls)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(MENDED[name], loader.exec_module)
        return spec


def mend_imports() -> None:
    """Mend the imports of mlx-lm and transformers, wherever they are."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _keep_limit(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run mlx-lm's module, and let no code lower the limit meanwhile."""
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


Structure = dict[frozenset[str], dict[str, set[str]]]
"""The names that each module of transformers defines, by the packages that they need."""


def _keep_structure(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run the module of transformers that reads its files, and let it read them once.

    Expects `define_import_structure(path, prefix)`, called with the folder `models` and with its
    `__init__.py`. Without it, or with a version under development, nothing changes.
    """
    run(module)
    read = getattr(module, "define_import_structure", None)
    key = _key_of_transformers(str(module.__file__))
    if read is None or key is None:
        return
    folder = key.partition(" ")[2]

    def define(module_path: Any, prefix: str | None = None) -> Structure:
        if str(module_path).removesuffix("/__init__.py") != folder:
            found: Structure = read(module_path, prefix)
            return found
        found = _structure(key, lambda: read(folder))
        return {
            needs: {f"{prefix}.{name}" if prefix else name: names for name, names in of.items()}
            for needs, of in found.items()
        }

    module.define_import_structure = define  # type: ignore[attr-defined]  # it has it


def _key_of_transformers(file: str) -> str | None:
    """Return the version of transformers and its folder of models, or None for no release."""
    import os
    from importlib.metadata import PackageNotFoundError, version

    package = os.path.dirname(os.path.dirname(file))
    folder = os.path.join(package, "models")
    try:
        found, time = version("transformers"), os.stat(folder).st_mtime_ns
    except (PackageNotFoundError, OSError):
        return None
    return None if "dev" in found else f"{found}/{time} {folder}"


def _structure(key: str, read: Callable[[], Structure]) -> Structure:
    """Return what is kept under `key`, or else what `read` returns, which is kept then."""
    from mlxrunner.system.folders import CacheFile

    file = CacheFile("transformers.json", most=3)
    try:
        return {
            frozenset(needs): {name: set(names) for name, names in of.items()}
            for needs, of in file.values()[key]
        }
    except (LookupError, TypeError, ValueError, AttributeError):
        found = read()
        kept = [
            [sorted(needs), {name: sorted(names) for name, names in of.items()}]
            for needs, of in found.items()
        ]
        file.keep(key, kept)
        return found


MENDED: dict[str, Callable[[Callable[[ModuleType], None], ModuleType], None]] = {
    "mlx_lm": _keep_limit,
    "transformers.utils.import_utils": _keep_structure,
}
"""Functions that run a module when it is imported."""


def limit() -> int:
    """Return the most files that this process may have open; -1 if there is no limit."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return -1 if soft == resource.RLIM_INFINITY else soft


def how_to_install(extra: str) -> str:
    """Return the command that installs the packages of `extra` beside this program.

    A venv that uv made has no pip of its own.
    """
    import shlex
    from importlib.metadata import PackageNotFoundError, requires

    try:
        wanted = [
            one.partition(";")[0].strip()
            for one in requires("mlxrunner") or ()
            if re.search(rf"extra == ['\"]{extra}['\"]", one)
        ]
    except PackageNotFoundError:  # it runs from a folder of its sources
        wanted = [f"mlxrunner[{extra}]"]
    has_pip = find_spec("pip") is not None
    command = (
        [sys.executable, "-m", "pip", "install"]
        if has_pip
        else ["uv", "pip", "install", "--python", sys.executable]
    )
    return shlex.join([*command, *wanted])

"""The limit of open files stays the user's when mlx-lm is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest


def limits_after(before: tuple[int, int], imports: str) -> str:
    """Return the limits of a process that begins with `before` and runs `imports`."""
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {before})\n"
        "own = resource.setrlimit\n"
        f"{imports}\n"
        "assert resource.setrlimit is own\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.mark.parametrize(
    ("before", "after"),
    [((5000, 6000), "5000 6000"), ((300, 6000), "2048 6000"), ((300, 400), "400 400")],
    ids=["enough", "few", "no more allowed"],
)
def test_importing_mlx_lm_lowers_no_limit(before: tuple[int, int], after: str) -> None:
    """It may raise the limit, as mlx-lm wants it, within what the user may have."""
    assert limits_after(before, "import mlxrunner.engine.sampling") == after


def test_every_way_to_mlx_lm_keeps_the_limit() -> None:
    """A program that imports mlxrunner first, and mlx-lm itself, keeps it, too."""
    assert limits_after((5000, 6000), "import mlxrunner, mlx_lm.utils") == "5000 6000"

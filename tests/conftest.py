"""For all tests."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def no_freed_buffers() -> None:
    """Tests that measure memory must not be handed larger buffers than they ask for, which an earlier test has freed."""
    mx.clear_cache()


@pytest.fixture
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A descriptor of a disk that is always full: of a copy of the device, so that nothing can replace the real one."""
    device = tmp_path_factory.mktemp("device") / "full"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        descriptor = os.open(device, os.O_WRONLY)
    except OSError:
        pytest.skip("only root, on Linux, can make a disk that is always full")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def null(tmp_path: Path) -> Path:
    """A copy of the null device."""
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.stat(os.devnull).st_rdev)
    except OSError:
        pytest.skip("only root can make devices")
    return device

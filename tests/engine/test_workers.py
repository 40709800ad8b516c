"""Threads that run MLX are kept: work in asyncio gets one, and its results."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from mlxrunner.engine.thread import run_in_worker


def test_work_is_done_in_a_thread_that_stays() -> None:
    """Results and errors come back, and the thread that made them is still there."""

    async def ask() -> list[threading.Thread]:
        with pytest.raises(ValueError, match="no"):
            await run_in_worker(fail, "no")
        return [await run_in_worker(threading.current_thread) for _ in range(3)]

    def fail(text: str) -> None:
        raise ValueError(text)

    threads = asyncio.run(ask())
    assert threading.main_thread() not in threads
    assert all(thread.is_alive() and thread.daemon for thread in threads)


def test_a_program_that_compiled_in_such_a_thread_ends_well() -> None:
    """MLX keeps compiled functions of a thread, and freeing them late would abort the process."""
    code = (
        "import asyncio, mlx.core as mx\n"
        "from mlxrunner.engine.thread import run_in_worker\n"
        "def work(): return mx.compile(lambda x: x * 2)(mx.ones(3)).sum().item()\n"
        "assert asyncio.run(run_in_worker(work)) == 6\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")

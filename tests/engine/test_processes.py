"""Ctrl-C, a fork and the end of the interpreter, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from support.waiting import PATIENCE_S

PROLOGUE = """
import os, signal, sys, threading
sys.path[:0] = ["tests"]
from support.families import write_family
from support.histories import tiny_parts
from mlxrunner import ClosedError, ParallelRunner
from support.engine import Engine
parts = tiny_parts("llama")
LONG = {"max_tokens": 3000, "stop_tokens": []}
def read(handle):
    try:
        handle.result()
    except ClosedError:
        pass
"""
"""The beginning of each program below."""


def program(text: str) -> subprocess.CompletedProcess[str]:
    source = PROLOGUE + textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


ENDS = {
    "never closed": ("", 0, ""),
    "an error": ("raise ValueError('mine')", 1, "ValueError: mine"),
    "an exit": ("sys.exit(7)", 7, ""),
    "a reader in a daemon": (
        "threading.Thread(target=read, args=(handles[1],), daemon=True).start()",
        0,
        "",
    ),
    "in a fork": ("os.fork()", 0, ""),
    "a cycle": ("runner.me = runner; handles.append(handles); del runner, handles", 0, ""),
}


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("end", ENDS)
def test_an_open_runner_lets_the_interpreter_end(end: str) -> None:
    """Requests run; nothing hangs, crashes or is said."""
    text, code, said = ENDS[end]
    ran = program(
        f"""
        runner = ParallelRunner(*parts, max_sequences=2, context=4000)
        handles = [runner.submit([i], **LONG) for i in range(4)]
        next(handles[0])
        {text}
        """
    )
    assert (ran.returncode, ran.stdout) == (code, "")
    assert ran.stderr == "" if not said else said in ran.stderr


def test_in_the_child_of_a_fork_nothing_waits_for_the_thread_that_is_missing() -> None:
    """Even if another thread held the lock: every call ends, and the parent's runner continues."""
    ran = program(
        """
        from mlxrunner import EngineError
        runner = ParallelRunner(*parts, max_sequences=2, context=4000)
        handles = [runner.submit([i], **LONG) for i in range(4)]
        taken, done = threading.Event(), threading.Event()

        def hold():
            with runner._thread.lock:
                taken.set()
                done.wait()

        threading.Thread(target=hold).start()
        taken.wait()
        if (child := os.fork()) == 0:
            waits = [handles[0].result, lambda: list(handles[1]), handles[2].wait]
            for wait in [*waits, lambda: runner.complete([1])]:
                try:
                    print("ended" if wait() is True else "answered")
                except EngineError as error:
                    print("fork" if "fork" in str(error) else error)
            handles[3].cancel()
            runner.close()
            print("closed", flush=True)
            os._exit(0)
        done.set()
        os.waitpid(child, 0)
        for handle in handles:
            handle.cancel()
        print(len(runner.complete([5], max_tokens=4, stop_tokens=[]).tokens) == 4)
        runner.close()
        """
    )
    assert ran.stderr == ""
    assert ran.stdout.split() == ["fork", "fork", "ended", "fork", "closed", "True"]


WAITS = {
    "result": "handle.result()",
    "iterate": "list(handle)",
    "wait": "queued.wait()",
    "complete": "runner.complete([5], **LONG)",
    "run": "runner.run([[5], [6]], **LONG)",
    "asyncio": "import asyncio; asyncio.run(follow(runner.stream([7], **LONG)))",
}


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupt_ends_the_waiting_at_once(wait: str) -> None:
    """While a step hangs; the runner can be used afterwards."""
    ran = program(
        f"""
        runner = ParallelRunner(*parts, max_sequences=1, context=4000)
        handle, queued = runner.submit([1], **LONG), runner.submit([2], **LONG)
        next(handle)
        is_hanging, may_go_on, step = threading.Event(), threading.Event(), Engine.step
        def hang(self):
            is_hanging.set()
            may_go_on.wait()
            step(self)
        Engine.step = hang
        follows = threading.Event()
        async def follow(stream):
            follows.set()
            async for chunk in stream: pass
        def press():
            is_hanging.wait()
            if {wait == "asyncio"}: follows.wait()
            os.kill(os.getpid(), signal.SIGINT)
        try:
            threading.Thread(target=press).start()
            {WAITS[wait]}
        except KeyboardInterrupt:
            print("interrupted")
        may_go_on.set()
        handle.cancel(), queued.cancel()
        print(len(runner.complete([5, 6], max_tokens=3, stop_tokens=[]).tokens))
        """
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "interrupted\n3\n", "")


def test_an_interrupt_ends_the_waiting_for_a_model_at_once() -> None:
    """The thread ends when it has loaded the model."""
    ran = program(
        """
        is_loading, may_go_on = threading.Event(), threading.Event()
        before = Engine.__init__
        def slow(self, *given, **more):
            is_loading.set()
            may_go_on.wait()
            before(self, *given, **more)
        Engine.__init__ = slow
        def press():
            is_loading.wait()
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press).start()
        try:
            ParallelRunner(*parts, max_sequences=1, context=4000)
        except KeyboardInterrupt:
            print("interrupted")
        may_go_on.set()
        """
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "interrupted\n", "")

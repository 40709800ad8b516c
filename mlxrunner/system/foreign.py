"""Call code of others: native libraries, and the Python code of models. Its failures are errors.

Such code may panic, call `sys.exit`, raise KeyboardInterrupt, or print. A signal that the user
sends, such as Ctrl-C, is not such a failure and passes.
"""

from __future__ import annotations

import dis
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import CodeType, TracebackType
from typing import Any

from mlxrunner.system.writing import open_temporary
from mlxrunner.terminal.output import visible

PANIC = "PanicException"
"""Class name of the BaseException that a panic of Rust becomes. Each library has its own class."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals whose handlers raise an exception in whatever code runs."""
OWN = "mlxrunner."
"""The beginning of the names of our modules."""
MOST_OUTPUT = 2**16
"""Most characters of the output of foreign code that are kept."""


class ForeignError(Exception):
    """The error of foreign code that panicked, or tried to end the program."""


def is_failure(error: BaseException) -> bool:
    """Return True if foreign code has raised `error`, False if a signal or our own code has.

    An Exception is always a failure. Python raises the KeyboardInterrupt of Ctrl-C between two
    instructions, and foreign code in a `raise`.
    """
    if isinstance(error, Exception) or type(error).__name__ == PANIC:
        return True
    places = list(_places(error.__traceback__))
    if not places:
        return False
    last, at = places[-1]
    if last.f_globals.get("__name__", "").startswith(OWN):
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in SIGNALS}
    if any(
        frame.f_code in handlers or frame.f_globals.get("__name__") == f"{OWN}terminal.signals"
        for frame, _ in places
    ):
        return False
    code = last.f_code.co_code
    is_raise = 0 <= at < len(code) and dis.opname[code[at]] == "RAISE_VARARGS"
    return not isinstance(error, KeyboardInterrupt) or is_raise


def _places(trace: TracebackType | None) -> Iterator[tuple[Any, int]]:
    """Yield each frame of a traceback, and the offset of the instruction that it was at."""
    while trace is not None:
        yield trace.tb_frame, trace.tb_lasti
        trace = trace.tb_next


def _code_of(handler: Any) -> CodeType | None:
    found = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return found if isinstance(found, CodeType) else None


@contextmanager
def foreign_code() -> Iterator[None]:
    """Run code of others: `failures_as_errors`, and `quiet`.

    The error of code that tried to end the program has the last line that it printed.
    """
    with quiet() as printed:
        try:
            with failures_as_errors():
                yield
        except ForeignError as error:
            said = printed.getvalue().split("\n")
            last = next((line for line in reversed(said) if line.strip()), None)
            if last is None or not _wanted_to_end(error.__cause__):
                raise
            raise ForeignError(f"{error}, and said {last.strip()[:200]!r}") from error.__cause__


@contextmanager
def failures_as_errors() -> Iterator[None]:
    """Raise ForeignError instead of what `is_failure` finds that is not an Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise ForeignError(_described(error)) from error


def _described(error: BaseException) -> str:
    if not _wanted_to_end(error):
        return (str(error).splitlines() or ["it panicked"])[0][:300]
    shown = f"{type(error).__name__}({' '.join(str(error).split())[:100]})"
    return f"its code tried to end the program by {shown}"


def _wanted_to_end(error: BaseException | None) -> bool:
    return type(error).__name__ != PANIC


_turn = threading.RLock()
"""Held by the thread whose output is held back: there is one stderr for all of them."""


@contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Hold back the stderr of this process, and what this thread prints, until the block ends.

    Then write it to stderr with control characters made visible. After a failure it is dropped,
    because it is debug output. Yield what was printed.
    """
    with _turn, _printed_apart() as printed, _stderr_held_back(printed):
        yield printed


@contextmanager
def _printed_apart() -> Iterator[io.StringIO]:
    """Let this thread print into a text of its own, and other threads where they did."""
    printed, before = io.StringIO(), sys.stdout
    sys.stdout = _Apart(before, printed)
    try:
        yield printed
    finally:
        sys.stdout = before


class _Apart:
    """Stands for sys.stdout: what this thread writes goes to another stream."""

    def __init__(self, stream: Any, own: io.StringIO) -> None:
        self._stream, self._own, self._thread = stream, own, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            return len(text) if self._stream is None else int(self._stream.write(text))
        if self._own.tell() < MOST_OUTPUT:
            self._own.write(text[:MOST_OUTPUT])
        return len(text)

    def __getattr__(self, name: str) -> Any:
        if self._stream is None or threading.get_ident() == self._thread:
            return getattr(self._own, name)
        return getattr(self._stream, name)


@contextmanager
def _stderr_held_back(printed: io.StringIO) -> Iterator[None]:
    """Hold back the stderr of this process. At the end write it, and what was `printed`."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        shown = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    with open_temporary() as kept:
        os.dup2(kept.fileno(), 2)
        has_failed = False
        try:
            yield
        except BaseException as error:
            has_failed = isinstance(error, ForeignError) or (
                error.__cause__ is not None and not isinstance(error.__cause__, Exception)
            )
            raise
        finally:
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            kept.seek(0)
            if not has_failed:
                text = kept.read().decode(errors="replace") + printed.getvalue()
                with suppress(OSError):
                    os.write(2, visible(text).encode())

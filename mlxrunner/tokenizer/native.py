"""Calls of libraries that are not written in Python, whose failures are no ordinary exceptions."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlxrunner.terminal import visible
from mlxrunner.writing import open_temporary

PANIC = "PanicException"
"""Name of the BaseException that a panic of Rust becomes in Python; each library has its own class."""


class NativeError(Exception):
    """A library gave up; the first line of what it said."""


def is_failure(error: BaseException) -> bool:
    """Return True for an exception or a panic, and not for Ctrl-C."""
    return isinstance(error, Exception) or type(error).__name__ == PANIC


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """NativeError instead of a panic of Rust."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise NativeError((str(error).splitlines() or ["it panicked"])[0][:300]) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back what this process writes to stderr, and show it at the end, where it can't drive the terminal.

    Nothing is shown after a panic, whose debug print it is."""
    sys.stderr.flush()
    try:
        shown = os.dup(2)
    except OSError:  # there is none
        yield
        return
    with open_temporary() as kept:
        os.dup2(kept.fileno(), 2)
        panicked = False
        try:
            yield
        except Exception as error:
            panicked = isinstance(error, NativeError) or (
                error.__cause__ is not None and not isinstance(error.__cause__, Exception)
            )
            raise
        finally:
            with suppress(OSError, ValueError):
                sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            kept.seek(0)
            if not panicked:
                with suppress(OSError):
                    os.write(2, visible(kept.read().decode(errors="replace")).encode())

"""Calls of libraries that are not written in Python, whose failures are no ordinary exceptions."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlxrunner.terminal import visible

PANIC = "PanicException"
"""What Rust's panics are in Python: a BaseException, of a class that each library has for itself."""


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
    """What is written to stderr meanwhile, by this whole process, is shown afterwards, and can't drive the terminal; after a panic it is not,
    being its debug print."""
    sys.stderr.flush()
    try:
        shown = os.dup(2)
    except OSError:  # there is none
        yield
        return
    with tempfile.TemporaryFile() as kept:
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

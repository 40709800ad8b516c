"""Call native libraries, whose failures are not ordinary exceptions."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlxrunner.system.writing import open_temporary
from mlxrunner.terminal.text import visible

PANIC = "PanicException"
"""Class name of the BaseException that a panic of Rust becomes. Each library has its own class."""


class NativeError(Exception):
    """The error of a native library that panicked. Its message is the panic's first line."""


def is_failure(error: BaseException) -> bool:
    """Return True for an exception or a panic, False for Ctrl-C."""
    return isinstance(error, Exception) or type(error).__name__ == PANIC


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise NativeError instead of a panic of Rust."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise NativeError((str(error).splitlines() or ["it panicked"])[0][:300]) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back the stderr of this process until the block ends.

    Then write it with control characters made visible. After a panic it is dropped, because it is
    debug output.
    """
    sys.stderr.flush()
    try:
        shown = os.dup(2)
    except OSError:  # stderr is closed
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

"""Log lines on stderr, above a progress bar or a prompt that is being typed."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from mlxrunner.terminal.text import visible


class StderrHandler(logging.StreamHandler[TextIO]):
    """A handler that writes each line, cleaned, to what `sys.stderr` is at that moment.

    While a bar is shown, rich puts a stream of its own there, which prints above the bar.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # the base class has an attribute
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_to_stderr(level: int) -> None:
    """Show what mlxrunner logs from `level` on."""
    logger = logging.getLogger("mlxrunner")
    logger.handlers = [StderrHandler()]
    logger.setLevel(level)

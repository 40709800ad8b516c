"""Ctrl-C as a request: the first one asks for the end, the second one is an interrupt as everywhere."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

MESSAGE = b"\nfinishing the lines that are running; Ctrl-C again stops at once, and nothing that is finished is lost\n"


class Interrupt:
    """While it is entered, `asked` says whether there was a Ctrl-C. Outside the main thread there never is one."""

    def __init__(self, message: bytes = MESSAGE) -> None:
        """`message`: said on stderr at once."""
        self.asked = False
        self._message = message
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if sys.stderr is not None:  # otherwise 2 may be any file
            os.write(2, self._message)  # print may be in the middle of something

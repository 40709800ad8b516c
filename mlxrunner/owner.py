"""One thread owns a model and all that runs on it: calls from others are refused."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from mlxrunner.errors import WrongThreadError

T = TypeVar("T")


class Owner:
    """The thread that opened `what`."""

    def __init__(self, what: str) -> None:
        self._what, self._thread = what, threading.current_thread()
        self._left: deque[Callable[[], object]] = deque()

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def check(self) -> None:
        """Raise WrongThreadError, with both names, in any thread but the owner."""
        if not self.is_here:
            raise WrongThreadError(self._what, self._thread.name, threading.current_thread().name)
        while self._left:
            self._left.popleft()()

    def do(self, act: Callable[[], object]) -> None:
        """Do it now; in another thread leave it to the owner's next call."""
        if self.is_here:
            act()
        else:
            self._left.append(act)


class Owned(Iterator[T]):
    """A generator that only its owner advances and closes."""

    def __init__(self, inner: Generator[T, None, None], owner: Owner) -> None:
        self._inner, self._owner = inner, owner

    def __iter__(self) -> Owned[T]:
        return self

    def __next__(self) -> T:
        self._owner.check()
        return next(self._inner)

    def close(self) -> None:
        """End it now. May be called again."""
        self._owner.check()
        self._inner.close()

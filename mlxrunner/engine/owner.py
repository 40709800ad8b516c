"""One thread owns a model and its runner: calls from other threads are refused."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self, TypeVar

from mlxrunner.errors import BusyError, ClosedError, WrongThreadError

T = TypeVar("T")


class Closing(ABC):
    """An object that the end of a `with` block closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Free everything. A second call is allowed."""


class Owner:
    """The thread that opened `what`, with a flag that is set when `what` is closed."""

    def __init__(self, what: str) -> None:
        self._what, self._thread = what, threading.current_thread()
        self._left: deque[Callable[[], object]] = deque()
        self.is_closed = False

    @property
    def is_here(self) -> bool:
        """True in the owner's thread."""
        return threading.current_thread() is self._thread

    def check(self) -> None:
        """Raise WrongThreadError in any thread but the owner, and ClosedError after `close`."""
        self.check_thread()
        if self.is_closed:
            raise ClosedError(self._what)
        while self._left:
            self._left.popleft()()

    def check_thread(self) -> None:
        """Raise WrongThreadError, with both names, in any thread but the owner."""
        if not self.is_here:
            raise WrongThreadError(self._what, self._thread.name, threading.current_thread().name)

    def do(self, act: Callable[[], object]) -> None:
        """Call `act` now; in another thread, leave it to the owner's next call."""
        if self.is_here:
            act()
        else:
            self._left.append(act)

    def close(self) -> None:
        """Refuse all further calls."""
        self.is_closed = True


class Owned(Iterator[T]):
    """A generator that only its owner advances and closes."""

    def __init__(self, inner: Generator[T, None, None], owner: Owner) -> None:
        self._inner: Any = inner  # whose state typing does not know
        self._owner = owner

    def __iter__(self) -> Owned[T]:
        return self

    def __next__(self) -> T:
        self._check_idle()
        self._owner.check()
        value: T = next(self._inner)
        return value

    @property
    def is_running(self) -> bool:
        """True while the generator computes its next value, as seen from a callback."""
        return bool(self._inner.gi_running)

    @property
    def is_over(self) -> bool:
        """True once the generator has ended."""
        return self._inner.gi_frame is None

    def close(self) -> None:
        """Close the generator. A second call is allowed, also after the runner was closed."""
        self._check_idle()
        self._inner.close()

    def _check_idle(self) -> None:
        """Raise WrongThreadError in another thread, and BusyError in a callback of its own."""
        self._owner.check_thread()
        if self.is_running:
            raise BusyError()

"""Remember results by the plain data that they were made of. Nothing here knows of templates."""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def sign(value: Any) -> bytes:
    """Return bytes that two values have in common only if they are the same plain data.

    The order of keys counts, and so does the type of a number. Raise ValueError for other objects.
    """
    return marshal.dumps(value, 0)  # version 0 has no references, which depend on more than values


class Bounded(Generic[T]):
    """Values by their keys, up to a size; those used last stay. Any thread may use it."""

    def __init__(self, most: int) -> None:
        """Begin with nothing. `most`: the largest sum of the sizes of all values."""
        self._most, self._size = most, 0
        self._known: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Hashable) -> T | None:
        """Return a value, or None if it is not known, or not any more."""
        with self._lock:
            found = self._known.get(key)
            if found is None:
                return None
            self._known.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: T, size: int) -> None:
        """Remember a value, in place of an earlier one."""
        with self._lock:
            self._size += size - self._known.pop(key, (None, 0))[1]
            self._known[key] = value, size
            while self._size > self._most:
                self._size -= self._known.popitem(last=False)[1][1]


class Remembered(Generic[T]):
    """A function of plain data that remembers its results. Nobody may change them."""

    def __init__(self, work: Callable[[Any], T], most: int) -> None:
        """Remember the results of `work`, for at most `most` bytes of what it is given."""
        self._work, self._known = work, Bounded[T](most)

    def __call__(self, value: Any) -> T:
        """Return what `work` returns, and raise what it raises."""
        try:
            key = sign(value)
        except ValueError:
            return self._work(value)
        found = self._known.get(key)
        if found is None:
            found = self._work(value)
            self._known.put(key, found, len(key))
        return found

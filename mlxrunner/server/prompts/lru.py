"""Remember results by the plain data that they were made of, up to a size in bytes."""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from sys import getsizeof
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")
ENTRY = 256
"""Bytes that a mapping takes for an entry, beside its key and its value."""
_SIMPLE = {str, bytes, int, float, bool, type(None)}
"""Types of objects without others in them."""


def sign(value: Any) -> bytes:
    """Return bytes that two values have in common only if they are the same plain data.

    The order of keys counts, and so does the type of a number. Raise ValueError for other objects.
    """
    return marshal.dumps(value, 0)  # version 0 has no references, which depend on more than values


def footprint(*values: Any) -> int:
    """Return about how many bytes plain objects take in memory, with all that is in them."""
    size, seen, left = 0, set[int](), [*values]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        size += getsizeof(one)
        if type(one) in _SIMPLE:
            continue
        if isinstance(one, dict):
            left += (*one, *one.values())
        elif isinstance(one, list | tuple):
            left += one
        elif is_dataclass(one):
            left += (getattr(one, part.name) for part in fields(one))
    return size


class LRUCache(Generic[T]):
    """Values by their keys, up to a size; those used last stay. Any thread may use it."""

    def __init__(self, most: int) -> None:
        """Begin with nothing. `most`: the most bytes of memory of all keys and values."""
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

    def put(self, key: Hashable, value: T) -> None:
        """Remember a value, in place of an earlier one."""
        size = ENTRY + footprint(key, value)
        with self._lock:
            self._size += size - self._known.pop(key, (None, 0))[1]
            self._known[key] = value, size
            while self._size > self._most:
                self._size -= self._known.popitem(last=False)[1][1]


class MemoizedFunction(Generic[T]):
    """A function of plain data that remembers its results. Nobody may change them."""

    def __init__(self, work: Callable[[Any], T], most: int) -> None:
        """Remember results of `work` in at most `most` bytes of memory."""
        self._work, self._known = work, LRUCache[T](most)

    def __call__(self, value: Any) -> T:
        """Return what `work` returns, and raise what it raises.

        It works on a copy that is made of the key, so that no later change of `value` matters.
        """
        try:
            key = sign(value)
        except ValueError:
            return self._work(value)
        found = self._known.get(key)
        if found is None:
            found = self._work(marshal.loads(key))
            self._known.put(key, found)
        return found

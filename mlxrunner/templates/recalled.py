"""Remember what the iterations of templates' loops have written.

A conversation comes back with a few new messages, and its template would write all the others
again. An iteration is recalled only if all that it reads is the same, type by type and in order:
see `mlxrunner.templates.loops`.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace

from mlxrunner.templates.loops import Shape
from mlxrunner.templates.remembered import Bounded, sign

MOST_VARIANTS = 2
"""Most texts of an iteration that differ by the items that it looks at."""
PURE = frozenset({"dict", "namespace", "raise_exception", "range"})
"""Functions of the sandbox that return the same for the same arguments."""
Key = tuple[Any, ...]


class Look(NamedTuple):
    """An item of a list that an iteration has read."""

    name: str
    at: Any
    found: bytes


class Written(NamedTuple):
    """The text of an iteration."""

    looks: tuple[Look, ...]
    text: str
    after: tuple[bytes, ...]
    """The values of the namespaces afterwards."""


Memory = Bounded[tuple[Written, ...]]
"""The texts of iterations, by what they have read."""


@dataclass
class _Loop:
    """A loop that runs."""

    key: Key
    """The part of the keys that is the same for all its iterations."""
    spaces: list[Namespace] = field(default_factory=list)
    """The namespaces that it may read and change."""
    looked: dict[str, Any] = field(default_factory=dict)
    """The lists of which it reads single items."""


@dataclass
class _Iteration:
    """An iteration that writes."""

    loop: _Loop
    key: Key
    looks: list[Look] = field(default_factory=list)


class Recollection:
    """The memory as one render of a template asks it."""

    def __init__(
        self,
        memory: Memory,
        source: bytes,
        variables: Mapping[str, Any],
        functions: Mapping[str, Any],
        item: Callable[[Any, Any], Any],
        signs: Mapping[int, bytes],
    ) -> None:
        """Begin a render of the template with the digest `source`.

        `functions` are those of the sandbox, `item` that which reads an item of a list. `signs`:
        the signs of the messages, by their identity.
        """
        self._memory, self._source, self._variables = memory, source, variables
        self._functions, self._item, self._signs = functions, item, signs
        self._loops: dict[int, _Loop | None] = {}
        self._open: _Iteration | None = None

    def recall(self, shape: tuple[Any, ...], item: Any, *given: Any) -> str:
        """Return what an iteration has written that read the same, or nothing.

        `shape`: a `Shape`. `given`: the values of its attributes and names.
        """
        self._open = None
        number, count = shape[0], len(shape[1])
        if number not in self._loops:
            self._loops[number] = self._begin(Shape._make(shape), given[count:])
        loop = self._loops[number]
        if loop is None:
            return ""
        try:
            read = map(self._sign, (item, *given[:count], *map(_values, loop.spaces)))
            key = (*loop.key, *read)
        except ValueError:
            return ""
        for written in self._memory.get(key) or ():
            if all(self._is_same(loop, look) for look in written.looks):
                for space, after in zip(loop.spaces, written.after, strict=True):
                    _values(space).update(marshal.loads(after))
                return written.text
        self._open = _Iteration(loop, key)
        return ""

    def keep(self, text: str) -> str:
        """Remember what an iteration has written, and return it."""
        iteration, self._open = self._open, None
        if iteration is not None and text:
            try:
                after = tuple(map(self._sign, map(_values, iteration.loop.spaces)))
            except ValueError:
                return text
            self._put(iteration.key, Written(tuple(iteration.looks), text, after))
        return text

    def look(self, name: str, value: Any, at: Any) -> Any:
        """Return the item of a list, and note that an iteration has read it."""
        found = self._item(value, at)
        if self._open is not None:
            try:
                if not isinstance(at, str | int):
                    raise ValueError
                self._open.looks.append(Look(name, at, self._sign(found)))
            except ValueError:
                self._open = None
        return found

    def _put(self, key: Key, written: Written) -> None:
        known = (written, *(self._memory.get(key) or ()))[:MOST_VARIANTS]
        self._memory.put(key, known)

    def _is_same(self, loop: _Loop, look: Look) -> bool:
        try:
            return self._sign(self._item(loop.looked[look.name], look.at)) == look.found
        except ValueError:
            return False

    def _begin(self, shape: Shape, given: Sequence[Any]) -> _Loop | None:
        """Begin a loop; None if it reads what can't be compared, or what grows."""
        loop = _Loop((self._source, shape.number))
        loop.looked.update(zip(shape.looked, given[len(shape.names) :], strict=True))
        if any(name in self._variables or name in self._functions for name in shape.assigned):
            return None
        try:
            whole = zip(shape.names, given[: len(shape.names)], strict=True)
            loop.key += tuple(self._outside(loop, name, value) for name, value in whole)
        except ValueError:
            return None
        return loop

    def _outside(self, loop: _Loop, name: str, value: Any) -> Any:
        """Return what is compared of a value from outside. Raise ValueError if it can't be."""
        if isinstance(value, Namespace):
            loop.spaces.append(value)
            return next(n for n, space in enumerate(loop.spaces) if space is value)
        if isinstance(value, Macro):
            return value._func.__code__
        if name in PURE and value is self._functions.get(name):
            return name
        if isinstance(value, list) and value and id(value[0]) in self._signs:
            raise ValueError  # a conversation, which grows
        return self._sign(value)

    def _sign(self, value: Any) -> bytes:
        """Return the sign of a value, or nothing if it is undefined.

        Raise ValueError for what is no plain data.
        """
        known = self._signs.get(id(value))
        if known is not None:
            return known
        return b"" if isinstance(value, Undefined) else sign(value)


def _values(space: Namespace) -> dict[str, Any]:
    values: dict[str, Any] = space._Namespace__attrs
    return values

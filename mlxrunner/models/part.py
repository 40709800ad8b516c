"""The part of each model that this process has: all of it, or that of one rank of several."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Way = Literal["tensor-parallel", "pipeline"]
"""Each rank has a part of every layer, or some of the layers."""
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The number of a layer in the name of a tensor."""


@dataclass(frozen=True)
class Part:
    """The part of rank `own` of `ranks`."""

    own: int
    ranks: int
    way: Way

    def rank(self) -> int:
        """Return `own`, as a group of MLX does."""
        return self.own

    def size(self) -> int:
        """Return `ranks`, as a group of MLX does."""
        return self.ranks

    def layers(self, count: int) -> range:
        """Return the numbers of the layers that this rank has, of `count`.

        The last rank begins, as in mlx-lm: the first ranks have one more where they are not equal.
        """
        if self.way != "pipeline":
            return range(count)
        each, more = divmod(count, self.ranks)
        sizes = [each + (rank < more) for rank in range(self.ranks)]
        first = sum(sizes[self.own + 1 :])
        return range(first, first + sizes[self.own])


Check = Callable[[Path, dict[str, Any], Part], None]
"""A function of a folder, its config.json and a part.

It raises ModelError if ranks can't share the model.
"""

_parts: list[tuple[Part, Check]] = []


def take_part(part: Part, check: Check) -> None:
    """Have this `part` of each model from now on, if it passes `check`."""
    _parts[:] = [(part, check)]


def take_all() -> None:
    """Have all of each model from now on."""
    _parts.clear()


def own_part() -> Part | None:
    """Return the part of each model that this process has, or None for all of it."""
    return _parts[0][0] if _parts else None


def check_part(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelError if ranks can't share the model in `folder`."""
    for part, check in _parts:
        check(folder, config, part)


def needed_tensors(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Return those of the tensors `names` of the weight files that this process needs.

    Every rank has the tensors outside of layers. Layers behind the last one of `config` are drafts
    of further tokens, which mlx-lm leaves out.
    """
    part, count = own_part(), config.get("num_hidden_layers")
    if part is None or part.way != "pipeline" or type(count) is not int or count < part.ranks:
        return list(names)
    own = {str(number) for number in part.layers(count)}
    return [name for name in names if (found := LAYER.search(name)) is None or found[1] in own]

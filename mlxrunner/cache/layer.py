"""What every layer cache can do, whatever it stores. Only the protocol: no tensors, no policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxrunner.cache.layout import Layout
from mlxrunner.cache.saved import Saved


@dataclass(frozen=True)
class Snapshot:
    """What a layer looked like at one offset: `content` is the layer's own affair, `arrays` are to be evaluated soon."""

    content: Any
    nbytes: int
    arrays: Sequence[Any] = ()


class LayerCache(Protocol):
    """One layer's share of the entry.

    `offset` is the number of tokens stored. A forward pass is bracketed by `begin_forward()` and `end_forward(n)`; one that was
    begun and never ended (Ctrl-C, an exception) left the layer in between, and `rewind` to the offset before it mends that.
    """

    @property
    def kind(self) -> str:
        """ "full", "sliding", "recurrent", "chunked", "composite" or "unknown"."""
        ...

    @property
    def counts_forwards(self) -> bool:
        """Whether `begin_forward` and `end_forward` have to be called; False where the offset follows from the writes."""
        ...

    @property
    def needs_checkpoints(self) -> bool:
        """Whether the layer can't be rewound to everywhere by itself."""
        ...

    @property
    def offset(self) -> int:
        """Tokens stored; -1 where the parts of a composite disagree."""
        ...

    @property
    def model_cache(self) -> Any:
        """What the model's layer is handed: this object, or the mlx-lm cache that it looks after."""
        ...

    @property
    def state(self) -> Any:
        """The arrays (a tree of them), to be evaluated or saved."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes that hold stored tokens."""
        ...

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append `[1, kv_heads, n, head_dim]` and return all that the queries may attend to."""
        ...

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all, so that writes up to there allocate nothing; nothing to do where it is made already."""
        ...

    def begin_forward(self) -> None: ...

    def end_forward(self, tokens: int) -> None: ...

    def reachable(self, to: int) -> int:
        """The largest offset <= `to` that `rewind` can reach; 0 when only a fresh start is left."""
        ...

    def can_rewind(self, to: int) -> bool: ...

    def rewind(self, to: int) -> None:
        """Go back to offset `to`. RewindError, with nothing changed, where `can_rewind(to)` is False."""
        ...

    def trim(self, tokens: int) -> int:
        """Drop the last `tokens` tokens; returns how many were dropped: all of them, or 0 where that can't be done."""
        ...

    def can_shift(self, keep: int, discard: int) -> bool:
        """Whether the tokens from `keep + discard` on can move up to `keep`."""
        ...

    def shift(self, keep: int, discard: int, rotate: Callable[[Any, int], Any]) -> None:
        """Drop the tokens `keep .. keep + discard`, move what follows up, its keys through `rotate(keys, -discard)`.

        Tokens before `keep` stay as they are at every moment; the offset changes last.
        """
        ...

    def layouts(self) -> list[Layout]:
        """What is stored, for the memory plan: one, or one per part. Valid once a token was written (evaluated or not)."""
        ...

    def pretend(self, offset: int) -> None:
        """Behave as if `offset` tokens were stored, whatever the buffers hold: for the worst-case batch at start."""
        ...

    def snapshot(self) -> Snapshot:
        """A bounded copy of what can't be rewound, at the present offset."""
        ...

    def restore(self, snapshot: Snapshot, offset: int) -> None:
        """Back to what `snapshot` was taken of, at `offset`; the snapshot stays usable."""
        ...

    def export(self, snapshot: Snapshot | None = None) -> Saved:
        """What is stored now, or what `snapshot` of this layer holds, as plain data; its arrays are views, to be copied soon."""
        ...

    def adopt(self, saved: Saved, offset: int) -> None:
        """Take over what a layer like this one stored of `offset` tokens, and evaluate it. ValueError where that can't be."""
        ...

    def snapshot_of(self, saved: Saved, offset: int) -> Snapshot:
        """The snapshot that was exported. ValueError where it is none of `offset` tokens."""
        ...

    def free(self) -> None:
        """Drop everything; offset 0."""
        ...


class RewindError(RuntimeError):
    """A layer was asked to go where it can't; nothing was changed."""

    def __init__(self, kind: str, offset: int, to: int) -> None:
        super().__init__(f"a {kind} layer at offset {offset} can't be rewound to {to}")


class Rewinding:
    """`can_rewind` and `trim` in terms of `offset`, `reachable` and `rewind`; a layer whose tokens can't be moved."""

    def can_shift(self, keep: int, discard: int) -> bool:
        return False

    def shift(self, keep: int, discard: int, rotate: Callable[[Any, int], Any]) -> None:
        raise TypeError("the tokens of this layer can't be moved")

    def can_rewind(self: LayerCache, to: int) -> bool:
        return self.reachable(to) == to

    def trim(self: LayerCache, tokens: int) -> int:
        to = self.offset - tokens
        if tokens < 0 or to < 0 or not self.can_rewind(to):
            return 0
        before = self.offset
        self.rewind(to)
        return before - self.offset


def reach(caches: Sequence[LayerCache], to: int) -> tuple[int, str | None]:
    """The largest offset <= `to` that all layers can be rewound to, and the kind of the layer that prevents more."""
    limited_by = None
    while True:
        for cache in caches:
            if (reachable := cache.reachable(to)) < to:
                to, limited_by = reachable, cache.kind
                break
        else:
            return to, limited_by

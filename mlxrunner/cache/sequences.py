"""What a cache for several sequences at once can do: the interface, the batch that it is told of, and its errors. No tensors here.

All tokens of a step, of all sequences, go through the model as one row. Keys and values are `[1, kv_heads, n, head_dim]`; positions
and sequences are given per token; a sequence is a number from 0 to `max_sequences - 1`. The interface is that of the Ollama runner's
kvcache package, with two phases where something may fail: first everything is worked out, then it is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mlxrunner.errors import MlxrunnerError

if TYPE_CHECKING:
    import mlx.core as mx

END = 2**31 - 1
"""As the end of a range of positions: everything from its beginning on."""

Commit = Callable[[], None]
"""Does what was worked out. To be called at once or not at all."""


class CacheFullError(MlxrunnerError):
    """`what` needs more cells than are free, even after defragmenting; nothing was changed."""

    def __init__(
        self,
        what: str,
        needed: int,
        free: int,
        total: int,
        remedy: str = "remove tokens or sequences, or initialize the cache with a larger capacity",
    ) -> None:
        super().__init__(
            f"{what} needs {needed} free cells, but {free} of {total} are free: {remedy}"
        )
        self.needed, self.free, self.total = needed, free, total


class NotSupportedError(MlxrunnerError):
    """This cache can't do that at all; nothing was changed."""


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass: `positions` and `sequences`, one of each per token.

    `encoder_inputs`: indices (into the batch) of tokens that stand for an encoder's input, an image say. `sees_forward`: indices of
    tokens that also see each other forwards where they belong to the same sequence, as the tokens of an image do in Gemma 3.
    """

    positions: Sequence[int]
    sequences: Sequence[int]
    encoder_inputs: Sequence[int] = ()
    sees_forward: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("positions", "sequences", "encoder_inputs", "sees_forward"):
            object.__setattr__(self, name, tuple(int(number) for number in getattr(self, name)))
        n = len(self.positions)
        if n == 0 or n != len(self.sequences):
            raise ValueError(
                f"{n} positions and {len(self.sequences)} sequences: give one of each per token, for at least one token"
            )
        if not all(0 <= position < END for position in self.positions):
            raise ValueError(
                f"positions have to be in 0 .. {END - 1}, not {min(self.positions)} .. {max(self.positions)}"
            )
        for name in ("encoder_inputs", "sees_forward"):
            if not all(0 <= index < n for index in getattr(self, name)):
                raise ValueError(
                    f"{name} are indices of the {n} tokens of the batch, not {getattr(self, name)}"
                )

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class CacheConfig:
    """Wishes of the model. `mask_dtype`: an additive mask of that type (0 or -inf) instead of a boolean one.

    `history_multiple`: the history that `get` returns is padded to a multiple of so many cells; the padding is masked out.
    """

    mask_dtype: mx.Dtype | None = None
    history_multiple: int = 1

    def __post_init__(self) -> None:
        if self.history_multiple < 1:
            raise ValueError(f"history_multiple has to be at least 1, not {self.history_multiple}")


class Cache(ABC):
    """Keys and values of several sequences.

    Used in this order: `set_config` (if at all), `init`, then for each forward pass `start_forward` and, by each layer, `set_layer`,
    `put`, `get`; between passes `copy_prefix`, `can_resume`, `remove`; at the end `close`. Calls out of order are RuntimeErrors,
    arguments out of range ValueErrors. What raises leaves everything as it was.
    """

    @abstractmethod
    def init(self, dtype: mx.Dtype, max_sequences: int, capacity: int, max_batch: int) -> None:
        """Fix the size of everything, once: `capacity` tokens per sequence, `max_batch` tokens per forward pass over all sequences.

        Each layer's tensors, of `dtype`, are allocated whole at its first `put` and never grow.
        """

    @abstractmethod
    def set_config(self, config: CacheConfig) -> None:
        """Once at most, before `init`."""

    @abstractmethod
    def start_forward(self, batch: Batch, reserve: bool = False) -> None:
        """Find room for the batch and build its mask, once for all layers. CacheFullError where there is none.

        `reserve`: a pass of the worst-case shapes (the whole cache is the history) that allocates the tensors and stores nothing.
        """

    def undo_forward(self) -> None:  # noqa: B027 -- nothing to undo unless a cache says so
        """Take back a `start_forward` that succeeded and was the last call; anything else makes this do nothing."""

    @abstractmethod
    def set_layer(self, layer: int) -> None:
        """The layer that `put` and `get` are about."""

    @abstractmethod
    def put(self, keys: mx.array, values: mx.array) -> None:
        """Store the batch. ValueError where it is not as long as `start_forward` was told."""

    @abstractmethod
    def get(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Keys and values of the history and the mask `[n_tokens, history]`, True where a token may attend.

        Don't keep them: as long as a view of a buffer is alive, each write to it is a copy of the whole.
        """

    @abstractmethod
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Make the sequence `target` exactly the tokens of `source` at positions < `length`. Both share them: nothing is copied."""

    @abstractmethod
    def can_resume(self, sequence: int, position: int) -> bool:
        """Whether all that a query at `position` may see is stored, and `position` is not past the end."""

    @abstractmethod
    def remove(self, sequence: int, begin: int, end: int = END) -> None:
        """Drop the tokens at positions `begin .. end - 1`; with an end, those behind move up by `end - begin`.

        NotSupportedError where keys can't be moved, CacheFullError where there is no room to copy those that are shared.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the storage. May be called again."""

    def prepare_copy_prefix(self, source: int, target: int, length: int) -> Commit:
        """Raise what `copy_prefix` would raise, or return what remains to be done, which should not fail; here, all of it."""
        return partial(self.copy_prefix, source, target, length)

    def prepare_remove(self, sequence: int, begin: int, end: int = END) -> Commit:
        """Raise what `remove` would raise, or return what remains to be done, which should not fail; here, all of it."""
        return partial(self.remove, sequence, begin, end)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0


class Lifecycle:
    """Configured at most once, initialized once, closed at last: the order of calls that all caches keep."""

    def __init__(self) -> None:
        self.config = CacheConfig()
        self._is_configured = self._is_initialized = self._is_closed = False

    def configure(self, config: CacheConfig) -> None:
        self._check_open()
        if self._is_initialized:
            raise RuntimeError("set_config was called after init: the sizes are fixed by then")
        if self._is_configured:
            raise RuntimeError("set_config was called twice")
        self.config, self._is_configured = config, True

    def initialize(self, **sizes: int) -> None:
        self._check_open()
        if self._is_initialized:
            raise RuntimeError("init was called twice: make another cache")
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} has to be at least 1, not {size}")
        self._is_initialized = True

    def check(self) -> None:
        """RuntimeError unless the cache can be used."""
        self._check_open()
        if not self._is_initialized:
            raise RuntimeError("the cache was not initialized: call init first")

    def close(self) -> None:
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the cache was closed: make another one")

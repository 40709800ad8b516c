"""Stand-ins for a model's parts while it runs rows of many sequences.

They replace the rope and the function of each attention, the last norm, and the layers' caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxrunner.parallel.rows.apart import Starts
from mlxrunner.parallel.rows.attention import Parts
from mlxrunner.system.mlx_lm_internals import Attention

if TYPE_CHECKING:
    from mlxrunner.parallel.rows.adapt import Adapted


class PerTokenRope(nn.Module):  # type: ignore[misc,name-defined]  # mlx.nn has no annotations
    """A rope that also takes one offset per token: `x [1, heads, n, head_dim]`, `offset [n]`.

    In a stack there is one offset per sequence, which the rope takes itself.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array, offset: Any = 0, **more: Any) -> mx.array:
        if isinstance(offset, int):
            alone: mx.array = self.inner(x, offset=offset, **more)
            return alone
        if isinstance(offset, Starts):
            offset = offset.positions
        is_row = isinstance(offset, mx.array) and offset.ndim == 1 and x.shape[0] == 1
        if not is_row or offset.size != x.shape[2]:
            same: mx.array = self.inner(x, offset=offset, **more)
            return same
        rows: mx.array = self.inner(x.transpose(2, 1, 0, 3), offset=offset, **more)
        return rows.transpose(2, 1, 0, 3)


class SomeRows(nn.Module):  # type: ignore[misc,name-defined]
    """The last norm, applied to the wanted rows only."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.rows: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        normed: mx.array = self.inner(x if self.rows is None else x[:, self.rows])
        return normed


class Enough(BaseException):
    """Ends a pass after its first layers, and holds what the next layer would have stored."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.arrays = keys, values


class LayerView:
    """One layer's part of the shared cells, in place of the layer's cache."""

    def __init__(self, step: Adapted, number: int, layer: int, group: int) -> None:
        """View layer `layer`, whose rows are the buffers `number` of its group."""
        self._step, self.number, self.layer, self.group = step, number, layer, group
        self._fetched: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> Any:
        """The position of each token, or of the first one of a step of one sequence."""
        return self._step.step.offset

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        return self._step.groups[self.group].attention_mask(
            is_split=self._step.masks_parts[self.group], as_array=return_array
        )

    @property
    def parts(self) -> Parts | None:
        """The parts in which this step computes its attention; None: one product."""
        return self._step.parts[self.group]

    def buffers(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of all cells of the layer. Call it after the layer has written."""
        return self._step.groups[self.group].buffers()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.layer == self._step.stops_at:
            raise Enough(keys, values)
        cache = self._step.groups[self.group]
        self._step.layer = self.layer
        cache.set_layer(self.number)
        cache.put(keys, values)
        self._fetched = cache.fetch()
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what `update_and_fetch` has returned, for layers that share this one's rows."""
        if self._fetched is None:
            raise ValueError("nothing was stored in this pass yet")
        return self._fetched

    def forget(self) -> None:
        """Drop what was fetched: a view of a buffer makes the next write copy the buffer."""
        self._fetched = None

    def is_plain(self, keys: mx.array, values: mx.array, mask: Any) -> bool:
        """Return True if an attention is over the rows as stored, under the mask as made.

        Latent attention (MLA) reads them in another form, and adds scores to the mask.
        """
        fetched = self._fetched
        if fetched is None or keys is not fetched[0] or values is not fetched[1]:
            return False
        return not isinstance(mask, mx.array) or mask.size == self.whole_mask.size

    @property
    def whole_mask(self) -> mx.array:
        """The mask of all queries and all cells, for attention that can't be split."""
        return self._step.groups[self.group].mask


def attention_in_parts(whole: Attention) -> Attention:
    """Return mlx-lm's attention function, changed to compute in parts if a step asks for it."""

    def attend(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        parts = cache.parts if isinstance(cache, LayerView) else None
        if parts is not None and cache.is_plain(keys, values, mask):
            return parts.attend(
                whole, queries, *cache.buffers(), scale=scale, sinks=sinks, cache=cache
            )
        if parts is not None and not isinstance(mask, mx.array):
            mask = cache.whole_mask
        more = {} if sinks is None else {"sinks": sinks}
        return whole(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)

    return attend

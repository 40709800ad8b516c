"""Choose the engine of a model: prove that its answers do not depend on who else is in a step.

Each way of sharing runs a few steps of several sequences, which have to agree with the same
sequences run alone: pieces of unequal length, a stack of single tokens, one sequence alone,
attention as one product and in parts, the end of a chunk, and positions far from the first. A model
for which none agrees runs one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlxrunner.cache.layers.extents import ChunkExtent
from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.layers.recurrent import RecurrentCache
from mlxrunner.cache.pool.attention_split import WORTH_SPLITTING
from mlxrunner.cache.protocol import Batch, LayerCache
from mlxrunner.engine.backends.backend import (
    BatchingMode,
    RotationProbe,
    SequentialModel,
    Sharing,
    falls_apart,
    shares,
)
from mlxrunner.engine.backends.batched import BatchedModel
from mlxrunner.models.facts import DEPENDS

TOLERANCE = 0.02
"""Largest accepted difference of logits, as a share of the largest one.

Half-precision sums in another order differ by less. A wrong position makes a far larger difference.
"""
STEPS: list[dict[int, list[int]]] = [
    {0: [5, 6, 8], 1: [9, 10]},  # unequal pieces, from nothing
    {1: [11, 5], 0: [7, 12, 10]},  # they continue, in another order
    {0: [13], 1: [14], 2: [15, 5, 9]},  # single tokens beside a piece
    {1: [6]},  # one sequence alone
    {0: [8], 2: [7]},
]
"""The tokens of each sequence in each step of the proof."""
SEES = "a model that sees pictures has one request in a step"
SEQUENCES, TOKENS = 3, 16
"""Sequences of the proof, and more tokens than any of them or any step has."""


def engine_for(
    model: Any,
    options: CacheOptions,
    *,
    max_sequences: int,
    capacity: int,
    max_batch: int,
    depends_on_chunks: bool = False,
) -> BatchedModel | SequentialModel:
    """Return the engine that runs as much of `model` as possible for several sequences at once.

    `options`: those of the layer caches; their context is the most tokens of one sequence.
    `capacity`: cells for each sequence, on average. `max_batch`: tokens per step.
    `depends_on_chunks`: the fact of that name about the model. A model with a method `own_engine`
    brings its engine.
    """
    context = options.context or capacity
    if hasattr(model, "own_engine"):
        engine: SequentialModel = model.own_engine(options)
        return engine
    if hasattr(model, "look"):
        return SequentialModel(model, options, SEES)
    if depends_on_chunks:
        return SequentialModel(model, options, DEPENDS)
    proof, why = Proof(model, options, far=(context - 1, context // 2)), None
    for adapted in _candidates(model, options):
        try:
            difference = proof.difference(adapted)
            if difference is None:
                adapted.allocate(max_sequences, capacity, max_batch)
                return adapted
            why = why or difference  # the first says most: it shares most
            adapted.close()
        except BaseException:
            adapted.close()
            raise
    return SequentialModel(model, options, why or "")


def _candidates(model: Any, options: CacheOptions) -> Iterator[BatchedModel]:
    """Yield the model adapted in each batching mode that differs from those before."""
    tried = set()
    for sharing in Sharing:
        for mode in (
            BatchingMode(sharing),
            BatchingMode(sharing, splits=False),
            BatchingMode(sharing, adds_starts=True),
            BatchingMode(sharing, cuts_head=False),
            BatchingMode(sharing, stages=False),
        ):
            adapted = BatchedModel(model, options, mode)
            in_stages = mode.stages and adapted.stacks
            what = (*adapted.ways, adapted.can_split, mode.adds_starts, mode.cuts_head, in_stages)
            if what not in tried:
                tried.add(what)
                yield adapted


class Proof:
    """The logits of some sequences run alone, to compare with."""

    def __init__(self, model: Any, options: CacheOptions, far: tuple[int, ...]) -> None:
        """Run the sequences of STEPS, and prepare for single tokens at the positions `far`."""
        self._model, self._far = model, far
        self._likes = make_layer_caches(model, options)
        self._expected = mx.concatenate(list(_run(SequentialModel(model, options))))
        mx.eval(self._expected)

    def difference(self, adapted: BatchedModel) -> str | None:
        """Wrap the model of `adapted`, and return how it differs from the sequences run alone.

        Return None if it agrees.
        """
        try:
            far = self._far_away(adapted.mode.sharing)
            adapted.wrap()
            adapted.allocate(SEQUENCES, TOKENS, TOKENS)
            difference = _difference(mx.concatenate(list(_run(adapted))), self._expected)
            if difference is not None or far is None:
                return difference
            adapted.allocate(SEQUENCES, TOKENS, TOKENS)
            batch = Batch(self._far, range(len(self._far)))
            return _difference(adapted.forward(mx.array([5, 6]), batch, [0, 1]), far)
        except Exception as error:
            at = "" if adapted.layer < 0 else f"layer {adapted.layer}: "
            text = " ".join(str(error).split())[:200]
            return (
                f"{at}this model can't run several sequences in one row: "
                f"{type(error).__name__}: {text}"
            )
        finally:
            adapted.worth_splitting = WORTH_SPLITTING

    def _far_away(self, sharing: Sharing) -> mx.array | None:
        """Return the logits of a token at each far position, if nothing is stored before it.

        Return None if layers that are apart count their own tokens: they can't be far away.
        """
        if not all(_can_be_far(like, sharing) for like in self._likes):
            return None
        logits = [
            self._model(mx.array([[token]]), cache=[_at(like, sharing, position) for like in fresh])
            for token, position, fresh in zip((5, 6), self._far, self._fresh(), strict=True)
        ]
        return mx.concatenate(logits)[:, -1]

    def _fresh(self) -> Iterator[list[LayerCache]]:
        for _ in self._far:
            yield make_layer_caches(self._model, CacheOptions())


def _can_be_far(like: LayerCache, sharing: Sharing) -> bool:
    if falls_apart(like, sharing):
        return all(_can_be_far(part, sharing) for part in like.parts)
    return shares(like, sharing) or isinstance(like, RecurrentCache)


def _at(like: LayerCache, sharing: Sharing, position: int) -> Any:
    """Return a cache for the model with nothing before `position`."""
    if falls_apart(like, sharing):
        return CacheList(*(_at(part, sharing, position) for part in like.parts))
    return RotationProbe(position) if shares(like, sharing) else like.model_cache


def _run(engine: Any) -> Iterator[mx.array]:
    """Yield the logits `[1, vocab]` after the last token of each sequence in each step."""
    done = dict.fromkeys(range(SEQUENCES), 0)
    for sequence in done:
        _begin_near_the_end_of_a_chunk(engine.caches(sequence))
    for number, step in enumerate(STEPS):
        engine.worth_splitting = 0 if number else 1 << 60
        together = [step] if engine.most_sequences != 1 else [{s: step[s]} for s in step]
        for part in together:
            yield engine.forward(*_row(part, done))
            for sequence, tokens in part.items():
                done[sequence] += len(tokens)


def _row(step: dict[int, list[int]], done: dict[int, int]) -> tuple[mx.array, Batch, list[int]]:
    tokens = [token for own in step.values() for token in own]
    positions = [done[s] + place for s, own in step.items() for place in range(len(own))]
    sequences = [s for s, own in step.items() for _ in own]
    ends = [sum(len(own) for own in list(step.values())[: n + 1]) - 1 for n in range(len(step))]
    return mx.array(tokens), Batch(positions, sequences), ends


def _begin_near_the_end_of_a_chunk(caches: Sequence[LayerCache]) -> None:
    """Let layers with attention within chunks begin two tokens before a chunk ends."""
    for cache in caches:
        if isinstance(cache.extent, ChunkExtent):
            inner: Any = cache.model_cache
            inner.offset = inner.start_position = cache.extent.window - 2


def _difference(found: mx.array, expected: mx.array) -> str | None:
    gap, scale = _largest(found - expected), _largest(expected)
    if gap <= TOLERANCE * max(scale, 1e-6):
        return None
    return (
        "this model answers otherwise with several sequences in one row "
        f"(logits differ by {gap:.2g} of {scale:.2g})"
    )


def _largest(array: mx.array) -> float:
    return float(mx.abs(array).max().item())  # type: ignore[arg-type]  # real

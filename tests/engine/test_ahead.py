"""The pass that stores the tokens of a prompt whose logits nobody reads."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engine import Engine, backend, scheduler
from support.histories import tiny_parts

from mlxrunner.cache.protocol import Batch
from mlxrunner.engine.backends import batched
from mlxrunner.errors import CacheFullError

KINDS = ["llama", "gemma3_text", "lfm2", "qwen3_next", "mamba2", "deepseek_v3", "jamba"]
PROMPT = np.random.default_rng(0).integers(10, 200, 300).tolist()
SHORT = PROMPT[100:104]


def answers(name: str) -> tuple[list[list[tuple[int | None, float | None]]], list[int]]:
    """Return what a runner answers, and the tokens of each forward pass of the model."""
    passes: list[int] = []
    with Engine(*tiny_parts(name), max_sequences=3, context=400, prefill_step=250) as runner:
        adapted: Any = backend(runner)
        run = adapted._run

        def counted(tokens: mx.array, *more: Any) -> mx.array:
            passes.append(tokens.size)
            result: mx.array = run(tokens, *more)
            return result

        adapted._run = counted
        options: dict[str, Any] = {"max_tokens": 12, "stop_tokens": [], "logprobs": 0}
        handles = [runner.submit(SHORT, **options), runner.submit(PROMPT, **options)]
        said = [[(chunk.token, chunk.logprob) for chunk in handle] for handle in handles]
        again = runner.submit(PROMPT[:200] + SHORT, **options)
        said.append([(chunk.token, chunk.logprob) for chunk in again])
    return said, passes


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("name", KINDS)
def test_tokens_ahead_change_no_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt beside an answer, from the beginning and after a prefix, on all kinds of layers."""
    said, passes = answers(name)
    monkeypatch.setattr(batched, "AHEAD_TOKENS", 1000)
    whole, at_once = answers(name)
    assert len(passes) > len(at_once)
    assert sum(passes) == sum(at_once)
    for ours, theirs in zip(said, whole, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        logprobs = np.array(
            [[a, b] for (_, a), (_, b) in zip(ours, theirs, strict=True) if a], float
        )
        np.testing.assert_allclose(logprobs[:, 0], logprobs[:, 1], atol=1e-3)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_no_buffer_is_copied(name: str) -> None:
    """The cells of a layer take more memory than all else that a step computes."""
    with Engine(*tiny_parts(name), max_sequences=8, context=20_000, prefill_step=250) as runner:
        adapted: Any = backend(runner)
        list(runner.submit(SHORT, max_tokens=2, stop_tokens=[]))
        mx.eval(adapted.state())
        layer = max(array.nbytes for group in adapted.groups for array in group.state)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for end in (90, 200, 250):
            list(runner.submit(PROMPT[:end], max_tokens=1, stop_tokens=[]))
        assert mx.get_peak_memory() - before < layer


def test_a_step_that_lacks_cells_stores_nothing() -> None:
    """Though its first pass alone had room."""
    with Engine(*tiny_parts("llama"), max_sequences=2, context=100, prefill_step=64) as runner:
        adapted: Any = backend(runner)
        cells = adapted.groups[0].num_cells
        batch = Batch([*range(cells), 0], [0] * cells + [1])
        with pytest.raises(CacheFullError):
            adapted.forward(mx.zeros(cells + 1, mx.int32), batch, [cells])
        assert adapted.groups[0].num_free == cells
        fits = Batch([*range(60), 0], [0] * 60 + [1])
        logits = adapted.forward(mx.zeros(61, mx.int32), fits, [59, 60])
        mx.eval(logits)
        assert adapted.groups[0].num_free == cells - 61


def test_a_step_without_logits_tells_nothing_of_their_width() -> None:
    """Guesses beside it need that of the logits before."""
    with Engine(*tiny_parts("llama"), max_sequences=2, context=400, prefill_step=64) as runner:
        inner = scheduler(runner)
        assert len(list(runner.submit(SHORT, max_tokens=2, stop_tokens=[]))) == 2
        runner.submit(PROMPT, max_tokens=1)
        width = inner._passes.width
        runner.step()
        assert inner._pending.sampled == []
        assert inner._passes.width == width == 300

"""A model that runs one request at a time evaluates prompts as `Runner` does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from support.architectures import build, settings_of
from support.engine import Engine

from mlxrunner import ParallelRunner, Runner
from mlxrunner.models.facts import ModelFacts, facts_of
from mlxrunner.testing import VOCAB as ORACLES
from mlxrunner.testing import ByteTokenizer, OracleModel, oracle_runner

VOCAB, LONG = 20_000, 300


def parts(name: str, vocab: int = 300) -> tuple[Any, ByteTokenizer, Any]:
    model = build(name, vocab_size=vocab)
    return model, ByteTokenizer(), facts_of(model, settings_of(name) | {"vocab_size": vocab})


def test_no_logits_are_computed_but_those_of_the_last_token() -> None:
    """Logits of all tokens of a piece would take more memory than there is."""
    with Engine(*parts("gpt2", VOCAB), max_sequences=2, context=512) as runner:
        assert runner.settings["ways"] == ["one at a time"]
        runner.complete([9] * LONG, max_tokens=2)  # the first one allocates
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        result = runner.complete(list(range(LONG)), max_tokens=2, stop_tokens=[])
        assert len(result.tokens) == 2
        assert mx.get_peak_memory() - before < LONG * VOCAB * 4 / 2


@pytest.mark.parametrize("length", [5, 17, 64, 65, 100])
def test_a_model_that_depends_on_chunks_gets_those_of_runner(length: int) -> None:
    """Else it would answer otherwise than alone."""
    model, tokenizer, facts = parts("llama")
    plain = type(model)
    noise = mx.random.normal((300,), key=mx.random.key(0))

    class Cut(plain):  # type: ignore[misc,valid-type]
        """Its logits depend on the number of tokens of a pass."""

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            logits: mx.array = super().__call__(inputs, cache=cache)
            return logits + mx.sin(inputs.shape[1] * noise)

    model.__class__ = Cut
    given = model, tokenizer, replace(facts, depends_on_chunks=True)
    options: dict[str, Any] = {"max_tokens": 4, "stop_tokens": [], "logprobs": 0}
    prompt = [(7 * place) % 290 for place in range(length)]
    settings = {"context": 200, "prefill_step": 64}
    alone = Runner(*given, **settings).complete(prompt, **options)
    with Engine(*given, max_sequences=2, **settings) as runner:
        found = runner.complete(prompt, **options)
    assert found.tokens == alone.tokens
    assert found.logprobs is not None
    assert alone.logprobs is not None
    pairs = zip(found.logprobs, alone.logprobs, strict=True)
    assert max(abs(ours[0] - its[0]) for ours, its in pairs) < 1e-4


@pytest.mark.parametrize("budget", [0, 10**6], ids=["no-checkpoints", "checkpoints"])
@pytest.mark.parametrize("kinds", [["recurrent", "full"], ["unknown", "composite"]], ids="+".join)
def test_each_turn_takes_the_passes_of_runner(kinds: list[str], budget: int) -> None:
    """A short turn after a long conversation is one pass, as in a short conversation."""
    facts = ModelFacts("oracle", 4096, True, {kind: kinds.count(kind) for kind in kinds}, ORACLES)
    given = {"context": 512, "checkpoint_budget": budget, "prefill_step": 64}
    theirs, ours = OracleModel(kinds), OracleModel(kinds)
    with (
        oracle_runner(model=theirs, **given) as one,
        ParallelRunner(
            ours, ByteTokenizer(), facts, max_sequences=1, max_step_ms=0, **given
        ) as many,
    ):
        assert many.why_alone is not None
        for cold in (5, 17, 100, 200):
            talk = [(7 * place) % 200 + 5 for place in range(cold)]
            for turn in (0, 1, 8, 16, 17, 40, 70):
                talk = [*talk, *[9] * turn]
                passes = []
                for runner, model in ((one, theirs), (many, ours)):
                    model.forwards.clear()
                    runner.complete(talk, max_tokens=1)
                    passes.append([*model.forwards])
                assert passes[0] == passes[1], (cold, turn)
                assert budget or turn > 16 or len(passes[1]) == 1 or turn == 0

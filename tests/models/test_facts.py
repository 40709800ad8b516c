"""Facts without weights equal the real kinds of layers, bytes per token and of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.models import tiny_config, tiny_model, write_model

from mlxrunner import PromptError, Runner
from mlxrunner.models.facts import (
    DEFAULT_CONTEXT,
    CacheCost,
    build,
    cache_cost,
    facts_of,
    weight_bytes,
)
from mlxrunner.models.load import describe
from mlxrunner.testing import ByteTokenizer

FLOAT = 4
HEAD = 2 * 16 * FLOAT
"""Bytes of one head's key and value."""
STEP, SLACK = 256, 512
"""Tokens by which a window may grow before it is cut, and that it keeps to be rewound."""
CASES = {
    "llama": ({"full": 2}, CacheCost(2 * 2 * HEAD, 0)),
    "mistral": ({"full": 2}, CacheCost(2 * 2 * 2 * 24 * FLOAT, 0)),
    # One layer of three sees everything; the others keep 16 tokens.
    "gemma3_text": (
        {"full": 1, "sliding": 2},
        CacheCost(2 * HEAD, 2 * (16 + SLACK + STEP) * 2 * HEAD),
    ),
    # One layer of attention; the others keep two columns of 64, and those before the last forward
    # pass.
    "lfm2": ({"full": 1, "recurrent": 2}, CacheCost(2 * HEAD, 2 * 2 * 2 * 64 * FLOAT)),
    # Multi-head latent attention: the latent vector and the rotated part of the key, for all heads
    # together.
    "deepseek_v3": ({"full": 2}, CacheCost(2 * (16 + 8) * FLOAT, 0)),
}
cases = pytest.mark.parametrize(
    ("kind", "layers", "cost"), [(kind, *case) for kind, case in CASES.items()], ids=CASES.keys()
)


@cases
def test_layers_and_the_cost_of_the_cache_are_known_without_weights(
    tmp_path: Path, kind: str, layers: dict[str, int], cost: CacheCost
) -> None:
    """From a config.json alone. Counted by hand; a window may keep more tokens than it shows."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(kind)))
    model, config = build(tmp_path)
    facts = facts_of(model, config)
    assert (facts.architecture, facts.layers) == (kind, layers)
    assert (facts.context, facts.context_is_known, facts.vocab) == (512, True, 288)
    assert cache_cost(tiny_model(tiny_config(kind))) == cost


@pytest.mark.usefixtures("on_cpu")
@cases
def test_a_real_entry_holds_what_was_foretold(
    tmp_path: Path, kind: str, layers: dict[str, int], cost: CacheCost
) -> None:
    """A full context takes the foretold bytes, allocated at the start; states are kept twice."""
    write_model(tmp_path, kind, torch_dtype="bfloat16", max_position_embeddings=1024)
    runner = Runner.load(str(tmp_path))
    foretold = describe(str(tmp_path)).cache
    list(runner.generate([5] * 300, max_tokens=3, stop_tokens=[]))
    states = sum(cache.nbytes for cache in runner.entry.caches if cache.kind == "recurrent")
    whole = sum(cache.nbytes for cache in runner.entry.caches) + states
    assert whole == foretold.fixed + foretold.per_token * 1024


@pytest.mark.parametrize("window", [8, 256, 257, 1000])
def test_a_window_costs_its_size_once(window: int) -> None:
    """It costs nothing per token, however large it is."""
    cost = cache_cost(tiny_model(tiny_config("gemma3_text", sliding_window=window)))
    assert cost.per_token == 2 * HEAD
    assert cost.fixed >= 2 * window * 2 * HEAD


def test_a_model_that_stays_quantized_is_reckoned_in_its_own_type(tmp_path: Path) -> None:
    """Its cache has the type of its scales."""
    config = tiny_config(torch_dtype="float16", quantization={"bits": 4, "group_size": 32})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    assert describe(str(tmp_path)).cache == CacheCost(2 * 2 * HEAD // 2, 0)


GUESS = (DEFAULT_CONTEXT, False)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_position_embeddings": 100}, (100, True)),
        ({"max_position_embeddings": None}, GUESS),
        ({"max_position_embeddings": None, "n_positions": 77}, (77, True)),
        (
            {"max_position_embeddings": None, "text_config": {"max_position_embeddings": 55}},
            (55, True),
        ),
        ({"max_position_embeddings": 10**30}, GUESS),
        ({"max_position_embeddings": 0, "max_sequence_length": 9}, (9, True)),
        ({"max_position_embeddings": "long"}, GUESS),
    ],
    ids=["named", "nowhere", "another name", "text_config", "endless", "zero", "text"],
)
def test_the_context_is_read_or_said_to_be_a_guess(
    settings: dict[str, Any], expected: tuple[int, bool]
) -> None:
    """Under the names that are in use."""
    facts = facts_of(tiny_model(tiny_config()), tiny_config(**settings))
    assert (facts.context, facts.context_is_known) == expected


@pytest.mark.parametrize(
    "settings", [{"vocab_size": None}, {"vocab_size": None, "text_config": {"vocab_size": 288}}]
)
def test_the_vocabulary_is_found_where_the_top_of_the_configuration_has_none(
    settings: dict[str, Any],
) -> None:
    """In text_config, or as the rows of the embedding."""
    assert facts_of(tiny_model(tiny_config()), tiny_config(**settings)).vocab == 288


def test_a_vocabulary_is_no_larger_than_the_table_of_tokens() -> None:
    """A repetition penalty on a token beyond it wrote outside of the logits."""
    model = tiny_model(tiny_config())
    assert facts_of(model, tiny_config(vocab_size=300)).vocab == 288
    runner = Runner(model, ByteTokenizer(), facts_of(model, tiny_config(vocab_size=300)))
    with pytest.raises(PromptError, match="token id 288 is beyond the model's vocabulary of 288"):
        runner.complete([7, 288], max_tokens=1, repetition_penalty=1.3)


def test_a_description_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It evaluates nothing, and says the same as the loaded model."""
    write_model(tmp_path)
    monkeypatch.setattr(mx, "load", None)
    monkeypatch.setattr(mx, "eval", None)
    described = describe(str(tmp_path)).as_dict()
    monkeypatch.undo()
    runner = Runner.load(str(tmp_path))
    parameters: Any = tree_flatten(runner.model.parameters())
    assert described | {"depends_on_chunks": False} == vars(runner.facts) | {
        "weight_bytes": weight_bytes(tmp_path),
        "loaded_bytes": sum(array.nbytes for _, array in parameters),
        "cache": {"per_token": 512, "fixed": 0},
    }

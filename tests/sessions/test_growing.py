"""A session keeps states that grow with the tokens, and refuses those of others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.models import tiny_config, tiny_model
from support.saving import stored

from mlxrunner import Runner
from mlxrunner.cache.disk.pieces import StoredEntry
from mlxrunner.cache.saved import ArrayShape, Saved, combined, mismatch
from mlxrunner.errors import SessionError
from mlxrunner.models.facts import facts_of
from mlxrunner.sessions.caches import SessionEntry
from mlxrunner.sessions.store import SessionStore
from mlxrunner.testing import ByteTokenizer

LATENT = {"q_lora_rank": 24, "qk_rope_head_dim": 8}
GROWING: dict[str, dict[str, Any]] = {
    "longcat_flash_ngram": LATENT
    | {
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 2,
        "attention_bias": False,
    },
    "deepseek_v41": LATENT
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "compress_ratios": [4, 1, 4, 1],
        "kv_source_layer_ids": [0, 1, 2, 3],
        "index_source_layer_ids": [0, 2],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "candidate_block_size": 2,
        "candidate_topk_blocks": 16,
    },
}
"""Shapes of states that grow.

An n-gram's last tokens, as many as there are; groups of four tokens, the window before them, and
the group that is still open.
"""


@cache
def parts(name: str) -> tuple[Any, ...]:
    config = tiny_config(name, rope_theta=1e4, **GROWING[name])
    model = tiny_model(config)
    return model, ByteTokenizer(), facts_of(model, config)


def runner_of(name: str, **options: int) -> Runner:
    return Runner(*parts(name), context=300, **options)


def answer(runner: Runner, prompt: list[int]) -> list[tuple[int | None, float]]:
    chunks = runner.generate(prompt, max_tokens=4, stop_tokens=[], logprobs=0)
    return [(chunk.token, pytest.approx(chunk.logprob, abs=1e-4)) for chunk in chunks]


def saved(store: SessionStore, runner: Runner) -> SessionEntry | StoredEntry:
    return stored(store, runner.entry)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("options", [{}, {"checkpoint_interval": 9}], ids=["usual", "checkpoints"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 13, 64, 129])
@pytest.mark.parametrize("name", GROWING)
def test_a_session_goes_on_where_it_was(
    name: str, length: int, options: dict[str, int], store: SessionStore
) -> None:
    """Nothing is damaged, nothing evaluated again, and the answer is a cold run's."""
    runner, prompt = runner_of(name, **options), [i * 37 % 250 for i in range(length)]
    said = [*prompt, *(token or 0 for token, _ in answer(runner, prompt))]
    entry = saved(store, runner)
    entry.check(runner.cache.outline())
    restored, following = runner_of(name, **options), [*said, 7, 8]
    restored.cache.adopt(entry)
    assert answer(restored, following) == answer(runner_of(name), following)
    assert restored.usage is not None
    assert restored.usage.cached_tokens == len(said) - 1


@pytest.mark.parametrize("name", GROWING)
def test_another_models_states_are_refused(name: str, store: SessionStore) -> None:
    """By what does not grow: types, widths and the number of axes."""
    runner = runner_of(name)
    answer(runner, list(range(40)))
    entry = saved(store, runner)
    outline = runner.cache.outline()
    for index, layer in enumerate(outline):
        for part, like in [(None, layer), *enumerate(layer.parts)]:
            for key, shape in like.arrays.items():
                for wrong in (
                    ArrayShape("int8", shape.shape),
                    ArrayShape(shape.dtype, (*shape.shape, 1)),
                    ArrayShape(shape.dtype, tuple(size and size + 1 for size in shape.shape)),
                ):
                    if wrong.shape == shape.shape and wrong.dtype == shape.dtype:
                        continue
                    other = replace(like, arrays={**like.arrays, key: wrong})
                    if part is not None:
                        other = replace(
                            layer,
                            parts=[
                                other if n == part else one for n, one in enumerate(layer.parts)
                            ],
                        )
                    with pytest.raises(SessionError, match="damaged"):
                        entry.check([*outline[:index], other, *outline[index + 1 :]])


def test_an_outline_is_what_stays_the_same() -> None:
    """An outline leaves changing axes open, and lets later arrays be absent, nothing else."""
    after_one = Saved("X", {"a": ArrayShape("float32", (1, 1, 8))}, {"b": None, "n": 3})
    after_nine = Saved(
        "X", {"a": ArrayShape("float32", (1, 9, 8)), "b": ArrayShape("float32", (1, 2))}, {"n": 3}
    )
    like = combined([after_one, after_nine])
    assert like == Saved(
        "X",
        {
            "a": ArrayShape("float32", (1, None, 8)),
            "b": ArrayShape("float32", (1, 2), may_lack=True),
        },
        {"n": 3},
        [],
    )
    for fine in (
        after_one,
        after_nine,
        Saved("X", {"a": ArrayShape("float32", (1, 5, 8))}, {"n": 3}),
    ):
        assert mismatch(fine, like, 9) is None
    for wrong in (
        Saved("X", {"b": ArrayShape("float32", (1, 2))}, {"n": 3}),
        Saved("X", {"a": ArrayShape("float32", (1, 9, 7))}, {"n": 3}),
        Saved(
            "X",
            {"a": ArrayShape("float32", (1, 9, 8)), "b": ArrayShape("float32", (1, 3))},
            {"n": 3},
        ),
        Saved("X", {"a": ArrayShape("float32", (1, 9, 8))}, {"b": 1, "n": 3}),
        Saved("X", {"a": ArrayShape("float32", (1, 9, 8))}, {}),
        Saved(
            "X", {"a": ArrayShape("float32", (1, 9, 8)), "c": ArrayShape("float32", (1,))}, {"n": 3}
        ),
    ):
        assert mismatch(wrong, like, 9) is not None

"""The least cost of a pass is counted on real architectures."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from support.models import tiny_config, tiny_model

from mlxrunner.bench.bench import (
    Ceilings,
    PassCost,
    compute_dtype,
    cost_of,
    measure_ceilings,
    num_parameters,
)

TABLE = 288 * 64


def test_an_untied_table_of_embeddings_is_not_read() -> None:
    """The head is used for the last token only."""
    config = tiny_config("llama")
    model = tiny_model(config)
    total = sum(array.size for _, array in tree_flatten(model.parameters()))
    cost = cost_of(model, config)
    assert num_parameters(model) == total
    assert cost == PassCost(total - 2 * TABLE, TABLE, 4 * (total - TABLE))


def test_a_tied_table_is_the_head() -> None:
    """It is read whole for the logits."""
    config = tiny_config("llama", tie_word_embeddings=True)
    model = tiny_model(config)
    total = sum(array.size for _, array in tree_flatten(model.parameters()))
    assert cost_of(model, config) == PassCost(total - TABLE, TABLE, 4 * total)


def test_quantized_weights_count_by_their_stored_bytes_and_whole_numbers() -> None:
    """Packed four-bit weights are as many numbers as before, in fewer bytes."""
    config = tiny_config("llama")
    model = tiny_model(config)
    before = cost_of(model, config)
    nn.quantize(model, group_size=32, bits=4)
    after = cost_of(model, config)
    assert before is not None
    assert after is not None
    assert (after.body, after.head) == (before.body, before.head)
    assert after.nbytes < before.nbytes / 4
    assert compute_dtype(model) == mx.float32


def test_experts_depend_on_the_tokens() -> None:
    """No share is given."""
    config = tiny_config("gpt_oss")
    assert cost_of(tiny_model(config), config) is None


@pytest.mark.parametrize(
    ("tokens", "stored", "expected"),
    [(1, 0, (1.0, "bandwidth")), (1, 50, (1.5, "bandwidth")), (100, 0, (20.2, "arithmetic"))],
)
def test_a_pass_is_bound_by_reading_or_by_computing(
    tokens: int, stored: int, expected: tuple[float, str]
) -> None:
    """One token reads all weights and caches; many compute twice per weight and token."""
    ceilings = Ceilings("float32", bandwidth=100, arithmetic=10)
    assert PassCost(body=1, head=1, nbytes=100).least_s(tokens, stored, ceilings) == pytest.approx(
        (expected[0], expected[1])
    )


def test_the_machine_has_ceilings() -> None:
    """Measured in the type in which the model computes."""
    ceilings = measure_ceilings(tiny_model(tiny_config("llama")), quick=True)
    assert ceilings.dtype == "float32"
    assert ceilings.bandwidth > 1e6
    assert ceilings.arithmetic > 1e6

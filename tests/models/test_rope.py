"""A model gets its rotary positions whichever version of transformers wrote its config.json."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from support.architectures import CONFIGS, settings_of
from support.models import LLAMA3, error_line, tiny_config, write_model

from mlxrunner import ModelError
from mlxrunner.models.facts import LOCAL_THETA, build, ropes_of
from mlxrunner.models.load import load_model
from mlxrunner.system.mlx_lm_internals import model_classes

FILE = Path("config.json")
TOKENS = mx.array([[(7 * place + 3) % 250 for place in range(24)]])
THETA = 5000.0
SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
NEED_MORE = {
    "deepseek_v2": {"plain"},
    "hunyuan": {*SCALINGS},
    "hunyuan_v1_dense": {"linear", "llama3", "yarn"},
    "internlm2": {"llama3", "yarn"},
    "internlm3": {"llama3", "yarn"},
    "minicpm3": {"plain"},
    "nemotron": {"llama3", "yarn"},
    "phi3": {"linear", "llama3", "yarn"},
    "phimoe": {"linear", "llama3", "yarn"},
    "qwen2_moe": {"llama3", "yarn"},
}
"""The scalings that mlx-lm's architectures refuse themselves, in every spelling."""
OWN_ONLY = ("gemma4_text",)
"""Architectures that have no `rope_theta` beside `rope_parameters`."""


def spellings(architecture: str, scaling: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the same model's settings as four writers would spell them."""
    whole = copy.deepcopy(settings_of(architecture))
    base = whole.get("text_config", whole)
    part = base.pop("partial_rotary_factor", None)
    if "llama_4_scaling_beta" in (base.get("rope_parameters") or {}):
        scaling = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64, **scaling}
    for name in ("rope_theta", "rope_scaling", "rope_parameters", "rotary_emb_base", "rotary_pct"):
        base.pop(name, None)
    if architecture in ("gemma3_text", "gemma3n", "plamo3"):
        base |= dict.fromkeys(LOCAL_THETA, THETA)
    partial = {} if part is None else {"partial_rotary_factor": part}
    new = {**scaling, "rope_theta": THETA, **partial}
    old = {**scaling, "type": scaling["rope_type"]}
    is_plain = scaling == SCALINGS["plain"]
    kinds = {"full_attention", "sliding_attention", *base.get("layer_types", ())}
    found = {}
    for name, settings in {
        "old": {"rope_theta": THETA, "rope_scaling": None if is_plain else old, **partial},
        "new": {"rope_parameters": new},
        "split": {"rope_theta": THETA, "rope_parameters": dict(scaling), **partial},
        "by layer": {"rope_parameters": {kind: dict(new) for kind in kinds}},
    }.items():
        one = copy.deepcopy(whole)
        one.get("text_config", one).update(settings)
        found[name] = one
    return found


def logits(config: dict[str, Any]) -> Any:
    """Return the logits of a model with random weights, or the error of building it."""
    ropes = ropes_of(FILE, config)
    settings = config | ropes.settings
    mx.random.seed(1)  # some parameters are random from the start
    try:
        model_class, arguments_class = model_classes(settings)
        model = model_class(arguments_class.from_dict(settings))
        ropes.check(model_class)
    except Exception as error:
        return type(error)
    parameters: Any = tree_flatten(model.parameters())
    weights = [
        (name, mx.random.normal(array.shape) * 0.15 if array.ndim > 1 else array)
        for name, array in parameters
    ]
    model.update(tree_unflatten(weights))
    model.eval()
    return np.array(model(TOKENS).astype(mx.float32))


@pytest.mark.exhaustive(12)
@pytest.mark.parametrize("architecture", [one for one in CONFIGS if one not in OWN_ONLY])
def test_all_spellings_of_a_rope_give_equal_logits(architecture: str) -> None:
    """The same logits, or the same error in every spelling; never a scaling that is left out."""
    chance = random.Random(architecture)
    for kind, scaling in SCALINGS.items():
        written = spellings(architecture, scaling)
        drawn = ["old", *chance.sample(["new", "split", "by layer"], 2)]
        found = {name: logits(written[name]) for name in drawn}
        first = found["old"]
        if isinstance(first, type):
            assert {*found.values()} == {first}, (kind, found)
            assert first is ModelError or kind in NEED_MORE.get(architecture, ()), (kind, first)
            continue
        for name, other in found.items():
            assert isinstance(other, np.ndarray), (kind, name, other)
            np.testing.assert_allclose(other, first, atol=1e-4, err_msg=f"{kind} {name}")


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_scaling_changes_the_logits_of_a_model_that_reads_it(kind: str) -> None:
    """Equal spellings prove nothing if none of them has an effect."""
    for architecture in ("llama", "qwen3", "exaone4", "qwen3_5", "deepseek_v3"):
        found = [logits(spellings(architecture, SCALINGS[one])["split"]) for one in ("plain", kind)]
        assert not np.allclose(*found, atol=1e-3), architecture


def test_layers_with_a_window_keep_their_own_base() -> None:
    """Gemma 3 as transformers 5 writes it, and as transformers 4 did."""
    common = tiny_config("gemma3_text", layer_types=["sliding_attention"] * 2 + ["full_attention"])
    common.pop("rope_theta", None)
    old = common | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 777.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = common | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
        }
    }
    np.testing.assert_array_equal(logits(old), logits(new))
    assert not np.allclose(logits(old), logits(old | {"rope_local_base_freq": 1e4}), atol=1e-3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}},
            "rope_theta is both 5.0 and 7.0",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "factor of rope_scaling is both 4.0 and 2.0",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "rope_type is both 'yarn' and 'linear'",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor is both 0.5 and 0.25",
        ),
    ],
    ids=["base", "factor", "kind", "part"],
)
def test_a_rope_that_is_described_twice_is_an_error(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    """Readers would choose differently, so `show`, `plan` and loading say so."""
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**config)))
    for read in (build, lambda folder: load_model(str(folder))):
        assert f"{tmp_path / 'config.json'}: {message}" in error_line(ModelError, read, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        ("mixtral", {"rope_scaling": SCALINGS["yarn"]}, "'yarn' scales the rotary positions"),
        (
            "qwen3",
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                },
                "rope_theta": None,
            },
            "the rope_theta 10000.0, and mlx-lm's qwen3 has one for all layers",
        ),
    ],
    ids=["scaling", "base of a window"],
)
def test_a_rope_that_an_architecture_does_not_read_is_an_error(
    tmp_path: Path, architecture: str, config: dict[str, Any], message: str
) -> None:
    """mlx-lm would run without it, and answer wrongly."""
    settings = settings_of(architecture) | config
    settings = {name: value for name, value in settings.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert message in error_line(ModelError, build, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default", "rope_type": "default"}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"rope_scaling": {"rope_type": "linear", "factor": 1.0}},
    ],
    ids=["none", "null", "default", "mrope", "factor 1"],
)
def test_a_rope_that_is_not_scaled_needs_no_reader(config: dict[str, Any]) -> None:
    """Published configurations have these for architectures that know no scaling."""
    assert isinstance(logits(settings_of("gemma2") | config), np.ndarray)

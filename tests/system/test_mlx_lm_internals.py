"""The contract with mlx-lm's private parts: what is relied on is so in the installed version."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache
from mlx_lm.models.pipeline import PipelineMixin
from support.models import tiny_config, tiny_model
from support.shares import group_of

from mlxrunner.models.files import ModelShard
from mlxrunner.system import mlx_lm_internals as internals
from mlxrunner.testing import UnknownCache

ROOT = Path(internals.__file__).parents[2]
ARCHITECTURES = ["llama", "qwen3", "gemma3_text", "gpt_oss"]
"""Some that parallel requests run on."""


def test_the_installed_version_is_one_of_those_tried() -> None:
    """Another one may have changed what is private: then this says what to do."""
    installed = version("mlx-lm")
    assert installed in internals.VERSIONS, (
        f"mlx-lm {installed} is installed, and mlxrunner/system/mlx_lm_internals.py was tried with "
        f"{', '.join(internals.VERSIONS)}: run the other tests of this file and "
        "tests/test_architectures.py, mend what they find, and add the version to VERSIONS"
    )


def test_the_allowed_versions_begin_with_one_that_was_tried() -> None:
    """They end before the next one that may change what is private."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = [name for name in project["dependencies"] if name.startswith("mlx-lm")]
    assert bound == f"mlx-lm>={internals.VERSIONS[0]},<0.33"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_attention_is_found_and_its_function_exchanged(architecture: str) -> None:
    """For one module only; put back, everything is as it was."""
    model = tiny_model(tiny_config(architecture))
    modules = [module for layer in model.layers for module in internals.with_rope(layer)]
    assert len(modules) == len(model.layers)
    assert all(map(internals.calls_attention, modules))
    tokens = mx.array([[5, 6, 7, 8]])
    before, old, calls = model(tokens), type(modules[0]), []

    def attention(whole: internals.Attention) -> internals.Attention:
        def attend(*args: Any, **more: Any) -> mx.array:
            calls.append(1)
            return whole(*args, **more)

        return attend

    modules[0].__class__ = internals.class_with(modules[0], attention)
    assert mx.array_equal(model(tokens), before)
    assert calls == [1]
    assert isinstance(modules[0], old)
    modules[0].__class__ = old
    assert mx.array_equal(model(tokens), before)
    assert calls == [1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_last_norm_is_the_one_before_the_logits(architecture: str) -> None:
    """Its output times nothing makes logits of zero."""
    model = tiny_model(tiny_config(architecture))
    found = internals.last_norm(model)
    assert found is not None
    body, name = found
    norm = getattr(body, name)
    setattr(body, name, lambda x: mx.zeros_like(norm(x)))
    assert mx.abs(model(mx.array([[5, 6]]))).max().item() == 0


def test_a_model_without_such_parts_has_none() -> None:
    """Nothing is guessed."""
    assert internals.last_norm(ModuleType("model")) is None
    assert internals.with_rope(ModuleType("layer")) == []
    assert not internals.calls_attention(ModuleType("attention"))


def test_classes_are_found_by_the_model_type() -> None:
    """Classes are found by mlx-lm's other names too; a type that it lacks is an error."""
    model_class, arguments_class = internals.model_classes({"model_type": "mistral"})
    assert (model_class.__module__, arguments_class.__name__) == (
        "mlx_lm.models.llama",
        "ModelArgs",
    )
    assert internals.has_architecture("mistral")
    assert internals.has_architecture("gemma3_text")
    assert not internals.has_architecture("no_such_model")
    assert not internals.has_architecture("../llama")
    with pytest.raises(ValueError, match="no_such_model"):
        internals.model_classes({"model_type": "no_such_model"})


def test_a_rotating_cache_knows_its_newest_row() -> None:
    """The rows come out by their positions, wrapped or not."""
    for tokens in (1, 5, 8, 9, 13, 16, 21):
        cache = RotatingKVCache(8)
        for position in range(tokens):
            row = mx.full((1, 1, 1, 2), float(position))
            cache.update_and_fetch(row, row)
        rows = internals.rows_in_order(cache, cache.keys)[0, 0, :, 0].tolist()
        assert rows == [float(position) for position in range(max(0, tokens - 8), tokens)]


def test_stock_caches_are_told_from_those_of_a_model() -> None:
    """By where their class is, and by whether their state can be set."""
    assert internals.is_stock_cache(KVCache())
    assert internals.is_stock_cache(CacheList())
    assert not internals.is_stock_cache(UnknownCache())
    assert internals.has_settable_state(KVCache())

    class Fixed:
        state = property(lambda self: ())

    assert not internals.has_settable_state(Fixed())


def test_a_prompt_cache_file_names_its_classes(tmp_path: Path) -> None:
    """Where they are expected; anything else among them is found before mlx-lm looks it up."""
    caches = [KVCache(), RotatingKVCache(8)]
    for cache in caches:
        cache.update_and_fetch(mx.zeros((1, 1, 3, 2)), mx.zeros((1, 1, 3, 2)))
    file = tmp_path / "x.safetensors"
    mlx_lm_cache.save_prompt_cache(str(file), caches, {})
    metadata = mx.load(str(file), return_metadata=True)[1]  # type: ignore[index]
    assert {"KVCache", "RotatingKVCache"} <= set(metadata.values())
    assert internals.strange_class(metadata) is None
    assert internals.strange_class({"1.0": "KVCache", "1.1": "os"}) == "os"
    assert internals.strange_class({"0.x": "y"}) == ""


def test_transformers_tokenizer_is_behind_mlx_lms() -> None:
    """Under the name that is expected."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    class Inner:
        eos_token_id = 2
        chat_template = None

        def get_vocab(self) -> dict[str, int]:
            return {}

        def apply_chat_template(self, messages: list[Any]) -> str:
            return ""

        def encode(self, text: str, **more: Any) -> list[int]:
            return [0]

        def decode(self, tokens: list[int]) -> str:
            return ""

    inner = Inner()
    assert internals.transformers_tokenizer(TokenizerWrapper(inner)) is inner


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ("<tool_call> {{ tool_call.name }}", [], "json_tools"),
        ("<tool_call>\n<function={{ name }}>", [], "qwen3_coder"),
        ("{{ bos_token }}[TOOL_CALLS]", [], "mistral"),
        ("{{ messages }}", ["<|tool_call_start|>", "<|tool_call_end|>"], "pythonic"),
        ("{{ messages }}", [], None),
    ],
)
def test_the_parser_of_tool_calls_is_found(
    template: str, tokens: list[str], name: str | None
) -> None:
    """By the template, or by tokens of the vocabulary."""
    assert internals.tool_parser_name(template, tokens) == name


def test_parsers_of_tool_calls_have_tags() -> None:
    """Text between them is read to a name and arguments; other text is an error of any kind."""
    for name in ("json_tools", "qwen3_coder", "mistral", "glm47", "pythonic", "kimi_k2"):
        found = internals.tool_parser(name)
        assert found is not None
        parse, start, end = found
        assert start
        assert (end == "") == (name == "mistral")
        if name != "glm47":
            with pytest.raises(ValueError, match=r"\w"):
                parse("nonsense", None)
    found = internals.tool_parser("json_tools")
    assert found is not None
    call = found[0](' {"name": "look", "arguments": {"at": 1}} ', None)
    assert call == {"name": "look", "arguments": {"at": 1}}
    assert internals.tool_parser("none_such") is None
    assert internals.tool_parser("../os") is None


@pytest.mark.parametrize("ranks", range(1, 7))
def test_layers_of_a_pipeline_are_those_of_mlx_lm(ranks: int) -> None:
    """A rank downloads the layers that mlx-lm lets it keep."""
    for count in range(ranks, 40):
        for rank in range(ranks):
            part, share = ModelShard(rank, ranks, "pipeline"), PipelineMixin()
            share.layers = list(range(count))
            share.pipeline(group_of(part))
            assert part.layers(count) == range(share.start_idx, share.end_idx)

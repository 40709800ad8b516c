"""A runner of many requests measures at start what a step needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine import Engine
from support.models import write_model

from mlxrunner.engine.backends import batched


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_a_layer_of_each_kind_tells_what_a_step_of_all_layers_needs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would only cost time, which is minutes for many cells."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8}
    if kind == "gpt_oss":
        sizes["layer_types"] = ["sliding_attention", "full_attention"] * 4
    folder = tmp_path / kind
    write_model(folder, kind, max_position_embeddings=1024, **sizes)

    def measured() -> int:
        with Engine.load(str(folder), max_sequences=4, context=512, prefill_step=256) as runner:
            assert runner.plan is not None
            (batch,) = (one.total for one in runner.plan.lines if "(measured)" in one.what)
            return batch

    few, whole = list[int](), list[int]()
    for _ in range(12):  # on a busy machine two steps are in memory at once sooner or later
        few.append(measured())
        with monkeypatch.context() as patched:
            patched.setattr(batched, "shapes_of", id)  # no layer is of the kind of another one
            whole.append(measured())
        if max(few) > 0.9 * min(whole) and min(few) < 1.1 * max(whole):
            return
    raise AssertionError((few, whole))

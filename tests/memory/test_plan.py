"""The plan's arithmetic equals the real bytes for every kind of layer, and is printed well."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from support.composites import BAICHUAN, FALCON
from support.models import save_model, tiny_config, write_model

from mlxrunner import Runner
from mlxrunner.cache.entry import SPACING
from mlxrunner.cache.protocol import Layout
from mlxrunner.loading import plan_model
from mlxrunner.memory.plan import (
    CHECKPOINT_SHARE,
    CHECKPOINTS,
    SMALL_CHECKPOINTS,
    SMALL_SHARE,
    SMALLEST_CONTEXT,
    SMALLEST_STEP,
    Demand,
    Plan,
    WorstCaseBatch,
    choose,
    make_plan,
)
from mlxrunner.memory.reserve import announce_step
from mlxrunner.models.load import describe
from mlxrunner.system import device
from mlxrunner.terminal.output import size

BYTES, SMALL = st.integers(0, 2**40), st.integers(0, 2**20)
LAYOUTS = st.builds(
    Layout,
    kind=st.sampled_from(["full", "sliding", "recurrent"]),
    row_bytes=SMALL,
    most_rows=st.none() | st.integers(1, 5000),
    fixed_bytes=SMALL,
    checkpoint_rows=st.integers(0, 5000),
    checkpoint_fixed=SMALL,
    draft_rows=st.integers(0, 5000),
)
DEMANDS = st.builds(
    Demand,
    weights=BYTES,
    layouts=st.lists(LAYOUTS, max_size=4).map(tuple),
    batch=st.builds(WorstCaseBatch, BYTES, SMALL, st.booleans()),
    checkpoint_budget=st.none() | BYTES,
)
CONTEXTS = st.integers(2, 10**6)
PLANS = st.builds(
    make_plan,
    DEMANDS,
    context=CONTEXTS,
    prefill_step=st.integers(1, 8192),
    offered=BYTES,
    limit=CONTEXTS,
)


@given(DEMANDS, CONTEXTS, CONTEXTS, BYTES)
def test_a_longer_context_never_takes_less(
    demand: Demand, one: int, other: int, offered: int
) -> None:
    short, long = sorted((one, other))
    for nbytes in (demand.caches, demand.drafts, demand.batch.nbytes):
        assert nbytes(short) <= nbytes(long)
    for with_budget in (demand.checkpoints, demand.total):
        assert with_budget(short, offered) <= with_budget(long, offered)


@given(DEMANDS, CONTEXTS, st.data())
def test_the_largest_context_fits_and_one_more_token_does_not(
    demand: Demand, limit: int, data: st.DataObject
) -> None:
    total = demand.total(data.draw(st.integers(0, limit)), 0)
    offered = data.draw(st.integers(total - 5, total + 5) | BYTES)
    largest = demand.largest_context(offered, limit)
    assert 0 <= largest <= limit
    assert largest == 0 or demand.total(largest, offered) <= offered
    assert largest == limit or demand.total(largest + 1, offered) > offered


@given(DEMANDS, CONTEXTS, CONTEXTS, BYTES)
def test_a_plan_fits_exactly_up_to_its_largest_context(
    demand: Demand, context: int, limit: int, offered: int
) -> None:
    """Also beyond the model's own context, where that was asked for."""
    plan = make_plan(demand, context=context, prefill_step=8, offered=offered, limit=limit)
    assert plan.fits == (plan.total <= offered) == (context <= plan.largest_context)
    assert plan.largest_context <= max(limit, context)


@given(DEMANDS, CONTEXTS, BYTES)
def test_the_lines_of_a_plan_add_up_to_its_total(
    demand: Demand, context: int, offered: int
) -> None:
    """Layers that are alike share a line of layers, tokens and bytes, besides what is fixed."""
    plan = make_plan(demand, context=context, prefill_step=8, offered=offered, limit=context)
    assert sum(line.total for line in plan.lines) == plan.total == demand.total(context, offered)
    layers = [line for line in plan.lines if line.layers]
    assert sum(line.layers for line in layers) == len(demand.layouts)
    assert len(layers) == len(set(demand.layouts))
    assert all(
        line.total == line.layers * (line.rows * line.row_bytes + line.fixed) for line in layers
    )
    assert all(line.rows <= context for line in layers)


def test_a_window_is_paid_for_once_and_a_state_whatever_the_length() -> None:
    full, window, state = (
        Layout("full", 10),
        Layout("sliding", 10, most_rows=100),
        Layout("recurrent", fixed_bytes=7),
    )
    demand = Demand(1000, (full, full, window, state), WorstCaseBatch(50, 2))
    assert demand.caches(80) == 2 * 800 + 800 + 7
    assert demand.caches(500) == 2 * 5000 + 1000 + 7
    assert demand.total(500, 10**9) == 1000 + 11007 + 50 + 1000


ONE = 3 * 10 + 5
BUDGETS: dict[str, tuple[int | None, int, int, int]] = {
    "by default room for several": (None, 100, 10**9, CHECKPOINTS * ONE),
    "for many, where they are small": (None, 2**17, 10**9, SMALL_CHECKPOINTS * ONE),
    "one every interval": (None, 10 * SPACING, 10**9, 10 * ONE),
    "as many as are small": (None, 2**17, 50_000, 50_000 // SMALL_SHARE),
    "several, where they are not": (None, 2**17, 10_000, CHECKPOINTS * ONE),
    "a share of what is offered": (None, 2**17, 1000, 1000 // CHECKPOINT_SHARE),
    "what the caller says": (12, 100, 10**9, 12),
    "none": (0, 100, 10**9, 0),
}


@pytest.mark.parametrize(
    ("budget", "context", "offered", "expected"), BUDGETS.values(), ids=BUDGETS
)
def test_the_budget_for_checkpoints(
    budget: int | None, context: int, offered: int, expected: int
) -> None:
    """Three rows of ten bytes and a state of five."""
    layout = Layout("sliding", 10, most_rows=8, checkpoint_rows=3, checkpoint_fixed=5)
    assert Demand(0, (layout,), WorstCaseBatch(0), budget).checkpoints(context, offered) == expected


def test_what_only_a_copy_undoes_is_planned_twice() -> None:
    full, unknown = Layout("full", 10), Layout("unknown", 7, draft_rows=2**31)
    demands = (Demand(0, layouts, WorstCaseBatch(0)) for layouts in ((full,), (full, unknown)))
    sizes = {"context": 100, "prefill_step": 8, "offered": 10**6, "limit": 100}
    plans = [make_plan(demand, **sizes) for demand in demands]
    found = [[line.total for line in plan.lines if "draft" in line.what] for plan in plans]
    assert found == [[], [700]]
    assert [plan.total for plan in plans] == [1000, 1000 + 2 * 700]


def test_a_model_that_rewinds_by_itself_gets_no_budget_for_checkpoints() -> None:
    demand = Demand(0, (Layout("full", 10),), WorstCaseBatch(0), checkpoint_budget=99)
    assert demand.checkpoints(100, 10**9) == 0
    lines = make_plan(demand, context=9, prefill_step=4, offered=9, limit=9).lines
    names = [line.what for line in lines]
    assert names == ["weights", "full layers", "batch of 4 tokens (estimated)"]


@given(PLANS)
def test_the_table_is_aligned_and_holds_the_numbers(plan: Plan) -> None:
    """The table has a line per item with bytes at the right, then sum, offer and a sentence."""
    *rows, total, offered, advice = plan.table().splitlines()
    assert {len(row) for row in rows} == {len(total)} == {len(offered)}
    for row, line in zip(rows, plan.lines, strict=True):
        assert row.startswith(line.what + " ")
        assert row.endswith(" " + size(line.total))
        assert not line.layers or f" {line.layers} x " in row
        assert not line.row_bytes or f"{line.rows} tokens x {size(line.row_bytes)}" in row
        assert not line.fixed or f"{size(line.fixed)} whatever the length" in row
    assert total.split() == ["total", *size(plan.total).split()]
    assert offered.split() == ["device", "offers", *size(plan.offered).split()]
    assert advice == plan.advice()


@given(PLANS)
def test_the_json_has_the_numbers_of_the_table(plan: Plan) -> None:
    read = json.loads(json.dumps(plan.as_dict()))
    assert read.pop("fits") == plan.fits
    assert Plan(**read | {"lines": plan.lines}) == plan
    assert [line["total"] for line in read["lines"]] == [line.total for line in plan.lines]


HOPELESS = "not even a short context fits: try a smaller or quantized model"
ADVICE = {
    5000: "a context of 400 tokens fits; the largest that would: 490",
    4000: "a context of 400 tokens does not fit; this would: --context 390",
    1000: f"{HOPELESS}, a smaller --prefill-step than 256",
}


@pytest.mark.parametrize(("offered", "advice"), ADVICE.items())
def test_the_advice_says_what_would_fit(offered: int, advice: str) -> None:
    """100 bytes of weights, 10 for each token."""
    demand = Demand(100, (Layout("full", 10),), WorstCaseBatch(0))
    plan = make_plan(demand, context=400, prefill_step=256, offered=offered, limit=2048)
    assert plan.advice() == advice
    assert (plan.largest_context >= SMALLEST_CONTEXT) == ("--prefill-step" not in advice)


# The prefill step.


def step_of(tokens: int, per_token: int = 0) -> WorstCaseBatch:
    """Return a batch that takes 10 bytes for each token of its step, and 50 for the logits."""
    return WorstCaseBatch(50 + 10 * tokens, per_token * tokens, step=tokens, logits=50)


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(0, 9), CONTEXTS)
def test_a_batch_of_another_step_is_in_proportion(
    step: int, other: int, per_token: int, context: int
) -> None:
    """The logits stay, and a context shorter than the step makes the step shorter."""
    batch = step_of(step, per_token).of_step(other)
    assert batch == step_of(other, per_token)
    shorter = min(other, context)
    assert batch.nbytes(context) == 50 + 10 * shorter + per_token * shorter * context
    measured = batch.measured(12345, context)
    assert (measured.nbytes(context), measured.is_measured) == (12345, True)


STEPS: dict[str, tuple[int | None, int, tuple[int, int, bool]]] = {
    "fits": (1000, 100_000, (2048, 1000, True)),
    "just fits": (5000, 50_000 + 20_530, (2048, 5000, True)),
    "half fits": (5000, 50_000 + 20_529, (1024, 5000, True)),
    "the smallest fits": (5000, 50_000 + 2_610, (256, 5000, True)),
    "none fits": (5000, 50_000 + 2_609, (256, 5000, False)),
    "the model's own fits": (None, 80_000 + 20_530, (2048, 8000, True)),
    "the model's own fits with half": (None, 80_000 + 20_529, (1024, 8000, True)),
    "shorter by a tenth at most": (None, 80_000 + 2_609, (1024, 7231, True)),
    "and not by more": (None, 70_000, (512, 6483, True)),
    "nothing fits": (None, 3_000, (256, 8000, False)),
}


@pytest.mark.parametrize(("context", "offered", "expected"), STEPS.values(), ids=STEPS)
def test_the_step_shrinks_until_the_context_fits(
    context: int | None,
    offered: int,
    expected: tuple[int, int, bool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """10 bytes for each token of the context and of the step. The plan and the log say so."""
    demand = Demand(0, (Layout("full", 10),), step_of(2048))
    plan = choose(demand, context, 2048, offered=offered, limit=8000)
    assert (plan.prefill_step, plan.context, plan.fits) == expected
    assert plan.asked_step == (0 if plan.prefill_step == 2048 else 2048)
    smaller = f"a prefill step of {plan.prefill_step} tokens instead of 2048" in plan.advice()
    assert smaller == (plan.fits and plan.asked_step > 0)
    announce_step(plan)
    assert ("prefill step: " in caplog.text) == smaller


@given(DEMANDS, CONTEXTS | st.none(), st.integers(1, 8192), BYTES, CONTEXTS)
def test_a_step_is_chosen_if_any_fits(
    demand: Demand, context: int | None, step: int, offered: int, limit: int
) -> None:
    """It is never longer than was asked for, and not shorter than is sensible."""
    demand = replace(demand, batch=replace(demand.batch, step=step))
    plan = choose(demand, context, step, offered=offered, limit=limit)
    assert min(step, SMALLEST_STEP) <= plan.prefill_step <= step
    shortest = choose(demand, context, plan.prefill_step, offered=offered, limit=limit)
    assert plan.fits == shortest.fits
    assert plan.context >= shortest.context * 9 // 10


# Against the real thing.

KINDS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "full": ("llama", None, {}),
    "full in 8 bits": ("llama", 8, {"head_dim": 64}),
    "full in 4 bits": ("llama", 4, {"head_dim": 32}),
    "latent": ("deepseek_v3", None, {}),
    "sliding": ("gemma3_text", None, {}),
    "sliding, its full layers in 8 bits": ("gemma3_text", 8, {"head_dim": 32}),
    "sliding with sinks and experts": ("gpt_oss", None, {}),
    "a window longer than the context": ("gemma3_text", None, {"sliding_window": 4096}),
    "convolution": ("lfm2", None, {}),
    "recurrent with attention": ("jamba", None, {}),
    "delta rule": ("qwen3_next", None, {}),
    "composite": ("falcon_h1", None, FALCON),
    "composite with a window": ("baichuan_m1", None, {**BAICHUAN, "sliding_window_layers": [1]}),
}


CONTEXT = 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def parameter_bytes(runner: Runner) -> int:
    parameters: Any = tree_flatten(runner.model.parameters())
    return sum(array.nbytes for _, array in parameters)


def caches(plan: Plan) -> int:
    return sum(line.total for line in plan.lines if line.layers)


def fill(runner: Runner, answer: int = 10) -> None:
    prompt = [7 * place % 250 for place in range(runner.context - answer)]
    for _ in runner.generate(prompt, max_tokens=answer + 1, stop_tokens=[]):
        pass
    gc.collect()
    assert len(runner.entry.tokens) == runner.context - 1  # nothing follows the last token
    # The last token's states would be computed with the next one.
    mx.eval([cache.state for cache in runner.entry.caches])


@pytest.mark.skipif(
    device.is_gpu(), reason="compares bytes of the CPU's allocator; that of a GPU rounds to pages"
)
@pytest.mark.parametrize(("kind", "kv_bits", "config"), KINDS.values(), ids=KINDS.keys())
def test_the_planned_bytes_are_those_of_the_real_thing(
    folder: Path,
    kind: str,
    kv_bits: int | None,
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan from config.json and headers has exact weights, and full caches within 1 %."""
    write_model(folder, kind, max_position_embeddings=CONTEXT, torch_dtype="bfloat16", **config)
    with monkeypatch.context() as nothing_is_read:
        nothing_is_read.setattr(mx, "load", None)
        nothing_is_read.setattr(mx, "eval", None)
        plan = plan_model(str(folder), kv_bits=kv_bits, prefill_step=256, checkpoint_budget=0)
    gc.collect()
    # A freed buffer that is used again may be two pages larger than what was asked for.
    mx.clear_cache()
    runner = Runner.load(str(folder), kv_bits=kv_bits, prefill_step=256, checkpoint_budget=0)
    weights = parameter_bytes(runner)
    fill(runner)
    assert plan.lines[0].total == weights
    counted = runner.entry.nbytes  # which counts each state once
    full = mx.get_active_memory()
    # What goes with the runner is its own; what earlier tests left may go at any time before.
    runner.close()
    del runner
    gc.collect()
    assert caches(plan) == pytest.approx(full - mx.get_active_memory() - weights, rel=0.01)
    assert caches(plan) == pytest.approx(counted, rel=0.05)


def test_a_state_is_planned_twice_because_the_one_before_it_is_kept(folder: Path) -> None:
    """For a model of nothing but states."""
    write_model(folder, "mamba2", max_position_embeddings=256)
    plan = plan_model(str(folder), checkpoint_budget=0)
    runner = Runner.load(str(folder), checkpoint_budget=0)
    fill(runner)
    assert caches(plan) == 2 * runner.entry.nbytes > 0


def test_layers_of_chunks_take_no_more_than_planned(folder: Path) -> None:
    """They are mlx-lm's, which allocate as they go."""
    text = tiny_config("llama4")["text_config"] | {"attn_temperature_tuning": True}
    text["max_position_embeddings"] = CONTEXT
    write_model(folder, "llama4", text_config=text, max_position_embeddings=CONTEXT)
    plan = plan_model(str(folder))
    runner = Runner.load(str(folder), checkpoint_budget=0)
    fill(runner)
    assert 0 < runner.entry.nbytes <= caches(plan)


@pytest.mark.parametrize("budget", [None, 20_000])
def test_checkpoints_stay_within_their_line(folder: Path, budget: int | None) -> None:
    write_model(folder, "gemma3_text", max_position_embeddings=CONTEXT)
    plan = plan_model(str(folder), checkpoint_budget=budget)
    (line,) = (line for line in plan.lines if line.what == "checkpoints")
    options = {"checkpoint_interval": 50, "prefill_step": 64}
    runner = Runner.load(str(folder), checkpoint_budget=budget, **options)
    fill(runner)
    assert budget is None or line.total == budget
    assert line.total == plan.checkpoint_budget
    assert 0.5 * line.total < runner.entry.checkpoints.nbytes <= line.total


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("stored", ["float16", "bfloat16", "quantized"])
def test_weights_are_planned_as_they_will_be_loaded(folder: Path, stored: str) -> None:
    """A CPU computes in float32; quantized weights stay as they are."""
    dtype = "float16" if stored == "quantized" else stored
    model = write_model(folder, max_position_embeddings=64, torch_dtype=dtype)
    config = json.loads((folder / "config.json").read_text())
    model.set_dtype(getattr(mx, dtype))
    if stored == "quantized":
        config["quantization"] = {"group_size": 32, "bits": 4}
        nn.quantize(model, **config["quantization"])
    save_model(folder, model, config)
    plan = plan_model(str(folder))
    runner = Runner.load(str(folder))
    fill(runner)
    assert plan.lines[0].total == parameter_bytes(runner)
    assert describe(str(folder)).loaded_bytes == parameter_bytes(runner)
    assert caches(plan) == runner.entry.nbytes

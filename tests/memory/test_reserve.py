"""A runner takes at its start all that it will need, or fails there with the plan's table."""

from __future__ import annotations

import gc
import logging
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner
from support.composites import BAICHUAN, FALCON
from support.models import EOS, write_model

from mlxrunner import Chunk, MemoryPlanError, Runner, Usage, cli, loading
from mlxrunner.cache.entry import HEADER
from mlxrunner.engine.engine import Engine
from mlxrunner.engine.opening import EngineConfig
from mlxrunner.loading import plan_model
from mlxrunner.memory.plan import Plan, WorstCaseBatch
from mlxrunner.models.load import load_model
from mlxrunner.options import OpenSettings
from mlxrunner.system import device
from mlxrunner.system.device import Limit
from mlxrunner.terminal.output import size

WIDE: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256}
"""Large enough that what Python and MLX hold beside it does not matter."""
TOLERANCE = 0.05
HOPELESS = "not even a short context fits: try a smaller or quantized model"


@pytest.fixture
def batch_tried_once() -> None:
    """Run the worst-case batch each time."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes that the device offers."""
    return lambda nbytes: monkeypatch.setattr(device, "offered_bytes", lambda: nbytes)


def active() -> int:
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


def answer(runner: Runner, prompt: list[int], tokens: int, **options: Any) -> list[Chunk]:
    return list(runner.generate(prompt, max_tokens=tokens, stop_tokens=[], **options))


def usage_of(chunks: list[Chunk]) -> Usage:
    usage = chunks[-1].usage
    assert usage is not None
    return usage


def plan_of(runner: Runner) -> Plan:
    assert runner.plan is not None
    return runner.plan


def batch_of(plan: Plan) -> int:
    return next(line.total for line in plan.lines if line.what.startswith("batch"))


def caches(plan: Plan) -> int:
    return sum(line.total for line in plan.lines if line.layers)


# What is taken at start is enough.

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("llama", WIDE, {}),
    "full in 8 bits": ("llama", {**WIDE, "head_dim": 32}, {"kv_bits": 8, "context": 512}),
    "latent": ("deepseek_v3", WIDE, {"context": 1024}),
    "experts in all layers but the first": (
        "deepseek_v3",
        {**WIDE, "moe_intermediate_size": 1024},
        {"context": 256},
    ),
    "sliding": ("gemma3_text", {**WIDE, "sliding_window": 256}, {}),
    "steps longer than the window": (
        "gemma3_text",
        WIDE
        | {"num_hidden_layers": 18, "hidden_size": 64, "head_dim": 64}
        | {"num_key_value_heads": 4},
        {"context": 800, "prefill_step": 728, "rewind_slack": 0},
    ),
    "convolution": ("lfm2", {**WIDE, "block_dim": 128}, {}),
    "recurrent": ("jamba", WIDE, {"context": 1024, "prefill_step": 128}),
    "composite": ("baichuan_m1", {**WIDE, **BAICHUAN}, {"context": 1024}),
    "many words, short steps": (
        "gemma3_text",
        {**WIDE, "vocab_size": 20000},
        {"context": 512, "prefill_step": 16},
    ),
}


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(("kind", "config", "options"), MODELS.values(), ids=MODELS.keys())
def test_a_full_context_needs_what_was_planned_and_no_more(
    folder: Path, kind: str, config: dict[str, Any], options: dict[str, Any]
) -> None:
    """The peak and the rest of a full context that is rewound and refilled stay within 5 %."""
    write_model(folder, kind, **{"max_position_embeddings": 2048, "vocab_size": 300, **config})
    before = active()
    runner = Runner.load(str(folder), **{"prefill_step": 256, **options})
    at_start, plan, context = active() - before, plan_of(runner), runner.context
    spare = int(TOLERANCE * plan.total)
    planned_to_stay = plan.total - batch_of(plan)
    assert at_start <= planned_to_stay + spare
    prompt = [place * 7 % 250 for place in range(context - 8)]
    # What follows is evaluated in one piece with its logits, where there are checkpoints.
    prompt[-HEADER] = EOS
    again = [*prompt[: context // 2], *prompt[: context // 2 - 8]]
    peaks = []
    for text in (prompt, again, [*prompt, 1, 2, 3]):
        chunks = answer(runner, text, context)
        assert len(runner.entry.tokens) == context - 1
        peaks.append(usage_of(chunks).memory.peak_bytes - before)
        stays = active() - before
        assert stays <= planned_to_stay + spare
        if set(runner.facts.layers) == {"full"}:
            assert stays - at_start <= spare, "buffers for the whole context were there before"
    assert 0.8 * plan.total <= max(peaks) <= plan.total + spare


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("kv_bits", [None, 8], ids=["as computed", "8 bits"])
def test_buffers_are_taken_at_start_and_stay(folder: Path, kv_bits: int | None) -> None:
    """Through requests of every length, and a reset, which empties them."""
    write_model(folder, head_dim=32, max_position_embeddings=512)
    before = active()
    runner = Runner.load(str(folder), kv_bits=kv_bits)
    at_start, weights = active() - before, plan_of(runner).lines[0].total
    assert at_start == pytest.approx(weights + caches(plan_of(runner)), rel=0.01)
    for length in (1, 500, 20, 300, 511, 7):
        answer(runner, [length % 200] * length, 3)
        assert runner.entry.nbytes == caches(plan_of(runner))
        assert active() - before == pytest.approx(at_start, rel=0.01)
    runner.reset()
    assert len(runner.entry.tokens) == 0
    assert active() - before == pytest.approx(at_start, rel=0.01)


# What happens at start leaves no trace.

ALIKE: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "full": ("llama", {}, None),
    "full in 8 bits": ("llama", {"head_dim": 32}, 8),
    "latent": ("deepseek_v3", {}, None),
    "sliding": ("gemma3_text", {}, None),
    "recurrent": ("jamba", {}, None),
    "convolution": ("lfm2", {}, None),
    "states alone": ("mamba2", {}, None),
    "composite": ("falcon_h1", FALCON, None),
    "composite with a window": ("baichuan_m1", BAICHUAN, None),
}


@pytest.mark.parametrize(("kind", "config", "kv_bits"), ALIKE.values(), ids=ALIKE.keys())
def test_a_reserved_runner_answers_like_one_that_is_not(
    folder: Path, kind: str, config: dict[str, Any], kv_bits: int | None
) -> None:
    """The first request finds nothing; tokens and log-probabilities are the same, cold and warm."""
    write_model(folder, kind, max_position_embeddings=512, **config)
    reserved, lazy = (
        Runner.load(str(folder), reserve=reserve, kv_bits=kv_bits, prefill_step=50)
        for reserve in (True, False)
    )
    assert (len(reserved.entry.tokens), reserved.entry.caches) == (0, [])
    for turn, prompt in enumerate(([*range(180)], [*range(180), 7, 8, 9], [*range(100), 5], [3])):
        one, other = (answer(runner, prompt, 8, logprobs=0) for runner in (reserved, lazy))
        if turn == 0:
            assert (usage_of(one).outcome, usage_of(one).reason) == ("miss", "empty")
        assert usage_of(one).cached_tokens == usage_of(other).cached_tokens
        assert [chunk.token for chunk in one] == [chunk.token for chunk in other]
        assert [chunk.logprob for chunk in one] == pytest.approx(
            [chunk.logprob for chunk in other], abs=1e-5
        )


# Too little memory.


def test_what_does_not_fit_fails_before_its_caches_are_taken(
    folder: Path, offer: Callable[[int], None]
) -> None:
    write_model(folder, max_position_embeddings=4096)
    plan = plan_model(str(folder), 1000, prefill_step=64)
    offer(plan.total)
    before = active()
    with pytest.raises(MemoryPlanError) as error:
        Runner.load(str(folder), 4096, prefill_step=64)
    too_large = plan_model(str(folder), 4096, prefill_step=64)
    message = str(error.value)
    del error
    assert message == f"this does not fit into memory\n{too_large.table()}"
    assert active() - before < too_large.lines[0].total / 10
    (advised,) = map(int, re.findall(r"this would: --context (\d+)$", message))
    assert advised == 1000
    runner = Runner.load(str(folder), advised, prefill_step=64)
    assert plan_of(runner).fits
    assert runner.context == advised


def test_the_default_context_is_what_fits_and_that_is_said(
    folder: Path, offer: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said of the model's own where that fits."""
    write_model(folder, max_position_embeddings=4096)
    offered = plan_model(str(folder), 1000, prefill_step=64).total
    assert Runner.load(str(folder), prefill_step=64).context == 4096
    assert not [record for record in caplog.records if record.name == "mlxrunner"]
    offer(offered)
    assert Runner.load(str(folder), prefill_step=64).context == 1000
    said = f"context: 1000 tokens, the most that fits into {size(offered)}; the model's own is 4096"
    told = [record for record in caplog.records if record.name == "mlxrunner"]
    assert [(one.levelno, one.getMessage()) for one in told] == [(logging.WARNING, said)]


def test_a_model_that_leaves_no_room_for_a_context_is_refused_before_it_is_loaded(
    folder: Path, offer: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(folder)
    offer(1000)
    monkeypatch.setattr(mx, "load", None)
    ways: list[dict[str, Any]] = [{}, {"context": 16}, {"reserve": "request"}]
    for options in ways:
        with pytest.raises(MemoryPlanError, match=HOPELESS):
            Runner.load(str(folder), **options)


def test_a_batch_that_was_underestimated_fails_at_start_too(
    folder: Path, offer: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table says that it was measured; nothing stays behind."""
    write_model(folder, **WIDE, max_position_embeddings=1024)
    monkeypatch.setattr(
        "mlxrunner.memory.reserve.estimate_batch", lambda *a, **k: WorstCaseBatch(0)
    )
    plan = plan_model(str(folder))
    offer(plan.total)
    before = active()
    with pytest.raises(MemoryPlanError, match=r"does not fit into memory\nweights ") as error:
        Runner.load(str(folder), 1024)
    assert "batch of 2048 tokens (measured)" in str(error.value)
    del error
    assert active() - before < plan.lines[0].total / 10


@pytest.mark.parametrize("experts", [2, 4])
@pytest.mark.parametrize(("step", "context"), [(512, 1024), (128, 4096), (64, 256)])
def test_the_batch_of_a_model_with_sinks_is_not_underestimated(
    folder: Path, step: int, context: int, experts: int
) -> None:
    """Sinks take the scores once more, and each expert of a token has rows of its own."""
    layers = ["sliding_attention", "full_attention"] * 2
    sizes = WIDE | {"num_attention_heads": 8, "head_dim": 32, "num_experts_per_tok": experts}
    write_model(folder, "gpt_oss", max_position_embeddings=8192, layer_types=layers, **sizes)
    options: dict[str, Any] = {"context": context, "prefill_step": step}
    estimated = plan_model(str(folder), **options).lines[-1].total
    # a busy machine frees later, and the models before are garbage
    plans = [plan_of(Runner.load(str(folder), **options)) for _ in range(3)]
    assert all(plan.batch_is_measured for plan in plans)
    measured = min(plan.lines[-1].total for plan in plans)
    assert 0.95 * measured < estimated < 2 * measured


def test_without_reserving_it_loads_anyway_and_grows_as_it_goes(
    folder: Path, offer: Callable[[int], None]
) -> None:
    write_model(folder, max_position_embeddings=4096)
    offer(1000)
    before = active()
    runner = Runner.load(str(folder), 4096, reserve=False)
    plan, held = plan_of(runner), list[int]()
    assert (plan.fits, plan.batch_is_measured, runner.context) == (False, False, 4096)
    assert active() - before == pytest.approx(plan.lines[0].total, rel=0.01)
    for length in (30, 1500):
        answer(runner, [1] * length, 3)
        held.append(runner.entry.nbytes)
    assert held[0] < caches(plan) / 10 < held[1] < caches(plan) / 2


def test_the_command_line_says_on_stderr_how_much_context_is_left() -> None:
    code = (
        "from mlxrunner import cli, loading\nfrom mlxrunner.system import device\n"
        "total = loading.plan_model('demo', 1000, prefill_step=64).total\n"
        "device.offered_bytes = lambda: total\n"
        "cli.main(['generate', '-p', 'Hello!', '--prefill-step', '64'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "Hello! How can I help you?\n")
    assert re.fullmatch(
        r"context: 1000 tokens, the most that fits into \S+ MB; the model's own is 2048\n",
        result.stderr,
    )


def test_the_command_line_fails_with_the_table_unless_told_not_to_reserve(
    offer: Callable[[int], None],
) -> None:
    offer(1000)
    refused = CliRunner().invoke(cli.main, ["generate", "-p", "Hello!"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    table = plan_model("demo").table()
    assert refused.stderr == f"mlxrunner: this does not fit into memory\n{table}\n"
    lazy = CliRunner().invoke(cli.main, ["generate", "-p", "Hello!", "--no-reserve"])
    assert (lazy.exit_code, lazy.stdout) == (0, "Hello! How can I help you?\n")


# A step that shrinks.


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("context", [1024, None], ids=["asked for", "the model's own"])
def test_the_prefill_step_shrinks_so_that_the_context_fits(
    folder: Path,
    context: int | None,
    offer: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says so, what is measured fits, and the answer stays the same."""
    write_model(folder, **WIDE, max_position_embeddings=1024)
    usual = Runner.load(str(folder), 1024, prefill_step=1024)
    offer(plan_of(usual).total - batch_of(plan_of(usual)) // 3)
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        runner = Runner.load(str(folder), context, prefill_step=1024)
    plan = plan_of(runner)
    assert (plan.context, plan.fits, plan.batch_is_measured) == (1024, True, True)
    assert plan.prefill_step == runner.prefill_step == runner.settings["prefill_step"] < 1024
    said = f"prefill step: {plan.prefill_step} tokens instead of 1024, so that 1024 tokens fit"
    assert [one.message for one in caplog.records] == [f"{said} into {size(plan.offered)}"]
    prompt = [7 * i % 250 for i in range(900)]
    found = [[one.token for one in answer(each, prompt, 20)] for each in (usual, runner)]
    assert found[0] == found[1]


SEVERAL: dict[str, Any] = {"max_sequences": 2, "kv_cache_tokens": 1024}


@pytest.mark.exhaustive(0)
def test_the_step_of_several_requests_shrinks_too(
    folder: Path, offer: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Not below one token for each of them."""
    write_model(folder, **WIDE, max_position_embeddings=1024)
    estimated = EngineConfig.of(load_model(str(folder)), OpenSettings.of(**SEVERAL))
    plan = estimated.plan(1024, 1024)
    offer(plan.total - batch_of(plan) // 3)
    with caplog.at_level(logging.WARNING, "mlxrunner"), Engine.load(str(folder), **SEVERAL) as few:
        assert 256 <= few.prefill_step < 1024
    assert "prefill step: " in caplog.text


@pytest.mark.exhaustive(0)
def test_the_step_of_several_requests_shrinks_if_it_takes_more_than_was_estimated(
    folder: Path,
    offer: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The smaller one is measured, too; the answer stays the same."""
    write_model(folder, **WIDE, max_position_embeddings=1024)
    prompt = [7 * i % 250 for i in range(900)]
    with Engine.load(str(folder), **SEVERAL) as usual:
        assert usual.plan is not None
        offer(usual.plan.total - batch_of(usual.plan) // 3)
        expected = usual.complete(prompt, max_tokens=20, stop_tokens=[]).tokens
    monkeypatch.setattr(EngineConfig, "settings", lambda self: self.asked)
    with caplog.at_level(logging.WARNING, "mlxrunner"), Engine.load(str(folder), **SEVERAL) as few:
        assert few.plan is not None
        assert (few.plan.fits, few.plan.batch_is_measured) == (True, True)
        assert 256 <= few.prefill_step == few.plan.prefill_step < 1024
        assert few.complete(prompt, max_tokens=20, stop_tokens=[]).tokens == expected
    assert f"prefill step: {few.prefill_step} tokens" in caplog.text
    offer(few.plan.total - batch_of(few.plan))
    with pytest.raises(MemoryPlanError, match="batch of 256 tokens \\(measured\\)"):
        Engine.load(str(folder), **SEVERAL)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_steps_of_several_requests_take_no_more_than_was_measured(folder: Path, kind: str) -> None:
    """Full slots, prompts that share a part, and cells that are scattered by many answers."""
    family, config, _ = MODELS[kind]
    write_model(folder, family, **config, max_position_embeddings=1024, vocab_size=300)
    rng = random.Random(0)
    shared = [rng.randrange(250) for _ in range(500)]
    several: dict[str, Any] = {"max_sequences": 8, "context": 1024, "prefill_step": 256}
    with Engine.load(str(folder), **several) as engine:
        assert engine.plan is not None
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for number in range(6):
            new = [[rng.randrange(250) for _ in range(rng.choice([9, 200]))] for _ in range(8)]
            prompts = [shared[: rng.randrange(500)] + one for one in new[number:]]
            prompts += [[*one, *one, *one, *one] for one in new[:number]]
            engine.run(prompts, max_tokens=30 + number, stop_tokens=[])
        assert mx.get_peak_memory() - before <= batch_of(engine.plan)


# One request.


def test_a_request_reserves_for_its_prompt_and_answer_alone(
    folder: Path, offer: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is tried, and the caches have rows for them, however long the context is."""
    write_model(folder, **WIDE, max_position_embeddings=4096)
    monkeypatch.setattr("mlxrunner.loading._taken", None)
    runner = Runner.load(str(folder), reserve="request")
    answer(runner, [1] * 30, 12)
    assert runner.context == 4096
    assert runner.entry.nbytes == caches(plan_model(str(folder), 256))  # 42, rounded up


@pytest.mark.exhaustive(0)
def test_a_request_that_does_not_fit_is_refused_before_it_runs(
    folder: Path, offer: Callable[[int], None]
) -> None:
    """With the table of its tokens; without `max_tokens` it grows until there is no more room."""
    write_model(folder, **WIDE, max_position_embeddings=4096)
    runner = Runner.load(str(folder), reserve="request", prefill_step=256)
    assert runner.growing is not None
    offer(runner.growing.growing(1000, runner.prefill_step, 0))
    with pytest.raises(MemoryPlanError, match="does not fit into memory\nweights ") as error:
        runner.generate([1] * 600, max_tokens=500)
    assert "1100 tokens x " in str(error.value)
    assert "a context of 1100 tokens does not fit; this would: --context " in str(error.value)
    assert len(answer(runner, [1] * 600, 300)) == 300
    chunks, count = runner.generate([2] * 600, stop_tokens=[]), 0
    with pytest.raises(MemoryPlanError, match="does not fit into memory"):
        for count, _ in enumerate(chunks, 1):
            pass
    assert 100 <= count <= 400
    assert runner.entry.is_true


@pytest.mark.exhaustive(0)
def test_a_request_shrinks_its_own_step(
    folder: Path, offer: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once. A short one does not, and a context that does not fit changes nothing."""
    write_model(folder, **WIDE, max_position_embeddings=2**16)
    usual = Runner.load(str(folder), reserve="request", prefill_step=1024)
    assert usual.growing is not None
    prompt = [7 * i % 250 for i in range(900)]
    expected = [one.token for one in answer(usual, prompt, 20)]
    offer(usual.growing.growing(1000, 512, 0))
    runner = Runner.load(str(folder), reserve="request", prefill_step=1024)
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        answer(runner, [1] * 200, 20)
        assert "prefill step" not in caplog.text
        assert [one.token for one in answer(runner, prompt, 20)] == expected
        assert [one.token for one in answer(runner, prompt, 20)] == expected
    assert "prefill step: 512 tokens instead of 1024, so that 920 tokens fit into" in caplog.text
    assert caplog.text.count("prefill step: ") == 1
    assert runner.prefill_step == 1024


WAYS = {"": "request", "--max-tokens 5": "request", "--reserve": True, "--no-reserve": False}


@pytest.mark.parametrize(("options", "reserve"), WAYS.items())
def test_generate_takes_what_it_needs(
    options: str, reserve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is told otherwise, as the config file may, too."""
    asked: list[Any] = []
    load = loading.load

    def note(*parts: Any, **rest: Any) -> Runner:
        asked.append(rest["reserve"])
        return load(*parts, **rest)

    monkeypatch.setattr("mlxrunner.runner.load", note)
    result = CliRunner().invoke(cli.main, ["generate", "Hello!", *options.split()])
    assert (result.exit_code, asked) == (0, [reserve]), result.output


# What MLX is told.


def test_the_limits_of_mlx_come_from_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch may be kept for the next step; all of it together may be used."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(device, "set_limits", lambda total, batch: told.append((total, batch)))
    write_model(folder)
    Runner.load(str(folder), reserve=False)
    assert told == []
    plan = plan_of(Runner.load(str(folder)))
    assert told == [(plan.total, batch_of(plan))]


@pytest.mark.parametrize(("total", "batch"), [(10**9, 10**8), (10**11, 5)])
def test_each_limit_is_what_it_says(
    total: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, int] = {}
    for name in ("memory", "cache", "wired"):
        monkeypatch.setattr(
            mx, f"set_{name}_limit", lambda nbytes, name=name: told.update({name: nbytes})
        )
    device.set_limits(total, batch)
    assert told.pop("memory") >= total
    assert told == {"cache": max(batch, device.SMALLEST_CACHE)}


def test_what_a_device_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU offers what it recommends; a CPU most of the available memory and MLX's share."""
    monkeypatch.setattr(device, "describe", lambda: {"max_recommended_working_set_size": 10**10})
    monkeypatch.setattr(device, "_available", lambda total: 10**9)
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    assert device.offered_bytes() == 10**10
    monkeypatch.setattr(device, "is_gpu", lambda: False)
    assert device.offered_bytes() == 9 * 10**8 + mx.get_active_memory()


def test_memory_that_grows_is_looked_at_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt or answer that does not fit is one line, the entry stays true, and others run."""
    runner = Runner.load("demo", context=1500, reserve=False)
    monkeypatch.setattr(device, "is_gpu", lambda: False)
    demand = runner.growing
    assert demand is not None
    offered = demand.growing(600, runner.prefill_step, 0)

    def left() -> Limit:
        return Limit("ulimit -v", offered - mx.get_active_memory() - mx.get_cache_memory())

    monkeypatch.setattr(device, "hard_limit", left)
    said = r"^1256 tokens need .*, and ulimit -v leaves .*: give at most 600 tokens, or a smaller"
    with pytest.raises(MemoryPlanError, match=said) as error:
        runner.generate([5] * 1000)
    assert "\n" not in str(error.value)
    chunks, count = runner.generate([5] * 200, stop_tokens=[]), 0
    with pytest.raises(MemoryPlanError, match="tokens need"):
        for count, _ in enumerate(chunks, 1):
            pass
    assert 250 <= count <= 600
    assert runner.entry.is_true
    assert len(list(runner.generate([5] * 200, max_tokens=3, stop_tokens=[]))) == 3
    with pytest.raises(MemoryPlanError, match="1000 tokens need"):
        runner.evaluate([5] * 1000)

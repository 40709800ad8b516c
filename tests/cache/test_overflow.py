"""A full context: the answer ends, fails, or continues without its oldest tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.rope_utils import initialize_rope
from support.histories import tiny_parts
from support.models import LLAMA3
from support.sample import fewer

from mlxrunner import ContextFullError, ContextLengthError, OptionError, Runner
from mlxrunner.cache.entry import as_tokens
from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.chat.conversation import Conversation
from mlxrunner.engine.backends.backend import rotators, turned
from mlxrunner.results import Result
from mlxrunner.testing import ByteTokenizer, oracle_runner

YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1} | {
    "original_max_position_embeddings": 128
}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "traditional": ("llama", {"rope_traditional": True}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama3": ("llama", {"rope_scaling": LLAMA3}),
    "yarn": ("qwen3", {"head_dim": 16, "rope_theta": 1e4, "rope_scaling": YARN}),
    "key norm": ("qwen3", {"head_dim": 16, "rope_theta": 1e6}),
    "per-layer bases": ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    "rope in some layers only": ("smollm3", {"no_rope_layer_interval": 2, "rope_theta": 1e4}),
}
ropes = pytest.mark.parametrize(("architecture", "settings"), ROPES.values(), ids=ROPES)


def build(architecture: str, settings: dict[str, Any], context: int = 60, **options: Any) -> Runner:
    given = tiny_parts(architecture, **({"max_position_embeddings": 512} | settings))
    return Runner(*given, context=context, prefill_step=16, **options)


def over(keep: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Return the options of an answer that goes over the edge of the context."""
    return {"overflow": "shift", "keep": keep, "max_tokens": max_tokens, "stop_tokens": []} | more


def first_layer(model: Any, tokens: list[int], at: int) -> mx.array:
    """Return the first layer's keys for `tokens` from position `at` on."""
    caches = make_layer_caches(model, CacheOptions(at + len(tokens), whole=True))
    model(mx.array([tokens]), cache=[c.model_cache for c in caches])
    for cache in caches:
        cache.pretend(at)
    keys: list[mx.array] = []
    write = caches[0].update_and_fetch
    caches[0].model_cache.update_and_fetch = lambda k, v: (keys.append(k), write(k, v))[1]
    model(mx.array([tokens]), cache=[c.model_cache for c in caches])
    return keys[0]


@ropes
def test_shifted_keys_equal_keys_computed_at_the_new_position(
    architecture: str, settings: dict[str, Any]
) -> None:
    """Each layer's own rope is right in float32 within 2e-4."""
    runner = build(architecture, settings)
    caches = make_layer_caches(runner.model)
    ways = rotators(runner.model, caches, -150)
    assert ways is not None
    tokens = list(range(20, 30))
    far, near = first_layer(runner.model, tokens, 157), first_layer(runner.model, tokens, 7)
    moved = ways[0](far, -150)
    assert mx.abs(moved - near).max().item() < 2e-4  # type: ignore[operator]
    assert mx.abs(far - near).max().item() > 0.05  # type: ignore[operator]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "scaling",
    [None, LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}],
    ids=["plain", "llama3", "yarn", "linear"],
)
@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "pairs"])
def test_a_rope_turns_keys_back_with_its_amplitude_divided_out(
    head_dim: int, scaling: Any, traditional: bool
) -> None:
    """For positions up to thousands, as YaRN would apply its factor twice."""
    mx.random.seed(0)
    rope = initialize_rope(head_dim, 10_000.0, traditional, scaling, 8192)
    keys = mx.random.normal((1, 2, 9, head_dim))
    for by in (-1, -400, -3000):
        there, here = rope(keys, offset=77 - by), rope(keys, offset=77)
        assert mx.abs(
            turned(rope, there, by) - here  # type: ignore[operator]
        ).max().item() < 2e-4 * max(1, -by / 400)


def test_layers_are_moved_as_their_keys_were_turned_or_not_at_all() -> None:
    """Layers that do not use their rope are found by comparing keys, here every second one.

    Recurrent layers can't be moved, nor keys that are rotated by something that is no rope module.
    """
    runner = build(*ROPES["rope in some layers only"])
    ways = rotators(runner.model, make_layer_caches(runner.model), -5)
    assert ways is not None
    assert len({way.func if isinstance(way, partial) else way for way in ways}) == 2
    for architecture in ("lfm2", "deepseek_v3"):
        runner = build(architecture, {})
        assert rotators(runner.model, make_layer_caches(runner.model), -5) is None


def replayed(runner: Runner, history: list[int], keep: int, discard: int) -> Runner:
    """A runner that evaluated `history` cold and then dropped the same tokens."""
    fresh = Runner(
        runner.model, ByteTokenizer(), runner.facts, context=runner.context, prefill_step=5
    )
    list(fresh.generate(history[:-1], max_tokens=1, stop_tokens=[]))
    fresh._cache.prepare(
        as_tokens(history), keep, discard, lambda caches, by: rotators(runner.model, caches, by)
    )
    return fresh


@ropes
def test_an_answer_goes_over_the_edge_and_the_entry_stays_true(
    architecture: str, settings: dict[str, Any]
) -> None:
    """Three times the context, with every layer at the entry's offset after each token."""
    runner = build(architecture, settings, context=48, rewind_slack=64)
    offsets = set()
    for chunk in runner.generate(list(range(30)), **over(4, 150)):
        offsets.add(len({cache.offset for cache in runner._cache.entry.caches}))
        assert len(runner._cache.entry.tokens) <= 48
    assert offsets == {1}
    assert chunk.usage is not None
    assert chunk.finish_reason == "length"
    assert chunk.usage.cache.shifted_tokens >= 100
    assert chunk.usage.cache.reevaluated_tokens == 0
    assert runner.entry.is_true
    assert runner.entry.tokens[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "kinds", [["recurrent", "full"], ["composite"], ["unknown"]], ids=lambda kinds: kinds[0]
)
def test_layers_that_cannot_move_evaluate_the_kept_text_again(kinds: list[str]) -> None:
    """The answer is that of a cold run on the kept text, and the usage says how much it cost."""
    runner = oracle_runner(kinds, context=40)
    result = runner.complete(list(range(30)), **over(3, 60))
    assert result.usage.cache.shifted_tokens > 0
    assert result.usage.cache.reevaluated_tokens > 0
    cold = oracle_runner(kinds).complete(list(runner.entry.tokens), max_tokens=1)
    assert cold.tokens == result.tokens[-1:]


def test_half_of_what_is_not_kept_becomes_free() -> None:
    """The rule of the shift: keep, then drop max(len - (context - target_free), 0) tokens."""
    runner = oracle_runner(["recurrent"], context=100)
    result = runner.complete(list(range(99)), **over(20, 3))
    assert result.usage.cache.shifted_tokens == 40
    assert runner.entry.tokens[:25] == [*range(20), *range(60, 65)]


def test_a_prompt_that_is_too_long_keeps_its_beginning_and_its_end() -> None:
    """The part of its end that the entry had is moved, not evaluated again."""
    runner, history = build("llama", {}, context=60), list(range(58))
    runner.complete(history, max_tokens=2, stop_tokens=[])
    longer = [*history, *range(100, 115)]
    found = runner.complete(longer, **over(6, 4))
    usage, shifted = found.usage, found.usage.cache.shifted_tokens
    assert usage.prompt_tokens == 60 - 27 == len(longer) - shifted
    assert (usage.evaluated_tokens, usage.cached_tokens) == (15, usage.prompt_tokens - 15)
    fresh = replayed(runner, [*history, 0], 6, shifted)
    prompt = [*longer[:6], *longer[6 + shifted :]]
    assert fresh.complete(prompt, max_tokens=4, stop_tokens=[]).tokens == found.tokens


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_a_warm_shift_equals_a_cold_one(architecture: str) -> None:
    """A shifted entry's logits are within 1e-4 of the same history evaluated in other chunks."""
    settings = {"head_dim": 16, "rope_theta": 1e4} if architecture == "qwen3" else {}
    runner, history = build(architecture, settings, context=64), [1]
    for turn in range(5):
        history += [(turn * 37 + i * 11) % 290 for i in range(9)]
        history += runner.complete(history, max_tokens=3, stop_tokens=[]).tokens
    prompt = [*history, 5, 6, 7]
    warm = runner.complete(prompt, **over(4, 5, logprobs=0))
    shifted = warm.usage.cache.shifted_tokens
    assert shifted > 0
    kept = [*prompt[:4], *prompt[4 + shifted :]]
    fresh = replayed(runner, history, 4, shifted)
    assert_alike(warm, fresh.complete(kept, max_tokens=5, stop_tokens=[], logprobs=0))


def assert_alike(warm: Result, cold: Result) -> None:
    assert warm.tokens == cold.tokens
    for ours, its in zip(warm.logprobs or [], cold.logprobs or [], strict=True):
        assert ours[0] == pytest.approx(its[0], abs=1e-4)


def one_window(**options: Any) -> Runner:
    """A runner of two layers: a window of 16, whose keys follow from token and position alone.

    The layer after it adds nothing. So the window stores after a shift what a cold run stores.
    """
    window = {"num_hidden_layers": 2, "sliding_window": 16, "sliding_window_pattern": 2}
    runner = build("gemma3_text", window, context=64, **options)
    last = runner.model.layers[1]
    for part in (last.self_attn.o_proj, last.mlp.down_proj):
        part.weight = mx.zeros_like(part.weight)
    return runner


@pytest.mark.parametrize("split", [8, 16, 19, 24, 32, 37])
def test_no_checkpoint_outlives_the_tokens_that_were_moved(
    split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that leaves the shifted text at any offset has the answer of a cold run."""
    monkeypatch.setattr("mlxrunner.cache.entry.SPACING", 3)
    asked: dict[str, Any] = {"stop_tokens": [], "logprobs": 0}
    runner = one_window(rewind_slack=0, checkpoint_interval=8, checkpoint_budget=10**7)
    history = [i * 7 % 290 for i in range(58)]
    runner.complete(history, max_tokens=1, **asked)
    assert {8, 16, 24, 32} <= {item.offset for item in runner.entry.checkpoints}
    runner.complete(history, **over(4, 12, logprobs=0))
    assert runner.shifted_tokens == 30
    assert not {8, 16, 24} & {item.offset for item in runner.entry.checkpoints}
    prompt = [*runner.entry.tokens[:split], 280, 281]
    warm, cold = (one.complete(prompt, max_tokens=4, **asked) for one in (runner, one_window()))
    assert_alike(warm, cold)


def test_a_chat_goes_over_the_edge_again_and_again() -> None:
    """Every turn reuses the whole entry, the system prompt stays and the entry is true.

    Turns that repeat have prompts that were evaluated before, and dropped: they are no hits.
    """
    runner = Runner.load("demo", context=160)
    conversation = Conversation(runner, system="The user's name is Ana.")
    shifted = 0
    for turn in range(fewer(40, 20)):
        question = ("Hello!", "I have a dog.", "What is my name?", "How are you?")[turn % 4]
        answer = "".join(chunk.text for chunk in conversation.send(question))
        usage = conversation.usages[-1]
        assert usage.outcome == (
            "miss" if not turn else "partial" if usage.missed_tokens else "hit"
        )
        assert usage.cached_tokens == usage.cache.matched_tokens
        assert usage.evaluated_tokens < 40
        assert runner.entry.is_true
        assert len(runner.entry.tokens) <= 160
        shifted += usage.cache.shifted_tokens
        if question == "What is my name?":
            assert "Ana" in answer
    assert shifted > fewer(500, 200)


def test_an_interrupt_during_a_shift_leaves_a_true_entry() -> None:
    """The entry has the kept tokens, or nothing."""
    for step in range(12):
        runner, calls = build("llama", {}, context=40), count(1)

        def interrupt(step: int = step, calls: Iterator[int] = calls) -> None:
            if next(calls) == step:
                raise KeyboardInterrupt

        def shift(*given: Any, of: Any, press: Any = interrupt, **more: Any) -> None:
            press()
            of(*given, **more)
            press()

        for cache in runner._cache.empty_caches():
            cache.shift = partial(shift, of=cache.shift)  # type: ignore[method-assign]
        with suppress(KeyboardInterrupt):
            runner.complete(list(range(30)), **over(5, 60))
        assert runner.entry.is_true
        entry = list(runner.entry.tokens)
        if 0 < step < 3:
            assert len(entry) <= 5 or runner.shifted_tokens == 0
        prompt = [*entry, 9] if len(entry) <= 6 else [*entry[:5], 9]
        warm, cold = (
            one.complete(prompt, max_tokens=4, stop_tokens=[]).tokens
            for one in (runner, build("llama", {}, context=40))
        )
        assert warm == cold


def test_stop_is_the_default_and_error_is_an_error() -> None:
    """With what was answered so far, and both numbers; neither is one token late."""
    runner, prompt = oracle_runner(context=30), list(range(25))
    for options in ({}, {"overflow": "error", "max_tokens": 5}):
        result = runner.complete(prompt, **options)
        assert (len(result.tokens), result.finish_reason) == (5, "length")
    shown = []
    with pytest.raises(ContextFullError, match="filled the context of 30 tokens after 5 tokens"):
        for chunk in runner.generate(prompt, overflow="error"):
            shown.append(chunk.token)
    assert shown == result.tokens
    assert runner.entry.is_true
    for overflow in ("stop", "error"):
        with pytest.raises(ContextLengthError):
            runner.generate(list(range(30)), overflow=overflow)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overflow": "explode"}, "overflow: 'explode' is not known, it has to be one of stop, s"),
        ({"overflow": "shift", "keep": 29}, "keep: 29 tokens leave no room in the context of 30"),
        ({"keep": -1}, "keep: -1 is out of range"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        oracle_runner(context=30).generate([1, 2], **options)

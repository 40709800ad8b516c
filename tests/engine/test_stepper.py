"""Many requests at once give each the answer that it would have got alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from support import histories
from support.engine import (
    AHEAD,
    SAMPLED,
    Engine,
    backend,
    largest_step,
    request_of,
    sample,
    sample_at_most,
)
from support.histories import Parts, alone, computed, tiny_parts
from support.models import LLAMA3

from mlxrunner import (
    ContextLengthError,
    MlxrunnerError,
    OptionError,
    PromptError,
    Runner,
    SessionError,
)
from mlxrunner.cache.pool.attention_split import WORTH_SPLITTING
from mlxrunner.errors import CacheFullError, NoFreeSlotError

pytestmark = pytest.mark.usefixtures("proved_once")

YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: histories.ARCHITECTURES[name] for name in ("llama", "qwen3", "phi3", "mixtral")},
    **{name: {} for name in ("mistral", "gemma3_text", "gpt_oss", "qwen2")},
    "llama with yarn": {"rope_scaling": YARN | {"original_max_position_embeddings": 64}},
    "llama with llama3 rope": {"rope_scaling": LLAMA3},
    "qwen3_moe": {"head_dim": 16, "rope_theta": 1e4, "num_experts_per_tok": 2}
    | EXPERTS
    | {"mlp_only_layers": [], "norm_topk_prob": True},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}


def some_prompts(seed: int, count: int) -> list[list[int]]:
    """Some share prefixes of several lengths, some share nothing."""
    rng = random.Random(seed)
    trunk = [rng.randrange(290) for _ in range(80)]
    prompts = []
    for _ in range(count):
        shared = trunk[: rng.choice([0, 0, 20, 50, 80])]
        prompts.append(shared + [rng.randrange(290) for _ in range(rng.randint(1, 25))])
    return prompts


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    "worth", [0, WORTH_SPLITTING, float("inf")], ids=["in parts", "as chosen", "at once"]
)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_answer_is_that_of_the_single_runner(name: str, worth: float) -> None:
    """Every architecture with a rope gives the single runner's answers, also windows and sinks."""
    given = tiny_parts(name.split(" ")[0], **ARCHITECTURES[name])
    prompts = some_prompts(1, 12)
    with Engine(*given, max_sequences=4, context=160, prefill_step=37) as runner:
        assert backend(runner).can_split == (name != "gemma2")
        backend(runner).worth_splitting = worth
        results = runner.run(prompts, max_tokens=10, stop_tokens=[])
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == alone(given, prompt, 10)
        assert result.finish_reason == "length"


def test_first_tokens_are_told_before_the_next_step_is_dispatched(
    llama: Parts,
) -> None:
    """Later tokens are read while the device runs the next step."""
    with Engine(*llama, max_sequences=2, context=50) as runner:
        told: list[tuple[int, list[int], int]] = []
        handles = [runner.submit([5, 6, 7], max_tokens=4, stop_tokens=[])]
        runner.tell_first(
            lambda: told.append(
                (
                    runner.steps,
                    [len(request_of(handle).said) for handle in handles],
                    request_of(handles[-1]).sampled,
                )
            )
        )
        runner.step()
        assert told == []
        runner.step()
        assert told == [(2, [1], 1)]
        handles.append(runner.submit([8, 9], max_tokens=4, stop_tokens=[]))
        tokens = [chunk.token for handle in reversed(handles) for chunk in handle]
        assert told[1:] == [(4, [3, 1], 1)]
    assert tokens == [token for prompt in ([8, 9], [5, 6, 7]) for token in alone(llama, prompt, 4)]


def test_closing_gives_the_model_back_as_it_was(llama: Parts) -> None:
    """The same ropes and norms, and the single runner works while it is open, too."""
    model = llama[0]
    before = [layer.self_attn.rope for layer in model.layers], model.model.norm
    kind = type(model.layers[0].self_attn)
    expected = alone(llama, [5, 6, 7], 5)
    with Engine(*llama, max_sequences=2, context=50):
        assert model.layers[0].self_attn.rope is not before[0][0]
        assert type(model.layers[0].self_attn) is not kind
        assert computed(llama, [5, 6, 7], 5) == expected
    assert ([layer.self_attn.rope for layer in model.layers], model.model.norm) == before
    assert {type(layer.self_attn) for layer in model.layers} == {kind}


def test_a_shared_prefix_is_evaluated_and_stored_once(
    llama: Parts,
) -> None:
    """Also when all prompts come at the same time."""
    prefix = [i * 7 % 290 for i in range(100)]
    prompts = [[*prefix, 100 + i, i] for i in range(6)]
    with Engine(*llama, max_sequences=6, context=120, prefill_step=64) as runner:
        results = runner.run(prompts, max_tokens=4, stop_tokens=[])
        assert backend(runner).groups[0].num_used_by(range(6)) == 100 + 6 * (2 + 3)
    assert [r.usage.cached_tokens for r in results] == [0, *[100] * 5]
    assert [r.usage.outcome for r in results] == ["miss", *["partial"] * 5]
    assert all(r.tokens == alone(llama, p, 4) for r, p in zip(results, prompts, strict=True))


def test_each_request_has_its_own_sampler_seed_stops_and_limits(
    llama: Parts,
) -> None:
    prompts = some_prompts(3, 6)
    answer = alone(llama, prompts[3], 12)
    options: list[dict[str, Any]] = [
        {"max_tokens": 9, "temperature": 1.3, "seed": 5},
        {"max_tokens": 9, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 6},
        {
            "max_tokens": 7,
            "repetition_penalty": 1.8,
            "presence_penalty": 0.5,
            "penalty_context": 100,
        },
        {"max_tokens": 12, "stop_tokens": [answer[4]]},
        {"max_tokens": 1},
        {"max_tokens": 6, "logprobs": 3},
    ]
    expected = [alone(llama, p, **o) for p, o in zip(prompts, options, strict=True)]
    for seed in range(3):
        order = random.Random(seed).sample(range(6), 6)
        with Engine(*llama, max_sequences=3 + seed, context=200, prefill_step=20) as runner:
            requests = [(prompts[i], {"stop_tokens": []} | options[i]) for i in order]
            results = dict(zip(order, runner.run_each(requests), strict=True))
        assert [results[i].tokens for i in range(6)] == expected
        assert results[3].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, PromptError, "empty"),
        (list(range(50)), {}, ContextLengthError, "has 50 tokens.*context of 50"),
        ([1, 300], {}, PromptError, "vocabulary of 300"),
        ([1, 2], {"overflow": "shift", "keep": 49}, OptionError, "keep: 49 tokens leave no room"),
    ],
    ids=["empty", "too-long", "unknown", "keep"],
)
def test_a_bad_request_is_refused_at_once(
    llama: Parts, prompt: list[int], options: Any, error: type[Exception], message: str
) -> None:
    """It takes no slot."""
    with Engine(*llama, max_sequences=1, context=50) as runner:
        with pytest.raises(error, match=message):
            runner.submit(prompt, **options)
        running = runner.submit([1, 2], max_tokens=3, stop_tokens=[])
        with pytest.raises(NoFreeSlotError):
            runner.submit([3])
        assert len(running.result().tokens) == 3


@pytest.mark.parametrize(
    "settings",
    [
        *({"kv_cache_tokens": 1}, {"kv_cache_tokens": "9"}, {"context": -1}),
        *({"max_step_ms": -1}, {"max_step_ms": 10**400}, {"prefill_step": 1}),
        *({"cache_memory": wrong} for wrong in (0, "8 GB", True, 1.5)),
        *({"disk_cache_bytes": 10**6, "disk_cache_dir": wrong} for wrong in (5, b"here")),
        {"disk_cache_dir": "here"},
    ],
    ids=repr,
)
def test_wrong_settings_are_refused_before_anything_is_loaded(settings: dict[str, Any]) -> None:
    name = list(settings)[-1]
    with pytest.raises(OptionError, match=f"^{name}: "):
        Engine.load("demo", **{"max_sequences": 2, "context": 64, **settings})
    with pytest.raises(SessionError, match="null byte"):
        Engine.load("demo", max_sequences=2, disk_cache_bytes=10**6, disk_cache_dir="a\0b")


def failing(runner: Engine, call: int, error: BaseException) -> None:
    """Let the call number `call` of a layer's cache raise `error`, once."""
    calls = 0

    def fail(put: Any, keys: mx.array, values: mx.array) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return put(keys, values)

    for view in backend(runner)._views:
        view.update_and_fetch = partial(  # type: ignore[method-assign]
            fail, view.update_and_fetch
        )


@pytest.mark.parametrize("call", range(1, 8))
def test_an_interrupted_step_leaves_nothing_wrong_behind(llama: Parts, call: int) -> None:
    """Its requests are ended; only what was evaluated before it is shared."""
    prompt = list(range(30))
    with Engine(*llama, max_sequences=2, context=80, prefill_step=16) as runner:
        running = runner.submit(prompt, max_tokens=5, stop_tokens=[])
        other = runner.submit([9, 8, 7], max_tokens=5, stop_tokens=[])
        failing(runner, call, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            list(running)
        for handle in (running, other):
            with pytest.raises(MlxrunnerError, match="was ended by"):
                handle.result()
        result = runner.submit([*prompt, 1], max_tokens=5, stop_tokens=[]).result()
        # Each step has two calls and 16 tokens, of which `other` takes 3, then 1 in each step.
        assert result.usage.cached_tokens == [0, 13, 13 + 15, 30][(call - 1) // 2]
        assert result.tokens == alone(llama, [*prompt, 1], 5)


@pytest.mark.parametrize("call", range(1, 14, 2))
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seed"])
def test_a_step_that_fails_once_is_run_again(
    llama: Parts, call: int, options: dict[str, Any]
) -> None:
    """No answer changes and no request ends, at whatever layer and step it fails."""
    prompts = [list(range(30)), [9, 8, 7], list(range(20, 50))]
    with Engine(*llama, max_sequences=3, context=80, prefill_step=16) as runner:
        failing(runner, call, RuntimeError("from a layer"))
        results = runner.run(prompts, max_tokens=5, stop_tokens=[], **options)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == alone(llama, prompt, 5, **options)


def test_buffers_that_cannot_be_evaluated_after_a_failed_step_are_dropped(
    llama: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is evaluated again, and no answer changes."""
    prompts = [list(range(30)), [9, 8, 7]]
    with Engine(*llama, max_sequences=2, context=80, prefill_step=16) as runner:
        failing(runner, 9, RuntimeError("from a layer"))
        forget, forgotten = backend(runner).forget, []
        monkeypatch.setattr(backend(runner), "state", lambda: mx.arange(3) @ mx.arange(2))
        monkeypatch.setattr(backend(runner), "forget", lambda: forgotten.append(forget()))
        results = runner.run(prompts, max_tokens=5, stop_tokens=[])
        assert len(forgotten) == 1
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == alone(llama, prompt, 5)


def test_tokens_that_cannot_be_read_are_computed_again(
    llama: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All buffers are dropped, and every running request begins again and continues as it was."""
    prompts = [list(range(30)), [9, 8, 7], list(range(20, 50))]
    options: dict[str, Any] = {"max_tokens": 9, "stop_tokens": [], "temperature": 1.0, "seed": 5}
    expected = [alone(llama, prompt, **options) for prompt in prompts]
    with Engine(*llama, max_sequences=3, context=80, prefill_step=16) as runner:
        handles = [runner.submit(prompt, **options) for prompt in prompts]
        for _ in range(7):
            runner.step()
        calls = 0

        def fail(*arrays: Any) -> None:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise RuntimeError("out of memory")
            evaluate(*arrays)

        evaluate = mx.eval
        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", fail)
            runner.step()
        assert calls >= 2
        assert [handle.result().tokens for handle in handles] == expected


def test_many_slots_are_reserved_by_sampling_for_a_few(llama: Any) -> None:
    """Sampling for each of a thousand took minutes."""
    with Engine(*llama, max_sequences=40, context=8) as runner:
        few = largest_step(backend(runner), 80, 3, 8)
        many = largest_step(backend(runner), 80, 40, 8)
    kept = 4  # keys and values after one layer of each kind, in two passes
    assert (len(few) - kept) / 3 == (len(many) - kept) / SAMPLED


def test_buffers_are_allocated_once() -> None:
    """By the reserving pass, for all cells, and never again; the plan says how much."""
    with Engine.load("demo", max_sequences=4, context=256, prefill_step=64) as runner:
        assert runner.plan is not None
        stored = sum(group.nbytes for group in backend(runner).groups)
        assert stored == 6 * 2 * 192 * 4 * 4 * 256
        assert any(line.total == stored for line in runner.plan.lines)
        before = mx.get_active_memory()
        runner.run([[1, 2, 3 + i] for i in range(8)], max_tokens=20, stop_tokens=[])
        assert sum(group.nbytes for group in backend(runner).groups) == stored
        assert mx.get_active_memory() - before < stored // 20


@pytest.mark.parametrize(
    ("prompt", "options", "context"),
    [
        ([{"role": "user", "content": "Tell me a joke."}], {"max_tokens": 20}, None),
        ([9] * 70, {"keep": 3, "max_tokens": 5, "stop_tokens": ()}, 64),  # longer than the context
        ([9] * 20, {"keep": 3, "max_tokens": 90, "stop_tokens": ()}, 64),
        ([9] * 20, {"keep": 40, "max_tokens": 5, "stop_tokens": ()}, 64),  # more than they need
        ([9] * 50, {"overflow": "stop", "max_tokens": 40, "stop_tokens": ()}, 64),
        ([9] * 50, {"max_tokens": 200, "stop_tokens": ()}, 64),
    ],
)
def test_several_answers_are_those_of_the_single_runner(
    prompt: Any, options: dict[str, Any], context: int | None
) -> None:
    """Each with its counted seed, in the context that was asked for, however little they need."""
    asked: dict[str, Any] = {"overflow": "shift", "temperature": 1.0} | options
    given: dict[str, Any] = {"parallel": 2, "loading": {"context": context}, "seed": 4}
    results = list(sample("demo", prompt, 3, **given, **asked))
    runner = Runner.load("demo", context=context, reserve=False)
    for i, result in enumerate(results):
        single = runner.complete(prompt, seed=4 + i, **asked)
        assert (result.tokens, result.text) == (single.tokens, single.text)
        assert result.finish_reason == single.finish_reason
        assert result.usage.cache.shifted_tokens == single.usage.cache.shifted_tokens
    assert len({result.text for result in results}) > 1


def test_several_answers_of_no_given_length_end_after_some_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A context that has more room is not full then, whatever the rule for that."""
    sample_at_most(30, monkeypatch)
    for overflow in ("stop", "shift", "error"):
        more: dict[str, Any] = {"overflow": overflow, "stop_tokens": ()}
        results = sample("demo", [9], 2, parallel=2, loading={"context": 200}, **more)
        assert [(len(one.tokens), one.finish_reason) for one in results] == [(30, "length")] * 2


def test_run_each_reads_no_further_ahead_than_it_has_to(
    llama: Parts,
) -> None:
    """A million requests need no memory at once, and first answers come before late requests."""
    read = []

    def requests() -> Iterator[tuple[list[int], dict[str, Any]]]:
        for index, prompt in enumerate(some_prompts(3, 60)):
            read.append(index)
            yield prompt, {"max_tokens": 30 if index == 5 else 2, "stop_tokens": []}

    with Engine(*llama, max_sequences=2, context=160) as runner:
        ahead = []
        for number, result in enumerate(runner.run_each(requests())):
            ahead.append(len(read) - number)
            assert len(result.tokens) == (30 if number == 5 else 2)
    assert len(ahead) == 60
    assert max(ahead) <= AHEAD * 2 + 1


def test_two_that_wait_for_a_cancelled_prefix_do_not_wait_for_each_other(
    llama: Parts,
) -> None:
    """The slot that one of them takes its prefix from may be given to the other in between."""
    prefix = list(range(1, 101))
    with Engine(*llama, max_sequences=2, context=150) as runner:
        first = runner.submit([*prefix, 5], max_tokens=3, stop_tokens=[])
        second = runner.submit([*prefix, 6], max_tokens=3, stop_tokens=[])
        first.cancel()
        third = runner.submit([*prefix, 7], max_tokens=3, stop_tokens=[])
        for _ in range(20):
            runner.step()
        assert second.finished
        assert third.finished
        assert second.result().tokens == alone(llama, [*prefix, 6], 3)
        assert third.result().tokens == alone(llama, [*prefix, 7], 3)


def test_a_prefix_of_an_idle_slot_counts_where_cells_are_few(
    llama: Parts,
) -> None:
    """A request that might not fit beside running ones is refused at once, and those continue."""
    prefix = list(range(1, 70))
    with Engine(*llama, max_sequences=2, context=100, kv_cache_tokens=100) as runner:
        runner.submit(prefix, max_tokens=1, stop_tokens=[]).result()
        running = runner.submit([200, 201, 202], max_tokens=25, stop_tokens=[])
        runner.step()
        with pytest.raises(CacheFullError):
            runner.submit([*prefix, 7], max_tokens=20, stop_tokens=[])
        assert len(running.result().tokens) == 25

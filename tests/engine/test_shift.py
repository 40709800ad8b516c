"""A full context among others is dropped, moved or evaluated again as in a single runner."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from support.engine import Engine, backend, claim_least, move_no_keys, request_of, sample
from support.histories import Parts, tiny_parts
from support.sample import fewer

from mlxrunner import ContextFullError, Runner
from mlxrunner.errors import CacheFullError
from mlxrunner.results import Result

pytestmark = pytest.mark.usefixtures("proved_once")

CONTEXT = 100
WINDOWS = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 512,
    "sliding_window_pattern": 4,
    "rope_theta": 1e4,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "cohere2": WINDOWS,  # its full layers have a rope that they do not use
    "smollm3": {"no_rope_layer_interval": 2, "num_hidden_layers": 4},
    "exaone4": WINDOWS
    | {"sliding_window_pattern": "LLLG", "rope_scaling": {"rope_type": "default"}},
}


@cache
def parts(name: str) -> Parts:
    return tiny_parts(name, **ARCHITECTURES[name])


def prompt(length: int, seed: int = 7) -> list[int]:
    return [i * seed % 290 for i in range(length)]


def alone(given: Parts, tokens: list[int], **options: Any) -> Result:
    return Result.of(
        list(Runner(*given, context=CONTEXT, rewind_slack=600).generate(tokens, **options))
    )


@pytest.mark.exhaustive(3)
@pytest.mark.parametrize(
    ("length", "name"),
    [
        *((20, name) for name in ARCHITECTURES),
        *product((90, 150), ("llama", "exaone4")),
    ],
)
def test_a_shifted_answer_is_that_of_the_single_runner(name: str, length: int) -> None:
    """The answer after shifts is the single runner's, for prompts that fit or are cut."""
    given, options = (
        parts(name),
        {"max_tokens": 130, "stop_tokens": [], "overflow": "shift", "keep": 4, "logprobs": 0},
    )
    expected = alone(given, prompt(length), **options)
    with Engine(*given, max_sequences=3, context=CONTEXT, prefill_step=32) as runner:
        beside = runner.submit([*prompt(18), 280, 281], max_tokens=70, stop_tokens=[])
        result = runner.submit(prompt(length), **options).result()
        assert result.tokens == expected.tokens
        assert result.usage.cache.shifted_tokens == expected.usage.cache.shifted_tokens > 40
        assert result.usage.cache.reevaluated_tokens == 0
        for ours, its in zip(result.logprobs or [], expected.logprobs or [], strict=True):
            assert ours[0] == pytest.approx(its[0], abs=1e-4)
        assert (
            beside.result().tokens
            == alone(given, [*prompt(18), 280, 281], max_tokens=70, stop_tokens=[]).tokens
        )


@pytest.mark.exhaustive(3)
@pytest.mark.parametrize(
    ("name", "keep", "window"),
    [
        (("gemma3_text", "olmo3", "cohere2", "gpt_oss")[number % 4], keep, window)
        for number, (keep, window) in enumerate(product((0, 20), (8, 41, 42, 99, 100, 120)))
    ],
)
def test_a_window_that_lacks_what_the_next_token_sees_is_evaluated_again(
    name: str, keep: int, window: int
) -> None:
    """Windows of any width are moved or evaluated again, and the answer is the single runner's."""
    layers = (
        {"layer_types": ["sliding_attention", "full_attention"] * 2}
        if name in ("olmo3", "gpt_oss")
        else {}
    )
    config = WINDOWS | {"sliding_window": window, "sliding_window_pattern": 2}
    given = tiny_parts(name, **(config | layers))
    options = {
        "max_tokens": 110,
        "stop_tokens": [],
        "overflow": "shift",
        "keep": keep,
        "logprobs": 0,
    }
    expected = Result.of(list(Runner(*given, context=CONTEXT).generate(prompt(90), **options)))
    is_moved = window > CONTEXT or keep == 0 or CONTEXT - (CONTEXT - keep) // 2 - window + 1 >= keep
    with Engine(*given, max_sequences=3, context=CONTEXT, prefill_step=32) as runner:
        beside = runner.submit([*prompt(18), 280, 281], max_tokens=70, stop_tokens=[])
        result = runner.submit(prompt(90), **options).result()
        assert result.tokens == expected.tokens
        assert (
            (result.usage.cache.reevaluated_tokens == 0)
            == (expected.usage.cache.reevaluated_tokens == 0)
            == is_moved
        )
        for ours, its in zip(result.logprobs or [], expected.logprobs or [], strict=True):
            assert ours[0] == pytest.approx(its[0], abs=1e-4)
        assert (
            beside.result().tokens
            == alone(given, [*prompt(18), 280, 281], max_tokens=70, stop_tokens=[]).tokens
        )


@pytest.mark.parametrize("reused", [0, 30, 60])
def test_whether_a_window_is_moved_does_not_depend_on_what_was_reused(reused: int) -> None:
    """Moving a window is independent of how much more it stores than it shows."""
    config = WINDOWS | {"sliding_window": 70, "sliding_window_pattern": 2}
    given = tiny_parts("gemma3_text", **config)
    options = {"max_tokens": 60, "stop_tokens": [], "overflow": "shift", "keep": 20}
    runner = Runner(*given, context=CONTEXT, rewind_slack=5)
    if reused:
        list(runner.generate(prompt(reused) + [290] * 8, max_tokens=1, stop_tokens=[]))
    expected = Result.of(list(Runner(*given, context=CONTEXT).generate(prompt(90), **options)))
    assert Result.of(list(runner.generate(prompt(90), **options))).tokens == expected.tokens


def test_a_shifted_conversation_is_shared_only_as_far_as_a_cold_run_would_store_it() -> None:
    """A prompt that equals what a shift has left gets the answer that it gets alone."""
    given, options = (
        parts("llama"),
        {"max_tokens": 40, "stop_tokens": [], "overflow": "shift", "keep": 4},
    )
    with Engine(*given, max_sequences=3, context=CONTEXT, prefill_step=32) as runner:
        shifting = runner.submit(prompt(90), **options)
        while not request_of(shifting).shifted:
            runner.step()
        left = request_of(shifting).slot.tokens.array.tolist()
        during = runner.submit([*left[:45], 5], max_tokens=8, stop_tokens=[]).result()
        shifting.result()
        after = runner.submit([*left[:45], 6], max_tokens=8, stop_tokens=[]).result()
    assert during.usage.cached_tokens == 4
    assert during.tokens == alone(given, [*left[:45], 5], max_tokens=8, stop_tokens=[]).tokens
    assert after.tokens == alone(given, [*left[:45], 6], max_tokens=8, stop_tokens=[]).tokens


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize(
    ("seed", "name"), [*((seed, "llama") for seed in range(6)), (6, "cohere2"), (7, "cohere2")]
)
def test_moved_tokens_are_not_reused_by_prompts_that_look_alike(name: str, seed: int) -> None:
    """Prompts of two words share any number of tokens; each answer is that of a new runner."""
    given, rng = parts(name), random.Random(seed)
    runner = Runner(*given, context=CONTEXT, rewind_slack=600)
    for _ in range(10):
        prompt = rng.choices([5, 6], [9, 1], k=rng.randrange(3, 130))
        options = {
            "max_tokens": rng.choice([3, 30, 110]),
            "keep": rng.choice([1, 4, 4, 20]),
            "overflow": "shift",
            "stop_tokens": [],
            "logprobs": 0,
        }
        found = Result.of(list(runner.generate(prompt, **options)))
        cold = alone(given, prompt, **options)
        assert found.tokens == cold.tokens
        for ours, its in zip(found.logprobs or [], cold.logprobs or [], strict=True):
            assert ours[0] == pytest.approx(its[0], abs=1e-4)


def test_what_cannot_be_moved_is_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The single runner does the same."""
    move_no_keys(monkeypatch)
    given, options = (
        parts("llama"),
        {"max_tokens": 130, "stop_tokens": [], "overflow": "shift", "keep": 4},
    )
    expected = alone(given, prompt(90), **options)
    with Engine(*given, max_sequences=2, context=CONTEXT, prefill_step=32) as runner:
        beside = runner.submit(prompt(30, 11), max_tokens=60, stop_tokens=[])
        result = runner.submit(prompt(90), **options).result()
        assert result.tokens == expected.tokens
        assert result.usage.cache.reevaluated_tokens == expected.usage.cache.reevaluated_tokens > 0
        assert (
            beside.result().tokens
            == alone(given, prompt(30, 11), max_tokens=60, stop_tokens=[]).tokens
        )


@pytest.mark.exhaustive(3)
@pytest.mark.parametrize("length", [98, 99, 100, 101, 140])
@pytest.mark.parametrize("choice", ["a", "ab", "abc", "abcde"])
@pytest.mark.parametrize("moves", [True, False])
def test_an_answer_that_ends_in_a_full_context_drops_as_much_as_the_single_runner(
    length: int, choice: str, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request, and a context that is evaluated again, do not change it."""
    if not moves:
        move_no_keys(monkeypatch)
    given, options = parts("llama"), {"overflow": "shift", "keep": 98, "choices": [choice, "xy"]}
    expected = alone(given, prompt(length), **options)
    with Engine(*given, max_sequences=3, context=CONTEXT) as runner:
        handles = [runner.submit(prompt(length), **options) for _ in range(2)]
        results = [handle.result() for handle in handles]
    dropped = [(one.text, one.usage.cache.shifted_tokens) for one in results]
    assert dropped == [(expected.text, expected.usage.cache.shifted_tokens)] * 2


@pytest.mark.exhaustive(0)
def test_many_that_shift_and_share_in_few_cells() -> None:
    """No request begins that might not fit, and none ends because another copies shared tokens."""
    given = parts("llama")
    requests = [
        (
            [*prompt(60), 200 + i],
            {"max_tokens": 80 + i, "stop_tokens": [], "overflow": "shift", "keep": 40 + i},
        )
        for i in range(6)
    ]
    for cells in (110, 150, 250)[: fewer(3, 1)]:
        with Engine(
            *given, max_sequences=4, context=CONTEXT, kv_cache_tokens=cells, prefill_step=32
        ) as runner:
            for (tokens, options), result in zip(requests, runner.run_each(requests), strict=True):
                assert result.tokens == alone(given, tokens, **options).tokens, f"{cells} cells"


def test_an_idle_conversation_makes_way_for_shared_tokens_that_move() -> None:
    """They need cells of their own then, as many as the idle one has taken."""
    given, options = parts("llama"), {"stop_tokens": [], "overflow": "shift", "keep": 4}
    with Engine(
        *given, max_sequences=2, context=CONTEXT, kv_cache_tokens=110, prefill_step=32
    ) as runner:
        runner.complete(prompt(98), max_tokens=1, stop_tokens=[])
        shifting = [*prompt(88), 5, 6]
        found = runner.complete(shifting, max_tokens=40, **options)
    assert found.usage.cached_tokens == 88
    assert found.tokens == alone(given, shifting, max_tokens=40, **options).tokens


def test_a_request_that_shifts_needs_no_more_than_a_context() -> None:
    """The limit of its answer does not matter."""
    with Engine(
        *parts("llama"), max_sequences=2, context=CONTEXT, kv_cache_tokens=CONTEXT
    ) as runner:
        running = runner.submit([1, 2, 3], max_tokens=200, stop_tokens=[], overflow="shift")
        with pytest.raises(
            CacheFullError, match="this request needs 2 free cells, but 0 of 100 are free"
        ):
            runner.submit([4], max_tokens=1)
        assert len(running.result().tokens) == 200


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("max_tokens", [None, 100])
def test_several_answers_that_shift(max_tokens: int | None) -> None:
    """`generate --n 2 --overflow shift`, where the context is too small for the answers."""
    text, options = (
        "word " * 90,
        {
            "max_tokens": max_tokens,
            "overflow": "shift",
            "stop_tokens": [],
            "temperature": 1.0,
            "seed": 3,
        },
    )
    runner = Runner.load("demo", context=128, reserve=False)
    results = list(sample("demo", text[:300], 2, parallel=2, loading={"context": 128}, **options))
    for i, result in enumerate(results):
        single = list(runner.generate(text[:300], **(options | {"seed": 3 + i})))
        assert result.tokens == [chunk.token for chunk in single]
        assert result.usage.cache.shifted_tokens > 0


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_shifted_answer_that_steps_back_is_that_of_the_single_runner(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved keys can't be had from the kept tokens alone: all are evaluated again."""
    claim_least(8, 8, monkeypatch)
    given = tiny_parts(name)
    options: dict[str, Any] = {"overflow": "shift", "keep": 5, "stop_tokens": [], "logprobs": 0}
    with Engine(
        *given, max_sequences=2, context=CONTEXT, kv_cache_tokens=120, prefill_step=16
    ) as runner:
        shifted = runner.submit(prompt(20), max_tokens=250, priority="batch", **options)
        while request_of(shifted).shifted < 60:
            runner.step()
        other = runner.submit(prompt(11, 5), max_tokens=80, stop_tokens=[])
        while request_of(shifted).is_placed and not other.finished:
            runner.step()
        assert not request_of(shifted).is_placed  # it stepped back
        result, expected = shifted.result(), alone(given, prompt(20), max_tokens=250, **options)
    assert result.tokens == expected.tokens
    assert result.usage.cache.shifted_tokens == expected.usage.cache.shifted_tokens
    pairs = zip(result.logprobs or [], expected.logprobs or [], strict=True)
    assert max(abs(ours[0] - its[0]) for ours, its in pairs) < 1e-4


def test_a_shifted_answer_whose_keys_are_lost_is_that_of_the_single_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step fails in a way that leaves nothing of the caches."""
    given = tiny_parts("llama")
    options: dict[str, Any] = {"overflow": "shift", "keep": 5, "stop_tokens": [], "max_tokens": 250}
    evaluate, failures = mx.eval, [RuntimeError("lost"), RuntimeError("lost")]

    def fail(*arrays: Any) -> None:
        if failures:
            raise failures.pop()
        evaluate(*arrays)

    with Engine(*given, max_sequences=2, context=CONTEXT, prefill_step=16) as runner:
        handles = [runner.submit(prompt(length), **options) for length in (20, 31)]
        while any(request_of(handle).shifted < 60 for handle in handles):
            runner.step()
        monkeypatch.setattr(mx, "eval", fail)
        results = [handle.result() for handle in handles]
    assert not failures
    for result, length in zip(results, (20, 31), strict=True):
        assert result.tokens == alone(given, prompt(length), **options).tokens


def test_a_token_that_was_not_read_where_the_context_ends_is_sampled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first pass over the kept text fails, and so does reading the step before it."""
    move_no_keys(monkeypatch)
    given, unread = parts("llama"), list[int]()
    options: dict[str, Any] = {"overflow": "shift", "keep": 4, "stop_tokens": [], "max_tokens": 40}
    failures = [RuntimeError("no token"), RuntimeError("no pass")]
    with Engine(*given, max_sequences=2, context=CONTEXT, prefill_step=32) as runner:
        beside = runner.submit(prompt(30, 11), max_tokens=60, stop_tokens=[])
        handle = runner.submit(prompt(90), **options)
        forward, evaluate = backend(runner).forward, mx.eval

        def run(*arguments: Any, **more: Any) -> mx.array:
            request = request_of(handle)
            if len(failures) == 2 and request.shifted:
                unread.append(request.sampled - len(request.said))
                raise failures.pop()
            return forward(*arguments, **more)

        def read(*arrays: Any) -> None:
            if len(failures) == 1:
                raise failures.pop()
            evaluate(*arrays)

        monkeypatch.setattr(backend(runner), "forward", run)
        monkeypatch.setattr(mx, "eval", read)
        result, other = handle.result(), beside.result()
    assert (unread, failures) == ([1], [])
    assert other.tokens == alone(given, prompt(30, 11), max_tokens=60, stop_tokens=[]).tokens
    assert result.tokens == alone(given, prompt(90), **options).tokens


def test_an_answer_may_fail_where_the_context_ends() -> None:
    """overflow="error": what there was, and then an error of this request alone."""
    given = parts("llama")
    with Engine(*given, max_sequences=2, context=CONTEXT) as runner:
        beside = runner.submit(prompt(30, 11), max_tokens=60, stop_tokens=[])
        failing = runner.submit(prompt(90), overflow="error", stop_tokens=[])
        seen = []
        with pytest.raises(ContextFullError, match="10"):
            seen.extend(failing)
        with pytest.raises(ContextFullError):
            for chunk in failing:
                seen.append(chunk)
        assert (
            beside.result().tokens
            == alone(given, prompt(30, 11), max_tokens=60, stop_tokens=[]).tokens
        )
        assert (
            runner.submit(prompt(90), overflow="error", max_tokens=10, stop_tokens=[])
            .result()
            .finish_reason
            == "length"
        )

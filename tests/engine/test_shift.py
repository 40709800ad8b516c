"""A full context among others is dropped, moved or evaluated again as in a single runner."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from support.engine import Engine, backend, claim_least, move_no_keys, request_of
from support.histories import Parts, tiny_parts
from support.sample import fewer

from mlxrunner import ContextFullError, Runner
from mlxrunner.cache.layers.factory import DEFAULT_SLACK
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


def alone(given: Parts, tokens: list[int], slack: int = 600, **options: Any) -> Result:
    runner = Runner(*given, context=CONTEXT, rewind_slack=slack)
    return runner.complete(tokens, **({"stop_tokens": []} | options))


def over(keep: int = 4, max_tokens: int = 130, **more: Any) -> dict[str, Any]:
    """Return the options of an answer that goes over the edge of the context."""
    return {"overflow": "shift", "keep": keep, "max_tokens": max_tokens, "stop_tokens": []} | more


def assert_alike(result: Result, expected: Result) -> None:
    """Compare tokens, what was dropped, and the log-probabilities that were asked for."""
    assert result.tokens == expected.tokens
    assert result.usage.cache.shifted_tokens == expected.usage.cache.shifted_tokens
    again = [one.usage.cache.reevaluated_tokens > 0 for one in (result, expected)]
    assert again[0] == again[1]
    for ours, its in zip(result.logprobs or [], expected.logprobs or [], strict=True):
        assert ours[0] == pytest.approx(its[0], abs=1e-4)


BESIDE = [*prompt(18), 280, 281]


@contextmanager
def opened(given: Parts, **settings: Any) -> Iterator[Engine]:
    """Open a runner on which another request is answered as if alone."""
    sizes = {"max_sequences": 3, "context": CONTEXT, "prefill_step": 32} | settings
    with Engine(*given, **sizes) as runner:
        other = runner.submit(BESIDE, max_tokens=70, stop_tokens=[])
        yield runner
        assert other.result().tokens == alone(given, BESIDE, max_tokens=70).tokens


@pytest.mark.exhaustive(3)
@pytest.mark.parametrize(
    ("length", "name"),
    [*((20, name) for name in ARCHITECTURES), *product((90, 150), ("llama", "exaone4"))],
)
def test_a_shifted_answer_is_that_of_the_single_runner(name: str, length: int) -> None:
    """The answer after shifts is the single runner's, for prompts that fit or are cut."""
    given, options = parts(name), over(logprobs=0)
    with opened(given) as runner:
        result = runner.complete(prompt(length), **options)
    assert_alike(result, alone(given, prompt(length), **options))
    cache = result.usage.cache
    assert cache.shifted_tokens > 40
    assert cache.reevaluated_tokens == 0


@pytest.mark.exhaustive(0)
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
    listed = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    config = WINDOWS | {"sliding_window": window, "sliding_window_pattern": 2}
    given = tiny_parts(name, **(config | (listed if name in ("olmo3", "gpt_oss") else {})))
    options = over(keep, 110, logprobs=0)
    is_moved = window > CONTEXT or keep == 0 or CONTEXT - (CONTEXT - keep) // 2 - window + 1 >= keep
    with opened(given) as runner:
        result = runner.complete(prompt(90), **options)
    assert_alike(result, alone(given, prompt(90), slack=DEFAULT_SLACK, **options))
    assert (result.usage.cache.reevaluated_tokens == 0) == is_moved


@pytest.mark.parametrize("reused", [0, 30, 60])
def test_whether_a_window_is_moved_does_not_depend_on_what_was_reused(reused: int) -> None:
    """Moving a window is independent of how much more it stores than it shows."""
    given = tiny_parts(
        "gemma3_text", **WINDOWS | {"sliding_window": 70, "sliding_window_pattern": 2}
    )
    runner = Runner(*given, context=CONTEXT, rewind_slack=5)
    if reused:
        runner.complete(prompt(reused) + [290] * 8, max_tokens=1, stop_tokens=[])
    expected = alone(given, prompt(90), slack=DEFAULT_SLACK, **over(20, 60))
    assert runner.complete(prompt(90), **over(20, 60)).tokens == expected.tokens


def test_a_shifted_conversation_is_shared_only_as_far_as_a_cold_run_would_store_it() -> None:
    """A prompt that equals what a shift has left gets the answer that it gets alone."""
    given = parts("llama")
    with Engine(*given, max_sequences=3, context=CONTEXT, prefill_step=32) as runner:
        shifting = runner.submit(prompt(90), **over(max_tokens=40))
        while not request_of(shifting).shifted:
            runner.step()
        left = request_of(shifting).slot.tokens.array.tolist()
        during = runner.complete([*left[:45], 5], max_tokens=8, stop_tokens=[])
        shifting.result()
        after = runner.complete([*left[:45], 6], max_tokens=8, stop_tokens=[])
    assert during.usage.cached_tokens == 4
    for token, result in ((5, during), (6, after)):
        assert result.tokens == alone(given, [*left[:45], token], max_tokens=8).tokens


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize(
    ("seed", "name"), [*((seed, "llama") for seed in range(4)), (5, "cohere2"), (7, "cohere2")]
)
def test_moved_tokens_are_not_reused_by_prompts_that_look_alike(name: str, seed: int) -> None:
    """Prompts of two words share any number of tokens; each answer is that of a new runner."""
    given, rng = parts(name), random.Random(seed)
    runner = Runner(*given, context=CONTEXT, rewind_slack=600)
    for _ in range(10):
        words = rng.choices([5, 6], [40, 1], k=rng.choice([20, 60, 80, 90, 130]))
        options = over(rng.choice([1, 4, 4, 20]), rng.choice([3, 30, 50, 110]), logprobs=0)
        found, cold = runner.complete(words, **options), alone(given, words, **options)
        assert found.tokens == cold.tokens
        for ours, its in zip(found.logprobs or [], cold.logprobs or [], strict=True):
            assert ours[0] == pytest.approx(its[0], abs=1e-4)


def test_what_cannot_be_moved_is_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The single runner does the same."""
    move_no_keys(monkeypatch)
    with opened(given := parts("llama"), max_sequences=2) as runner:
        result = runner.complete(prompt(90), **over())
    expected = alone(given, prompt(90), **over())
    assert_alike(result, expected)
    cache = result.usage.cache
    assert cache.reevaluated_tokens == expected.usage.cache.reevaluated_tokens > 0


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
    expected = Runner(*given, context=CONTEXT, rewind_slack=600).complete(prompt(length), **options)
    with Engine(*given, max_sequences=3, context=CONTEXT) as runner:
        handles = [runner.submit(prompt(length), **options) for _ in range(2)]
        results = [handle.result() for handle in handles]
    dropped = [(one.text, one.usage.cache.shifted_tokens) for one in results]
    assert dropped == [(expected.text, expected.usage.cache.shifted_tokens)] * 2


@pytest.mark.exhaustive(0)
def test_many_that_shift_and_share_in_few_cells() -> None:
    """No request begins that might not fit, and none ends because another copies shared tokens."""
    given = parts("llama")
    requests = [([*prompt(60), 200 + i], over(40 + i, 80 + i)) for i in range(6)]
    for cells in (110, 150, 250)[: fewer(3, 1)]:
        sizes = {"max_sequences": 4, "kv_cache_tokens": cells, "prefill_step": 32}
        with Engine(*given, context=CONTEXT, **sizes) as runner:
            for (tokens, options), result in zip(requests, runner.run_each(requests), strict=True):
                assert result.tokens == alone(given, tokens, **options).tokens, f"{cells} cells"


def test_an_idle_conversation_makes_way_for_shared_tokens_that_move() -> None:
    """They need cells of their own then, as many as the idle one has taken."""
    given, shifting, sizes = parts("llama"), [*prompt(88), 5, 6], {"kv_cache_tokens": 110}
    with Engine(*given, max_sequences=2, context=CONTEXT, prefill_step=32, **sizes) as runner:
        runner.complete(prompt(98), max_tokens=1, stop_tokens=[])
        found = runner.complete(shifting, **over(max_tokens=40))
    assert found.usage.cached_tokens == 88
    assert found.tokens == alone(given, shifting, **over(max_tokens=40)).tokens


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


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_shifted_answer_that_steps_back_is_that_of_the_single_runner(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved keys can't be had from the kept tokens alone: all are evaluated again."""
    claim_least(8, 8, monkeypatch)
    given, options = tiny_parts(name), over(5, 250, logprobs=0)
    sizes = {"max_sequences": 2, "kv_cache_tokens": 120, "prefill_step": 16}
    with Engine(*given, context=CONTEXT, **sizes) as runner:
        shifted = runner.submit(prompt(20), priority="batch", **options)
        while request_of(shifted).shifted < 60:
            runner.step()
        other = runner.submit(prompt(11, 5), max_tokens=80, stop_tokens=[])
        while request_of(shifted).is_placed and not other.finished:
            runner.step()
        assert not request_of(shifted).is_placed  # it stepped back
        result, expected = shifted.result(), alone(given, prompt(20), **options)
    assert result.tokens == expected.tokens
    assert result.usage.cache.shifted_tokens == expected.usage.cache.shifted_tokens
    pairs = zip(result.logprobs or [], expected.logprobs or [], strict=True)
    assert max(abs(ours[0] - its[0]) for ours, its in pairs) < 1e-4


def test_a_shifted_answer_whose_keys_are_lost_is_that_of_the_single_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step fails in a way that leaves nothing of the caches."""
    given, options = tiny_parts("llama"), over(5, 250)
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
    given, unread, options = parts("llama"), list[int](), over(max_tokens=40)
    failures = [RuntimeError("no token"), RuntimeError("no pass")]
    with opened(given, max_sequences=2) as runner:
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
        result = handle.result()
    assert (unread, failures) == ([1], [])
    assert result.tokens == alone(given, prompt(90), **options).tokens


def test_an_answer_may_fail_where_the_context_ends() -> None:
    """overflow="error": what there was, and then an error of this request alone."""
    options: dict[str, Any] = {"overflow": "error", "stop_tokens": []}
    with opened(parts("llama"), max_sequences=2) as runner:
        failing = runner.submit(prompt(90), **options)
        for message in ("10", ""):
            with pytest.raises(ContextFullError, match=message):
                list(failing)
        limited = runner.complete(prompt(90), max_tokens=10, **options)
    assert limited.finish_reason == "length"

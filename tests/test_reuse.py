"""Reuse never changes the output, for every cache kind, split point and way to end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mixes import CHECKPOINTS, FEW, NO_HELP, SLACK, Mix, mixes_of
from support.prompts import PROMPT
from support.sample import examples, fewer

from mlxrunner import BusyError, ContextLengthError, OptionError, PromptError, Runner
from mlxrunner.testing import EOS, VOCAB, WINDOW, interrupt_at, oracle_runner

MIXES: dict[str, tuple[list[str], dict[str, int]]] = {
    "full": (["full", "full"], NO_HELP),
    "sliding": (["full", "sliding"], NO_HELP),
    "sliding-slack": (["full", "sliding"], SLACK),
    "sliding-checkpoints": (["sliding", "full"], CHECKPOINTS),
    "recurrent": (["recurrent", "full"], NO_HELP),
    "recurrent-checkpoints": (["recurrent", "full"], CHECKPOINTS),
    "composite": (["composite"], NO_HELP),
    "composite-few-checkpoints": (["composite"], FEW),
    "chunked-checkpoints": (["chunked", "full"], CHECKPOINTS),
    "unknown-checkpoints": (["unknown", "full"], CHECKPOINTS),
    "all": (["full", "sliding", "recurrent", "composite", "chunked"], NO_HELP),
    "all-checkpoints": (["full", "sliding", "recurrent", "composite", "chunked"], CHECKPOINTS),
}


mixes = mixes_of(MIXES)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow and move every few tokens, checkpoints that are close to each other."""
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 4)
    monkeypatch.setattr("mlxrunner.cache.layers.full.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.checkpoints.SPACING", 3)
    monkeypatch.setattr("mlxrunner.engine.pipeline.SEED_TOKENS", 3)


def tokens(runner: Runner, prompt: list[int], n: int = 6, **options: Any) -> list[int]:
    return [
        chunk.token
        for chunk in runner.generate(prompt, max_tokens=n, **options)
        if chunk.token is not None
    ]


def cold(kinds: list[str], prompt: list[int], n: int = 6, **options: Any) -> list[int]:
    return tokens(oracle_runner(kinds), prompt, n, **options)


def is_consistent(runner: Runner) -> bool:
    entry = runner.entry
    return entry.is_true and (len(entry.tokens) > 0 or not entry.caches)


def run_to_the_end(runner: Runner, prompt: list[int]) -> None:
    tokens(runner, prompt)


def close_early(runner: Runner, prompt: list[int]) -> None:
    iterator = runner.generate(prompt, max_tokens=20)
    next(iterator), next(iterator)
    iterator.close()  # type: ignore[attr-defined]


def drop_unread(runner: Runner, prompt: list[int]) -> None:
    runner.generate(prompt)


def stop_on_a_token(runner: Runner, prompt: list[int]) -> None:
    third = cold(runner.model.kinds, prompt)[2]
    assert list(runner.generate(prompt, stop_tokens=[third]))[-1].finish_reason == "stop"


def stop_on_text(runner: Runner, prompt: list[int]) -> None:
    answer = "".join(
        chunk.text for chunk in oracle_runner(runner.model.kinds).generate(prompt, max_tokens=8)
    )
    last = list(runner.generate(prompt, max_tokens=8, stop=answer[2]))[-1]
    assert last.finish_reason == "stop"


def one_token(runner: Runner, prompt: list[int]) -> None:
    tokens(runner, prompt, 1)


def fail(runner: Runner, prompt: list[int], error: BaseException, forward: int, layer: int) -> None:
    """An error from inside the model, before `layer` of its `forward`-th forward pass."""
    model = runner.model
    first = len(model.forwards)

    def on_layer(index: int) -> None:
        if len(model.forwards) - first == forward and index == layer:
            raise error

    model.on_layer = on_layer
    with pytest.raises(type(error)):
        tokens(runner, prompt, 20)
    model.on_layer = lambda index: None


def exception_in_prefill(runner: Runner, prompt: list[int]) -> None:
    fail(runner, prompt, RuntimeError("from the model"), 1, 0)


def interrupt_in_prefill(runner: Runner, prompt: list[int]) -> None:
    fail(runner, prompt, KeyboardInterrupt(), 1, len(runner.model.kinds) - 1)


def interrupt_in_second_chunk(runner: Runner, prompt: list[int]) -> None:
    if len(prompt) - len(runner.entry.tokens) > 20:
        fail(runner, prompt, KeyboardInterrupt(), 2, len(runner.model.kinds) - 1)


def interrupt_in_decode(runner: Runner, prompt: list[int]) -> None:
    fail(runner, prompt, KeyboardInterrupt(), 7, len(runner.model.kinds) - 1)


def sampler_fails(runner: Runner, prompt: list[int]) -> None:
    def processor(history: mx.array, logits: mx.array) -> mx.array:
        if history.shape[0] > len(prompt) + 1:
            raise ZeroDivisionError
        return logits

    with pytest.raises(ZeroDivisionError):
        tokens(runner, prompt, 20, logits_processors=[processor])


def reset(runner: Runner, prompt: list[int]) -> None:
    tokens(runner, prompt)
    runner.reset()


ENDS: dict[str, Callable[[Runner, list[int]], None]] = {
    f.__name__: f
    for f in (
        run_to_the_end,
        close_early,
        drop_unread,
        stop_on_a_token,
        stop_on_text,
        one_token,
        exception_in_prefill,
        interrupt_in_prefill,
        interrupt_in_second_chunk,
        interrupt_in_decode,
        sampler_fails,
        reset,
    )
}


@pytest.mark.exhaustive(10)
@mixes
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_warm_equals_cold_for_every_split_after_every_end(
    mix: Mix, end: Callable[[Runner, list[int]], None]
) -> None:
    """A prompt that leaves the first one at any position, after any end, has the cold tokens."""
    expected = {}
    for split in range(len(PROMPT) + 1):
        second = [*PROMPT[:split], 111, 112] if split < len(PROMPT) else PROMPT
        expected[split] = cold(mix.kinds, second)
    for split, answer in expected.items():
        second = [*PROMPT[:split], 111, 112] if split < len(PROMPT) else PROMPT
        runner = mix.runner()
        end(runner, PROMPT)
        assert is_consistent(runner)
        assert tokens(runner, second) == answer
        assert is_consistent(runner)


@mixes
def test_the_entry_holds_exactly_what_was_evaluated(mix: Mix) -> None:
    """Prompt and answer, but for the last token, which nobody asked to go on from."""
    runner = mix.runner()
    answer = tokens(runner, PROMPT)
    assert runner.entry.tokens == PROMPT + answer[:-1]
    assert sum(runner.model.forwards) == len(runner.entry.tokens)


@mixes
def test_a_conversation_evaluates_only_what_is_new(mix: Mix) -> None:
    """For every kind: appending needs no rewind."""
    runner, history = mix.runner(), list(PROMPT)
    for turn in range(6):
        before = len(runner.entry.tokens)
        answer = list(runner.generate(history, max_tokens=5))
        usage = answer[-1].usage
        assert usage is not None
        assert usage.cached_tokens == before
        assert usage.evaluated_tokens == len(history) - before
        assert usage.outcome == ("hit" if turn else "miss")
        history += [chunk.token for chunk in answer if chunk.token is not None] + [turn, 100 + turn]


def usage_of(runner: Runner, prompt: list[int]) -> Any:
    return list(runner.generate(prompt, max_tokens=3))[-1].usage


def test_a_full_hit_evaluates_exactly_one_token() -> None:
    """There are no logits without evaluating something."""
    runner = oracle_runner()
    usage_of(runner, PROMPT)
    usage = usage_of(runner, PROMPT)
    assert (usage.outcome, usage.cached_tokens, usage.evaluated_tokens) == (
        "hit",
        len(PROMPT) - 1,
        1,
    )
    assert usage.cache.matched_tokens == len(PROMPT)
    assert usage.reason == "prompt_shorter"  # than the entry, which holds the answer too
    assert usage.cache.trimmed_tokens == 3


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        pytest.param(
            [1, 2, 3], ("miss", "no_common_token", 0, 0, len(PROMPT) + 2), id="nothing-in-common"
        ),
        pytest.param(
            [*PROMPT[:10], 1, 2], ("partial", "diverged", 10, 10, len(PROMPT) - 8), id="diverged"
        ),
        pytest.param(
            PROMPT[:10], ("partial", "prompt_shorter", 10, 9, len(PROMPT) - 7), id="shorter"
        ),
    ],
)
def test_the_usage_says_what_was_reused_and_why_not_more(
    second: list[int], expected: tuple[Any, ...]
) -> None:
    """outcome, reason, matched, cached, trimmed."""
    runner = oracle_runner()
    usage_of(runner, PROMPT)
    usage = usage_of(runner, second)
    if expected[1] == "prompt_shorter":  # all that could be was reused
        expected = ("hit", *expected[1:])
    assert (
        usage.outcome,
        usage.reason,
        usage.cache.matched_tokens,
        usage.cached_tokens,
        usage.cache.trimmed_tokens,
    ) == expected
    assert usage.evaluated_tokens == len(second) - usage.cached_tokens


def test_the_first_request_is_a_miss_because_the_entry_was_empty() -> None:
    """A reset is named."""
    runner = oracle_runner()
    assert usage_of(runner, PROMPT).reason == "empty"
    runner.reset()
    usage = usage_of(runner, PROMPT)
    assert (usage.reason, usage.cache.freed_by) == ("entry_freed", "a reset")
    assert usage_of(runner, [*PROMPT, 1]).cache.freed_by is None


@pytest.mark.parametrize("kind", ["sliding", "recurrent", "unknown"])
def test_a_layer_that_cannot_rewind_is_named(kind: str) -> None:
    """Without slack and checkpoints it starts cold and says so."""
    runner = oracle_runner(["full", kind], **NO_HELP)
    assert len(PROMPT) > WINDOW
    usage_of(runner, PROMPT)
    usage = usage_of(runner, [*PROMPT[:18], 1, 2])
    assert (usage.outcome, usage.reason, usage.cache.rewind_limited_by) == (
        "miss",
        "rewind_limited",
        kind,
    )
    assert (usage.cache.matched_tokens, usage.cached_tokens) == (18, 0)


@pytest.mark.parametrize("kind", ["sliding", "recurrent", "unknown", "composite", "chunked"])
def test_a_checkpoint_is_the_way_back(kind: str) -> None:
    """The usage names the layer and the last checkpoint that a request goes back to."""
    runner = oracle_runner(
        ["full", kind], rewind_slack=0, checkpoint_interval=1000, checkpoint_budget=10**6
    )
    prompt = [*PROMPT[:9], EOS, *PROMPT[10:]]  # a system prompt of 10 tokens
    usage_of(runner, prompt)
    assert runner.entry.checkpoints.offsets[0] == 10
    usage = usage_of(runner, [*prompt[:14], 1, 2])
    assert (usage.outcome, usage.cache.matched_tokens, usage.cached_tokens) == ("partial", 14, 10)
    assert (usage.cache.rewind_limited_by, usage.cache.checkpoint, usage.reason) == (
        kind,
        10,
        "rewind_limited",
    )


def test_a_layer_that_trims_another_number_than_asked_frees_the_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Correct first: the answer is that of a cold run, and the event says why."""
    from mlx_lm.models.cache import ChunkedKVCache

    kinds = ["full", "chunked"]
    runner = oracle_runner(kinds, **NO_HELP)
    usage_of(runner, PROMPT[:8])
    monkeypatch.setattr(ChunkedKVCache, "trim", lambda self, n: n - 1)
    second = [*PROMPT[:5], 1]
    chunks = list(runner.generate(second, max_tokens=6))
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.outcome, usage.reason, usage.cache.freed_by) == (
        "miss",
        "entry_freed",
        "layers that disagreed after a rewind",
    )
    assert [chunk.token for chunk in chunks] == cold(kinds, second)
    assert is_consistent(runner)


def test_an_interrupted_prefill_keeps_its_finished_chunks() -> None:
    """The same prompt again goes on from there."""
    runner = oracle_runner(["full", "recurrent"], prefill_step=8)
    prompt = list(range(60))
    fail(runner, prompt, KeyboardInterrupt(), 4, 1)
    assert runner.entry.tokens == prompt[:24]
    usage = usage_of(runner, prompt)
    assert (usage.outcome, usage.cached_tokens, usage.evaluated_tokens) == ("hit", 24, 36)


def warm_request(runner: Runner) -> None:
    tokens(runner, [*PROMPT[:12], *range(60, 84)], 4)


def assert_interrupts_leave_a_true_entry(
    mix: Mix, request: Callable[[Runner], None], follow_up: list[int], lines: int
) -> None:
    """Press Ctrl-C at `lines` lines of a request behind PROMPT. `follow_up` has to be exact."""
    answer = cold(mix.kinds, follow_up)
    runner = mix.runner()
    tokens(runner, PROMPT)
    with interrupt_at(-1) as seen:
        request(runner)
    interrupted = 0
    for line in range(1, seen[0] + 1, max(1, seen[0] // lines)):
        runner = mix.runner()
        tokens(runner, PROMPT)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            try:
                request(runner)
            except KeyboardInterrupt:
                interrupted += 1
                raise
        assert is_consistent(runner), f"line {line}"
        assert tokens(runner, follow_up) == answer, f"line {line}"
    assert interrupted > lines * 4 // 5


@mixes
def test_ctrl_c_at_any_line_leaves_a_true_entry(mix: Mix) -> None:
    """The next request is exact after Ctrl-C at any of 200 lines of a warm one."""
    follow_up = [*PROMPT[:12], *range(60, 80), 5]
    assert_interrupts_leave_a_true_entry(mix, warm_request, follow_up, fewer(200, 40))


@pytest.mark.parametrize(
    "kinds", [["full", "full"], ["recurrent", "full"]], ids=lambda kinds: kinds[0]
)
def test_ctrl_c_at_any_line_of_an_answer_in_a_form_leaves_a_true_entry(kinds: list[str]) -> None:
    """Ctrl-C may come while what may come next is found out and learned."""

    def held(runner: Runner) -> None:
        tokens(
            runner,
            [*PROMPT[:12], 60, 61],
            12,
            schema={"type": "array", "items": {"const": "ab"}, "minItems": 9},
        )

    follow_up = [*PROMPT[:12], 60, 61, *b'["ab", "a', 5]
    assert_interrupts_leave_a_true_entry(Mix(kinds, {}), held, follow_up, fewer(250, 50))


@pytest.mark.parametrize(
    "kinds",
    [["full", "full"], ["recurrent", "full"], ["sliding", "full"]],
    ids=lambda kinds: kinds[0],
)
def test_ctrl_c_at_any_line_of_a_full_context_leaves_a_true_entry(kinds: list[str]) -> None:
    """While room is made and kept tokens are evaluated again."""

    def overflowing(runner: Runner) -> None:
        tokens(runner, list(range(30)), 25, overflow="shift", keep=4)

    runner = oracle_runner(kinds, context=40)
    with interrupt_at(-1) as seen:
        overflowing(runner)
    for line in range(1, seen[0] + 1, max(1, seen[0] // fewer(250, 50))):
        runner = oracle_runner(kinds, context=40)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            overflowing(runner)
        assert is_consistent(runner), f"line {line}"
        follow_up = (
            [*runner.entry.tokens, 7][-39:] if len(runner.entry.tokens) < 39 else list(range(30))
        )
        assert tokens(runner, follow_up, 1) == cold(kinds, follow_up, 1), f"line {line}"


def test_a_reset_during_a_request_is_refused() -> None:
    """It would take the caches from under it."""
    runner = oracle_runner()
    answer = runner.generate(PROMPT, max_tokens=6)
    first = [next(answer).token for _ in range(3)]
    with pytest.raises(BusyError):
        runner.reset()
    assert first + [chunk.token for chunk in answer] == cold(["full", "full"], PROMPT)


def test_unseeded_requests_differ_after_a_seeded_one() -> None:
    """Each request has random numbers of its own."""
    runner = oracle_runner()
    answers = []
    for _ in range(3):
        tokens(runner, PROMPT, 5, temperature=5.0, seed=7)
        answers.append(tuple(tokens(runner, PROMPT, 20, temperature=5.0)))
    assert len(set(answers)) == 3


def test_checkpoints_go_on_after_a_full_context_was_evaluated_again() -> None:
    """The entry that is begun anew has the same budget."""
    runner = oracle_runner(
        ["recurrent", "full"], context=60, checkpoint_interval=5, checkpoint_budget=10**6
    )
    tokens(runner, list(range(50)), 30, overflow="shift", keep=4)
    assert runner.entry.checkpoints.budget == 10**6


edits = st.lists(
    st.tuples(
        st.sampled_from(["append", "cut", "edit", "new"]),
        st.integers(0, 60),
        st.lists(st.integers(0, 9), min_size=1, max_size=12),
        st.sampled_from(["end", "close", "interrupt", "one"]),
    ),
    min_size=1,
    max_size=8,
)


@mixes
@examples(15)
@given(edits=edits, data=st.data())
def test_random_conversations_are_as_if_cold(
    mix: Mix, edits: list[Any], data: st.DataObject
) -> None:
    """Random prompts after ended, closed and interrupted requests give the cold tokens."""
    runner, history = mix.runner(prefill_step=5), [1]
    for change, place, new, end in edits:
        if change == "append":
            history = history + new
        elif change == "new":
            history = list(new)
        elif change == "cut":
            history = history[: max(1, place % (len(history) + 1))]
        else:
            at = place % (len(history) + 1)
            history = [*history[:at], *new, *history[at + 1 :]]
        if end == "end":
            answer = tokens(runner, history, 4)
            assert answer == cold(mix.kinds, history, 4)
            history = history + answer
        elif end == "one":
            assert tokens(runner, history, 1) == cold(mix.kinds, history, 1)
        elif end == "close":
            iterator = runner.generate(history)
            next(iterator)
            iterator.close()  # type: ignore[attr-defined]
        else:
            with suppress(KeyboardInterrupt), interrupt_at(data.draw(st.integers(1, 900))):
                tokens(runner, history, 4)
        assert is_consistent(runner)
    assert tokens(runner, history, 4) == cold(mix.kinds, history, 4)


def test_penalties_see_the_whole_prompt_warm_or_cold() -> None:
    """mlx-lm's processors see only the suffix on a hit; these do not."""
    options = {
        "repetition_penalty": 1.7,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "penalty_context": 1000,
    }
    runner = oracle_runner()
    tokens(runner, PROMPT)
    assert tokens(runner, PROMPT, 12, **options) == cold(["full", "full"], PROMPT, 12, **options)
    assert tokens(runner, PROMPT, 12, **options) != tokens(runner, PROMPT, 12)
    seen: list[list[int]] = []

    def spy(history: mx.array, logits: mx.array) -> mx.array:
        seen.append(history.tolist())  # type: ignore[arg-type]
        return logits

    answer = tokens(runner, PROMPT, 3, logits_processors=[spy])
    assert seen == [PROMPT, PROMPT + answer[:1], PROMPT + answer[:2]]


def test_a_seed_decides_the_answer_warm_or_cold() -> None:
    """Another seed decides otherwise."""
    options = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    first = cold(["full", "full"], PROMPT, 20, seed=1, **options)
    runner = oracle_runner()
    tokens(runner, [*PROMPT, 5])
    assert tokens(runner, PROMPT, 20, seed=1, **options) == first
    assert tokens(runner, PROMPT, 20, seed=2, **options) != first


def test_only_one_request_at_a_time() -> None:
    """A second one is refused until the first is closed, or forgotten."""
    runner = oracle_runner()
    first = runner.generate(PROMPT)
    next(first)
    with pytest.raises(BusyError, match="another request"):
        runner.generate(PROMPT)
    first.close()  # type: ignore[attr-defined]
    assert tokens(runner, PROMPT) == cold(["full", "full"], PROMPT)
    forgotten = runner.generate(PROMPT)
    next(forgotten)
    del forgotten
    assert tokens(runner, PROMPT) == cold(["full", "full"], PROMPT)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        pytest.param([], PromptError, "the prompt is empty", id="empty"),
        pytest.param(
            list(range(100)),
            ContextLengthError,
            "has 100 tokens.*context of 100 tokens",
            id="too-long",
        ),
        pytest.param([[1, 2], [3]], PromptError, "flat list of integers", id="ragged"),
        pytest.param(
            None, PromptError, "a prompt is a text, token ids or messages, not NoneType", id="none"
        ),
        pytest.param({1, 2}, PromptError, "not set", id="set"),
        pytest.param(
            [1, VOCAB],
            PromptError,
            f"token id {VOCAB} is beyond the model's vocabulary of {VOCAB}",
            id="unknown-token",
        ),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused_at_once(
    prompt: list[int], error: type[Exception], message: str
) -> None:
    """Before anything is iterated, and without touching the entry."""
    runner = oracle_runner(context=100)
    tokens(runner, PROMPT)
    before = list(runner.entry.tokens)
    with pytest.raises(error, match=message):
        runner.generate(prompt)
    assert runner.entry.tokens == before


def test_the_answer_ends_where_the_context_ends() -> None:
    """With the reason "length", and not one token later."""
    runner = oracle_runner(context=len(PROMPT) + 4)
    chunks = list(runner.generate(PROMPT))
    assert len(chunks) == 4
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 is out of range, it has to be at least 1"),
        ({"temperature": -1}, "temperature: -1 is out of range"),
        ({"temperature": float("nan")}, "temperature: nan is out of range"),
        ({"temperature": "hot"}, "temperature: 'hot' is not a number"),
        ({"top_p": 1.5}, "top_p: 1.5 is out of range, it has to be between 0 and 1"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -5}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"logprobs": 1000}, "logprobs: 1000 is out of range, it has to be between 0 and 100"),
        ({"stop": [""]}, "each stop string"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": 1.5}, "top_k: 1.5 is not a whole number"),
        ({"max_tokens": 2.5}, "max_tokens: 2.5 is not a whole number"),
        ({"max_tokens": float("inf")}, "max_tokens: inf is not a whole number"),
        ({"seed": 1.5}, "seed"),
        ({"stop_tokens": "ab"}, "stop_tokens: 'ab' is not a list; give one"),
        ({"stop_tokens": 5}, "stop_tokens: 5 is not a list"),
        ({"stop": 5}, "stop: 5 is not a list"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_out_of_range_is_named_with_its_range(
    options: dict[str, Any], message: str
) -> None:
    """Before the request begins."""
    with pytest.raises(OptionError, match=message):
        oracle_runner().generate(PROMPT, **options)


def test_log_probabilities_are_there_when_asked_for() -> None:
    """The token's own and the most likely ones, in order, summing to less than one."""
    runner = oracle_runner()
    assert all(
        chunk.logprob is None and chunk.top_logprobs is None
        for chunk in runner.generate(PROMPT, max_tokens=3)
    )
    for chunk in runner.generate(PROMPT, max_tokens=3, logprobs=5):
        assert chunk.top_logprobs is not None
        assert next(iter(chunk.top_logprobs)) == chunk.token
        assert chunk.top_logprobs[chunk.token] == chunk.logprob
        assert list(chunk.top_logprobs.values()) == sorted(
            chunk.top_logprobs.values(), reverse=True
        )
        assert len(chunk.top_logprobs) == 5
    assert all(
        chunk.top_logprobs is None
        for chunk in runner.generate(PROMPT, max_tokens=3, logprobs=0)
        if chunk.logprob is None
    )


def test_progress_counts_the_prompt_up() -> None:
    """From what is in the entry to the whole prompt."""
    seen: list[tuple[int, int]] = []
    runner = oracle_runner(prefill_step=10)
    prompt = list(range(40))
    list(
        runner.generate(
            prompt, max_tokens=1, progress=lambda done, total: seen.append((done, total))
        )
    )
    assert seen[0] == (0, 40)
    assert seen[-1] == (40, 40)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_unusable_array_frees_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept after an exception that leaves caches which cannot be evaluated any more."""
    runner = oracle_runner(["full"])
    tokens(runner, PROMPT)

    def on_layer(index: int) -> None:
        monkeypatch.setattr(
            type(runner.entry.caches[0]),
            "state",
            property(lambda self: mx.arange(3) @ mx.arange(2)),
        )
        raise RuntimeError("out of memory")

    runner.model.on_layer = on_layer
    with pytest.raises(RuntimeError, match="out of memory"):
        tokens(runner, [*PROMPT, *range(40)])
    monkeypatch.undo()
    runner.model.on_layer = lambda index: None
    assert len(runner.entry.tokens) == 0
    assert usage_of(runner, PROMPT).cache.freed_by == "ValueError while evaluating"


@pytest.mark.parametrize("kinds", [("full", "sliding"), ("recurrent", "composite")], ids="+".join)
def test_an_exception_that_is_still_held_keeps_nobody_out(kinds: tuple[str, ...]) -> None:
    """The next request is served while the traceback of an interrupted one is referenced."""
    runner = oracle_runner(kinds, checkpoint_interval=5)
    held = []
    for line in range(1, 420, 3):
        try:
            with interrupt_at(line):
                tokens(runner, [1, 2, 3, line % 7, *range(5, 13)], 4, stop_tokens=[])
        except KeyboardInterrupt as error:
            held = [error]
        assert tokens(runner, [1, 2, 3, 4], 2, stop_tokens=[])
    assert held

"""Guessed tokens never change an answer, nor what the next request reuses."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest
from support.drafting import steady_costs
from support.histories import tiny_parts
from support.reused import (
    ALL,
    CHECKPOINTS,
    FEW,
    NO_HELP,
    SLACK,
    RepeatingModel,
    next_prompts,
    repeating_runner,
)
from support.sample import fewer

from mlxrunner import Runner
from mlxrunner.results import Chunk
from mlxrunner.testing import interrupt_at, oracle_runner

PROMPT = list(range(1, 30))
MIXES: dict[str, tuple[list[str], dict[str, int]]] = {
    "full": (["full", "full"], NO_HELP),
    "sliding": (["full", "sliding"], SLACK),
    "sliding-no-slack": (["sliding", "full"], NO_HELP),
    "sliding-checkpoints": (["sliding", "full"], CHECKPOINTS),
    "recurrent": (["recurrent", "full"], NO_HELP),
    "recurrent-checkpoints": (["recurrent", "full"], CHECKPOINTS),
    "chunked": (["chunked", "full"], CHECKPOINTS),
    "all": (ALL[:-1], NO_HELP),
    "all-checkpoints": (ALL, CHECKPOINTS),
    "few-checkpoints": (["recurrent", "full"], FEW),
}
every_mix = pytest.mark.parametrize("name", MIXES)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.3, "seed": 3},
    "filtered": {"temperature": 0.5, "top_p": 0.9, "top_k": 9, "min_p": 0.01, "seed": 1},
    "penalties": {"repetition_penalty": 1.02, "presence_penalty": 0.3, "frequency_penalty": 0.4},
    "logprobs": {"logprobs": 3},
    "sampled with logprobs": {"temperature": 0.3, "seed": 5, "logprobs": 0},
}


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a pass is none of what these tests are about."""
    steady_costs(monkeypatch)


def runner_of(name: str, **options: Any) -> Runner:
    kinds, rewinding = MIXES[name]
    return repeating_runner(kinds, **(rewinding | options))


def answer(runner: Runner, prompt: list[int], how: str, count: int = 90, **options: Any) -> Any:
    """Return the chunks of an answer without its usage, and the usage."""
    chunks = list(
        runner.generate(prompt, max_tokens=count, speculate=how, **({"stop_tokens": []} | options))
    )
    usage = chunks[-1].usage
    return [one_without_usage(chunk) for chunk in chunks], usage


def one_without_usage(chunk: Chunk) -> tuple[Any, ...]:
    logprobs = None if chunk.logprob is None else round(chunk.logprob, 4)
    return chunk.token, chunk.text, chunk.finish_reason, logprobs


def reuse(usage: Any) -> tuple[Any, ...]:
    """Return what a request reused, and why not more."""
    cache = usage.cache
    return (
        *(usage.prompt_tokens, usage.cached_tokens, usage.evaluated_tokens, usage.outcome),
        *(usage.reason, cache.lost_tokens, cache.trim_limited_by, cache.checkpoint),
        *(cache.matched_tokens, cache.trimmed_tokens, cache.shifted_tokens),
    )


def entry_of(runner: Runner) -> tuple[list[int], list[int]]:
    assert runner.entry.is_true
    return list(runner.entry.tokens), runner.entry.checkpoints.offsets


@every_mix
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.exhaustive(12)
def test_tokens_are_those_of_plain_decoding(name: str, way: str) -> None:
    """Chunks, entry and checkpoints are the same, in fewer forward passes."""
    plain, guessing = runner_of(name), runner_of(name)
    expected, _ = answer(plain, PROMPT, "off", **WAYS[way])
    got, usage = answer(guessing, PROMPT, "lookup", **WAYS[way])
    assert got == expected
    assert entry_of(guessing) == entry_of(plain)
    right = sum(use.accepted for use in usage.drafts)
    assert 0 < right < sum(use.drafted for use in usage.drafts)
    assert len(guessing.model.forwards) < len(plain.model.forwards)
    assert usage.draft_passes > 0


class BrokenBehindWrong(RepeatingModel):
    """Computes no number after a token that is not that of `right` at its place."""

    right: list[int]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        begin = cache[0].offset
        expected = mx.array(self.right[begin : begin + tokens.shape[1]])
        logits = super().__call__(tokens, cache)
        is_right = tokens[0, : len(expected)] == expected
        found: mx.array = mx.where(is_right[None, :, None], logits[:, : len(expected)], mx.nan)
        return mx.concatenate([found, logits[:, len(expected) :]], axis=1)


def test_logits_behind_a_wrong_guess_may_be_anything() -> None:
    """They end no answer: a token there is a guess about nothing."""
    expected, _ = answer(runner_of("full"), PROMPT, "off")
    model = BrokenBehindWrong(MIXES["full"][0])
    model.right = [*PROMPT, *(chunk[0] for chunk in expected)]
    got, usage = answer(oracle_runner(model=model, **NO_HELP), PROMPT, "lookup")
    assert got == expected
    assert 0 < sum(use.accepted for use in usage.drafts) < sum(use.drafted for use in usage.drafts)


@pytest.mark.parametrize(
    ("ending", "name"),
    [
        (ending, name)
        for number, name in enumerate(MIXES)
        for ending in ((1, 3, 25, 29), (2, 24, 27, 41))[number % 2]
    ],
)
@pytest.mark.exhaustive(0)
def test_an_answer_may_end_anywhere_in_an_accepted_run(name: str, ending: int) -> None:
    """The entry is the same after `max_tokens` and after a close, and so is what comes next.

    A case tries two of the prompts that may come next after each way to end; the next endings try
    the others.
    """
    for first, way in ((ending, "closed"), (ending + 4, "limited")):
        found = []
        for how in ("off", "lookup"):
            runner, said = ended(name, how, way, ending)
            left = entry_of(runner)
            prompts, after = list(next_prompts(said).values()), []
            for prompt in (prompts[first % len(prompts)], prompts[(first + 2) % len(prompts)]):
                runner, _ = ended(name, how, way, ending)
                chunks, usage = answer(runner, prompt, how, 8)
                after.append((chunks, reuse(usage), entry_of(runner)))
            found.append((said, left, after))
        assert found[0] == found[1]


def ended(name: str, how: str, way: str, ending: int) -> tuple[Runner, list[int]]:
    """Return a runner whose first answer has ended after `ending` tokens, and what was said."""
    runner = runner_of(name)
    if way == "limited":
        chunks, _ = answer(runner, PROMPT, how, ending)
        return runner, PROMPT + [chunk[0] for chunk in chunks]
    iterator = runner.generate(PROMPT, speculate=how, stop_tokens=[])
    said = PROMPT + [int(next(iterator).token or 0) for _ in range(ending)]
    iterator.close()
    return runner, said


@every_mix
@pytest.mark.exhaustive(4)
def test_another_thread_may_drop_the_answer_anywhere(name: str) -> None:
    """The entry is then the one that a close leaves, and so is what comes next."""
    for ending in range(3, 41, fewer(9, 18)):
        found = []
        for how in ("off", "lookup", "dropped"):
            runner = runner_of(name)
            held = [
                runner.generate(PROMPT, speculate=how.replace("dropped", "lookup"), stop_tokens=[])
            ]
            said = [*PROMPT, *(int(next(held[0]).token or 0) for _ in range(ending))]
            if how == "dropped":
                thread = threading.Thread(target=held.clear)
                thread.start()
                thread.join()
            else:
                held.pop().close()
            chunks, usage = answer(runner, [*said, 5], "off", 3)
            found.append((chunks, reuse(usage), entry_of(runner)))
        assert found[0] == found[1] == found[2]


@every_mix
@pytest.mark.exhaustive(4)
def test_turns_reuse_the_same_with_and_without_guesses(name: str) -> None:
    """Conversations with edits and retries have the same answers, reuse, reasons and losses."""
    rng = random.Random(name)
    plain, guessing = runner_of(name), runner_of(name)
    said = list(PROMPT)
    for _ in range(fewer(8, 5)):
        count = rng.randrange(2, 40)
        expected, usual = answer(plain, said, "off", count)
        got, usage = answer(guessing, said, "lookup", count)
        assert got == expected
        assert reuse(usage) == reuse(usual)
        assert entry_of(guessing) == entry_of(plain)
        said += [chunk[0] for chunk in got]
        said = rng.choice(list(next_prompts(said).values())[:-1])


@pytest.mark.parametrize("name", ["full", "sliding", "recurrent-checkpoints", "all-checkpoints"])
@pytest.mark.exhaustive(2)
def test_an_interrupt_at_any_line_leaves_a_true_entry(name: str) -> None:
    """The next answer is the one of a cold run."""
    count = 30
    cold, _ = answer(runner_of(name), PROMPT, "off", count)
    runner = runner_of(name)
    with interrupt_at(-1) as seen:
        answer(runner, PROMPT, "lookup", count)
    lines = range(1, seen[0], max(1, seen[0] // fewer(50, 40)))
    for line in lines:
        runner = runner_of(name)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            answer(runner, PROMPT, "lookup", count)
        assert runner.entry.is_true or not runner.entry.tokens
        said = [*PROMPT, *(chunk[0] for chunk in cold)]
        assert list(runner.entry.tokens) == said[: len(runner.entry.tokens)]
        assert answer(runner, PROMPT, "lookup", count)[0] == cold


@pytest.mark.parametrize("name", ["full", "sliding", "recurrent", "all-checkpoints"])
def test_a_shift_comes_where_it_comes_without_guesses(name: str) -> None:
    """The context is full in the middle of an answer, several times."""
    found = []
    for how in ("off", "lookup"):
        runner = runner_of(name, context=48)
        chunks, usage = answer(runner, PROMPT, how, 150, overflow="shift", keep=4)
        found.append((chunks, entry_of(runner), reuse(usage)))
    assert found[0] == found[1]
    assert found[0][2][-1] > 0


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("kinds", [["chunked"], ["chunked", "sliding"], ["full", "chunked"]])
def test_the_entry_goes_back_as_far_as_without_guesses(kinds: list[str]) -> None:
    """A pass of several rows drops the tokens of an earlier chunk later than single ones do."""
    for ending in range(2, 40):
        found = []
        for how in ("off", "lookup"):
            runner = repeating_runner(kinds, **NO_HELP)
            answer(runner, PROMPT, how, ending)
            entry = runner.entry
            found.append([entry.reach(to) for to in range(len(entry.tokens) + 1)])
        assert found[0] == found[1], ending


@pytest.mark.parametrize("how", ["off", "lookup"])
def test_observers_see_the_models_own_logits_beside_penalties(how: str) -> None:
    """Penalties change what is sampled, and not what is compared with a cold run."""
    found: list[list[float]] = []
    for options in (WAYS["penalties"], {}):
        runner = repeating_runner(["full"])
        runner.observers.append(lambda _, seen: found.append(seen.logits[0].tolist()))
        answer(runner, PROMPT, how, 2, **options)
        said = list(runner.entry.tokens)
        runner.reset()
        answer(runner, said, "off", 1)
    assert found[0] == found[1]
    assert found[2] == found[3]


FORMS: dict[str, dict[str, Any]] = {
    "choices": {"choices": ["yes, please", "no, thank you", "yes, of course"]},
    "schema": {
        "schema": {
            "type": "object",
            "properties": {
                "name": {"enum": ["Ada Lovelace", "Alan Turing"]},
                "years": {"type": "integer", "minimum": 10, "maximum": 99},
                "is_known": {"type": "boolean"},
            },
            "required": ["name", "years", "is_known"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("name", ["full", "recurrent", "all-checkpoints"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0, "seed": 4}, {"logprobs": 2}])
def test_what_a_form_leaves_no_other_text_for_is_guessed(
    name: str, form: str, sampling: dict[str, Any]
) -> None:
    """The answer is the same in fewer passes, and so is the entry."""
    plain, guessing = runner_of(name), runner_of(name)
    options = FORMS[form] | sampling
    expected, _ = answer(plain, PROMPT, "off", **options)
    got, usage = answer(guessing, PROMPT, "auto", **options)
    assert got == expected
    assert entry_of(guessing) == entry_of(plain)
    assert {use.source for use in usage.drafts} >= {"form"}
    assert len(guessing.model.forwards) < 0.7 * len(plain.model.forwards)


@pytest.mark.parametrize("how", ["auto", "lookup"])
def test_a_callers_own_processor_sees_each_token_once(how: str) -> None:
    """It may keep count, so nothing is guessed beside it."""
    seen: list[int] = []

    def process(history: mx.array, logits: mx.array) -> mx.array:
        seen.append(history.shape[0])
        return logits

    runner = runner_of("full")
    _, usage = answer(runner, PROMPT, how, 40, logits_processors=[process])
    assert seen == list(range(len(PROMPT), len(PROMPT) + 40))
    assert usage.draft_passes == 0


def test_a_repeated_request_is_drafted_from_the_earlier_answer() -> None:
    runner = repeating_runner(["full"])
    first, _ = answer(runner, PROMPT, "off", 60)
    runner.model.forwards.clear()
    again, usage = answer(runner, PROMPT, "lookup", 60)
    assert again == first
    assert [use.source for use in usage.drafts] == ["earlier"]
    assert usage.drafts[0].accepted == usage.drafts[0].drafted
    assert len(runner.model.forwards) < 10


def test_nothing_is_guessed_where_it_is_off() -> None:
    """No pass has more than one row after the prefill."""
    runner = runner_of("full")
    _, usage = answer(runner, PROMPT, "off")
    assert (usage.draft_passes, usage.drafts) == (0, ())
    assert set(runner.model.forwards[-80:]) == {1}


@pytest.mark.parametrize("strange", [-300, 10**8])
def test_tokens_that_a_file_has_and_the_model_lacks_are_not_guessed(strange: int) -> None:
    """They are the text before, of which the model would read memory that is not its own."""
    runner = Runner(*tiny_parts("llama"), context=1000)
    begin = [9, 10, 11]
    expected = runner.complete([*begin, 8, 5, 6], max_tokens=12, stop_tokens=[]).tokens
    runner.reset()
    followed = [number for token in range(290) for number in (6, token, 3)]
    runner.complete(begin + followed, max_tokens=1, stop_tokens=[])
    held = runner.entry.tokens.array
    held[len(begin) + 2 :: 3] = strange
    result = runner.complete([*begin, 8, 5, 6], max_tokens=12, stop_tokens=[], speculate="lookup")
    assert result.tokens == expected
    assert result.usage.cached_tokens == len(begin)
    assert all(use.source != "earlier" for use in result.usage.drafts)

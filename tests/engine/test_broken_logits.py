"""Logits that are NaN or infinite are an error of one request, whose stored tokens are freed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.histories import tiny_parts
from support.models import write_model
from support.reused import cold, is_consistent, tokens
from support.sample import examples

from mlxrunner import BatchRequest, LogitsError, ModelError, ParallelRunner, Runner, cli, run_batch
from mlxrunner.testing import VOCAB, OracleModel, oracle_runner

KINDS = ["recurrent", "full"]
PROMPT = [(7 * place) % 200 + 5 for place in range(30)]
NAN, INF = math.nan, math.inf
BROKEN: dict[str, Callable[[mx.array], mx.array]] = {
    "one NaN": lambda logits: mx.where(mx.arange(VOCAB) == 3, NAN, logits),
    "all NaN": lambda logits: mx.full(logits.shape, NAN),
    "all -inf": lambda logits: mx.full(logits.shape, -INF),
    "all inf": lambda logits: mx.full(logits.shape, INF),
    "one inf": lambda logits: mx.where(mx.arange(VOCAB) == 3, INF, logits),
    "half": lambda logits: mx.full(logits.shape, NAN).astype(mx.float16),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "alone": {"speculate": "off"},
    "guessed": {"speculate": "lookup"},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 40},
    "logprobs": {"logprobs": 5},
    "penalties": {"repetition_penalty": 1.2},
    "schema": {"schema": {"type": "array", "items": {"const": "ab"}, "minItems": 9}},
    "choices": {"choices": ["abcdefghijk", "abcdefghijkl"]},
    "processors": {"logits_processors": [lambda seen, logits: logits * 2]},
}


class BreakingModel(OracleModel):
    """An oracle whose logits are broken after a number of tokens of the answer."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__(kinds)
        self.at: int | None = None
        """The number of tokens in the caches after which they are broken; None: never."""
        self.change = BROKEN["all NaN"]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        begin = cache[-1].offset
        logits = super().__call__(tokens, cache)
        places = mx.arange(begin + 1, begin + 1 + tokens.shape[1])[None, :, None]
        if self.at is None:
            return logits
        changed = self.change(logits)
        return mx.where(places >= self.at, changed, logits).astype(changed.dtype)


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("asked", OPTIONS)
def test_a_broken_step_is_an_error_and_what_was_stored_is_freed(how: str, asked: str) -> None:
    """The tokens before it are those of a cold answer, and the next request is as if cold."""
    options: dict[str, Any] = {"stop_tokens": [], **OPTIONS[asked]}
    model = BreakingModel(KINDS)
    model.change = BROKEN[how]
    for place in (0, 1, 4):
        model.at = None
        runner = oracle_runner(model=model)
        told: list[Any] = []
        runner.observers.append(lambda _, observed, told=told: told.append(observed))
        tokens(runner, [*PROMPT, 1, 2], 9)
        model.at = len(PROMPT) + place
        said: list[int] = []
        with pytest.raises(LogitsError, match=r"NaN|infinity") as raised:
            for chunk in runner.generate(PROMPT, max_tokens=12, **options):
                said.append(chunk.token)
        assert ("float16" in str(raised.value)) == (how == "half")
        if "temperature" not in options or "seed" in options:
            assert said == cold(KINDS, PROMPT, 12, **options)[:place]
        assert len(said) == place
        assert len(runner.entry.tokens) == 0
        assert (told[-1].finish, told[-1].error) == ("error", "LogitsError")
        model.at = None
        assert tokens(runner, PROMPT, 5) == cold(KINDS, PROMPT, 5)
        assert is_consistent(runner)


def test_a_single_minus_infinity_is_a_logit_like_any_other() -> None:
    """No log-probability is NaN then."""
    model = BreakingModel(KINDS)
    model.change = lambda logits: mx.where(mx.arange(VOCAB) == 3, -INF, logits)
    model.at = 0
    for options in ({"logprobs": 20}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 20}):
        answer = oracle_runner(model=model).complete(PROMPT, max_tokens=5, **options)
        assert len(answer.tokens) == 5
        assert not any(math.isnan(one[0]) for one in answer.logprobs or ())


@pytest.mark.parametrize("value", [-INF, NAN])
def test_a_function_that_leaves_no_token_is_named(value: float) -> None:
    """The model is not blamed for it."""
    runner = oracle_runner()
    broken = [lambda seen, logits: logits + (value if len(seen) > len(PROMPT) + 2 else 0.0)]
    with pytest.raises(LogitsError, match="after penalties, logits_processors"):
        runner.complete(PROMPT, max_tokens=9, logits_processors=broken)
    assert len(tokens(runner, PROMPT, 3)) == 3


@pytest.mark.parametrize("asked", ["greedy", "sampled", "logprobs"])
def test_a_function_may_choose_a_token_with_infinity(asked: str) -> None:
    forced = [lambda seen, logits: mx.where(mx.arange(VOCAB) == 77, INF, logits)]
    answer = oracle_runner().complete(
        PROMPT, max_tokens=3, logits_processors=forced, **OPTIONS[asked]
    )
    assert answer.tokens == [77] * 3
    assert all(one[0] == 0.0 for one in answer.logprobs or ())


def poisoned(name: str, token: int) -> Any:
    """Return the parts of a model whose `token` makes all keys, values and logits NaN."""
    model, tokenizer, facts = tiny_parts(name)
    embedding = model.model.embed_tokens
    weight = embedding.weight
    weight[token] = NAN
    embedding.weight = weight
    mx.eval(weight)
    return model, tokenizer, facts


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "jamba"])
def test_answers_beside_a_broken_one_are_as_if_alone(name: str) -> None:
    """NaN in cells that all of a step read reaches them; they continue from their last token."""
    asked: dict[str, Any] = {"max_tokens": 24, "stop_tokens": []}
    prompts = [[*PROMPT[: 10 + number], number] for number in range(3)]
    with Runner(*tiny_parts(name), context=128) as alone:
        expected = [alone.complete(prompt, **asked).tokens for prompt in prompts]
    token = next(one for one in range(299, 200, -1) if all(one not in said for said in expected))
    with ParallelRunner(*poisoned(name, token), max_sequences=4, context=128) as runner:
        for broken, more in (([token, 7], {}), ([7, token], {"logprobs": 2}), ([token], {})):
            handles = [runner.submit(prompt, **asked) for prompt in prompts]
            wrong = runner.submit([*PROMPT[:12], *broken], max_tokens=5, **more)
            with pytest.raises(LogitsError, match="NaN"):
                wrong.result()
            assert [handle.result().tokens for handle in handles] == expected
        assert runner.complete(prompts[0], **asked).tokens == expected[0]
        assert runner.stats().busy == 0


@examples(12)
@given(
    at=st.integers(30, 60),
    how=st.sampled_from(sorted(BROKEN)),
    asked=st.sampled_from(sorted(OPTIONS)),
)
def test_a_runner_of_many_ends_the_broken_request_alone(at: int, how: str, asked: str) -> None:
    """The next requests are as if cold, whatever was asked for."""
    options = {key: value for key, value in OPTIONS[asked].items() if key != "logits_processors"}
    plain, model = oracle_runner(KINDS), BreakingModel(KINDS)
    given_: dict[str, Any] = {"max_sequences": 2, "context": 128, "prefill_step": 16}
    with ParallelRunner(model, plain.tokenizer, plain.facts, **given_) as runner:
        assert runner.why_alone is not None
        runner.complete([*PROMPT, 4], max_tokens=2)
        model.change, model.at = BROKEN[how], at
        with pytest.raises(LogitsError):
            runner.complete(PROMPT, max_tokens=60, stop_tokens=[], **options)
        model.at = None
        found = runner.complete(PROMPT, max_tokens=5, stop_tokens=[]).tokens
        assert found == cold(KINDS, PROMPT, 5)


def broken_folder(tmp_path: Path, where: str) -> Path:
    """Save a tiny model of which one number of the tensor `where` is NaN."""
    folder = tmp_path / "model"
    write_model(folder, "llama", tie_word_embeddings=False)
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    array = np.array(weights[where])
    array.reshape(-1)[3] = NAN
    mx.save_safetensors(str(file), weights | {where: mx.array(array)}, {"format": "mlx"})
    return folder


@pytest.mark.parametrize("where", ["model.norm.weight", "lm_head.weight"])
def test_a_model_that_computes_nan_for_each_prompt_is_refused_at_load(
    tmp_path: Path, where: str
) -> None:
    """The error names the tensor, with and without a reservation, and for a runner of many."""
    folder = broken_folder(tmp_path, where)
    for load in (
        lambda: Runner.load(folder),
        lambda: Runner.load(folder, reserve=False),
        lambda: ParallelRunner.load(folder, max_sequences=2),
        lambda: Runner.load(folder, draft_model=folder),
    ):
        with pytest.raises(ModelError, match=f"{where} holds NaN"):
            load()


def test_the_lines_of_a_batch_beside_a_broken_one_are_answered() -> None:
    """The error of the line says what was wrong, in words and no JSON that is none."""
    model = BreakingModel(KINDS)
    model.at = 40
    runner = oracle_runner(model=model)
    results = list(
        run_batch(
            runner, [BatchRequest(prompt) for prompt in ("short", "x" * 60, "again")], max_tokens=4
        )
    )
    assert [result.error is None for result in results] == [True, False, True]
    assert "its logits are NaN" in str(results[1].error)


def test_the_command_prints_one_line(tmp_path: Path) -> None:
    """Neither text nor JSON, and the exit code is that of a model that can't be used."""
    folder = broken_folder(tmp_path, "model.norm.weight")
    for more in ([], ["--json", "--logprobs", "2"], ["--choices", "a,b"]):
        result = CliRunner().invoke(cli.main, ["generate", "-m", str(folder), "hello", *more])
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "holds NaN" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1

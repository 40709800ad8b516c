"""A wrong argument of a public function is an error with the value and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import tiny_config, tiny_model

from mlxrunner import (
    BatchRequest,
    OptionError,
    ParallelRunner,
    Profile,
    Result,
    Runner,
    Usage,
    errors,
    run_batch,
)
from mlxrunner.errors import MlxrunnerError
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import ByteTokenizer, oracle_runner


def test_a_model_is_a_text_or_a_path(tmp_path: Path) -> None:
    """Another value is a ModelError, with both runners."""
    kinds: list[Callable[[Any], object]] = [
        Runner.load,
        lambda model: ParallelRunner.load(model, max_sequences=1),
    ]
    for load in kinds:
        with pytest.raises(errors.ModelError, match=r"^5 names no model: give 'demo', a directory"):
            load(5)
        with pytest.raises(errors.ModelError, match=f"{tmp_path}.*config.json"):
            load(tmp_path)
    with Runner.load(Path("demo")) as runner:
        assert runner.name == "demo"


def test_a_batch_takes_batch_requests_only() -> None:
    """A bare prompt is an error that says so."""
    with pytest.raises(errors.PromptError, match=r"^request 0 has to be a BatchRequest\(prompt\)"):
        list(run_batch(oracle_runner(), ["Hello"]))  # type: ignore[list-item]


def test_a_profile_refuses_a_share_that_is_no_number() -> None:
    """It raises OptionError, also for one that is out of range."""
    with pytest.raises(OptionError, match=r"^verify_cache: 'all' is not a number$"):
        Profile(verify="all")  # type: ignore[arg-type]


def ask(**options: Any) -> Callable[[], object]:
    return lambda: oracle_runner().complete("a", max_tokens=2, **options)


def parallel_runner() -> ParallelRunner:
    config = tiny_config("llama", max_position_embeddings=4096, vocab_size=300)
    model = tiny_model(config)
    parts = model, ByteTokenizer(), facts_of(model, config)
    return ParallelRunner(*parts, max_sequences=1, context=64)


def called(given: Any) -> list[dict[str, Any]]:
    call = {"function": {"name": "f", "arguments": given}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


NO_LIST = "is not a list; give one, such as "


CALLED: dict[str, tuple[Callable[[], object], str]] = {
    "processors": (ask(logits_processors=5), f"logits_processors: 5 {NO_LIST}"),
    "processor": (ask(logits_processors=[5]), "logits_processors: 5 can't be called; give a "),
    "processed": (
        ask(logits_processors=[lambda tokens, logits: None]),
        "returned None, it has to return an array of shape (1, ",
    ),
    "progress": (ask(progress=5), "progress: 5 can't be called; give a function of (tokens"),
    "cancelled": (
        lambda: oracle_runner().evaluate("a", cancelled=5),  # type: ignore[arg-type]
        "cancelled: 5 can't be called; give a function of no arguments",
    ),
    "stop token": (
        ask(stop_tokens=[10**9]),
        "stop_tokens: 1000000000 is beyond the model's vocabulary, it has to be between 0 and ",
    ),
    "negative": (ask(stop_tokens=[-1]), "stop_tokens: -1 is out of range, it has to be between 0"),
    "stop": (ask(stop={"a": 1}), f"stop: {{'a': 1}} {NO_LIST}"),
    "choices": (ask(choices=["a", ""]), "at least one character, not ''; leave it out"),
    "schema": (ask(schema="{"), "in '{'; it has to be a JSON object, such as"),
    "constant": (ask(schema='{"const": NaN}'), "schema: not valid JSON: Out of range float"),
    "tools": (ask(tools='[{"f": '), "in '[{\"f\": '; it has to be a list of JSON objects"),
    "arguments": (
        lambda: oracle_runner().complete(called('{"a": NaN}')),
        "message 0: the arguments of 'f' have to be a JSON object, such as ",
    ),
    "number": (lambda: oracle_runner().complete(called({"a": float("nan")})), "not {'a': nan}"),
    "object": (lambda: oracle_runner().complete(called({"a": abs})), "not JSON serializable"),
    "prompt": (
        lambda: oracle_runner().complete(5),  # type: ignore[arg-type]
        "a prompt is a text, token ids or messages, not int: 5",
    ),
    "token": (
        lambda: oracle_runner().complete([None]),  # type: ignore[list-item]
        "token ids have to be a flat list of integers, not [None]",
    ),
    "requests": (
        lambda: run_batch(oracle_runner(), 5),  # type: ignore[arg-type]
        f"requests: 5 {NO_LIST}[BatchRequest",
    ),
    "runner": (
        lambda: run_batch(5, []),  # type: ignore[arg-type]
        "runner: 5 is not a Runner or ParallelRunner; load one with Runner.load(model)",
    ),
    "options": (
        lambda: (
            next(
                run_batch(
                    oracle_runner(),
                    [BatchRequest("a", options=5)],  # type: ignore[arg-type]
                )
            ).text
        ),
        "options: 5 has to be a dictionary of options",
    ),
    "prompts": (
        lambda: parallel_runner().run(5),  # type: ignore[arg-type]
        f"prompts: 5 {NO_LIST}",
    ),
    "one prompt": (lambda: parallel_runner().run("Hello"), f"prompts: 'Hello' {NO_LIST}"),
    "pairs": (
        lambda: parallel_runner().run_each(5),  # type: ignore[arg-type]
        f"requests: 5 {NO_LIST}",
    ),
    "pair": (
        lambda: list(parallel_runner().run_each(["ab"])),  # type: ignore[list-item]
        "request 0 has to be a pair of a prompt and its options, such as",
    ),
    "events": (
        lambda: Profile(events=5),  # type: ignore[arg-type]
        "events: 5 names no file; give a text or a Path",
    ),
    "sinks": (lambda: Profile(sinks=5), f"sinks: 5 {NO_LIST}"),  # type: ignore[arg-type]
    "watched": (
        lambda: Profile().watch(5),  # type: ignore[arg-type]
        "runner: 5 is not a runner; load one",
    ),
    "reserve": (
        lambda: Runner.load(reserve="no"),  # type: ignore[arg-type]
        "reserve: 'no' has to be True or False",
    ),
    "trusting": (
        lambda: ParallelRunner.load(
            max_sequences=1,
            trust_remote_code="no",  # type: ignore[arg-type]
        ),
        "trust_remote_code: 'no' has to be True or False",
    ),
    "parts": (
        lambda: Runner(5, ByteTokenizer(), 5),  # type: ignore[arg-type]
        "facts: 5 is not a ModelFacts; use Runner.",
    ),
    "chunks": (
        lambda: Result.of([5]),  # type: ignore[list-item]
        "chunks: 5 is not a Chunk; give what Runner.generate",
    ),
    "usage": (lambda: Usage.from_dict({}), "usage: 'evaluated_tokens' is wrong in {}; give what"),
}


@pytest.mark.parametrize("case", CALLED)
def test_a_wrong_argument_is_an_error_with_the_value_and_a_remedy(case: str) -> None:
    """Never a TypeError from somewhere within, and never silence."""
    call, message = CALLED[case]
    with pytest.raises(MlxrunnerError) as error:
        call()
    assert message in str(error.value)


def test_the_error_of_a_callback_comes_out_as_it_is() -> None:
    """It is the caller's own."""
    with pytest.raises(ZeroDivisionError):
        oracle_runner().complete("a", progress=lambda done, total: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        oracle_runner().complete("a", logits_processors=[lambda tokens, logits: 1 / 0])

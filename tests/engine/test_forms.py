"""Answers in a form equal the single runner's, and a dead end costs nobody else."""

from __future__ import annotations

import json
import random
from functools import cached_property
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.engine import Engine, sample
from support.histories import Parts, alone, check, tiny_parts
from support.sample import fewer

from mlxrunner import FormError, OptionError, Runner
from mlxrunner.testing import VOCAB, ByteTokenizer
from mlxrunner.tokenizer.base import Vocabulary

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "is": {"type": "boolean"},
        "of": {"enum": ["größer", 1, None]},
    },
    "required": ["name", "is", "of"],
    "additionalProperties": False,
}
OPTIONS: list[dict[str, Any]] = [
    {"schema": SCHEMA},
    {"stop_tokens": []},
    {"choices": ["yes", "yesterday", "no"]},
    {"schema": SCHEMA, "temperature": 1.2, "seed": 5, "top_k": 30},
    {"stop_tokens": [], "temperature": 1.0, "seed": 2},
    {"choices": ["a", "b"], "logprobs": 2},
    {"schema": SCHEMA, "max_tokens": 9},
    {"schema": SCHEMA, "repetition_penalty": 1.5, "penalty_context": 50},
    {"stop_tokens": [], "logprobs": 1},
    {"schema": {"type": "string", "minLength": 60}, "stop_tokens": []},
    {"choices": ["x"]},
    {"choices": ["yes", "no"], "stop": "e"},
]


def parts(architecture: str = "llama", tokenizer: ByteTokenizer | None = None) -> Parts:
    model, own, facts = tiny_parts(architecture, vocab_size=VOCAB)
    return model, tokenizer or own, facts


def requests(seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Return requests of all sorts, with prefixes in common."""
    rng = random.Random(seed)
    trunk, pairs = [rng.randrange(290) for _ in range(60)], []
    for options in OPTIONS:
        new = [rng.randrange(290) for _ in range(rng.randint(1, 20))]
        pairs.append((trunk[: rng.choice([0, 20, 60])] + new, {"max_tokens": 60, **options}))
    rng.shuffle(pairs)
    return pairs


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize(
    ("seed", "architecture"), enumerate(["llama", "qwen3", "gemma3_text", "gpt_oss"])
)
def test_each_answer_is_that_of_the_single_runner(seed: int, architecture: str) -> None:
    """The answer is the single runner's with any others in the step and in used slots."""
    given, pairs = parts(architecture), requests(seed)
    with Engine(*given, max_sequences=4, context=160, prefill_step=24) as runner:
        results = list(runner.run_each(pairs))
        again = list(runner.run_each(reversed(pairs)))[::-1]
    for (prompt, options), *found in zip(pairs, results, again, strict=True):
        expected = Runner(*given).complete(prompt, **options)
        for result in found:
            check(expected, 160, prompt, options, result)
        if options.get("schema") == SCHEMA and expected.finish_reason == "stop":
            Draft202012Validator(SCHEMA).validate(json.loads(expected.text))


def test_log_probabilities_are_those_of_the_possible_tokens() -> None:
    given, options = parts(), {"choices": ["yes", "no"], "logprobs": 4}
    with Engine(*given, max_sequences=2, context=60) as runner:
        other = runner.submit([9, 9], max_tokens=20, stop_tokens=[])
        chunks = list(runner.submit([1, 2], **options))
        other.result()
    for chunk, other in zip(chunks, Runner(*given).generate([1, 2], **options), strict=True):
        assert chunk.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert chunk.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_an_answer_that_joins_and_one_that_is_cancelled_take_nothing_from_the_others() -> None:
    """At every step of the first."""
    given = parts()
    first, second = ([1, 2, 3], {"schema": SCHEMA}), ([1, 2, 4], {"choices": ["yesterday"]})
    expected = [Runner(*given).complete(one, **how).tokens for one, how in (first, second)]
    for steps in range(0, len(expected[0]), fewer(2, 5)):
        with Engine(*given, max_sequences=3, context=100) as runner:
            stream = iter(runner.submit(first[0], **first[1]))
            shown = [next(stream).token for _ in range(steps)]
            cancelled = runner.submit([7, 8], schema=SCHEMA)
            late = runner.submit(second[0], **second[1])
            next(iter(cancelled))
            cancelled.cancel()
            assert late.result().tokens == expected[1]
            assert shown + [chunk.token for chunk in stream] == expected[0]


class NoZ(ByteTokenizer):
    """It has no token for the letter z."""

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary([None if byte == ord("z") else bytes([byte]) for byte in range(256)])


def test_a_dead_end_is_an_error_of_its_own_request() -> None:
    """The chunks before it are not lost, others continue, and its slot is exact for the next."""
    given, prompt = parts(tokenizer=NoZ()), [5, 6, 7, 8]
    with Engine(*given, max_sequences=2, context=60) as runner:
        other = runner.submit(prompt, max_tokens=25, stop_tokens=[])
        failing = runner.submit([5, 6, 7, 9], schema={"const": "abz"})
        shown = []
        with pytest.raises(FormError, match="after 3 tokens of the answer"):
            for chunk in failing:
                shown.append(chunk.token)
        assert bytes(shown) == b'"ab'
        with pytest.raises(FormError):
            failing.result()
        assert other.result().tokens == alone(given, prompt, 25)
        for again in (prompt, [5, 6, 7, 9, *b'"ab', 1]):
            found = runner.complete(again, max_tokens=10, stop_tokens=[])
            assert found.tokens == alone(given, again, 10)


def test_a_form_that_cannot_be_had_takes_no_slot() -> None:
    """It is refused when it is submitted."""
    schemas: list[Any] = [{"not": {}}, "{", {"enum": []}]
    with Engine(*parts(tokenizer=NoZ()), max_sequences=1, context=60) as runner:
        for form in ({"choices": ["abz"]}, *({"schema": schema} for schema in schemas)):
            with pytest.raises(OptionError):
                runner.submit([1, 2, 3], **form)
        assert not any(slot.is_busy for slot in runner.slots)
        assert runner.submit([1, 2, 3], choices=["ab"]).result().text == "ab"


def test_several_answers_to_one_prompt_in_a_form() -> None:
    colors = ["red", "green", "blue"]
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "choices": colors, "max_tokens": None}
    results = list(
        sample("demo", "My favorite color is", 6, parallel=3, loading={"context": 200}, **options)
    )
    assert len({result.text for result in results} & {*colors}) > 1
    assert all(one.text in colors and one.finish_reason == "stop" for one in results)

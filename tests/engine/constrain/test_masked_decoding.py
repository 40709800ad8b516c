"""Answers in a form equal plain masked decoding, whatever was reused."""

from __future__ import annotations

import json
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from llguidance import LLMatcher
from mlx_lm.models.cache import make_prompt_cache
from support.forms import SCHEMAS, ask, build, text, tokens
from support.sample import fewer

from mlxrunner import Runner
from mlxrunner.engine.constrain import constraint_of
from mlxrunner.options import GenerateOptions
from mlxrunner.testing import EOS, VOCAB, ByteTokenizer

WARM = [
    "llama",
    "qwen3",
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "llama4",
    "qwen3_next",
    "lfm2",
    "mamba2",
]


def masked_by_hand(
    runner: Runner, prompt: list[int], grammar: str, limit: int
) -> tuple[list[int], list[float]]:
    """Decode on mlx-lm's own caches with all tokens forbidden that llguidance does not allow."""
    matcher, cache = (
        LLMatcher(runner.tokenizer.vocabulary.guide, grammar),
        make_prompt_cache(runner.model),
    )
    logits = runner.model(mx.array([prompt]), cache=cache)[0, -1]
    found, logprobs = [], []
    while len(found) < limit:
        row = np.array(logits.astype(mx.float32), np.float64)
        allowed = np.unpackbits(
            np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
        )[: len(row)].astype(bool)
        allowed[EOS] = matcher.is_accepting()
        row[~allowed] = -np.inf
        token = int(row.argmax())
        found.append(token)
        logprobs.append(float(row[token] - row.max() - np.log(np.exp(row - row.max()).sum())))
        if token == EOS or (matcher.consume_token(token) and matcher.is_stopped()):
            break
        logits = runner.model(mx.array([[token]]), cache=cache)[0, -1]
    return found, logprobs


@pytest.mark.parametrize("architecture", WARM)
def test_tokens_are_those_of_plain_masked_decoding(architecture: str) -> None:
    """Log-probabilities are those of the masked logits."""
    runner = build(architecture)
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    head = '%llguidance {"no_forcing": true}'
    for name in ("object", "nested arrays", "anyOf", "$ref"):
        grammar = f"{head}\nstart: %json {json.dumps(SCHEMAS[name] | {'x-guidance': style})}"
        expected = masked_by_hand(runner, [5, 6, 7, 8], grammar, 40)
        chunks = ask(runner, [5, 6, 7, 8], schema=SCHEMAS[name], max_tokens=40, logprobs=3)
        assert tokens(chunks) == expected[0]
        assert [chunk.logprob for chunk in chunks] == pytest.approx(expected[1], abs=1e-4)


@pytest.mark.exhaustive(3)
@pytest.mark.parametrize("architecture", WARM)
def test_a_warm_answer_is_that_of_a_cold_one(architecture: str) -> None:
    """A warm answer equals a cold one, and the entry holds exactly what was evaluated."""
    rng = random.Random(architecture)
    runner = build(
        architecture,
        prefill_step=16,
        rewind_slack=4,
        checkpoint_interval=8,
        checkpoint_budget=10**6,
    )
    forms: list[dict[str, Any]] = [
        {"schema": SCHEMAS["object"]},
        {"choices": ["yes", "yesterday", "no"]},
        {},
        {"schema": SCHEMAS["nested arrays"]},
        {
            "schema": SCHEMAS["object"],
            "temperature": 1.0,
            "seed": 4,
            "top_k": 20,
            "top_p": 0.9,
            "repetition_penalty": 1.3,
        },
    ]
    history = [rng.randrange(290) for _ in range(40)]
    for turn in range(fewer(6, 4)):
        options = {"max_tokens": 30, **forms[turn % len(forms)]}
        chunks = ask(runner, history, **options)
        fresh = build(architecture)
        assert tokens(chunks) == tokens(ask(fresh, history, **options))
        entry = runner.entry
        assert entry.is_true
        evaluated = [*history, *tokens(chunks)]
        assert entry.tokens == evaluated[: len(entry.tokens)]
        assert len(entry.tokens) >= len(evaluated) - 1
        edit = rng.choice(["append", "edit", "again"])
        if edit == "append":
            history = evaluated + [rng.randrange(290) for _ in range(5)]
        elif edit == "edit":
            place = rng.randrange(1, len(history))
            history = [*history[:place], rng.randrange(290), *history[place + 1 :]]


def test_sampling_sees_only_what_the_form_allows(llama: Runner) -> None:
    """Log-probabilities, top_k, top_p and a seed count possible tokens only."""
    for chunk in ask(llama, choices=["yes", "no"], logprobs=5):
        assert chunk.top_logprobs is not None
        assert {chr(token) for token in chunk.top_logprobs} <= set("yesno")
        assert sum(np.exp(list(chunk.top_logprobs.values()))) == pytest.approx(1, abs=1e-5)
        json.dumps(chunk.top_logprobs, allow_nan=False)
    greedy = tokens(ask(llama, schema=SCHEMAS["object"]))
    for narrow in ({"top_k": 1}, {"top_p": 0}, {"min_p": 1.0}):
        assert (
            tokens(ask(llama, schema=SCHEMAS["object"], temperature=5.0, seed=1, **narrow))
            == greedy
        )
    several = {
        tuple(tokens(ask(llama, schema=SCHEMAS["object"], temperature=2.0, seed=seed)))
        for seed in (1, 1, 2, 3)
    }
    assert len(several) == 3
    seen: list[int] = []
    ask(
        llama,
        [1, 2, 3],
        choices=["yes"],
        logits_processors=[lambda history, logits: seen.append(history.shape[0]) or logits],
    )
    assert seen[:3] == [3, 4, 5]


def test_penalties_are_for_the_tokens_of_the_answer(llama: Runner) -> None:
    """Ten equal letters are not the best answer any more."""
    schema = {"type": "string", "pattern": "^[a-z]{10}$"}
    plain, varied = (
        text(ask(llama, schema=schema, **options)) for options in ({}, {"frequency_penalty": 50.0})
    )
    assert max(map(plain.count, plain[1:-1])) > max(map(varied.count, varied[1:-1]))
    assert len(set(varied[1:-1])) == 10


@pytest.mark.parametrize("width", [VOCAB - 40, VOCAB, VOCAB + 100])
def test_a_mask_is_as_wide_as_the_logits(width: int) -> None:
    """Tokens that the tokenizer does not know, and the library's end token, are never allowed."""
    constraint = constraint_of(GenerateOptions.of(choices=["a", "ab"]), ByteTokenizer(), width)
    assert constraint is not None
    constraint.advance(ord("a"))
    assert np.flatnonzero(constraint.mask(width)).tolist() == [
        ord("b"),
        *([EOS] if width > EOS else []),
    ]
    constraint.advance(ord("b"))
    assert constraint.is_done


def test_each_request_compiles_for_itself(llama: Runner) -> None:
    """An answer is not in the way of another that explored the form."""
    first, second = (
        constraint_of(GenerateOptions.of(choices=["ab", "cd"]), llama.tokenizer, VOCAB)
        for _ in range(2)
    )
    assert first is not None
    assert second is not None
    first.advance(ord("a"))
    assert [np.flatnonzero(one.mask(VOCAB)).tolist() for one in (first, second)] == [
        [ord("b")],
        [ord("a"), ord("c")],
    ]
    assert llama.tokenizer.vocabulary.guide is llama.tokenizer.vocabulary.guide

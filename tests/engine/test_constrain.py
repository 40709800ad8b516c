"""Answers in a form are valid, end where the form does, and refuse what cannot be had."""

from __future__ import annotations

import json
import random
import re
import sys
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher
from mlx_lm.models.cache import make_prompt_cache
from support.forms import SCHEMAS, FewLetters, ask, boost, build, text, tokens
from support.sample import fewer

from mlxrunner import FormError, OptionError, Runner
from mlxrunner.config.option import MAX_SCHEMA
from mlxrunner.engine.constrain import check_form, constraint_of
from mlxrunner.options import GenerateOptions
from mlxrunner.testing import EOS, VOCAB, ByteTokenizer


@pytest.fixture(scope="module")
def llama() -> Runner:
    return build()


@pytest.fixture(scope="module")
def demo() -> Runner:
    return Runner.load("demo", reserve=False)


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_an_instance_of_the_schema(llama: Runner, demo: Runner, name: str) -> None:
    """An answer is valid whatever the model prefers; a cut one is the beginning of a valid one."""
    validator = Draft202012Validator(
        SCHEMAS[name], format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    whole = 0
    for runner in (llama, demo):
        for options in ({}, *({"temperature": 1.0, "seed": seed} for seed in range(3))):
            chunks = ask(runner, schema=SCHEMAS[name], max_tokens=200, **options)
            if chunks[-1].finish_reason == "stop":
                answer = json.loads(text(chunks))
                validator.validate(answer)
                whole += 1
            else:
                assert chunks[-1].finish_reason == "length"
                assert name in ("recursive", "anything", "additional properties")
    assert whole >= fewer(3, 2)


@pytest.mark.parametrize(
    "choices",
    [
        ["yes", "no"],
        ["yes"],
        ["a", "ab", "abc"],
        ["größer", "日本語", "😀", "日本"],
        ["yes, please", 'say "no"', "back\\slash", "two\nlines", "\ttab"],
        ["</s>", "<|im_end|>", "<0x41>", "start: x", "%json", "'", "/"],
        ["A"] * 3,
        [f"number {i}" for i in range(2000)],
    ],
    ids=lambda choices: choices[0],
)
def test_an_answer_is_one_of_the_choices(llama: Runner, demo: Runner, choices: list[str]) -> None:
    seen = set()
    for runner in (llama, demo):
        for options in ({}, *({"temperature": 3.0, "seed": seed} for seed in range(6))):
            chunks = ask(runner, choices=choices, **options)
            assert text(chunks) in choices
            assert chunks[-1].finish_reason == "stop"
            seen.add(text(chunks))
    assert len(seen) > 1 or len(set(choices)) == 1


class _Marked(ByteTokenizer):
    template_stops = ("es",)


def test_an_answer_has_the_spaces_of_json_dumps_and_all_that_was_asked_for(llama: Runner) -> None:
    """A text is one choice, duplicates change nothing, and so does a template's mark of an end."""
    schema = {"const": {"a": [1, {"b": None}, []], "c": "d e"}}
    assert text(ask(llama, schema=schema)) == json.dumps(schema["const"])
    assert text(ask(llama, choices="maybe")) == "maybe"
    several = (["no", "yes", "yes, please"], ["no", "yes", "no", "yes, please", "yes"])
    assert len({text(ask(llama, choices=choices)) for choices in several}) == 1
    assert text(ask(build(tokenizer=_Marked()), choices=["yes"])) == "yes"
    longest = ("x" * (MAX_SCHEMA // 2), "y" * (MAX_SCHEMA // 2))
    assert GenerateOptions.of(choices=[*longest]).choices == longest


def test_a_full_context_shifts_under_an_answer_in_a_form() -> None:
    runner = build(context=40)
    chunks = ask(
        runner,
        range(10),
        schema={"type": "string", "pattern": "^[a-z]{60}$"},
        overflow="shift",
        keep=4,
        max_tokens=100,
    )
    assert len(json.loads(text(chunks))) == 60
    assert chunks[-1].usage.cache.shifted_tokens > 0  # type: ignore[union-attr]
    assert runner.entry.is_true


def test_answers_go_on_while_they_are_read(llama: Runner) -> None:
    """The text of each chunk is there before the next token is chosen: chunks come one by one."""
    answer = llama.generate([1, 2, 3], schema=SCHEMAS["const"])
    shown = [""]
    for chunk in answer:
        shown.append(shown[-1] + chunk.text)
    assert all(after.startswith(before) for before, after in pairwise(shown))
    assert json.loads(shown[-1]) == SCHEMAS["const"]["const"]


def test_a_stop_token_comes_only_where_the_form_is_complete(llama: Runner) -> None:
    """The model decides between a stop token and more only where the form is complete."""
    eager = {"logits_processors": [boost(EOS)]}
    chunks = ask(llama, choices=["yesterday", "yes"], **eager)
    assert (text(chunks), tokens(chunks)[-1], len(chunks)) == ("yes", EOS, 4)
    chunks = ask(llama, choices=["yesterday", "yes"], logits_processors=[boost(ord("t"))])
    assert (text(chunks), tokens(chunks)[-1]) == ("yesterday", ord("y"))
    chunks = ask(llama, schema={"type": "integer", "minimum": 100}, **eager)
    assert len(text(chunks)) == 3
    assert chunks[-1].finish_reason == "stop"
    assert json.loads(text(ask(llama, schema=SCHEMAS["object"], **eager)))


def test_the_stop_tokens_of_the_request_count(llama: Runner) -> None:
    """Without stop tokens the answer continues as the form does; a letter as one is left out."""
    assert text(ask(llama, choices=["a", "ab", "abc"], stop_tokens=[])) == "abc"
    chunks = ask(llama, schema={"type": "integer"}, stop_tokens=[], max_tokens=30)
    assert (len(chunks), chunks[-1].finish_reason) == (30, "length")
    with pytest.raises(FormError, match="after 1 tokens"):
        ask(llama, choices=["cat"], stop_tokens=[ord("a")])
    chunks = ask(
        llama, choices=["do", "dog"], stop_tokens=[ord("x")], logits_processors=[boost(ord("x"))]
    )
    assert (text(chunks), tokens(chunks)[-1], chunks[-1].finish_reason) == ("do", ord("x"), "stop")
    assert text(ask(llama, choices=["yes"], stop_tokens=[ord("x"), EOS])) == "yes"


def test_the_limit_cuts_with_the_reason_length(llama: Runner) -> None:
    """Unless the form is complete just then."""
    whole = ask(llama, schema=SCHEMAS["object"])
    for limit in range(1, len(whole) + 1):
        chunks = ask(llama, schema=SCHEMAS["object"], max_tokens=limit)
        assert tokens(chunks) == tokens(whole)[:limit]
        assert text(whole).startswith(text(chunks))
        assert chunks[-1].finish_reason == ("stop" if limit == len(whole) else "length")


CUTS: list[dict[str, Any]] = [
    {"stop": "e"},
    {"stop": ["s", "o", '"', "}"]},
    {"stop": ["yes", "no", "{"]},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(
    "form", [{"choices": ["yes", "no"]}, {"schema": SCHEMAS["object"]}], ids=["choices", "schema"]
)
def test_no_stop_string_cuts_an_answer_in_a_form(
    llama: Runner, form: dict[str, Any], cut: dict[str, Any]
) -> None:
    """Stop strings have no effect on an answer in a form, also at another temperature."""
    for sampling in ({}, {"temperature": 1.5, "seed": 4}):
        plain, with_stop = (ask(llama, **form, **sampling, **more) for more in ({}, cut))
        assert tokens(with_stop) == tokens(plain)
        assert text(with_stop) == text(plain)
        assert with_stop[-1].finish_reason == plain[-1].finish_reason == "stop"


WARM = "llama qwen3 deepseek_v3 gemma3_text gpt_oss llama4 qwen3_next lfm2 mamba2".split()


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
    checkpoints = {"checkpoint_interval": 8, "checkpoint_budget": 10**6}
    runner = build(architecture, prefill_step=16, rewind_slack=4, **checkpoints)
    forms: list[dict[str, Any]] = [
        {"schema": SCHEMAS["object"]},
        {"choices": ["yes", "yesterday", "no"]},
        {},
        {"schema": SCHEMAS["nested arrays"]},
        {"schema": SCHEMAS["object"], "temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9}
        | {"repetition_penalty": 1.3},
    ]
    history = [rng.randrange(290) for _ in range(40)]
    for turn in range(fewer(5, 4)):
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


def test_a_dead_end_is_an_error_and_the_entry_stays_true() -> None:
    """A text that can be begun but not ended."""
    runner, prompt = build(tokenizer=FewLetters()), [1, 2, 3]
    shown = []
    with pytest.raises(
        FormError, match="after 3 tokens of the answer, no token of the model fits the schema"
    ) as raised:
        for chunk in runner.generate(prompt, schema={"const": "abz"}):
            shown.append(chunk.token)
    assert raised.value.tokens == 3
    assert bytes(shown) == b'"ab'
    assert runner.entry.is_true
    assert bytes(runner.entry.tokens[3:]) == b'"ab'
    after = [*prompt, *b'"ab', 9]
    chunks = ask(runner, after, max_tokens=5, stop_tokens=[])
    assert chunks[-1].usage.cached_tokens == 6  # type: ignore[union-attr]
    assert tokens(chunks) == tokens(ask(build(), after, max_tokens=5, stop_tokens=[]))


def test_a_processor_that_forces_another_token_is_an_error(llama: Runner) -> None:
    with pytest.raises(FormError, match="after 1 tokens"):
        ask(
            llama,
            choices=["yes"],
            logits_processors=[lambda history, logits: mx.zeros_like(logits)],
        )


HOSTILE: dict[str, tuple[Any, str]] = {
    "no json": ("{", "schema: not valid JSON: Expecting property name"),
    "a list": ("[1]", 'schema: it has to be a JSON object, such as {"type": "object"}, not [1]'),
    "a number": (
        5,
        'schema: it has to be a JSON object, such as {"type": "object"}, or its text, not 5',
    ),
    "not writable": ({"const": object()}, "schema: it can't be written as JSON"),
    "too long": (
        {"const": "x" * MAX_SCHEMA},
        f"characters are too many, it may have at most {MAX_SCHEMA}",
    ),
    "deep": ('{"items": ' * 5000 + "{}" + "}" * 5000, "schema: not valid JSON"),
    "rather deep": ('{"items": ' * 200 + "{}" + "}" * 200, "recursion limit exceeded"),
    "not a number": ('{"const": NaN}', "schema: "),
    "huge number": ({"minimum": 10**400}, "number out of range"),
    "half a character": ({"const": "\ud800"}, "schema: "),
    "empty enum": ({"enum": []}, "schema: Unsatisfiable schema: anyOf is empty"),
    "unsatisfiable": (
        {"type": "integer", "minimum": 5, "maximum": 3},
        "minimum (5) is greater than maximum (3)",
    ),
    "itself": (
        {"$ref": "#"},
        "schema: after 0 tokens of the answer, no token of the model fits the schema or choices",
    ),
    "unsupported": ({"not": {"type": "string"}}, 'schema: Unimplemented keys: ["not"]'),
    "unknown type": ({"type": "strin"}, "schema: Invalid type: strin"),
    "unknown format": (
        {"type": "string", "format": "nonsense"},
        "schema: Unknown format: nonsense",
    ),
    "broken pattern": (
        {"type": "string", "pattern": "((("},
        "schema: regex parse error: ((( ^ error: unclosed group",
    ),
    "nobody's reference": ({"$ref": "#/$defs/x"}, "schema: Pointer '/$defs/x' does not exist"),
    "remote": ({"$ref": "http://127.0.0.1:9/x.json"}, "does not fetch resources"),
    "a file": ({"$ref": "file:///etc/passwd"}, "does not fetch resources"),
    "many": ({"enum": [f"{i:x}" for i in range(12_000)]}, ""),
    "explosive": (
        {
            "allOf": [
                {"anyOf": [{"properties": {f"{x}{i}": {"const": i}}} for x in "ab"]}
                for i in range(12)
            ]
        },
        "schema too large",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_schema_that_cannot_be_had_is_refused_in_one_line(name: str) -> None:
    """Before anything is evaluated: the entry is as it was, and the next request is a hit."""
    runner = build()
    ask(runner, [1, 2, 3], max_tokens=2, stop_tokens=[])
    before = list(runner.entry.tokens)
    schema, message = HOSTILE[name]
    if not message:  # large, but possible
        assert json.loads(text(ask(runner, schema=schema))) in schema["enum"]
        return
    with pytest.raises(OptionError, match=re.escape(message)) as raised:
        runner.generate([1, 2, 3], schema=schema)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    assert runner.entry.tokens == before
    assert (
        ask(runner, [1, 2, 3], max_tokens=2, stop_tokens=[])[-1].usage.outcome  # type: ignore[union-attr]
        == "hit"
    )


def test_a_schema_cannot_loosen_itself(llama: Runner) -> None:
    """llguidance's own settings inside a schema are ignored."""
    with pytest.raises(OptionError, match="Unimplemented"):
        llama.generate([1], schema={"not": {}, "x-guidance": {"lenient": True}})
    assert (
        text(ask(llama, schema={"const": [1, 2], "x-guidance": {"item_separator": "  ,  "}}))
        == "[1, 2]"
    )


def test_without_the_library_only_a_form_is_refused(
    llama: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for options in ({"choices": ["yes"]}, {"schema": "{}"}):
        with pytest.raises(OptionError, match=r"not installed: .* install .*llguidance"):
            llama.generate([1, 2], **options)
        with pytest.raises(OptionError, match="pip install"):
            check_form(GenerateOptions.of(**options))
    assert ask(llama, [1, 2], max_tokens=2, stop_tokens=[])


def test_a_vocabulary_that_cannot_spell_a_choice_is_named_with_it() -> None:
    """Before anything is evaluated; what it can spell works."""
    runner = build(tokenizer=FewLetters())
    with pytest.raises(OptionError, match="choices: this model's vocabulary can't spell 'abz'"):
        runner.generate([1, 2, 3], choices=["abc", "abz"])
    assert text(ask(runner, choices=["abc", "dab"])) in ("abc", "dab")
    assert text(ask(runner, schema={"enum": ["abc", "zzz"]})) == '"abc"'
    with pytest.raises(
        OptionError,
        match="schema: after 0 tokens of the answer, no token of the model fits the schema",
    ):
        runner.generate([1, 2, 3], schema={"const": 7})


def test_a_form_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of lines of a batch may have it; a refused one is looked at once, too."""
    from mlxrunner.engine import constrain

    seen = []
    real = constrain.library().LLMatcher.validate_grammar

    class Counting:
        class LLMatcher:
            @staticmethod
            def validate_grammar(grammar: str) -> Any:
                seen.append(grammar)
                return real(grammar)

    monkeypatch.setattr(constrain, "library", lambda: Counting)
    for _ in range(3):
        constrain.check_form(GenerateOptions.of(choices=["once", "and again"]))
        with pytest.raises(OptionError, match="schema: "):
            constrain.check_form(GenerateOptions.of(schema={"not": {}, "title": "looked at once"}))
    assert len(seen) == 2


EACH = "choices: each one has to be a text of at least one character"
STOPS = "stop: each stop string has to be a text of at least one character"
LONG = f"choices: {MAX_SCHEMA + 1} characters are too many, they may have at most {MAX_SCHEMA}"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"choices": 5}, "choices: 5 is not a list"),
    ({"choices": ["\ud800"]}, "choices: '\\ud800' is not valid Unicode"),
    ({"choices": ["a"], "schema": {}}, "schema, choices: an answer has one form"),
    # 20 MB of them took 30 s and 1.8 GB.
    ({"choices": ["x" * (MAX_SCHEMA // 2), "y" * (MAX_SCHEMA // 2 + 1)]}, LONG),
    *(({"choices": wrong}, EACH) for wrong in (["a", ""], ["a", 1], "")),
    *(({"choices": wrong}, "choices: the list is empty") for wrong in ([], ())),
    ({"choices": [], "schema": {}}, "choices: the list is empty"),
    *(({"stop": wrong}, STOPS) for wrong in ("", ["a", ""])),
    ({"schema": ""}, "schema: not valid JSON"),
    ({"max_tokens": 0}, "max_tokens: 0 is out of range"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_forms_are_refused_when_they_are_made(
    llama: Runner, options: dict[str, Any], message: str
) -> None:
    """Without the library; what is empty never gives a free answer."""
    with pytest.raises(OptionError, match=re.escape(message)):
        GenerateOptions.of(**options)
    with pytest.raises(OptionError, match=re.escape(message)):
        ask(llama, **options)

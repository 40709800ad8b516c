"""An answer in a form ends where the form is complete, or at the limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.forms import SCHEMAS, ask, boost, build, text, tokens

from mlxrunner import FormError, Runner
from mlxrunner.testing import EOS, ByteTokenizer


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
    """Without stop tokens the answer goes on as the form does; a letter as one is left out."""
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


class _Marked(ByteTokenizer):
    template_stops = ("es",)


def test_a_template_that_ends_messages_by_a_text_cuts_no_form() -> None:
    """The text may be part of what was asked for."""
    assert text(ask(build(tokenizer=_Marked()), choices=["yes"])) == "yes"

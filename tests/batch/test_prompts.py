"""Lines and requests become tokens in the store, or errors; nothing of it stops the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from support.checks import has

from mlxrunner.batch.execution import BatchRequest, lines_of
from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.prompts import tokenize_lines
from mlxrunner.batch.store import InputLine, Store, StoredLine
from mlxrunner.errors import PromptError
from mlxrunner.testing import BOS, EOS, ByteTokenizer


def spooled(lines: Iterable[InputLine], tokenizer: Any = None, **settings: Any) -> list[StoredLine]:
    with Store.create() as store:
        tokenize_lines(store, lines, tokenizer or ByteTokenizer(), **{"context": 100, **settings})
        store.finish()
        return list(store.pending("input"))


def test_a_line_becomes_its_tokens() -> None:
    """The tokens are those that the runner would evaluate; the rest of the line stays."""
    messages: Any = [{"role": "user", "content": "hi"}]
    lines = [
        InputLine(0, 3, "hi", 7, "text_completion", {"max_tokens": 5}),
        InputLine(1, 4, messages, "a", "plain"),
        InputLine(2, 9, id="b", error="line 9: broken"),
    ]
    found = spooled(lines)
    chat = ByteTokenizer().encode(ByteTokenizer().render(messages))
    for line, one, tokens in zip(lines, found, ([BOS, *b"hi"], chat, []), strict=True):
        assert one.tokens.tolist() == tokens
        names = ("index", "number", "id", "format", "options", "error")
        has(one, **{name: getattr(line, name) for name in names})


NO_ROOM = "line 1: the prompt has {} tokens, which leaves no room in the context of 99 tokens"


@pytest.mark.parametrize("length", [98, 99, 100, 1001])
@pytest.mark.parametrize("overflow", ["stop", "error", "shift"])
@pytest.mark.parametrize("by", ["line", "default"])
def test_a_prompt_that_is_too_long(length: int, overflow: str, by: str) -> None:
    """A prompt without room for an answer is an error with both numbers, unless it is shifted.

    One that is far too long is not tokenized, unless it is shifted.
    """
    options = {"overflow": overflow}
    line = InputLine(0, 1, "x" * (length - 1), options=options if by == "line" else {})
    defaults = options if by == "default" else {"overflow": "stop"}
    (found,) = spooled([line], context=99, defaults=defaults)
    if length < 99 or overflow == "shift":
        assert (len(found.tokens), found.error) == (length, None)
    else:
        said = "at least 99" if length > 1000 else length
        assert str(found.error).startswith(NO_ROOM.format(said))


def test_what_the_template_or_the_tokenizer_refuses() -> None:
    """Is the error of that line."""

    class Refusing(ByteTokenizer):
        def render(self, messages: Any, *, add_generation_prompt: bool = True) -> str:
            raise PromptError("no such roles")

        def encode(self, text: str) -> list[int]:
            return []

    chat, empty = spooled(
        [InputLine(0, 5, [{"role": "user", "content": "a"}]), InputLine(1, 6, "a")], Refusing()
    )
    assert chat.error == "line 5: no such roles"
    assert empty.error == "line 6: the prompt is empty: at least one token is needed"


def test_requests_of_a_program() -> None:
    """Texts, messages and token ids take a program's options; each wrong one is its own error."""
    wrong: list[tuple[BatchRequest, str]] = [
        (BatchRequest("hi", {"temperature": -1}, id=4), "temperature: -1 is out of range"),
        (BatchRequest("hi", {"progress": print}), "unknown option 'progress'"),
        (BatchRequest("hi", {"stop_tokens": {1}}), "values that JSON knows"),
        (BatchRequest("\ud800"), "not valid Unicode"),
        (BatchRequest([-1]), "token ids have to be between 0 and"),
        (BatchRequest([]), "the prompt is empty"),
        (BatchRequest(5), "a prompt is a text, token ids or messages, not int"),  # type: ignore[arg-type]
    ]
    requests = [
        BatchRequest("hi", {"stop": ("a", "b"), "max_tokens": 3}, id="x"),
        BatchRequest([{"role": "user", "content": "hi"}]),
        BatchRequest([1, 2, 3]),
        BatchRequest(np.array([4, 5])),  # type: ignore[arg-type]
        *(request for request, _ in wrong),
    ]
    found = spooled(lines_of(requests, BatchOptions(defaults={"temperature": 1})))
    assert [one.index for one in found] == list(range(11))
    assert (found[0].options, found[0].id) == ({"stop": ["a", "b"], "max_tokens": 3}, "x")
    assert [one.tokens.tolist() for one in found[2:4]] == [[1, 2, 3], [4, 5]]
    assert [one.error for one in found[:4]] == [None] * 4
    for one, (_, problem) in zip(found[4:], wrong, strict=True):
        assert problem in str(one.error)
    assert found[4].id == 4


@pytest.mark.parametrize(
    "name",
    [2**70, (1,), "\ud800", 1.5, True, object()],
    ids=["long", "tuple", "half", "float", "bool", "object"],
)
def test_an_id_that_cannot_be_is_an_error_of_its_request_only(name: Any) -> None:
    """It can't come back; the index says which one it was."""
    bad, good = spooled(lines_of([BatchRequest("hi", id=name), BatchRequest("hi", id="b")]))
    assert (bad.id, good.id, good.error) == (None, "b", None)
    assert str(bad.error).startswith("id ")


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"overflow": "shift"}, 12), ({"overflow": "shift", "keep": 3}, 3), ({}, None)],
)
def test_what_a_shift_keeps(options: dict[str, Any], kept: int | None) -> None:
    """A shift keeps the system prompt with BOS by default, counted here for the store."""
    messages: Any = [{"role": "system", "content": "S!"}, {"role": "user", "content": "hi"}]
    (found,) = spooled([InputLine(0, 1, messages, options=options)])
    assert found.options.get("keep") == kept
    if "keep" not in options and kept is not None:
        assert found.tokens[:kept].tolist() == [BOS, *b"system: S!", EOS]


def test_more_than_can_be_kept_is_an_error_before_anything_runs() -> None:
    """The message is the runner's."""
    (found,) = spooled([InputLine(0, 1, "hi", options={"overflow": "shift", "keep": 99})])
    assert found.error == "line 1: keep: 99 tokens leave no room in the context of 100 tokens"

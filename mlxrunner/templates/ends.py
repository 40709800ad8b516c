"""Find the tokens with which a chat template ends the assistant's turns.

Short conversations of marks are rendered with the model's own template: an answer, with thinking,
with one and two tool calls, as the last message and before others. A token is an end if the
template closes such a turn with it, and never writes it within one. No name of a token is known
here: gpt-oss ends its thinking with the token with which Phi-3 ends its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from mlxrunner.errors import PromptError, TemplateLimitError

CALL_ID = "probe0001"
"""The id of a call that all templates take: Mistral's have nine letters or digits."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "d",
        "parameters": {"type": "object", "properties": {"p": {"type": "string"}}},
    },
}
"""The tool of a call."""
_QUESTION, _THOUGHT, _ANSWER, _VALUE, _NEXT, _LAST = (
    f"probe{name}text" for name in ("question", "thought", "answer", "value", "next", "last")
)
_USER = {"role": "user", "content": _QUESTION}

Encode = Callable[[str], list[int]]


class _ProbedTurn(NamedTuple):
    """A turn of the assistant within a conversation."""

    before: list[dict[str, Any]]
    message: dict[str, Any]
    mark: str
    """The text of the message behind which its end is looked for."""
    after: dict[str, Any]
    """A message that may follow."""
    variables: Mapping[str, Any] = MappingProxyType({})


def turn_ends(
    render: Callable[..., str], encode: Encode, is_mark: Callable[[int], bool]
) -> frozenset[int]:
    """Return the tokens with which a template ends the assistant's turns.

    `render` and `encode` are `Tokenizer.render` and `Tokenizer.encode_more`. `is_mark` tells if a
    token is a special or added one. The set is empty if the template refuses the conversations, or
    ends turns with no such token.
    """
    ends, within = set[int](), set[int]()
    try:
        begun = _text(render, [_USER], True)
        if begun is None or _QUESTION not in begun:
            return frozenset()
        openers = set(takewhile(is_mark, _tokens(encode, begun.partition(_QUESTION)[0])))
        for turn in _turns():
            end, inner = _look(render, encode, is_mark, turn, openers)
            ends |= {end} if end is not None else set()
            within |= inner
    except PromptError:  # the template was stopped, or a text can't be encoded
        return frozenset()
    return frozenset(ends - within - openers)


def _turns() -> Iterator[_ProbedTurn]:
    """Yield the turns that a template may write."""
    user = {"role": "user", "content": _NEXT}
    last = {"role": "user", "content": _LAST}
    answer: dict[str, Any] = {"role": "assistant", "content": _ANSWER}
    thought = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    tagged = {"content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}
    for message in (answer, answer | thought, answer | tagged):
        yield _ProbedTurn([_USER], message, _ANSWER, user)
        yield _ProbedTurn([_USER, answer, user], message, _ANSWER, last)
    tools = {"tools": [TOOL]}
    result = {"role": "tool", "content": _NEXT, "tool_call_id": CALL_ID, "name": "probetool"}
    function = {"name": "probetool", "arguments": {"p": _VALUE}}
    call = {"type": "function", "id": CALL_ID, "function": function}
    silent = answer | {"content": "", "tool_calls": [call]}
    for message in (
        silent,
        silent | thought,
        silent | {"tool_calls": [call, call]},
        answer | {"tool_calls": [call]},
    ):
        yield _ProbedTurn([_USER], message, _VALUE, result, tools)
    yield _ProbedTurn([_USER], silent, _VALUE, result, {"builtin_tools": ["probetool"], **tools})
    yield _ProbedTurn([_USER, silent, result], answer | thought, _ANSWER, last, tools)


def _look(
    render: Callable[..., str],
    encode: Encode,
    is_mark: Callable[[int], bool],
    turn: _ProbedTurn,
    openers: set[int],
) -> tuple[int | None, set[int]]:
    """Return the mark that ends a turn, if one does, and those that stand within it."""
    whole, anchor = [*turn.before, turn.message], turn.before[-1]["content"]
    begun = _text(render, turn.before, True, **turn.variables)
    last = _text(render, whole, False, **turn.variables)
    if begun is None or last is None or anchor not in begun or turn.mark not in last:
        return None, set()
    header = _tokens(encode, begun.rpartition(anchor)[2])
    texts, tails = [last], [_tokens(encode, _behind(last, turn.mark))]
    longer = _text(render, [*whole, turn.after], False, **turn.variables) or ""
    followed, found, _ = longer.rpartition(turn.after["content"])
    if found and turn.mark in followed:
        texts.append(followed)
        tails.append(_tokens(encode, _behind(followed, turn.mark)))
    open_ = _text(render, whole, True, **turn.variables) or ""
    end = _end(tails, _tokens(encode, _behind(open_, turn.mark)), is_mark, openers)
    inner = set[int]()
    for text, tail in zip(texts, tails, strict=True):
        body = _tokens(encode, text[: text.rindex(turn.mark)].rpartition(anchor)[2])
        begins = _shared(header, body)
        if any(map(is_mark, header)) and not any(map(is_mark, header[:begins])):
            return None, set()  # the turn begins in another way than with a generation prompt
        before = tail[: tail.index(end)] if end is not None and end in tail else []
        inner |= {one for one in (*body[begins:], *before) if is_mark(one)}
    return end, inner


def _end(
    tails: Sequence[Sequence[int]],
    open_: Sequence[int],
    is_mark: Callable[[int], bool],
    openers: set[int],
) -> int | None:
    """Return the token that ends a turn, from the tokens behind it; None if none does.

    `tails`: those of the last message, and those before a further one. `open_`: those of the last
    message with a generation prompt. Tokens that begin a message are none of the end.
    """

    def last_mark(tokens: Sequence[int]) -> int | None:
        ends = (token for token in reversed(tokens) if is_mark(token) and token not in openers)
        return next(ends, None)

    own = last_mark(tails[0])
    if len(tails) == 1:
        return own
    both = last_mark(tails[0][: _shared(*tails)])
    if both is not None:
        return both
    # The last message ends in its own way, as in gpt-oss, or not at all.
    return own if own is not None else last_mark(open_[: _shared(open_, tails[1])])


def _text(
    render: Callable[..., str], messages: list[Any], add_generation_prompt: bool, **variables: Any
) -> str | None:
    """Return a conversation as the template writes it, or None if the template refuses it.

    Raise TemplateLimitError if the template was stopped.
    """
    try:
        return render(messages, add_generation_prompt=add_generation_prompt, **variables)
    except TemplateLimitError:
        raise
    except PromptError:
        return None


def _tokens(encode: Encode, text: str) -> list[int]:
    return encode(text) if text else []


def _behind(text: str, mark: str) -> str:
    """Return the text behind the last `mark`; nothing if there is none."""
    return text.rpartition(mark)[2] if mark in text else ""


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))

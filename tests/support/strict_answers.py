"""Answers of models that would write anything, held to the calls of strict tools."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.strict_templates import NESTED, load_strict

from mlxrunner.engine.constrain import Constraint
from mlxrunner.results import Chunk
from mlxrunner.serve.events import AnswerEvent, ServerRequest, ToolCallDelta, ToolCallStart
from mlxrunner.serve.prompts.builder import PromptBuilder
from mlxrunner.tokenizer import Tokenizer, load_tokenizer

LONG = [">\n", '>{"', '": "', '"l', "ook", "}}", "]{", " ok", '{"name": "lo', "a[TOOL_CALLS] [{"]
"""Tokens of several letters, of which some end a tag and go on."""
FIRST = 256
"""The first of them: those before are bytes."""
SHORT = '"}]>0123456789slowfat'
"""Letters that end a value soon."""


def tool(name: str, parameters: dict[str, Any] = NESTED, **more: Any) -> dict[str, Any]:
    """Return a description of a tool."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("look", strict=True), tool("move")]


def asked(**more: Any) -> ServerRequest:
    """Return a request with a strict tool and another one."""
    messages = [{"role": "user", "content": "hi"}]
    given = {"protocol": "chat", "model": "", "id": "r", "messages": messages, "tools": TOOLS}
    return ServerRequest(**{**given, **more})


def tokenizer_of(folder: Path, family: str) -> Tokenizer:
    """Load a tokenizer that has the long tokens as well."""
    load_strict(folder, family)
    path = folder / "tokenizer.json"
    written = json.loads(path.read_text())
    spelled = [text.replace(" ", "\u0120").replace("\n", "\u010a") for text in LONG]
    written["model"]["vocab"] |= {text: FIRST + n for n, text in enumerate(spelled)}
    for token in written["added_tokens"]:
        token["id"] += len(LONG)
    path.write_text(json.dumps(written))
    return load_tokenizer(folder)


def constraint_of(maker: PromptBuilder, request: ServerRequest) -> Constraint | None:
    """Return the constraint of an answer to a request."""
    start = maker.make(request).prompt.constraint
    return None if start is None else start(maker.tokenizer.stop_tokens)


def held_of(maker: PromptBuilder, request: ServerRequest) -> Constraint:
    """Return the constraint of an answer to a request that has one."""
    held = constraint_of(maker, request)
    assert held is not None
    return held


def answered(maker: PromptBuilder, held: Constraint, wish: str, order: random.Random) -> str:
    """Return the answer of a model that wants to say `wish`.

    Where it may not, it gives that up, says anything that may come, and ends as soon as it may.
    """
    tokenizer, said = maker.tokenizer, list[int]()
    short = {token for letter in SHORT for token in tokenizer.encode_more(letter)}
    wishes = tokenizer.encode_more(wish)[::-1]
    while not held.is_done and len(said) < 400:
        allowed = held.mask(tokenizer.vocab_size)
        if wishes and allowed[wishes[-1]]:
            said.append(wishes.pop())
        else:
            may, wishes = allowed.nonzero()[0].tolist(), []
            for few in (tokenizer.stop_tokens, short, may):
                if set(few) & set(may):
                    said.append(order.choice(sorted(set(few) & set(may))))
                    break
        held.advance(said[-1])
    assert held.is_done
    assert held.count == len(said)
    return tokenizer.decode([token for token in said if token not in tokenizer.stop_tokens])


def events_of(maker: PromptBuilder, request: ServerRequest, answer: str) -> list[AnswerEvent]:
    """Return the events of an answer."""
    splitter = maker.splitter(maker.make(request), request)
    return [*splitter.add(Chunk(answer, 1)), *splitter.finish()]


def calls_of(events: Sequence[AnswerEvent]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the arguments of each call."""
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    written = [json.loads(event.text) for event in events if isinstance(event, ToolCallDelta)]
    return zip(names, written, strict=True)

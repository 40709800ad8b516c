"""Templates and answers that notice every difference."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.chat_templates import chat_template
from support.models import write_tokenizer

from mlxrunner.engine.constrain import Constraint
from mlxrunner.results import Chunk
from mlxrunner.server.events import AnswerEvent, ServerRequest, ToolCallEvent
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.tokenizer import Tokenizer, load_tokenizer

_CALL_ENDS = {
    "chatml": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3.5": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma3": "<end_of_turn>",
    "gpt-oss": "<|call|>",
    "glm": "<|user|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "phi4": "<|im_end|>",
}
TEMPLATES = {name: (chat_template("strict", name), end) for name, end in _CALL_ENDS.items()}
"""The template of each family, and the token that ends a call."""
MARKS: Sequence[str] = (
    "<|im_start|> <|im_end|> <|im_sep|> <tool_call> </tool_call> <think> </think> <|eot_id|> "
    "<|start_header_id|> <|end_header_id|> <|begin_of_text|> <start_of_turn> <end_of_turn> "
    "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|return|> [INST] [/INST] "
    "[TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] <|user|> <|assistant|> <|observation|> <|system|> "
    "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>"
).split()


NESTED = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "at": {"type": "integer", "minimum": 10, "maximum": 99},
        "how": {"$ref": "#/$defs/how"},
    },
    "required": ["at", "how"],
    "additionalProperties": False,
    "$defs": {"how": {"enum": ["fast", "slow"]}},
}
"""A form with parts that are defined elsewhere, and with limits."""


def load_strict(
    folder: Path, family: str, words: Sequence[str] = (), *, opening: str = "", begin: str = ""
) -> Tokenizer:
    """Write the tokenizer of a family: a token per byte, mark and word. Load it.

    `opening`: more of the template, after its end. `begin`: more, in front of it.
    """
    from tokenizers import Tokenizer as Fast

    template, end = TEMPLATES[family]
    folder.mkdir(parents=True)
    write_tokenizer(folder, chat_template=begin + template + opening, eos_token=end)
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(list(MARKS))
    fast.add_tokens(list(words))
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return load_tokenizer(folder)


Makers = dict[str, PromptBuilder]
"""A maker of prompts for each family."""
LONG = [">\n", '>{"', '": "', '"l', "ook", "}}", "]{", " ok", '{"name": "lo', "a[TOOL_CALLS] [{"]
"""Tokens of several letters, of which some end a tag and continue."""
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
    for event in events:
        if isinstance(event, ToolCallEvent):
            yield event.name, json.loads(event.arguments)

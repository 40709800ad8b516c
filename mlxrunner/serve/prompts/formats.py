"""The forms in which models write tool calls, and the reader of each.

mlx-lm's parsers read most of them. The readers here are for forms that it has none for: JSON
without tags (Llama 3), JSON in tags (Phi-4) and DeepSeek's tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from mlxrunner.serve.prompts import parameters
from mlxrunner.system.mlx_lm_internals import tool_parser, tool_parser_name
from mlxrunner.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
Kind = Literal["tags", "bare", "open", "channels"]


class Call(NamedTuple):
    """A call of a tool, as a model wrote it."""

    name: str
    arguments: str
    """The JSON text of an object."""
    id: str | None = None
    """The id that the model gave it, if its form has ids."""

    @property
    def meaning(self) -> tuple[str, str, str | None]:
        """A value that is equal for calls that mean the same, however their JSON is written."""
        return self.name, json.dumps(json.loads(self.arguments), sort_keys=True), self.id


class Piece(NamedTuple):
    """A piece of an answer."""

    kind: Literal["thought", "text", "call"]
    text: str = ""
    """The text, unless it is a call."""
    call: Call | None = None


@dataclass(frozen=True)
class CallFormat:
    """A form in which a model writes tool calls."""

    name: str
    kind: Kind
    """"tags": between two tags; "open": after a tag, to the end of the answer; "bare": JSON that
    the answer begins with; "channels": messages to a tool, as of gpt-oss."""
    start: str = ""
    """The text before a call."""
    end: str = ""
    """The text after a call."""
    parse: Callable[[str, Tools], Any] = lambda text, tools: json.loads(text)
    """The function from the text between the tags to a call, or to a list of them."""
    is_in_value: Callable[[str, Tools], bool] = lambda text, tools: _is_in_json(text)
    """The function that tells if the beginning of a call ends within a text of its arguments, so
    that the end tag behind it belongs to that text."""
    opening: str | None = None
    """The text before a JSON object of a call; None if its calls are not such objects."""
    arguments: str = "arguments"
    """The name of the arguments in that object."""

    def calls(self, text: str, tools: Tools) -> list[Call]:
        """Return the calls in `text`. Raise ValueError, with the reason, if it has none."""
        try:
            found = self.parse(text, tools)
            return [_call(one) for one in (found if isinstance(found, list) else [found])]
        except ValueError:
            raise
        except Exception as error:  # mlx-lm's parsers raise anything for text that is no call
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _is_in_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[") and parameters.is_in_string(text)


def _call(found: Any) -> Call:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        raise ValueError("it has no name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict) or (found["name"] == "unknown" and "raw" in arguments):
        raise ValueError("its arguments are not an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    identity = found.get("id")
    return Call(found["name"], text, identity if isinstance(identity, str) else None)


_DEEPSEEK = re.compile(
    "<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]+?)(?:<｜tool▁sep｜>)?\\s*"
    "(?:```json\n)?({.*?})\\s*(?:```)?<｜tool▁call▁end｜>",
    re.DOTALL,
)


def _parse_deepseek(text: str, tools: Tools) -> list[dict[str, Any]]:
    calls = [{"name": name, "arguments": json.loads(one)} for name, one in _DEEPSEEK.findall(text)]
    if not calls:
        raise ValueError("no call is in it")
    return calls


OWN = (
    CallFormat("channels", "channels", "<|channel|>", "<|message|>"),
    CallFormat(
        "deepseek",
        "tags",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _parse_deepseek,
    ),
    CallFormat("phi", "tags", "<|tool_call|>", "<|/tool_call|>"),
)
"""Formats that mlx-lm has no parser for; a template that names both tags uses them."""
BARE = CallFormat("bare_json", "bare", "<|python_tag|>", opening="", arguments="parameters")
HERMES = CallFormat("json_tools", "tags", "<tool_call>", "</tool_call>", opening="<tool_call>\n")


class _Vocabulary:
    """The tokens of a tokenizer, for questions with `in`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __contains__(self, text: str) -> bool:
        return len(self._tokenizer.encode_more(text)) == 1


def format_of(template: str, tokenizer: Tokenizer, parser: str | None = None) -> CallFormat:
    """Return the format of a model's tool calls.

    `parser`: the name of mlx-lm's parser, if the model's files name one. It counts if mlx-lm has
    it. A template that mlx-lm does not know is one of those in `OWN`, or has calls as JSON.
    """
    for name in (parser, tool_parser_name(template, _Vocabulary(tokenizer))):
        if name == HERMES.name:
            return HERMES
        if name is not None and (found := parsed_by_mlx_lm(name)) is not None:
            return found
    own = (one for one in OWN if one.start in template and one.end in template)
    return next(own, HERMES if "<tool_call>" in template or "tools" not in template else BARE)


def parsed_by_mlx_lm(name: str) -> CallFormat | None:
    """Return the format of mlx-lm's parser `name`; None if it has no such parser."""
    found = tool_parser(name)
    if found is None:
        return None
    parse, start, end = found
    form = CallFormat(name, "tags" if end else "open", start, end, parse)
    if name != parameters.NAME:
        return form
    return replace(form, parse=parameters.typed(parse), is_in_value=parameters.is_in_value)

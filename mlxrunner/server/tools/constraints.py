"""Hold the calls of tools to their schemas: calls that are required, and those of strict tools."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxrunner.engine.constrain import HEAD, JSON_STYLE, Constraint, check_form, literal, matcher_of
from mlxrunner.errors import OptionError
from mlxrunner.options import GenerateOptions
from mlxrunner.server.events import AnswerNote, ToolChoice, field_error
from mlxrunner.server.tools.formats import (
    ANY,
    ANY_TEXT,
    HERMES,
    NAME,
    CallFormat,
    Tools,
    arguments_of,
    is_strict,
    name_of,
    rules_of,
    strict_error,
)
from mlxrunner.templates.messages import THINKING_TAGS, ThinkingSplitter
from mlxrunner.tokenizer import Tokenizer

BEGINNING = "\0"
"""Stands for the beginning of an answer, or the end of a call, in the text that is searched."""
MOST_SEARCHED = 300
"""Most characters before a call that are searched for its beginning."""


@dataclass(frozen=True)
class ToolCallSyntax:
    """The way in which calls of a form are spelled.

    In its texts `%n` stands for the name of a tool, `%a` for its arguments, `%d` for a number and
    `%i` for an id.
    """

    begins: str
    """A regular expression for the text after which calls are held."""
    tag: str
    """The end of that text."""
    whole: str
    """The text from there on, in llguidance's dialect of Lark: of `call`, `WS` and `end`."""
    calls: tuple[str, ...]
    """The texts of a call."""
    heads: tuple[str, ...] = ()
    """The texts of a call without JSON around it, which is `head`."""
    end: str = ""
    """The text after the calls."""
    names: str = r"(?s:.+)"
    """A regular expression for the names of tools that a reader finds."""
    are_texts: bool = False
    """True if arguments are texts between tags: see `mlxrunner.server.tools.formats`."""


def _tagged(tag: str, whole: str, *calls: str, end: str = "", **more: Any) -> ToolCallSyntax:
    return ToolCallSyntax(re.escape(tag) + r"\s*", tag, whole, calls, end=end, **more)


LIST = '"[" call (", " call)* "]"'
TOOL_CALL_SYNTAXES: Mapping[str, ToolCallSyntax] = {
    "json_tools": _tagged(
        "<tool_call>", "WS call WS end", '{"name": "%n", "arguments": %a}', end="</tool_call>"
    ),
    "phi": _tagged(
        "<|tool_call|>",
        f"WS (call | {LIST}) WS end",
        '{"name": "%n", "arguments": %a}',
        end="<|/tool_call|>",
    ),
    "mistral": _tagged(
        "[TOOL_CALLS]",
        f"WS ({LIST} | head)",
        '{"name": "%n", "arguments": %a}',
        '{"name": "%n", "arguments": %a, "id": "%i"}',
        heads=("%n[ARGS]%a",),
        names=r"[\w.-]+",
    ),
    "kimi_k2": _tagged(
        "<|tool_calls_section_begin|>",
        "WS (call WS)+ end",
        "<|tool_call_begin|>functions.%n:%d<|tool_call_argument_begin|>%a<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
        names=r"[^\s<:]+",
    ),
    "deepseek": _tagged(
        "<｜tool▁calls▁begin｜>",
        "WS (call WS)+ end",
        "<｜tool▁call▁begin｜>%n<｜tool▁sep｜>%a<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%n\n```json\n%a\n```<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
        names=r"[^\s<{](?:[^<{\n]*[^\s<{])?",
    ),
    NAME: _tagged(
        "<tool_call>",
        "WS call WS end",
        "<function=%n>\n%a</function>",
        end="</tool_call>",
        names=r"[^\s<>]+",
        are_texts=True,
    ),
    "bare_json": ToolCallSyntax(
        BEGINNING + r"[\s;,]*(?:<\|python_tag\|>)?\s*\{\s*"
        r'(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"',
        '"name":"',
        "call",
        ('%n", "parameters": %a}',),
    ),
    "channels": ToolCallSyntax(
        r"to=(?:functions\.)?(?P<name>[^\s<]+)(?:(?!<\|(?:message|start)\|>).)*<\|message\|>\s*",
        "<|message|>",
        "WS call end?",
        ("%a",),
        end="<|call|>",
        names=r"[^\s<]+",
    ),
}
"""The spelling of each form whose calls can be held to a schema, by the name of the form."""
_TERMINALS = {"WS": r"/[ \n]{0,4}/", "DIGITS": "/[0-9]{1,4}/", "ID": "/[A-Za-z0-9]{9}/"}


StartConstraint = Callable[[frozenset[int]], Constraint]
"""A function from the tokens that end an answer to its constraint."""


class StrictCalls:
    """The constraints of one model's answers that may call strict tools."""

    def __init__(self, form: str, tokenizer: Tokenizer) -> None:
        """Hold calls of the form with the name `form`, for the model of `tokenizer`."""
        self.form, self._tokenizer = form, tokenizer
        self._spelling = TOOL_CALL_SYNTAXES.get(form)

    def note(self, tools: Tools) -> AnswerNote | None:
        """Return the reason why calls of strict tools can't be held, or None."""
        if self._spelling is not None or not any(map(is_strict, tools)):
            return None
        return AnswerNote(
            "not-strict",
            f"strict tools: calls in this model's form ({self.form}) can't be held to a schema, "
            "so their arguments may differ from it",
        )

    def constraint(
        self, tools: Tools, context: Sequence[int], opens: str
    ) -> StartConstraint | None:
        """Return what makes the constraint of an answer.

        Return None if no tool is strict, or if calls of this form can't be held. `context`: the
        last tokens of the prompt. `opens`: its end, which may have opened the thinking. Raise
        ApiError for a strict tool whose schema can't be held to.
        """
        if self._spelling is None or not any(map(is_strict, tools)):
            return None
        for tool in filter(is_strict, tools):
            _check(tool, self._spelling)
        spelling = self._spelling
        groups = {"": tools}
        if "name" in re.compile(spelling.begins).groupindex:
            groups = {name_of(tool): [tool] for tool in tools if is_strict(tool)}
        matchers = {name: self._matcher(spelling, group) for name, group in groups.items()}
        stream = self._tokenizer.stream
        thinking = opens if spelling.tag != "<|message|>" else None
        return lambda ends: CallConstraint(
            Beginnings(spelling, self._long, self._whole),
            matchers,
            stream(context),
            None if thinking is None else ThinkingSplitter(thinking),
            len(self._tokenizer.vocabulary.pieces),
            ends,
        )

    @cached_property
    def _long(self) -> list[tuple[int, str]]:
        """The tokens that may continue after the end of a tag, and their texts."""
        last = b"" if self._spelling is None else self._spelling.tag[-1].encode()
        pieces = enumerate(self._tokenizer.vocabulary.pieces)
        return [(n, one.decode(errors="replace")) for n, one in pieces if one and last in one[:-1]]

    @cached_property
    def _whole(self) -> list[tuple[int, str]]:
        """Those of them that have the whole tag."""
        tag = "" if self._spelling is None else self._spelling.tag
        return [(token, text) for token, text in self._long if tag in "".join(text.split())]

    def _matcher(self, spelling: ToolCallSyntax, tools: Tools) -> Any:
        """Return the matcher of a grammar of calls of `tools`, from after the tag on."""
        rules: dict[str, list[str]] = defaultdict(list)
        for rule, text in ANY_TEXT if spelling.are_texts else ():
            rules[rule].append(text)
        for number, tool in enumerate(tools):
            for rule, text in self._arguments(spelling, tool, number):
                rules[rule].append(text)
            for rule, texts in (("call", spelling.calls), ("head", spelling.heads)):
                rules[rule] += [self._call(text, number, name_of(tool)) for text in texts]
        if spelling.end:
            rules["end"].append(self._spelled(spelling.end))
        lines = [f"{rule}: {' | '.join(found)}" for rule, found in rules.items() if found]
        lines += [f"{name}: {one}" for name, one in _TERMINALS.items()]
        grammar = "\n".join([HEAD + spelling.whole, *lines])
        return matcher_of(grammar, self._tokenizer.vocabulary, "tools")

    def _arguments(
        self, spelling: ToolCallSyntax, tool: Mapping[str, Any], number: int
    ) -> Iterable[tuple[str, str]]:
        """Return the rules of a tool's arguments: names and texts."""
        if spelling.are_texts:
            return rules_of(tool, number)
        schema = arguments_of(tool) if is_strict(tool) else ANY
        styled = json.dumps(schema | {"x-guidance": JSON_STYLE})
        return [(f"arguments_{number}", f"%json {styled}")]

    def _call(self, text: str, number: int, name: str) -> str:
        """Return the text of a call of a tool in Lark."""
        named = json.dumps(name)[1:-1] if '%n"' in text else name
        rules = {"%a": f"arguments_{number}", "%n": f"/{literal(named)}/"}
        rules |= {"%d": "DIGITS", "%i": "ID"}
        parts = [part for part in re.split("(%[adin])", text) if part]
        return " ".join(rules.get(part) or self._spelled(part) for part in parts)

    def _spelled(self, text: str) -> str:
        """Return a text in Lark. A mark in it that is a token of its own is that token."""
        vocabulary = self._tokenizer.vocabulary
        found: list[str] = []
        for part in re.split(r"(<[|｜/]?[\w▁]+[|｜]?>|\[[A-Z_]+\])", text):
            tokens = self._tokenizer.encode_more(part) if part else []
            if len(tokens) == 1 and vocabulary.pieces[tokens[0]] is None:
                found.append(f"<[{tokens[0]}]>")
            elif part:
                found.append(f"/{literal(part)}/")
        return " ".join(found)


def _check(tool: Mapping[str, Any], spelling: ToolCallSyntax) -> None:
    """Raise ApiError if the calls of a strict tool can't be held to its name and schema."""
    if not re.fullmatch(spelling.names, name_of(tool)):
        why = "this model's call format can't have such names: change the name, or leave out strict"
        raise strict_error(tool, why)
    try:
        check_form(GenerateOptions.of(schema=arguments_of(tool)))
    except OptionError as error:
        why = f"its arguments can't be held to its schema: {str(error).removeprefix('schema: ')}"
        raise strict_error(tool, f"{why}: change the schema, or leave out strict") from error


class Beginnings:
    """Finds where calls begin in a text that streams."""

    def __init__(
        self,
        spelling: ToolCallSyntax,
        long: Iterable[tuple[int, str]],
        whole: Iterable[tuple[int, str]] = (),
    ) -> None:
        """Search for the beginnings of `spelling`. `long`, `whole`: see `StrictCalls`."""
        self._pattern = re.compile(spelling.begins, re.DOTALL)
        self._tag, self._long, self._whole = spelling.tag, long, whole
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the text so far: an answer begins, or a call has ended."""
        self._text = BEGINNING

    def add(self, text: str) -> str | None:
        """Take the next part of the text. Return the name of a tool if its call begins after it.

        The name is empty if the form does not say it there.
        """
        self._text = (self._text + text)[-MOST_SEARCHED:]
        found = self._pattern.search(self._text) if text else None
        if found is None or found.end() < len(self._text):
            return None
        self._text = ""
        return found["name"] if "name" in self._pattern.groupindex else ""

    def forbidden(self) -> list[int]:
        """Return the tokens that would begin a call and end inside it, which nothing could hold."""
        compact = "".join(self._text.split())
        begun = range(1, len(self._tag))
        is_near = any(compact.endswith(self._tag[:count]) for count in begun)
        tokens = self._long if is_near else self._whole
        return [token for token, text in tokens if self._goes_on(self._text + text)]

    def _goes_on(self, text: str) -> bool:
        found = self._pattern.search(text)
        return found is not None and found.end() < len(text)


class CallConstraint(Constraint):
    """The tokens that may come next in an answer whose calls are held, and nothing else."""

    def __init__(
        self,
        beginnings: Beginnings,
        matchers: Mapping[str, Any],
        stream: Any,
        thinking: ThinkingSplitter | None,
        num_tokens: int,
        ends: frozenset[int],
    ) -> None:
        """Begin an answer, outside of calls.

        `matchers`: those of the calls, by the name that `beginnings` find. `stream`: that of the
        answer's text. `thinking` takes the thinking out of it, in which no call begins.
        """
        super().__init__(None, num_tokens, ends)
        self._beginnings, self._matchers = beginnings, matchers
        self._stream, self._thinking = stream, thinking

    def mask(self, width: int) -> NDArray[np.bool_]:
        """Return an array `[width]` that is True for the tokens that may come next."""
        if self._matcher is not None:
            return super().mask(width)
        allowed = np.ones(width, np.bool_)
        if self._thinking is None or not self._thinking.is_thinking:
            allowed[self._beginnings.forbidden()] = False
        return allowed

    def advance(self, token: int) -> None:
        text, is_held = self._stream.add(token), self._matcher is not None
        if is_held or token in self._ends:
            super().advance(token)
        else:
            self.count += 1
            self._read(text)
        if is_held and self.is_done and token not in self._ends:
            self.is_done, self._matcher = False, None
            self._beginnings.begin_again()

    def _read(self, text: str) -> None:
        """Take a text outside of calls, and hold what follows if a call begins with it."""
        parts = [(False, text)] if self._thinking is None else self._thinking.add(text)
        said = "".join(part for is_thinking, part in parts if not is_thinking)
        name = self._beginnings.add(said)
        if name is not None and name in self._matchers:
            self._matcher = self._matchers[name].deep_copy()


CHANNEL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
"""The header of a call of gpt-oss."""


@dataclass(frozen=True)
class ForcedCall:
    """A call that an answer is held to."""

    schema: str
    """The JSON schema of the answer."""
    opening: str
    """The text at the end of the prompt that begins the call."""
    closed: str
    """The part of `opening` that ends the thinking; empty if the prompt has opened none."""
    before: str
    """The text that a reader of `form` is given before the answer."""
    after: str
    """The text that it is given after the answer."""
    form: CallFormat
    is_own: bool
    """True if prompt and answer together are the model's own form of a call."""


def forced(choice: ToolChoice, tools: Tools, form: CallFormat, text: str) -> ForcedCall:
    """Return the call that `choice` asks for: any that is required, or the one that it names.

    `text`: the prompt. Raise ApiError for a tool that is not there.
    """
    named = [tool for tool in tools if choice.mode == "required" or name_of(tool) == choice.name]
    if not named:
        what = "no tools are given" if not tools else f"no tool is called {choice.name!r:.80}"
        raise field_error("tool_choice", f"a call is required, and {what}")
    closed = closed_thinking(text)
    if form.kind == "channels" and len(named) == 1:
        header = CHANNEL.format(name_of(named[0]))
        schema = _checked([named[0]], lambda tools: arguments_of(tools[0]))
        return ForcedCall(schema, header, "", header, "", form, True)
    is_own = form.opening is not None
    own = form if is_own else HERMES
    schema = _checked(named, lambda tools: _calls(tools, own.arguments))
    opening, after = own.opening or "", "\n" + own.end if own.end else ""
    whole = closed + (opening if is_own else "")
    return ForcedCall(schema, whole, closed, opening, after, own, is_own)


def closed_thinking(text: str) -> str:
    """Return the text that ends the thinking that a prompt has opened, or nothing."""
    ends = text.rstrip()
    opened = (tags for tags in THINKING_TAGS if ends.endswith(tags.begin))
    return next((f"\n{tags.end}{tags.header}\n\n" for tags in opened), "")


def _checked(tools: Sequence[Mapping[str, Any]], schema_of: Any) -> str:
    """Return a schema of calls, with free arguments for tools that llguidance has no grammar for.

    Raise OptionError if a tool is `strict` and its schema can't be held to.
    """
    text = json.dumps(schema_of(tools))
    try:
        check_form(GenerateOptions(schema=text))
    except OptionError:
        if any(map(is_strict, tools)):
            raise
        free = [{"function": {"name": name_of(tool), "parameters": ANY}} for tool in tools]
        text = json.dumps(schema_of(free))
        check_form(GenerateOptions(schema=text))
    return text


def _calls(tools: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    calls, definitions = [], {}
    for number, tool in enumerate(tools):
        schema = arguments_of(tool)
        for key in ("$defs", "definitions"):  # references begin at the root of the whole schema
            known = json.dumps(schema).replace(f'"#/{key}/', f'"#/$defs/{number}.{key}.')
            schema = json.loads(known)
            found = schema.pop(key, {})
            definitions.update({f"{number}.{key}.{name}": one for name, one in found.items()})
        properties = {"name": {"const": name_of(tool)}, arguments: schema}
        call = {"type": "object", "properties": properties, "required": ["name", arguments]}
        calls.append(call | {"additionalProperties": False})
    whole = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return whole | ({"$defs": definitions} if definitions else {})

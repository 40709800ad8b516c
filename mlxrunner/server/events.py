"""A request for an answer and the events of the answer, in one form for all protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxrunner.batch.openai_format import TokenLogprob
from mlxrunner.profiling.divergence import Cause
from mlxrunner.profiling.schema import NoteKind
from mlxrunner.results import Usage

EndReason = Literal["stop", "stop_sequence", "length", "tool_calls"]
CUT_OFF = "it was cut off"
"""The reason why a call can't be read of which only the beginning came."""


@dataclass(frozen=True)
class AnswerNote:
    """A remark on an answer."""

    kind: NoteKind
    """The remark in one word, for events."""
    text: str
    """The remark for the client, which may have words of the answer."""

    @classmethod
    def unread(cls, why: str) -> AnswerNote:
        """Remark that a tool call could not be read, and is in the text."""
        text = f"a tool call could not be read, it is in the text: {why}"[:300]
        return cls("call-cut" if why == CUT_OFF else "call-unread", text)


@dataclass(frozen=True, slots=True)
class Ping:
    """Nothing has come for a while: the request waits, or its prompt is being evaluated."""


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """A piece of the model's thinking, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer."""

    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallEvent:
    """The model calls a tool."""

    index: int
    """Number of the call in this answer, from 0."""
    id: str
    name: str
    arguments: str
    """The JSON text of an object."""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of the answer."""

    reason: EndReason
    usage: Usage
    rules: tuple[str, ...] = ()
    """The names of the rules that changed the prompt."""
    cause: Cause | None = None
    """A known cause on the client's side why not more was reused."""
    stop_sequence: str | None = None
    """The stop string before which the answer ended; only if `reason` is "stop_sequence"."""
    thinking_tokens: int = 0
    """Tokens of the answer that were thinking."""
    note: AnswerNote | None = None
    replaced: tuple[str, ...] = ()
    """The types of what the prompt has as short texts, since the model can't be shown it."""


AnswerPart = ThinkingDelta | TextDelta | ToolCallEvent
AnswerEvent = Ping | AnswerPart | AnswerEnd


class ApiError(Exception):
    """A request that gets no answer, or whose answer ends early, with what the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Make the refusal. `status` is one of HTTP, `param` the field of the body at fault."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after = retry_after


def field_error(
    name: str, why: str, *, status: int = 400, code: str = "invalid_request"
) -> ApiError:
    """Return the refusal of the field `name` of a body."""
    return ApiError(status, f"{name}: {why}", code=code, param=name)


ProtocolName = Literal["anthropic", "chat", "completions", "responses", "ollama"]


@dataclass(frozen=True)
class ToolChoice:
    """The choice of tools: the model may, must or must not call them."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    """The function that has to be called; only if `mode` is "named"."""


@dataclass(frozen=True)
class Client:
    """The program that asks, as far as the request says so."""

    name: str = ""
    """The program, such as "claude-cli" or "opencode", from the User-Agent header."""
    session: str | None = None
    """The client's name of the conversation: a session's, user's or prompt cache's id."""


@dataclass(frozen=True, kw_only=True)
class ServerRequest:
    """One request for an answer.

    Exactly one of `messages` and `prompt` is given.
    """

    protocol: ProtocolName
    model: str
    """The name of the model as the client gave it; empty: the server's first model."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation in OpenAI's form, in the order in which the client sent it.

    Roles are "system", "developer", "user", "assistant" and "tool", wherever they stand. `content`
    is a text, or a list of texts and pictures, of which `image` is base64 or a URL. An assistant's
    message may have `tool_calls` and `reasoning_content`, a tool's has `tool_call_id`. Nothing has
    been moved or left out.
    """
    replaced: Sequence[str] = ()
    """The types of parts and items that `messages` have as short texts, since no model reads them.
    """
    prompt: str | Sequence[int] | None = None
    """Raw text or tokens, for requests without a conversation."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions in OpenAI's form, `{"type": "function", "function": {...}}`, in their order.

    `function` may have `strict`.
    """
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    """False: the answer has at most one tool call."""
    thinking: bool | None = None
    """True if the model is to think first; None: as its template does by itself."""
    effort: str | None = None
    """The amount of thinking, as the client said it ("low", "high"), for templates that ask."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `GenerateOptions`: max_tokens, temperature, stop, seed, schema, logprobs, ..."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    keep_alive: float | None = None
    """Seconds for which the model stays loaded afterwards; None: as the server is set."""
    is_whole: bool = False
    """True if the client gets nothing before the whole answer is there."""
    client: Client = Client()
    id: str = ""
    """The id of the request, which responses, events and `/explain/{request}` name."""

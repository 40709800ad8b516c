"""A request for an answer, in one form for all protocols.

A protocol reads its own body into an `Asked`; the rest of the server knows no protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
    address: str = ""
    """The peer's address."""


@dataclass(frozen=True, kw_only=True)
class Asked:
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
    deadline: float | None = None
    """Seconds after which the answer is given up."""
    keep_alive: float | None = None
    """Seconds for which the model stays loaded afterwards; None: as the server is set."""
    is_whole: bool = False
    """True if the client gets nothing before the whole answer is there."""
    client: Client = Client()
    id: str = ""
    """The id of the request, which responses, events and `/explain/{request}` name."""

"""The bodies of requests for answers, and the `Asked` that they mean."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlxrunner.batch.fields import ANY_OBJECT
from mlxrunner.batch.translate import TURN
from mlxrunner.config.arguments import without_nulls
from mlxrunner.config.request_fields import held, is_neutral
from mlxrunner.options import GenerateOptions
from mlxrunner.serve.apis.fields import (
    OPTIONS,
    Body,
    HistoryText,
    SentContent,
    plain,
    present,
    shown_messages,
    text_of,
    unread,
)
from mlxrunner.serve.apis.openai.options import checked_effort, options_of
from mlxrunner.serve.asked import Asked, Client
from mlxrunner.serve.events import RefusedError
from mlxrunner.templates.parts import UNREAD_PICTURE, Parts, Shown, StandIn, parts_of

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds of each unit of a duration."""
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


class Call(Body):
    """A call in an earlier answer."""

    class Function(Body):
        """A function: what it is called, and with what."""

        name: str = "unknown"
        arguments: Any = None
        """An object. Another value, of an answer that was cut off, is taken, too."""

    id: HistoryText = None
    function: Function = Function()


class Message(Body):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function", "thinking"]
    """"function" is the older name of "tool"; the content of "thinking" is that of the answer
    behind it.
    """
    content: SentContent = None
    thinking: HistoryText = None
    tool_calls: Annotated[list[Call] | None, BeforeValidator(present)] = None
    tool_name: HistoryText = None
    tool_call_id: HistoryText = None
    images: list[Any] | None = None


class Common(Body):
    """The fields of both kinds of requests."""

    model: str = Field(min_length=1)
    stream: bool = True
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class ChatRequest(Common):
    """The body of a request for the next message of a conversation."""

    messages: Annotated[list[Message] | None, BeforeValidator(present)] = None
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(Common):
    """The body of a request for the answer to one prompt."""

    prompt: str | None = None
    system: str | None = None
    raw: bool = False
    images: list[Any] | None = None


def read(body: ChatRequest | GenerateRequest, client: Client, request_id: str) -> Asked:
    """Return what a body asks for. Raise RefusedError or OptionError."""
    extra = body.model_extra or {}
    held(extra, TURN)
    for name in OPTIONS & (extra.keys() - TURN):
        if not is_neutral(extra[name]):
            raise RefusedError(
                400, f"{name}: send it as a member of options, where it is heeded", param=name
            )
    is_raw = isinstance(body, GenerateRequest) and body.raw
    if isinstance(body, GenerateRequest) and body.raw and body.images:
        raise RefusedError(400, "images: a raw prompt has no place for pictures", param="images")
    messages, replaced = shown_messages(() if is_raw else list(_messages(body)))
    level = body.think if isinstance(body.think, str) else None
    thinking = body.think if isinstance(body.think, bool) else None
    return Asked(
        protocol="ollama",
        model=body.model,
        messages=messages,
        replaced=replaced,
        prompt=body.prompt if is_raw and isinstance(body, GenerateRequest) else None,
        tools=_tools(body.tools or []) if isinstance(body, ChatRequest) else (),
        thinking=True if level else thinking,
        effort=checked_effort(level or None, "think"),
        options=_options(body),
        keep_alive=seconds_of(body.keep_alive),
        client=client,
        id=request_id,
    )


def left_out(body: ChatRequest | GenerateRequest) -> list[str]:
    """Return the fields that are ignored because nobody here knows them."""
    return [*unread(body.model_extra or {}), *unread(body.options or {}, (), "options.")]


def is_empty(body: ChatRequest | GenerateRequest) -> bool:
    """Return True if a body only loads a model, or unloads it."""
    return not (body.messages if isinstance(body, ChatRequest) else body.prompt)


def seconds_of(given: float | str | None) -> float | None:
    """Return the seconds of `keep_alive`: a number, or a text such as "5m". Raise RefusedError."""
    if given is None:
        return None
    if isinstance(given, str):
        sign, text = (-1.0, given[1:]) if given.startswith("-") else (1.0, given)
        parts = _DURATION.findall(text)
        if "".join(number + unit for number, unit in parts) == text and parts:
            return sign * sum(float(number) * UNITS[unit] for number, unit in parts)
        try:
            given = float(given)
        except ValueError:
            given = math.nan
    if not math.isfinite(given):
        raise RefusedError(
            400,
            'keep_alive: it has to be seconds, or a duration such as "5m" or "1h30m"; negative: '
            "for ever",
            param="keep_alive",
        )
    return given


def _messages(body: ChatRequest | GenerateRequest) -> Iterator[dict[str, Any]]:
    """Yield the messages in OpenAI's form, in their order."""
    if isinstance(body, GenerateRequest):
        if body.system:
            yield {"role": "system", "content": body.system}
        content = Parts([*_pictures("images", body.images), body.prompt or ""])
        yield {"role": "user", "content": content}
        return
    waiting: list[str] = []
    thought = ""
    for number, message in enumerate(body.messages or ()):
        if message.role == "thinking":
            thought += text_of(message.content)
            continue
        where = f"messages.{number}"
        content = parts_of(f"{where}.content", plain(message.content))
        content[:0] = _pictures(f"{where}.images", message.images)
        role = "tool" if message.role == "function" else message.role
        found: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            if message.thinking or thought:
                found["reasoning_content"] = thought + (message.thinking or "")
            if message.tool_calls:
                found["tool_calls"] = _calls(number, message.tool_calls)
                waiting = [call["id"] for call in found["tool_calls"]]
        elif role == "tool":
            found["tool_call_id"] = message.tool_call_id or (
                waiting.pop(0) if waiting else f"call_{number}"
            )
            if message.tool_name:
                found["name"] = message.tool_name
        thought = ""
        yield found


def _pictures(where: str, images: list[Any] | None) -> Iterator[Shown | StandIn]:
    """Yield the pictures of a message, and a stand-in for each that is none."""
    for number, image in enumerate(images or ()):
        why, name = "a picture has to be base64", f"{where}.{number}"
        is_text = isinstance(image, str)
        yield Shown(image) if is_text else StandIn("picture", UNREAD_PICTURE, name, why)


def _calls(number: int, calls: list[Call]) -> list[dict[str, Any]]:
    """Return the calls of message `number`. Ollama's clients give them no ids: they get some."""
    return [
        {
            "id": call.id or f"call_{number}_{place}",
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for place, call in enumerate(calls)
    ]


def _tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, tool in enumerate(given):
        match tool:
            case {"function": {"name": str()}} if tool.get("type") in (None, "function"):
                continue
        where = f"tools.{number}"
        raise RefusedError(
            400, f"{where}: it has to be a function with a name, not {tool!r:.80}", param=where
        )
    return [{"type": "function", "function": without_nulls(tool["function"])} for tool in given]


def _options(body: Common) -> dict[str, Any]:
    given = without_nulls(body.options or {})
    for name in ("typical_p", "tfs_z"):
        if given.get(name) == 0:
            del given[name]  # as Ollama writes that it is off
    kept, wanted = held(given, TURN, "options."), OPTIONS | TURN
    own = {name: value for name, value in kept.items() if name in wanted}
    own |= {name: value for name, value in (body.model_extra or {}).items() if name in TURN}
    # Where Ollama has a number for "no limit" or "by chance", we have nothing.
    for name in ("num_predict", "seed", "repeat_last_n"):
        if isinstance(own.get(name), int | float) and own[name] < 0:
            del own[name]
    if own.get("repeat_last_n") == 0:
        own = {name: value for name, value in own.items() if not name.startswith("repeat_")}
    if body.logprobs:
        own |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    options, _ = options_of(own)
    if isinstance(body.format, dict):
        options["schema"] = body.format
    elif body.format == "json":
        options["schema"] = ANY_OBJECT
    elif body.format:
        raise RefusedError(
            400, f'format: {body.format!r:.80} is neither "json" nor a schema', param="format"
        )
    GenerateOptions.of(**options)
    return options

"""The fields that the bodies of OpenAI's APIs share: options, tools, the choice of tools."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from mlxrunner.batch.fields import form_of
from mlxrunner.batch.translate import EFFORTS, READ, translate
from mlxrunner.config.arguments import as_whole, shown, without_nulls
from mlxrunner.config.names import SAME
from mlxrunner.config.option import names
from mlxrunner.config.request_fields import held
from mlxrunner.errors import OptionError
from mlxrunner.options import GenerateOptions
from mlxrunner.serve.apis.fields import Body
from mlxrunner.serve.asked import ToolChoice
from mlxrunner.serve.events import RefusedError

OPTIONS = frozenset(names(GenerateOptions))
"""The names of our options, which a body may have, too."""
FORMS = ("schema", "choices")
"""Our options that vLLM's `structured_outputs` stands for."""
CHOICE = "tool_choice"
MOST_ANSWERS = 16
"""The most answers that one request may ask for."""

Tools = Sequence[Mapping[str, Any]]
"""Functions as `Asked` has them."""


class StreamOptions(Body):
    """Wishes about a stream."""

    include_usage: bool = False


class Common(Body):
    """The fields that all bodies have."""

    model: str = ""
    stream: bool = False
    user: str | None = None
    prompt_cache_key: str | None = None


class Sampled(Common):
    """The fields of bodies that may ask for several answers."""

    n: int = Field(default=1, ge=1, le=MOST_ANSWERS)
    stream_options: StreamOptions | None = None

    @property
    def has_usage(self) -> bool:
        """True if a stream is to end with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def options_of(
    fields: Mapping[str, Any], *, counts_logprobs: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options and the template's variables that the fields of a body ask for.

    Fields that are not known are ignored. Raise OptionError for one that is not supported, and for
    a wrong value. A `max_tokens` of -1 is no limit, as for llama.cpp and LM Studio.
    """
    given = held(without_nulls(fields), READ)
    given = {
        name: value
        for name, value in given.items()
        if not (value == -1 and SAME.get(name, name) == "max_tokens")
    }
    if given.get("template") == "":
        del given["template"]  # Ollama's text of that name
    if given.get("top_k") == -1:
        del given["top_k"]  # as vLLM says that all tokens count
    if type(seed := as_whole(given.get("seed"))) is int and seed < 0:
        given["seed"] = seed % 2**64
    if "max_completion_tokens" in given:
        given.pop("max_tokens", None)  # the older name of the same
    translated = translate(given, {}, counts_logprobs=counts_logprobs)
    options = {name: value for name, value in translated.items() if name in OPTIONS - {"tools"}}
    try:
        options |= form_of(options, translated.get("response_format"), {})
        variables = options.pop("template", None) or {}
        if isinstance(options.get("stop"), str):
            options["stop"] = [options["stop"]]
        GenerateOptions.of(**options, template=variables)
    except OptionError as error:
        raise OptionError(_as_sent(str(error), given)) from error
    return options, variables


def _as_sent(message: str, given: Mapping[str, Any]) -> str:
    """Return a message about one of our options, with the name that the client gave to it."""
    sent = {SAME.get(name, name): name for name in given}
    for name, meant in (("top_logprobs", ("logprobs",)), ("structured_outputs", FORMS)):
        sent |= dict.fromkeys(meant, name) if name in given else {}
    ours = re.split(": | has to be ", message, maxsplit=1)[0]
    return sent.get(ours, ours) + message.removeprefix(ours)


def checked_effort(effort: str | None, param: str) -> str | None:
    """Return how much to think. Raise RefusedError if it is not known; `param` names the field."""
    if effort is None or effort in EFFORTS:
        return effort
    known = ", ".join(EFFORTS)
    raise RefusedError(400, f"{param}: {effort!r:.80} is not known, only {known}", param=param)


def with_seed(options: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the options of answer number `index` of several: each has a seed of its own."""
    if options.get("seed") is None or index == 0:
        return dict(options)
    return {**options, "seed": (options["seed"] + index) % 2**64}


def choice_of(given: Any, tools: Tools) -> tuple[ToolChoice, Tools]:
    """Return the use of tools that `tool_choice` asks for, and the tools that it allows.

    Raise RefusedError.
    """
    match given:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
            pass
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            pass
        case _:
            return _choice_of(given, tools), tools
    if mode not in ("auto", "required"):
        raise RefusedError(
            400, f"tool_choice: mode {shown(mode)} is neither auto nor required", param=CHOICE
        )
    wanted = [name for tool in allowed for name in _named(tool)]
    unknown = set(wanted) - {tool["function"]["name"] for tool in tools}
    if unknown:
        raise RefusedError(
            400, f"tool_choice: {min(unknown)!r:.80} is not among the tools", param=CHOICE
        )
    few = [tool for tool in tools if tool["function"]["name"] in wanted]
    return _choice_of(mode, few), few


def _named(tool: Any) -> Iterator[str]:
    """Yield the name of an allowed tool, if it is a function: the model is told of no others."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            yield name
        case {"type": "function", "name": str(name)}:
            yield name


def _choice_of(given: Any, tools: Tools) -> ToolChoice:
    match given:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "required":
            choice = ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}}:
            choice = ToolChoice("named", name)
        case {"type": "function", "name": str(name)}:
            choice = ToolChoice("named", name)
        case _:
            raise RefusedError(
                400,
                f"tool_choice: {shown(given)} is not supported; it has to be none, auto or "
                "required, or an object of the type function or allowed_tools",
                param=CHOICE,
            )
    known = [tool["function"]["name"] for tool in tools]
    if not known or choice.name not in (None, *known):
        named = "there are no tools" if not known else f"{choice.name!r:.80} is not among the tools"
        raise RefusedError(400, f"tool_choice: {named}", param=CHOICE)
    return choice

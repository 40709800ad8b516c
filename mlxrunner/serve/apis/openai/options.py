"""The fields that the bodies of OpenAI's APIs share: options, tools, the choice of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from mlxrunner.batch.fields import form_of
from mlxrunner.batch.translate import EFFORTS, translate
from mlxrunner.config.arguments import shown
from mlxrunner.config.option import names
from mlxrunner.options import GenerateOptions
from mlxrunner.serve.apis.fields import Body, refuse
from mlxrunner.serve.asked import ToolChoice
from mlxrunner.serve.events import RefusedError

OPTIONS = frozenset(names(GenerateOptions))
"""The names of our options, which a body may have, too."""
MOST_ANSWERS = 16
"""The most answers that one request may ask for."""

NEUTRAL: dict[str, tuple[Any, ...]] = {"web_search_options": (), "audio": ()}
"""Fields that are not supported, beside those of `translate`, with the values that are accepted."""
WISHES = frozenset(("verbosity",))
"""Fields that say how the client would like the answer, and are ignored."""


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
    a wrong value.
    """
    refuse(fields, NEUTRAL)
    given = {
        name: value for name, value in fields.items() if value is not None and name not in WISHES
    }
    if given.get("top_k") == -1:
        del given["top_k"]  # as vLLM says that all tokens count
    if isinstance(seed := given.get("seed"), int) and seed < 0:
        given["seed"] = seed % 2**64
    if "max_completion_tokens" in given:
        given.pop("max_tokens", None)  # the older name of the same
    translated = translate(given, {}, counts_logprobs=counts_logprobs)
    options = {name: value for name, value in translated.items() if name in OPTIONS - {"tools"}}
    options |= form_of(options, translated.get("response_format"), {})
    variables = options.pop("template", None) or {}
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    GenerateOptions.of(**options, template=variables)
    return options, variables


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


def choice_of(given: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return the use of tools that `tool_choice` asks for. Raise RefusedError."""
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
                f"tool_choice: {shown(given)} is not supported; it has to be none, auto, required "
                "or a function's name",
                param="tool_choice",
            )
    known = [tool["function"]["name"] for tool in tools]
    if not known or choice.name not in (None, *known):
        named = "there are no tools" if not known else f"{choice.name!r:.80} is not among the tools"
        raise RefusedError(400, f"tool_choice: {named}", param="tool_choice")
    return choice

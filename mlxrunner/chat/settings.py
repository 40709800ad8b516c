"""Commands that change how the next answers come about: sampling, context, system prompt, thinking, model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mlxrunner.chat.commands import Command
from mlxrunner.chat.spelling import POLICIES, messages
from mlxrunner.config import OVERFLOW, GenerateOptions
from mlxrunner.errors import OptionError

if TYPE_CHECKING:
    from mlxrunner.chat.repl import Chat

WHOLE = ("max_tokens", "top_k", "seed", "penalty_context", "keep")
REAL = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
SAMPLING = (*REAL, *WHOLE, "stop", "overflow")
DEFAULT = "default"
STANDARD = vars(GenerateOptions()) | {"overflow": "shift"}
"""What holds for a chat where nothing is set."""


def parse_settings(text: str) -> dict[str, Any]:
    """`temperature=0.8 seed=3` as options of a request. OptionError for what is not known or out of range."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise OptionError(f"{text}: {error}") from error
    for name, found, _ in pairs:
        if not found:
            raise OptionError(f"{name}: has to be NAME=VALUE, as temperature=0.8")
    options = {
        _known(name, SAMPLING): _value(_known(name, SAMPLING), value) for name, _, value in pairs
    }
    GenerateOptions.of(**options)
    return options


def set_(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        show_settings(chat)
        return
    name, value = _known(name, (*SAMPLING, "context", "history")), value.strip()
    if not value:
        chat.say(f"{name} = {_shown(chat, name)}")
    elif name == "context":
        chat.reload(chat.model, context=None if value == DEFAULT else _number(name, value, int))
        chat.say(
            f"loaded again with a context of {chat.runner.context} tokens; the conversation is evaluated again"
        )
    elif name == "history":
        if value not in POLICIES:
            raise OptionError(
                f"history: {value!r} is not known, it has to be one of {', '.join(POLICIES)}"
            )
        chat.conversation.policy = value
        chat.say(f"history = {value}: {chat.conversation.outlook()}")
    else:
        options = {known: old for known, old in chat.conversation.options.items() if known != name}
        if value != DEFAULT:
            options[name] = _value(name, value)
        GenerateOptions.of(**options)
        chat.conversation.options = options
        chat.say(f"{name} = {_shown(chat, name)}")


def show_settings(chat: Chat) -> None:
    for name in ("context", "history", *SAMPLING):
        chat.say(f"{name:20}{_shown(chat, name)}")


def show(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    chat.say(
        f"model     {chat.model}, context of {chat.runner.context} tokens, history {conversation.policy}"
    )
    changed = {
        name: value
        for name, value in conversation.options.items()
        if value not in (STANDARD.get(name), ())
    }
    chat.say(
        "sampling  " + (", ".join(f"{name} {value}" for name, value in changed.items()) or "greedy")
    )
    chat.say(f"branch    {chat.branches.current} of {', '.join(chat.branches)}")
    chat.say(f"system    {conversation.system or '(none)'}")
    for number, message in enumerate(conversation.messages, 1):
        line = " ".join(message["content"].split())
        chat.say(f"{number:4} {message['role']:10}{line[:100]}{' ...' if len(line) > 100 else ''}")


def system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.clear()
        chat.conversation.system = argument
    chat.say(f"system prompt: {chat.conversation.system or '(none)'}")


def think(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    if argument in ("show", "hide"):
        chat.show_thinking = argument == "show"
    elif argument in ("on", "off"):
        if not _has_switch(chat):
            raise OptionError("this model's template has no switch for thinking")
        conversation.variables = {**conversation.variables, "enable_thinking": argument == "on"}
    elif argument:
        raise OptionError(f"/think {argument}: has to be show, hide, on or off")
    wanted = conversation.variables.get("enable_thinking")
    switched = "as the template has it" if wanted is None else "on" if wanted else "off"
    chat.say(f"thinking is {'shown' if chat.show_thinking else 'hidden'}; it is {switched}")


def _has_switch(chat: Chat) -> bool:
    probe: Any = messages(chat.conversation.history, None) or [{"role": "user", "content": "x"}]
    return (
        len({chat.runner.tokenizer.render(probe, enable_thinking=on) for on in (True, False)}) > 1
    )


def model(chat: Chat, argument: str) -> None:
    if argument:
        chat.reload(argument)
    chat.say(f"model: {chat.model}, context of {chat.runner.context} tokens")


def _shown(chat: Chat, name: str) -> str:
    if name == "context":
        return str(chat.runner.context)
    if name == "history":
        return chat.conversation.policy
    value = chat.conversation.options.get(name)
    value = STANDARD[name] if value is None or value == () else value
    if name == "stop":
        return ", ".join(map(json.dumps, [value] if isinstance(value, str) else value)) or "(none)"
    return "(none)" if value is None else str(value)


def _known(name: str, names: tuple[str, ...]) -> str:
    name = name.replace("-", "_")
    if name not in names:
        raise OptionError(f"there is no setting {name}: there are {', '.join(names)}")
    return name


def _value(name: str, text: str) -> Any:
    if name in WHOLE:
        return _number(name, text, int)
    if name in REAL:
        return _number(name, text, float)
    if name == "stop" and text[:1] in ('"', "["):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise OptionError(
                f'stop: {text} is not readable as JSON; it can be a bare text, "a\\n" or ["a", "b"]'
            ) from error
        return tuple(value) if isinstance(value, list) else (value,)
    return (text,) if name == "stop" else text


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise OptionError(
            f"{name}: {text!r} is not a {'whole ' if kind is int else ''}number"
        ) from error


def _setting_names(chat: Chat) -> Iterable[str]:
    return (*SAMPLING, "context", "history", *OVERFLOW, *POLICIES)


def _model_names(chat: Chat) -> Iterable[str]:
    from mlxrunner.models.catalog import cached_models

    return ["demo", *(found.name for found in cached_models())]


COMMANDS = (
    Command("/system", "[TEXT]", "set the system prompt and begin anew; without TEXT: show it", system),
    Command("/set", "[NAME VALUE]", "sampling, seed, stop, context, history; VALUE default takes it back", set_, _setting_names),
    Command("/show", "", "model, settings, and the messages with their numbers", show),
    Command("/think", "[show|hide|on|off]", "show or hide thinking; let the model think or not", think, lambda chat: ("show", "hide", "on", "off")),
    Command("/model", "[NAME]", "go on with another model; the conversation is evaluated anew", model, _model_names),
)  # fmt: skip

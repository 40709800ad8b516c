"""Commands for sampling, context, system prompt, thinking and model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from mlxrunner.chat.commands.table import ChatContext, Command, whole_number
from mlxrunner.chat.rendering import POLICIES
from mlxrunner.config.file import NAMED, Config, read_config_file
from mlxrunner.config.layering import DEFAULT, HERE, layer, settled, values
from mlxrunner.config.names import did_you_mean
from mlxrunner.config.option import about
from mlxrunner.errors import OptionError
from mlxrunner.options import (
    CHOOSING,
    EMBEDDED,
    GREEDY,
    OVERFLOW,
    GenerateOptions,
    RunnerSettings,
    chat_options,
)

SETTABLE = dict(chat_options())
"""The options of a request that `/set` knows, by name."""
CONTEXT = about(RunnerSettings.__dataclass_fields__["context"])
GREEDILY = "greedy"
"""The word that stands for the options of GREEDY."""
STANDARD = vars(GenerateOptions()) | {"overflow": "shift"}
"""The options of a chat that sets none."""


def parse_settings(text: str) -> dict[str, Any]:
    """Return the options of a request that a text such as `temperature=0.8 seed=3` gives.

    Raise OptionError for an unknown name or a value out of range.
    """
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise OptionError(f"{text}: {error}") from error
    for name, found, _ in pairs:
        if not found and name != GREEDILY:
            raise OptionError(f"{name}: has to be NAME=VALUE, as temperature=0.8")
    options: dict[str, Any] = {}
    for given, found, value in pairs:
        if not found:
            options |= GREEDY
            continue
        name = _known(given, tuple(SETTABLE))
        options[name] = SETTABLE[name].parse(name, value)
    GenerateOptions.of(**options)
    return options


def set_(chat: ChatContext, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if name == "parameter" and value:  # as ollama has it
        name, _, value = value.strip().partition(" ")
    if name == "system":
        raise OptionError(f"the system prompt is no setting: /system {value or 'TEXT'} sets it")
    if not name:
        show_settings(chat)
        return
    if argument == GREEDILY:
        chat.conversation.options |= GREEDY
        chat.say(f"sampling: {chat.conversation.sampling}")
        return
    name, value = _known(name, (*SETTABLE, "context", "history")), value.strip()
    if not value:
        chat.say(f"{name} = {_shown(chat, name)}")
    elif name == "context":
        chat.reload(chat.model, context=None if value == DEFAULT else CONTEXT.parse(name, value))
        chat.say(
            f"loaded again with a context of {chat.runner.context} tokens; "
            "the conversation is evaluated again"
        )
    elif name == "history":
        if value not in POLICIES:
            raise OptionError(
                f"history: {value!r} is not known, it has to be one of {', '.join(POLICIES)}"
            )
        chat.conversation.set_policy(value)
        chat.say(f"history = {value}: {chat.conversation.outlook()}")
    else:
        options = {known: old for known, old in chat.conversation.options.items() if known != name}
        if value != DEFAULT:
            options[name] = SETTABLE[name].parse(name, value)
        GenerateOptions.of(**options)
        chat.conversation.options = options
        chat.say(f"{name} = {_shown(chat, name)}")


def show_settings(chat: ChatContext) -> None:
    for name in ("context", "history", *SETTABLE):
        chat.say(f"{name:20}{_shown(chat, name):16}({_source(chat, name)})")


def show(chat: ChatContext, argument: str) -> None:
    if argument:
        show_message(chat, argument)
        return
    conversation = chat.conversation
    chat.say(
        f"model     {chat.model}, context of {chat.runner.context} tokens, "
        f"history {conversation.policy}"
    )
    others = {
        name: value
        for name, value in conversation.effective.items()
        if name not in CHOOSING and value not in (STANDARD.get(name), ())
    }
    chat.say(
        ", ".join(
            (
                f"sampling  {conversation.sampling}",
                *(f"{name} {value}" for name, value in others.items()),
            )
        )
    )
    chat.say(f"branch    {chat.branches.current} of {', '.join(chat.branches)}")
    chat.say(f"system    {conversation.system or '(none)'}")
    for number, message in enumerate(conversation.messages, 1):
        line = " ".join(message["content"].split())
        chat.say(f"{number:4} {message['role']:10}{line[:100]}{' ...' if len(line) > 100 else ''}")


def show_message(chat: ChatContext, argument: str) -> None:
    messages = chat.conversation.messages
    number = whole_number(argument, default=len(messages))
    if number > len(messages):
        raise OptionError(
            f"there is no message {number}: "
            + (f"the last one is {len(messages)}" if messages else "nothing was said yet")
        )
    message = messages[number - 1]
    chat.say(f"{number} {message['role']}:")
    chat.say(message["content"], is_verbatim=True)


def system(chat: ChatContext, argument: str) -> None:
    conversation = chat.conversation
    if argument:
        is_none = argument in ('""', "''")
        conversation.set_system(None if is_none else read_config_file().system(argument))
    chat.say(f"system prompt: {conversation.system or '(none)'}")
    if argument and conversation.history.turns:
        chat.say(f"the conversation stays: {conversation.outlook()}")


def think(chat: ChatContext, argument: str) -> None:
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


def _has_switch(chat: ChatContext) -> bool:
    probe: Any = chat.conversation.history.messages(None) or [{"role": "user", "content": "x"}]
    return (
        len({chat.runner.tokenizer.render(probe, enable_thinking=on) for on in (True, False)}) > 1
    )


def model(chat: ChatContext, argument: str) -> None:
    if argument:
        config = read_config_file()
        name = config.name_of(argument)
        chat.reload(name, **_loading_changes(chat, config, name))
    chat.say(f"model: {chat.model}, context of {chat.runner.context} tokens")


def _loading_changes(chat: ChatContext, config: Config, name: str) -> dict[str, Any]:
    """Return what the config file says about loading the model `name`, unless the user has said it.

    What it says about the present model ends with that model.
    """
    before, after = config.options("chat", chat.model), config.options("chat", name)
    usual = layer(vars(RunnerSettings()), DEFAULT)
    before, after = settled(usual, before), settled(usual, after)
    now = values(usual) | chat.loading
    return {
        key: after[key].value
        for key in usual
        if after[key] != before[key] and now[key] == before[key].value
    }


def _shown(chat: ChatContext, name: str) -> str:
    if name == "context":
        return str(chat.runner.context)
    if name == "history":
        return chat.conversation.policy
    value = chat.conversation.effective.get(name)
    value = STANDARD[name] if value is None or value == () else value
    if name == "stop":
        return ", ".join(map(json.dumps, [value] if isinstance(value, str) else value)) or "(none)"
    return "(none)" if value is None else str(value)


def _source(chat: ChatContext, name: str) -> str:
    """Return where the value of a setting comes from."""
    if name == "context":
        of_file = read_config_file().options("chat", chat.model).get(name)
        value = chat.loading.get(name)
        if of_file is not None and of_file.value == value:
            return of_file.source
        return DEFAULT if value is None else HERE
    if name == "history":
        return DEFAULT if chat.conversation.policy == POLICIES[0] else HERE
    if name in chat.conversation.options:
        return HERE
    setting = chat.conversation.usual.get(name)
    return DEFAULT if setting is None else setting.source


def _known(name: str, names: tuple[str, ...]) -> str:
    name = name.replace("-", "_")
    if name not in names:
        hint = did_you_mean(name, names)
        raise OptionError(f"there is no setting {name}: {hint}there are {', '.join(names)}")
    return name


def setting_words(chat: ChatContext, before: str) -> Iterable[str]:
    """Return the names of all settings, or the values of the one that `before` names."""
    names = (*SETTABLE, GREEDILY, "context", "history")
    if not before:
        return names
    values = {"history": POLICIES, "overflow": (*OVERFLOW, DEFAULT)}
    name = before.strip().replace("-", "_")
    return values.get(name, (DEFAULT,)) if name in names and name != GREEDILY else ()


def _model_names(chat: ChatContext, before: str) -> Iterable[str]:
    from mlxrunner.models.catalog import cached_models

    return [*EMBEDDED, *read_config_file().aliases, *(found.name for found in cached_models())]


def _prompt_names(chat: ChatContext, before: str) -> Iterable[str]:
    return [f"{NAMED}{name}" for name in read_config_file().prompts]


def _think_words(chat: ChatContext, before: str) -> Iterable[str]:
    return ("show", "hide", "on", "off")


COMMANDS = (
    Command(
        "/system",
        "[TEXT]",
        "set the system prompt, or @NAME of the config file",
        system,
        _prompt_names,
        is_daily=True,
    ),
    Command(
        "/set",
        "[NAME VALUE]",
        "set it (VALUE default: reset), or greedy; alone: list",
        set_,
        setting_words,
        is_daily=True,
    ),
    Command(
        "/show",
        "[N]",
        "settings and numbered messages; N: message N whole",
        show,
        is_daily=True,
    ),
    Command(
        "/think",
        "[show|hide|on|off]",
        "show or hide thinking; let the model think or not",
        think,
        _think_words,
    ),
    Command(
        "/model",
        "[NAME]",
        "go on with another model, which evaluates all again",
        model,
        _model_names,
        is_daily=True,
    ),
)

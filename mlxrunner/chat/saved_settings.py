"""Collect the settings of a chat for a session, and restore them.

Settings given on the command line take precedence. Settings that cannot be used are left out.
"""

from __future__ import annotations

from typing import Any

from mlxrunner.chat.commands.settings import SETTABLE
from mlxrunner.chat.commands.table import ChatContext
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.rendering import POLICIES
from mlxrunner.errors import MlxrunnerError, OptionError
from mlxrunner.models.resolve import lasting
from mlxrunner.options import GenerateOptions
from mlxrunner.sessions.session import Session
from mlxrunner.terminal.keyboard import Keyboard, is_terminal
from mlxrunner.terminal.text import visible


def settings_of(chat: ChatContext) -> dict[str, Any]:
    """Return the settings that a session keeps beside its text, as JSON values."""
    conversation = chat.conversation
    return {
        "options": dict(conversation.options),
        "hide_thinking": not chat.show_thinking,
        "context": chat.loading.get("context"),
        "history": conversation.policy,
        "keep_thinking": conversation.keep_thinking,
        "variables": conversation.variables,
        "kv_bits": chat.loading.get("kv_bits"),
    }


def put_back(
    session: Session,
    conversation: Conversation,
    loading: dict[str, Any],
    model: str,
    given: set[str],
) -> str:
    """Restore the settings of `session` before a chat begins. Return the name of its model.

    They go into `conversation` and into `loading`, the options of `Runner.load`. `given` names the
    settings that are given now, which stay. `model` is used if `given` has it.
    """
    found = _checked(session.settings)
    conversation.options |= {
        name: value for name, value in found["options"].items() if name not in given
    }
    if "history" not in given:
        conversation.policy = found["history"]
    if "keep_thinking" not in given:
        conversation.keep_thinking = found["keep_thinking"] and conversation.policy == POLICIES[0]
    if "system" not in given:
        conversation.system = session.system
    if "kv_bits" not in given:
        loading["kv_bits"] = found["kv_bits"]
    model = model if "model" in given else session.model
    if "context" not in given and lasting(model) == session.model:
        loading["context"] = found["context"]
    conversation.variables = {**found["variables"], **conversation.variables}
    return model


def must_be_wanted(name: str | None, before: str, model: str, keyboard: Keyboard) -> None:
    """Ask the user before session `name` goes on in another model than `before`.

    Raise OptionError if the user does not want that, or if there is no terminal to ask at.
    """
    if lasting(model) == before:
        return
    what = f"session {name} was saved with the model {before}, and -m names {model}"
    if is_terminal():
        question = f"{what}, which evaluates it anew. Go on with {model}? [y/N] "
        if keyboard.ask(visible(question)).lower() in ("y", "yes"):
            return
        raise OptionError(f"nothing has changed: without -m, session {name} goes on with {before}")
    raise OptionError(
        f"{what}: --switch-model goes on with {model}, which evaluates it anew; leave -m out to go "
        f"on with {before}"
    )


def load_with_context(chat: ChatContext, session: Session) -> None:
    """Load the model again with the context that a session of it has set.

    If that fails, print why; the context then stays as it is.
    """
    context = _checked(session.settings)["context"]
    if context in (None, chat.loading.get("context")) or session.model != lasting(chat.model):
        return
    try:
        chat.reload(chat.model, context=context)
    except MlxrunnerError as error:
        chat.say(f"its context of {context} tokens is left out: {error}")
    else:
        chat.say(f"loaded again with a context of {context} tokens")


def apply(chat: ChatContext, settings: dict[str, Any], *, begun: bool) -> None:
    """Restore saved settings in a chat; the model stays.

    Unless the chat has `begun`, restore only `show_thinking`: `put_back` has restored the others.
    """
    found, conversation = _checked(settings), chat.conversation
    chat.show_thinking = not found["hide_thinking"]
    if not begun:
        return
    conversation.options, conversation.policy = found["options"], found["history"]
    conversation.keep_thinking, conversation.variables = found["keep_thinking"], found["variables"]


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the saved settings that can be used, because a file may say anything."""
    options, variables = settings.get("options"), settings.get("variables")
    context, policy, kv_bits = (settings.get(name) for name in ("context", "history", "kv_bits"))
    return {
        "options": _usable(options) if isinstance(options, dict) else {},
        "keep_thinking": settings.get("keep_thinking") is True,
        "variables": variables if _are_variables(variables) else {},
        "history": policy if policy in POLICIES else POLICIES[0],
        "kv_bits": kv_bits if kv_bits in (4, 8) else None,
        "context": context if type(context) is int and 2 <= context < 2**31 else None,
        "hide_thinking": settings.get("hide_thinking") is True,
    }


def _are_variables(variables: Any) -> bool:
    """Return True if `variables` can be given to a chat template."""
    try:
        return isinstance(variables, dict) and bool(GenerateOptions.of(template=variables))
    except OptionError:
        return False


def _usable(options: dict[str, Any]) -> dict[str, Any]:
    usable = {}
    for name, value in options.items():
        value = tuple(value) if isinstance(value, list) else value
        if name not in SETTABLE:
            continue
        try:
            GenerateOptions.of(**{name: value})
        except (OptionError, TypeError):
            continue
        usable[name] = value
    return usable

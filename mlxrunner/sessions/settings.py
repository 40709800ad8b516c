"""The settings of a chat that a session keeps, and how they come back: those that are given win, and those that can't be are left out."""

from __future__ import annotations

from typing import Any

from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import Chat
from mlxrunner.chat.settings import SAMPLING
from mlxrunner.chat.spelling import POLICIES
from mlxrunner.config import GenerateOptions
from mlxrunner.errors import MlxrunnerError, OptionError
from mlxrunner.models.resolve import lasting
from mlxrunner.sessions.session import Session


def settings_of(chat: Chat) -> dict[str, Any]:
    """What a session keeps beside the text, as JSON knows it."""
    conversation, usual = chat.conversation, vars(GenerateOptions())
    return {
        "options": {
            name: value
            for name, value in conversation.options.items()
            if value is not None and value != usual[name]
        },
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
    """What was saved, but for what was `given` now; returns the model's name."""
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
    conversation.variables = found["variables"]
    return model


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Saved settings without those that can't be used: a file may say anything."""
    options, variables, context = (
        settings.get("options"),
        settings.get("variables"),
        settings.get("context"),
    )
    thinks = variables.get("enable_thinking") if isinstance(variables, dict) else None
    return {
        "options": _usable(options) if isinstance(options, dict) else {},
        "keep_thinking": settings.get("keep_thinking") is True,
        "variables": {"enable_thinking": thinks} if isinstance(thinks, bool) else {},
        "history": settings.get("history") if settings.get("history") in POLICIES else POLICIES[0],
        "kv_bits": settings.get("kv_bits") if settings.get("kv_bits") in (4, 8) else None,
        "context": context if type(context) is int and 2 <= context < 2**31 else None,
        "hide_thinking": settings.get("hide_thinking") is True,
    }


def with_context(chat: Chat, session: Session) -> None:
    """Load the model again with the context that was set in a session of it; where that can't be it is said, and stays as it is."""
    context = _checked(session.settings)["context"]
    if context in (None, chat.loading.get("context")) or session.model != lasting(chat.model):
        return
    try:
        chat.reload(chat.model, context=context)
    except MlxrunnerError as error:
        chat.say(f"its context of {context} tokens is left out: {error}")
    else:
        chat.say(f"loaded again with a context of {context} tokens")


def apply(chat: Chat, settings: dict[str, Any], *, begun: bool) -> None:
    """Go on with these settings in a chat that has `begun`, or else with what `put_back` could not know of; the model stays."""
    found, conversation = _checked(settings), chat.conversation
    chat.show_thinking = not found["hide_thinking"]
    if not begun:
        return
    conversation.options, conversation.policy = found["options"], found["history"]
    conversation.keep_thinking, conversation.variables = found["keep_thinking"], found["variables"]


def _usable(options: dict[str, Any]) -> dict[str, Any]:
    usable = {}
    for name, value in options.items():
        value = tuple(value) if isinstance(value, list) else value
        if name not in SAMPLING:
            continue
        try:
            GenerateOptions.of(**{name: value})
        except (OptionError, TypeError):
            continue
        usable[name] = value
    return usable

"""Commands that go back in the conversation and on from there: each says what is reused for it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxrunner.chat.commands import Command, flagged
from mlxrunner.chat.settings import parse_settings
from mlxrunner.errors import OptionError

if TYPE_CHECKING:
    from mlxrunner.chat.repl import Chat


def undo(chat: Chat, argument: str) -> None:
    taken = chat.conversation.undo(_number(argument, default=1))
    if not taken:
        raise OptionError("there is no turn to take back")
    chat.say(
        f"{_turns(len(taken))} taken back, {_turns(len(chat.conversation.history.turns))} left: {chat.conversation.outlook()}"
    )


def edit(chat: Chat, argument: str) -> None:
    """Messages are numbered as /show numbers them: the user's are odd, the answers even."""
    messages = chat.conversation.messages
    if not messages:
        raise OptionError("there is nothing to edit yet")
    number = _number(argument, default=len(messages) - 1)
    if number > len(messages):
        raise OptionError(
            f"there is no message {number}: the last one is {len(messages)}, see /show"
        )
    turn, before = (number - 1) // 2, messages[number - 1]["content"]
    text = (
        chat.edit(before, ahead=False) if number % 2 == 0 else _edited_message(chat, turn, before)
    )
    if text is None:
        chat.say("nothing changed")
    elif number % 2 == 0:
        chat.conversation.answer_with(turn, text)
        chat.say(
            f"the answer of turn {turn + 1} is changed, {_turns(turn + 1)} left: {chat.conversation.outlook()}"
        )
    else:
        chat.send(text, partial(_again, chat, turn))


def _edited_message(chat: Chat, turn: int, text: str) -> str | None:
    """Edited where it will be sent, so that it is evaluated there while it is typed."""
    history = chat.conversation.history
    chat.conversation.history = history.copy()
    chat.conversation.history.cut(turn)
    try:
        return chat.edit(text)
    finally:
        chat.conversation.history = history


def retry(chat: Chat, argument: str) -> None:
    turns = chat.conversation.history.turns
    if not turns:
        raise OptionError("there is no answer to try again")
    options = parse_settings(argument)
    merged = chat.conversation.options | options
    if not merged.get("temperature") and not options:
        chat.say(
            "the temperature is 0, so the answer will be the same: /retry temperature=0.8 gives another"
        )
    _again(chat, len(turns) - 1, turns[-1].user, **options)


def _again(chat: Chat, turn: int, text: str, **options: Any) -> None:
    """Send `text` in place of turn `turn` and those after it, which come back if no answer is begun."""
    conversation = chat.conversation
    before = conversation.history.copy()
    conversation.history.cut(turn)
    try:
        chat.say(str(conversation.outlook(text)))
        chat.answer(text, **options)
    finally:
        if len(conversation.history.turns) <= turn:
            conversation.history = before


def branch(chat: Chat, argument: str) -> None:
    conversation, branches = chat.conversation, chat.branches
    drop, name = flagged(argument, "-d")
    if drop:
        chat.say(f"branch {name} is dropped, with {_turns(len(branches.drop(name).turns))}")
    elif argument:
        branches.fork(argument, conversation.system, conversation.history)
        chat.say(f"on branch {argument}: {conversation.outlook()}")
    else:
        for name in branches:
            chat.say(f"{'*' if name == branches.current else ' '} {name}")


def switch(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    conversation.system, conversation.history = chat.branches.switch(
        argument, conversation.system, conversation.history
    )
    chat.say(
        f"on branch {argument}, {_turns(len(conversation.history.turns))}: {conversation.outlook()}"
    )


def clear(chat: Chat, argument: str) -> None:
    chat.conversation.clear()
    chat.attachments.clear()
    chat.say(f"cleared: {chat.conversation.outlook()}")


def _names(chat: Chat) -> Iterable[str]:
    return chat.branches


def _number(argument: str, *, default: int) -> int:
    if not argument:
        return default
    if not re.fullmatch("0*[1-9][0-9]{0,8}", argument):
        raise OptionError(f"{argument[:20]!r} is not a whole number between 1 and 999999999")
    return int(argument)


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"


COMMANDS = (
    Command("/undo", "[N]", "take the last turn back, or the last N", undo),
    Command("/edit", "[N]", "edit message N of /show (else your last one) and go on from there; answers, too", edit),
    Command("/retry", "[NAME=VALUE ...]", "answer the last message again, with other sampling", retry),
    Command(
        "/branch", "[-d] [NAME]", "go on as branch NAME, leaving this one as it is; without NAME: list them; -d drops one",
        branch, _names,
    ),
    Command("/switch", "NAME", "go on with another branch", switch, _names),
    Command("/clear", "", "forget the conversation; the system prompt stays", clear),
)  # fmt: skip

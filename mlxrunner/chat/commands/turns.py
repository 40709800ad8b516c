"""Commands that go back in the conversation and continue from there.

Each of them says how much of the entry is reused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from mlxrunner.chat.commands.settings import parse_settings
from mlxrunner.chat.commands.table import ChatContext, Command, count_of, flagged
from mlxrunner.errors import OptionError


def undo(chat: ChatContext, argument: str) -> None:
    taken = chat.conversation.undo(_number(argument, default=1))
    if not taken:
        raise OptionError("there is no turn to take back")
    left = count_of(len(chat.conversation.history.turns), "turn")
    chat.say(
        f"{count_of(len(taken), 'turn')} taken back, {left} left: {chat.conversation.outlook()}"
    )


def edit(chat: ChatContext, argument: str) -> None:
    """Edit the message with a number of /show: the user's are odd, the answers even."""
    messages, history = chat.conversation.messages, chat.conversation.history
    if not messages:
        raise OptionError("there is nothing to edit yet")
    number = _number(argument, default=len(messages) - 1)
    if number > len(messages):
        raise OptionError(
            f"there is no message {number}: the last one is {len(messages)}, see /show"
        )
    turn, before = (number - 1) // 2, messages[number - 1]["content"]
    is_answer = number % 2 == 0
    text = chat.edit(before, None if is_answer else history.cut(turn))
    if text is None:
        chat.say("nothing changed")
    elif is_answer:
        chat.conversation.answer_with(turn, text)
        left = count_of(turn + 1, "turn")
        chat.say(
            f"the answer of turn {turn + 1} is changed, {left} left: {chat.conversation.outlook()}"
        )
    else:
        chat.send(text, history.cut(turn))


def retry(chat: ChatContext, argument: str) -> None:
    history = chat.conversation.history
    if not history.turns:
        raise OptionError("there is no answer to try again")
    options = parse_settings(argument)
    merged: dict[str, Any] = chat.conversation.effective | options
    if not merged.get("temperature") and not options:
        chat.say(
            "the temperature is 0, so the answer will be the same: "
            "/retry temperature=0.8 gives another"
        )
    *earlier, last = history.turns
    chat.answer(last.user, history.cut(len(earlier)), **options)


def branch(chat: ChatContext, argument: str) -> None:
    drop, name = flagged(argument, "-d")
    if drop:
        dropped = count_of(len(chat.branches.drop(name).history.turns), "turn")
        chat.say(f"branch {name} is dropped, with {dropped}")
    elif argument:
        chat.branches.fork(argument, chat.conversation.branch)
        chat.say(f"on branch {argument}: {chat.conversation.outlook()}")
    else:
        for name in chat.branches:
            chat.say(f"{'*' if name == chat.branches.current else ' '} {name}")


def switch(chat: ChatContext, argument: str) -> None:
    conversation = chat.conversation
    conversation.switch_to(chat.branches.switch(argument, conversation.branch))
    turns = count_of(len(conversation.history.turns), "turn")
    chat.say(f"on branch {argument}, {turns}: {conversation.outlook()}")


def clear(chat: ChatContext, argument: str) -> None:
    chat.conversation.clear()
    chat.attachments.texts.clear()
    chat.say(f"cleared: {chat.conversation.outlook()}")


def _names(chat: ChatContext) -> Iterable[str]:
    return chat.branches


def _number(argument: str, *, default: int) -> int:
    if not argument:
        return default
    if not re.fullmatch("0*[1-9][0-9]{0,8}", argument):
        raise OptionError(f"{argument[:20]!r} is not a whole number between 1 and 999999999")
    return int(argument)


COMMANDS = (
    Command("/undo", "[N]", "take the last turn back, or the last N", undo),
    Command(
        "/edit",
        "[N]",
        "edit message N of /show (else your last one) and go on from there; answers, too",
        edit,
    ),
    Command(
        "/retry",
        "[NAME=VALUE ...]",
        "answer the last message again, with other sampling",
        retry,
    ),
    Command(
        "/branch",
        "[-d] [NAME]",
        "go on as branch NAME, leaving this one as it is; without NAME: list them; -d drops one",
        branch,
        _names,
    ),
    Command("/switch", "NAME", "go on with another branch", switch, _names),
    Command("/clear", "", "forget the conversation; the system prompt stays", clear),
)

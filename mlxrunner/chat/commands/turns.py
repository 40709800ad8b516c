"""Commands that go back in the conversation and continue from there.

Each of them says how much of the entry is reused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlxrunner.chat.commands.settings import GREEDILY, SETTABLE, parse_settings
from mlxrunner.chat.commands.table import ChatContext, Command, flagged, whole_number
from mlxrunner.chat.taken import State
from mlxrunner.errors import OptionError
from mlxrunner.terminal.text import count_of


def undo(chat: ChatContext, argument: str) -> None:
    taken = chat.conversation.undo(whole_number(argument, default=1))
    if not taken:
        raise OptionError("there is no turn to take back")
    left = count_of(len(chat.conversation.history.turns), "turn")
    chat.say(
        f"{count_of(len(taken), 'turn')} taken back, {left} left: {chat.conversation.outlook()}"
        f"; /redo brings {'it' if len(taken) == 1 else 'them'} back"
    )


def redo(chat: ChatContext, argument: str) -> None:
    conversation, name = chat.conversation, chat.branches.current
    present = conversation.branch
    branch = chat.taken.pop(name, present)
    if branch is None:
        raise OptionError(f"no command has taken anything away from branch {name}")
    chat.branches.drop_kept_within(branch)
    kept = ""
    if State(name, present).is_lost_in(branch):
        kept = f"; what was here is kept as branch {chat.branches.keep(name, present)}"
    conversation.switch_to(branch)
    turns = count_of(len(branch.history.turns), "turn")
    chat.say(f"brought back, {turns}: {conversation.outlook()}{kept}")


def edit(chat: ChatContext, argument: str) -> None:
    """Edit the message with a number of /show: the user's are odd, the answers even."""
    messages, history = chat.conversation.messages, chat.conversation.history
    if not messages:
        raise OptionError("there is nothing to edit yet")
    number = whole_number(argument, default=len(messages) - 1)
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
    elif merged.get("seed") is not None and not options:
        seed = merged["seed"]
        chat.say(
            f"the seed is {seed}, so the answer will be the same: "
            f"/retry seed={seed + 1} gives another"
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
    had_turns = bool(chat.conversation.history.turns)
    chat.conversation.clear()
    chat.attachments.clear()
    back = "; /redo brings it back" if had_turns else ""
    chat.say(f"cleared: {chat.conversation.outlook()}{back}")


def _names(chat: ChatContext, before: str) -> Iterable[str]:
    return chat.branches


def _retry_words(chat: ChatContext, before: str) -> Iterable[str]:
    return (GREEDILY, *(f"{name}=" for name in SETTABLE))


COMMANDS = (
    Command("/undo", "[N]", "take the last turn back, or the last N", undo, is_daily=True),
    Command("/redo", "", "bring back what the last command took away", redo, is_daily=True),
    Command(
        "/edit",
        "[N]",
        "edit message N of /show, or your last, and go on there",
        edit,
        is_daily=True,
    ),
    Command(
        "/retry",
        "[NAME=VALUE ...]",
        "answer the last message again, with other sampling",
        retry,
        _retry_words,
        is_daily=True,
    ),
    Command(
        "/branch",
        "[-d] [NAME]",
        "go on as branch NAME, leaving this one as it is; without NAME: list them; -d drops one",
        branch,
        _names,
    ),
    Command("/switch", "NAME", "go on with another branch", switch, _names),
    Command("/clear", "", "forget the conversation; the system prompt stays", clear, is_daily=True),
)

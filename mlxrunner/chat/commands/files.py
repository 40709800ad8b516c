"""Commands that attach files, and that copy or export the conversation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from mlxrunner.chat.attachments import read_text
from mlxrunner.chat.commands.table import PATH, ChatContext, Command, flagged, quoted
from mlxrunner.chat.markdown import code_blocks
from mlxrunner.chat.pictures import picture_paths
from mlxrunner.errors import FileError, OptionError
from mlxrunner.system.writing import written
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.templates.thinking import without_thinking
from mlxrunner.terminal.clipboard import copy
from mlxrunner.terminal.text import count_of, size


def attach(chat: ChatContext, argument: str) -> None:
    drop, name = flagged(argument, "-d")
    attached = chat.attachments.texts
    if drop and name and name not in attached:
        raise OptionError(f"{name} does not wait for the next message: /file lists those that do")
    if drop:
        for one in [name] if name else list(attached):
            del attached[one]
    elif name:
        attached[name] = read_text(name, chat.runner)
    for one, text in attached.items():
        chat.say(f"{one} ({size(len(text.encode()))}) goes with the next message")
    if not attached:
        chat.say("no file goes with the next message")


def show_picture(chat: ChatContext, argument: str) -> None:
    drop, given = flagged(argument, "-d")
    waiting = chat.attachments.pictures
    if drop:
        waiting.clear()
    elif given:
        for path in picture_paths(given) or [given]:
            name = chat.see(path)
            if name not in waiting:
                waiting.append(name)
    for name in waiting:
        chat.say(f"{name} goes with the next message")
    if not waiting:
        chat.say("no picture goes with the next message")


def copy_answer(chat: ChatContext, argument: str) -> None:
    if argument not in ("", "code"):
        raise OptionError(f"/copy {argument}: /copy copies the last answer, /copy code its code")
    turns = len(chat.conversation.history.turns)
    if not turns:
        raise OptionError("there is no answer to copy yet")
    if not argument:
        text = _answer(chat, turns - 1)
        chat.say(f"copied {len(text)} characters {copy(text)}")
        return
    for number in reversed(range(turns)):
        if blocks := code_blocks(_answer(chat, number)):
            lines = count_of(len(blocks[-1].splitlines()), "line")
            chat.say(f"copied {lines} of code in message {2 * number + 2} {copy(blocks[-1])}")
            return
    raise OptionError("no answer has a block of code: /copy copies the last answer whole")


def _answer(chat: ChatContext, number: int) -> str:
    """Return the answer of turn `number` (from 0) without its thinking."""
    history = chat.conversation.history
    asked = chat.conversation.renderer.asked(history, number)
    return without_thinking(history.turns[number].answer, asked.text)


def write_outside(chat: ChatContext, argument: str) -> None:
    chat.begun = quoted(chat.write(argument))


def export(chat: ChatContext, argument: str) -> None:
    force, name = flagged(argument, "-f")
    if not name:
        raise OptionError("/export FILE: which file? FILE.json for JSON, anything else is Markdown")
    path, conversation = Path(os.path.expanduser(name)), chat.conversation
    text = transcript(name, conversation.system, conversation.messages, chat.model)
    try:
        with written(path, force=force) as stream:
            stream.write(text)
    except FileExistsError as error:
        raise FileError(f"{name} is there already: /export -f {name} overwrites it") from error
    except OSError as error:
        raise FileError(f"{name}: {error.strerror or error}") from error
    chat.say(f"{count_of(len(conversation.history.turns), 'turn')} written to {name}")


def transcript(file: str, system: str | None, messages: Sequence[PlainMessage], model: str) -> str:
    """Return the text of a conversation: JSON if the name `file` ends in .json, else Markdown."""
    if file.endswith(".json"):
        content = {"model": model, "system": system, "messages": messages}
        return json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    prompt = [f"## System\n\n{system}\n"] if system else []
    headed = (f"## {one['role'].capitalize()}\n\n{one['content']}\n" for one in messages)
    return "\n".join([*prompt, *headed])


COMMANDS = (
    Command(
        "/file",
        f"[-d] [{PATH}]",
        "put a file before the next text; alone: list; -d: drop",
        attach,
        is_daily=True,
    ),
    Command(
        "/image",
        f"[-d] [{PATH}]",
        "show a picture with the next text; alone: list; -d: drop",
        show_picture,
    ),
    Command(
        "/editor",
        "[TEXT]",
        "write the next text in $EDITOR; Enter then sends it",
        write_outside,
        is_daily=True,
    ),
    Command(
        "/copy",
        "[code]",
        "copy the last answer; code: the last block of code",
        copy_answer,
        lambda chat, before: ("code",),
        is_daily=True,
    ),
    Command(
        "/export",
        f"[-f] {PATH}",
        "write the conversation as Markdown, or JSON for PATH.json; -f overwrites",
        export,
    ),
)

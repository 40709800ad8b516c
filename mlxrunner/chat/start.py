"""A chat put together: every command, and the editor and the view that standard input and output call for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlxrunner.chat import files, reports, settings, turns
from mlxrunner.chat.commands import Command, Table
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.keyboard import Keyboard, is_terminal
from mlxrunner.chat.repl import Chat
from mlxrunner.folders import data_folder


def open_chat(
    conversation: Conversation,
    *more: Command,
    plain: bool = False,
    history: bool = True,
    keyboard: Keyboard | None = None,
    **options: Any,
) -> tuple[Chat, Table]:
    """`more`: commands of other rooms; `plain`: no Markdown; `history`: keep what is typed for the next time. `options`: other fields of
    `Chat`."""
    table = commands(*more)
    chat = Chat(conversation, interactive=is_terminal(), **options)
    if chat.interactive:
        from mlxrunner.chat.editor import Editor

        words = {command.name: command.words for command in table}
        chat.keyboard = keyboard or Keyboard(terminal=True)
        chat.reader = Editor(
            table,
            lambda name: words[name](chat),
            _history_file() if history else None,
            chat.keyboard,
        )
    if chat.interactive and not plain and os.environ.get("TERM", "dumb") != "dumb":
        from rich.console import Console

        from mlxrunner.chat.markdown import StreamedMarkdown

        chat.view = lambda: StreamedMarkdown(Console())
    return chat, table


def commands(*more: Command) -> Table:
    """All commands; `more` are those of other rooms."""

    def show_help(chat: Chat, argument: str) -> None:
        for line in table.help():
            chat.say(line)
        chat.say(
            'Alt-Enter, Ctrl-J or """ around it: a text of several lines. In """, a text is sent whatever it begins with.'
        )
        chat.say('@PATH in a text, or @"PATH" where that has spaces: the file goes with it.')
        chat.say(
            "Ctrl-C stops an answer and keeps what was shown; while typing it clears the line. Ctrl-Z suspends the chat."
        )

    def leave(chat: Chat, argument: str) -> None:
        raise EOFError

    table = Table((
        *turns.COMMANDS,
        *settings.COMMANDS,
        *reports.COMMANDS,
        *files.COMMANDS,
        *more,
        Command("/help", "", "this list", show_help),
        Command("/bye", "", "leave (so does Ctrl-D)", leave),
    ))  # fmt: skip
    return table


def _history_file() -> Path | None:
    try:
        return data_folder() / "history"
    except OSError:
        return None

"""Assemble a chat: the commands, and the editor and view for standard input and output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlxrunner.chat.commands import files, reports, settings, turns
from mlxrunner.chat.commands.table import ChatContext, Command, CommandTable
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.repl import Chat
from mlxrunner.errors import OptionError
from mlxrunner.system.folders import data_folder
from mlxrunner.terminal.keyboard import Keyboard, is_terminal


def open_chat(
    conversation: Conversation,
    *more: Command,
    plain: bool = False,
    history: bool = True,
    keyboard: Keyboard | None = None,
    **options: Any,
) -> tuple[Chat, CommandTable]:
    """Return a chat and the table of its commands.

    `more` are commands beside those that every chat has. `plain` turns Markdown off. `history`
    keeps what is typed for the next chat. `keyboard` is the one already in use, if any. `options`
    are other fields of `Chat`.
    """
    table = commands(*more)
    chat = Chat(conversation, interactive=is_terminal(), **options)
    if chat.interactive:
        from mlxrunner.chat.editor import Editor

        words = {command.name: command.words for command in table}
        chat.keyboard = keyboard or Keyboard(terminal=True)
        file = _history_file() if history else None
        chat.reader = Editor(
            table, lambda name, before: words[name](chat, before), file, chat.keyboard
        )
    if chat.interactive and not plain and os.environ.get("TERM", "dumb") != "dumb":
        from rich.console import Console

        from mlxrunner.chat.markdown import StreamedMarkdown

        chat.view = lambda: StreamedMarkdown(Console())
    return chat, table


HELP = (
    "Alt-Enter, Ctrl-J or a backslash at the end: the text goes on in a new line.",
    '""" around a text sends it as it is, whatever it begins with.',
    "@PATH in a text: the file, or picture, goes with it.  Ctrl-X Ctrl-E: $EDITOR.",
    "Ctrl-C stops an answer and keeps what was shown; it clears the line.",
    "Ctrl-Z suspends the chat.  Ctrl-D, exit or quit leave it.",
)
"""Lines of /help after the commands; a terminal of 80 columns wraps none of them."""


def commands(*more: Command) -> CommandTable:
    """Return the table of all commands, with `more` before /help."""

    def show_help(chat: ChatContext, argument: str) -> None:
        if argument not in ("", "all"):
            raise OptionError(f"/help {argument}: /help shows the daily commands, /help all all")
        for line in (*table.help(is_whole=argument == "all"), *HELP):
            chat.say(line)

    def leave(chat: ChatContext, argument: str) -> None:
        raise EOFError

    table = CommandTable(
        (
            *turns.COMMANDS,
            *settings.COMMANDS,
            *reports.COMMANDS,
            *files.COMMANDS,
            *more,
            Command(
                "/help",
                "[all]",
                "what is used daily; all: every command (also /?)",
                show_help,
                lambda chat, before: ("all",),
                is_daily=True,
            ),
            Command("/bye", "", "leave (also /exit, /quit, Ctrl-D)", leave, is_daily=True),
        )
    )
    return table


def _history_file() -> Path | None:
    try:
        return data_folder() / "history"
    except OSError:
        return None

"""Files into a message, and the conversation out to a file or the clipboard."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mlxrunner.chat.clipboard import copy
from mlxrunner.chat.commands import PATH, Command, flagged
from mlxrunner.chat.thinking import without_thinking
from mlxrunner.errors import MlxrunnerError, OptionError
from mlxrunner.reading import ReadError, open_file
from mlxrunner.terminal import size
from mlxrunner.tokenizer import Message
from mlxrunner.writing import written

if TYPE_CHECKING:
    from mlxrunner.chat.repl import Chat

NAMED = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
FENCED = re.compile(r"^(`{3,}).*?(?:^\1`*\s*$|\Z)", re.MULTILINE | re.DOTALL)
LONGEST_TOKEN = 32
"""Bytes: a file that has more of them for each token of the context is not even read."""


class Said(Protocol):
    """A conversation, or what was saved of one."""

    @property
    def system(self) -> str | None: ...

    @property
    def messages(self) -> list[Message]: ...


class FileError(MlxrunnerError):
    """A file that can't be put into a message, or written."""

    exit_code = 2


@dataclass
class Attachments:
    """Texts of files, by name, that go before the next message, so that they are evaluated while it is typed."""

    texts: dict[str, str] = field(default_factory=dict)

    def before(self, text: str) -> str:
        return "".join(
            [*(f"{quoted(name, content)}\n" for name, content in self.texts.items()), text]
        )

    def clear(self) -> None:
        self.texts.clear()

    def put_into(self, chat: Chat, text: str) -> str:
        """The message: what was attached, `text`, and behind it the files that it names with `@`, each once.

        A message that is edited may hold files already: they are not put in again, nor is what they name in their fences looked at.
        """
        named: dict[str, str] = {}
        for in_quotes, word in NAMED.findall(FENCED.sub("", text)):
            # What ends a sentence is part of a name only if there is such a file.
            name = next(
                (name for name in (in_quotes, word, word.rstrip(".,;:!?)'\"")) if _exists(name)),
                None,
            )
            if name is not None:
                content = quoted(name, read_text(name, chat)).rstrip("\n")
                named |= {name: content} if content not in text else {}
            elif in_quotes or "/" in word or "." in word.strip("."):
                chat.say(f"no such file: {in_quotes or word}; sent as it is")
        return "\n\n".join([self.before(text), *named.values()])


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(os.path.expanduser(name)).exists()
    except (OSError, ValueError):  # too long, or not a name at all
        return False


def quoted(name: str, text: str) -> str:
    """A file as part of a message, in a fence that its own text does not end."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{name}:\n{fence}\n{text.rstrip()}\n{fence}\n"


def read_text(name: str, chat: Chat) -> str:
    """The text of a file that fits into the context. FileError in one line for any other."""
    path = Path(os.path.expanduser(name))
    context, tokenizer = chat.runner.context, chat.runner.tokenizer
    limit = LONGEST_TOKEN * context
    try:
        descriptor, nbytes = open_file(path)
        with os.fdopen(descriptor, "rb") as stream:
            content = stream.read(limit + 1) if nbytes <= limit else b""
        if max(nbytes, len(content)) > limit:
            raise FileError(
                f"{name}: {size(max(nbytes, len(content)))} are more than the context of {context} tokens holds"
            )
        text = content.decode()
    except ReadError as error:
        raise FileError(str(error)) from error
    except OSError as error:
        raise FileError(f"{name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{name}: not a text (byte {error.start} is not UTF-8)") from error
    if "\0" in text:
        raise FileError(f"{name}: not a text (byte {text.index(chr(0))} is 0)")
    tokens = len(tokenizer.encode_more(text))
    if tokens >= context:
        raise FileError(
            f"{name}: its {tokens} tokens are more than the context of {context} tokens holds"
        )
    return text


def attach(chat: Chat, argument: str) -> None:
    drop, name = flagged(argument, "-d")
    waiting = chat.attachments.texts
    if drop and name and name not in waiting:
        raise OptionError(f"{name} does not wait for the next message: /file lists those that do")
    if drop:
        for one in [name] if name else list(waiting):
            del waiting[one]
    elif name:
        waiting[name] = read_text(name, chat)
    for one, text in waiting.items():
        chat.say(f"{one} ({size(len(text.encode()))}) goes with the next message")
    if not waiting:
        chat.say("no file goes with the next message")


def copy_answer(chat: Chat, argument: str) -> None:
    turns = chat.conversation.history.turns
    if not turns:
        raise OptionError("there is no answer to copy yet")
    text = without_thinking(turns[-1].answer, chat.conversation.asked_for(len(turns) - 1).text)
    chat.say(f"copied {len(text)} characters {copy(text)}")


def export(chat: Chat, argument: str) -> None:
    force, name = flagged(argument, "-f")
    if not name:
        raise OptionError("/export FILE: which file? FILE.json for JSON, anything else is Markdown")
    path = Path(os.path.expanduser(name))
    text = (
        as_json(chat.conversation, chat.model)
        if path.suffix == ".json"
        else as_markdown(chat.conversation)
    )
    try:
        with written(path, force=force) as stream:
            stream.write(text)
    except FileExistsError as error:
        raise FileError(f"{name} is there already: /export -f {name} overwrites it") from error
    except OSError as error:
        raise FileError(f"{name}: {error.strerror or error}") from error
    turns = len(chat.conversation.history.turns)
    chat.say(f"{turns} turn{'' if turns == 1 else 's'} written to {name}")


def as_markdown(conversation: Said) -> str:
    system = [f"## System\n\n{conversation.system}\n"] if conversation.system else []
    said = [
        f"## {message['role'].capitalize()}\n\n{message['content']}\n"
        for message in conversation.messages
    ]
    return "\n".join([*system, *said])


def as_json(conversation: Said, model: str) -> str:
    content = {"model": model, "system": conversation.system, "messages": conversation.messages}
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


COMMANDS = (
    Command(
        "/file",
        f"[-d] [{PATH}]",
        "put a text file before the next message; without PATH: list them; -d drops it, or all",
        attach,
    ),
    Command("/copy", "", "copy the last answer to the clipboard", copy_answer),
    Command(
        "/export",
        f"[-f] {PATH}",
        "write the conversation as Markdown, or JSON for PATH.json; -f overwrites",
        export,
    ),
)

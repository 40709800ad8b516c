"""The line editor of the chat, which runs prompt_toolkit in a thread of its own.

So the caller's thread has the model to itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import TextIO, cast

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.screen import Char
from prompt_toolkit.output import Output
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.patch_stdout import StdoutProxy

from mlxrunner.chat.input import CommandTable, DraftInterrupt, TypedText, is_continued, is_open
from mlxrunner.errors import MlxrunnerError, ReadError
from mlxrunner.system.reading import open_file
from mlxrunner.system.writing import open_own
from mlxrunner.terminal.control import Keyboard, edit_outside, uninterrupted
from mlxrunner.terminal.output import SHOWN, visible

LONGEST_HISTORY = 2**26
"""Most bytes of the file of earlier texts."""

PROMPT, MORE = ">>> ", "... "
NAMED = re.compile(r'(?<!\S)@(?:"[^"\n]*|\S*)$')
"""Matches a file that is being named at the end of a text."""


class FoldedPastes:
    """Long pasted texts, each of which stands in the line as one short name."""

    LINES = 10
    """Lines from which on a pasted text is folded."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def fold(self, text: str) -> str:
        """Return what stands for a pasted `text` in the line: itself, or a name."""
        lines = text.count("\n") + 1
        if lines < self.LINES:
            return text
        name = f"[pasted text {len(self._texts) + 1}: {lines} lines]"
        self._texts[name] = text
        return name

    def unfold(self, line: str) -> str:
        """Return `line` with the texts that its names stand for."""
        if "[pasted text " not in line or not self._texts:
            return line
        names = "|".join(map(re.escape, self._texts))  # in one pass: texts may hold names
        return re.sub(names, lambda found: self._texts[found[0]], line)

    def at_the_end(self, line: str) -> int:
        """Return the length of the name at the end of `line`, or 0."""
        return next((len(name) for name in self._texts if line.endswith(name)), 0)


class _GoesOutside(Exception):  # noqa: N818  # a wish, not an error
    """The user wants to continue with the text in an editor of their own."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class Editor:
    """Reads texts from a terminal."""

    def __init__(
        self,
        table: CommandTable,
        words: Callable[[str, str], Iterable[str]],
        history: Path | None = None,
        keyboard: Keyboard | None = None,
    ) -> None:
        """Complete the commands in `table`, and their arguments with `words(command, before)`.

        `history` is the file that keeps the texts; None keeps none. `keyboard` has the terminal
        while no line is edited.
        """
        Char.display_mappings.update({chr(code): shown for code, shown in SHOWN.items()})
        self._keyboard, self._pastes = keyboard or Keyboard(), FoldedPastes()
        self._session: PromptSession[str] = PromptSession(
            output=_output(),
            multiline=True,
            prompt_continuation=lambda width, line, wraps: "" if wraps else MORE,
            key_bindings=_bindings(self._keyboard, self._pastes),
            completer=ChatCompleter(table, words),
            complete_while_typing=False,
            enable_history_search=True,
            history=PrivateHistory(history, self._pastes.unfold),
            reserve_space_for_menu=4,
        )
        self._draft, self._thread = TypedText(), Thread()
        self._session.default_buffer.on_text_changed += self._changed

    def read(self, idle: Callable[[TypedText], None], default: str = "") -> str:
        """Return the text that the user types, while `idle(draft)` works in the caller's thread.

        `default` is the text to begin with. `idle` has to return soon after the draft is over.
        Raise EOFError after Ctrl-D, and after Ctrl-C DraftInterrupt, or KeyboardInterrupt if
        nothing was typed. Ctrl-X Ctrl-E continues in the user's own editor.
        """
        while True:
            self._end()  # an interrupt may have cut off the end of the last line
            self._feed(self._keyboard.typed_before())
            try:
                with self._keyboard.editing():
                    return self._edited(idle, default)
            except _GoesOutside as asked:
                default = self._edited_outside(asked.text)

    def _edited_outside(self, text: str) -> str:
        try:
            return edit_outside(text, self._keyboard)
        except MlxrunnerError as error:
            print(visible(f"error: {error}"), file=sys.stderr)
            return text

    def _edited(self, idle: Callable[[TypedText], None], default: str) -> str:
        draft = self._draft = TypedText(default)
        outcome: list[str | BaseException] = []

        def edit() -> None:
            try:
                outcome.append(
                    self._session.prompt(
                        PROMPT, default=default, handle_sigint=False, set_exception_handler=False
                    )
                )
            except BaseException as error:
                outcome.append(error)
            finally:
                draft.finish()

        self._thread = Thread(target=edit, name="line editor", daemon=True)
        try:
            with uninterrupted():
                self._thread.start()
            with _errors_above():
                idle(draft)
            self._thread.join()
        except KeyboardInterrupt:  # a signal that came before the editor had the keyboard
            self._end()
            raise _given_up(draft.text) from None
        except BaseException:
            self._end()
            raise
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return self._pastes.unfold(outcome[0])

    def _feed(self, typed: str) -> None:
        """Begin the next line with the keys in `typed`; further lines in them follow it."""
        if typed:
            keys: list[KeyPress] = []
            parser = Vt100Parser(keys.append)
            parser.feed(typed)
            parser.flush()
            store_typeahead(self._session.app.input, keys)

    def _changed(self, buffer: Buffer) -> None:
        self._draft.update(self._pastes.unfold(buffer.text))

    def _end(self) -> None:
        """End the editing in the other thread, even if it has only just begun."""
        app = self._session.app
        while self._thread.is_alive():
            if app.loop is not None and app.is_running:
                with suppress(RuntimeError):  # the loop has just been closed
                    app.loop.call_soon_threadsafe(
                        lambda: app.is_done or app.exit(exception=KeyboardInterrupt)
                    )
            self._thread.join(0.05)


@contextmanager
def _errors_above() -> Iterator[None]:
    """Print what is logged to the terminal above the line that is edited, not into it."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    with StdoutProxy() as above, redirect_stderr(cast(TextIO, above)):
        yield


def _given_up(text: str) -> KeyboardInterrupt:
    """Return the interrupt of Ctrl-C at a line that holds `text`."""
    return DraftInterrupt() if text else KeyboardInterrupt()


def _output() -> Output:
    """Return the terminal. It keeps marking pasted text after a line is entered: see `Keyboard`."""
    output = create_output()
    output.disable_bracketed_paste = lambda: None  # type: ignore[method-assign]
    return output


def _bindings(keyboard: Keyboard, pastes: FoldedPastes) -> KeyBindings:
    bindings = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @bindings.add(Keys.BracketedPaste, filter=typing)
    def _(event: KeyPressEvent) -> None:
        pasted = event.data.replace("\r\n", "\n").replace("\r", "\n")
        event.current_buffer.insert_text(pastes.fold(pasted))

    @bindings.add("backspace", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        whole = pastes.at_the_end(buffer.document.text_before_cursor)
        buffer.delete_before_cursor(count=whole or event.arg)

    @bindings.add("c-c", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.app.exit(exception=_given_up(event.current_buffer.text), style="class:aborting")

    @bindings.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(pastes.unfold(buffer.text)):
            buffer.newline(copy_margin=False)
        elif not buffer.document.text_after_cursor and is_continued(buffer.text):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("c-z")
    def _(event: KeyPressEvent) -> None:
        run_in_terminal(keyboard.stop_group)

    @bindings.add("c-x", "c-e", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.app.exit(exception=_GoesOutside(pastes.unfold(event.current_buffer.text)))

    @bindings.add("escape", "enter", filter=typing)
    @bindings.add("c-j", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


class ChatCompleter(Completer):
    """Completes commands, their arguments, and paths after `@` or where a command takes one."""

    def __init__(self, table: CommandTable, words: Callable[[str, str], Iterable[str]]) -> None:
        self._table, self._words = table, words
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        line = document.text_before_cursor
        word = line.split()[-1] if line and not line[-1].isspace() else ""
        named = NAMED.search(line)
        name, space, argument = line.partition(" ")
        command = next((command for command in self._table if command.name == name), None)
        if line.startswith("/") and not space:
            for command in self._table:
                if command.name.startswith(name):
                    yield Completion(command.name, -len(name), display_meta=command.help)
        elif command is not None and command.takes_path:
            yield from self._paths.get_completions(
                Document(re.sub(r"^-\w\s+", "", argument)), complete_event
            )
        elif command is not None:
            yield from (
                Completion(one, -len(word))
                for one in dict.fromkeys(self._words(name, argument.removesuffix(word)))
                if one.startswith(word)
            )
        elif named is not None:
            path = named[0][1:].removeprefix('"')
            for one in self._paths.get_completions(Document(path), complete_event):
                whole = path + one.text
                quote = '"' if named[0][1:2] == '"' or len(whole.split()) > 1 else ""
                end = "" if one.display_text.endswith("/") else quote  # a folder's name continues
                yield Completion(f"@{quote}{whole}{end}", -len(named[0]), display=one.display)


class PrivateHistory(FileHistory):
    """Entries of any number of lines, in a file that only its owner can read.

    A file that cannot be read or written is ignored; None keeps the entries in memory only.
    """

    def __init__(self, file: Path | None, unfold: Callable[[str], str] = str) -> None:
        """Keep of each entry what `unfold` returns."""
        super().__init__(file or "")
        self._unfold = unfold

    def append_string(self, string: str) -> None:
        super().append_string(self._unfold(string))

    def load_history_strings(self) -> Iterable[str]:
        if not self.filename:
            return []
        try:
            os.close(
                open_file(os.fsdecode(self.filename), LONGEST_HISTORY)[0]
            )  # raises for a FIFO, which never ends
            return list(super().load_history_strings())
        except (OSError, ReadError):
            return []

    def store_string(self, string: str) -> None:
        if not self.filename:
            return
        lines = "".join(f"+{line}\n" for line in string.split("\n"))
        try:
            with os.fdopen(open_own(os.fsdecode(self.filename), append=True), "ab") as stream:
                stream.write(f"\n# {datetime.now()}\n{lines}".encode(errors="replace"))
        except OSError:
            return

"""The loop of the chat: read a text, then run the command or print the answer.

A text that is not a command is sent to the model.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import Any, NoReturn

from mlxrunner.chat.commands import COMMANDS
from mlxrunner.chat.conversation import (
    Branches,
    Conversation,
    UndoHistory,
    UndoState,
    full_context,
    more_room,
)
from mlxrunner.chat.input import (
    GOODBYES,
    Attachments,
    Command,
    CommandTable,
    DraftInterrupt,
    Reader,
    StdinReader,
    TypeAhead,
    TypedText,
    is_open,
    picture_paths,
    quoted,
    unquoted,
)
from mlxrunner.chat.view import (
    DIM,
    UNDIM,
    PlainView,
    StreamedMarkdown,
    ThinkingView,
    View,
    beginning,
    held_log,
)
from mlxrunner.errors import (
    ContextLengthError,
    MlxrunnerError,
    ModelError,
    OptionError,
    PromptError,
)
from mlxrunner.loading import add_draft_model, plan_model
from mlxrunner.memory.reserve import must_fit
from mlxrunner.models.facts import is_run_by_mlx_vlm
from mlxrunner.models.load import why_no_vision
from mlxrunner.options import RunnerSettings
from mlxrunner.results import Chunk
from mlxrunner.runner import Runner
from mlxrunner.sessions.session import History
from mlxrunner.system.device import on_battery
from mlxrunner.system.folders import data_folder
from mlxrunner.terminal.control import (
    Interrupts,
    Keyboard,
    edit_outside,
    is_terminal,
    orderly_end,
    uninterrupted,
)
from mlxrunner.terminal.early import INTERRUPTED
from mlxrunner.terminal.output import FilteredStream, PrefillBar, inline, shows_pictures, wrapped
from mlxrunner.terminal.output import loading as loading_bar

logger = logging.getLogger("mlxrunner")

PRESSES_TO_LEAVE = 3
"""Times that Ctrl-C is pressed at an empty prompt until the chat ends."""
PIECE_S = 0.4
"""Seconds of a prefill that Ctrl-C may have to wait for, in a terminal."""


@dataclass
class Chat:
    """The loop, and the chat that the commands work on."""

    conversation: Conversation
    reader: Reader = field(default_factory=StdinReader)
    view: Callable[[], View] = PlainView
    """Makes the view for one answer."""
    model: str = ""
    """The name from which the model was loaded."""
    loading: dict[str, Any] = field(default_factory=dict)
    """Options of `Runner.load`."""
    interactive: bool = False
    """True if a user is at the terminal."""
    type_ahead: bool = True
    """True to evaluate a text while the user types it."""
    show_thinking: bool = True
    """True to show thinking, False to hide it."""
    branches: Branches = field(default_factory=Branches)
    attachments: Attachments = field(default_factory=Attachments)
    undo_history: UndoHistory = field(default_factory=UndoHistory)
    """Turns that commands took away, for /redo."""
    begun: str = ""
    """The text that the next line begins with."""
    after_turn: list[Callable[[Chat], None]] = field(default_factory=list)
    """Functions called after each answer, complete or interrupted, before the next text is read."""
    while_idle: list[Callable[[], bool]] = field(default_factory=list)
    """Functions called about once a second while a text is read; True: the draft was dropped."""
    after_load: list[Callable[[Chat], None]] = field(default_factory=list)
    """Functions called after another runner is loaded."""
    after_command: list[Callable[[Chat], None]] = field(default_factory=list)
    """Functions called after each command."""
    load_elsewhere: Callable[[str, dict[str, Any]], Runner] | None = None
    """Loads another model on several ranks, from its name and options; None: on this one alone."""
    changed_by: str = ""
    """The command that changed the conversation since the last turn; "" if none did."""
    parted_by: str = ""
    """The command that made the last turn leave the turns before it; "" if none did."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    keyboard: Keyboard = field(default_factory=Keyboard)

    def __post_init__(self) -> None:
        if self.interactive:
            self.conversation.piece_s = PIECE_S
        self.loaded = ChatModel(self, self._try)
        self._table = CommandTable()
        self._typeahead = self._type_ahead()

    @property
    def runner(self) -> Runner:
        return self.conversation.runner

    def run(self, table: CommandTable) -> int:
        """Read texts and act on them until the end of the input or /bye. Return the exit code.

        In a terminal that is 0. Elsewhere it is that of the last error, or 130 after Ctrl-C.
        """
        self._table = table
        with orderly_end(), self.keyboard, self.interrupts:
            return self._run()

    def _run(self) -> int:
        failed, idle_presses = 0, 0
        while True:
            is_idle = True
            try:
                with self.interrupts.listening():
                    failed = self._try(self.loaded.complete) or failed
                    begun, self.begun = self.begun, ""
                    text = self._read(self._typeahead, begun)
                    is_idle, idle_presses = False, 0
                    failed = self._try(partial(self._do, text)) or failed
            except EOFError:
                return 0 if self.interactive else failed
            except KeyboardInterrupt as pressed:
                if not self.interactive:
                    return INTERRUPTED
                if not is_idle or isinstance(pressed, DraftInterrupt):
                    idle_presses = 0
                    continue
                idle_presses += 1
                if idle_presses == PRESSES_TO_LEAVE:
                    return 0
                more = "once" if idle_presses + 1 == PRESSES_TO_LEAVE else "twice"
                self.say(f"to leave: Ctrl-D, /bye, or Ctrl-C {more} more")

    def _try(self, act: Callable[[], None]) -> int:
        """Call `act`, and print its error. Return the exit code of the error, or 0."""
        try:
            act()
        except MlxrunnerError as error:
            hint = self._hint(error) if isinstance(error, ContextLengthError) else ""
            self.say(f"error: {error}{hint}")
            return error.exit_code
        except EOFError:
            raise
        except Exception as error:
            if not self.interactive:
                raise
            # A bug must not cost the user the conversation.
            logger.debug("internal error", exc_info=True)
            self.say(
                f"internal error: {type(error).__name__}: {' '.join(str(error).split())} "
                "(the conversation is still there)"
            )
        return 0

    def _hint(self, error: ContextLengthError) -> str:
        """Return a hint that says what makes room, or ""."""
        if self.attachments.texts:
            return "; /file -d removes the attached files"
        if self.attachments.pictures:
            return "; /image -d removes the attached pictures"
        evaluated = len(self.conversation.history.rendering.tokens)
        fits_alone = error.tokens - evaluated < error.context
        return f"; {more_room(self.conversation)}" if fits_alone else ""

    def _read(self, idle: Callable[[TypedText], None], default: str = "") -> str:
        with held_log() if self.interactive else nullcontext():
            return self.reader.read(idle, default)

    def _type_ahead(self, after: History | None = None) -> TypeAhead:
        """Return a worker that evaluates a draft as the message after `after`.

        None stands for the present history.
        """
        return TypeAhead(
            partial(self._evaluate, after=after),
            reads_draft=lambda: self.type_ahead and not on_battery(),
            idle=lambda: any(act() for act in self.while_idle),
        )

    def _evaluate(
        self, draft: str, cancelled: Callable[[], bool], after: History | None = None
    ) -> None:
        text = "" if self._table.is_command(draft) else unquoted(draft)
        self.conversation.evaluate(self.attachments.before(text), cancelled, after)
        if not text and not cancelled():
            self.conversation.drift()  # so that /stats has it at once

    def _do(self, text: str) -> None:
        if self.interactive and text.strip() in GOODBYES:
            raise EOFError
        parsed = self._table.parse(text)
        if parsed is not None:
            self._run_command(*parsed)
        else:
            text = text if is_open(text) else unquoted(text)
            if picture_paths(text):  # a terminal types the path of what is dropped on it
                self._do(f"/image {text.strip()}")
            elif text.strip():
                self.send(text)

    def _run_command(self, command: Command, argument: str) -> None:
        state = UndoState(self.branches.current, self.conversation.branch)
        self.undo_history.push(state)
        earlier, self.changed_by = self.changed_by, command.name
        try:
            command.run(self, argument)
        finally:
            if self.changed_by and self.conversation.branch == state.branch:
                self.changed_by = earlier
            present = {self.branches.current: self.conversation.branch}
            self.undo_history.settle(state, self.branches.others | present)
        for act in self.after_command:
            act(self)

    def say(self, text: str, *, is_verbatim: bool = False, is_dim: bool = False) -> None:
        """Print a note, which is not an answer, on stderr.

        `is_verbatim` keeps its lines and spaces as they are. `is_dim` sets it apart from answers.
        """
        sys.stdout.flush()
        text = wrapped(text) if self.interactive and not is_verbatim else text
        is_dim = is_dim and sys.stderr.isatty()
        sys.stderr.write(DIM if is_dim else "")
        FilteredStream(sys.stderr).write(f"{text}\n")
        sys.stderr.write(UNDIM if is_dim else "")
        sys.stderr.flush()

    def introduce(self) -> None:
        """Say which model this is, and where help is."""
        context = f"context window of {self.runner.context} tokens"
        self.say(f"model {self.model}, {context}; /help lists the commands")

    def recall(self) -> None:
        """Show the model and the last turn, if a user is at the terminal."""
        if not self.interactive:
            return
        self.introduce()
        messages = self.conversation.messages
        for number, message in list(enumerate(messages, 1))[-2:]:
            text = beginning(message["content"], f"... (/show {number} shows it whole)")
            mark = ">>> " if message["role"] == "user" else ""
            self.say(f"{mark}{text}", is_verbatim=True, is_dim=True)

    def write(self, text: str) -> str:
        """Return `text` as the user leaves it in an editor of their own.

        Raise PromptError without a terminal, and MlxrunnerError if the editor fails.
        """
        if not self.interactive:
            raise PromptError("there is no terminal for an editor")
        return edit_outside(text, self.keyboard)

    def edit(self, text: str, after: History | None) -> str | None:
        """Return `text` as the user changes it, or None if the user changes nothing or gives up.

        Meanwhile the text is evaluated as the message after `after`, unless that is None. Raise
        PromptError without a terminal.
        """
        if not self.interactive:
            raise PromptError("there is no line editor without a terminal")
        idle = TypedText.wait_until_over if after is None else self._type_ahead(after)
        try:
            typed = self._read(idle, quoted(text))
        except (EOFError, KeyboardInterrupt):
            return None
        return None if typed == quoted(text) or not typed.strip() else unquoted(typed)

    def send(self, text: str, after: History | None = None) -> None:
        """Send `text` with the attachments and the files that it names, and print the answer."""
        message = self.attachments.with_named(text, self.runner, self.say, self.see)
        before = self.conversation.history
        try:
            self.answer(message, after)
        finally:
            if self.conversation.history is not before:
                self.attachments.clear()

    def see(self, path: str) -> str:
        """Return the name that shows a picture file to the model, in any message of the user.

        The model is loaded again if it was loaded without its eyes. Raise PictureError if the file
        can't be used.
        """
        album, before = self.conversation.album, self.conversation.history
        name, is_new = album.add(path)
        if self.interactive and sys.stderr.isatty() and shows_pictures(os.environ):
            sys.stderr.write(inline(*album.small(name), os.environ))
        self.loaded.open_eyes()
        if is_new and any(name in turn.user for turn in before.turns):  # as a text until now
            self.loaded.forget_tokens()
        return name

    def answer(self, text: str, after: History | None = None, **options: Any) -> None:
        """Send `text` as it is, and print the answer. It follows `after`, by default the history.

        If there is no answer, the present history stays. `options` take precedence over the
        conversation's own.
        """
        first = (self.conversation.history if after is None else after).first
        if after is not None:
            self.say(str(self.conversation.outlook(text, after)))
        with (
            self.interrupts.asking() as interrupted,
            self.keyboard.answering(),
            held_log(),
            ExitStack() as ending,
        ):
            bar = PrefillBar()

            def progress(done: int, total: int) -> None:
                if self.keyboard.asks_to_stop:
                    bar.pause()
                    self.keyboard.stop()
                bar(done, total)
                if interrupted():
                    raise KeyboardInterrupt

            ending.callback(self._answered, self.conversation.history)
            chunks = self.conversation.send(text, progress, after, **options)
            asked = self.conversation.asked.text
            view = ThinkingView(self.view, asked, self.show_thinking, self.interactive)
            # These run in reverse order, even if one of them fails because the window is gone.
            ending.callback(view.close)
            ending.callback(chunks.close)  # type: ignore[attr-defined]  # a generator
            ending.callback(bar.close)
            last: Chunk | None = None
            with suppress(KeyboardInterrupt):
                for chunk in chunks:
                    last = chunk
                    if self.keyboard.asks_to_stop:
                        view.pause()
                        self.keyboard.stop()
                    view.write(chunk.text)
                    if interrupted():
                        break
        if interrupted():  # even if it came late
            self.say("(interrupted)")
            raise KeyboardInterrupt
        if last is not None:
            for note in full_context(self.conversation, first, last, options):
                self.say(note, is_dim=True)

    def _answered(self, before: History) -> None:
        if self.conversation.history is not before:
            self.parted_by, self.changed_by = self.changed_by, ""
            for act in self.after_turn:
                act(self)


class ChatModel:
    """The model of a chat, and the ways to load it again or to load another one."""

    def __init__(self, chat: Chat, attempt: Callable[[Callable[[], None]], int]) -> None:
        """Begin with the runner of `chat`. `attempt` calls a function and prints its error."""
        self._chat, self._attempt = chat, attempt
        self._known_runner = chat.conversation.runner  # `after_load` is not called for it

    def open_eyes(self) -> None:
        """Load the model again if it was loaded without its eyes.

        Raise ModelError if it has none, and PromptError if several hosts share it.
        """
        if not self._chat.conversation.sees:
            if (why := why_no_vision(self._chat.model)) is not None:
                raise ModelError(why)
            self._chat.say(f"{self._chat.model} is loaded again, with its vision encoder")
            self.change(self._chat.model, pictures=True)
        if not self._chat.conversation.sees:
            raise PromptError("a model that several hosts share can't see pictures")

    def change(self, name: str, **changes: Any) -> None:
        """Load another model, or the same one with other options, and continue with it.

        If the request itself is wrong, raise while the present model is still loaded.
        """
        loading = self._chat.loading | changes
        if name != self._chat.model:
            loading.pop("pictures", None)  # until one is shown
        plan = vars(RunnerSettings.among(loading))
        found = plan_model(name, **plan)
        if loading.get("reserve", True):
            must_fit(found)
        # Two models at once may be too much, so the present one is freed first. After an interrupt
        # here, `complete` loads it again.
        self._known_runner = self._chat.conversation.runner = NoRunner()  # type: ignore[assignment]
        try:
            runner = self._load(name, loading)
        except Exception as error:
            clear_frames(error.__traceback__)  # they hold what was loaded so far
            self._attempt(self.complete)
            raise
        if name != self._chat.model:
            self.forget_tokens()
        self._chat.model, self._chat.loading, self._chat.conversation.runner = name, loading, runner
        self.complete()

    def complete(self) -> None:
        """Complete a change of models that an interrupt or an error has cut off.

        Afterwards a model is loaded, and `after_load` has been called for it.
        """
        runner = self._chat.conversation.runner
        if isinstance(runner, NoRunner) and runner.why is None:
            self._chat.say(f"{self._chat.model} is loaded again")
            with uninterrupted():
                self._chat.conversation.runner = self._loaded_again()
        if self._chat.conversation.runner is not self._known_runner and not isinstance(
            self._chat.conversation.runner, NoRunner
        ):
            with uninterrupted():
                branches = [self._chat.conversation.branch, *self._chat.branches.others.values()]
                if any(branch.history.shows_pictures for branch in branches):
                    self.forget_tokens()  # ids of pictures are those of the model that is gone
                for act in self._chat.after_load:
                    act(self._chat)
                self._known_runner = self._chat.conversation.runner

    def forget_tokens(self) -> None:
        """Keep the conversation as texts, which the model that is loaded now tokenizes."""
        self._chat.conversation.history = self._chat.conversation.history.without_tokens()
        self._chat.branches.forget_tokens()

    def _loaded_again(self) -> Runner:
        try:
            return self._load(self._chat.model, self._chat.loading)
        except Exception as error:
            failed = NoRunner(" ".join(str(error).split()))
            self._chat.conversation.runner = failed  # type: ignore[assignment]
            raise

    def _load(self, model: str, loading: dict[str, Any]) -> Runner:
        """Load a model in the middle of a chat, with a bar if that takes long.

        If the draft model can't guess for it, say why, and continue without.
        """
        if self._chat.load_elsewhere is not None:
            return self._chat.load_elsewhere(model, loading)
        own, why = dict(loading), ""
        draft = own.pop("draft_model", None)
        draft = None if own.get("pictures") or is_run_by_mlx_vlm(model) else draft
        with loading_bar(model) as show:
            runner = Runner.load(model, progress=show, **own)
            try:
                if draft is not None:
                    trusts = bool(own.get("trust_remote_code"))
                    add_draft_model(runner, draft, trust_remote_code=trusts, progress=show)
            except MlxrunnerError as error:
                why = str(error).partition("\n")[0]
        if why:
            self._chat.say(f"{draft} is not used as draft model of {model}: {why}")
        return runner


class NoRunner:
    """Stands for a runner that was freed for another one. Using it raises ModelError."""

    def __init__(self, why: str | None = None) -> None:
        """Keep the error of loading the model again; None means that this was not tried yet."""
        self.why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise ModelError(
            f"no model is loaded{f' ({self.why})' if self.why else ''}: /model NAME loads one"
        )


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

        chat.view = lambda: StreamedMarkdown(Console())
    return chat, table


HELP = (
    "Alt-Enter, Ctrl-J or a backslash at the end of the line begin a new line.",
    '""" around a text sends it unchanged, even if it looks like a command.',
    "@PATH in a text attaches a file or a picture.  Ctrl-X Ctrl-E opens $EDITOR.",
    "Ctrl-C stops an answer, keeping its text; at the prompt it clears the line.",
    "Ctrl-Z suspends the chat.  Ctrl-D, exit, or Ctrl-C three times leave it.",
)
"""Lines of /help after the commands; a terminal of 80 columns wraps none of them."""


def commands(*more: Command) -> CommandTable:
    """Return the table of all commands, with `more` before /help."""

    def show_help(chat: Chat, argument: str) -> None:
        if argument not in ("", "all"):
            raise OptionError(
                f"/help {argument}: /help shows the common commands, /help all every command"
            )
        for line in (*table.help(is_whole=argument == "all"), *HELP):
            chat.say(line)

    def leave(chat: Chat, argument: str) -> None:
        raise EOFError

    table = CommandTable(
        (
            *COMMANDS,
            *more,
            Command(
                "/help",
                "[all]",
                "show common commands; all: every command (also /?)",
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

"""The chat: read a text, do the command or print the answer, again. Everything that is not a command is sent."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from traceback import clear_frames
from typing import Any, NoReturn, Protocol

from mlxrunner.chat.ahead import Ahead, Draft
from mlxrunner.chat.branches import Branches
from mlxrunner.chat.commands import Table, is_open, quoted, unquoted
from mlxrunner.chat.conversation import Conversation
from mlxrunner.chat.files import Attachments
from mlxrunner.chat.keyboard import Keyboard
from mlxrunner.chat.keys import Interrupts, interruptible, orderly_end, uninterrupted, wait_readable
from mlxrunner.chat.log import held_log
from mlxrunner.chat.render import Plain, ThinkingApart, View, wrapped
from mlxrunner.errors import ContextLengthError, MlxrunnerError, ModelError, PromptError
from mlxrunner.power import on_battery
from mlxrunner.reserve import must_fit
from mlxrunner.runner import Runner, plan_model
from mlxrunner.terminal import Output, PrefillBar

logger = logging.getLogger("mlxrunner")

INTERRUPTED = 130
PIECE = 2**16
"""Bytes of standard input that are read at once."""
PLANNED = ("context", "prefill_step", "kv_bits", "rewind_slack", "checkpoint_budget")


class Reader(Protocol):
    def read(self, idle: Callable[[Draft], None], default: str = "") -> str:
        """The next text; EOFError at the end, KeyboardInterrupt where it was given up. See `Editor.read`."""
        ...


class Lines:
    """A line of standard input is a text, or the lines between quotes are; what begins with `default` can't be edited there."""

    def __init__(self) -> None:
        self._unread = b""

    def read(self, idle: Callable[[Draft], None], default: str = "") -> str:
        text = self._line()
        if not text:
            raise EOFError
        while is_open(text) and (line := self._line()):
            text += line
        return text.rstrip("\n")

    def _line(self) -> str:
        """The next line, with its end; "" behind the last one. Ctrl-C ends the wait for it, whenever it comes."""
        try:
            descriptor = sys.stdin.fileno()
        except (
            OSError,
            ValueError,
        ):  # of no descriptor, as a program may have put one in the place of standard input
            return sys.stdin.readline()
        while b"\n" not in self._unread:
            wait_readable(descriptor)
            piece = os.read(descriptor, PIECE)
            if not piece:
                break
            self._unread += piece
        line, end, self._unread = self._unread.partition(b"\n")
        text = (line + end).decode(sys.stdin.encoding or "utf-8", sys.stdin.errors or "strict")
        return text.replace("\r\n", "\n")


class NoRunner:
    """In the place of a runner that was given up for another one. Whoever needs it gets a ModelError of one line.

    `why`: it could not be loaded again; None as long as that was not tried.
    """

    def __init__(self, why: str | None = None) -> None:
        self.why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise ModelError(
            f"no model is loaded{f' ({self.why})' if self.why else ''}: /model NAME loads one"
        )


@dataclass
class Chat:
    """What the commands work on. `loading`: the options of `Runner.load`; `view()`: where an answer goes.

    `after_turn` are called when an answer has been remembered, also one that was interrupted or failed, before the next text is read;
    `after_load` when another runner was loaded than the first, `after_command` when a command has been done.
    """

    conversation: Conversation
    reader: Reader = field(default_factory=Lines)
    view: Callable[[], View] = Plain
    model: str = ""
    loading: dict[str, Any] = field(default_factory=dict)
    interactive: bool = False
    type_ahead: bool = True
    show_thinking: bool = True
    branches: Branches = field(default_factory=Branches)
    attachments: Attachments = field(default_factory=Attachments)
    after_turn: list[Callable[[Chat], None]] = field(default_factory=list)
    after_load: list[Callable[[Chat], None]] = field(default_factory=list)
    after_command: list[Callable[[Chat], None]] = field(default_factory=list)
    interrupts: Interrupts = field(default_factory=Interrupts)
    keyboard: Keyboard = field(default_factory=Keyboard)

    def __post_init__(self) -> None:
        self._known_runner = self.conversation.runner  # that `after_load` need not be told of
        self._table = Table(())

    @property
    def runner(self) -> Runner:
        return self.conversation.runner

    def run(self, table: Table) -> int:
        """Until the end of the input or /bye; returns the exit code: in a terminal 0, else that of the last error, 130 after Ctrl-C."""
        self._table = table
        with orderly_end(), self.keyboard, self.interrupts:
            return self._run()

    def _run(self) -> int:
        failed = 0
        while True:
            try:
                with self.interrupts.listening():
                    failed = self._try(self._complete_model) or failed
                    text = self._read()
                    failed = self._try(partial(self._do, text)) or failed
            except EOFError:
                return 0 if self.interactive else failed
            except KeyboardInterrupt:
                if not self.interactive:
                    return INTERRUPTED

    def _try(self, act: Callable[[], None]) -> int:
        """Do it; the exit code of the error that was said about it."""
        try:
            act()
        except MlxrunnerError as error:
            self.say(
                f"error: {error}{self._way_out(error) if isinstance(error, ContextLengthError) else ''}"
            )
            return error.exit_code
        except EOFError:
            raise
        except Exception as error:
            if not self.interactive:
                raise
            # Nobody should lose a conversation to a bug.
            logger.debug("internal error", exc_info=True)
            self.say(
                f"internal error: {type(error).__name__}: {' '.join(str(error).split())} (the conversation is still there)"
            )
        return 0

    def _way_out(self, error: ContextLengthError) -> str:
        """What else makes room, where something does."""
        if self.attachments.texts:
            return "; /file -d drops the files that wait"
        is_due_to_turns = (
            error.tokens - len(self.conversation.history.spelling.tokens) < error.context
        )
        return "; /undo takes turns back, /clear all of them" if is_due_to_turns else ""

    def _read(self, default: str = "", *, ahead: bool = True) -> str:
        """`ahead`: whether what comes next is what is sent, and may be evaluated."""
        work = Ahead(self._evaluate, types_ahead=lambda: self.type_ahead and not on_battery())
        with held_log(self.interactive):
            return self.reader.read(work if ahead else Draft.wait_until_over, default)

    def _evaluate(self, draft: str, cancelled: Callable[[], bool]) -> None:
        text = "" if self._table.parses(draft) else unquoted(draft)
        self.conversation.evaluate(self.attachments.before(text), cancelled)
        if not text and not cancelled():
            self.conversation.drift()  # so that /stats has it at once

    def _do(self, text: str) -> None:
        parsed = self._table.parse(text)
        if parsed is not None:
            command, argument = parsed
            command.run(self, argument)
            for act in self.after_command:
                act(self)
        else:
            text = text if is_open(text) else unquoted(text)
            if text.strip():
                self.send(text)

    def reload(self, name: str, **changes: Any) -> None:
        """Go on with another model, or the same one loaded otherwise. What is wrong with it is said while the present one is still there."""
        loading = self.loading | changes
        plan = {option: loading[option] for option in PLANNED if option in loading}
        found = plan_model(name, **plan)
        if loading.get("reserve", True):
            must_fit(found)
        # Two models at a time may be too much: the present one is given up first. An interrupt leaves it at that: see `_run`.
        self._known_runner = self.conversation.runner = NoRunner()  # type: ignore[assignment]
        try:
            runner = Runner.load(name, **loading)
        except Exception as error:
            clear_frames(error.__traceback__)  # which hold what was loaded so far
            self._try(self._complete_model)
            raise
        if name != self.model:
            for history in (
                self.conversation.history,
                *(history for _, history in self.branches.others.values()),
            ):
                history.forget_tokens()
        self.model, self.loading, self.conversation.runner = name, loading, runner
        self._complete_model()

    def _complete_model(self) -> None:
        """Bring what an interrupt or an error left of a change of models to its end: there is a model, and all who keep it know it."""
        runner = self.conversation.runner
        if isinstance(runner, NoRunner) and runner.why is None:
            self.say(f"{self.model} is loaded again: it had been given up for the other model")
            with uninterrupted():
                self.conversation.runner = self._loaded_again()
        if self.conversation.runner is not self._known_runner and not isinstance(
            self.conversation.runner, NoRunner
        ):
            with uninterrupted():
                for act in self.after_load:
                    act(self)
                self._known_runner = self.conversation.runner

    def _loaded_again(self) -> Runner:
        try:
            return Runner.load(self.model, **self.loading)
        except Exception as error:
            self.conversation.runner = NoRunner(" ".join(str(error).split()))  # type: ignore[assignment]
            raise

    def say(self, text: str) -> None:
        """Everything that is not an answer goes to stderr."""
        sys.stdout.flush()
        Output(sys.stderr).write((wrapped(text) if self.interactive else text) + "\n")

    def edit(self, text: str, *, ahead: bool = True) -> str | None:
        """`text` as the user changes it; None where that was given up, or nothing is changed. `ahead`: whether it is the next message."""
        if not self.interactive:
            raise PromptError("there is no line editor without a terminal")
        try:
            typed = self._read(quoted(text), ahead=ahead)
        except (EOFError, KeyboardInterrupt):
            return None
        return None if typed == quoted(text) or not typed.strip() else unquoted(typed)

    def send(self, text: str, answer: Callable[[str], None] | None = None) -> None:
        """A text of the user, with the files that wait and those that it names, which `answer` gets (default: the method)."""
        message = self.attachments.put_into(self, text)
        try:
            (answer or self.answer)(message)
        finally:
            turns = self.conversation.history.turns
            if turns and turns[-1].user == message:
                self.attachments.clear()

    def answer(self, text: str, **options: Any) -> None:
        """Send `text` as it is and print what comes; `options` over the conversation's own."""
        turns = len(self.conversation.history.turns)
        with (
            interruptible(self.interrupts.ignore) as interrupted, self.keyboard.answering(),
            held_log(self.interactive), ExitStack() as ending,
        ):  # fmt: skip
            bar = PrefillBar()

            def progress(done: int, total: int) -> None:
                if self.keyboard.asks_to_stop:
                    bar.pause()
                    self.keyboard.stop()
                bar(done, total)
                if interrupted():
                    raise KeyboardInterrupt

            chunks = self.conversation.send(text, progress, **options)
            view = ThinkingApart(
                self.view, self.conversation.asked.text, self.show_thinking, self.interactive
            )
            ending.callback(self._answered, turns)
            # From the last to the first, also where one of them fails: the window may be gone.
            ending.callback(view.close)
            ending.callback(chunks.close)  # type: ignore[attr-defined]  # a generator
            ending.callback(bar.close)
            with suppress(KeyboardInterrupt):
                for chunk in chunks:
                    if self.keyboard.asks_to_stop:
                        view.pause()
                        self.keyboard.stop()
                    view.write(chunk.text)
                    if interrupted():
                        break
        if interrupted():  # however late it came
            self.say("(interrupted)")
            raise KeyboardInterrupt

    def _answered(self, turns: int) -> None:
        if len(self.conversation.history.turns) > turns:
            for act in self.after_turn:
                act(self)

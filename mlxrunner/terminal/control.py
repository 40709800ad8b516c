"""Handle the keyboard, Ctrl-C and the signals that end a command; the user's editor and clipboard.

The user's own editor is `$VISUAL` or `$EDITOR`. After `kill`, or when its window is closed, a
command ends in order.
"""

from __future__ import annotations

import base64
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from mlxrunner.errors import MlxrunnerError, ReadError
from mlxrunner.system.reading import read_text
from mlxrunner.system.writing import written

MARK_PASTES, UNMARK_PASTES = b"\x1b[?2004h", b"\x1b[?2004l"
SHOW_CURSOR = b"\x1b[?25h"
MOST_TYPED = 2**16
"""Most bytes to read of the keys typed while the program starts."""
STOPPED_S = 1.0
"""Seconds to wait for the system to stop the program.

The system does not stop it if nobody could continue it.
"""
COOKED = bytes.maketrans(b"\n\0", b"\r\x04")
"""Translates Enter and Ctrl-D from what a line-editing terminal reads to the keys as typed."""


class Keyboard:
    """Keeps typed keys off the screen while it is entered, and saves them for the next line.

    The terminal marks pasted text, which is kept, too. On leaving, and while the program is
    stopped, the terminal is as it was before. Without a `terminal` nothing happens. It may be
    entered again within itself. Use it in the main thread.
    """

    def __init__(self, terminal: bool = False) -> None:
        self._terminal = terminal
        self._depth = self._cooked = 0
        self._earlier = b""
        self._holds = self._is_asked = self._is_lent = False
        self._continued = threading.Event()

    def __enter__(self) -> Keyboard:
        self._depth += 1
        if self._terminal and self._depth == 1:
            self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._terminal and self._depth == 0:
            signal.signal(signal.SIGTSTP, self._on_stop)
            signal.signal(signal.SIGCONT, self._on_continue)
            GIVES_BACK.remove(self._release)
            self._release()

    def typed_before(self) -> str:
        """Return the text typed while the program started, as keys for a line editor.

        The second call returns an empty text.
        """
        earlier, self._earlier = self._earlier, b""
        typed = earlier + (self._typed() if self._cooked or earlier else b"")
        return typed.decode(errors="surrogateescape")

    def ask(self, question: str) -> str:
        """Return the line that the user types after `question`, or "" at the end of the input.

        Keys that were typed before the question do not answer it: they wait for the next line.
        """
        self._earlier += self._typed()
        with self.lent():
            print(question, end="", file=sys.stderr, flush=True)
            return os.read(sys.stdin.fileno(), MOST_TYPED).decode(errors="replace").strip()

    def _typed(self) -> bytes:
        """Read the keys that wait, as a line editor gets them."""
        cooked, self._cooked = self._cooked, 0
        if not (waiting := _waiting()):
            return b""
        typed = os.read(sys.stdin.fileno(), min(waiting, MOST_TYPED))
        return typed[:cooked].translate(COOKED) + typed[cooked:]

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Lend the terminal to a line editor, which gives it back around `stop_group`."""
        if not self._terminal:
            yield
            return
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._is_lent = True
        try:
            yield
        finally:
            self._is_lent = False
            signal.signal(signal.SIGTSTP, before)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the terminal, as it was before, to another program that runs in it."""
        with self.editing():
            if self._terminal:
                self._release()
            try:
                yield
            finally:
                if self._terminal:
                    self._take()

    def stop_group(self) -> None:
        """Stop this program and those started with it, as a terminal does at Ctrl-Z.

        Use it from any thread while `editing`.
        """
        with suppress(OSError):
            os.write(sys.stdout.fileno(), UNMARK_PASTES)
        self._continued.clear()
        os.kill(0, signal.SIGTSTP)  # another thread may be the first to see it
        self._continued.wait(STOPPED_S)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Let Ctrl-Z only ask to stop: see `asks_to_stop`."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
            if self._is_asked:
                self.stop()

    @property
    def asks_to_stop(self) -> bool:
        """True once Ctrl-Z is pressed: clear what is drawn, and call `stop`."""
        return self._is_asked

    def stop(self) -> None:
        """Stop until somebody continues the program, with the terminal as it was before."""
        self._is_asked = False
        self._release()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(
            threading.get_ident(), signal.SIGTSTP
        )  # this thread, so that it does not run on before it stops
        signal.signal(signal.SIGTSTP, before)
        self._take()

    def _begin(self) -> None:
        import termios

        self._before = termios.tcgetattr(sys.stdin.fileno())
        self._quiet = termios.tcgetattr(sys.stdin.fileno())
        self._quiet[0] &= ~termios.ICRNL
        self._quiet[3] &= ~(termios.ECHO | termios.ICANON)
        GIVES_BACK.append(self._release)
        self._take()
        self._cooked = _waiting()
        self._on_stop = signal.signal(signal.SIGTSTP, self._asked)
        self._on_continue = signal.signal(signal.SIGCONT, self._on_continued)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True
        if not self._holds:
            self.stop()

    def _on_continued(self, number: int, frame: FrameType | None) -> None:
        self._continued.set()
        if not self._is_lent:
            self._take()

    def _take(self) -> None:
        """Take the terminal, but not from the background: the system stops a program that tries."""
        import termios

        with suppress(OSError, termios.error):
            if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._quiet)
                os.write(sys.stdout.fileno(), MARK_PASTES)

    def _release(self) -> None:
        import termios

        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._before)
        with suppress(OSError):
            os.write(sys.stdout.fileno(), UNMARK_PASTES + SHOW_CURSOR)


def is_terminal() -> bool:
    """Return True if standard input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _waiting() -> int:
    """Return the number of bytes that were typed and not read yet."""
    import fcntl
    import termios

    try:
        return int.from_bytes(
            fcntl.ioctl(sys.stdin.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder
        )
    except OSError:
        return 0


LONGEST_TEXT = 2**26
"""Most bytes of a text that comes back from an editor."""
USUAL = "vi"
"""The editor of a user who has set none."""


def edit_outside(text: str, keyboard: Keyboard) -> str:
    """Return `text` as the user leaves it in an editor of their own.

    The editor has the terminal meanwhile; Ctrl-C is a key of the editor. The text is in a folder
    that only the user can read, and that is removed afterwards. Use it in the main thread. Raise
    MlxrunnerError if the editor cannot be started or fails, and ReadError if what it leaves is not
    a text.
    """
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or USUAL
    with TemporaryDirectory(prefix="mlxrunner-") as folder:
        path = Path(folder) / "text.md"
        try:
            with written(path, sync=False) as stream:
                stream.write(f"{text}\n" if text else "")
            with keyboard.lent():
                code = _run([*shlex.split(command), str(path)])
        except (OSError, ValueError) as error:
            raise MlxrunnerError(
                f"the editor {command!r} can't be used ({error}): set EDITOR to another one"
            ) from error
        if code:
            raise MlxrunnerError(
                f"the editor {command!r} ended with code {code}: the text is unchanged"
            )
        edited = read_text(path, LONGEST_TEXT)
    if "\0" in edited:
        raise ReadError("the edited file is not a text: it has a byte 0")
    return edited.removesuffix("\n")


def _run(command: list[str]) -> int:
    """Run `command` in the terminal, and return its exit code. Ctrl-C is for the command only."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return subprocess.call(command)
    finally:
        signal.signal(signal.SIGINT, before)


def copy(text: str) -> str:
    """Copy `text` to the clipboard, and return the means, such as "with pbcopy".

    Raise MlxrunnerError if nothing can do it.
    """
    for command in _programs():
        try:
            subprocess.run(
                command,
                input=text.encode(errors="replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=5,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return f"with {command[0]}"
    if not sys.stdout.isatty():
        raise MlxrunnerError(
            "there is no clipboard: neither pbcopy, wl-copy nor xclip works, "
            "and stdout is not a terminal"
        )
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(text.encode(errors='replace')).decode()}\a")
    sys.stdout.flush()
    return "through the terminal (OSC 52), if it allows that"


def _programs() -> Iterator[list[str]]:
    """Yield the command lines of the installed programs that have a screen of this machine.

    Over SSH only the terminal reaches the right clipboard.
    """
    if os.environ.get("SSH_TTY"):
        return
    if shutil.which("pbcopy"):
        yield ["pbcopy"]
    if os.environ.get("WAYLAND_DISPLAY") and shutil.which("wl-copy"):
        yield ["wl-copy"]
    if os.environ.get("DISPLAY") and shutil.which("xclip"):
        yield ["xclip", "-selection", "clipboard"]


AGAIN_S = 0.02
"""Seconds after which an exit that was dropped comes again."""
ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command in order."""


class Interrupts:
    """Handles Ctrl-C while it is entered, as the innermost `listening` or `asking` says.

    A press outside of these blocks waits for the next one. Nothing changes if the parent ignores
    Ctrl-C, as a shell does for background jobs, or outside the main thread.
    """

    def __init__(self, *others: signal.Signals) -> None:
        """Handle the signals `others` like Ctrl-C, but raise SystemExit for them.

        The exit code is 128 + the signal's number. `others` may hold some of `ENDS`.
        """
        self._act: Callable[[], None] = self._wait
        self._waits = False
        self._numbers, self._last = (signal.SIGINT, *others), int(signal.SIGINT)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in self._numbers if is_main_thread() else ():
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._heard)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._heard:
                signal.signal(number, before)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at the first press, or at once if a press waits.

        Later presses do nothing until the next block, so that nothing interrupts the handling of
        the first.
        """
        self._act = self._raise
        try:
            if self._waits:
                self._raise()
            yield
        finally:
            if self._act == self._raise:
                self._act = self._wait

    @contextmanager
    def asking(
        self, first: Callable[[], None] = lambda: None, *, is_settled_when_seen: bool = True
    ) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns True once Ctrl-C was pressed.

        A second press raises KeyboardInterrupt (SystemExit for another signal); later ones do
        nothing. The handler calls `first` at the first press. If `is_settled_when_seen` is true,
        the second press does nothing once the function has returned True, because the caller is
        ending.
        """
        asked, outer = False, self._act

        def ask() -> None:
            nonlocal asked
            asked, self._act = True, self._raise
            first()

        def is_asked() -> bool:
            if asked and is_settled_when_seen:
                self._act = _ignore
            return asked

        self._act = ask
        try:
            if self._waits:
                self._waits = False
                ask()
            yield is_asked
        finally:
            self._act = _ignore if asked else outer

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._last = number
        self._act()

    def _wait(self) -> None:
        self._waits = True

    def _raise(self) -> None:
        self._act, self._waits = _ignore, False
        if self._last != signal.SIGINT:
            raise SystemExit(128 + self._last)
        raise KeyboardInterrupt


def _ignore() -> None:
    """Do nothing, because an interrupt is being handled."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends. Use it in the main thread."""
    pressed = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


HELD_UP_S = 0.3
"""Seconds in which the main thread handles a signal unless a long step of MLX holds it up."""
GIVES_BACK: list[Callable[[], None]] = []
"""Functions that give the terminal back, if the process has to leave from another thread."""


@contextmanager
def heard_at_once(act: Callable[[int], None], patience_s: float = HELD_UP_S) -> Iterator[None]:
    """Call `act` with the number of a signal that ends the command, although its handler waits.

    Python runs handlers between two instructions of the main thread, so a long step of MLX holds
    them up. `act` runs in another thread, unless the block ends within `patience_s` seconds after
    the signal; without patience, always. Outside the main thread nothing is heard.
    """
    if not is_main_thread():
        yield
        return
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    ended = threading.Event()

    def listen() -> None:
        while number := os.read(woken, 1):
            if number[0] in (signal.SIGINT, *ENDS) and not (patience_s and ended.wait(patience_s)):
                act(number[0])

    thread = threading.Thread(target=listen, daemon=True, name="signals")
    thread.start()
    before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(waker)
        thread.join()
        os.close(woken)


def leave_at_once(number: int) -> None:
    """Give the terminal back and end the process, from any thread, without further cleaning up."""
    for give_back in GIVES_BACK:
        give_back()
    os._exit(128 + number)


def say_now(text: str) -> None:
    """Write a line to stderr from a signal handler, which may interrupt a `print`."""
    if sys.stderr is not None:  # otherwise 2 may be any file
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())


def is_main_thread() -> bool:
    """Return True in the main thread, the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()


def wait_readable(descriptor: int) -> None:
    """Wait until `descriptor` can be read, and run signal handlers at once.

    A plain read cannot promise this: Python notes a signal that comes shortly before the read, and
    runs its handler only after it. Use it in the main thread.
    """
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    before = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    try:
        while descriptor not in select.select([descriptor, woken], [], [])[0]:
            os.read(woken, 100)
    finally:
        signal.set_wakeup_fd(before)
        os.close(woken)
        os.close(waker)


@contextmanager
def orderly_end() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into a SystemExit with code 128 + the signal's number.

    So the command can clean up after `kill`, or when its window is closed. Later signals do
    nothing. A signal that the parent ignores, as nohup does, stays ignored.
    """
    handlers = {number: signal.getsignal(number) for number in ENDS}
    _Leaving.is_over = False
    for number in ENDS:
        if handlers[number] is not signal.SIG_IGN:
            signal.signal(number, _leave)
    try:
        yield
    finally:
        _Leaving.is_over = True
        for number in ENDS:
            if signal.getsignal(number) is _leave:
                signal.signal(number, handlers[number])


class _Leaving(SystemExit):
    """An exit that comes again if it is dropped before `orderly_end` has seen it.

    C++ code that converts a numpy array to an array of MLX drops what a signal's handler raises
    meanwhile, and tries another way to convert it.
    """

    is_over = True

    def __del__(self) -> None:
        if not _Leaving.is_over:
            code = self.code
            signal.signal(signal.SIGALRM, lambda *_: _leave_with(code))
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)


def _leave_with(code: Any) -> None:
    if not _Leaving.is_over:
        raise _Leaving(code)


def _leave(number: int, frame: FrameType | None) -> None:
    for one in ENDS:
        signal.signal(one, _do_nothing)
    _leave_with(128 + number)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, this can handle a signal that came at the same moment."""

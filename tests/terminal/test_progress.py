"""Long work shows its progress on stderr, in a terminal as a bar that goes away."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from support.waiting import PATIENCE_S

from mlxrunner.terminal import output
from mlxrunner.terminal.control import uninterrupted
from mlxrunner.terminal.output import PrefillBar, Progress, Steps, loading, log_to_stderr, reading


class Screen(io.StringIO):
    """A terminal that remembers what it was sent."""

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        """Return what was shown, without the escapes."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())

    def until(self, shown: str) -> None:
        """Wait until it has shown this."""
        end = time.monotonic() + PATIENCE_S
        while shown not in self.text:
            assert time.monotonic() < end, self.text
            time.sleep(0.01)


def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal in the place of stderr, until the test ends."""
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    return screen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("mlxrunner.terminal.output.time.monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_comes_every_few_seconds(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    """Not for each update; a text that is not shown is not made; hostile text is shown."""
    made: list[int] = []

    def words(number: int) -> Callable[[], str]:
        return lambda: made.append(number) or f"\x1b{number}"  # type: ignore[func-returns-value]

    shown = Progress(line_every_s=5.0)
    for number in range(13):
        shown.update(words(number), number, 13)
        clock[0] += 1
    shown.say("\x1b[2J")
    shown.close()
    out, err = capsys.readouterr()
    assert (out, err) == ("", "\\x1b5\n\\x1b10\n\\x1b[2J\n")
    assert made == [5, 10]


@pytest.mark.parametrize("has_stderr", [True, False], ids=["quiet", "no stderr"])
def test_quiet_is_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_stderr: bool
) -> None:
    """A process without stderr is quiet, too."""
    if not has_stderr:
        monkeypatch.setattr("sys.stderr", None)
    shown = Progress(has_bar=True, line_every_s=0.0, is_quiet=has_stderr)
    shown.update("x")
    shown.say("x")
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_the_bar_and_what_is_said_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are not taken for markup; nothing of the bar stays, and stdout is left alone."""
    screen = terminal(monkeypatch)
    shown = Progress()
    shown.say("[bold]before[/bold] \x1b")
    shown.update("half \x1b[31mred[bold]", 1, 2)
    shown.say("[bold]x[/bold] \x1b")
    screen.until("half \\x1b[31mred[bold]")
    shown.close()
    assert "[bold]before[/bold] \\x1b\n" in screen.text
    assert "[bold]x[/bold] \\x1b\n" in screen.text
    assert "\x1b[31mred" not in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


def test_a_bar_can_go_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `pause`, and after `close`, the next update shows it again."""
    screen = terminal(monkeypatch)
    shown = Progress()
    for end in (shown.pause, shown.close):
        shown.update(f"before {end.__name__}", 1)
        screen.until(f"before {end.__name__}")
        end()
        gone = len(screen.getvalue())
        shown.say("alone")
        assert screen.getvalue()[gone:] == "alone\n"
    shown.close()


def test_a_patient_bar_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short work shows nothing; long work shows what it said last, though nothing more is said."""
    screen = terminal(monkeypatch)
    monkeypatch.setattr(output, "PATIENCE_S", 3600.0)
    with loading("short"):
        pass
    bar = PrefillBar()
    bar(0, 10)
    bar(10, 10)
    assert screen.getvalue() == ""
    monkeypatch.setattr(output, "PATIENCE_S", 0.01)
    with loading("\x1b"):
        screen.until("loading \\x1b")
    bar = PrefillBar()
    bar(30, 120)
    bar(40, 120)
    screen.until("evaluating the prompt (25% was cached): 40/120 tokens, ")
    bar(120, 120)
    assert screen.getvalue().endswith("\x1b[2K")


def test_a_step_is_a_line_or_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the name of the command, and in a terminal with the time."""
    screen = terminal(monkeypatch)
    steps = Steps("verify", 2)
    steps("append")
    screen.until("verify: append (0.")
    steps.close()
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    steps = Steps("verify", 2)
    for name in ("loading", "append"):
        steps(name)
    assert file.getvalue() == "verify: loading\nverify: append\n"
    assert capsys.readouterr().out == ""


def test_reading_is_counted_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report may continue for minutes."""
    screen = terminal(monkeypatch)
    with reading("events") as count:
        screen.until("reading events")
        count(12_345)
        screen.until("reading events: 12,345")
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    with reading("events") as count:
        count(1)
    assert file.getvalue() == ""


def test_a_log_line_comes_above_the_bar(
    monkeypatch: pytest.MonkeyPatch, quiet_logger: logging.Logger
) -> None:
    """The bar is drawn again below it; the handler was made before the bar."""
    screen = terminal(monkeypatch)
    log_to_stderr(logging.INFO)
    bar = Progress()
    bar.update("working")
    screen.until("working")
    drawn = bar._live
    assert drawn is not None
    with drawn._lock:  # the bar is not drawn meanwhile
        before = len(screen.getvalue())
        quiet_logger.info("a line with \x1b[2J in it")
        after = screen.getvalue()[before:]
    bar.close()
    line, bar_again = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", after).strip("\r\n").split("\n", 1)
    assert line.strip() == r"a line with \x1b[2J in it"
    assert "working" in bar_again
    quiet_logger.info("the last one")
    assert screen.getvalue().endswith("the last one\n")


def test_a_bar_says_at_once_that_ctrl_c_waits_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a bar of new work after that."""
    screen = terminal(monkeypatch)
    bar = Progress()
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        bar.update("a long step")
        os.kill(os.getpid(), signal.SIGINT)
        screen.until("stopping after this step: a long step")
        bar.close()
    bar.update("more")
    screen.until(" more")
    bar.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_program_that_loads_a_model_leaves_at_once(number: signal.Signals) -> None:
    """The main thread is in a step that runs no handler; the terminal is given back."""
    code = (
        "import os, time\n"
        "from mlxrunner.terminal import control, output\n"
        "control.GIVES_BACK.append(lambda: print('given back', flush=True))\n"
        "with control.orderly_end(), control.uninterrupted():\n"
        "    with output.loading('demo', leaves=True):\n"
        f"        os.kill(os.getpid(), {number:d})\n"
        "        while True:\n"
        "            try: time.sleep(60)\n"
        "            except SystemExit: pass\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (128 + number, b"given back\n")


@pytest.fixture
def quiet_logger() -> Iterator[logging.Logger]:
    """The logger of the package, as it was before, when the test ends."""
    logger = logging.getLogger("mlxrunner")
    before = logger.handlers, logger.level
    yield logger
    logger.handlers, _ = before
    logger.setLevel(before[1])

"""A chat that ends by a full disk, a closed window or a kill keeps what was said."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pexpect
import pytest
from support.chats import Talk, content
from support.checks import raising
from support.models import write_model
from support.saving import pieces
from support.waiting import PATIENCE_S, until

from mlxrunner.sessions.store import SessionStore


def test_a_damaged_cache_file_costs_a_cold_turn(talk: Talk, data: Path) -> None:
    """One line says so; the conversation continues, and is whole again afterwards."""
    talk(["My name is Zorblin."], "--session", "zor")
    file = pieces(data / "sessions" / "zor", "talk-")[0]
    file.write_bytes(file.read_bytes()[:-100])
    again = talk(["What is my name?"], "--session", "zor")
    assert again.stdout == "Your name is Zorblin.\n"
    assert again.stderr.startswith(
        "session zor: 1 turn, its caches are dropped, its text is kept: talk-"
    )
    assert again.stderr.count("\n") == 1
    assert "62 tokens restored" in talk([], "--session", "zor").stderr


def test_a_full_disk_is_said_and_the_chat_goes_on(
    talk: Talk, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is one line after each turn and an exit code; the text can be exported."""
    no_room = raising(OSError(28, "No space left on device"))
    monkeypatch.setattr("mlxrunner.sessions.store.write_all", no_room)
    result = talk(["My name is Zorblin.", "What is my name?"], "--session", "zor")
    assert result.stdout == "Nice to meet you.\nYour name is Zorblin.\n"
    full = "error: the session 'zor' could not be saved: No space left on device; "
    assert f"{full}on the disk: none of 1 turn\n" in result.stderr
    assert f"{full}on the disk: none of 2 turns\n" in result.stderr
    assert result.exit_code == 2
    assert SessionStore().names() == []


class Disk:
    """A disk of `size` bytes, as far as sessions write to it."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size

    def write_all(self, fd: int, data: bytes | memoryview) -> None:
        used = sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
        os.write(fd, data[: max(self._size - used, 0)])
        if used + len(data) > self._size:
            raise OSError(28, "No space left on device")


@pytest.fixture
def disk(data: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`disk(SIZE)` makes a disk of SIZE bytes, from now on."""

    def limit(size: int) -> None:
        for module in ("sessions.store", "system.tensorfile"):
            monkeypatch.setattr(f"mlxrunner.{module}.write_all", Disk(data, size).write_all)

    return limit


SAFE = re.compile(
    r"(?:error|mlxrunner): the (caches of the )?session 'zor' could not be saved: "
    r"No space left on device; on the disk: (.*)"
)


@pytest.mark.parametrize("size", [500, 1500, 3000, 9000, 300_000, 500_000, 700_000])
def test_a_full_disk_says_which_turns_are_safe(
    talk: Talk, data: Path, disk: Callable[[int], None], size: int
) -> None:
    """They are safe: the text goes before the caches, of which there need not be any."""
    disk(size)
    result = talk([f"My name is Zorblin {number}." for number in range(7)], "--session", "zor")
    said = [found for line in result.stderr.splitlines() if (found := SAFE.match(line))]
    kept = (
        content(data, "zor")["branches"]["main"]["history"]["turns"]
        if "zor" in SessionStore().names()
        else []
    )
    assert said
    which = {0: "none of 7 turns", 7: "all of 7 turns"}.get(
        len(kept), f"the first {len(kept)} of 7 turns"
    )
    assert said[-1][2] == which
    assert (len(kept) == 7) == (size >= 9000)
    assert "its text was" not in result.stderr
    assert not kept or len(SessionStore().load("zor").history.turns) == len(kept)


def test_caches_give_way_to_the_text(talk: Talk, data: Path, disk: Callable[[int], None]) -> None:
    """Those that lie on a disk which is full by now."""
    talk(["My name is Zorblin."], "--session", "zor")
    disk(sum(file.stat().st_size for file in (data / "sessions" / "zor").iterdir()) + 100)
    result = talk(["What is my name?"], "--session", "zor")
    assert result.stdout == "Your name is Zorblin.\n"
    assert (
        "the caches of the session 'zor' could not be saved: No space left on device; on the disk: "
        "all of 2 turns" in result.stderr
    )
    assert len(content(data, "zor")["branches"]["main"]["history"]["turns"]) == 2


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize("end", ["SIGHUP", "SIGTERM", "closed"])
def test_a_window_that_is_closed_in_mid_answer_costs_nothing(
    open_screen: Any, tmp_path: Path, data: Path, end: str
) -> None:
    """The question and the shown part of the answer are saved; a second signal does no harm."""
    write_model(tmp_path / "model", vocab_size=300)
    chat = ("-m", "mlxrunner", "chat", "--no-reserve", "--plain", "--session", "hup")
    screen = open_screen(*chat, "-m", str(tmp_path / "model"), "--max-tokens", "4000")
    screen.prompt()
    before = len(screen.everything)
    screen.child.send("An important question.\r")
    screen.until(lambda: len(screen.everything) > before + 12)
    close(screen, end)
    (turn,) = content(data, "hup")["branches"]["main"]["history"]["turns"]
    assert turn["user"] == "An important question."
    assert len(turn["answer"]) > 50


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize("end", ["SIGHUP", "SIGTERM", "closed"])
def test_a_window_that_is_closed_at_the_prompt_costs_nothing(
    open_screen: Any, data: Path, end: str
) -> None:
    """Changes since the last turn are saved."""
    screen = open_screen("-m", "mlxrunner", "chat", "--no-reserve", "--session", "hup")
    screen.prompt()
    screen.say("My name is Ana.")
    screen.child.send("/edit 2\r")
    screen.until(">>> Nice to meet you.")
    screen.child.send(" A LONG EDIT.\r")
    screen.until("is changed").prompt()
    close(screen, end)
    (turn,) = content(data, "hup")["branches"]["main"]["history"]["turns"]
    assert turn["answer"] == "Nice to meet you. A LONG EDIT."


@pytest.mark.exhaustive(0)
def test_a_chat_in_a_pipe_that_is_killed_costs_nothing(data: Path) -> None:
    """By `kill`; nohup protects it from a window that is closed."""
    nohup = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    arguments = [sys.executable, "-m", "mlxrunner", "chat", "--no-reserve", "--session", "hup"]
    with subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=nohup,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdin.write("My name is Ana.\n/undo\n")
        child.stdin.flush()
        assert any(line.startswith("1 turn removed") for line in child.stderr)
        child.send_signal(signal.SIGHUP)
        child.stdin.write("My name is Zorblin.\n/undo\n")
        child.stdin.flush()
        assert any(line.startswith("1 turn removed") for line in child.stderr)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert content(data, "hup")["branches"]["main"]["history"]["turns"] == []


def close(screen: Any, end: str) -> None:
    """Close the window, or send a signal and a second one; until the program has ended."""
    if end == "closed":
        screen.child.ptyproc.fileobj.close()
        screen.child.ptyproc.closed = True
    else:
        os.kill(screen.child.pid, getattr(signal, end))
        os.kill(screen.child.pid, signal.SIGTERM)
        screen.child.expect(pexpect.EOF)
    until(lambda: not screen.child.isalive())

"""Files of others: regular ones of a bounded size, anything else is one line."""

from __future__ import annotations

import io
import os
import pty
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE_S

from mlxrunner import cli
from mlxrunner.errors import MissingFileError, ReadError
from mlxrunner.system.reading import (
    is_there,
    open_file,
    open_given,
    read_bytes,
    read_json,
    read_text,
)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    """The limit itself is allowed; one byte more names both sizes."""
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_bytes(file, 5) == b"12345"
    with pytest.raises(ReadError, match=r"file: 5 bytes or more, and at most 4 are read here"):
        read_bytes(file, 4)


def test_the_file_that_was_opened_is_told_with_its_size(tmp_path: Path) -> None:
    """The descriptor belongs to the caller."""
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    descriptor, size = open_file(file)
    assert (os.read(descriptor, 9), size) == (b"12345", 5)
    os.close(descriptor)


def test_a_file_that_says_it_is_empty_is_bounded_all_the_same() -> None:
    """Files in /proc say that."""
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux has /proc")
    assert b"Name:" in read_bytes("/proc/self/status", 2**20)
    with pytest.raises(ReadError, match="at most 10 are read"):
        read_bytes("/proc/self/status", 10)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_fifo, "x: is a FIFO, not a regular file: copy"),
        (_socket, "x: is a socket, not"),
        (Path.mkdir, "x: is a directory, not a regular file: name a file in it"),
        (_link_to_itself, "x: can't be read: Too many"),
        (_link_to_fifo, "x: is a FIFO, not"),
    ],
)
def test_what_is_not_a_file_is_refused_at_once(
    make: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for the other end of a pipe, and links change nothing about that."""
    monkeypatch.chdir(tmp_path)  # a socket's name may have 100 characters
    make(Path("x"))
    with pytest.raises(ReadError, match=message):
        read_bytes("x", 100)


def test_a_device_is_not_even_opened(tmp_path: Path) -> None:
    """A copy of /dev/zero, which never ends."""
    try:
        os.mknod(tmp_path / "zero", 0o20666, os.makedev(1, 5))
    except OSError as error:
        pytest.skip(f"makes a device, which this user may not: {error}")
    with pytest.raises(ReadError, match="zero: is a device, not a regular file"):
        read_bytes(tmp_path / "zero", 100)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\0b", "not a file name"),
        ("x" * 5000, "can't be read"),
        ("\ud83d", "not a file name"),
        ("", "no such file"),
    ],
    ids=["NUL", "long", "half a character", "empty"],
)
def test_what_no_file_system_takes_is_one_line(name: str, message: str) -> None:
    """A name from a file or a command line can be anything."""
    with pytest.raises(ReadError, match=message):
        read_bytes(name, 100)


def test_a_missing_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    """A caller may continue without it; but a link to nothing says where it points to."""
    with pytest.raises(MissingFileError, match=r"none: no such file"):
        read_bytes(tmp_path / "none", 100)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(MissingFileError, match=r"link: a link to nowhere, which is missing"):
        read_bytes(tmp_path / "link", 100)
    assert is_there(tmp_path / "link")
    assert not is_there(tmp_path / "none")
    assert not is_there("a\0b")


def test_a_text_is_utf8(tmp_path: Path) -> None:
    """With or without a byte order mark; else the first wrong byte is named."""
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9")
    assert read_text(file, 100) == "café"
    file.write_bytes(b"abc\xff")
    with pytest.raises(ReadError, match=r"text: can't be read: not UTF-8 \(byte 3\)"):
        read_text(file, 100)


def test_a_file_is_found_in_an_open_directory(tmp_path: Path) -> None:
    """It is found in no other one."""
    (tmp_path / "file").write_text("here")
    folder = os.open(tmp_path, os.O_RDONLY)
    assert read_text("file", 100, dir_fd=folder) == "here"
    with pytest.raises(MissingFileError):
        read_text("other", 100, dir_fd=folder)
    os.close(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not readable as JSON"),
        (b"\xff", "not readable as JSON"),
        (b"[" * 100_000, "not readable as JSON"),
        (b"[" * 101 + b"]" * 101, "nested more than 100 times"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' is there twice, as 1 and as 2: keep one"),
        (b"9" * 5000, "not readable as JSON"),
    ],
    ids=["cut off", "no UTF-8", "endless", "deep", "two values", "digits"],
)
def test_what_is_no_json_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    """With the name of the file."""
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(ReadError, match=message) as error:
        read_json(file, 2**20)
    assert str(error.value).startswith(f"{file}: not readable as JSON: ")
    assert "\n" not in str(error.value)


def test_json_may_say_a_thing_twice_if_it_is_the_same(tmp_path: Path) -> None:
    """Some published files do."""
    file = tmp_path / "x.json"
    file.write_text('{"a": [1, {"b": null}], "a": [1, {"b": null}]}')
    assert read_json(file, 100) == {"a": [1, {"b": None}]}


def run(command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A line for a shell that knows `<(command)`; `mlxrunner` is the program."""
    whole = f'mlxrunner() {{ "{sys.executable}" -m mlxrunner "$@"; }}; {command}'
    return subprocess.run(
        ["bash", "-c", whole],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **options,
    )


def test_what_a_shell_hands_over_is_read(tmp_path: Path) -> None:
    """A pipe that is open already, and standard input; a regular file after one is opened again."""
    (read, write) = os.pipe()
    os.write(write, b'{"a": 1}')
    os.close(write)
    with pytest.raises(ReadError, match="is a FIFO"):
        read_json(f"/dev/fd/{read}", 100)
    assert read_json(f"/dev/fd/{read}", 100, given=True) == {"a": 1}
    os.close(read)
    with pytest.raises(ReadError, match=f"/dev/fd/{read}: "):
        open_given(f"/dev/fd/{read}")
    (tmp_path / "file").write_text("here")
    with (tmp_path / "file").open("rb") as file:
        assert file.read(2) == b"he"
        assert read_text(f"/dev/fd/{file.fileno()}", 4, given=True) == "here"
        with pytest.raises(ReadError, match="at most 3 are read"):
            read_text(f"/dev/fd/{file.fileno()}", 3, given=True)


def test_a_pipe_that_sends_too_much_is_bounded() -> None:
    """It is not read to its end."""
    read, write = os.pipe()
    os.write(write, bytes(5000))
    with pytest.raises(ReadError, match="at most 100 are read here"):
        read_bytes(f"/dev/fd/{read}", 100, given=True)
    os.close(write)
    os.close(read)


@pytest.mark.parametrize("kind", [_fifo, _socket, _link_to_fifo])
def test_a_named_pipe_is_refused_where_a_shell_did_not_open_it(
    kind: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may ever write to it."""
    monkeypatch.chdir(tmp_path)
    kind(Path("x"))
    with pytest.raises(ReadError, match=r"x: is a .*, not a regular file"):
        open_given("x")


FORM = '{"enum": ["yes"]}'


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize(
    ("command", "output"),
    [
        (f"mlxrunner generate -p Hi --schema <(echo '{FORM}')", '"yes"\n'),
        (f"echo '{FORM}' | mlxrunner generate -p Hi --schema /dev/stdin", '"yes"\n'),
        ('mlxrunner batch <(echo \'{"prompt": "Hi", "max_tokens": 1}\') -o - | wc -l', "1\n"),
        (
            'echo \'{"prompt": "Hi", "max_tokens": 1}\' | mlxrunner batch /dev/stdin -o - | wc -l',
            "1\n",
        ),
    ],
    ids=["schema <()", "schema stdin", "batch <()", "batch stdin"],
)
def test_the_command_line_takes_what_a_shell_hands_over(command: str, output: str) -> None:
    """`<(command)` and /dev/stdin in the place of a file."""
    assert run(command).stdout == output


def test_a_report_takes_what_a_shell_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe and a file on standard input keep all bytes after the first look at them."""
    events = tmp_path / "events"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert (
        cli.main.main(
            ["generate", "-p", "Hi", "--max-tokens", "1", "--events", str(events)],
            standalone_mode=False,
        )
        is None
    )
    for command in (
        f"report --json <(cat {events})",
        f"report --json /dev/stdin < {events}",
        f"explain <(cat {events}) --last",
    ):
        found = run(f"mlxrunner {command}")
        assert found.returncode == 0, found.stderr
        assert '"requests": 1' in found.stdout or "generate, demo" in found.stdout


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("command", ["batch - -o -", "report /dev/stdin"])
def test_who_waits_says_for_what(command: str, tmp_path: Path) -> None:
    """On a terminal, once, where a stream has sent nothing yet."""
    outer, inner = pty.openpty()
    read, write = os.pipe()
    program = subprocess.Popen(
        [sys.executable, "-m", "mlxrunner", *command.split()],
        stdin=read,
        stdout=subprocess.DEVNULL,
        stderr=inner,
    )
    os.close(read)
    os.close(inner)
    said = b""
    while b"which has sent nothing yet" not in said:
        assert program.poll() is None, said
        if select.select([outer], [], [], 0.1)[0]:
            said += os.read(outer, 1000)
    os.close(write)
    program.wait(PATIENCE_S)
    os.close(outer)
    assert b"waiting for" in said

"""Files of others: regular ones of a bounded size, anything else is one line."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrunner.reading import MissingFileError, ReadError, is_there, open_file, read_bytes, read_given_text, read_json, read_text


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
    """As those in /proc do."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
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


@pytest.mark.skipif(not hasattr(os, "mknod") or os.geteuid() != 0, reason="needs root to make a device node")
def test_a_device_is_not_even_opened(tmp_path: Path) -> None:
    """A copy of /dev/zero, which never ends."""
    try:
        os.mknod(tmp_path / "zero", 0o20666, os.makedev(1, 5))
    except OSError as error:
        pytest.skip(f"no device nodes here: {error}")
    with pytest.raises(ReadError, match="zero: is a device, not a regular file"):
        read_bytes(tmp_path / "zero", 100)


@pytest.mark.parametrize(
    ("name", "message"),
    [("a\0b", "not a file name"), ("x" * 5000, "can't be read"), ("\ud83d", "not a file name"), ("", "no such file")],
    ids=["NUL", "long", "half a character", "empty"],
)
def test_what_no_file_system_takes_is_one_line(name: str, message: str) -> None:
    """A name from a file or a command line can be anything."""
    with pytest.raises(ReadError, match=message):
        read_bytes(name, 100)


def test_a_missing_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    """A caller may go on without it; but a link to nothing says where it points to."""
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
    """And in no other one."""
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
    """As some published files do."""
    file = tmp_path / "x.json"
    file.write_text('{"a": [1, {"b": null}], "a": [1, {"b": null}]}')
    assert read_json(file, 100) == {"a": [1, {"b": None}]}


def test_a_given_stream_is_read_to_its_end_within_the_limit(tmp_path: Path) -> None:
    """What the user gave the program as `<(command)`; a FIFO with a name, a folder and an endless device stay refused."""
    for content, limit in (("given", 5), ("more than that", 5)):
        reader, writer = os.pipe()
        os.write(writer, content.encode())
        os.close(writer)
        try:
            if len(content) <= limit:
                assert read_given_text(f"/dev/fd/{reader}", limit) == content
            else:
                with pytest.raises(ReadError, match="at most 5 are read here"):
                    read_given_text(f"/dev/fd/{reader}", limit)
        finally:
            os.close(reader)
    with pytest.raises(ReadError, match="can't be read"):
        read_given_text(f"/dev/fd/{reader}", 5)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ReadError, match="is a FIFO"):
        read_given_text(str(tmp_path / "fifo"), 5)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(ReadError, match="is a directory"):
            read_given_text(f"/dev/fd/{folder}", 5)
    finally:
        os.close(folder)

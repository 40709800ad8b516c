"""Read whole files that somebody else may have made: regular files only, never more than a limit, never waiting.

A FIFO, a socket or a device (also behind a link) would block, never end or do something when it is opened; none is.
Knows nothing about what the files mean.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from mlxrunner.errors import MlxrunnerError

FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MOST_NESTED = 100
"""Lists and objects within each other in a JSON file; what is deeper breaks who copies or writes it."""
PIECE = 2**20
"""Bytes asked for at once: a file that lies about its size costs no memory before it is read."""
_GIVEN = re.compile(r"/dev/stdin|/(?:dev|proc/self)/fd/(?P<number>\d{1,6})")
KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class ReadError(MlxrunnerError):
    """A file that can't be read. The message begins with its path and says what to do."""

    exit_code = 2


class MissingFileError(ReadError):
    """No file has this name; it may be a link to nothing."""


def open_file(path: str | os.PathLike[str], limit: int | None = None, *, dir_fd: int | None = None) -> tuple[int, int]:
    """Open a regular file: its descriptor, which the caller closes, and its size in bytes.

    Links are followed. `dir_fd`: the open directory that a relative `path` is looked up in.
    ReadError where `path` is something else, can't be opened, or has more than `limit` bytes.
    """
    try:
        _check_kind(path, os.stat(path, dir_fd=dir_fd).st_mode)  # before it is opened: opening a device may act on it
        descriptor = os.open(path, FLAGS, dir_fd=dir_fd)
    except FileNotFoundError as error:
        raise MissingFileError(f"{os.fspath(path)}: {_missing(path, dir_fd)}") from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        found = os.fstat(descriptor)
        _check_kind(path, found.st_mode)
        _check_size(path, found.st_size, limit)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found.st_size


def read_bytes(path: str | os.PathLike[str], limit: int, *, dir_fd: int | None = None) -> bytes:
    """All of a regular file of at most `limit` bytes. ReadError as `open_file`."""
    return _read_all(open_file(path, limit, dir_fd=dir_fd)[0], path, limit)


def _read_all(descriptor: int, path: str | os.PathLike[str], limit: int) -> bytes:
    """Everything in an open file of at most `limit` bytes, which is closed."""
    try:
        content = bytearray()
        while piece := os.read(descriptor, min(PIECE, limit + 1 - len(content))):
            content += piece
            _check_size(path, len(content), limit)  # it may grow, and some files say that they are empty
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return bytes(content)


def read_text(path: str | os.PathLike[str], limit: int, *, dir_fd: int | None = None) -> str:
    """The text of a regular file of at most `limit` bytes: UTF-8, without a byte order mark. ReadError as `open_file`."""
    return _decoded(path, read_bytes(path, limit, dir_fd=dir_fd))


def read_given_text(path: str, limit: int) -> str:
    """As `read_text`; and all of a stream that the user gave the program: `<(command)` or /dev/stdin."""
    given = _GIVEN.fullmatch(path)
    if given is None:
        return read_text(path, limit)
    try:
        descriptor = os.dup(int(given["number"] or 0))
    except OSError as error:
        raise _unreadable(path, error) from error
    if is_endless(descriptor) or stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return read_text(path, limit)  # which says what it is
    return _decoded(path, _read_all(descriptor, path, limit))


def _decoded(path: str | os.PathLike[str], content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReadError(f"{os.fspath(path)}: can't be read: not UTF-8 (byte {error.start}), save it as UTF-8 text") from error


def read_json(path: str | os.PathLike[str], limit: int) -> Any:
    """The value in a JSON file of at most `limit` bytes. ReadError as `open_file`, and for what is no JSON or says two things."""
    content = read_bytes(path, limit)
    try:
        found = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_said_once)
        if _depth(found) > MOST_NESTED:
            raise ValueError(f"nested more than {MOST_NESTED} times")
    except (ValueError, RecursionError) as error:
        raise ReadError(f"{os.fspath(path)}: not readable as JSON: {' '.join(str(error).split())[:300]}") from error
    return found


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; ValueError where a name has two different values, of which each reader takes the one it likes."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next((name for name, value in pairs if found[name] is not value and found[name] != value), None)
        if twice is not None:
            values = [repr(value)[:40] for name, value in pairs if name == twice]
            raise ValueError(f"{twice[:80]!r} is there twice, as {values[0]} and as {values[-1]}: keep one of them")
    return found


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return depth


def is_endless(descriptor: int) -> bool:
    """Return True if an open descriptor is of a device which may never end: not a terminal, and not the null device."""
    status = os.fstat(descriptor)
    is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    return is_device and not os.isatty(descriptor) and status.st_rdev != os.stat(os.devnull).st_rdev


def is_there(path: str | os.PathLike[str]) -> bool:
    """Return True if `path` names anything, a link to nothing included, so that nobody takes a broken file for none."""
    try:
        return os.path.lexists(path)
    except ValueError:  # a NUL in it
        return False


def _check_kind(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_one, name in KINDS if is_one(mode)), "something else")
        advice = "name a file in it" if stat.S_ISDIR(mode) else "copy what it holds into a file"
        raise ReadError(f"{Path(path)}: is {kind}, not a regular file: {advice}")


def _check_size(path: str | os.PathLike[str], nbytes: int, limit: int | None) -> None:
    if limit is not None and nbytes > limit:
        raise ReadError(
            f"{os.fspath(path)}: {nbytes:,} bytes or more, and at most {limit:,} are read here: is it the right file?"
        )


def _missing(path: str | os.PathLike[str], dir_fd: int | None) -> str:
    try:
        return f"a link to {os.readlink(path, dir_fd=dir_fd)}, which is missing: make the file or the link anew"
    except OSError:
        return "no such file"


def _unreadable(path: str | os.PathLike[str], error: OSError | ValueError) -> ReadError:
    """For a NUL or half characters in the name, too, which no file system knows."""
    why = error.strerror or str(error) if isinstance(error, OSError) else f"not a file name ({error})"
    return ReadError(f"{os.fspath(path)}: can't be read: {why}")

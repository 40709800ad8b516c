"""Read whole files that somebody else may have made: regular files only, never more than a limit, never waiting.

A FIFO, a socket or a device (also behind a link) would block, never end or do something when it is opened; none is. What a
shell hands over as an open descriptor (`<(command)`, /dev/stdin) is open already, and read where a command line names it.
Knows nothing about what the files mean.
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from mlxrunner.errors import MlxrunnerError

FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MOST_NESTED = 100
"""Lists and objects within each other in a JSON file; what is deeper breaks who copies or writes it."""
PIECE = 2**20
"""Bytes asked for at once: a file that lies about its size costs no memory before it is read."""
PATIENCE = 2.0
"""Seconds after which a person is told which stream has sent nothing yet."""
HANDED_OVER = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})|/dev/(stdin)")
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class ReadError(MlxrunnerError):
    """A file that can't be read. The message begins with the path and says what to do."""

    exit_code = 2


class MissingFileError(ReadError):
    """No file has this name; it may be a link to nothing."""


def open_file(
    path: str | os.PathLike[str],
    limit: int | None = None,
    *,
    dir_fd: int | None = None,
    follow: bool = True,
) -> tuple[int, int]:
    """Open a regular file: its descriptor, which the caller closes, and its size in bytes.

    `dir_fd`: the open directory that a relative `path` is looked up in. `follow`: links, too.
    ReadError where `path` is something else, can't be opened, or has more than `limit` bytes.
    """
    try:
        # Before it is opened: opening a device may act on it.
        _check_kind(path, os.stat(path, dir_fd=dir_fd, follow_symlinks=follow).st_mode)
        descriptor = os.open(path, FLAGS if follow else FLAGS | os.O_NOFOLLOW, dir_fd=dir_fd)
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


def open_given(path: str | os.PathLike[str], limit: int | None = None) -> BinaryIO:
    """What a command line names: a regular file, or a stream that the shell has opened. ReadError as `open_file`, but for that."""
    number = _handed_over(path)
    if number is None:
        return os.fdopen(open_file(path, limit)[0], "rb")
    try:
        descriptor = os.dup(number)
    except OSError as error:
        raise _unreadable(path, error) from error
    stream = os.fdopen(descriptor, "rb")
    if is_endless(descriptor):
        stream.close()
        raise ReadError(
            f"{os.fspath(path)}: can't be read: it is a device, which may never end: name a file"
        )
    return stream


def say_if_waiting(stream: BinaryIO, name: str) -> None:
    """Tell a person at a terminal which stream has sent nothing for PATIENCE seconds. For who begins to read it, and waits on."""
    if sys.stderr is None or not sys.stderr.isatty():
        return
    with suppress(
        OSError, ValueError
    ):  # of no descriptor, as a program may have put one in the place of standard input
        if select.select([stream.fileno()], [], [], PATIENCE)[0]:
            return
        print(f"waiting for {name}, which has sent nothing yet", file=sys.stderr, flush=True)


def read_bytes(
    path: str | os.PathLike[str], limit: int, *, dir_fd: int | None = None, given: bool = False
) -> bytes:
    """All of a regular file of at most `limit` bytes; `given`: or of what `open_given` opens. ReadError as `open_file`."""
    if given:
        with open_given(path, limit) as stream:
            say_if_waiting(stream, os.fspath(path))
            content = stream.read(limit + 1)
        _check_size(path, len(content), limit)
        return content
    return _whole(path, open_file(path, limit, dir_fd=dir_fd)[0], limit)


def read_text(
    path: str | os.PathLike[str], limit: int, *, dir_fd: int | None = None, given: bool = False
) -> str:
    """The text of a file as `read_bytes` reads it: UTF-8, without a byte order mark. ReadError as `open_file`."""
    content = read_bytes(path, limit, dir_fd=dir_fd, given=given)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReadError(
            f"{os.fspath(path)}: can't be read: not UTF-8 (byte {error.start}), save it as UTF-8 text"
        ) from error


def read_json(path: str | os.PathLike[str], limit: int, *, given: bool = False) -> Any:
    """The value in a JSON file, read as by `read_bytes`. ReadError as `open_file`, and for what is no JSON or says two things."""
    content = read_bytes(path, limit, given=given)
    try:
        found = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_said_once)
        if _depth(found) > MOST_NESTED:
            raise ValueError(f"nested more than {MOST_NESTED} times")
    except (ValueError, RecursionError) as error:
        raise ReadError(
            f"{os.fspath(path)}: not readable as JSON: {' '.join(str(error).split())[:300]}"
        ) from error
    return found


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; ValueError where a name has two different values, of which each reader takes the one it likes."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(
            (name for name, value in pairs if found[name] is not value and found[name] != value),
            None,
        )
        if twice is not None:
            values = [repr(value)[:40] for name, value in pairs if name == twice]
            raise ValueError(
                f"{twice[:80]!r} is there twice, as {values[0]} and as {values[-1]}: keep one of them"
            )
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


def _handed_over(path: str | os.PathLike[str]) -> int | None:
    """The number of the open descriptor that `path` is, if it is one and not of a regular file, which is opened anew."""
    match = HANDED_OVER.fullmatch(os.fspath(path))
    if match is None:
        return None
    number = 0 if match[2] else int(match[1])
    try:
        mode = os.fstat(number).st_mode
    except (OSError, OverflowError):
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else number


def _whole(path: str | os.PathLike[str], descriptor: int, limit: int) -> bytes:
    try:
        content = bytearray()
        while piece := os.read(descriptor, min(PIECE, limit + 1 - len(content))):
            content += piece
            _check_size(
                path, len(content), limit
            )  # it may grow, and some files say that they are empty
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return bytes(content)


def kind_of(mode: int) -> str:
    """Name the kind of file that has this `st_mode`, for an error."""
    return next((name for is_one, name in _KINDS if is_one(mode)), "something else")


def is_of_kernel(path: str | os.PathLike[str]) -> bool:
    """Return True for what looks like a file and is the kernel's, in Linux's /proc: reading it may wait for ever."""
    with suppress(OSError):
        return os.stat(path).st_dev == os.stat("/proc/self/status").st_dev
    return False


def _check_kind(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        advice = "name a file in it" if stat.S_ISDIR(mode) else "copy what it holds into a file"
        raise ReadError(f"{Path(path)}: is {kind_of(mode)}, not a regular file: {advice}")


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
    why = (
        error.strerror or str(error) if isinstance(error, OSError) else f"not a file name ({error})"
    )
    return ReadError(f"{os.fspath(path)}: can't be read: {why}")

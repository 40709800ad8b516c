"""Read files that a stranger may have made: regular files only, bounded, never waiting.

Opening a FIFO, a socket or a device can block, never end, or have an effect. This module opens none
of them, not even after a link. A shell passes some as open descriptors (`<(command)`, /dev/stdin).
These are read if a command line names them. This module does not know what the files mean.
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mlxrunner.errors import MissingFileError, ReadError, reason

FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
MOST_NESTED = 100
"""Deepest nesting of lists and objects in a JSON file.

Deeper ones break the code that copies or writes them.
"""
PIECE = 2**20
"""Bytes per read. A file that lies about its size therefore costs no memory in advance."""
PATIENCE = 2.0
"""Seconds after which the user is told which stream has sent nothing yet."""
HANDED_OVER = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})|/dev/(stdin)")
_SEAL = re.compile(rb'\{"crc32": "([0-9a-f]{8})", ')
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(
    path: str | os.PathLike[str],
    limit: int | None = None,
    *,
    dir_fd: int | None = None,
    follow: bool = True,
) -> tuple[int, int]:
    """Open a regular file and return its descriptor and its size in bytes. The caller closes it.

    `dir_fd` is the open directory in which a relative `path` is looked up. `follow` allows links.
    Raise ReadError if `path` is not a regular file, can't be opened, or has more than `limit`
    bytes.
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
    """Open what a command line names: a regular file, or a stream that the shell has opened.

    Raise ReadError as `open_file` does, and for a device that may never end.
    """
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
    """Tell a user at a terminal which stream has sent nothing for PATIENCE seconds.

    Call it before the first read of a stream that may keep the user waiting.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        return
    with suppress(
        OSError, ValueError
    ):  # the stream may have no descriptor if a program has replaced standard input
        if select.select([stream.fileno()], [], [], PATIENCE)[0]:
            return
        print(f"waiting for {name}, which has sent nothing yet", file=sys.stderr, flush=True)


def read_bytes(
    path: str | os.PathLike[str], limit: int, *, dir_fd: int | None = None, given: bool = False
) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    `given` also allows the streams of `open_given`. Raise ReadError as `open_file` does.
    """
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
    """Return the text of a UTF-8 file as `read_bytes` reads it, without a byte order mark.

    Raise ReadError as `open_file` does, and for text that is not UTF-8.
    """
    return _decoded(path, read_bytes(path, limit, dir_fd=dir_fd, given=given))


def read_trusted(path: str | os.PathLike[str], limit: int) -> str:
    """Return the text of a UTF-8 file that decides what the program does.

    Raise ReadError as `read_text` does, and for a file that another user owns or may write to.
    """
    descriptor, _ = open_file(path, limit)
    try:
        status = os.fstat(descriptor)
        if status.st_uid not in (os.geteuid(), 0):
            raise ReadError(
                f"{os.fspath(path)}: it belongs to another user (number {status.st_uid}), who "
                "could change it: make a copy of your own"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ReadError(
                f"{os.fspath(path)}: others may write to it (mode {status.st_mode & 0o777:04o}): "
                "chmod 600 it"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return _decoded(path, _whole(path, descriptor, limit))


def _decoded(path: str | os.PathLike[str], content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReadError(
            f"{os.fspath(path)}: can't be read: not UTF-8 (byte {error.start}), save it as UTF-8 "
            "text"
        ) from error


LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of the small file that Git leaves in the place of one that it has not fetched."""
FETCH_LFS = "is a Git LFS pointer, not the file itself: run git lfs pull in its folder"


def read_json(
    path: str | os.PathLike[str], limit: int, *, given: bool = False, sealed: bool = False
) -> Any:
    """Return the value in a JSON file, read as `read_bytes` does.

    `sealed`: this program wrote it, and the checksum that it may have is taken out. Raise ReadError
    as `open_file` does, and for text that is not JSON, nests too deep, or has another checksum.
    """
    content = read_bytes(path, limit, given=given)
    if sealed:
        seal, content = unsealed(content)
        if seal is False:
            raise ReadError(f"{os.fspath(path)}: was changed: its checksum is another one")
    try:
        found = json.loads(content.decode("utf-8-sig"), object_pairs_hook=said_once)
        if _depth(found) > MOST_NESTED:
            raise ValueError(f"nested more than {MOST_NESTED} times")
    except (ValueError, RecursionError) as error:
        if content.startswith(LFS_POINTER):
            raise ReadError(f"{os.fspath(path)}: {FETCH_LFS}") from error
        raise ReadError(f"{os.fspath(path)}: not readable as JSON: {reason(error)}") from error
    return found


def unsealed(content: bytes) -> tuple[bool | None, bytes]:
    """Return the JSON object that `writing.sealed` was given, and True if it has not changed.

    None stands for a file without a checksum, which versions up to 0.2 wrote.
    """
    seal = _SEAL.match(content)
    if seal is None:
        return None, content
    rest = content[seal.end() :]
    return int(seal[1], 16) == zlib.crc32(rest), b"{" + rest


def untagged(value: Any) -> Any:
    """Return a value of JSON with a float in the place of each `{"__float__": "Infinity"}`.

    So transformers 5 writes the floats that JSON has no number for.
    """
    if isinstance(value, list):
        return [untagged(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: untagged(one) for name, one in value.items()}


def said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as an object.

    Raise ValueError if a name has two different values, because readers would choose differently.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(
            (name for name, value in pairs if found[name] is not value and found[name] != value),
            None,
        )
        if twice is not None:
            values = [repr(value)[:40] for name, value in pairs if name == twice]
            raise ValueError(
                f"{twice[:80]!r} is there twice, as {values[0]} and as {values[-1]}: keep one of "
                "them"
            )
    return found


def no_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN and infinities, which `json` reads and JSON does not have."""
    raise ValueError(f"{constant} is not a number of JSON")


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
    return depth


def is_endless(descriptor: int) -> bool:
    """Return True if an open descriptor is a device that may never end.

    Terminals and the null device end.
    """
    status = os.fstat(descriptor)
    is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    return is_device and not os.isatty(descriptor) and status.st_rdev != os.stat(os.devnull).st_rdev


def is_there(path: str | os.PathLike[str]) -> bool:
    """Return True if `path` names anything, also a broken link.

    A broken file therefore never counts as a missing one.
    """
    try:
        return os.path.lexists(path)
    except ValueError:  # a NUL in it
        return False


def _handed_over(path: str | os.PathLike[str]) -> int | None:
    """Return the open descriptor that `path` names, or None.

    Return None for a regular file, too: it is opened again.
    """
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
            )  # the file may grow, and some files claim to be empty
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return bytes(content)


def kind_of(mode: int) -> str:
    """Name the kind of file that has this `st_mode`, for an error."""
    return next((name for is_one, name in _KINDS if is_one(mode)), "something else")


def is_of_kernel(path: str | os.PathLike[str]) -> bool:
    """Return True for the kernel's files in Linux's /proc. Reading one may wait forever."""
    with suppress(OSError):
        return os.stat(path).st_dev == os.stat("/proc/self/status").st_dev
    return False


def _check_kind(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        advice = "name a file in it" if stat.S_ISDIR(mode) else "copy its content into a file"
        raise ReadError(f"{Path(path)}: is {kind_of(mode)}, not a regular file: {advice}")


def _check_size(path: str | os.PathLike[str], nbytes: int, limit: int | None) -> None:
    if limit is not None and nbytes > limit:
        raise ReadError(
            f"{os.fspath(path)}: {nbytes:,} bytes or more, and at most {limit:,} are read here: is "
            "it the right file?"
        )


def _missing(path: str | os.PathLike[str], dir_fd: int | None) -> str:
    try:
        return (
            f"a link to {os.readlink(path, dir_fd=dir_fd)}, which is missing: make the file "
            "or the link again"
        )
    except OSError:
        return "no such file"


def _unreadable(path: str | os.PathLike[str], error: OSError | ValueError) -> ReadError:
    """Return the error for a file that can't be opened.

    The reason may also be a name that no file system accepts.
    """
    why = (
        error.strerror or str(error) if isinstance(error, OSError) else f"not a file name ({error})"
    )
    return ReadError(f"{os.fspath(path)}: can't be read: {why}")

"""Damage for files of every format: what kind of file they are, their bytes, their JSON, kill -9.

`CONTENTS`, `KINDS` and `OWNERS` are tables for `parametrize`: functions that damage a file.
`scrambled` and `changed` draw at random, so that a seed repeats a damage. `change_header` is for
safetensors. `kill_at_calls` ends a writer at each call that changes a disk.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Damage = Callable[[Path], object]


# Bytes


def cut(share: float) -> Damage:
    """Keep this share of the bytes."""
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def flip(share: float) -> Damage:
    """Turn a bit of the byte that is this share of the file after its beginning."""

    def apply(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int((len(content) - 1) * share)] ^= 4
        path.write_bytes(content)

    return apply


def hole(nbytes: int) -> Damage:
    """Make a file of this size that takes no disk."""

    def apply(path: Path) -> None:
        path.touch()
        os.truncate(path, nbytes)

    return apply


def swap(path: Path) -> None:
    """Put another file of the same kind in its place, of the same size if there is one."""
    kind = path.name.partition("-")[0]
    others = [other for other in path.parent.glob(f"{kind}-*") if other != path]
    others.sort(key=lambda other: abs(other.stat().st_size - path.stat().st_size))
    shutil.copy(others[0], path)


CONTENTS: dict[str, Damage] = {
    "empty": cut(0),
    "cut in the header": cut(0.1),
    "cut at the end": cut(0.99),
    "a bit in the length": flip(0),
    "a bit in the header": flip(0.2),
    "a bit in the middle": flip(0.6),
    "a bit at the end": flip(1),
    "another file": swap,
}
"""Damage to the bytes of a file that stays a file."""
FOREIGN: dict[str, bytes] = {
    "nothing": b"",
    "a newline": b"\n",
    "zeros": b"\0" * 5000,
    "ones": b"\xff" * 100,
    "gzip": b"\x1f\x8b123",
    "a zip file": b"PK\x03\x04" * 50,
    "null": b"null",
    "a list": b"[]",
    "brackets": b"[" * 10**5,
    "braces": b"{" * 10**5,
    "a huge header": struct.pack("<Q", 2**63) + b"x" * 100,
    "a header of brackets": struct.pack("<Q", 90) + b"[" * 90,
    "a header that is a list": struct.pack("<Q", 2) + b"[]",
}
"""Contents of other formats, and of none."""


def scrambled(rng: random.Random, content: bytes) -> bytes:
    """Return `content` with bytes turned, cut out, zeroed or doubled, or without its end."""
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 20]) if found else 0):
        # Formats begin with what says most about them.
        begin = rng.randrange(min(len(found), rng.choice([100, 4000, len(found)])))
        end = begin + rng.choice([1, 4, 8, 100, 4096])
        match rng.randrange(6):
            case 0:
                found[begin:end] = bytes(len(found[begin:end]))
            case 1:
                found[begin:end] = b""
            case 2:
                found[begin:end] *= 2
            case 3 if rng.random() < 0.2:
                del found[begin:]
            case _:
                found[begin] = rng.randrange(256)
        if not found:
            break
    return bytes(found)


# Kinds of files


def link(path: Path) -> None:
    """Put a link to the same content in its place."""
    moved = path.parent.parent / f"moved-{path.name}"
    path.rename(moved)
    path.symlink_to(moved)


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def unreadable(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


def gone(make: Damage) -> Damage:
    """Return `make`, called when what was at the path is gone."""

    def apply(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        make(path)

    return apply


KINDS: dict[str, Damage] = {
    "missing": gone(lambda path: None),
    "a FIFO": gone(os.mkfifo),
    "a link to a FIFO": gone(link_to_fifo),
    "a link to nowhere": gone(lambda path: path.symlink_to("nowhere")),
    "a link to itself": gone(lambda path: path.symlink_to(path.name)),
    "a folder": gone(Path.mkdir),
    "a hole": gone(hole(2**36)),
    "a link": link,
}
"""Something else than a regular file in its place."""


def device(path: Path) -> None:
    os.mknod(path, 0o20666, os.makedev(1, 5))


def second_name(path: Path) -> None:
    os.link(path, path.parent.parent / f"second-{path.name}")


OWNERS: dict[str, Damage] = {
    "another owner": lambda path: os.chown(path, 12345, 12345),
    "writable by others": lambda path: path.chmod(0o666),
    "a second name": second_name,
}
"""A whole file that others may change; only root can give one away."""


# JSON


class Raw(str):
    """JSON as it stands, valid or not."""


NUMBERS = """
-1 0 1 2 3 7 1000 1000000000 1.5 0.5 1e308 1e-320 1e999 NaN Infinity -Infinity 2147483648
4294967296 9007199254740993 9223372036854775808
""".split()
HOSTILE: list[Any] = [
    None, True, False, [], {}, [None], [[]], [{}], [0], [1, 2], ["a"], [[1]], {"a": 1}, {"a": {}},
    "", "x", "0", "llama", "default", "</s>", "NaN", "=1+1", "../..", "/dev/zero", "a\0b", "a\nb",
    "\ud800", "\u202e\x1b[31m", "2026-99-99T00:00:00Z", "0001-01-01T00:00:00Z", [2**40],
    [0, 1, 2, 3, 4, 5], "x" * 3000, "x" * 10**5, [0] * 5000, [True] * 1000, [1, "a" * 10**5],
    {"\ud800": {"": []}}, *map(Raw, NUMBERS), Raw("9" * 400), Raw("-" + "1" * 400),
]  # fmt: skip  # values by rows
"""Values that are valid JSON, or that Python's own reader takes, in the place of any other."""
BROKEN = [
    Raw("[" * 5000 + "]" * 5000), Raw('{"a":' * 5000 + "1" + "}" * 5000), Raw('"\\ud800"'),
    Raw("["), Raw("nul"), Raw('"'), Raw(""), Raw("9" * 5000),
]  # fmt: skip  # values by rows
"""Values that no reader takes: not JSON, nested too deeply, or of too many digits."""


def places(value: Any, most: int = 20) -> Iterator[tuple[Any, Any]]:
    """Yield each holder in `value` with each of its keys; of long lists the first `most`."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(min(len(value), most)))
    for key in keys:
        yield value, key
        yield from places(value[key], most)


def changed(rng: random.Random, value: Any, values: list[Any] | None = None) -> str:
    """Change `value` in one place: another value, none, or it twice. Return which, and how."""
    found = list(places(value))
    if not found:
        return "nothing"
    holder, key = rng.choice(found)
    how = rng.random()
    if isinstance(holder, dict) and how < 0.15:
        del holder[key]
        return f"{key} dropped"
    if how < 0.25:
        holder[key] = [holder[key], holder[key]]
    elif how < 0.35 and type(holder[key]) is int:
        holder[key] *= 10**6
    else:
        holder[key] = rng.choice(HOSTILE + BROKEN if values is None else values)
    return f"{key} = {holder[key]!r:.60}"


def encoded(value: Any) -> str:
    """Return `value` as JSON, with `Raw` texts as they stand."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        pairs = (f"{json.dumps(name)}: {encoded(one)}" for name, one in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(encoded, value)) + "]"
    return json.dumps(value)


# Safetensors

Header = dict[str, Any]
Change = Callable[[Header, bytearray], object]


def split_header(content: bytes) -> tuple[Header, bytearray]:
    """Return the header and the data of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])


def change_header(path: Path, change: Change, *, sums: bool = True) -> None:
    """Change header and data of a safetensors file; `sums`: make its checksums right again."""
    header, data = split_header(path.read_bytes())
    change(header, data)
    metadata = header.get("__metadata__")
    if sums and isinstance(metadata, dict) and "crc32" in metadata:
        found = {
            name: zlib.crc32(data[slice(*entry["data_offsets"])])
            for name, entry in header.items()
            if name != "__metadata__" and isinstance(entry, dict) and "data_offsets" in entry
        }
        metadata["crc32"] = json.dumps(found)
    if isinstance(metadata, dict):
        metadata.pop("header_crc32", None)
    text = encoded(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


# kill -9

CALLS = "open write writev pwrite rename replace link unlink remove mkdir rmdir ftruncate truncate"
KILLS = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
left = None

def counted(name):
    call = getattr(os, name)

    def counting(*arguments, **options):
        global left
        if left is not None:
            left -= 1
            if left < 0:
                if name == "write":  # a part of it
                    data = memoryview(arguments[1]).cast("B")
                    call(arguments[0], data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    setattr(os, name, counting)

for name in {calls!r}.split():
    counted(name)
prepare = lambda folder: None
{script}
base, first, step, most = Path(sys.argv[1]), *map(int, sys.argv[2:5])
for number in range(first, first + step * most, step):
    folder = base / str(number)
    said = os.open(base / f"{{number}}.said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    child = os.fork()
    if child == 0:
        os.dup2(said, 1)
        folder.mkdir()
        prepare(folder)
        left = number
        act(folder)
        left = None
        sys.stdout.flush()
        os._exit(0)
    os.close(said)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        sys.exit(status)
"""


class Killed(NamedTuple):
    """A writer that was killed, or that came to its end."""

    folder: Path
    """The folder that it has written in."""
    said: str
    """Its output, as far as it was flushed."""
    is_whole: bool
    """True for the last one, which was not killed."""


def kill_at_calls(
    script: str, base: Path, *, first: int = 0, step: int = 1, most: int = 10_000
) -> list[Killed]:
    """Run a writer again and again, each time for `step` more calls that change a disk.

    `script` defines `act(folder)`, and may define `prepare(folder)`, which is not counted. Each
    run has a new folder in `base` and is a fork of one process, so that the script is imported
    once. It may import mlx, and use it in the functions only. A write that kills is done by half.
    """
    base.mkdir(exist_ok=True)
    code = KILLS.format(paths=[str(Path(__file__).parents[1])], calls=CALLS, script=script)
    command = [sys.executable, "-c", code, str(base), str(first), str(step), str(most)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers = sorted(int(said.stem) for said in base.glob("*.said"))
    complete = len(numbers) < most
    return [
        Killed(
            base / str(number),
            (base / f"{number}.said").read_text(),
            complete and number == numbers[-1],
        )
        for number in numbers
    ]

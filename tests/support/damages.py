"""Change one to three things in a good model folder: a value, bytes, or what a file is."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from support.damage_values import NAMES, VALUES
from support.damaged_json import (
    bytes_of,
    config,
    other_json,
    paths_in,
    template,
    tokenizer_config,
    tokenizer_json,
)


def mutate(folder: Path, choose: random.Random) -> str:
    """Change one to three things in `folder`; says which."""
    return "; ".join(
        choose.choice(CHANGES)(folder, choose) for _ in range(choose.choice((1, 1, 1, 2, 3)))
    )


def header(folder: Path, choose: random.Random) -> str:
    """Change the header of the weights: its JSON, or its length."""
    file = folder / "model.safetensors"
    try:
        data = bytes_of(file)
        length = struct.unpack("<Q", data[:8])[0]
        content = json.loads(data[8 : 8 + length])
    except (OSError, ValueError, struct.error):
        return "model.safetensors: left"
    if choose.random() < 0.2:
        length = choose.choice([0, 1, 7, 2**31, 2**63, 2**64 - 1, length - 1, length + 1])
        file.write_bytes(struct.pack("<Q", length) + data[8:])
        return f"model.safetensors: length {length}"
    paths = paths_in(content)
    *inner, last = choose.choice(paths) if paths else ("a",)
    place = content
    for key in inner:
        place = place[key]
    value = choose.choice(
        [
            *VALUES,
            "F32",
            "F64",
            "F16",
            "BOOL",
            "F8_E4M3",
            "XX",
            [-8, 0],
            [0, 8],
            [0, 2**63],
            [2**40],
        ]
    )
    place[last] = value
    text = json.dumps(content).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"model.safetensors: {[*inner, last]} = {value!r:.60}"


def data(folder: Path, choose: random.Random) -> str:
    """Change the data of the weights: not one number, or other bytes."""
    file = folder / "model.safetensors"
    try:
        content = bytearray(bytes_of(file))
    except OSError:
        return "model.safetensors: left"
    if len(content) > 8 and choose.random() < 0.5:
        begin = 8 + min(len(content), int.from_bytes(content[:8], "little"))
        content[begin:] = choose.choice((b"\xff", b"\0", b"\x7f")) * (len(content) - begin)
    elif content:
        for _ in range(50):
            content[choose.randrange(len(content))] = choose.randrange(256)
    file.write_bytes(content)
    return "model.safetensors: bytes"


def damage(folder: Path, choose: random.Random) -> str:
    """Cut, emptied, or with other bytes in it: any file."""
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 2**24
    ]
    if not files:
        return "nothing there"
    file, how = choose.choice(files), choose.choice(("cut", "empty", "bytes", "more", "zeros"))
    content = bytearray(file.read_bytes())
    if how == "cut":
        del content[choose.randrange(len(content) + 1) :]
    elif how == "empty":
        content.clear()
    elif how == "more":
        content += content[:1000]
    elif how == "zeros":
        content[:] = bytes(len(content))
    else:
        for _ in range(min(len(content), choose.choice((1, 3, 20)))):
            content[choose.randrange(len(content))] = choose.randrange(256)
    file.write_bytes(content)
    return f"{file.name}: {how}"


def kind_of_file(folder: Path, choose: random.Random) -> str:
    """Put a FIFO, a directory, a broken link or a device in the place of any file."""
    file, how = (
        folder / choose.choice(NAMES),
        choose.choice(
            ("fifo", "folder", "dangling", "loop", "device", "unreadable", "link to fifo", "hole")
        ),
    )
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
    if how == "fifo":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "dangling":
        file.symlink_to("nowhere")
    elif how == "loop":
        file.symlink_to(file.name)
    elif how == "link to fifo":
        if not (folder / "pipe").exists():
            os.mkfifo(folder / "pipe")
        file.symlink_to("pipe")
    elif how == "hole":
        with file.open("wb") as stream:
            stream.truncate(2**36)
    elif how == "unreadable":
        file.write_text("{}")
        file.chmod(0)
    else:
        with contextlib.suppress(OSError):  # who is not root can't
            os.mknod(file, 0o20666, os.makedev(1, 5))
    return f"{file.name}: {how}"


CHANGES: list[Callable[[Path, random.Random], str]] = [
    config, config, config, config, tokenizer_config, tokenizer_config, tokenizer_json,
    tokenizer_json, other_json, template, header, data, damage, kind_of_file,
]  # fmt: skip  # weights by repetition

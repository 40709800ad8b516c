"""Kept answers on disk, beside the parked conversations, so that both are there after a restart.

The file has a line for each answer: a digest, and JSON. A line that is damaged, such as the last
one of a server that was killed, is left out when the file is read.
"""

from __future__ import annotations

import json
import os
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.errors import MlxrunnerError, ReadError
from mlxrunner.results import logger
from mlxrunner.serve.prompts.encoding import Fill
from mlxrunner.serve.prompts.reader import Said
from mlxrunner.serve.prompts.turn import Turn
from mlxrunner.system.reading import read_bytes
from mlxrunner.system.writing import open_own, write_all, written

NAME = "answers.jsonl"
MOST_BYTES = 2**24
"""Most bytes of a file. The older half of its answers is dropped then."""
DIGEST = 32
"""Characters of a digest."""


class KeptFile:
    """The answers of one model that may come back, in the folder of its parked conversations.

    One process at a time may use it: the one that has locked the folder.
    """

    def __init__(self, folder: Path, most: int = MOST_BYTES) -> None:
        self._path, self._most, self._lock, self._said = folder / NAME, most, Lock(), ""

    def read(self) -> Iterator[tuple[bytes, Turn]]:
        """Yield the answers and the conversations that they answer, the oldest first.

        An answer comes again when the template has written it in another form.
        """
        try:
            lines = read_bytes(self._path, 2 * self._most).splitlines()
        except ReadError:  # missing, or not ours to read: there are none
            return
        for line in lines:
            found = _read(line)
            if found is not None:
                yield found

    def add(self, link: bytes, turn: Turn) -> None:
        """Write an answer to the conversation `link`. A failure costs only this answer on disk."""
        line = _line(link, turn)
        try:
            if 2 * len(line) > self._most:
                raise OSError(f"it takes {len(line):,} of at most {self._most // 2:,} bytes")
            with self._lock:
                descriptor = open_own(self._path, append=True)
                try:
                    size = os.fstat(descriptor).st_size
                    # A process that was killed may have left the beginning of a line.
                    is_cut = size and os.pread(descriptor, 1, size - 1) != b"\n"
                    write_all(descriptor, b"\n" + line if is_cut else line)
                finally:
                    os.close(descriptor)
                if size + len(line) > self._most:
                    self._drop_older()
        except (OSError, MlxrunnerError) as error:
            said = " ".join(str(error).split())
            if said != self._said:
                logger.warning("an answer will not be known after a restart: %s", said)
            self._said = said

    def _drop_older(self) -> None:
        content = read_bytes(self._path, 4 * self._most)
        begin = content.find(b"\n", len(content) - self._most // 2) + 1
        with written(self._path, sync=False) as stream:
            stream.write(content[begin:].decode("ascii", "replace"))


def _line(link: bytes, turn: Turn) -> bytes:
    """Return an answer as a line. Its text may have half surrogates, which JSON escapes."""
    value = {
        "link": link.hex(),
        "length": turn.length,
        "before": turn.before.hex(),
        "text": turn.text,
        "tokens": _packed(turn.tokens),
        "ends": _packed(turn.ends),
        "closing": turn.closing,
        "said": asdict(turn.said),
        "is_cut": turn.is_cut,
        "known": [[written, *_fill(fill)] for written, fill in [*turn.known.items()]],
    }
    content = json.dumps(value, separators=(",", ":")).encode()
    return b"%s %s\n" % (_digest(content), content)


def _read(line: bytes) -> tuple[bytes, Turn] | None:
    digest, _, content = line.partition(b" ")
    if digest != _digest(content):
        return None
    value: dict[str, Any] = json.loads(content)
    said = value.pop("said")
    said["calls"] = tuple((name, arguments, id_) for name, arguments, id_ in said["calls"])
    link = bytes.fromhex(value.pop("link"))
    known = {
        written: Fill(begin, end, text, as_tokens(_numbers(tokens)))
        for written, begin, end, text, tokens in value.pop("known")
    }
    parts: dict[str, Any] = {
        "before": bytes.fromhex(value.pop("before")),
        "tokens": as_tokens(_numbers(value.pop("tokens"))),
        "ends": array("q", _numbers(value.pop("ends")).tolist()),
        "said": Said(**said),
        "known": known,
        "forms": len(known),
    }
    return link, Turn(**value, **parts)


def _fill(fill: Fill) -> tuple[int, int, str, str]:
    return fill.begin, fill.end, fill.text, _packed(fill.tokens)


def _packed(numbers: Sequence[int] | TokenArray) -> str:
    """Return numbers as text: base64 of 32 bits each."""
    return b64encode(np.asarray(numbers, "<i4").tobytes()).decode()


def _numbers(packed: str) -> TokenArray:
    return np.frombuffer(b64decode(packed), "<i4").astype(np.int32)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST // 2).hexdigest().encode()

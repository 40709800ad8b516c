"""A file of caches that is damaged, foreign or hostile costs a cold turn, and is one line.

The file is that of version 0.2.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.old_caches import write_old
from support.prompts import PROMPT
from support.saving import Make, answer, last, save

from mlxrunner import Runner
from mlxrunner.sessions.store import CACHE, SessionStore
from mlxrunner.testing import oracle_runner

pytestmark = pytest.mark.usefixtures("small_steps")
Header = dict[str, Any]


def rewrite(
    file: Path, change: Callable[[Header, bytearray], object], *, sums: bool = True
) -> None:
    """Change header and data of a safetensors file; `sums`: with checksums that are right again."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    change(header, data)
    if sums:
        found = {
            name: zlib.crc32(data[slice(*entry["data_offsets"])])
            for name, entry in header.items()
            if name != "__metadata__" and isinstance(entry, dict) and "data_offsets" in entry
        }
        header["__metadata__"]["crc32"] = json.dumps(found)
    header["__metadata__"].pop("header_crc32", None)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def structure(change: Callable[[Any], object]) -> Callable[[Header, bytearray], None]:
    def apply(header: Header, data: bytearray) -> None:
        entry = json.loads(header["__metadata__"]["entry"])
        change(entry)
        header["__metadata__"]["entry"] = json.dumps(entry)

    return apply


def cut(name: str) -> Callable[[Header, bytearray], None]:
    """The last row of an array is not there."""

    def apply(header: Header, data: bytearray) -> None:
        entry = header[name]
        entry["shape"][2] -= 1
        entry["data_offsets"][1] -= 8
        place = entry["data_offsets"][1]
        del data[place : place + 8]
        for other in header.values():
            if "data_offsets" in other and other["data_offsets"][0] > place:
                other["data_offsets"] = [offset - 8 for offset in other["data_offsets"]]

    return apply


HEADERS: dict[str, Callable[[Header, bytearray], object]] = {
    "no type": lambda h, d: h["layers.0.keys"].pop("dtype"),
    "unknown type": lambda h, d: h["layers.0.keys"].update(dtype="F99"),
    "another type": lambda h, d: h["layers.0.keys"].update(dtype="I32"),
    "negative shape": lambda h, d: h["layers.0.keys"].update(shape=[-1, -1, 30, 2]),
    "huge shape": lambda h, d: h["layers.0.keys"].update(shape=[2**40, 2**40, 2**40, 2]),
    "shape of texts": lambda h, d: h["layers.0.keys"].update(shape=["1", "1", "30", "2"]),
    "no shape": lambda h, d: h["layers.0.keys"].update(shape=None),
    "transposed": lambda h, d: h["layers.0.keys"].update(
        shape=[1, 2, h["layers.0.keys"]["shape"][2], 1]
    ),
    "flat": lambda h, d: h["layers.0.keys"].update(shape=[h["layers.0.keys"]["shape"][2] * 2]),
    "beyond the end": lambda h, d: h["layers.1.values"].update(data_offsets=[2**40, 2**40 + 240]),
    "before the beginning": lambda h, d: h["layers.1.values"].update(data_offsets=[-240, 0]),
    "overlapping": lambda h, d: h["layers.1.values"].update(
        data_offsets=h["layers.0.keys"]["data_offsets"]
    ),
    "no entry": lambda h, d: h["__metadata__"].pop("entry"),
    "an entry that is no JSON": lambda h, d: h["__metadata__"].update(entry="["),
    "a nested entry": lambda h, d: h["__metadata__"].update(entry="[" * 10**5),
    "no fingerprint": lambda h, d: h["__metadata__"].pop("fingerprint"),
    "metadata of numbers": lambda h, d: h["__metadata__"].update(entry=1),
    "no tokens": lambda h, d: h.pop("tokens"),
    "too few tokens": lambda h, d: h["tokens"].update(
        dtype="I64", shape=[h["tokens"]["shape"][0] // 2]
    ),
    "negative tokens": lambda h, d: d.__setitem__(
        slice(h["tokens"]["data_offsets"][0], h["tokens"]["data_offsets"][0] + 4), b"\xff" * 4
    ),
    "a layer less": structure(lambda e: e["layers"].pop()),
    "a layer more": structure(lambda e: e["layers"].append(e["layers"][0])),
    "another kind": structure(lambda e: e["layers"][0].update(kind="../../x")),
    "a part that is missing": structure(lambda e: e["layers"][0]["arrays"].pop("keys")),
    "a path for a name": structure(lambda e: e["layers"][0]["arrays"].update({"../../x": None})),
    "bits that nobody has": structure(lambda e: e["layers"][0]["arrays"].update(keys=[3, 7])),
    "a number too many": structure(lambda e: e["layers"][0]["numbers"].update(offset=2**70)),
    "layers that are none": structure(lambda e: e.update(layers=7)),
    "endless numbers": structure(
        lambda e: e.update(checkpoints=[{"offset": float("inf"), "is_anchor": True, "layers": []}])
    ),
}


@pytest.fixture
def damaged(saver: Make, store: SessionStore) -> Callable[[], tuple[Runner, str]]:
    """A session as version 0.2 saved it, to be damaged; then a runner that has loaded it."""
    runner = oracle_runner(["full", "full"])
    answer(runner, PROMPT)
    kept = saver(runner)
    save(kept)
    fingerprint = store.load("one").fingerprint
    write_old(store.folder / "one", runner.entry.export(), fingerprint)

    def load() -> tuple[Runner, str]:
        restored = oracle_runner(["full", "full"])
        found, line = saver(restored).load("one")
        assert found.messages[0]["content"] == "hello"
        assert "\n" not in line
        assert len(line) < 600
        return restored, line

    return load


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_a_hostile_header_is_one_line(
    damaged: Callable[[], tuple[Runner, str]],
    store: SessionStore,
    change: Callable[[Header, bytearray], object],
) -> None:
    """The text is kept, the next turn starts cold and answers as ever."""
    rewrite(store.folder / "one" / CACHE, change)
    runner, line = damaged()
    assert line.startswith("its caches are dropped, its text is kept: the cache ")
    assert answer(runner, PROMPT) == answer(oracle_runner(["full", "full"]), PROMPT)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, 700, -300, -1])
def test_a_truncated_file_is_one_line(
    damaged: Callable[[], tuple[Runner, str]], store: SessionStore, keep: int
) -> None:
    file = store.folder / "one" / CACHE
    file.write_bytes(file.read_bytes()[:keep])
    runner, line = damaged()
    assert line.startswith("its caches are dropped, its text is kept: the cache is truncated")
    assert last(runner, PROMPT).outcome == "miss"


def test_rows_without_end_are_not_read(
    damaged: Callable[[], tuple[Runner, str]], store: SessionStore
) -> None:
    """Keys of 2**36 rows, which the file, with a hole, has: more than tokens."""

    def change(header: Header, data: bytearray) -> None:
        header["layers.1.values"]["shape"][2] = 2**36
        begin = header["layers.1.values"]["data_offsets"][0]
        header["layers.1.values"]["data_offsets"][1] = begin + 2**39

    file = store.folder / "one" / CACHE
    rewrite(file, change, sums=False)
    length = struct.unpack("<Q", file.read_bytes()[:8])[0]
    with file.open("r+b") as stream:
        begin = json.loads(file.read_bytes()[8 : 8 + length])["layers.1.values"]["data_offsets"][1]
        stream.truncate(8 + length + begin)
    assert "which does not go with" in damaged()[1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (cut("layers.0.keys"), "rows"),
        (structure(lambda e: e["layers"][0].update(arrays={})), "rows"),
        (
            structure(
                lambda e: e.update(
                    checkpoints=[{"offset": 99, "is_anchor": False, "layers": [None, None]}]
                )
            ),
            "checkpoint is at 99",
        ),
    ],
    ids=["a row less", "an empty layer", "a checkpoint beyond the end"],
)
def test_what_is_found_when_it_is_read_costs_a_cold_turn(
    damaged: Callable[[], tuple[Runner, str]],
    store: SessionStore,
    change: Callable[[Header, bytearray], object],
    why: str,
) -> None:
    """The request says that the entry was given up, and why, and its answer is right."""
    rewrite(store.folder / "one" / CACHE, change)
    runner, _ = damaged()
    usage = last(runner, PROMPT)
    assert (usage.outcome, usage.reason) == ("miss", "entry_freed")
    assert why in usage.cache.evicted_by
    assert "\n" not in usage.cache.evicted_by
    assert answer(runner, PROMPT) == answer(oracle_runner(["full", "full"]), PROMPT)


def test_a_flipped_bit_is_found(
    damaged: Callable[[], tuple[Runner, str]], store: SessionStore
) -> None:
    """By the checksum, when it is read."""

    def flip(header: Header, data: bytearray) -> None:
        data[header["layers.1.values"]["data_offsets"][0] + 17] ^= 4

    rewrite(store.folder / "one" / CACHE, flip, sums=False)
    runner, _ = damaged()
    usage = last(runner, PROMPT)
    assert usage.reason == "entry_freed"
    assert "the checksum of 'layers.1.values' is another one" in usage.cache.evicted_by


def test_a_link_in_place_of_the_caches_is_not_followed(
    damaged: Callable[[], tuple[Runner, str]], store: SessionStore
) -> None:
    """Even to a file that would do."""
    file = store.folder / "one" / CACHE
    file.rename(store.folder / "elsewhere")
    file.symlink_to(store.folder / "elsewhere")
    assert damaged()[1].startswith(
        "its caches are dropped, its text is kept: the cache can't be read"
    )

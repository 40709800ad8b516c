"""The harness of damage does what its tables say."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.damage import (
    CONTENTS,
    KINDS,
    change_header,
    changed,
    encoded,
    kill_at_calls,
    scrambled,
)

WRITER = """
def prepare(folder):
    (folder / "old").write_text("old")

def act(folder):
    fd = os.open(folder / "new", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"abcd")
    print("written", flush=True)
    os.replace(folder / "new", folder / "old")
"""


def test_a_writer_is_killed_at_each_call(tmp_path: Path) -> None:
    """The last run is the one that comes to its end."""
    runs = kill_at_calls(WRITER, tmp_path / "runs")
    found = [{path.name: path.read_text() for path in run.folder.iterdir()} for run in runs]
    assert found == [
        {"old": "old"},
        {"old": "old", "new": "ab"},
        {"old": "old", "new": "abcd"},
        {"old": "abcd"},
    ]
    assert [run.said for run in runs] == ["", "", "written\n", "written\n"]
    assert [run.is_whole for run in runs] == [False, False, False, True]
    assert len(kill_at_calls(WRITER, tmp_path / "some", first=1, step=2, most=1)) == 1


@pytest.mark.parametrize("what", [*CONTENTS, *KINDS])
def test_each_damage_changes_the_file(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "rows-1").write_bytes(bytes(range(200)))
    (folder / "rows-2").write_bytes(bytes(range(1, 201)))
    (CONTENTS | KINDS)[what](folder / "rows-1")
    file = folder / "rows-1"
    is_same = file.is_file() and not file.is_symlink() and file.stat().st_size == 200
    assert not is_same or file.read_bytes() != bytes(range(200))


def test_random_damage_is_that_of_its_seed() -> None:
    content = json.dumps({"a": [1, {"b": 2}], "c": "text"}).encode()
    found = [scrambled(random.Random(seed), content) for seed in range(50)]
    assert found == [scrambled(random.Random(seed), content) for seed in range(50)]
    assert len(set(found)) > 25
    values = [json.loads(content) for _ in range(50)]
    for seed, value in enumerate(values):
        changed(random.Random(seed), value)
    assert len({encoded(value) for value in values}) > 25
    assert encoded(json.loads(content)).encode() == content


def test_checksums_fit_a_changed_header(tmp_path: Path) -> None:
    file = tmp_path / "file"
    text = json.dumps({"__metadata__": {"crc32": "{}"}, "a": {"data_offsets": [0, 2]}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"xy")
    change_header(file, lambda header, data: data.__setitem__(0, 0))
    assert b"crc32" in file.read_bytes()
    assert file.read_bytes().endswith(b"\0y")

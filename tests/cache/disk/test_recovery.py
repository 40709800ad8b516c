"""A conversation is found again from its pieces after its writer was killed at any time."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.histories import tiny_parts

from mlxrunner import Runner
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.disk.index import StoredConversation
from mlxrunner.cache.disk.pieces import PieceFile
from mlxrunner.system.folders import Folder
from mlxrunner.testing import oracle_runner

from .conftest import PARTS, PLENTY, Make, answer, array, offloaded, on_disk, served

KINDS = {
    "rows": ["full", "full"],
    "rows-and-states": ["full", "sliding", "recurrent", "composite"],
    "states": ["recurrent"],
}
PROMPT = [*range(1, 60)]
FOLLOWING = [*PROMPT, *range(100, 150)]


def most(done: StoredConversation, folder: Path) -> int:
    """Return the last offset at which the files in `folder` let a conversation be resumed."""
    there, end = {path.name for path in folder.iterdir()}, 0
    for piece, upto in done.used(len(done.tokens)):
        if piece.name not in there:
            break
        end = upto
    if done.name in there or done.has_only_rows:
        return len(done.tokens) if done.name in there else end
    kept = [state.offset for state in done.states if state.name in there]
    return max(offset for offset in kept if offset <= end or not done.rows)


def new(name: str) -> Runner:
    return oracle_runner(
        KINDS[name], rewind_slack=2, checkpoint_interval=12, checkpoint_budget=10**6
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_kill_between_two_writes_costs_the_last_piece(
    name: str, make_parking: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces on disk serve the conversation that continues, with the answer of a cold run."""
    first, disk, copies = new(name), make_parking(), list[Path]()
    answer(first, PROMPT)
    offloaded(disk, first.entry)
    answer(first, FOLLOWING)
    write = PieceFile.write

    def write_and_copy(file: PieceFile, folder: Folder, **more: Any) -> None:
        write(file, folder, **more)
        copies.append(tmp_path / f"copy-{len(copies)}")
        shutil.copytree(folder.path, copies[-1] / folder.path.name)

    with monkeypatch.context() as patch:
        patch.setattr(PieceFile, "write", write_and_copy)
        offloaded(disk, first.entry)
    done = disk.find(first.entry.tokens.array)
    assert done is not None
    reused = list[int]()
    for copy in copies:
        wanted = min(most(done[0], copy / disk.folder.name), done[0].resumable(len(FOLLOWING)))
        other, again = DiskCache(copy, PARTS, limit=PLENTY), list[int]()
        reused.append(served(partial(new, name), other, [*FOLLOWING, 7, 8]))
        assert reused[-1] >= wanted
        for _ in range(2):
            again.append(len(other))
            assert other.bytes == on_disk(other)
            other.close()
            other = DiskCache(copy, PARTS, limit=PLENTY)
        other.close()
        assert again[0] == again[1]
    assert reused == sorted(reused)
    assert len(set(reused)) > 3


def test_a_conversation_after_a_shift_is_found_again(make_parking: Make) -> None:
    """Its files have names of their own."""
    runner, disk = Runner(*tiny_parts("llama"), context=400), make_parking()
    list(runner.generate([7] * 390, max_tokens=40, stop_tokens=[], overflow="shift", keep=4))
    assert runner.entry.is_shifted
    tokens = runner.entry.tokens.array.copy()
    offloaded(disk, runner.entry)
    for head in disk.folder.glob("talk-*"):
        head.unlink()
    folder = disk.folder
    found = make_parking().find(array([*tokens, 3]))
    assert folder == make_parking().folder
    assert found is not None
    assert found[1] == len(tokens)
    assert not found[0].is_exact


@pytest.mark.parametrize("name", KINDS)
def test_files_of_another_model_tell_no_conversation(name: str, make_parking: Make) -> None:
    """A file tells only what its own name says, too."""
    runner, disk = new(name), make_parking()
    answer(runner, PROMPT)
    offloaded(disk, runner.entry)
    for path in [*disk.folder.iterdir()]:
        if path.name.startswith("talk-"):
            path.unlink()
        else:
            kind, _, *numbers = path.name.split("-")
            path.rename(path.with_name("-".join([kind, "0" * 32, *numbers])))
    assert len(make_parking()) == 0
    assert not [*disk.folder.iterdir()]

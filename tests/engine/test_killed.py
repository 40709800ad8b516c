"""kill -9 while conversations are parked and come back in pieces: nothing wrong is restored."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.sample import fewer

from mlxrunner.cache.disk.disk_cache import FILE

from .test_errands import LONG, Talks, small_pieces  # noqa: F401

CHILD = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
from mlxrunner.cache.disk import index
import pytest
from engine.test_errands import Talks
from support.engine import park_in_pieces_of

park_in_pieces_of(16, pytest.MonkeyPatch())
add, remove = index.DiskCacheIndex.add, index.DiskCacheIndex.remove

def added(self, parked):
    add(self, parked)
    os.write(1, f"+{{parked.name}}\\n".encode())

def removed(self, parked):
    if parked in self:
        os.write(1, f"-{{parked.name}}\\n".encode())
    remove(self, parked)

index.DiskCacheIndex.add, index.DiskCacheIndex.remove = added, removed
left, lines = int(sys.argv[3]), 0

def trace(frame, event, argument):
    global left, lines
    if "/mlxrunner/cache/disk/" not in frame.f_code.co_filename:
        return None
    if event == "line":
        left, lines = left - 1, lines + 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    return trace

talks = Talks(sys.argv[1], Path(sys.argv[2]))
talks.begin_answer()
sys.settrace(trace)
for number in (0, 1, 0, 1, 0):
    found = talks.submit(number).result()
    talks.talks[number] += [*found.tokens, 7, 8, 9]
sys.settrace(None)
print(lines)
"""


def killed_at(line: int, name: str, folder: Path) -> tuple[set[str], int]:
    """Run the child until a line of `mlxrunner.cache.disk`, 0: to its end.

    Return the conversations that were whole then, by the names of their files, and the lines.
    """
    code = CHILD.format(paths=[str(Path(__file__).parent.parent)])
    told = subprocess.run(
        [sys.executable, "-c", code, name, str(folder), str(line)],
        stdout=subprocess.PIPE,
        check=False,
        text=True,
    )
    assert told.returncode == (-signal.SIGKILL if line else 0)
    whole: set[str] = set()
    for one in told.stdout.splitlines():
        if one[0] == "+":
            whole.add(one[1:])
        elif one[0] == "-":
            whole.discard(one[1:])
    return whole, 0 if line else int(told.stdout.splitlines()[-1])


def go_on(name: str, folder: Path, whole: set[str]) -> int:
    """Go on with each conversation; return the number of tokens that were reused."""
    talks, reused = Talks(name, folder), 0
    there = {one.name: one.tokens.tolist() for one in talks.parking._index}
    assert whole <= there.keys()
    files = [path for path in talks.parking.folder.iterdir() if FILE.fullmatch(path.name)]
    assert sum(file.stat().st_size for file in files) == talks.parking.bytes
    for number, talk in enumerate(talks.talks):
        parked = [tokens for tokens in there.values() if tokens[:LONG] == talk]
        begun = [tokens for tokens in there.values() if tokens == talk[: len(tokens)]]
        longest = max(parked, key=len, default=[])
        talks.talks[number] = [*longest, 7, 8, 9] if longest else talk
        usage = talks.say(number)  # compares it with a cold run
        assert usage.cached_tokens == len(longest or max(begun, key=len, default=[]))
        reused += usage.cached_tokens
    talks.close()
    return reused


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_kill_at_any_piece_leaves_whole_conversations(name: str, tmp_path: Path) -> None:
    """A fresh process goes on with all that was whole, and evaluates the rest."""
    all_of_them, lines = killed_at(0, name, tmp_path / "whole")
    assert len(all_of_them) > 1
    rng, reused = random.Random(name), []
    for number in range(fewer(4, 3)):
        folder = tmp_path / str(number)
        whole, _ = killed_at(rng.randrange(1, lines * 9 // 10), name, folder)
        reused.append(go_on(name, folder, whole))
    assert any(reused)

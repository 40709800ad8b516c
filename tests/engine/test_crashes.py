"""A process with several conversations dies at a random write or step, or loses its power.

Others meet a full disk. The next process answers as a cold run does, and evaluates at most what
came after the last write.
"""

from __future__ import annotations

import json
import logging
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.engine import park_in_pieces_of
from support.forking import run_program
from support.histories import tiny_parts
from support.sample import fewer

from mlxrunner import ParallelRunner, Runner
from mlxrunner.cache.disk.disk_cache import FILE, DiskCache

SETTINGS = {"context": 400, "prefill_step": 32, "checkpoint_budget": 10**6}
CHILD = """
import json, os, random, signal, stat, sys, threading
from pathlib import Path
import pytest
from engine.test_crashes import SETTINGS, first_prompts
from support.engine import engine_of, park_in_pieces_of
from support.histories import tiny_parts
from mlxrunner import ParallelRunner
from mlxrunner.cache.disk import index
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.engine.scheduling import eviction

name, folder, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
left, limit = map(int, sys.argv[4:])
write, sync, full = os.write, os.fsync, 0
park_in_pieces_of(16, pytest.MonkeyPatch())
eviction.QUIET_S = eviction.BUSY_S = 0.0

def say(kind, value):
    write(1, f"{kind} {json.dumps(value)}\\n".encode())

def pass_by():
    global left, full
    left -= 1
    if left == 0 and how in ("kill", "power"):
        os.kill(os.getpid(), signal.SIGKILL)
    if left == 0 and how == "full":
        full = 40

def counted(act):
    def call(*given, **more):
        global full
        pass_by()
        if full > 0 and act is write:
            full -= 1
            raise OSError(28, "No space left on device")
        return act(*given, **more)
    return call

def synced(fd):
    sync(fd)
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        say("D", os.listdir(place.folder))
    else:
        say("F", found.st_ino)

add, delete = index.DiskCacheIndex.add, index.DiskCacheIndex._delete

def added(self, one):
    add(self, one)
    say("+", [one.name, one.tokens.tolist()])

def deleted(self, name):
    say("-", name)
    delete(self, name)

index.DiskCacheIndex.add, index.DiskCacheIndex._delete = added, deleted
place = DiskCache(folder, {"model": name}, limit=limit, daily=10**9)
runner = ParallelRunner(*tiny_parts(name), max_sequences=3, parking=place, **SETTINGS)
engine = engine_of(runner)
step = engine.step

def stepped():
    step()
    pass_by()
    if left == 0 and how == "abort":
        os.abort()

engine.step = stepped
acts = os.write, os.rename, os.unlink, synced
os.write, os.rename, os.unlink, os.fsync = map(counted, acts)

def talk(number, prompt):
    rng = random.Random(number)
    for _ in range(6):
        found = runner.complete(prompt, max_tokens=5, stop_tokens=[])
        prompt = [*prompt, *found.tokens, *(rng.randrange(1, 250) for _ in range(9))]
        say("T", [number, prompt])

threads = [threading.Thread(target=talk, args=pair) for pair in enumerate(first_prompts())]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os.kill(os.getpid(), signal.SIGKILL)
"""


def first_prompts() -> list[list[int]]:
    """Return the prompts of four conversations, two of which share a header."""
    rng = random.Random(0)
    header = [rng.randrange(1, 250) for _ in range(40)]
    talks = [[rng.randrange(1, 250) for _ in range(50 + number)] for number in range(4)]
    return [[*header, *talks[0]], [*header, *talks[1]], talks[2], talks[3]]


@dataclass
class Left:
    """The last prompt of each conversation, and what was whole on disk, when a process died."""

    prompts: list[list[int]] = field(default_factory=first_prompts)
    whole: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def after(cls, name: str, folder: Path, how: str, count: int, limit: int) -> Left:
        """Let a process die at its write or step number `count`."""
        words = [name, str(folder), how, str(count), str(limit)]
        told = run_program("-c", CHILD, *words, text=True, imports=["engine.test_crashes"])
        assert told.returncode in (-signal.SIGKILL, -signal.SIGABRT), told.returncode
        left, files, names = cls(), set[int](), set[str]()
        for line in told.stdout.splitlines():
            kind, value = line[0], json.loads(line[2:])
            if kind == "T":
                left.prompts[value[0]] = value[1]
            elif kind == "+":
                left.whole[value[0]] = value[1]
            elif kind == "F":
                files.add(value)
            elif kind == "D":
                names = set(value)
            else:
                left.whole.pop(value, None)
        if how == "power":
            lose_power(folder, files, names, random.Random(count))
        return left


def lose_power(folder: Path, files: set[int], names: set[str], rng: random.Random) -> None:
    """Damage what was not forced to the disk.

    `files`: the inodes of those that were. `names`: the names in the folder when it was. A name
    that was removed since may come back, which harms nobody.
    """
    for path in folder.glob("*/*"):
        size = path.stat().st_size
        if path.stat().st_ino not in files:
            with path.open("r+b") as file:
                kept = rng.randrange(size + 1)
                file.truncate(kept)
                file.truncate(rng.choice([kept, size]))  # zeros
        if path.name not in names and rng.random() < 0.5:
            path.unlink()


def begins(prompt: list[int], tokens: list[int]) -> bool:
    return len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens


@pytest.mark.usefixtures("proved_once")
@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
@pytest.mark.parametrize("how", ["kill", "abort", "full", "power"])
def test_what_was_written_survives(
    name: str,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The longest of each conversation that was whole is found; no file is refused, all fit."""
    park_in_pieces_of(16, monkeypatch)
    rng, parts = random.Random(f"{name} {how}"), tiny_parts(name)
    for number in range(fewer(4, 1)):
        folder, limit = tmp_path / str(number), rng.choice([10**9, 300_000])
        left = Left.after(name, folder, how, rng.randrange(1, 900), limit)
        with caplog.at_level(logging.WARNING):
            place = DiskCache(folder, {"model": name}, limit=limit)
        assert caplog.text == "" or how == "power"
        caplog.clear()
        there = [path for path in place.folder.iterdir() if FILE.fullmatch(path.name)]
        files = [path.stat().st_size for path in there]
        assert sum(files) == place.bytes <= limit
        assert left.whole.keys() <= {one.name for one in place._index}
        with ParallelRunner(*parts, max_sequences=4, parking=place, **SETTINGS) as runner:
            for prompt in left.prompts:
                whole = [tokens for tokens in left.whole.values() if begins(prompt, tokens)]
                found = runner.complete(prompt, max_tokens=5, stop_tokens=[])
                assert found.usage.cached_tokens >= len(max(whole, key=len, default=[]))
                cold = Runner(*parts, **SETTINGS).complete(prompt, max_tokens=5, stop_tokens=[])
                assert found.tokens == cold.tokens

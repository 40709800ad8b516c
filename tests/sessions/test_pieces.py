"""The caches of a session in pieces: what a save writes, many checkpoints, damage and repair."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.checks import raising
from support.damage import CONTENTS, KINDS, OWNERS
from support.old_caches import write_old
from support.prompts import PROMPT
from support.reused import CHECKPOINTS
from support.saving import Make, answer, last, pieces, restored_by, save, saved, session

from mlxrunner import Runner
from mlxrunner.sessions.store import CACHE, SessionStore
from mlxrunner.testing import interrupt_at, oracle_runner

pytestmark = pytest.mark.usefixtures("small_steps", "short_pieces")
MIX = ["full", "sliding", "recurrent"]


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxrunner.cache.disk.index.SEGMENT", 16)
    monkeypatch.setattr("mlxrunner.cache.disk.index.SHORT", 4)


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the identity and the size of each piece."""
    return {path.name: (path.stat().st_ino, path.stat().st_size) for path in pieces(folder)}


@pytest.mark.parametrize("options", [{}, {"kv_bits": 8}], ids=["exact", "in 8 bits"])
def test_a_save_writes_what_is_new(
    saver: Make, store: SessionStore, options: dict[str, int]
) -> None:
    """The rows of earlier turns stay in their files, and nothing else is left."""
    runner = oracle_runner(["full", "full"])
    answer(runner, PROMPT, 20)
    kept = saver(runner, **options)
    save(kept)
    before = written(store.folder / "one")
    answer(runner, [*runner.entry.tokens, *range(1, 30)])
    save(kept)
    after = written(store.folder / "one")
    rows = {name: one for name, one in before.items() if name.startswith("rows-")}
    assert len(rows) >= 2
    assert rows.items() <= after.items()
    assert len([name for name in after if name.startswith("talk-")]) == 1
    restored = oracle_runner(["full", "full"])
    assert saver(restored).load("one")[1].startswith(f"{len(runner.entry.tokens)} tokens restored")
    following = [*runner.entry.tokens, 7, 8]
    assert last(restored, following).evaluated_tokens == 2


def test_another_branch_shares_what_it_has_in_common(saver: Make, store: SessionStore) -> None:
    """Files of the other one go."""
    runner = oracle_runner(["full"])
    answer(runner, [*PROMPT, *range(1, 60)])
    save(saver(runner))
    before = written(store.folder / "one")
    answer(runner, [*PROMPT, *range(100, 120)])
    save(saver(runner))
    after = written(store.folder / "one")
    assert before.items() & after.items()
    assert before.keys() - after.keys()
    restored, _ = restored_by(saver, ["full"])
    assert list(restored.entry.tokens) == list(runner.entry.tokens)


def test_a_session_of_version_0_2_goes_on(saver: Make, store: SessionStore) -> None:
    """Its one file is read, and the next save replaces it by pieces."""
    runner = saved(saver, MIX, **CHECKPOINTS)
    parts = store.load("one").fingerprint
    write_old(store.folder / "one", runner.entry.export(), parts)
    restored = oracle_runner(MIX, **CHECKPOINTS)
    kept = saver(restored)
    assert kept.load("one")[1].startswith(f"{len(runner.entry.tokens)} tokens restored")
    following = [*runner.entry.tokens, 7, 8]
    assert last(restored, following).evaluated_tokens == 2
    save(kept)
    assert CACHE not in {path.name for path in pieces(store.folder / "one")}
    again = oracle_runner(MIX, **CHECKPOINTS)
    assert "tokens restored" in saver(again).load("one")[1]
    assert answer(again, [*restored.entry.tokens, 5]) == answer(
        oracle_runner(MIX), [*restored.entry.tokens, 5]
    )


def test_any_number_of_checkpoints_is_read(saver: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a file of its own, so that no header grows beyond what is read."""
    monkeypatch.setattr("mlxrunner.system.tensorfile.MOST_HEADER", 12_000)
    runner = oracle_runner(MIX * 3, checkpoint_interval=4, checkpoint_budget=10**6)
    answer(runner, [number % 250 for number in range(200)])
    assert len(runner.entry.checkpoints) > 25
    save(saver(runner))
    restored = oracle_runner(MIX * 3, checkpoint_interval=4, checkpoint_budget=10**6)
    assert "tokens restored" in saver(restored).load("one")[1]
    assert restored.entry.checkpoints.offsets == runner.entry.checkpoints.offsets


DAMAGES = CONTENTS | KINDS | {"a second name": OWNERS["a second name"]}
del DAMAGES["a folder"]  # which can't be replaced: the save says so
del DAMAGES["another file"]  # there is one `talk-` only


@pytest.mark.parametrize("kind", ["talk-", "rows-", "state-"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_costs_a_cold_turn_and_is_mended(
    saver: Make, store: SessionStore, damage: Callable[[Path], object], kind: str
) -> None:
    """The text is there, the answer is right, and the next save writes what was damaged."""

    def new() -> Runner:
        return oracle_runner(MIX, **CHECKPOINTS)

    runner = new()
    answer(runner, [*PROMPT, *range(1, 40)])
    save(saver(runner))
    damage(pieces(store.folder / "one", kind)[0])
    restored, said = new(), [*runner.entry.tokens]
    kept = saver(restored)
    loaded, line = kept.load("one")
    assert loaded.messages[0]["content"] == "hello"
    assert "\n" not in line
    assert answer(restored, [*said, 7, 8]) == answer(new(), [*said, 7, 8])
    save(kept)
    again = new()
    count = len(restored.entry.tokens)
    assert saver(again).load("one")[1].startswith(f"{count} tokens restored")
    following = [*restored.entry.tokens, 5]
    assert last(again, following).evaluated_tokens == 1
    assert answer(again, following) == answer(new(), following)


def test_a_save_that_fails_leaves_the_caches_before_it(
    saver: Make, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of its own stays."""
    runner = saved(saver, MIX, **CHECKPOINTS)
    before, count = written(store.folder / "one"), len(runner.entry.tokens)
    answer(runner, [*runner.entry.tokens, *range(1, 40)])
    kept = saver(runner)
    with monkeypatch.context() as patch:
        no_room = raising(OSError(28, "No space left on device"))
        patch.setattr("mlxrunner.system.tensorfile.write_all", no_room)
        with pytest.raises(Exception, match="could not be saved: No space left on device"):
            save(kept)
    assert written(store.folder / "one") == before
    restored = oracle_runner(MIX, **CHECKPOINTS)
    assert saver(restored).load("one")[1].startswith(f"{count} tokens restored")


def test_an_interrupt_at_any_line_of_a_second_save(saver: Make, store: SessionStore) -> None:
    """The caches are those of the first save, or of the second."""
    runner = oracle_runner(MIX, **CHECKPOINTS)
    answer(runner, PROMPT)
    kept = saver(runner)
    save(kept)
    first = len(runner.entry.tokens)
    answer(runner, [*runner.entry.tokens, 5, 6])
    said, second = session(runner), len(runner.entry.tokens)
    for line in range(1, 2000, 97):
        with suppress(KeyboardInterrupt), interrupt_at(line):
            kept.save("one", said)
        kept.wait()
        restored = oracle_runner(MIX, **CHECKPOINTS)
        found = saver(restored).load("one")[1]
        assert found.startswith((f"{first} tokens restored", f"{second} tokens restored")), line

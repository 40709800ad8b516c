"""Conversations with pictures are parked on disk, and found again by another process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from support.seeing import noise, write_seeing

from mlxrunner import ParallelRunner, PromptError, Runner
from mlxrunner.cache.entry import FIRST_OF_PICTURES, as_tokens
from mlxrunner.pictures.table import PictureNames, PictureTable, as_json, renumbered

KINDS = ("qwen2_5_vl", "gemma3", "idefics3", "mllama")


def asked(text: str, *pictures: int) -> dict[str, Any]:
    shown = [{"type": "image", "image": noise(one)} for one in pictures]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}]}


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("kind", KINDS)
def test_four_conversations_take_turns_in_one_slot(kind: str, tmp_path: Path) -> None:
    """After each restart other pictures come first, so that all have other ids."""
    folder, drawn = write_seeing(tmp_path / kind, kind), random.Random(len(kind))
    talks = [[asked(f"What is that? {number % 2}", number // 2)] for number in range(4)]
    cold = Runner.load(folder, context=600, pictures=True, reserve=False)
    told = dict[int, int]()  # the tokens of each conversation that were evaluated
    for start in range(3):
        with ParallelRunner.load(
            folder,
            max_sequences=1,
            context=600,
            pictures=True,
            reserve=False,
            disk_cache_bytes=10**9,
            disk_cache_dir=tmp_path / "parked",
        ) as runner:
            runner.run([[asked("first", 9 + start)]], max_tokens=1)
            for _ in range(2):
                for talk in drawn.sample(talks, 4):
                    found = runner.submit(talk, max_tokens=5, stop_tokens=[]).result()
                    cold.reset()
                    assert found.tokens == cold.complete(talk, max_tokens=5, stop_tokens=[]).tokens
                    assert found.usage is not None
                    assert found.usage.cached_tokens >= told.get(id(talk), 0)
                    told[id(talk)] = found.usage.prompt_tokens
                    talk += [
                        {"role": "assistant", "content": "So."},
                        asked("And?", *drawn.sample(range(4), drawn.choice([0, 0, 1]))),
                    ]
        assert list((tmp_path / "parked").rglob("talk-*.safetensors"))


def test_a_picture_is_found_by_its_pixels_alone(tmp_path: Path) -> None:
    """Another one that got the ids of the first in another process is a miss, not a hit."""
    folder = write_seeing(tmp_path / "model", "gemma3")
    settings: dict[str, Any] = {
        "max_sequences": 1,
        "context": 600,
        "pictures": True,
        "reserve": False,
        "disk_cache_bytes": 10**9,
        "disk_cache_dir": tmp_path / "parked",
    }
    cold = Runner.load(folder, context=600, pictures=True, reserve=False)
    for picture in (1, 2, 1, 3):
        with ParallelRunner.load(folder, **settings) as runner:
            talk = [asked("What is it?", picture)]
            found = runner.submit(talk, max_tokens=5, stop_tokens=[]).result()
            cold.reset()
            assert found.tokens == cold.complete(talk, max_tokens=5, stop_tokens=[]).tokens


def test_stored_tokens_get_the_ids_of_this_process() -> None:
    """Their names are the same in every process, and text alone is named as it was before."""
    drawn = random.Random(0)
    for _ in range(200):
        here, there = PictureTable(), PictureTable()
        made = [(bytes([number]) * 32, drawn.randrange(1, 9)) for number in range(5)]
        for table in (here, there):
            for digest, count in drawn.sample(made, 5):
                table.add(digest, count, (1, 1, count) if count % 2 else None)
        shown = drawn.choices(made, k=4)
        written, expected = list[int](), list[int]()
        for digest, count in shown:
            grid, text = (1, 1, count) if count % 2 else None, [drawn.randrange(99)] * 2
            written += [*text, *there.add(digest, count, grid).ids.tolist()]
            expected += [*text, *here.add(digest, count, grid).ids.tolist()]
        cut = drawn.randrange(1, len(written) + 1)
        tokens, own = as_tokens(written[:cut]), as_tokens(expected[:cut])
        ours, theirs = PictureNames(here), PictureNames(there)
        stored = theirs.of(tokens)
        assert ours.adopted(tokens, stored).tolist() == own.tolist()
        assert ours.spelled(own).tobytes() == theirs.spelled(tokens).tobytes()
    assert ours.spelled(as_tokens([1, 2])).tolist() == [1, 2]


def test_a_picture_with_other_positions_is_another_one() -> None:
    """The one that the processor makes now counts."""
    table = PictureTable()
    stored = table.add(b"1" * 32, 4)
    now = table.add(b"1" * 32, 6)
    assert now.first == stored.first + 4
    assert table.add(b"1" * 32, 6) is now
    tokens = stored.ids
    with pytest.raises(PromptError, match="sees it otherwise"):
        renumbered(tokens, as_json([stored]), {now.digest: now})
    with pytest.raises(PromptError, match="is not named"):
        renumbered(as_tokens([FIRST_OF_PICTURES + 99]), as_json([stored]), {})

"""The law holds across saving, leaving and coming back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.models import ARCHITECTURES
from support.prompts import PROMPT
from support.reused import (
    CHECKPOINTS,
    each_kind_and_all,
    next_prompts,
    with_and_without_checkpoints,
)
from support.saving import Make, answer, last, pieces, restored_by, save, saved, session, tiny
from support.waiting import until

from mlxrunner import Runner
from mlxrunner.sessions.store import TEXT, SessionStore
from mlxrunner.testing import oracle_runner

pytestmark = pytest.mark.usefixtures("small_steps")
PARTS = pytest.mark.parametrize(
    ("part", "why"),
    [
        ("weights", "other weights"),
        ("config", "another config.json"),
        ("tokenizer", "another tokenizer"),
        ("template", "another chat template"),
    ],
)


@with_and_without_checkpoints
@each_kind_and_all
def test_every_kind_of_layer_goes_on_as_if_nothing_had_been(
    saver: Make, kinds: list[str], options: dict[str, int]
) -> None:
    """Restored answers equal a cold run's for every next prompt, evaluating only what is new."""
    runner = oracle_runner(kinds, **options)
    answer(runner, PROMPT)
    answer(runner, [*PROMPT[:-3], 40, 41], 20)
    said = list(runner.entry.tokens)
    save(saver(runner))
    for what, prompt in next_prompts(said).items():
        restored, line = restored_by(saver, kinds, **options)
        assert line.startswith(f"{len(said)} tokens restored")
        assert answer(restored, prompt) == answer(oracle_runner(kinds, **options), prompt), what
        assert restored.entry.is_true
    restored, _ = restored_by(saver, kinds, **options)
    usage = last(restored, [*said, 5, 6, 7])
    assert (usage.outcome, usage.reason) == ("hit", "restored")
    assert (usage.cached_tokens, usage.evaluated_tokens) == (len(said), 3)


@pytest.mark.exhaustive(5)
@pytest.mark.parametrize(
    ("architecture", "kv_bits"),
    [*((name, None) for name in ARCHITECTURES), ("llama", 8), ("qwen3", 4)],
)
def test_every_architecture_goes_on_as_if_nothing_had_been(
    saver: Make, architecture: str, kv_bits: int | None
) -> None:
    """The next turn has the tokens and logits of a runner that never left.

    Edited turns have the tokens of a cold run.
    """
    _, make = tiny(architecture, wide=kv_bits is not None, max_position_embeddings=16384)
    often = {"prefill_step": 24, "rewind_slack": 10, "checkpoint_interval": 50}
    new = partial(make, kv_bits=kv_bits, **often)
    runner = new()
    prompt = np.random.default_rng(0).integers(0, 290, 120).tolist()
    answer(runner, prompt, 20)
    answer(runner, [*prompt, 5, 6], 20)
    said = list(runner.entry.tokens)
    save(saver(runner))
    restored = new()
    saver(restored).load("one")
    assert answer(restored, [*said, 5, 6, 7]) == answer(runner, [*said, 5, 6, 7])
    for what, prompt in next_prompts(said).items():
        restored = new()
        saver(restored).load("one")
        (tokens, found), (wanted, expected) = (
            zip(*answer(one, prompt), strict=True) for one in (restored, new())
        )
        assert tokens == wanted, what
        assert np.allclose(found, expected, atol=1e-4), what
        assert restored.entry.is_true


def test_a_checkpoint_is_of_use_after_a_restore(saver: Make) -> None:
    """A state can't be rewound by itself: what was saved of it earlier is."""
    runner = oracle_runner(["recurrent", "full"], **CHECKPOINTS)
    answer(runner, PROMPT)
    offsets = runner.entry.checkpoints.offsets
    save(saver(runner))
    restored, _ = restored_by(saver, ["recurrent", "full"], **CHECKPOINTS)
    assert restored.entry.checkpoints.offsets == offsets
    assert last(restored, [*PROMPT[: offsets[1] + 1], 99, 98]).cache.checkpoint == offsets[1]


def rows_beyond(runner: Runner, end: int) -> Iterator[bytes]:
    """The bytes of each stored row of a token from `end` on."""
    for cache in runner.entry.caches:
        for array in cache.state:
            if isinstance(array, mx.array) and array.ndim == 4:
                stored = cache.export().arrays
                first = cache.offset - stored["keys" if "keys" in stored else "0"].shape[2]
                host = np.array(array)
                for head in range(host.shape[1]):
                    yield from (host[0, head, end - first + i].tobytes() for i in range(4))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "llama4"])
def test_nothing_that_was_trimmed_is_in_the_file(
    saver: Make, store: SessionStore, architecture: str
) -> None:
    """Keys and values of tokens that were taken back stay in the buffers and out of the file."""
    _, new = tiny(architecture, max_position_embeddings=16384)
    runner = new(rewind_slack=40, checkpoint_budget=0, whole=True)
    said = np.random.default_rng(0).integers(0, 290, 34).tolist()
    answer(runner, [*said, 250, 251, 252, 253, 254, 255], 2)
    trimmed, kept = list(rows_beyond(runner, 36)), list(rows_beyond(runner, 28))
    answer(runner, said, 1)
    assert runner.entry.offsets == [34] * len(runner.entry.caches)
    assert list(rows_beyond(runner, 36)) == trimmed  # the buffers still have them
    save(saver(runner))
    content = b"".join(one.read_bytes() for one in pieces(store.folder / "one"))
    assert trimmed
    assert kept
    assert [row for row in trimmed if row in content] == []
    assert [row for row in kept if row not in content] == []
    used = sum(cache.used_bytes for cache in runner.entry.caches)
    assert len(content) < used + 8000


def test_nothing_is_read_before_somebody_needs_it(
    saver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a session costs its header and tokens, the first turn the rest."""
    saved(saver)
    read: list[str] = []
    from mlxrunner.system.tensorfile import StoredArray

    original = StoredArray.read_into
    monkeypatch.setattr(
        StoredArray,
        "read_into",
        lambda array, views: (read.append(array.name), original(array, views))[1],
    )
    restored, _ = restored_by(saver)
    assert read == ["tokens"]
    last(restored, [*PROMPT, 5])
    assert sorted(read) == ["0.keys", "0.values", "1.keys", "1.values", "tokens"]


def test_a_reset_gives_up_what_was_not_read_yet(saver: Make) -> None:
    """The next request starts cold."""
    saved(saver)
    restored, _ = restored_by(saver)
    restored.reset()
    assert last(restored, PROMPT).outcome == "miss"


@each_kind_and_all
def test_only_what_was_said_is_saved(saver: Make, store: SessionStore, kinds: list[str]) -> None:
    """Neither file has evaluated tokens that were not said, and what continues is exact."""
    runner = oracle_runner(kinds, **CHECKPOINTS)
    answer(runner, PROMPT)
    said = session(runner)
    answer(runner, [*runner.entry.tokens, 111, 112, 113, 114])
    kept = saver(runner)
    kept.save("one", said)
    kept.wait()
    restored, _ = restored_by(saver, kinds, **CHECKPOINTS)
    tokens = said.history.rendering.tokens
    assert tuple(restored.entry.tokens) == tokens[: len(restored.entry.tokens)]
    for piece in pieces(store.folder / "one"):
        assert np.array([111, 112, 113], np.int32).tobytes() not in piece.read_bytes()
    for one in (runner, restored):
        assert answer(one, [*tokens, 5, 6]) == answer(oracle_runner(kinds), [*tokens, 5, 6])


@PARTS
def test_another_model_keeps_the_text_and_says_why(saver: Make, part: str, why: str) -> None:
    """The caches are dropped; the tokens too where they may mean something else."""
    saved(saver)
    other = oracle_runner()
    found, line = saver(other, **{part: "another"}).load("one")
    assert line == f"its caches are dropped, its text is kept: {why}"
    said = [{"role": role, "content": "hello"} for role in ("user", "assistant")]
    assert found.messages == said
    kept = 0 if part in ("tokenizer", "template") else len(PROMPT) + 5
    assert len(found.history.rendering.tokens) == kept
    assert last(other, PROMPT).outcome == "miss"


def test_another_format_of_caches_keeps_the_text_and_says_why(saver: Make) -> None:
    """Other kinds of layers, or --kv-bits."""
    saved(saver, ["full", "sliding"])
    for kinds in (["full", "full"], ["full", "sliding", "full"]):
        _, line = saver(oracle_runner(kinds)).load("one")
        assert line == "its caches are dropped, its text is kept: caches of another format"


def test_a_context_that_is_too_short_keeps_the_text_and_says_why(saver: Make) -> None:
    saved(saver)
    _, line = restored_by(saver, context=20)
    said = f"{len(PROMPT) + 5} tokens, and the context is 20"
    assert line == f"its caches are dropped, its text is kept: {said}"


def test_text_only(saver: Make, store: SessionStore) -> None:
    """No cache file, and none that is left from before."""
    runner = saved(saver)
    save(saver(runner, caches=False))
    assert os.listdir(store.folder / "one") == [TEXT]
    _, line = saver(oracle_runner()).load("one")
    assert line == "without caches: the first turn evaluates it again"


def arrays_of(restored: Runner, original: Runner) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield each array of an entry with that of another one."""
    for one, other in zip(restored.entry.caches, original.entry.caches, strict=True):
        for name, array in one.export().arrays.items():
            yield array, other.export().arrays[name]


def test_fewer_bits_in_the_file(saver: Make, store: SessionStore) -> None:
    """8 bits take under a third of float32 and differ by a hundredth; states stay exact."""
    _, new = tiny("gemma3_text", head_dim=64)
    runner = new()
    prompt = np.random.default_rng(0).integers(0, 290, 200).tolist()
    answer(runner, prompt)
    save(saver(runner), "whole")
    save(saver(runner, kv_bits=8), "packed")
    whole, packed = (store.nbytes(name)[1] for name in ("whole", "packed"))
    assert packed < 0.32 * whole
    restored = new()
    assert "tokens restored" in saver(restored).load("packed")[1]
    for array, exact in arrays_of(restored, runner):
        assert array.shape == exact.shape
        assert mx.abs(array - exact).max().item() < 0.01 * mx.abs(exact).max().item()  # type: ignore[operator]
    assert last(restored, [*restored.entry.tokens, 5]).evaluated_tokens == 1


def test_bfloat16_comes_back_bit_by_bit(saver: Make) -> None:
    """numpy does not know the type."""
    model, new = tiny("llama")
    model.set_dtype(mx.bfloat16)
    runner = new()
    answer(runner, PROMPT)
    save(saver(runner))
    restored = new()
    saver(restored).load("one")
    for array, exact in arrays_of(restored, runner):
        assert array.dtype == mx.bfloat16
        assert mx.array_equal(array, exact)


@pytest.mark.parametrize("kinds", [["full"], ["sliding", "recurrent"]], ids="-".join)
def test_a_changed_digit_of_the_tokens_costs_a_cold_turn(
    saver: Make, store: SessionStore, kinds: list[str]
) -> None:
    """It is said, and neither the tokens nor the caches are used."""
    saved(saver, kinds)
    file = store.folder / "one" / TEXT
    text = file.read_text()
    file.write_text(text.replace(f"[{PROMPT[0]}, ", f"[{PROMPT[0] + 1}, ", 1))
    assert file.read_text() != text
    restored = oracle_runner(kinds)
    found, line = saver(restored).load("one")
    assert line.startswith("its file was changed by another program: its tokens and caches are")
    assert [turn.user for turn in found.history.turns] == ["hello"]
    assert found.history.rendering.tokens == ()
    assert last(restored, PROMPT).cached_tokens == 0


def test_caches_that_came_while_others_were_written_follow(
    saver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further turn is needed: a kill then loses no turn that had ended."""
    runner = oracle_runner(["full", "recurrent"])
    keeper, goes_on, save_cache = saver(runner), threading.Event(), SessionStore.save_cache

    def slowly(store: SessionStore, name: str, write: Any) -> None:
        goes_on.wait()
        save_cache(store, name, write)

    monkeypatch.setattr(SessionStore, "save_cache", slowly)
    for prompt in (PROMPT, [*PROMPT, 40, 41]):
        answer(runner, prompt)
        keeper.save("one", session(runner))
    said = list(runner.entry.tokens)
    assert not keeper.write_behind()
    runner.evaluate([*said, 50, 51])  # as what is typed
    goes_on.set()
    until(keeper.write_behind)
    assert not keeper.write_behind()
    keeper.wait()
    restored = oracle_runner(["full", "recurrent"])
    _, line = saver(restored).load("one")
    assert line.startswith(f"{len(said)} tokens restored")

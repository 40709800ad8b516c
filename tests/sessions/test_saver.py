"""The law holds across saving, leaving and coming back, whatever happened to the file."""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.mixes import (
    CHECKPOINTS,
    each_kind_and_all,
    next_prompts,
    with_and_without_checkpoints,
)
from support.models import ARCHITECTURES, tiny_config, tiny_model
from support.prompts import PROMPT
from support.sample import fewer
from support.waiting import PATIENCE_S

from mlxrunner import Runner
from mlxrunner.errors import SessionError
from mlxrunner.models.facts import facts_of
from mlxrunner.sessions.history import History, Rendering, Turn
from mlxrunner.sessions.saver import Saver
from mlxrunner.sessions.session import Branch, Session
from mlxrunner.sessions.store import CACHE, TEXT, SessionStore
from mlxrunner.testing import ByteTokenizer, interrupt_at, oracle_runner

Make = Callable[..., Saver]
PARTS = pytest.mark.parametrize(
    ("part", "why"),
    [
        ("weights", "other weights"),
        ("config", "another config.json"),
        ("tokenizer", "another tokenizer"),
        ("template", "another chat template"),
    ],
)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow and move every few tokens, checkpoints that are close to each other."""
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 4)
    monkeypatch.setattr("mlxrunner.cache.layers.full.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.checkpoints.SPACING", 3)


def session(runner: Runner, text: str = "hello") -> Session:
    tokens = tuple(runner.entry.tokens)
    return Session(
        "oracle",
        {
            "main": Branch(
                None,
                History((Turn(text, text),), Rendering(runner.tokenizer.decode(tokens), tokens)),
            )
        },
    )


def answer(runner: Runner, prompt: list[int], n: int = 6) -> list[tuple[int | None, float | None]]:
    """Tokens and their log-probabilities."""
    return [
        (chunk.token, chunk.logprob)
        for chunk in runner.generate(prompt, max_tokens=n, stop_tokens=[], logprobs=0)
    ]


def last(runner: Runner, prompt: list[int], n: int = 6) -> Any:
    """The usage of a request."""
    return list(runner.generate(prompt, max_tokens=n, stop_tokens=[]))[-1].usage


def save(saver: Saver, name: str = "one") -> None:
    saver.save(name, session(saver.runner))
    saver.wait()


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
        restored = oracle_runner(kinds, **options)
        _, line = saver(restored).load("one")
        assert line.startswith(f"{len(said)} tokens restored")
        assert answer(restored, prompt) == answer(oracle_runner(kinds, **options), prompt), what
        assert restored.entry.is_true
    restored = oracle_runner(kinds, **options)
    saver(restored).load("one")
    usage = last(restored, [*said, 5, 6, 7])
    assert (usage.outcome, usage.cached_tokens, usage.evaluated_tokens, usage.reason) == (
        "hit",
        len(said),
        3,
        "restored",
    )


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
    sizes = {"hidden_size": 128, "head_dim": 32} if kv_bits else {}
    config = tiny_config(architecture, max_position_embeddings=16384, vocab_size=300, **sizes)
    model = tiny_model(config)

    def new() -> Runner:
        options = {
            "context": 512,
            "prefill_step": 24,
            "rewind_slack": 10,
            "checkpoint_interval": 50,
            "kv_bits": kv_bits,
        }
        return Runner(
            model,
            ByteTokenizer(),
            facts_of(model, config),
            **options,  # type: ignore[arg-type]
        )

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
        cold = new()
        found, expected = answer(restored, prompt), answer(cold, prompt)
        assert [token for token, _ in found] == [token for token, _ in expected], what
        assert np.allclose(
            [p for _, p in found],  # type: ignore[arg-type]
            [p for _, p in expected],  # type: ignore[arg-type]
            atol=1e-4,
        ), what
        assert restored.entry.is_true


def test_a_checkpoint_is_of_use_after_a_restore(saver: Make) -> None:
    """A state can't be rewound by itself: what was saved of it earlier is."""
    runner = oracle_runner(["recurrent", "full"], **CHECKPOINTS)
    answer(runner, PROMPT)
    offsets = runner.entry.checkpoints.offsets
    save(saver(runner))
    restored = oracle_runner(["recurrent", "full"], **CHECKPOINTS)
    saver(restored).load("one")
    assert restored.entry.checkpoints.offsets == offsets
    assert last(restored, [*PROMPT[: offsets[1] + 1], 99, 98]).cache.checkpoint == offsets[1]


def rows_beyond(runner: Runner, end: int) -> Iterator[bytes]:
    """The bytes of each stored row of a token from `end` on."""
    for cache in runner.entry.caches:
        for array in cache.state:
            if isinstance(array, mx.array) and array.ndim == 4:
                first = (
                    cache.offset
                    - cache.export()
                    .arrays["keys" if "keys" in cache.export().arrays else "0"]
                    .shape[2]
                )
                host = np.array(array)
                yield from (
                    host[0, head, end - first + i].tobytes()
                    for head in range(host.shape[1])
                    for i in range(4)
                )


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "llama4"])
def test_nothing_that_was_trimmed_is_in_the_file(
    saver: Make, store: SessionStore, architecture: str
) -> None:
    """Keys and values of tokens that were taken back stay in the buffers and out of the file."""
    config = tiny_config(architecture, max_position_embeddings=16384, vocab_size=300)
    model = tiny_model(config)
    runner = Runner(
        model,
        ByteTokenizer(),
        facts_of(model, config),
        context=512,
        rewind_slack=40,
        checkpoint_budget=0,
        whole=True,
    )
    said = np.random.default_rng(0).integers(0, 290, 34).tolist()
    answer(runner, [*said, 250, 251, 252, 253, 254, 255], 2)
    trimmed, kept = list(rows_beyond(runner, 36)), list(rows_beyond(runner, 28))
    answer(runner, said, 1)
    assert runner.entry.offsets == [34] * len(runner.entry.caches)
    assert list(rows_beyond(runner, 36)) == trimmed  # the buffers still have them
    save(saver(runner))
    content = (store.folder / "one" / CACHE).read_bytes()
    assert trimmed
    assert kept
    assert [row for row in trimmed if row in content] == []
    assert [row for row in kept if row not in content] == []
    used = sum(cache.used_bytes for cache in runner.entry.caches)
    assert len(content) < used + 4000


def test_nothing_is_read_before_somebody_needs_it(
    saver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a session costs its header and tokens, the first turn the rest."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    save(saver(runner))
    read: list[str] = []
    from mlxrunner.stored.tensors import StoredArray

    original = StoredArray.read
    monkeypatch.setattr(
        StoredArray, "read", lambda array: (read.append(array.name), original(array))[1]
    )
    restored = oracle_runner()
    saver(restored).load("one")
    assert read == ["tokens"]
    last(restored, [*PROMPT, 5])
    assert sorted(read) == [
        "layers.0.keys",
        "layers.0.values",
        "layers.1.keys",
        "layers.1.values",
        "tokens",
    ]


def test_a_reset_gives_up_what_was_not_read_yet(saver: Make) -> None:
    """The next request starts cold."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    save(saver(runner))
    restored = oracle_runner()
    saver(restored).load("one")
    restored.reset()
    assert last(restored, PROMPT).outcome == "miss"


def test_an_interrupt_while_reading_costs_nothing(
    saver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of it: the next turn reads it."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    said = list(runner.entry.tokens)
    save(saver(runner))
    restored = oracle_runner()
    saver(restored).load("one")
    from mlxrunner.stored.tensors import StoredArray

    original = StoredArray.read

    def interrupted(array: StoredArray) -> bytearray:
        if array.name == "layers.1.values":
            raise KeyboardInterrupt
        return original(array)

    monkeypatch.setattr(StoredArray, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        last(restored, [*said, 5])
    monkeypatch.setattr(StoredArray, "read", original)
    assert last(restored, [*said, 5]).cached_tokens == len(said)


@each_kind_and_all
def test_only_what_was_said_is_saved(saver: Make, store: SessionStore, kinds: list[str]) -> None:
    """Neither file has evaluated tokens that were not said, and what goes on is exact."""
    runner = oracle_runner(kinds, **CHECKPOINTS)
    answer(runner, PROMPT)
    said = session(runner)
    answer(runner, [*runner.entry.tokens, 111, 112, 113, 114])
    kept = saver(runner)
    kept.save("one", said)
    kept.wait()
    restored = oracle_runner(kinds, **CHECKPOINTS)
    saver(restored).load("one")
    tokens = said.history.rendering.tokens
    assert tuple(restored.entry.tokens) == tokens[: len(restored.entry.tokens)]
    assert (
        np.array([111, 112, 113], np.int32).tobytes()
        not in (store.folder / "one" / CACHE).read_bytes()
    )
    for one in (runner, restored):
        assert answer(one, [*tokens, 5, 6]) == answer(oracle_runner(kinds), [*tokens, 5, 6])


@pytest.mark.parametrize(
    "kinds", [["full", "full"], ["sliding", "recurrent", "chunked"]], ids=lambda kinds: kinds[0]
)
def test_ctrl_c_at_any_line_of_a_restore_costs_nothing(saver: Make, kinds: list[str]) -> None:
    """An interrupted restore leaves a true entry or a later read, and a cold run's answer."""
    runner = oracle_runner(kinds, **CHECKPOINTS)
    answer(runner, PROMPT)
    said = list(runner.entry.tokens)
    save(saver(runner))
    cold = answer(oracle_runner(kinds, **CHECKPOINTS), [*said, 5], 3)

    def opened() -> Runner:
        restored = oracle_runner(kinds, **CHECKPOINTS)
        saver(restored).load("one")
        return restored

    restored = opened()
    with interrupt_at(-1) as seen:
        assert answer(restored, [*said, 5], 3) == cold
    for line in range(1, seen[0] + 1, max(1, seen[0] // fewer(200, 40))):
        restored = opened()
        with suppress(KeyboardInterrupt), interrupt_at(line):
            answer(restored, [*said, 5], 3)
        assert restored.entry.is_true, line
        assert answer(restored, [*said, 5], 3) == cold, line


def test_ctrl_c_at_any_line_of_a_save_loses_nothing(saver: Make, store: SessionStore) -> None:
    """Text and caches are whole, old or new, and the session is unlocked and usable."""
    kinds = ["full", "sliding", "recurrent"]
    runner = oracle_runner(kinds, **CHECKPOINTS)
    answer(runner, PROMPT)
    kept, said = saver(runner), session(runner)
    with interrupt_at(-1) as seen:
        kept.save("one", said)
    kept.wait()
    cold = answer(oracle_runner(kinds, **CHECKPOINTS), [*said.history.rendering.tokens, 5])
    for line in range(1, seen[0] + 1, max(1, seen[0] // fewer(150, 40))):
        with suppress(KeyboardInterrupt), interrupt_at(line):
            kept.save("one", said)
        kept.wait()
        assert store.load("one").history == said.history, line
        with SessionStore(store.folder).lock("one"):
            pass
        restored = oracle_runner(kinds, **CHECKPOINTS)
        assert saver(restored).load("one")[1].startswith("30 tokens restored"), line
    assert answer(runner, [*said.history.rendering.tokens, 5]) == cold


@PARTS
def test_another_model_keeps_the_text_and_says_why(saver: Make, part: str, why: str) -> None:
    """The caches are dropped; the tokens too where they may mean something else."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    save(saver(runner))
    other = oracle_runner()
    found, line = saver(other, **{part: "another"}).load("one")
    assert line == f"its text is kept, its caches are dropped: {why}"
    assert found.messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello"},
    ]
    assert len(found.history.rendering.tokens) == (
        0 if part in ("tokenizer", "template") else len(PROMPT) + 5
    )
    assert last(other, PROMPT).outcome == "miss"


def test_another_format_of_caches_keeps_the_text_and_says_why(saver: Make) -> None:
    """Other kinds of layers, or --kv-bits."""
    runner = oracle_runner(["full", "sliding"])
    answer(runner, PROMPT)
    save(saver(runner))
    for kinds in (["full", "full"], ["full", "sliding", "full"]):
        _, line = saver(oracle_runner(kinds)).load("one")
        assert line == "its text is kept, its caches are dropped: caches of another format"


def test_a_context_that_is_too_short_keeps_the_text_and_says_why(saver: Make) -> None:
    """Both numbers."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    save(saver(runner))
    _, line = saver(oracle_runner(context=20)).load("one")
    assert (
        line == f"its text is kept, its caches are dropped: "
        f"{len(PROMPT) + 5} tokens, and the context is 20"
    )


def test_text_only(saver: Make, store: SessionStore) -> None:
    """No cache file, and none that is left from before."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    save(saver(runner))
    save(saver(runner, caches=False))
    assert os.listdir(store.folder / "one") == [TEXT]
    _, line = saver(oracle_runner()).load("one")
    assert line == "without caches: the first turn evaluates it anew"


def test_fewer_bits_in_the_file(saver: Make, store: SessionStore) -> None:
    """8 bits take under a third of float32 and differ by a hundredth; states stay exact."""
    config = tiny_config("gemma3_text", head_dim=64, vocab_size=300)
    model = tiny_model(config)

    def new() -> Runner:
        return Runner(model, ByteTokenizer(), facts_of(model, config), context=512)

    runner = new()
    prompt = np.random.default_rng(0).integers(0, 290, 200).tolist()
    answer(runner, prompt)
    save(saver(runner), "whole")
    save(saver(runner, kv_bits=8), "packed")
    whole, packed = (store.nbytes(name)[1] for name in ("whole", "packed"))
    assert packed < 0.32 * whole
    restored = new()
    assert "tokens restored" in saver(restored).load("packed")[1]
    for cache, original in zip(restored.entry.caches, runner.entry.caches, strict=True):
        for name, array in cache.export().arrays.items():
            exact = original.export().arrays[name]
            assert array.shape == exact.shape
            assert (
                mx.abs(array - exact).max().item()  # type: ignore[operator]
                < 0.01 * mx.abs(exact).max().item()
            )
    assert last(restored, [*restored.entry.tokens, 5]).evaluated_tokens == 1


def test_bfloat16_comes_back_bit_by_bit(saver: Make) -> None:
    """numpy does not know the type."""
    config = tiny_config("llama", vocab_size=300)
    model = tiny_model(config)
    model.set_dtype(mx.bfloat16)

    def new() -> Runner:
        return Runner(model, ByteTokenizer(), facts_of(model, config), context=512)

    runner = new()
    answer(runner, PROMPT)
    save(saver(runner))
    restored = new()
    saver(restored).load("one")
    for cache, original in zip(restored.entry.caches, runner.entry.caches, strict=True):
        for name, array in cache.export().arrays.items():
            assert array.dtype == mx.bfloat16
            assert mx.array_equal(array, original.export().arrays[name])


def test_the_next_turn_runs_while_the_last_one_is_written(
    saver: Make, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the moment of the save, one copy is held, and `wait` writes what is newer."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    first = list(runner.entry.tokens)
    may_write, writes = threading.Event(), []
    original = store.save_cache

    def slowly(name: str, *arguments: Any) -> None:
        may_write.wait(PATIENCE_S)
        writes.append(name)
        original(name, *arguments)

    monkeypatch.setattr(store, "save_cache", slowly)
    kept = saver(runner)
    kept.save("one", session(runner, "first"))
    answer(runner, [*first, 5, 6])
    kept.save("one", session(runner, "second"))  # the first is not written yet
    assert store.load("one").history.turns[0].user == "second"
    assert writes == []
    second = list(runner.entry.tokens)
    runner.evaluate([*second, 70, 71, 72, 73, 74, 75, 76, 77])  # typed, and not sent yet
    may_write.set()
    kept.wait()
    assert writes == ["one", "one"]
    restored = oracle_runner()
    saver(restored).load("one")
    assert list(restored.entry.tokens) == second


def test_what_is_not_written_yet_is_written_before_another_session_is_loaded(
    saver: Make, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file has its own tokens."""
    runner = oracle_runner()
    answer(runner, [99, 98, 97])
    save(saver(runner), "other")
    answer(runner, PROMPT)
    original = store.save_cache
    writing = threading.Event()
    monkeypatch.setattr(
        store, "save_cache", lambda *arguments: (writing.wait(0.2), original(*arguments))
    )
    kept = saver(runner)
    kept.save("one", session(runner))
    answer(runner, [*runner.entry.tokens, 5])
    said = list(runner.entry.tokens)
    kept.save("one", session(runner))
    kept.load("other")
    assert list(runner.entry.tokens)[:3] == [99, 98, 97]
    saver(runner).load("one")
    assert list(runner.entry.tokens) == said


def test_caches_that_could_not_be_written_are_said_later(
    saver: Make, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next save or by `wait`; the text was saved."""
    runner = oracle_runner()
    answer(runner, PROMPT)
    kept = saver(runner)

    def full(*arguments: Any) -> None:
        raise SessionError("no room")

    monkeypatch.setattr(store, "save_cache", full)
    with pytest.raises(SessionError, match="no room"):
        kept.save("one", session(runner))
        kept.wait()
    kept.wait()  # said once
    assert store.load("one") is not None


# --- files that are not what they were
# ---------------------------------------------------------------------------------------------

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
    """A saved session, to be damaged; then a runner that has loaded it, and what was said."""
    runner = oracle_runner(["full", "full"])
    answer(runner, PROMPT)
    save(saver(runner))

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
    assert line.startswith("its text is kept, its caches are dropped: the cache ")
    assert answer(runner, PROMPT) == answer(oracle_runner(["full", "full"]), PROMPT)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, 700, -300, -1])
def test_a_truncated_file_is_one_line(
    damaged: Callable[[], tuple[Runner, str]], store: SessionStore, keep: int
) -> None:
    """Wherever it ends."""
    file = store.folder / "one" / CACHE
    file.write_bytes(file.read_bytes()[:keep])
    runner, line = damaged()
    assert line.startswith("its text is kept, its caches are dropped: the cache is truncated")
    assert last(runner, PROMPT).outcome == "miss"


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 100,
        struct.pack("<Q", 2**63) + b"x" * 100,
        struct.pack("<Q", 90) + b"[" * 90,
        struct.pack("<Q", 2) + b"[]",
        b"PK\x03\x04" * 50,
    ],
    ids=["ones", "a huge header", "brackets", "a list", "a zip file"],
)
def test_a_foreign_file_is_one_line(
    damaged: Callable[[], tuple[Runner, str]], store: SessionStore, content: bytes
) -> None:
    """It may be of any other kind."""
    (store.folder / "one" / CACHE).write_bytes(content)
    assert damaged()[1].startswith("its text is kept, its caches are dropped: the cache ")


def test_a_huge_header_is_not_read(
    damaged: Callable[[], tuple[Runner, str]], store: SessionStore
) -> None:
    """A file with holes, of a terabyte."""
    file = store.folder / "one" / CACHE
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 2**39))
        stream.truncate(2**40)
    assert "not a safetensors file" in damaged()[1]


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
    assert why in usage.cache.freed_by
    assert "\n" not in usage.cache.freed_by
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
    assert "the checksum of 'layers.1.values' is another one" in usage.cache.freed_by


def test_a_link_in_place_of_the_caches_is_not_followed(
    damaged: Callable[[], tuple[Runner, str]], store: SessionStore
) -> None:
    """Even to a file that would do."""
    file = store.folder / "one" / CACHE
    file.rename(store.folder / "elsewhere")
    file.symlink_to(store.folder / "elsewhere")
    assert damaged()[1].startswith(
        "its text is kept, its caches are dropped: the cache can't be read"
    )


def test_a_runner_that_is_gone_is_let_go(
    saver: Make, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saver of a chat that changes its model neither holds nor writes the old one."""
    import gc
    import weakref

    runner = oracle_runner()
    answer(runner, PROMPT)
    may_write = threading.Event()
    original = store.save_cache
    monkeypatch.setattr(
        store, "save_cache", lambda *arguments: (may_write.wait(PATIENCE_S), original(*arguments))
    )
    kept = saver(runner, holds=False)
    kept.save("one", session(runner))
    kept.save("one", session(runner))
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None
    may_write.set()
    kept.wait()
    _, line = saver(oracle_runner()).load("one")
    assert line.startswith("30 tokens restored")

"""Prompt caches of mlx-lm continue there as here, through mlx-lm's own functions."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from support.models import ARCHITECTURES, tiny_config, tiny_model, write_model

from mlxrunner import Runner
from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.cache.saved import Exported
from mlxrunner.errors import OptionError, SessionError
from mlxrunner.models.facts import facts_of
from mlxrunner.sessions.exchange import export_file, import_file, import_session
from mlxrunner.sessions.store import SessionStore
from mlxrunner.testing import ByteTokenizer

NEXT = [5, 6, 7]


class Tiny:
    """A tiny model, runners of it, and mlx-lm's way to continue."""

    def __init__(self, architecture: str, kv_bits: int | None = None) -> None:
        sizes = {"hidden_size": 128, "head_dim": 32} if kv_bits else {}
        self.config = tiny_config(
            architecture, max_position_embeddings=16384, vocab_size=300, **sizes
        )
        self.model, self.kv_bits = tiny_model(self.config), kv_bits
        self.options = CacheOptions(rewind_slack=10, kv_bits=kv_bits)

    def runner(self) -> Runner:
        facts = facts_of(self.model, self.config)
        return Runner(
            self.model,
            ByteTokenizer(),
            facts,
            context=512,
            prefill_step=24,
            rewind_slack=10,
            kv_bits=self.kv_bits,
        )

    def ours(self, runner: Runner, prompt: list[int], n: int = 8) -> list[int]:
        return [
            chunk.token
            for chunk in runner.generate(prompt, max_tokens=n, stop_tokens=[])
            if chunk.token is not None
        ]

    def theirs(self, cache: list[Any], tokens: list[int], n: int = 8) -> list[int]:
        found: list[int] = []
        logits = self.model(mx.array([tokens]), cache=cache)[0, -1]
        for _ in range(n):
            found.append(int(mx.argmax(logits).item()))  # type: ignore[arg-type]
            logits = self.model(mx.array([[found[-1]]]), cache=cache)[0, -1]
        return found

    def their_cache(self, tokens: list[int]) -> list[Any]:
        """Evaluated in chunks, and the last ones one by one: a window has gone round."""
        cache: list[Any] = make_prompt_cache(self.model)
        if self.kv_bits:
            cache = [layer.to_quantized(group_size=32, bits=self.kv_bits) for layer in cache]
        for begin in range(0, len(tokens) - 25, 40):
            self.model(mx.array([tokens[begin : min(begin + 40, len(tokens) - 25)]]), cache=cache)
        for token in tokens[-25:]:
            self.model(mx.array([[token]]), cache=cache)
        return cache


tinies = pytest.mark.parametrize(
    "tiny",
    [*((name, None) for name in ARCHITECTURES), ("qwen3", 8), ("llama", 4)],
    ids=lambda made: f"{made[0]} {made[1] or ''}".strip(),
)


@pytest.mark.exhaustive(8)
@tinies
@pytest.mark.parametrize("length", [5, 120])
def test_mlx_lm_goes_on_from_our_file(
    tmp_path: Path, tiny: tuple[str, int | None], length: int
) -> None:
    """load_prompt_cache reads it, and the model says there what it says here."""
    made, file = Tiny(*tiny), tmp_path / "x.safetensors"
    runner = made.runner()
    made.ours(runner, np.random.default_rng(0).integers(0, 290, length).tolist(), 20)
    said = list(runner.entry.tokens)
    exported = runner.entry.export()
    without_checkpoints = Exported(exported.tokens, exported.layers, [])
    export_file(file, made.model, "tiny", made.options, without_checkpoints)
    cache, metadata = load_prompt_cache(str(file), return_metadata=True)
    assert json.loads(metadata["tokens"]) == said
    # mlx_lm.generate --prompt-cache-file wants them.
    assert {"model", "tokenizer_config"} <= metadata.keys()
    assert made.theirs(cache, NEXT) == made.ours(runner, [*said, *NEXT])
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.exhaustive(8)
@tinies
@pytest.mark.parametrize("length", [30, 140])
def test_we_go_on_from_a_file_of_mlx_lm(
    tmp_path: Path, tiny: tuple[str, int | None], length: int
) -> None:
    """A file of save_prompt_cache is an entry of its tokens with the same answer as there."""
    made, file = Tiny(*tiny), tmp_path / "x.safetensors"
    said = np.random.default_rng(1).integers(0, 290, length).tolist()
    save_prompt_cache(str(file), made.their_cache(said))
    entry = import_file(file, made.model, made.options, said, trust=True)
    assert entry.offsets == [length] * len(entry.caches)
    runner = made.runner()
    runner.cache.adopt(entry.export())
    chunks = list(runner.generate([*said, *NEXT], max_tokens=8, stop_tokens=[]))
    assert [chunk.token for chunk in chunks] == made.theirs(made.their_cache(said), NEXT)
    usage = chunks[-1].usage
    assert usage is not None
    counts = (usage.outcome, usage.cached_tokens, usage.evaluated_tokens)
    assert counts == ("hit", length, len(NEXT))


def test_our_own_file_comes_back_without_being_told_the_tokens(tmp_path: Path) -> None:
    """They are in its metadata."""
    made, file = Tiny("gemma3_text"), tmp_path / "x.safetensors"
    tokens = list(range(60))
    exported(made, file, tokens)
    assert list(import_file(file, made.model, made.options, None).tokens) == tokens


@pytest.mark.exhaustive(8)
@tinies
@pytest.mark.parametrize("surplus", [-1, 1, 5])
def test_a_file_of_more_or_fewer_tokens_is_refused(
    tmp_path: Path, tiny: tuple[str, int | None], surplus: int
) -> None:
    """Keys and values count their tokens. Of states alone nothing is believed."""
    made, file = Tiny(*tiny), tmp_path / "x.safetensors"
    said = np.random.default_rng(1).integers(0, 290, 50).tolist()
    save_prompt_cache(str(file), made.their_cache(said[: 40 + surplus]))
    with pytest.raises(SessionError, match=r"tokens, not 40 tokens|has states only"):
        import_file(file, made.model, made.options, said[:40])


def exported(made: Tiny, file: Path, tokens: list[int]) -> None:
    """Export an entry with these tokens."""
    runner = made.runner()
    runner.evaluate(tokens)
    export_file(file, made.model, "tiny", made.options, runner.entry.export())


@pytest.mark.parametrize("name", ["mamba2", "gemma3_text", "llama", "lfm2"])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_tokens_that_mlx_lm_left_in_a_file_it_went_on_from_are_not_believed(
    tmp_path: Path, name: str, more: int
) -> None:
    """A program that keeps the metadata keeps the tokens of the states before."""
    made, file = Tiny(name), tmp_path / "x.safetensors"
    exported(made, file, list(range(1, 30)))
    cache, metadata = load_prompt_cache(str(file), return_metadata=True)
    for token in range(more):
        made.model(mx.array([[token]]), cache=cache)
    save_prompt_cache(str(file), cache, metadata)
    if not more:
        assert len(import_file(file, made.model, made.options, None).tokens) == 29
        return
    with pytest.raises(SessionError, match="does not say which tokens it is of"):
        import_file(file, made.model, made.options, None)
    with pytest.raises(SessionError, match=r"tokens, not 29 tokens|has states only"):
        import_file(file, made.model, made.options, list(range(1, 30)))


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_a_changed_digit_of_the_tokens_is_noticed(tmp_path: Path, name: str) -> None:
    """Keys of other tokens would give other answers."""
    made, file = Tiny(name), tmp_path / "x.safetensors"
    exported(made, file, [1, 2, 3])
    file.write_bytes(file.read_bytes().replace(b"[1, 2, 3]", b"[1, 2, 4]"))
    with pytest.raises(SessionError, match="does not say which tokens it is of"):
        import_file(file, made.model, made.options, None)


def test_states_that_we_have_exported_are_of_their_own_tokens(tmp_path: Path) -> None:
    """Given are the same, or the caller has to take the responsibility."""
    made, file = Tiny("mamba2"), tmp_path / "x.safetensors"
    exported(made, file, [1, 2, 3])
    assert import_file(file, made.model, made.options, [1, 2, 3]).offsets == [3, 3]
    with pytest.raises(SessionError, match="add --trust"):
        import_file(file, made.model, made.options, [1, 2])
    assert import_file(file, made.model, made.options, [1, 2], trust=True).offsets == [2, 2]


def test_a_file_that_names_another_model_of_this_machine_is_refused(tmp_path: Path) -> None:
    """Other weights in the same shapes make other keys."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        write_model(folder, "llama", seed=seed)
    made, file = Tiny("llama"), tmp_path / "x.safetensors"
    for name, is_refused in [(str(folders[0]), True), (str(folders[1]), False), ("o/x", False)]:
        save_prompt_cache(str(file), made.their_cache(list(range(40))), {"model": name})
        arguments = (file, made.model, made.options, list(range(40)), folders[1])
        if is_refused:
            with pytest.raises(SessionError, match="other weights: name the model that made it"):
                import_file(*arguments)
        assert list(import_file(*arguments, trust=is_refused).tokens) == [*range(40)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """mlx-lm's, of 40 tokens of a tiny Llama."""
    made = Tiny("llama")
    save_prompt_cache(str(tmp_path / "x.safetensors"), made.their_cache(list(range(40))))
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize(
    ("architecture", "tokens", "why"),
    [
        ("llama", None, "does not say which tokens it is of: give them with --tokens"),
        ("llama", list(range(39)), "39 tokens"),
        ("llama", list(range(41)), "41 tokens"),
        ("llama", [], "0 tokens"),
        ("gemma3_text", list(range(40)), "has 2 layers, and the model 3"),
        ("deepseek_v3", list(range(40)), "is of another model"),
        ("mamba2", list(range(40)), "has a KVCache for a recurrent layer"),
        ("gpt_oss", list(range(40)), "has a KVCache for a sliding layer"),
    ],
)
def test_a_file_that_is_of_something_else_is_one_line(
    file: Path, architecture: str, tokens: list[int] | None, why: str
) -> None:
    """Another number of tokens, or another model; both numbers are said."""
    made = Tiny(architecture)
    with pytest.raises(SessionError, match=why) as caught:
        import_file(file, made.model, made.options, tokens)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_a_window_of_another_size_is_one_line(tmp_path: Path) -> None:
    made, other = Tiny("gpt_oss"), Tiny("gpt_oss")
    config = {**other.config, "sliding_window": 24}
    save_prompt_cache(str(tmp_path / "x.safetensors"), other.their_cache(list(range(40))))
    with pytest.raises(SessionError, match="a window is of 16 tokens, and the model's of 24"):
        import_file(tmp_path / "x.safetensors", tiny_model(config), made.options, list(range(40)))


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return apply


def with_metadata(name: str, value: str) -> Callable[[bytes], bytes]:
    return with_header(lambda header: header["__metadata__"].update({name: value}))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[:-50],
    "cut off in the header": lambda content: content[:100],
    "of another kind": lambda content: b"GGUF" * 100,
    "no metadata": with_header(lambda header: header.pop("__metadata__")),
    "a class that is none": with_metadata("1.0", "make_prompt_cache"),
    "a class of something else": with_metadata("1.0", "_BaseCache"),
    "an unknown class": with_metadata("1.0", "../../xCache"),
    "numbers that are none": with_metadata("2.1.1", "eval"),
    "tokens that are none": with_metadata("0.tokens", "[[1, 2], [3]]"),
    "nested tokens": with_metadata("0.tokens", "[" * 10**5),
    "a huge array": with_header(lambda h: h["0.0"].update(shape=[2**40, 2**20, 2**20, 16])),
    "a path for a name": with_header(lambda h: h.update({"../../x": h.pop("0.0")})),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_one_line(file: Path, damage: Callable[[bytes], bytes]) -> None:
    """mlx-lm may make anything of it."""
    made = Tiny("llama")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SessionError) as caught:
        import_file(file, made.model, made.options, None)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_file_that_can_not_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    """Missing, a folder, or in a folder that is not there."""
    made = Tiny("llama")
    runner = made.runner()
    made.ours(runner, [1, 2, 3])
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("nothing.safetensors", "folder.safetensors", "no/where.safetensors"):
        with pytest.raises(SessionError, match=name):
            import_file(tmp_path / name, made.model, made.options, [1])
    for name in ("folder.safetensors", "no/where.safetensors", "x.bin"):
        with pytest.raises(SessionError, match=name):
            export_file(tmp_path / name, made.model, "tiny", made.options, runner.entry.export())
    assert [path.name for path in tmp_path.iterdir()] == ["folder.safetensors"]


def test_bits_that_a_model_cannot_have_are_an_error_in_one_line(tmp_path: Path, file: Path) -> None:
    """Heads of 16 numbers are refused here as where they are run."""
    write_model(tmp_path / "lfm2", "lfm2")
    store, tokens = SessionStore(tmp_path / "sessions"), list(range(40))
    why = "kv_bits: this model can't use a quantized cache: heads of 16 and 16 numbers"
    with pytest.raises(OptionError, match=why):
        import_session(file, "one", str(tmp_path / "lfm2"), tokens, 8, store)
    assert store.names() == []

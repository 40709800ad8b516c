"""A new kind of layer cache is one file and one line: those of docs/architecture.md.

The code is read from the page and run as it stands there, as if it were a file of the package.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from profiling import test_simulate as replays
from reuse import test_broken_off, test_warm_equals_cold
from support.prompts import PROMPT
from support.reused import (
    CHECKPOINTS,
    ENDS,
    FEW,
    NO_HELP,
    cold,
    mixes_of,
    small_steps,
    tokens,
    usage_of,
)
from support.saving import stored

from mlxrunner import ParallelRunner
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.layers import factory
from mlxrunner.cache.layers.extents import is_layer, read_extent
from mlxrunner.cache.protocol import EXTENTS, Everything, describe
from mlxrunner.models.facts import ModelFacts
from mlxrunner.sessions.store import SessionStore
from mlxrunner.testing import (
    LAYERS,
    PACKAGE,
    PRIME,
    VOCAB,
    ByteTokenizer,
    OracleLayer,
    OracleModel,
    oracle_runner,
)

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
NAME = "mlxrunner.cache.layers.trail"
FILE = os.path.join(PACKAGE, "cache", "layers", "trail.py")
"""Where the file would be: Ctrl-C comes between its lines, too."""

# In small steps, as the oracle suite runs.
__all__ = ["small_steps"]

MIXES = {
    "no-help": (["trail", "full"], NO_HELP),
    "checkpoints": (["full", "trail"], CHECKPOINTS),
    "few-checkpoints": (["trail", "sliding"], FEW),
    "all": (["full", "sliding", "recurrent", "trail", "chunked"], CHECKPOINTS),
}


mixes = mixes_of(MIXES)


def recur(tokens: mx.array, cache: Any) -> mx.array:
    """Change the state with each token, which sees it, as the model does."""
    state = cache.last if cache.last.shape[0] else mx.array([1], mx.int32)
    states = []
    for place in range(tokens.shape[0]):
        state = (state * 31 + tokens[place : place + 1] + 1) % PRIME
        states.append(state)
    cache.append(mx.concatenate(states))
    return mx.concatenate(states)


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's file, and its line in the registry; gone again after the test."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    *code, line = blocks
    module = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    exec(compile("\n".join(code), FILE, "exec"), vars(module))
    assert len(line.splitlines()) == 1
    for model_cache, make in eval(f"{{{line}}}", vars(module)).items():
        monkeypatch.setitem(factory.KINDS, model_cache, make)
    monkeypatch.setitem(LAYERS, "trail", OracleLayer(module.Trail, recur))
    yield module
    EXTENTS.pop("last_states", None)


def test_the_line_decides(kind: ModuleType) -> None:
    """Without it the model's own cache is looked after; with it the new kind takes its place."""
    (cache,) = factory.make_layer_caches(OracleModel(["trail"]))
    assert type(cache) is kind.TrailCache
    del factory.KINDS[kind.Trail]
    assert factory.layer_cache(kind.Trail(), factory.CacheOptions()).kind == "unknown"


@mixes
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_warm_equals_cold_for_every_split_after_every_end(mix: Any, end: Any) -> None:
    """The oracle suite: a request that ends in this way, then a prompt that leaves it anywhere."""
    test_warm_equals_cold.test_warm_equals_cold_for_every_split_after_every_end(mix, end)


@pytest.mark.exhaustive(0)
@mixes
def test_ctrl_c_at_any_line_leaves_a_true_entry(mix: Any) -> None:
    """Those of the new file included."""
    test_broken_off.test_ctrl_c_at_any_line_leaves_a_true_entry(mix)


@mixes
def test_a_conversation_evaluates_only_what_is_new(mix: Any) -> None:
    """Appending needs no rewind."""
    test_warm_equals_cold.test_a_conversation_evaluates_only_what_is_new(mix)


def test_a_few_tokens_are_taken_back_without_a_checkpoint() -> None:
    """The number is that of the page, and one more is a fresh start."""
    for back, cached in ((1, 22), (3, 20), (4, 0)):
        runner = oracle_runner(["trail"], **NO_HELP)
        tokens(runner, PROMPT[:23], 1)
        usage = usage_of(runner, [*PROMPT[: 23 - back], 111, 112])
        assert usage.cached_tokens == cached
        assert usage.cache.trim_limited_by == (None if cached else "trail")


def test_a_saved_session_comes_back(tmp_path: Path) -> None:
    """With its checkpoints: into another runner, from a file."""
    runner = oracle_runner(["trail", "full"], **CHECKPOINTS)
    answer = tokens(runner, PROMPT)
    before = runner.entry.checkpoints.offsets
    sessions = SessionStore(tmp_path)
    for prompt in ([*PROMPT, *answer, 5], [*PROMPT[:16], 6, 7]):
        other = oracle_runner(["trail", "full"], **CHECKPOINTS)
        found = stored(sessions, runner.entry)
        found.check(other.cache.outline())
        other.cache.adopt(found)
        assert other.entry.checkpoints.offsets == before
        chunks = list(other.generate(prompt, max_tokens=6))
        assert chunks[-1].usage.cached_tokens > 0
        assert [chunk.token for chunk in chunks] == cold(["trail", "full"], prompt)


def test_parallel_requests_answer_alike_also_after_a_restart(tmp_path: Path) -> None:
    """Four conversations in two slots are parked, and each turn but the first reuses its own."""
    kinds = ["trail", "full"]
    facts = ModelFacts("oracle", 4096, True, dict.fromkeys(kinds, 1), VOCAB)
    talks = [[first, *PROMPT] for first in (1, 2, 3, 4)]
    settings = {"context": 400, "max_sequences": 2, **CHECKPOINTS}
    for turn in range(3):
        parking = DiskCache(tmp_path, {"model": "oracle"}, limit=10**8)
        model = OracleModel(kinds)
        with ParallelRunner(model, ByteTokenizer(), facts, parking=parking, **settings) as runner:
            handles = [runner.submit(talk, max_tokens=6, stop_tokens=[]) for talk in talks]
            results = [handle.result() for handle in handles]
        parking.close()
        for talk, result in zip(talks, results, strict=True):
            assert result.tokens == cold(kinds, talk)
            assert (result.usage.cached_tokens > 0) == (turn > 0)
            talk += [*result.tokens, 5, 6, 7]


def test_a_damaged_session_is_refused(kind: ModuleType) -> None:
    """A number of states that does not fit the number of tokens is a ValueError."""
    cache = kind.TrailCache()
    with pytest.raises(ValueError, match="9 states of 20 tokens, and at most 4 are kept"):
        cache.fill({"states": mx.zeros((9,), mx.int32)}, 20)


@pytest.mark.parametrize("budget", [2**30, 300, 0], ids=["large", "small", "none"])
@pytest.mark.parametrize("kinds", [["trail"], ["trail", "sliding"]], ids="+".join)
def test_a_replay_agrees(
    kinds: list[str], budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request by request, with the same checkpoints kept and given up."""
    runner = oracle_runner(kinds, checkpoint_budget=budget, **replays.SMALL)
    logged = replays.converse(runner, tmp_path / "log", f"{kinds}{budget}", monkeypatch)
    assert logged[0].process["layers"][0]["extent"] == "last_states"
    replays.assert_agrees(logged)


def test_a_log_of_a_kind_that_is_gone_is_refused(kind: ModuleType) -> None:
    """Its extent is not known any more: nothing is guessed."""
    (cache,) = factory.make_layer_caches(OracleModel(["trail"]))
    cache.append(mx.array([1, 2], mx.int32))
    line = describe(cache)
    assert is_layer(line)
    assert read_extent(line, 100) == kind.LastStates(depth=4)
    del EXTENTS["last_states"]
    assert not is_layer(line)
    assert is_layer(line | {"extent": Everything.name})

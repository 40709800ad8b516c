"""Tokens, entries that nobody gave back or whose layers lost their way, and which is evicted."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drafting import Side

from mlxrunner import PromptError
from mlxrunner.cache import PrefixCache
from mlxrunner.cache.entry import (
    EVEN_TOKENS,
    GreedyDual,
    TokenBuffer,
    as_tokens,
    common_prefix,
    evaluation_cost,
    eviction_score,
)
from mlxrunner.cache.layers.extents import window_closes
from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.prefix import CopySource
from mlxrunner.cache.protocol import END
from mlxrunner.testing import OracleModel, interrupt_at

PROMPT = list(range(1, 41))


def taken(*kinds: str, budget: int = 0) -> Side:
    """Return a side that has evaluated PROMPT and still has its lease."""
    side = Side(OracleModel(list(kinds)), CacheOptions(), budget, None)
    side.take(PROMPT)
    return side


@pytest.mark.parametrize(
    ("kind", "budget"),
    [("recurrent", 0), ("unknown", 10**6), ("full", 0)],
    ids=lambda one: str(one),
)
def test_an_entry_that_nobody_gave_back_is_settled_when_it_is_asked_for(
    kind: str, budget: int
) -> None:
    """The end of a request may itself be interrupted: its lease is gone, and its pass is not.

    A layer that can't undo the pass goes back to the last checkpoint.
    """
    side, prompt = taken(kind, "full", budget=budget), PROMPT
    kept = side.cache.entry.checkpoints.offsets[-1] if budget else len(PROMPT)
    if kind == "full":
        side.lease.close()
        side.take(prompt := [*PROMPT[:20], 50])
    side.lease.begin_forward()
    side.forward([7, 8])
    del side.lease
    assert side.cache.current.is_true
    assert side.cache.current.tokens == prompt[:kept] != []


def test_a_request_is_told_of_a_pass_that_could_not_be_undone() -> None:
    """The lease of the one before is gone, without an end."""
    side = taken("unknown", "full", budget=0)
    side.lease.begin_forward()
    side.forward([7, 8])
    del side.lease
    with side.cache.begin([*PROMPT, 9]) as lease:
        cause = "an interrupted forward pass that could not be undone"
        assert (lease.lookup.cached, lease.lookup.evicted_by) == (0, cause)


def test_ctrl_c_while_tokens_are_appended_leaves_all_of_them_or_none() -> None:
    """Those that a rewind left in the buffer never count again."""
    for line in range(1, 12):
        tokens = TokenBuffer([1, 2, 3])
        tokens.truncate(1)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            tokens.extend([7, 8])
        assert tokens[:] in ([1], [1, 7, 8]), f"line {line}"


def test_no_checkpoint_is_taken_of_layers_that_are_ahead_of_the_tokens() -> None:
    side = taken("recurrent", budget=10**6)
    before = side.cache.entry.checkpoints.offsets
    side.lease.begin_forward()
    side.forward([7])
    assert side.lease.checkpoint() == []
    assert side.cache.entry.checkpoints.offsets == before
    side.lease.record([7])
    assert side.lease.checkpoint() != []


def test_what_a_draft_held_is_no_way_back_for_a_layer_that_it_does_not_hold() -> None:
    """A state undoes one pass by itself, and not two."""
    side = taken("unknown", "recurrent")
    side.lease.hold(1)
    for token in (7, 8):
        side.lease.begin_next()
        side.forward([token])
        side.lease.record([token])
    assert side.cache.entry.reach(len(PROMPT)) == (0, "unknown")


def test_what_a_draft_held_is_gone_once_other_tokens_take_its_place() -> None:
    """A layer that goes back after it by a checkpoint, and forth, holds another text there."""
    side = taken("unknown", "full", budget=10**6)
    side.lease.hold(1)
    side.lease.restart([*PROMPT[:30], 99])
    kept = side.lease.recorded
    assert 0 < kept <= 30
    other = [50] * (len(PROMPT) + 5 - kept)
    side.lease.begin_next()
    side.forward(other)
    side.lease.record(other)
    assert side.cache.entry.reach(len(PROMPT) + 2)[0] == kept


def test_layers_that_disagree_after_a_rewind_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    side = taken("full", "full")
    side.lease.close()
    monkeypatch.setattr(side.cache.entry.caches[0], "go_back", lambda to: None)
    with side.cache.begin([*PROMPT[:9], 99]) as lease:
        assert lease.lookup.evicted_by == "layers that disagreed after a rewind"
        assert (lease.recorded, lease.lookup.cached) == (0, 0)


def test_a_copy_has_no_checkpoint_of_what_it_does_not_copy() -> None:
    """Other tokens follow in it: a checkpoint there would be one of another text."""
    source = taken("recurrent", "full", budget=10**6)
    offsets = source.cache.entry.checkpoints.offsets
    assert len(offsets) > 1
    fork = PrefixCache(source.cache._make_caches, 10**6)
    prompt = [*PROMPT[: offsets[0] + 1], 99]
    with fork.begin(prompt, source=CopySource(source.cache, END)) as lease:
        assert lease.recorded == offsets[0]
        assert fork.entry.checkpoints.offsets == [offsets[0]]


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_a_saved_entry_is_read_again_after_an_interrupt(kind: str) -> None:
    """Ctrl-C may come at any line of it."""
    source = taken(kind, "full", budget=10**6).cache
    saved, line, lines = source.entry.export(), 0, [0]
    while lines[0] >= line:
        line += 4
        cache = PrefixCache(partial(make_layer_caches, OracleModel([kind, "full"]), CacheOptions()))
        cache.adopt(saved)
        with suppress(KeyboardInterrupt), interrupt_at(line) as lines:
            assert cache.current.tokens == PROMPT
        assert cache.current.tokens == PROMPT, f"line {line}"
        assert cache.current.is_true
    assert line > 20


tokens = st.lists(st.integers(0, 5), max_size=40)


def naive(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(tokens, tokens)
def test_common_prefix_is_what_a_loop_finds(a: list[int], b: list[int]) -> None:
    """Also when one list is empty or the beginning of the other."""
    assert common_prefix(as_tokens(a), as_tokens(b)) == naive(a, b)
    assert common_prefix(as_tokens(a), as_tokens(a + b)) == len(a)


@given(st.lists(st.one_of(tokens, st.integers(0, 40), st.integers(0, 5).map(lambda t: (t,)))))
def test_a_buffer_behaves_like_a_list(steps: list[list[int] | int | tuple[int]]) -> None:
    buffer, reference = TokenBuffer(), list[int]()
    for step in steps:
        if isinstance(step, int):
            buffer.truncate(step)
            del reference[step:]
        elif isinstance(step, tuple):
            buffer.append(*step)
            reference.extend(step)
        else:
            buffer.extend(step)
            reference.extend(step)
        assert buffer == reference
        assert list(buffer) == reference
        assert buffer[1:3] == reference[1:3]
        assert len(buffer) == len(reference)


def test_a_buffer_grows_past_its_first_allocation() -> None:
    buffer = TokenBuffer(range(1000))
    for token in range(1000, 3000):
        buffer.append(token)
    assert buffer == list(range(3000))
    assert buffer[-1] == 2999
    assert buffer == TokenBuffer(range(3000))
    assert buffer != TokenBuffer(range(2999))


@pytest.mark.parametrize("bad", [[1, -1], [2**31], [1.5], ["a"], [[1, 2]], [2**70]], ids=str)
def test_what_is_no_token_id_is_refused(bad: list[Any]) -> None:
    """With a message that says what was found; no tokens are an array of the right type."""
    with pytest.raises(PromptError, match="token ids have to be"):
        as_tokens(bad)
    assert as_tokens([]).dtype == np.int32


@pytest.mark.parametrize(
    ("tokens", "closes"), [(7, True), (8, False), (9, False), (12, False), (13, True), (30, True)]
)
@pytest.mark.exhaustive(6)
def test_a_window_is_complete_behind_a_gap(tokens: int, closes: bool) -> None:
    """Before a token has left it, or once the tokens after the gap fill it.

    8 tokens are seen, 2 are kept and 4 are dropped.
    """
    assert window_closes(8, tokens, keep=2, discard=4) == closes


def test_the_cost_grows_with_the_square_of_the_tokens() -> None:
    """Attention costs as much as the rest at EVEN tokens, and parts add up to the whole.

    Worth is the cost of what would be lost for its bytes.
    """
    assert evaluation_cost(EVEN_TOKENS) == 2 * EVEN_TOKENS
    assert evaluation_cost(3000, 1000) + evaluation_cost(1000) == evaluation_cost(3000)
    assert evaluation_cost(0) == evaluation_cost(500, 500) == 0
    assert eviction_score(2000, 100) > eviction_score(1000, 100) > eviction_score(1000, 200)
    assert eviction_score(2000, 100, begin=1900) < eviction_score(100, 10)
    assert eviction_score(10, 0) == evaluation_cost(10)


def test_the_least_valuable_is_chosen() -> None:
    """Only the worth counts while the clock stands still; ties go to the first."""
    dual = GreedyDual[str]()
    for name in "abc":
        dual.use(name)
    assert dual.least({"a": 2.0, "b": 1.0, "c": 3.0}) == "b"
    assert dual.least({"c": 1.0, "a": 1.0}) == "c"
    with pytest.raises(ValueError, match="empty"):
        dual.least({})


def test_what_is_never_used_again_goes_at_some_time() -> None:
    """Each one that is given up lets the clock continue, and others gain on the unused one."""
    dual = GreedyDual[int]()
    dual.use(0)
    given_up = []
    for number in range(1, 9):
        dual.use(number)
        key = dual.least({0: 5.0, number: 1.5})
        dual.evict(key, 5.0 if key == 0 else 1.5)
        given_up.append(key)
        if key == 0:
            break
    assert given_up == [1, 2, 3, 0]
    assert dual.clock == 5.0


def test_a_use_brings_a_key_up_to_the_clock_and_the_clock_never_goes_back() -> None:
    dual = GreedyDual[str]()
    dual.use("old")
    dual.use("big")
    dual.evict("big", 4.0)
    assert dual.value("old", 1.0) == 1.0
    dual.use("old")
    assert dual.value("old", 1.0) == 5.0
    dual.evict("never used", 1.0)
    assert dual.clock == 4.0
    dual.forget("old")
    assert dual.value("old", 1.0) == 1.0

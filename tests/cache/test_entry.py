"""States of an entry that requests seldom leave: nobody gave it back, a layer lost its way back."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
from support.drafting import Side

from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.cache.prefix import CopySource, PrefixCache
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
    """A layer that goes back behind it by a checkpoint, and forth, holds another text there."""
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

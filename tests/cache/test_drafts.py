"""Drafts on an entry: whatever is kept of them, each layer is as if it had been evaluated plainly.

This is tried with the oracle's layers of every kind, and with real architectures of random weights.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest
from support.architectures import VOCAB, build
from support.drafting import LINES, Drafting, Side
from support.reused import each_kind_and_all
from support.sample import fewer

from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.testing import VOCAB as ORACLES
from mlxrunner.testing import OracleModel, interrupt_at

NEAR = 1e-4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
PENDING = ("recurrent", "composite", "unknown")
"""The kinds that go back to where a draft began, and not to a place within it."""
ARCHITECTURES = (
    "llama qwen3 mixtral deepseek_v3 deepseek_v32 minicpm3 gpt_oss gemma3_text gemma3n olmo3 "
    "cohere2 llama4 baichuan_m1 qwen3_next qwen3_5 kimi_linear lfm2 jamba mamba mamba2 falcon_h1 "
    "nemotron_h granitemoehybrid olmo_hybrid plamo2 recurrent_gemma rwkv7 bailing_moe_linear "
    "longcat_flash"
).split()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that move, and checkpoints that come every few tokens."""
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.entry.SPACING", 8)


def play(drafting: Drafting, turns: int, *, interrupts: float = 0.0) -> Counter[str]:
    for _ in range(turns):
        drafting.begin()
        for _ in range(drafting.rng.randint(5, 14)):
            hit = drafting.rng.random() < interrupts
            drafting.step(drafting.rng.randint(1, LINES) if hit else None)
        drafting.end()
    return Counter(drafting.seen)


def happened(seen: Counter[str], *names: str) -> None:
    """Check that the random drafts came to all of it: a test that tries nothing holds nothing."""
    assert all(seen[name] for name in names), dict(seen)


@pytest.mark.exhaustive(0)
@each_kind_and_all
@pytest.mark.parametrize("context", [None, 48], ids=["room", "full"])
@pytest.mark.parametrize("budget", [0, 300, 10**6], ids=lambda budget: f"{budget}-bytes")
def test_random_drafts_on_the_oracle(kinds: list[str], context: int | None, budget: int) -> None:
    """The oracle sees the same after drafts as after plain steps."""
    seen: Counter[str] = Counter()
    for seed in range(fewer(4, 2)):
        model, rng = OracleModel(kinds), random.Random(seed)
        drafting = Drafting(model, rng, vocab=ORACLES, near=0, budget=budget, context=context)
        seen += play(drafting, 4, interrupts=0.1)
    happened(seen, "drafts", "rejected", "fewer", "interrupts")
    happened(seen, *(["shifts"] if context else []))
    happened(seen, *(["within"] if budget > 300 and kinds != ["full"] else []))
    assert bool(seen["pending"]) == any(kind in PENDING for kind in kinds)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("context", [None, 96], ids=["room", "full"])
def test_random_drafts_on_real_architectures(architecture: str, context: int | None) -> None:
    """The log-probabilities after what is kept are those of a cold run, token by token."""
    model, rng = build(architecture), random.Random(architecture)
    drafting = Drafting(model, rng, vocab=VOCAB, near=NEAR, context=context)
    seen = play(drafting, 3, interrupts=0.15)
    happened(seen, "drafts", "rejected")


@each_kind_and_all
def test_ctrl_c_at_any_line_of_a_draft_leaves_a_true_entry(kinds: list[str]) -> None:
    """Ctrl-C may come while a draft begins, is kept in part, is cut, and is evaluated again."""
    histories: list[list[int]] = []

    def request(side: Side) -> None:
        side.take(PROMPT)
        lease = side.lease
        for draft, kept in ((4, 2), (3, 3), (4, 1)):
            rows = [*lease.pending, *range(90, 91 + draft)]
            lease.begin_draft(len(rows))
            side.forward(rows)
            for count in (kept, kept - 1):
                lease.accept(rows[: len(rows) - draft + count])
                histories.append(lease.tokens + lease.pending)
            side.checkpoint()
        if lease.pending:
            side.record(lease.pending)
        lease.close()

    model = OracleModel(kinds)
    side = Side(model, CacheOptions(rewind_slack=2), 10**5, None)
    with interrupt_at(-1) as seen:
        request(side)
    said = list(side.cache.entry.tokens)
    assert said == histories[-1]
    valid = list(histories)
    cold = Side(model, CacheOptions(), 0, None)
    cold.take([*said, 7])
    expected = cold.record([8])
    for line in range(1, seen[0] + 1, max(1, seen[0] // fewer(120, 50))):
        side = Side(model, CacheOptions(rewind_slack=2), 10**5, None)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            request(side)
        if side.lease is not None:
            side.lease.close()
        there = side.cache.current
        assert there.is_true, f"line {line}"
        assert any(there.tokens == one[: len(there.tokens)] for one in valid), f"line {line}"
        side.take([*said, 7])
        assert (side.record([8]) == expected).all(), f"line {line}"


def test_a_draft_that_is_no_draft_is_refused() -> None:
    """A lease says which number was wrong, and changes nothing."""
    side = Side(OracleModel(["recurrent"]), CacheOptions(), 0, None)
    side.take(PROMPT)
    lease = side.lease
    with pytest.raises(ValueError, match="1 tokens to accept of None"):
        lease.accept([1])
    lease.begin_draft(3)
    side.forward([1, 2, 3])
    with pytest.raises(ValueError, match="with 0 pending, at 9 of 12 evaluated tokens"):
        lease.begin_draft(1)
    with pytest.raises(ValueError, match="4 tokens to accept"):
        lease.accept([1, 2, 3, 4])
    lease.accept([1, 2])
    assert (lease.pending, lease.tokens) == ([1, 2], PROMPT)
    with pytest.raises(ValueError, match="a draft of 2 tokens, with 2 pending"):
        lease.begin_draft(2)
    lease.accept([])
    assert (lease.pending, lease.tokens) == ([], PROMPT)
    lease.close()


def test_what_a_draft_held_is_let_go() -> None:
    """A copy of an unknown layer stays until the next pass begins, or the lease ends."""
    side = Side(OracleModel(["unknown"]), CacheOptions(), 0, None)
    side.take(PROMPT)
    entry, before = side.cache.entry, side.cache.entry.nbytes
    side.lease.begin_draft(2)
    side.forward([1, 2])
    side.lease.accept([1, 2])
    assert entry.nbytes == 2 * before
    side.record([3])
    assert entry.nbytes == before
    side.lease.begin_draft(1)
    side.lease.close()
    assert entry.held is None


@each_kind_and_all
def test_a_cache_that_breaks_in_a_draft_is_evaluated_again(
    kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If layers can't be brought back, all tokens are pending: the answer does not change."""
    side = Side(OracleModel(kinds), CacheOptions(), 0, None)
    side.take(PROMPT)
    side.lease.begin_draft(3)
    side.forward([1, 2, 3])
    broken = side.cache.entry.caches[0]
    monkeypatch.setattr(broken, "go_back", lambda to: None)
    monkeypatch.setattr(broken, "restore", lambda kept, to: None)
    side.lease.accept([1])
    monkeypatch.undo()
    assert side.lease.pending == [*PROMPT, 1]
    assert side.cache.entry.is_true
    expected = Side(OracleModel(kinds), CacheOptions(), 0, None)
    expected.take([*PROMPT, 1])
    rows = side.record([*side.lease.pending, 2])
    assert (rows[-1] == expected.record([2])[0]).all()

"""A draft model never changes an answer, and its own entry keeps in step with it."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engine import DraftPlan, OpenSettings
from support.models import write_model
from support.reused import each_kind_and_all
from support.sample import fewer

from mlxrunner import MemoryPlanError, OptionError, Runner
from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.engine.draft_model import DraftModel, check_vocabularies
from mlxrunner.engine.drafting import Controller, StepController
from mlxrunner.loading import plan_model
from mlxrunner.models.load import load_model
from mlxrunner.testing import VOCAB, ByteTokenizer, OracleModel, interrupt_at, oracle_runner
from mlxrunner.tokenizer.base import Vocabulary

PROMPT = list(range(20, 49))
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.4, "seed": 3},
    "filtered": {"temperature": 0.6, "top_p": 0.9, "top_k": 9, "seed": 1},
    "logprobs": {"temperature": 0.4, "seed": 5, "logprobs": 2},
}
ways = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft whatever it costs: the oracle's passes cost next to nothing."""
    monkeypatch.setattr(Controller, "depth", lambda self, shares, most, first=1.0: min(most, 5))
    monkeypatch.setattr(StepController, "may_draft", True)


def model_of(kinds: list[str], context: int | None = None) -> DraftModel:
    return DraftModel(OracleModel(kinds), VOCAB, CacheOptions(context), 10**6, 8)


def answer(runner: Runner, prompt: list[int], count: int = 40, **options: Any) -> Any:
    """Return the tokens and log-probabilities of an answer, and its usage."""
    chunks = list(runner.generate(prompt, max_tokens=count, stop_tokens=[], **options))
    return [(chunk.token, chunk.logprob) for chunk in chunks], chunks[-1].usage


def guessed(usage: Any) -> tuple[int, int]:
    """Return how many tokens the draft model guessed, and how many of them were right."""
    counts = [(use.drafted, use.accepted) for use in usage.drafts if use.source == "model"]
    return counts[0] if counts else (0, 0)


@pytest.mark.exhaustive(6)
@each_kind_and_all
@ways
def test_a_draft_model_that_agrees_is_always_right(
    kinds: list[str], options: dict[str, Any]
) -> None:
    """Sampling too: the same random numbers choose the same tokens from the same logits."""
    plain, guessing = oracle_runner(kinds), oracle_runner(kinds)
    guessing.sources.model = model_of(kinds)
    expected, _ = answer(plain, PROMPT, speculate="off", **options)
    got, usage = answer(guessing, PROMPT, **options)
    assert got == expected
    drafted, accepted = guessed(usage)
    assert drafted == accepted > 20
    assert len(guessing.model.forwards) < len(plain.model.forwards) / 2
    assert guessing.entry.tokens == plain.entry.tokens


@pytest.mark.exhaustive(0)
@each_kind_and_all
@ways
def test_a_draft_model_that_differs_changes_nothing(
    kinds: list[str], options: dict[str, Any]
) -> None:
    """Over several turns with edits; the draft model leaves its entry where the text does."""
    rng, plain, guessing = random.Random(4), oracle_runner(kinds), oracle_runner(kinds)
    guessing.sources.model = _SometimesRight(kinds)
    prompt, right, all_drafted = list(PROMPT), 0, 0
    for _ in range(fewer(4, 3)):
        expected, _ = answer(plain, prompt, 25, speculate="off", **options)
        got, usage = answer(guessing, prompt, 25, **options)
        assert got == expected
        assert guessing.entry.is_true
        assert guessing.entry.tokens == plain.entry.tokens
        drafted, accepted = guessed(usage)
        right, all_drafted = right + accepted, all_drafted + drafted
        said = prompt + [int(token) for token, _ in got if token is not None]
        prompt = [*said[: rng.randint(5, len(said))], *(rng.randrange(200) for _ in range(3))]
    assert 0 < right < all_drafted


class _SometimesRight(DraftModel):
    """A draft model that says something else now and then."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__(OracleModel(kinds), VOCAB, CacheOptions(), 10**6, 8)
        self._calls = 0

    def draft(self, tokens: Any, most: int, guess: Any) -> list[int]:
        def wrong(logits: mx.array) -> mx.array:
            self._calls += 1
            token = guess(logits)
            return (token + 1) % 200 if self._calls % 4 == 0 else token

        return super().draft(tokens, most, wrong)


@each_kind_and_all
def test_the_entry_of_a_draft_model_is_as_if_cold(kinds: list[str]) -> None:
    """It says the same, however many of its guesses are kept and wherever the text is left."""
    rng, drafts, oracle = random.Random(2), model_of(kinds), OracleModel(kinds)
    text = [rng.randrange(200) for _ in range(20)]
    for _ in range(fewer(20, 12)):
        most = rng.randint(1, 5)
        found = drafts.draft(np.array(text, np.int32), most, lambda row: mx.argmax(row, axis=-1))
        expected = list(text)
        for _ in range(most):
            logits = oracle(mx.array([expected]), cache=oracle.make_cache())[0, -1]
            expected.append(int(mx.argmax(logits).item()))  # type: ignore[arg-type]
        assert found == expected[len(text) :]
        text += [*found[: rng.randint(0, most)], rng.randrange(200)]
        if rng.random() < 0.2:
            text = [*text[: rng.randint(1, len(text))], rng.randrange(200)]
    drafts.close()


def test_a_draft_costs_one_pass_for_each_token() -> None:
    """No token that was right is evaluated again, with a state too."""
    for kinds in (["full"], ["recurrent"], ["unknown"]):
        model = OracleModel(kinds)
        drafts = DraftModel(model, VOCAB, CacheOptions(), 0, 64)
        text = list(PROMPT)
        for right, passes in ((4, [len(PROMPT), 1, 1, 1]), (0, [2, 1, 1, 1]), (0, [1, 1, 1, 1])):
            model.forwards.clear()
            found = drafts.draft(np.array(text, np.int32), 4, lambda row: mx.argmax(row, axis=-1))
            if kinds == ["full"] or len(text) < 40:
                assert model.forwards[1:] == passes[1:]
                assert model.forwards[0] <= passes[0] + 2
            text += [*found[:right], 7]


@pytest.mark.exhaustive(0)
@each_kind_and_all
def test_ctrl_c_at_any_line_of_a_draft_leaves_true_entries(kinds: list[str]) -> None:
    """The next request is exact, with a draft model whose own request was cut off."""
    follow_up = [*PROMPT, 60, 61]
    expected, _ = answer(oracle_runner(kinds), follow_up, 8, speculate="off")
    runner = oracle_runner(kinds)
    runner.sources.model = _SometimesRight(kinds)
    with interrupt_at(-1) as seen:
        answer(runner, PROMPT, 20)
    for line in range(1, seen[0] + 1, max(1, seen[0] // fewer(30, 25))):
        runner = oracle_runner(kinds)
        runner.sources.model = _SometimesRight(kinds)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            answer(runner, PROMPT, 20)
        assert answer(runner, follow_up, 8)[0] == expected, f"line {line}"
        assert runner.entry.is_true, f"line {line}"


def test_a_draft_model_with_another_vocabulary_is_refused() -> None:
    """The error names the first token that differs, and both texts."""

    class Other(ByteTokenizer):
        @property
        def vocabulary(self) -> Vocabulary:
            pieces = list(ByteTokenizer().vocabulary.pieces)
            pieces[98] = b"ab"
            return Vocabulary(pieces)

    check_vocabularies("same", ByteTokenizer(), ByteTokenizer())
    with pytest.raises(OptionError, match=r"token 98 is 'ab' in other, and 'b' here"):
        check_vocabularies("other", Other(), ByteTokenizer())


def test_tokens_that_only_one_model_has_do_no_harm() -> None:
    """A smaller vocabulary never guesses the rest; a larger one is cut."""
    for vocab in (VOCAB - 20, VOCAB + 20):
        drafts = DraftModel(OracleModel(["full"]), vocab, CacheOptions(), 0, 8)
        seen: list[int] = []

        def guess(logits: mx.array, seen: list[int] = seen) -> mx.array:
            seen.append(logits.shape[1])
            return mx.argmax(logits, axis=-1)

        drafts.draft(np.array(PROMPT, np.int32), 3, guess)
        assert seen == [vocab] * 3


def test_a_draft_model_reads_no_token_that_it_lacks(tmp_path: Path) -> None:
    """Beyond its table of embeddings is other memory: reading it ended the process, or not."""
    write_model(tmp_path / "large", vocab_size=400)
    write_model(tmp_path / "small", vocab_size=300)
    prompt, most = [*range(1, 30), 399, 350, 7], list[int]()

    def watch(model: Any) -> None:
        table, read = model.model.embed_tokens, type(model.model.embed_tokens).__call__

        class Watched(type(table)):  # type: ignore[misc]
            def __call__(self, tokens: mx.array) -> mx.array:
                most.append(int(mx.max(tokens).item()))
                return read(self, tokens)

        table.__class__ = Watched

    large = tmp_path / "large"
    with Runner.load(large, 64, draft_model=tmp_path / "small", reserve=False) as runner:
        drafts = runner.sources.model
        assert isinstance(drafts, DraftModel)
        watch(drafts._model)
        answer(runner, prompt, 8)
    loaded = load_model(str(large))
    asked = OpenSettings.of(max_sequences=1, context=64, reserve=False)
    seats = DraftPlan.of(str(tmp_path / "small"), 64, asked).load(loaded)
    watch(seats.entries[0]._model)
    for _ in range(4):
        seats.entries[0].draft(np.array(prompt, np.int32), 3, lambda logits: mx.array([9]))
    assert len(most) > 8
    assert max(most) < 300


def test_a_draft_model_has_to_fit_beside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them fits alone. The error has the table of the draft model."""
    offered = int(1.2 * plan_model("demo", 256).total)
    monkeypatch.setattr("mlxrunner.loading.device.offered_bytes", lambda: offered)
    with pytest.raises(MemoryPlanError, match=r"draft model demo does not fit .*\n.*weights"):
        Runner.load("demo", 256, draft_model="demo")

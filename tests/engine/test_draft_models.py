"""A draft model never changes an answer beside others, and keeps in step with each of them."""

from __future__ import annotations

import logging
import random
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.engine import (
    DraftPlan,
    Engine,
    EngineHandle,
    OpenSettings,
    offer_bytes,
    request_of,
    scheduler,
)
from support.histories import WITH_WINDOWS, CheckedHistory, Parts, parts, tiny_parts
from support.models import write_model
from support.sample import fewer

from mlxrunner import MemoryPlanError, OptionError, ParallelRunner, Runner
from mlxrunner.cache.entry import common_prefix
from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.engine.draft_model import DraftCachePool, DraftModel
from mlxrunner.engine.drafting import MOST_ANSWERS, StepController
from mlxrunner.options import ServeSettings
from mlxrunner.results import Result, Usage
from mlxrunner.server.models import ModelLoader

DEEPEST = 5
"""Most tokens of a guess here."""


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guess by the draft model alone, whatever it costs: tiny models cost next to nothing."""

    def depth(self: StepController, shares: Any, most: int, first: float = 1.0) -> int:
        few = self._most == MOST_ANSWERS >= self._answers
        return min(most, DEEPEST) if few else 0

    monkeypatch.setattr(StepController, "depth", depth)
    monkeypatch.setattr(StepController, "may_draft", True)
    monkeypatch.setattr("mlxrunner.engine.drafting.FOLLOWING", 10.0**6)


def seats_of(
    given: Parts, context: int, count: int = MOST_ANSWERS, step: int = 16
) -> DraftCachePool:
    """Return the seats of a draft model that reads `step` tokens of a text at a time."""
    model, _, facts = given
    made = model, facts.vocab, CacheOptions(context), 10**6, step
    return DraftCachePool([DraftModel(*made, in_pieces=True) for _ in range(count)])


def guessed(usage: Usage) -> tuple[int, int]:
    """Return how many tokens the draft model guessed, and how many of them were right."""
    counts = [(use.drafted, use.accepted) for use in usage.drafts if use.source == "model"]
    return counts[0] if counts else (0, 0)


class DraftHistory(CheckedHistory):
    """A history whose answers a draft model guesses, which may fail now and then.

    A model that guesses for itself is always right, unless its entry is not what was said. What it
    does not know of are penalties, forms and what a full context dropped.
    """

    def __init__(self, given: Parts, drafts: Parts, rng: random.Random, *, fails: bool) -> None:
        super().__init__(given, rng)
        self._drafts, self._fails, self.seats = drafts, fails, list[DraftCachePool]()

    @property
    def has_seen_enough(self) -> bool:
        if self._fails:
            return self.seen["answered"] > 3 and self.seen["drafts failed"] > 0
        return self.seen["answered"] > 3 and self.seen["drafted"] > 20

    def options(self) -> dict[str, Any]:
        return super().options() | {"speculate": "auto"}

    def _opened(self) -> Engine:
        runner = super()._opened()
        seats = seats_of(self._drafts, self.context, self.rng.choice([1, 2, MOST_ANSWERS]))
        if self._fails:
            for entry in seats.entries:
                entry._model = self._failing(entry._model)
        self.seats.append(seats)
        runner.guess_with(seats)
        return runner

    def _failing(self, model: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            if self.rng.random() < 0.03:
                self.seen["drafts failed"] += 1
                raise RuntimeError("no room")
            return model(*given, **named)

        return run

    def ended(self, handle: EngineHandle, prompt: list[int], options: dict[str, Any]) -> Usage:
        usage = super().ended(handle, prompt, options)
        drafted, accepted = guessed(usage)
        self.seen["drafted"] += drafted
        self.seen["right"] += accepted
        unknown = {"choices", "repetition_penalty"} & set(options)
        if not unknown and not usage.cache.shifted_tokens:
            self.seen["wrong"] += drafted - accepted
        return usage

    def look(self) -> None:
        """Check that only running answers hold an entry, each of which is true between answers."""
        super().look()
        held = {number for one in self.seats for number in one._holders if one._holder(number)}
        assert len(held) <= max(1, len(scheduler(self.runner).requests))
        seats = self.seats[-1]
        for number, entry in enumerate(seats.entries):
            if seats._holder(number) is None:
                assert entry.entry.is_true or not entry.entry.tokens


KINDS = ["llama", "gemma3_text", "qwen3_next", "lfm2", "mamba2"]
"""Full attention, windows, states and convolutions beside attention, and nothing but states."""


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    ("name", "who"),
    [*((name, "itself") for name in KINDS), ("qwen3_next", "other"), ("lfm2", "fails")],
    ids=lambda one: one,
)
def test_any_history_with_a_draft_model_gives_the_answers_of_cold_single_runs(
    name: str, who: str
) -> None:
    """Requests shift, stop, are cancelled, wait for room, fail, and are interrupted anywhere."""
    rng = random.Random(f"{name} {who}")
    window = 16 if name in WITH_WINDOWS else 0
    sizes = {"sliding_window": window} if window else {}
    seed = window if who == "itself" else 7
    drafts = tiny_parts(name, seed=seed, **WITH_WINDOWS.get(name, {}), **sizes)
    one = DraftHistory(parts(name, window), drafts, rng, fails=who == "fails")
    one.weights = (8.0, 12.0, 1.0, 0.5, 0.5, 0.3, 0.2)
    one.failures = KeyboardInterrupt, RuntimeError
    one.open()
    seen, events = one.seen, 0
    while events < fewer(30, 15) or (not one.has_seen_enough and events < 400):
        rng.choices(one.acts, one.weights)[0](one.runner)
        events += 1
    one.close()
    assert one.has_seen_enough
    if who == "itself":
        assert seen["right"] > 20
        assert seen["wrong"] == 0


def texts(count: int, length: int = 24) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(290) for _ in range(length)] for _ in range(count)]


def answers(count: int, seats: DraftCachePool | None, **options: Any) -> tuple[list[Result], int]:
    """Return `count` answers beside each other, and the steps that they took."""
    with Engine(*tiny_parts("llama"), max_sequences=count, context=200) as runner:
        runner.guess_with(seats)
        given = {"max_tokens": 40, "stop_tokens": [], "speculate": "auto"} | options
        return runner.run(texts(count), **given), runner.steps


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("count", [1, MOST_ANSWERS])
@pytest.mark.parametrize("way", [{}, {"temperature": 1.0, "seed": 3, "top_k": 30}])
def test_few_answers_take_fewer_steps(count: int, way: dict[str, Any]) -> None:
    plain, steps = answers(count, None, speculate="off", **way)
    drafted, fewer_steps = answers(count, seats_of(tiny_parts("llama"), 200), **way)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert fewer_steps < 0.6 * steps
    assert all(guessed(one.usage)[0] == guessed(one.usage)[1] > 9 for one in drafted)


def test_a_step_of_many_answers_asks_no_draft_model() -> None:
    """Its passes would come on top of each step, once for each answer."""
    seats = seats_of(tiny_parts("llama"), 200)
    many, _ = answers(MOST_ANSWERS + 1, seats)
    assert [guessed(one.usage) for one in many] == [(0, 0)] * (MOST_ANSWERS + 1)
    assert not any(entry.entry.tokens for entry in seats.entries)


def test_a_long_text_is_read_between_steps() -> None:
    """The other answer gets a token for each piece that the draft model reads."""
    given, seats = tiny_parts("llama"), seats_of(tiny_parts("llama"), 300, step=8)
    passes: list[int] = []
    model = seats.entries[0]._model
    for entry in seats.entries:
        entry._model = lambda tokens, cache: (passes.append(tokens.shape[1]), model(tokens, cache))[
            1
        ]
    with Engine(*given, max_sequences=2, context=300) as runner:
        runner.guess_with(seats)
        short = runner.submit(texts(1, 3)[0], max_tokens=60, stop_tokens=[], speculate="off")
        long = runner.submit(texts(1, 90)[0], max_tokens=60, stop_tokens=[], speculate="auto")
        while not request_of(long).said:
            runner.step()
        said = len(request_of(short).said)
        drafting = request_of(long).drafting
        assert drafting is not None
        while not drafting.by_source["model"].drafted:
            runner.step()
        assert len(request_of(short).said) - said >= 90 // 8 - 1
        assert max(passes) == 8
        drafted = long.result()
    assert guessed(drafted.usage)[0] == guessed(drafted.usage)[1] > 9


def test_an_entry_goes_to_the_answer_that_it_has_most_of() -> None:
    """The next turn of a conversation finds its own, also when the other one has ended later."""
    given, seats = tiny_parts("llama"), seats_of(tiny_parts("llama"), 300, 2)
    with Engine(*given, max_sequences=2, context=300) as runner:
        runner.guess_with(seats)
        options: dict[str, Any] = {"max_tokens": 20, "stop_tokens": [], "speculate": "auto"}
        first, second = runner.run(texts(2), **options)
        one, two = texts(2)[0] + first.tokens, texts(2)[1] + second.tokens
        for said in (two, one):
            held = [entry.entry.tokens.array.copy() for entry in seats.entries]
            runner.complete([*said, 9], **options)
            [changed] = [
                number
                for number, entry in enumerate(seats.entries)
                if entry.entry.tokens.array.tolist() != held[number].tolist()
            ]
            assert common_prefix(held[changed], mx.array(said)) > 30  # type: ignore[arg-type]


def test_an_answer_beyond_the_draft_models_context_goes_on_without() -> None:
    seats = seats_of(tiny_parts("llama"), 34)
    [plain], _ = answers(1, None, speculate="off")
    [drafted], _ = answers(1, seats)
    assert drafted.tokens == plain.tokens
    assert 0 < guessed(drafted.usage)[0] < 11
    assert seats._holder(0) is None


@pytest.mark.exhaustive(0)
def test_a_draft_model_is_planned_and_reserved_at_start() -> None:
    """Its bytes are not among those of the cells, and its entries are there from the start."""
    asked = OpenSettings(max_sequences=8, context=256)
    plan = DraftPlan.of("demo", 256, asked)
    assert (plan.entries, plan.context) == (MOST_ANSWERS, 256)
    with Engine.load("demo", max_sequences=8, context=256, draft_model="demo") as runner:
        assert runner.plan is not None
        assert 0 < runner.draft_bytes <= plan.nbytes * 2
        before = mx.get_active_memory()
        drafted = runner.complete("In the morning", max_tokens=20, speculate="auto")
        plain = runner.complete("In the morning", max_tokens=20, speculate="off")
        assert drafted.tokens == plain.tokens
        assert guessed(drafted.usage)[1] > 0
        assert mx.get_active_memory() - before < 10**6


def test_memory_that_a_draft_model_has_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    offer_bytes(10**6, monkeypatch)
    with pytest.raises(MemoryPlanError, match="the draft model demo has 25 kB"):
        DraftPlan.of("demo", 256, OpenSettings(max_sequences=8))


def another(folder: Path) -> str:
    write_model(folder / "other", vocab_size=300)
    return str(folder / "other")


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="a draft model has to have the vocabulary of the model"):
        ParallelRunner.load(
            "demo", max_sequences=1, context=64, draft_model=another(tmp_path), reserve=False
        )


def test_a_path_names_a_draft_model_of_both_runners(tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=300)
    loads: list[Any] = [Runner.load, partial(ParallelRunner.load, max_sequences=1)]
    for load in loads:
        with load(tmp_path, context=64, draft_model=tmp_path, reserve=False) as runner:
            assert runner.complete([1, 2, 3], max_tokens=2, stop_tokens=[]).tokens


@pytest.mark.exhaustive(0)
def test_each_model_of_a_server_has_a_draft_model_if_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another model continues without, and a line says why."""
    settings = ServeSettings(slots=2, disk_cache=False, memory=4 * 10**8)
    opening = ModelLoader(settings=settings, runner={"context": 200}, draft_model="demo")
    first = opening.load("demo", 2**28)
    with first.runner:
        assert first.bytes > first.runner.draft_bytes > 0
        result = first.runner.complete("In the morning", max_tokens=20, speculate="auto")
        assert guessed(result.usage)[1] > 0
    with caplog.at_level(logging.WARNING, "mlxrunner"):
        second = opening.load(another(tmp_path), 2**28)
    with second.runner:
        assert second.runner.draft_bytes == 0
        assert second.runner.complete("In the morning", max_tokens=3).tokens
    assert "demo is not used as draft model of" in caplog.text

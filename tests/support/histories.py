"""Random histories of requests on a parallel runner, held against cold single runners."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from support.engine import Engine, EngineHandle, backend, request_of, scheduler
from support.engine import EngineHandle as Handle
from support.models import tiny_config, tiny_model

from mlxrunner import Runner
from mlxrunner.cache.disk.disk_cache import DiskCache
from mlxrunner.cache.protocol import Batch
from mlxrunner.engine.drafting import SourceCounts
from mlxrunner.engine.request import Observation
from mlxrunner.errors import CacheFullError, FormError, NoFreeSlotError, StepFailedError
from mlxrunner.models.facts import facts_of
from mlxrunner.results import Result, Usage
from mlxrunner.testing import ByteTokenizer, interrupt_at

Parts = tuple[Any, ByteTokenizer, Any]
"""Model, tokenizer and facts: the first arguments of a runner."""


def tiny_parts(name: str, *, seed: int = 0, **config: Any) -> Parts:
    """Return the parts of a runner of the tiny model `name`, with `config` over its own."""
    settings = tiny_config(name, **({"max_position_embeddings": 4096, "vocab_size": 300} | config))
    model = tiny_model(settings, seed=seed)
    return model, ByteTokenizer(), facts_of(model, settings)


Running = tuple[EngineHandle, list[int], dict[str, Any]]
"""A request: its handle, its prompt and its options."""


class History(ABC):
    """One run of random events. `seen` counts what happened.

    Half of the runners park conversations on disk, and half have a budget of bytes.

    `weights`: how often a request comes, steps are run, one is cancelled, a step fails, a call is
    interrupted, a request makes each of its steps fail, the runner is closed and opened again.
    `failures`: the exceptions that end a step.
    """

    weights = (8.0, 12.0, 1.0, 0.5, 0.0, 0.0, 0.0)
    failures: tuple[type[BaseException], ...] = (KeyboardInterrupt,)
    is_bounded = True
    """False: no runner has a budget or parks, which a replay does not follow."""

    def __init__(self, given: Parts, rng: random.Random) -> None:
        self.given, self.rng, self.seen = given, rng, Counter[str]()
        self.context = rng.randint(30, 150)
        self.trunk, self.past = self.some(2 * self.context), [[7]]
        self.live: list[Running] = []
        self.broken: list[EngineHandle] = []
        """The requests that make each of their steps fail."""
        self.disturbed: set[EngineHandle] = set()
        """The requests that ran when something failed: they may end with an error."""

    def run(
        self, events: int, watch: Callable[[Engine], None] = lambda runner: None, *, fewest: int = 1
    ) -> None:
        """Let `events` happen on a runner of `fewest` to five sequences, and all requests end."""
        self.open(fewest)
        watch(self.runner)
        try:
            for _ in range(events):
                self.rng.choices(self.acts, self.weights)[0](self.runner)
            while self.live:
                self.step(self.runner)
        finally:
            self.runner.close()

    @property
    def acts(self) -> list[Callable[[Engine], None]]:
        return [
            self.submit,
            self.step,
            self.cancel,
            self.interrupt,
            self.interrupt_anywhere,
            self.submit_broken,
            self.restart,
        ]

    def open(self, fewest: int = 1) -> None:
        """Make the runner."""
        sequences = self.rng.randint(fewest, 5)
        self._settings: dict[str, Any] = {
            "max_sequences": sequences,
            "context": self.context,
            "kv_cache_tokens": self.rng.choice(
                [None, self.rng.randint(self.context, sequences * self.context)]
            ),
            "prefill_step": self.rng.choice([8, 32, 200]),
        }
        if self.is_bounded and self.rng.random() < 0.5:
            self._settings["cache_memory"] = self.rng.randint(10**4, 10**6)
        self._disk: TemporaryDirectory[str] | None = None
        if self.is_bounded and self.rng.random() < 0.5:
            self._disk = TemporaryDirectory()
        self.runner = self._opened()

    def _opened(self) -> Engine:
        """Return a runner that parks conversations in the folder of this history, if it has one."""
        if self._disk is None:
            return Engine(*self.given, **self._settings)
        parking = DiskCache(Path(self._disk.name), {"model": "tiny"}, limit=2**20)
        runner = Engine(*self.given, parking=parking, **self._settings)
        runner.observers.append(self._count)
        return runner

    def _count(self, runner: Any, observed: Observation) -> None:
        beside = observed.scheduling
        self.seen["parked"] += sum(one.parked for one in beside.evicted) if beside else 0
        self.seen["restored"] += observed.lookup.restored > 0

    @abstractmethod
    def submit(self, runner: Engine) -> None:
        """Begin a request, or do something else if it can't begin."""

    @abstractmethod
    def ended(
        self, handle: EngineHandle, prompt: list[int], options: dict[str, Any]
    ) -> Usage | None:
        """Look at a request that has ended by itself; return its usage, None if it failed."""

    def some(self, count: int) -> list[int]:
        """Return `count` random tokens."""
        return [self.rng.randrange(290) for _ in range(count)]

    def prompt(self) -> list[int]:
        """Return a piece of the trunk or of a past conversation, and something new after it."""
        rng = self.rng
        base = rng.choice([self.trunk, self.trunk[1:], rng.choice(self.past)])
        lengths = [0, 1, len(base), rng.randint(0, len(base)), rng.randint(0, self.context)]
        return base[: rng.choice(lengths)] + self.some(
            rng.choice([0, 1, 3, rng.randint(1, 40)])
        ) or [7]

    def shift(self) -> dict[str, Any]:
        """Return options of an answer that may go over the edge of the context."""
        rng = self.rng
        keep = rng.choice([0, 1, rng.randint(0, self.context // 2), self.context - 2])
        return {"overflow": "shift", "keep": keep, "max_tokens": rng.randint(1, 3 * self.context)}

    def step(self, runner: Engine) -> None:
        """Run some steps, and look at the requests that ended in them."""
        for _ in range(self.rng.choice([1, 1, 5, 30])):
            runner.step()
        self.look()

    def look(self) -> None:
        """Look at the requests that have ended."""
        for one in [one for one in self.live if one[0].finished]:
            self.live.remove(one)
            handle = one[0]
            if handle in self.broken:
                assert isinstance(handle.error, StepFailedError | FormError), handle.error
                continue
            if handle in self.disturbed and isinstance(handle.error, StepFailedError):
                self.failed(*one)
                continue
            usage = self.ended(*one)
            if usage is not None:
                self.seen["shifted"] += usage.cache.shifted_tokens > 0
                self.seen["evaluated again"] += usage.cache.reevaluated_tokens > 0
                self.seen["reused"] += usage.cached_tokens > 0

    def failed(self, handle: EngineHandle, prompt: list[int], options: dict[str, Any]) -> None:
        """Look at a request that ended because something failed."""
        self.seen["ended by an error"] += 1

    def cancel(self, runner: Engine) -> None:
        """Cancel one of the running requests."""
        if self.live:
            self.live.pop(self.rng.randrange(len(self.live)))[0].cancel()
            self.seen["cancelled"] += 1

    def interrupt(self, runner: Engine) -> None:
        """Fail in some layer of a step.

        An interrupt ends what is running. After an error all requests continue but one that was
        alone in the step.
        """
        view, failure = self.rng.choice(backend(runner)._views), self.rng.choice(self.failures)

        def fail(keys: mx.array, values: mx.array) -> Any:
            self.seen["interrupted"] += 1
            raise failure

        view.update_and_fetch = fail  # type: ignore[method-assign]
        running = [handle for handle, _, _ in self.live]
        try:
            with suppress(failure):
                runner.step()
        finally:
            del view.update_and_fetch
        ended = [handle for handle in running if isinstance(handle.error, StepFailedError)]
        assert failure is KeyboardInterrupt or len(ended) <= 1
        self.disturbed.update(ended)
        self.look()

    def interrupt_anywhere(self, runner: Engine) -> None:
        """Press Ctrl-C at some line of a step, a submission or a cancel."""
        act = self.rng.choice([runner.step, runner.step, self.submit, self.cancel])
        given = () if act == runner.step else (runner,)
        self.disturbed.update(handle for handle, _, _ in self.live)
        with suppress(KeyboardInterrupt), interrupt_at(self.rng.randint(1, 500)):
            try:
                act(*given)
            except KeyboardInterrupt:
                self.seen["interrupted"] += 1
                raise
        self.look()

    def submit_broken(self, runner: Engine) -> None:
        """Begin a request that makes each of its steps fail; all others continue."""
        engine, live = backend(runner), len(self.live)
        forward = engine.forward
        self.submit(runner)
        if len(self.live) != live + 1:
            return
        handle = self.live[-1][0]
        self.broken.append(handle)
        self.seen["broken"] += 1

        def fail(tokens: mx.array, batch: Batch, rows: Any, **more: Any) -> mx.array:
            slot = request_of(handle).slot.number
            if not handle.finished and request_of(handle).is_placed and slot in batch.sequences:
                raise RuntimeError("a request that can't be run")
            return forward(tokens, batch, rows, **more)

        engine.forward = fail  # type: ignore[method-assign]

    def restart(self, runner: Engine) -> None:
        """Close the runner, and open another one on the same model."""
        runner.close()
        assert all(handle.finished for handle, _, _ in self.live)
        self.live.clear()
        self.seen["restarted"] += 1
        self.runner = self._opened()

    def close(self) -> None:
        """Let all requests end, check that every slot holds what it says, and close the runner."""
        runner = self.runner
        try:
            while scheduler(runner).requests or self.live:
                self.step(runner)
            for slot in runner.slots:
                held = {cache.offset for cache in slot.cache.current.caches}
                assert held <= {len(slot.tokens)}, (slot.number, held, len(slot.tokens))
                assert not slot.is_busy
                slot.cache.reset()
            assert all(group.num_free == group.num_cells for group in backend(runner).groups)
        finally:
            runner.close()


SLIDING = {"head_dim": 16, "num_hidden_layers": 3, "rope_theta": 1e4}
WITH_WINDOWS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window_pattern": 3},
    "olmo3": SLIDING
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "cohere2": SLIDING | {"sliding_window_pattern": 3, "layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "gpt_oss": {},
    "exaone4": SLIDING
    | {"sliding_window_pattern": "LLG", "rope_scaling": {"rope_type": "default"}},
}
ARCHITECTURES: dict[str, dict[str, Any]] = WITH_WINDOWS | {
    "llama": {},
    "qwen3": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {
        "rope_theta": 1e4,
        "pad_token_id": 0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
NEAR = 1e-4


@cache
def parts(name: str, window: int) -> Parts:
    windows = {"sliding_window": window} if name in WITH_WINDOWS else {}
    return tiny_parts(name, seed=window, **ARCHITECTURES.get(name, {}), **windows)


ANSWERS: dict[tuple[int, tuple[int, ...], str], tuple[Any, list[int]]] = {}
"""Answers of single runners, by model, prompt and options; each with its model, which stays."""


def alone(given: Parts, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """Return the tokens of `computed`, computed once."""
    key = id(given[0]), tuple(prompt), repr((max_tokens, sorted(options.items())))
    if key not in ANSWERS:
        ANSWERS[key] = given[0], computed(given, prompt, max_tokens, **options)
    return ANSWERS[key][1]


def computed(given: Parts, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """Return the tokens of the answer of a new single runner, without stop tokens by default."""
    chosen = {"max_tokens": max_tokens, "stop_tokens": []} | options
    return Runner(*given).complete(prompt, **chosen).tokens


def cold(given: Parts, context: int, prompt: list[int], options: dict[str, Any]) -> Result:
    """Return the answer of a new single runner."""
    return Result.of(list(Runner(*given, context=context).generate(prompt, **options)))


def check(
    expected: Result, context: int, prompt: list[int], options: dict[str, Any], got: Result
) -> None:
    """Check that tokens, text and end are the expected ones, log-probabilities within NEAR."""
    pairs = zip(got.logprobs or [], expected.logprobs or [], strict=False)
    gaps = [abs(ours[0] - its[0]) for ours, its in pairs]
    said = (
        f"{len(prompt)} tokens, context {context}, {options}: {got.tokens} is not "
        f"{expected.tokens}, {gaps}"
    )
    assert max(gaps, default=0) < NEAR, said
    assert (got.tokens, got.text, got.finish_reason) == (
        expected.tokens,
        expected.text,
        expected.finish_reason,
    ), said
    shifted, its = (one.usage.cache.shifted_tokens for one in (got, expected))
    # A step with guesses is read before the next one: where its last token stops the answer and
    # fills the context, no shift makes room for what would have followed.
    is_full = len(prompt) + len(got.tokens) - 1 - shifted == context
    is_spared = got.usage.draft_passes > 0 and got.finish_reason == "stop" and is_full
    assert shifted == its or (is_spared and shifted < its), said


class CheckedHistory(History):
    """Each answer is held against that of a cold single runner."""

    def __init__(self, given: Parts, rng: random.Random) -> None:
        super().__init__(given, rng)
        self._cold: dict[str, Result] = {}

    def cold(self, prompt: list[int], options: dict[str, Any]) -> Result:
        """Return the answer of a new single runner, computed once."""
        asked = repr((prompt, options))
        if asked not in self._cold:
            self._cold[asked] = cold(self.given, self.context, prompt, options)
        return self._cold[asked]

    def options(self) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {
            "stop_tokens": [],
            "max_tokens": rng.choice([1, 3, 10, 40]),
            "logprobs": 0,
        }
        if rng.random() < 0.5:
            options |= self.shift()
        more: list[dict[str, Any]] = [
            {"temperature": 1.0, "seed": rng.randrange(99), "top_k": 40},
            {"repetition_penalty": 1.3, "penalty_context": 64},
            {"stop_tokens": rng.sample(range(290), 30)},
            {"stop": [chr(97 + rng.randrange(26)), "ab"]},
            {"choices": ["yes", "no", "perhaps"]},
        ]
        return options | (rng.choice(more) if rng.random() < 0.4 else {})

    def submit(self, runner: Engine) -> None:
        prompt, options = self.prompt(), self.options()
        if len(prompt) >= self.context and "overflow" not in options:
            prompt = prompt[: self.context - 1]
        try:
            self.live.append((runner.submit(prompt, **options), prompt, options))
            self.seen["submitted"] += 1
        except (NoFreeSlotError, CacheFullError):
            self.step(runner)

    def ended(self, handle: Handle, prompt: list[int], options: dict[str, Any]) -> Usage:
        result = handle.result()
        check(self.cold(prompt, options), self.context, prompt, options, result)
        self.past.append(prompt + result.tokens)
        self.seen["answered"] += 1
        return result.usage

    def failed(self, handle: Handle, prompt: list[int], options: dict[str, Any]) -> None:
        """Check that what came of the answer is the beginning of a cold single runner's."""
        tokens = [chunk.token for chunk in handle.poll() if chunk.token is not None]
        expected = self.cold(prompt, options)
        assert tokens == expected.tokens[: len(tokens)]
        super().failed(handle, prompt, options)


DEEPEST = 9
"""Most tokens of such a guess."""


class Guesses:
    """In place of `mlxrunner.engine.drafting.Drafting`: it knows the answer."""

    always = True

    def __init__(self, answer: list[int], rng: random.Random, seen: Counter[str]) -> None:
        self.answer, self.rng, self.seen, self.place = answer, rng, seen, 0
        self.by_source: defaultdict[str, SourceCounts] = defaultdict(SourceCounts)
        self.passes = 0
        self.source, self.model_s = "lookup", None

    def close(self) -> None:
        """Keep nothing for a request."""

    def add(self, token: int) -> None:
        self.place += 1

    @property
    def is_worth_waiting(self) -> bool:
        return self.rng.random() < 0.5

    def draft(self, most: int) -> list[int]:
        guess = self.answer[self.place : self.place + self.rng.randint(0, DEEPEST)][: max(0, most)]
        if guess and self.rng.random() < 0.5:
            guess[self.rng.randrange(len(guess))] = self.rng.randrange(290)
        return guess

    def judge(self, drafted: int, accepted: int) -> None:
        self.passes += 1
        self.seen["drafts"] += 1
        self.seen["wrong"] += accepted < drafted
        self.seen["right"] += accepted


class GuessedHistory(CheckedHistory):
    """A history whose answers are guessed. What happens to an entry is counted."""

    def submit(self, runner: Engine) -> None:
        live = len(self.live)
        super().submit(runner)
        if len(self.live) > live:
            handle, prompt, options = self.live[-1]
            answer = self.cold(prompt, options).tokens
            drafting: Any = Guesses(answer, self.rng, self.seen)
            request_of(handle).drafting = drafting

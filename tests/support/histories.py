"""Random histories of requests on one parallel runner: they come, run, are cancelled, and fail."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx
from support.models import tiny_config, tiny_model

from mlxrunner.errors import FormError, StepFailedError
from mlxrunner.models.facts import facts_of
from mlxrunner.parallel.handle import Handle
from mlxrunner.parallel.stepper import Stepper
from mlxrunner.results import Usage
from mlxrunner.testing import ByteTokenizer

Parts = tuple[Any, ByteTokenizer, Any]
"""Model, tokenizer and facts: the first arguments of a runner."""


def tiny_parts(name: str, *, seed: int = 0, **config: Any) -> Parts:
    """Return the parts of a runner of the tiny model `name`, with `config` over its own."""
    settings = tiny_config(name, **({"max_position_embeddings": 4096, "vocab_size": 300} | config))
    model = tiny_model(settings, seed=seed)
    return model, ByteTokenizer(), facts_of(model, settings)


class History(ABC):
    """One run of random events. `seen` counts what happened.

    `weights`: how often a request comes, steps are run, one is cancelled, a step fails.
    `failures`: the exceptions that end a step.
    """

    weights = (8.0, 12.0, 1.0, 0.5)
    failures: tuple[type[BaseException], ...] = (KeyboardInterrupt,)

    def __init__(self, given: Parts, rng: random.Random) -> None:
        self.given, self.rng, self.seen = given, rng, Counter[str]()
        self.context = rng.randint(30, 150)
        self.trunk, self.past = self.some(2 * self.context), [[7]]
        self.live: list[tuple[Handle, list[int], dict[str, Any]]] = []

    def run(
        self,
        events: int,
        watch: Callable[[Stepper], None] = lambda runner: None,
        *,
        fewest: int = 1,
    ) -> None:
        """Let `events` happen on a runner of `fewest` to five sequences, and all requests end."""
        sequences = self.rng.randint(fewest, 5)
        cells = self.rng.choice([None, self.rng.randint(self.context, sequences * self.context)])
        with Stepper(
            *self.given,
            max_sequences=sequences,
            context=self.context,
            prefill_step=self.rng.choice([8, 32, 200]),
            cells=cells,
        ) as runner:
            watch(runner)
            acts = [self.submit, self.step, self.cancel, self.interrupt]
            for _ in range(events):
                self.rng.choices(acts, self.weights)[0](runner)
            while self.live:
                self.step(runner)

    @abstractmethod
    def submit(self, runner: Stepper) -> None:
        """Begin a request, or do something else if it can't begin."""

    @abstractmethod
    def ended(self, handle: Handle, prompt: list[int], options: dict[str, Any]) -> Usage | None:
        """Look at a request that has ended by itself; return its usage, None if it failed."""

    def some(self, count: int) -> list[int]:
        """Return `count` random tokens."""
        return [self.rng.randrange(290) for _ in range(count)]

    def prompt(self) -> list[int]:
        """Return a piece of the trunk or of a past conversation, and something new behind it."""
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
        return {
            "overflow": "shift",
            "keep": keep,
            "max_tokens": rng.randint(1, 3 * self.context),
        }

    def step(self, runner: Stepper) -> None:
        """Run some steps, and look at the requests that ended in them."""
        for _ in range(self.rng.choice([1, 1, 5, 30])):
            runner.step()
        for one in [one for one in self.live if one[0].finished]:
            self.live.remove(one)
            usage = self.ended(*one)
            if usage is not None:
                self.seen["shifted"] += usage.cache.shifted_tokens > 0
                self.seen["evaluated again"] += usage.cache.reevaluated_tokens > 0
                self.seen["reused"] += usage.cached_tokens > 0

    def cancel(self, runner: Stepper) -> None:
        """Cancel one of the running requests."""
        if self.live:
            self.live.pop(self.rng.randrange(len(self.live)))[0].cancel()
            self.seen["cancelled"] += 1

    def interrupt(self, runner: Stepper) -> None:
        """Fail in some layer of a step; what was running has ended then, one way or the other."""
        view = self.rng.choice(runner._adapted._views)

        def fail(keys: mx.array, values: mx.array) -> Any:
            raise self.rng.choice(self.failures)

        view.update_and_fetch = fail  # type: ignore[method-assign]
        try:
            runner.step()
        except self.failures:
            self.seen["interrupted"] += 1
            for handle, _, _ in self.live:
                with suppress(StepFailedError, FormError):
                    assert handle.result().finish_reason
            self.live.clear()
        finally:
            del view.update_and_fetch

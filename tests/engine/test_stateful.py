"""Each answer of a runner of many requests is that of a cold single runner.

Hypothesis puts the events of `support.histories` in any order, and shortens what fails.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from support.histories import WITH_WINDOWS, CheckedHistory, parts
from support.sample import fewer

NAMES = [
    *("llama", "gemma3_text", "gpt_oss", "mixtral", "cohere2", "smollm3"),
    *("qwen3_next", "lfm2", "mamba2", "jamba", "deepseek_v3", "llama4"),
    *("olmo3", "exaone4", "qwen3", "phi3"),
]
RANDOMS = st.randoms(use_true_random=True)
"""One draw each: how many requests have ended depends on what steps cost, so that two runs with the
same draws may have others to choose from.
"""


class Conversations(RuleBasedStateMachine):
    """A runner, and everything that may happen to it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @initialize(rng=RANDOMS)
    def open(self, rng: random.Random) -> None:
        window = rng.choice([4, 16, 33, 70]) if self.name in WITH_WINDOWS else 0
        self.history = CheckedHistory(parts(self.name, window), rng)
        self.history.failures = KeyboardInterrupt, RuntimeError
        self.history.open()

    def _do(self, rng: random.Random, act: str) -> None:
        self.history.rng = rng
        getattr(self.history, act)(self.history.runner)

    @rule(rng=RANDOMS)
    def submit(self, rng: random.Random) -> None:
        self._do(rng, "submit")

    @rule(rng=RANDOMS)
    def step(self, rng: random.Random) -> None:
        self._do(rng, "step")

    @rule(rng=RANDOMS)
    def cancel(self, rng: random.Random) -> None:
        if self.history.live:
            self._do(rng, "cancel")

    @rule(rng=RANDOMS)
    def fail_a_step(self, rng: random.Random) -> None:
        if self.history.live:
            self._do(rng, "interrupt")

    @rule(rng=RANDOMS)
    def interrupt(self, rng: random.Random) -> None:
        self._do(rng, "interrupt_anywhere")

    @rule(rng=RANDOMS)
    def submit_broken(self, rng: random.Random) -> None:
        self._do(rng, "submit_broken")

    @rule(rng=RANDOMS)
    def restart(self, rng: random.Random) -> None:
        self._do(rng, "restart")

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.rng = random.Random(0)
            self.history.close()


@pytest.mark.usefixtures("proved_once")
@pytest.mark.exhaustive(3, "gemma3_text", "qwen3_next")
@pytest.mark.parametrize("name", NAMES)
def test_whatever_happens_each_answer_is_that_of_a_cold_runner(name: str) -> None:
    """Requests come, share, shift, are cancelled, fail, and are interrupted at any line."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Conversations(name),
        settings=settings(max_examples=fewer(5, 4), stateful_step_count=fewer(40, 25)),
    )

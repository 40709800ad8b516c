"""Run the scenarios, each warm, cold, and cold in other prefill steps.

The model's speed decides the length of the prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from mlxrunner.bench.models import load_or_make
from mlxrunner.errors import OptionError
from mlxrunner.loading import plan_model
from mlxrunner.memory.reserve import must_fit
from mlxrunner.models.chunks import DEPENDS
from mlxrunner.options import GenerateOptions
from mlxrunner.runner import Runner
from mlxrunner.system import device
from mlxrunner.verify.cross_checks import (
    GUESSED,
    MOVED_KEYS,
    PARALLEL,
    AnswerLogits,
    ask,
    difference,
    guessed,
    moved_keys,
    parallel,
)
from mlxrunner.verify.findings import Check, Findings
from mlxrunner.verify.scenarios import MORE, SCENARIOS, SMALLEST, THINKING, Case, Talk

Begin = Callable[[str], None]
"""A function that is called with the name of each part before the part runs."""
REPEATED = "the same cold run twice"
NUM_PARTS = len(SCENARIOS) + 6
"""Number of calls of `begin` in a whole verification, loading included."""
SECONDS = 120
"""Longest time that a verification should take, roughly."""
MOST = 2048
"""Tokens of context beyond which a longer one proves nothing new."""
RUNS = 3 * len(SCENARIOS) + 14
"""Approximate number of prompts that are evaluated whole."""
NEAR_END = 3
"""Place of the wrong token, in tokens from the end. A state forgets distant tokens."""
SMALL_STEP = 8
"""A prefill step in tokens for which a device uses other kernels, as for single tokens."""


class Verification:
    """A verification of a runner. `findings` grow while it runs, also up to an interrupt."""

    def __init__(
        self,
        runner: Runner,
        other: Runner,
        answer: int = 8,
        *,
        about: str = "",
        begin: Begin = lambda name: None,
    ) -> None:
        """Prepare a verification with answers of `answer` tokens.

        `other`: a Runner on the same model with the same caches but no checkpoints. Its passes end
        at other offsets, and the resulting difference is the noise. `about`: the first line of the
        table.
        """
        self._runner, self._other = runner, other
        self._talk, self._begin = Talk(runner, answer), begin
        self._step = min(runner.prefill_step, max(len(self._talk.base) // 5, 2))
        self.findings = Findings(runner.name, device.backend(), runner.context, about)

    def run(self) -> Findings:
        """Run all checks and return the findings."""
        self._runner.prefill_step = self._step
        self._noise()
        for number, name in enumerate(SCENARIOS):
            self._begin(name)
            self._other.prefill_step = max(
                (self._step // 2, self._step // 3, SMALL_STEP)[number % 3], 1
            )
            self._add(name, partial(self._row, name))
        for name, row in ((MOVED_KEYS, moved_keys), (GUESSED, guessed), (PARALLEL, parallel)):
            self._begin(name)
            self._add(name, partial(row, self._talk))
        self.findings.is_complete = True
        return self.findings

    def _add(self, name: str, check: Callable[[], Check]) -> None:
        """Add what `check` finds, or why the model refuses it."""
        try:
            found = check()
        except OptionError as error:
            found = Check(name, untested=str(error))
        self.findings.checks.append(found)

    def _noise(self) -> None:
        """Measure the difference of two equal runs, and the change that one wrong token makes."""
        self._begin(REPEATED)
        base = Case(self._talk.base)
        first, second = self._cold(self._runner, base), self._cold(self._runner, base)
        wrong = self._cold(self._runner, Case(self._talk.changed(len(self._talk.base) - NEAR_END)))
        between = difference(first, second)
        self.findings.checks.append(Check(REPEATED, found=between, noise=between))
        self.findings.wrong_token = difference(first, wrong).logits
        self.findings.epsilon = first.epsilon

    def _row(self, name: str) -> Check:
        self._runner.reset()
        case = SCENARIOS[name](self._talk)
        warm = ask(self._runner, case, self._talk.answer)
        entry, usage, fault = self._runner.entry, warm.usage, None
        if not entry.is_true:
            fault = (
                f"the entry holds {len(entry.tokens)} tokens, "
                f"but its layers are at {sorted(set(entry.offsets))}"
            )
        cold = self._cold(self._runner, case)
        # A run that shifts uses the caches under test: it shows nothing about the device.
        noise = None if case.options else difference(cold, self._cold(self._other, case))
        self.findings.largest = max(self.findings.largest, cold.largest)
        reused = usage.cached_tokens if usage is not None else 0
        reason = usage.reason if usage is not None else ""
        return Check(
            name,
            found=difference(warm, cold),
            noise=noise,
            reused=reused,
            prompt=usage.prompt_tokens if usage is not None else 0,
            fault=fault,
            untested=None if reused or fault else f"nothing could be reused: {reason}",
        )

    def _cold(self, runner: Runner, case: Case) -> AnswerLogits:
        runner.reset()
        if case.before is not None:
            ask(runner, Case(case.before), 1)
        return ask(runner, case, self._talk.answer)


def verification(
    model: str,
    *,
    context: int | None = None,
    tokens: int = 8,
    kv_bits: int | None = None,
    trust_remote_code: bool = False,
    begin: Begin = lambda name: None,
) -> Verification:
    """Load `model` (a name, or `random:100M`) and prepare to verify it.

    `context`: tokens of the longest prompt with its answer; None: as many as a verification of
    SECONDS allows. `tokens`: tokens of each answer. `kv_bits`: see `Runner.load`. `begin`: called
    with the name of each part. Raise OptionError if the context is too short to find anything, and
    MemoryPlanError if the model does not fit into memory.
    """
    GenerateOptions.of(max_tokens=tokens)
    begin(f"loading {model}")
    if not model.startswith("random:"):
        must_fit(plan_model(model, context, kv_bits=kv_bits))
    loaded = load_or_make(model, trust_remote_code=trust_remote_code)
    make = partial(
        Runner, loaded.model, loaded.tokenizer, loaded.facts, name=model, kv_bits=kv_bits
    )
    return prepared(make, context=context, tokens=tokens, begin=begin)


def prepared(
    make: Callable[..., Runner], *, context: int | None, tokens: int, begin: Begin
) -> Verification:
    """Prepare to verify the model of the runners that `make` makes; see `verification`."""
    begin("measuring the model's speed")
    first = make()
    limit = context or min(MOST, first.context)
    token_s, step_s = _speed(make, min(limit, first.context))
    if context is None:
        context = _affordable(limit, token_s, step_s, THINKING * tokens + 2 * MORE)
    about = (
        f"{first.name} on {device.backend()}: context {context}, answers of {tokens} tokens, "
        f"prefill {1 / token_s:.0f} tokens/s"
    )
    if first.facts.depends_on_chunks:
        about += f"; {DEPENDS}, and nothing is reused"
    runner = make(context=context, whole=True)
    other = make(context=context, checkpoint_budget=0)
    return Verification(runner, other, tokens, about=about, begin=begin)


def _affordable(limit: int, token_s: float, step_s: float, beside: int) -> int:
    """Return the context whose prompts can be evaluated RUNS times in SECONDS.

    A ninth of the prompts is evaluated in small steps. `beside`: other tokens of the context.
    """
    prompt = SECONDS / RUNS / (token_s + step_s / (9 * SMALL_STEP))
    return min(limit, max(int(prompt), 2 * SMALLEST) + beside)


def _speed(make: Callable[..., Runner], most: int) -> tuple[float, float]:
    """Return the seconds of a prompt token among many, and of a single one.

    `most`: tokens of the context. Raise OptionError if they are too few.
    """
    if most < SMALLEST:
        raise OptionError(
            f"context: {most} tokens are too few to verify anything: at least {SMALLEST} are needed"
        )
    runner = make(context=most)
    count = min(256, most - 8)
    for _ in range(2):  # the first time, kernels are compiled
        runner.reset()
        began = time.perf_counter()
        usages = [
            chunk.usage for chunk in runner.generate([1] * count, max_tokens=4, stop_tokens=[])
        ]
        seconds = time.perf_counter() - began
    usage = usages[-1]
    decode = usage.timing.decode_s if usage is not None else 0.0
    return (seconds - decode) / count, decode / 3

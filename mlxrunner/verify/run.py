"""Run the scenarios: each warm, cold, and cold in other prefill steps, at a length that the model's speed allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from mlxrunner import device
from mlxrunner.bench.models import load_or_make
from mlxrunner.config import GenerateOptions
from mlxrunner.errors import OptionError
from mlxrunner.models.chunks import DEPENDS
from mlxrunner.models.load import LoadedModel
from mlxrunner.reserve import must_fit
from mlxrunner.runner import Runner, plan_model
from mlxrunner.verify.answer import Answer, ask, difference
from mlxrunner.verify.beside import MOVED_KEYS, PARALLEL, moved_keys, parallel
from mlxrunner.verify.report import Report, Row
from mlxrunner.verify.scenarios import MORE, SCENARIOS, SMALLEST, THINKING, Case, Talk

Begin = Callable[[str], None]
"""Called with the name of what is done next."""
REPEATED = "the same cold run twice"
NUM_PARTS = len(SCENARIOS) + 5
"""How often `begin` is called by a whole verification, loading included."""
SECONDS = 120
"""What a verification should take at most, about."""
MOST = 2048
"""Tokens of context beyond which a longer one proves nothing new."""
RUNS = 3 * len(SCENARIOS) + 10
"""Prompts that are evaluated whole, about."""
NEAR_END = 3
"""Where a wrong token is put to see what it changes: a state forgets what is far away."""
SMALL_STEP = 8
"""A prefill step for which a device has other kernels, as for single tokens."""


class Verification:
    """Of `runner`, with answers of `answer` tokens. `report.rows` grow while `run` goes on: an interrupted one has something to say.

    `other`: a Runner on the same model with the same caches but no checkpoints, so that its passes end elsewhere: what that changes is
    the noise.
    """

    def __init__(
        self,
        runner: Runner,
        other: Runner,
        answer: int = 8,
        *,
        about: str = "",
        begin: Begin = lambda name: None,
    ) -> None:
        self._runner, self._other, self._talk, self._begin = (
            runner,
            other,
            Talk(runner, answer),
            begin,
        )
        self._step = min(runner.prefill_step, max(len(self._talk.base) // 5, 2))
        self.report = Report(runner.name, device.backend(), runner.context, about)

    def run(self) -> Report:
        self._runner.prefill_step = self._step
        self._noise()
        for number, name in enumerate(SCENARIOS):
            self._begin(name)
            self._other.prefill_step = max(
                (self._step // 2, self._step // 3, SMALL_STEP)[number % 3], 1
            )
            self.report.rows.append(self._row(name))
        for name, row in ((MOVED_KEYS, moved_keys), (PARALLEL, parallel)):
            self._begin(name)
            self.report.rows.append(row(self._talk))
        self.report.is_complete = True
        return self.report

    def _noise(self) -> None:
        """The same run twice, and what one wrong token changes."""
        self._begin(REPEATED)
        base = Case(self._talk.base)
        first, second = self._cold(self._runner, base), self._cold(self._runner, base)
        wrong = self._cold(self._runner, Case(self._talk.changed(len(self._talk.base) - NEAR_END)))
        between = difference(first, second)
        self.report.rows.append(Row(REPEATED, found=between, noise=between))
        self.report.wrong_token = difference(first, wrong).logits
        self.report.epsilon = first.epsilon

    def _row(self, name: str) -> Row:
        self._runner.reset()
        case = SCENARIOS[name](self._talk)
        warm = ask(self._runner, case, self._talk.answer)
        entry, usage, fault = self._runner.entry, warm.usage, None
        if not entry.is_true:
            fault = f"the entry holds {len(entry.tokens)} tokens, but its layers are at {sorted(set(entry.offsets))}"
        cold = self._cold(self._runner, case)
        # A run that shifts goes through the caches that are on trial: it says nothing about the device.
        noise = None if case.options else difference(cold, self._cold(self._other, case))
        self.report.largest = max(self.report.largest, cold.largest)
        reused = usage.cached_tokens if usage is not None else 0
        return Row(
            name, found=difference(warm, cold), noise=noise, reused=reused,
            prompt=usage.prompt_tokens if usage is not None else 0, fault=fault,
            untested=None if reused or fault else f"nothing could be reused: {usage.reason if usage is not None else ''}",
        )  # fmt: skip

    def _cold(self, runner: Runner, case: Case) -> Answer:
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
    """Load `model` (a name, or `random:100M`) and get ready to verify it.

    context: tokens of the longest prompt with its answer (default: what the model evaluates fast enough for a verification of SECONDS).
    tokens: of each answer. kv_bits: as in `Runner.load`. OptionError where they are too few for anything to be found.
    """
    GenerateOptions.of(max_tokens=tokens)
    begin(f"loading {model}")
    if not model.startswith("random:"):
        must_fit(plan_model(model, context, kv_bits=kv_bits))
    loaded = load_or_make(model, trust_remote_code=trust_remote_code)
    limit = context or min(MOST, loaded.facts.context)
    begin("measuring the model's speed")
    token_s, step_s = _speed(loaded, min(limit, loaded.facts.context))
    if context is None:
        context = _affordable(limit, token_s, step_s, THINKING * tokens + 2 * MORE)
    make = partial(
        Runner,
        loaded.model,
        loaded.tokenizer,
        loaded.facts,
        name=model,
        context=context,
        kv_bits=kv_bits,
    )
    about = f"{model} on {device.backend()}: context {context}, answers of {tokens} tokens, prefill {1 / token_s:.0f} tokens/s"
    if loaded.facts.depends_on_chunks:
        about += f"; {DEPENDS}, and nothing is reused"
    return Verification(
        make(whole=True), make(checkpoint_budget=0), tokens, about=about, begin=begin
    )


def _affordable(limit: int, token_s: float, step_s: float, beside: int) -> int:
    """The context whose prompts can be evaluated RUNS times in SECONDS, a ninth of them in small steps."""
    prompt = SECONDS / RUNS / (token_s + step_s / (9 * SMALL_STEP))
    return min(limit, max(int(prompt), 2 * SMALLEST) + beside)


def _speed(loaded: LoadedModel, most: int) -> tuple[float, float]:
    """Seconds of a prompt token among many, and of a single one."""
    if most < SMALLEST:
        raise OptionError(
            f"context: {most} tokens are too few to verify anything: at least {SMALLEST} are needed"
        )
    runner = Runner(loaded.model, loaded.tokenizer, loaded.facts, context=most)
    count = min(256, most - 8)
    for _ in range(2):  # the first time, kernels are compiled
        runner.reset()
        began = time.perf_counter()
        usages = [
            chunk.usage for chunk in runner.generate([1] * count, max_tokens=4, stop_tokens=[])
        ]
        seconds = time.perf_counter() - began
    usage = usages[-1]
    decode = usage.decode_s if usage is not None else 0.0
    return (seconds - decode) / count, decode / 3

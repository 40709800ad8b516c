"""The work that is measured: cold prompts, warm ones, answers at several depths, memory; alone, or against mlx-lm in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from statistics import median

import mlx.core as mx

from mlxrunner import device
from mlxrunner.bench.ceilings import Ceilings, cost_of, measure_ceilings, num_parameters
from mlxrunner.bench.figures import Figure, Findings
from mlxrunner.bench.harness import Begin, alternate, some_tokens, wait
from mlxrunner.bench.models import load_or_make
from mlxrunner.bench.rows import less_is_better, more_is_better
from mlxrunner.bench.sides import Side, mlx_lm_side, our_side
from mlxrunner.errors import OptionError
from mlxrunner.events import Usage
from mlxrunner.reserve import must_fit, weights_of
from mlxrunner.runner import Runner, plan_model
from mlxrunner.terminal import size

CONTEXTS = (512, 2048)
CACHED = (0, 50, 90, 99, 100)
"""Per cent of a prompt that the entry has already."""
QUICK_CONTEXT = 128
SHORTEST = 16


class Bench:
    """Of one model. `findings` grow while `run` goes on: an interrupted one has something to say.

    contexts: tokens of the prompts (default: CONTEXTS, as far as the model goes). rounds: how often each is measured. answer: tokens decoded
    after each. versus: also run mlx-lm on the same weights, alternately. OptionError for a prompt that the model is not made for.
    """

    def __init__(
        self,
        model: str,
        *,
        contexts: Sequence[int] = (),
        rounds: int = 3,
        answer: int = 32,
        versus: bool = False,
        quick: bool = False,
        trust_remote_code: bool = False,
        begin: Begin = lambda name: None,
    ) -> None:
        self._model, self._rounds, self._answer, self._versus, self._quick = model, rounds, answer, versus, quick
        self._begin, self._trust = begin, trust_remote_code
        self._contexts = list(contexts)
        self.findings = Findings()

    @staticmethod
    def num_parts(contexts: int, rounds: int) -> int:
        """How often `begin` is called."""
        return 2 + contexts * (rounds + 1) + rounds

    def run(self) -> Findings:
        self._load()
        self._begin("measuring what the machine can do at most")
        self._ceilings = measure_ceilings(self._runner.model, quick=self._quick)
        self._say_what(self._ceilings)
        for context in self._contexts:
            self._cold(context)
        self._warm(self._contexts[-1])
        self._memory()
        return self.findings

    def _load(self) -> None:
        self._begin(f"loading {self._model}")
        if not self._model.startswith("random:"):
            must_fit(plan_model(self._model, max(self._contexts) + self._answer if self._contexts else None))
        began = time.perf_counter()
        loaded = load_or_make(self._model, trust_remote_code=self._trust)
        seconds = time.perf_counter() - began
        most = loaded.facts.context - self._answer - 1
        self._contexts = sorted(set(self._contexts or (min(context, most) for context in CONTEXTS)))
        if not SHORTEST <= self._contexts[0] <= self._contexts[-1] <= most:
            raise OptionError(
                f"context: {self._contexts[0]} to {self._contexts[-1]} tokens with an answer of {self._answer} are out of range: "
                f"at least {SHORTEST}, at most {most} for this model's context of {loaded.facts.context}"
            )
        context = self._contexts[-1] + self._answer + 1
        self._runner = Runner(loaded.model, loaded.tokenizer, loaded.facts, name=self._model, context=context)
        self._cost = cost_of(loaded.model, loaded.config)
        self._weights = weights_of(loaded.model)
        self._load_s = seconds

    def _say_what(self, ceilings: Ceilings) -> None:
        self.findings.about = {
            "model": self._model,
            "parameters": f"{num_parameters(self._runner.model) / 1e6:.3g} M",
            "weights": size(self._weights),
            "device": device.backend(),
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
            "BLAS": device.blas().value,
            "rounds": self._rounds,
        }
        share = self._weights / ceilings.bandwidth / self._load_s
        self.findings.figures += [
            Figure("load", "s", [self._load_s], share, "bandwidth"),
            Figure(f"ceiling: bandwidth, {ceilings.dtype}", "GB/s", [ceilings.bandwidth / 1e9]),
            Figure(f"ceiling: arithmetic, {ceilings.dtype}", "GFLOP/s", [ceilings.arithmetic / 1e9]),
        ]

    def _cold(self, context: int) -> None:
        """Prefill, decode at that depth, and memory."""
        sides: dict[str, Side] = {"ours": our_side(self._runner)}
        if self._versus:
            sides["mlx-lm"] = mlx_lm_side(self._runner)
        prompt, steps = some_tokens(self._runner, context), self._answer - 1
        runs = alternate(self._runner, sides, prompt, self._answer, self._rounds, self._begin)
        ours = runs["ours"]
        prefill = {side: [context / run.ttft for run in those] for side, those in runs.items()}
        decode = {side: [steps / run.decode for run in those] for side, those in runs.items()}
        peak = {side: [run.peak / 1e6 for run in those] for side, those in runs.items()}
        ttft, step = median(run.ttft for run in ours), median(run.decode for run in ours) / steps
        self.findings.figures += [
            Figure(f"cold prefill of {context}", "tok/s", prefill["ours"], *self._share(ttft, context, 0)),
            Figure(f"decode after {context}", "tok/s", decode["ours"], *self._share(step, 1, ours[-1].stored)),
            Figure(f"peak memory with {context}", "MB", peak["ours"], max(peak["ours"]) * 1e6 / device.offered_bytes(), "memory"),
        ]
        if self._versus:
            self.findings.rows += [
                more_is_better(f"cold prefill of {context}", "tok/s", prefill["ours"], prefill["mlx-lm"]),
                more_is_better(f"decode after {context}", "tok/s", decode["ours"], decode["mlx-lm"]),
                less_is_better(f"peak memory with {context}", "MB", peak["ours"], peak["mlx-lm"]),
            ]

    def _warm(self, context: int) -> None:
        """Time to the first token of a prompt whose beginning is in the entry, and of the same prompt after its answer."""
        found: dict[str, list[Usage]] = {f"first token of {context}, {percent} % cached": [] for percent in CACHED}
        again = f"first token of {context}, regenerated"
        found[again] = []
        for turn in range(self._rounds):
            self._begin(f"warm prompts of {context}, round {turn + 1} of {self._rounds}")
            self._runner.reset()
            prompt = some_tokens(self._runner, context, seed=turn)
            for percent, name in zip(CACHED, found, strict=False):
                kept = context * percent // 100
                # Different from its first token on, so that no more than `kept` can be reused of the entry that the last one left.
                prompt = prompt[:kept] + [(token + 1) % self._runner.facts.vocab for token in prompt[kept:]]
                found[name].append(self._ask(prompt, 1))
            self._ask(prompt, self._answer)
            found[again].append(self._ask(prompt, 1))
        for name, usages in found.items():
            seconds, evaluated = median(usage.ttft_s for usage in usages), usages[-1].evaluated_tokens
            share = self._share(seconds, evaluated, self._runner.entry.used_bytes)
            self.findings.figures.append(Figure(name, "ms", [usage.ttft_s * 1e3 for usage in usages], *share, evaluated))

    def _ask(self, prompt: list[int], count: int) -> Usage:
        wait()
        usage = [chunk.usage for chunk in self._runner.generate(prompt, max_tokens=count, stop_tokens=[])][-1]
        assert usage is not None  # the last chunk has it
        return usage

    def _memory(self) -> None:
        offered = device.offered_bytes()
        entry = self._runner.entry
        self.findings.figures += [
            Figure("weights", "MB", [self._weights / 1e6], self._weights / offered, "memory"),
            Figure(f"entry of {len(entry.tokens)} tokens", "MB", [entry.nbytes / 1e6], entry.nbytes / offered, "memory"),
        ]
        mx.clear_cache()

    def _share(self, seconds: float, tokens: int, stored: int) -> tuple[float | None, str | None]:
        """Of the ceiling that bounds a pass over `tokens` tokens with `stored` bytes of caches."""
        if self._cost is None:
            return None, None
        least, ceiling = self._cost.least_s(tokens, stored, self._ceilings)
        return least / seconds, ceiling

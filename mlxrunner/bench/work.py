"""The work that is measured: cold prompts, warm ones, answers at several depths, memory; alone, or against mlx-lm in turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any

import mlx.core as mx
import mlx_lm

from mlxrunner import device
from mlxrunner.bench.ceilings import Ceilings, cost_of, measure_ceilings, num_parameters
from mlxrunner.bench.figures import Figure, Findings
from mlxrunner.bench.harness import Begin, alternate, in_turn, measure, some_tokens, wait
from mlxrunner.bench.models import load_or_make
from mlxrunner.bench.rows import less_is_better, more_is_better
from mlxrunner.bench.sides import PromptCacheSide, Side, mlx_lm_side, our_side
from mlxrunner.errors import MlxrunnerError, OptionError
from mlxrunner.models.resolve import resolve
from mlxrunner.observation import Observation
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
        self._model, self._rounds, self._answer, self._versus, self._quick = (
            model,
            rounds,
            answer,
            versus,
            quick,
        )
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
            must_fit(
                plan_model(
                    self._model, max(self._contexts) + self._answer if self._contexts else None
                )
            )
        self._loads = (
            self._compare_loads() if self._versus and not self._model.startswith("random:") else {}
        )
        began = time.perf_counter()
        loaded = load_or_make(self._model, trust_remote_code=self._trust)
        self._loads.setdefault("ours", [time.perf_counter() - began])
        most = loaded.facts.context - self._answer - 1
        self._contexts = sorted(set(self._contexts or (min(context, most) for context in CONTEXTS)))
        if not SHORTEST <= self._contexts[0] <= self._contexts[-1] <= most:
            raise OptionError(
                f"context: {self._contexts[0]} to {self._contexts[-1]} tokens with an answer of {self._answer} are out of range: "
                f"at least {SHORTEST}, at most {most} for this model's context of {loaded.facts.context}"
            )
        context = self._contexts[-1] + self._answer + 1
        self._runner = Runner(
            loaded.model, loaded.tokenizer, loaded.facts, name=self._model, context=context
        )
        self._cost = cost_of(loaded.model, loaded.config)
        self._weights = weights_of(loaded.model)
        self._runner.observer, self._evaluated = self._observe, 0

    def _compare_loads(self) -> dict[str, list[float]]:
        """Seconds of each side, with its tokenizer, one after the other; nothing of one is there while the other loads."""
        folder = str(resolve(self._model))
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda: load_or_make(self._model, trust_remote_code=self._trust),
            "mlx-lm": lambda: mlx_lm.load(
                folder, tokenizer_config={"trust_remote_code": self._trust}
            ),
        }
        found: dict[str, list[float]] = {side: [] for side in ways}
        for turn in range(self._rounds + 1):
            for side in in_turn(ways, turn):
                wait()
                began = time.perf_counter()
                try:
                    ways[side]()
                except MlxrunnerError:
                    raise
                except Exception as error:  # a tokenizer that only we know, say
                    print(
                        f"mlx-lm can't load it by itself: {type(error).__name__}", file=sys.stderr
                    )
                    return {}
                found[side].append(time.perf_counter() - began)
        return {side: those[1:] for side, those in found.items()}

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
        ours = self._loads["ours"]
        share = self._weights / ceilings.bandwidth / median(ours)
        if "mlx-lm" in self._loads:
            self.findings.rows.append(less_is_better("load", "s", ours, self._loads["mlx-lm"]))
        self.findings.figures += [
            Figure("load", "s", ours, share, "bandwidth"),
            Figure(f"ceiling: bandwidth, {ceilings.dtype}", "GB/s", [ceilings.bandwidth / 1e9]),
            Figure(
                f"ceiling: arithmetic, {ceilings.dtype}", "GFLOP/s", [ceilings.arithmetic / 1e9]
            ),
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
            Figure(
                f"cold prefill of {context}",
                "tok/s",
                prefill["ours"],
                *self._share(ttft, context, 0),
            ),
            Figure(
                f"decode after {context}",
                "tok/s",
                decode["ours"],
                *self._share(step, 1, ours[-1].stored),
            ),
            Figure(
                f"peak memory with {context}",
                "MB",
                peak["ours"],
                max(peak["ours"]) * 1e6 / device.offered_bytes(),
                "memory",
            ),
        ]
        if self._versus:
            self.findings.rows += [
                more_is_better(
                    f"cold prefill of {context}", "tok/s", prefill["ours"], prefill["mlx-lm"]
                ),
                more_is_better(
                    f"decode after {context}", "tok/s", decode["ours"], decode["mlx-lm"]
                ),
                less_is_better(f"peak memory with {context}", "MB", peak["ours"], peak["mlx-lm"]),
            ]

    def _warm(self, context: int) -> None:
        """Time to the first token of a prompt whose beginning is in the entry, and of the same prompt after its answer."""
        sides: dict[str, Side] = {"ours": our_side(self._runner)}
        if self._versus:
            sides["mlx-lm"] = other = PromptCacheSide(self._runner)
        names = [f"first token of {context}, {percent} % cached" for percent in CACHED]
        found: dict[str, dict[str, list[float]]] = {}
        evaluated: dict[str, int] = {}

        def ask(name: str, prompt: list[int]) -> None:
            for side in in_turn(sides, turn):
                run = measure(sides[side], prompt, 1, self._runner)
                found.setdefault(name, {}).setdefault(side, []).append(run.ttft * 1e3)
            evaluated[name] = self._evaluated

        for turn in range(self._rounds):
            self._begin(f"warm prompts of {context}, round {turn + 1} of {self._rounds}")
            self._runner.reset()
            if self._versus:
                other.reset()
            prompt = some_tokens(self._runner, context, seed=turn)
            for percent, name in zip(CACHED, names, strict=True):
                kept = context * percent // 100
                # Different from its first token on, so that no more than `kept` can be reused of the entry that the last one left.
                prompt = prompt[:kept] + [
                    (token + 1) % self._runner.facts.vocab for token in prompt[kept:]
                ]
                ask(name, prompt)
            for side in sides.values():
                measure(side, prompt, self._answer, self._runner)
            ask(f"first token of {context}, regenerated", prompt)
        for name, ms in found.items():
            share = self._share(
                median(ms["ours"]) / 1e3, evaluated[name], self._runner.entry.used_bytes
            )
            self.findings.figures.append(Figure(name, "ms", ms["ours"], *share, evaluated[name]))
            if self._versus and name != names[0]:  # the cold one is compared as a rate
                self.findings.rows.append(less_is_better(name, "ms", ms["ours"], ms["mlx-lm"]))

    def _observe(self, runner: Any, observation: Observation) -> None:
        self._evaluated = observation.usage.evaluated_tokens

    def _memory(self) -> None:
        offered = device.offered_bytes()
        entry = self._runner.entry
        self.findings.figures += [
            Figure("weights", "MB", [self._weights / 1e6], self._weights / offered, "memory"),
            Figure(
                f"entry of {len(entry.tokens)} tokens",
                "MB",
                [entry.nbytes / 1e6],
                entry.nbytes / offered,
                "memory",
            ),
        ]
        mx.clear_cache()

    def _share(self, seconds: float, tokens: int, stored: int) -> tuple[float | None, str | None]:
        """Of the ceiling that bounds a pass over `tokens` tokens with `stored` bytes of caches."""
        if self._cost is None:
            return None, None
        least, ceiling = self._cost.least_s(tokens, stored, self._ceilings)
        return least / seconds, ceiling

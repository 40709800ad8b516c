"""Measure a model, alone or in turn with mlx-lm, in shares of the most that this machine can do.

The measurements are cold prompts, warm prompts, answers at several depths, and memory. A pass over
n tokens takes at least the time of reading the weights and caches once, and of two operations per
weight and token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from mlxrunner.bench.harness import (
    Backend,
    Begin,
    Comparison,
    Figure,
    Measurements,
    PromptCacheBackend,
    alternate,
    in_turn,
    less_is_better,
    load_or_make,
    measure,
    mlx_lm_backend,
    more_is_better,
    our_backend,
    some_tokens,
    wait,
)
from mlxrunner.engine.request import Observation
from mlxrunner.errors import MlxrunnerError, OptionError
from mlxrunner.loading import plan_model
from mlxrunner.memory.reserve import must_fit, weights_of
from mlxrunner.models.files import read_config
from mlxrunner.models.resolve import resolve
from mlxrunner.runner import Runner
from mlxrunner.system import device
from mlxrunner.terminal.output import size

if TYPE_CHECKING:
    from mlxrunner.ranks.ranks import Ranks


CONTEXTS = (512, 2048)
CACHED = (0, 50, 90, 99, 100)
"""The percentages of a prompt that the entry holds already."""
QUICK_CONTEXT = 128
SHORTEST = 16


class Bench:
    """A bench of one model. `run` fills `measurements` as it goes, also up to an interrupt."""

    def __init__(
        self,
        model: str,
        *,
        contexts: Sequence[int] = (),
        rounds: int = 3,
        answer: int = 32,
        versus: bool = False,
        quick: bool = False,
        guess: str = "off",
        trust_remote_code: bool = False,
        ranks: Ranks | None = None,
        begin: Begin = lambda name: None,
    ) -> None:
        """Prepare a bench; `run` loads the model and measures it.

        `contexts` are the lengths of the prompts in tokens, by default CONTEXTS as far as the
        model's context allows. `rounds` is the number of runs of each measurement, and `answer` the
        number of tokens decoded after each prompt. With `versus`, mlx-lm runs on the same weights
        in turn. With `quick`, the bandwidth is measured with smaller arrays. With `guess`
        other than "off", an answer that is asked for again is guessed, too. With `ranks`, they
        share the model, and the first one measures. `begin` is called with the name of each piece
        of work.
        """
        self._model, self._contexts, self._rounds = model, list(contexts), rounds
        self._answer, self._versus, self._quick = answer, versus, quick
        self._begin, self._trust, self._guess = begin, trust_remote_code, guess
        self._ranks = ranks
        self.measurements = Measurements()

    @staticmethod
    def num_parts(contexts: int, rounds: int, guess: str = "off") -> int:
        """Return the number of calls of `begin`."""
        return 2 + contexts * (rounds + 1) + rounds + (guess != "off")

    def run(self) -> Measurements:
        """Measure the model and return the measurements.

        Raise OptionError if a prompt is too short, or too long for the model's context. Raise
        ModelError if the model can't be loaded, and MemoryPlanError if it does not fit.
        """
        self._begin(f"loading {self._model}")
        self._load() if self._ranks is None else self._load_on(self._ranks)
        self._runner.observers.append(self._observe)
        self._evaluated = self._accepted = 0
        self._begin("measuring the machine's limits")
        self._ceilings = measure_ceilings(self._runner.model, quick=self._quick)
        self._say_what(self._ceilings)
        for context in self._contexts:
            self._cold(context)
        self._warm(self._contexts[-1])
        if self._guess != "off":
            self._guessed(self._contexts[-1])
        self._memory()
        return self.measurements

    def _load(self) -> None:
        """Load the model, check the lengths of the prompts, and make the runner."""
        is_random = self._model.startswith("random:")
        if not is_random:
            most = max(self._contexts) + self._answer if self._contexts else None
            must_fit(plan_model(self._model, most))
        self._loads = self._compare_loads() if self._versus and not is_random else {}
        began = time.perf_counter()
        loaded = load_or_make(self._model, trust_remote_code=self._trust)
        self._loads.setdefault("ours", [time.perf_counter() - began])
        self._choose_contexts(loaded.facts.context)
        context = self._contexts[-1] + self._answer + 1
        self._runner = Runner(
            loaded.model, loaded.tokenizer, loaded.facts, name=self._model, context=context
        )
        self._cost = cost_of(loaded.model, loaded.config)
        self._weights = weights_of(loaded.model)

    def _load_on(self, ranks: Ranks) -> None:
        """Load the model on all ranks. Costs and weights are those of the first rank's part."""
        ranks.wait_for_all()
        began = time.perf_counter()
        self._runner = ranks.load(self._model, {})
        self._loads = {"ours": [time.perf_counter() - began]}
        self._choose_contexts(self._runner.context)
        part = self._runner.model.own_part
        self._cost = cost_of(part, read_config(resolve(self._model)))
        self._weights = weights_of(part)

    def _choose_contexts(self, room: int) -> None:
        """Sort the lengths of the prompts. Raise OptionError unless they fit in `room` tokens."""
        most = room - self._answer - 1
        self._contexts = sorted(set(self._contexts or (min(context, most) for context in CONTEXTS)))
        if not SHORTEST <= self._contexts[0] <= self._contexts[-1] <= most:
            raise OptionError(
                f"context: {self._contexts[0]} to {self._contexts[-1]} tokens with an answer of "
                f"{self._answer} are out of range: at least {SHORTEST}, at most {most} for this "
                f"model's context of {room}"
            )

    def _compare_loads(self) -> dict[str, list[float]]:
        """Measure the seconds in which each backend loads model and tokenizer, in turns."""
        folder = str(resolve(self._model))
        trust = {"trust_remote_code": self._trust}
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda: load_or_make(self._model, **trust),
            "mlx-lm": lambda: mlx_lm.load(folder, tokenizer_config=trust),
        }
        found: dict[str, list[float]] = {backend: [] for backend in ways}
        for turn in range(self._rounds + 1):
            for backend in in_turn(ways, turn):
                wait()
                began = time.perf_counter()
                try:
                    ways[backend]()
                except MlxrunnerError:
                    raise
                except Exception as error:  # such as a tokenizer that only we know
                    why = type(error).__name__
                    print(f"mlx-lm can't load it by itself: {why}", file=sys.stderr)
                    return {}
                found[backend].append(time.perf_counter() - began)
        return {backend: those[1:] for backend, those in found.items()}

    def _say_what(self, ceilings: Ceilings) -> None:
        """Record the model, the versions, the time to load and the ceilings."""
        ranks, sharing = self._ranks, dict[str, Any]()
        if ranks is not None:
            sharing = {"ranks": len(ranks.shares), "sharing": ranks.way, "measured on": "rank 0"}
        self.measurements.about = {
            "model": self._model,
            **sharing,
            "parameters": f"{num_parameters(self._runner.model) / 1e6:.3g} M",
            "weights": size(self._weights),
            "device": device.backend(),
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
            "BLAS": device.blas().value,
            "rounds": self._rounds,
        }
        share = self._weights / ceilings.bandwidth / median(self._loads["ours"])
        self._add("load", "s", self._loads, (share, "bandwidth"), less_is_better)
        for name, unit in (("bandwidth", "GB/s"), ("arithmetic", "GFLOP/s")):
            value = getattr(ceilings, name) / 1e9
            figure = Figure(f"ceiling: {name}, {ceilings.dtype}", unit, [value])
            self.measurements.figures.append(figure)

    def _cold(self, context: int) -> None:
        """Measure prefill, decode at that depth, and memory."""
        backends: dict[str, Backend] = {"ours": our_backend(self._runner)}
        if self._versus:
            backends["mlx-lm"] = mlx_lm_backend(self._runner)
        prompt, steps = some_tokens(self._runner, context), self._answer - 1
        runs = alternate(self._runner, backends, prompt, self._answer, self._rounds, self._begin)
        ours = runs["ours"]
        prefill = {name: [context / run.ttft for run in those] for name, those in runs.items()}
        decode = {name: [steps / run.decode for run in those] for name, those in runs.items()}
        peak = {name: [run.peak / 1e6 for run in those] for name, those in runs.items()}
        ttft, step = median(run.ttft for run in ours), median(run.decode for run in ours) / steps
        share = self._share(ttft, context, 0)
        self._add(f"cold prefill of {context}", "tok/s", prefill, share, more_is_better)
        share = self._share(step, 1, ours[-1].stored)
        self._add(f"decode after {context}", "tok/s", decode, share, more_is_better)
        share = max(peak["ours"]) * 1e6 / device.offered_bytes(), "memory"
        self._add(f"peak memory with {context}", "MB", peak, share, less_is_better)

    def _add(
        self,
        name: str,
        unit: str,
        values: dict[str, list[float]],
        share: tuple[float | None, str | None],
        compare: Callable[..., Comparison],
        evaluated: int | None = None,
    ) -> None:
        """Record a figure, and how it compares with the one of mlx-lm if that was measured."""
        ours = values["ours"]
        self.measurements.figures.append(Figure(name, unit, ours, *share, evaluated))
        if "mlx-lm" in values:
            compared = compare(name, unit, ours, values["mlx-lm"])
            self.measurements.comparisons.append(compared)

    def _warm(self, context: int) -> None:
        """Measure the time to the first token where parts of a prompt are cached, or repeated."""
        backends: dict[str, Backend] = {"ours": our_backend(self._runner)}
        if self._versus:
            backends["mlx-lm"] = other = PromptCacheBackend(self._runner)
        names = [f"first token of {context}, {percent} % cached" for percent in CACHED]
        found: dict[str, dict[str, list[float]]] = {}
        evaluated: dict[str, int] = {}

        def ask(name: str, prompt: list[int]) -> None:
            for backend in in_turn(backends, turn):
                run = measure(backends[backend], prompt, 1, self._runner)
                found.setdefault(name, {}).setdefault(backend, []).append(run.ttft * 1e3)
            evaluated[name] = self._evaluated

        for turn in range(self._rounds):
            self._begin(f"warm prompts of {context}, round {turn + 1} of {self._rounds}")
            self._runner.reset()
            if self._versus:
                other.reset()
            prompt = some_tokens(self._runner, context, seed=turn)
            for percent, name in zip(CACHED, names, strict=True):
                kept = context * percent // 100
                # The rest differs from its first token on, so that no more than `kept` tokens of
                # the last entry can be reused.
                vocab = self._runner.facts.vocab
                prompt = prompt[:kept] + [(token + 1) % vocab for token in prompt[kept:]]
                ask(name, prompt)
            for backend in backends.values():
                measure(backend, prompt, self._answer, self._runner)
            ask(f"first token of {context}, regenerated", prompt)
        for name, ms in found.items():
            took, stored = median(ms["ours"]) / 1e3, self._runner.entry.used_bytes
            share = self._share(took, evaluated[name], stored)
            if name == names[0]:  # the cold prompt is compared as a rate
                ms = {"ours": ms["ours"]}
            self._add(name, "ms", ms, share, less_is_better, evaluated[name])

    def _guessed(self, context: int) -> None:
        """Measure decode where the earlier answer is guessed, the most that guesses save."""
        self._begin(f"guessed answers after {context}")
        prompt, steps = some_tokens(self._runner, context), self._answer - 1
        ways = {how: our_backend(self._runner, how) for how in ("off", self._guess)}
        rates: dict[str, list[float]] = {how: [] for how in ways}
        passes = {}
        for turn in range(self._rounds + 1):
            for how in in_turn(ways, turn):
                run = measure(ways[how], prompt, self._answer, self._runner)
                rates[how].append(steps / run.decode)
                passes[how] = steps - self._accepted
        name = f"decode after {context}, the answer asked for again"
        self.measurements.figures += [
            Figure(label, "tok/s", rates[how][1:], passes=passes[how])
            for how, label in (("off", name), (self._guess, f"{name}, guessed"))
        ]

    def _observe(self, runner: Any, observation: Observation) -> None:
        self._evaluated = observation.usage.evaluated_tokens
        self._accepted = sum(one.accepted for one in observation.usage.drafts)

    def _memory(self) -> None:
        """Record the memory of the weights and of the entry."""
        offered = device.offered_bytes()
        entry = self._runner.entry
        parts = {"weights": self._weights, f"entry of {len(entry.tokens)} tokens": entry.nbytes}
        self.measurements.figures += [
            Figure(name, "MB", [nbytes / 1e6], nbytes / offered, "memory")
            for name, nbytes in parts.items()
        ]
        mx.clear_cache()

    def _share(self, seconds: float, tokens: int, stored: int) -> tuple[float | None, str | None]:
        """Return the share of a ceiling that a pass reached, and its name; None: unknown."""
        if self._cost is None:
            return None, None
        least, ceiling = self._cost.least_s(tokens, stored, self._ceilings)
        return least / seconds, ceiling


REPEATS = 5
ENOUGH_S = 0.1
"""The seconds of a matrix product that is long enough to use the whole device."""
LARGEST_SIDE = 8192
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names that configurations use for the number of experts."""


@dataclass(frozen=True)
class Ceilings:
    """The most that a device can do with numbers of one type."""

    dtype: str
    bandwidth: float
    """The bytes per second that a copy or a matrix-vector product moves, whichever is faster."""
    arithmetic: float
    """The operations per second of a matrix product."""


@dataclass(frozen=True)
class PassCost:
    """The weights that a pass through a model uses."""

    body: int
    """The number of weights that each token uses."""
    head: int
    """The number of weights that only the last token uses, to make its logits."""
    nbytes: int
    """The bytes of both, as they are stored."""

    def least_s(self, tokens: int, stored: int, ceilings: Ceilings) -> tuple[float, str]:
        """Return the least seconds of a pass with `stored` bytes of caches, and what limits it."""
        computing = 2 * (self.body * tokens + self.head) / ceilings.arithmetic
        reading = (self.nbytes + stored) / ceilings.bandwidth
        return (computing, "arithmetic") if computing > reading else (reading, "bandwidth")


def measure_ceilings(model: Any, *, quick: bool = False) -> Ceilings:
    """Measure the ceilings of the device for the type of `model`; `quick`: with smaller arrays."""
    dtype = compute_dtype(model)
    nbytes = min(
        (2**28 if device.is_gpu() else 2**27) >> (2 if quick else 0), device.offered_bytes() // 8
    )
    return Ceilings(str(dtype).split(".")[-1], bandwidth(dtype, nbytes), arithmetic(dtype))


def bandwidth(dtype: mx.Dtype, nbytes: int) -> float:
    """Measure bytes per second with arrays of `nbytes` bytes."""
    side = 4096
    matrix = mx.ones((max(nbytes // dtype.size // side, 1), side), dtype)
    vector = mx.ones((side,), dtype)
    mx.eval(matrix, vector)
    copied = 2 * matrix.nbytes / _best(lambda: matrix + 1)
    return max(copied, matrix.nbytes / _best(lambda: matrix @ vector))


def arithmetic(dtype: mx.Dtype) -> float:
    """Measure operations per second with growing matrices, until a product takes ENOUGH_S."""
    side, best = 512, 0.0
    while True:
        matrix = mx.random.normal((side, side)).astype(dtype)
        mx.eval(matrix)
        seconds = _best(partial(mx.matmul, matrix, matrix))
        best = max(best, 2 * side**3 / seconds)
        if seconds > ENOUGH_S or side >= LARGEST_SIDE:
            return best
        side *= 2


def _best(work: Callable[[], mx.array]) -> float:
    """Return the seconds of the fastest of REPEATS runs, the least disturbed one."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        mx.eval(work())
        times.append(time.perf_counter() - began)
    mx.clear_cache()
    return min(times)


def compute_dtype(model: Any) -> mx.Dtype:
    """Return the type in which a model computes: that of its weights, or of their scales."""
    parameters: Any = tree_flatten(model.parameters())
    dtypes: list[mx.Dtype] = [array.dtype for _, array in parameters]
    return next(dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating))


def cost_of(model: Any, config: dict[str, Any]) -> PassCost | None:
    """Return the cost of a pass; None for a model with experts, where it depends on the tokens.

    A table of embeddings that is not also the head is left out, since a pass reads one row of it.
    """
    sources = config, config.get("text_config") or {}
    experts = [source.get(name) for source in sources for name in EXPERTS]
    if any(isinstance(count, int) and count > 1 for count in experts):
        return None
    arrays: Any = tree_flatten(model.parameters())
    total, modules = num_parameters(model), dict(model.named_modules())
    is_untied = any("lm_head" in name for name, _ in arrays)
    weights = [name for name, _ in arrays if name.endswith(".weight")]
    table, head = (
        sum(_count(modules[name.removesuffix(".weight")]) for name in weights if part in name)
        for part in ("embed", "lm_head")
    )
    read = sum(array.nbytes for name, array in arrays if not (is_untied and "embed" in name))
    return PassCost(total - table - head, head or table, read)


def num_parameters(model: Any) -> int:
    """Count the numbers in all weights, packed ones too."""
    count: int = get_total_parameters(model)
    return count


def _count(module: Any) -> int:
    """Count the numbers in a weight, which may be packed."""
    packed = getattr(module, "bits", None)
    return int(module.weight.size * 32 // packed if packed else module.weight.size)

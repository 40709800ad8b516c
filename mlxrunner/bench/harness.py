"""Measure requests as the reader of their tokens sees them, on backends that take turns.

All backends run in one process, and another one begins each round. A disturbance of the machine
slows all of them, and they are compared round by round. `Figure` and `Comparison` hold the results.
"""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import stream_generate
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from mlxrunner.cache.entry import as_tokens, common_prefix
from mlxrunner.errors import ModelError
from mlxrunner.models.facts import facts_of
from mlxrunner.models.load import LoadedModel, load_either
from mlxrunner.runner import Runner
from mlxrunner.system import device
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.base import ByteTokenizer

Tokens = Generator[int, None, None]
Backend = Callable[[list[int], int], Tokens]
"""A function of a prompt and the most tokens to answer. It yields the tokens of a greedy answer."""


def our_backend(runner: Runner, guess: str = "off") -> Backend:
    """Return a backend that asks `runner`, by default for one token per forward pass."""
    options: dict[str, Any] = {"stop_tokens": [], "speculate": guess}

    def generate(prompt: list[int], max_tokens: int) -> Tokens:
        with closing(runner.generate(prompt, max_tokens=max_tokens, **options)) as chunks:
            for chunk in chunks:
                yield chunk.token  # type: ignore[misc]  # each chunk of such an answer has one

    return generate


def mlx_lm_backend(runner: Runner) -> Backend:
    """Return a backend that asks mlx-lm with a fresh prompt cache for each prompt, its default."""
    tokenizer = SameDecoder(runner.tokenizer)

    def generate(prompt: list[int], max_tokens: int) -> Tokens:
        responses = stream_generate(runner.model, tokenizer, prompt, max_tokens=max_tokens)
        with closing(responses):
            for response in responses:
                yield response.token

    return generate


class PromptCacheBackend:
    """A backend that asks mlx-lm with one prompt cache, which is trimmed or made again."""

    def __init__(self, runner: Runner) -> None:
        self._model, self._tokenizer = runner.model, SameDecoder(runner.tokenizer)
        self.reset()

    def reset(self) -> None:
        """Make an empty prompt cache."""
        self._cache, self._held = make_prompt_cache(self._model), as_tokens([])

    def __call__(self, prompt: list[int], max_tokens: int) -> Tokens:
        shared = min(common_prefix(self._held, as_tokens(prompt)), len(prompt) - 1)
        if trim_prompt_cache(self._cache, len(self._held) - shared) != len(self._held) - shared:
            self.reset()
            shared = 0
        given, rest = list(prompt), prompt[shared:]
        try:
            responses = stream_generate(
                self._model, self._tokenizer, rest, max_tokens=max_tokens, prompt_cache=self._cache
            )
            with closing(responses):
                for response in responses:
                    given.append(response.token)
                    yield response.token
        finally:
            self._held = as_tokens(given[: getattr(self._cache[0], "offset", len(given))])


class SameDecoder(TokenizerWrapper):  # type: ignore[misc]  # not annotated upstream
    """A tokenizer for mlx-lm that decodes as the runner does. No token ends the answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = _Detokenizer(tokenizer)
        self._eos_token_ids: set[int] = set()


class _Detokenizer(StreamingDetokenizer):  # type: ignore[misc]  # not annotated upstream
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def reset(self) -> None:
        self._stream, self._segment = self._tokenizer.stream([]), ""

    def add_token(self, token: int) -> None:
        self._segment = self._stream.add(token)

    def finalize(self) -> None:
        self._segment += self._stream.finish()

    @property
    def last_segment(self) -> str:
        return self._segment


Begin = Callable[[str], None]
"""A function that is called with the name of the next piece of work."""


@dataclass(frozen=True)
class TimedRun:
    """One measured request."""

    tokens: list[int]
    ttft: float
    """The seconds to the first token."""
    decode: float
    """The seconds from the first token to the last."""
    python: float
    """The seconds of `decode` that the reading thread itself computed."""
    peak: int
    """The peak of all MLX memory, in bytes."""
    stored: int = 0
    """The bytes of the runner's entry that hold tokens afterwards, for our own backend only."""


def alternate(
    runner: Runner,
    backends: Mapping[str, Backend],
    prompt: list[int],
    count: int,
    rounds: int,
    begin: Begin = lambda name: None,
) -> dict[str, list[TimedRun]]:
    """Run each backend cold `rounds` times, after one run that does not count.

    Print a line on standard error if the backends give different tokens.
    """
    runs: dict[str, list[TimedRun]] = {backend: [] for backend in backends}
    for turn in range(rounds + 1):
        which = f"round {turn} of {rounds}" if turn else "warming up"
        begin(f"cold prompt of {len(prompt)}, {which}")
        for backend in in_turn(backends, turn):
            runner.reset()
            runs[backend].append(measure(backends[backend], prompt, count, runner))
    if len({tuple(run.tokens) for those in runs.values() for run in those}) > 1:
        print(f"{', '.join(backends)}: not the same tokens after {len(prompt)}", file=sys.stderr)
    return {backend: those[1:] for backend, those in runs.items()}


def in_turn(backends: Mapping[str, Any], turn: int) -> list[str]:
    """Return the names in the order of round `turn`: forwards in odd rounds, else backwards."""
    return list(backends) if turn % 2 else list(backends)[::-1]


def measure(backend: Backend, prompt: list[int], count: int, runner: Runner) -> TimedRun:
    """Measure `count` tokens. As for a reader, a second one is computed while one is read."""
    wait()
    mx.reset_peak_memory()
    began = time.perf_counter()
    answer = backend(prompt, max(count, 2))
    tokens = [next(answer)]
    first, first_python = time.perf_counter(), time.thread_time()
    while len(tokens) < count:
        tokens.append(next(answer))
    last, last_python = time.perf_counter(), time.thread_time()
    answer.close()
    times = first - began, last - first, last_python - first_python
    return TimedRun(tokens, *times, mx.get_peak_memory(), runner.entry.used_bytes)


def wait() -> None:
    """Wait for the last run to end on the device, and give back its memory."""
    mx.synchronize()
    mx.synchronize(generation_stream)
    gc.collect()
    mx.clear_cache()


def some_tokens(runner: Runner, count: int, seed: int = 0) -> list[int]:
    """Return `count` random tokens of the runner's vocabulary."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = rng.integers(runner.facts.vocab, size=count).tolist()
    return tokens


RANDOM = re.compile(r"random:(\d+(?:\.\d+)?)([MG])", re.IGNORECASE)
VOCAB = 8192
HEAD_DIM = 64


def load_or_make(name: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """Load a model as `load_either` does, or make an untrained Llama.

    A name such as `random:100M` or `random:1.5G` makes a Llama with about that number of
    parameters. Random weights are as fast as others, so anybody can compare machines without a
    download. Raise ModelError if the name is not a size or the weights do not fit.
    """
    if not name.startswith("random:"):
        return load_either(name, trust_remote_code=trust_remote_code)
    match = RANDOM.fullmatch(name)
    if match is None:
        raise ModelError(
            f"{name} is not a size: name a random model like random:100M or random:1.5G"
        )
    return random_llama(name, float(match[1]) * {"M": 1e6, "G": 1e9}[match[2].upper()])


def random_llama(name: str, parameters: float) -> LoadedModel:
    """Make the Llama nearest to `parameters`, 64 times as wide as deep, as small models are.

    Raise ModelError if its weights do not fit into the memory of the device.
    """
    depth = min(range(1, 200), key=lambda layers: abs(_parameters(layers) - parameters))
    dtype, hidden = device.preferred_dtype() or mx.bfloat16, HEAD_DIM * depth
    need, offered = int(_parameters(depth) * dtype.size), device.offered_bytes()
    if need > offered:
        raise ModelError(
            f"{name}: its weights would take {need / 1e9:.1f} GB, and the device offers "
            f"{offered / 1e9:.1f} GB: name a smaller one"
        )
    args = ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=depth,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_attention_heads=depth,
        num_key_value_heads=depth,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    mx.random.seed(0)
    model = Model(args)
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    # Most ids have no text in this tokenizer, so decoding them costs next to nothing.
    return LoadedModel(
        name, Path(), model, ByteTokenizer(), facts_of(model, vars(args)), vars(args)
    )


def _parameters(layers: int) -> float:
    """Return the number of parameters of a Llama with this number of layers."""
    hidden = HEAD_DIM * layers
    return float(12 * layers * hidden**2 + 2 * VOCAB * hidden)


@dataclass(frozen=True)
class Figure:
    """A quantity that was measured once a round."""

    name: str
    unit: str
    values: Sequence[float]
    """The value of each round, in `unit`."""
    share: float | None = None
    """The share of the ceiling that the median reaches; None if there is no ceiling."""
    ceiling: str | None = None
    evaluated: int | None = None
    """The prompt tokens that the model evaluated, where the entry held some of them; else None."""
    passes: int | None = None
    """The forward passes of the answer, where some of its tokens were guessed; else None."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figure with minimum, median and maximum of its values."""
        share = None if self.share is None else short(self.share)
        rest = {name: getattr(self, name) for name in ("ceiling", "evaluated", "passes")}
        head = {"name": self.name, "unit": self.unit, **_named(spread(self.values))}
        return {**head, "share": share, **rest}


@dataclass(frozen=True)
class Comparison:
    """A quantity that was measured once a round for each of two backends."""

    name: str
    unit: str
    ours: Sequence[float]
    """The value of our backend in each round, in `unit`."""
    other: Sequence[float]
    """The value of the other backend in each round, in `unit`."""
    compared: Sequence[float]
    """The gain of each round (how many times better ours is), or the excess (ours - other)."""
    is_excess: bool = False
    target: float | None = None
    """The least gain or the largest excess that the median has to reach; None for no target."""

    @property
    def is_met(self) -> bool | None:
        """True if the median meets the target; None without a target."""
        if self.target is None:
            return None
        middle = median(self.compared)
        return middle <= self.target if self.is_excess else middle >= self.target

    @property
    def verdict(self) -> str:
        """The target and the word "met" or "MISSED"; empty without a target."""
        if self.target is None:
            return ""
        bound = "<=" if self.is_excess else ">="
        return f"{bound} {self.target:g} {'met' if self.is_met else 'MISSED'}"

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison with the medians, and the spread of its gain or excess."""
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": short(median(self.ours)),
            "other": short(median(self.other)),
            "excess" if self.is_excess else "gain": _named(spread(self.compared)),
            "target": self.target,
            "met": self.is_met,
        }


def more_is_better(
    name: str, unit: str, ours: Sequence[float], other: Sequence[float], target: float | None = None
) -> Comparison:
    """Compare by gain: ours / other in each round."""
    gains = [a / b for a, b in zip(ours, other, strict=True)]
    return Comparison(name, unit, ours, other, gains, target=target)


def less_is_better(
    name: str, unit: str, ours: Sequence[float], other: Sequence[float]
) -> Comparison:
    """Compare by gain: other / ours in each round."""
    gains = [b / a for a, b in zip(ours, other, strict=True)]
    return Comparison(name, unit, ours, other, gains)


def excess(
    name: str, unit: str, ours: Sequence[float], other: Sequence[float], target: float | None = None
) -> Comparison:
    """Compare by excess: ours - other in each round."""
    excesses = [a - b for a, b in zip(ours, other, strict=True)]
    return Comparison(name, unit, ours, other, excesses, is_excess=True, target=target)


@dataclass
class Measurements:
    """The results of a bench; all three fields grow while it runs."""

    about: dict[str, Any] = field(default_factory=dict)
    """The model, the machine and the versions that were measured."""
    figures: list[Figure] = field(default_factory=list)
    """The figures of our own backend and of the machine."""
    comparisons: list[Comparison] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the measurements for programs."""
        return {
            **self.about,
            "figures": [figure.as_dict() for figure in self.figures],
            "versus": [comparison.as_dict() for comparison in self.comparisons],
        }

    def table(self) -> str:
        """Return the measurements as text for people."""
        lines = [", ".join(f"{name} {value}" for name, value in self.about.items())]
        if self.figures:
            width = max(len(figure.name) for figure in self.figures)
            heads = f"{'unit':>7}  {'min':>7}  {'median':>7}  {'max':>7}"
            lines.append(f"{'':{width}}  {heads}  share of the ceiling")
            lines += [_figure_line(figure, width) for figure in self.figures]
        if self.comparisons:
            lines += ["", 'against mlx-lm ("x": how many times better we are)']
            lines += table_of(self.comparisons, "ours", "mlx-lm")
        return "\n".join(lines)


def table_of(
    comparisons: Sequence[Comparison], ours: str = "runner", other: str = "other"
) -> list[str]:
    """Return the lines of a table: medians, and the spread of the gain (x) or the excess (+)."""
    width = max(len(one.name) for one in comparisons)
    heads = f"{'unit':>5}  {ours:>7}  {other:>7}     {'min':>7}  {'median':>7}  {'max':>7}"
    has_target = any(one.target is not None for one in comparisons)
    lines = [f"{'':{width}}  {heads}" + ("  target" if has_target else "")]
    for one in comparisons:
        low, middle, high = spread(one.compared)
        medians = f"{short(median(one.ours)):>7g}  {short(median(one.other)):>7g}"
        sign = "+" if one.is_excess else "x"
        spreads = f"{low:>7g}  {middle:>7g}  {high:>7g}"
        line = f"{one.name:{width}}  {one.unit:>5}  {medians}  {sign}  {spreads}  {one.verdict}"
        lines.append(line.rstrip())
    return lines


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return minimum, median and maximum."""
    return short(min(values)), short(median(values)), short(max(values))


def _named(values: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("min", "median", "max"), values, strict=True))


def short(value: float) -> float:
    """Round to four digits, more than such a measurement has."""
    return float(f"{value:.4g}")


def _figure_line(figure: Figure, width: int) -> str:
    low, middle, high = spread(figure.values)
    share = "" if figure.share is None else f"{figure.share:6.1%} of {figure.ceiling}"
    evaluated = "" if figure.evaluated is None else f"  ({figure.evaluated} evaluated)"
    passes = "" if figure.passes is None else f"  ({figure.passes} passes)"
    spreads = f"{low:>7g}  {middle:>7g}  {high:>7g}"
    line = f"{figure.name:{width}}  {figure.unit:>7}  {spreads}  {share}{evaluated}{passes}"
    return line.rstrip()

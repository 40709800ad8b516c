"""Measure requests as the reader of their tokens sees them, on backends that take turns.

All backends run in one process, and another one begins each round. A disturbance of the machine
slows all of them, and they are compared round by round.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import stream_generate
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from mlxrunner.cache.tokens import as_tokens, common_prefix
from mlxrunner.runner import Runner
from mlxrunner.tokenizer import Tokenizer

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
        with closing(
            stream_generate(runner.model, tokenizer, prompt, max_tokens=max_tokens)
        ) as responses:
            for response in responses:
                yield response.token

    return generate


class PromptCacheBackend:
    """A backend that asks mlx-lm with one prompt cache.

    The cache is trimmed to the prefix that a prompt shares with it, or made anew if it can't be
    trimmed.
    """

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
    """A tokenizer for mlx-lm's generator that decodes with the stream of the runner.

    No token ends the answer.
    """

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
class Run:
    """One measured request."""

    tokens: list[int]
    """The tokens of the answer."""
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
) -> dict[str, list[Run]]:
    """Run each backend cold `rounds` times, after one run that does not count.

    `count` is the number of tokens to answer. Print a line on standard error if the backends give
    different tokens.
    """
    runs: dict[str, list[Run]] = {backend: [] for backend in backends}
    for turn in range(rounds + 1):
        begin(
            f"cold prompt of {len(prompt)}, "
            + (f"round {turn} of {rounds}" if turn else "warming up")
        )
        for backend in in_turn(backends, turn):
            runner.reset()
            runs[backend].append(measure(backends[backend], prompt, count, runner))
    if len({tuple(run.tokens) for those in runs.values() for run in those}) > 1:
        print(f"{', '.join(backends)}: not the same tokens after {len(prompt)}", file=sys.stderr)
    return {backend: those[1:] for backend, those in runs.items()}


def in_turn(backends: Mapping[str, Any], turn: int) -> list[str]:
    """Return the names in the order of round `turn`: forwards in odd rounds, else backwards."""
    return list(backends) if turn % 2 else list(backends)[::-1]


def measure(backend: Backend, prompt: list[int], count: int, runner: Runner) -> Run:
    """Measure an answer of `count` tokens.

    A single token is measured as the first of two, so that the second is already being computed, as
    it is for a reader.
    """
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
    stored = runner.entry.used_bytes
    return Run(
        tokens,
        first - began,
        last - first,
        last_python - first_python,
        mx.get_peak_memory(),
        stored,
    )


def wait() -> None:
    """Wait for the last run to end on the device, and give back its memory."""
    mx.synchronize()
    mx.synchronize(generation_stream)
    gc.collect()
    mx.clear_cache()


def some_tokens(runner: Runner, count: int, seed: int = 0) -> list[int]:
    """Return `count` random tokens of the runner's vocabulary."""
    tokens: list[int] = (
        np.random.default_rng(seed).integers(runner.facts.vocab, size=count).tolist()
    )
    return tokens

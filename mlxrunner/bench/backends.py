"""Define the backends that a bench compares, all on one loaded model.

A backend turns a prompt of token ids into a stream of token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from mlx_lm import stream_generate
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

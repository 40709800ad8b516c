"""The sides of the comparison: from a prompt of token ids to a stream of token ids, all on one loaded model."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

from mlx_lm import stream_generate
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from mlxrunner.runner import Runner
from mlxrunner.tokenizer import Tokenizer

Tokens = Generator[int, None, None]
Side = Callable[[list[int], int], Tokens]
"""(prompt, most tokens) -> the tokens, greedy, one by one."""


def our_side(runner: Runner) -> Side:
    def generate(prompt: list[int], max_tokens: int) -> Tokens:
        with closing(runner.generate(prompt, max_tokens=max_tokens, stop_tokens=[])) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                yield chunk.token  # type: ignore[misc]  # each chunk of such an answer has one

    return generate


def mlx_lm_side(runner: Runner) -> Side:
    """With a fresh prompt cache each time, as it does by itself."""
    tokenizer = SameDecoder(runner.tokenizer)

    def generate(prompt: list[int], max_tokens: int) -> Tokens:
        with closing(stream_generate(runner.model, tokenizer, prompt, max_tokens=max_tokens)) as responses:
            for response in responses:
                yield response.token

    return generate


class SameDecoder(TokenizerWrapper):  # type: ignore[misc]  # not annotated upstream
    """What mlx-lm's generator needs of a tokenizer: no token that ends, and text from the stream that the runner itself uses."""

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

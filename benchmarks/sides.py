"""The sides of the comparison: from a prompt of token ids to a stream of token ids, all on one loaded model."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from mlxrunner.cache.factory import make_layer_caches
from mlxrunner.models.facts import facts_of
from mlxrunner.runner import Runner
from mlxrunner.testing import ByteTokenizer
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


def bare_loop(runner: Runner) -> Side:
    """The least that decoding one step ahead takes, on the layer caches that the runner uses, and in its order."""
    model = runner.model

    def generate(prompt: list[int], max_tokens: int) -> Tokens:
        layers = make_layer_caches(model)
        for layer in layers:
            layer.reserve(len(prompt) + max_tokens)
        cache = [layer.model_cache for layer in layers]

        def following(tokens: mx.array) -> mx.array:
            token = mx.argmax(model(tokens[None], cache=cache)[:, -1, :], axis=-1)
            mx.async_eval(token)
            return token

        model(mx.array(prompt[:-1])[None], cache=cache)
        mx.eval([layer.state for layer in layers])
        token = following(mx.array(prompt[-1:]))
        yield token.item()  # type: ignore[misc]  # of an integer array
        coming = following(token)
        for left in range(max_tokens - 1, 0, -1):
            token = coming
            if left > 1:
                coming = following(token)
            yield token.item()  # type: ignore[misc]  # of an integer array

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


def random_llama() -> Runner:
    """About 100 M parameters in float32 that were never trained, which makes them no slower."""
    args = ModelArgs(
        model_type="llama", hidden_size=768, num_hidden_layers=12, intermediate_size=2048, num_attention_heads=12,
        num_key_value_heads=12, rms_norm_eps=1e-5, vocab_size=8192, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    mx.random.seed(0)
    model = Model(args)
    model.eval()
    mx.eval(model.parameters())
    # Most of its ids have no text in this tokenizer: equally little to do for both sides.
    return Runner(model, ByteTokenizer(), facts_of(model, vars(args)), name="llama")

"""Runners of the oracle in mixes of layers, ways for their requests to end, and next prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from support.engine import last_pass_of

from mlxrunner import Runner
from mlxrunner.testing import LAYERS, VOCAB, OracleModel, interrupt_at, oracle_runner

NO_HELP = {"rewind_slack": 0, "checkpoint_budget": 0}
SLACK = {"rewind_slack": 4, "checkpoint_budget": 0}
CHECKPOINTS = {"rewind_slack": 2, "checkpoint_interval": 7, "checkpoint_budget": 10**6}
FEW = {"rewind_slack": 2, "checkpoint_interval": 5, "checkpoint_budget": 300}
ALL = [*LAYERS]
each_kind_and_all = pytest.mark.parametrize(
    "kinds", [*([kind] for kind in ALL), ALL], ids=lambda kinds: "-".join(kinds)
)
with_and_without_checkpoints = pytest.mark.parametrize(
    "options", [NO_HELP, CHECKPOINTS], ids=["alone", "checkpoints"]
)


class Mix:
    """Layers, and how they may be rewound."""

    def __init__(self, kinds: list[str], options: dict[str, int]) -> None:
        self.kinds, self.options = kinds, options

    def runner(self, **options: Any) -> Runner:
        return oracle_runner(self.kinds, **(self.options | options))


def mixes_of(named: dict[str, tuple[list[str], dict[str, int]]]) -> pytest.MarkDecorator:
    """Run a test with each mix, as its argument `mix`."""
    return pytest.mark.parametrize("mix", [Mix(*given) for given in named.values()], ids=named)


def next_prompts(said: list[int]) -> dict[str, list[int]]:
    """Return prompts that may follow the tokens of a request and its answer."""
    return {
        "next turn": [*said, 5, 6, 7],
        "the same again": said,
        "last token regenerated": said[:-1],
        "edited late": [*said[:-4], 9, 9, 9],
        "edited in the middle": [*said[: len(said) // 2], 8, 8],
        "edited early": [*said[:3], 8, 8],
        "another conversation": [99, 98, 97],
    }


MIXES: dict[str, tuple[list[str], dict[str, int]]] = {
    "full": (["full", "full"], NO_HELP),
    "sliding": (["full", "sliding"], NO_HELP),
    "sliding-slack": (["full", "sliding"], SLACK),
    "sliding-checkpoints": (["sliding", "full"], CHECKPOINTS),
    "recurrent": (["recurrent", "full"], NO_HELP),
    "recurrent-checkpoints": (["recurrent", "full"], CHECKPOINTS),
    "composite": (["composite"], NO_HELP),
    "composite-few-checkpoints": (["composite"], FEW),
    "chunked-checkpoints": (["chunked", "full"], CHECKPOINTS),
    "unknown-checkpoints": (["unknown", "full"], CHECKPOINTS),
    "all": (["full", "sliding", "recurrent", "composite", "chunked"], NO_HELP),
    "all-checkpoints": (["full", "sliding", "recurrent", "composite", "chunked"], CHECKPOINTS),
}


mixes = mixes_of(MIXES)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that grow and move every few tokens, checkpoints that are close to each other."""
    monkeypatch.setattr("mlxrunner.cache.layers.extents.STEP", 4)
    monkeypatch.setattr("mlxrunner.cache.layers.attention.STEP", 8)
    monkeypatch.setattr("mlxrunner.cache.entry.SPACING", 3)
    last_pass_of(3, monkeypatch)


def tokens(runner: Runner, prompt: list[int], n: int = 6, **options: Any) -> list[int]:
    return [
        chunk.token
        for chunk in runner.generate(prompt, max_tokens=n, **options)
        if chunk.token is not None
    ]


def cold(kinds: Sequence[str], prompt: list[int], n: int = 6, **options: Any) -> list[int]:
    """Return the answer of a new runner. One without functions in its options is computed once."""
    if "logits_processors" in options:
        return tokens(oracle_runner(kinds), prompt, n, **options)
    return [*_cold(tuple(kinds), tuple(prompt), n, json.dumps(options, sort_keys=True))]


@cache
def _cold(kinds: tuple[str, ...], prompt: tuple[int, ...], n: int, options: str) -> list[int]:
    return tokens(oracle_runner(kinds), [*prompt], n, **json.loads(options))


def is_consistent(runner: Runner) -> bool:
    entry = runner.entry
    return entry.is_true and (len(entry.tokens) > 0 or not entry.caches)


def fail(runner: Runner, prompt: list[int], error: BaseException, forward: int, layer: int) -> None:
    """An error from inside the model, before `layer` of its `forward`-th forward pass."""
    model = runner.model
    first = len(model.forwards)

    def on_layer(index: int) -> None:
        if len(model.forwards) - first == forward and index == layer:
            raise error

    model.on_layer = on_layer
    with pytest.raises(type(error)):
        tokens(runner, prompt, 20)
    model.on_layer = lambda index: None


@contextmanager
def interrupted_twice(model: OracleModel, line: int) -> Iterator[list[list[int]]]:
    """Press Ctrl-C before the last layer of the second pass from now on, and `line` lines later.

    Yield a list, which then has the count of `interrupt_at`.
    """
    first, counts, last = len(model.forwards), list[list[int]](), len(model.kinds) - 1
    with suppress(KeyboardInterrupt), ExitStack() as stack:

        def on_layer(index: int) -> None:
            if len(model.forwards) - first == 2 and index == last and not counts:
                counts.append(stack.enter_context(interrupt_at(line)))
                raise KeyboardInterrupt

        model.on_layer = on_layer
        with suppress(KeyboardInterrupt):
            yield counts
    model.on_layer = lambda index: None


def usage_of(runner: Runner, prompt: list[int]) -> Any:
    return list(runner.generate(prompt, max_tokens=3))[-1].usage


def run_to_the_end(runner: Runner, prompt: list[int]) -> None:
    tokens(runner, prompt)


def close_early(runner: Runner, prompt: list[int]) -> None:
    iterator = runner.generate(prompt, max_tokens=20)
    next(iterator), next(iterator)
    iterator.close()  # type: ignore[attr-defined]


def drop_unread(runner: Runner, prompt: list[int]) -> None:
    runner.generate(prompt)


def stop_on_a_token(runner: Runner, prompt: list[int]) -> None:
    third = cold(runner.model.kinds, prompt)[2]
    assert list(runner.generate(prompt, stop_tokens=[third]))[-1].finish_reason == "stop"


def stop_on_text(runner: Runner, prompt: list[int]) -> None:
    answer = "".join(
        chunk.text for chunk in oracle_runner(runner.model.kinds).generate(prompt, max_tokens=8)
    )
    last = list(runner.generate(prompt, max_tokens=8, stop=answer[2]))[-1]
    assert last.finish_reason == "stop"


def one_token(runner: Runner, prompt: list[int]) -> None:
    tokens(runner, prompt, 1)


def exception_in_prefill(runner: Runner, prompt: list[int]) -> None:
    fail(runner, prompt, RuntimeError("from the model"), 1, 0)


def interrupt_in_prefill(runner: Runner, prompt: list[int]) -> None:
    fail(runner, prompt, KeyboardInterrupt(), 1, len(runner.model.kinds) - 1)


def interrupt_in_second_chunk(runner: Runner, prompt: list[int]) -> None:
    if len(prompt) - len(runner.entry.tokens) > 20:
        fail(runner, prompt, KeyboardInterrupt(), 2, len(runner.model.kinds) - 1)


def interrupt_in_decode(runner: Runner, prompt: list[int]) -> None:
    fail(runner, prompt, KeyboardInterrupt(), 7, len(runner.model.kinds) - 1)


def sampler_fails(runner: Runner, prompt: list[int]) -> None:
    def processor(history: mx.array, logits: mx.array) -> mx.array:
        if history.shape[0] > len(prompt) + 1:
            raise ZeroDivisionError
        return logits

    with pytest.raises(ZeroDivisionError):
        tokens(runner, prompt, 20, logits_processors=[processor])


def reset(runner: Runner, prompt: list[int]) -> None:
    tokens(runner, prompt)
    runner.reset()


ENDS: dict[str, Callable[[Runner, list[int]], None]] = {
    f.__name__: f
    for f in (
        run_to_the_end,
        close_early,
        drop_unread,
        stop_on_a_token,
        stop_on_text,
        one_token,
        exception_in_prefill,
        interrupt_in_prefill,
        interrupt_in_second_chunk,
        interrupt_in_decode,
        sampler_fails,
        reset,
    )
}


ROUND = 40
"""Tokens that it mostly uses."""


class RepeatingModel(OracleModel):
    """Goes round a short text, and leaves it where the oracle says so.

    Each place depends on every (token, position) that is visible through the caches, as the
    oracle's does.
    """

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        told = mx.argmax(super().__call__(tokens, cache)[0], axis=-1)
        usual = (tokens[0].astype(mx.int32) * 5 + 3) % ROUND
        target = mx.where(told % 9 == 0, told % ROUND, usual)
        distance = (mx.arange(VOCAB)[None] - target[:, None]) % VOCAB
        return -distance.astype(mx.float32)[None]


def repeating_runner(kinds: list[str], **options: Any) -> Runner:
    """Return a runner on such a model."""
    return oracle_runner(model=RepeatingModel(kinds), **options)

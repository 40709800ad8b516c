"""A ParallelRunner serves any thread, and each request gets the answer that it would get alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine import engine_of
from support.families import write_family
from support.threads import alone, asked, in_threads, opened
from support.waiting import until

from mlxrunner import BatchRequest, Handle, Runner, run_batch
from mlxrunner.models.load import tokenizer_of
from mlxrunner.tokenizer import load_tokenizer

WAYS: list[Callable[[Handle], list[int | None]]] = [
    lambda handle: list(handle.result().tokens),
    lambda handle: [chunk.token for chunk in handle],
    lambda handle: [next(handle).token, *(chunk.token for chunk in handle)],
    lambda handle: [chunk.token for chunk in handle.poll()] if handle.wait() else [],
]
"""Ways to read a whole answer."""


def test_eight_threads_get_the_answers_of_a_runner_alone(llama: Any) -> None:
    """The 96 requests sample in every way and are read in every way; some are cancelled."""
    rng = random.Random(5)
    trunk = [rng.randrange(290) for _ in range(30)]
    requests = [asked(rng, trunk) for _ in range(96)]
    expected = [alone(llama, prompt, **options) for prompt, options in requests]
    seen = Counter[str]()
    with opened(llama, 3) as runner:

        def work(number: int) -> None:
            mine = random.Random(number)
            for index in range(number, len(requests), 8):
                prompt, options = requests[index]
                handle = runner.submit(prompt, **options)
                if mine.random() < 0.15:
                    handle.cancel()
                    tokens: list[int | None] = [chunk.token for chunk in handle]
                    assert tokens == expected[index][: len(tokens)]
                    seen["cancelled"] += 1
                    continue
                way = mine.randrange(len(WAYS))
                assert WAYS[way](handle) == expected[index]
                seen[str(way)] += 1

        in_threads(8, work)
        until(lambda: runner.stats().busy == runner.stats().waiting == 0)
        assert not any(slot.is_busy for slot in engine_of(runner).slots)
    assert len(seen) == 5


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_tokenizers_and_templates_work_in_eight_threads(kind: str, tmp_path: Path) -> None:
    """Each thread gets the tokens that one thread gets."""
    if kind == "huggingface":
        write_family(tmp_path, "chatml")
    tokenizer = load_tokenizer(tmp_path) if kind == "huggingface" else tokenizer_of("demo")
    messages: Any = [{"role": "user", "content": "My name is Ana Bjork."}]
    texts = [f"{i} words, and then ünïcode {'x' * i}" for i in range(40)]

    def tokens() -> list[Any]:
        return [tokenizer.encode(text) for text in texts] + [
            tokenizer.render(messages),
            tokenizer.encode_more("more"),
            tokenizer.decode(tokenizer.encode(texts[3])),
        ]

    expected = tokens()

    def work(number: int) -> None:
        for _ in range(5):
            assert tokens() == expected

    in_threads(8, work)


def test_a_batch_runs_on_it(llama: Any) -> None:
    """With the results of a Runner; a request that takes too long ends alone."""
    requests = [BatchRequest([i % 3, i]) for i in range(20)]
    options: dict[str, Any] = {"max_tokens": 5, "stop_tokens": []}
    expected = [result.text for result in run_batch(Runner(*llama), requests, **options)]
    with opened(llama, 3) as runner:
        assert [result.text for result in run_batch(runner, requests, **options)] == expected
        slow = [BatchRequest([1], {"max_tokens": 120}), *requests[:2]]
        results = list(run_batch(runner, slow, timeout=1e-9, stop_tokens=[]))
        assert "stopped after" in str(results[0].error)

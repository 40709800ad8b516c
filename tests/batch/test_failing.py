"""A request that fails, takes too long or is interrupted costs only itself."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.batches import prompts, requests, texts
from support.engine import backend

from mlxrunner import BatchRequest, run_batch
from mlxrunner.testing import ByteTokenizer, oracle_runner

BAD: dict[str, tuple[BatchRequest, str]] = {
    "empty": (BatchRequest([]), "the prompt is empty"),
    "too long": (
        BatchRequest([1] * 256),
        "has 256 tokens, which leaves no room in the context of 256",
    ),
    "no token": (BatchRequest([5, 9999]), "9999 is beyond the model's vocabulary"),
    "no prompt": (
        BatchRequest(7),  # type: ignore[arg-type]
        "a prompt is a text, token ids or messages",
    ),
    "option": (BatchRequest("x", {"temperature": -1}), "temperature: -1 is out of range"),
    "unknown option": (BatchRequest("x", {"colour": 1}), "unknown option 'colour'"),
    "message": (BatchRequest([{"role": "user"}]), "content"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("which", ["alone", "together"])
def test_a_bad_request_is_a_result_with_an_error(
    kind: str, which: str, request: pytest.FixtureRequest
) -> None:
    """In its place, in one line; the others are answered."""
    runner, (bad, message) = request.getfixturevalue(which), BAD[kind]
    results = list(run_batch(runner, [*requests(2), bad, *requests(2)], max_tokens=2))
    assert [result.index for result in results] == list(range(5))
    assert [result.error is None for result in results] == [True, True, False, True, True]
    assert results[2].result is None
    assert message in str(results[2].error)
    assert "\n" not in str(results[2].error)
    assert not str(results[2].error).startswith("line ")


class Failing:
    """A model whose forward pass fails while the tokens contain `token`, `times` times."""

    def __init__(self, model: Any, token: int, times: int) -> None:
        self.model, self.token, self.left = model, token, times

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        if self.left and self.token in np.array(tokens):
            self.left -= 1
            raise RuntimeError("the device\nfell over")
        result: mx.array = self.model(tokens, cache=cache)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def with_failures(which: str, request: pytest.FixtureRequest, times: int) -> Any:
    runner = request.getfixturevalue(which)
    failing = Failing(runner.model, 251, times)
    if which == "alone":
        runner.model = failing
    else:
        backend(runner).model = failing
    return runner


@pytest.mark.parametrize("which", ["alone", "together"])
def test_a_request_that_fails_costs_only_itself(which: str, request: pytest.FixtureRequest) -> None:
    """Requests in the same forward pass get the answers of a run without the failing one."""
    asked = requests(9, max_tokens=4, stop_tokens=[])
    expected = texts(list(run_batch(request.getfixturevalue("alone"), asked)))
    bad = BatchRequest([*prompts(1)[0], 251, 3], {}, "bad")
    runner = with_failures(which, request, times=100)
    results = list(run_batch(runner, [*asked[:4], bad, *asked[4:]]))
    assert str(results[4].error) == "RuntimeError: the device fell over"
    assert [entry[1:] for entry in texts(results[:4] + results[5:])] == [
        entry[1:] for entry in expected
    ]


@pytest.mark.parametrize("which", ["alone", "together"])
@pytest.mark.parametrize(("retries", "fails"), [(0, True), (1, True), (4, False)])
def test_retries(which: str, retries: int, fails: bool, request: pytest.FixtureRequest) -> None:
    """A request that failed is tried again, `retries` times at most."""
    runner = with_failures(which, request, times=3)
    asked = [*requests(3, max_tokens=2), BatchRequest([251, 251], {"max_tokens": 2})]
    results = list(run_batch(runner, asked, retries=retries))
    assert [result.error is not None for result in results] == [False, False, False, fails]


@pytest.mark.parametrize("which", ["alone", "together"])
def test_a_timeout_ends_one_request_only(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds are counted from its own begin; the error says how many it had."""
    runner = request.getfixturevalue(which)
    now = [0.0]
    monkeypatch.setattr(
        "mlxrunner.batch.execution.time.monotonic", lambda: now.__setitem__(0, now[0] + 1) or now[0]
    )
    asked = [
        BatchRequest([1, 2, 3], {"max_tokens": 2}),
        BatchRequest([4, 5], {"max_tokens": 200, "stop_tokens": []}),
    ]
    results = list(run_batch(runner, [*asked, asked[0]], timeout=30))
    assert [result.error is None for result in results] == [True, False, True]
    assert "stopped after 30 s without an end" in str(results[1].error)


def test_a_timeout_is_noticed_between_the_pieces_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only between tokens; what was evaluated stays in the entry."""
    runner = oracle_runner(prefill_step=4)
    now = [0.0]
    monkeypatch.setattr(
        "mlxrunner.batch.execution.time.monotonic", lambda: now.__setitem__(0, now[0] + 1) or now[0]
    )
    (result,) = run_batch(runner, [BatchRequest(list(range(100)))], timeout=5, max_tokens=1)
    assert "stopped after 5 s" in str(result.error)
    assert 0 < len(runner.entry.tokens) < 99


@pytest.mark.parametrize("which", ["alone", "together"])
def test_closing_the_iterator_leaves_the_runner_usable(
    which: str, request: pytest.FixtureRequest
) -> None:
    """No request of it is left behind."""
    runner = request.getfixturevalue(which)
    expected = texts(list(run_batch(runner, requests(4, max_tokens=3))))
    with closing(
        run_batch(runner, requests(9, max_tokens=30, stop_tokens=[]), output_order="done")
    ) as results:  # type: ignore[type-var]
        next(results)
    assert texts(list(run_batch(runner, requests(4, max_tokens=3)))) == expected


@pytest.mark.parametrize("which", ["alone", "together"])
def test_an_interrupt_leaves_the_runner_usable(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes out, in the middle of a request, and the next batch is right."""
    runner = request.getfixturevalue(which)
    expected = texts(list(run_batch(runner, requests(4, max_tokens=3))))
    left = [10]

    def interrupting(tokenizer: Any, token: int, *, add: Any = ByteTokenizer._bytes) -> bytes:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        data: bytes = add(token)
        return data

    monkeypatch.setattr(ByteTokenizer, "_bytes", interrupting)
    with pytest.raises(KeyboardInterrupt):
        list(run_batch(runner, requests(9, max_tokens=30, stop_tokens=[])))
    left[0] = -1
    assert texts(list(run_batch(runner, requests(4, max_tokens=3)))) == expected

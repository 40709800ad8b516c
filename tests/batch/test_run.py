"""run_batch: requests in, results out, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.batches import llama, prompts, requests, texts
from support.checks import has
from support.engine import Engine, backend

import mlxrunner
from mlxrunner import BatchRequest, BatchResult, OptionError, Runner, run_batch
from mlxrunner.batch.order import run_order, sort_key
from mlxrunner.testing import ByteTokenizer, OracleModel, oracle_runner

WHICH = pytest.mark.parametrize("which", ["alone", "together"])
"""The fixtures that are runners."""


def ran(runner: Any, asked: Iterable[BatchRequest], **options: Any) -> list[BatchResult]:
    return list(run_batch(runner, asked, **options))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second pass each time that somebody looks."""
    seconds = count(1.0)
    monkeypatch.setattr("mlxrunner.batch.execution.time.monotonic", lambda: next(seconds))


def test_results_come_in_the_order_of_the_requests_and_equal_runs_one_by_one(alone: Runner) -> None:
    """The order in which they ran does not matter."""
    asked = requests(max_tokens=5, stop_tokens=[])
    results = ran(alone, asked)
    assert [(one.index, one.id) for one in results] == [(i, f"r{i}") for i in range(12)]
    for request, result in zip(asked, results, strict=True):
        alone.reset()
        chunks = list(alone.generate(request.prompt, max_tokens=5, stop_tokens=[]))
        assert (result.error, result.result is not None) == (None, True)
        tokens, text = [chunk.token for chunk in chunks], "".join(chunk.text for chunk in chunks)
        has(result.result, tokens=tokens, text=text, finish_reason="length")


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.3}],
    ids=["greedy", "seeded", "penalty"],
)
@pytest.mark.parametrize("output_order", ["input", "done"])
def test_parallel_equals_single(
    alone: Runner, together: Engine, options: dict[str, Any], output_order: str
) -> None:
    """The same tokens, by either runner, in either order."""
    asked = requests(20, max_tokens=6, stop_tokens=[])
    one, several = (
        sorted(texts(ran(runner, asked, output_order=output_order, **options)))
        for runner in (alone, together)
    )
    assert one == several
    assert len({str(tokens) for _, _, tokens, _ in one}) > 5


def test_done_gives_results_as_they_finish(alone: Runner) -> None:
    """In prefix order, with one at a time; nothing waits for its turn."""
    asked = requests(8, max_tokens=1)
    order = [result.index for result in run_batch(alone, asked, output_order="done")]
    keys = [sort_key(np.array(request.prompt, np.int32)) for request in asked]
    rows = sorted(enumerate(keys), key=lambda row: row[::-1])
    assert order == list(run_order(rows, 8)) != list(range(8))


def test_the_seed_of_all_differs_from_line_to_line(alone: Runner) -> None:
    """Number i gets S + i, as several answers of `generate` do; a request's own seed is its own."""
    same = BatchRequest([7, 8, 9], {"max_tokens": 8, "stop_tokens": []})
    own = BatchRequest([7, 8, 9], {"max_tokens": 8, "stop_tokens": [], "seed": 40})
    results = ran(alone, [same, own, same], temperature=1.0, seed=40)
    tokens = [result.result.tokens for result in results if result.result is not None]
    assert tokens[0] == tokens[1] != tokens[2]
    alone.reset()
    last = alone.generate([7, 8, 9], max_tokens=8, stop_tokens=[], temperature=1.0, seed=42)
    assert tokens[2] == [chunk.token for chunk in last]


def test_log_probabilities_come_with_the_result(alone: Runner, together: Engine) -> None:
    """Through the temporary file that keeps the order, too."""
    one, several = (
        [result.result.logprobs for result in ran(runner, requests(3, max_tokens=2, logprobs=2))]
        for runner in (alone, together)
    )
    for a, b in zip(one, several, strict=True):
        assert [list(top) for _, top in a] == [list(top) for _, top in b]
        assert [own for own, _ in a] == pytest.approx([own for own, _ in b], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "random"}, "order: 'random' is not known"),
        ({"output_order": "x"}, "output_order: 'x' is not known"),
        ({"retries": -1}, "retries: -1 is out of range"),
        ({"timeout": 0}, "timeout: 0 is out of range"),
        ({"temperature": 1000}, "temperature: 1000 is out of range"),
    ],
)
def test_options_of_the_batch_are_checked_at_once(
    alone: Runner, options: dict[str, Any], message: str
) -> None:
    """Before a request is read."""
    with pytest.raises(OptionError, match=message):
        run_batch(alone, iter(()), **options)


def test_no_requests_are_no_results(alone: Runner, together: Engine) -> None:
    """There is no error either."""
    assert ran(alone, []) == ran(together, []) == []


def test_an_answer_that_fills_the_context_can_be_an_error_in_parallel_too(
    alone: Runner, together: Engine
) -> None:
    """overflow="error", which the parallel runner itself does not have."""
    asked = [
        BatchRequest([3] * 250, {"overflow": "error", "stop_tokens": []}),
        BatchRequest([4] * 250, {"max_tokens": 2}),
    ]
    one, several = (texts(ran(runner, asked)) for runner in (alone, together))
    assert one == several
    assert "the answer filled the context of 256 tokens after 6 tokens" in str(one[0][3])


def test_a_busy_runner_is_the_callers_error() -> None:
    """Not one of each request."""
    runner = oracle_runner(model=OracleModel())
    other = runner.generate([1, 2, 3])
    next(other)
    with pytest.raises(mlxrunner.BusyError):
        ran(runner, requests(3))


def test_where_cells_are_few_requests_wait_for_room() -> None:
    """They are not refused; one whose prompt never fits is an error of its own."""
    model, facts = llama()
    parts = model, ByteTokenizer(), facts
    long = BatchRequest([1, 2, 3] * 50, {"max_tokens": 200})
    asked = [*requests(12, max_tokens=5, stop_tokens=[]), long]
    with Engine(*parts, max_sequences=4, context=256, kv_cache_tokens=130) as runner:
        *results, refused = ran(runner, asked)
    assert texts(results) == texts(ran(Runner(*parts, context=256), asked[:12]))
    assert refused.result is None
    assert "130" in str(refused.error)


def test_what_mlx_keeps_of_freed_buffers_is_given_back(
    together: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed buffers are given back, because steps of ever new sizes leave ever more of them."""
    monkeypatch.setattr("mlxrunner.batch.execution.GIVE_BACK_EVERY", 4)
    given = []
    monkeypatch.setattr(mx, "clear_cache", lambda: given.append(1))
    ran(together, requests(12), max_tokens=2)
    assert len(given) == 3


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 256, {}, "has 256 tokens, which leaves no room in the context of 256"),
        ([5, 9999], {}, "9999 is beyond the model's vocabulary"),
        (7, {}, "a prompt is a text, token ids or messages"),
        ("x", {"temperature": -1}, "temperature: -1 is out of range"),
        ("x", {"colour": 1}, "unknown option 'colour'"),
        ([{"role": "user"}], {}, "content"),
    ],
)
@WHICH
def test_a_bad_request_is_a_result_with_an_error(
    which: str,
    prompt: Any,
    options: dict[str, Any],
    message: str,
    request: pytest.FixtureRequest,
) -> None:
    """In its place, in one line; the others are answered."""
    asked = [*requests(2), BatchRequest(prompt, options), *requests(2)]
    results = ran(request.getfixturevalue(which), asked, max_tokens=2)
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


@WHICH
def test_a_request_that_fails_costs_only_itself(which: str, request: pytest.FixtureRequest) -> None:
    """Requests in the same forward pass get the answers of a run without the failing one."""
    asked = requests(9, max_tokens=4, stop_tokens=[])
    expected = texts(ran(request.getfixturevalue("alone"), asked))
    bad = BatchRequest([*prompts(1)[0], 251, 3], {}, "bad")
    results = ran(with_failures(which, request, times=100), [*asked[:4], bad, *asked[4:]])
    assert str(results.pop(4).error) == "RuntimeError: the device fell over"
    assert [one[1:] for one in texts(results)] == [one[1:] for one in expected]


@WHICH
@pytest.mark.parametrize(("retries", "fails"), [(0, True), (1, True), (4, False)])
def test_retries(which: str, retries: int, fails: bool, request: pytest.FixtureRequest) -> None:
    """A request that failed is tried again, `retries` times at most."""
    runner = with_failures(which, request, times=3)
    asked = [*requests(3, max_tokens=2), BatchRequest([251, 251], {"max_tokens": 2})]
    results = ran(runner, asked, retries=retries)
    assert [result.error is not None for result in results] == [False, False, False, fails]


@WHICH
@pytest.mark.usefixtures("clock")
def test_a_timeout_ends_one_request_only(which: str, request: pytest.FixtureRequest) -> None:
    """Seconds are counted from its own begin; the error says how many it had."""
    runner = request.getfixturevalue(which)
    asked = [
        BatchRequest([1, 2, 3], {"max_tokens": 2}),
        BatchRequest([4, 5], {"max_tokens": 200, "stop_tokens": []}),
    ]
    results = ran(runner, [*asked, asked[0]], timeout=30)
    assert [result.error is None for result in results] == [True, False, True]
    assert "stopped after 30 s without an end" in str(results[1].error)


@pytest.mark.usefixtures("clock")
def test_a_timeout_is_noticed_between_the_pieces_of_a_prompt() -> None:
    """Not only between tokens; what was evaluated stays in the entry."""
    runner = oracle_runner(prefill_step=4)
    (result,) = run_batch(runner, [BatchRequest(list(range(100)))], timeout=5, max_tokens=1)
    assert "stopped after 5 s" in str(result.error)
    assert 0 < len(runner.entry.tokens) < 99


@WHICH
def test_a_batch_that_was_left_leaves_the_runner_usable(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed, or by Ctrl-C, which comes out in the middle of a request; the next batch is right."""
    runner = request.getfixturevalue(which)
    expected = texts(ran(runner, requests(4, max_tokens=3)))
    asked = requests(9, max_tokens=30, stop_tokens=[])
    with closing(run_batch(runner, asked, output_order="done")) as results:  # type: ignore[type-var]
        next(results)
    assert texts(ran(runner, requests(4, max_tokens=3))) == expected
    left = [10]

    def interrupting(tokenizer: Any, token: int, *, add: Any = ByteTokenizer._bytes) -> bytes:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        data: bytes = add(token)
        return data

    monkeypatch.setattr(ByteTokenizer, "_bytes", interrupting)
    with pytest.raises(KeyboardInterrupt):
        ran(runner, asked)
    left[0] = -1
    assert texts(ran(runner, requests(4, max_tokens=3))) == expected

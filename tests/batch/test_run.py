"""run_batch: requests in, results out, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.batches import llama, prompts, requests, texts
from support.engine import Engine, backend

import mlxrunner
from mlxrunner import BatchRequest, BatchResult, OptionError, Runner, run_batch
from mlxrunner.batch.order import run_order, sort_key
from mlxrunner.batch.prompts import cost
from mlxrunner.testing import ByteTokenizer, OracleModel, oracle_runner

Make = Callable[[], Any]


def evaluated_of(results: Iterable[BatchResult]) -> int:
    return sum(one.result.usage.evaluated_tokens for one in results if one.result is not None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second pass each time that somebody looks."""
    seconds = count(1.0)
    monkeypatch.setattr("mlxrunner.batch.execution.time.monotonic", lambda: next(seconds))


def test_results_come_in_the_order_of_the_requests_and_equal_runs_one_by_one(alone: Runner) -> None:
    """The order in which they ran does not matter."""
    asked = requests(max_tokens=5, stop_tokens=[])
    results = list(run_batch(alone, asked))
    assert [result.index for result in results] == list(range(12))
    assert [result.id for result in results] == [f"r{i}" for i in range(12)]
    for request, result in zip(asked, results, strict=True):
        alone.reset()
        chunks = list(alone.generate(request.prompt, max_tokens=5, stop_tokens=[]))
        assert result.error is None
        assert result.result is not None
        assert result.result.tokens == [chunk.token for chunk in chunks]
        assert result.result.text == "".join(chunk.text for chunk in chunks)
        assert result.result.finish_reason == "length"


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
    one = sorted(texts(list(run_batch(alone, asked, output_order=output_order, **options))))
    several = sorted(texts(list(run_batch(together, asked, output_order=output_order, **options))))
    assert one == several
    assert len({str(tokens) for _, _, tokens, _ in one}) > 5


def test_the_prefix_order_evaluates_each_node_of_the_tree_once(alone: Runner) -> None:
    """Plus one token per duplicate; in input order it is more."""
    asked = prompts(14, seed=3)
    asked += asked[:2]
    arrays = [np.array(prompt, np.int32) for prompt in asked]
    least = cost(sorted(arrays, key=sort_key))

    def evaluated(order: Any) -> int:
        alone.reset()
        results = run_batch(
            alone, [BatchRequest(prompt) for prompt in asked], order=order, max_tokens=1
        )
        return evaluated_of(results)

    assert evaluated("prefix") == least.nodes + least.repeats
    assert least.repeats == 2
    assert evaluated("input") == cost(arrays).evaluated > least.evaluated


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
    results = list(run_batch(alone, [same, own, same], temperature=1.0, seed=40))
    tokens = [result.result.tokens for result in results if result.result is not None]
    assert tokens[0] == tokens[1] != tokens[2]
    alone.reset()
    last = alone.generate([7, 8, 9], max_tokens=8, stop_tokens=[], temperature=1.0, seed=42)
    assert tokens[2] == [chunk.token for chunk in last]


def test_log_probabilities_come_with_the_result(alone: Runner, together: Engine) -> None:
    """Through the temporary file that keeps the order, too."""
    one, several = (
        list(run_batch(runner, requests(3, max_tokens=2, logprobs=2)))
        for runner in (alone, together)
    )
    for a, b in zip(one, several, strict=True):
        assert a.result is not None
        assert b.result is not None
        assert a.result.logprobs is not None
        assert b.result.logprobs is not None
        assert [list(top) for _, top in a.result.logprobs] == [
            list(top) for _, top in b.result.logprobs
        ]
        assert [own for own, _ in a.result.logprobs] == pytest.approx(
            [own for own, _ in b.result.logprobs], abs=1e-4
        )


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
    assert list(run_batch(alone, [])) == list(run_batch(together, [])) == []


def test_an_answer_that_fills_the_context_can_be_an_error_in_parallel_too(
    alone: Runner, together: Engine
) -> None:
    """overflow="error", which the parallel runner itself does not have."""
    asked = [
        BatchRequest([3] * 250, {"overflow": "error", "stop_tokens": []}),
        BatchRequest([4] * 250, {"max_tokens": 2}),
    ]
    one, several = (texts(list(run_batch(runner, asked))) for runner in (alone, together))
    assert one == several
    assert "the answer filled the context of 256 tokens after 6 tokens" in str(one[0][3])


def test_a_busy_runner_is_the_callers_error() -> None:
    """Not one of each request."""
    runner = oracle_runner(model=OracleModel())
    other = runner.generate([1, 2, 3])
    next(other)
    with pytest.raises(mlxrunner.BusyError):
        list(run_batch(runner, requests(3)))


def test_where_cells_are_few_requests_wait_for_room() -> None:
    """They are not refused; one whose prompt never fits is an error of its own."""
    model, facts = llama()
    asked = [
        *requests(12, max_tokens=5, stop_tokens=[]),
        BatchRequest([1, 2, 3] * 50, {"max_tokens": 200}),
    ]
    with Engine(
        model, ByteTokenizer(), facts, max_sequences=4, context=256, kv_cache_tokens=130
    ) as runner:
        results = list(run_batch(runner, asked))
    expected = texts(
        list(run_batch(Runner(model, ByteTokenizer(), facts, context=256), asked[:12]))
    )
    assert texts(results[:12]) == expected
    assert results[12].result is None
    assert "130" in str(results[12].error)


def test_in_parallel_shared_prefixes_are_evaluated_once(together: Engine) -> None:
    """Requests that share a beginning start close together, and wait for whoever evaluates it."""
    asked = [BatchRequest(prompt) for prompt in prompts(14, seed=3)]
    results = list(run_batch(together, asked, max_tokens=3, stop_tokens=[]))
    assert evaluated_of(results) <= 2 * 40 + sum(len(request.prompt) - 40 + 4 for request in asked)


def test_what_mlx_keeps_of_freed_buffers_is_given_back(
    together: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed buffers are given back, because steps of ever new sizes leave ever more of them."""
    monkeypatch.setattr("mlxrunner.batch.execution.GIVE_BACK_EVERY", 4)
    given = []
    monkeypatch.setattr(mx, "clear_cache", lambda: given.append(1))
    list(run_batch(together, requests(12), max_tokens=2))
    assert len(given) == 3


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
@pytest.mark.usefixtures("clock")
def test_a_timeout_ends_one_request_only(which: str, request: pytest.FixtureRequest) -> None:
    """Seconds are counted from its own begin; the error says how many it had."""
    runner = request.getfixturevalue(which)
    asked = [
        BatchRequest([1, 2, 3], {"max_tokens": 2}),
        BatchRequest([4, 5], {"max_tokens": 200, "stop_tokens": []}),
    ]
    results = list(run_batch(runner, [*asked, asked[0]], timeout=30))
    assert [result.error is None for result in results] == [True, False, True]
    assert "stopped after 30 s without an end" in str(results[1].error)


@pytest.mark.usefixtures("clock")
def test_a_timeout_is_noticed_between_the_pieces_of_a_prompt() -> None:
    """Not only between tokens; what was evaluated stays in the entry."""
    runner = oracle_runner(prefill_step=4)
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

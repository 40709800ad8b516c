"""The costs of lines say where they are cut."""

from __future__ import annotations

from mlxrunner.batch.plan import ANSWER, costs_of
from mlxrunner.batch.records import StoredLine
from mlxrunner.cache.tokens import as_tokens


def test_a_line_costs_its_new_tokens_and_its_answer() -> None:
    """A prompt that is there twice evaluates its last token; broken lines cost nothing."""
    lines = [
        StoredLine(7, 8, as_tokens([]), error="line 8: broken"),
        StoredLine(2, 3, as_tokens([1, 2, 3])),
        StoredLine(4, 5, as_tokens([1, 2, 3]), options={"max_tokens": 5}),
        StoredLine(1, 2, as_tokens([1, 2, 9, 9]), options={"max_tokens": 10**6}),
    ]
    indexes, costs = costs_of(lines, {"max_tokens": 20})
    assert list(indexes) == [7, 2, 4, 1]
    assert costs.evaluated.tolist() == [0, 3, 1, 2]
    assert costs.reused.tolist() == [0, 0, 2, 2]
    assert costs.answers.tolist() == [0, 20, 5, ANSWER]
    assert costs_of(lines, {}, answer=3)[1].answers.tolist() == [0, 3, 3, 3]

"""The embedded picture demo keeps its promises, on pictures that training never used."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from support.sample import fewer

from eval_picture_demo import QUESTIONS, judge
from mlxrunner import Runner

COUNTING = ("How many", "Is")
"""The kinds of questions that it can answer."""


@pytest.mark.exhaustive(0)
def test_it_counts_shapes() -> None:
    """Four of five are right, of some that the evaluation asks; each picture is encoded once."""
    pictures = fewer(25, 15)
    with Runner.load("demo-pictures", pictures=True, reserve=False) as runner:
        right, asked, wrong = judge(runner, pictures)
        assert asked.total() == QUESTIONS * pictures
        assert sum(right[kind] for kind in COUNTING) >= 0.8 * sum(
            asked[kind] for kind in COUNTING
        ), wrong
        assert runner.model.sight.encoded == pictures


def test_without_pictures_it_is_a_model_of_text() -> None:
    """It says that it sees none."""
    with Runner.load("demo-pictures", reserve=False) as runner:
        asked = [{"role": "user", "content": "How many red squares are there?"}]
        answer = runner.complete(asked, max_tokens=30, temperature=0.0)
    assert answer.text == "I see no picture. Show me one with shapes."

"""Real architectures of mlx-lm give the same tokens with and without guesses."""

from __future__ import annotations

import pytest
from support.drafting import NAMES, compare, runner_of


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.exhaustive(3)
def test_tokens_are_those_of_plain_decoding_on_every_architecture(architecture: str) -> None:
    """The earlier answer is guessed: with random weights nothing else is likely to be right."""
    seen = compare(runner_of(architecture), architecture, 4)
    assert (seen.answers, seen.different) == (4, 0)
    assert 0 < seen.accepted <= seen.drafted

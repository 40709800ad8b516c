"""The pieces of a prefill follow the speed, and change no answer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from mlxrunner import Runner
from mlxrunner.engine.scheduling.pacing import FEWEST_TOKENS, FIRST_PIECE, Pace
from mlxrunner.testing import oracle_runner


def test_a_piece_takes_the_seconds_that_are_asked_for() -> None:
    """At 1,000 tokens a second, then at 100, and never more than the step."""
    pace = Pace(0.5)
    assert pace.size(2048) == FIRST_PIECE
    pace.measure(FIRST_PIECE, FIRST_PIECE / 1000)
    assert pace.size(2048) == 500
    pace.measure(500, 5.0)
    assert pace.size(2048) == 50
    assert pace.size(20) == 20


def test_the_pace_grows_step_by_step() -> None:
    """A first piece that took no time is no promise."""
    pace = Pace(0.5)
    pace.measure(FIRST_PIECE, 0.0)
    assert pace.size(2**30) == 16 * FIRST_PIECE


def test_a_slow_piece_leaves_a_small_one() -> None:
    """Each makes some progress."""
    pace = Pace(0.5)
    pace.measure(FIRST_PIECE, 1e6)
    assert pace.size(2048) == FEWEST_TOKENS


def test_a_short_last_piece_says_nothing() -> None:
    """Few tokens are slower each, unless they took too long already."""
    pace = Pace(0.5)
    pace.measure(10, 0.1)
    assert pace.size(2048) == FIRST_PIECE
    pace.measure(10, 1.0)
    assert pace.size(2048) == FEWEST_TOKENS


class Given(Pace):
    """Has the sizes that it is given."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(1.0)
        self.sizes = list(sizes)

    def size(self, most: int) -> int:
        return min(self.sizes[0], most)

    def measure(self, tokens: int, seconds: float) -> None:
        self.sizes = self.sizes[1:] or self.sizes


def steps(runner: Runner, prompt: list[int]) -> tuple[list[int], list[int | None]]:
    """Return where the prefill stood after each piece, and the answer."""
    seen: list[int] = []
    chunks = runner.generate(
        prompt, max_tokens=6, stop_tokens=[], progress=lambda done, total: seen.append(done)
    )
    return seen, [chunk.token for chunk in chunks]


@pytest.mark.parametrize("kinds", [["full"], ["sliding", "full"], ["recurrent", "full"]])
@pytest.mark.parametrize("sizes", [(1,), (3, 7, 1, 30), (100,)])
def test_pieces_change_no_answer(kinds: list[str], sizes: tuple[int, ...]) -> None:
    """The pieces are at most a step, for any size, and Ctrl-C is looked for after each."""
    prompt = [(7 * number) % 250 + 1 for number in range(60)]
    runner = oracle_runner(kinds, prefill_step=10)
    runner.pace = Given(*sizes)
    seen, answer = steps(runner, prompt)
    assert answer == steps(oracle_runner(kinds, prefill_step=10), prompt)[1]
    assert runner.entry.is_true
    lengths = [after - before for before, after in pairwise(seen)]
    assert max(lengths[:-1]) <= min(10, max(sizes))
    assert lengths[0] == min(10, sizes[0])


def test_a_model_whose_answers_depend_on_chunks_has_whole_steps() -> None:
    """Its answer must not depend on the speed of a machine."""
    runner = oracle_runner(prefill_step=10)
    runner.facts = replace(runner.facts, depends_on_chunks="it does")
    runner.pace = Given(1)
    seen, _ = steps(runner, list(range(1, 36)))
    assert seen[:4] == [0, 10, 20, 30]

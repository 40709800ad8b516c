"""A warm answer about pictures is the one that mlx-vlm gives to the whole prompt, cold."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from support.seeing import (
    CONFIGS,
    Eyes,
    Part,
    block_of,
    built,
    histories,
    joined,
    own_answer,
)

from mlxrunner import PromptError, Runner
from mlxrunner.models.facts import VISION_ARCHITECTURES
from mlxrunner.testing import ByteTokenizer


class Asked(Eyes):
    """A runner of one architecture, and mlx-vlm beside it."""

    def __init__(self, kind: str, step: int = 32) -> None:
        model = built(kind)
        super().__init__(kind, model, model)
        self.runner = Runner(
            self.model, ByteTokenizer(), self.facts, context=1024, prefill_step=step
        )

    def model_kept(self) -> list[Any]:
        """Return the keys and values of pictures beside the tokens."""
        model: Any = self.model
        return [one for layers in model._looked_at._kept.values() for one in layers]

    def answer(self, history: list[Part], count: int = 6) -> list[int]:
        result = self.runner.complete(self.prompt(history), max_tokens=count, stop_tokens=[])
        assert set(self.sight._views) == set(self.sight._seen)  # no inputs are left
        return result.tokens


def test_each_architecture_is_tried() -> None:
    """No other one loads."""
    assert set(VISION_ARCHITECTURES) == set(CONFIGS)


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("kind", VISION_ARCHITECTURES)
def test_warm_answers_are_those_of_mlx_vlm(kind: str) -> None:
    """Pictures come early and late, change, go, and change places."""
    eyes = Asked(kind)
    asked = histories(10, seed=len(kind))
    assert any(part[0] == "picture" for part in asked[0] + asked[1])
    cached = 0
    for history in asked:
        assert eyes.answer(history) == eyes.cold(history)
        assert eyes.runner.usage is not None
        cached += eyes.runner.usage.cached_tokens
    assert cached
    assert eyes.sight.encoded <= 4  # each picture once, however often it is asked about
    seen = [("picture", 0), ("text", [5, 6])]
    assert eyes.cold(seen) != eyes.cold([("picture", 1), ("text", [5, 6])])


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3"])
def test_a_pass_may_end_within_a_picture(kind: str) -> None:
    """The positions after it do not depend on where its chunks end."""
    eyes = Asked(kind, step=3)
    history: list[Part] = [("text", [1, 2]), ("picture", 1), ("text", [7]), ("picture", 2)]
    assert eyes.answer(history) == eyes.cold(history)
    longer: list[Part] = [*history, ("text", [9, 8, 7])]
    assert eyes.answer(longer) == eyes.cold(longer)


def test_a_second_question_runs_no_encoder() -> None:
    """The features are kept, also when its positions are evaluated again."""
    eyes = Asked("qwen2_5_vl")
    eyes.answer([("picture", 1), ("text", [1, 2, 3])])
    for history in ([("picture", 1), ("text", [4])], [("text", [4, 4]), ("picture", 1)]):
        assert eyes.answer(history) == eyes.cold(history)
    assert eyes.sight.encoded == 1


def test_another_picture_is_a_miss_at_its_first_position() -> None:
    """The text before it stays, and the same picture stays whole."""
    eyes = Asked("gemma3")
    eyes.answer([("text", [1, 2, 3]), ("picture", 1), ("text", [4, 5])])
    eyes.answer([("text", [1, 2, 3]), ("picture", 2), ("text", [4, 5])])
    assert eyes.runner.usage is not None
    assert eyes.runner.usage.cached_tokens == 3 + 1  # the mark before the picture is a token
    eyes.answer([("text", [1, 2, 3]), ("picture", 2), ("text", [5, 5])])
    assert eyes.runner.usage.cached_tokens == 3 + 18


def test_what_was_seen_is_kept_within_a_budget() -> None:
    """A picture that was dropped is encoded again."""
    eyes = Asked("qwen2_5_vl")
    eyes.sight._kept_bytes = 0
    for _ in range(2):
        history: list[Part] = [("text", [eyes.sight.encoded + 1]), ("picture", 1), ("text", [1])]
        assert eyes.answer(history) == eyes.cold(history)
    assert eyes.sight.encoded == 2
    assert not eyes.sight._seen


@pytest.mark.parametrize("ending", ["closed", "error", "interrupt", "never begun"])
def test_pictures_are_given_up_after_every_ending(ending: str) -> None:
    """The next answer is right, and nothing of the request before waits."""
    eyes = Asked("qwen2_vl", step=4)
    history: list[Part] = [("text", [1]), ("picture", 1), ("text", [2, 3] * 10)]

    def fail(done: int, total: int) -> None:
        if done > 4 and ending in ("error", "interrupt"):
            raise KeyboardInterrupt if ending == "interrupt" else RuntimeError

    chunks = eyes.runner.generate(eyes.prompt(history), progress=fail, max_tokens=9)
    if ending == "closed":
        next(chunks)
    elif ending != "never begun":
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            next(chunks)
    chunks.close()
    del chunks
    later: list[Part] = [("text", [1]), ("picture", 1), ("text", [2]), ("picture", 2)]
    assert eyes.answer(later) == eyes.cold(later)


def test_an_entry_evaluated_in_advance_serves_pictures() -> None:
    """Evaluating stops anywhere, also within a picture."""
    eyes = Asked("qwen3_vl")
    history: list[Part] = [("text", [1, 2]), ("picture", 2), ("text", [5])]
    assert eyes.runner.evaluate(eyes.prompt(history), cancelled=iter([False, True]).__next__)
    assert eyes.answer(history) == eyes.cold(history)


def test_a_picture_beside_the_tokens_is_seen_as_by_mlx_vlm() -> None:
    """Its own generate is exact where no token is in front of a picture, and no tile is empty."""
    eyes = Asked("mllama")
    block, inputs = block_of("mllama", 3)
    assert inputs["aspect_ratio_mask"].all()
    for text in ([1, 2, 3], [1, 2, 4] * 20, [7]):
        own = own_answer(eyes.other, [*block, *text], joined("mllama", [inputs]), 6)
        assert eyes.answer([("picture", 3), ("text", text)]) == own
    assert eyes.sight.encoded == 1


def test_pictures_side_by_side_are_looked_at_together() -> None:
    """Text between them hides the first one, and five of them are too many."""
    eyes = Asked("mllama")
    both: list[Part] = [("text", [5]), ("picture", 1), ("picture", 2), ("text", [1, 2, 3])]
    apart: list[Part] = [("text", [5]), ("picture", 1), ("text", [9]), ("picture", 2), both[-1]]
    changed: list[Part] = [*apart[:1], ("picture", 3), *apart[2:]]
    answers = [eyes.answer(one, 12) for one in (both, apart, changed)]
    assert answers == [eyes.cold(one, 12) for one in (both, apart, changed)]
    assert answers[0] != answers[1]
    four: list[Part] = [("picture", number) for number in range(4)]
    assert eyes.answer([*four, both[-1]]) == eyes.cold([*four, both[-1]])
    with pytest.raises(PromptError, match="5 pictures are side by side, and 4 are the most"):
        eyes.answer([*four, ("picture", 4), both[-1]])
    assert eyes.answer(apart, 12) == answers[1]


def test_what_is_looked_at_is_kept_within_a_budget() -> None:
    """Conversations with other pictures make room, and come back."""
    eyes = Asked("mllama")
    asked: list[list[Part]] = [
        [("picture", number), ("picture", number + 1), ("text", [1, 2])] for number in range(6)
    ]
    for history in [*asked, *asked]:
        assert eyes.answer(history) == eyes.cold(history)
        kept = eyes.model_kept()
        assert sum(one.nbytes for one in kept) <= eyes.sight.looked_at_bytes

"""A runner of many requests answers about pictures as one of a single request does, cold."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from support.seeing import (
    Eyes,
    Part,
    built,
    histories,
    write_seeing,
)

from mlxrunner import ParallelRunner, PictureError, Runner, StepFailedError
from mlxrunner.models.facts import VISION_ARCHITECTURES
from mlxrunner.pictures import vision_encoder
from mlxrunner.testing import ByteTokenizer
from mlxrunner.tokenizer.prompt import tokenize_prompt


@contextmanager
def many(kind: str, slots: int = 3, step: int = 16) -> Iterator[Any]:
    """Give the runner of several requests of one architecture, and mlx-vlm beside it."""
    eyes: Any = Eyes(kind, built(kind), built(kind))
    with ParallelRunner(
        eyes.model,
        ByteTokenizer(),
        eyes.facts,
        max_sequences=slots,
        context=1024,
        prefill_step=step,
    ) as eyes.runner:
        yield eyes


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("kind", VISION_ARCHITECTURES)
def test_histories_with_pictures_are_answered_as_by_mlx_vlm(kind: str) -> None:
    """Conversations take turns in the same steps; some of them have no picture, some end early."""
    drawn = random.Random(len(kind))
    with many(kind) as eyes:
        asked = [histories(6, seed) for seed in range(3)]
        asked[2] = [[part for part in one if part[0] == "text"] for one in asked[2]]
        cached = 0
        for turn in zip(*asked, strict=True):
            dropped = drawn.choice([*turn])
            handle = eyes.runner.submit(eyes.prompt(dropped), max_tokens=50, stop_tokens=[])
            handles = [
                eyes.runner.submit(eyes.prompt(one), max_tokens=6, stop_tokens=[]) for one in turn
            ]
            next(handle)
            handle.cancel()
            for one, running in zip(turn, handles, strict=True):
                result = running.result()
                assert result.tokens == eyes.cold(one)
                assert result.usage is not None
                cached += result.usage.cached_tokens
        assert cached > 100
        assert 0 < eyes.sight.encoded <= 4


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_a_failing_pass_ends_only_its_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, and what comes later, are answered rightly."""
    good: list[Part] = [("text", [1, 2, 3]), ("picture", 1), ("text", [4] * 30)]
    bad: list[Part] = [("text", [1, 2, 3]), ("picture", 2), ("text", [4])]
    with many(kind) as eyes:
        seen = eyes.sight.seen
        broken = eyes.prompt(bad).views[0].picture

        def fail(picture: Any) -> Any:
            if picture is broken:
                raise RuntimeError("broken eyes")
            return seen(picture)

        monkeypatch.setattr(eyes.sight, "seen", fail)
        handles = [
            eyes.runner.submit(eyes.prompt(one), max_tokens=6, stop_tokens=[])
            for one in (good, bad, good)
        ]
        with pytest.raises(StepFailedError, match="broken eyes"):
            handles[1].result()
        assert [handles[i].result().tokens for i in (0, 2)] == [eyes.cold(good)] * 2
        monkeypatch.undo()
        again = eyes.runner.submit(eyes.prompt(bad), max_tokens=6, stop_tokens=[])
        assert again.result().tokens == eyes.cold(bad)


def test_each_picture_is_there_until_its_last_request_has_ended() -> None:
    """Nothing is kept for later, and many threads ask about the same pictures."""
    with many("qwen2_5_vl", slots=2) as eyes:
        eyes.sight._kept_bytes = 0
        asked: list[list[Part]] = [
            [("text", [thread]), ("picture", thread % 3), ("text", [5, 6])]
            for thread in range(1, 9)
        ]
        found: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            handle = eyes.runner.submit(eyes.prompt(asked[number]), max_tokens=6, stop_tokens=[])
            found[number] = handle.result().tokens

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(8)] == [eyes.cold(one) for one in asked]
        assert not eyes.sight._seen


def test_pictures_of_requests_that_wait_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """One beyond it is refused with the numbers, and finds room when the others have ended."""
    asked: list[list[Part]] = [[("picture", number), ("text", [5, 6])] for number in range(3)]
    with many("gemma3", slots=1) as eyes:
        prompts = [eyes.prompt(one) for one in asked[:2]]
        held = [one.view for prompt in prompts for one in prompt.views]
        most = sum(view.nbytes for view in held if view is not None)
        eyes.sight._kept_bytes = 0
        monkeypatch.setattr(vision_encoder, "HELD_BYTES", most)
        handles = [eyes.runner.submit(prompt, max_tokens=6, stop_tokens=[]) for prompt in prompts]
        del prompts, held
        monkeypatch.setattr(
            vision_encoder, "HELD_BYTES", 1
        )  # what was seen of one may be smaller than it
        with pytest.raises(PictureError, match=r"^the pictures of requests take .* are the most:"):
            eyes.prompt(asked[2])
        found = [handle.result().tokens for handle in handles[:2]]
        assert found == [eyes.cold(one) for one in asked[:2]]
        monkeypatch.setattr(vision_encoder, "HELD_BYTES", most)
        handles.clear()
        later = eyes.runner.submit(eyes.prompt(asked[2]), max_tokens=6, stop_tokens=[])
        assert later.result().tokens == eyes.cold(asked[2])


@pytest.mark.exhaustive(3)
@pytest.mark.parametrize("kind", VISION_ARCHITECTURES)
def test_room_is_counted_for_what_will_have_been_seen(kind: str) -> None:
    """It may be more than the encoder's input, which is all that is there before."""
    with many(kind, slots=1) as eyes:
        for number in range(2):
            asked: list[Part] = [("picture", number), ("text", [5, 6])]
            prompt = eyes.prompt(asked)
            view = prompt.views[0].view
            assert view is not None
            before = view.nbytes
            eyes.runner.submit(prompt, max_tokens=2, stop_tokens=[]).result()
        assert view.seen is not None
        assert before >= view.seen.nbytes


def test_a_request_that_waits_holds_no_pixels(folder: Path) -> None:
    """The prompt keeps the input of the encoder, and its messages render as before."""
    pixels = np.random.default_rng(2).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    gone = weakref.ref(pixels)
    content = [{"type": "image", "image": pixels}, {"type": "text", "text": "What?"}]
    with ParallelRunner.load(folder, max_sequences=1, reserve=False, pictures=True) as runner:
        prompt = tokenize_prompt(runner.tokenizer, [{"role": "user", "content": content}])
        del pixels, content
        gc.collect()
        assert gone() is None
        assert runner.tokenizer.render(prompt.messages) == prompt.text
        assert runner.complete(prompt, max_tokens=3).usage.completion_tokens == 3


def test_penalties_know_words_only() -> None:
    """The ids of pictures are beyond the vocabulary."""
    history: list[Part] = [("text", [1, 2]), ("picture", 1), ("text", [7])]
    with many("gemma3") as eyes:
        handle = eyes.runner.submit(eyes.prompt(history), max_tokens=6, repetition_penalty=1.3)
        assert len(handle.result().tokens) == 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("sees"), "gemma3")


def test_a_directory_is_loaded_with_its_eyes(folder: Path) -> None:
    """The plan counts pictures, and messages are those of `Runner`."""
    pixels = np.random.default_rng(1).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    content = [{"type": "image", "image": pixels}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": content}]
    with ParallelRunner.load(folder, max_sequences=2, context=512, pictures=True) as runner:
        assert runner.why_alone == "a model that sees pictures has one request in a step"
        assert runner.plan is not None
        assert [line.total for line in runner.plan.lines if line.what == "pictures"] != []
        found = [one.tokens for one in runner.run([messages, messages], max_tokens=5)]
    with Runner.load(folder, context=512, pictures=True, reserve=False) as single:
        expected = single.complete(messages, max_tokens=5).tokens
    assert found == [expected, expected]

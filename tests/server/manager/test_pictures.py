"""Pictures of requests: the answers are those of a cold run, and what was shown is kept."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from PIL import Image
from support.managers import asked, events_of, held_in, open_manager
from support.seeing import write_seeing

from mlxrunner import Runner
from mlxrunner.errors import OptionError
from mlxrunner.options import ServeSettings
from mlxrunner.pictures import vision_encoder
from mlxrunner.profiling.metrics import RequestLog
from mlxrunner.server.events import AnswerEnd, ApiError, ServerRequest, TextDelta
from mlxrunner.server.manager import ModelManager, ModelNames
from mlxrunner.server.models import ModelLoader

SHAPES = Path(__file__).parents[3] / "docs" / "images" / "shapes.png"
SETTINGS = ServeSettings(
    slots=2, max_queue=8, memory=3_000_000_000, pictures=True, disk_cache=False
)
QUESTIONS = ("How many red squares are there?", "How many circles?", "Is there a triangle?")


def png(number: int) -> bytes:
    """Return a picture of shapes; each number is another one."""
    pixels = np.asarray(Image.open(SHAPES).convert("RGB"))
    stream = io.BytesIO()
    Image.fromarray(np.roll(pixels, 24 * number, axis=number % 2)).save(stream, "PNG")
    return stream.getvalue()


FILES = [png(number) for number in range(4)]


def shown(number: int) -> dict[str, Any]:
    data = base64.b64encode(FILES[number]).decode()
    url = data if number % 2 else f"data:image/png;base64,{data}"
    return {"type": "image", "image": url}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def request(messages: list[dict[str, Any]], **more: Any) -> ServerRequest:
    options = {"max_tokens": 12, "temperature": 0.0}
    return asked(messages=messages, **{"options": options, **more})


@asynccontextmanager
async def seeing(
    settings: ServeSettings = SETTINGS,
    record: RequestLog | None = None,
    model: str = "demo-pictures",
) -> AsyncIterator[ModelManager]:
    found = ModelLoader(settings=settings, runner={"context": 2000})
    async with open_manager(ModelNames(model, {}), found, record) as manager:
        yield manager


async def answered(manager: ModelManager, messages: list[dict[str, Any]]) -> tuple[str, AnswerEnd]:
    events = await events_of(manager, request(messages))
    assert isinstance(events[-1], AnswerEnd)
    return "".join(one.text for one in events if isinstance(one, TextDelta)), events[-1]


def drawn_turn(draw: random.Random) -> dict[str, Any]:
    """Return a message of the user with up to two pictures among its texts."""
    parts = [shown(draw.randrange(4)) for _ in range(draw.choice([0, 1, 1, 2]))]
    parts.insert(draw.randrange(len(parts) + 1), said(draw.choice(QUESTIONS)))
    return {"role": "user", "content": parts if len(parts) > 1 else parts[0]["text"]}


def changed(draw: random.Random, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation as it may come next: gone on, edited, cut, or begun again."""
    users = [number for number, one in enumerate(messages) if one["role"] == "user"]
    kind = draw.choice(["on", "on", "on", "edit", "cut", "new"])
    if not users or kind == "new" or len(messages) > 6:
        return [drawn_turn(draw)]
    if kind == "edit":
        at = draw.choice(users)
        return [*messages[:at], drawn_turn(draw), *messages[at + 1 :]][: max(users) + 1]
    if kind == "cut":
        return messages[: draw.choice(users) + 1]
    return [*messages, drawn_turn(draw)] if messages[-1]["role"] == "assistant" else messages


def cold(runner: Runner, messages: list[dict[str, Any]]) -> str:
    """Return the answer of a runner that has kept nothing."""
    runner.reset()
    plain = [
        {**one, "content": [_opened(part) for part in one["content"]]}
        if isinstance(one["content"], list)
        else one
        for one in messages
    ]
    return runner.complete(plain, max_tokens=12, temperature=0.0).text


def _opened(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    return {"type": "image", "image": base64.b64decode(part["image"].rpartition(",")[2])}


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("slots", [1, 2])
async def test_conversations_go_on_after_a_restart(
    slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pictures have other ids then, and others have theirs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = replace(SETTINGS, slots=slots, disk_cache=True)
    talks = [[{"role": "user", "content": [shown(one), said(QUESTIONS[1])]}] for one in (0, 1)]
    told = [0, 0]

    runner = Runner.load("demo-pictures", context=2000, pictures=True, reserve=False)
    with runner:
        for start in (0, 1):
            async with seeing(settings) as manager:
                first = {"role": "user", "content": [shown(2 + start), said("?")]}
                await answered(manager, [first])
                for number, talk in enumerate(talks):
                    text, ended = await answered(manager, talk)
                    assert text == cold(runner, talk)
                    assert ended.usage.cached_tokens >= told[number]
                    told[number] = ended.usage.prompt_tokens
                    question = {"role": "user", "content": QUESTIONS[2 * start]}
                    talk += [{"role": "assistant", "content": text}, question]


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *(("demo-pictures", seed) for seed in range(3)),
        *((kind, 0) for kind in ("qwen2_5_vl", "gemma3", "idefics3", "mllama")),
    ],
)
async def test_random_conversations_are_answered_as_cold(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """Pictures come early and late, change, go away and come back; some clients leave.

    Random weights answer in no text, which would come back in other tokens.
    """
    draw, has_words = random.Random(seed), kind == "demo-pictures"
    model = kind if has_words else str(write_seeing(tmp_path / kind, kind))

    with Runner.load(model, pictures=True, reserve=False) as runner:
        async with seeing(model=model) as manager:
            messages: list[dict[str, Any]] = []
            kept = 0
            for _ in range(14):
                messages = changed(draw, messages)
                if draw.random() < 0.15:
                    stream = manager.answer(request(messages))
                    await anext(stream)
                    await stream.aclose()
                text, ended = await answered(manager, messages)
                assert text == cold(runner, messages)
                kept += ended.usage.cached_tokens
                said = text if has_words else "Fine."
                messages = [*messages, {"role": "assistant", "content": said}]
            assert kept > 100
            assert held_in(manager).loaded.model.sight.encoded <= len(FILES)


@pytest.mark.exhaustive(0)
async def test_a_changed_picture_is_named(tmp_path: Path) -> None:
    """The response names message and picture, and so does the event."""
    events = tmp_path / "events.jsonl"
    record = RequestLog(str(events))

    async with seeing(record=record) as manager:
        first = [{"role": "user", "content": [shown(0), shown(1), said(QUESTIONS[0])]}]
        text, _ = await answered(manager, first)
        rest = [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
        await answered(manager, [*first, *rest])
        first[0]["content"] = [shown(0), shown(2), said(QUESTIONS[0])]
        _, found = await answered(manager, [*first, *rest])
    record.close()
    cause = found.cause
    assert (cause.name, cause.message) == ("picture-changed", 0)
    assert cause.remedy.startswith("Send picture 2 of message 0 back unchanged")
    last = events.read_text().splitlines()[-1]
    assert '"part":"picture"' in last
    assert '"picture":2' in last


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([{"type": "image", "image": "https://x.org/a.png"}], "is not fetched"),
        ([{"type": "image", "image": "file:///etc/passwd"}], "no files are opened"),
        ([{"type": "image", "image": "/etc/passwd"}], "base64 is wrong|not a picture"),
        ([{"type": "image", "image": "data:image/png,abc"}], "a data URL has to begin"),
        ([{"type": "image", "image": "data:image/png;base64,aGVsbG8="}], "not a picture"),
        ([shown(0), said("a\ufffcb")], "U\\+FFFC"),
        ([shown(0), said("<start_of_image>")], "is 2 times in its text"),
    ],
    ids=["fetched", "file", "path", "not base64", "no picture", "U+FFFC", "marker"],
)
async def test_what_can_not_be_shown_is_refused(content: list[dict[str, Any]], why: str) -> None:
    """Each has a reason, and the next request is answered."""

    async with seeing() as manager:
        with pytest.raises(ApiError, match=why) as caught:
            await events_of(manager, request([{"role": "user", "content": content}]))
        assert caught.value.status == 400
        fine = [{"role": "user", "content": [shown(0), said(QUESTIONS[0])]}]
        assert await manager.count(request(fine)) > 20


async def test_too_many_pictures_at_once_are_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told to come again, and then there is room."""
    monkeypatch.setattr(vision_encoder, "KEPT_BYTES", 0)

    async with seeing() as manager:
        manager.load_first().loaded.model.sight._kept_bytes = 0
        asks = [[{"role": "user", "content": [shown(number)]}] for number in range(2)]
        monkeypatch.setattr(vision_encoder, "HELD_BYTES", 1)
        with pytest.raises(ApiError, match="the pictures of requests take") as caught:
            await answered(manager, asks[0])
        assert (caught.value.status, caught.value.retry_after) == (503, 5)
        monkeypatch.setattr(vision_encoder, "HELD_BYTES", 2**29)
        await answered(manager, asks[1])


async def test_a_file_in_the_folder_is_the_same_picture(tmp_path: Path) -> None:
    """It is found in the folder only, also behind links and dots."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "shapes of mine.png").write_bytes(FILES[1])
    (tmp_path / "outside.png").write_bytes(FILES[1])
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    settings = replace(SETTINGS, picture_folder=str(folder))

    def by_url(url: str) -> list[dict[str, Any]]:
        content = [{"type": "image", "image": url}, said(QUESTIONS[0])]
        return [{"role": "user", "content": content}]

    async with seeing(settings) as manager:
        await answered(manager, [{"role": "user", "content": [shown(1), said(QUESTIONS[0])]}])
        inside = (folder / "shapes of mine.png").as_uri()
        _, ended = await answered(manager, by_url(inside))
        assert ended.usage.outcome == "hit"
        for outside in (
            (folder / "link.png").as_uri(),
            f"{folder.as_uri()}/../outside.png",
            (tmp_path / "outside.png").as_uri(),
            f"file://elsewhere{folder}/shapes%20of%20mine.png",
            f"{inside}%00",
        ):
            with pytest.raises(ApiError, match="is not in the folder"):
                await events_of(manager, request(by_url(outside)))
        missing = f"{folder.as_uri()}/missing.png"
        with pytest.raises(ApiError, match=r"missing\.png"):
            await events_of(manager, request(by_url(missing)))


@pytest.mark.exhaustive(0)
async def test_without_the_option_the_remedy_is_named() -> None:
    """The model is loaded for text then."""

    async with seeing(replace(SETTINGS, pictures=False)) as manager:
        content = [shown(0), said(QUESTIONS[0])]
        with pytest.raises(ApiError, match="start the server with --pictures"):
            await events_of(manager, request([{"role": "user", "content": content}]))
        await events_of(manager, request([{"role": "user", "content": QUESTIONS[0]}]))


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("pictures", [True, False])
async def test_the_list_of_models_says_which_see(pictures: bool) -> None:
    """It does so before they are loaded, because clients read it when they start."""

    found = ModelLoader(settings=replace(SETTINGS, pictures=pictures), runner={"context": 400})
    async with open_manager(ModelNames("demo", {"eyes": "demo-pictures"}), found) as manager:
        sees = {card.name: card.sees for card in manager.models()}
        assert sees == {"demo": False, "eyes": pictures}
        await manager.hold("eyes", 60)
        assert manager.card("eyes").sees == pictures


async def test_a_model_without_eyes_answers_text(caplog: pytest.LogCaptureFixture) -> None:
    """A warning says why it sees nothing."""

    found = ModelLoader(settings=SETTINGS, runner={"context": 400})
    async with open_manager(ModelNames("demo", {}), found) as manager:
        await events_of(manager, request([{"role": "user", "content": "Hello"}]))
        with pytest.raises(ApiError, match="ask a model that sees"):
            await events_of(manager, request([{"role": "user", "content": [shown(0)]}]))
    assert "demo sees no pictures" in caplog.text


async def test_what_a_seeing_model_can_not_have() -> None:
    """Quantized caches are refused; guesses and parking are left out."""

    found = ModelLoader(settings=SETTINGS, runner={"context": 400, "kv_bits": 8})
    async with open_manager(ModelNames("demo-pictures", {}), found) as manager:
        with pytest.raises(OptionError, match="kv_bits"):
            manager.load_first()
    found = ModelLoader(settings=SETTINGS, runner={"context": 400}, speculate="lookup")
    async with open_manager(ModelNames("demo-pictures", {}), found) as manager:
        assert manager.load_first().sees
        await events_of(manager, request([{"role": "user", "content": [shown(0)]}]))

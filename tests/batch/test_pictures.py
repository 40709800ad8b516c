"""Lines with pictures: the answers of a cold run, also after a restart, and clear errors."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from PIL import Image
from support.batch_command import answers, run, write
from support.checks import ends, has

from mlxrunner import BatchRequest, ParallelRunner, Runner, run_batch
from mlxrunner.batch.store import Store
from mlxrunner.errors import PromptError
from mlxrunner.pictures.table import FIRST, Picture, PictureTable

SHAPES = Path(__file__).parents[2] / "docs" / "images" / "shapes.png"
QUESTIONS = ("How many red squares are there?", "How many circles?", "Is there a triangle?")
MODEL = ("-m", "demo-pictures", "--pictures", "--picture-folder", "photos", "--no-reserve")
BROKEN = {"id": "broken", "messages": [{"role": "user", "content": [{"type": "image"}]}]}
OPTIONS = (*MODEL, "--greedy", "--max-tokens", 12, "--no-usage", "-q")


def pixels(number: int) -> Any:
    """Return a picture of shapes; each number is another one."""
    found = np.asarray(Image.open(SHAPES).convert("RGB"))
    return np.ascontiguousarray(np.roll(found, 24 * number, axis=number % 2))


def png(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels(number)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three pictures, within an own working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(png(number))
    return folder


def asking(image: Any, question: str = "") -> list[Any]:
    """Return a conversation with a picture."""
    parts = [{"type": "image", "image": image}]
    text = [{"type": "text", "text": question}] if question else []
    return [{"role": "user", "content": [*parts, *text]}]


def line(number: int) -> dict[str, Any]:
    """Return a line in one of three forms, with a picture that comes again in later lines."""
    which, question = number % 3, QUESTIONS[number // 3 % 3]
    data = "data:image/png;base64," + base64.b64encode(png(which)).decode()
    url = data if number % 2 else f"file:{which}.png"
    if number % 4 == 0:
        return {"id": number, "messages": asking(url, question)}
    if number % 4 == 1:
        parts = [{"type": "input_image", "image_url": url}]
        item = {"role": "user", "content": [*parts, {"type": "input_text", "text": question}]}
        return {"custom_id": str(number), "url": "/v1/responses", "body": {"input": [item]}}
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": question}]}]
    if number % 4 == 2:
        return {"id": number, "messages": messages}
    url = "/v1/chat/completions"
    return {"custom_id": str(number), "url": url, "body": {"messages": messages}}


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of an answer in any of the forms."""
    if "response" not in answer:
        return str(answer["text"])
    body = answer["response"]["body"]
    if "output" in body:
        return str(body["output"][0]["content"][0]["text"])
    return str(body["choices"][0]["message"]["content"])


def cold(count: int) -> list[str]:
    """Return the answers of a runner that keeps nothing from line to line."""
    found = []
    with Runner.load("demo-pictures", pictures=True, reserve=False) as runner:
        for number in range(count):
            runner.reset()
            asked = asking(png(number % 3), QUESTIONS[number // 3 % 3])
            found.append(runner.complete(asked, max_tokens=12, temperature=0.0).text)
    return found


def test_lines_in_every_form_are_answered_as_cold(photos: Path) -> None:
    """The order that reuses most brings the lines of a picture together."""
    write(*(line(number) for number in range(12)))
    ends(run("in.jsonl", "-o", "out.jsonl", *OPTIONS, "--events", "events.jsonl"), 0)
    assert [text_of(one) for one in answers()] == cold(12)
    events = [json.loads(one) for one in Path("events.jsonl").read_text().splitlines()]
    assert sum(event["cached_tokens"] > 15 for event in events) >= 9
    assert {event["messages"] for event in events} == {1}


def test_a_run_that_was_stopped_goes_on_with_the_same_pictures(photos: Path) -> None:
    """The ids of the new process are those in the store, in whatever order lines run."""
    lines = [line(number) for number in range(9)]
    write(*lines[:4], BROKEN, *lines[4:])
    ends(run("in.jsonl", "-o", "whole.jsonl", *OPTIONS), 3)
    ends(run("in.jsonl", "-o", "out.jsonl", *OPTIONS, "--order", "input", "--max-errors", 1), 1)
    with Store.open(Path("out.jsonl.run")) as store:
        assert 0 < store.counts.done < 9
    ends(run("in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume"), 3)
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


def test_a_file_that_has_changed_since_is_named(photos: Path) -> None:
    """Its line gets an error; the other lines are answered."""
    write(line(0), BROKEN, line(2), line(1))
    run("in.jsonl", "-o", "out.jsonl", *OPTIONS, "--order", "input", "--max-errors", 1)
    (photos / "2.png").write_bytes(png(7))
    ends(run("in.jsonl", "-o", "out.jsonl", *OPTIONS, "--resume"), 3)
    found = answers()
    assert "picture 1 of the line has changed since the batch was read" in found[2]["error"]
    assert text_of(found[3]) == cold(2)[1]


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("file:missing.png", "missing.png: no such file"),
        ("file:../in.jsonl", "is not in the folder photos"),
        ("https://x.org/a.png", "is not fetched"),
        ("data:image/png;base64,aGVsbG8=", "not a picture of a known format"),
        (7, "a picture has to be a text"),
    ],
)
def test_what_is_no_picture_is_the_error_of_its_line(photos: Path, image: Any, why: str) -> None:
    """It stops nothing."""
    write({"id": 0, "messages": asking(image)}, line(0))
    ends(run("in.jsonl", "-o", "out.jsonl", *OPTIONS), 3)
    assert why in answers()[0]["error"]
    assert text_of(answers()[1]) == cold(1)[0]


def test_without_the_option_the_remedy_is_named(photos: Path) -> None:
    """The model is loaded for text then."""
    write(line(0), line(3))
    ends(run("in.jsonl", "-o", "out.jsonl", "-m", "demo-pictures", "--no-reserve"), 3)
    remedy = "line 1: message 0 has a picture: run the batch with --pictures"
    assert answers()[0]["error"] == remedy


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--parallel", 2], "one line at a time"),
        (["--workers", 2], "run in one process"),
        (["--dask", "tcp://127.0.0.1:9"], "run in one process"),
        (["--raw"], "--raw is plain text only"),
        (["--verify-cache", 1], "without pictures"),
        (["--log-tokens", "t"], "writes tokens only"),
    ],
)
def test_what_a_seeing_model_can_not_have(photos: Path, given: list[Any], why: str) -> None:
    """Each is refused before anything is read."""
    write(line(0))
    ends(run("in.jsonl", "-o", "out.jsonl", *MODEL, *given), 2, why)


def test_the_plan_counts_positions_of_pictures(photos: Path) -> None:
    """It says one line at a time, and reads no weights."""
    write(*(line(number) for number in range(9)))
    result = run("in.jsonl", *MODEL, "--plan", "--json")
    ends(result, 0)
    has(json.loads(result.stdout), lines=9, parallel=1)


@pytest.mark.parametrize("kind", [Runner, ParallelRunner])
def test_a_program_gives_paths_bytes_and_pixels(photos: Path, kind: Any) -> None:
    """They are the same pictures as those of lines."""
    given = [photos / "0.png", png(1), pixels(2), str(photos / "0.png")]
    requests = [
        BatchRequest(asking(image, QUESTIONS[number // 3 % 3]))
        for number, image in enumerate(given)
    ]
    missing = BatchRequest(asking("missing.png"))
    settings = {"max_sequences": 2, "context": 400} if kind is ParallelRunner else {}
    with kind.load("demo-pictures", pictures=True, reserve=False, **settings) as runner:
        results = list(run_batch(runner, [*requests, missing], max_tokens=12, temperature=0.0))
    assert [result.text for result in results[:4]] == cold(4)
    assert "missing.png: no such file" in str(results[4].error)


def test_a_table_takes_in_ids_of_another_process() -> None:
    """In any order; the same ids for two pictures are refused."""
    table = PictureTable()
    second, first = Picture(b"2", FIRST + 10, 5), Picture(b"1", FIRST, 4)
    table.restore(second)
    table.restore(first)
    table.restore(second)
    assert table.at(FIRST + 3) == first
    assert table.at(FIRST + 14) == second
    for gap in (FIRST - 1, FIRST + 4, FIRST + 15):
        with pytest.raises(KeyError):
            table.at(gap)
    assert table.add(b"3", 2).first == FIRST + 15
    for wrong in (Picture(b"4", FIRST + 3, 2), Picture(b"5", FIRST + 8, 3)):
        with pytest.raises(PromptError, match="same ids"):
            table.restore(wrong)

"""Models that see, loaded as a user loads them, answer as mlx-vlm does."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("mlx_vlm", reason="needs the extra vision")

from PIL import Image
from support.models import change_json
from support.seeing import masked_answer, noise, own_answer, write_seeing

from mlxrunner import (
    MemoryPlanError,
    ModelError,
    OptionError,
    ParallelRunner,
    PromptError,
    Runner,
    cli,
)
from mlxrunner.models import load
from mlxrunner.models.sharding import share_among
from mlxrunner.profiling.profile import Profile
from mlxrunner.system import device
from mlxrunner.system import mlx_vlm_internals as internals

KINDS = ("qwen2_5_vl", "gemma3", "idefics3", "mllama")


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def asked(*parts: Any) -> dict[str, Any]:
    """Return a message of texts and pictures."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def generated(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["generate", "--no-reserve", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("sees"), "gemma3")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[Runner]:
    with Runner.load(folder, context=1024, pictures=True, reserve=False) as loaded:
        yield loaded


def cold(runner: Runner, messages: list[dict[str, Any]], count: int) -> list[int]:
    """Return the answer of mlx-vlm's model; its processor gets the whole conversation at once."""
    model: Any = runner.model.inner
    processor = internals.load_processor(Path(runner.name))
    text = runner.tokenizer._inner.render_parts(messages)  # type: ignore[attr-defined]
    pictures = [p["image"] for m in messages for p in m["content"] if p["type"] == "image"]
    images = [Image.fromarray(one) for one in pictures]
    found = dict(processor(text=[text], images=images, add_special_tokens=False))
    tokens = np.array(found.pop("input_ids"))[0].tolist()
    found.pop("attention_mask", None)
    inputs = {name: mx.array(value) for name, value in found.items()}
    if "aspect_ratio_mask" in inputs:
        names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        views = [
            {name: np.array(inputs[name][:, at : at + 1]) for name in names}
            for at in range(len(images))
        ]
        return masked_answer(model, tokens[1:], views, count)  # it begins each text with a token
    return own_answer(model, tokens, inputs, count)


@pytest.mark.exhaustive(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_from_a_directory(kind: str, tmp_path: Path) -> None:
    """Each turn is evaluated alone, and each picture is encoded once."""
    name = write_seeing(tmp_path, kind)
    with Runner.load(name, context=1500, pictures=True, reserve=kind == "gemma3") as runner:
        sight, pictures = runner.model.sight, [noise(seed) for seed in range(3)]
        messages = [asked("What is ", pictures[0], " this?")]
        for more in ((asked("And?"),), (asked(pictures[1], pictures[2]), asked("Why"))):
            answer = runner.complete(messages, max_tokens=5, stop_tokens=[])
            assert answer.tokens == cold(runner, messages, 5)
            messages = [*messages, *more]
        answer = runner.complete(messages, max_tokens=5, stop_tokens=[])
        assert answer.tokens == cold(runner, messages, 5)
        assert answer.usage is not None
        assert answer.usage.cached_tokens > (30 if kind == "mllama" else 40)  # a picture is a token
        assert sight.encoded == 3
        changed = [asked("What is ", pictures[1], " this?"), *messages[1:]]
        again = runner.complete(changed, max_tokens=5, stop_tokens=[])
        assert again.tokens == cold(runner, changed, 5)
        assert sight.encoded == 3


def test_the_same_picture_is_a_hit_wherever_it_comes_from(runner: Runner, tmp_path: Path) -> None:
    """A path, the bytes of a file and its pixels are one picture."""
    pixels = noise(4)
    file = tmp_path / "a.png"
    file.write_bytes(png(pixels))
    usages = [
        runner.complete([asked(one, "What is it?")], max_tokens=1).usage
        for one in (file, file.read_bytes(), pixels)
    ]
    assert all(one and one.evaluated_tokens == 1 for one in usages[1:])


def test_text_alone_is_answered_too(runner: Runner) -> None:
    """A model that sees needs no picture."""
    messages = [asked("Hello")]
    again = [{"role": "user", "content": "Hello"}]
    assert (
        runner.complete(messages, max_tokens=4).tokens
        == runner.complete(again, max_tokens=4).tokens
    )


def test_a_mark_in_a_text_is_no_picture(runner: Runner) -> None:
    """It would move the pictures after it."""
    with pytest.raises(PromptError, match="is 2 times in its text"):
        runner.complete([asked(noise(1), "<start_of_image>")])
    with pytest.raises(PromptError, match="the prompt has places for more"):
        runner.complete([asked(noise(1), "<image_soft_token>")])
    with pytest.raises(PromptError, match="U\\+FFFC"):
        runner.complete([asked(noise(1), "\ufffc")])


def test_a_picture_is_shown_as_one_character(runner: Runner) -> None:
    """Events show a few tokens of a prompt."""
    tokens = runner.tokenize([asked("a", noise(1), noise(2), "b")])
    assert runner.tokenizer.decode(tokens.tolist()).count("\ufffc") == 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"overflow": "shift"}, "can't drop a part of its context"),
        ({"speculate": "lookup"}, "nothing is guessed"),
    ],
)
def test_options_that_know_no_pictures_are_refused(
    runner: Runner, options: Any, match: str
) -> None:
    """Each by its name."""
    with pytest.raises(OptionError, match=match):
        runner.generate([asked(noise(1))], **options)


@pytest.mark.parametrize(
    "settings",
    [{"kv_bits": 8}, {"draft_model": "demo"}, {"trust_remote_code": True}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_know_no_pictures_are_refused(folder: Path, settings: Any) -> None:
    """Each by its name, when the model is loaded."""
    (name,) = settings
    for kind, more in ((Runner, {}), (ParallelRunner, {"max_sequences": 2})):
        with pytest.raises(OptionError, match=f"^{name}: a model that sees pictures"):
            kind.load(folder, pictures=True, reserve=False, **more, **settings)


def test_tokens_of_pictures_are_neither_recorded_nor_given(runner: Runner, tmp_path: Path) -> None:
    """Their ids mean something in this process only."""
    for more in ({"verify": 1.0}, {"tokens": tmp_path / "tokens"}):
        with pytest.raises(OptionError, match="neither verified nor recorded"):
            Profile(**more).watch(runner)  # type: ignore[arg-type]
    tokens = runner.tokenize([asked(noise(1), "a")])
    with pytest.raises(PromptError, match="vocabulary"):
        runner.complete(tokens.tolist())


def test_a_model_loaded_for_text_says_how_it_would_see() -> None:
    """A file is not even opened."""
    with (
        Runner.load("demo", reserve=False) as demo,
        pytest.raises(PromptError, match="pictures=True"),
    ):
        demo.complete([asked(Path("/no/such/file"))])


def test_only_architectures_that_were_compared_load() -> None:
    """The demo model reads text."""
    with pytest.raises(ModelError, match="pictures are not supported for model_type 'llama'"):
        Runner.load("demo", pictures=True)


@pytest.mark.parametrize("name", ["config.json", "processor_config.json"])
def test_code_of_a_model_is_not_run(folder: Path, tmp_path: Path, name: str) -> None:
    """Not even asked for."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_json(tmp_path / name, auto_map={"AutoProcessor": "code.Mine"})
    with pytest.raises(ModelError, match="auto_map names Python code"):
        Runner.load(tmp_path, pictures=True, reserve=False)


def test_several_ranks_see_no_pictures(folder: Path) -> None:
    """None of them loads a part that would answer wrongly."""
    group: Any = object()
    share_among(group)
    try:
        with pytest.raises(ModelError, match="can't be shared among ranks"):
            Runner.load(folder, pictures=True, reserve=False)
    finally:
        share_among(None)


def test_the_plan_counts_pictures(folder: Path) -> None:
    """Kept ones, one that is read, and the encoder's worst case, which is then a bound."""
    with Runner.load(folder, context=256, pictures=True) as runner:
        assert runner.plan is not None
        (line,) = [line for line in runner.plan.lines if line.what == "pictures"]
        sight = runner.model.sight
        assert line.total > sight.work_bytes(tries=False)
        assert sum(one.total for one in runner.plan.lines) == runner.plan.total
        sight._most -= 1
        with pytest.raises(Exception, match="more memory than was planned"):
            runner.complete([asked(noise(1))])


def test_generate_shows_files_to_the_model(folder: Path, tmp_path: Path) -> None:
    """The first --image comes first."""
    for number in (1, 2):
        (tmp_path / f"{number}.png").write_bytes(png(noise(number)))
    said = [
        generated(
            *("-m", folder, "--json", "--max-tokens", "3", "what?"),
            *(option for one in order for option in ("--image", tmp_path / f"{one}.png")),
        )
        for order in ((1, 2), (2, 1))
    ]
    with Runner.load(folder, pictures=True, reserve=False) as runner:
        expected = runner.complete([asked(noise(1), noise(2), "what?")], max_tokens=3)
        other = runner.complete([asked(noise(2), noise(1), "what?")], max_tokens=3)
    assert [json.loads(one.stdout)["tokens"] for one in said] == [expected.tokens, other.tokens]


def test_several_answers_about_a_picture_are_those_of_single_requests(
    folder: Path, tmp_path: Path
) -> None:
    """Each has a seed of its own, and they share what was seen."""
    file = tmp_path / "a.png"
    file.write_bytes(png(noise(1)))
    asked_of = ("-m", folder, "--image", file, "--json", "--max-tokens", "6", "what?")
    options = ("--temperature", "50", "--seed")
    several = generated(*asked_of, *options, "5", "--n", "3", "--parallel", "2")
    assert several.exit_code == 0, several.stderr
    answers = [json.loads(line) for line in several.stdout.splitlines()]
    single = [json.loads(generated(*asked_of, *options, seed).stdout) for seed in (5, 6, 7)]
    assert [one["tokens"] for one in answers] == [one["tokens"] for one in single]
    assert len({tuple(one["tokens"]) for one in answers}) > 1
    assert [one["usage"]["cached_tokens"] > 0 for one in answers] == [False, True, True]


def test_a_runner_of_many_requests_compares_its_plan_before_it_reads_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows then what pictures need beside the encoder's own work."""
    monkeypatch.setattr(load, "read_weights", pytest.fail)
    monkeypatch.setattr(device, "offered_bytes", lambda: 1000)
    with pytest.raises(MemoryPlanError, match="does not fit into memory") as error:
        ParallelRunner.load(folder, max_sequences=2, context=256, pictures=True)
    assert "pictures" in str(error.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--raw"], "--raw is plain text"),
        (["--verify-cache", "1"], "--verify-cache runs"),
        (["--log-tokens", os.devnull], "--log-tokens writes"),
        (["--draft-model", "demo"], "draft_model"),
        (["--kv-bits", "8"], "kv_bits"),
    ],
)
@pytest.mark.exhaustive(1)
def test_generate_refuses_what_knows_no_pictures(
    folder: Path, tmp_path: Path, options: list[str], match: str
) -> None:
    """One line, before an answer."""
    file = tmp_path / "a.png"
    file.write_bytes(png(noise(1)))
    done = generated("-m", folder, "--image", file, "hi", *options)
    assert done.exit_code == 2
    assert match in done.stderr
    assert done.stderr.count("\n") == 1

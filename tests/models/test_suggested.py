"""The sampling that a model's generation_config.json suggests, and what is wrong with a file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mlxrunner
from mlxrunner import ParallelRunner, Runner, cli
from mlxrunner.models.files import MOST_SUGGESTIONS, suggestion_of

DEMO = Path(mlxrunner.__file__).parent / "models" / "demo"
QWEN = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
GREEDY, KEPT = {"temperature": 0.0}, {"top_k": 64, "top_p": 0.95}
OWN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def written(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.mark.exhaustive(20)
@pytest.mark.parametrize(
    ("found", "options"),
    [
        ({}, {}),
        ({"eos_token_id": [1, 2], "transformers_version": "4.51.0"}, {}),
        (QWEN, OWN),
        ({**QWEN, "do_sample": None}, OWN),
        ({**QWEN, "do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.05}, GREEDY | {"repetition_penalty": 1.05}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, {"temperature": 1.0, **KEPT}),
        ({"temperature": 1, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0}, {}),
        ({"temperature": 0.7, "top_k": 0}, {"temperature": 0.7}),
    ],
    ids=str,
)
def test_sampling_is_read_from_the_file(
    tmp_path: Path, found: dict[str, Any], options: dict[str, Any]
) -> None:
    """Neutral values are none, `do_sample` says whether to sample at all."""
    suggestion = suggestion_of(written(tmp_path, found))
    assert (suggestion.options, suggestion.problem) == (options, None)


@pytest.mark.exhaustive(20)
@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ('{"temperature": NaN}', "temperature: nan is out of range"),
        ('{"temperature": Infinity}', "temperature: inf is out of range"),
        ({"temperature": 1e9}, "temperature: 1000000000.0 is out of range"),
        ({"temperature": -1}, "temperature: -1 is out of range"),
        ({"temperature": "hot\x1b[2J"}, "temperature: 'hot\\x1b[2J' is not a number"),
        ({"temperature": [0.6]}, "temperature: [0.6] is not a number"),
        ({"temperature": True}, "temperature: True is not a number"),
        ({"top_k": 2.5}, "top_k: 2.5 is not a whole number"),
        ({"top_p": 1.5}, "top_p: 1.5 is out of range"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0 is out of range"),
        ({"do_sample": "yes"}, "do_sample: 'yes' is neither true nor false"),
        ("[]", "not a JSON object"),
        ("{", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        (" " * MOST_SUGGESTIONS + "{}", "bytes or more"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_used_is_ignored_and_named(tmp_path: Path, found: Any, problem: str) -> None:
    """One line with the file and the value; nothing is suggested."""
    suggestion = suggestion_of(written(tmp_path, found))
    assert suggestion.options == {}
    problem_line = str(suggestion.problem)
    assert str(tmp_path / "generation_config.json") in problem_line
    assert problem in problem_line
    assert "\n" not in problem_line
    assert len(problem_line) < 1000


def test_good_values_hold_beside_a_bad_one(tmp_path: Path) -> None:
    """Only the bad one is left out."""
    suggestion = suggestion_of(written(tmp_path, {**QWEN, "top_p": "high"}))
    assert suggestion.options == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("kind", ["missing", "fifo", "link", "huge"])
def test_a_file_that_is_none_suggests_nothing(tmp_path: Path, kind: str) -> None:
    """It is never waited for, and only a missing file is no problem."""
    file = tmp_path / "generation_config.json"
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to(tmp_path / "nowhere")
    elif kind == "huge":
        with file.open("wb") as stream:
            stream.truncate(2**30)
    suggestion = suggestion_of(tmp_path)
    assert suggestion.options == {}
    assert (suggestion.problem is None) == (kind == "missing")


def test_a_runner_knows_what_its_model_suggests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`suggested_options` are options of `generate`; a bad value is one warning of loading."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    written(folder, {**QWEN, "min_p": 7})
    with Runner.load(folder, reserve=False) as runner:
        assert runner.suggested_options == OWN
        asked: Any = runner.suggested_options
        assert runner.complete("My name is", max_tokens=2, seed=1, **asked).tokens
    warnings = [one.getMessage() for one in caplog.records if "generation_config" in one.message]
    assert len(warnings) == 1
    assert "min_p: 7 is out of range" in warnings[0]
    with ParallelRunner.load(folder, max_sequences=2, context=64, reserve=False) as many:
        assert many.suggested_options == OWN
    with Runner.load("demo", reserve=False) as demo:
        assert demo.suggested_options == {}


NAME = [{"role": "user", "content": "My name is Bo. What is my name?"}]


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, whose file asks for a stop text."""
    folder = tmp_path_factory.mktemp("stopping") / "demo"
    shutil.copytree(DEMO, folder)
    return written(folder, {"eos_token_id": [2], "stop_strings": [" is", 5, ""]})


def test_stop_strings_end_every_answer(stopping: Path) -> None:
    """With a runner, a runner of many, and beside stop texts and tokens of the request."""
    with Runner.load(str(stopping), context=256) as runner:
        assert runner.complete(NAME).text == "Your name"
        assert runner.complete(NAME, stop="zebra", stop_token_ids=[7]).text == "Your name"
        assert runner.complete(NAME, stop=" name").text == "Your"
        assert runner.complete(NAME, choices=["it is so"]).text == "it is so"
    with ParallelRunner.load(str(stopping), context=256, max_sequences=2) as runner:
        assert runner.complete(NAME).text == "Your name"


def test_stop_strings_that_cannot_be_used_are_named(stopping: Path, tmp_path: Path) -> None:
    """The others count. Each new token is compared with all of them, so they are few."""
    problem = "stop_strings: [' is', 5, ''] is not a list of texts"
    assert problem in str(suggestion_of(stopping).problem)
    texts = [f"end {number}" for number in range(10_000)]
    suggestion = suggestion_of(written(tmp_path, {"stop_strings": texts}))
    assert suggestion.stops == tuple(texts[:64])
    assert "stop_strings: all but the first 64 of 10,000 texts" in str(suggestion.problem)


def test_show_prints_the_ends(stopping: Path) -> None:
    """Tokens with their ids and texts, and the files that name them."""
    shown, listed = (
        CliRunner().invoke(cli.main, ["show", str(stopping), *more]).output
        for more in ([], ["--json"])
    )
    assert "<|im_end|> (4: config.json, tokenizer_config.json, chat template)" in shown
    assert "' is' (generation_config.json)" in shown
    end = {"text": " is", "token": None, "places": ["generation_config.json"]}
    assert end in json.loads(listed)["ends"]

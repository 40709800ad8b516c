"""Every door refuses a wrong option in the same words, and describes each one."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from support.command import run

import mlxrunner
from mlxrunner import (
    GenerateKwargs,
    GenerateOptions,
    OptionError,
    ParallelRunner,
    Runner,
    RunnerKwargs,
    RunnerSettings,
    run_batch,
)
from mlxrunner.batch.inputs import read_fields
from mlxrunner.batch.job import Job
from mlxrunner.batch.options import BatchOptions, FileOptions
from mlxrunner.chat.commands import parse_settings
from mlxrunner.config.option import about, names
from mlxrunner.loading import plan_model
from mlxrunner.testing import oracle_runner

PACKAGE = Path(mlxrunner.__file__).parent


# Options: described once, for every door.

BAD = {
    "temperature=-1": "temperature: -1.0 is out of range, it has to be between 0 and 100",
    "top_p=1.5": "top_p: 1.5 is out of range, it has to be between 0 and 1",
    "max_tokens=0": "max_tokens: 0 is out of range, it has to be at least 1",
    "seed=-1": f"seed: -1 is out of range, it has to be between 0 and {2**64 - 1}",
    "penalty_context=0": "penalty_context: 0 is out of range, "
    f"it has to be between 1 and {2**31 - 1}",
}


def error_of(call: Callable[[], object]) -> str:
    """Return the words with which a call refuses an option."""
    with pytest.raises(OptionError) as error:
        call()
    return str(error.value)


def refusal(*arguments: str) -> str:
    """Return what a command says as it refuses an option."""
    result = run(*arguments)
    assert result.exit_code == 2
    return result.stderr


@pytest.mark.parametrize("given", BAD)
def test_every_door_refuses_an_option_with_the_same_words(given: str) -> None:
    """Python, the command line, a batch line and the chat's /set."""
    name, _, text = given.partition("=")
    value = about(GenerateOptions.__dataclass_fields__[name]).parse(name, text)
    calls: list[Callable[[], object]] = [
        lambda: oracle_runner().generate("a", **{name: value}),  # type: ignore[arg-type]
        lambda: read_fields({"prompt": "a", name: value}, BatchOptions()),
        lambda: parse_settings(given),
    ]
    assert [error_of(call) for call in calls] == [BAD[given]] * 3
    said = refusal("generate", "-p", "a", f"--{name.replace('_', '-')}", text)
    assert said.endswith(f"mlxrunner: {BAD[given]}\n")


SETTINGS = {
    "context=1": f"context: 1 is out of range, it has to be between 2 and {2**31 - 1}",
    "kv_bits=3": "kv_bits: 3 is out of range, it has to be 4 or 8",
    "prefill_step=0": f"prefill_step: 0 is out of range, it has to be between 1 and {2**31 - 1}",
    "checkpoint_budget=-1": "checkpoint_budget: -1 is out of range, it has to be at least 0",
}


@pytest.mark.parametrize("given", SETTINGS)
def test_every_door_refuses_a_setting_with_the_same_words(given: str) -> None:
    """`Runner`, `Runner.load`, `plan_model` and the command line."""
    name, _, text = given.partition("=")
    value: dict[str, Any] = {name: int(text)}
    calls: list[Callable[[], object]] = [
        lambda: oracle_runner(**value),
        lambda: Runner.load("demo", **value),
        lambda: plan_model("demo", **value),
    ]
    assert [error_of(call) for call in calls] == [SETTINGS[given]] * 3
    said = refusal("generate", "-p", "a", f"--{name.replace('_', '-')}", text)
    assert said.endswith(f"mlxrunner: {SETTINGS[given]}\n")


BATCH = {
    "order=random": "order: 'random' is not known, it has to be one of prefix, input",
    "output_order=x": "output_order: 'x' is not known, it has to be one of input, done",
    "retries=-1": "retries: -1 is out of range, it has to be at least 0",
    "timeout=0": "timeout: 0.0 is out of range, it has to be more than 0",
    "parallel=0": "parallel: 0 is out of range, it has to be at least 1",
    "max_errors=0": "max_errors: 0 is out of range, it has to be at least 1",
}


@pytest.mark.parametrize("given", BATCH)
def test_every_door_refuses_an_option_of_a_batch_with_the_same_words(given: str) -> None:
    """`Job`, `run_batch` where it has the option, and the command line."""
    name, _, text = given.partition("=")
    value: dict[str, Any] = {name: about(FileOptions.__dataclass_fields__[name]).parse(name, text)}
    assert error_of(lambda: Job(inputs=("in.jsonl",), **value)) == BATCH[given]
    if name in names(BatchOptions):
        assert error_of(lambda: run_batch(oracle_runner(), [], **value)) == BATCH[given]
    said = refusal("batch", "in.jsonl", "-o", "out.jsonl", f"--{name.replace('_', '-')}", text)
    if about(FileOptions.__dataclass_fields__[name]).kind is not str:  # click refuses a choice
        assert said == f"mlxrunner: {BATCH[given]}\n"


def test_a_batch_refuses_an_option_of_the_wrong_type() -> None:
    """A flag is True or False, a number is not text."""
    for wrong, message in (
        ({"retries": True}, "retries: True is not a whole number"),
        ({"timeout": "1"}, "timeout: '1' is not a number"),
        ({"raw": "no"}, "raw: 'no' has to be True or False"),
        ({"system": 5}, "system: 5 is not a text"),
    ):
        assert error_of(partial(Job, inputs=("in.jsonl",), **wrong)) == message  # type: ignore[arg-type]


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    """For requests and for settings."""
    with pytest.raises(OptionError, match=r"'temprature': did you mean 'temperature'\? known "):
        oracle_runner().generate("a", temprature=1)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"'kvbits': did you mean 'kv_bits'\? known are ch"):
        Runner.load("demo", kvbits=4)  # type: ignore[call-arg]


def test_type_checkers_know_every_option() -> None:
    """GenerateKwargs and RunnerKwargs name the fields of the classes after them."""
    assert set(GenerateKwargs.__annotations__) == set(names(GenerateOptions))
    assert {"context", *RunnerKwargs.__annotations__} == set(names(RunnerSettings))


@pytest.mark.parametrize("kind", [GenerateOptions, RunnerSettings, FileOptions])
def test_every_option_is_described(kind: type) -> None:
    """Its help stands in its field, and its default is a value that it allows."""
    for name in names(kind):
        described = about(kind.__dataclass_fields__[name])  # type: ignore[attr-defined]
        assert described.help
    kind()


WORDS = {
    "context",
    "prefill_step",
    "stop",
    "keep",
    "schema",
    "choices",
    "seed",
    "overflow",
    "logprobs",
    "template",
    "tools",
}
"""Options whose names are also words for other things, or fields of OpenAI's format."""


ELSEWHERE = {
    "config/names.py": "it translates the names of other programs",
    "profiling": "token logs have fields of these names",
    "sessions": "so have saved sessions and their layers",
    "chat/session_commands.py": "a saved session has fields of these names",
    "cli/sessions.py": "a saved cache has bits of its own",
    "batch/openai_format.py": "it answers in OpenAI's format",
    "models/files.py": "a generation_config.json has fields of these names",
    "chat/conversation.py": "it says which limit has cut an answer off",
    "cli/llm_plugin.py": "it says which settings llm knows",
    "cli/generate.py": "it refuses the option beside --n, and passes it on to nobody",
    "cli/program.py": "it tells by one option whether a command makes requests",
    "memory": "a plan counts the tokens of a step and the bytes of checkpoints",
    "engine/pipeline.py": "it does the steps",
    "engine/parallel_runner.py": "it has settings of its own",
    **dict.fromkeys(
        [
            f"server/{name}.py"
            for name in ("openai", "completions", "responses", "anthropic", "ollama")
        ],
        "protocols have fields of these names",
    ),
}
"""Where an option's name is another thing's name as well."""


@pytest.mark.parametrize("name", sorted({*names(GenerateOptions), *names(RunnerSettings)} - WORDS))
def test_no_option_is_passed_on_by_name_in_more_than_four_files(name: str) -> None:
    """A parameter, a text or `name=name` counts; passing all options on names none."""
    naming = [file for file, names_there in passed_on().items() if name in names_there]
    assert len(naming) <= 4, naming


@cache
def passed_on() -> dict[str, set[object]]:
    """Return what each file passes on: names of parameters, of `name=name`, and texts."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {
        file: {found for node in ast.walk(ast.parse(path.read_text())) for found in passes_on(node)}
        for file, path in files.items()
        if not file.startswith(tuple(ELSEWHERE))
    }


def passes_on(node: ast.AST) -> Iterator[object]:
    if isinstance(node, ast.arg) or (
        isinstance(node, ast.keyword) and node.arg == named(node.value)
    ):
        yield node.arg
    elif isinstance(node, ast.Constant):
        yield node.value


def named(value: ast.expr) -> str:
    """The name of a variable or an attribute."""
    return ast.unparse(value).rpartition(".")[2]


PARALLEL = {
    "max_sequences=0": "max_sequences: 0 is out of range, it has to be at least 1",
    "max_sequences=None": "max_sequences: None is not a whole number",
    "context='x'": "context: 'x' is not a whole number",
    "context=0": f"context: 0 is out of range, it has to be between 2 and {2**31 - 1}",
    "prefill_step=1": f"prefill_step: 1 is out of range, it has to be between 2 and {2**31 - 1}",
}


@pytest.mark.parametrize("given", PARALLEL)
def test_a_parallel_runner_refuses_a_setting_in_a_sentence(given: str) -> None:
    """Also one of the wrong type, and a context of 0, which is not the default."""
    name, _, text = given.partition("=")
    runner = oracle_runner()
    settings = {"max_sequences": 2, name: ast.literal_eval(text)}
    parts = runner.model, runner.tokenizer, runner.facts
    assert error_of(lambda: ParallelRunner(*parts, **settings)) == PARALLEL[given]

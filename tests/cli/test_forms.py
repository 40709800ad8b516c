"""--schema and --choices as a user meets them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import Result
from jsonschema import Draft202012Validator
from support.checks import refused
from support.command import run

from mlxrunner.system.imports import how_to_install

SCHEMA = {
    "type": "object",
    "properties": {"pet": {"enum": ["parrot", "cat"]}, "name": {"type": "string", "maxLength": 10}},
    "required": ["pet", "name"],
    "additionalProperties": False,
}


def generate(*arguments: object) -> Result:
    return run("generate", "-p", "My name is Bo. What is my name?", *arguments)


def test_a_schema_may_be_typed_in_place_of_its_file() -> None:
    result = generate("--schema", json.dumps(SCHEMA))
    Draft202012Validator(SCHEMA).validate(json.loads(result.stdout))
    refused(generate("--schema", '{"type": }'), "mlxrunner: --schema: not valid JSON")


def test_an_answer_that_was_cut_off_is_told() -> None:
    """The rest is no JSON; the object of --json has the reason."""
    cut = ("--schema", json.dumps(SCHEMA), "--max-tokens", "2")
    assert "cut off before it was complete" in generate(*cut).stderr
    several = generate(*cut, "--n", "2").stderr
    assert "answer 2 of 2 was cut off before it was complete" in several
    whole = generate(*cut, "--json")
    assert (json.loads(whole.stdout)["finish_reason"], whole.stderr) == ("length", "")


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("more", [[], ["--n", "3"], ["--raw", "--repeat", "2"]], ids=str)
def test_an_answer_that_fits_a_schema(tmp_path: Path, more: list[str]) -> None:
    """Each line of standard output is one, with a mark of its encoding in the file or without."""
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "pet.json").write_text(json.dumps(SCHEMA), encoding=encoding)
        result = generate("--schema", str(tmp_path / "pet.json"), *more)
        assert (result.stderr, result.exit_code) == ("", 0)
        answers = [json.loads(line) for line in result.stdout.splitlines() if line]
        assert answers
        for answer in answers:
            Draft202012Validator(SCHEMA).validate(answer)


@pytest.mark.parametrize(
    ("given", "answers"),
    [
        pytest.param("Ana,Bo,Cleo", {"Bo"}, id="commas"),
        pytest.param('"Ana, Bo","Cleo, Bo"', {"Ana, Bo", "Cleo, Bo"}, id="a comma within"),
        pytest.param('Ana, "say ""Bo"""', {"Ana", 'say "Bo"'}, id="quotes within"),
        pytest.param("größer", {"größer"}, id="only one"),
    ],
)
def test_an_answer_that_is_one_of_the_choices(given: str, answers: set[str]) -> None:
    """Separated by commas; a space after one does not count; the demo model knows the name."""
    result = generate("--choices", given)
    assert (result.stderr, result.exit_code) == ("", 0)
    assert result.stdout.rstrip("\n") in answers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe{}", "can't be read: not UTF-8 (byte 0)"),
        (b"", "schema.json: not valid JSON"),
        (b"{}, {}", "schema.json: not valid JSON: Extra data"),
        (b"[]", "schema.json: it has to be a JSON object"),
        (b'{"not": {}}', 'schema: Unimplemented keys: ["not"]'),
        (b'{"enum": []}', "schema: Unsatisfiable schema"),
        (b'{"const": "\x1b[2J"}', "schema.json: not valid JSON: Invalid control character"),
        (b" " * 200_000, "schema.json: 200000 characters are too many, it may have at most 131072"),
        (b" " * 2**20, "1,048,576 bytes or more, and at most 524,288 are read"),
        ("fifo", "--schema schema.json: is a FIFO, not a regular file"),
        ("folder", "--schema schema.json: is a directory, not a regular file"),
        (None, "--schema schema.json: no such file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_is_no_use_is_one_line_before_the_model_is_loaded(
    folder: Path, content: bytes | str | None, message: str
) -> None:
    """The exit code is that of options, and nothing waits for what is no ordinary file."""
    file = Path("schema.json")
    match content:
        case bytes():
            file.write_bytes(content)
        case "fifo":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
    result = generate("--schema", file, "--model", folder / "no model")
    refused(result, message)
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "--choices: there is none, give them as yes,no"),
        ("yes,", "choices: each one has to be a text of at least one character"),
        ('"yes"no', "one that has a comma is put in double quotes"),
        ('"yes', "one that has a comma is put in double quotes"),
    ],
    ids=str,
)
def test_choices_that_are_no_list_are_one_line(given: str, message: str) -> None:
    """With an example or the rule."""
    refused(generate("--choices", given), message)


def test_without_the_library_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a model is loaded; other answers do not need it."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    refused(
        generate("--choices", "yes,no", "--model", "/no/model"),
        "mlxrunner: schema, choices: answers in a given form need llguidance, which is not "
        f"installed: {how_to_install('structured')}\n",
    )
    assert generate("--max-tokens", "2").exit_code == 0


@pytest.mark.parametrize(
    ("command", "times"),
    [
        ("generate -p Hi --stop e --choices yes,no", 1),
        ("generate -p Hi --stop e --max-tokens 1", 0),
        ("generate -p Hi --choices yes,no --repeat 2", 0),
        ("batch - -o - --stop e --choices yes,no", 1),
        ("batch - -o - --stop e --choices yes,no -q", 0),
    ],
)
def test_a_stop_string_that_has_no_effect_is_said_once(command: str, times: int) -> None:
    """On stderr; the answer is the whole form."""
    result = run(*command.split(), stdin='{"prompt": "Hi"}\n' * 2)
    assert result.exit_code == 0
    assert result.stderr.count("--stop has no effect with --schema or --choices") == times

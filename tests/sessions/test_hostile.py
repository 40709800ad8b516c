"""Damaged session folders end each command in one line or in what is asked for."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.sample import fewer
from support.saving import pieces

from mlxrunner import cli
from mlxrunner.sessions.store import TEXT

Change = Callable[[random.Random, Path], None]
DEEP = "[" * 5000 + "]" * 5000
VALUES = [
    "null", "true", "-1", "1.5", "1" * 401, "1" * 5000, "-" + "9" * 400, "1e999", "NaN",
    "-Infinity", "9223372036854775808", '""', '"a\\u0000b"', '"\\ud800"', '"\\u202e\\u001b[31m"',
    '"a\\nb"', json.dumps("x" * 100_000), "[]", "{}", "[null]", "[[1]]", DEEP,
    '{"\\ud800": {"": []}}', '"../.."', '"/dev/zero"', "[0, 1, 2, 3, 4, 5]",
]  # fmt: skip  # values by rows


class Raw(str):
    """JSON as it stands."""


def encoded(value: Any) -> str:
    match value:
        case Raw():
            return value
        case dict():
            members = (f"{json.dumps(name)}:{encoded(one)}" for name, one in value.items())
            return f"{{{','.join(members)}}}"
        case list():
            return f"[{','.join(map(encoded, value))}]"
    return json.dumps(value)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in it, with each of its keys; of long lists the first three."""
    keys: Any = ()
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(min(len(value), 3))
    for key in keys:
        yield value, key
        yield from places(value[key])


def changed(rng: random.Random, value: Any) -> Any:
    """With another value somewhere, or without one, or with one twice."""
    container, key = rng.choice(list(places(value)))
    how = rng.random()
    if how < 0.7:
        container[key] = Raw(rng.choice(VALUES))
    elif how < 0.85:
        del container[key]
    else:
        container[key] = [container[key], container[key]]
    return value


def change_text(rng: random.Random, folder: Path) -> None:
    file = folder / TEXT
    file.write_text(encoded(changed(rng, json.loads(file.read_text()))))


def change_bytes(rng: random.Random, folder: Path) -> None:
    file = rng.choice([folder / TEXT, *pieces(folder)])
    found = bytearray(file.read_bytes())
    place = rng.randrange(min(len(found), 4000))
    if rng.random() < 0.5:
        del found[place : place + rng.choice([1, 8, len(found)])]
    else:
        found[place] = rng.randrange(256)
    file.write_bytes(found)


def change_header(rng: random.Random, folder: Path) -> None:
    file = rng.choice(pieces(folder))
    found = file.read_bytes()
    size = struct.unpack("<Q", found[:8])[0]
    header = json.loads(found[8 : 8 + size])
    inner = rng.choice(["about", "about", "crc32"])
    if rng.random() < 0.5:
        known = json.loads(header["__metadata__"][inner])
        header["__metadata__"][inner] = encoded(changed(rng, known))
    else:
        header = changed(rng, header)
    text = encoded(header).encode()
    told = struct.pack("<Q", len(text) + rng.choice([0, 0, 0, -1, 2**40]))
    file.write_bytes(told + text + found[8 + size :])


def change_size(rng: random.Random, folder: Path) -> None:
    """Sparse: no disk is needed for it."""
    os.truncate(rng.choice([folder / TEXT, *pieces(folder)]), rng.choice([0, 7, 8, 2**33, 2**40]))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a session with two branches and a system prompt, and one with 8-bit arrays."""
    data = tmp_path_factory.mktemp("made")
    lines = "My name is Ana.\n/branch x\n/undo\n/system Hi.\nHello!\n"
    for name, options in (("a", ""), ("b", "--set session_kv_bits=8")):
        run(data, f"chat --no-reserve --session {name} {options}".split(), lines)
    return data


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    """A copy of these sessions."""
    return Path(shutil.copytree(made, tmp_path / "data"))


def run(data: Path, arguments: list[str], lines: str = "") -> str:
    """Return what a command says about it, which is never an internal error."""
    env = {"MLXRUNNER_DATA": str(data), "HF_HUB_OFFLINE": "1"}
    result = CliRunner().invoke(cli.main, arguments, input=lines, env=env)
    said, error = result.stderr, result.exception
    assert error is None or isinstance(error, SystemExit), (arguments, error)
    assert "internal error" not in said, (arguments, said)
    assert "Traceback" not in said, (arguments, said)
    assert max(map(len, said.splitlines()), default=0) < 1000, (arguments, said[:200])
    return said


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    "change", [change_text, change_bytes, change_header, change_size], ids=lambda one: one.__name__
)
def test_no_session_ends_a_command_in_an_internal_error(
    made: Path, tmp_path: Path, change: Change
) -> None:
    """List, show, export, resume, load, and remove: of a sample."""
    rng = random.Random(change.__name__)
    for number in range(fewer(30, 8)):
        data = tmp_path / str(number)
        shutil.copytree(made, data)
        name = rng.choice("ab")
        change(rng, data / "sessions" / name)
        run(data, ["sessions", "list"])
        run(data, ["sessions", "show", name, *["--json"] * (number % 2)])
        run(data, ["sessions", "export", name, str(tmp_path / "said.json"), "--force"])
        if change is not change_text:
            run(data, ["cache", "export", name, str(tmp_path / "cache.safetensors"), "--force"])
        if number % 6 == 0:
            run(data, ["chat", "--no-reserve", "--session", name], "Hello!\n/show\n/undo\n")
            run(data, ["chat", "--no-reserve"], f"/load {name}\nHello!\n/branch\n")
        run(data, ["sessions", "rm", name])
        shutil.rmtree(data)


def test_a_session_from_the_end_of_time_is_listed(data: Path) -> None:
    """Its time of saving, and the files beside it, may be any."""
    file = data / "sessions" / "a" / TEXT
    for saved_at in ("1" + "0" * 400, "-" + "1" * 400, "1e308", "1e999", "-1"):
        found = json.loads(file.read_text())
        file.write_text(encoded(found | {"saved_at": Raw(saved_at)}))
        assert run(data, ["sessions", "list"]) == ""
        assert run(data, ["sessions", "show", "a"]) == ""


@pytest.mark.parametrize(
    "model", ["x" * 100_000, "a\0b", "~nobody/x", "\ud800", "/" + "y/" * 5000, "\n", ""]
)
def test_a_model_that_no_file_can_be_is_one_line(data: Path, tmp_path: Path, model: str) -> None:
    """The session names it."""
    file = data / "sessions" / "a" / TEXT
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": model}))
    chat = ["chat", "--no-reserve", "--session", "a"]
    for command in (chat, ["cache", "export", "a", str(tmp_path / "x.safetensors")]):
        assert run(data, command, "Hello!\n").count("\n") == 1
    assert run(data, ["sessions", "list"]) == ""
    assert "session a: 1 turn" in run(data, [*chat, "-m", "demo", "--switch-model"], "Hello!\n")


def test_names_that_are_none_are_one_line(data: Path, tmp_path: Path) -> None:
    """With a NUL, of half characters, of devices; for every command that takes a name."""
    os.mkfifo(tmp_path / "fifo")
    commands = "save,save -f,load,load -f,file,export,export -f,branch,branch -d,switch,model"
    names = ["a\0b", "\0", "..", "../a", "a/b", ".", "x" * 300, str(tmp_path / "fifo"), "١\0"]
    lines = [f"/{one} {name}" for one in commands.split(",") for name in names]
    lines += ["/save", "/save a b", "/load"]
    said = run(data, ["chat", "--no-reserve"], "\n".join(lines))
    assert len(said.splitlines()) == len(lines)

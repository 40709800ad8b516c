"""`mlxrunner sessions` and `mlxrunner cache` as a user meets them."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from shutil import copytree

import pexpect
import pytest
from click.testing import Result
from support.checks import ends, refused
from support.command import run

from mlxrunner.models.resolve import DEMO_FOLDER
from mlxrunner.sessions.store import TEXT, SessionStore


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's data folder."""
    monkeypatch.setenv("MLXRUNNER_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("MLXRUNNER_MODEL", raising=False)
    return tmp_path / "data"


def talk(name: str, *lines: str, more: tuple[object, ...] = ()) -> Result:
    said = "".join(f"{line}\n" for line in lines)
    return run("chat", "--no-reserve", "--session", name, *more, stdin=said)


def sessions(*arguments: object) -> Result:
    return run("sessions", *arguments)


def cache(*arguments: object) -> Result:
    return run("cache", *arguments)


ZORBLIN = "My name is Zorblin."
RESTORED = "session again: 0 turns, 31 tokens restored"


def test_without_sessions_it_says_how_to_begin_one() -> None:
    """On stderr; standard output has nothing, or an empty list."""
    result = sessions("list")
    assert (result.stdout, result.exit_code) == ("", 0)
    assert "mlxrunner chat --session NAME" in result.stderr
    assert json.loads(sessions("list", "--json").stdout) == []


def test_list_and_show() -> None:
    """A line each; and what was said, with the settings that are not the usual ones."""
    talk("zor", ZORBLIN)
    talk("ana", "My name is Ana.", "/set seed 7")
    head, first, second = sessions("list").stdout.splitlines()
    assert head == "name  turns     text   caches  saved             model"
    assert re.match(r"ana +1 +[\d.]+ k?B", first)
    assert re.match(r"zor +1 +[\d.]+ k?B", second)
    assert max(map(len, (head, first, second))) <= 80
    assert second.endswith("  demo")
    listed = json.loads(sessions("list", "--json").stdout)
    found = [(one["name"], one["turns"], one["tokens"]) for one in listed]
    assert found == [("ana", 1, 29), ("zor", 1, 31)]
    shown = sessions("show", "ana").stdout
    assert "seed 7" in shown
    assert shown.endswith("user: My name is Ana.\nassistant: Nice to meet you.\n")
    as_json = json.loads(sessions("show", "ana", "--json").stdout)
    assert as_json["messages"][0]["content"] == "My name is Ana."


def test_a_session_that_was_edited_is_as_old_as_its_file(data: Path) -> None:
    """Its text is used, and what it says of its saving is not."""
    talk("zor", ZORBLIN)
    file = data / "sessions" / "zor" / TEXT
    file.write_text(file.read_text().replace(ZORBLIN, "My name is Bo."))
    for seconds, year in ((1.1e9, "2004"), (1e10, "2096")):
        os.utime(file, (seconds, seconds))
        assert json.loads(sessions("list", "--json").stdout)[0]["saved"].startswith(year)


@pytest.mark.parametrize("name", ["zor", "n" * 28, "n" * 41])
def test_a_session_is_one_line_of_a_terminal(name: str, tmp_path: Path) -> None:
    """The model is shortened and the least important columns go; a pipe gets everything."""
    model = tmp_path / "Llama-3.2-1B-Instruct-of-a-very-long-name-4bit"
    copytree(DEMO_FOLDER, model)
    talk(name, "Hi", more=("-m", model))
    command = shlex.join([sys.executable, "-m", "mlxrunner", "sessions"])
    shown = pexpect.run(command, dimensions=(24, 80), encoding="utf-8").splitlines()
    assert len(shown) == 2
    assert max(map(len, shown)) <= 80
    assert re.match(rf"{name} .* Lla.*\.\.\..*4bit$", shown[1])
    assert sessions().stdout.endswith(f"  {model}\n")


def test_a_broken_session_does_not_hide_the_others(data: Path) -> None:
    """It is named on stderr, in one line, and can be removed."""
    talk("zor", ZORBLIN)
    talk("bad", "Hello!")
    (data / "sessions" / "bad" / TEXT).write_text("{")
    result = sessions("list")
    assert "\nzor " in result.stdout
    assert result.stderr.startswith("mlxrunner: the session 'bad' (")
    assert result.stderr.count("\n") == 1
    assert sessions("show", "bad").exit_code == 2
    assert sessions("rm", "bad").exit_code == 0
    assert SessionStore().names() == ["zor"]


def test_what_a_session_says_can_not_drive_the_terminal(data: Path) -> None:
    talk("zor", ZORBLIN)
    file = data / "sessions" / "zor" / TEXT
    text = file.read_text().replace(ZORBLIN, "\\u001b[2J" + 15 * "x")
    file.write_text(text.replace('"demo"', '"\\u001b]0;x\\u0007"'))
    for command in (("list",), ("show", "zor"), ("export", "zor", "-")):
        result = sessions(*command)
        assert "\x1b" not in result.stdout
        assert "\\x1b" in result.stdout


def test_export(tmp_path: Path) -> None:
    """`sessions export` writes Markdown or JSON, to a new file, with --force, or to -."""
    talk("zor", ZORBLIN)
    markdown, as_json = tmp_path / "zor.md", tmp_path / "zor.json"
    text = "## User\n\nMy name is Zorblin.\n\n## Assistant\n\nNice to meet you.\n"
    assert sessions("export", "zor", markdown).stderr == f"1 turn written to {markdown}\n"
    assert markdown.read_text() == sessions("export", "zor", "-").stdout == text
    assert markdown.stat().st_mode & 0o777 == 0o600
    sessions("export", "zor", as_json)
    first = json.loads(as_json.read_text())["messages"][0]
    assert first == {"role": "user", "content": ZORBLIN}
    markdown.write_text("mine")
    said = f"mlxrunner: {markdown} is there already: --force overwrites it\n"
    refused(sessions("export", "zor", markdown), said)
    assert markdown.read_text() == "mine"
    sessions("export", "zor", markdown, "--force")
    assert markdown.read_text() == text
    assert sessions("export", "zor", tmp_path / "no" / "where").exit_code == 2


def test_rm_goes_on_where_it_can() -> None:
    """It says at the end which sessions were not there, or are open."""
    for name in ("zor", "open", "ana"):
        talk(name, "Hello!")
    with SessionStore().lock("open"):
        result = sessions("rm", "nope", "zor", "zor", "open", "ana")
    assert result.stderr == (
        "mlxrunner: no session is called 'nope'; `mlxrunner sessions list` lists them; "
        "the session 'open' is open in another chat: close that, or use another name\n"
    )
    assert result.exit_code == 2
    assert SessionStore().names() == ["open"]
    assert sessions("rm", "open").exit_code == 0
    assert list(SessionStore().folder.iterdir()) == []


def test_caches_go_out_to_mlx_lm_and_come_back(tmp_path: Path) -> None:
    """A session made of an exported file continues and evaluates only what is new."""
    talk("zor", ZORBLIN)
    file = tmp_path / "zor.safetensors"
    assert cache("export", "zor", file).stderr == "31 tokens\n"
    assert cache("export", "zor", file).exit_code == 2  # it is there
    assert cache("import", file, "--session", "again").stderr == (
        "31 tokens: in `mlxrunner chat --session again`, a prompt that begins with them does not "
        "evaluate them again\n"
    )
    talk("again")  # opened and left without a turn
    said = talk("again", "/stats", ZORBLIN, "/stats")
    assert said.stderr.startswith(f"{RESTORED} (286 kB)\n")
    assert "24 cached, 0 missed, 0 displaced, 1 new" in said.stderr
    assert said.stdout == "Nice to meet you.\n"
    refused(
        cache("import", file, "--session", "zor"),
        "mlxrunner: the session 'zor' exists already: `mlxrunner sessions rm zor` removes it\n",
    )


def test_an_imported_session_knows_its_model_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory is named by its whole path."""
    copytree(DEMO_FOLDER, tmp_path / "demodir")
    talk("zor", ZORBLIN)
    monkeypatch.chdir(tmp_path)
    cache("export", "zor", "zor.safetensors")
    ends(cache("import", "zor.safetensors", "-m", "./demodir", "--session", "again"), 0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert SessionStore().load("again").model == str(tmp_path / "demodir")
    assert talk("again", ZORBLIN).stderr.startswith(RESTORED)


def test_the_tokens_of_a_foreign_file_are_given(tmp_path: Path) -> None:
    """They are a list, or stand in a file; anything else is one line."""
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

    from mlxrunner import Runner

    import mlx.core as mx  # isort: skip

    runner = Runner.load("demo", reserve=False)
    tokens = list(map(int, runner.tokenize([{"role": "user", "content": ZORBLIN}])))
    layers = make_prompt_cache(runner.model)
    runner.model(mx.array([tokens]), cache=layers)
    file, ids = tmp_path / "x.safetensors", tmp_path / "ids.json"
    save_prompt_cache(str(file), layers)
    ids.write_text(json.dumps(tokens))
    arguments = ("import", file, "--session")
    said = f"mlxrunner: {file}: does not say which tokens it is of: give them with --tokens\n"
    assert cache(*arguments, "none").stderr == said
    assert cache(*arguments, "one", "--tokens", json.dumps(tokens)).exit_code == 0
    assert cache(*arguments, "two", "--tokens", f"@{ids}").exit_code == 0
    os.mkfifo(tmp_path / "fifo")
    files = ("@nowhere", "@/dev/zero", f"@{tmp_path}/fifo", "@a\ud800")
    lists = ("1 2", "{}", '["a"]', "[-1]", "[1.5]", "[[1]]", "[1e999]", "[" * 9999, f"[{10**20}]")
    for wrong in (*files, *lists, f"{tokens[:-1]}"):
        result = cache(*arguments, "three", "--tokens", wrong)
        assert result.exit_code in (1, 2), wrong
        assert result.stderr.count("\n") == 1
    assert SessionStore().names() == ["one", "two"]
    said = talk("two", ZORBLIN, "/stats")
    assert said.stdout == "Nice to meet you.\n"
    assert f"{len(tokens) - 1} cached, 0 missed, 0 displaced, 1 new" in said.stderr


def test_a_session_without_caches_can_not_be_exported(tmp_path: Path) -> None:
    talk("zor", "Hello!", more=("--set", "no_cache_file=true"))
    result = cache("export", "zor", tmp_path / "x.safetensors")
    assert result.stderr == "mlxrunner: the session 'zor' was saved without caches\n"


def test_caches_that_the_model_has_left_behind_are_not_exported(tmp_path: Path) -> None:
    """It has other weights now: one line says so."""
    from support.models import write_model

    folder = tmp_path / "model"
    write_model(folder, vocab_size=300)
    assert talk("zor", "Hello!", more=("-m", folder, "--max-tokens", 3)).exit_code == 0
    write_model(folder, vocab_size=300, seed=1)
    refused(
        cache("export", "zor", tmp_path / "x.safetensors"),
        f"mlxrunner: the session 'zor' was made with other weights than {folder} has now\n",
    )


def test_a_quantized_session_goes_out_and_comes_back(tmp_path: Path) -> None:
    """--kv-bits is seen by the file; the import has to be told."""
    file = tmp_path / "zor.safetensors"
    talk("zor", ZORBLIN, more=("--kv-bits", 8))
    assert cache("export", "zor", file).stderr == "31 tokens\n"
    taken = ("import", file, "--session", "again")
    assert "it has a QuantizedKVCache for a full layer" in cache(*taken).stderr
    assert [cache(*taken, "--kv-bits", bits).exit_code for bits in (3, 8)] == [2, 0]
    assert talk("again", ZORBLIN).stderr.startswith(RESTORED)


def test_template_variables_are_kept_and_may_be_given_anew() -> None:
    """Saved with the session; what the command line says wins."""
    for given, style in (
        (("style=brief", "n=1"), "brief"),
        ((), "brief"),
        (("style=long",), "long"),
    ):
        more = tuple(word for one in given for word in ("--chat-template-var", one))
        ends(talk("ana", "Hello!", more=more), 0)
        assert SessionStore().load("ana").settings["variables"] == {"style": style, "n": 1}

"""The config file: what it may say, what is wrong with it and where, and who may write to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrunner import MissingFileError, MlxrunnerError, OptionError, ReadError
from mlxrunner.config.file import EVERYWHERE, KEYS, LARGEST, SWITCHES, config_path, read_config_file
from mlxrunner.config.names import plain
from mlxrunner.config.option import DEFAULT, HERE, MODEL, Setting, layer, settled, values

GOOD = """
model = "small"
[aliases]
small = "mlx-community/Llama-3.2-1B-Instruct-4bit"
[options]
temperature = 1
top-p = 0.9
stop = "END"
[chat]
plain = true
system = "@terse"
temperature = 0.5
[models.small]
context = 4096
top_p = 0.8
template = { enable_thinking = false }
[prompts]
terse = "Be brief."
[templates]
sum = "Summarise: {input}"
[templates.list]
prompt = "List {n} of {input}"
system = "@terse"
"""
SMALL = "mlx-community/Llama-3.2-1B-Instruct-4bit"


@pytest.fixture
def file(own_home: Path) -> Path:
    """The place of the user's config file."""
    found = own_home / ".config" / "mlxrunner" / "config.toml"
    found.parent.mkdir(parents=True)
    return found


def test_later_layers_are_stronger() -> None:
    """Each value keeps its source."""
    made = settled(
        layer({"a": 1, "b": 1, "c": 1}, DEFAULT), layer({"b": 2}, MODEL), {"c": Setting(3)}
    )
    assert values(made) == {"a": 1, "b": 2, "c": 3}
    assert [one.source for one in made.values()] == [DEFAULT, MODEL, HERE]


def test_a_file_holds_models_options_prompts_and_templates(file: Path) -> None:
    """The sections of all commands, of one, and of a model; the last is the strongest."""
    file.write_text(GOOD)
    config = read_config_file()
    assert config.model == Setting("small", "config.toml line 2")
    assert (config.name_of("small"), config.name_of("demo")) == (SMALL, "demo")
    assert values(config.options("chat", SMALL)) == {
        "temperature": 0.5,
        "top_p": 0.8,
        "stop": ("END",),
        "plain": True,
        "system": "@terse",
        "context": 4096,
        "template": {"enable_thinking": False},
    }
    assert values(config.options("batch", "demo")) == {
        "temperature": 1, "top_p": 0.9, "stop": ("END",),
    }  # fmt: skip  # a table
    assert config.options("chat", SMALL)["top_p"].source == "config.toml line 15"
    assert config.system("@terse") == "Be brief."
    assert config.template("sum").prompt == "Summarise: {input}"
    assert config.template("list").system == "@terse"


@pytest.mark.parametrize("text", ["Be brief.", "@", "@two words", "mail@example.org", "@a\nb"])
def test_a_text_that_names_no_prompt_is_the_system_prompt(file: Path, text: str) -> None:
    """Only @ and one word is a name."""
    assert read_config_file().system(text) == text


def test_a_name_that_is_not_there_is_answered_with_those_that_are(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there is no file, or none is to be read."""
    with pytest.raises(OptionError, match=r"no system prompt 'terse' under \[prompts\] in .*none"):
        read_config_file().system("@terse")
    file.write_text(GOOD)
    with pytest.raises(OptionError, match=r"'ters'.*: did you mean 'terse'\? there are terse"):
        read_config_file().system("@ters")
    with pytest.raises(OptionError, match=r"no prompt template 'su'.*there are sum, list"):
        read_config_file().template("su")
    monkeypatch.setenv("MLXRUNNER_CONFIG", "")
    with pytest.raises(OptionError, match=r"the config file, which MLXRUNNER_CONFIG turns off"):
        read_config_file().system("@terse")


@pytest.mark.exhaustive(40)
@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("\nmodl = 'a'", 2, "there is no key 'modl': did you mean 'model'? known are aliases"),
        ("temperature = 0.5", 1, "the key 'temperature' belongs below [options], or that "),
        ("\nport = 8000", 2, "the key 'port' belongs below [serve]"),
        ("[options]\n\ntemp = 1", 3, "no key 'temp' in [options]: did you mean 'temperature'?"),
        ("[chat]\nnum_ctx = 1", 2, "no key 'num_ctx' in [chat]: did you mean 'context'?"),
        ("[generate]\nplain = true", 2, "there is no key 'plain' in [generate]"),
        ("[models.a]\nschema = 'x'", 2, "there is no key 'schema' in [models.a]"),
        ("[options]\nop = 1", 2, "there is no key 'op' in [options]"),
        ("[options]\ntemperature = 'hot'", 2, "temperature: 'hot' is not a number"),
        ("[options]\ntemperature = true", 2, "temperature: True is not a number"),
        ("[options]\ntemperature = nan", 2, "temperature: nan is out of range"),
        ("[options]\ntemperature = 1e9", 2, "temperature: 1000000000.0 is out of range"),
        ("[options]\ntemperature = 1979-05-27", 2, "is not a number"),
        ("[options]\nstop = 3", 2, "stop: 3 is not a list"),
        ("[options]\nstop = ['']", 2, "stop: each stop string"),
        ("[options]\noverflow = 'never'", 2, "overflow: 'never' is not known"),
        ("[options]\ntemplate = 1", 2, "template: it has to be a JSON object"),
        ("[options]\ntemplate = {messages = 1}", 2, "'messages' is not free for a variable"),
        ("[options]\ncontext = 1", 2, "context: 1 is out of range"),
        ("[options]\nkv_bits = 5", 2, "kv_bits: 5 is out of range"),
        ("[options]\nreserve = 1", 2, "reserve: 1 has to be true or false"),
        ("[options]\nsystem = 1", 2, "system: 1 has to be a text"),
        ("[options]\ntop-p = 1\ntop_p = 1", 3, "top_p is there twice"),
        ("options = 1", 1, "options: 1 has to be a table: [options]"),
        ("[models]\na = 1", 2, "a: 1 has to be a table: [models.a]"),
        ("model = 1", 1, "model: 1 has to be a text"),
        ("[aliases]\na = ''", 2, "a: '' has to be a text"),
        ("[aliases]\ndemo = 'x'", 2, "'demo' is the name of a model"),
        ("[aliases]\n'a/b' = 'x'", 2, "'a/b' is the name of a model"),
        ("[aliases]\na = 'b'\nb = 'c'", 2, "'a' names the alias 'b': name the model"),
        ("[prompts]\na = [1]", 2, "a: [1] has to be a text"),
        ("[templates.a]\nsystem = 'x'", 1, "the template 'a' has no prompt"),
        ("[templates.a]\nprompt = 'x'\ntext = 1", 3, "no key 'text' in [templates.a]"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)  # fmt: skip  # a case a line
def test_what_is_wrong_is_one_line_with_its_line(
    file: Path, text: str, line: int, problem: str
) -> None:
    """The path, the number of the line, the value, and the nearest key."""
    file.write_text(text)
    with pytest.raises(OptionError) as error:
        read_config_file()
    assert str(error.value).startswith(f"{file} line {line}: ")
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "text", ["a = ", "[a", "a = 1\na = 2", "a = " + "[" * 100_000, "\0", "a = " + "1" * 5000]
)
def test_what_is_not_toml_is_one_line(file: Path, text: str) -> None:
    """With the parser's own place."""
    file.write_text(text)
    with pytest.raises(OptionError, match=r"not readable as TOML|there is no key") as error:
        read_config_file()
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    "text", ["[options]\nseed = 0x", "[options.template]\na = 0x", "model = 0x"]
)
def test_a_number_that_python_cannot_print_is_one_line(file: Path, text: str) -> None:
    """TOML has 64 bits; the parser reads any number of hexadecimal digits."""
    file.write_text(text + "f" * 10_000)
    with pytest.raises(OptionError, match="a whole number in it has 40,000 bits"):
        read_config_file()


def test_the_file_is_found_where_the_user_says(
    file: Path, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default file may be missing, one that is named may not, and an empty name is none."""
    assert config_path() == file
    assert read_config_file().path is None
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_path() == tmp_path / "mlxrunner" / "config.toml"
    monkeypatch.setenv("MLXRUNNER_CONFIG", "~/mine.toml")
    assert config_path() == own_home / "mine.toml"
    with pytest.raises(MissingFileError, match=r"mine.toml: no such file \(MLXRUNNER_CONFIG names"):
        read_config_file()
    monkeypatch.setenv("MLXRUNNER_CONFIG", "~no-such-user/mine.toml")
    with pytest.raises(MissingFileError, match="no such file"):
        read_config_file()
    file.write_text("wrong")
    monkeypatch.setenv("MLXRUNNER_CONFIG", "")
    assert config_path() is None
    assert read_config_file().path is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_to_is_refused(file: Path, mode: int) -> None:
    """They could choose the model, whose code may run; others may read it."""
    file.write_text("model = 'a'")
    file.chmod(mode)
    with pytest.raises(ReadError, match=f"others may write to it \\(mode {mode:04o}\\): chmod 600"):
        read_config_file()
    file.chmod(0o644)
    assert read_config_file().model is not None


def test_a_link_to_a_file_of_ones_own_is_followed(file: Path, tmp_path: Path) -> None:
    """Users keep such files elsewhere; the file after the link is checked."""
    (tmp_path / "mine.toml").write_text("model = 'a'")
    file.symlink_to(tmp_path / "mine.toml")
    assert read_config_file().model is not None
    (tmp_path / "mine.toml").chmod(0o666)
    with pytest.raises(ReadError, match="others may write to it"):
        read_config_file()


def test_a_file_of_another_user_is_refused(file: Path, give_away: Callable[[Path], int]) -> None:
    """Unless that user is root."""
    file.write_text("model = 'a'")
    owner = give_away(file)
    with pytest.raises(ReadError, match=rf"it belongs to another user \(number {owner}\)"):
        read_config_file()


@pytest.mark.parametrize("kind", ["fifo", "folder", "huge", "dangling", "no text"])
def test_what_is_no_file_is_refused_and_never_waited_for(file: Path, kind: str) -> None:
    """In one line that names it."""
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "huge":
        with file.open("wb") as stream:
            stream.truncate(LARGEST + 1)
    elif kind == "dangling":
        file.symlink_to("nowhere")
    else:
        file.write_bytes(b"\xff\xfe")
    with pytest.raises(MlxrunnerError) as error:
        read_config_file()
    assert str(error.value).startswith(str(file))


def test_every_key_is_written_as_the_options_are() -> None:
    """With underscores; a key may also be written with dashes."""
    assert all(plain(key) == key for keys in KEYS.values() for key in keys)
    assert set(SWITCHES) & EVERYWHERE == set()

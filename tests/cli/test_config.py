"""The config file as a user of the commands meets it."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.checks import refused
from support.command import run

import mlxrunner
from mlxrunner import cli
from mlxrunner.cli.program import KEYS_ONLY
from mlxrunner.config.file import COMMANDS, EVERYWHERE, KEYS, REQUEST
from mlxrunner.sessions.store import SessionStore

DEMO = Path(mlxrunner.__file__).parent / "models" / "demo"
Write = Callable[[str], Path]


@pytest.fixture
def write(own_home: Path) -> Write:
    """Write the user's config file."""

    def written(text: str) -> Path:
        file = own_home / ".config" / "mlxrunner" / "config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return written


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the demo model that suggests its own sampling."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO, tmp_path / "model")
    suggested = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(suggested))
    return tmp_path / "model"


def test_the_layers_are_the_same_for_every_command(
    write: Write, model: Path, asked: list[tuple[Any, dict[str, Any]]]
) -> None:
    """Default, model, [options], the command, the model's section, and what is typed."""
    write(
        f"""
        model = "mine"
        [aliases]
        mine = "{model}"
        [options]
        top_p = 0.9
        max_tokens = 2
        reserve = false
        [chat]
        top_k = 7
        [generate]
        top_k = 8
        [batch]
        top_k = 9
        [models.mine]
        seed = 5
        """
    )
    Path("in.jsonl").write_text('{"prompt": "Hello!"}\n')
    typed = ("--min-p", "0.25")
    assert run("chat", *typed, stdin="Hello!\n").exit_code == 0
    assert run("generate", *typed, "Hello!").exit_code == 0
    batch = ("batch", "in.jsonl", "-o", "out.jsonl", "--parallel", 1, *typed)
    assert run(*batch).exit_code == 0
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
    chosen = [[options[name] for name in names] for _, options in asked]
    assert chosen == [[0.6, 0.9, top_k, 0.25, 5, 2] for top_k in (7, 8, 9)]


def test_what_is_typed_overrides_the_file(
    write: Write, asked: list[tuple[Any, dict[str, Any]]]
) -> None:
    """Also with the built-in default, and in a variable of the environment."""
    write('model = "no/such"\n[options]\ntemperature = 9\nmax_tokens = 2\nsystem = "Be brief."')
    assert run("generate", "--no-reserve", "Hi", MLXRUNNER_MODEL="demo").exit_code == 0
    assert run("generate", "-m", "demo", "--temperature", 0, "-s", "Hey", "Hi").exit_code == 0
    assert run("chat", "demo", "--greedy", stdin="Hi\n").exit_code == 0
    assert [options["temperature"] for _, options in asked] == [9, 0, 0]
    systems = [prompt[0]["content"] for prompt, _ in asked[:2]]
    assert systems == ["Be brief.", "Hey"]
    assert "no/such" in run("generate", "--no-reserve", "Hi").stderr


def test_set_gives_a_key_for_one_command(
    write: Write, asked: list[tuple[Any, dict[str, Any]]]
) -> None:
    """It overrides the file, as its flag does, and has the checks of the file."""
    write('[options]\ntop_k = 3\nmax_tokens = 2\n[prompts]\nterse = "Be brief."')
    given = ("--set", "top_k=5", "--set", "penalty-context=7", "--set", "system=@terse")
    variables = ("--set", "template={a = 1}", "--set", "stop=end of it")
    assert run("generate", *given, *variables, "Hi").exit_code == 0
    (prompt, options), *_ = asked
    assert (options["top_k"], options["penalty_context"], options["max_tokens"]) == (5, 7, 2)
    assert (options["template"], options["stop"]) == ({"a": 1}, ("end of it",))
    assert prompt[0]["content"] == "Be brief."


@pytest.mark.parametrize("text", ["true", "7", "1.50", "2024-11-26", "07"])
def test_set_takes_a_text_that_looks_like_another_value(
    asked: list[tuple[Any, dict[str, Any]]], text: str
) -> None:
    """Where the key takes a text, it is one as it was typed, without quotes."""
    given = ("--set", f"system={text}", "--set", f"stop={text}")
    assert run("generate", *given, "--set", "top_k=5.0", "Hi").exit_code == 0
    (prompt, options), *_ = asked
    assert (prompt[0]["content"], options["stop"], options["top_k"]) == (text, (text,), 5)


@pytest.mark.parametrize(
    ("command", "given", "problem"),
    [
        ("generate", "stop=[1]", "--set: stop: each stop string has to be a text of at least one"),
        ("generate", "top_k=true", "--set: top_k: True is not a whole number"),
        ("chat", "top_k", "--set top_k: it has to be NAME=VALUE; `mlxrunner config --keys` lists"),
        ("chat", "topk=1", "--set: there is no key 'topk' in [chat]: did you mean 'top_k'?"),
        ("generate", "top_k=many", "--set: top_k: 'many' is not a whole number"),
        ("generate", "top_k=" + "9" * 5000, "--set: top_k: '999"),
        ("generate", "top_k=" + "[" * 5000, "--set: top_k: '[[["),
        ("chat", "history=long", "--set: history: 'long' is not known, it has to be one of exact"),
        ("serve", "api_key=secret", "--set api_key: set that in the config file"),
        ("serve", "top_k=1", "--set top_k: set that in the config file"),
    ],
    ids=lambda text: text[:20],
)
def test_a_wrong_key_is_refused_before_a_model_is_loaded(
    command: str, given: str, problem: str
) -> None:
    refused(run(command, "-m", "/no/model", "--set", given), f"mlxrunner: {problem}")


MOVED = [(command, name) for command, names in KEYS_ONLY.items() for name in names.split()]


@pytest.mark.parametrize(("command", "name"), MOVED)
def test_a_flag_that_became_a_key_is_read_with_a_note(command: str, name: str) -> None:
    """The note says how to give the same value, which the command then takes."""
    found = cli.main.commands[command]
    option = next(one for one in found.params if one.name == name)
    assert isinstance(option, click.Option)
    assert option.hidden
    assert name in KEYS[command]
    typed = [] if option.is_flag else [{"wire": "all", "history": "template"}.get(name, "8")]
    words = ["in.jsonl"] if command == "batch" else []
    with CliRunner().isolation() as (_, err, _):
        given = found.make_context(command, [option.opts[0], *typed, *words]).params[name]
        note = err.getvalue().decode()
    flag, instead = note.split(" is read until version 0.4; use --set ")
    again = shlex.split(instead.partition(", or ")[0])
    assert flag == option.opts[0]
    assert found.make_context(command, ["--set", *again, *words]).params[name] == given


def test_keys_are_listed_with_what_they_mean() -> None:
    """Each once, in the section that may have it first; in JSON, too."""
    listed = json.loads(run("config", "--keys", "--json").stdout)
    assert set().union(*listed.values()) == set().union(*KEYS.values()) - KEYS[""]
    shown = run("config", "--keys").stdout
    assert all(name in shown for texts in listed.values() for name in texts)
    assert listed["serve"]["disk_cache"].startswith("false: discard evicted conversations")


def test_a_raw_prompt_takes_nothing_of_the_template_from_the_file(write: Write) -> None:
    """Only what is typed contradicts --raw."""
    write('[options]\nsystem = "x"\ntemplate = {a = 1}\nmax_tokens = 2\nreserve = false')
    assert run("generate", "--raw", "Hi").exit_code == 0
    assert run("generate", "--raw", "-s", "y", "Hi").exit_code == 2


def test_a_wrong_key_stops_every_command_that_reads_the_file(write: Write) -> None:
    """In one line, before anything is loaded; --help still helps."""
    file = write("[chat]\ntemprature = 1")
    for arguments in (("chat",), ("generate", "Hi"), ("config",), ("show", "demo")):
        refused(run(*arguments), f"mlxrunner: {file} line 2: there is no key 'temprature'")
    assert run("chat", "--help").exit_code == 0


def test_an_alias_names_a_model_everywhere(write: Write, model: Path) -> None:
    """It works as an option, an argument, and in the chat; a word like it is not asked."""
    write(f'[aliases]\nmine = "{model}"')
    assert run("show", "mine").exit_code == 0
    assert run("plan", "mine").exit_code == 0
    assert run("generate", "-m", "mine", "--no-reserve", "--greedy", "Hi").exit_code == 0
    imported = run("cache", "import", "nowhere", "--session", "new", "-m", "mine")
    assert "no such model" not in imported.stderr
    assert "nowhere" in imported.stderr
    chat = run("chat", "mine", "--no-reserve", stdin="/model demo\n/model mine\n")
    assert f"model: {model}, " in chat.stderr
    assert "mine may be a model or a prompt" in run("generate", "mine").stderr
    assert "mine: no such model" in run("show", "mine", MLXRUNNER_CONFIG="").stderr


def test_settings_of_the_chat_name_the_line_of_the_file(write: Write, model: Path) -> None:
    """A context of one model is not that of the next."""
    write(f'[aliases]\nmine = "{model}"\n[models.mine]\ncontext = 256\ntop_k = 3')
    said = "/set\n/model demo\n/set context\n/model mine\n/set context\n"
    lines = run("chat", "mine", "--no-reserve", stdin=said).stderr.splitlines()
    assert "context             256             (config.toml line 4)" in lines
    assert "top_k               3               (config.toml line 5)" in lines
    assert "top_p               0.95            (model)" in lines
    assert [line for line in lines if line.startswith("context =")] == [
        "context = 2048",
        "context = 256",
    ]


def test_system_prompts_have_names(
    write: Write, model: Path, asked: list[tuple[Any, dict[str, Any]]]
) -> None:
    """On the command line, in the file itself, and in /system."""
    write('[options]\nreserve = false\nmax_tokens = 2\n[chat]\nsystem = "@a"\n'
          '[prompts]\na = "Be a."\nb = "Be b."')  # fmt: skip  # as it is typed
    assert run("generate", "-s", "@b", "Hi").exit_code == 0
    assert asked[0][0][0] == {"role": "system", "content": "Be b."}
    chat = run("chat", stdin="/system\n/system @b\n/system @c\n/system\n")
    assert [line for line in chat.stderr.splitlines() if line.startswith("system")] == [
        "system prompt: Be a.",
        "system prompt: Be b.",
        "system prompt: Be b.",
    ]
    assert "there is no system prompt 'c'" in chat.stderr
    Path("in.jsonl").write_text('{"prompt": "Hi"}\n')
    assert run("batch", "in.jsonl", "-o", "o", "--parallel", 1, "--system", "@b").exit_code == 0
    assert "there is no system prompt 'x'" in run("batch", "in", "-o", "p", "--system", "@x").stderr


TEMPLATES = """
[options]
reserve = false
max_tokens = 2
[prompts]
brief = "Be brief."
[templates]
sum = "In {n} words:\\n{input}"
plain = "What is this?"
braces = "{{{input}}}"
broken = "{input"
[templates.sys]
prompt = "{input}!"
system = "@brief"
"""


@pytest.mark.exhaustive(20)
@pytest.mark.parametrize(
    ("arguments", "stdin", "messages"),
    [
        (["-t", "sum", "--prompt-var", "n=3", "Text"], "", ["In 3 words:\nText"]),
        (["-t", "sum", "--prompt-var", "n={input}"], "Text\n", ["In {input} words:\nText"]),
        (["-t", "sum", "--prompt-var", "n=3", "Text"], "more", ["In 3 words:\nText\n\nmore"]),
        (["-t", "plain"], "", ["What is this?"]),
        (["-t", "plain"], "a stone", ["What is this?\n\na stone"]),
        (["-t", "braces", "a{b}"], "", ["{a{b}}"]),
        (["-t", "sys", "Hi"], "", ["Be brief.", "Hi!"]),
        (["-t", "sys", "-s", "Own.", "Hi"], "", ["Own.", "Hi!"]),
    ],
)
def test_a_template_makes_the_prompt(
    write: Write,
    asked: list[tuple[Any, dict[str, Any]]],
    arguments: list[str],
    stdin: str,
    messages: list[str],
) -> None:
    """Braces of an input mean nothing, and what has no place follows the prompt."""
    write(TEMPLATES)
    assert run("generate", *arguments, stdin=stdin).exit_code == 0
    assert [one["content"] for one in asked[0][0]] == messages


@pytest.mark.exhaustive(20)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-t", "smu", "a"], "there is no prompt template 'smu' under [templates]"),
        (["-t", "sum", "a"], "template sum needs --prompt-var n=..."),
        (["-t", "sum", "--prompt-var", "n=1"], "template sum needs an input"),
        (["-t", "sum", "--prompt-var", "n=1", "--prompt-var", "m=2", "a"], "has no variable 'm'"),
        (["-t", "plain", "--prompt-var", "n=1"], "template plain has no variable 'n': it has none"),
        (["-t", "sum", "--prompt-var", "n", "a"], "--prompt-var n: it has to be NAME=VALUE"),
        (["-t", "sum", "--prompt-var", "input=1", "a"], "it has to be NAME=VALUE, and not input="),
        (["-t", "broken", "a"], "template broken: the prompt template has a '{' at character 0"),
        (["--prompt-var", "n=1", "a"], "--prompt-var fills a template: name it with -t NAME"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_template_that_cannot_be_filled_is_one_line(
    write: Write, arguments: list[str], said: str
) -> None:
    """Before a model is loaded."""
    write(TEMPLATES)
    refused(run("generate", *arguments), said)


def test_config_shows_what_holds_and_where_it_comes_from(write: Write, model: Path) -> None:
    """For people and as JSON."""
    assert "every option has its built-in default" in run("config").stdout
    assert "(there is none yet)" in run("config").stdout
    file = write(f'model = "m"\n[aliases]\nm = "{model}"\n[chat]\ntop_k = 3\n[prompts]\na = "A"')
    shown = run("config").stdout.splitlines()
    assert [" ".join(line.split()) for line in shown] == [
        f"file {file}",
        f"model {model}",
        f"aliases m = {model}",
        "system prompts @a",
        "temperature 0.6 (model) for chat, generate, batch, serve",
        "top_p 0.95 (model) for chat, generate, batch, serve",
        "top_k 3 (config.toml line 5) for chat",
        "top_k 20 (model) for generate, batch, serve",
    ]
    found = json.loads(run("config", "--json").stdout)
    assert found["options"]["chat"]["top_k"] == {"value": 3, "source": "config.toml line 5"}
    assert (found["file"], found["model"]) == (str(file), str(model))
    away = run("config", "no/such-model")
    assert "no/such-model (not on this machine yet)" in away.stdout


def test_resume_says_that_the_file_has_changed(write: Write, model: Path) -> None:
    """The answers of two settings are not mixed."""
    write("[batch]\nmax_tokens = 2\nreserve = false")
    Path("in.jsonl").write_text('{"prompt": "Hello!"}\n')
    batch = ("batch", "in.jsonl", "-o", "out.jsonl", "--parallel", 1)
    assert run(*batch).exit_code == 0
    write("[batch]\nmax_tokens = 3\nreserve = false")
    resumed = run(*batch, "--resume")
    assert resumed.exit_code == 2
    assert "another --max-tokens: 2 then, 3 now" in resumed.stderr


def test_a_session_does_not_keep_what_the_file_says(write: Write) -> None:
    """Only what the user has set in it."""
    write("[chat]\ntop_k = 3\nreserve = false\nno_cache_file = true")
    assert run("chat", "--session", "s", stdin="/set max_tokens 2\nHi\n").exit_code == 0
    assert SessionStore().load("s").settings["options"] == {"max_tokens": 2}


def test_every_key_is_an_option_of_its_command() -> None:
    """`reserve` and the switches, too. Requests to a server bring options of their own."""
    for command in COMMANDS:
        options = {str(option.name) for option in cli.main.commands[command].params}
        assert options >= KEYS[command] - ({*REQUEST} if command == "serve" else set())
    assert KEYS["options"] == EVERYWHERE


@pytest.mark.parametrize(
    ("model", "note"),
    [("somebody/something", "not on this machine yet"), ("nope", "there is no such model")],
)
def test_config_says_which_model_can_be_downloaded(own_home: Path, model: str, note: str) -> None:
    """A name without an owner is on no hub."""
    assert f"{model} ({note})" in run("config", model).stdout

"""The plugin for `llm`, tried with the real program in processes of its own.

One test starts it as a user does. The others are forks, without the second that its imports take.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.forking import run_program
from support.models import write_model, write_tokenizer
from support.tokenizers import CHATML
from support.waiting import PATIENCE_S

from mlxrunner.config.option import about
from mlxrunner.options import chat_options

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
IMPORTS = ("llm.default_plugins.openai_models", "mlxrunner.cli.llm_plugin")
"""Most of what `llm` imports. Importing them registers no plugin."""
AS_STARTED = """
import os, sys
from huggingface_hub import constants
constants.HF_HUB_CACHE = os.environ["HF_HUB_CACHE"]
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
"""
"""Read in a fork the variables that Python and the hub read when they start."""


class Llm:
    """Runs `llm` with a home of its own, and with the entry point as an installation has it."""

    def __init__(self, folder: Path) -> None:
        entry_points = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]["llm"]
        installed = folder / "site" / "as_installed-0.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: as-installed\nVersion: 0")
        lines = [f"{name} = {module}" for name, module in entry_points.items()]
        (installed / "entry_points.txt").write_text("\n".join(["[llm]", *lines]))
        places = [str(installed.parent), *map(os.path.abspath, filter(None, sys.path))]
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(places),
            "LLM_USER_PATH": str(folder / "llm"),
            "HF_HUB_CACHE": str(folder / "hub"),
        }

    def __call__(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return self.code("from llm.cli import cli; cli(prog_name='llm')", *arguments, stdin=stdin)

    def code(self, code: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run Python code in the place of `llm`."""
        given: dict[str, Any] = {"input": stdin, "text": True, "env": self.env}
        return run_program(
            "-c", AS_STARTED + code, *arguments, **given, timeout=PATIENCE_S, imports=IMPORTS
        )

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Start `llm`, not a fork."""
        return subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            capture_output=True,
            text=True,
            env=self.env,
            timeout=PATIENCE_S,
        )


@pytest.fixture
def run(tmp_path: Path) -> Llm:
    return Llm(tmp_path)


def cached(usage: str) -> int:
    """The cached tokens in what `llm -u` prints."""
    found = re.search(r'"cached_tokens": (\d+)', usage)
    assert found is not None, usage
    return int(found[1])


@pytest.mark.exhaustive(0)
def test_a_prompt_is_answered_with_its_usage(run: Llm) -> None:
    """The answer on stdout, and the counts that `llm -u` shows; the log has both."""
    result = run.start("-m", "mlxrunner/demo", "My name is Ana. What is my name?", "-u")
    assert (result.returncode, result.stdout) == (0, "Your name is Ana.\n")
    assert "Token usage: 29 input, 9 output" in result.stderr
    (logged,) = json.loads(run("logs", "--json").stdout)
    assert logged["model"] == "mlxrunner/demo"
    assert logged["response"] == "Your name is Ana."
    assert (logged["input_tokens"], logged["output_tokens"]) == (29, 9)
    assert logged["response_json"]["usage"]["outcome"] == "miss"


def test_a_chat_reuses_the_entry(run: Llm) -> None:
    """The second turn evaluates only what is new, and says how much was cached."""
    said = "My name is Zorblin.\nWhat is my name?\nexit\n"
    result = run("chat", "-m", "mlxrunner/demo", stdin=said)
    assert "Nice to meet you." in result.stdout
    assert "Your name is Zorblin." in result.stdout
    second, first = sorted(
        json.loads(run("logs", "--json").stdout), key=lambda one: -one["input_tokens"]
    )
    details = json.loads(second["token_details"])
    assert details["prompt_tokens_details"]["cached_tokens"] >= first["input_tokens"] - 1
    assert second["response_json"]["usage"]["outcome"] == "hit"


@pytest.mark.exhaustive(0)
def test_a_conversation_goes_on_in_another_process(run: Llm) -> None:
    """With `llm -c`: nothing is cached there, and the answer is the same."""
    run("-m", "mlxrunner/demo", "My name is Ana.")
    result = run("-c", "What is my name?", "-u")
    assert result.stdout == "Your name is Ana.\n"
    assert cached(result.stderr) == 0


def test_options_are_those_of_a_request(run: Llm) -> None:
    """With the same help, and the context of the runner beside them."""
    listed = " ".join(run("models", "--options", "-m", "mlxrunner/demo").stdout.split())
    for name, option in chat_options():
        kind = "array" if option.is_list else option.kind.__name__
        assert f"{name}: {kind} {option.help.split(' [default')[0]}" in listed
    assert f"context: int {about_context()}" in listed


def about_context() -> str:
    from mlxrunner.options import RunnerSettings

    return about(RunnerSettings.__dataclass_fields__["context"]).help.split(" [default")[0]


@pytest.mark.exhaustive(0)
def test_options_have_an_effect(run: Llm) -> None:
    """A limit, a stop text, a seed; without a stream, too."""
    limited = run("-m", "mlxrunner/demo", "Hello!", "-o", "max_tokens", "2", "--no-stream")
    assert len(limited.stdout) < len("Hello! How can I help you?")
    stopped = run("-m", "mlxrunner/demo", "Hello!", "-o", "stop", "How")
    assert stopped.stdout == "Hello! \n"
    sample = ["-m", "mlxrunner/demo", "Tell me.", "-o", "temperature", "2", "-o", "max_tokens", "9"]
    first, again = (run(*sample, "-o", "seed", "3").stdout for _ in range(2))
    assert first == again


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "temperature", "-3"], "temperature: -3.0 is out of range"),
        (["-o", "max_tokens", "many"], "max_tokens: 'many' is not a whole number"),
        (["-o", "nonsense", "1"], "nonsense"),
        (["-o", "context", "10"], "the prompt has 19 tokens, which leaves no room"),
        (["-a", str(PYPROJECT)], "does not support attachments"),
    ],
    ids=["range", "kind", "unknown", "context", "attachment"],
)
def test_what_is_wrong_is_said_without_a_traceback(
    run: Llm, arguments: list[str], said: str
) -> None:
    """The words are those of `llm`."""
    result = run("-m", "mlxrunner/demo", "Hello!", *arguments)
    assert result.returncode != 0
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.exhaustive(0)
def test_an_error_in_a_chat_is_one_line(run: Llm) -> None:
    """`llm chat` shows the traceback of any other error."""
    result = run("chat", "-m", "mlxrunner/demo", "-o", "context", "10", stdin="Hello!\n")
    assert result.returncode == 1
    assert result.stderr.startswith("Error: the prompt has 19 tokens")
    assert result.stderr.count("\n") == 1


@pytest.mark.exhaustive(0)
def test_a_schema_holds_the_answer(run: Llm) -> None:
    """`llm --schema` gives it."""
    options = ["-o", "max_tokens", "200", "-o", "temperature", "0"]
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    closed = json.dumps({**schema, "additionalProperties": False})
    result = run("-m", "mlxrunner/demo", "Hello!", "--schema", closed, *options)
    assert isinstance(json.loads(result.stdout)["ok"], bool)


@pytest.mark.exhaustive(0)
def test_models_of_the_cache_and_of_the_environment_are_listed(run: Llm, tmp_path: Path) -> None:
    """A directory has a name by MLXRUNNER_MODEL; every hub id that is in the cache has one."""
    (tmp_path / "hub" / "models--org--name").mkdir(parents=True)
    folder = tmp_path / "model"
    write_model(folder)
    run.env["MLXRUNNER_MODEL"] = str(folder)
    listed = re.findall(r"mlxrunner: (\S+)", run("models").stdout)
    assert listed == ["mlxrunner/demo", "mlxrunner/org/name", f"mlxrunner/{folder}"]
    answered = run("-m", f"mlxrunner/{folder}", "a", "-o", "max_tokens", "3", "-u")
    assert (answered.returncode, "3 output" in answered.stderr) == (0, True)


@pytest.mark.exhaustive(0)
def test_another_model_takes_the_place_of_the_first(run: Llm, tmp_path: Path) -> None:
    """One runner at a time; the same model with the same settings is not loaded again."""
    folder = tmp_path / "model"
    write_model(folder)
    write_tokenizer(folder, chat_template=CHATML)
    run.env["MLXRUNNER_MODEL"] = str(folder)
    code = (
        "import llm, json\n"
        "from mlxrunner.runner import Runner\n"
        "loads, load = [], Runner.load\n"
        "Runner.load = lambda *a, **k: loads.append(a) or load(*a, **k)\n"
        "def ask(name, **options):\n"
        "    return llm.get_model('mlxrunner/' + name).prompt('Hello!', max_tokens=3, **options)\n"
        "first = ask('demo').text()\n"
        "assert ask('demo').text() == first and len(loads) == 1\n"
        f"ask({str(folder)!r}).text()\n"
        "assert ask('demo', context=300).text() == first\n"
        "print(len(loads))\n"
    )
    result = run.code(code)
    assert (result.stdout, result.stderr) == ("3\n", "")


def test_nothing_but_llm_imports_the_plugin() -> None:
    """It is no dependency of this program."""
    project: dict[str, Any] = tomllib.loads(PYPROJECT.read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith("llm")]
    code = (
        "import sys; sys.modules['llm'] = None\n"
        "import mlxrunner.cli, mlxrunner.runner\n"
        "assert 'mlxrunner.cli.llm_plugin' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

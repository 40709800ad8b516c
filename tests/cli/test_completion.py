"""Completion as the shells ask for it: the real scripts in real shells."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.waiting import PATIENCE_S

from mlxrunner import cli
from mlxrunner.cli.describe import SHELLS, VARIABLE
from mlxrunner.config.names import known_models


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the command `mlxrunner`, a hub cache and a session; first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "mlxrunner"
    command.write_text(
        f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "
        '\'from mlxrunner.cli import main; main(prog_name="mlxrunner")\' "$@"\n'
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    for name in ("models--org--first", "models--org--second"):
        (tmp_path / "hub" / name).mkdir(parents=True)
    data = tmp_path / "data"
    (data / "sessions" / "trip").mkdir(parents=True)
    (data / "sessions" / "trip" / "conversation.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MLXRUNNER_DATA", str(data))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, filter(None, sys.path))))
    return folder


BASH = """
eval "$(mlxrunner completion bash)"
COMP_WORDS=({words}) COMP_CWORD={last}
_mlxrunner_completion mlxrunner
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ : }}
_describe() {{ print -l -- ${{(P)3}} }}
compadd() {{ print -l -- ${{(P)@[-1]}} }}
_path_files() {{ : }}
eval "$(mlxrunner completion zsh)"
words=({words}) CURRENT={next}
_mlxrunner_completion
"""
FISH = """
mlxrunner completion fish | source
complete --do-complete {line}
"""


def offered(shell: str, line: str) -> set[str]:
    """The words that `shell` offers at the end of a line."""
    words = line.split(" ")
    script = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell].format(
        words=" ".join(map(shlex.quote, words)),
        last=len(words) - 1,
        next=len(words),
        line=shlex.quote(line),
    )
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    found = subprocess.run(
        [shell, *options, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert found.stderr == ""
    return {word.split("\t")[0].split(":")[0] for word in found.stdout.split("\n") if word}


KNOWN_WITH_D = {name for name in known_models() if name.startswith("d") and ":" not in name}


@pytest.mark.exhaustive(9)
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mlxrunner gen", {"generate"}),
        ("mlxrunner models ", {"pull", "rm"}),
        ("mlxrunner generate --kv", {"--kv-bits"}),
        ("mlxrunner generate -m org/", {"org/first", "org/second"}),
        ("mlxrunner show d", {"demo", "demo-pictures", *KNOWN_WITH_D}),
        ("mlxrunner models rm org/first org/", {"org/second"}),
        ("mlxrunner chat --session t", {"trip"}),
        ("mlxrunner sessions rm ", {"trip"}),
        ("mlxrunner completion z", {"zsh"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_shell_offers_what_fits(program: Path, shell: str, line: str, words: set[str]) -> None:
    """Commands, options, models in the hub cache, saved sessions."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert offered(shell, line) == words


def test_a_path_is_completed_by_the_shell(program: Path) -> None:
    """Where no model has that name, it may be a directory."""
    asked = {VARIABLE: "bash_complete", "COMP_WORDS": "mlxrunner show ./mod", "COMP_CWORD": "2"}
    found = subprocess.run(
        ["mlxrunner"], capture_output=True, text=True, env={**os.environ, **asked}
    )
    assert (found.stdout, found.stderr) == ("dir,./mod\n", "")


def test_completion_imports_no_mlx(program: Path) -> None:
    """It answers at each press of Tab."""
    code = (
        "import sys; from mlxrunner.cli import main\n"
        "try: main(prog_name='mlxrunner')\n"
        "except SystemExit: pass\n"
        "assert not {'mlx', 'mlx_lm', 'transformers', 'numpy', 'rich'} & set(sys.modules)\n"
    )
    for words in ("mlxrunner show o", "mlxrunner chat --session t"):
        number = str(len(words.split()) - 1)
        asked = {VARIABLE: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}
        found = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, **asked},
        )
        assert (found.returncode, found.stderr) == (0, "")
        assert found.stdout.startswith("plain,")


def test_what_cannot_be_read_offers_nothing(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shell cannot show an error."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXRUNNER_DATA", str(tmp_path / "file"))
    assert offered("bash", "mlxrunner sessions show ") == set()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_static(shell: str) -> None:
    """It names the program, and holds none of its commands or models."""
    result = CliRunner().invoke(cli.main, ["completion", shell])
    assert result.exit_code == 0
    assert VARIABLE in result.stdout
    assert "generate" not in result.stdout

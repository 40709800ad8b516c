"""The table of exit codes in docs/commands.md: each row is held by a command that ends with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.waiting import PATIENCE_S

from mlxrunner import cli

TABLE = (Path(cli.__file__).parents[2] / "docs" / "commands.md").read_text()
EXAMPLE = Path(__file__).parents[1] / "profiling" / "example.jsonl"


def code(*arguments: str, stdin: str = "") -> int:
    return CliRunner().invoke(cli.main, arguments, input=stdin).exit_code


def damaged_session(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setenv("MLXRUNNER_DATA", str(folder))
    (folder / "sessions" / "bad").mkdir(parents=True)
    (folder / "sessions" / "bad" / "conversation.json").write_text("{")
    shown = {code("sessions", "show", "bad"), code("chat", "--session", "bad", stdin="Hello!\n")}
    (found,) = shown | {code("cache", "export", "bad", str(folder / "x.safetensors"))}
    return found


def bug(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setattr("mlxrunner.system.device.findings", lambda: 1 / 0)
    return code("doctor")


def ended_by(number: signal.Signals) -> Callable[[pytest.MonkeyPatch, Path], int]:
    def run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
        told = (
            "import os, signal\n"
            "from mlxrunner.profiling.report import summary\n"
            f"summary.Summary.add = lambda *given: os.kill(os.getpid(), {int(number)})\n"
            f"from mlxrunner.cli import main; main(['report', {str(EXAMPLE)!r}])\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", told],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )
        assert result.stderr == ""
        return result.returncode

    return run


def of_verify(verdict: str) -> Callable[[pytest.MonkeyPatch, Path], int]:
    """The command with a report whose `passed` is false, and whose `is_different` is as given."""

    def run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
        class Made:
            findings = type("Findings", (), {"checks": ()})()

            def run(self) -> object:
                return type("Report", (), {"passed": False, "is_different": verdict == "other"})()

        monkeypatch.setattr("mlxrunner.verify.verification.verification", lambda *a, **k: Made())
        return code("verify", "demo")

    return run


def gone_reader(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    """A pipe whose other end is closed: nobody wants the rest."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mlxrunner", "report", str(EXAMPLE)]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=PATIENCE_S)
    os.close(write)
    assert result.stderr == b""
    return result.returncode


CASES: dict[str, tuple[int, Callable[[pytest.MonkeyPatch, Path], int]]] = {
    "all is well": (0, lambda *_: code("--version")),
    "a full context": (
        1,
        lambda *_: code("generate", "-p", "Hello!", "--context", "22", "--overflow", "error"),
    ),
    "a bug": (1, bug),
    "a reader that is gone": (1, gone_reader),
    "no such option": (2, lambda *_: code("generate", "--nonsense")),
    "no such model": (2, lambda *_: code("show", "nowhere")),
    "a model that does not fit": (2, lambda *_: code("plan", "demo", "--context", "900000000")),
    "a damaged session": (2, damaged_session),
    "too low a hit rate": (3, lambda *_: code("report", str(EXAMPLE), "--min-hit-rate", "1")),
    "verify finds a difference": (4, of_verify("other")),
    "verify can prove nothing": (5, of_verify("none")),
    "the window is closed": (129, ended_by(signal.SIGHUP)),
    "Ctrl-C": (130, ended_by(signal.SIGINT)),
    "kill": (143, ended_by(signal.SIGTERM)),
}


@pytest.mark.exhaustive(len(CASES))
@pytest.mark.parametrize("case", CASES)
def test_a_command_ends_with_its_code(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected, run = CASES[case]
    assert run(monkeypatch, tmp_path) == expected


def test_the_table_lists_the_codes_that_are_held() -> None:
    """Not more, and not fewer."""
    section = TABLE.split("## Exit codes")[1].split("\n## ")[0]
    listed = {int(number) for number in re.findall(r"(?m)^\| (\d+) \|", section)}
    assert listed == {number for number, _ in CASES.values()}

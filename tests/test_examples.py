"""The programs in `examples/` run as they stand, each in under 40 lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ranks import free_port

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `mlxrunner` and a `claude` that prints what it is given, first on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    claude = 'echo "$ANTHROPIC_BASE_URL $*"'
    for name, line in (
        ("mlxrunner", f'exec "{sys.executable}" -m mlxrunner "$@"'),
        ("claude", claude),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("EVENTS", str(tmp_path / "events.jsonl"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def run(*words: object, stdin: str = "") -> str:
    """Return what an example prints."""
    done = subprocess.run(
        [str(word) for word in words], input=stdin, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_example_is_short_and_says_how_it_is_run() -> None:
    files = sorted(EXAMPLES.iterdir())
    assert [file.name for file in files] == [
        "ask_document.py",
        "claude_code.sh",
        "home_assistant.py",
        "label_csv.sh",
    ]
    for file in files:
        assert len(file.read_text().splitlines()) < 40
        assert f"examples/{file.name}" in file.read_text()


def test_a_batch_labels_a_table(programs: Path) -> None:
    table = programs / "reviews.csv"
    table.write_text("id,text\na,I like it.\nb,It broke.\n")
    printed = run("sh", EXAMPLES / "label_csv.sh", table)
    first, *rows = (line.split(",") for line in printed.splitlines())
    assert first == ["id", "text"]
    assert [row[0] for row in rows] == ["a", "b"]
    assert {row[1] for row in rows} <= {"good", "bad"}
    assert run("sh", EXAMPLES / "label_csv.sh", table) == printed


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize("choices", [["--choices", "yes,no"], []], ids=["choices", "free"])
def test_questions_about_a_document_evaluate_it_once(programs: Path, choices: list[str]) -> None:
    (programs / "book.txt").write_text("The river is wide. " * 60)
    (programs / "asked.txt").write_text("Is it wide?\nIs it long?\nIs it blue?\n")
    words = [EXAMPLES / "ask_document.py", programs / "book.txt", programs / "asked.txt"]
    text = run(sys.executable, *words, *choices)
    reused = [line.split() for line in text.splitlines() if "tokens reused" in line]
    assert [int(words[0]) / int(words[2]) > 0.9 for words in reused] == [False, True, True]


@pytest.mark.parametrize("name", ["claude_code.sh", "label_csv.sh"])
def test_a_script_without_arguments_says_which_it_takes(name: str) -> None:
    done = subprocess.run(["sh", str(EXAMPLES / name)], capture_output=True, text=True)
    assert done.returncode != 0
    assert f": give a {'model' if name.startswith('claude') else 'table'}: sh" in done.stderr


@pytest.mark.exhaustive(0)
def test_claude_code_is_started_on_a_server_of_its_own(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends with it."""
    port = free_port(1)
    monkeypatch.setenv("PORT", str(port))
    text = run("sh", EXAMPLES / "claude_code.sh", "demo", "-p", "hi")
    assert text.splitlines()[0].startswith(f"http://127.0.0.1:{port}")
    assert "-p hi" in text


@pytest.fixture
def server(programs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    port = free_port(1)
    words = ["mlxrunner", "serve", "demo", "--port", str(port), "--no-disk-cache"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while f":{port}" not in process.stderr.readline():
            assert process.poll() is None
        monkeypatch.setenv("MLXRUNNER_URL", f"http://127.0.0.1:{port}")
        yield
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.exhaustive(0)
def test_a_home_is_told_what_to_do(server: None) -> None:
    """Each answer has the form, and the second reuses the instructions."""
    text = run(sys.executable, EXAMPLES / "home_assistant.py", stdin="Light on\nOpen the door\n")
    lines = text.splitlines()
    assert len(lines) == 2
    assert all("'device'" in line and "'action'" in line for line in lines)
    assert int(lines[1].rpartition(": ")[2].rstrip("}")) > 40

"""Failures of a model's code are errors of that model, whatever they are; Ctrl-C is none."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.models import change_json, error_line, tiny_config, write_model

from mlxrunner import ModelError, Runner, cli
from mlxrunner.loading import plan_model
from mlxrunner.models.load import describe, load_model, tokenizer_of
from mlxrunner.system.foreign import ForeignError, failures_as_errors, foreign_code
from mlxrunner.terminal.control import Interrupts, orderly_end


def in_a_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("in_thread", [False, True])
def test_an_end_that_code_asks_for_is_an_error(
    failure: BaseException, in_thread: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has what the code said last, and nothing is printed."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            with foreign_code():
                print("first")
                print("install something")
                raise failure
        except BaseException as error:
            found.append(error)

    in_a_thread(run) if in_thread else run()
    assert type(found[0]) is ForeignError
    assert "tried to end the program by" in str(found[0])
    assert str(found[0]).endswith("and said 'install something'")
    assert capfd.readouterr() == ("", "")


def own_handler(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("handler", [signal.default_int_handler, own_handler])
def test_ctrl_c_is_not_an_error_of_the_model(handler: Any) -> None:
    """Neither Python's handler nor that of a program that uses this library."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt), foreign_code():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_that_commands_handle_pass() -> None:
    """Ctrl-C in a command, and the SystemExit of `kill`."""
    with (
        Interrupts() as interrupts,
        interrupts.listening(),
        pytest.raises(KeyboardInterrupt),
        failures_as_errors(),
    ):
        signal.raise_signal(signal.SIGINT)
    with orderly_end(), pytest.raises(SystemExit), failures_as_errors():
        signal.raise_signal(signal.SIGTERM)


def test_other_threads_may_print_where_there_is_no_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what they print, as it does without foreign code."""
    monkeypatch.setattr(sys, "stdout", None)
    failed = list[BaseException]()

    def say() -> None:
        try:
            print("nobody hears this")
        except BaseException as error:
            failed.append(error)

    with foreign_code():
        in_a_thread(say)
    assert failed == []


def test_what_code_prints_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output has answers only. Other threads print as before."""
    with foreign_code():
        print("a note \x1b[1m")
        in_a_thread(lambda: print("an answer"))
    assert capfd.readouterr() == ("an answer\n", "a note \\x1b[1m\n")


@pytest.fixture
def folder(folder: Path) -> Path:
    """A folder of an OLMo, whose module of mlx-lm prints and calls `sys.exit` at import."""
    (folder / "config.json").write_text(json.dumps(tiny_config(model_type="olmo")))
    return folder


@pytest.mark.parametrize(
    "read",
    [load_model, Runner.load, describe, plan_model, tokenizer_of],
    ids=["load_model", "Runner.load", "show", "plan", "tokenizer"],
)
def test_a_model_that_ends_the_program_is_refused(
    read: Callable[[str], Any], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message has the module's own advice."""
    said = error_line(ModelError, read, str(folder))
    assert "pip install ai2-olmo" in said
    assert (read is tokenizer_of) == ("no tokenizer" in said)
    assert capfd.readouterr() == ("", "")


def test_one_such_model_does_not_end_the_list(folder: Path, cache_repository: Any) -> None:
    """`models` prints the others, and why this one can't be run."""
    cache_repository("org/olmo", partial(shutil.copytree, folder, dirs_exist_ok=True))
    cache_repository("org/llama", write_model)
    result = CliRunner().invoke(cli.main, ["models"])
    assert result.exit_code == 0, result.output
    first, second = sorted(result.stdout.splitlines(), key=lambda line: "olmo" in line)
    assert "org/llama" in first
    assert first.endswith("fits")
    assert "can't be run" in second
    assert "ai2-olmo" in second


def test_a_draft_model_that_ends_the_program_is_refused(folder: Path) -> None:
    """The error is one of the draft model."""
    with pytest.raises(ModelError, match="ai2-olmo"):
        Runner.load("demo", draft_model=str(folder), reserve=False)


@pytest.mark.parametrize("place", ["import", "build", "forward"])
def test_code_of_a_model_itself_is_held_to_the_same(tmp_path: Path, place: str) -> None:
    """With trust_remote_code a model may bring any code."""
    write_model(tmp_path)
    change_json(tmp_path / "config.json", model_file="own.py")
    leaving = {place: "sys.exit(1)"}
    (tmp_path / "own.py").write_text(
        "import sys\n"
        "from mlx_lm.models import llama\n"
        f"{leaving.get('import', 'pass')}\n"
        "class Model(llama.Model):\n"
        "    def __init__(self, args):\n"
        f"        {leaving.get('build', 'pass')}\n"
        "        super().__init__(args)\n"
        "    def __call__(self, *args, **more):\n"
        f"        {leaving.get('forward', 'pass')}\n"
        "        return super().__call__(*args, **more)\n"
        "ModelArgs = llama.ModelArgs\n"
    )
    with pytest.raises(ModelError, match="tried to end the program"):
        load_model(str(tmp_path), trust_remote_code=True)

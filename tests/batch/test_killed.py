"""Runs that are killed or interrupted at any moment continue without loss or repeated work."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.batches import OUT, STORE, TYPED, lines, resume, run, unbroken
from support.forking import Program
from support.waiting import PATIENCE_S, until

from mlxrunner.batch.store import Store

KILLS = 14
COMMAND = ("batch", *map(str, TYPED), "--no-reserve")


@pytest.mark.exhaustive(0)
def test_a_run_killed_at_many_random_points_equals_an_unbroken_one(folder: Path) -> None:
    """The file after SIGKILL at any stage equals the unbroken one, and is never wrong before."""
    Path("one.jsonl").write_text(lines(1))
    Path("in.jsonl").write_text(lines(500, broken=(7, 61)))
    expected = unbroken("--context", 128)
    chosen, done = random.Random(1), []
    options = "--no-usage --no-reserve --context 128 --parallel 1 --resume -q".split()
    beginning = {}
    for as_user in (True, False):
        began = time.monotonic()
        assert begun("one.jsonl", f"{as_user}.jsonl", *options, as_user=as_user).wait() == 0
        beginning[as_user] = time.monotonic() - began
    for kill in range(KILLS):
        as_user = kill == 9
        process = begun("in.jsonl", "out.jsonl", *options, as_user=as_user)
        wait_for_commits(
            1 + (kill in (6, 12)),
            STORE,
            at_most=PATIENCE_S if kill % 5 == 3 else chosen.uniform(0, 1.5 * beginning[as_user]),
        )
        time.sleep(chosen.uniform(0, 0.05))
        process.kill()
        ended = process.wait()
        assert ended == -signal.SIGKILL, "it ended before it was killed: give it more lines"
        assert expected.startswith(OUT.read_bytes() if OUT.exists() else b"")
        # Each second time it is left to the program to look at its store first.
        if kill % 2 and STORE.exists():
            with Store.open(STORE) as store:
                done.append(store.counts.done)
    assert begun("in.jsonl", "out.jsonl", *options, as_user=True).wait() == 3  # of broken lines
    assert OUT.read_bytes() == expected
    assert not STORE.exists()
    assert done == sorted(done)
    assert len(set(done)) > 2, "it was never killed in the middle"


def test_a_killed_shard_equals_an_unbroken_one(folder: Path) -> None:
    """The store of a shard has its lines only, and continues like that of a whole batch."""
    Path("in.jsonl").write_text(lines(120, broken=(7, 61)))
    options = ["--shard", "2/2", "--no-usage", "--context", "128", "--parallel", "1", "-q"]
    assert run("in.jsonl", "-o", "whole.jsonl", *options).exit_code in (0, 3)
    expected, output, done = Path("whole.jsonl").read_bytes(), OUT, [0]
    output.touch()
    options += ["--no-reserve", "--order", "input", "--resume"]
    for _ in range(2):
        process = begun("in.jsonl", "out.jsonl", *options)
        until(partial(has_grown, output, output.stat().st_size))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert expected.startswith(output.read_bytes())
        with Store.open(STORE) as store:
            done.append(store.counts.done)
    assert begun("in.jsonl", "out.jsonl", *options).wait() in (0, 3)
    assert output.read_bytes() == expected
    assert done == sorted(set(done)), "each run answered more"


def has_grown(output: Path, before: int) -> bool:
    return output.stat().st_size > before


def wait_for_commits(count: int, store: Path, *, at_most: float) -> None:
    """Wait until the store has changed `count` times after its input, or `at_most` seconds."""

    def state() -> int:
        return store.stat().st_mtime_ns if store.exists() else 0

    end, last, seen = time.monotonic() + at_most, state(), 0
    was_there = bool(last) and store.stat().st_size > 60_000
    while time.monotonic() < end and seen < count + (not was_there):
        time.sleep(0.002)
        now = state()
        seen, last = seen + (now != last), now


def begun(source: str, target: str, *options: str, as_user: bool = False) -> Any:
    """Start the command, as a user does or as a fork."""
    start = subprocess.Popen if as_user else Program
    return start([sys.executable, "-m", "mlxrunner", "batch", source, "-o", target, *options])


def test_killed_while_it_read_the_input(folder: Path) -> None:
    """There is a store without an input: it begins again, with --resume and without."""
    expected = unbroken()
    for arguments in (["--resume"], []):
        Store.create(STORE).close()
        run(*TYPED, *arguments)
        assert OUT.read_bytes() == expected
        OUT.unlink()


@pytest.mark.exhaustive(0)
def test_a_closed_window_ends_a_run_that_says_how_to_go_on(folder: Path) -> None:
    """The answers before it stay, and the rest equals an unbroken run."""
    expected = unbroken("--context", 128)
    command = [*COMMAND, "--context", "128", "--order", "input"]
    code = (
        "import time\nfrom mlxrunner.batch import output\nfrom mlxrunner.cli import main\n"
        "output.SHORTEST_S = output.SHARE = 0\n"
        "flush, waited = output.AnswerWriter.flush, []\n"
        "def slow(self):\n"
        "    flush(self)\n"
        "    if self.output.size and not waited:\n"
        "        waited.append(True)\n"  # first, because the signal comes once the file is there
        "        open('waits', 'w').close()\n"
        "        time.sleep(3600)\n"
        "output.AnswerWriter.flush = slow\n"
        "main()\n"
    )
    process = Program([sys.executable, "-c", code, *command], stderr=subprocess.PIPE, text=True)
    until(lambda: Path("waits").exists() or process.poll() is not None)
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGHUP, said
    assert said.splitlines()[-1] == f"to continue: mlxrunner {' '.join(command)} --resume"
    assert 0 < len(OUT.read_bytes()) < len(expected)
    assert expected.startswith(OUT.read_bytes())
    assert run(*command[1:], "--resume").exit_code == 3  # of the broken line
    assert OUT.read_bytes() == expected


@pytest.mark.exhaustive(0)
def test_nohup_protects_a_run(folder: Path) -> None:
    """A window that is closed does not end it."""
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code += "from mlxrunner.cli import main; main()"
    process = Program([sys.executable, "-c", code, *COMMAND, "-q"])
    until(lambda: OUT.exists() or process.poll() is not None)
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE_S) == 3  # of the broken line
    assert len(OUT.read_text().splitlines()) == 12


# The program, which writes each answer at once, and makes a file once one has thirty tokens.
TELLS = """
from pathlib import Path
from mlxrunner.batch import output
from mlxrunner.cli import main
from mlxrunner.runner import Runner

output.SHORTEST_S = output.SHARE = 0
generate = Runner.generate

def told(self, *arguments, **options):
    for number, chunk in enumerate(generate(self, *arguments, **options), 1):
        if number == 30:
            Path("thirty").touch()
        yield chunk

Runner.generate = told
main()
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    """The command on its way: its first answers are there."""
    command = [sys.executable, "-c", TELLS, *COMMAND, *arguments]
    process = Program(command, stderr=subprocess.PIPE, text=True)
    until(lambda: (OUT.exists() and OUT.stat().st_size) or process.poll() is not None)
    return process


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_kill_finish_the_current_line_and_say_how_to_go_on(
    folder: Path, number: signal.Signals
) -> None:
    """Exit code 1; the same command with --resume does the rest."""
    Path("in.jsonl").write_text(lines(24))
    expected = unbroken("--order", "input")
    process = started("--order", "input")
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 1
    assert "finishing the lines that are running" in said
    typed = " ".join(["mlxrunner", *COMMAND, "--order input --resume"])
    assert f"to continue: {typed}\n" in said
    with Store.open(STORE) as store:
        assert 0 < store.counts.done < 24
        assert len(OUT.read_bytes().splitlines()) == store.counts.done
    assert expected.startswith(OUT.read_bytes())
    assert resume("--order", "input").exit_code == 0
    assert OUT.read_bytes() == expected


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGTERM, signal.SIGINT, 130),
    ],
)
def test_a_second_ctrl_c_or_kill_stops_at_once(
    folder: Path, first: signal.Signals, second: signal.Signals, code: int
) -> None:
    """In the middle of an answer, which is not written; what was finished is not lost."""
    long = [
        {"prompt": "Hello!", "max_tokens": 2},
        {"prompt": "Zebra", "stop_tokens": [], "max_tokens": 1900},
    ]
    Path("in.jsonl").write_text("\n".join(map(json.dumps, long)))
    process = started()
    until(lambda: Path("thirty").exists() or process.poll() is not None)
    process.send_signal(first)
    assert process.stderr is not None
    while "finishing the lines" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(second)
    _, said = process.communicate()
    assert process.returncode == code
    assert "to continue: " in said
    assert "Traceback" not in said
    assert len(OUT.read_bytes().splitlines()) == 1

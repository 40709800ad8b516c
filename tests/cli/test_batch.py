"""`mlxrunner batch` as a user meets it: what it answers, with which options, and its exit codes.

Kills are in tests/batch/test_killed.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.architectures import build, settings_of
from support.batch_command import FACTS, answers, openai, run, write
from support.checks import ends
from support.engine import Engine
from support.models import save_model, write_tokenizer

from mlxrunner import cli
from mlxrunner.profiling.profile import Profile

pytestmark = pytest.mark.usefixtures("folder")


def test_a_batch_passes_its_memory_and_step_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To the runner of several lines, whose cells are those that fit into the memory."""
    seen: list[Engine] = []
    opened = Engine.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, *arguments: Any, **settings: Any) -> Engine:
        seen.append(opened(cls, *arguments, **settings))
        return seen[-1]

    monkeypatch.setattr(Engine, "of", classmethod(of))
    lines = [{"prompt": f"Line {number}: {'word ' * 20}", "max_tokens": 3} for number in range(6)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for given in ([], ["--cache-memory", "1500000", "--max-step-ms", "50"]):
        command = ["batch", str(source), "-o", str(tmp_path / f"{len(given)}.jsonl"), *given]
        ends(CliRunner().invoke(cli.main, [*command, "--parallel", "3", "--no-reserve"]), 0)
    free, bounded = (runner.settings for runner in seen)
    assert (free["cache_memory"], free["max_step_ms"]) == (None, 0)
    assert (bounded["cache_memory"], bounded["max_step_ms"]) == (1500000, 50)
    assert bounded["kv_cache_tokens"] < free["kv_cache_tokens"]
    wrong = CliRunner().invoke(cli.main, [*command[:4], "--cache-memory", "0"])
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "mlxrunner: cache_memory: 0 is out of range, it has to be at least 1\n",
    )


def test_questions_about_facts_are_answered_in_the_order_of_the_input() -> None:
    """The demo model recalls its facts in input order, in a private file, and the store goes."""
    asked = [
        ("ana", f"{FACTS[0]} What is my name?"),
        ("zorblin", f"{FACTS[1]} What is my name?"),
        ("hello", "Hello!"),
    ]
    result = run(write(*({"id": name, "prompt": text} for name, text in asked)), "-o", "out.jsonl")
    assert (result.exit_code, result.stdout) == (0, "")
    found = answers()
    assert [(line["id"], line["index"], line["text"]) for line in found] == [
        ("ana", 0, "Your name is Ana."),
        ("zorblin", 1, "Your name is Zorblin."),
        ("hello", 2, "Hello! How can I help you?"),
    ]
    assert all(
        line["finish_reason"] == "stop" and line["usage"]["completion_tokens"] > 2 for line in found
    )
    assert "3 lines in " in result.stderr
    assert sorted(path.name for path in Path().iterdir() if path.is_file()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.done",
    ]


def test_one_at_a_time_each_line_reuses_what_it_shares_with_the_one_before() -> None:
    """The evaluated tokens add up to what --plan says is the best."""
    lines = [
        {"prompt": f"{fact} {question}"}
        for question in ("What is my name?", "How are you?", "Hello!")
        for fact in FACTS
    ]
    run(write(*lines), "-o", "out.jsonl", "--parallel", 1)
    planned = json.loads(run("in.jsonl", "--plan", "--json").stdout)
    evaluated = sum(line["usage"]["evaluated_tokens"] for line in answers())
    assert (
        evaluated
        == planned["evaluated_in_prefix_order"]
        == planned["evaluated_at_best"]
        < planned["evaluated_in_input_order"]
    )


@pytest.mark.exhaustive(2)
@pytest.mark.parametrize("lanes", [None, 1, 2, 8])
def test_any_number_at_a_time_gives_the_same_file(lanes: int | None) -> None:
    """Without usage the file is equal byte for byte; stderr says how many unless one was asked."""
    lines = [
        {"prompt": f"{FACTS[i % 2]} What is my name?", "temperature": 0.9 * (i % 3 == 0), "seed": i}
        for i in range(7)
    ]
    write(*lines)
    run("in.jsonl", "-o", "one.jsonl", "--parallel", 1, "--no-usage")
    result = run(
        "in.jsonl", "-o", "out.jsonl", "--no-usage", *(["--parallel", lanes] if lanes else [])
    )
    assert result.exit_code == 0
    assert Path("out.jsonl").read_bytes() == Path("one.jsonl").read_bytes()
    expected = {None: "7 lines at a time", 1: None, 2: "2 lines at a time", 8: "7 lines at a time"}[
        lanes
    ]
    assert ("at a time" in result.stderr) == bool(expected)
    assert (expected or "") in result.stderr


@pytest.mark.parametrize(
    ("typed", "step"),
    [((), 256), (("--prefill-step", 64), 64), (("--prefill-step", 2048), 2048)],
    ids=str,
)
def test_several_at_a_time_have_steps_as_asked(
    typed: tuple[object, ...], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --prefill-step they have a default of their own."""
    seen: list[Any] = []
    monkeypatch.setattr(Profile, "watch", lambda self, runner: seen.append(runner.settings))
    lines = write(*[{"prompt": f"{FACTS[0]} What is my name? {i}"} for i in range(2)])
    assert run(lines, "-o", "out.jsonl", "--parallel", 2, *typed).exit_code == 0
    assert [settings["prefill_step"] for settings in seen] == [step]


def test_a_model_that_cannot_run_several_runs_one_at_a_time_and_says_why() -> None:
    """GPT-2 adds the number of a token in its row to a position that is a number."""
    save_model(Path("gpt2"), build("gpt2"), settings_of("gpt2"))
    write_tokenizer(Path("gpt2"))
    ends(
        run(
            write(*[{"prompt": "ab", "max_tokens": 2}] * 3),
            "-o",
            "out.jsonl",
            "-m",
            "gpt2",
            "--parallel",
            3,
            "--context",
            64,
        ),
        0,
        "one line at a time: layer 0: this model can't run several sequences",
    )
    assert len({line["text"] for line in answers()}) == 1


def test_options_of_the_command_are_those_of_lines_that_do_not_say_otherwise() -> None:
    lines = [
        {"prompt": "Hello!"},
        {"prompt": "Hello!", "max_tokens": 5},
        {"prompt": "Hello!", "system": "The user's name is Bo."},
    ]
    run(write(*lines), "-o", "out.jsonl", "--max-tokens", 2, "--system", "The user's name is Ana.")
    assert [line["usage"]["completion_tokens"] for line in answers()] == [2, 5, 2]
    assert len({line["usage"]["prompt_tokens"] for line in answers()}) == 2
    run("in.jsonl", "-o", "raw.jsonl", "--raw")
    assert (
        answers("raw.jsonl")[0]["usage"]["prompt_tokens"] < answers()[0]["usage"]["prompt_tokens"]
    )


def test_sampling_options_reach_the_model_and_each_line_has_a_seed_of_its_own() -> None:
    """--seed S is S + i for line number i."""
    write(*[{"prompt": "Hello!"}] * 3, {"prompt": "Hello!", "seed": 9})
    run(
        "in.jsonl",
        "-o",
        "out.jsonl",
        "--temperature",
        3,
        "--seed",
        9,
        "--max-tokens",
        12,
        "--stop",
        "zzz",
    )
    texts = [line["text"] for line in answers()]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3
    one = CliRunner().invoke(
        cli.main,
        "generate -p Hello! --temperature 3 --seed 10 --max-tokens 12 --json".split(),
    )
    assert json.loads(one.stdout)["text"] == texts[1]


BROKEN = [
    "{broken",
    {"id": 1},
    {"prompt": "Hello!", "promt": 1},
    {"prompt": "Hello!", "top_p": 3},
    {"prompt": "x " * 3000},
    "[1]",
    '"text"',
]


def test_bad_lines_get_an_error_with_their_number_and_stop_nothing() -> None:
    """Exit code 1, and a summary that shows the first."""
    result = run(write({"prompt": "Hello!"}, *BROKEN, "", {"prompt": "Hello!"}), "-o", "out.jsonl")
    found = answers()
    assert [("error" in line, line["index"]) for line in found] == [
        (0 < i < 8, i) for i in range(9)
    ]
    assert [line["error"].split(":")[0] for line in found[1:8]] == [
        f"line {i}" for i in range(2, 9)
    ]
    for error, said in zip(
        found[1:8],
        ["not JSON", "no", "promt", "top_p: 3", "leaves no room in the context", "", ""],
        strict=True,
    ):
        assert said in error["error"]
    ends(result, 3, "7 of 9 lines failed, the first: line 2: not JSON")


def test_only_bad_lines_need_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their errors are written."""
    monkeypatch.setattr(
        "mlxrunner.batch.work.open_runner", lambda *arguments: pytest.fail("a model is loaded")
    )
    assert run(write(*BROKEN), "-o", "out.jsonl").exit_code == 3
    assert len(answers()) == len(BROKEN)


def test_strict_runs_nothing_if_a_line_is_bad() -> None:
    """Exit code 2, one line, no files."""
    result = run(write({"prompt": "Hello!"}, *BROKEN), "-o", "out.jsonl", "--strict")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "mlxrunner: 7 of 8 lines can't be run, the first: line 2: not JSON"
    )
    assert not Path("out.jsonl").exists()
    assert not Path("out.jsonl.run").exists()
    assert run(write({"prompt": "Hello!"}), "-o", "out.jsonl", "--strict").exit_code == 0


def test_max_errors_stops_and_can_be_gone_on_with() -> None:
    """With the command that it prints: it counts what failed since."""
    write({"prompt": "Hello!"}, *BROKEN)
    ends(
        run("in.jsonl", "-o", "out.jsonl", "--max-errors", 3, "--order", "input"),
        1,
        "stopped: 4 of 8 lines are done (--max-errors 3)",
        "to continue: ",
    )
    assert len(answers()) == 4
    for code, written in ((1, 7), (3, 8)):
        result = run(
            "in.jsonl", "-o", "out.jsonl", "--max-errors", 3, "--order", "input", "--resume"
        )
        assert (result.exit_code, len(answers())) == (code, written)
    assert "to continue: " not in result.stderr


def test_the_first_error_is_that_of_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of the first line, broken or failed, also in a run that goes on."""

    def fall(deadline: object, *reached: int) -> None:
        raise ValueError("it fell")

    monkeypatch.setattr("mlxrunner.batch.execution.Deadline.__call__", fall)
    lines = [openai("q1", "Hello!"), "{not JSON", openai("q2", "Hello!")]
    result = run(write(*lines), "-o", "out.jsonl", "--parallel", 1, "--max-errors", 2)
    assert "2 of 3 lines failed, the first: line 1: ValueError: it fell" in result.stderr
    result = run("in.jsonl", "-o", "out.jsonl", "--parallel", 1, "--resume")
    assert "3 of 3 lines failed, the first: line 1: ValueError: it fell" in result.stderr

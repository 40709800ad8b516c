"""`mlxrunner batch` as a user meets it: what it answers, with which options, and its exit codes.

Kills are in tests/batch/test_killed.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.architectures import build, settings_of
from support.batch_command import FACTS, answers, openai, run, run_lines, write
from support.checks import ends
from support.command import run as generate
from support.engine import Engine
from support.models import save_model, write_tokenizer

from mlxrunner.profiling.profile import Profile

pytestmark = pytest.mark.usefixtures("folder")


def test_a_batch_passes_its_memory_and_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the runner of several lines, whose cells are those that fit into the memory."""
    seen: list[Engine] = []
    opened = Engine.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, *arguments: Any, **settings: Any) -> Engine:
        seen.append(opened(cls, *arguments, **settings))
        return seen[-1]

    monkeypatch.setattr(Engine, "of", classmethod(of))
    write(*({"prompt": f"Line {n}: {'word ' * 20}", "max_tokens": 3} for n in range(6)))
    for name, given in (("free", ""), ("bounded", "--cache-memory 1500000 --max-step-ms 50")):
        ends(run(f"in.jsonl -o {name}.jsonl --parallel 3 --no-reserve {given}"), 0)
    free, bounded = (runner.settings for runner in seen)
    assert (free["cache_memory"], free["max_step_ms"]) == (None, 0)
    assert (bounded["cache_memory"], bounded["max_step_ms"]) == (1500000, 50)
    assert bounded["kv_cache_tokens"] < free["kv_cache_tokens"]
    wrong = run("in.jsonl -o out.jsonl --cache-memory 0")
    said = "mlxrunner: cache_memory: 0 is out of range, it has to be at least 1\n"
    assert (wrong.exit_code, wrong.stderr) == (2, said)


def test_questions_about_facts_are_answered_in_the_order_of_the_input() -> None:
    """The demo model recalls its facts in input order, in a private file, and the store goes."""
    asked = {"ana": f"{FACTS[0]} What is my name?", "zorblin": f"{FACTS[1]} What is my name?"}
    asked["hello"] = "Hello!"
    result = run_lines("", *({"id": name, "prompt": text} for name, text in asked.items()))
    assert (result.exit_code, result.stdout) == (0, "")
    found = answers()
    assert [(line["id"], line["index"], line["text"]) for line in found] == [
        ("ana", 0, "Your name is Ana."),
        ("zorblin", 1, "Your name is Zorblin."),
        ("hello", 2, "Hello! How can I help you?"),
    ]
    assert {line["finish_reason"] for line in found} == {"stop"}
    assert all(line["usage"]["completion_tokens"] > 2 for line in found)
    assert "3 lines in " in result.stderr
    files = sorted(path.name for path in Path().iterdir() if path.is_file())
    assert files == ["in.jsonl", "out.jsonl", "out.jsonl.done"]


def test_one_at_a_time_each_line_reuses_what_it_shares_with_the_one_before() -> None:
    """The evaluated tokens add up to what --plan says is the best."""
    questions = ("What is my name?", "How are you?", "Hello!")
    prompts = [f"{fact} {question}" for question in questions for fact in FACTS]
    run_lines("--parallel 1", *({"prompt": prompt} for prompt in prompts))
    planned = json.loads(run("in.jsonl --plan --json").stdout)
    evaluated = sum(line["usage"]["evaluated_tokens"] for line in answers())
    assert planned["evaluated_in_prefix_order"] == planned["evaluated_at_best"] == evaluated
    assert evaluated < planned["evaluated_in_input_order"]


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    ("lanes", "said"),
    [
        ("", "7 lines at a time"),
        ("--parallel 1", None),
        ("--parallel 2", "2 lines at a time"),
        ("--parallel 8", "7 lines at a time"),
    ],
)
def test_any_number_at_a_time_gives_the_same_file(lanes: str, said: str | None) -> None:
    """Without usage the file is equal byte for byte; stderr says how many unless one was asked."""
    write(
        *(
            {"prompt": f"{FACTS[i % 2]} What is my name?", "temperature": 0.9 * (i % 3 == 0)}
            | {"seed": i}
            for i in range(7)
        )
    )
    run("in.jsonl -o one.jsonl --parallel 1 --no-usage")
    result = run(f"in.jsonl -o out.jsonl --no-usage {lanes}")
    assert result.exit_code == 0
    assert Path("out.jsonl").read_bytes() == Path("one.jsonl").read_bytes()
    assert ("at a time" in result.stderr) == bool(said)
    assert (said or "") in result.stderr


@pytest.mark.parametrize(
    ("typed", "step"), [("", 256), ("--prefill-step 64", 64), ("--prefill-step 2048", 2048)]
)
def test_several_at_a_time_have_steps_as_asked(
    typed: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --prefill-step they have a default of their own."""
    seen: list[Any] = []
    monkeypatch.setattr(Profile, "watch", lambda self, runner: seen.append(runner.settings))
    lines = [{"prompt": f"{FACTS[0]} What is my name? {i}"} for i in range(2)]
    ends(run_lines(f"--parallel 2 {typed}", *lines), 0)
    assert [settings["prefill_step"] for settings in seen] == [step]


def test_a_model_that_cannot_run_several_runs_one_at_a_time_and_says_why() -> None:
    """GPT-2 adds the number of a token in its row to a position that is a number."""
    save_model(Path("gpt2"), build("gpt2"), settings_of("gpt2"))
    write_tokenizer(Path("gpt2"))
    result = run_lines(
        "-m gpt2 --parallel 3 --context 64", *[{"prompt": "ab", "max_tokens": 2}] * 3
    )
    ends(result, 0, "one line at a time: layer 0: this model can't run several sequences")
    assert len({line["text"] for line in answers()}) == 1


def test_options_of_the_command_are_those_of_lines_that_do_not_say_otherwise() -> None:
    own = ({}, {"max_tokens": 5}, {"system": "The user's name is Bo."})
    write(*({"prompt": "Hello!", **more} for more in own))
    run("in.jsonl -o out.jsonl --max-tokens 2 --system", "The user's name is Ana.")
    usages = [line["usage"] for line in answers()]
    assert [usage["completion_tokens"] for usage in usages] == [2, 5, 2]
    assert len({usage["prompt_tokens"] for usage in usages}) == 2
    run("in.jsonl -o raw.jsonl --raw")
    assert answers("raw.jsonl")[0]["usage"]["prompt_tokens"] < usages[0]["prompt_tokens"]


def test_sampling_options_reach_the_model_and_each_line_has_a_seed_of_its_own() -> None:
    """--seed S is S + i for line number i."""
    sampled = "--temperature 3 --max-tokens 12"
    lines = [*[{"prompt": "Hello!"}] * 3, {"prompt": "Hello!", "seed": 9}]
    run_lines(f"{sampled} --seed 9 --stop zzz", *lines)
    texts = [line["text"] for line in answers()]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3
    one = generate(*f"generate -p Hello! {sampled} --seed 10 --json".split())
    assert json.loads(one.stdout)["text"] == texts[1]


BROKEN: list[tuple[Any, str]] = [
    ("{broken", "not JSON"),
    ({"id": 1}, "no"),
    ({"prompt": "Hello!", "promt": 1}, "promt"),
    ({"prompt": "Hello!", "top_p": 3}, "top_p: 3"),
    ({"prompt": "x " * 3000}, "leaves no room in the context"),
    ("[1]", ""),
    ('"text"', ""),
]
"""Lines that can't be run, and a part of their errors."""
LINES = [line for line, _ in BROKEN]
HELLO = {"prompt": "Hello!"}


def test_bad_lines_get_an_error_with_their_number_and_stop_nothing() -> None:
    """Exit code 1, and a summary that shows the first."""
    result = run_lines("", HELLO, *LINES, "", HELLO)
    found = answers()
    assert [("error" in line, line["index"]) for line in found] == [
        (0 < i < 8, i) for i in range(9)
    ]
    for number, (line, (_, said)) in enumerate(zip(found[1:8], BROKEN, strict=True), start=2):
        assert line["error"].split(":")[0] == f"line {number}"
        assert said in line["error"]
    ends(result, 3, "7 of 9 lines failed, the first: line 2: not JSON")


def test_only_bad_lines_need_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their errors are written."""
    monkeypatch.setattr(
        "mlxrunner.batch.work.open_runner", lambda *arguments: pytest.fail("a model is loaded")
    )
    assert run_lines("", *LINES).exit_code == 3
    assert len(answers()) == len(BROKEN)


def test_strict_runs_nothing_if_a_line_is_bad() -> None:
    """Exit code 2, one line, no files."""
    result = run_lines("--strict", HELLO, *LINES)
    said = "mlxrunner: 7 of 8 lines can't be run, the first: line 2: not JSON"
    assert (result.exit_code, result.stdout, result.stderr[: len(said)]) == (2, "", said)
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]
    ends(run_lines("--strict", HELLO), 0)


def test_max_errors_stops_and_can_be_gone_on_with() -> None:
    """With the command that it prints: it counts what failed since."""
    words = "--max-errors 3 --order input"
    stopped = "stopped: 4 of 8 lines are done (--max-errors 3)"
    ends(run_lines(words, HELLO, *LINES), 1, stopped, "to continue: ")
    assert len(answers()) == 4
    for code, written in ((1, 7), (3, 8)):
        result = run(f"in.jsonl -o out.jsonl --resume {words}")
        assert (result.exit_code, len(answers())) == (code, written)
    assert "to continue: " not in result.stderr


def test_the_first_error_is_that_of_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of the first line, broken or failed, also in a run that continues."""

    def fall(deadline: object, *reached: int) -> None:
        raise ValueError("it fell")

    monkeypatch.setattr("mlxrunner.batch.execution.Deadline.__call__", fall)
    lines = [openai("q1", "Hello!"), "{not JSON", openai("q2", "Hello!")]
    result = run_lines("--parallel 1 --max-errors 2", *lines)
    assert "2 of 3 lines failed, the first: line 1: ValueError: it fell" in result.stderr
    result = run("in.jsonl -o out.jsonl --parallel 1 --resume")
    assert "3 of 3 lines failed, the first: line 1: ValueError: it fell" in result.stderr

"""Other programs learn of a batch by `--progress-file` and, at its end, by `--summary`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support import batches
from support.checks import ends, has, raising, read_lines

from mlxrunner.batch import work
from mlxrunner.batch.job import Job
from mlxrunner.batch.work import Status, Tally
from mlxrunner.runner import Runner

REPORTS = ("--progress-file", "progress.json", "--summary", "summary.json")


def run(*arguments: object) -> Result:
    return batches.run("in.jsonl", "--parallel", 1, "-o", "out.jsonl", *arguments)


def read(name: str) -> Any:
    return json.loads(Path(name).read_text())


@pytest.fixture(autouse=True)
def questions(folder: Path) -> None:
    lines = [{"prompt": "Hello!", "max_tokens": 2}, {"prompt": "My name is Bo. What is my name?"}]
    Path("in.jsonl").write_text("\n".join([*map(json.dumps, lines * 2), "no JSON"]))


def test_the_summary_adds_up_what_the_lines_say() -> None:
    """Tokens, reuse, answers cut at their limit, failures by kind; both files are private."""
    assert run(*REPORTS).exit_code == 3
    answers = read_lines(Path("out.jsonl"))
    usages = [answer["usage"] for answer in answers if "usage" in answer]
    found = read("summary.json")
    has(found, state="done", lines=5, answered=4, failed=1, model="demo", inputs=["in.jsonl"])
    own = found["run"]
    assert own["failures"] == {"refused": 1}
    assert own["cut_at_limit"] == sum(a.get("finish_reason") == "length" for a in answers) == 2
    for name in ("prompt_tokens", "cached_tokens", "evaluated_tokens", "completion_tokens"):
        reported = "answer_tokens" if name == "completion_tokens" else name
        assert own[reported] == sum(usage[name] for usage in usages) > 0
    assert own["reused"] == pytest.approx(own["cached_tokens"] / own["prompt_tokens"], abs=1e-6)
    rate = own["answer_tokens"] / own["seconds"]
    assert own["tokens_per_second"] == pytest.approx(rate, rel=0.01)
    assert own["on_battery"] in (True, False)
    has(read("progress.json"), state="done", done=5, failed=1, pid=os.getpid())
    for name in ("progress.json", "summary.json"):
        assert Path(name).stat().st_mode & 0o777 == 0o600
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


def test_failures_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit, a full context, a disk: each has its name."""

    def generate(self: Runner, prompt: Any, **options: Any) -> Any:
        if options.get("max_tokens") == 2:
            raise OSError("out of paper")
        return iter_generate(self, prompt, **options)

    iter_generate = Runner.generate
    monkeypatch.setattr(Runner, "generate", generate)
    run(*REPORTS, "--timeout", 1e-9)
    failures = read("summary.json")["run"]["failures"]
    assert failures == {"refused": 1, "other": 2, "timeout": 2}


def test_the_last_state_says_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Done also if there was nothing to do; interrupted with lines left; failed with the error."""

    def states() -> set[str]:
        return {read(name)["state"] for name in REPORTS[1::2]}

    assert run(*REPORTS, "--max-errors", 1, "--order", "input").exit_code == 3  # the last line
    assert read("progress.json")["state"] == "done"
    assert run(*REPORTS, "--resume").exit_code == 3
    has(read("progress.json"), state="done", done=5)
    assert read("summary.json")["run"]["lines"] == 0
    Path("out.jsonl").unlink()
    assert run(*REPORTS, "--max-errors", 1).exit_code == 1  # the broken line comes first
    assert states() == {"interrupted"}
    assert run(*REPORTS, "--resume", "--system", "x").exit_code == 2
    assert states() == {"failed"}
    for name in REPORTS[1::2]:
        assert "was begun with another --system" in read(name)["error"]
    monkeypatch.setattr("mlxrunner.batch.work.open_runner", raising(SystemExit(143)))
    assert run(*REPORTS, "--resume").exit_code == 143
    has(read("progress.json"), state="interrupted", error=None)


def test_it_is_written_once_a_second_while_lines_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be told often; the first and the last state are always written."""
    now = [100.0]
    monkeypatch.setattr(work.time, "monotonic", lambda: now[0])
    writes: list[tuple[str, int]] = []
    monkeypatch.setattr(
        work, "_write", lambda path, content: writes.append((content["state"], content["done"]))
    )
    job = Job(inputs=("in.jsonl",), output="out.jsonl", progress_file="p")
    with Status(job, pytest.fail) as told:
        told.begin(Tally(total=100))
        assert told.tally is not None
        for _ in range(30):
            now[0] += 0.1
            told.tally.done += 1
            told.tick()
    assert writes[:2] == [("starting", 0), ("running", 0)]
    assert writes[-1] == ("done", 30)
    assert 2 <= len(writes[2:-1]) <= 3


def test_while_lines_run_it_has_counts_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader at any moment finds a whole file."""
    monkeypatch.setattr(work, "EVERY_S", 0.0)
    seen: list[dict[str, Any]] = []
    write = work._write

    def noted(path: str, content: dict[str, Any]) -> str | None:
        problem = write(path, content)
        seen.append(read(path))
        return problem

    monkeypatch.setattr(work, "_write", noted)
    run("--progress-file", "progress.json")
    running = [one for one in seen if one["state"] == "running"]
    assert [one["done"] for one in running] == sorted(one["done"] for one in running)
    assert {1, 2, 3} <= {one["done"] for one in running}
    assert all(one["lines"] == 5 for one in running)
    assert all((one["seconds_left"] is None) == (one["done"] == 0) for one in running)


@pytest.mark.parametrize("name", ["link", "fifo", "folder"])
def test_a_file_that_can_t_be_written_ends_no_batch(name: str) -> None:
    """One warning for each, whatever the name means; the answers are there."""
    Path("folder").mkdir()
    os.mkfifo("fifo")
    os.symlink("elsewhere", "link")
    for option in ("--progress-file", "--summary"):
        result = run(option, name)
        assert result.exit_code == 3
        assert result.stderr.count(f"{option} {name}: can't be written: ") == 1
        assert len(Path("out.jsonl").read_text().splitlines()) == 5
        Path("out.jsonl").unlink()
    assert not Path("elsewhere").exists()
    assert list(Path("folder").iterdir()) == []


@pytest.mark.parametrize("option", REPORTS[::2])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("-", "does not mean standard output here"),
        ("no/such/file.json", "there is no folder"),
        *(
            (name, "choose a file of its own")
            for name in ("in.jsonl", "out.jsonl", "out.jsonl.run", "./out.jsonl.done", "other")
        ),
    ],
)
def test_a_file_that_is_something_else_is_refused(name: str, why: str, option: str) -> None:
    """Before anything is read: the reports would replace it. So is a plan, which tells nothing."""
    before = Path("in.jsonl").read_bytes()
    (other,) = {*REPORTS[::2]} - {option}
    ends(run(option, name, other, "./other"), 2, why)
    ends(run("--plan", option, "s.json"), 2, "--plan runs nothing")
    assert Path("in.jsonl").read_bytes() == before
    assert os.listdir() == ["in.jsonl"]

"""Shards of a batch, each on a machine of its own, make the output of one machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support import batch_command as command
from support.batches import lines, run, unbroken
from support.checks import ends

from mlxrunner.batch import job as merging
from mlxrunner.batch.plan import Shard
from mlxrunner.batch.store import Store
from mlxrunner.errors import OptionError
from mlxrunner.system.writing import sealed
from mlxrunner.terminal.output import count_of

PARTS = ("part1.jsonl", "part2.jsonl", "part3.jsonl")
ALL = Path("all.jsonl")
"""The merged output."""


def shard(number: int, *arguments: object, count: int = 3, output: str | None = None) -> Result:
    output = output or f"part{number}.jsonl"
    given = ("--shard", f"{number}/{count}", "--no-usage", "--parallel", 1, *arguments)
    return run("in.jsonl", "-o", output, *given)


def merge(*outputs: str, output: str = "all.jsonl") -> Result:
    return command.run("merge", *(outputs or PARTS), "-o", output)


def answers_of(name: str) -> list[str]:
    return Path(name).read_text().splitlines()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three shards that no test changes."""
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("in.jsonl").write_text(lines(12, broken=(5,)))
        for number in (1, 2, 3):
            assert shard(number).exit_code in (0, 3)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of these shards, to be changed."""
    folder = Path(shutil.copytree(made, tmp_path / "copied"))
    monkeypatch.chdir(folder)
    return folder


def test_merged_shards_are_the_output_of_one_machine(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, seeded and broken lines, byte for byte, in any order of the outputs.

    Each line is in one shard. A shard is read in groups, and its file is closed between them.
    """
    whole = unbroken()
    found = [[json.loads(line)["index"] for line in answers_of(name)] for name in PARTS]
    assert sorted(chain(*found)) == list(range(12))
    assert all(found)
    for group in (merging.GROUP, 1):
        monkeypatch.setattr(merging, "GROUP", group)
        ends(merge(*reversed(PARTS)), 3, "all.jsonl: 12 lines of 3 shards, 1 of them failed")
        assert ALL.read_bytes() == whole
        assert ALL.stat().st_mode & 0o777 == 0o600
        ALL.unlink()
        Path("all.jsonl.done").unlink()


def test_merged_shards_go_on_like_the_output_of_one_machine(copied: Path) -> None:
    """Their record is that of a run without shards: --resume and --retry-failed take it."""
    assert merge().exit_code == 3
    again = ("in.jsonl", "-o", ALL, "--no-usage")
    ends(run(*again, "--resume"), 3, "all.jsonl is complete (12 lines): nothing to do")
    ends(run(*again, "--retry-failed"), 3)
    assert ALL.read_bytes() == unbroken()
    ends(run(*again, "--resume", "--max-tokens", 3), 2, "another --max-tokens")


def test_seeds_are_those_of_the_whole_batch(folder: Path) -> None:
    """Line i samples with the seed S + i on every machine."""
    sampled = ("--temperature", 1.0, "--seed", 7)
    whole = unbroken(*sampled)
    for number in (1, 2):
        shard(number, *sampled, count=2)
    assert merge(*PARTS[:2]).exit_code == 3
    assert ALL.read_bytes() == whole


@pytest.mark.parametrize("order", ["input", "prefix"])
def test_a_shard_that_was_stopped_goes_on(folder: Path, order: str) -> None:
    """It runs its own lines only, and ends with the bytes of an unbroken run."""
    shard(1, count=2, output="whole.jsonl")
    ends(shard(1, "--order", order, "--max-errors", 1, count=2), 1)
    with Store.open(Path("part1.jsonl.run")) as store:
        counts = store.counts
    assert counts.left > 0
    ends(shard(1, "--order", order, "--resume", count=2), 3, f"{count_of(counts.left, 'line')} in ")
    assert Path("part1.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


def test_a_shard_keeps_its_lines_only(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store has no lines of others, and its counts are its own."""
    monkeypatch.setattr("mlxrunner.batch.work.complete", lambda *_: None)
    own = len(answers_of(PARTS[1]))
    ends(shard(2, output="other.jsonl"), 0, f"{own} lines in ")
    with Store.open(Path("other.jsonl.run")) as store:
        counts = store.size, store.counts.lines, store.counts.done, len(list(store.answers()))
    assert counts == (12, own, own, own)


def test_more_shards_than_lines_leave_some_empty(folder: Path) -> None:
    Path("in.jsonl").write_text(lines(2))
    names = [f"part{number}.jsonl" for number in range(1, 5)]
    results = [shard(number, count=4) for number in range(1, 5)]
    assert [result.exit_code for result in results] == [0, 0, 0, 0]
    assert "shard 4/4 has no lines: nothing to do" in results[3].stderr
    assert merge(*names).exit_code == 0
    assert ALL.read_bytes() == unbroken()


def test_the_failed_lines_of_a_shard_run_again(folder: Path) -> None:
    """The others keep their bytes, and the shard can be merged as before."""
    for number in (1, 2):
        shard(number, count=2)
    before = [Path(name).read_bytes() for name in PARTS[:2]]
    results = [shard(number, "--retry-failed", count=2) for number in (1, 2)]
    assert sorted(result.exit_code for result in results) == [0, 3]
    assert [Path(name).read_bytes() for name in PARTS[:2]] == before
    assert merge(*PARTS[:2]).exit_code == 3
    assert ALL.read_bytes() == unbroken()


def rewritten(**changed: str) -> None:
    """Change what the record of the second shard says."""
    content: dict[str, Any] = json.loads(RECORD.read_text())
    content["made_from"] |= changed
    sealed_record(RECORD, content)


TWO, RECORD = Path("part2.jsonl"), Path("part2.jsonl.done")
OTHER = (PARTS[0], "other.jsonl", PARTS[2])
NO_RECORD = "part2.jsonl: part2.jsonl.done is missing or damaged, which says what it was made from"
COPY = f"{NO_RECORD}: copy it from the machine that ran the shard"
BAD_RECORD = "part2.jsonl: its part2.jsonl.done is damaged"
NOT_LEFT = "part2.jsonl: is not what shard 2/3 left"
NOT_ENDED = "part2.jsonl: this shard has not ended: continue it with --resume"
TWICE = "part2.jsonl and copy.jsonl are both shard 2/3: leave one out"
PLAIN = "plain.jsonl: is not a shard: it was made without --shard, leave it out"
INPUT = "other.jsonl: was made from another input than part1.jsonl"
TOP_K = "other.jsonl: was made from another --top-k than part1.jsonl: 3 there, 0 here"
CUT = "part2.jsonl: its machine partitioned the batch differently than that of part1.jsonl"


def copy_second() -> None:
    for end in ("", ".done"):
        shutil.copy(f"{TWO}{end}", f"copy.jsonl{end}")


def shard_of_another_input() -> None:
    Path("in.jsonl").write_text(lines(13))
    shard(2, output="other.jsonl")


def with_a_failure() -> None:
    RECORD.write_text(RECORD.read_text().replace('"failed": 0', '"failed": 1'))


@pytest.mark.parametrize(
    ("change", "outputs", "message"),
    [
        (None, PARTS[:2], "shard 3/3 is missing: name its output, too"),
        (None, PARTS[:1], "shards 2/3, 3/3 are missing"),
        (copy_second, (*PARTS, "copy.jsonl"), TWICE),
        (None, (*PARTS[:2], "none.jsonl"), "none.jsonl: is not there"),
        (RECORD.unlink, PARTS, COPY),
        (lambda: RECORD.write_text("{"), PARTS, NO_RECORD),
        (with_a_failure, PARTS, NO_RECORD),
        (lambda: rewritten(**{"--shard": '"9/3"'}), PARTS, BAD_RECORD),
        (lambda: rewritten(**{"--shard": "[" * 99_999}), PARTS, BAD_RECORD),
        (lambda: rewritten(cut="0"), PARTS, CUT),
        (Path("part2.jsonl.run").touch, PARTS, NOT_ENDED),
        (lambda: TWO.write_bytes(TWO.read_bytes()[:-1] + b" "), PARTS, NOT_LEFT),
        (lambda: TWO.write_bytes(TWO.read_bytes()[:-9]), PARTS, NOT_LEFT),
        (lambda: run("in.jsonl", "-o", "plain.jsonl"), (*PARTS, "plain.jsonl"), PLAIN),
        (shard_of_another_input, OTHER, INPUT),
        (lambda: shard(2, "--top-k", 3, output="other.jsonl"), OTHER, TOP_K),
        (
            lambda: shard(2, count=4, output="other.jsonl"),
            OTHER,
            "other.jsonl is shard 2/4 and part1.jsonl is shard 1/3",
        ),
    ],
)
def test_shards_that_do_not_make_a_batch_are_refused(
    copied: Path, change: Callable[[], object] | None, outputs: tuple[str, ...], message: str
) -> None:
    """The error names the file and says what to do, and nothing is written."""
    if change is not None:
        change()
    ends(merge(*outputs), 2, message)
    assert not ALL.exists()
    assert not Path("all.jsonl.done").exists()


def sealed_record(record: Path, content: dict[str, Any]) -> None:
    del content["crc32"]
    record.write_text(sealed(json.dumps(content)))


def recorded(name: str, content: bytes) -> None:
    """Write another output, and a record that fits it."""
    Path(name).write_bytes(content)
    record = Path(f"{name}.done")
    fitting = {"digest": merging.output_digest(Path(name)), "size": len(content)}
    sealed_record(record, json.loads(record.read_text()) | fitting)


def last_of(name: str) -> bytes:
    return Path(name).read_bytes().splitlines(keepends=True)[-1]


WRONG, FOREIGN = "nothing is written: ", "is not an answer of this program"
HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "first line missing": (lambda whole: whole.split(b"\n", 1)[1], WRONG),
    "last line missing": (lambda whole: whole[: whole[:-1].rindex(b"\n") + 1], WRONG),
    "line there twice": (lambda whole: whole + last_of("part1.jsonl"), WRONG),
    "line of another shard": (lambda whole: whole + last_of("part2.jsonl"), WRONG),
    "empty": (lambda whole: b"", WRONG),
    "no JSON": (lambda whole: whole + b"{\n", FOREIGN),
    "no object": (lambda whole: whole + b"[]\n", FOREIGN),
    "deep": (lambda whole: whole + b"[" * 99_999 + b"\n", FOREIGN),
    "index of text": (lambda whole: whole + b'{"index": "1"}\n', FOREIGN),
    "index of truth": (lambda whole: whole + b'{"index": true}\n', FOREIGN),
    "index below": (lambda whole: b'{"index": -1}\n' + whole, WRONG),
    "index beyond": (lambda whole: whole + b'{"index": 12}\n', WRONG),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_record_that_fits_hides_nothing(
    copied: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    """Each line of the batch has to be there once, also where a shard agrees with its record."""
    recorded(PARTS[0], change(Path(PARTS[0]).read_bytes()))
    ends(merge(), 2, message)
    assert not ALL.exists()


def test_names_that_lead_nowhere_are_refused(copied: Path) -> None:
    """A link to itself, a folder, a pipe with a record beside it."""
    Path("loop").symlink_to("loop")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    shutil.copy("part1.jsonl.done", "pipe.done")
    shutil.copy("part1.jsonl.done", "folder.done")
    for name in ("loop", "folder", "pipe"):
        result = merge(name, *PARTS[1:])
        ends(result, 2, name)
        assert "internal error" not in result.stderr


def test_an_output_that_is_there_stays(copied: Path) -> None:
    ALL.write_text("mine")
    ends(merge(), 2, "all.jsonl: is there already: choose another -o, or remove it")
    assert ALL.read_text() == "mine"
    ends(merge(output="part1.jsonl"), 2, "is the output of a shard")


def test_a_model_may_have_another_name_on_each_machine(copied: Path) -> None:
    rewritten(model="/elsewhere/demo")
    assert merge().exit_code == 3


def test_a_shard_is_no_shard_of_another_number(copied: Path) -> None:
    """--resume names both."""
    ends(shard(3, "--resume", output="part2.jsonl"), 2, 'another --shard: "2/3" then, "3/3" now')
    plain = run("in.jsonl", "-o", "part2.jsonl", "--no-usage", "--resume")
    ends(plain, 2, 'another --shard: "2/3" then, not set now')


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "-1/3", "a/b", "1/3/3", "1/999999"])
def test_a_shard_has_a_number_and_a_count(text: str) -> None:
    with pytest.raises(OptionError, match="has to be I/N"):
        Shard.of(text)


OTHER_OPTIONS = {
    ("--shard", "1/2", "-o", "-"): "--shard needs an output file",
    ("--shard", "1/2", "-o", "a.parquet"): "merge ... -o a.parquet` makes the table",
    ("--shard", "1/2", "-o", "a.jsonl", "--output-order", "done"): "needs --output-order input",
    ("--shard", "1/2", "--workers", "2", "--plan"): "use one of the two",
    ("--shard", "1/2", "--dask", "tcp://localhost", "-o", "a.jsonl"): "use one of the two",
}


@pytest.mark.parametrize(("given", "message"), OTHER_OPTIONS.items(), ids=" ".join)
def test_options_that_do_not_go_together_are_refused(
    folder: Path, given: tuple[str, ...], message: str
) -> None:
    ends(run("in.jsonl", *given), 2, message)


def test_an_input_called_merge_is_reached_by_its_path(folder: Path) -> None:
    Path("in.jsonl").rename("merge")
    ends(command.run("./merge", "-o", "out.jsonl", "--no-usage", "--max-tokens", 2), 3)
    assert len(Path("out.jsonl").read_text().splitlines()) == 12


def test_a_table_is_made_of_all_shards(copied: Path) -> None:
    pytest.importorskip("pyarrow")
    assert merge(output="all.parquet").exit_code == 3
    import pyarrow.parquet

    assert pyarrow.parquet.read_table("all.parquet").num_rows == 12
    assert Path("all.parquet.jsonl").read_bytes() == unbroken()

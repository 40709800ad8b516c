"""`mlxrunner batch` reads and writes tables, streams and several files."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path

import pytest
from support.batch_command import answers, run, run_lines, table, write
from support.checks import ends, refused
from support.command import in_shell

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.exhaustive(0)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("batch - -o out.jsonl <&-", "mlxrunner: standard input is closed\n"),
        ("batch in.jsonl -o - >&-", "mlxrunner: standard output is closed\n"),
        ("batch in.jsonl -o out.jsonl -q >&-", ""),
        ("batch in.jsonl -o out.jsonl 2>&-", ""),
    ],
)
def test_a_closed_standard_stream_is_one_line(words: str, said: str) -> None:
    """There is no line where the stream is not needed."""
    write({"prompt": "Hello!", "max_tokens": 2})
    result = in_shell(words)
    assert (result.returncode, result.stderr) == (2 if said else 0, said)
    assert Path("out.jsonl").exists() == (not said)


def test_csv_end_to_end() -> None:
    """A template with columns; quotes, commas and line ends in values."""
    Path("in.csv").write_text('id,name,more\nx,Ana,"a, b"\ny,"Zor\nblin",\nbad,row\n')
    template = "My name is {name}. What is my name?"
    result = run("in.csv -o out.jsonl --row-template", template)
    assert (answers()[0]["id"], answers()[0]["text"]) == ("x", "Your name is Ana.")
    assert (result.exit_code, len(answers())) == (3, 3)
    assert answers()[2]["error"].startswith("line 5: ")
    ends(run("in.csv -o other.jsonl"), 2, "neither a column 'prompt' nor")
    ends(run("in.csv -o other.jsonl --row-template {town}"), 2, "no column 'town'")
    assert not Path("other.jsonl").exists()
    assert not Path("other.jsonl.run").exists()


@pytest.mark.parametrize("words", ["-o ./-", "-o out.jsonl --events ./-"])
def test_a_file_may_be_called_a_dash(words: str) -> None:
    """With a folder, as for other programs: `./-`. Without one it is standard output."""
    write({"prompt": "Hello!", "max_tokens": 2})
    result = run(f"in.jsonl {words}")
    assert (result.exit_code, result.stdout) == (0, "")
    assert Path.cwd().joinpath("-").read_text().startswith('{"')


def test_standard_input_and_output() -> None:
    """`-` for each; what is on stdout is the answers and nothing else."""
    text, said = json.dumps({"prompt": "Hello!"}) + "\n", "Hello! How can I help you?"
    found = json.loads(run("- -o - --no-usage", stdin=text).stdout)
    assert found == {"id": None, "index": 0, "text": said, "finish_reason": "stop"}
    run("- -o out.jsonl", stdin=text)
    assert answers()[0]["text"] == said
    refused(run("- -o - --resume", stdin=text), "--resume needs an output file")


def test_a_closed_pipe_ends_it_quietly() -> None:
    """`mlxrunner batch ... -o - | head -1`."""
    write(*[{"prompt": "Hello!", "max_tokens": 3}] * 200)
    words = "batch in.jsonl -o - --no-usage -q --no-reserve --parallel 1 | head -1"
    result = in_shell(words)
    assert (len(result.stdout.splitlines()), result.stderr) == (1, "")


def test_a_stream_on_a_full_disk_is_one_line(full: int) -> None:
    """It is written to as answers come, and such a run can't resume."""
    stream = f"/dev/fd/{full}"
    write({"prompt": "Hello!"})
    result = run(f"in.jsonl -o {stream} -q")
    said = f"mlxrunner: {stream}: can't be written: No space left on device\n"
    assert (result.exit_code, result.stderr) == (1, said)
    refused(
        run(f"in.jsonl -o {stream} --resume"),
        "mlxrunner: --resume needs an output file: a run whose answers went to standard output "
        "or a device can't resume\n",
    )


def test_an_output_that_is_no_file_is_refused_at_once(null: Path) -> None:
    """A FIFO and a link are refused at once; the null device is written to and stays one."""
    os.mkfifo("fifo")
    os.symlink("elsewhere", "link")
    write({"prompt": "Hello!"})
    for name, why in (
        ("fifo", "it is a FIFO, not a regular file"),
        ("link", "it is a link to elsewhere: name the file itself"),
    ):
        refused(run(f"in.jsonl -o {name}"), f"mlxrunner: {name}: can't be written: {why}")
        assert not os.path.exists(f"{name}.run")
    before = null.lstat()
    assert run("in.jsonl -o", null, "-q").exit_code == 0
    assert os.path.samestat(before, null.lstat())


def test_output_order_done_writes_as_they_finish() -> None:
    """In the order in which they ran; each says its index."""
    prompts = [f"My name is {name}. What is my name?" for name in ("Zo", "Al", "Zo")]
    run_lines("--output-order done --parallel 1", *({"prompt": text} for text in prompts))
    order = [line["index"] for line in answers()]
    assert order != [0, 1, 2]
    assert sorted(order) == [0, 1, 2]
    assert abs(order.index(0) - order.index(2)) == 1


def test_an_empty_input_is_an_empty_output() -> None:
    """Exit code 0, and stderr says so."""
    for words in ("", "--resume"):
        result = run_lines(words)
        assert (result.exit_code, result.stderr) == (0, "in.jsonl has no lines: nothing to do\n")
    assert run("- -o other.jsonl").stderr == "standard input has no lines: nothing to do\n"
    assert Path("out.jsonl").read_bytes() == b""
    assert not Path("out.jsonl.run").exists()


@pytest.mark.exhaustive(0)
def test_answers_become_a_parquet_file_when_all_are_there() -> None:
    """Its rows have the text, the counts and the whole line, for every format of lines."""
    pytest.importorskip("pyarrow")
    ours = [{"id": "a", "prompt": "Hello!"}, {"id": 5, "prompt": "Hello!"}, {"promt": "a"}]
    theirs = [
        {"custom_id": "c", "body": {"messages": [{"role": "user", "content": "Hello!"}]}},
        {"custom_id": "t", "url": "/v1/completions", "body": {"prompt": "Hello!", "max_tokens": 2}},
        {"custom_id": "r", "url": "/v1/responses", "body": {"input": "Hello!"}},
    ]
    write(*ours, *theirs)
    ends(run("in.jsonl -o out.parquet"), 3)
    rows = table()
    assert [row["id"] for row in rows] == ["a", "5", None, "c", "t", "r"]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4, 5]
    said = "Hello! How can I help you?"
    assert [row["text"] for row in rows if row["id"] != "t"] == [said, said, None, said, said]
    ended = [row["finish_reason"] for row in rows]
    assert ended == ["stop", "stop", None, "stop", "length", "stop"]
    assert "unknown field 'promt'" in rows[2]["error"]
    counts = ("prompt_tokens", "cached_tokens", "completion_tokens")
    assert all(isinstance(row[name], int) for row in rows if row["text"] for name in counts)
    assert [row["line"] for row in rows] == Path("out.parquet.jsonl").read_text().splitlines()
    assert Path("out.parquet").stat().st_mode & 0o777 == 0o600
    ends(run("in.jsonl -o out.parquet"), 2, "out.parquet: is there already")


def test_the_folder_that_one_is_in_goes_to_standard_output() -> None:
    """`-o -` is no file in it, and neither is it the input `./-`; a name in it is refused."""
    Path("a.txt").write_text("Hi")
    assert json.loads(run(". -o - --no-usage").stdout)["id"] == "a.txt"
    ends(run(". -o out.jsonl"), 2, "out.jsonl: is in the input")
    write({"id": 1, "prompt": "Hi"}, file="-")
    assert json.loads(run("./- -o - --no-usage").stdout)["id"] == 1


@pytest.mark.parametrize("option", ["-o", "--summary", "--progress-file"])
def test_a_folder_that_is_missing_is_named_before_anything_runs(option: str) -> None:
    ends(run_lines(f"{option} nowhere/out.csv", {"prompt": "Hi"}), 2, "no folder nowhere")
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", ["out.csv", "out.TSV"])
def test_answers_become_a_text_table_when_all_are_there(name: str) -> None:
    """It needs no package; a file of lines from before is never replaced."""
    write({"id": "a", "prompt": 'Say "hi", and\nbye'}, {"id": 2, "prompt": "Hi", "max_tokens": -1})
    words = f"in.jsonl -o {name} --max-tokens 4"
    ends(run(words), 3)
    with Path(name).open(newline="") as stream:
        first, second = csv.DictReader(stream, delimiter="," if name == "out.csv" else "\t")
    lines = answers(f"{name}.jsonl")
    assert (first["id"], first["index"], first["text"]) == ("a", "0", lines[0]["text"])
    assert int(first["completion_tokens"]) == lines[0]["usage"]["completion_tokens"]
    assert (second["id"], second["text"], second["error"]) == ("2", "", lines[1]["error"])
    ends(run(words), 2, f"{name}: is there already")
    assert f"{name} is complete (2 lines)" in run(f"{words} --resume").stderr
    Path(f"{name}.jsonl").unlink()
    before = Path(name).read_bytes()
    ends(run(f"{words} --resume"), 2, f"{name}: is there already")
    assert Path(name).read_bytes() == before


def test_a_parquet_file_comes_with_the_end_of_a_run_that_is_resumed() -> None:
    """Until then there are the lines only; --resume of a finished run makes the file again."""
    pytest.importorskip("pyarrow")
    write(*({"id": number, "prompt": "Hello!", "max_tokens": 3} for number in range(4)), "no json")
    words, file = "in.jsonl -o out.parquet --no-usage", Path("out.parquet")
    ends(run(f"{words} --max-errors 1"), 1)
    assert not file.exists()
    ends(run(f"{words} --resume"), 3)
    first = file.read_bytes()
    assert [row["id"] for row in table()] == [0, 1, 2, 3, None]
    file.unlink()
    ends(run(f"{words} --resume"), 3)
    assert file.read_bytes() == first


def test_several_inputs_are_one_batch_that_can_be_resumed_with_the_same_ones() -> None:
    """Errors name the input; other inputs, and other columns, are refused with both values."""
    write({"id": "a", "prompt": "Hello!"})
    Path("more.csv").write_text("key,question\na,Hello!\nb,Hello!\n")
    words, key = "in.jsonl more.csv -o out.jsonl --prompt-column question", "--id-column key"
    ends(run(f"{words} {key}"), 3)
    first, again, last = answers()
    assert (first["id"], last["id"], first["text"]) == ("a", "b", last["text"])
    assert again["error"] == "more.csv line 2: id 'a' was there before, on in.jsonl line 1"
    ends(run(f"more.csv more.csv -o twice.jsonl --prompt-column question {key}"), 3)
    said = "id 'b' was there before, from the same file, which is given twice"
    assert answers("twice.jsonl")[3]["error"].endswith(said)
    ends(run(f"{words} {key} --resume"), 3)
    ends(run(f"{words} --resume"), 2, 'another --id-column: "key" then')
    Path("more.csv").write_text("key,question\na,Hello!\n")
    ends(run(f"{words} {key} --resume"), 2, "was begun with another input")


def test_a_compressed_input_that_is_cut_off_leaves_nothing_behind() -> None:
    """Nothing is run, and the error is one line."""
    Path("in.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "Hello!"}\n' * 50)[:-9])
    result = run("in.jsonl.gz -o out.jsonl")
    said = "mlxrunner: in.jsonl.gz: can't be read to its end as gzip: it is cut off"
    assert (result.exit_code, result.stderr.splitlines()[-1][: len(said)]) == (2, said)
    assert [path.name for path in Path().iterdir() if path.is_file()] == ["in.jsonl.gz"]

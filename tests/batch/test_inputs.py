"""Inputs of every kind become lines; each has its place, and a broken file is one error."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.checks import output_of

from mlxrunner.batch.inputs import LONGEST, Inputs, digest_of
from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.store import InputLine
from mlxrunner.batch.tables import Columns, HashedStream, Template, decompressed
from mlxrunner.errors import OptionError, PromptError

pyarrow: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")

LINES = b'{"id": "a", "prompt": "Hello"}\n{"id": "b", "prompt": "Bye"}\n'
ROWS = {"id": [1, 2], "prompt": ["Hello", "Bye"], "n": [5, None]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(
    *names: str, columns: Columns | None = None, delimiter: str | None = None, raw: bool = True
) -> list[InputLine]:
    """Read the inputs, and check that the digest of what was read is that of the files."""
    inputs = Inputs(names, BatchOptions(raw=raw), columns, delimiter)
    lines = list(inputs)
    assert inputs.digest == digest_of(names)
    return lines


def told(lines: Sequence[InputLine]) -> list[tuple[Any, Any]]:
    return [(line.id, line.prompt if line.error is None else line.error) for line in lines]


def save(table: Any, name: str, kind: Any = pyarrow.ipc.new_file) -> None:
    with pyarrow.OSFile(name, "wb") as file, kind(file, table.schema) as to:
        to.write(table)


def zstd(content: bytes) -> bytes:
    """Return `content` as zstd, by way of a file: the stream closes what it writes to."""
    with pyarrow.CompressedOutputStream("packed.tmp", "zstd") as packed:
        packed.write(content)
    return Path("packed.tmp").read_bytes()


PACK = {"gzip": gzip.compress, "zstd": zstd, "plain": bytes}


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in"])
def test_the_first_bytes_tell_the_compression(kind: str, name: str) -> None:
    """The name does not matter; files that were joined are read to the end of the last."""
    for content in (PACK[kind](LINES), PACK[kind](LINES[:31]) + PACK[kind](LINES[31:])):
        Path(name).write_bytes(content)
        assert told(read(name)) == [("a", "Hello"), ("b", "Bye")]


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_file_that_is_cut_off_anywhere_is_one_error(kind: str) -> None:
    """It names the file. Nothing of the input is used."""
    whole = PACK[kind](LINES)
    cut = [(whole[:size], ".*: it is cut") for size in range(9, len(whole))]
    for content, why in (*cut, (whole + b"garbage", "")):
        Path("in.gz").write_bytes(content)
        with pytest.raises(PromptError, match=rf"in.gz: can't be read to its end as{why}"):
            list(Inputs(["in.gz"], BatchOptions()))


def test_a_small_file_that_decompresses_to_a_large_line_costs_no_memory() -> None:
    """The line is an error, and the lines around it are read."""
    good = b'{"prompt": "Hello"}\n'
    script = """
import io, resource, sys
from mlxrunner.batch.inputs import Inputs
from mlxrunner.batch.options import BatchOptions
first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for line in Inputs(sys.argv[1:], BatchOptions()):
    print(line.error or "good")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - first)
"""
    with gzip.open("bomb.gz", "wb", compresslevel=1) as packed:
        packed.write(good)
        for _ in range(12):
            packed.write(b"a" * LONGEST)
        packed.write(b"\n" + good)
    assert Path("bomb.gz").stat().st_size < LONGEST
    first, second, third, grown = output_of(script, "bomb.gz").splitlines()
    assert (first, third) == ("good", "good")
    assert second == f"line 2: is longer than {LONGEST} bytes"
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(grown) * unit < 8 * LONGEST


def test_zstd_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """gzip needs nothing."""
    stream = HashedStream(io.BytesIO(zstd(LINES)))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        pytest.raises(PromptError, match=r"needs pyarrow: .* install .*pyarrow"),
        decompressed(stream, "in.zst"),
    ):
        pass
    with decompressed(HashedStream(io.BytesIO(gzip.compress(LINES))), "in.gz") as content:
        assert content.read() == LINES


@pytest.mark.parametrize(
    ("name", "delimiter", "content"),
    [
        ("in.tsv", None, "id\tprompt\n1\tHello, you\n"),
        ("in.tab", None, "id\tprompt\n1\tHello, you\n"),
        ("in.csv", None, 'id,prompt\n1,"Hello, you"\n'),
        ("in.csv", ";", "id;prompt\n1;Hello, you\n"),
        ("in.txt", "tab", "id\tprompt\n1\tHello, you\n"),
        ("in.txt", "\\t", "id\tprompt\n1\tHello, you\n"),
        ("in.csv", "|", "id|prompt\n1|Hello, you\n"),
    ],
)
def test_tables_of_text(name: str, delimiter: str | None, content: str) -> None:
    """The end of the name tells the delimiter, unless one is given; a column `prompt` is taken."""
    Path(name).write_text(content)
    assert told(read(name, delimiter=delimiter)) == [("1", "Hello, you")]


@pytest.mark.parametrize("delimiter", ["", "ab", '"', "\n", "é"])
def test_a_delimiter_is_one_character(delimiter: str) -> None:
    with pytest.raises(OptionError, match="is not one ASCII character"):
        Inputs(["in.csv"], BatchOptions(), delimiter=delimiter)


def test_columns_can_be_named() -> None:
    """For the prompt, the messages (as JSON in a text) and the id."""
    Path("in.csv").write_text('key,q,talk\nk,Hello,"[{""role"": ""user"", ""content"": ""Hi""}]"\n')
    assert told(read("in.csv", columns=Columns(prompt="q", id="key"))) == [("k", "Hello")]
    (line,) = read("in.csv", columns=Columns(messages="talk"))
    assert line.prompt == [{"role": "user", "content": "Hi"}]
    Path("in.csv").write_text("id,talk\nk,[\n")
    (found,) = told(read("in.csv", columns=Columns(messages="talk")))
    assert found[0] == "k"
    assert "line 2: column 'talk' is not JSON" in found[1]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (Columns(), "the CSV file has neither a column 'prompt' nor one 'messages': say with"),
        (Columns(prompt="c"), "the CSV file has no column 'c': it has 'a', 'b'"),
        (Columns(prompt="a", id="c"), "the CSV file has no column 'c': it has 'a', 'b'"),
    ],
)
def test_a_column_that_is_not_there_is_an_error_before_anything_runs(
    columns: Columns, problem: str
) -> None:
    Path("in.csv").write_text("a,b\n1,2\n")
    with pytest.raises(OptionError, match=re.escape(problem)):
        read("in.csv", columns=columns)


def test_options_that_contradict_each_other_are_errors() -> None:
    with pytest.raises(OptionError, match="--row-template and --prompt-column both say"):
        Columns(Template("{a}"), prompt="a")
    with pytest.raises(OptionError, match=r"are for tables .* and in.jsonl.gz is JSON lines"):
        Inputs(["in.jsonl.gz"], BatchOptions(), Columns(prompt="a"))


def test_a_parquet_file_is_read_by_its_columns() -> None:
    """Ids keep their type, a template fills values of any kind in, and null is as not given."""
    parquet.write_table(pyarrow.table(ROWS), "in.parquet")
    assert told(read("in.parquet")) == [(1, "Hello"), (2, "Bye")]
    columns = Columns(Template("{prompt}: {n}"), id="n")
    assert told(read("in.parquet", columns=columns)) == [(5, "Hello: 5"), (None, "Bye: ")]
    talk = [[{"role": "user", "content": "Hi"}], [{"role": "usr", "content": "Hi"}], None]
    parquet.write_table(pyarrow.table({"messages": talk}), "talk.parquet")
    good, unknown, none = read("talk.parquet")
    assert good.prompt == talk[0]
    assert "row 2: message 0: role 'usr' is not known" in (unknown.error or "")
    assert "row 3: messages has to be a list of at least one message" in (none.error or "")


def test_rows_that_are_too_long_and_files_that_are_damaged() -> None:
    """A row is an error of its own; a file that is cut off is one error that names it."""
    table = pyarrow.table({"id": ["a", "b"], "prompt": ["a" * (LONGEST + 1), "b"]})
    parquet.write_table(table, "in.parquet")
    long, good = read("in.parquet")
    assert (long.id, good.prompt) == ("a", "b")
    assert "row 1: is longer than" in (long.error or "")
    content = Path("in.parquet").read_bytes()
    for broken in (content[:-4], content[: len(content) // 2], content[:12]):
        Path("cut.parquet").write_bytes(broken)
        with pytest.raises(PromptError, match=r"cut.parquet: can't be read as Parquet"):
            read("cut.parquet")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_value_that_python_cannot_hold_is_an_error_of_its_row(kind: str) -> None:
    """One row of a strange type or size stops no other row, and keeps its id."""
    days = pyarrow.array([1, 2**31 - 1], pyarrow.int32()).cast(pyarrow.date32())
    table = pyarrow.table({"id": ["a", "b"], "prompt": days})
    (parquet.write_table if kind == "parquet" else save)(table, f"in.{kind}")
    _, wrong = read(f"in.{kind}")
    assert wrong.id == "b"
    assert "a value can't be read" in str(wrong.error)


def test_a_small_file_of_huge_rows_costs_no_memory() -> None:
    """A list that repeats one text of a dictionary 10,000 times is measured first."""
    from mlxrunner.batch.tables import _weight

    text = pyarrow.array(["a" * LONGEST])
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 10_000), text)
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 10_000], pyarrow.int32()), repeated)
    assert _weight([lists]) > 10_000 * LONGEST
    save(pyarrow.table({"prompt": lists, "id": ["a"]}), "in.arrow")
    (line,) = read("in.arrow")
    assert line.id == "a"
    assert "is longer than" in str(line.error)


def test_offsets_that_lead_out_of_an_arrow_file_are_one_error() -> None:
    """pyarrow itself would read memory that is not the file's."""
    offsets, text = (
        pyarrow.py_buffer(content)
        for content in (b"".join(n.to_bytes(4, "little") for n in (0, 2**30, 2)), b"hi")
    )
    wrong = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, text])
    save(pyarrow.RecordBatch.from_arrays([wrong], names=["prompt"]), "in.arrow")
    with pytest.raises(PromptError, match=r"in.arrow: can't be read as Arrow"):
        read("in.arrow")


def test_a_data_set_that_was_saved() -> None:
    """A folder as `datasets.save_to_disk` writes it; of several splits one has to be named."""
    Path("set/train").mkdir(parents=True)
    shard, state = "data-00000-of-00001.arrow", Path("set/train/state.json")
    save(pyarrow.table(ROWS), f"set/train/{shard}", pyarrow.ipc.new_stream)
    state.write_text(json.dumps({"_data_files": [{"filename": shard}], "_split": None}))
    Path("set/train/dataset_info.json").write_text("{}")
    assert told(read("set/train")) == [(1, "Hello"), (2, "Bye")]
    Path("set/dataset_dict.json").write_text('{"splits": ["train"]}')
    assert told(read("set")) == [(1, "Hello"), (2, "Bye")]
    Path("set/dataset_dict.json").write_text('{"splits": ["train", "test", "../x"]}')
    with pytest.raises(PromptError, match="set: has 2 splits: name one of them: set/train"):
        read("set")
    state.write_text('{"_data_files": [{"filename": "../x.arrow"}]}')
    with pytest.raises(PromptError, match="names files outside of the folder"):
        read("set/train")


def test_a_folder_of_shards() -> None:
    """Shards are read in order, and a place names its shard; two splits are not mixed."""
    for number, text in enumerate(("Hello", "")):
        parquet.write_table(
            pyarrow.table({"prompt": [text]}), f"train-0000{number}-of-00002.parquet"
        )
    first, second = read(".")
    assert first.prompt == "Hello"
    assert second.error == "train-00001-of-00002.parquet row 1: prompt is empty"
    parquet.write_table(pyarrow.table({"prompt": ["x"]}), "test-00000-of-00001.parquet")
    with pytest.raises(PromptError, match=r"has the files of 2 splits or parts: name those of one"):
        read(".")


def test_a_data_set_of_the_hub_comes_from_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its splits can be named by the path in the repository."""
    from huggingface_hub import constants

    root, commit = tmp_path / "hf/hub/datasets--me--set", "c" * 40
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root.parent))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (root / "refs").mkdir(parents=True)
    (root / "refs/main").write_text(commit)
    data = root / f"snapshots/{commit}/data"
    data.mkdir(parents=True)
    parquet.write_table(pyarrow.table(ROWS), data / "train-00000-of-00001.parquet")
    assert told(read("hf://datasets/me/set")) == [(1, "Hello"), (2, "Bye")]
    parquet.write_table(pyarrow.table({"prompt": ["x"]}), data / "test-00000-of-00001.parquet")
    name = "hf://datasets/me/set@main/data/test-00000-of-00001.parquet"
    assert told(read(name)) == [(None, "x")]
    for wrong, problem in (
        ("me/set", "name those of one"),
        ("me/other", "not in the local cache, and the hub can't be reached"),
        ("me", "has to be hf://datasets/OWNER/NAME"),
    ):
        with pytest.raises(PromptError, match=problem):
            read(f"hf://datasets/{wrong}")


def test_each_file_of_a_folder_is_a_prompt() -> None:
    """Sorted, with its path as its id; what is not text, or leads out, is an error of that file."""
    Path("in/sub").mkdir(parents=True)
    Path("in/b.txt").write_text("Hello\n\n")
    Path("in/sub/a.md").write_bytes(b"\xef\xbb\xbfBye\r\nnow\r\n")
    Path("in/.hidden").write_text("x")
    Path("in/binary").write_bytes(b"a\0b")
    Path("in/latin").write_bytes(b"\xe9")
    Path("in/empty").write_text("\n")
    Path("out").write_text("secret")
    os.symlink("../out", "in/link")
    os.symlink("b.txt", "in/near")
    os.symlink("..", "in/up")
    os.mkfifo("in/fifo")
    found = dict(told(read("in")))
    assert [*found] == "b.txt binary empty fifo latin link near up sub/a.md".split()
    good = {name: found.pop(name) for name in ("b.txt", "near", "sub/a.md")}
    assert good == {"b.txt": "Hello", "near": "Hello", "sub/a.md": "Bye\r\nnow"}
    assert found == {
        "binary": "file binary: there is a NUL byte in it: is it a text file?",
        "empty": "file empty: prompt is empty",
        "fifo": "file fifo: is a FIFO, not a regular file: copy its content into a file",
        "latin": "file latin: can't be read: not UTF-8 (byte 0), save it as UTF-8 text",
        "link": "file link: is a link that leads out of the folder: copy the file",
        "up": "file up: is a link that leads out of the folder: copy the file",
    }
    columns = Columns(Template("{path}: {text}"))
    assert ("b.txt", "b.txt: Hello") in told(read("in", columns=columns))
    Path("none").mkdir()
    with pytest.raises(PromptError, match="none: the folder has no files"):
        read("none")


def test_the_lines_of_several_inputs_follow_each_other() -> None:
    """A place names the input; the digest depends on their order."""
    Path("a.jsonl").write_bytes(LINES)
    Path("b.csv").write_text("prompt\nHi\n\n\n")
    Path("c").mkdir()
    Path("c/x").write_text("Ho")
    lines = read("a.jsonl", "b.csv", "c")
    assert [line.index for line in lines] == [0, 1, 2, 3]
    numbers = ["a.jsonl line 1", "a.jsonl line 2", "b.csv line 2", "file c/x"]
    assert [line.number for line in lines] == numbers
    assert told(lines)[2:] == [(None, "Hi"), ("c/x", "Ho")]
    assert digest_of(["a.jsonl", "b.csv"]) != digest_of(["b.csv", "a.jsonl"])


def test_parquet_from_a_stream_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read from its end."""
    parquet.write_table(pyarrow.table(ROWS), "in.parquet")
    ends = os.pipe()
    with open(ends[1], "wb") as writer:
        writer.write(Path("in.parquet").read_bytes())
    with open(ends[0]) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(PromptError, match="standard input: is Parquet or Arrow"):
            list(Inputs(["-"], BatchOptions()))

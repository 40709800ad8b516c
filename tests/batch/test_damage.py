"""Stores, records and inputs with random damage end in one clear line or in the right answers.

A sample of what was tried in thousands of runs.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from support.batches import entry, filled, once, read, run

from mlxrunner.batch.execution import Outcome
from mlxrunner.batch.output import write_line
from mlxrunner.batch.store import Store, StoredLine, checksum
from mlxrunner.errors import StoreError
from mlxrunner.testing import ByteTokenizer

SEEDS = range(60)
TABLES = {
    "input": ("lines", "broken"),
    "meta": ("name", "value"),
    "lines": ("line", "number", "id", "format", "options", "error", "tokens", "prompt", "sum"),
    "places": ("place", "line"),
    "results": ("done", "line", "failed", "body", "sum"),
}
NUMBERS = (None, -1, 0, 3, 10**15, 1.5)
TEXTS = ("", "x", "[]", '{"a": 1}', "9" * 5000, "[" * 2000)
VALUES = (*NUMBERS, *TEXTS, b"", b"\0\0\0\5", b"\xff\xff\xff\xff", b"\xff")


PARTS = (*(bytes([byte]) for byte in b'\0\xff"{]\n'), b"", b"\\ud800", b"NaN", b"1e999")
PARTS += (b"1" * 5000, b"[" * 3000)


def body(index: int) -> bytes:
    return json.dumps({"id": index, "text": "answer"}).encode()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a store of eight lines, five of them answered."""
    path = tmp_path_factory.mktemp("store") / "run"
    lines = []
    for index in range(8):
        tokens, error = ([], "broken") if index == 2 else ([5, index], None)
        lines.append(entry(index, tokens, id=f"a{index}", error=error, prompt="Hello!"))
    with filled(lines, path) as made:
        for index in range(5):
            made.record(index, body(index), failed=index == 2)
        made.commit()
    return path.read_bytes()


def written(folder: Path, store: bytes) -> Path:
    path = folder / "run"
    path.write_bytes(store)
    path.chmod(0o600)
    return path


def flip(chosen: random.Random, path: Path) -> None:
    """Bytes turned, cut out, zeroed; in SQLite's own header, too."""
    content = bytearray(path.read_bytes())
    for _ in range(chosen.choice([1, 2, 20])):
        begin = chosen.choice([chosen.randrange(100), chosen.randrange(len(content))])
        end = begin + chosen.choice([1, 4, 100, 4096])
        match chosen.randrange(3):
            case 0:
                content[begin] = chosen.randrange(256)
            case 1:
                content[begin:end] = bytes(len(content[begin:end]))
            case _:
                content[begin:end] = b"" if len(content) > 8192 else b"x"
    path.write_bytes(content)


def rewrite(chosen: random.Random, path: Path) -> None:
    """By SQLite: other values, other types, other tables."""
    table = chosen.choice(list(TABLES))
    column = chosen.choice(TABLES[table])
    change = chosen.choice(
        [
            f"UPDATE {table} SET {column} = ?",
            f"UPDATE {table} SET {column} = ? WHERE rowid = {chosen.randrange(8)}",
            f"DELETE FROM {table}",
            f"DROP TABLE {table}",
            f"ALTER TABLE {table} ADD COLUMN more",
            "CREATE TRIGGER bad AFTER INSERT ON results BEGIN DELETE FROM lines; END",
            "PRAGMA user_version = 1",
        ]
    )
    with closing(sqlite3.connect(path, isolation_level=None)) as database, suppress(sqlite3.Error):
        database.execute(change, (chosen.choice(VALUES),) if "?" in change else ())


LINE: dict[str, object] = {"line": 70, "number": 70, "id": "b0", "format": "chat.completion"}
LINE |= {"options": "{}", "error": "no", "tokens": b"\0\0\0\5", "prompt": '"Hullo!"', "sum": 1}
ONE_VALUE = {
    "lines": LINE,
    "places": {"line": 1},
    "results": {"done": 70, "line": 7, "failed": 1, "body": b"{}", "sum": 1},
}


@pytest.mark.parametrize("broken", [False, True], ids=["read", "not read"])
@pytest.mark.parametrize(
    ("table", "column", "value"),
    [(table, *one) for table, columns in ONE_VALUE.items() for one in columns.items()],
)
def test_each_column_of_a_row_is_checked(
    table: str, column: str, value: object, broken: bool, tmp_path: Path
) -> None:
    """A value that is valid elsewhere is refused too, also if the format was unknown before."""
    path = tmp_path / "run"
    form, error = ("unknown", "broken") if broken else ("plain", None)
    first = entry(0, [5, 6], id="a0", format=form, error=error)
    with filled([first, entry(1, [5, 7], id="a1", prompt="Hello!")], path) as made:
        if table == "results":
            made.record(0, body(0))
            made.commit()
    with Store.open(path) as whole:
        assert len([*whole.answers("done"), *whole.pending()]) == 2
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        change = f"UPDATE {table} SET {column} = ? WHERE rowid < 2 AND line = 0"
        assert database.execute(change, (value,)).rowcount == 1
    with pytest.raises(StoreError, match="damaged"), Store.open(path) as opened:
        list(opened.answers("done")), list(opened.pending("input")), list(opened.pending())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", [flip, rewrite])
def test_a_damaged_store_is_an_error_or_gives_what_was_put_in(
    damage: Callable[[random.Random, Path], None], seed: int, store: bytes, tmp_path: Path
) -> None:
    """All that is read before the error is as it was."""
    path = written(tmp_path, store)
    damage(random.Random(seed), path)
    with suppress(StoreError), Store.open(path) as opened:
        assert opened.is_complete or not opened.counts.lines
        for found in opened.answers():
            assert found.body == body(found.index)
        for one in opened.pending():
            assert (one.id, one.number) == (f"a{one.index}", one.index + 1)
            assert one.error is not None or one.tokens.tolist() == [5, one.index]
        assert opened.meta is not None
        opened.first_failure()
        opened.record(7, body(7))
        opened.commit()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mutated_input_is_lines_or_errors_of_lines(seed: int) -> None:
    """Each with one line of JSON as its answer."""
    chosen = random.Random(seed)
    good = (
        b'{"id": 1, "prompt": "Hello!", "max_tokens": 2, "stop": ["a"]}\n'
        b'{"id": "b", "messages": [{"role": "user", "content": "caf\\u00e9"}], '
        b'"response_format": {"type": "json_object"}}\n'
        b'{"custom_id": "c", "method": "POST", "url": "/v1/completions", '
        b'"body": {"prompt": "x", "logprobs": 2}}\n'
    )
    content = bytearray(good)
    for _ in range(chosen.randrange(1, 6)):
        at = chosen.randrange(len(content))
        content[at : at + chosen.randrange(9)] = chosen.choice(PARTS)
    for line in read(bytes(content)):
        if line.error is not None:
            outcome = Outcome(StoredLine(**vars(line)), error=line.error)
            answer = write_line(outcome, ByteTokenizer(), model="demo", usage=False)
            assert json.loads(answer)
            assert len(line.error) < 700


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_record_of_a_finished_run_is_one_line(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is run for it, and the output stays."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("no JSON\n")
    asked = ("in.jsonl", "-o", "out", "--no-usage")
    assert once(*asked).exit_code == 3
    output, record = Path("out").read_bytes(), json.loads(Path("out.done").read_text())
    chosen = random.Random(seed)
    inner = chosen.choice([record, record["made_from"]])
    inner[chosen.choice(list(inner))] = chosen.choice([None, -1, 10**30, 1.5, "x", [], {}, True])
    Path("out.done").write_text(json.dumps(record))
    result = run(*asked, "--resume")
    assert result.exit_code in (2, 3)
    assert result.stderr.count("\n") <= 2
    assert "internal error" not in result.stderr
    assert Path("out").read_bytes() == output


@pytest.mark.parametrize("column", ["id", "options", "error", "tokens", "prompt"])
@pytest.mark.parametrize("value", ["x", "[1]", "{", "[" * 50_000, b"\0", 5])
def test_a_line_whose_checksum_was_made_to_fit_is_an_error_of_the_store(
    column: str, value: Any, store: bytes, tmp_path: Path
) -> None:
    """It may also be read as what it says, if that can be a line."""
    path = written(tmp_path, store)
    names = ("line", "number", "id", "options", "error", "tokens", "prompt")
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        found = database.execute(f"SELECT {', '.join(names)} FROM lines WHERE line = 6").fetchone()
        row = dict(zip(names, found, strict=True)) | {column: value}
        change = f"UPDATE lines SET {column} = ?, sum = ? WHERE line = 6"
        database.execute(change, (value, checksum(*row.values())))
    for lines in (Store.pending, Store.left):
        with suppress(StoreError), Store.open(path) as opened:
            for one in lines(opened):
                assert isinstance(one.options, dict)
                assert isinstance(getattr(one, "id", None), str | int | None)
                assert isinstance(one.error, str | None)
                assert one.tokens.dtype == "int32"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE places SET line = 1 WHERE line = 2",
        "UPDATE places SET line = 'x' WHERE line = 2",
        "UPDATE places SET line = 1 << 60 WHERE line = 2",
        "UPDATE places SET line = -5 WHERE line = 0",
    ],
)
def test_a_line_without_a_place_is_an_error_of_the_store(
    change: str, store: bytes, tmp_path: Path
) -> None:
    path = written(tmp_path, store)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(change)
    with pytest.raises(StoreError, match="a line has no place in its order"):
        Store.open(path)

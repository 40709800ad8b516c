"""The lines of a batch and their answers in one SQLite file: bounded memory, an order made by a sort on disk, nothing lost, nothing done twice.

Either a whole input is in the store (`is_complete`) or none of it. An answer is there from the `commit` after its `record` on, whatever
happens then: kill -9, a power cut, a full disk. One process at a time has a store open. Knows nothing about models or files of answers.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from mlxrunner.batch.order import sort_key, tokens_of
from mlxrunner.cache.tokens import TokenArray, as_tokens
from mlxrunner.errors import MlxrunnerError
from mlxrunner.tokenizer.base import Message
from mlxrunner.writing import open_database, open_temporary_database

Format = Literal["plain", "chat.completion", "text_completion", "unknown"]
"""How a line wants to be answered: our own way, or as the OpenAI object of that name. Unknown: a line that can't be read; when the input
is complete it gets that of the first line that can."""
Order = Literal["prefix", "input"]

APPLICATION_ID = 0x6D6C7862  # "mlxb"
VERSION = 4
CACHE_KIB = 32 * 1024
"""Memory for SQLite's pages, and for a run of its sort."""

_SCHEMA = """
CREATE TABLE input (lines INTEGER NOT NULL, broken INTEGER NOT NULL);
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE lines (
    line INTEGER PRIMARY KEY, number INTEGER NOT NULL, id, format TEXT NOT NULL, options TEXT, error TEXT, tokens BLOB NOT NULL, prompt TEXT,
    sum INTEGER NOT NULL
);
CREATE UNIQUE INDEX ids ON lines (id) WHERE id IS NOT NULL AND error IS NULL;
CREATE TABLE places (place INTEGER PRIMARY KEY, line INTEGER NOT NULL);
CREATE TABLE results (done INTEGER PRIMARY KEY, line INTEGER NOT NULL UNIQUE REFERENCES lines, failed INTEGER NOT NULL, body BLOB NOT NULL,
    sum INTEGER NOT NULL
);
CREATE INDEX failures ON results (line) WHERE failed;
"""


class StoreError(MlxrunnerError):
    """A store that can't be made, opened or written to. What was committed before stays."""

    exit_code = 2


class DamagedStoreError(StoreError):
    """A file that is not a store, or not as this program wrote it; no run can be resumed from it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name}: {why}: no run can be gone on with from it. Remove it and begin again with another -o; the answers "
            "in the output stay"
        )


@dataclass(frozen=True)
class Entry:
    """A line of the input. `index` from 0, in the order of the input; `number`: its line in the file, from 1. With an `error`, no tokens.

    `prompt`: the text or the messages that `tokens` were made of, if they were."""

    index: int
    number: int
    tokens: TokenArray
    id: str | int | None = None
    format: Format = "plain"
    options: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    prompt: str | Sequence[Message] | None = None


@dataclass(frozen=True)
class Body:
    """What was recorded for line `index`. `place`: give it as `after` to go on behind it."""

    place: int
    index: int
    body: bytes
    failed: bool


@dataclass(frozen=True)
class Counts:
    """`lines`: of a complete input, `broken`: those of them with an error; `done`: lines with a result, `failed`: those that failed."""

    lines: int
    broken: int
    done: int
    failed: int

    @property
    def left(self) -> int:
        return self.lines - self.done


_TABLES = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
_INSERT_LINE = """
INSERT INTO lines (line, number, id, options, error, tokens, prompt, format, sum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_INSERT_RESULT = "INSERT INTO results (done, line, failed, body, sum) VALUES (?, ?, ?, ?, ?)"
_RESULT = "SELECT done, line, failed, body, sum FROM results WHERE"
_SET_FORMATS = """
UPDATE lines SET format = :format, sum = row_sum(line, number, id, options, error, tokens, prompt, :format) WHERE format = 'unknown'
"""
_FIRST_FORMAT = "SELECT format FROM lines WHERE format <> 'unknown' ORDER BY line LIMIT 1"
_PENDING = """
SELECT {place}, line, number, id, options, error, tokens, prompt, format, sum FROM {table}
WHERE {place} > ? AND line NOT IN (SELECT line FROM results) ORDER BY {place} LIMIT 1
"""
_NEXT = {
    "prefix": _PENDING.format(place="place", table="places CROSS JOIN lines USING (line)"),
    "input": _PENDING.format(place="line", table="lines"),
}


class Store:
    """Made by `create` or `open`; a context manager. Any method may raise StoreError; then nothing after the last commit has happened.

    An input goes in by `add` and ends with `finish`; then `pending` gives its entries and `record` and `commit` take their results.
    """

    def __init__(self, name: str, database: sqlite3.Connection) -> None:
        """Use `create` or `open`."""
        self._name, self._db = name, database
        self._lines = self._broken = 0
        self._recorded = 0  # `done` of the last result, in a transaction

    @classmethod
    def create(cls, path: Path | None = None, *, unique_ids: bool = True) -> Store:
        """A new, empty store (file mode 0600); None: a private temporary one, gone with the process. StoreError if the file exists.

        `unique_ids`: an id that was there becomes an error; to a program, which gets its answers in order, they mean nothing.
        """
        store = cls._connect(path, new=True)
        if not unique_ids:
            store._db.execute("DROP INDEX ids")
        return store

    @classmethod
    def open(cls, path: Path) -> Store:
        """An existing store. StoreError if there is none, it is not a store of this version, or another process has it open."""
        return cls._connect(path, new=False)

    @classmethod
    def _connect(cls, path: Path | None, *, new: bool) -> Store:
        """A store that holds its file's lock, and whose commits are on the disk.

        A file without content becomes a store: a process may have been killed directly after making it.
        """
        name = "the batch's temporary file" if path is None else str(path)
        try:
            store = cls(
                name, open_temporary_database() if path is None else open_database(path, new=new)
            )
        except OSError as error:
            problem = "can't be made" if new else "can't be opened"
            raise StoreError(f"{error.filename or name}: {problem}: {error.strerror}") from error
        except sqlite3.Error as error:
            raise StoreError(f"{name}: {_reason(error)}") from error
        try:
            store._set_up()
        except BaseException:
            store.close()
            raise
        return store

    def _set_up(self) -> None:
        with self._explained():
            self._db.executescript(
                f"PRAGMA locking_mode=EXCLUSIVE; PRAGMA cache_size=-{CACHE_KIB}; PRAGMA foreign_keys=ON; BEGIN EXCLUSIVE; COMMIT;"
                "PRAGMA synchronous=FULL; PRAGMA fullfsync=ON;"  # the latter: macOS
                "PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON"
            )
            if self._one("PRAGMA schema_version") == (0,):
                marks = f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={VERSION}"
                self._db.executescript(f"BEGIN; {marks}; {_SCHEMA} COMMIT")
            (kind,), (version,) = (
                self._one("PRAGMA application_id"),
                self._one("PRAGMA user_version"),
            )
            if kind != APPLICATION_ID:
                raise DamagedStoreError(self._name, "is not a batch store")
            if version != VERSION:
                why = f"is a batch store of version {version}, and this program knows version {VERSION}"
                raise DamagedStoreError(self._name, why)
            self._check()

    def _check(self) -> None:
        """DamagedStoreError where the tables are others, or don't agree with each other: SQLite itself looks at little."""
        if self._db.execute(_TABLES).fetchall() != _tables():
            raise self.damaged("its tables are not those of a batch store")
        inputs = self._db.execute("SELECT lines, broken FROM input").fetchall()
        (last,), (place,) = (
            self._one("SELECT max(line) FROM lines"),
            self._one("SELECT max(place) FROM places"),
        )
        if inputs:
            lines, broken = inputs[0]
            if len(inputs) > 1 or not _are_ints(lines, broken) or not 0 <= broken <= lines:
                raise self.damaged("it does not say how many lines there are")
            if (-1 if last is None else last) != lines - 1 or (place or 0) != lines:
                raise self.damaged(f"{lines} lines should be in it, and are not")
            if (
                self._one(
                    "SELECT line FROM lines WHERE line NOT IN (SELECT line FROM places) LIMIT 1"
                )
                is not None
            ):
                raise self.damaged("a line has no place in its order")
            self._lines, self._broken = lines, broken
        elif last is not None or place is not None:
            raise self.damaged("it has lines, and no end of them")

    def damaged(self, why: str) -> DamagedStoreError:
        """The error to raise for what can't have been written here."""
        return DamagedStoreError(self._name, f"is damaged ({why})")

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Safe to repeat. What was recorded since the last commit is dropped."""
        self._db.close()

    @property
    def is_complete(self) -> bool:
        """Whether a whole input is there; if not, there is nothing of it."""
        with self._explained():
            return self._one("SELECT lines FROM input") is not None

    @property
    def meta(self) -> dict[str, str]:
        """What `finish` was given: what the store was made from."""
        with self._explained():
            found = self._db.execute("SELECT name, value FROM meta").fetchall()
            if not all(isinstance(text, str) for row in found for text in row):
                raise self.damaged("what it was made from is not text")
            return dict(found)

    @property
    def counts(self) -> Counts:
        """Of what was added and recorded so far."""
        with self._explained():
            (done,), (failed,) = (
                self._one(f"SELECT count(*) FROM results {where}") for where in ("", "WHERE failed")
            )
        return Counts(self._lines, self._broken, done, failed)

    def add(self, entry: Entry) -> None:
        """The next line of the input; its index is one more than the last one's. An id that was there becomes that line's error."""
        with self._explained():
            self._begin_input()
            if entry.index != self._lines:
                raise StoreError(
                    f"{self._name}: line {entry.index} was added where line {self._lines} has to come"
                )
            try:
                self._insert(entry)
            except sqlite3.IntegrityError:
                (first,) = self._one(
                    "SELECT number FROM lines WHERE id = ? AND error IS NULL", entry.id
                )
                name = "id" if entry.format == "plain" else "custom_id"
                problem = f"line {entry.number}: {name} {entry.id!r:.80} was there before, on line {first}"
                entry = replace(entry, error=problem, tokens=as_tokens([]))
                self._insert(entry)
            self._lines += 1
            self._broken += entry.error is not None

    def _insert(self, entry: Entry) -> None:
        options = json.dumps(dict(entry.options)) if entry.options else None
        tokens, prompt = sort_key(entry.tokens), _as_text(entry.prompt)
        columns = (
            entry.index,
            entry.number,
            entry.id,
            options,
            entry.error,
            tokens,
            prompt,
            entry.format,
        )
        self._db.execute(_INSERT_LINE, (*columns, _sum(*columns)))

    def _begin_input(self) -> None:
        if self._db.in_transaction:
            return
        if self._one("SELECT lines FROM input") is not None:
            raise StoreError(f"{self._name}: its input is complete, nothing can be added")
        self._db.execute("BEGIN")
        self._lines = self._broken = 0

    def finish(self, meta: Mapping[str, str] | None = None) -> None:
        """The input is complete: sort it, and commit everything. Until then the store is as it was."""
        with self._explained():
            self._begin_input()
            if self._broken:
                (form,) = self._one(_FIRST_FORMAT) or ("plain",)
                self._db.create_function("row_sum", -1, _sum)
                self._db.execute(_SET_FORMATS, {"format": form})
            self._db.execute(
                "INSERT INTO places (line) SELECT line FROM lines ORDER BY tokens, line"
            )
            self._db.executemany("INSERT INTO meta VALUES (?, ?)", (meta or {}).items())
            self._db.execute("INSERT INTO input VALUES (?, ?)", (self._lines, self._broken))
            self._db.execute("COMMIT")

    def pending(self, order: Order = "prefix") -> Iterator[Entry]:
        """Entries without a result, one at a time; those recorded in the meantime don't come any more.

        "prefix": broken lines first, then by token ids, equal ones as they came; "input": as they came.
        """
        place = -1
        while (row := self._next(_NEXT[order], place)) is not None:
            place, *columns, written = row
            if _sum(*columns) != written or columns[-1] not in get_args(Format):
                raise self.damaged(f"line {columns[0]!r:.20} of it has changed")
            try:
                entry = _entry(columns[:-1], columns[-1])
            except (ValueError, TypeError, RecursionError) as error:
                raise self.damaged(f"line {columns[0]!r:.20} of it can't be read") from error
            yield entry

    def record(self, index: int, body: bytes, *, failed: bool = False) -> None:
        """The result of a line: what is to be written for it. It counts from the next `commit` on. A second one is a StoreError."""
        with self._explained():
            if not self._db.in_transaction:
                self._db.execute("BEGIN")
                (self._recorded,) = self._one("SELECT ifnull(max(done), 0) FROM results")
            self._recorded += 1
            row = (self._recorded, index, int(failed), body)
            self._db.execute(_INSERT_RESULT, (*row, _sum(*row)))

    def commit(self) -> None:
        """What was recorded is on the disk when this returns."""
        with self._explained():
            if self._db.in_transaction:
                self._db.execute("COMMIT")

    def bodies(self, order: Literal["input", "done"] = "input", after: int = -1) -> Iterator[Body]:
        """Results behind `after` (a `Body.place`), one at a time.

        "input": in the order of the input, up to the first line that has none yet (`place` is the index); "done": as they were recorded.
        """
        where = "line = ? + 1" if order == "input" else "done > ? ORDER BY done LIMIT 1"
        while (row := self._next(f"{_RESULT} {where}", after)) is not None:
            body = self._body(row, order)
            after = body.place
            yield body

    def _body(self, row: tuple[Any, ...], order: Literal["input", "done"] = "input") -> Body:
        *columns, written = row
        done, line, failed, body = columns
        if _sum(*columns) != written or not _are_ints(done, line) or not 0 <= line < self._lines:
            raise self.damaged(f"the answer of line {line!r:.20} has changed")
        return Body(done if order == "done" else line, line, body, bool(failed))

    def first_failure(self) -> Body | None:
        """The result of the first line of the input that failed so far."""
        with self._explained():
            row = self._one(f"{_RESULT} failed ORDER BY line LIMIT 1")
        return None if row is None else self._body(row)

    def _next(self, query: str, after: int) -> Any:
        with self._explained():
            return self._one(query, after)

    def _one(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's errors in one line, with everything since the last commit undone."""
        try:
            yield
        except (
            sqlite3.Error,
            UnicodeDecodeError,
            StoreError,
        ) as error:  # the second: SQLite quotes the file
            with suppress(sqlite3.Error):
                self._db.rollback()
            if isinstance(error, StoreError):
                raise
            if isinstance(error, UnicodeDecodeError) or _is_damage(error):
                raise DamagedStoreError(self._name, "is not a batch store, or damaged") from error
            raise StoreError(f"{self._name}: {_reason(error)}") from error


def _entry(columns: list[Any], form: Format) -> Entry:
    """The line of a row. ValueError, TypeError or RecursionError where it is none, whatever its checksum says."""
    line, number, name, options, error, tokens, prompt = columns
    options = json.loads(options) if options else {}
    if not (
        isinstance(options, dict) and _are_ints(line, number) and isinstance(name, str | int | None)
    ):
        raise TypeError("not the columns of a line")
    if not isinstance(error, str | None):
        raise TypeError("not the columns of a line")
    return Entry(
        line,
        number,
        tokens_of(tokens),
        name,
        form,
        options,
        error,
        None if prompt is None else json.loads(prompt),
    )


def _tables() -> list[Any]:
    with closing(open_temporary_database()) as database:
        database.executescript(_SCHEMA)
        return database.execute(_TABLES).fetchall()


def _sum(*columns: str | bytes | int | None) -> int:
    """Of all that is in a row, so that a bit that a disk has turned does not become another answer."""
    total = 0
    for column in columns:
        data = column if isinstance(column, bytes) else str(column).encode("utf-8", "surrogatepass")
        total = zlib.crc32(data, zlib.crc32(type(column).__name__.encode(), total))
    return total


def _are_ints(*values: Any) -> bool:
    return all(isinstance(value, int) for value in values)


def _is_damage(error: sqlite3.Error) -> bool:
    """A text in the file that is not UTF-8 has no code of SQLite's."""
    code = getattr(error, "sqlite_errorcode", None)
    damage = (
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_MISMATCH,
    )
    return (
        code & 0xFF in damage if code is not None else isinstance(error, sqlite3.OperationalError)
    )


def _as_text(prompt: str | Sequence[Message] | None) -> str | None:
    return None if prompt is None else json.dumps(prompt, default=str)


def _reason(error: sqlite3.Error) -> str:
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_BUSY:
            return "another process is using it: wait for its end"
        case sqlite3.SQLITE_FULL:
            return "the disk is full (or that of temporary files): make room and go on; what was committed is kept"
        case sqlite3.SQLITE_CONSTRAINT:
            return f"a line has to be there, and can have one result only ({error})"
    text = " ".join(str(error).split())
    return f"{text}; what was committed is kept"

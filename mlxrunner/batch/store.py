"""Keep the lines of a batch and their answers in one SQLite file.

Memory is bounded, since the lines are sorted on disk. The store holds either a whole input
(`is_complete`) or nothing of it. An answer survives a kill -9, a power cut or a full disk from the
first `commit` after its `record`, and its line is never run again. One process at a time can open a
store. Knows nothing about models or files of answers.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from mlxrunner.batch.options import Order, OutputOrder
from mlxrunner.batch.order import run_order, sort_key, tokens_of
from mlxrunner.cache.entry import TokenArray, as_tokens
from mlxrunner.errors import DamagedStoreError, StoreError
from mlxrunner.system.writing import open_database, open_temporary_database
from mlxrunner.tokenizer.prompt import Prompt

Format = Literal["plain", "chat.completion", "text_completion", "response", "unknown"]
"""The form of a line's answer: our own object, or the OpenAI object of that name.

A line that can't be read is "unknown"; `finish` gives it the format of the first line that can.
"""

CUT = "cut"
"""The name, among the parts of a shard, of the digest of the cut that it is a part of."""
FORMATS = frozenset(get_args(Format))
Place = int | str
"""The number of a line in the only file, from 1, or a text of words that names its place."""


def place_of(number: Place) -> str:
    """Return a line's place for an error: `line 4`, or the text that names it."""
    return f"line {number}" if isinstance(number, int) else number


@dataclass(frozen=True)
class InputLine:
    """A line of the input that is not empty."""

    index: int
    """The number of the line among those that are not empty, from 0."""
    number: Place
    """The number of the line in the file, from 1, or a text that says where it is."""
    prompt: Prompt | None = None
    """The text, messages or tokens of the prompt; None if it can't be told."""
    id: str | int | None = None
    """The id that the line gives; None if it gives none."""
    format: Format = "plain"
    """The form of its answer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `GenerateOptions` that the line itself gives."""
    error: str | None = None
    """The reason why it can't be run, in one line; in a file the line number comes first."""


@dataclass(frozen=True)
class StoredLine(InputLine):
    """A line with its tokens. A prompt of token ids is None."""

    tokens: TokenArray = field(default_factory=lambda: as_tokens([]))
    """The tokens of its prompt; empty if there is an error."""

    @property
    def key(self) -> bytes:
        """The `sort_key` of the tokens."""
        return sort_key(self.tokens)


@dataclass(slots=True)
class BriefLine:
    """The fields of a StoredLine on which its cost depends. It is made in less time."""

    index: int
    key: bytes
    options: Mapping[str, Any]
    error: str | None

    @property
    def tokens(self) -> TokenArray:
        """The tokens of its prompt, which are made again each time."""
        return tokens_of(self.key)


@dataclass(frozen=True)
class StoredAnswer:
    """The answer to a line."""

    place: int
    """The position of this answer, to be passed as `after` to read the answers after it."""
    index: int
    body: bytes
    """The bytes of the answer."""
    failed: bool


@dataclass(frozen=True)
class LineCounts:
    """The numbers of lines in a store."""

    lines: int
    """The lines that were added; all lines once the input is complete."""
    broken: int
    """The lines that can't be run."""
    done: int
    """The lines that have an answer."""
    failed: int
    """The lines whose answer is an error."""

    @property
    def left(self) -> int:
        """The lines that have no answer."""
        return self.lines - self.done


def _line_of(columns: Sequence[Any]) -> StoredLine:
    """Return the line of a row.

    Raise ValueError, TypeError or RecursionError if the columns are not those of a line, although
    their checksum is right.
    """
    index, number, name, _, error, tokens, prompt, form = columns
    made_of = None if prompt is None else json.loads(prompt)
    options = _options_of(columns)
    return StoredLine(index, number, made_of, name, form, options, error, tokens_of(tokens))


def _brief_of(columns: Sequence[Any]) -> BriefLine:
    """Return the line of a row in brief. Raise what `_line_of` raises, the prompt aside."""
    index, error, tokens = columns[0], columns[4], columns[5]
    if not isinstance(tokens, bytes) or len(tokens) % 4:
        raise TypeError("not the tokens of a line")
    return BriefLine(index, tokens, _options_of(columns), error)


def _options_of(columns: Sequence[Any]) -> dict[str, Any]:
    index, number, name, options, error = columns[:5]
    found = json.loads(options) if options else {}
    if not (
        isinstance(found, dict)
        and isinstance(index, int)
        and isinstance(number, (int, str))
        and (name is None or isinstance(name, (str, int)))
        and (error is None or isinstance(error, str))
    ):
        raise TypeError("not the columns of a line")
    return found


T = TypeVar("T")

APPLICATION_ID = 0x6D6C7862  # "mlxb"
VERSION = 4
MARKS = f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={VERSION}"
CACHE_KIB = 32 * 1024
"""The KiB of memory for SQLite's pages, and for a run of its sort."""

SCHEMA = """
CREATE TABLE input (lines INTEGER NOT NULL, broken INTEGER NOT NULL);
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE lines (
    line INTEGER PRIMARY KEY, number INTEGER NOT NULL, id, format TEXT NOT NULL, options TEXT, \
error TEXT, tokens BLOB NOT NULL, prompt TEXT,
    sum INTEGER NOT NULL
);
CREATE UNIQUE INDEX ids ON lines (id) WHERE id IS NOT NULL AND error IS NULL;
CREATE TABLE places (place INTEGER PRIMARY KEY, line INTEGER NOT NULL);
CREATE TABLE results (done INTEGER PRIMARY KEY, line INTEGER NOT NULL UNIQUE REFERENCES lines, \
failed INTEGER NOT NULL, body BLOB NOT NULL,
    sum INTEGER NOT NULL
);
CREATE INDEX failures ON results (line) WHERE failed;
"""
"""An opened store has to have exactly these tables: never change a character."""

TABLES = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
SETTINGS = f"""
PRAGMA locking_mode=EXCLUSIVE; PRAGMA cache_size=-{CACHE_KIB}; PRAGMA foreign_keys=ON;
BEGIN EXCLUSIVE; COMMIT;
PRAGMA synchronous=FULL; PRAGMA fullfsync=ON;  -- the latter: macOS
PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON
"""
INSERT_LINE = """
INSERT INTO lines (line, number, id, options, error, tokens, prompt, format, sum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
INSERT_RESULT = "INSERT INTO results (done, line, failed, body, sum) VALUES (?, ?, ?, ?, ?)"
RESULT = "SELECT done, line, failed, body, sum FROM results WHERE"
NEXT_LINE = "line = (SELECT min(line) FROM lines WHERE line > ?)"
SET_FORMATS = """
UPDATE lines SET format = :format,
sum = row_sum(line, number, id, options, error, tokens, prompt, :format)
WHERE format = 'unknown'
"""
SORTED = "lines ORDER BY tokens, line"
FIRST_FORMAT = "SELECT format FROM lines WHERE format <> 'unknown' ORDER BY line LIMIT 1"
FIRST_WITH_ID = "SELECT number FROM lines WHERE id = ? AND error IS NULL"
PLACED = "SELECT line FROM places ORDER BY line"
HELD = "SELECT line FROM lines ORDER BY line"
_COLUMNS = "line, number, id, options, error, tokens, prompt, format, sum"
LINE = f"SELECT {_COLUMNS} FROM lines WHERE line = ?"
_LEFT = "WHERE line NOT IN (SELECT line FROM results)"
_ORDERS = {"prefix": ("place", "places CROSS JOIN lines USING (line)"), "input": ("line", "lines")}
ALL = {
    order: f"SELECT {_COLUMNS} FROM {table} {_LEFT} ORDER BY {place}"
    for order, (place, table) in _ORDERS.items()
}
NEXT = {
    order: f"SELECT {_COLUMNS}, {place} FROM {table} {_LEFT} AND {place} > ? "
    f"ORDER BY {place} LIMIT 1"
    for order, (place, table) in _ORDERS.items()
}


class Store:
    """A batch store, made by `create` or `open`; a context manager.

    An input goes in by `add` and ends with `finish`. Then `pending` yields its lines, and `record`
    and `commit` take their answers. Each method may raise StoreError; everything since the last
    commit is undone then.
    """

    def __init__(self, name: str, database: sqlite3.Connection) -> None:
        """Call `create` or `open` instead."""
        self._name, self._db = name, database
        self._lines = self._broken = self._own = 0
        self._recorded = 0  # within a transaction, `done` of its last result

    @classmethod
    def create(cls, path: Path | None = None, *, unique_ids: bool = True) -> Store:
        """Make a new, empty store in a file with mode 0600. Raise StoreError if the file exists.

        Without a `path` the store is private and ends with the process. With `unique_ids` a line
        whose id was used before gets an error.
        """
        store = cls._connect(path, new=True)
        if not unique_ids:
            store._db.execute("DROP INDEX ids")
        return store

    @classmethod
    def open(cls, path: Path) -> Store:
        """Open an existing store.

        Raise StoreError if there is none, if it is not a store of this version, or if another
        process has it open.
        """
        return cls._connect(path, new=False)

    @classmethod
    def _connect(cls, path: Path | None, *, new: bool) -> Store:
        """Return a store that holds the lock of its file and whose commits are on the disk."""
        name = "the batch's temporary file" if path is None else str(path)
        try:
            opened = open_temporary_database() if path is None else open_database(path, new=new)
        except OSError as error:
            problem = "can't be made" if new else "can't be opened"
            raise StoreError(f"{error.filename or name}: {problem}: {error.strerror}") from error
        except sqlite3.Error as error:
            raise StoreError(f"{name}: {reason(error)}") from error
        store = cls(name, opened)
        try:
            store._set_up()
        except BaseException:
            store.close()
            raise
        return store

    def _set_up(self) -> None:
        with self._explained():
            self._db.executescript(SETTINGS)
            if self._one("PRAGMA schema_version") == (0,):  # new, or left by a killed process
                self._db.executescript(f"BEGIN; {MARKS}; {SCHEMA} COMMIT")
            (kind,) = self._one("PRAGMA application_id")
            (version,) = self._one("PRAGMA user_version")
            if kind != APPLICATION_ID:
                raise DamagedStoreError(self._name, "is not a batch store")
            if version != VERSION:
                why = f"is a batch store of version {version}, and this program knows version"
                raise DamagedStoreError(self._name, f"{why} {VERSION}")
            self._check()

    def _check(self) -> None:
        """Raise DamagedStoreError if the tables are not ours or do not agree with each other."""
        if self._db.execute(TABLES).fetchall() != tables():
            raise self.damaged("its tables are not those of a batch store")
        inputs = self._db.execute("SELECT lines, broken FROM input").fetchall()
        (last,) = self._one("SELECT max(line) FROM lines")
        (place,) = self._one("SELECT max(place) FROM places")
        if not inputs:
            if last is not None or place is not None:
                raise self.damaged("it has lines, and no end of them")
            return
        lines, broken = inputs[0]
        if len(inputs) > 1 or not _are_ints(lines, broken) or not 0 <= broken <= lines:
            raise self.damaged("it does not say how many lines there are")
        last, places = -1 if last is None else last, place or 0
        is_part = self._one("SELECT 1 FROM meta WHERE name = ?", CUT) is not None
        if not (last < lines and places <= lines if is_part else last + 1 == lines == places):
            raise self.damaged(f"{lines} lines should be in it, and are not")
        # Both in one order: to look up each of 10 million lines wrote 39 GB, and took 2 min.
        held, placed = (self._db.execute(query) for query in (HELD, PLACED))
        if not all(one == other for one, other in zip_longest(held, placed)):
            raise self.damaged("a line has no place in its order")
        self._lines, self._broken, self._own = lines, broken, places

    def damaged(self, why: str) -> DamagedStoreError:
        """Return the error to raise for a store whose content this program can't have written."""
        return DamagedStoreError(self._name, f"is damaged ({why})")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop everything recorded since the last commit, and close the file. Safe to repeat."""
        self._db.close()

    @property
    def is_complete(self) -> bool:
        """True if the store holds a whole input; otherwise it holds nothing of it."""
        with self._explained():
            return self._one("SELECT lines FROM input") is not None

    @property
    def size(self) -> int:
        """The number of lines of the whole input, with those of other shards."""
        return self._lines

    @property
    def meta(self) -> dict[str, str]:
        """The parts that the store was made from, by name, as given to `finish`."""
        with self._explained():
            found = self._db.execute("SELECT name, value FROM meta").fetchall()
            if not all(isinstance(text, str) for row in found for text in row):
                raise self.damaged("what it was made from is not text")
            return dict(found)

    @property
    def counts(self) -> LineCounts:
        """The numbers of lines and answers so far."""
        with self._explained():
            (done,) = self._one("SELECT count(*) FROM results")
            (failed,) = self._one("SELECT count(*) FROM results WHERE failed")
        return LineCounts(self._own, self._broken, done, failed)

    def add(self, line: StoredLine) -> None:
        """Add the next line of the input, whose index is one more than that of the last."""
        with self._explained():
            self._begin_input()
            if line.index != self._lines:
                wrong = f"line {line.index} was added where line {self._lines} has to come"
                raise StoreError(f"{self._name}: {wrong}")
            try:
                self._insert(line)
            except sqlite3.IntegrityError:
                (first,) = self._one(FIRST_WITH_ID, line.id)
                name = "id" if line.format == "plain" else "custom_id"
                where, earlier = place_of(line.number), place_of(first)
                twice = "from the same file, which is given twice"
                before = twice if earlier == where else f"on {earlier}"
                problem = f"{where}: {name} {line.id!r:.80} was there before, {before}"
                line = replace(line, error=problem, tokens=as_tokens([]))
                self._insert(line)
            self._lines = self._own = self._lines + 1
            self._broken += line.error is not None

    def _insert(self, line: StoredLine) -> None:
        options = json.dumps(dict(line.options)) if line.options else None
        prompt = None if line.prompt is None else json.dumps(line.prompt, default=str)
        columns = (line.index, line.number, line.id, options, line.error, line.key, prompt)
        row = (*columns, line.format)
        self._db.execute(INSERT_LINE, (*row, checksum(*row)))

    def _begin_input(self) -> None:
        if self._db.in_transaction:
            return
        if self._one("SELECT lines FROM input") is not None:
            raise StoreError(f"{self._name}: its input is complete, nothing can be added")
        self._db.execute("BEGIN")
        self._lines = self._broken = self._own = 0

    def arrange(self, *, by_tokens: bool = False) -> None:
        """Put the input, which is now complete, into its prefix order, which `pending` then has.

        With `by_tokens` that is the order of the token ids, otherwise that of `run_order`.
        """
        with self._explained():
            self._begin_input()
            if self._broken:
                (form,) = self._one(FIRST_FORMAT) or ("plain",)
                self._db.create_function("row_sum", -1, checksum)
                self._db.execute(SET_FORMATS, {"format": form})
            if by_tokens:
                self._db.execute(f"INSERT INTO places (line) SELECT line FROM {SORTED}")
            else:
                rows = self._db.execute(f"SELECT line, tokens FROM {SORTED}")
                order = run_order(rows, self._lines)
                self._db.executemany("INSERT INTO places (line) VALUES (?)", zip(order))

    def keep(self, lines: Iterable[int]) -> None:
        """Delete all lines but these, which are those of one shard, in the order in which they run.

        Call `arrange` before.
        """
        with self._explained():
            self._db.execute("DELETE FROM places")
            self._db.executemany("INSERT INTO places (line) VALUES (?)", zip(lines))
            self._db.execute("DELETE FROM lines WHERE line NOT IN (SELECT line FROM places)")
            (self._own,) = self._one("SELECT count(*) FROM places")
            (self._broken,) = self._one("SELECT count(*) FROM lines WHERE error IS NOT NULL")

    def finish(self, meta: Mapping[str, str] | None = None, *, by_tokens: bool = False) -> None:
        """Commit the whole input, in prefix order. `arrange` need not have been called.

        Until then the store on the disk stays as it was. `meta` holds the parts that it was made
        from, among them the CUT of a shard. `by_tokens` is for `arrange`.
        """
        with self._explained():
            self._begin_input()
            if self._own and self._one("SELECT place FROM places LIMIT 1") is None:
                self.arrange(by_tokens=by_tokens)
            self._db.executemany("INSERT INTO meta VALUES (?, ?)", (meta or {}).items())
            self._db.execute("INSERT INTO input VALUES (?, ?)", (self._lines, self._broken))
            self._db.execute("COMMIT")

    def pending(self, order: Order = "prefix") -> Iterator[StoredLine]:
        """Yield the lines without an answer, one at a time.

        A line that gets its answer in the meantime is left out. "prefix" yields broken lines first
        and then the others in their prefix order; "input" yields all as they came.
        """
        place = -1
        while (row := self._next(NEXT[order], place)) is not None:
            yield self._read(row[:-1], _line_of)
            place = row[-1]

    def left(self, order: Order = "prefix") -> Iterator[BriefLine]:
        """Yield the lines without an answer as `pending` does, in brief and in less time.

        No answer may come in the meantime.
        """
        with self._explained():
            for row in self._db.execute(ALL[order]):
                yield self._read(row, _brief_of)

    def line(self, index: int) -> StoredLine:
        """Return line `index`, which has to be there."""
        row = self._next(LINE, index)
        if row is None:
            raise self.damaged(f"line {index} is not found in it")
        return self._read(row, _line_of)

    def _read(self, row: Sequence[Any], made_of: Callable[[Sequence[Any]], T]) -> T:
        """Return what is made of a line's row. Raise DamagedStoreError if it has changed."""
        columns = row[:-1]
        if checksum(*columns) != row[-1] or columns[-1] not in FORMATS:
            raise self.damaged(f"line {columns[0]!r:.20} of it has changed")
        try:
            return made_of(columns)
        except (ValueError, TypeError, RecursionError) as error:
            raise self.damaged(f"line {columns[0]!r:.20} of it can't be read") from error

    def record(self, index: int, body: bytes, *, failed: bool = False) -> None:
        """Take the answer of line `index`. The next `commit` keeps it.

        Raise StoreError if the line has an answer already.
        """
        with self._explained():
            if not self._db.in_transaction:
                self._db.execute("BEGIN")
                (self._recorded,) = self._one("SELECT ifnull(max(done), 0) FROM results")
            self._recorded += 1
            row = (self._recorded, index, int(failed), body)
            self._db.execute(INSERT_RESULT, (*row, checksum(*row)))

    def commit(self) -> None:
        """Put everything recorded onto the disk, before this returns."""
        with self._explained():
            if self._db.in_transaction:
                self._db.execute("COMMIT")

    def answers(self, order: OutputOrder = "input", after: int = -1) -> Iterator[StoredAnswer]:
        """Yield the answers behind `after` (a `StoredAnswer.place`), one at a time.

        "input" yields them in the order of the input, up to the first line that has none yet;
        "done" yields them as they were recorded.
        """
        where = NEXT_LINE if order == "input" else "done > ? ORDER BY done LIMIT 1"
        while (row := self._next(f"{RESULT} {where}", after)) is not None:
            answer = self._answer(row, order)
            after = answer.place
            yield answer

    def _answer(self, row: tuple[Any, ...], order: OutputOrder = "input") -> StoredAnswer:
        done, line, failed, body, written = row
        is_whole = checksum(*row[:-1]) == written and _are_ints(done, line)
        if not is_whole or not 0 <= line < self._lines:
            raise self.damaged(f"the answer of line {line!r:.20} has changed")
        return StoredAnswer(done if order == "done" else line, line, body, bool(failed))

    def first_failure(self) -> StoredAnswer | None:
        """Return the answer of the first failed line of the input; None if no line has failed."""
        row = self._next(f"{RESULT} failed AND line > ? ORDER BY line LIMIT 1", -1)
        return None if row is None else self._answer(row)

    def _next(self, query: str, after: int) -> Any:
        try:
            return self._one(query, after)
        except (sqlite3.Error, UnicodeDecodeError):
            with self._explained():  # not around each row: it is asked for millions
                raise

    def _one(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into errors of one line. Undo everything since the last commit."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, StoreError) as error:
            with suppress(sqlite3.Error):
                self._db.rollback()
            if isinstance(error, StoreError):
                raise
            # SQLite quotes the file in its messages, which may not be UTF-8.
            if isinstance(error, UnicodeDecodeError) or _is_damage(error):
                raise DamagedStoreError(self._name, "is not a batch store, or damaged") from error
            raise StoreError(f"{self._name}: {reason(error)}") from error


def _are_ints(one: Any, other: Any) -> bool:
    return isinstance(one, int) and isinstance(other, int)


def tables() -> list[Any]:
    """Return the rows that describe the tables of a store of this version."""
    with closing(open_temporary_database()) as database:
        database.executescript(SCHEMA)
        return database.execute(TABLES).fetchall()


def checksum(*columns: str | bytes | int | None) -> int:
    """Return a checksum of a row, which tells if a bit on the disk has flipped."""
    parts: list[bytes] = []
    for column in columns:
        if column is None:
            parts.append(b"NoneTypeNone")
        elif type(column) is str:
            parts.append(b"str")
            parts.append(column.encode("utf-8", "surrogatepass"))
        elif type(column) is int:
            parts.append(b"int%d" % column)
        elif isinstance(column, bytes):
            parts.append(b"bytes")
            parts.append(column)
        else:
            parts.append(f"{type(column).__name__}{column}".encode("utf-8", "surrogatepass"))
    return zlib.crc32(b"".join(parts))


_DAMAGE = (
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_MISMATCH,
)


def _is_damage(error: sqlite3.Error) -> bool:
    """Return True if the error says that the file is not a sound SQLite database."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # a text in the file that is not UTF-8
        return isinstance(error, sqlite3.OperationalError)
    return code & 0xFF in _DAMAGE


def reason(error: sqlite3.Error) -> str:
    """Return the cause of an error of SQLite, and its remedy, in one line."""
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_BUSY:
            return "another process is using it: wait for its end"
        case sqlite3.SQLITE_FULL:
            return (
                "the disk is full (or that of temporary files): free space and resume; "
                "committed answers are kept"
            )
        case sqlite3.SQLITE_CONSTRAINT:
            return f"a line has to be there, and can have one result only ({error})"
    return f"{' '.join(str(error).split())}; what was committed is kept"

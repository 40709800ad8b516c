"""The SQLite database of a batch store: its tables, statements, checksums and errors.

Knows nothing about what the columns of a row mean.
"""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import closing
from typing import Any

from mlxrunner.system.writing import open_temporary_database

APPLICATION_ID = 0x6D6C7862  # "mlxb"
VERSION = 4
"""The version of the tables."""
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
_ORDERS = {
    "prefix": ("place", "places CROSS JOIN lines USING (line)"),
    "input": ("line", "lines"),
}
ALL = {
    order: f"SELECT {_COLUMNS} FROM {table} {_LEFT} ORDER BY {place}"
    for order, (place, table) in _ORDERS.items()
}
NEXT = {
    order: f"SELECT {_COLUMNS}, {place} FROM {table} {_LEFT} AND {place} > ? "
    f"ORDER BY {place} LIMIT 1"
    for order, (place, table) in _ORDERS.items()
}


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


def is_damage(error: sqlite3.Error) -> bool:
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
                "the disk is full (or that of temporary files): make room and go on; what was "
                "committed is kept"
            )
        case sqlite3.SQLITE_CONSTRAINT:
            return f"a line has to be there, and can have one result only ({error})"
    return f"{' '.join(str(error).split())}; what was committed is kept"

"""Read rows of Parquet files and Arrow files, a few at a time, with the columns that are needed.

pyarrow decodes them. It reads no more than `ROWS` rows at once, and runs no code of a data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from mlxrunner.batch.stream import needed
from mlxrunner.batch.table import Columns
from mlxrunner.errors import BrokenLineError, PromptError

ROWS = 16
"""The number of rows that are decoded at once: one of a hostile file may be as large as memory."""
PARQUET, FEATHER = b"PAR1", b"ARROW1"
"""The first bytes of Parquet files and of Arrow files with an index."""
Row = tuple[int, Mapping[str, Any] | PromptError]
"""The number of a row, from 1, and its fields or its error."""


def parquet_rows(stream: BinaryIO, name: str, columns: Columns, longest: int) -> Iterator[Row]:
    """Yield the rows of a Parquet file. `name` is for errors.

    A row takes at most `longest` bytes. Raise PromptError if the file can't be read, and
    OptionError if it lacks a column.
    """
    needed("Parquet", name)
    from pyarrow.parquet import ParquetFile

    with _readable(name, "Parquet"), ParquetFile(stream, pre_buffer=False) as file:
        rows = columns.within(file.schema_arrow.names, "Parquet file")
        batches = file.iter_batches(ROWS, columns=rows.names, use_threads=False)
        yield from _numbered(batches, rows, longest)


def arrow_rows(stream: BinaryIO, name: str, columns: Columns, longest: int) -> Iterator[Row]:
    """Yield the rows of an Arrow file, as `parquet_rows` does."""
    pyarrow = needed("Arrow", name)
    head = stream.read(len(FEATHER))
    stream.seek(0)
    with _readable(name, "Arrow"):
        if head == FEATHER:
            file = pyarrow.ipc.open_file(stream)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            file = pyarrow.ipc.open_stream(stream)
            batches = iter(file)
        rows = columns.within(file.schema.names, "Arrow file")
        yield from _numbered(_few(batches, rows.names), rows, longest)


def _few(batches: Iterator[Any], names: list[str]) -> Iterator[Any]:
    """Yield parts of ROWS rows of each batch, with these columns only."""
    for batch in batches:
        chosen = batch.select(names)
        for first in range(0, chosen.num_rows, ROWS):
            yield chosen.slice(first, ROWS)


def _numbered(batches: Iterator[Any], rows: Any, longest: int) -> Iterator[Row]:
    """Yield the rows of the batches, numbered from 1."""
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            if (size := _size(values)) > longest:
                problem = f"is longer than {longest} bytes: it has {size:,} characters"
                yield number, BrokenLineError(problem, rows.known(values))
            else:
                yield number, rows.fields(f"row {number}", values, longest)


def _size(value: Any) -> int:
    """Return the number of characters and bytes in the texts of a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 1


@contextmanager
def _readable(name: str, kind: str) -> Iterator[None]:
    """Raise PromptError in the place of the errors of pyarrow."""
    import pyarrow

    try:
        yield
    except PromptError:
        raise
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise PromptError(f"{name}: can't be read as {kind}: {why}") from error

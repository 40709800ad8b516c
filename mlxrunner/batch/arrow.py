"""Read rows of Parquet files and Arrow files, a few at a time, with the columns that are needed.

pyarrow decodes them. It reads no more than `ROWS` rows at once, and runs no code of a data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from mlxrunner.batch.stream import needed
from mlxrunner.batch.table import Columns, Rows
from mlxrunner.errors import BrokenLineError, PromptError

ROWS = 16
"""The number of rows that are decoded at once: one of a hostile file may be as large as memory."""
LONGEST_ID = 2**20
"""Most bytes of the id that is kept for a row that can't be read."""
UNUSABLE = (ValueError, OverflowError, LookupError)
"""The errors of pyarrow for a value that Python can't hold."""
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
    """Yield parts of ROWS rows of each batch, with these columns only.

    pyarrow does not check the offsets of an Arrow file when it reads one. Wrong ones lead out of
    memory, and `validate` finds them.
    """
    for batch in batches:
        chosen = batch.select(names)
        chosen.validate(full=True)
        for first in range(0, chosen.num_rows, ROWS):
            yield chosen.slice(first, ROWS)


def _numbered(batches: Iterator[Any], rows: Rows, longest: int) -> Iterator[Row]:
    """Yield the rows of the batches, numbered from 1."""
    number = 0
    for batch in batches:
        for values in _decoded(batch, rows, longest):
            number += 1
            if isinstance(values, PromptError):
                yield number, values
            elif (size := _size(values)) > longest:
                yield number, BrokenLineError(_too_long(size, longest), rows.known(values))
            else:
                yield number, rows.fields(f"row {number}", values, longest)


def _decoded(batch: Any, rows: Rows, longest: int) -> Iterator[dict[str, Any] | PromptError]:
    """Yield the values of each row of a batch, or its error.

    A batch with too much in it, or with a value that Python can't hold (the year 60000), is decoded
    row by row.
    """
    with suppress(*UNUSABLE):
        if _weight(batch.columns) <= longest:
            yield from batch.to_pylist()
            return
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        try:
            size = _weight(row.columns)
            if size <= longest:
                yield row.to_pylist()[0]
                continue
            problem = _too_long(size, longest)
        except UNUSABLE as error:
            problem = f"a value can't be read: {' '.join(str(error).split())[:200]}"
        yield BrokenLineError(problem, _known(row, rows))


def _known(row: Any, rows: Rows) -> dict[str, Any]:
    """Return the id of a row that can't be read, if at least that can be."""
    with suppress(*UNUSABLE):
        if rows.id is not None and _weight([row.column(rows.id)]) <= LONGEST_ID:
            return rows.known(row.select([rows.id]).to_pylist()[0])
    return rows.known({})


def _too_long(size: int, longest: int) -> str:
    return f"is longer than {longest} bytes: it has {size:,} characters"


def _weight(columns: Iterable[Any]) -> int:
    """Return the number of values and bytes that columns of Arrow make when they are decoded.

    This costs no memory: a value that many others repeat, or a run of them, is stored once. Raise
    ValueError for a kind of column that no prompt is made of.
    """
    from pyarrow import types

    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_map)
    total, left = 0, list(columns)
    while left:
        column = left.pop()
        kind = column.type
        total += len(column)
        if types.is_dictionary(kind):
            total += _weight_of_indices(column)
        elif types.is_struct(kind):
            left += column.flatten()
        elif any(of(kind) for of in lists):
            left.append(column.flatten())
        elif hasattr(column, "storage"):
            left.append(column.storage)
        elif kind.num_fields or types.is_run_end_encoded(kind):
            raise ValueError(f"a column of the type {kind!s:.80} makes no prompt")
        elif str(kind).endswith("_view"):
            total += sum(len(one.as_buffer() or b"") for one in column)
        else:
            total += column.nbytes
    return total


def _weight_of_indices(column: Any) -> int:
    """Return the bytes that a column of indices makes of the values of its dictionary."""
    values, used = column.dictionary, column.indices.drop_null()
    counts = (
        (int(one["values"].as_py()), int(one["counts"].as_py())) for one in used.value_counts()
    )
    return sum(_weight([values.slice(index, 1)]) * count for index, count in counts)


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

"""Turn the rows of tables into prompts: CSV with any delimiter, Parquet, Arrow, or a data set.

`Columns` says which column is the prompt, the messages or the id, or which text is made of several.
Python's csv module and pyarrow decode, at most a few rows at once, and no code of a data set runs.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlxrunner.errors import BrokenLineError, OptionError, PromptError, ReadError
from mlxrunner.system.imports import how_to_install
from mlxrunner.system.reading import read_json

ID, PROMPT, MESSAGES = "id", "prompt", "messages"
"""The names of the columns that are used where no option names another."""
_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
KINDS = {",": "CSV file", "\t": "TSV file"}
"""The name of a table in an error, by its delimiter."""
DELIMITERS = {",": "a comma", "\t": "a tab"}
"""The name of a delimiter in an error."""
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
LOOKED_AT = 8
"""The number of first bytes that tell the kind of a file."""
HUB = "hf://datasets/"
"""The beginning of the name of a data set on the hub."""
_HUB_NAME = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?")
_SHARD = re.compile(r"(.+?)-\d{1,6}-of-\d{1,6}")
LARGEST = 2**24
"""The most bytes of a JSON file that describes a data set."""
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


class Template:
    """A text with `{column}`s, in which `{{` and `}}` stand for braces.

    Creating it raises OptionError for any other brace, and for a text without columns.
    """

    def __init__(self, text: str) -> None:
        parts = list(_PART.finditer(text))
        wrong = next((part for part in parts if part[0] in ("{", "}", "{}")), None)
        if wrong is not None:
            raise OptionError(
                f"the prompt template has a {wrong[0]!r} at character {wrong.start()}: write "
                "{column}, or {{ for a brace"
            )
        self._names = [part[1] for part in parts if part[1] is not None]
        self.columns = list(dict.fromkeys(self._names))
        if not self.columns:
            raise OptionError(f"the prompt template has no {{column}} in it: {text!r:.80}")
        self._text = text

    def size(self, row: Mapping[str, Any]) -> int:
        """Return the number of characters that `fill` makes of a row, or slightly more."""
        return len(self._text) + sum(len(shown(row[name])) for name in self._names)

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the template with the row's values. Braces in the values mean nothing."""
        return _PART.sub(
            lambda match: match[0][0] if match[1] is None else shown(row[match[1]]), self._text
        )


def shown(value: Any) -> str:
    """Return a value of a row as text: a text as it is, nothing for null, and else JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Columns:
    """The columns of a table that make a line. Creating it raises OptionError if two are prompts.

    Without a template, and without a column of prompts or messages, a column `prompt` or `messages`
    is taken.
    """

    template: Template | None = None
    """The text that makes a prompt of the values of a row."""
    prompt: str | None = None
    messages: str | None = None
    id: str | None = None
    """The name of the column of ids; None for `id`, if there is one."""

    def __post_init__(self) -> None:
        given = {
            "--row-template": self.template,
            "--prompt-column": self.prompt,
            "--messages-column": self.messages,
        }
        both = [flag for flag, value in given.items() if value is not None]
        if len(both) > 1:
            raise OptionError(f"{both[0]} and {both[1]} both say what a prompt is: use one of them")

    @property
    def is_given(self) -> bool:
        """True if an option names a column."""
        return self != Columns()

    def within(self, header: Sequence[str], kind: str) -> Columns:
        """Return the columns as they are in a table with this header, with those used by default.

        `kind` names the table in an error. Raise OptionError if a column is missing or there twice.
        """
        prompt, messages = self.prompt, self.messages
        if self.template is None and prompt is None and messages is None:
            found = [name for name in (PROMPT, MESSAGES) if name in header]
            if len(found) != 1:
                problem = "both" if found else "neither"
                raise OptionError(
                    f"the {kind} has {problem} a column 'prompt' {'and' if found else 'nor'} one "
                    "'messages': say with --row-template, --prompt-column or --messages-column "
                    f"what to ask; it has {', '.join(map(repr, header))}"[:1000]
                )
            prompt, messages = (PROMPT, None) if found == [PROMPT] else (None, MESSAGES)
        chosen = replace(self, prompt=prompt, messages=messages)
        missing = [repr(name) for name in chosen.names if name not in header]
        if missing:
            problem = f"the {kind} has no column {', '.join(missing)}"
            raise OptionError(f"{problem}: it has {', '.join(map(repr, header))}"[:1000])
        for name in (*chosen.names, self.id or ID):
            places = [str(place) for place, column in enumerate(header, 1) if column == name]
            if len(places) > 1:
                raise OptionError(
                    f"the {kind} has more than one column {name!r}: number {' and '.join(places)}"
                )
        return replace(chosen, id=self.id or (ID if ID in header else None))

    @property
    def names(self) -> list[str]:
        """The names of the columns that are read, once `within` has found them."""
        names = list(self.template.columns) if self.template else []
        names += [name for name in (self.prompt, self.messages, self.id) if name is not None]
        return list(dict.fromkeys(names))

    def known(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the id of a row, for a row that can't be read as well."""
        name = None if self.id is None else values.get(self.id)
        return {"id": None if name == "" else name}

    def fields(
        self, row: str, values: Mapping[str, Any], longest: int
    ) -> dict[str, Any] | PromptError:
        """Return the fields of a row, or its error. `row` names it in the error."""
        known = self.known(values)
        if self.messages is not None:
            return self._conversation(values[self.messages], known)
        if self.template is None:
            return {"prompt": values[self.prompt or PROMPT], **known}
        if (size := self.template.size(values)) > longest:
            problem = f"{row} makes a prompt of {size:,} characters"
            return BrokenLineError(f"{problem}, and {longest:,} are the most", known)
        return {"prompt": self.template.fill(values), **known}

    def _conversation(self, value: Any, known: dict[str, Any]) -> dict[str, Any] | PromptError:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                return BrokenLineError(f"column {self.messages!r:.80} is not JSON: {error}", known)
        return {"messages": [] if value is None else value, **known}


def read_table(
    lines: Iterable[bytes | None], columns: Columns, longest: int, delimiter: str = ","
) -> Iterator[tuple[int, dict[str, Any] | PromptError]]:
    """Yield for each row the number of its first line, and its fields or its error.

    Python's csv module reads the rows in its strict mode. A row takes at most `longest` bytes. The
    first step raises OptionError if the header is missing or broken, or lacks a column.
    """
    source = _CsvSource(lines, longest)
    reader = csv.reader(source, strict=True, delimiter=delimiter)
    header = _header(reader, longest)
    rows = columns.within(header, KINDS.get(delimiter, "table"))
    count = 0
    while True:
        number = source.begin()
        try:
            row = _next_row(reader, longest)
        except (csv.Error, ValueError) as error:
            count += 1
            yield number, PromptError(f"not a CSV row: {error}")
            continue
        if row is None:
            return
        if row:
            count += 1
            yield number, _row_fields(count, row, header, rows, longest, delimiter)


class _CsvSource:
    """An iterator that gives lines to csv.reader and limits the size of a row.

    A row takes several lines if its values contain line ends.
    """

    def __init__(self, lines: Iterable[bytes | None], longest: int) -> None:
        self._lines, self._longest = iter(lines), longest
        self.number = self._taken = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        self._taken += self._longest + 1 if line is None else len(line)
        if line is None or self._taken > self._longest:
            raise csv.Error(f"a row is longer than {self._longest} bytes (is a quote missing?)")
        if b"\0" in line:
            raise csv.Error("there is a NUL byte in it: is it a text file?")
        return line.decode("utf-8", "surrogateescape")

    def begin(self) -> int:
        """Begin the next row and return the number of its first line."""
        self._taken = 0
        return self.number + 1


def _header(reader: Any, longest: int) -> list[str]:
    try:
        while (header := _next_row(reader, longest)) == []:  # an empty line
            pass
    except (csv.Error, ValueError) as error:
        raise OptionError(f"the CSV file's header can't be read: {error}") from error
    if not header:
        raise OptionError("the CSV file has no header: its first line has to name the columns")
    return [name.strip() for name in header]


def _next_row(reader: Any, longest: int) -> list[str] | None:
    """Return the next row, or None at the end.

    Raise csv.Error for a broken row, and ValueError for one that is not UTF-8.
    """
    before = csv.field_size_limit(longest)  # a limit of the whole module
    try:
        row: list[str] | None = next(reader, None)
    except csv.Error as error:
        if str(error).startswith("new-line character"):
            raise csv.Error(
                "there is a carriage return in it that ends no line: lines have to end with LF or "
                "CRLF"
            ) from error
        raise
    finally:
        csv.field_size_limit(before)
    try:
        "".join(row or ()).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it is not UTF-8") from error
    return row


def _row_fields(
    number: int, row: list[str], header: list[str], rows: Columns, longest: int, delimiter: str
) -> dict[str, Any] | PromptError:
    """Return the fields of row `number` (from 1), or its error.

    A row with too few or too many values, or with too long a prompt, keeps the id in its column.
    """
    values = dict(zip(header, row, strict=False))
    if len(row) == len(header):
        return rows.fields(f"row {number}", values, longest)
    known = rows.known(values)
    problem = f"row {number} has {len(row)} values and the header {len(header)} columns: "
    if len(row) < len(header):
        missing = ", ".join(map(repr, header[len(row) :]))
        hint = f"(is {DELIMITERS.get(delimiter, repr(delimiter))} missing?)"
        return BrokenLineError(f"{problem}none for {missing:.200} {hint}", known)
    beyond = f"{', '.join(map(repr, row[len(header) :])):.200} follows the last"
    return BrokenLineError(f"{problem}{beyond}, {header[-1]!r:.80} (are quotes missing?)", known)


class HashedStream(io.RawIOBase):
    """A stream that hashes what is read from it, and whose first bytes can be looked at."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
        self._hash = hashlib.sha256()
        self.head = stream.read(LOOKED_AT) or b""
        """The first bytes, fewer if the stream is shorter. They are read as well."""
        self._left = self.head

    @property
    def digest(self) -> str:
        """The SHA-256 of the bytes read so far, in hexadecimal."""
        return self._hash.hexdigest()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._left[: len(buffer)]
        self._left = self._left[len(part) :]
        if not part:
            part = self._read(len(buffer)) or b""
        buffer[: len(part)] = part
        self._hash.update(part)
        return len(part)


@contextmanager
def decompressed(stream: HashedStream, name: str) -> Iterator[BinaryIO]:
    """Open a stream, decompressed if it is gzip or zstd. `name` is for errors.

    Raise PromptError if the stream is cut off or damaged where it is read within the block, or if
    it is zstd and pyarrow is missing.
    """
    source: BinaryIO = io.BufferedReader(stream)
    if stream.head.startswith(GZIP):
        kind, source = "gzip", cast(BinaryIO, gzip.GzipFile(fileobj=source, mode="rb"))
    elif stream.head.startswith(ZSTD):
        pyarrow = needed("zstd", name)
        codec = pyarrow.CompressedInputStream(pyarrow.PythonFile(source, mode="r"), "zstd")
        kind, source = "zstd", io.BufferedReader(codec)
    else:
        yield source
        return
    try:
        yield source
    except (EOFError, OSError, zlib.error) as error:
        is_cut = isinstance(error, EOFError) or "truncated" in str(error).lower()
        why = "it is cut off" if is_cut else " ".join(str(error).split())
        raise PromptError(
            f"{name}: can't be read to its end as {kind}: {why}: copy or download it again"
        ) from error


def needed(kind: str, name: str) -> Any:
    """Return pyarrow, which reads files of this kind. Raise PromptError if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise PromptError(
            f"{name}: is {kind}, which needs pyarrow: {how_to_install('data')}"
        ) from error
    return pyarrow


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


def _numbered(batches: Iterator[Any], rows: Columns, longest: int) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for values in _decoded(batch, rows, longest):
            number += 1
            if not isinstance(values, PromptError):
                values = rows.fields(f"row {number}", values, longest)
            yield number, values


def _decoded(batch: Any, rows: Columns, longest: int) -> Iterator[dict[str, Any] | PromptError]:
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
            problem = f"is longer than {longest} bytes: it has {size:,} characters"
        except UNUSABLE as error:
            problem = f"a value can't be read: {' '.join(str(error).split())[:200]}"
        yield BrokenLineError(problem, _known(row, rows))


def _known(row: Any, rows: Columns) -> dict[str, Any]:
    """Return the id of a row that can't be read, if at least that can be."""
    with suppress(*UNUSABLE):
        if rows.id is not None and _weight([row.column(rows.id)]) <= LONGEST_ID:
            return rows.known(row.select([rows.id]).to_pylist()[0])
    return rows.known({})


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


def dataset_files(folder: Path) -> list[Path] | None:
    """Return the files of the data set in `folder`, in order; None if there is none.

    Raise PromptError if the folder has several splits, or does not have what it describes.
    """
    if (splits := _described(folder / "dataset_dict.json", "splits")) is not None:
        names = [name for name in splits if isinstance(name, str) and Path(name).name == name]
        if len(names) != 1:
            listed = ", ".join(str(folder / name) for name in names)
            raise PromptError(f"{folder}: has {len(names)} splits: name one of them: {listed}")
        return dataset_files(folder / names[0])
    if (listed_files := _described(folder / "state.json", "_data_files")) is not None:
        files = [one.get("filename") for one in listed_files if isinstance(one, dict)]
        if any(not isinstance(name, str) or Path(name).name != name for name in files):
            raise PromptError(f"{folder / 'state.json'}: names files outside of the folder")
        return [folder / str(name) for name in files]
    shards = sorted(folder.rglob("*.parquet")) or sorted(folder.glob("*.arrow"))
    return _one_split(folder, shards) if shards else None


def _described(file: Path, name: str) -> list[object] | None:
    """Return the list `name` in a JSON file; None if there is no such file."""
    if not file.is_file():
        return None
    try:
        found = read_json(file, LARGEST)
    except ReadError as error:
        raise PromptError(str(error)) from error
    listed = found.get(name) if isinstance(found, dict) else None
    if not isinstance(listed, list):
        raise PromptError(f"{file}: has no list {name!r}: was it written by datasets.save_to_disk?")
    return listed


def _one_split(folder: Path, shards: list[Path]) -> list[Path]:
    """Return the shards. Raise PromptError if they are those of several splits."""
    splits = {_split(file): file for file in shards}
    if len(splits) > 1:
        which = sorted(f"{split}*" for split in splits)
        raise PromptError(
            f"{folder}: has the files of {len(splits)} splits or parts: name those of one, such as "
            f"{which[0]}"
        )
    return shards


def _split(file: Path) -> str:
    """Return the path of a shard without its number and its end."""
    match = _SHARD.fullmatch(file.stem)
    return str(file.parent / (match[1] if match else file.stem))


def from_hub(name: str) -> list[Path]:
    """Return the Parquet files of a data set on the hub: those of the local cache, or downloaded.

    `name` is hf://datasets/OWNER/NAME, with @REVISION and /PATH in the repository if it has several
    splits. Raise PromptError if it can't be read.
    """
    found = _HUB_NAME.fullmatch(name)
    if found is None:
        raise PromptError(f"{name}: has to be {HUB}OWNER/NAME[@REVISION][/PATH]")
    repository, revision, path = found.groups()
    pattern = "*.parquet" if path is None else path.rstrip("/")
    patterns = [pattern] if pattern.endswith(".parquet") else [f"{pattern}/*.parquet"]
    folder = _snapshot(name, repository, revision, patterns)
    if path is None:
        shards = sorted(folder.rglob("*.parquet"))
    else:
        shards = sorted(
            file for one in patterns for file in folder.glob(one.replace("/*", "/**/*"))
        )
    if not shards:
        raise PromptError(f"{name}: has no Parquet files there (data set scripts are never run)")
    return shards if path and path.endswith(".parquet") else _one_split(Path(name), shards)


def _snapshot(name: str, repository: str, revision: str | None, patterns: list[str]) -> Path:
    """Return the folder of the files on the hub, downloaded if the local cache lacks them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repository, repo_type="dataset", revision=revision, allow_patterns=patterns
        )
    except LocalEntryNotFoundError as error:
        folder = str(getattr(error, "snapshot_path", None) or "")
        if not folder:
            cause = " ".join(str(error.__cause__ or error).split())[:300]
            raise PromptError(
                f"{name}: not in the local cache, and the hub can't be reached: {cause}"
            ) from error
    except Exception as error:  # HTTP errors, a full disk, a name that is not valid
        why = " ".join(str(error).split())[:300]
        raise PromptError(f"{name}: the download failed: {why}") from error
    return Path(folder)

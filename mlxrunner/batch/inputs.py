"""Open the inputs of a batch, whatever they are, and yield their lines one after the other.

An input is a file, standard input, a folder of texts, or a data set: a folder of Parquet or Arrow
files, or one on the hub. The first bytes of a file tell its kind, and its name tells JSON lines
from tables. One line is in memory at a time, and none longer than LONGEST. No tensors.

`read_fields` turns the fields of a line into prompts and options of `generate`. They are those of
this project or of OpenAI's batch files, both also under the names of OpenAI's and vLLM's APIs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxrunner.batch.openai_format import (
    READ,
    RESPONSE_FIELDS,
    check_functions,
    form_of,
    kind,
    read_response,
    translate,
    unknown,
)
from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.store import Format, InputLine, Place, place_of
from mlxrunner.batch.tables import (
    FEATHER,
    HUB,
    PARQUET,
    Columns,
    HashedStream,
    arrow_rows,
    dataset_files,
    decompressed,
    from_hub,
    parquet_rows,
    read_table,
)
from mlxrunner.config.names import MEANT, SAME, did_you_mean
from mlxrunner.config.option import names as names_of
from mlxrunner.config.option import without_nulls
from mlxrunner.config.request_fields import held
from mlxrunner.engine.constrain import check_form
from mlxrunner.errors import BrokenLineError, OptionError, PromptError, ReadError
from mlxrunner.options import LARGEST_TOKEN, GenerateOptions
from mlxrunner.system.reading import no_constant, open_given, read_text, say_if_waiting
from mlxrunner.templates.messages import PlainMessage, check_message, has_picture, picture_of
from mlxrunner.terminal.output import one_line
from mlxrunner.tokenizer.prompt import Prompt

STANDARD = "-"
"""The name for standard input or standard output."""
ARROW = b"\xff\xff\xff\xff"
"""The first bytes of an Arrow stream."""
PACKED = (".gz", ".zst", ".zstd")
"""The ends of names that say how a file is compressed. The first bytes decide."""
TABS, TABLES, JSON_LINES = (
    (".tsv", ".tab"),
    (".csv", ".tsv", ".tab"),
    (".jsonl", ".ndjson", ".json"),
)
TEXT = ("id", "path", "text")
"""The columns of a folder: each file is a row, and its path is its id."""
PIECE = 2**18
"""Bytes per read of a stream."""
LONGEST = 2**24
"""The size in bytes of the longest line, or row of a CSV file."""
BOM = b"\xef\xbb\xbf"
Record = bytes | Mapping[str, Any] | Exception | None
"""The bytes of a line, the fields of a row, or the error of either; None if it is too long."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class InputFile:
    """A stream of an input, or a file of a folder."""

    path: str
    """The path to open, or "-"."""
    shown: str = ""
    """The name in front of a place; empty for the only file."""
    text_id: str | None = None
    """The path within its folder, for a file that is one prompt."""
    problem: str | None = None
    """The reason why the file is not read."""


class Inputs:
    """An iterable over the lines of all inputs, to be used once.

    A bad line is a `InputLine` with an error and never stops the rest.
    """

    def __init__(
        self,
        names: Sequence[str],
        options: BatchOptions,
        columns: Columns | None = None,
        delimiter: str | None = None,
    ) -> None:
        """Read the inputs with these names. `delimiter` is that of tables, None for the usual one.

        Raise OptionError if `columns` or a `delimiter` are given and no input can be a table.
        """
        self._names, self._options = names, options
        self._columns = columns or Columns()
        self._delimiter = _delimiter(delimiter)
        self._is_table = self._columns.is_given or delimiter is not None
        self._digests: list[str] = []
        if self._is_table and all(_end(name) in JSON_LINES for name in names):
            raise OptionError(
                "--row-template, --delimiter and the options of columns are for tables (CSV, "
                f"TSV, Parquet, data sets, folders), and {names[0]} is JSON lines"
            )

    @property
    def digest(self) -> str:
        """The SHA-256 of the inputs as they are stored, in hexadecimal, after the last line."""
        return _together(self._digests)

    def __iter__(self) -> Iterator[InputLine]:
        return lines_of_records(self._records(), self._options)

    def _records(self) -> Iterator[tuple[Place, Record]]:
        for part in all_parts(self._names):
            if part.text_id is not None:
                yield f"file {part.text_id}", self._text(part)
                continue
            for place, record in self._records_of(part):
                if part.shown or isinstance(place, str):
                    unit = place if isinstance(place, str) else f"line {place}"
                    place = f"{part.shown} {unit}".strip()
                yield place, record

    def _text(self, part: InputFile) -> Record:
        """Return the fields of a file of a folder, or its error."""
        columns = self._columns if self._columns.is_given else Columns(prompt="text")
        rows = columns.within(TEXT, "folder")
        text, digest = _text_of(part)
        self._digests.append(digest)
        values = {"id": part.text_id, "path": part.text_id, "text": text}
        if isinstance(text, PromptError):
            return BrokenLineError(str(text), rows.known(values))
        return rows.fields(f"file {part.text_id}", values, LONGEST)

    def _records_of(self, part: InputFile) -> Iterator[tuple[Place, Record]]:
        with opened(part) as stream:
            hashed, name = HashedStream(stream), part.shown or part.path
            name = "standard input" if name == STANDARD else name
            is_arrow = hashed.head[:4] == ARROW or hashed.head.startswith(FEATHER)
            if is_arrow or hashed.head.startswith(PARQUET):
                _read_to_end(hashed)
                _rewind(stream, name)
                read = arrow_rows if is_arrow else parquet_rows
                for number, record in read(stream, name, self._columns, LONGEST):
                    yield f"row {number}", record
            else:
                end = _end(part.path)
                is_table = end in TABLES or (self._is_table and end not in JSON_LINES)
                delimiter = self._delimiter or ("\t" if end in TABS else ",")
                with decompressed(hashed, name) as content:
                    columns = self._columns if is_table else None
                    yield from read_records(content, columns, delimiter)
                _read_to_end(hashed)
        self._digests.append(hashed.digest)


def digest_of(names: Sequence[str]) -> str | None:
    """Return the SHA-256 of the inputs as they are now, in hexadecimal.

    Return None for a standard input that gives nothing: a store has read it already.
    """
    if STANDARD in names and (sys.stdin is None or sys.stdin.isatty()):
        return None
    digests = []
    for part in all_parts(names):
        if part.text_id is not None:
            digests.append(_text_of(part)[1])
            continue
        with opened(part) as stream:
            hashed = HashedStream(stream)
            if part.path == STANDARD and not hashed.head:
                return None
            _read_to_end(hashed)
            digests.append(hashed.digest)
    return _together(digests)


def _delimiter(given: str | None) -> str | None:
    """Return the character that is given, or named "tab". Raise OptionError for anything else."""
    found = "\t" if given in ("tab", "\\t") else given
    if found is not None and (len(found) != 1 or found in '"\r\n\0' or not found.isascii()):
        raise OptionError(
            f"delimiter: {given!r:.80} is not one ASCII character that can separate values, or tab"
        )
    return found


def _together(digests: Sequence[str]) -> str:
    """Return the digest of one file as it is, and one of the digests of several."""
    if len(digests) == 1 and "\0" not in digests[0]:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode("utf-8", "surrogateescape")).hexdigest()


def _end(name: str) -> str:
    """Return the end of a name that tells the kind of a file, without that of its compression."""
    path = Path(name.lower())
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix


def is_same_or_within(output: str, name: str) -> bool:
    """Return True if the output is the input `name`, or in the folder with that name."""
    try:
        if os.path.isdir(name):
            return Path(output).resolve().is_relative_to(Path(name).resolve())
        return os.path.samefile(name, output)
    except (OSError, ValueError, RuntimeError):  # one of them is not there; a NUL in a name
        return False


def all_parts(names: Sequence[str]) -> Iterator[InputFile]:
    """Yield the files of all inputs, in order.

    Raise PromptError for an input that is not there, or for a folder without files.
    """
    for name in names:
        if name.startswith(HUB):
            for file in from_hub(name):
                yield InputFile(str(file), file.name)
        elif name != STANDARD and os.path.isdir(name):
            files = dataset_files(Path(name))
            if files is not None:
                for file in files:
                    yield InputFile(str(file), str(file) if len(names) > 1 else file.name)
                continue
            count = 0
            for part in _texts(Path(name), len(names) > 1):
                count += 1
                yield part
            if not count:
                raise PromptError(f"{name}: the folder has no files")
        else:
            shown = "standard input" if name == STANDARD else name
            yield InputFile(name, shown if len(names) > 1 else "")


def _texts(folder: Path, is_one_of_many: bool) -> Iterator[InputFile]:
    """Yield the files of a folder and of the folders in it, sorted. Hidden ones are left out."""
    root = folder.resolve()
    for place, folders, files in os.walk(folder, onerror=_raise):
        linked = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = sorted(set(folders) - {*linked, *(n for n in folders if n.startswith("."))})
        for name in sorted([*files, *linked]):
            if name.startswith("."):
                continue
            path = os.path.join(place, name)
            own = os.path.relpath(path, folder)
            problem = None
            if os.path.islink(path):
                problem = _wrong_link(Path(path), root)
            yield InputFile(path, text_id=path if is_one_of_many else own, problem=problem)


def _wrong_link(path: Path, root: Path) -> str | None:
    """Return the reason why a link is not followed, or None if it leads to a file in `root`."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError):
        return "is a link that leads nowhere"
    if not target.is_relative_to(root):
        return "is a link that leads out of the folder: copy the file"
    return "is a link to a folder" if target.is_dir() else None


def _raise(error: OSError) -> None:
    raise PromptError(f"{error.filename}: can't be read: {error.strerror}") from error


def _text_of(part: InputFile) -> tuple[str | PromptError, str]:
    """Return the text of a file without the line ends at its end, or its error, and a digest."""
    try:
        if part.problem is not None:
            raise PromptError(part.problem)
        text = read_text(part.path, LONGEST)
        if "\0" in text:
            raise PromptError("there is a NUL byte in it: is it a text file?")
    except (PromptError, ReadError) as error:
        problem = PromptError(str(error).removeprefix(f"{part.path}: "))
        return problem, f"{part.text_id}\0{problem}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text.rstrip("\r\n"), f"{part.text_id}\0{digest}"


@contextmanager
def opened(part: InputFile) -> Iterator[BinaryIO]:
    """Open a file or standard input. Raise PromptError if it can't be read."""
    if part.path == STANDARD:
        if sys.stdin is None:
            raise PromptError("standard input is closed")
        say_if_waiting(sys.stdin.buffer, "standard input")
        yield sys.stdin.buffer
        return
    try:
        with open_given(part.path) as stream:
            say_if_waiting(stream, part.path)
            yield stream
    except ReadError as error:
        raise PromptError(str(error)) from error
    except OSError as error:
        raise PromptError(f"{part.path}: can't be read: {error.strerror or error}") from error


def _read_to_end(stream: HashedStream) -> None:
    while stream.read(PIECE):
        pass


def _rewind(stream: BinaryIO, name: str) -> None:
    try:
        stream.seek(0)
    except (OSError, io.UnsupportedOperation) as error:
        raise PromptError(
            f"{name}: is Parquet or Arrow, which can't be read from a stream: name a file"
        ) from error


def read_records(
    stream: BinaryIO, columns: Columns | None = None, delimiter: str = ",", longest: int = LONGEST
) -> Iterator[tuple[int, Record]]:
    """Yield the number and the record of each line of a stream that is not empty.

    With `columns` the stream is a table of text. Its first step raises OptionError if it lacks one
    of the columns.
    """
    if columns is not None:
        return read_table(_whole_lines(stream, longest), columns, longest, delimiter)
    lines = enumerate(_whole_lines(stream, longest), 1)
    return ((number, line) for number, line in lines if line is None or line.strip())


def _whole_lines(stream: BinaryIO, longest: int) -> Iterator[bytes | None]:
    """Yield the lines with their ends, and None in the place of one that is too long."""
    mark = BOM
    while line := stream.readline(longest + 1):
        is_whole = len(line) <= longest or line.endswith(b"\n")
        rest = line
        while not rest.endswith(b"\n") and (rest := stream.readline(longest + 1)):
            is_whole = False
        yield line.removeprefix(mark) if is_whole else None
        mark = b""


def lines_of_records(
    records: Iterable[tuple[Place, Record]], options: BatchOptions, longest: int = LONGEST
) -> Iterator[InputLine]:
    """Yield the lines of records, each with its place."""
    index = 0
    for place, record in records:
        for line in _lines(index, place, record, options, longest):
            yield line
            index += 1


def _lines(
    index: int, place: Place, record: Record, options: BatchOptions, longest: int
) -> Iterator[InputLine]:
    """Yield a line for each prompt of a record, from `index` on, or one with its error.

    Several prompts get the id of their record with their number from 0 after it.
    """
    form: Format = "unknown" if record is None or isinstance(record, bytes) else "plain"
    name = problem = None
    try:
        try:
            fields: Mapping[str, Any] = _parsed(record, longest)
        except BrokenLineError as error:
            fields, problem = error.fields, error
        form = format_of(fields)
        key = "id" if form == "plain" else "custom_id"
        name = checked_id(key, fields.get(key))
        if problem is not None:
            raise problem
        prompts, own = read_fields(fields, options)
    except (PromptError, OptionError, RecursionError) as error:
        text = "nested too deeply" if isinstance(error, RecursionError) else one_line(str(error))
        yield InputLine(index, place, id=name, format=form, error=f"{place_of(place)}: {text}")
        return
    for part, prompt in enumerate(prompts):
        called = name if name is None or len(prompts) == 1 else f"{name}/{part}"
        yield InputLine(index + part, place, prompt, called, form, own)


def _parsed(record: Record, longest: int) -> Mapping[str, Any]:
    if isinstance(record, Exception):
        raise record
    if record is None:
        raise PromptError(f"is longer than {longest} bytes")
    if isinstance(record, Mapping):
        return record
    try:
        twice = _DuplicateKeys()
        value = json.loads(
            record.rstrip().decode(), parse_constant=no_constant, object_pairs_hook=twice
        )
        if _SURROGATE.search(record):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise PromptError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except UnicodeEncodeError as error:
        raise PromptError("has half a character (a lone surrogate) in it") from error
    except json.JSONDecodeError as error:
        hint = "" if error.pos else '; a line is an object such as {"prompt": "Hi"}'
        raise PromptError(f"not JSON: {error.msg} at character {error.pos + 1}{hint}") from error
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise PromptError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise PromptError(f"has to be a JSON object, not {kind(value)}")
    if twice.name is not None:
        known = {name: field for name, field in value.items() if name != twice.name}
        raise BrokenLineError(
            f"the key {twice.name!r:.80} is there twice in one object: which value counts?", known
        )
    return value


class _DuplicateKeys:
    """A hook that makes the objects of a line and finds a key that stands twice in one of them."""

    name: str | None = None
    """The first such key; None if there is none."""

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs) and self.name is None:
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    self.name = name
                    break
                seen.add(name)
        return made


OPTIONS = frozenset(names_of(GenerateOptions))
"""The names of the options that a line may give."""
FIELDS = OPTIONS | {"id", "prompt", "messages", "system", "response_format"}
"""The fields of a line that does not come from OpenAI's batch files."""
BODY = OPTIONS | {"response_format"}
"""The fields of a body of OpenAI's batch files beside its prompt, under our names."""
ROLES = ("system", "user", "assistant", "tool")

OPENAI_FIELDS = frozenset(("custom_id", "method", "url", "body"))
"""The fields of a line of OpenAI's batch files."""
URLS: dict[str, Format] = {
    "/v1/chat/completions": "chat.completion",
    "/v1/completions": "text_completion",
    "/v1/responses": "response",
}
"""The format of the answer for each `url` that is supported."""
EMBEDDINGS_URL = "/v1/embeddings"
NO_EMBEDDINGS = (
    "embeddings are not supported: this program generates text; take a program that is made for "
    "embedding models"
)
"""The error of `--embeddings` and of a line with EMBEDDINGS_URL."""


def format_of(record: Mapping[str, Any]) -> Format:
    """Return the format of the answer to a line with these fields."""
    if "custom_id" not in record and "body" not in record:
        return "plain"
    url = record.get("url")
    return URLS.get(url, "chat.completion") if isinstance(url, str) else "chat.completion"


def read_fields(
    record: Mapping[str, Any], batch: BatchOptions
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return the prompts and the options of a line. It has one prompt, or a list of them.

    A field that is null counts as not given. Raise PromptError or OptionError if a field is wrong
    or not supported.
    """
    if format_of(record) != "plain":
        prompt, options = _read_openai(record, batch)
        return [prompt], options
    # An error for a name that is like one of ours says so, and any other field asks for nothing.
    given = held(without_nulls(record), FIELDS | READ | MEANT.keys() | SAME.keys())
    fields = translate(given, batch.defaults, counts_logprobs=True)
    wrong = next((name for name in given if name in fields and name not in FIELDS), None)
    if wrong is not None:
        raise unknown(wrong, FIELDS)
    prompts = _prompts(fields, batch)
    options = {name: value for name, value in fields.items() if name in OPTIONS}
    return prompts, checked_options(options, fields.get("response_format"), batch)


def _prompts(given: Mapping[str, Any], batch: BatchOptions) -> list[Prompt]:
    if "prompt" in given and "messages" in given:
        raise PromptError("has both a prompt and messages")
    if "prompt" not in given and "messages" not in given:
        raise PromptError('has no "prompt" and no "messages"')
    system = given.get("system", batch.system)
    if system is not None and not isinstance(system, str):
        raise PromptError(f"system has to be a text, not {kind(system)}")
    if "messages" in given:
        return [_conversation(given["messages"], system, batch.pictures)]
    listed = _listed(given["prompt"])
    if "system" in given and (batch.raw or not all(isinstance(one, str) for one in listed)):
        left_out = "--raw leaves out" if batch.raw else "token ids leave out"
        raise PromptError(f"a system prompt needs the chat template, which {left_out}")
    if batch.raw:
        return listed
    return [
        _conversation([{"role": "user", "content": one}], system, False)
        if isinstance(one, str)
        else one
        for one in listed
    ]


def _listed(prompt: Any) -> list[Prompt]:
    """Return the prompts of the field `prompt`: a text, token ids, or a list of either."""
    if not isinstance(prompt, list) or (prompt and not isinstance(prompt[0], str | list)):
        return [_text_or_tokens("prompt", prompt)]
    if not prompt:
        raise PromptError("prompt is an empty list")
    return [_text_or_tokens(f"prompt {number}", one) for number, one in enumerate(prompt)]


def _text_or_tokens(name: str, value: Any) -> Prompt:
    """Return `value`: a text, or token ids. Raise PromptError if it is neither."""
    if not isinstance(value, str | list):
        raise PromptError(f"{name} has to be a text, not {kind(value)}")
    if not value:
        raise PromptError(f"{name} is empty")
    for one in value if isinstance(value, list) else ():
        if type(one) is not int or not 0 <= one <= LARGEST_TOKEN:
            raise PromptError(f"{name}: {one!r:.80} is not a token id")
    return value


def _conversation(messages: Any, system: str | None, sees: bool) -> list[PlainMessage]:
    """Return the messages as the chat template takes them.

    A `system` prompt is put in front if they do not begin with one. `sees`: they may have pictures.
    Raise PromptError for the first wrong message.
    """
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages has to be a list of at least one message")
    checked = [_message(number, message, sees) for number, message in enumerate(messages)]
    if system and checked[0]["role"] != "system":
        checked.insert(0, {"role": "system", "content": system})
    return checked


def _message(number: int, message: Any, sees: bool) -> PlainMessage:
    """Return message `number` (from 0), checked. Raise PromptError if it is not supported."""
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        # A picture of OpenAI's comes in our form.
        pairs = ((p, picture_of(p) if isinstance(p, dict) else None) for p in message["content"])
        parts = [p if one is None else {"type": "image", "image": one.image} for p, one in pairs]
        message = {**message, "content": parts}
    if has_picture(message) and not sees:
        raise PromptError(f"message {number} has a picture: run the batch with --pictures")
    if isinstance(message, dict) and message.get("role") == "developer":
        # OpenAI's newer name for "system", which no chat template knows.
        message = {**message, "role": "system"}
    checked = check_message(number, message, _picture_text if sees else None)
    role = checked["role"]
    if role not in ROLES:
        likely = did_you_mean(role, ROLES).rstrip()
        raise PromptError(
            f"message {number}: role {role!r:.80} is not known, it has to be one of "
            f"{', '.join(ROLES)}{likely and ': '}{likely}"
        )
    known = {"content", *checked}
    if role == "assistant":
        known |= {"prefix", "partial"}  # of Mistral, DeepSeek and others: an answer to be continued
    extra = [name for name, value in message.items() if value and name not in known]
    if extra:
        raise PromptError(f"message {number} has a field that is not supported: {extra[0]!r:.80}")
    return checked


def _picture_text(image: Any, name: str) -> str:
    """Return the text of a picture in a line, undecoded. Raise PromptError if it is not text."""
    if isinstance(image, str):
        return image
    raise PromptError(f"{name}: a picture has to be a text: base64, or a URL")


def checked_id(name: str, value: Any) -> str | int | None:
    """Return a line's id unchanged: a text, a whole number of 64 bits, or None.

    Raise PromptError for anything else; the error names the field `name`.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"{name} is not valid Unicode: {error.reason} at character {error.start}"
            ) from error
    elif value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63
    ):
        raise PromptError(
            f"{name} has to be a text or a whole number of at most 64 bits, not {value!r:.80}"
        )
    found: str | int | None = value
    return found


def checked_options(
    options: dict[str, Any], response_format: Any, batch: BatchOptions
) -> dict[str, Any]:
    """Return a line's own options as they are stored, after checking them with the defaults.

    Raise OptionError if an option is unknown or wrong.
    """
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise OptionError(
            f"unknown option {unknown[0]!r:.80}: known are {', '.join(sorted(OPTIONS))}"
        )
    options = options | form_of(options, response_format, batch.defaults)
    # A line's form replaces a form of the other kind that the defaults ask for.
    if options.get("schema") is not None and batch.defaults.get("choices"):
        options.setdefault("choices", None)
    if options.get("choices") and batch.defaults.get("schema") is not None:
        options.setdefault("schema", None)
    for name in ("stop", "choices"):
        if options.get(name) is not None:
            options[name] = _text_list(name, options[name])
    if options:
        together = GenerateOptions.of(**{**batch.defaults, **options})
        if "schema" in options or "choices" in options:
            check_form(together)
    return options


def _text_list(name: str, value: Any) -> list[str]:
    values = [value] if isinstance(value, str) and name == "stop" else value
    if not isinstance(values, list | tuple) or not all(
        isinstance(text, str) and text for text in values
    ):
        raise OptionError(f"{name}: {value!r:.80} is not a list of texts of at least one character")
    return list(values)


def _read_openai(record: Mapping[str, Any], batch: BatchOptions) -> tuple[Prompt, dict[str, Any]]:
    record = without_nulls(record)
    _check_envelope(record)
    form = format_of(record)
    body = without_nulls(record["body"])
    body.pop("model", None)
    if form == "text_completion" and body.get("add_special_tokens") is True:
        del body["add_special_tokens"]
    reads = {"text_completion": {"prompt"}, "response": RESPONSE_FIELDS}.get(form, {"messages"})
    body = held(body, reads | READ)
    if form == "text_completion":
        prompts = _listed(body.pop("prompt", None))
        if len(prompts) > 1:
            raise PromptError(
                f"a list of {len(prompts)} prompts is not supported in a body: write a line for "
                "each"
            )
        prompt = prompts[0]
    elif form == "response":
        messages, body = read_response(body)
        prompt = _conversation(messages, batch.system, batch.pictures)
    else:
        prompt = _conversation(body.pop("messages", None), batch.system, batch.pictures)
    fields = translate(body, batch.defaults, counts_logprobs=form == "text_completion")
    wrong = next((name for name in body if name in fields and name not in BODY), None)
    if wrong is not None:
        known = BODY | (RESPONSE_FIELDS if form == "response" else {"messages", "prompt"})
        hint = did_you_mean(wrong, known - {wrong}).rstrip()
        raise OptionError(f"{wrong!r:.80} is not supported in a body{hint and ': '}{hint}")
    check_functions(fields.get("tools"))
    response_format = fields.pop("response_format", None)
    return prompt, checked_options(fields, response_format, batch)


def _check_envelope(record: Mapping[str, Any]) -> None:
    wrong = sorted(record.keys() - OPENAI_FIELDS)
    if wrong:
        raise OptionError(f"unknown field {wrong[0]!r:.80} beside custom_id, method, url and body")
    if not isinstance(record.get("custom_id"), str):
        raise PromptError("custom_id has to be a text")
    if record.get("method", "POST") != "POST":
        raise OptionError(f"method {record['method']!r:.80} is not supported, only POST")
    if record.get("url") == EMBEDDINGS_URL:
        raise OptionError(NO_EMBEDDINGS)
    if record.get("url") is not None and record["url"] not in list(URLS):
        raise OptionError(f"url {record['url']!r:.80} is not supported, only {', '.join(URLS)}")
    if not isinstance(record.get("body"), dict):
        raise PromptError(f"body has to be an object, not {kind(record.get('body'))}")

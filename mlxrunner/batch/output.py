"""Make a line of each answer of a batch, write it to a file or a stream, and read it again.

A line is our own object, or one of OpenAI's batch files, and always ASCII. With `usage=False` it
holds nothing that depends on time or on what was reused: each run writes the same bytes.

The file is always a beginning of what the store holds, byte for byte, so any broken end can be
mended. A table can't be continued (Parquet has its index at the end): it is made of the finished
JSON lines in one go, and takes its name when it is on the disk.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TextIO, cast

from mlxrunner.batch.openai_format import (
    TokenLogprob,
    chat_logprobs,
    completion_usage,
    error_object,
    finite,
    message_item,
    response_object,
    response_usage,
    text_logprobs,
    token_text,
)
from mlxrunner.batch.options import OutputOrder
from mlxrunner.batch.store import Store, StoredAnswer, StoredLine, place_of
from mlxrunner.errors import MlxrunnerError, OptionError, OutputError, ReadError
from mlxrunner.options import GenerateOptions
from mlxrunner.system.imports import how_to_install
from mlxrunner.system.reading import open_file
from mlxrunner.system.writing import (
    check_own,
    is_writable,
    open_own,
    open_stream,
    whole_sync,
    write_errors_as,
    written,
)

if TYPE_CHECKING:
    from mlxrunner.batch.execution import Outcome
    from mlxrunner.results import Result
    from mlxrunner.tokenizer import Tokenizer


REFUSED, FAILED = 400, 500
"""HTTP's status codes for a request that is at fault, and for one that is not."""


def write_line(outcome: Outcome, tokenizer: Tokenizer, *, model: str, usage: bool) -> bytes:
    """Return the line for an outcome, without its line end.

    OpenAI's objects name the `model`. With `usage` the line holds counts and times.
    """
    line, result = outcome.line, outcome.result
    if line.format == "plain":
        written = _plain(outcome, usage)
    elif result is None:
        status = REFUSED if outcome.is_refused else FAILED
        written = _openai_error(line, line_error(outcome), status)
    else:
        written = _openai(line, result, tokenizer, model, usage)
    return json.dumps(written).encode("ascii")


def line_error(outcome: Outcome) -> str:
    """Return the error of an outcome, with the number of its line in the file in front."""
    number = f"{place_of(outcome.line.number)}: "
    return number + (outcome.error or "").removeprefix(number)


def error_of(line: bytes) -> str:
    """Return the error in a line of the output; empty if the line has none."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        error: Any = json.loads(line)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    return ""


def _plain(outcome: Outcome, usage: bool) -> dict[str, Any]:
    written: dict[str, Any] = {"id": outcome.line.id, "index": outcome.line.index}
    if outcome.result is None:
        return written | {"error": line_error(outcome)}
    result = outcome.result
    written |= {"text": result.text, "finish_reason": result.finish_reason}
    if result.logprobs is not None:
        written["logprobs"] = [
            {"logprob": finite(own), "top": {token: finite(one) for token, one in top.items()}}
            for own, top in result.logprobs
        ]
    return written | ({"usage": result.usage.as_dict()} if usage else {})


def _openai(
    line: StoredLine, result: Result, tokenizer: Tokenizer, model: str, usage: bool
) -> dict[str, Any]:
    if line.format == "response":
        return _openai_line(line, 200, _response(line, result, tokenizer, model, usage), None)
    is_chat = line.format == "chat.completion"
    choice: dict[str, Any] = {"index": 0}
    tokens = _tokens(result, tokenizer)
    if is_chat:
        choice["message"] = {"role": "assistant", "content": result.text}
        choice["logprobs"] = None if tokens is None else {"content": chat_logprobs(tokens)}
    else:
        choice["text"] = result.text
        choice["logprobs"] = None if tokens is None else text_logprobs(tokens)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line.index}",
        "object": line.format,
        "created": int(time.time()) if usage else 0,
        "model": model,
        "choices": [choice | {"finish_reason": result.finish_reason}],
    }
    if usage:
        used = result.usage
        body["usage"] = completion_usage(
            used.prompt_tokens, used.cached_tokens, used.completion_tokens
        )
    return _openai_line(line, 200, body, None)


def _response(
    line: StoredLine, result: Result, tokenizer: Tokenizer, model: str, usage: bool
) -> dict[str, Any]:
    tokens, variables = _tokens(result, tokenizer), GenerateOptions.of(**line.options).variables
    status = "incomplete" if result.finish_reason == "length" else "completed"
    logprobs = None if tokens is None else chat_logprobs(tokens)
    body = response_object(
        f"resp_{line.index}",
        status,
        created=int(time.time()) if usage else 0,
        model=model,
        output=[message_item(f"msg_{line.index}", result.text, status=status, logprobs=logprobs)],
        options=line.options,
        effort=variables.get("reasoning_effort"),
        tools=[{"type": "function", **tool["function"]} for tool in variables.get("tools", ())],
    )
    if usage:
        used = result.usage
        body["usage"] = response_usage(
            used.prompt_tokens, used.cached_tokens, used.completion_tokens
        )
    return body


def _openai_error(line: StoredLine, message: str, status: int) -> dict[str, Any]:
    """Return OpenAI's object for an error.

    The error stands both where the API's own answer has it and where readers of batch files look.
    """
    kind = "invalid_request_error" if status == REFUSED else "server_error"
    body = {"error": error_object(message, kind)}
    return _openai_line(line, status, body, {"code": kind, "message": message})


def _openai_line(
    line: StoredLine, status: int, body: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{line.index}", "body": body}
    name = f"batch_req_{line.index}"
    return {"id": name, "custom_id": line.id, "response": response, "error": error}


def _tokens(result: Result, tokenizer: Tokenizer) -> list[TokenLogprob] | None:
    """Return the tokens of an answer as OpenAI's API names them; None without log-probabilities.

    The bytes of a token are those of its text if the tokenizer does not know its bytes.
    """
    if result.logprobs is None:
        return None
    try:
        pieces = tokenizer.vocabulary.pieces
    except OptionError:
        pieces = ()

    def text_of(token: int) -> str:
        piece = pieces[token] if token < len(pieces) else None
        return token_text(tokenizer.decode([token]).encode() if piece is None else piece)

    return [
        TokenLogprob(
            text_of(token), token, own, tuple((text_of(one), one, top[one]) for one in top)
        )
        for token, (own, top) in zip(result.tokens, result.logprobs, strict=True)
    ]


SHORTEST_S = 0.1
"""The least seconds between two writes, and so the most work that a kill can lose."""
SHARE = 20
"""Writes to the disk take at most one part in SHARE of the time."""
PARQUET = ".parquet"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLES = (PARQUET, *DELIMITERS)
"""The ends of the names of outputs that are written as tables."""
ROWS = 1000
"""The number of rows of a group, and of those in memory at once."""
COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_THEIRS = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}


class AnswerFile:
    """A file (mode 0600) or a stream to which lines are appended.

    Each method may raise OutputError, with a message of one line.
    """

    def __init__(self, stream: BinaryIO, name: str, *, is_file: bool) -> None:
        """Call `open` or `streaming` instead."""
        self._stream, self.name, self.is_file = stream, name, is_file
        self.place = -1
        """The last `StoredAnswer.place` that is in it."""
        self.size = 0
        """Bytes of its whole lines."""
        self._hash = hashlib.sha256()  # the hash of all whole lines

    @property
    def digest(self) -> str:
        """The SHA-256, in hexadecimal, of the lines that this run wrote or found to be its own."""
        return self._hash.hexdigest()

    @classmethod
    def open(cls, path: Path) -> AnswerFile:
        """Open the file `path`, and make it if it does not exist.

        If the file has content, call `mend` before `append`.
        """
        with write_errors_as(OutputError, path):
            return cls(os.fdopen(open_own(path), "r+b", buffering=0), str(path), is_file=True)

    @classmethod
    def streaming(cls, path: Path | None) -> AnswerFile:
        """Open standard output (None) or another stream.

        What was sent can't be taken back, so a run on a stream can't be resumed.
        """
        if path is None:
            if sys.stdout is None or not _is_open(sys.stdout):
                raise OutputError("standard output is closed")
            return cls(sys.stdout.buffer, "standard output", is_file=False)
        with write_errors_as(OutputError, path):
            return cls(os.fdopen(open_stream(path), "wb", buffering=0), str(path), is_file=False)

    def mend(self, answers: Iterable[StoredAnswer]) -> None:
        """Compare the file with the store's answers, cut off a torn end, and go to the end.

        Raise OutputError, and change nothing, if the file holds anything else.
        """
        end = 0
        self._stream.seek(0)
        with os.fdopen(os.dup(self._stream.fileno()), "rb") as reader:
            for number, answer in enumerate(answers, 1):
                line = answer.body + b"\n"
                found = reader.read(len(line))
                if found != line:
                    self._check_torn(found, line, f"line {number} is")
                    break
                end, self.place = end + len(line), answer.place
                self._hash.update(line)
            else:
                self._check_torn(reader.read(1), b"", "its last lines are")
        with write_errors_as(OutputError, self.name):
            self._stream.truncate(end)
        self.size = end

    def _check_torn(self, found: bytes, line: bytes, where: str) -> None:
        """Raise OutputError unless `found` is what a broken write left of `line`.

        A broken write leaves the beginning of the line. After a power cut, a file system may add
        zeros.
        """
        if not line.startswith(found.rstrip(b"\0")):
            raise OutputError(
                f"{self.name}: {where} not what this run wrote: move it away, and --resume writes "
                "it again without running anything twice"
            )

    def append(self, answers: Iterable[StoredAnswer]) -> None:
        """Write these answers at the end, and for a file put them onto the disk.

        A line that was interrupted half-way is overwritten. Raise BrokenPipeError if nobody reads
        the stream any more.
        """
        with write_errors_as(OutputError, self.name):
            if self.is_file:
                self._stream.seek(self.size)
            for answer in answers:
                line = answer.body + b"\n"
                self._write(line)
                self.place, self.size = answer.place, self.size + len(line)
                self._hash.update(line)
            self._stream.flush()
            if self.is_file:
                os.fsync(self._stream.fileno())

    def _write(self, line: bytes) -> None:
        """Write the whole line: an unbuffered write may take only a part."""
        left = memoryview(line)
        while left:
            left = left[self._stream.write(left) :]

    def seal(self) -> None:
        """Put the file and its name onto the disk, so that a power cut loses neither."""
        if not self.is_file:
            return
        with write_errors_as(OutputError, self.name):
            whole_sync(self._stream.fileno())
        _sync_folder(Path(self.name))

    def rename(self, path: Path) -> None:
        """Give the file the name `path`, in the place of the file that has it."""
        with write_errors_as(OutputError, path):
            os.replace(self.name, path)
        self.name = str(path)
        _sync_folder(path)

    def close(self) -> None:
        """Close the file. Standard output stays open."""
        if self._stream is not getattr(sys.stdout, "buffer", None):
            with suppress(OSError):
                self._stream.close()


def _sync_folder(path: Path) -> None:
    """Put the names of the files beside `path` onto the disk, where the file system can do that."""
    with suppress(OSError):
        folder = os.open(path.resolve().parent, os.O_RDONLY)  # noqa: TID251  # no file
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _is_open(stream: TextIO) -> bool:
    """Return True if the stream can be written to.

    A stream without a descriptor, such as one that a test or a program made, only has to be open.
    """
    try:
        return is_writable(stream.fileno())
    except (OSError, ValueError):
        return not stream.closed


class AnswerWriter:
    """A context manager that takes answers to the store and from there to the output, in groups.

    A group costs the disk a few writes. However the block is left, what was written is on the disk.
    Each method may raise StoreError or OutputError.
    """

    def __init__(self, store: Store, output: AnswerFile, order: OutputOrder) -> None:
        """Write the answers of `store` to `output` in this order."""
        self._store, self.output, self._order = store, output, order
        self._is_waiting = False
        self._due = 0.0

    def mend(self) -> None:
        """Cut off a torn end of the output. The next `flush` adds the answers that are missing."""
        if self.output.is_file:
            self.output.mend(self._store.answers(self._order))

    def write(self, index: int, line: bytes, *, failed: bool) -> None:
        """Take the answer of line `index`, which is safe after the next `flush`.

        `tick` flushes from time to time.
        """
        self._store.record(index, line, failed=failed)
        self._is_waiting = True
        self.tick()

    def tick(self) -> None:
        """Flush if an answer has waited long enough. Call this often."""
        if self._is_waiting and time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write to the store first and then to the output, which never has more than the store."""
        began = time.monotonic()
        self._is_waiting = False
        self._store.commit()
        self.output.append(self._store.answers(self._order, after=self.output.place))
        now = time.monotonic()
        self._due = now + max(SHORTEST_S, SHARE * (now - began))

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.flush()
            return
        with suppress(MlxrunnerError, OSError):
            self.flush()


def check_writable(file: Path, *, replaced: bool = False) -> None:
    """Raise OutputError if `file` exists and can't be written."""
    with write_errors_as(OutputError, file), suppress(FileNotFoundError):
        check_own(file, replaced=replaced)


@contextmanager
def opened_answers(output: Path) -> Iterator[io.BufferedReader]:
    """Open the output for reading. Raise OutputError if it can't be read."""
    try:
        descriptor, _ = open_file(output)
        with os.fdopen(descriptor, "rb") as stream:
            yield stream
    except ReadError as error:
        raise OutputError(str(error)) from error
    except OSError as error:
        raise OutputError(f"{output}: can't be read: {error.strerror}") from error


def output_digest(output: Path) -> str:
    """Return the SHA-256 of the output, in hexadecimal. Raise OutputError if it can't be read."""
    with opened_answers(output) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def answers_in(lines: Iterable[bytes], output: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield for each line of the output its index, its bytes, and True if it is an error."""
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
            own = "index" in answer
            index = answer["index"] if own else int(answer["id"].removeprefix("batch_req_"))
            if type(index) is not int:
                raise TypeError
            yield index, line, answer.get("error") is not None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise OutputError(
                f"{output}: line {number} is not an answer of this program"
            ) from error


def lines_path(output: str) -> str:
    """Return the path of the JSON lines beside a table."""
    return f"{output}.jsonl"


def check_table(output: str, *, goes_on: bool) -> None:
    """Raise an error for a table that can't be written, before anything runs.

    `goes_on` says that the run is continued, so that the file may be there if its JSON lines are,
    too. Raise OptionError if pyarrow is missing, and OutputError if the file is there or can't be
    replaced.
    """
    if output.lower().endswith(PARQUET):
        try:
            import pyarrow  # noqa: F401  # asks only if it is there
        except ImportError as error:
            raise OptionError(
                f"-o {output}: Parquet needs pyarrow: {how_to_install('data')}"
            ) from error
    check_writable(Path(output), replaced=True)
    if Path(output).exists() and not (goes_on and Path(lines_path(output)).exists()):
        raise OutputError(f"{output}: is there already: choose another -o, or remove it")


def write_table(output: str) -> None:
    """Write the answers in the JSON lines beside it to `output`, in place of what is there.

    The name says the format. Raise OutputError if a file can't be read or written. The old file is
    then unchanged.
    """
    lines = Path(lines_path(output))
    with opened_answers(lines) as stream:
        try:
            with written(Path(output), newline="") as text:
                if output.lower().endswith(PARQUET):
                    _write_parquet(stream, text)
                else:
                    _write_csv(stream, text, DELIMITERS[output[-4:].lower()])
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
            raise OutputError(
                f"{output}: can't be written: {why}; the answers are in {lines}"
            ) from error


def _write_parquet(lines: BinaryIO, output: IO[str]) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    schema = _schema(lines)
    lines.seek(0)
    rows = (_row(line) for line in lines)
    binary = cast(io.TextIOWrapper, output).buffer
    with ParquetWriter(binary, schema, compression="zstd") as writer:
        while group := list(islice(rows, ROWS)):
            if schema.field("id").type == pyarrow.string():
                ids = (None if row["id"] is None else str(row["id"]) for row in group)
                group = [row | {"id": name} for row, name in zip(group, ids, strict=True)]
            writer.write_table(pyarrow.Table.from_pylist(group, schema))


def _write_csv(lines: BinaryIO, output: IO[str], delimiter: str) -> None:
    """Write the columns of Parquet but the last, which repeats the others as JSON."""
    names = ("id", "index", "text", "finish_reason", "error", *COUNTS)
    table = csv.DictWriter(
        output, names, extrasaction="ignore", delimiter=delimiter, lineterminator="\n"
    )
    table.writeheader()
    table.writerows(map(_row, lines))


def _schema(stream: BinaryIO) -> Any:
    """Return the columns. Ids are whole numbers if all of them are, or else texts."""
    import pyarrow

    ids = {type(_row(line)["id"]) for line in stream} - {type(None)}
    text, whole = pyarrow.string(), pyarrow.int64()
    return pyarrow.schema(
        [
            ("id", whole if ids == {int} else text),
            ("index", whole),
            ("text", text),
            ("finish_reason", text),
            ("error", text),
            *((name, whole) for name in COUNTS),
            ("line", text),
        ]
    )


def _row(line: bytes) -> dict[str, Any]:
    """Return the row of a line of answers: what most want of it, and the whole line."""
    answer = json.loads(line)
    row = _openai_row(answer) if "custom_id" in answer else _plain_row(answer)
    return row | {"line": line.decode().rstrip("\n")}


def _plain_row(answer: dict[str, Any]) -> dict[str, Any]:
    names = ("id", "index", "text", "finish_reason", "error")
    usage = answer.get("usage") or {}
    return {name: answer.get(name) for name in names} | {n: usage.get(n) for n in COUNTS}


def _openai_row(answer: dict[str, Any]) -> dict[str, Any]:
    body, error = answer["response"]["body"], answer["error"]
    usage = body.get("usage") or {}
    text, finish = _openai_text(body) if error is None else (None, None)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    counts = {name: usage.get(name, usage.get(_THEIRS.get(name, ""))) for name in COUNTS}
    return {
        "id": answer["custom_id"],
        "index": int(answer["id"].removeprefix("batch_req_")),
        "text": text,
        "finish_reason": finish,
        "error": None if error is None else error["message"],
        **counts,
        "cached_tokens": details.get("cached_tokens"),
    }


def _openai_text(body: dict[str, Any]) -> tuple[str, str]:
    if "output" in body:
        finish = "length" if body["status"] == "incomplete" else "stop"
        return body["output"][0]["content"][0]["text"], finish
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["finish_reason"]

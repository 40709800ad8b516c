"""Write the output of a batch: the line for each answer, and the file or stream that it goes to.

An answer is our own object or the one of OpenAI's batch files, always as one line of ASCII. With
`usage=False` it holds nothing that depends on time or on what was reused: each run writes the same
bytes. The file is always a beginning of what the store holds, byte for byte, so any broken end can
be mended.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from mlxrunner.batch.options import OutputOrder
from mlxrunner.batch.responses import response_body, response_usage
from mlxrunner.batch.store import Store, StoredAnswer, StoredLine, place_of
from mlxrunner.errors import MlxrunnerError, OptionError, OutputError
from mlxrunner.system.writing import is_writable, open_own, open_stream, whole_sync

if TYPE_CHECKING:
    from mlxrunner.batch.run import Outcome
    from mlxrunner.results import Result
    from mlxrunner.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0
"""The log-probability of an impossible token, as OpenAI's API writes it: JSON has no infinity."""
REFUSED, FAILED = 400, 500
"""HTTP's status codes for a request that is at fault, and for one that is not."""
SHORTEST_S = 0.1
"""The least seconds between two writes, and so the most work that a kill can lose."""
SHARE = 20
"""Writes to the disk take at most one part in SHARE of the time."""


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
        written = _openai(line, _finite(result), tokenizer, model, usage)
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
    """Return our own object for an outcome."""
    written: dict[str, Any] = {"id": outcome.line.id, "index": outcome.line.index}
    if outcome.result is None:
        return written | {"error": line_error(outcome)}
    result = _finite(outcome.result)
    written |= {"text": result.text, "finish_reason": result.finish_reason}
    if result.logprobs is not None:
        written["logprobs"] = [{"logprob": own, "top": top} for own, top in result.logprobs]
    return written | ({"usage": result.usage.as_dict()} if usage else {})


def _openai(
    line: StoredLine, result: Result, tokenizer: Tokenizer, model: str, usage: bool
) -> dict[str, Any]:
    """Return OpenAI's object for an answer."""
    if line.format == "response":
        return _openai_line(line, 200, _response(line, result, tokenizer, model, usage), None)
    is_chat = line.format == "chat.completion"
    choice: dict[str, Any] = {"index": 0}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": result.text}
        choice["logprobs"] = _chat_logprobs(result, tokenizer)
    else:
        choice["text"] = result.text
        choice["logprobs"] = _text_logprobs(result, tokenizer)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line.index}",
        "object": line.format,
        "created": int(time.time()) if usage else 0,
        "model": model,
        "choices": [choice | {"finish_reason": result.finish_reason}],
    }
    if usage:
        body["usage"] = {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "total_tokens": result.usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens},
        }
    return _openai_line(line, 200, body, None)


def _response(
    line: StoredLine, result: Result, tokenizer: Tokenizer, model: str, usage: bool
) -> dict[str, Any]:
    """Return the body of an answer in the format of OpenAI's Responses API."""
    logprobs = _chat_logprobs(result, tokenizer)
    body = response_body(
        line.index,
        line.options,
        result.text,
        is_cut=result.finish_reason == "length",
        logprobs=None if logprobs is None else logprobs["content"],
        created=int(time.time()) if usage else 0,
        model=model,
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
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return _openai_line(line, status, body, {"code": kind, "message": message})


def _openai_line(
    line: StoredLine, status: int, body: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a line of OpenAI's batch output with this body."""
    response = {"status_code": status, "request_id": f"req_{line.index}", "body": body}
    name = f"batch_req_{line.index}"
    return {"id": name, "custom_id": line.id, "response": response, "error": error}


def _finite(result: Result) -> Result:
    """Return the result with infinite log-probabilities replaced by IMPOSSIBLE."""
    if result.logprobs is None:
        return result
    logprobs = [
        (max(own, IMPOSSIBLE), {token: max(value, IMPOSSIBLE) for token, value in top.items()})
        for own, top in result.logprobs
    ]
    return replace(result, logprobs=logprobs)


def _chat_logprobs(result: Result, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the log-probabilities as OpenAI's chat API writes them."""
    if result.logprobs is None:
        return None
    bytes_of = _token_bytes(tokenizer)

    def shown(token: int, logprob: float) -> dict[str, Any]:
        content = bytes_of(token)
        return {"token": _token_text(content), "logprob": logprob, "bytes": list(content)}

    pairs = zip(result.tokens, result.logprobs, strict=True)
    return {
        "content": [
            {**shown(token, own), "top_logprobs": [shown(*other) for other in top.items()]}
            for token, (own, top) in pairs
        ]
    }


def _text_logprobs(result: Result, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the log-probabilities as OpenAI's completions API writes them."""
    if result.logprobs is None:
        return None
    bytes_of = _token_bytes(tokenizer)
    tops: list[dict[str, float]] = []
    for _, top in result.logprobs:
        by_text: dict[str, float] = {}
        for token, value in top.items():
            # Of tokens that are spelled alike, keep the first, which is the likeliest.
            by_text.setdefault(_token_text(bytes_of(token)), value)
        tops.append(by_text)
    return {
        "tokens": [_token_text(bytes_of(token)) for token in result.tokens],
        "token_logprobs": [own for own, _ in result.logprobs],
        "top_logprobs": tops,
    }


def _token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return a function from a token to its bytes, which may be part of a character.

    The bytes are those of the token's text if the tokenizer does not know its bytes.
    """
    try:
        pieces = tokenizer.vocabulary.pieces
    except OptionError:
        pieces = ()

    def bytes_of(token: int) -> bytes:
        piece = pieces[token] if token < len(pieces) else None
        return tokenizer.decode([token]).encode() if piece is None else piece

    return bytes_of


def _token_text(content: bytes) -> str:
    """Return a token as OpenAI's API writes it: its text, or its bytes if they are not a text."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


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
        try:
            return cls(os.fdopen(open_own(path), "r+b", buffering=0), str(path), is_file=True)
        except OSError as error:
            raise _unwritable(str(path), error) from error

    @classmethod
    def streaming(cls, path: Path | None) -> AnswerFile:
        """Open standard output (None) or another stream.

        What was sent can't be taken back, so a run on a stream can't be resumed.
        """
        if path is None:
            if sys.stdout is None or not _is_open(sys.stdout):
                raise OutputError("standard output is closed")
            return cls(sys.stdout.buffer, "standard output", is_file=False)
        try:
            return cls(os.fdopen(open_stream(path), "wb", buffering=0), str(path), is_file=False)
        except OSError as error:
            raise _unwritable(str(path), error) from error

    def mend(self, answers: Iterable[StoredAnswer]) -> None:
        """Compare the file with the store's answers, cut off a torn end, and go to the end.

        Raise OutputError, and change nothing, if the file holds anything else.
        """
        end = 0
        self._stream.seek(0)
        with open(os.dup(self._stream.fileno()), "rb") as reader:
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
        try:
            self._stream.truncate(end)
        except OSError as error:
            raise _unwritable(self.name, error) from error
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
        try:
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
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _unwritable(self.name, error) from error

    def _write(self, line: bytes) -> None:
        """Write the whole line: an unbuffered write may take only a part."""
        left = memoryview(line)
        while left:
            left = left[self._stream.write(left) :]

    def seal(self) -> None:
        """Put the file and its name onto the disk, so that a power cut loses neither."""
        if not self.is_file:
            return
        try:
            whole_sync(self._stream.fileno())
        except OSError as error:
            raise _unwritable(self.name, error) from error
        _sync_folder(Path(self.name))

    def rename(self, path: Path) -> None:
        """Give the file the name `path`, in the place of the file that has it."""
        try:
            os.replace(self.name, path)
        except OSError as error:
            raise _unwritable(str(path), error) from error
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
        folder = os.open(path.resolve().parent, os.O_RDONLY)
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


def _unwritable(name: str, error: OSError) -> OutputError:
    """Return the error for a file or stream that can't be written."""
    return OutputError(f"{name}: can't be written: {error.strerror}")


class Writer:
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

    def __enter__(self) -> Writer:
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

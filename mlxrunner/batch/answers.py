"""Make the line of the output for each outcome: our own object, or one of OpenAI's batch files.

A line is always ASCII. With `usage=False` it holds nothing that depends on time or on what was
reused: each run writes the same bytes. Knows nothing about files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlxrunner.batch.records import StoredLine, place_of
from mlxrunner.batch.responses import response_body, response_usage
from mlxrunner.errors import OptionError

if TYPE_CHECKING:
    from mlxrunner.batch.execution import Outcome
    from mlxrunner.results import Result
    from mlxrunner.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0
"""The log-probability of an impossible token, as OpenAI's API writes it: JSON has no infinity."""
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

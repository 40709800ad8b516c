"""Make the line of the output for each outcome: our own object, or one of OpenAI's batch files.

A line is always ASCII. With `usage=False` it holds nothing that depends on time or on what was
reused: each run writes the same bytes. Knows nothing about files.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mlxrunner.batch.openai_format import (
    TokenLogprob,
    chat_logprobs,
    completion_usage,
    error_object,
    finite,
    response_body,
    response_usage,
    text_logprobs,
    token_text,
)
from mlxrunner.batch.records import StoredLine, place_of
from mlxrunner.errors import OptionError

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
    """Return our own object for an outcome."""
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
    """Return OpenAI's object for an answer."""
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
    """Return the body of an answer in the format of OpenAI's Responses API."""
    tokens = _tokens(result, tokenizer)
    body = response_body(
        line.index,
        line.options,
        result.text,
        is_cut=result.finish_reason == "length",
        logprobs=None if tokens is None else chat_logprobs(tokens),
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
    body = {"error": error_object(message, kind)}
    return _openai_line(line, status, body, {"code": kind, "message": message})


def _openai_line(
    line: StoredLine, status: int, body: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a line of OpenAI's batch output with this body."""
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

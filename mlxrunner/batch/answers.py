"""What is written for a line: our own object, or the one of OpenAI's batch files. Always one line of ASCII, whatever the text is.

With `usage=False` nothing is in it that depends on time or on what was reused: an answer is the same bytes in every run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlxrunner.errors import OptionError

if TYPE_CHECKING:
    from mlxrunner.batch.run import Outcome
    from mlxrunner.batch.store import Entry
    from mlxrunner.parallel.request import Result
    from mlxrunner.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0
"""The log-probability of what can't be, as OpenAI's API says it."""
REFUSED, FAILED = 400, 500
"""HTTP's status codes for a request that is at fault, and for one that is not."""


def write_line(outcome: Outcome, tokenizer: Tokenizer, *, model: str, usage: bool) -> bytes:
    """The line, without its end. `model`: the name that OpenAI's objects say."""
    entry = outcome.entry
    if entry.format == "plain":
        written = _plain(outcome, usage)
    elif outcome.result is None:
        written = _openai_error(
            entry, line_error(outcome), REFUSED if outcome.is_refused else FAILED
        )
    else:
        written = _openai(entry, outcome.result, tokenizer, model, usage)
    return json.dumps(written).encode("ascii")


def line_error(outcome: Outcome) -> str:
    """What was wrong, with the number of the line in the file."""
    number = f"line {outcome.entry.number}: "
    return number + (outcome.error or "").removeprefix(number)


def error_of(line: bytes) -> str:
    """Return the error in a line of the output; empty if the line has none."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        error: Any = json.loads(line)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    return ""


def _plain(outcome: Outcome, usage: bool) -> dict[str, Any]:
    written: dict[str, Any] = {"id": outcome.entry.id, "index": outcome.entry.index}
    if outcome.result is None:
        return written | {"error": line_error(outcome)}
    result = _finite(outcome.result)
    written |= {"text": result.text, "finish_reason": result.finish_reason}
    if result.logprobs is not None:
        written["logprobs"] = [{"logprob": own, "top": top} for own, top in result.logprobs]
    return written | ({"usage": result.usage.as_dict()} if usage else {})


def _openai(
    entry: Entry, result: Result, tokenizer: Tokenizer, model: str, usage: bool
) -> dict[str, Any]:
    result = _finite(result)
    if entry.format == "chat.completion":
        kind: dict[str, Any] = {"message": {"role": "assistant", "content": result.text}}
        logprobs = _chat_logprobs(result, tokenizer)
    else:
        kind, logprobs = {"text": result.text}, _text_logprobs(result, tokenizer)
    body = {
        "id": f"{'chatcmpl' if entry.format == 'chat.completion' else 'cmpl'}-{entry.index}",
        "object": entry.format,
        "created": int(time.time()) if usage else 0,
        "model": model,
        "choices": [
            {"index": 0, **kind, "logprobs": logprobs, "finish_reason": result.finish_reason}
        ],
    }
    if usage:
        prompt, answer = result.usage.prompt_tokens, result.usage.completion_tokens
        body["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens},
        }
    return _openai_line(entry, 200, body, None)


def _openai_error(entry: Entry, message: str, status: int) -> dict[str, Any]:
    """Both where the API's own answer has it and where readers of batch files look first."""
    kind = "invalid_request_error" if status == REFUSED else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return _openai_line(entry, status, body, {"code": kind, "message": message})


def _openai_line(
    entry: Entry, status: int, body: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{entry.index}", "body": body}
    return {
        "id": f"batch_req_{entry.index}",
        "custom_id": entry.id,
        "response": response,
        "error": error,
    }


def _finite(result: Result) -> Result:
    """What can't be has a log-probability that JSON has no number for."""
    if result.logprobs is None:
        return result
    logprobs = [
        (max(own, IMPOSSIBLE), {token: max(value, IMPOSSIBLE) for token, value in top.items()})
        for own, top in result.logprobs
    ]
    return replace(result, logprobs=logprobs)


def _chat_logprobs(result: Result, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if result.logprobs is None:
        return None

    bytes_of = _spelling(tokenizer)

    def shown(token: int, logprob: float) -> dict[str, Any]:
        spelled = bytes_of(token)
        return {"token": _shown(spelled), "logprob": logprob, "bytes": list(spelled)}

    pairs = zip(result.tokens, result.logprobs, strict=True)
    return {
        "content": [
            {**shown(token, own), "top_logprobs": [shown(*other) for other in top.items()]}
            for token, (own, top) in pairs
        ]
    }


def _text_logprobs(result: Result, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if result.logprobs is None:
        return None
    bytes_of = _spelling(tokenizer)
    tops: list[dict[str, float]] = [{} for _ in result.logprobs]
    for by_text, (_, top) in zip(tops, result.logprobs, strict=True):
        for (
            token,
            value,
        ) in (
            top.items()
        ):  # the likeliest first: of tokens that are spelled alike it is the one that is kept
            by_text.setdefault(_shown(bytes_of(token)), value)
    return {
        "tokens": [_shown(bytes_of(token)) for token in result.tokens],
        "token_logprobs": [own for own, _ in result.logprobs],
        "top_logprobs": tops,
    }


def _spelling(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """The bytes of a token, which may be part of a character; those of its text where the tokenizer knows no others."""
    try:
        pieces = tokenizer.vocabulary.pieces
    except OptionError:
        pieces = ()

    def bytes_of(token: int) -> bytes:
        piece = pieces[token] if token < len(pieces) else None
        return tokenizer.decode([token]).encode() if piece is None else piece

    return bytes_of


def _shown(spelled: bytes) -> str:
    """As OpenAI's API writes a token: its text, or its bytes where these are none."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

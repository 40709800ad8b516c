"""Turn the errors of the engine into what a client is told. No traceback ever reaches a client."""

from __future__ import annotations

from mlxrunner.errors import (
    CacheFullError,
    ClosedError,
    ContextFullError,
    ContextLengthError,
    EngineError,
    FormError,
    LogitsError,
    MemoryPlanError,
    MlxrunnerError,
    ModelError,
    OptionError,
    PictureError,
    PicturesFullError,
    PromptError,
    StepFailedError,
    TimeLimitError,
)
from mlxrunner.results import logger
from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import RefusedError
from mlxrunner.serve.shapes import BAD_PICTURE

SOON = 5
"""Seconds after which a client may ask again for what is not there at the moment."""
MOST_MESSAGES = 20_000
MOST_TOOLS = 2_000
MOST_STOPS = 1_000
"""Most stop strings: each token of the answer is compared with all, and other requests wait."""
TOO_LONG = "context_length_exceeded"
STATUS: tuple[tuple[type[MlxrunnerError], int, str], ...] = (
    (ContextLengthError, 400, TOO_LONG),
    (ContextFullError, 400, TOO_LONG),
    (CacheFullError, 400, TOO_LONG),
    (PromptError, 400, "invalid_prompt"),
    (OptionError, 400, "invalid_option"),
    (FormError, 400, "invalid_form"),
    (PicturesFullError, 503, "overloaded"),
    (PictureError, 400, BAD_PICTURE),
    (TimeLimitError, 504, "timeout"),
    (ModelError, 503, "model_unavailable"),
    (MemoryPlanError, 503, "model_too_large"),
    (EngineError, 503, "engine_failed"),
    (ClosedError, 503, "stopping"),
    (StepFailedError, 500, "request_failed"),
    (LogitsError, 500, "broken_logits"),
)
"""The status and the code for each class of errors; the first that fits counts."""


def refusal_of(error: BaseException) -> RefusedError:
    """Return what a client is told about `error`, which is logged if it is unexpected."""
    if isinstance(error, RefusedError):
        return error
    for kind, status, code in STATUS:
        if isinstance(error, kind):
            retry_after = SOON if status == 503 else None
            return RefusedError(status, _line(error), code=code, retry_after=retry_after)
    logger.error("a request failed: %s: %s", type(error).__name__, error)
    logger.debug("where it failed", exc_info=error)
    return RefusedError(
        500, f"internal error ({type(error).__name__}); the server's log says more", code="internal"
    )


def check_counts(asked: Asked) -> None:
    """Raise RefusedError for more messages, tools or stop strings than any conversation has."""
    stops = asked.options.get("stop") or ()
    for name, given, most in (
        ("stop", () if isinstance(stops, str) else stops, MOST_STOPS),
        ("messages", asked.messages, MOST_MESSAGES),
        ("tools", asked.tools, MOST_TOOLS),
    ):
        if len(given) > most:
            raise RefusedError(
                400,
                f"{name}: there are {len(given)}, and {most} are the most: send fewer",
                param=name,
            )


def too_long(tokens: int, room: int, *, is_least: bool = False) -> RefusedError:
    """Return the refusal of a prompt of `tokens` tokens where `room` is the most there is.

    `is_least`: it was not tokenized, because it has at least so many.

    Clients such as Claude Code and opencode shorten the conversation when an error has the words
    "prompt is too long".
    """
    count = f"at least {tokens}" if is_least else tokens
    return RefusedError(
        400,
        f"the prompt is too long: it has {count} tokens, and the context has room for {room} with "
        "the answer: shorten it, or start the server with a longer --context or more --memory",
        code=TOO_LONG,
    )


def _line(error: BaseException) -> str:
    """Return the first line of the text of an error: a table's others are for the terminal."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__

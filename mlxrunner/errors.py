"""Every error that mlxrunner raises on purpose, as one tree.

The command line prints each as one line and ends with its exit code.

MlxrunnerError               exit code 1
├── ModelError               exit code 2: the model is missing, broken or not supported
│   └── NoSuchModelError     exit code 2: no model has this name
├── MemoryPlanError          exit code 2: the model and its caches do not fit into the memory
├── OptionError              exit code 2: an option is out of range (also a ValueError)
├── PromptError              exit code 2: the prompt cannot be run (also a ValueError)
│   ├── ContextLengthError   exit code 2: the prompt is longer than the context
│   ├── TemplateLimitError   exit code 2: the chat template took too long or made too much text
│   └── BrokenLineError      exit code 2: a line of a batch cannot be run
├── ReadError                exit code 2: a file or a log cannot be read
│   └── MissingFileError     exit code 2: no file has this name
├── OutputClosedError        exit code 2: standard output cannot be written to
├── PictureError             exit code 2: a picture cannot be used
│   └── PicturesFullError    exit code 2: other requests hold too many
├── SessionError             exit code 2: a saved session is missing, damaged or in use
├── ContextFullError         exit code 1: the answer filled the context (`overflow="error"`)
├── FormError                exit code 1: no token continues an answer in the requested form
├── LogitsError              exit code 1: the model computed NaN or only infinities, and no token
├── CancelledError           exit code 1: the request was cancelled before it ended
├── CacheFullError           exit code 1: a cache for many sequences has too few free cells
├── NotSupportedError        exit code 2: a cache or a model cannot do this at all
├── NoFreeSlotError          exit code 1: every slot is in use (a ParallelRunner waits)
├── StepFailedError          exit code 1: a request made a step fail, or was in an interrupted one
├── StoreError               exit code 2: the store of a batch cannot be made, opened or written
│   └── DamagedStoreError    exit code 2: the store of a batch is damaged
├── OutputError              exit code 2: answers, a report or another file cannot be written
├── CutOffError              exit code 1: a batch could not write any more after it had answered
├── TimeLimitError           exit code 1: a request took longer than its time limit
├── DifferentRunError        exit code 2: a batch was begun with other options, model or input
├── RequestError             exit code 1: a request of `run_batch` has no answer
├── VerifyError              exit code 4: a warm answer differed from a cold one (`--verify-strict`)
├── WrongThreadError         exit code 1: another thread than the owner called the runner
├── ClosedError              exit code 1: the runner has been closed
├── LaunchError              exit code 1: a client or the ranks of a model cannot be started
├── EngineError              exit code 1: the thread of a ParallelRunner has died
└── BusyError                exit code 1: another request uses the cache, another thread reads, or
                             an observer waits for the thread that called it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MlxrunnerError(Exception):
    """Base class of all errors that mlxrunner raises on purpose."""

    exit_code = 1
    """Exit code of the command line."""
    is_table = False
    """True if the message has several lines, none of which comes from a file."""

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        """Give a class its `exit_code`, by default that of its base."""
        if exit_code is not None:
            cls.exit_code = exit_code


def reason(error: BaseException, most: int = 300) -> str:
    """Return the message of any error in one line of at most `most` characters, or its type."""
    return " ".join(str(error).split())[:most] or type(error).__name__


class ModelError(MlxrunnerError, exit_code=2):
    """The model is missing, broken or of an unknown kind; the message names the file or id."""


class NoSuchModelError(ModelError):
    """No model, here or on the hub, has this name, or it is not a name of a model at all."""


class MemoryPlanError(MlxrunnerError, exit_code=2):
    """The plan does not fit; the message is its table, with settings that would fit."""

    is_table = True


class OptionError(MlxrunnerError, ValueError, exit_code=2):
    """An option is unknown, of the wrong type or out of its range."""


class PromptError(MlxrunnerError, ValueError, exit_code=2):
    """The prompt cannot be run: it is empty, not made of tokens, or refused by the template."""


class ContextLengthError(PromptError):
    """The prompt leaves no room for an answer in the context."""

    def __init__(self, tokens: int, context: int, *, is_least: bool = False) -> None:
        """`is_least`: the prompt was not tokenized, because it has at least `tokens` tokens."""
        count = f"at least {tokens}" if is_least else str(tokens)
        super().__init__(
            f"the prompt has {count} tokens, which leaves no room in the context of {context} "
            "tokens: shorten it or load the model with a longer --context"
        )
        self.tokens, self.context, self.is_least = tokens, context, is_least


class TemplateLimitError(PromptError):
    """A chat template was stopped because it took too long or made too much text."""


class BrokenLineError(PromptError):
    """A line of a batch cannot be run."""

    def __init__(self, problem: str, fields: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.fields = fields
        """The fields of the line that could be read, such as its id."""


class ReadError(MlxrunnerError, exit_code=2):
    """A file cannot be read. The message begins with the path and says what to do."""


class MissingFileError(ReadError):
    """No file has this name; it may be a link to nothing."""


class OutputClosedError(MlxrunnerError, exit_code=2):
    """Standard output is closed or full."""


class PictureError(MlxrunnerError, exit_code=2):
    """A picture is damaged, too large, or of an unknown format; the message names it."""


class PicturesFullError(PictureError):
    """The pictures of a request find no room beside those of running requests: send it again."""


class SessionError(MlxrunnerError, exit_code=2):
    """A saved session is missing, damaged, open elsewhere, or cannot be written."""


class ContextFullError(MlxrunnerError):
    """The answer filled the context before it ended (`overflow="error"`)."""

    def __init__(self, answer: int, context: int) -> None:
        super().__init__(
            f"the answer filled the context of {context} tokens after {answer} tokens: "
            "load the model with a longer --context, or use --overflow shift"
        )
        self.answer, self.context = answer, context


class FormError(MlxrunnerError):
    """No token of the model continues an answer in the requested form (`schema`, `choices`)."""

    def __init__(self, tokens: int, why: str = "") -> None:
        reason = f": {why}" if why else ""
        super().__init__(
            f"after {tokens} tokens of the answer, no token of the model fits the schema or "
            f"choices{reason}"
        )
        self.tokens = tokens


class LogitsError(MlxrunnerError):
    """The logits of the next token are NaN or infinite; the message names the likely reason."""


class CancelledError(MlxrunnerError):
    """The request was cancelled before it ended, so it has no result."""


class CacheFullError(MlxrunnerError):
    """A cache has fewer free cells than needed, even after defragmenting; nothing was changed."""

    def __init__(
        self,
        what: str,
        needed: int,
        free: int,
        total: int,
        remedy: str = "remove tokens or sequences, or initialize the cache with a larger capacity",
    ) -> None:
        super().__init__(
            f"{what} needs {needed} free cells, but {free} of {total} are free: {remedy}"
        )
        self.needed, self.free, self.total = needed, free, total


class NotSupportedError(MlxrunnerError, exit_code=2):
    """A cache or model cannot do that at all; nothing was changed."""


class NoFreeSlotError(MlxrunnerError):
    """Every slot has a request. A ParallelRunner does not raise it: its requests wait."""

    def __init__(self, slots: int) -> None:
        super().__init__(
            f"all {slots} slots are in use: finish or cancel a request, or load with more "
            "max_sequences"
        )


class StepFailedError(MlxrunnerError):
    """A request made a step fail, or a step that carried it was interrupted."""


class RequestError(MlxrunnerError):
    """A request of `run_batch` could not be answered; the message is one line."""

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused
        """True if the request itself is at fault, so that it was not run."""


class StoreError(MlxrunnerError, exit_code=2):
    """A store cannot be made, opened or written to. Answers committed before are safe."""


class DamagedStoreError(StoreError):
    """A file is not a store, or has been changed; no run can resume from it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name}: {why}: no run can resume from it. Remove it and begin again with "
            "another -o; the answers in the output stay"
        )


class OutputError(MlxrunnerError, exit_code=2):
    """A file cannot be written, or another run wrote it; the message names the file."""

    @classmethod
    def of(cls, file: str, error: OSError) -> OutputError:
        """Return the error for `file`, with the system's reason."""
        return cls(f"{file}: can't be written: {error.strerror or error}")


class CutOffError(MlxrunnerError):
    """A batch could not write any more; the store keeps its answers, and `--resume` continues."""


class TimeLimitError(MlxrunnerError):
    """A request did not end within its time limit: the `timeout` of a batch, or its `deadline`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"stopped after {seconds:g} s without an end: allow more time, or a shorter answer "
            "(max_tokens)"
        )


class DifferentRunError(MlxrunnerError, exit_code=2):
    """The run to resume was begun with other options, another model or another input."""


class VerifyError(MlxrunnerError, exit_code=4):
    """A request gave another answer when it was run again without the entry."""

    def __init__(self, failed: int, verified: int) -> None:
        super().__init__(
            f"{failed} of {verified} verified requests gave something else when they were run "
            "again cold: the cache was wrong. This is a bug or broken memory; the events with "
            "verify.equal false say more"
        )
        self.failed, self.verified = failed, verified


class WrongThreadError(MlxrunnerError):
    """A thread that is not the owner made a call; nothing was touched."""

    def __init__(self, what: str, owner: str, caller: str) -> None:
        super().__init__(
            f"this {what} belongs to the thread {owner!r}, which opened it, but thread {caller!r} "
            f"called it: make all calls in {owner!r}"
        )
        self.what, self.owner, self.caller = what, owner, caller


class ClosedError(MlxrunnerError):
    """A closed runner was called."""

    def __init__(self, what: str) -> None:
        super().__init__(f"this {what} is closed: load the model again with {what}.load")
        self.what = what


class LaunchError(MlxrunnerError):
    """A client can't be started on a server, or the hosts of a model can't work together."""


class EngineError(MlxrunnerError):
    """The thread that owns the model of a ParallelRunner has ended by an unexpected exception."""

    def __init__(self, cause: BaseException) -> None:
        why = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        super().__init__(
            f"the engine of this ParallelRunner was ended by {why}: close it and load it again"
        )


class BusyError(MlxrunnerError):
    """A second request was started before the first one ended, or a handle has another reader.

    Or an observer made a call that waits for the thread that called it.
    """

    def __init__(
        self,
        why: str = "another request still uses the cache: finish it or close its iterator first",
    ) -> None:
        super().__init__(why)


FORMER = {"FileError": ReadError, "ObserverError": BusyError, "WriteError": OutputError}
"""Errors by the names that they had until version 0.2."""


def __getattr__(name: str) -> Any:
    if name not in FORMER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return FORMER[name]

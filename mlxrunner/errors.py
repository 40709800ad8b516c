"""Everything that can go wrong, as one tree. The command line turns each into one line and an exit code.

MlxrunnerError          exit code 1
├── ModelError          exit code 2: a model that is missing, broken or not supported
├── MemoryPlanError     exit code 2: what was asked for does not fit into the memory that the device offers
├── OptionError         exit code 2: an option out of range (also a ValueError)
├── PromptError         exit code 2: a prompt that can't be run
│   ├── ContextLengthError   longer than the context
│   ├── TemplateLimitError   made by a chat template that does not end
│   └── BrokenLineError      a line of a batch that can't be run (`mlxrunner.batch.fields`)
├── ReadError           exit code 2: a file or a log that can't be read (`mlxrunner.reading`)
│   └── MissingFileError     that is not there
├── WriteError          exit code 2: a report that can't be written (`mlxrunner.profiling.files`)
├── OutputClosedError   exit code 2: standard output can't be written to (`mlxrunner.cli.program`)
├── SessionError        exit code 1: a saved session that is missing, damaged, in use, or can't be written
├── FileError           exit code 2: a file that can't be put into a message, or written (`mlxrunner.chat.files`)
├── ContextFullError    exit code 1: the answer filled the context, and the caller wanted that to be an error
├── FormError           exit code 1: an answer that can't go on in the form that was asked for
├── CacheFullError, NotSupportedError   exit code 1: of caches for many sequences (`mlxrunner.cache.sequences`)
├── StoreError          exit code 2: the lines and answers of a batch can't be kept (`mlxrunner.batch.store`)
│   └── DamagedStoreError    they were kept, and are damaged
├── OutputError         exit code 2: answers of a batch can't be written (`mlxrunner.batch.output`)
├── CutOffError         exit code 1: a StoreError or an OutputError, after answers were given (`mlxrunner.batch.work`)
├── TimeLimitError      a line of a batch that did not end in its time (`mlxrunner.batch.run`)
├── DifferentRunError   exit code 2: a batch was begun with other options, model or input (`mlxrunner.batch.fingerprint`)
├── NoFreeSlotError     exit code 1: every slot of a parallel runner is in use (`mlxrunner.parallel.slots`)
├── StepFailedError     exit code 1: a step that carried several requests failed (`mlxrunner.parallel.request`)
├── VerifyError         exit code 4: warm requests differed from a cold run (`--verify-cache` with `--strict`)
├── WrongThreadError    exit code 1: a call from another thread than the one that owns the runner (`mlxrunner.owner`)
└── BusyError           exit code 1: another request is still using the one entry
"""

from __future__ import annotations


class MlxrunnerError(Exception):
    """Base of all errors that mlxrunner raises on purpose."""

    exit_code = 1
    is_table = False
    """The message has several lines, and nothing in it comes from a file."""


class ModelError(MlxrunnerError):
    """A model that is missing, broken or of a kind that is not known; the message names the file or id."""

    exit_code = 2


class MemoryPlanError(MlxrunnerError):
    """The plan does not fit; the message is its table, with the settings that would."""

    exit_code = 2
    is_table = True


class OptionError(MlxrunnerError, ValueError):
    """An option out of its range."""

    exit_code = 2


class PromptError(MlxrunnerError, ValueError):
    """A prompt that can't be run: empty, refused by the chat template, or made of something else than tokens."""

    exit_code = 2


class ContextLengthError(PromptError):
    """The prompt leaves no room for an answer in the context."""

    def __init__(self, tokens: int, context: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, which leaves no room in the context of {context} tokens: "
            "shorten it or load the model with a longer --context"
        )
        self.tokens, self.context = tokens, context


class TemplateLimitError(PromptError):
    """A chat template that was stopped: it took too long, or made too much text."""


class ContextFullError(MlxrunnerError):
    """The answer filled the context before it ended (`overflow="error"`)."""

    def __init__(self, answer: int, context: int) -> None:
        super().__init__(
            f"the answer filled the context of {context} tokens after {answer} tokens: "
            "load the model with a longer --context, or use --overflow shift"
        )
        self.answer, self.context = answer, context


class SessionError(MlxrunnerError):
    """A saved session, or its caches, that is missing, damaged, open elsewhere, or can't be written."""


class FormError(MlxrunnerError):
    """No token of the model begins or goes on with an answer in the form that was asked for (`schema`, `choices`)."""

    def __init__(self, tokens: int, why: str = "") -> None:
        reason = f": {why}" if why else ""
        super().__init__(
            f"after {tokens} tokens of the answer, no token of the model fits the form that was asked for{reason}"
        )
        self.tokens = tokens


class VerifyError(MlxrunnerError):
    """A request that was run again cold gave something else than the entry had given."""

    exit_code = 4

    def __init__(self, failed: int, verified: int) -> None:
        super().__init__(
            f"{failed} of {verified} verified requests gave something else when they were run again cold: the entry was wrong. "
            "This is a bug or broken memory; the events with verify.equal false say more"
        )
        self.failed, self.verified = failed, verified


class BusyError(MlxrunnerError):
    """A second request was started before the first one ended."""

    def __init__(self) -> None:
        super().__init__(
            "another request still uses the entry: finish it or close its iterator first"
        )


class WrongThreadError(MlxrunnerError):
    """A call from another thread than the one that opened `what`; nothing was touched."""

    def __init__(self, what: str, owner: str, caller: str) -> None:
        super().__init__(
            f"this {what} belongs to the thread {owner!r}, which opened it, but thread {caller!r} called it: "
            f"make all calls in {owner!r}"
        )
        self.what, self.owner, self.caller = what, owner, caller

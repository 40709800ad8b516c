"""The options of a request and the settings of a runner, each described once.

`mlxrunner.config.option` says what such a description holds, and what is made from it. This knows
nothing about models, or about the meaning of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from mlxrunner.config.names import did_you_mean, nearest
from mlxrunner.config.option import (
    Option,
    as_choices,
    as_texts,
    check_choices,
    check_fields,
    check_path,
    check_range,
    check_schema,
    check_stop,
    check_template,
    check_tools,
    check_whole,
    described,
    json_text,
    listed,
    names,
    option,
    with_current_names,
)
from mlxrunner.errors import OptionError

EMBEDDED = ("demo", "demo-pictures")
"""The names of the models that come with the program."""
MAX_LOGPROBS = 100
"""Most tokens whose log-probabilities can be asked for."""
OVERFLOW = ("stop", "shift", "error")
"""The actions that can be taken when the context is full."""
Reserve = bool | Literal["request"]
"""The time at which memory is reserved: at start for the whole context (True), for each request's
prompt and `max_tokens` when it begins ("request"), or never (False).
"""
PER_REQUEST: Literal["request"] = "request"
WIRE = {
    "weights": "the weights stay in memory, caches may be swapped out when memory is short",
    "all": "caches stay in memory, too: kernel panics were reported for this with many requests",
    "none": "no kernel panics were reported, but a model that nearly fills the memory gets slow",
}
"""The parts of a model's memory that macOS may not move (wired), each with what it risks."""
SPECULATE = ("auto", "lookup", "off")
"""The ways to guess tokens of an answer."""
NO_SPECULATING = {
    "mtp": "mlx-lm drops the heads that predict several tokens when it loads a model, so nothing "
    "can be drafted with them; use auto, or a draft model",
    "draft": "a draft model is chosen when the model is loaded: --draft-model MODEL, in Python "
    "Runner.load(..., draft_model=MODEL)",
}
"""Why other ways, which other programs have, are not among them."""
CHOOSING = tuple(
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty".split()
)
"""The options that choose the next token."""
MOST_TOKENS = 2**31 - 1
"""Largest value of an option that counts tokens."""
LARGEST_TOKEN = 2**31 - 1
"""The largest token id: ids are stored in 32 bits."""

STOP_IDS = ("stop_tokens", "stop_token_ids")
"""The options that are lists of token ids: all that end an answer, and further ones."""
NO_STOP: dict[str, Any] = {STOP_IDS[0]: []}
"""The options of an answer that no token ends."""
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "repetition_penalty": None,
    "presence_penalty": None,
    "frequency_penalty": None,
}
"""The options of an answer whose tokens are always the model's most likely ones."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of a request.

    `schema` and `choices` hold the answer to a form. Such an answer ends where its form is
    complete: `stop` has no effect on it, and stop tokens can only come there. Raise OptionError if
    a value is of the wrong type, out of range, or contradicts another.
    """

    max_tokens: int | None = option(
        None,
        int,
        "Maximum answer length, in tokens. [default: until the model stops or the context is full]",
        low=1,
    )
    temperature: float = option(
        0.0,
        float,
        "0 = always the most likely token.",
        low=0,
        high=100,
    )
    top_k: int = option(
        0, int, "Keep only the K most likely tokens. [default: all]", low=0, high=MOST_TOKENS
    )
    top_p: float = option(
        1.0,
        float,
        "Keep only the most likely tokens up to this probability. [default: all]",
        low=0,
        high=1,
    )
    min_p: float = option(
        0.0,
        float,
        "Keep only tokens at least this likely, as a share of the likeliest.",
        low=0,
        high=1,
    )
    repetition_penalty: float | None = option(
        None,
        float,
        "Divide the logits of recent tokens. [default: 1, which is off]",
        low=0.01,
        high=100,
    )
    presence_penalty: float | None = option(
        None, float, "Subtract from the logits of recent tokens. [default: 0]", low=-100, high=100
    )
    frequency_penalty: float | None = option(
        None,
        float,
        "Subtract from the logits of recent tokens, once per occurrence. [default: 0]",
        low=-100,
        high=100,
    )
    penalty_context: int = option(
        20,
        int,
        "Number of recent tokens that the penalties see.",
        low=1,
        high=MOST_TOKENS,
    )
    seed: int | None = option(
        None,
        int,
        "Make sampling repeatable. [default: random; in a batch 0]",
        low=0,
        high=2**64 - 1,
    )
    stop: tuple[str, ...] = option(
        (),
        str,
        "End the answer before TEXT (repeatable). No effect with --schema or --choices.",
        metavar="TEXT",
        is_list=True,
    )
    schema: str | None = option(
        None,
        str,
        "Constrain the answer to the JSON schema in FILE.",
        metavar="FILE",
        in_chat=False,
    )
    choices: tuple[str, ...] = option(
        (),
        str,
        "Constrain the answer to one of these; put one with a comma in double quotes: "
        "'yes,\"no, never\"'.",
        metavar="A,B,...",
        is_list=True,
        in_chat=False,
    )
    overflow: str = option(
        "stop",
        str,
        "When the context is full: end the answer, drop the oldest half after the first `keep` "
        "tokens, or fail.",
        among=OVERFLOW,
    )
    keep: int | None = option(
        None, int, "Tokens that a shift keeps. [default: the system prompt]", low=0
    )
    speculate: str = option(
        "auto",
        str,
        "Speculative decoding: auto (where it pays), lookup (wherever the text repeats "
        "itself) or off. Answers stay the same.",
        among=SPECULATE,
        refused=NO_SPECULATING,
    )
    logprobs: int | None = option(
        None,
        int,
        "Each token's log-probability and the K likeliest.",
        low=0,
        high=MAX_LOGPROBS,
        metavar="K",
        in_chat=False,
    )
    stop_tokens: tuple[int, ...] | None = option(
        None,
        int,
        "Token ids that end the answer. [default: the model's own]",
        is_list=True,
        in_chat=False,
    )
    stop_token_ids: tuple[int, ...] = option(
        (),
        int,
        "Additional token ids that end the answer.",
        is_list=True,
        in_chat=False,
    )
    continue_final_message: bool | None = option(
        None,
        bool,
        "Continue the assistant's message at the end of the conversation (true), or begin a "
        "new one (false). [default: continue it, if there is one]",
        in_chat=False,
    )
    template: str | None = option(
        None,
        str,
        "Set a variable of the chat template, such as enable_thinking=false (repeatable). "
        "VALUE is JSON, or else a text.",
        metavar="NAME=VALUE",
        in_chat=False,
    )
    tools: str | None = option(
        None,
        str,
        "Describe the tools in FILE to the model: a JSON list of functions in OpenAI's format.",
        metavar="FILE",
        in_chat=False,
    )

    def __post_init__(self) -> None:
        check_stop(self.stop)
        _check_stop_tokens("stop_tokens", self.stop_tokens or ())
        _check_stop_tokens("stop_token_ids", self.stop_token_ids)
        check_choices(self.choices)
        check_schema(self.schema)
        if self.choices and self.schema is not None:
            raise OptionError("schema, choices: an answer has one form, use one of them")
        check_template(self.template)
        check_tools(self.tools)
        check_fields(self)

    @property
    def has_form(self) -> bool:
        """True if the answer is held to a schema or to choices."""
        return self.schema is not None or bool(self.choices)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template besides the messages: `template` and `tools`."""
        variables: dict[str, Any] = {} if self.template is None else json.loads(self.template)
        tools = [] if self.tools is None else json.loads(self.tools)
        return {**variables, "tools": tools} if tools else variables

    def ends(self, default: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end the answer. `default` are those of the tokenizer."""
        own = default if self.stop_tokens is None else frozenset(self.stop_tokens)
        return own.union(self.stop_token_ids)

    def stops(self, default: Sequence[str]) -> tuple[str, ...]:
        """Return the texts before which the answer ends. `default` are those of the template."""
        return () if self.has_form else (*self.stop, *default)

    @classmethod
    def of(cls, **options: Any) -> GenerateOptions:
        """Return the options that a caller gives as keyword arguments (see GenerateKwargs).

        `stop` and `choices` may be a string or several. `schema` and `template` may be a
        dictionary, and `tools` a list of dictionaries. Raise OptionError if a name is unknown or a
        value is wrong.
        """
        _check_names(cls, options)
        ends, more = options.pop("stop_tokens", None), options.pop("stop_token_ids", None) or ()
        return cls(
            stop=as_texts("stop", options.pop("stop", None)),
            stop_tokens=None if ends is None else tuple(listed("stop_tokens", ends, "[2, 5]")),
            stop_token_ids=tuple(listed("stop_token_ids", more, "[2, 5]")),
            schema=json_text("schema", options.pop("schema", None), dict),
            template=json_text("template", options.pop("template", None), dict),
            tools=json_text("tools", options.pop("tools", None), list, tuple),
            choices=as_choices(options.pop("choices", None)),
            **options,
        )


class GenerateKwargs(TypedDict, total=False):
    """The options of GenerateOptions as `generate` takes them, for type checkers.

    `stop` and `choices` take one string or several. `schema`, `template` and `tools` take JSON
    text, or an object (for `tools` a list of objects).
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    penalty_context: int
    seed: int | None
    stop: str | Sequence[str]
    schema: str | dict[str, Any] | None
    template: str | dict[str, Any] | None
    tools: str | Sequence[dict[str, Any]] | None
    choices: str | Sequence[str] | None
    overflow: Literal["stop", "shift", "error"]
    keep: int | None
    speculate: Literal["auto", "lookup", "off"]
    logprobs: int | None
    stop_tokens: Sequence[int] | None
    stop_token_ids: Sequence[int] | None
    continue_final_message: bool | None


class SubmitKwargs(GenerateKwargs, total=False):
    """The options of a request beside others, for type checkers.

    `priority`: "interactive", or "batch" for work that takes what others leave. `deadline`: seconds
    after which the request ends with TimeLimitError.
    """

    priority: Literal["interactive", "batch"]
    deadline: float | None


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """The settings of a runner: what its caches store, and how far they can be rewound.

    Raise OptionError if a value is of the wrong type or out of range.
    """

    context: int | None = option(
        None,
        int,
        "Context window: maximum tokens of prompt and answer. [default: the model's own, or "
        "what fits]",
        low=2,
        high=MOST_TOKENS,
    )
    kv_bits: int | None = option(
        None,
        int,
        "Quantize the KV cache of full-attention layers to 8 or 4 bits. [default: no quantization]",
        among=(4, 8),
        metavar="B",
    )
    prefill_step: int = option(
        2048,
        int,
        "Prompt tokens evaluated per step.",
        low=1,
        high=MOST_TOKENS,
    )
    rewind_slack: int = option(
        512,
        int,
        "Tokens kept beyond a sliding window, so that it can be rewound.",
        low=0,
        high=MOST_TOKENS,
    )
    checkpoint_budget: int | None = option(
        None,
        int,
        "Memory for checkpoints of sliding windows and recurrent states. [default: room for 8 "
        "to 64]",
        low=0,
        metavar="SIZE",
        is_size=True,
    )
    checkpoint_interval: int = option(
        1024,
        int,
        "Tokens between checkpoints.",
        low=1,
        high=MOST_TOKENS,
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Return the settings given by name. Raise OptionError if a name or a value is wrong."""
        settings = with_current_names(cls, settings)
        _check_names(cls, settings)
        return cls(**settings)

    @classmethod
    def among(cls, options: Mapping[str, Any]) -> RunnerSettings:
        """Return the settings that are among `options`, which may hold others as well."""
        return cls(**{name: options[name] for name in names(cls) if name in options})


class RunnerKwargs(TypedDict, total=False):
    """The settings of RunnerSettings except `context`, as keyword arguments, for type checkers."""

    kv_bits: int | None
    prefill_step: int
    rewind_slack: int
    checkpoint_budget: int | None
    checkpoint_interval: int


def _check_names(kind: Any, given: Mapping[str, Any]) -> None:
    unknown = sorted(given.keys() - kind.__dataclass_fields__.keys())
    if unknown:
        known = ", ".join(sorted(names(kind)))
        hint = did_you_mean(unknown[0], names(kind)) or _of_the_runner(unknown[0], kind)
        raise OptionError(f"unknown option {unknown[0]!r}: {hint}known are {known}")


def _of_the_runner(name: str, kind: type) -> str:
    """Return a hint if `name`, which is none of the options `kind`, is a setting of a runner."""
    found = nearest(name, names(RunnerSettings)) if kind is GenerateOptions else None
    return "" if found is None else f"{found!r} is a setting of the runner (Runner.load); "


def _check_stop_tokens(name: str, tokens: tuple[int, ...]) -> None:
    for token in tokens:
        check_whole(name, token)
        check_range(name, token, 0, LARGEST_TOKEN)


def chat_options() -> Iterator[tuple[str, Option]]:
    """Return the options that the chat's `/set` knows, by name."""
    return (found for found in described(GenerateOptions).items() if found[1].in_chat)


def sampling(options: Mapping[str, Any]) -> str:
    """Describe how options of a request choose tokens, such as "temperature 0.6, top_p 0.95".

    Without a temperature that is "greedy", with the penalties if there are any.
    """
    usual = vars(GenerateOptions())
    changed = [name for name in CHOOSING if options.get(name, usual[name]) != usual[name]]
    if not options.get("temperature"):
        changed = ["greedy", *(name for name in changed if name in GREEDY)]
    return ", ".join(f"{name} {options[name]}" if name != "greedy" else name for name in changed)


def check_raw(options: Mapping[str, Any], system: str | None) -> None:
    """Raise OptionError if an option needs the chat template, which --raw leaves out."""
    given = {
        "--system": system,
        "--chat-template-var": options.get("template"),
        "--tools": options.get("tools"),
    }
    for flag, value in given.items():
        if value:
            raise OptionError(
                f"{flag} needs the chat template, which --raw leaves out: use one of them"
            )


GIB = 2**30
DISK_WRITE_BYTES = 64 * GIB
DISK_WRITES = (
    "Maximum per day that conversations in memory write to the disk cache, where a crash does not "
    "lose them; 0 = none."
)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of `mlxrunner serve`. Creating it raises OptionError if one is wrong."""

    host: str = option(
        "127.0.0.1",
        str,
        "Address to listen on. All but loopback addresses need --api-key or --no-key.",
        metavar="ADDRESS",
    )
    port: int = option(
        8080,
        int,
        "Port to listen on; 0 = any free one.",
        low=0,
        high=65535,
    )
    api_key: str | None = option(
        None,
        str,
        "Refuse requests without this key, which clients send as a bearer token or as x-api-key.",
        metavar="KEY",
    )
    no_key: bool = option(
        False,
        bool,
        "Allow a non-loopback address without a key: anyone who reaches it can use the server.",
    )
    allow_origin: tuple[str, ...] = option(
        (),
        str,
        "Let web pages from URL use the server, such as http://localhost:3000 (repeatable).",
        metavar="URL",
        is_list=True,
        was=("origin",),
    )
    memory: int | None = option(
        None,
        int,
        "Memory limit for models and caches. [default: what the device offers]",
        low=1,
        metavar="SIZE",
        is_size=True,
    )
    slots: int | None = option(
        None,
        int,
        "Parallel requests, and conversations in memory, per model. [default: 16, or 8 where the "
        "windows and states of 16 would take a twentieth of the memory]",
        low=1,
        high=256,
    )
    max_queue: int = option(
        64,
        int,
        "Maximum waiting requests; others are rejected with status 429.",
        low=0,
        high=MOST_TOKENS,
    )
    disk_cache_bytes: int = option(
        8 * GIB,
        int,
        "Disk cache size per model, for conversations evicted from memory.",
        low=1,
        metavar="SIZE",
        is_size=True,
        was=("park_bytes",),
    )
    disk_cache: bool = option(
        True,
        bool,
        "Discard evicted conversations instead of writing them to disk.",
        was=("parks", "park"),
    )
    disk_write_bytes: int = option(
        DISK_WRITE_BYTES,
        int,
        DISK_WRITES,
        low=0,
        metavar="SIZE",
        is_size=True,
    )
    keep_alive: float | None = option(
        None,
        float,
        "Time after its last answer until a model is unloaded. [default: when memory is needed]",
        low=0,
        metavar="SECONDS",
    )
    pictures: bool = option(
        False,
        bool,
        "Load vision models with their encoders. They answer one request per step, without "
        "speculative decoding.",
    )
    picture_folder: str | None = option(
        None,
        str,
        "Read pictures that requests name by file: URLs, from this folder only.",
        metavar="FOLDER",
    )
    disable_rewrite: tuple[str, ...] = option(
        (),
        str,
        "Turn off a rule that rewrites prompts for reuse (repeatable). "
        "docs/serve-prefixes.md lists them.",
        metavar="NAME",
        is_list=True,
        was=("no_rule",),
    )
    claude_names: bool = option(
        True,
        bool,
        "Refuse the names of Anthropic's models, such as claude-haiku-4-5, instead of answering "
        "them with MODEL.",
    )
    drain: float = option(
        10.0,
        float,
        "Time that running requests get when the server stops.",
        low=0,
        high=3600,
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        check_fields(self)


CHECKPOINT_BUDGET = 2**30
"""Bytes for the checkpoints of all slots if neither a setting nor a plan gives another number."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings(RunnerSettings):
    """The settings of an engine of many requests that is made from loaded parts.

    Raise OptionError if a value is of the wrong type or out of range.
    """

    max_sequences: int = field(
        metadata={"option": Option(int, "Maximum parallel requests.", low=1)}
    )
    prefill_step: int = option(
        1024, int, "Maximum tokens per step, for all requests together.", low=1, high=MOST_TOKENS
    )
    kv_cache_tokens: int | None = option(
        None,
        int,
        "Size of the KV pool in tokens; a shared token counts once. [default: what fits, or "
        "is always enough]",
        low=2,
        high=MOST_TOKENS,
        was=("cells",),
    )
    cache_memory: int | None = option(
        None,
        int,
        "Memory limit for the caches of all requests. Idle conversations are "
        "evicted first. [default: what fits]",
        low=1,
        metavar="SIZE",
        is_size=True,
        was=("memory",),
    )
    max_step_ms: float | None = option(
        None,
        float,
        "Maximum milliseconds of a step while answers are generated; 0 = no limit.",
        low=0,
        metavar="MS",
        was=("step_ms",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill_step >= self.max_sequences:
            return
        default = type(self).__dataclass_fields__["prefill_step"].default
        if self.prefill_step == default:
            raise OptionError(
                f"max_sequences: {self.max_sequences} is out of range, a step of {default} tokens "
                "has to hold one of each"
            )
        Option(low=self.max_sequences, high=MOST_TOKENS).check("prefill_step", self.prefill_step)

    @property
    def engine(self) -> dict[str, Any]:
        """The settings of the engine alone, by name."""
        return {name: getattr(self, name) for name in names(EngineSettings)}

    def complete(self, context: int) -> Self:
        """Return the settings in use for a model of `context` tokens.

        The context of a request is never longer than all cells.
        """
        context = self.context or context
        chosen = replace(self, context=min(context, self.kv_cache_tokens or context))
        budget = self.checkpoint_budget
        return replace(
            chosen,
            kv_cache_tokens=self.kv_cache_tokens or chosen.most_cells,
            prefill_step=chosen.step,
            checkpoint_budget=CHECKPOINT_BUDGET if budget is None else budget,
        )

    @property
    def most_cells(self) -> int:
        """Cells that are always enough. The settings need to have a context."""
        return self.max_sequences * (self.context or MOST_TOKENS)

    @property
    def step(self) -> int:
        """The most tokens of a step: no more than all sequences can have."""
        return min(self.prefill_step, self.most_cells)


@dataclass(frozen=True, kw_only=True)
class OpenSettings(EngineSettings):
    """The settings with which an engine is opened on a loaded model."""

    disk_cache_bytes: int = option(
        0,
        int,
        "Disk cache size, for conversations evicted from memory; 0 = none.",
        low=0,
        metavar="SIZE",
        is_size=True,
        was=("park_bytes",),
    )
    disk_cache_dir: str | PathLike[str] | None = option(
        None,
        Path,
        "Folder of the disk cache, kept for the next start. [default: a private one, removed "
        "at the end]",
        metavar="FOLDER",
        was=("park_folder",),
    )
    disk_write_bytes: int = option(
        DISK_WRITE_BYTES,
        int,
        DISK_WRITES,
        low=0,
        metavar="SIZE",
        is_size=True,
    )
    reserve: bool = option(True, bool, "Allocate memory as needed, not at start.")
    wire: str = option(
        "weights",
        str,
        "Memory that macOS may not swap out: weights, all (caches, too) or none.",
        among=tuple(WIRE),
    )
    draft_model: str | None = option(
        None,
        str,
        "Draft model for speculative decoding: a smaller model with the same vocabulary. "
        "Answers stay the same.",
        metavar="MODEL",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disk_cache_dir is not None:
            check_path("disk_cache_dir", self.disk_cache_dir)
            if not self.disk_cache_bytes:
                raise OptionError("disk_cache_dir: needs disk_cache_bytes, too")

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Return the settings given by name, as RunnerSettings.of; a model may be a path."""
        drafts = settings.get("draft_model")
        given = {"draft_model": fspath(drafts)} if isinstance(drafts, PathLike) else {}
        return super().of(**settings | given)


class EngineKwargs(RunnerKwargs, total=False):
    """The settings of EngineSettings but `max_sequences`, for type checkers."""

    context: int | None
    kv_cache_tokens: int | None
    cache_memory: int | None
    max_step_ms: float | None


class OpenKwargs(EngineKwargs, total=False):
    """The settings of OpenSettings but `max_sequences`, for type checkers."""

    disk_cache_bytes: int
    disk_cache_dir: str | PathLike[str] | None
    disk_write_bytes: int
    reserve: bool
    wire: str
    draft_model: str | PathLike[str] | None

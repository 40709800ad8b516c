"""Write and read the token log: the requests as token ids.

The log is enough to replay the entry's decisions without a model. docs/profiling.md describes each
field. A line holds the number of tokens that its prompt shares with the request before, and the
rest of the prompt. A conversation of n turns therefore takes n lines of one turn each. No tensors.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

from mlxrunner.cache.account import ConversationName
from mlxrunner.cache.entry import TokenArray, as_tokens, common_prefix
from mlxrunner.profiling.logs import LogLines
from mlxrunner.results import with_new_names

if TYPE_CHECKING:
    from mlxrunner.engine.request import Observation
    from mlxrunner.profiling.schema import Event


SCHEMA, VERSION = "mlxrunner/tokens", 1
ANEW = 64
"""The number of requests after which a line shares nothing with the one before."""

TokenIds = list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]


class _ProcessFields(TypedDict):
    """The fields that the line of a process must have."""

    kind: Literal["process"]
    process: str
    model: str
    fingerprint: str
    context: int
    prefill_step: int
    checkpoint_interval: int
    checkpoint_budget: int
    rewind_slack: int
    layers: list[Any]
    thinking: list[Any]
    message_ends: TokenIds


class _RequestFields(TypedDict):
    """The fields that the line of a request must have."""

    kind: Literal["request"]
    process: str
    id: str
    number: int
    shared: int
    matched: int
    cached: int
    entry_before: int
    entry_after: int
    evaluated: int
    shifted: int
    prompt: TokenIds
    answer: TokenIds
    checkpoints: TokenIds
    conversation: NotRequired[tuple[str, str | None, bool] | None]


@dataclass(frozen=True)
class LoggedRequest:
    """One request of a token log. docs/profiling.md describes the fields of its lines."""

    process: Mapping[str, Any]
    prompt: TokenArray
    answer: TokenArray
    """The tokens of the answer that were run through the model."""
    facts: Mapping[str, Any]
    """Its own line (`matched`, `cached` ...)."""

    @property
    def conversation(self) -> ConversationName | None:
        """The names of its conversation; None: it is compared with no other prompt."""
        names = self.facts.get("conversation", ())
        return None if names is None else ConversationName(*names)


@dataclass
class TokenLines:
    """The maker of the lines of one process."""

    process: Mapping[str, Any]
    _before: TokenArray = field(default_factory=lambda: as_tokens([]))
    _since: int = 0
    _began: float = field(default_factory=time.perf_counter)

    def first(self) -> dict[str, Any]:
        """Return the line that describes the process."""
        return {"schema": SCHEMA, "version": VERSION, "kind": "process", **self.process}

    def request(self, observed: Observation, event: Event) -> dict[str, Any]:
        """Return the line of the next request."""
        self._since += 1
        prompt, entry = observed.prompt, observed.entry.array
        shared = 0 if self._since >= ANEW else common_prefix(self._before, prompt)
        if not shared:
            self._since = 0
        goes_on = common_prefix(entry, prompt) == min(len(entry), len(prompt))
        scheduling = observed.scheduling
        answer = entry[len(prompt) :] if goes_on else as_tokens([])
        if scheduling is not None:
            answer = scheduling.answer
        self._before = np.concatenate([prompt, answer])
        name = observed.prepared.conversation
        line = {
            "schema": SCHEMA,
            "version": VERSION,
            "kind": "request",
            "process": self.process["process"],
            "id": event.id,
            "number": event.number,
            "shared": shared,
            "prompt": prompt[shared:].tolist(),
            "answer": answer.tolist(),
            "matched": event.matched_tokens,
            "cached": event.saved_tokens,
            "entry_before": event.entry_tokens,
            "entry_after": len(entry),
            "evaluated": min(len(entry), len(prompt)) if goes_on else len(prompt),
            "shifted": event.shifted_tokens,
            "entry": None if goes_on else entry.tolist(),
            "evicted_by": event.evicted_by,
            "checkpoints": list(observed.checkpoints),
            "conversation": None if name is None else list(name),
            "began_s": round(observed.clock.began - self._began, 6),
        }
        if scheduling is not None:
            facts = vars(scheduling).items()
            line["scheduling"] = {name: value for name, value in facts if name != "answer"}
        return line


class TokenLog:
    """The requests of token logs, with their whole prompts, in the order of the files."""

    def __init__(self, files: Iterable[str | Path]) -> None:
        self._lines = LogLines(files, SCHEMA, VERSION, _checked)
        self._lost = 0

    @property
    def skipped(self) -> Counter[str]:
        """The number of skipped lines by the kinds of `LogLines`; "lost" continue missing ones."""
        return self._lines.skipped + Counter(lost=self._lost)

    def __iter__(self) -> Iterator[LoggedRequest]:
        self._lost = 0
        processes: dict[str, Mapping[str, Any]] = {}
        before: dict[str, tuple[int, TokenArray]] = {}
        for line in self._lines:
            name = line["process"]
            if line["kind"] == "process":
                processes[name] = line
                continue
            number, tokens = before.get(name, (0, as_tokens([])))
            is_there = name in processes and (line["shared"] == 0 or number == line["number"] - 1)
            if not is_there or line["shared"] > len(tokens):
                self._lost += 1
                continue
            facts = dict(line)
            prompt = np.concatenate([tokens[: line["shared"]], as_tokens(facts.pop("prompt"))])
            answer = as_tokens(facts.pop("answer"))
            before[name] = line["number"], np.concatenate([prompt, answer])
            yield LoggedRequest(processes[name], prompt, answer, facts)


def read_token_log(files: Iterable[str | Path]) -> TokenLog:
    """Read the requests of `files`. The iteration raises ReadError if a file can't be read."""
    return TokenLog(files)


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with the names of today. Raise ValueError if it is none."""
    line = with_new_names(line)
    msgspec.convert(line, _RequestFields if line.get("kind") == "request" else _ProcessFields)
    if any(isinstance(value, int) and not 0 <= value <= 2**53 for value in line.values()):
        raise ValueError("a count is out of range")
    if line["kind"] == "request" and not line["shared"] + len(line["prompt"]):
        raise ValueError("the prompt is empty")
    return line

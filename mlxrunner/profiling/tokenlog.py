"""Write and read the token log: the requests as token ids.

The log is enough to replay the entry's decisions without a model. docs/profiling.md describes each
field. A line holds the number of tokens that its prompt shares with the request before, and the
rest of the prompt. A conversation of n turns therefore takes n lines of one turn each. No tensors.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from mlxrunner.cache.account import ConversationName
from mlxrunner.cache.entry import TokenArray, as_tokens, common_prefix
from mlxrunner.errors import PromptError
from mlxrunner.profiling.logs import LogLines
from mlxrunner.results import with_new_names

if TYPE_CHECKING:
    from mlxrunner.engine.request import Observation, SchedulingRecord
    from mlxrunner.profiling.schema import Event


SCHEMA, VERSION = "mlxrunner/tokens", 1
ANEW = 64
"""The number of requests after which a line shares nothing with the one before."""

_TYPES: Mapping[str, Mapping[type, str]] = {
    "process": {
        str: "process model fingerprint",
        int: "context prefill_step checkpoint_interval checkpoint_budget rewind_slack",
        list: "layers message_ends thinking",
    },
    "request": {
        str: "process id",
        int: "number shared matched cached entry_before entry_after evaluated shifted",
        list: "prompt answer checkpoints",
    },
}
"""The fields that a line of each kind must have, by their type."""


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
        return line if scheduling is None else {**line, "scheduling": _as_dict(scheduling)}


class TokenLog:
    """The requests of token logs, in the order in which they were written."""

    def __init__(self, files: Iterable[str | Path]) -> None:
        self._lines = LogLines(files, SCHEMA, VERSION, _checked)
        self._lost = 0

    @property
    def skipped(self) -> Counter[str]:
        """The number of lines that the last iteration skipped, by kind.

        The kinds are those of `LogLines`, and "lost" for requests that share tokens with a missing
        one.
        """
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
            prompt = np.concatenate([tokens[: line["shared"]], _ids(facts.pop("prompt"))])
            answer = _ids(facts.pop("answer"))
            before[name] = line["number"], np.concatenate([prompt, answer])
            yield LoggedRequest(processes[name], prompt, answer, facts)


def _as_dict(scheduling: SchedulingRecord) -> dict[str, Any]:
    return {
        one.name: getattr(scheduling, one.name)
        for one in fields(scheduling)
        if one.name != "answer"
    }


def read_token_log(files: Iterable[str | Path]) -> TokenLog:
    """Read the requests of `files` with their whole prompts.

    The iteration raises ReadError if a file can't be read.
    """
    return TokenLog(files)


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with the names of today.

    Raise ValueError if a field is missing or has an impossible value.
    """
    line = with_new_names(line)
    if not _is_valid(line):
        raise ValueError("not a line of a token log")
    return line


def _is_valid(line: Mapping[str, Any]) -> bool:
    """Return True if a line has all fields of its kind, with possible values."""
    wanted = _TYPES.get(str(line.get("kind")), {})
    if not wanted or not all(
        type(line.get(name)) is kind for kind, names in wanted.items() for name in names.split()
    ):
        return False
    if any(isinstance(value, int) and not 0 <= value <= 2**53 for value in line.values()):
        return False
    if not all(
        are_ids(line.get(name, [])) for name in ("prompt", "answer", "message_ends", "checkpoints")
    ):
        return False
    if line["kind"] == "process":
        return True
    return bool(line["shared"] + len(line["prompt"])) and _are_names(line.get("conversation"))


def _are_names(names: Any) -> bool:
    """Return True if a field names a conversation, or that there is none."""
    try:
        msgspec.convert(names, tuple[str, str | None, bool] | None)
    except msgspec.ValidationError:
        return False
    return True


def are_ids(tokens: Any) -> bool:
    """Return True if `tokens` is a list of token ids.

    Each item is checked: for a text among them, numpy would allocate its length for every token.
    """
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        return False
    try:
        as_tokens(tokens)
    except PromptError:
        return False
    return True


def _ids(tokens: list[int]) -> TokenArray:
    return as_tokens(tokens)

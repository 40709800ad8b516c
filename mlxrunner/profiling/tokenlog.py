"""The token log: what an entry was asked, as token ids, enough to replay its decisions without a model. No tensors.

`TOKENS.md` beside this file says what each field means. A prompt is written as what it shares with the request before it and the rest,
so a conversation of n turns takes n lines of a turn each, not of a conversation each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxrunner.cache.tokens import TokenArray, as_tokens, common_prefix
from mlxrunner.errors import PromptError
from mlxrunner.profiling.reading import Lines

if TYPE_CHECKING:
    from mlxrunner.observation import Beside, Observation

SCHEMA, VERSION = "mlxrunner/tokens", 1
ANEW = 64
"""So many requests after a line that stands for itself, another one does."""

_PROCESS: Mapping[str, type] = {
    "process": str, "model": str, "fingerprint": str, "context": int, "prefill_step": int, "checkpoint_interval": int,
    "checkpoint_budget": int, "rewind_slack": int, "layers": list, "message_ends": list, "thinking": list,
}  # fmt: skip
_REQUEST: Mapping[str, type] = {
    "process": str, "id": str, "number": int, "shared": int, "prompt": list, "answer": list, "matched": int, "cached": int,
    "entry_before": int, "entry_after": int, "evaluated": int, "shifted": int, "checkpoints": list,
}  # fmt: skip


@dataclass(frozen=True)
class LoggedRequest:
    """One request of a token log. `process`: the line of its process, `facts`: its own (`matched`, `cached` ...), as TOKENS.md says."""

    process: Mapping[str, Any]
    prompt: TokenArray
    answer: TokenArray
    facts: Mapping[str, Any]


@dataclass
class TokenLines:
    """The lines of one process on their way out."""

    process: Mapping[str, Any]
    _before: TokenArray = field(default_factory=lambda: as_tokens([]))
    _since: int = 0
    _began: float = field(default_factory=time.perf_counter)

    def first(self) -> dict[str, Any]:
        """The line of the process."""
        return {"schema": SCHEMA, "version": VERSION, "kind": "process", **self.process}

    def request(self, observed: Observation, event: Mapping[str, Any]) -> dict[str, Any]:
        """The next request's line."""
        self._since += 1
        prompt, entry = observed.prompt, observed.entry.array
        shared = 0 if self._since >= ANEW else common_prefix(self._before, prompt)
        if not shared:
            self._since = 0
        goes_on = common_prefix(entry, prompt) == min(len(entry), len(prompt))
        beside = observed.beside
        answer = entry[len(prompt) :] if goes_on else as_tokens([])
        if beside is not None:
            answer = beside.answer
        self._before = np.concatenate([prompt, answer])
        line = {
            "schema": SCHEMA, "version": VERSION, "kind": "request", "process": self.process["process"],
            "id": event["id"], "number": event["number"], "shared": shared, "prompt": prompt[shared:].tolist(), "answer": answer.tolist(),
            "matched": event["matched_tokens"], "cached": event["saved_tokens"], "entry_before": event["entry_tokens"],
            "entry_after": len(entry), "evaluated": min(len(entry), len(prompt)) if goes_on else len(prompt),
            "shifted": event["shifted_tokens"], "entry": None if goes_on else entry.tolist(), "freed_by": event["freed_by"],
            "checkpoints": list(observed.checkpoints), "began_s": round(observed.clock.began - self._began, 6),
        }  # fmt: skip
        return line if beside is None else {**line, "beside": _as_dict(beside)}


class TokenLog:
    """The requests of token logs, in the order in which they were written; `skipped` counts what could not be used while it is iterated.

    `skipped`: those of `reading.Lines`, and "lost": requests that share tokens with one that is not there.
    """

    def __init__(self, files: Iterable[str | Path]) -> None:
        self._lines = Lines(files, SCHEMA, VERSION, _is_valid)
        self._lost = 0

    @property
    def skipped(self) -> Counter[str]:
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
            prompt = np.concatenate([tokens[: line["shared"]], _ids(line["prompt"])])
            answer = _ids(line["answer"])
            before[name] = line["number"], np.concatenate([prompt, answer])
            yield LoggedRequest(processes[name], prompt, answer, line)


def _as_dict(beside: Beside) -> dict[str, Any]:
    return {one.name: getattr(beside, one.name) for one in fields(beside) if one.name != "answer"}


def read_token_log(files: Iterable[str | Path]) -> TokenLog:
    """The requests of `files` with their whole prompts. ReadError, while iterating, for a file that can't be read."""
    return TokenLog(files)


def _is_valid(line: Any) -> bool:
    wanted = {"process": _PROCESS, "request": _REQUEST}.get(str(line.get("kind")))
    if wanted is None or not all(type(line.get(name)) is kind for name, kind in wanted.items()):
        return False
    if any(isinstance(value, int) and not 0 <= value <= 2**53 for value in line.values()):
        return False
    if not all(
        are_ids(line.get(name, [])) for name in ("prompt", "answer", "message_ends", "checkpoints")
    ):
        return False
    return line["kind"] == "process" or bool(line["shared"] + len(line["prompt"]))


def are_ids(tokens: Any) -> bool:
    """Whether it is a list of token ids. A text among them would make numpy allocate its length for each."""
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        return False
    try:
        as_tokens(tokens)
    except PromptError:
        return False
    return True


def _ids(tokens: list[int]) -> TokenArray:
    return as_tokens(tokens)

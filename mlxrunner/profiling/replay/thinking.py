"""Rewrite the prompts of a token log: keep the thinking of earlier answers in them, or strip it.

Chat templates do the one or the other. Stripping looks for the marks. Putting thinking back needs
the answers: a prompt that continues an earlier request except for a thinking block of its answer
gets that block. A prompt stays as it is if the log does not show what was left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mlxrunner.cache.tokens import TokenArray, common_prefix
from mlxrunner.profiling.replay.simulate import ReplayedRequest

REMEMBERED = 64
"""The number of earlier requests that a prompt may continue."""
HEADER = 16
"""The most tokens from the beginning of a thinking block that the template opens to the answer."""
BLANKS = 8
"""The most tokens around a thinking block (line ends) that are left out with it."""
PROOF = 4
"""The number of tokens behind a block that have to be the same to prove that it was left out."""


@dataclass(frozen=True)
class _Turn:
    """An earlier request."""

    logged: TokenArray
    """The tokens of prompt and answer as logged."""
    prompt_tokens: int
    """The number of these tokens that are the prompt."""
    kept: TokenArray
    """The tokens of the prompt with its thinking put back."""


class Rewriter:
    """A rewriter of the requests of one process, in their order.

    `changed` counts the requests that it has changed.
    """

    def __init__(self, process: Mapping[str, Any], way: Literal["kept", "stripped"]) -> None:
        """Rewrite prompts so that their thinking is "kept" or "stripped".

        `process` is the line of the process in the token log.
        """
        self._marks = [
            (tuple(mark["begin"]), tuple(mark["end"]))
            for mark in process["thinking"]
            if mark["begin"] and mark["end"]
        ]
        self._message_ends = np.array(process["message_ends"], np.int32)
        self._way = way
        self._turns: deque[_Turn] = deque(maxlen=REMEMBERED)
        self.changed = 0

    def rewrite(self, request: ReplayedRequest) -> ReplayedRequest:
        """Return the request with its prompt rewritten.

        Return the request itself if its prompt stays the same.
        """
        prompt = self._stripped(request.prompt) if self._way == "stripped" else self._kept(request)
        if len(prompt) == len(request.prompt):
            return request
        self.changed += 1
        was_whole = request.evaluated >= len(request.prompt)
        return replace(
            request,
            prompt=prompt,
            evaluated=len(prompt) if was_whole else request.evaluated,
            entry=None,
        )

    def _stripped(self, prompt: TokenArray) -> TokenArray:
        """Return the prompt without the thinking blocks of earlier messages."""
        ends = np.flatnonzero(np.isin(prompt, self._message_ends))
        last = int(ends[-1]) if len(ends) else 0
        gone = np.zeros(len(prompt), np.bool_)
        for begin, end in self._blocks(prompt):
            gone[begin:end] = begin < last
        return prompt[~gone]

    def _kept(self, request: ReplayedRequest) -> TokenArray:
        """Return the prompt with the thinking of the request that it continues."""
        prompt = request.prompt
        goes_on = [(common_prefix(turn.logged, prompt), turn) for turn in self._turns]
        goes_on = [
            (common, turn) for common, turn in goes_on if common >= turn.prompt_tokens - HEADER
        ]
        if goes_on:
            common, turn = max(goes_on, key=lambda one: one[0])
            logged = turn.logged
            resumed = self._resumed(logged, prompt, common)
            before = np.concatenate([turn.kept, logged[turn.prompt_tokens :]])
            moved = len(turn.kept) - turn.prompt_tokens
            prompt = np.concatenate([before[: resumed + moved], prompt[common:]])
        self._turns.append(
            _Turn(np.concatenate([request.prompt, request.answer]), len(request.prompt), prompt)
        )
        return prompt

    def _resumed(self, logged: TokenArray, prompt: TokenArray, common: int) -> int:
        """Return where `logged`, behind a thinking block, continues like `prompt` from `common`.

        Return `common` if it does not.
        """
        for end in sorted(
            {end for begin, end in self._blocks(logged) if begin - BLANKS <= common < end}
        ):
            for place in range(end, min(end + BLANKS, len(logged))):
                same = common_prefix(logged[place:], prompt[common:])
                if same >= min(PROOF, len(logged) - place):
                    return place
        return common

    def _blocks(self, tokens: TokenArray) -> list[tuple[int, int]]:
        """Return begin and end of each thinking block, with its marks."""
        blocks: list[tuple[int, int]] = []
        for begin, end in self._marks:
            ends, begins = _places(tokens, end), _places(tokens, begin)
            after = np.searchsorted(ends, begins + len(begin))
            ended = after < len(ends)
            blocks += zip(
                begins[ended].tolist(), (ends[after[ended]] + len(end)).tolist(), strict=True
            )
        return blocks


def _places(tokens: TokenArray, wanted: Sequence[int]) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the places where `wanted` begins in `tokens`."""
    count = len(tokens) - len(wanted) + 1
    if count <= 0:
        return np.empty(0, np.intp)
    found = np.ones(count, np.bool_)
    for index, token in enumerate(wanted):
        found &= tokens[index : index + count] == token
    return np.flatnonzero(found)

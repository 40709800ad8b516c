"""Prompts of a token log as they would have been, had the thinking of earlier answers been kept in them, or been stripped from them.

Whether it is is the chat template's doing. Stripping is looking for the marks. Putting it back needs the answers: a prompt that goes on as
an earlier one did, but for a thinking block of its answer, gets that block. Where the log does not show what was left out, a prompt
stays as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mlxrunner.cache.tokens import TokenArray, common_prefix
from mlxrunner.profiling.simulate import Request

REMEMBERED = 64
"""Earlier requests that a prompt may go on from."""
HEADER = 16
"""A template may open the thinking block itself: it then begins at most so many tokens before the answer."""
BLANKS = 8
"""Tokens around a thinking block (line ends) that go with it."""
PROOF = 4
"""So many tokens after a block have to be the same for it to be the one that was left out."""


@dataclass(frozen=True)
class _Turn:
    """`logged` is prompt and answer as they were, `kept` the prompt with its thinking put back."""

    logged: TokenArray
    prompt_tokens: int
    kept: TokenArray


class Rewriter:
    """For the requests of one process, in their order. `changed` counts those that came out different."""

    def __init__(self, process: Mapping[str, Any], way: Literal["kept", "stripped"]) -> None:
        self._marks = [
            (tuple(mark["begin"]), tuple(mark["end"]))
            for mark in process["thinking"]
            if mark["begin"] and mark["end"]
        ]
        self._message_ends = np.array(process["message_ends"], np.int32)
        self._way = way
        self._turns: deque[_Turn] = deque(maxlen=REMEMBERED)
        self.changed = 0

    def rewrite(self, request: Request) -> Request:
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
        ends = np.flatnonzero(np.isin(prompt, self._message_ends))
        last = int(ends[-1]) if len(ends) else 0
        gone = np.zeros(len(prompt), np.bool_)
        for begin, end in self._blocks(prompt):
            gone[begin:end] = begin < last
        return prompt[~gone]

    def _kept(self, request: Request) -> TokenArray:
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
        """Where `logged` goes on as `prompt` does from `common` on, after a thinking block; `common` if it does not."""
        for end in sorted(
            {end for begin, end in self._blocks(logged) if begin - BLANKS <= common < end}
        ):
            for place in range(end, min(end + BLANKS, len(logged))):
                same = common_prefix(logged[place:], prompt[common:])
                if same >= min(PROOF, len(logged) - place):
                    return place
        return common

    def _blocks(self, tokens: TokenArray) -> list[tuple[int, int]]:
        """Begin and end of each thinking block, its marks included."""
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
    """Where `wanted` begins in `tokens`."""
    count = len(tokens) - len(wanted) + 1
    if count <= 0:
        return np.empty(0, np.intp)
    found = np.ones(count, np.bool_)
    for index, token in enumerate(wanted):
        found &= tokens[index : index + count] == token
    return np.flatnonzero(found)

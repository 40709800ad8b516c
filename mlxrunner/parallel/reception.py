"""Prepare requests for a runner of many: tokenize them, check their options, and bound them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mlxrunner.engine.answer import AnswerStream
from mlxrunner.engine.requests import Request, prepare
from mlxrunner.errors import CacheFullError
from mlxrunner.models.facts import ModelFacts
from mlxrunner.options import GenerateOptions
from mlxrunner.parallel.scheduling.claims import NEVER
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.turns import Priority
from mlxrunner.parallel.scheduling.turns import check as check_turn
from mlxrunner.tokenizer import Tokenizer
from mlxrunner.tokenizer.prompt import Prompt


@dataclass(frozen=True)
class Reception:
    """The bounds of each request. Any thread may use them."""

    tokenizer: Tokenizer
    facts: ModelFacts
    context: int
    """Most tokens of one prompt and its answer."""
    cells: int
    """Most tokens that are stored for all requests together."""

    def prepare(self, prompt: Prompt, given: dict[str, Any]) -> ActiveRequest:
        """Tokenize a prompt and check its options.

        Raise CacheFullError if the request would not find room even alone.
        """
        began = time.perf_counter()
        priority: Priority = given.pop("priority", "interactive")
        deadline: float | None = given.pop("deadline", None)
        check_turn(priority, deadline)
        request = prepare(
            prompt,
            GenerateOptions.of(**given),
            tokenizer=self.tokenizer,
            facts=self.facts,
            context=self.context,
            began=began,
        )
        self._limit_to_cells(request)
        most = min(len(request.tokens) + request.limit, self.context)
        if most > self.cells:
            is_open = request.options.max_tokens is None and request.shift is None
            needed = len(request.tokens) + 1 if is_open else most
            raise CacheFullError("this request", needed, self.cells, self.cells, NEVER, never=True)
        answer = AnswerStream(self.tokenizer, request.tokens, request.options, request.limit)
        active = ActiveRequest.of(request, answer)
        active.priority, active.deadline, active.asked = priority, deadline, began
        return active

    def _limit_to_cells(self, request: Request) -> None:
        """End an answer without a limit where all cells are its own."""
        room = self.cells - len(request.tokens)
        if request.options.max_tokens is None and request.shift is None and room > 0:
            request.limit = min(request.limit, room)
            request.context = min(request.context, self.cells)

"""Prepare requests for a runner of many: tokenize them, check their options, and bound them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mlxrunner.engine.answer import AnswerStream
from mlxrunner.engine.requests import prepare
from mlxrunner.models.facts import ModelFacts
from mlxrunner.options import GenerateOptions
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

    def prepare(self, prompt: Prompt, given: dict[str, Any]) -> ActiveRequest:
        """Tokenize a prompt and check its options."""
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
        answer = AnswerStream(self.tokenizer, request.tokens, request.options, request.limit)
        active = ActiveRequest.of(request, answer)
        active.priority, active.deadline, active.asked = priority, deadline, began
        return active

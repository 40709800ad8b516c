"""Guess tokens of answers that run beside others: whose, how many, and what became of them.

A step that carries guesses is read before the next one is dispatched. All its guesses take rows of
one pass, which every answer in the step waits for. So a guess counts for less the more answers a
step carries, and a full step has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import mlx.core as mx

from mlxrunner.engine.sampling import Decoded, Sampled, plain
from mlxrunner.errors import FormError, LogitsError
from mlxrunner.models.facts import ModelFacts
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.row import Row, Step
from mlxrunner.results import Chunk
from mlxrunner.speculation.controller import (
    DEEPEST,
    DEPTHS,
    KEPT,
    LEAST_GAIN,
    Budget,
    Controller,
)
from mlxrunner.speculation.drafting import Experience
from mlxrunner.speculation.seats import MOST_ANSWERS
from mlxrunner.speculation.sources import Sources
from mlxrunner.system.device import work_clock

FORGOTTEN = 256
"""Steps without guesses after which the cost of those with guesses is measured again."""


class StepController(Controller):
    """The choice of how much one answer of a step drafts. It learns from whole steps."""

    def __init__(self, budget: Budget, most: int = DEEPEST, kept: float = 0.0) -> None:
        """Begin without measurements. `budget`: bounds what drafts lose. `kept`: see `Controller`.

        `most`: the answers of a step beyond which there are no drafts.
        """
        super().__init__(budget, kept=kept)
        self._shared, self._most = budget, most
        self._of: dict[int, Controller] = {}
        self._plain: defaultdict[int, int] = defaultdict(int)
        self._answers, self._can_pay = 1, True
        self.costs = self._for(1).costs

    def carry(self, answers: int) -> None:
        """Note how many answers the next step carries."""
        self._answers = max(1, answers)
        self.costs = self._for(_size(self._answers)).costs
        self._can_pay = self._answers == 1 or any(
            depth / self._answers + 1 - self.costs.hoped(depth) >= LEAST_GAIN
            for depth in DEPTHS
            if self._affords(depth)
        )

    @property
    def may_draft(self) -> bool:
        """True if the budget has room for a draft that would save enough if it were right."""
        return self._answers <= self._most and self._can_pay and super().may_draft

    def depth(self, shares: Sequence[float], most: int, first: float = 1.0) -> int:
        """Return how many tokens to draft: see `Controller.depth`.

        A right guess saves a step for one answer only, so it counts as that answer's share of it.
        """
        if not shares or self._answers > self._most:
            return 0
        part = [shares[0] / self._answers, *shares[1:]]
        return self._for(_size(self._answers)).depth(part, most, first)

    def hold(self, depth: int) -> None:
        """Note that an answer of the next step drafts `depth` tokens, which may all be wrong."""
        if depth:
            self._shared.held += self.costs.ratio(depth) - 1

    def verified(self, depth: int, seconds: float) -> None:
        """Do nothing: `measure` has the whole step."""

    def passed(self, seconds: float) -> None:
        """Do nothing: `measure` has the whole step."""

    def pay(self, depth: int, tokens: int, lost: float = 0.0) -> None:
        """Do nothing: `settle` has the whole step."""

    def settle(self, answers: int, rows: int, tokens: int, late: float) -> None:
        """Note that a step gave `tokens` tokens in all, with `rows` rows beside one per answer.

        An answer that gets one token more saves its share of a step. `late`: see `Drafting.passed`.
        """
        costs = self._for(_size(answers)).costs
        lost = min(late / costs.single, 1.0) if late and costs.single else 0.0
        self._shared.pay(costs.ratio(rows) + lost, tokens / answers)

    def measure(self, answers: int, rows: int, seconds: float) -> None:
        """Note the seconds of a step with `rows` beside one for each answer."""
        size = _size(answers)
        if rows:
            self._plain[size] = 0
            self._for(size).verified(rows, seconds)
            return
        self._plain[size] += 1
        if self._plain[size] % FORGOTTEN == 0:
            self._of.pop(size, None)
        self._for(size).passed(seconds)

    def _for(self, size: int) -> Controller:
        """Return the controller of steps of a size. It begins with what smaller ones know."""
        if size not in self._of:
            like = self._for(size - 1).costs if size > 1 else None
            self._of[size] = Controller(self._shared, like, self._kept)
        return self._of[size]


class Drafts:
    """The drafts of all requests of a runner."""

    def __init__(self, facts: ModelFacts | None, most: int) -> None:
        """Prepare drafts for the model of `facts`; None: there are none.

        `most`: rows that drafts may add to a step.
        """
        budget = Budget()
        self._controller = StepController(budget)
        self._modelled = StepController(budget, MOST_ANSWERS, KEPT)
        self._said_s: float | None = None
        """Seconds in which a model drafted all guesses of the step; None: they tell nothing."""
        experience = Experience(budget, of_steps=(self._controller, self._modelled))
        self.sources = None if facts is None else Sources(facts, experience)
        self._most, self._clock = min(most, DEEPEST), work_clock()
        self._is_used = self._is_always = self._may = False

    def begin(self, request: ActiveRequest) -> None:
        """Prepare the drafts of a request whose first token was read."""
        if self.sources is not None and request.drafting is None:
            request.drafting = self.sources.drafting(
                request.next_token, request.lease, request.options.speculate
            )
        if request.drafting is not None:
            request.drafting.clock = self._clock
            self._is_used = True
            self._is_always |= request.drafting.always

    def is_worth_waiting(self, row: Row) -> bool:
        """Return True if the tokens of the last step are needed before `row` is dispatched."""
        self._may = self._is_used and self._may_draft(row)
        return self._may and any(
            request.drafting is not None
            and not request.is_read
            and request.drafting.is_worth_waiting
            and self._room(request) > 0
            for request, _ in row
        )

    def add_to(self, row: Row, width: int) -> Row:
        """Return `row` with the tokens that are likely to follow. `width`: entries of the logits.

        `row`: the one of the last `is_worth_waiting`, but for those that ended since. Requests that
        have guesses share the rows that are left.
        """
        if not self._may:
            return row
        self._carry(row)
        left = self._most - sum(count - 1 for _, count in row)
        asked = [one for one, _ in row if one.is_read and one.drafting is not None]
        for place, request in enumerate(asked):
            request.draft = _draft(request, min(left // (len(asked) - place), self._room(request)))
            request.draft = _fitting(request, width)
            left -= len(request.draft)
            self._of(request).hold(len(request.draft))
        drafted = [one.drafting for one in asked if one.draft and one.drafting is not None]
        said = [one.model_s for one in drafted if one.source == "model"]
        seconds = [one for one in said if one is not None]
        self._said_s = sum(seconds) if len(seconds) == len(drafted) else None
        return [(request, count + len(request.draft)) for request, count in row]

    def _of(self, request: ActiveRequest) -> StepController:
        """Return the controller of the draft of `request`."""
        is_said = request.drafting is not None and request.drafting.source == "model"
        return self._modelled if is_said else self._controller

    def _carry(self, row: Row) -> None:
        for controller in (self._controller, self._modelled):
            controller.carry(len(row))

    def _may_draft(self, row: Row) -> bool:
        """Return True if a step carries few rows: only answers, and fewer than a draft may add.

        One of them has to be guessed, and a guess has to be able to pay: all other steps cost
        nothing here.
        """
        if len(row) > self._most or all(request.drafting is None for request, _ in row):
            return False
        self._carry(row)
        has_model = self.sources is not None and self.sources.model is not None
        may = self._is_always or self._controller.may_draft
        may = may or (has_model and self._modelled.may_draft)
        return may and not any(request.left for request, _ in row)

    def _room(self, request: ActiveRequest) -> int:
        """Return how many tokens may be drafted behind the current one of `request`.

        A draft ends where its claim of cells, its context or its answer does, and where a
        checkpoint is due.
        """
        here, lease = request.place + request.waiting, request.lease
        end = min(request.claimed, request.context)
        if lease.needs_checkpoints:
            end = min(end, lease.checkpoint_due)
        return int(min(end - here, request.limit - request.sampled - 1))

    def ended(self, step: Step, right: int, seconds: float | None) -> None:
        """Note that a step has ended, in which `right` guesses were right.

        `seconds`: what it took; None if other work took place meanwhile.
        """
        answers = step.planned.rows
        if not self._is_used or step.planned.prefill or not answers:
            return
        said_s = self._said_s if step.drafted else None
        if seconds is not None:
            self._controller.measure(answers, step.more, seconds)
            if said_s is not None or not step.more:
                self._modelled.measure(answers, step.more, seconds + (said_s or 0.0))
        controller = self._controller if said_s is None else self._modelled
        controller.settle(answers, step.more, answers + right, step.late_s)


def sample(
    request: ActiveRequest,
    end: int,
    logits: mx.array,
    best: tuple[mx.array, mx.array] | None,
) -> list[Sampled]:
    """Dispatch the sampling of the tokens behind the last token and behind each drafted token.

    Their rows of `logits` are those before `end`. `best`: the likeliest token and the largest logit
    of each row, if they were asked for.
    """
    begin, next_token = end - len(request.draft) - 1, request.next_token
    if best is not None and next_token.is_plain:
        return [plain(*best, row) for row in range(begin, end)]
    history = request.history
    if history is not None:
        history = mx.concatenate([history, mx.array(request.draft, mx.int32)])
    return next_token.rows(logits[None, begin:end], history, request.masks)


def error_of(request: ActiveRequest, sampled: list[Sampled]) -> LogitsError | None:
    """Return the error of the token that the answer goes on with, or of a right guess before it.

    The logits behind a wrong guess may be anything.
    """
    for one, guess in zip(sampled, [*request.draft, None], strict=False):
        if (error := one.error) is not None or one.token.item() != guess:
            return error
    return None


def taken(request: ActiveRequest, sampled: list[Sampled]) -> list[Chunk]:
    """Return the chunks of the drafted tokens that were right and of the token behind them.

    The slot keeps those tokens and goes back behind the wrong ones.
    """
    tokens, chunks = _judge(request, sampled), list[Chunk]()
    for decoded in tokens:
        chunks.append(request.answer.take(decoded, request.clock))
        request.take(decoded.token)
        if chunks[-1].finish_reason is not None:
            break
    request.keep(min(len(chunks), len(tokens) - 1))
    return chunks


def _judge(request: ActiveRequest, sampled: list[Sampled]) -> list[Decoded]:
    """Return the tokens that count: the guesses that are right, and the one behind them."""
    draft, decoded = request.draft, list[Decoded]()
    for one, guess in zip(sampled, [*draft, None], strict=True):
        decoded.append(one.decoded(one.read()))
        if decoded[-1].token != guess:
            break
    kept = sampled[: len(decoded)]
    request.next_token.keep(kept)
    if request.history is not None:
        request.history = mx.concatenate(
            [request.history, *(one.token.astype(mx.int32) for one in kept)]
        )
    request.last = kept[-1].token.astype(mx.int32)
    assert request.drafting is not None
    request.drafting.judge(len(draft), len(kept) - 1, 0.0)
    return decoded


def _draft(request: ActiveRequest, most: int) -> list[int]:
    return [] if request.drafting is None else request.drafting.draft(most)


def _fitting(request: ActiveRequest, width: int) -> list[int]:
    """Return the beginning of the request's draft that its form allows, and keep the masks."""
    request.masks = []
    with suppress(FormError):  # the step without a draft finds it, too
        request.masks = request.next_token.masks(request.draft, width)
        return request.draft[: len(request.masks) - 1] if request.masks else request.draft
    return []


def _size(answers: int) -> int:
    """Return the power of two from which on a step counts as one of as many answers."""
    return answers.bit_length()

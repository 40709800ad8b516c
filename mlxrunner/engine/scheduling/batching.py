"""Build and dispatch the batch of each step: its requests, their tokens, drafts and samples.

Nothing here waits for a result but `BatchBuilder.wait`: the scheduler reads the step later. A step
that carries guesses is read before the next one is dispatched. All its guesses take rows of one
pass, which every answer in the step waits for. So a guess counts for less the more answers a step
carries, and a full step has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

import mlx.core as mx

from mlxrunner.cache.protocol import Batch, LayerCache
from mlxrunner.engine.backends.backend import Backend
from mlxrunner.engine.drafting import DEEPEST, DraftSources, Experience
from mlxrunner.engine.request import SEED_TOKENS, ActiveRequest
from mlxrunner.engine.sampling import Decoded, Sampled, dispatch, plain
from mlxrunner.engine.scheduling.eviction import EvictionPolicy, RequestFinalizer
from mlxrunner.engine.scheduling.pacing import FairShare, Pace, PlannedStep, StepPace, TokenDemand
from mlxrunner.errors import FormError, LogitsError
from mlxrunner.models.facts import ModelFacts
from mlxrunner.results import Chunk
from mlxrunner.system.device import work_clock

ScheduledBatch = list[tuple[ActiveRequest, int]]
"""The requests of a step, with the number of tokens of each."""


@dataclass(frozen=True)
class DispatchedStep:
    """A dispatched forward pass."""

    planned: PlannedStep
    sampled: list[tuple[ActiveRequest, list[Sampled]]]
    """Requests, and what the step sampled for each: after a draft, one for each of its tokens."""
    awaited: list[mx.array]
    """Arrays that are ready when the step has ended."""
    drafted: int
    """Its rows that are guesses."""
    more: int
    """Its rows beside one for each request."""
    late_s: float
    """Seconds in which the device had nothing to do, because a guess was waited for in vain."""
    seconds: float
    """Seconds that its dispatch took. A device without a long queue runs it meanwhile."""
    work_s: float
    """The same by `BatchBuilder.clock`."""
    began: float = 0.0
    """The moment of its dispatch, on `time.perf_counter`."""
    again: Sequence[ActiveRequest] = ()
    """Requests with the last tokens of a full context that is evaluated again."""

    @property
    def begins_answers(self) -> bool:
        """True if a client waits for the first token of its answer, which the step samples."""
        return any(not request.said and not request.finished for request, _ in self.sampled)

    @property
    def pipelined(self) -> list[ActiveRequest]:
        """Requests whose next step a `Runner` dispatches before it reads this one."""
        alike = [one for one, _ in self.sampled if one.said and not (one.draft or one.finished)]
        return [request for request in alike if request not in self.again]


ANSWER = PlannedStep(rows=1, kept=1, prefill=0, cells=0, normal=0.0, expected=0.0)
"""A step of one slot that continues its answer."""


class BatchBuilder:
    """The rows of an engine, and the time that they take."""

    def __init__(
        self, engine: Backend, requests: Sequence[ActiveRequest], most: int, pace: StepPace
    ) -> None:
        """Compose rows of at most `most` tokens of the running `requests`."""
        self._engine, self._requests, self.most, self._pace = engine, requests, most, pace
        self.piece_pace: Pace | None = None
        """Sizes the pieces of a prompt for one slot; None: as many tokens as a step has."""
        self._turns = FairShare()
        self._was_prefill = False
        self.clock: Callable[[], float] = lambda: 0.0
        """Returns the seconds by which guesses are judged; 0 until something is guessed."""
        self._is_disturbed = False
        """True if other work took place while the last step was running."""

    def row(self, requests: Sequence[ActiveRequest]) -> ScheduledBatch:
        """Return the tokens of the next step for some of the requests."""
        for request in requests:
            request.draft = []
        decoding = [request for request in requests if request.is_decoding]
        kept = [request for request in decoding if request.priority == "interactive"] or decoding
        others = [request for request in decoding if request not in kept]
        others += [request for request in requests if request.is_placed and request.left]
        budget = self._budget(kept, others)
        if self._engine.most_sequences == 1 and len(kept) + len(others) > 1:
            return [_whole(*one) for one in self._alone(kept, others, budget)]
        undone = sum(request.waiting - 1 for request in decoding)
        budget = budget and min(budget, self.most - len(kept) - undone)
        wants = [self._want(request) for request in others]
        shares = [0] * len(others)
        if budget and others:
            most = self.most - len(kept) - undone
            shares = self._turns.deal(budget, wants, self._pace.costs.share, most)
        carried = [(one, count) for one, count in zip(others, shares, strict=True) if count]
        return [_whole(*one) for one in [(request, 1) for request in kept] + carried]

    def piece(self, request: ActiveRequest) -> ScheduledBatch:
        """Return the tokens of the next step for the only request."""
        request.draft = []
        if request.left:
            end = self._end(request)
            if end == len(request.todo) and not request.is_ahead:
                return [(request, end - request.place)]
            most = self.most if self.piece_pace is None else self.piece_pace.size(self.most)
            return [(request, min(most, end - request.place))]
        return [_whole(request, 1)] if request.is_decoding else []

    def note_span(self, request: ActiveRequest, step: DispatchedStep) -> None:
        """Note that a step has ended, if it was a piece of the only request's prompt."""
        if count := step.planned.prefill:
            ended = time.perf_counter()
            request.spans.append((step.began, ended, count))
            if self.piece_pace is not None:
                self.piece_pace.measure(count, ended - step.began)
            mx.clear_cache()

    def _end(self, request: ActiveRequest) -> int:
        """Return the offset at which the next piece of the only request's prompt has to end.

        A long one gets a pass of its own for its last token, because a pass computes the logits of
        all its tokens. Checkpoints cut a prompt otherwise, and leave a short end, which is one
        piece.
        """
        end = len(request.todo)
        if request.shift is not None:
            end = min(end, request.context)
        if request.lease.needs_checkpoints:
            stop = request.lease.next_stop
            return min(end, stop) if stop > request.place else end
        is_long = end - request.evaluated_from > SEED_TOKENS and end == len(request.todo)
        return end - 1 if is_long and not request.is_ahead and request.place < end - 1 else end

    def offload_s(self, *, is_late: bool) -> float:
        """Return the seconds that work beside the next step may take; 0: none now."""
        return self._pace.offload_s(self._num_kept(), is_late=is_late)

    def spend(self, seconds: float) -> None:
        """Note that work beside the next step took time, while the last one was running."""
        self._pace.spend(self._num_kept(), seconds)
        self._is_disturbed = True

    def planned(self, row: ScheduledBatch) -> PlannedStep:
        """Note that a row is dispatched now, and return what `wait` needs.

        The only request of one slot has all the time: its steps need no pace.
        """
        if self._engine.is_single:
            request, count = row[0]
            return PlannedStep(0, 0, count, 0, 0.0, 0.0) if request.left else ANSWER
        rows = [request for request, _ in row if not request.left]
        interactive = [request for request in rows if request.priority == "interactive"]
        others = [one for one in row if one[0] not in (interactive or rows)]
        cells = max((request.place for request, _ in others), default=0)
        pieces = [count for _, count in others] or [0]
        return self._pace.plan(
            len(row) - len(others), sum(pieces), cells, longest=max(pieces), kept=self._num_kept()
        )

    def _num_kept(self) -> int:
        """Return the number of answers that must not stall."""
        return sum(one.is_decoding and one.priority == "interactive" for one in self._requests)

    def wait(self, step: DispatchedStep) -> float | None:
        """Wait for the end of a step, note how long it took, and return its seconds of `clock`.

        Return None if other work took place meanwhile. The seconds of a step are those of its
        dispatch and of this wait: the device may run the step during either of them.
        """
        began, worked = time.perf_counter(), self.clock()
        mx.eval(step.awaited)
        seconds, work_s = time.perf_counter() - began, self.clock() - worked
        was_disturbed, self._is_disturbed = self._is_disturbed, False
        if was_disturbed:
            return None
        if not step.drafted and not self._engine.is_single:
            self._pace.measure(step.planned, step.seconds + seconds)
        return step.work_s + work_s

    def _budget(self, kept: Sequence[ActiveRequest], others: Sequence[ActiveRequest]) -> int:
        """Return how many tokens of `others` a step carries beside the `kept` answers."""
        if not others:
            return 0
        cells = max(request.place for request in others)
        if any(request.priority == "interactive" for request in kept):
            return self._pace.allowance(len(kept), cells)
        wanted = sum(self._want(request).tokens for request in others)
        return max(1, min(self._pace.allowance(0, cells, wanted), self.most - len(kept)))

    def _alone(
        self, kept: Sequence[ActiveRequest], others: Sequence[ActiveRequest], budget: int
    ) -> ScheduledBatch:
        """Return a row of one request: the kept answers and the others take turns."""
        self._was_prefill = bool(others) and bool(budget) and not (self._was_prefill and kept)
        group = others if self._was_prefill else kept
        wants = [self._want(request) for request in group]
        turn = self._turns.deal(1, wants).index(1)
        piece = self.most if budget >= self.most - len(kept) else budget
        return [(group[turn], min(wants[turn].tokens, piece if self._was_prefill else 1))]

    def _want(self, request: ActiveRequest) -> TokenDemand:
        tokens = self._stop(request) - request.place if request.left else 1
        return TokenDemand(tokens, request.priority, request.due, request.left)

    def _stop(self, request: ActiveRequest) -> int:
        """Return the offset at which the next piece of the request's prefill has to end.

        Windows drop tokens and states have no past: a prefix has to be shared, or copied by a
        checkpoint, while it is there.
        """
        end = (
            len(request.todo) if request.shift is None else min(len(request.todo), request.context)
        )
        if not any(cache.needs_checkpoints for cache in request.lease.caches):
            return end
        ends = [
            other.promised
            for other in self._requests
            if not other.is_placed and other.source is request.slot
        ]
        stop = request.lease.next_stop if request.lease.needs_checkpoints else end
        return min(end, *(place for place in (stop, *ends) if place > request.place), end)


def _whole(request: ActiveRequest, count: int) -> tuple[ActiveRequest, int]:
    """Return the tokens of a step: all that an answer waits for, or a piece of a prompt."""
    is_one = request.drafting is None or request.left
    return request, count if is_one else request.waiting


def wanted_rows(row: ScheduledBatch) -> tuple[list[int], list[tuple[ActiveRequest, range]]]:
    """Return the rows whose logits are wanted, and for each request that samples its part of them.

    A draft has the logits of all its rows, so that an engine runs them as one pass.
    """
    wanted: list[int] = []
    sampling, end, rows = [], 0, 0
    for request, count in row:
        end += count
        if request.left <= count and not request.is_ahead:
            own = count if request.draft else 1
            wanted += range(end - own, end)
            sampling.append((request, range(rows, rows + own)))
            rows += own
    return wanted, sampling


def stops_at(request: ActiveRequest, count: int) -> bool:
    """Return True if a piece of `count` tokens ends where the request wants a checkpoint."""
    is_prefill, lease = request.left > count or request.is_ahead, request.lease
    return is_prefill and lease.needs_checkpoints and lease.next_stop == request.place + count


class DraftScheduler:
    """The drafts of all requests of a runner."""

    def __init__(self, facts: ModelFacts | None, most: int | None) -> None:
        """Prepare drafts for the model of `facts`; None: there are none.

        `most`: rows that drafts may add to a step; None: any number.
        """
        experience = Experience()
        self._controller, self._modelled = experience.controller, experience.modelled
        self._said_s: float | None = None
        """Seconds in which a model drafted all guesses of the step; None: they tell nothing."""
        self.sources = None if facts is None else DraftSources(facts, experience)
        self._most = DEEPEST if most is None else min(most, DEEPEST)
        self.clock = work_clock()
        """Returns the seconds by which guesses are judged."""
        self._is_used = self._is_always = self._may = False

    def begin(self, request: ActiveRequest) -> None:
        """Prepare the drafts of a request whose first token was read."""
        if self.sources is not None and request.drafting is None:
            request.drafting = self.sources.drafting(
                request.next_token, request.lease, request.options.speculate
            )
        if request.drafting is not None:
            request.drafting.clock = self.clock
            self._is_used = True
            self._is_always |= request.drafting.always

    def is_worth_waiting(self, row: ScheduledBatch) -> bool:
        """Return True if the tokens of the last step are needed before `row` is dispatched."""
        self._may = self._is_used and self._may_draft(row)
        return self._may and any(
            request.drafting is not None
            and not request.is_read
            and request.drafting.is_worth_waiting
            and self._room(request) > 0
            for request, _ in row
        )

    def add_to(self, row: ScheduledBatch, width: int) -> ScheduledBatch:
        """Return `row` with the tokens that are likely to follow. `width`: entries of the logits.

        `row`: the one of the last `is_worth_waiting`, but for those that ended since. Requests that
        have guesses share the rows that are left.
        """
        if not self._may:
            return row
        self._carry(row)
        left = self._most - sum(count - 1 for _, count in row)
        asked = [(one, one.drafting) for one, _ in row if one.is_read and one.drafting is not None]
        for place, (request, drafting) in enumerate(asked):
            most = min(left // (len(asked) - place), self._room(request))
            request.draft = drafting.draft(most)
            request.draft = _fitting(request, width)
            left -= len(request.draft)
            is_said = drafting.source == "model"
            (self._modelled if is_said else self._controller).hold(len(request.draft))
        drafted = [drafting for request, drafting in asked if request.draft]
        said = [one.model_s for one in drafted if one.source == "model"]
        seconds = [one for one in said if one is not None]
        self._said_s = sum(seconds) if len(seconds) == len(drafted) else None
        return [(request, count + len(request.draft)) for request, count in row]

    def _carry(self, row: ScheduledBatch) -> None:
        for controller in (self._controller, self._modelled):
            controller.carry(len(row))

    def _may_draft(self, row: ScheduledBatch) -> bool:
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
        """Return how many tokens may be drafted after the current one of `request`.

        A draft ends where its claim of cells, its context or its answer does, and where a
        checkpoint is due. The tokens that are undone with a wrong guess end before that offset, so
        the pass that evaluates them again does not cross it.
        """
        here, lease = request.place + request.waiting, request.lease
        end = min(request.claimed, request.context)
        if lease.needs_checkpoints:
            end = min(end, lease.checkpoint_due)
        return int(min(end - here, request.limit - request.sampled - 1))

    def ended(self, step: DispatchedStep, right: int, seconds: float | None) -> None:
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
    """Dispatch the sampling of the tokens after the last token and after each drafted token.

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
    """Return the error of the token that the answer continues with, or of a right guess before it.

    The logits after a wrong guess may be anything.
    """
    if not request.draft:
        return sampled[0].error
    for one, guess in zip(sampled, [*request.draft, None], strict=False):
        if (error := one.error) is not None or one.token.item() != guess:
            return error
    return None


def taken(request: ActiveRequest, sampled: list[Sampled]) -> list[Chunk]:
    """Return the chunks of the drafted tokens that were right and of the token after them.

    The slot keeps those tokens and drops the wrong ones.
    """
    tokens, chunks = judge(request, sampled), list[Chunk]()
    for decoded in tokens:
        chunks.append(request.answer.take(decoded, request.clock))
        request.take(decoded.token)
        if chunks[-1].finish_reason is not None:
            break
    request.keep(min(len(chunks), len(tokens) - 1))
    return chunks


def judge(request: ActiveRequest, sampled: list[Sampled]) -> list[Decoded]:
    """Return the tokens that count: the guesses that are right, and the one after them."""
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
    request.drafting.judge(len(draft), len(kept) - 1)
    return decoded


def _fitting(request: ActiveRequest, width: int) -> list[int]:
    """Return the beginning of the request's draft that its form allows, and keep the masks.

    A token beyond the vocabulary, which only a file can have brought, ends the draft.
    """
    request.draft = list(takewhile(lambda token: 0 <= token < width, request.draft))
    request.masks = []
    with suppress(FormError):  # the step without a draft finds it, too
        request.masks = request.next_token.masks(request.draft, width)
        return request.draft[: len(request.masks) - 1] if request.masks else request.draft
    return []


class BatchExecutor:
    """The forward passes of an engine, one for each step."""

    def __init__(
        self,
        engine: Backend,
        residents: EvictionPolicy,
        composer: BatchBuilder,
        endings: RequestFinalizer,
    ) -> None:
        """Run passes on `engine`. `residents` make room, `endings` end what can't continue."""
        self._engine, self._residents = engine, residents
        self._composer, self._endings = composer, endings
        self.width = 0
        """Entries of the logits, once a step has run."""
        self.formless: list[tuple[ActiveRequest, FormError]] = []
        """Requests whose form allows no further token, with the error that ends them."""

    def forward(self, row: ScheduledBatch, *, waited: bool = False) -> DispatchedStep:
        """Dispatch the forward pass of a row, and the sampling from it."""
        clock = self._composer.clock
        began, worked = time.perf_counter(), clock()
        prepared = time.thread_time() if waited else 0.0
        planned = self._composer.planned(row)
        wanted, sampling = wanted_rows(row)
        batch = Batch(
            [
                position
                for request, count in row
                for position in range(request.place, request.place + count)
            ],
            [request.slot.number for request, count in row for _ in range(count)],
        )
        coming = [request.coming_tokens(count) for request, count in row]
        tokens = coming[0] if len(coming) == 1 else mx.concatenate(coming)
        drafted, is_single = 0, self._engine.is_single
        for request, count in row:
            if request.draft or (is_single and count > 1 and not request.left):
                request.lease.hold(count)
                drafted += len(request.draft)
        if len(row) == 1:
            request, count = row[0]
            self._engine.look(request.lease.array, request.todo[request.place :][:count])
        if is_single:
            logits = self._engine.forward(tokens, batch, wanted)
        else:
            logits = self._residents.make_room(lambda: self._engine.forward(tokens, batch, wanted))
        if wanted:
            self.width = logits.shape[-1]
        stops = [request for request, count in row if stops_at(request, count)]
        again = [one for one, count in row if one.shift and one.said and one.left == count]
        for request, count in row:
            request.advance(count)
        if is_single:
            request.logits = (request.place, logits) if wanted else None
        sampled = self._sample(sampling, logits)
        awaited = [array for _, own in sampled for one in own for array in one.arrays] or [logits]
        dispatch(awaited)
        took, work_s = time.perf_counter() - began, clock() - worked
        late = time.thread_time() - prepared if waited and not drafted else 0.0
        for request in stops:
            dispatch(request.lease.checkpoint())
        for request, _ in sampling:
            if not request.said and not request.finished:
                request.next_checkpoint = 0
                request.checkpoint_if_due()
            elif is_single and request.together and not request.draft:
                request.checkpoint_if_due()  # its tokens were recorded with the dispatch
        more = len(batch) - len(row)
        return DispatchedStep(
            planned, sampled, awaited, drafted, more, late, took, work_s, began, again
        )

    def run(self, request: ActiveRequest, tokens: list[int]) -> None:
        """Run and record tokens of the answer that were delivered, with no token after them."""
        if not tokens:
            return
        lease, count = request.lease, len(tokens)
        begin = lease.recorded
        batch = Batch(list(range(begin, begin + count)), [request.slot.number] * count)
        logits = self._engine.forward(mx.array(tokens, mx.int32), batch, [count - 1])
        dispatch([logits])
        lease.record(tokens)
        request.place = lease.recorded
        request.logits = (request.place, logits)
        if request.drafting is not None:
            request.drafting.evaluated_again(count)
        request.checkpoint_if_due()

    def finish(self, request: ActiveRequest) -> None:
        """Leave the entry of the only request as it is without drafts.

        All tokens of the answer are in it but those that nothing follows: the last one of its
        limit, and the first one. The last one is in it by itself: a layer that goes back only to
        where the last pass began then goes back as far, and one that drops old tokens when a pass
        begins has dropped as many.
        """
        if request.drafting is None or not request.is_placed or request.left:
            return
        if request.draft:
            request.keep(min(request.num_read - len(request.guessed), request.num_read - 1))
            request.guessed.clear()
        said, lease = request.said, request.lease
        if len(said) < 2 or request.left:
            return
        rest, together = said[request.run : request.limit - 1], request.together
        was_taken = False
        if not rest and len(together) > 1:
            behind = lease.recorded - 1
            if not all(_ends_alone(cache, behind) for cache in lease.caches):
                was_taken = lease.is_at_checkpoint
                lease.accept(together[:-1])
                rest = [*lease.pending, together[-1]]
        self.run(request, rest[:-1])
        self.run(request, rest[-1:])
        if was_taken:
            dispatch(lease.checkpoint())

    def _sample(
        self, requests: list[tuple[ActiveRequest, range]], logits: mx.array
    ) -> list[tuple[ActiveRequest, list[Sampled]]]:
        """Sample the next tokens of each request from its rows, at once for all plain greedy ones.

        A request whose form allows no token ends with a FormError, and one whose sampling fails
        otherwise with a StepFailedError.
        """
        best: tuple[mx.array, mx.array] | None = None
        for request, _ in requests:
            if best is None and request.next_token.is_plain:
                best = (mx.argmax(logits, axis=-1), mx.max(logits, axis=-1))
        sampled: list[tuple[ActiveRequest, list[Sampled]]] = []
        for request, rows in requests:
            row = rows.stop - 1
            try:
                if request.draft:
                    sampled.append((request, sample(request, rows.stop, logits, best)))
                    continue
                if best is not None and request.next_token.is_plain:
                    token = plain(*best, row)
                else:
                    token = request.next_token(logits[row : row + 1], request.history)
            except FormError as error:
                self.formless.append((request, error))  # its last token is not delivered yet
                continue
            except LogitsError:  # the token before is not there: whoever reads it finds out
                continue
            except Exception as error:
                if self._engine.is_single:
                    raise
                self._endings.fail_alone(request, error)
                continue
            request.sampled += 1
            request.last = token.token.astype(mx.int32)
            if request.history is not None:
                request.history = mx.concatenate([request.history, request.last])
            sampled.append((request, [token]))
        return sampled


def _ends_alone(cache: LayerCache, behind: int) -> bool:
    """Return True if `cache` is as after a pass of one token, which began at `behind`."""
    extent = cache.extent
    return cache.can_rewind(behind) and extent.rewound(behind).after(1) == extent

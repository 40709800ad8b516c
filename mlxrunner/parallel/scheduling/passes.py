"""Dispatch the forward pass of a step's row, and the sampling of the tokens that come next.

Nothing here waits for a result: `mlxrunner.parallel.scheduling.scheduler` reads the step later.
"""

from __future__ import annotations

import time

import mlx.core as mx

from mlxrunner.cache.pool.interface import Batch
from mlxrunner.engine.sampling import Sampled, dispatch, plain
from mlxrunner.errors import FormError, LogitsError
from mlxrunner.parallel.rows.engine import Engine
from mlxrunner.parallel.scheduling.drafts import sample
from mlxrunner.parallel.scheduling.endings import Endings
from mlxrunner.parallel.scheduling.request import ActiveRequest
from mlxrunner.parallel.scheduling.residents import Residents
from mlxrunner.parallel.scheduling.row import Composer, Row, Step, stops_at, wanted_rows


class Passes:
    """The forward passes of an engine, one for each step."""

    def __init__(
        self, engine: Engine, residents: Residents, composer: Composer, endings: Endings
    ) -> None:
        """Run passes on `engine`. `residents` make room, `endings` end what can't go on."""
        self._engine, self._residents = engine, residents
        self._composer, self._endings = composer, endings
        self.width = 0
        """Entries of the logits, once a step has run."""
        self.formless: list[tuple[ActiveRequest, FormError]] = []
        """Requests whose form allows no further token, with the error that ends them."""

    def forward(self, row: Row, *, waited: bool = False) -> Step:
        """Dispatch the forward pass of a row, and the sampling from it."""
        clock = self._composer.clock
        began, worked, prepared = time.perf_counter(), clock(), time.thread_time()
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
        tokens = mx.concatenate([request.coming_tokens(count) for request, count in row])
        drafted = 0
        for request, count in row:
            if request.draft:
                request.lease.hold(count)
                drafted += len(request.draft)
        if len(row) == 1:
            request, count = row[0]
            self._engine.look(request.lease.array, request.todo[request.place :][:count])
        logits = self._residents.make_room(lambda: self._engine.forward(tokens, batch, wanted))
        if wanted:
            self.width = logits.shape[-1]
        stops = [request for request, count in row if stops_at(request, count)]
        for request, count in row:
            request.advance(count)
        sampled = self._sample(sampling, logits)
        awaited = [array for _, own in sampled for one in own for array in one.arrays] or [logits]
        dispatch(awaited)
        took, work_s = time.perf_counter() - began, clock() - worked
        late = time.thread_time() - prepared if waited and not drafted else 0.0
        for request in stops:
            dispatch(request.lease.checkpoint())
        for request, _ in sampling:
            if not request.said and not request.finished:
                request.checkpoint_if_due()
        more = len(batch) - len(row)
        return Step(planned, sampled, awaited, drafted, more, late, took, work_s)

    def _sample(
        self, requests: list[tuple[ActiveRequest, range]], logits: mx.array
    ) -> list[tuple[ActiveRequest, list[Sampled]]]:
        """Sample the next tokens of each request from its rows, at once for all plain greedy ones.

        A request whose form allows no token ends with a FormError, and one whose sampling fails
        otherwise with a StepFailedError.
        """
        is_any_plain = any(request.next_token.is_plain for request, _ in requests)
        best = (mx.argmax(logits, axis=-1), mx.max(logits, axis=-1)) if is_any_plain else None
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
                self._endings.fail_alone(request, error)
                continue
            request.sampled += 1
            request.last = token.token.astype(mx.int32)
            if request.history is not None:
                request.history = mx.concatenate([request.history, request.last])
            sampled.append((request, [token]))
        return sampled

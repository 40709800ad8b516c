"""All that tests take from within the engine: one place to edit when its modules move.

A test of a law uses `mlxrunner`, `mlxrunner.testing` and this module, and no module of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlxrunner import ParallelRunner
from mlxrunner.engine.backends.attention import SplitAttention as SplitAttention
from mlxrunner.engine.backends.backend import WINDOWS_KEEP as WINDOWS_KEEP
from mlxrunner.engine.backends.backend import SequentialModel as SequentialModel
from mlxrunner.engine.backends.batched import BatchedModel as BatchedModel
from mlxrunner.engine.backends.batched import PerTokenRope as PerTokenRope
from mlxrunner.engine.backends.proof import engine_for as engine_for
from mlxrunner.engine.engine import AHEAD as AHEAD
from mlxrunner.engine.engine import Engine as Engine
from mlxrunner.engine.engine import EngineHandle as EngineHandle
from mlxrunner.engine.opening import SAMPLED as SAMPLED
from mlxrunner.engine.opening import DraftPlan as DraftPlan
from mlxrunner.engine.opening import largest_step as largest_step
from mlxrunner.engine.parallel_runner import sample as sample
from mlxrunner.engine.request import SEED_TOKENS as SEED_TOKENS
from mlxrunner.engine.scheduling.batching import BatchBuilder as BatchBuilder
from mlxrunner.engine.scheduling.batching import DispatchedStep as DispatchedStep
from mlxrunner.engine.scheduling.batching import sample as sample_drafts  # noqa: F401
from mlxrunner.engine.scheduling.pacing import StepCosts as StepCosts
from mlxrunner.options import OpenSettings as OpenSettings


def engine_of(runner: ParallelRunner) -> Engine:
    """Return the engine that the thread of `runner` drives."""
    return runner._stepper


def backend(engine: Engine) -> Any:
    """Return the model of an engine, as the scheduler runs it."""
    return engine._adapted


def scheduler(engine: Engine) -> Any:
    """Return the scheduler of an engine."""
    return engine._scheduler


def request_of(handle: EngineHandle) -> Any:
    """Return the request of a handle, with its slot, its answer so far and its counts."""
    return handle._request


def last_pass_of(count: int, patch: pytest.MonkeyPatch) -> None:
    """Let the last pass of a prefill, which gives the first logits, have at most `count` tokens."""
    patch.setattr("mlxrunner.engine.scheduling.batching.SEED_TOKENS", count)


def after_each_chunk(call: Callable[[Any], None], patch: pytest.MonkeyPatch) -> None:
    """Call `call` when a chunk of a prefill has been evaluated."""
    wait = BatchBuilder.wait

    def wait_and_call(composer: BatchBuilder, step: DispatchedStep) -> float | None:
        seconds = wait(composer, step)
        call(step)
        return seconds

    patch.setattr(BatchBuilder, "wait", wait_and_call)


def clock_passes_by(clock: Any, patch: pytest.MonkeyPatch) -> None:
    """Let passes be timed by `clock`, in place of the module `time`."""
    patch.setattr("mlxrunner.engine.scheduling.batching.time", clock)


def sample_drafts_by(sampler: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    """Let `sampler` sample after each token of a draft, in place of `sample_drafts`."""
    patch.setattr("mlxrunner.engine.scheduling.batching.sample", sampler)


def tell_time_by(clock: Callable[[], float], patch: pytest.MonkeyPatch) -> None:
    """Let the chunks of an evaluation ahead be timed by `clock`."""
    patch.setattr("mlxrunner.engine.scheduling.batching.time.perf_counter", clock)


def move_no_keys(patch: pytest.MonkeyPatch) -> None:
    """Let no layer move its keys, so that a full context is evaluated again."""
    for module in ("mlxrunner.engine.backends.batched", "mlxrunner.engine.backends.backend"):
        patch.setattr(f"{module}.rotators", lambda *_: None)


def claim_least(claim: int, room: int, patch: pytest.MonkeyPatch) -> None:
    """Let growing answers claim `claim` tokens at a time, and begin with room for `room`."""
    patch.setattr("mlxrunner.engine.scheduling.allocation.LEAST", claim)
    patch.setattr("mlxrunner.engine.scheduling.allocation.SOON", room)


def park_in_pieces_of(count: int, patch: pytest.MonkeyPatch) -> None:
    """Let files have `count` tokens, and a step write or read one piece of a conversation."""
    patch.setattr("mlxrunner.cache.disk.index.SEGMENT", count)
    patch.setattr("mlxrunner.engine.scheduling.eviction.IN_ONE_PIECE", count)
    patch.setattr("mlxrunner.engine.scheduling.pacing.StepPace.offload_s", lambda *_, **__: 1e-9)


def offer_bytes(count: int, patch: pytest.MonkeyPatch) -> None:
    """Let the device offer `count` bytes to a draft model."""
    patch.setattr("mlxrunner.engine.opening.device.offered_bytes", lambda: count)


def sample_at_most(count: int, patch: pytest.MonkeyPatch) -> None:
    """Let an answer of no given length, one of several, have `count` tokens."""
    patch.setattr("mlxrunner.engine.parallel_runner.DEFAULT_MAX_TOKENS", count)

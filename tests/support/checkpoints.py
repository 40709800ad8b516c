"""Checkpoints of few bytes, and a prefill that takes them."""

from __future__ import annotations

from mlxrunner.cache.checkpoints import Checkpoint, CheckpointPlaces, Checkpoints, Role


def at(offset: int, nbytes: int = 1, role: Role | None = None) -> Checkpoint:
    return Checkpoint(offset, nbytes, role=role)


def holding(budget: int, *offsets: int) -> Checkpoints:
    """Checkpoints of one byte each, added in this order."""
    found = Checkpoints(budget)
    for offset in offsets:
        found.add(at(offset))
    return found


def stops(some: Checkpoints, start: int, places: CheckpointPlaces, nbytes: int = 1) -> list[int]:
    """Where a prefill from `start` on pauses, taking a checkpoint each time."""
    some.mark(places)
    at_, found = start, []
    while (stop := some.next_stop(at_)) is not None:
        assert at_ < stop <= places.until
        found.append(stop)
        some.add(at(stop, nbytes))
        at_ = stop
    return found

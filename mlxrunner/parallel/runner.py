"""The ParallelRunner: many requests at once on one model."""

from __future__ import annotations

from mlxrunner.parallel.stepper import Stepper


class ParallelRunner(Stepper):
    """A runner of many requests at once."""

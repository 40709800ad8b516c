"""Load a draft model that guesses for answers beside each other, and take its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlxrunner.cache.layers.factory import CacheOptions, make_layer_caches
from mlxrunner.errors import MemoryPlanError
from mlxrunner.memory.plan import SMALLEST_CONTEXT, Demand, WorstCaseBatch
from mlxrunner.memory.reserve import demand_of, reserve
from mlxrunner.models.facts import without_weights
from mlxrunner.models.load import LoadedModel, load_model
from mlxrunner.parallel.settings import OpenSettings
from mlxrunner.speculation.model import DraftModel, check_vocabularies
from mlxrunner.speculation.seats import MOST_ANSWERS, DraftSeats
from mlxrunner.system import device
from mlxrunner.terminal.text import size

PIECE = 256
"""Most tokens of a text that a draft model reads between two steps, for each answer."""
SHARE = 10
"""Its entries take at most this part of the device's offer: one in 10."""


@dataclass(frozen=True)
class DraftPlan:
    """The memory of a draft model, before it is loaded."""

    name: str
    demand: Demand
    """The memory of its weights and of one entry."""
    options: CacheOptions
    """The options of its layer caches, with its context."""
    entries: int
    room: int
    """Most bytes of an entry."""

    @classmethod
    def of(cls, name: str, context: int, asked: OpenSettings) -> DraftPlan:
        """Plan the draft model `name` for answers of at most `context` tokens.

        Its own context is the longest that fits. Raise ModelError if it is missing or broken, and
        MemoryPlanError if it does not fit.
        """
        found, entries = without_weights(name), min(MOST_ANSWERS, asked.max_sequences)
        offered, limit = device.offered_bytes(), min(context, found.facts.context)
        options = CacheOptions(limit, asked.reserve, asked.rewind_slack)
        demand = demand_of(found.model, found.config, options, PIECE, weights=found.weight_bytes)
        plan = cls(name, demand, options, entries, offered // SHARE // entries)
        fitting = plan._entry.largest_context(plan.room, limit)
        if fitting < min(SMALLEST_CONTEXT, limit):
            raise MemoryPlanError(
                f"the draft model {name} has {size(plan.room)} for what it keeps of an answer, and "
                f"{min(SMALLEST_CONTEXT, limit)} tokens do not fit into that"
            )
        plan = replace(plan, options=replace(options, context=fitting))
        if plan.nbytes > offered:
            raise MemoryPlanError(
                f"the draft model {name} takes {size(plan.nbytes)}, and the device offers "
                f"{size(offered)}"
            )
        return plan

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer for which the draft model can guess."""
        return self.options.context or 0

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, its entries and its longest pass."""
        entries = self.entries * self._entry.total(self.context, self.room)
        return self.demand.weights + self.demand.batch.nbytes(self.context) + entries

    @property
    def _entry(self) -> Demand:
        return replace(self.demand, weights=0, batch=WorstCaseBatch(0))

    def load(self, own: LoadedModel) -> DraftSeats:
        """Load the draft model for the model `own`, and allocate its entries if they are whole.

        Raise OptionError if its vocabulary is another one.
        """
        loaded = load_model(self.name)
        check_vocabularies(self.name, loaded.tokenizer, own.tokenizer)
        budget = self._entry.checkpoints(self.context, self.room)
        parts = loaded.model, own.facts.vocab, self.options, budget, PIECE
        entries = [DraftModel(*parts, in_pieces=True) for _ in range(self.entries)]
        plan = self
        if self.options.whole:
            batch = max(self._reserve(loaded.model, entry) for entry in entries)
            plan = replace(self, demand=replace(self.demand, batch=WorstCaseBatch(batch)))
        return DraftSeats(entries, plan.nbytes)

    def _reserve(self, model: Any, entry: DraftModel) -> int:
        """Allocate an entry, and return the bytes that its longest pass takes."""
        scratch = make_layer_caches(model, self.options)
        return reserve(model, entry.empty_caches(), self.context, PIECE, scratch).batch


def seats_of(own: LoadedModel, asked: OpenSettings) -> DraftSeats | None:
    """Load the draft model that is asked for beside the model `own`; None if none is."""
    if asked.draft_model is None:
        return None
    context = asked.context or own.facts.context
    return DraftPlan.of(asked.draft_model, context, asked).load(own)

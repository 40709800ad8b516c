"""Load a model for the server within a number of bytes, and close it again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrunner.config.file import MODEL, layer, read_config_file, settled, values
from mlxrunner.config.option import names
from mlxrunner.errors import MemoryPlanError, MlxrunnerError
from mlxrunner.loading import cache_options
from mlxrunner.memory.plan import CHECKPOINT_SHARE, SMALLEST_CONTEXT, Demand
from mlxrunner.memory.reserve import demand_of_slots, weights_of
from mlxrunner.models.facts import ModelFacts, Shapes, is_run_by_mlx_vlm, without_weights
from mlxrunner.models.fingerprint import fingerprint
from mlxrunner.models.load import (
    LoadedModel,
    LoadProgress,
    load_model,
    load_vision_model,
    tell_nobody,
    tokenizer_of,
    unread_vision_model,
    why_no_vision,
)
from mlxrunner.options import GenerateOptions, RunnerSettings, ServeSettings
from mlxrunner.parallel.opening import DraftPlan
from mlxrunner.parallel.runner import ParallelRunner
from mlxrunner.parallel.settings import OpenSettings
from mlxrunner.pictures.tokenizer import SeeingTokenizer
from mlxrunner.results import logger
from mlxrunner.serve.prompts.answer_tokens import AnswerTokenFile
from mlxrunner.serve.prompts.builder import PromptBuilder
from mlxrunner.speculation.model import check_vocabularies
from mlxrunner.system import device
from mlxrunner.system.folders import cache_folder
from mlxrunner.terminal.text import size

if TYPE_CHECKING:
    from mlxrunner.ranks.ranks import Ranks


USUAL = 8192
"""Tokens of the context that a model is given room for before others are unloaded for it."""
OF_REQUESTS = frozenset(names(GenerateOptions)) - {"template"}


@dataclass(frozen=True, kw_only=True)
class ModelLoader:
    """The way in which the server loads its models."""

    settings: ServeSettings
    runner: Mapping[str, Any] = field(default_factory=dict)
    """The settings of RunnerSettings that the user gave."""
    speculate: str | None = None
    """The way to guess tokens of answers that the user gave; None: as the config file says."""
    draft_model: str | None = None
    """The model that guesses for each of them whose vocabulary it has."""
    trust_remote_code: bool = False
    ranks: Ranks | None = None
    """The ranks that share each model; None: it is on this machine alone."""

    def budget(self) -> int:
        """Return the most bytes of all models together."""
        offered = device.offered_bytes()
        return min(self.settings.memory or offered, offered)

    def least(self, name: str) -> int:
        """Return the bytes that the model `name` needs to be of use, before it is loaded.

        Raise ModelError if it is missing or broken.
        """
        offered = self.budget()
        if self._sees(name):
            unread = unread_vision_model(name)
            weights = weights_of(unread.model)
            return self._needed(
                self._demand(unread, weights, offered, is_read=False),
                min(self._context(unread.facts), USUAL),
                offered,
            )
        shapes, beside = without_weights(name), 0
        with suppress(MlxrunnerError):  # then it has no draft model, and a warning says so
            beside = self._of_draft(shapes.facts)
        demand = self._demand(shapes, shapes.weight_bytes, offered)
        return self._needed(demand, min(self._context(shapes.facts), USUAL), offered) + beside

    def _needed(self, demand: Demand, tokens: int, offered: int) -> int:
        """Return the bytes in which all slots together find room for `tokens` tokens.

        Checkpoints take what they would of `offered` bytes, but no larger share of the result,
        unless the user gave their bytes.
        """
        total, checkpoints = demand.total(tokens, offered), demand.checkpoints(tokens, offered)
        if self.runner.get("checkpoint_budget") is not None:
            return total
        others = total - checkpoints
        return others + min(checkpoints, -(-others // (CHECKPOINT_SHARE - 1)))

    def load(self, name: str, room: int, progress: LoadProgress = tell_nobody) -> ServedModel:
        """Load the model `name`, which with all that it stores takes at most `room` bytes.

        Raise ModelError if it is missing or broken, MemoryPlanError if it does not fit, and
        SessionError if the folder for parked conversations can't be used.
        """
        loaded = self._read(name, room, progress)
        sees = isinstance(loaded.tokenizer, SeeingTokenizer)
        draft = None if sees else self._draft_for(loaded, room - self._smallest(loaded, room))
        beside = 0 if draft is None else self._of_draft(loaded.facts)
        cells, memory = self._cells(loaded, room - beside)
        parks = self.settings.disk_cache
        runner = ParallelRunner.of(
            loaded,
            max_sequences=self.settings.slots,
            kv_cache_tokens=cells,
            memory=memory,
            reserve=self.ranks is None,
            disk_cache_bytes=self.settings.disk_cache_bytes if parks else 0,
            disk_cache_dir=parking_folder() if parks else None,
            draft_model=draft,
            **self.runner,
        )
        given = {} if self.speculate is None else {"speculate": self.speculate}
        return ServedModel.of(loaded, runner, self.settings, given)

    def _sees(self, name: str) -> bool:
        """Return True if the model `name` is to be loaded with its encoder of pictures."""
        if not self.settings.pictures:
            return is_run_by_mlx_vlm(name)
        why = why_no_vision(name)
        if why is not None:
            logger.warning("%s sees no pictures: %s", name, why)
        return why is None

    def _read(self, name: str, room: int, progress: LoadProgress) -> LoadedModel:
        """Load a model, with its encoder of pictures if it is to see, or this rank's part of it."""
        if self.ranks is not None:
            return self.ranks.load_served(name, dict(self.runner))
        if not self._sees(name):
            return load_model(name, trust_remote_code=self.trust_remote_code, progress=progress)

        def check(unread: LoadedModel) -> None:
            self._smallest(unread, room, is_read=False)

        return load_vision_model(name, progress=progress, check=check)

    def _smallest(self, loaded: LoadedModel, room: int, *, is_read: bool = True) -> int:
        """Return the bytes that a model takes with a short context.

        `is_read`: the weights are there. Raise MemoryPlanError if `room` bytes are not enough.
        """
        demand = self._demand(loaded, weights_of(loaded.model), room, is_read=is_read)
        needed = self._needed(demand, min(SMALLEST_CONTEXT, self._context(loaded.facts)), room)
        if needed > room:
            raise MemoryPlanError(
                f"{loaded.name} with {self.settings.slots} slots takes {size(needed)} for a short "
                f"context, and {size(max(0, room))} are left for it: give more --memory, fewer "
                "--slots, or a smaller model"
            )
        return needed

    def _cells(self, loaded: LoadedModel, room: int) -> tuple[int, int]:
        """Return the tokens of all conversations, and the bytes that are kept of them.

        The model, they and the largest step, which looks at all of them, take `room` bytes.
        """
        demand = self._demand(loaded, weights_of(loaded.model), room)
        most = self.settings.slots * self._context(loaded.facts)
        cells = demand.largest_context(room, most)
        memory = demand.caches(cells) + demand.drafts(cells) + demand.checkpoints(cells, room)
        if self.ranks is not None:
            memory = min(memory, demand.caches(self.ranks.room))
        return cells, memory

    def _draft_for(self, loaded: LoadedModel, room: int) -> str | None:
        """Return the draft model for a loaded model, which may take `room` bytes.

        Return None, after a warning, if it can't guess for this model.
        """
        name = self.draft_model
        if name is None:
            return None
        try:
            check_vocabularies(name, tokenizer_of(name), loaded.tokenizer)
            needed = self._of_draft(loaded.facts)
            if needed > room:
                raise MemoryPlanError(
                    f"it takes {size(needed)}, and {size(max(0, room))} are left for it"
                )
        except MlxrunnerError as error:
            why = str(error).partition("\n")[0]
            logger.warning("%s guesses nothing for %s: %s", name, loaded.name, why)
            return None
        return name

    def _of_draft(self, facts: ModelFacts) -> int:
        """Return the bytes of the draft model beside a model; 0 without one."""
        if self.draft_model is None:
            return 0
        settings = OpenSettings.of(max_sequences=self.settings.slots, **self.runner)
        return DraftPlan.of(self.draft_model, self._context(facts), settings).nbytes

    def _context(self, facts: ModelFacts) -> int:
        """Return the context of a model, in tokens, before memory narrows it."""
        return RunnerSettings.of(**self.runner).context or facts.context

    def _demand(
        self, found: LoadedModel | Shapes, weights: int, offered: int, *, is_read: bool = True
    ) -> Demand:
        """Return the memory that a model needs for all slots, as a function of their tokens.

        Its weights take `weights` bytes, and `offered` are there for all of it.
        """
        slots = self.settings.slots
        asked = OpenSettings.of(max_sequences=slots, **self.runner)
        asked = replace(asked, context=self._context(found.facts))
        options = replace(cache_options(asked, whole=False), context=None)
        demand = demand_of_slots(
            found.model,
            found.config,
            options,
            asked,
            slots=slots,
            step=asked.step,
            offered=offered,
        )
        sight = getattr(found.model, "sight", None)
        pictures = 0 if sight is None else sight.work_bytes(tries=is_read)
        return replace(demand, weights=weights, pictures=pictures)


def parking_folder() -> Path:
    """Return the folder of the conversations that servers of this user park."""
    return cache_folder() / "serve"


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A loaded model and its runner."""

    name: str
    loaded: LoadedModel
    runner: ParallelRunner
    bytes: int
    """Bytes of its weights and of all that it may store."""
    digest: str
    """The fingerprint of its files."""
    maker: PromptBuilder
    defaults: Mapping[str, Any]
    """The options that hold for requests that do not give them."""

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        runner: ParallelRunner,
        settings: ServeSettings,
        given: Mapping[str, Any] | None = None,
    ) -> ServedModel:
        """Describe a loaded model. `given`: the options of answers that the user gave."""
        total = weights_of(loaded.model) if runner.plan is None else runner.plan.total
        total += runner.draft_bytes
        of_file = read_config_file().options("serve", loaded.name)
        chosen = {name: one for name, one in of_file.items() if name in OF_REQUESTS}
        defaults = values(settled(layer(loaded.suggested, MODEL), chosen)) | dict(given or {})
        if isinstance(loaded.tokenizer, SeeingTokenizer):
            defaults.pop("speculate", None)  # nothing is guessed for it
        parts = sorted(fingerprint(loaded.folder).items())
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        folder = None if settings.picture_folder is None else Path(settings.picture_folder)
        maker = PromptBuilder.of(loaded, off=settings.disable_rewrite, folder=folder)
        if runner.parked_in is not None:
            maker.kept.store_in(AnswerTokenFile(runner.parked_in))
        return cls(loaded.name, loaded, runner, total, digest, maker, defaults)

    @property
    def sees(self) -> bool:
        """True if requests may have pictures."""
        return isinstance(self.loaded.tokenizer, SeeingTokenizer)

    @property
    def room(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.runner.context

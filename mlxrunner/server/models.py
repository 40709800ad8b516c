"""Load and describe the models of a server: how much each may take, and what clients may know."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrunner.config.file import read_config_file
from mlxrunner.config.option import MODEL, layer, names, settled, values
from mlxrunner.engine.draft_model import check_vocabularies
from mlxrunner.engine.opening import DraftPlan
from mlxrunner.engine.parallel_runner import ParallelRunner
from mlxrunner.errors import MemoryPlanError, MlxrunnerError
from mlxrunner.loading import cache_options
from mlxrunner.memory.plan import CHECKPOINT_SHARE, SMALLEST_CONTEXT, Demand, choose
from mlxrunner.memory.reserve import announce_step, demand_of_slots, weights_of
from mlxrunner.models.facts import (
    ModelFacts,
    Shapes,
    has_vision_encoder,
    is_run_by_mlx_vlm,
    needs_mlx_vlm,
    weight_bytes,
    without_weights,
)
from mlxrunner.models.files import read_config
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
from mlxrunner.models.resolve import folder_if_here
from mlxrunner.options import GenerateOptions, OpenSettings, RunnerSettings, ServeSettings
from mlxrunner.pictures.tokenizer import SeeingTokenizer
from mlxrunner.results import logger
from mlxrunner.server.prompts.answer_tokens import AnswerTokenFile
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.system import device
from mlxrunner.system.folders import cache_folder
from mlxrunner.templates.rendering import read_json, read_template
from mlxrunner.terminal.output import size

if TYPE_CHECKING:
    from mlxrunner.ranks.ranks import Ranks


@dataclass(frozen=True)
class ModelCard:
    """A model that the server can answer with, as far as clients may know it."""

    name: str
    is_loaded: bool
    context: int
    """Tokens of a prompt and its answer; 0 if it is not known before the model is loaded."""
    bytes: int = 0
    """Bytes of its files."""
    modified: float = 0.0
    """Unix time at which its files changed last."""
    architecture: str = ""
    digest: str = ""
    """The fingerprint of the files."""
    has_tools: bool = False
    has_thinking: bool = False
    template: str = ""
    """The text of its chat template."""
    sees: bool = False
    """True if requests may have pictures."""
    expires: float | None = None
    """Unix time at which it is unloaded if nobody asks; None: never, or not loaded."""


def card_of(shown: str, name: str, opened: ServedModel | None, *, pictures: bool) -> ModelCard:
    """Return the card of the model `name`, which clients know as `shown`.

    `opened`: the model, if it is loaded. `pictures`: models that see are loaded with their
    encoders.
    """
    folder = folder_if_here(name)
    found: dict[str, Any] = {}
    with suppress(OSError):
        if folder:
            found = dict(_described(folder, (folder / "config.json").stat().st_mtime))
    has_vision = found.pop("has_vision_encoder", False)
    needs_vision = found.pop("needs_mlx_vlm", False)
    if opened is None:
        sees = (pictures and has_vision) or needs_vision
        return ModelCard(shown, is_loaded=False, context=0, sees=sees, **found)
    more = {"digest": opened.digest, "sees": opened.sees, **found}
    return ModelCard(shown, is_loaded=True, context=opened.room, **more)


@lru_cache(maxsize=256)
def _described(folder: Path, modified: float) -> dict[str, Any]:
    """Return what the files of a model say; less if some can't be read."""
    found: dict[str, Any] = {"modified": modified}
    with suppress(MlxrunnerError, OSError, ValueError):
        config = read_config(folder)
        found["architecture"] = config["model_type"]
        found["has_vision_encoder"] = has_vision_encoder(config)
        found["needs_mlx_vlm"] = needs_mlx_vlm(config)
        found["bytes"] = weight_bytes(folder)
        template = read_template(folder, read_json(folder / "tokenizer_config.json")) or ""
        found |= {"has_tools": "tools" in template, "has_thinking": "think" in template}
        found["template"] = template
    return found


USUAL = 8192
"""Tokens of the context that a model is given room for before others are unloaded for it."""
FEW_SLOTS, MANY_SLOTS, SLOTS_SHARE = 8, 16, 20
"""Slots of a model if the user gives no number.

They are many if they take at most one part in 20 of the memory more than few.
"""
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
    wire: str = "weights"
    """The part of each model's memory that is wired."""
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
        offered, sees, beside = self.budget(), self._sees(name), 0
        found: LoadedModel | Shapes
        if sees:
            found = unread_vision_model(name)
            weights = weights_of(found.model)
        else:
            found = without_weights(name)
            weights = found.weight_bytes
            with suppress(MlxrunnerError):  # then it has no draft model, and a warning says so
                beside = self._of_draft(found)
        demand = self._demand(found, weights, offered, is_read=not sees)
        return self._needed(demand, min(self._context(found.facts), USUAL), offered) + beside

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
        beside = 0 if draft is None else self._of_draft(loaded)
        cells, memory, step = self._cells(loaded, room - beside)
        parks = self.settings.disk_cache
        runner = ParallelRunner.of(
            loaded,
            max_sequences=self.slots_of(loaded),
            progress=progress,
            kv_cache_tokens=cells,
            cache_memory=memory,
            reserve=self.ranks is None,
            disk_cache_bytes=self.settings.disk_cache_bytes if parks else 0,
            disk_cache_dir=parking_folder() if parks else None,
            disk_write_bytes=self.settings.disk_write_bytes,
            draft_model=draft,
            wire=self.wire,
            **{**self.runner, "prefill_step": step},
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
            slots = self.slots_of(loaded)
            raise MemoryPlanError(
                f"{loaded.name} with {slots} slots takes {size(needed)} for a short context, and "
                f"{size(max(0, room))} are left for it: give more --memory, fewer --slots, or a "
                "smaller model"
            )
        return needed

    def _cells(self, loaded: LoadedModel, room: int) -> tuple[int, int, int]:
        """Return the tokens of all conversations, the bytes that are kept of them, and the most
        tokens of a step, which become fewer if one whole context would not fit otherwise.

        The model, they and the largest step, which looks at all of them, take `room` bytes.
        """
        demand = self._demand(loaded, weights_of(loaded.model), room)
        context = self._context(loaded.facts)
        most = self.slots_of(loaded) * context
        plan = choose(demand, None, demand.batch.step, offered=room, limit=context)
        announce_step(plan)
        demand = replace(demand, batch=demand.batch.of_step(plan.prefill_step))
        cells = demand.largest_context(room, most)
        memory = demand.caches(cells) + demand.drafts(cells) + demand.checkpoints(cells, room)
        if self.ranks is not None:
            memory = min(memory, demand.caches(self.ranks.room))
        return cells, memory, plan.prefill_step

    def _draft_for(self, loaded: LoadedModel, room: int) -> str | None:
        """Return the draft model for a loaded model, which may take `room` bytes.

        Return None, after a warning, if it can't guess for this model.
        """
        name = self.draft_model
        if name is None:
            return None
        try:
            check_vocabularies(name, tokenizer_of(name), loaded.tokenizer)
            needed = self._of_draft(loaded)
            if needed > room:
                raise MemoryPlanError(
                    f"it takes {size(needed)}, and {size(max(0, room))} are left for it"
                )
        except MlxrunnerError as error:
            why = str(error).partition("\n")[0]
            logger.warning("%s is not used as draft model of %s: %s", name, loaded.name, why)
            return None
        return name

    def _of_draft(self, found: LoadedModel | Shapes) -> int:
        """Return the bytes of the draft model beside a model; 0 without one."""
        if self.draft_model is None:
            return 0
        settings = OpenSettings.of(max_sequences=self.slots_of(found), **self.runner)
        return DraftPlan.of(self.draft_model, self._context(found.facts), settings).nbytes

    def _context(self, facts: ModelFacts) -> int:
        return RunnerSettings.of(**self.runner).context or facts.context

    def slots_of(self, found: LoadedModel | Shapes) -> int:
        """Return the number of slots of a model: the given one, or many where these take little."""
        if self.settings.slots is not None:
            return self.settings.slots
        offered, tokens = self.budget(), min(self._context(found.facts), USUAL)
        few, many = (
            self._demand_of(found, slots, offered).total(tokens, offered)
            for slots in (FEW_SLOTS, MANY_SLOTS)
        )
        return MANY_SLOTS if many - few <= offered // SLOTS_SHARE else FEW_SLOTS

    def _demand(
        self, found: LoadedModel | Shapes, weights: int, offered: int, *, is_read: bool = True
    ) -> Demand:
        """Return the memory that a model needs for all slots, as a function of their tokens.

        Its weights take `weights` bytes, and `offered` are there for all of it.
        """
        demand = self._demand_of(found, self.slots_of(found), offered)
        sight = getattr(found.model, "sight", None)
        pictures = 0 if sight is None else sight.work_bytes(tries=is_read)
        return replace(demand, weights=weights, pictures=pictures)

    def _demand_of(self, found: LoadedModel | Shapes, slots: int, offered: int) -> Demand:
        """Return the memory that a model needs for `slots` slots, beside weights and pictures."""
        asked = OpenSettings.of(max_sequences=slots, **self.runner)
        asked = replace(asked, context=self._context(found.facts))
        options = replace(cache_options(asked, whole=False), context=None)
        return demand_of_slots(
            found.model,
            found.config,
            options,
            asked,
            slots=slots,
            step=asked.step,
            offered=offered,
        )


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

    # These two are read once: the runner does not change them.
    @cached_property
    def slots(self) -> int:
        """Most requests that it answers at a time."""
        return self.runner.stats().slots

    @cached_property
    def room(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.runner.context

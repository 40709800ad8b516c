"""Load a model directory with mlx-lm, or with mlx-vlm to see pictures; describe it unloaded.

The text of every error is one line. All of mlx-lm's architectures load, also with quantized
weights.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrunner.errors import ModelError, OptionError, ReadError
from mlxrunner.models.facts import (
    DEPENDS,
    VISION_ARCHITECTURES,
    CacheCost,
    ModelFacts,
    Shapes,
    cache_cost,
    computes_only_nan,
    depends_on_chunks,
    has_vision_encoder,
    how_to_see,
    is_run_by_mlx_vlm,
    ropes_of,
    usable_facts,
    weight_bytes,
    widen_windows,
    without_weights,
)
from mlxrunner.models.files import (
    GENERATION_CONFIG,
    MOST_SUGGESTIONS,
    check_files,
    check_layers,
    check_weights,
    eos_tokens,
    read_config,
    suggestion_of,
    tensor_count,
    text_settings,
    wrong_setting,
)
from mlxrunner.models.fingerprint import probe_key
from mlxrunner.models.resolve import remember_use, resolve
from mlxrunner.models.sharding import WeightFiles, is_sharing, share
from mlxrunner.pictures.model import CrossingModel, SeeingModel
from mlxrunner.pictures.tokenizer import SeeingTokenizer
from mlxrunner.pictures.vision_encoder import VisionEncoder
from mlxrunner.results import logger
from mlxrunner.system import device
from mlxrunner.system import mlx_vlm_internals as internals
from mlxrunner.system.folders import CacheFile
from mlxrunner.system.foreign import foreign_code
from mlxrunner.system.mlx_lm_internals import (
    Tensors,
    classes_that_show,
    has_architecture,
    model_classes,
)
from mlxrunner.system.mlx_lm_internals import load_model as mlx_lm_load
from mlxrunner.system.reading import is_there, read_bytes, read_json
from mlxrunner.terminal.output import one_line
from mlxrunner.tokenizer import Tokenizer, load_tokenizer

LoadProgress = Callable[[str, int, int | None], None]
"""Called with a step of loading, and how many of how many bytes are done; None: unknown."""
HEAD = re.compile(r"(?:^|\.)lm_head\.\w+$")
"""A tensor of the projection from the last layer to the logits."""
GROUP = 2**28
"""Bytes of weights that are read between two calls for progress."""
LOOKED_AT = 64
"""Number of values of each tensor that are checked first."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: mlx-lm's module, the tokenizer, and the facts about it."""

    name: str
    folder: Path
    model: Any
    tokenizer: Tokenizer
    facts: ModelFacts
    config: dict[str, Any]
    suggested: dict[str, Any] = field(default_factory=dict)
    """The sampling that the model suggests, as options of a request."""


def tell_nobody(step: str, done: int = 0, total: int | None = None) -> None:
    """Stand for a LoadProgress that nobody gave."""


def load_model(
    name: str, *, trust_remote_code: bool = False, progress: LoadProgress = tell_nobody
) -> LoadedModel:
    """Load `name` ("demo", a directory or a hub id) and evaluate its weights.

    Raise ModelError, which names the missing or broken file.
    """
    folder = resolve(name, with_code=trust_remote_code)
    config = _check(folder)
    device.warn_of_slow_blas()
    tokenizer = tokenizer_in(folder, config, trust_remote_code=trust_remote_code)
    model, config = _load_unread(folder, trust_remote_code, progress)
    read_weights(folder, model, progress)
    facts = usable_facts(folder, model, config)
    has_code = config.get("model_file") is not None
    key = None if has_code or is_sharing() else _probe_key(folder, config)
    facts = tried(name, model, facts, key)
    remember_use(name)
    return LoadedModel(name, folder, model, tokenizer, facts, config, suggested(folder))


def suggested(folder: Path) -> dict[str, Any]:
    """Return the sampling that the model suggests, and warn in the log of what is ignored."""
    found = suggestion_of(folder)
    if found.problem is not None:
        logger.warning("%s", one_line(found.problem))
    return found.options


def tried(name: str, model: Any, facts: ModelFacts, key: str | None = None) -> ModelFacts:
    """Test the model with a few tokens, and warn in the log if its answers depend on chunks.

    The result is kept under `key`, if there is one, and the model is not tested again. Raise
    ModelError if it computes NaN, or only infinities, whatever it is given.
    """
    found = PROBES.values().get(key) if key is not None else None
    if not isinstance(found, bool):
        if computes_only_nan(model, facts.vocab):
            raise ModelError(f"{name}: {_why_nan(model)}")
        found = depends_on_chunks(model, facts.vocab)
        if key is not None:
            PROBES.keep(key, found)
    if found:
        logger.warning(
            "%s: %s, so nothing is reused: every prompt is evaluated whole", name, DEPENDS
        )
    return replace(facts, depends_on_chunks=found)


PROBES = CacheFile("probes.json")
"""True for each model whose answers depend on chunks and False for each other one, by its files,
the code that runs it, and the device.
"""
PROBE_VERSION = 1
"""Changes with the test that `tried` makes."""


def _probe_key(folder: Path, config: dict[str, Any]) -> str:
    code = os.stat(inspect.getfile(model_classes(config)[0]))
    versions = [PROBE_VERSION, *map(version, ("mlx", "mlx-lm"))]
    return probe_key(folder, *versions, code.st_size, code.st_mtime_ns, device.describe())


def unread_model(folder: Path) -> Any:
    """Return mlx-lm's model in `folder` with its types and shapes, without reading its weights.

    A rank that shares it reads its parts of tensors. Raise the same ModelError as `load_model`.
    """
    _check(folder)
    model, _ = _load_unread(folder, trust_remote_code=False)
    widen_windows(model)
    return model


def _check(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    check_files(folder)
    check_model_type(folder, config)
    check_layers(folder / "config.json", config, tensor_count(folder))
    return config


def tokenizer_of(name: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Return the tokenizer of model `name` alone, without reading weights.

    Raise ModelError, which names the missing or broken file.
    """
    folder = resolve(name, with_code=trust_remote_code)
    check_files(folder)
    return tokenizer_in(folder, read_config(folder), trust_remote_code=trust_remote_code)


def tokenizer_in(
    folder: Path,
    config: dict[str, Any],
    *,
    trust_remote_code: bool = False,
    of_processor: bool = False,
) -> Tokenizer:
    """Return the tokenizer in `folder`, with the ends that all of its files name.

    `of_processor` is that of `load_tokenizer`. Raise ModelError, which names the missing or broken
    file.
    """
    return load_tokenizer(
        folder,
        eos_tokens(folder, config),
        stops=suggestion_of(folder).stops,
        trust_remote_code=trust_remote_code,
        of_processor=of_processor,
    )


def check_model_type(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelError unless mlx-lm supports the architecture, and its code can be imported."""
    kind = config["model_type"]
    if config.get("model_file") is not None:
        return
    if not has_architecture(kind):
        remedy = ""
        if has_vision_encoder(config):
            remedy = f": {'load it with its encoder' if internals.is_installed() else how_to_see()}"
        raise ModelError(
            f"{folder / 'config.json'}: model_type {kind[:80]!r} is not one that mlx-lm supports"
            f"{remedy}"
        )
    try:
        with foreign_code():
            model_classes(config)
    except Exception as error:
        raise ModelError(f"{folder / 'config.json'}: {explained(error)}") from error


def _load_unread(
    folder: Path, trust_remote_code: bool, progress: LoadProgress = tell_nobody
) -> tuple[Any, dict[str, Any]]:
    """Return mlx-lm's model and its configuration; ranks that share it read their parts."""
    if not is_sharing():
        model, config = _of_mlx_lm(folder, trust_remote_code)
    else:
        files = WeightFiles(folder, partial(progress, "reading the weights"))
        model, config = _of_mlx_lm(folder, trust_remote_code, files.take, files.complete)
        share(folder, model, config, files)
    _set_dtype(model, config)
    return model, config


def _set_dtype(model: Any, config: dict[str, Any]) -> None:
    """Convert weights that are not quantized to the type that the device prefers."""
    dtype = device.preferred_dtype()
    if dtype is not None and not config.get("quantization"):
        model.set_dtype(dtype)


def _of_mlx_lm(
    folder: Path,
    trust_remote_code: bool,
    take: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    complete: Callable[[Tensors, Tensors], Tensors] = lambda made, parameters: made,
) -> tuple[Any, dict[str, Any]]:
    """Return mlx-lm's model and its configuration. See `classes_that_show` for the functions."""
    config = read_config(folder)
    ropes = ropes_of(folder / "config.json", config)

    def completed(made: Tensors, parameters: Tensors) -> Tensors:
        return complete(without_tied_head(made, parameters, config), parameters)

    try:
        with foreign_code():
            model, config = mlx_lm_load(
                folder,
                check_weights(folder),
                ropes.settings,
                classes_that_show(take, completed),
                trust_remote_code=trust_remote_code,
            )
    except ModelError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and (why := wrong_setting(config)) is not None:
            raise ModelError(f"{folder / 'config.json'}: {why}") from error
        _check_generation_config(folder, error)
        raise ModelError(f"{folder}: {explained(error)}") from error
    if config.get("model_file") is None:
        ropes.check(type(model))
    return model, config


def _check_generation_config(folder: Path, error: Exception) -> None:
    """Raise ModelError if mlx-lm's `error` is that the file can't be decoded: it names no file."""
    if isinstance(error, UnicodeDecodeError):
        try:
            read_json(folder / GENERATION_CONFIG, MOST_SUGGESTIONS)
        except ReadError as found:
            raise ModelError(str(found)) from error


def without_tied_head(made: Tensors, parameters: Tensors, config: dict[str, Any]) -> Tensors:
    """Return the tensors without an output projection that the model has not.

    Files may have one though the model uses its embeddings in its place, by `tie_word_embeddings`
    or because all models of its kind do.
    """
    ties = [one.get("tie_word_embeddings") for one in (config, text_settings(config))]
    if False in ties:
        return made
    return {
        name: tensor for name, tensor in made.items() if name in parameters or not HEAD.search(name)
    }


def read_weights(folder: Path, model: Any, progress: LoadProgress) -> None:
    """Read the weights of `model`. Raise ModelError if they are damaged, or too large."""
    parameters: Any = tree_flatten(model.parameters())
    arrays: list[mx.array] = [array for _, array in parameters]
    total, done = sum(array.nbytes for array in arrays), 0
    try:
        for group in _groups(arrays):
            progress("reading the weights", done, total)
            mx.eval(group)
            done += sum(array.nbytes for array in group)
    except MemoryError as error:
        raise ModelError(f"{folder}: not enough memory for the weights") from error
    except Exception as error:
        raise ModelError(f"{folder}: {explained(error)}") from error
    _check_numbers(folder, model)


def _groups(arrays: list[mx.array]) -> Iterator[list[mx.array]]:
    """Yield `arrays` in groups of about GROUP bytes."""
    group, nbytes = list[mx.array](), 0
    for array in arrays:
        group.append(array)
        nbytes += array.nbytes
        if nbytes >= GROUP:
            yield group
            group, nbytes = [], 0
    yield group


def _check_numbers(folder: Path, model: Any) -> None:
    """Raise ModelError for a tensor that holds only NaN, as in damaged files.

    Look at a few values first, and at the whole tensor only if those are all NaN.
    """
    floats = [(name, array.reshape(-1)) for name, array in _floats(model)]
    places = [mx.all(mx.isnan(array[:: max(1, array.size // LOOKED_AT)])) for _, array in floats]
    mx.eval(places)
    for (name, array), is_bad in zip(floats, places, strict=True):
        if is_bad.item() and mx.all(mx.isnan(array)).item():
            raise ModelError(
                f"{folder}: the {array.size} values of the tensor {name} are all NaN: the weights "
                "are damaged, download them again"
            )


def _why_nan(model: Any) -> str:
    """Return why a model computes NaN: the first tensor with NaN, or a type that is too small."""
    floats = _floats(getattr(model, "inner", model))
    damaged = next((name for name, one in floats if mx.any(mx.isnan(one)).item()), None)
    if damaged is not None:
        return (
            f"the tensor {damaged} holds NaN (not a number), and so do all answers: the weights "
            "are damaged or were converted wrongly, download or convert them again"
        )
    is_half = any(array.dtype == mx.float16 for _, array in floats)
    return "the model computes NaN (not a number) or only infinities for every prompt: " + (
        "most likely its numbers exceed 65504, the largest of float16: use a bfloat16 or float32 "
        "version of it"
        if is_half
        else "its weights are damaged or were converted wrongly, download or convert them again"
    )


def _floats(model: Any) -> list[tuple[str, mx.array]]:
    """Return the parameters that may hold NaN."""
    parameters: Any = tree_flatten(model.parameters())
    return [
        (name, array)
        for name, array in parameters
        if array.size and mx.issubdtype(array.dtype, mx.floating)
    ]


def explained(error: Exception) -> str:
    """Return what is wrong with a model, by the error of loading it, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, TypeError) and "missing" in text and "argument" in text:
        return (
            "config.json lacks a setting that this architecture needs: "
            f"{text.split(':')[-1].strip()}"
        )
    if "trust_remote_code" in text:
        return "wants to run Python code of its own; if you trust it, add --trust-remote-code"
    if isinstance(error, KeyError):
        return f"a setting of config.json or a tensor is missing: {text}"
    return (text[:400] + " ..." if len(text) > 400 else text) or type(error).__name__


SETTINGS = ("preprocessor_config.json", "processor_config.json")
"""The files that decide what the processor makes of pixels."""
MOST_SETTINGS = 2**20
"""Most bytes of such a file."""
MAY_HAVE_CODE = ("config.json", "tokenizer_config.json", *SETTINGS)
"""The files that may name Python code of the model, which mlx-vlm would run unasked."""


def why_no_vision(name: str) -> str | None:
    """Return why the model `name` can't be loaded with an encoder of pictures; None if it can."""
    if not internals.is_installed():
        return how_to_see()
    try:
        folder = resolve(name)
        _check_vision(folder, read_config(folder))
    except ModelError as error:
        return str(error)
    return None


def unread_vision_model(name: str) -> LoadedModel:
    """Return `name` as `load_vision_model` does, with shapes and settings, without weights."""
    if not internals.is_installed():
        raise OptionError(how_to_see())
    if is_sharing():
        raise ModelError(f"{name}: a model that sees pictures can't be shared among ranks")
    folder = resolve(name)
    config = read_config(folder)
    check_files(folder)
    _check_vision(folder, config)
    tokenizer = tokenizer_in(folder, config, of_processor=True)
    model, seeing_tokenizer = with_vision_encoder(folder, _unread_vision(folder, config), tokenizer)
    facts = usable_facts(folder, model, config)
    return LoadedModel(name, folder, model, seeing_tokenizer, facts, config, suggested(folder))


def load_vision_model(
    name: str, *, progress: LoadProgress, check: Callable[[LoadedModel], None]
) -> LoadedModel:
    """Load `name` (a directory or a hub id), which mlx-vlm runs, and evaluate its weights.

    `check` is called before a weight is read. Raise ModelError, which names what is missing, broken
    or not supported, and OptionError if mlx-vlm is not installed.
    """
    loaded = unread_vision_model(name)
    check(loaded)
    read_weights(loaded.folder, loaded.model.inner, progress)
    remember_use(name)
    return replace(loaded, facts=tried(name, loaded.model, loaded.facts))


def load_either(name: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """Load `name` for text, or with its encoder if mlx-lm lacks it. Raise as both do."""
    if is_run_by_mlx_vlm(name):
        return load_vision_model(name, progress=tell_nobody, check=lambda _: None)
    return load_model(name, trust_remote_code=trust_remote_code)


def with_vision_encoder(
    folder: Path, model: Any, tokenizer: Tokenizer
) -> tuple[SeeingModel, SeeingTokenizer]:
    """Return `model`, which mlx-vlm loaded from `folder`, and its tokenizer, ready for pictures.

    Raise ModelError if the processor or the chat template can't be used.
    """
    model.eval()  # some encoders drop parts of a picture at random otherwise
    processor = internals.load_processor(folder)
    settings = b"\0".join(
        read_bytes(folder / name, MOST_SETTINGS) for name in SETTINGS if is_there(folder / name)
    )
    version = internals.version().encode()
    sight = VisionEncoder(
        model, processor, internals.marker_of(processor), version + b"\0" + settings
    )
    crosses = internals.crossing_layers(model)
    seeing = CrossingModel(model, sight) if crosses else SeeingModel(model, sight)
    return seeing, SeeingTokenizer(tokenizer, sight)


def _check_vision(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelError for a model that can't be used, before mlx-vlm reads anything of it."""
    file, kind = folder / "config.json", config["model_type"]
    if kind not in VISION_ARCHITECTURES:
        raise ModelError(
            f"{file}: pictures are not supported for model_type {kind[:80]!r}, only for "
            f"{', '.join(VISION_ARCHITECTURES)}"
        )
    if not isinstance(config.get("vision_config"), dict):
        raise ModelError(f"{file}: no vision_config: this model has no encoder of pictures")
    for name in MAY_HAVE_CODE:
        found = read_json(folder / name, MOST_SETTINGS) if is_there(folder / name) else {}
        for key in ("auto_map", "model_file"):
            if isinstance(found, dict) and found.get(key):
                raise ModelError(
                    f"{folder / name}: {key} names Python code of the model, and a model that "
                    "sees pictures may have none"
                )
    check_layers(file, config, tensor_count(folder))


def _unread_vision(folder: Path, config: dict[str, Any]) -> Any:
    """Return mlx-vlm's model in `folder`, whose weights are not read yet."""
    try:
        with foreign_code():
            model = internals.load_model(folder, check_weights(folder))
        _set_dtype(model, config)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{folder}: {explained(error)}") from error
    return model


@dataclass(frozen=True)
class Description:
    """The figures of `mlxrunner show`: the facts that need no weights, and sizes in bytes."""

    architecture: str
    context: int
    context_is_known: bool
    layers: dict[str, int]
    vocab: int
    weight_bytes: int
    """Bytes in the files."""
    loaded_bytes: int
    """Bytes in memory, where the device may need another type of numbers."""
    cache: CacheCost

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class End:
    """An end of the model's answers."""

    text: str
    """The text of a token that ends an answer, or the text before which it ends."""
    token: int | None
    """The id of the token; None for a text."""
    places: tuple[str, ...]
    """The files that name it; "chat template" for a token with which it ends a turn."""


def ends_of(name: str) -> list[End]:
    """Return where the answers of the model `name` end. No weights are read.

    Raise ModelError if its tokenizer can't be loaded.
    """
    tokenizer = tokenizer_of(name)
    found = [
        End(tokenizer.decode([token]), token, places)
        for token, places in sorted(tokenizer.ends.items())
    ]
    stops = suggestion_of(resolve(name)).stops
    for text in dict.fromkeys((*stops, *tokenizer.template_stops)):
        place = GENERATION_CONFIG if text in stops else "fallback template"
        found.append(End(text, None, (place,)))
    return found


def describe(name: str) -> Description:
    """Describe the model `name` without loading its weights. Raise ModelError if it is broken."""
    found = unread_vision_model(name) if is_run_by_mlx_vlm(name) else without_weights(name)
    known = {
        name: value for name, value in vars(found.facts).items() if name != "depends_on_chunks"
    }
    in_files = weight_bytes(resolve(name))
    loaded = found.weight_bytes if isinstance(found, Shapes) else in_files
    return Description(
        **known, weight_bytes=in_files, loaded_bytes=loaded, cache=cache_cost(found.model)
    )

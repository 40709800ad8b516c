"""Read the files of a model's folder, checked before a library opens them.

They are config.json, generation_config.json, the weight index and the headers of the weight files.
A rank that has a part of a model (ModelShard) needs some of the weight files only.
"""

from __future__ import annotations

import codecs
import os
import posixpath
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any, Literal

from mlxrunner.config.option import about
from mlxrunner.errors import MissingFileError, ModelError, OptionError, ReadError, reason
from mlxrunner.options import GenerateOptions
from mlxrunner.system.foreign import foreign_code
from mlxrunner.system.reading import (
    FETCH_LFS,
    LFS_POINTER,
    is_of_kernel,
    is_there,
    open_file,
    read_bytes,
    read_json,
    untagged,
)
from mlxrunner.system.tensorfile import Header, HeaderError
from mlxrunner.system.tensorfile import read_header as read_tensors
from mlxrunner.tokenizer.base import LAST_TOKEN

WEIGHTS = "model*.safetensors"
"""The files of weights that are read."""
GGUF = (
    "a GGUF file is for llama.cpp and its relatives; `mlxrunner models --known` lists models in "
    "MLX's format"
)
INDEX = "model.safetensors.index.json"
"""The file that says in which file each tensor is, where there are several."""
SINGLE = "model.safetensors"
"""The file that has all weights where there is no index."""
NUMBERED = re.compile(r"model-(\d{1,6})-of-(\d{1,6})\.safetensors")
"""The name of one of several files of weights."""
MOST_SETTINGS = 2**24
"""Largest size of a config.json in bytes.

The largest one in use, with a setting for each of a hundred thousand tensors, has half this size.
"""
MOST_HEADER = 2**26
"""Largest size of the header of a weight file, in bytes."""
MOST_SIDE = 2**31 - 1
"""Largest side of a tensor: MLX counts with 32 bits."""
MOST_BYTES = {
    ".json": 2**27,
    ".jinja": 2**20,
    ".jsonl": 2**27,
    ".txt": 2**26,
    ".model": 2**27,
    ".tiktoken": 2**26,
    ".py": 2**22,
}
"""Largest size in bytes of a file that a tokenizer is made from, by its suffix.

Each is several times the size of the largest file in use.
"""
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Names of the settings of the part of a model that writes text."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json after checking its values, with tagged floats as floats.

    Raise ModelError if it is missing or broken.
    """
    config: dict[str, Any] = untagged(config_as_written(folder))
    return config


def config_as_written(folder: Path) -> dict[str, Any]:
    """Return config.json as `read_config` does, with tagged floats as they are."""
    file = folder / "config.json"
    try:
        config = read_json(file, MOST_SETTINGS)
    except MissingFileError as error:
        if is_there(file):
            raise ModelError(str(error)) from error
        remedy = "a model directory needs config.json, *.safetensors and tokenizer files"
        found = GGUF if any(folder.glob("*.gguf")) else remedy
        raise ModelError(f"{file}: missing: {found}") from error
    except ReadError as error:
        raise ModelError(str(error)) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file}: has no model_type")
    if read_bytes(file, MOST_SETTINGS).startswith(codecs.BOM_UTF8):
        raise ModelError(
            f"{file}: begins with a byte order mark (BOM), which mlx-lm can't read: save it as "
            "UTF-8 without one"
        )
    check_settings(file, config)
    return config


def eos_tokens(folder: Path, config: dict[str, Any]) -> dict[int, tuple[str, ...]]:
    """Return the end-of-sequence ids of config.json and generation_config.json, with their files.

    The ids in the settings of a part that writes text count, too. Values that are not token ids are
    ignored.
    """
    sources: list[tuple[str, Any]] = [("config.json", config)]
    sources += [("config.json", config.get(name)) for name in TEXT_PARTS]
    with suppress(ReadError):
        file = "generation_config.json"
        sources.append((file, read_json(folder / file, MOST_SETTINGS)))
    found: dict[int, tuple[str, ...]] = {}
    for file, source in sources:
        ids = source.get("eos_token_id") if isinstance(source, dict) else None
        for token in ids if isinstance(ids, list) else [ids]:
            if type(token) is int and 0 <= token <= LAST_TOKEN:
                found[token] = tuple(dict.fromkeys((*found.get(token, ()), file)))
    return found


def check_files(folder: Path) -> None:
    """Raise ModelError for a file that is not a regular file of a sensible size.

    The libraries open files by name without checks. A FIFO would block them, and a device would
    feed them forever. `read_headers` checks the weight files.
    """
    for place in (folder, folder / "additional_chat_templates"):
        try:
            names = sorted(os.listdir(place))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ModelError(f"{place}: can't be read: {error.strerror or error}") from error
        for name in names:
            limit = MOST_BYTES.get(os.path.splitext(name)[1])
            if limit is not None:
                descriptor, _ = _opened(place / name, limit)
                try:
                    _check_fetched(place / name, descriptor)
                finally:
                    os.close(descriptor)


def _check_fetched(file: Path, descriptor: int) -> None:
    """Raise ModelError if Git has a pointer to a file in its place."""
    if os.pread(descriptor, len(LFS_POINTER), 0) == LFS_POINTER:
        raise ModelError(f"{file}: {FETCH_LFS}")


def _opened(file: Path, limit: int | None = None) -> tuple[int, int]:
    """Return `open_file` of a file of a model. Raise ModelError if it can't be one."""
    if is_of_kernel(file):
        raise ModelError(
            f"{file}: is a file of the kernel, not a regular file: copy its content into a file"
        )
    try:
        return open_file(file, limit)
    except ReadError as error:
        raise ModelError(str(error)) from error


def check_weights(folder: Path) -> list[Path]:
    """Return the weight files after comparing each one with its header.

    Raise ModelError, which names the first bad file.
    """
    return list(read_headers(folder))


def read_headers(folder: Path) -> dict[Path, Header]:
    """Return the checked header of each weight file.

    Raise ModelError if a file is broken, if one that this process needs is missing, or if two files
    have the same tensor.
    """
    headers = {file: read_header(file) for file in _weight_files(folder)}
    place: dict[str, Path] = {}
    for file, header in headers.items():
        for name in header.tensors:
            other = place.setdefault(name, file)
            if other is not file:
                raise ModelError(
                    f"{folder}: {_in(folder, other)} and {_in(folder, file)} both have the tensor "
                    f"{name[:80]!r}: remove the file that is not of this model"
                )
    return headers


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that are read, sorted.

    They are those that the weight index names, whatever else is in the folder. Without an index
    they are all that match WEIGHTS. An index that names missing files counts for nothing beside
    whole weights. Raise ModelError if a file is missing.
    """
    placed = placed_tensors(folder)
    needed = needed_files(folder)
    if missing := sorted(needed - _present(folder, needed)):
        if found := _whole_weights(folder, placed):
            return found
        what = "not a safetensors file" if is_there(folder / missing[0]) else "missing"
        raise ModelError(
            f"{folder / missing[0]}: {what}: {len(missing)} of {len(needed)} weight files that "
            f"{INDEX} lists: download the model again"
        )
    if placed:
        return sorted(folder / name for name in _present(folder, placed.values()))
    names = {file.name for file in folder.glob(WEIGHTS)}
    if not names:
        raise ModelError(
            f"{folder}: no weights: no model*.safetensors in it (other formats are not loaded)"
        )
    for count, files in _numbered(names).items():
        if (lacking := _lacking(files, count)) is not None:
            raise ModelError(
                f"{folder / lacking}: missing, by the numbers in the names of the other weight "
                "files: download the model again"
            )
    return sorted(folder / name for name in names)


def _present(folder: Path, names: Iterable[str]) -> set[str]:
    """Return those of the weight files `names` that are in `folder`."""
    return {name for name in names if name.endswith(".safetensors") and is_there(folder / name)}


def _whole_weights(folder: Path, placed: dict[str, str]) -> list[Path]:
    """Return the weights that an index with missing files does not know of, [] if none are whole.

    They are whole if they have every tensor that the index names. Where no file of the index is
    there, it is an index of other weights, and its names say nothing.
    """
    is_foreign = not _present(folder, placed.values())
    for names in whole_sets({file.name for file in folder.glob(WEIGHTS)}):
        files = [folder / name for name in names]
        if is_foreign or _have_all(files, placed.keys()):
            return files
    return []


def _have_all(files: list[Path], tensors: Iterable[str]) -> bool:
    """Return True if the weight `files` are readable and have all `tensors`."""
    try:
        return {*tensors} <= {name for file in files for name in read_header(file).tensors}
    except ModelError:
        return False


def whole_sets(names: Set[str]) -> list[list[str]]:
    """Return the weights that are whole by the `names` of their files: one file, or all numbers."""
    single = [[SINGLE]] if SINGLE in names else []
    return single + [
        sorted(name for several in files.values() for name in several)
        for count, files in _numbered(names).items()
        if _lacking(files, count) is None
    ]


def _numbered(names: Iterable[str]) -> dict[str, dict[int, list[str]]]:
    """Return the numbered files among `names`, by the number of files, as text, and their own."""
    found: dict[str, dict[int, list[str]]] = {}
    for name in sorted(names):
        if match := NUMBERED.fullmatch(name):
            found.setdefault(match[2], {}).setdefault(int(match[1]), []).append(name)
    return dict(sorted(found.items()))


def _lacking(files: Mapping[int, Sequence[str]], count: str) -> str | None:
    """Return the first name that numbered `files` lack to be `count`, from 0 or 1 on, or None."""
    first = min(1, *files)
    width = max(len(name.split("-")[1]) for several in files.values() for name in several)
    numbers = (number for number in range(first, first + int(count)) if number not in files)
    lacking = next(numbers, None)
    return None if lacking is None else f"model-{lacking:0{width}}-of-{count}.safetensors"


def _in(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def tensor_count(folder: Path) -> int:
    """Return the number of tensors of a model, also of those in files that a rank does not need.

    Raise ModelError as `read_headers` does.
    """
    here = sum(len(header.tensors) for header in read_headers(folder).values())
    return max(here, len(placed_tensors(folder))) if missing_files(folder) else here


def missing_files(folder: Path) -> list[str]:
    """Return the weight files that the weight index names, and that are not there."""
    named = {*placed_tensors(folder).values()}
    return sorted(named - _present(folder, named))


def weight_patterns(folder: Path) -> list[str]:
    """Return the patterns of the weight files that this process needs.

    The names in a weight index are not patterns.
    """
    return sorted(map(escape, needed_files(folder))) or [WEIGHTS]


def weights_among(names: Set[str], placed: Mapping[str, str]) -> list[str]:
    """Return the patterns of the weight files to download from a repository with the files `names`.

    `placed` is what its weight index says. The same files are read as from a folder of them all.
    """
    named = {*placed.values()}
    if named and not named <= names:
        whole = whole_sets({name for name in names if fnmatch(name, WEIGHTS) and "/" not in name})
        named = {*whole[0]} if whole else named
    return sorted(map(escape, named)) or [WEIGHTS]


def needed_files(folder: Path) -> set[str]:
    """Return the weight files that the weight index names, and that this process needs."""
    placed = placed_tensors(folder)
    if not placed or own_shard() is None:
        return set(placed.values())
    return {placed[name] for name in needed_tensors(placed, read_config(folder))}


def placed_tensors(folder: Path) -> dict[str, str]:
    """Return the name of the file of each tensor by the weight index, or nothing without one."""
    index = folder / INDEX
    return index_in(index) if is_there(index) else {}


def index_in(index: Path) -> dict[str, str]:
    """Return the name of the file of each tensor by the file `index`.

    Raise ModelError if it is not a weight index, or names a file outside of its folder.
    """
    remedy = "remove it, if the weights are whole without it, or download it again"
    try:
        content = read_json(index, MOST_BYTES[".json"])
    except ReadError as error:
        raise ModelError(f"{error}; it is the weight index: {remedy}") from error
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ModelError(
            f"{index}: not a readable weight index: it has no object 'weight_map', which names the "
            f"file of each tensor: {remedy}"
        )
    return {name: _inner(index, file) for name, file in found.items()}


def _inner(index: Path, file: Any) -> str:
    """Return the name of a weight file in an index. Raise ModelError if it leads elsewhere."""
    if not isinstance(file, str):
        raise ModelError(
            f"{index}: not a readable weight index: it names the file {reprlib.repr(file)}, which "
            "is not a text: remove the index, or download it again"
        )
    name = posixpath.normpath(file)
    if name.startswith(("/", "../")) or name == ".." or "\0" in name:
        raise ModelError(
            f"{index}: names {file[:100]!r}, which is not a file in this folder: remove the index, "
            "or download it again"
        )
    return name


def read_header(file: Path) -> Header:
    """Return the checked header of a safetensors file.

    Raise ModelError if the file is cut off or is not a safetensors file.
    """
    descriptor, size = _opened(file)
    try:
        _check_fetched(file, descriptor)
        header = read_tensors(descriptor, size, MOST_HEADER)
        for name, place in header.tensors.items():
            if max(place.shape, default=0) > MOST_SIDE:
                raise HeaderError(
                    f"damaged: {name[:80]!r} has the shape {place.shape}, and {MOST_SIDE:,} is the "
                    "longest side"
                )
        return header
    except (HeaderError, OSError) as error:
        raise ModelError(f"{file}: {reason(error)}: download it again") from error
    finally:
        os.close(descriptor)


COUNTS = re.compile(
    r"(?!.*(?:size|dim|tokens)_)(?:.*_)?"
    r"(?:layers?|experts?|loops|blocks|codebooks|depth|embedders|ngram)"
)
"""Names of settings that count parts of a model. Building each part costs time in Python."""
MOST_PARTS = 1024
"""Largest number of parts. The deepest models have 200 layers, the widest 512 experts."""
ALWAYS_BUILT = 64
"""Number of layers up to which building the model costs nothing."""
SIZES = re.compile(
    r"(?:.*_)?(?:(?:hidden|intermediate|vocab)_size|d_model|n_embd|n_inner|dim|heads?|rank)"
)
MOST_SIZE = 2**27
"""Largest side of a matrix."""
FORMS: dict[str, tuple[type, str]] = {
    "tie_word_embeddings": (bool, "true or false"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
}
"""The forms of settings with which a model would be built wrongly in silence, or fail elsewhere."""
NUMBERS = re.compile(
    r"(?:.*_)?(?:factor|theta|eps|epsilon|scale|window|embeddings|bits|size|beta_fast|beta_slow)"
)
"""Names of settings that are numbers."""
ALWAYS_WHOLE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Settings that are whole numbers in each model that has them."""
NUMERAL = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,3})?")
"""A text that is a number."""
MOST_LIST = 2**16
"""Longest list of settings, such as the kinds of all layers."""


def check_settings(file: Path, config: dict[str, Any]) -> None:
    """Raise ModelError for the first setting of `config` that no model can have.

    Nested settings are checked, too. The message names `file`.
    """
    for name, value in _settings(config):
        last = name.rpartition(".")[2]
        if isinstance(value, list) and len(value) > MOST_LIST:
            raise ModelError(
                f"{file}: {name[:200]} is a list of {len(value):,} values, and {MOST_LIST:,} are "
                "the most"
            )
        form, shown = FORMS.get(last, (object, ""))
        if value is not None and not isinstance(value, form):
            raise ModelError(f"{file}: {name[:200]} is {reprlib.repr(value)}: write {shown}")
        is_size = COUNTS.fullmatch(last) or SIZES.fullmatch(last)
        if isinstance(value, str) and value.strip().isdecimal() and is_size:
            raise ModelError(f"{file}: {name[:200]} is the text {value[:40]!r}: write a number")
        number = value if isinstance(value, int | float) else 0
        for pattern, most in ((COUNTS, MOST_PARTS), (SIZES, MOST_SIZE)):
            if pattern.fullmatch(last) and not -1 <= number <= most:
                huge = f"{number:.0e}" if abs(number) < 10**300 else "a huge number"
                shown = repr(number) if abs(number) < 10**20 else huge
                raise ModelError(
                    f"{file}: {name[:200]} is {shown}; no model has more than {most:,}: download "
                    "the file again"
                )


def wrong_setting(config: dict[str, Any]) -> str | None:
    """Return what is wrong with the first setting of a kind that no model can be built from.

    Call it when building has failed: a setting that a model ignores may be of any kind.
    """
    for name, value in _settings(config):
        last = name.rpartition(".")[2]
        is_size = COUNTS.fullmatch(last) or SIZES.fullmatch(last)
        if is_size and isinstance(value, float):
            number = str(int(value)) if value.is_integer() else "a whole number"
            return f"{name[:200]} is {value!r}: write {number}"
        if isinstance(value, str) and NUMERAL.fullmatch(value) and NUMBERS.fullmatch(last):
            return f"{name[:200]} is the text {value!r}: write {value}"
        if name in ALWAYS_WHOLE and type(value) is not int:
            return f"{name} is {reprlib.repr(value)}: write a whole number"
        if last in ("quantization", "quantization_config") and value in ({}, []):
            return (
                f"{name[:200]} is {value!r}: write group_size and bits into it, or remove it if "
                "the weights are not quantized"
            )
    return None


def check_layers(file: Path, config: dict[str, Any], tensors: int) -> None:
    """Raise ModelError if the model has more layers than its weight files have `tensors`.

    Each layer has at least one tensor of its own.
    """
    layers = size_of(config, "num_hidden_layers", "n_layers", "n_layer", "num_layers")
    if layers > max(tensors, ALWAYS_BUILT):
        raise ModelError(
            f"{file}: {layers:,} layers, but the weight files have {tensors:,} tensors in all: "
            "they are not of one model"
        )


def size_of(config: dict[str, Any], *names: str) -> int:
    """Return the value of the first of `names` that is a positive whole number.

    It may be in `config` or its `text_config`. Return 0 if there is none.
    """
    sources = (config, text_settings(config))
    return next(
        (s[name] for name in names for s in sources if type(s.get(name)) is int and s[name] > 0), 0
    )


def text_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text settings of a model with several kinds of input; empty if it has none."""
    found = config.get("text_config")
    return found if isinstance(found, dict) else {}


def _settings(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its name, `a.b` for a nested one."""
    for name, value in config.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")


ShardingWay = Literal["tensor-parallel", "pipeline"]
"""Each rank has a part of every layer, or some of the layers."""
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The number of a layer in the name of a tensor."""


@dataclass(frozen=True)
class ModelShard:
    """The part of rank `own` of `ranks`."""

    own: int
    ranks: int
    way: ShardingWay

    def layers(self, count: int) -> range:
        """Return the numbers of the layers that this rank has, of `count`.

        The last rank begins, as in mlx-lm: the first ranks have one more where they are not equal.
        """
        if self.way != "pipeline":
            return range(count)
        each, more = divmod(count, self.ranks)
        sizes = [each + (rank < more) for rank in range(self.ranks)]
        first = sum(sizes[self.own + 1 :])
        return range(first, first + sizes[self.own])


DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""The settings of config.json that each rank has an equal part of."""
_part: ModelShard | None = None


def be_rank(part: ModelShard | None) -> None:
    """Download, check and load only `part` of each model from now on; None: all of it."""
    global _part
    _part = part


def own_shard() -> ModelShard | None:
    """Return the part of each model that this process has, or None for all of it."""
    return _part


def check_shard(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelError, with the name of the architecture, if ranks can't share the model."""
    if _part is None:
        return
    from mlxrunner.system.mlx_lm_internals import has_pipeline, model_classes

    kind, ranks, way = config["model_type"], _part.ranks, _part.way
    try:
        with foreign_code():
            model = model_classes(config)[0]
        known = hasattr(model, "shard") if way == "tensor-parallel" else has_pipeline(model)
    except Exception:  # an architecture that loading refuses with a better explanation
        known = False
    if not known:
        raise ModelError(
            f"{folder}: mlx-lm can't share the architecture {kind!r:.80} among ranks by --{way}"
        )
    if way == "pipeline":
        count = config.get("num_hidden_layers")
        if isinstance(count, int) and count < ranks:
            raise ModelError(f"{folder}: {count} layers are too few for {ranks} ranks")
        return
    for name in DIVIDED:
        count = config.get(name)
        if isinstance(count, int) and count % ranks:
            raise ModelError(
                f"{folder}: {name} is {count}, which {ranks} ranks can't share equally: use a "
                "number of hosts that divides it"
            )


def needed_tensors(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Return those of the tensors `names` of the weight files that this process needs.

    Every rank has the tensors outside of layers. Layers after the last one of `config` are drafts
    of further tokens, which mlx-lm leaves out.
    """
    part, count = own_shard(), config.get("num_hidden_layers")
    if part is None or part.way != "pipeline" or type(count) is not int or count < part.ranks:
        return list(names)
    own = {str(number) for number in part.layers(count)}
    return [name for name in names if (found := LAYER.search(name)) is None or found[1] in own]


GENERATION_CONFIG = "generation_config.json"
MOST_SUGGESTIONS = 2**20
"""Most bytes of the file that are read. The files in use have a few hundred."""
SUGGESTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The options that are taken from the file, under the same names."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
}
"""Values that change nothing."""
MOST_STOP_STRINGS = 64
"""Most texts that end an answer: each new token is compared with all of them."""
FILTERS = ("top_p", "top_k", "min_p")
"""The options that only matter where tokens are sampled."""


@dataclass(frozen=True)
class Suggestion:
    """The options that a model suggests."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of a request. It is empty if the model suggests nothing."""
    problem: str | None = None
    """One line about what is ignored, or None."""
    stops: tuple[str, ...] = ()
    """The texts before which an answer ends (`stop_strings`)."""


def suggestion_of(folder: Path) -> Suggestion:
    """Return the sampling and the ends that the model in `folder` suggests.

    `do_sample: false` means greedy. `do_sample: true` without a temperature means 1.0, as it does
    in transformers.
    """
    file = folder / GENERATION_CONFIG
    try:
        found = read_json(file, MOST_SUGGESTIONS)
    except MissingFileError as error:
        return Suggestion(problem=f"{error}: it is ignored" if is_there(file) else None)
    except ReadError as error:
        return Suggestion(problem=f"{error}; its sampling is ignored")
    if not isinstance(found, dict):
        return Suggestion(problem=f"{file}: not a JSON object: its sampling is ignored")
    options, problems = _sampling(found)
    stops, why = _stop_strings(found.get("stop_strings"))
    problems += [why] if why else []
    if found.get("do_sample") is False:
        options = {"temperature": 0.0} | {
            name: value for name, value in options.items() if name not in ("temperature", *FILTERS)
        }
    elif found.get("do_sample") is True:
        options = {"temperature": 1.0} | options
    problem = f"{file}: ignored: {'; '.join(problems)}" if problems else None
    return Suggestion(options, problem, stops)


def _sampling(found: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the usable options, and a reason for each one that is not."""
    options, problems = {}, []
    for name in SUGGESTED:
        value = found.get(name)
        if value is None or (type(value) in (int, float) and value in NEUTRAL.get(name, ())):
            continue
        try:
            about(GenerateOptions.__dataclass_fields__[name]).check(name, value)
        except OptionError as error:
            problems.append(f"{error!s:.120}")
        else:
            options[name] = float(value) if name != "top_k" else value
    if found.get("do_sample") not in (None, True, False):
        problems.append(f"do_sample: {found['do_sample']!r:.80} is neither true nor false")
    return options, problems


def _stop_strings(given: Any) -> tuple[tuple[str, ...], str]:
    """Return the usable texts, and what is ignored, or ""."""
    listed = given if isinstance(given, list) else [given]
    usable = tuple(dict.fromkeys(text for text in listed if isinstance(text, str) and text))
    why = ""
    if given is not None and not all(isinstance(text, str) and text for text in listed):
        why = f"stop_strings: {given!r:.80} is not a list of texts"
    elif len(listed) > MOST_STOP_STRINGS:
        why = f"stop_strings: all but the first {MOST_STOP_STRINGS} of {len(listed):,} texts"
    return usable[:MOST_STOP_STRINGS], why

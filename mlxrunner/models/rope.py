"""Give an architecture its rotary positions (RoPE) under the names that it reads.

transformers 4 wrote `rope_theta` and `rope_scaling`. transformers 5 writes `rope_parameters`, with
a dict for each kind of layer where those differ. An architecture of mlx-lm reads one of these
forms, and takes defaults in silence where it does not find it. So each form is made of the others,
and a setting that the built model has not read is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mlxrunner.errors import ModelError

THETA = ("rope_theta", "rotary_emb_base")
"""Names of the base of the rotations."""
LOCAL_THETA = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta", "local_rope_theta")
"""Names of the base of the rotations in layers with a sliding window."""
PARTIAL = ("partial_rotary_factor", "rotary_pct")
"""Names of the part of each head that is rotated."""
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
KIND = ("rope_type", "type")
"""Names of the kind of scaling. An architecture reads one or the other."""
PLAIN = ("default", "mrope")
"""Kinds of scaling that change nothing for a text."""
DESCRIPTIVE = {*KIND, "rope_theta", "partial_rotary_factor", ORIGINAL, "mrope_section"}
"""Settings of a scaling that do not say how much it scales."""
HAS_DEFAULTS = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
"""Types of models whose layers have ropes of their own where config.json names none."""


class RopeSettings(dict[str, Any]):
    """The settings of a rope, which know the names that a model has read."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.read = set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(super().keys())
        return super().__iter__()

    def items(self) -> Any:
        self.read.update(super().keys())
        return super().items()


Forms = list[RopeSettings]
"""The same rope in each place where a model may read it."""


@dataclass
class Ropes:
    """The ropes of a model in every form, and those that it must not overlook."""

    file: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings to put over those of config.json."""
    scaled: list[tuple[str, Forms]] = field(default_factory=list)
    """Each scaled rope, with its kind."""
    local: list[tuple[Any, Forms]] = field(default_factory=list)
    """Each rope of layers with a window that has a base of its own, with that base."""

    def check(self, model_class: Any) -> None:
        """Raise ModelError unless a model of `model_class`, which was built, has read them."""
        name = str(model_class.__module__).rpartition(".")[2]
        if not _has_setting(model_class, (*THETA, "rope_parameters")):
            return  # it does not rotate, or always in the same way
        for kind, forms in self.scaled:
            if not any(form.read - DESCRIPTIVE for form in forms):
                raise ModelError(
                    f"{self.file}: rope_type {kind!r:.40} scales the rotary positions, and "
                    f"mlx-lm's {name} does not read it: the answers would be wrong. Without the "
                    "scaling the model runs as far as it was trained before"
                )
        for theta, forms in self.local:
            if not any("rope_theta" in form.read for form in forms) and not _has_setting(
                model_class, LOCAL_THETA
            ):
                raise ModelError(
                    f"{self.file}: layers with a sliding window have the rope_theta {theta!r:.40}, "
                    f"and mlx-lm's {name} has one for all layers: the answers would be wrong"
                )


def _has_setting(model_class: Any, names: Container[str]) -> bool:
    """Return True if the arguments of a model or of its parts have a field of one of `names`."""
    module = sys.modules[model_class.__module__]
    modules = [module, *(one for one in vars(module).values() if isinstance(one, ModuleType))]
    classes = [one for place in modules for one in vars(place).values() if isinstance(one, type)]
    return any(one.name in names for kind in classes if is_dataclass(kind) for one in fields(kind))


def ropes_of(file: Path, config: Mapping[str, Any]) -> Ropes:
    """Return the ropes that `config`, read from `file`, describes, also in nested settings.

    Raise ModelError if it describes a rope in two ways that differ.
    """
    ropes = Ropes(file)
    completed = _completed(ropes, config)
    ropes.settings = {
        name: value for name, value in completed.items() if value is not config.get(name, ropes)
    }
    return ropes


def _completed(ropes: Ropes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with its rope in every form, and note it in `ropes`."""
    found = dict(config)
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and "vision" not in name:
            found[name] = _completed(ropes, value)
    parameters = _dict(config.get("rope_parameters"))
    layers = {kind: rope for kind, rope in parameters.items() if isinstance(rope, dict)}
    flat = {name: value for name, value in parameters.items() if name not in layers}
    main = {**flat, **(layers.get(FULL) or next(iter(layers.values()), {}))}
    rope = _merged(ropes.file, config, main)
    if not rope:
        return found
    theta, part = rope.get("rope_theta"), rope.get("partial_rotary_factor")
    local = _agreed(
        ropes.file,
        "rope_theta of layers with a sliding window",
        [*map(config.get, LOCAL_THETA), layers.get(SLIDING, {}).get("rope_theta")],
    )
    names = dict.fromkeys(THETA, theta) | dict.fromkeys(PARTIAL, part)
    names |= dict.fromkeys(LOCAL_THETA, local) | {ORIGINAL: rope.get(ORIGINAL)}
    if part is not None and type(config.get("head_dim")) is int:
        names["rotary_dim"] = int(config["head_dim"] * part)
    for name, value in names.items():
        if value is not None and found.get(name) is None:
            found[name] = value
    if isinstance(found.get("attn_config"), dict) and theta is not None:
        found["attn_config"] = {"rope_theta": theta, **found["attn_config"]}
    if local is not None:
        layers = {SLIDING: {"rope_theta": local}, **layers}
    _put(ropes, found, rope, {kind: {**flat, **layer} for kind, layer in layers.items()})
    return found


def _put(
    ropes: Ropes, found: dict[str, Any], rope: dict[str, Any], layers: dict[str, dict[str, Any]]
) -> None:
    """Put `rope`, and those of `layers`, into `found` as `rope_scaling` and `rope_parameters`."""
    kind, theta = rope["rope_type"], rope.get("rope_theta")
    scaling, parameters, layer = (RopeSettings(rope) for _ in range(3))
    kinds = [one for one in found.get("layer_types") or () if isinstance(one, str)]
    own = dict.fromkeys([FULL, SLIDING, *kinds], layer)
    for name, given in layers.items():
        whole = _with_kind(ropes.file, {"rope_theta": theta, **given})
        own[name] = layer if whole == rope else RopeSettings(whole)
    if kind not in PLAIN and not (kind == "linear" and rope.get("factor") == 1):
        found["rope_scaling"] = scaling
        ropes.scaled.append((kind, [scaling, parameters, layer, own[FULL]]))
    elif {*_dict(found.get("rope_scaling"))} <= DESCRIPTIVE:
        found["rope_scaling"] = None
    window = own[SLIDING]
    if window.get("rope_theta") != theta and (not kinds or SLIDING in kinds):
        ropes.local.append((window["rope_theta"], [window]))
        window.read.clear()
    if "rope_parameters" in found or found.get("model_type") not in HAS_DEFAULTS:
        parameters.update(own)
        found["rope_parameters"] = parameters


def _merged(file: Path, config: Mapping[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the rope of `config` whose `rope_parameters` are `parameters`; {} if it has none."""
    scaling = _dict(config.get("rope_scaling"))
    thetas = [*map(config.get, THETA), parameters.get("rope_theta"), scaling.get("rope_theta")]
    parts = [
        *map(config.get, PARTIAL),
        *(one.get("partial_rotary_factor") for one in (parameters, scaling)),
    ]
    named = {
        "rope_theta": _agreed(file, "rope_theta", thetas),
        "partial_rotary_factor": _agreed(file, "partial_rotary_factor", parts),
    }
    named = {name: value for name, value in named.items() if value is not None}
    if not named and not parameters and not scaling:
        return {}
    forms = [_with_kind(file, one) for one in (parameters, scaling) if one]
    scaled = [one for one in forms if one["rope_type"] not in PLAIN]
    for name in {*scaled[0]} & {*scaled[-1]} if scaled else ():
        _agreed(file, f"{name} of rope_scaling", [one[name] for one in scaled])
    rope = {name: value for one in (*forms, *scaled) for name, value in one.items()}
    rope = {**dict.fromkeys(KIND, "default"), **rope, **named}
    if rope["rope_type"] not in PLAIN and config.get(ORIGINAL) is not None:
        rope.setdefault(ORIGINAL, config[ORIGINAL])
    return rope


def _with_kind(file: Path, rope: dict[str, Any]) -> dict[str, Any]:
    """Return `rope` with its kind under both names."""
    kinds = ["longrope" if kind == "su" else kind for kind in map(rope.get, KIND) if kind]
    if not {*kinds} <= {*PLAIN}:
        _agreed(file, "rope_type", kinds)
    return {**rope, **dict.fromkeys(KIND, kinds[0] if kinds else "default")}


def _agreed(file: Path, name: str, values: list[Any]) -> Any:
    """Return the value of a setting that is in several places, or None.

    Raise ModelError if they differ.
    """
    given = [value for value in values if value is not None]
    for other in given[1:]:
        if other != given[0]:
            raise ModelError(
                f"{file}: {name} is both {given[0]!r:.60} and {other!r:.60}: keep the one that the "
                "model was trained with"
            )
    return given[0] if given else None


def _dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}

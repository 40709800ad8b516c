"""Share the weights of a model among the ranks of a group. Without a group, nothing happens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.pipeline import PipelineMixin

from mlxrunner.cache.layers.factory import make_layer_caches
from mlxrunner.cache.layers.full import FullAttentionCache
from mlxrunner.errors import ModelError
from mlxrunner.models.part import Part, check_part, own_part, take_part
from mlxrunner.models.part_reading import WeightFiles
from mlxrunner.system.foreign import foreign_code
from mlxrunner.system.mlx_lm_internals import cutting
from mlxrunner.terminal.text import one_line

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""The settings of config.json that each rank has an equal part of."""

_groups: list[mx.distributed.Group] = []


def share_among(group: mx.distributed.Group | None) -> None:
    """Share every model that this process loads from now on as its part says; None: no longer."""
    _groups[:] = [] if group is None else [group]


def be_rank(part: Part) -> None:
    """Download, check and load only `part` of each model from now on."""
    take_part(part, check_shares)


def is_sharing() -> bool:
    """Return True if a model that is loaded now would be shared."""
    return bool(_groups)


def check_shares(folder: Path, config: dict[str, Any], part: Part) -> None:
    """Raise ModelError, with the name of the architecture, unless ranks can share it as `part`."""
    from mlx_lm.utils import _get_classes

    kind, ranks, way = config["model_type"], part.ranks, part.way
    try:
        with foreign_code():
            model = _get_classes(config)[0]
        known = hasattr(model, "shard") if way == "tensor-parallel" else _has_pipeline(model)
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


def _has_pipeline(model: type) -> bool:
    """Return True if the layers of `model` are in a class that can share them."""
    classes = vars(sys.modules[model.__module__]).values()
    return any(
        isinstance(one, type) and one is not PipelineMixin and hasattr(one, "pipeline")
        for one in classes
    )


def share(folder: Path, model: Any, config: dict[str, Any], files: WeightFiles) -> None:
    """Keep only this rank's part of `model`, whose weights are not read yet.

    The parts of tensors that `files` has seen are read. Raise ModelError if a file can't be read,
    if the model can't be shared, or if a layer can't be rewound by itself.
    """
    for group in _groups:
        part = own_part()
        assert part is not None
        check_part(folder, config)
        if not all(type(cache) is FullAttentionCache for cache in make_layer_caches(model)):
            raise ModelError(
                f"{folder}: the architecture {config['model_type']!r:.80} has layers other than "
                "full attention, which several ranks can't keep equal"
            )
        try:
            if part.way == "pipeline":
                model.model.pipeline(group)
            else:
                with cutting(files.part):
                    model.shard(group)
        except ValueError as error:  # a tensor whose sides do not follow from DIVIDED
            raise ModelError(
                f"{folder}: {group.size()} ranks can't share it equally: {one_line(str(error))}"
            ) from error

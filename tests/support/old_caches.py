"""The one file that version 0.2 wrote for the caches of a session. The program reads it still."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from mlxrunner.cache.disk.pieces import LazyArray, Packer
from mlxrunner.cache.saved import Exported
from mlxrunner.sessions.store import CACHE
from mlxrunner.system.folders import Folder
from mlxrunner.system.tensorfile import write


def write_old(
    session: Path,
    entry: Exported,
    fingerprint: Mapping[str, str],
    bits: int | None = None,
    pictures: Mapping[str, Sequence[int]] | None = None,
) -> Path:
    """Write an entry into the folder `session` as version 0.2 did, in place of its pieces."""
    packer = Packer(bits)
    packer.arrays["tokens"] = LazyArray(mx.array(entry.tokens))
    structure = {
        "is_exact": entry.is_exact and bits is None,
        "layers": [
            packer.layer(f"layers.{index}", layer) for index, layer in enumerate(entry.layers)
        ],
        "checkpoints": [
            {
                "offset": item.offset,
                "role": item.role,
                "layers": [
                    None if layer is None else packer.layer(f"checkpoints.{place}.{index}", layer)
                    for index, layer in enumerate(item.layers)
                ],
            }
            for place, item in enumerate(entry.checkpoints)
        ],
    }
    metadata = {"entry": structure, "fingerprint": dict(fingerprint)}
    if pictures:
        metadata["pictures"] = dict(pictures)
    for piece in session.glob("*-*.safetensors"):
        piece.unlink()
    texts = {name: json.dumps(one) for name, one in metadata.items()}
    with Folder(session) as folder:
        folder.write(CACHE, lambda fd: write(fd, packer.arrays, texts))
    return session / CACHE

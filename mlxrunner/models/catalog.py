"""List the models in the local hub cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlxrunner.errors import ModelError


@dataclass(frozen=True)
class CachedModel:
    """A downloaded model that can be run."""

    name: str
    nbytes: int
    """Bytes on disk."""
    folder: Path


def cached_models() -> list[CachedModel]:
    """List the repositories of the hub cache with a config.json and safetensors, sorted by name.

    Raise ModelError if the hub cache can't be read.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    except ValueError as error:
        raise ModelError(f"the hub cache can't be read: {error}") from error
    found = []
    for repository in repositories:
        # The revision that the name stands for comes first.
        for revision in sorted(
            repository.revisions, key=lambda revision: "main" not in revision.refs
        ):
            names = {file.file_name for file in revision.files}
            if (
                repository.repo_type == "model"
                and "config.json" in names
                and any(n.endswith(".safetensors") for n in names)
            ):
                found.append(
                    CachedModel(repository.repo_id, revision.size_on_disk, revision.snapshot_path)
                )
                break
    return sorted(found, key=lambda model: model.name)

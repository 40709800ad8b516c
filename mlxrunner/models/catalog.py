"""List the models in the local hub cache, with their last use, and remove them.

The file system says when a file was last read, but a backup reads it, too, and many disks do not
keep that time. Therefore the program notes each loading itself, as the time of an empty file.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mlxrunner.errors import ModelError, OptionError
from mlxrunner.models.download import is_being_downloaded, storage_of
from mlxrunner.models.resolve import HUB_ID
from mlxrunner.system.folders import cache_folder
from mlxrunner.system.writing import open_own


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
    except (ValueError, RuntimeError) as error:
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


def _note_of(name: str) -> Path:
    return cache_folder() / "used" / storage_of(name).name


def remember_use(name: str) -> None:
    """Note that the model `name` is loaded now. Do nothing if that can't be written."""
    with suppress(OSError, RuntimeError):
        note = _note_of(name)
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = open_own(note)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)


def last_use(name: str) -> float | None:
    """Return when this program last loaded the model `name`, in seconds since 1970.

    Return None if it never did.
    """
    with suppress(OSError, RuntimeError):
        return _note_of(name).lstat().st_mtime
    return None


def must_be_removable(name: str) -> None:
    """Raise OptionError unless `name` is a repository in the hub cache that can be removed."""
    folder = storage_of(name)
    if not HUB_ID.fullmatch(name):
        raise OptionError(
            f"{name}: not a model of the hub cache; remove a directory of your own yourself"
        )
    if folder.is_symlink():
        raise OptionError(f"{name}: {folder} is a link: remove what it leads to yourself")
    if not folder.is_dir():
        raise OptionError(f"{name}: not in the hub cache, {folder.parent}")
    if is_being_downloaded(name):
        raise OptionError(f"{name}: is being downloaded: wait for the end of that process")


def removable_bytes(name: str) -> int:
    """Return the bytes on disk of every revision of `name`, and of what is not whole yet."""
    return _bytes_in(storage_of(name))


def remove(name: str) -> int:
    """Remove the repository `name` from the hub cache, and return the bytes that became free.

    A process that has loaded the model keeps it. Raise OptionError if it can't be removed.
    """
    must_be_removable(name)
    folder = storage_of(name)
    shared = folder.parent / "blobs"  # huggingface_hub keeps files of several repositories there
    before = _bytes_in(folder) + _bytes_in(shared)
    try:
        _remove_revisions(name)
        if folder.exists():
            shutil.rmtree(folder)
        shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)
    except OSError as error:
        raise OptionError(f"{name}: can't be removed: {error}") from error
    with suppress(OSError, RuntimeError):
        _note_of(name).unlink()
    return before - _bytes_in(folder) - _bytes_in(shared)


def _remove_revisions(name: str) -> None:
    """Remove the whole revisions of `name` as huggingface_hub does."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with suppress(CacheNotFound, ValueError):
        found = scan_cache_dir()
        # A copy of a repository has the same commits, so the others are left out of sight.
        own = {one for one in found.repos if one.repo_type == "model" and one.repo_id == name}
        commits = [revision.commit_hash for one in own for revision in one.revisions]
        replace(found, repos=frozenset(own)).delete_revisions(*commits).execute()


def _bytes_in(folder: Path) -> int:
    return sum(_sizes(folder)) if folder.is_dir() and not folder.is_symlink() else 0


def _sizes(folder: Path) -> Iterable[int]:
    """Yield the size of each regular file below `folder`; links lead nowhere."""
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(place, name))
                if stat.S_ISREG(status.st_mode):
                    yield status.st_size

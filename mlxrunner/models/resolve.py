"""Find a model by its name (demo, a directory, a hub id, a short name); list and remove models.

The file system says when a file was last read, but a backup reads it, too, and many disks do not
keep that time. Therefore the program notes each loading itself, as the time of an empty file.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mlxrunner.config.names import hub_id_of, suggestion_for
from mlxrunner.errors import ModelError, NoSuchModelError, OptionError, reason
from mlxrunner.models.download import (
    CODE,
    SETTINGS,
    Tell,
    download,
    in_turn,
    is_being_downloaded,
    storage_of,
    tell_nobody,
)
from mlxrunner.models.files import (
    GGUF,
    INDEX,
    WEIGHTS,
    check_shard,
    check_weights,
    own_shard,
    read_config,
    weight_patterns,
)
from mlxrunner.options import EMBEDDED
from mlxrunner.system.folders import cache_folder
from mlxrunner.system.reading import is_there
from mlxrunner.system.writing import open_own

DEMO_FOLDER = Path(__file__).parent / "demo"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def name_of(model: str | os.PathLike[str]) -> str:
    """Return the text that names `model`. Raise ModelError for anything but a text or a path."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    raise ModelError(f"{model!r:.80} names no model: give 'demo', a directory or a hub id")


def resolve(name: str, *, with_code: bool = False) -> Path:
    """Return the directory of model `name`: one of EMBEDDED, a directory, a hub id or a short name.

    A model that is not in the hub cache is downloaded; `with_code` needs its Python files, too.
    Raise ModelError if there is no such model.
    """
    if name in EMBEDDED:
        return DEMO_FOLDER.with_name(name.replace("-", "_"))
    shown = name if name.strip() and name.isprintable() and len(name) < 300 else f"{name[:300]!r}"
    try:
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
        if name and folder.exists():
            is_gguf = folder.suffix.lower() == ".gguf"
            other = "is a file; name the directory that holds config.json and the weights"
            raise ModelError(f"{shown}: {GGUF if is_gguf else other}")
    except (
        OSError,
        RuntimeError,
    ) as error:  # a name too long, or the home of an unknown user
        raise ModelError(f"{shown}: not a usable path: {reason(error)}") from error
    if name.lower().endswith(".gguf"):
        raise ModelError(f"{shown}: {GGUF}")
    if name.startswith((".", "/", "~")):
        raise NoSuchModelError(f"{shown}: no such model: no directory has this name")
    if HUB_ID.fullmatch(repository := hub_id_of(name)):
        return _from_hub(repository, with_code)
    raise NoSuchModelError(
        f"{shown}: no such model: {suggestion_for(name)}a model is a directory, a hub id "
        f"(owner/name), {' or '.join(map(repr, EMBEDDED))}, or a name that `mlxrunner models "
        "--known` lists"
    )


def folder_if_here(name: str) -> Path | None:
    """Return the directory of a model on this machine, complete or not, and download nothing."""
    if name in EMBEDDED:
        return DEMO_FOLDER.with_name(name.replace("-", "_"))
    with suppress(OSError, RuntimeError, ValueError):
        folder = Path(name).expanduser()
        if name and folder.is_dir():
            return folder
    name = hub_id_of(name)
    if not HUB_ID.fullmatch(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    with suppress(Exception):  # a name that the hub does not allow
        found = try_to_load_from_cache(name, "config.json")
        if isinstance(found, str):
            return Path(found).parent
    return None


def lasting(name: str) -> str:
    """Return a name that is valid in every working directory: the full path of a directory.

    Other names are returned unchanged.
    """
    try:
        folder = Path(name).expanduser()
        return str(folder.resolve()) if name not in EMBEDDED and folder.is_dir() else name
    except (OSError, RuntimeError):  # not a path: `resolve` reports it
        return name


def _from_hub(name: str, with_code: bool) -> Path:
    """Return a model from the local hub cache if it is complete there, else download it.

    A rank downloads what it needs, once the model is known to be one that ranks can share.
    """
    part = own_shard()
    cached, partial = _cached(name, with_code, () if part is not None else (WEIGHTS,))
    if cached is None and partial is not None and is_there(partial / INDEX):
        cached, _ = _cached(name, with_code, ())  # the index says which weights are needed
    if cached is not None and _is_whole(cached):
        return cached
    if part is None:
        return pull(name, with_code=with_code, partial=partial)
    with in_turn(name):
        folder = pull(name, with_code=with_code, partial=cached or partial, weights=())
        check_shard(folder, read_config(folder))
        needed = weight_patterns(folder)
        return pull(name, with_code=with_code, partial=folder, weights=needed)


def _cached(name: str, with_code: bool, weights: Sequence[str]) -> tuple[Path | None, Path | None]:
    """Return the folder of a model in the local hub cache, and else the folder of a part of it.

    Only settings and files of the patterns `weights` are looked for.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    patterns = [*SETTINGS, *weights, *([CODE] if with_code else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True)), None
    except LocalEntryNotFoundError as error:
        # Set if files of the repository are missing. They may be files that the model does not
        # need.
        found = getattr(error, "snapshot_path", None)
        return None, Path(found) if found is not None else None
    except HFValidationError as error:
        raise NoSuchModelError(f"{name}: not a valid hub id: {reason(error)}") from error


def pull(
    name: str,
    *,
    with_code: bool = False,
    weights: Sequence[str] | None = None,
    partial: Path | None = None,
    tell: Tell = tell_nobody,
) -> Path:
    """Download the present revision of a model of the hub, and return its directory.

    `with_code` downloads its Python files, too. `weights` are the patterns of the weight files that
    are needed; None: those that its index names. `tell` is told how far each file is. `partial` is
    the directory of a part that is in the hub cache; it is returned if the hub can't be reached and
    all that is needed is there. Raise ModelError if the model can't be downloaded.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if not HUB_ID.fullmatch(name):
        raise not_a_hub_id(name)
    try:
        return download(name, with_code=with_code, weights=weights, tell=tell)
    except ModelError:
        raise
    except HFValidationError as error:
        raise NoSuchModelError(f"{name}: not a valid hub id: {reason(error)}") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{name}: access is restricted: accept its terms on the hub, then log in with `hf auth "
            "login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise NoSuchModelError(
            f"{name}: no such repository on the hub (or a private one: `hf auth login`)"
        ) from error
    except LocalEntryNotFoundError as error:
        if partial is not None and _is_whole(partial):
            return partial
        part, cause = (
            "not" if partial is None else "only in part",
            reason(error.__cause__ or error),
        )
        raise ModelError(
            f"{name}: {part} in the local cache, and the hub can't be reached: {cause}; "
            "go online and try again"
        ) from error
    except Exception as error:  # HTTP errors, a full disk, or an answer changed by a proxy
        raise ModelError(f"{name}: the download failed: {reason(error)}") from error


def not_a_hub_id(name: str) -> NoSuchModelError:
    """Return the error about a name that has not the form of a hub id."""
    return NoSuchModelError(
        f"{name[:300]!r}: not a hub id, which has the form OWNER/NAME: {suggestion_for(name)}"
        "`mlxrunner models --known` lists short names"
    )


def _is_whole(folder: Path) -> bool:
    """Return True if `folder` holds the configuration and all weights."""
    try:
        read_config(folder)
        check_weights(folder)
    except ModelError:
        return False
    return True


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
    """Note that the model `name` is loaded now, if it is one of the hub.

    Do nothing if that can't be written.
    """
    if not HUB_ID.fullmatch(name) or Path(name).is_dir():
        return
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
        raise OptionError(f"{name}: {folder} is a link: remove its target yourself")
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

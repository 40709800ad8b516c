"""Find the files of a data set: in a folder that `datasets` or a hub has written, or on the hub.

Only Parquet and Arrow files are read, never a script: no code of a data set runs.
"""

from __future__ import annotations

import re
from pathlib import Path

from mlxrunner.errors import PromptError, ReadError
from mlxrunner.system.reading import read_json

HUB = "hf://datasets/"
"""The beginning of the name of a data set on the hub."""
_HUB_NAME = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?")
_SHARD = re.compile(r"(.+?)-\d{1,6}-of-\d{1,6}")
LARGEST = 2**24
"""The most bytes of a JSON file that describes a data set."""


def dataset_files(folder: Path) -> list[Path] | None:
    """Return the files of the data set in `folder`, in order; None if there is none.

    Raise PromptError if the folder has several splits, or does not have what it describes.
    """
    if (splits := _described(folder / "dataset_dict.json", "splits")) is not None:
        names = [name for name in splits if isinstance(name, str) and Path(name).name == name]
        if len(names) != 1:
            listed = ", ".join(str(folder / name) for name in names)
            raise PromptError(f"{folder}: has {len(names)} splits: name one of them: {listed}")
        return dataset_files(folder / names[0])
    if (listed_files := _described(folder / "state.json", "_data_files")) is not None:
        files = [one.get("filename") for one in listed_files if isinstance(one, dict)]
        if any(not isinstance(name, str) or Path(name).name != name for name in files):
            raise PromptError(f"{folder / 'state.json'}: names files outside of the folder")
        return [folder / str(name) for name in files]
    shards = sorted(folder.rglob("*.parquet")) or sorted(folder.glob("*.arrow"))
    return _one_split(folder, shards) if shards else None


def _described(file: Path, name: str) -> list[object] | None:
    """Return the list `name` in a JSON file; None if there is no such file."""
    if not file.is_file():
        return None
    try:
        found = read_json(file, LARGEST)
    except ReadError as error:
        raise PromptError(str(error)) from error
    listed = found.get(name) if isinstance(found, dict) else None
    if not isinstance(listed, list):
        raise PromptError(f"{file}: has no list {name!r}: was it written by datasets.save_to_disk?")
    return listed


def _one_split(folder: Path, shards: list[Path]) -> list[Path]:
    """Return the shards. Raise PromptError if they are those of several splits."""
    splits = {_split(file): file for file in shards}
    if len(splits) > 1:
        which = sorted(f"{split}*" for split in splits)
        raise PromptError(
            f"{folder}: has the files of {len(splits)} splits or parts: name those of one, such as "
            f"{which[0]}"
        )
    return shards


def _split(file: Path) -> str:
    """Return the path of a shard without its number and its end."""
    match = _SHARD.fullmatch(file.stem)
    return str(file.parent / (match[1] if match else file.stem))


def from_hub(name: str) -> list[Path]:
    """Return the Parquet files of a data set on the hub: those of the local cache, or downloaded.

    `name` is hf://datasets/OWNER/NAME, with @REVISION and /PATH in the repository if it has several
    splits. Raise PromptError if it can't be read.
    """
    found = _HUB_NAME.fullmatch(name)
    if found is None:
        raise PromptError(f"{name}: has to be {HUB}OWNER/NAME[@REVISION][/PATH]")
    repository, revision, path = found.groups()
    pattern = "*.parquet" if path is None else path.rstrip("/")
    patterns = [pattern] if pattern.endswith(".parquet") else [f"{pattern}/*.parquet"]
    folder = _snapshot(name, repository, revision, patterns)
    if path is None:
        shards = sorted(folder.rglob("*.parquet"))
    else:
        shards = sorted(
            file for one in patterns for file in folder.glob(one.replace("/*", "/**/*"))
        )
    if not shards:
        raise PromptError(f"{name}: has no Parquet files there (data set scripts are never run)")
    return shards if path and path.endswith(".parquet") else _one_split(Path(name), shards)


def _snapshot(name: str, repository: str, revision: str | None, patterns: list[str]) -> Path:
    """Return the folder of the files on the hub, downloaded if the local cache lacks them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repository, repo_type="dataset", revision=revision, allow_patterns=patterns
        )
    except LocalEntryNotFoundError as error:
        folder = str(getattr(error, "snapshot_path", None) or "")
        if not folder:
            cause = " ".join(str(error.__cause__ or error).split())[:300]
            raise PromptError(
                f"{name}: not in the local cache, and the hub can't be reached: {cause}"
            ) from error
    except Exception as error:  # HTTP errors, a full disk, a name that is not valid
        why = " ".join(str(error).split())[:300]
        raise PromptError(f"{name}: the download failed: {why}") from error
    return Path(folder)

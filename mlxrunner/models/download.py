"""Download a model of the hub into the hub cache, with progress, and resume one that was cut off.

The files come through huggingface_hub. It deletes what a cut-off download has got of a file;
therefore this module fetches each file into a partial file of its own, and gives that the name
under which huggingface_hub looks for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from mlxrunner.errors import ModelError
from mlxrunner.models.files import INDEX, WEIGHTS, index_in, weights_among
from mlxrunner.system.writing import open_own
from mlxrunner.terminal.output import Progress, duration, one_line, size

SETTINGS = (
    "*.json",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
"""Files of a repository that are downloaded beside the weights: tokenizer, settings, templates."""
CODE = "*.py"
"""Files that are downloaded in addition for --trust-remote-code."""
PARTIAL = ".mlxrunner.incomplete"
"""Suffix of a file that is not whole yet."""
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
BLOCK = 2**24


@dataclass(frozen=True)
class HubFile:
    """A file of a repository."""

    path: str
    nbytes: int
    blob: Path
    """The path of its bytes in the hub cache."""
    is_large: bool
    """True if its name in the cache is the SHA-256 digest of its bytes.

    Only such a file continues where it was cut off, because its bytes can be checked.
    """

    @property
    def partial(self) -> Path:
        """The path of what came before a download was cut off."""
        return self.blob.with_name(self.blob.name + PARTIAL)

    @property
    def present(self) -> int:
        """Bytes of it that are on the disk."""
        if self.blob.exists():
            return self.nbytes
        try:
            return min(self.partial.lstat().st_size, self.nbytes) if self.is_large else 0
        except OSError:
            return 0


def storage_of(name: str) -> Path:
    """Return the folder of repository `name` in the hub cache; it may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{name.replace('/', '--')}"


def repositories() -> list[str]:
    """List the models in the hub cache by their folders, whole or not, sorted by name."""
    from huggingface_hub import constants

    found = Path(constants.HF_HUB_CACHE).expanduser().glob("models--*--*")
    return sorted(folder.name.split("--", 1)[1].replace("--", "/", 1) for folder in found)


Tell = Callable[[str, int, int], None]
"""A function that is told of a file's name, its bytes that are on the disk, and all its bytes.

What it raises ends the download.
"""


def tell_nobody(file: str, present: int, whole: int) -> None:
    """Do nothing."""


@contextmanager
def in_turn(name: str) -> Iterator[None]:
    """Wait until no other process of this machine is in this block for the repository `name`.

    Raise ModelError if the hub cache can't be written to.
    """
    folder = storage_of(name)
    lock = folder.parent / ".locks" / folder.name / "mlxrunner.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(lock)
    except OSError as error:
        raise ModelError(f"{name}: can't be downloaded: {lock}: {error.strerror}") from error
    with os.fdopen(descriptor, "r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            Progress().say(f"waiting for another process, which downloads {name}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def download(
    name: str,
    *,
    with_code: bool = False,
    weights: Sequence[str] | None = None,
    tell: Tell = tell_nobody,
) -> Path:
    """Download the present revision of the repository `name`, and return its folder.

    Check the disk first. Skip the files that are in the hub cache, and resume a file that was
    cut off. Raise ModelError if the disk is too small, or if the download fails; what came is kept.
    `with_code` downloads Python files, too. `weights` are the patterns of the weight files that are
    needed; None: those that the weight index names, or all without one. `tell` is told how far each
    file is. Errors of huggingface_hub that concern the whole repository come as they are.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented
        disable_progress_bars,
    )

    commit, files = "", list[HubFile]()
    with suppress(Exception):  # snapshot_download meets the same error, and knows its meaning
        commit, files = _listed(name)
    if weights is None:
        weights = _by_index(name, commit, files, tell)
    patterns = (*SETTINGS, *weights, *((CODE,) if with_code else ()))
    chosen = [file for file in files if any(fnmatch(file.path, one) for one in patterns)]
    _fetch(name, commit, chosen, tell)
    with disable_progress_bars():
        return Path(snapshot_download(name, allow_patterns=list(patterns)))


def _by_index(name: str, commit: str, files: Sequence[HubFile], tell: Tell) -> list[str]:
    """Return the patterns of the weight files to download, by the weight index of a repository."""
    index = next((file for file in files if file.path == INDEX), None)
    if index is None:
        return [WEIGHTS]
    _fetch(name, commit, [index], tell)
    return weights_among({file.path for file in files}, index_in(index.blob))


def _listed(name: str) -> tuple[str, list[HubFile]]:
    """Return the commit of the present revision, and its files."""
    from huggingface_hub import HfApi, RepoFile, constants

    api, blobs = HfApi(), storage_of(name) / "blobs"
    commit = api.model_info(name).sha or ""
    found = []
    for file in api.list_repo_tree(name, recursive=True, revision=commit):
        if not isinstance(file, RepoFile):
            continue
        digest = file.lfs.sha256 if file.lfs else file.blob_id
        nbytes = file.lfs.size if file.lfs else file.size
        if DIGEST.fullmatch(digest) and nbytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            found.append(HubFile(file.path, nbytes, blobs / digest, file.lfs is not None))
    return commit, found


def _fetch(name: str, commit: str, files: Sequence[HubFile], tell: Tell) -> None:
    missing = [file for file in files if not file.blob.exists()]
    if not missing:
        return
    must_have_disk(name, sum(file.nbytes - file.present for file in missing), missing[0].blob)
    progress = DownloadProgress(files, tell)
    try:
        for file in missing:
            _fetch_file(name, commit, file, progress)
    except KeyboardInterrupt:
        progress.close()
        progress.say(f"stopped: {_kept(files)}; the same command resumes")
        raise
    except ModelError:
        raise
    except Exception as error:  # the network, the hub, or the disk
        why = one_line(" ".join(str(error).split()), 300) or type(error).__name__
        raise ModelError(
            f"{name}: the download failed: {why}; {_kept(files)}: try again to resume"
        ) from error
    finally:
        progress.close()


def _kept(files: Sequence[HubFile]) -> str:
    whole = sum(file.nbytes for file in files)
    return f"{size(sum(file.present for file in files))} of {size(whole)} are on the disk"


def must_have_disk(name: str, nbytes: int, place: Path) -> None:
    """Raise ModelError if the disk that has `place` has less than `nbytes` left."""
    folder = next(folder for folder in place.parents if folder.exists())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ModelError(
            f"{name}: {size(nbytes)} have to be downloaded, and {size(free)} are free in {folder}: "
            f"free {size(nbytes - free)}, or set HF_HOME to a folder on a larger disk"
        )


def _fetch_file(name: str, commit: str, file: HubFile, progress: DownloadProgress) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented

    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with _locked(name, file) as stream, _without_hub_log():
        before = stream.seek(0, os.SEEK_END)
        if before > file.nbytes or not file.is_large:  # only a large file can be checked
            before = stream.seek(0)
            stream.truncate()
        http_get(
            hf_hub_url(name, file.path, revision=commit),
            stream,
            resume_size=before,
            headers=build_hf_headers(),
            expected_size=file.nbytes,
            displayed_filename=file.path,
            tqdm_class=partial(_Bar, progress.of(file)),  # type: ignore[arg-type]  # called only
        )
        stream.flush()
        if before:
            _check_digest(name, file, stream)
        os.fchmod(stream.fileno(), file.blob.parent.stat().st_mode & 0o666)
        os.replace(file.partial, file.blob)
    progress.say(f"{file.path}: {size(file.nbytes)}")


@contextmanager
def _locked(name: str, file: HubFile) -> Iterator[BinaryIO]:
    """Yield the partial file, which no other process may write to meanwhile."""
    with os.fdopen(open_own(file.partial), "r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelError(
                f"{name}: another process is downloading it: wait for its end, then try again"
            ) from error
        yield stream


def is_being_downloaded(name: str) -> bool:
    """Return True if a process is downloading the repository `name` now."""
    for file in (storage_of(name) / "blobs").glob(f"*{PARTIAL}"):
        with suppress(OSError), os.fdopen(open_own(file, make=False), "r+b") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _check_digest(name: str, file: HubFile, stream: BinaryIO) -> None:
    """Raise ModelError if a file that came in several parts is not what the hub has.

    Remove it then, because continuing from it would not help.
    """
    digest = hashlib.sha256()
    stream.seek(0)
    while block := stream.read(BLOCK):
        digest.update(block)
    if digest.hexdigest() != file.blob.name:
        file.partial.unlink()
        raise ModelError(
            f"{name}: {file.path} came damaged: its SHA-256 digest is {digest.hexdigest()[:12]}... "
            f"and the hub names {file.blob.name[:12]}...: try again"
        )


@contextmanager
def _without_hub_log() -> Iterator[None]:
    """Keep the warnings of huggingface_hub about connections that it opens again off the screen."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class DownloadProgress(Progress):
    """The bytes of a file, and of all files, that are on the disk."""

    def __init__(self, files: Sequence[HubFile], tell: Tell = tell_nobody) -> None:
        super().__init__(line_every_s=5.0)
        self._tell = tell
        self._bytes = {file.path: file.present for file in files}
        self._whole = sum(file.nbytes for file in files)
        self._before, self._start = self._present, time.monotonic()

    @property
    def _present(self) -> int:
        return sum(self._bytes.values())

    def of(self, file: HubFile) -> Callable[[int], None]:
        """Return a function that shows how many bytes of `file` are on the disk."""

        def show(nbytes: int) -> None:
            self._bytes[file.path] = nbytes
            self._tell(file.path, nbytes, file.nbytes)
            self.update(lambda: self._line(file), self._present, self._whole)

        return show

    def _line(self, file: HubFile) -> str:
        """Return the line that is shown while `file` comes."""
        present = self._present
        text = (
            f"{file.path}: {size(self._bytes[file.path])} of {size(file.nbytes)}; "
            f"in all {size(present)} of {size(self._whole)}"
        )
        rate = (present - self._before) / max(time.monotonic() - self._start, 1e-3)
        if rate <= 0:
            return text
        return f"{text}, {size(rate)}/s, {duration((self._whole - present) / rate)} left"


class _Bar:
    """Stands for the bar of tqdm that huggingface_hub would draw for a file."""

    def __init__(self, show: Callable[[int], None], *, initial: int = 0, **_: Any) -> None:
        self._show, self._nbytes = show, initial
        show(initial)

    def update(self, nbytes: int = 1) -> None:
        self._nbytes += nbytes
        self._show(self._nbytes)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None: ...

"""Write conversations of one model to disk, and bring back the one that a prompt continues.

What conversations share is stored once. Within the limit, those that are cheap to evaluate again
for their bytes go first (`mlxrunner.cache.eviction`). The files are described in
`mlxrunner.cache.disk.index`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlxrunner.cache.disk.index import (
    DiskCacheIndex,
    EntryForm,
    OnEvicted,
    StoredConversation,
    digests,
    file_name,
    read_conversation,
)
from mlxrunner.cache.disk.pieces import (
    DividedLayers,
    PieceFile,
    PieceReader,
    Pieces,
    RestoredEntry,
    completed,
    head_file,
    is_piece,
    piece_files,
)
from mlxrunner.cache.entry import CacheEntry
from mlxrunner.cache.layers.protocol import Exported, Saved, SavedCheckpoint
from mlxrunner.cache.layers.protocol import outline as outlined
from mlxrunner.cache.prefix_index import NAME, PrefixIndex
from mlxrunner.cache.tokens import TokenArray
from mlxrunner.errors import MlxrunnerError, SessionError
from mlxrunner.pictures.table import PictureNames, PictureTable
from mlxrunner.system.folders import Folder, cache_folder
from mlxrunner.system.tensorfile import ArraySource

FILE = re.compile(r"\.?(rows|state|talk)-[0-9a-f]{32}(-\d{1,9}){1,2}\.safetensors(\.new)?")
"""The names of this module's files. Whatever else is in the folder is left alone."""
MOMENT_S = 1e-3
"""Seconds for which a thread that writes is waited for at a time."""
COPIED = 2**25
"""Bytes of copied arrays from which on they are written before others are copied."""
FAILURES = (OSError, MlxrunnerError, ValueError, TypeError, RuntimeError, MemoryError)
"""Errors that cost the conversation that is written, and nothing else."""

logger = logging.getLogger("mlxrunner")


def form_of(
    entry: CacheEntry, exported: Exported, layers: DividedLayers, pictures: PictureNames
) -> EntryForm:
    """Return what names the files of an entry."""
    checkpoints = exported.checkpoints if layers.can_be_cut else []
    return EntryForm(
        exported.tokens,
        [cache.extent for cache in entry.caches],
        [(item.offset, item.role) for item in checkpoints],
        layers.has_rows,
        layers.has_only_rows,
        layers.can_be_cut,
        exported.is_exact,
        pictures.spelled(exported.tokens),
    )


def form_up_to(form: EntryForm, end: int, checkpoints: Sequence[SavedCheckpoint]) -> EntryForm:
    """Return the form of the first `end` tokens of an entry, with these checkpoints."""
    return replace(
        form,
        tokens=form.tokens[:end],
        spelled=form.spelled[:end],
        checkpoints=[(item.offset, item.role) for item in checkpoints],
    )


class DiskCache:
    """Conversations of one model on disk, each found by its tokens.

    All methods belong to the thread that owns the model.
    """

    def __init__(
        self,
        folder: Path | None,
        fingerprint: Mapping[str, str],
        *,
        limit: int,
        daily: int = 0,
        outline: Sequence[Saved] | None = None,
        on_evicted: OnEvicted = lambda conversation: None,
        pictures: PictureNames | None = None,
    ) -> None:
        """Open the cache in `folder`, and find again what is there.

        Each model has a folder of its own in it. None: a private folder, which goes with this
        process. `fingerprint`: that of the model, with all settings that decide what its layers
        store. `limit`: most bytes of all files. `daily`: see `daily_bytes`. `outline`: what
        `fingerprint` is completed by and restored layers are compared with, if it is given.
        `on_evicted` is told which conversation was evicted. `pictures`: those of a model that sees.
        Raise SessionError if the folder can't be used.
        """
        format_ = None if outline is None else [outlined(layer) for layer in outline]
        described = json.dumps([dict(fingerprint), format_], sort_keys=True).encode()
        self._seed = digests(described, np.empty(0, np.int32), [0])[0].encode()
        self._outline, self._pictures = outline, pictures or PictureNames(PictureTable())
        self._place = (
            private_folder() if folder is None else kept_folder(folder, self._seed[:16].decode())
        )
        self._index = DiskCacheIndex(self._place.folder.remove, limit, on_evicted)
        self._said = ""
        self.daily_bytes = 0 if self._place.is_private else daily
        """Most bytes that conversations that stay in memory are to write in a day; 0: none are.

        Those in a private folder would be lost with it.
        """
        self.written = 0
        """Bytes of all files that were written since it was opened."""
        self._writers: dict[str, threading.Thread] = {}
        """The threads that write, by the name of each file."""
        self._read_all()

    def tell(self, on_evicted: OnEvicted) -> None:
        """Call `on_evicted` from now on with each conversation that is evicted."""
        self._index.on_evicted = on_evicted

    @property
    def folder(self) -> Path:
        return self._place.folder.path

    @property
    def is_kept(self) -> bool:
        """True if the conversations are found again after a restart."""
        return not self._place.is_private

    @property
    def limit(self) -> int:
        """Most bytes of all files."""
        return self._index.limit

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return self._index.bytes

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, conversation: object) -> bool:
        """Return True if `conversation` is still there."""
        return conversation in self._index

    def prefixes(self) -> PrefixIndex:
        """Return the index of what was evaluated, kept beside the conversations.

        It has these, too, also if its file was lost. It goes with this process if they do.
        """
        file = self.folder / NAME if self.is_kept else None
        found = PrefixIndex(file, spelled=self._pictures.spelled)
        for one in self._index:
            if one.is_exact:
                found.add(found.fingerprints(one.tokens)[0], is_here=False)
        return found

    def offload(
        self, entry: CacheEntry, *, replaces: StoredConversation | None = None
    ) -> StoredConversation | None:
        """Write what the disk lacks of a settled entry, and return its conversation.

        Earlier states of this conversation are dropped: all but their last few tokens are in the
        entry, and `replaces` names them, or they were restored, or the entry can be resumed
        wherever they can. An entry that can't be written is None, and one line of the log.
        """
        return completed(self.offloading(entry, replaces))

    def offloading(
        self, entry: CacheEntry, replaces: StoredConversation | None = None
    ) -> Generator[bool, None, StoredConversation | None]:
        """Write an entry as `offload` does. Yield after each array, and True while a thread writes.

        The entry must not change meanwhile. If the iterator is closed, nothing was written.
        """
        return self._settling(self._offloading(entry), replaces)

    def saving(
        self, entry: CacheEntry, upto: int, replaces: StoredConversation | None = None
    ) -> Generator[bool, None, StoredConversation | None]:
        """Write the first `upto` tokens of an exact entry, which stays in memory.

        It writes the rows that the disk lacks and one copy of the states and windows, those after
        `upto` tokens or at the last checkpoint before. Yield as `offloading` does. The entry may
        grow meanwhile, but what it has must not change. Earlier states are dropped as `offload`
        does.
        """
        return self._settling(self._saving(entry, upto), replaces)

    def lacks(self, tokens: TokenArray) -> int:
        """Return how many tokens of an exact conversation no file has."""
        return len(tokens) - self._index.closest(tokens)[1]

    def find(self, prompt: TokenArray) -> tuple[StoredConversation, int] | None:
        """Return the conversation from which `prompt` can reuse most tokens, and how many.

        Only offsets at which it can be resumed count. None if there is no such token.
        """
        return self._index.find(prompt)

    def restore(self, conversation: StoredConversation, upto: int | None = None) -> RestoredEntry:
        """Return the conversation as an entry that `CacheEntry.adopt` reads.

        `upto`: tokens that are needed. If all layers store rows, no others are read. If a
        checkpoint has to take the place of layers that can't be cut, it ends there, and has fewer.
        Reading raises SessionError if files are missing or damaged; the conversations that use them
        are dropped then.
        """
        reader = PieceReader(self._place.folder, self._index.drop_users)
        found = RestoredEntry(conversation, upto, reader, self._outline)
        if conversation in self._index:
            self._index.use(conversation, found)
        return found

    def drop(self, conversation: StoredConversation) -> None:
        """Remove a conversation, if it is there, and the files that no other one uses."""
        if conversation in self._index:
            self._index.remove(conversation)

    def close(self) -> None:
        """Unlock the folder, or remove it if it goes with this process."""
        self._place.close()

    def _settling(
        self,
        work: Generator[bool, None, StoredConversation | None],
        replaces: StoredConversation | None,
    ) -> Generator[bool, None, StoredConversation | None]:
        """Do the work, and drop what is an earlier state of its conversation; log a failure."""
        try:
            conversation = yield from work
        except FAILURES as error:
            self._say(f"a conversation was not written to the disk cache: {_reason(error)}")
            return None
        if conversation is not None:
            self._said = ""
            self._index.drop_earlier(conversation, replaces)
        return conversation

    def _offloading(self, entry: CacheEntry) -> Generator[bool, None, StoredConversation | None]:
        if not entry.tokens or not entry.is_true:
            return None
        exported = entry.export(outlined=True)
        layers = DividedLayers(entry.caches, exported.layers, len(exported.tokens))
        salt = "" if exported.is_exact else os.urandom(8).hex()
        form = form_of(entry, exported, layers, self._pictures)
        conversation = self._index.plan(self._seed + salt.encode(), form)
        return (yield from self._adding(conversation, exported, layers, layers.states, salt=salt))

    def _saving(
        self, entry: CacheEntry, upto: int
    ) -> Generator[bool, None, StoredConversation | None]:
        exported = entry.export(outlined=True)
        layers = DividedLayers(entry.caches, exported.layers, len(exported.tokens))
        is_whole = upto == len(exported.tokens) and entry.is_true
        if not upto or not exported.is_exact or not (is_whole or layers.can_be_cut):
            return None
        form = form_of(entry, exported, layers, self._pictures)
        if not is_whole:
            cut = None if layers.has_only_rows else _last_before(exported.checkpoints, upto)
            if cut is None and not layers.has_only_rows:
                return None
            upto = upto if cut is None else cut.offset
            exported = replace(exported, checkpoints=[] if cut is None else [cut])
            form = form_up_to(form, upto, exported.checkpoints)
        conversation = self._index.plan(self._seed, form, is_frugal=True)
        if is_whole:  # of its checkpoints, only those that are there already
            pairs = zip(conversation.states, exported.checkpoints, strict=False)
            there = [pair for pair in pairs if pair[0].name in self._index.sizes]
            conversation = replace(conversation, states=[state for state, _ in there])
            exported = replace(exported, checkpoints=[item for _, item in there])
        elif exported.checkpoints:
            conversation = replace(conversation, lowest=upto + 1)
        states = layers.states if is_whole else {}
        return (yield from self._adding(conversation, exported, layers, states, has_tokens=False))

    def _adding(
        self,
        conversation: StoredConversation,
        exported: Exported,
        layers: DividedLayers,
        states: Mapping[str, ArraySource],
        *,
        salt: str = "",
        has_tokens: bool = True,
    ) -> Generator[bool, None, StoredConversation]:
        """Write a conversation, unless it is there with all that this one has, and return it."""
        there = self._index.named(conversation.name)
        if there is not None and there.covers(conversation):
            self._index.use(there)
            return there
        self._index.claim(conversation)
        try:
            sizes, names = self._index.sizes, self._pictures
            files = piece_files(conversation, exported, layers, sizes, salt=salt, pictures=names)
            head = head_file(
                conversation,
                {**sizes, **{file.name: file.nbytes for file in files}},
                layers.structure,
                states,
                salt=salt,
                pictures=names,
                has_tokens=has_tokens,
            )
            self._index.make_room(sum(file.nbytes for file in (*files, head)), conversation)
            yield from self._writing(conversation, files, head)
            self._index.add(conversation)
        except BaseException:
            self._index.remove(conversation)
            raise
        return conversation

    def _writing(
        self, conversation: StoredConversation, files: list[PieceFile], head: PieceFile
    ) -> Iterator[bool]:
        """Write files in a thread, from copies of their arrays; the conversation's own last.

        That is copied first, because states change when the entry grows. Where conversations are
        found after a restart, all files are on the disk at the end, also after a power cut.
        """
        last, copies = (yield from head.copying()), list[PieceFile]()
        while files:
            file = files.pop(0)
            if file.name not in self._index.sizes:  # another may have written it
                copies.append((yield from file.copying()))
            del file
            if sum(copy.nbytes for copy in copies) > COPIED:
                yield from self._write_copies(conversation, copies)
                copies = []
        yield from self._write_copies(conversation, [*copies, last])

    def _write_copies(
        self, conversation: StoredConversation, files: Sequence[PieceFile]
    ) -> Iterator[bool]:
        """Write files whose arrays are copies, in a thread. Yield True until they are on the disk.

        If the iterator is closed, the thread ends with the file that it writes.
        """
        failed, done = list[Exception](), list[PieceFile]()
        is_closed = threading.Event()

        def write() -> None:
            try:
                for file in files:
                    if is_closed.is_set():
                        return
                    file.write(self._place.folder, sync=self.is_kept, more=file is not files[-1])
                    done.append(file)
            except Exception as error:
                failed.append(error)

        self._index.make_room(sum(file.nbytes for file in files), conversation)
        for other in {self._writers[file.name] for file in files if file.name in self._writers}:
            other.join()
        writer = threading.Thread(target=write, name="mlxrunner-disk-cache", daemon=True)
        try:
            self._writers |= {file.name: writer for file in files}
            writer.start()
            while writer.is_alive():
                writer.join(MOMENT_S)
                yield True
        finally:
            is_closed.set()
            if writer.is_alive():  # else it has ended, or could not start
                writer.join()
            self._writers = {n: one for n, one in self._writers.items() if one is not writer}
            for file in done:
                self._wrote(file)
        if failed:
            raise failed[0]

    def _wrote(self, file: PieceFile) -> None:
        self.written += file.nbytes
        self._index.wrote(file.name, file.nbytes)

    def _read_all(self) -> None:
        """Find again what is in the folder; remove what is damaged, or used by nothing.

        One line of the log says how many conversations are damaged.
        """
        folder, index = self._place.folder, self._index
        files: dict[str, os.stat_result] = {}
        for name in filter(FILE.fullmatch, folder.names()):
            with suppress(OSError):
                found = folder.stat(name)
                if name.endswith(".new") or not _is_ours(found):
                    folder.remove(name)
                else:
                    files[name] = found
        heads = [name for name in files if name.startswith("talk-")]
        damaged: list[str] = []
        for name in sorted(heads, key=lambda name: files[name].st_mtime_ns):
            try:
                conversation, sizes = self._read(PieceReader(folder, lambda name: None), name)
                for piece, size in sizes.items():
                    if piece not in files or files[piece].st_size != size:
                        raise SessionError(f"{piece} is missing or damaged")
            except SessionError as error:
                damaged.append(str(error))
                continue
            for piece, size in {**sizes, name: files[name].st_size}.items():
                index.wrote(piece, size)
            index.add(conversation)
        if damaged:
            self._say(
                f"{len(damaged)} of {len(heads)} conversations in {folder.path} can't be "
                f"restored, and are evaluated again: {damaged[0]}"
            )
        self._recover({name: found.st_size for name, found in files.items()})
        for name in files.keys() - index.sizes.keys():
            with suppress(OSError):
                folder.remove(name)
        index.make_room(0)

    def _recover(self, sizes: Mapping[str, int]) -> None:
        """Find conversations again whose own file a killed process did not get to write.

        `sizes`: bytes of all files. The longest ones come first: others are within them.
        """
        folder, pieces = self._place.folder, Pieces(self._place.folder, self._pictures, sizes)
        left = [name for name in sizes if name not in self._index.sizes and is_piece(name)]
        for name in sorted(left, key=lambda name: int(name.split(".")[0].split("-")[-1]))[::-1]:
            if name in self._index.sizes:
                continue
            try:
                found = pieces.conversation(name, self._seed)
                if self._index.closest(found.tokens)[1] == len(found.tokens):
                    continue
                file = head_file(
                    found.conversation,
                    sizes,
                    found.structure,
                    {},
                    salt=found.salt,
                    pictures=self._pictures,
                )
                file.write(folder)
            except FAILURES:
                continue
            for one in found.conversation.pieces:
                self._index.wrote(one, sizes[one])
            self._index.wrote(file.name, file.nbytes)
            self._index.add(found.conversation)

    def _read(self, reader: PieceReader, name: str) -> tuple[StoredConversation, dict[str, int]]:
        """Return a conversation and the sizes of its files. Raise SessionError if it is damaged."""
        with reader.file(name) as file:
            about = json.loads(file.metadata["about"])
            tokens = reader.all_tokens(name, self._pictures)
            conversation, sizes = read_conversation(name, tokens, about)
            seed = self._seed + str(about["salt"]).encode()
            digest = digests(seed, self._pictures.spelled(tokens), [len(tokens)])[len(tokens)]
            if name != file_name("talk", digest, len(tokens)):
                raise SessionError("it belongs to another model, or has other tokens")
            return conversation, sizes

    def _say(self, what: str) -> None:
        """Log a line, unless it is the same as the last one."""
        if what != self._said:
            logger.warning("%s", what)
        self._said = what


def _last_before(items: Sequence[SavedCheckpoint], end: int) -> SavedCheckpoint | None:
    """Return the last checkpoint at or before `end`; None if there is none."""
    return max(
        (item for item in items if item.offset <= end), key=lambda item: item.offset, default=None
    )


def _is_ours(found: os.stat_result) -> bool:
    """Return True for a regular file of this user, with one name, that nobody else may write to."""
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and found.st_nlink == 1
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _reason(error: BaseException) -> str:
    said = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    return said or type(error).__name__


PREFIX = "own-"
"""The beginning of the names of folders that go with their process."""
ENDING = "ending"
"""The file in a locked folder whose process is ending."""


class CacheFolder:
    """A locked folder, for this process only. `close` unlocks it, and removes a private one."""

    def __init__(self, folder: Folder, *, is_private: bool) -> None:
        self.folder, self.is_private = folder, is_private
        self.close = weakref.finalize(self, _remove if is_private else _close, folder)


def kept_folder(parent: Path, name: str) -> CacheFolder:
    """Return the folder `name` in `parent`, both made if they are missing (mode 0700).

    Wait for a process that uses it and is ending. If another one uses it, say so and return a
    private one. Raise SessionError if it can't be made, or if others can write to it.
    """
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Folder(parent / name, make=True)
        found = folder.stat()
    except (OSError, ValueError) as error:  # a name may hold what no path can
        raise SessionError(
            f"the disk cache can't be made in {parent}: {_said(error)}: choose another folder, or "
            "none (of serve: XDG_CACHE_HOME, --no-disk-cache)"
        ) from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SessionError(
            f"the disk cache can't be made in {folder.path}: it has to be yours, and others may "
            f"not write to it (it belongs to user {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}): chmod 700 it, or choose another folder"
        )
    if _lock(folder):
        return CacheFolder(folder, is_private=False)
    folder.close()
    logger.warning(
        "another process uses the disk cache of this model in %s: this one uses another folder, "
        "which goes with it",
        parent,
    )
    return private_folder()


def announce_end(folder: Path) -> None:
    """Let the next process wait for `folder`, a kept one of this process, which is ending."""
    with suppress(OSError), Folder(folder) as opened:
        opened.write(ENDING, lambda fd: None, sync=False)


def _lock(folder: Folder) -> bool:
    """Lock a folder; wait while a process that is ending holds the lock. Return False if held."""
    has_told = False
    while not folder.lock():
        if ENDING not in folder.names():
            return False
        if not has_told:
            logger.warning(
                "the disk cache of this model is in use by a process that is ending, perhaps a "
                "server that lets its last requests end: waiting for it"
            )
            has_told = True
        time.sleep(0.1)
    with suppress(OSError):
        folder.remove(ENDING)
    return True


def private_folder() -> CacheFolder:
    """Return a new folder in the user's cache folder, which goes with this process.

    Folders of processes that were killed are removed first. Raise SessionError if none can be made.
    """
    try:
        parent = cache_folder() / "parked"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in parent.glob(f"{PREFIX}*"):
            _remove_abandoned(path)
        while True:
            folder = Folder(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))
            if folder.lock():  # or else another process took it for abandoned
                return CacheFolder(folder, is_private=True)
    except (OSError, RuntimeError) as error:
        raise SessionError(f"the disk cache can't be made: {_said(error)}") from error


def _remove_abandoned(path: Path) -> None:
    """Remove the folder of a process that does not run any more."""
    with suppress(OSError), Folder(path) as folder:
        if folder.lock():
            _remove(folder)


def _remove(folder: Folder) -> None:
    with suppress(OSError):
        for name in folder.names():
            folder.remove(name)
        folder.path.rmdir()
    _close(folder)


def _close(folder: Folder) -> None:
    folder.close()


def _said(error: Exception) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())

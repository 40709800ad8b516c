"""Write conversations of one model to disk, and bring back the one that a prompt continues.

What conversations share is stored once. Within the limit, those that are cheap to evaluate again
for their bytes go first (`mlxrunner.cache.disk.index`). The files are described in
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
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlxrunner.cache.account import NAME, PrefixIndex
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
from mlxrunner.cache.entry import CacheEntry, TokenArray, common_prefix
from mlxrunner.cache.saved import Exported, SavedCheckpoint
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
MOST_WRITERS = 32
"""Most conversations that are written at once."""
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
        pictures: PictureNames | None = None,
    ) -> None:
        """Open the cache in `folder`, and find again what is there.

        Each model has a folder of its own in it. None: a private folder, which goes with this
        process. `fingerprint`: that of the model, with all settings that decide what its layers
        store. `limit`: most bytes of all files. `daily`: see `daily_bytes`. `pictures`:
        those of a model that sees. Raise SessionError if the folder can't be used.
        """
        # The None stays: folders that are there are named by the digest.
        described = json.dumps([dict(fingerprint), None], sort_keys=True).encode()
        self._seed = digests(described, np.empty(0, np.int32), [0])[0].encode()
        self._pictures = pictures or PictureNames(PictureTable())
        self._place = (
            private_folder() if folder is None else kept_folder(folder, self._seed[:16].decode())
        )
        self._index = DiskCacheIndex(self._place.folder.remove, limit)
        self._said = ""
        self.daily_bytes = 0 if self._place.is_private else daily
        """Most bytes that conversations that stay in memory are to write in a day; 0: none are.

        Those in a private folder would be lost with it.
        """
        self.written = 0
        """Bytes of all files that were written since it was opened."""
        self._writers: dict[str, FileWriter] = {}
        """The last one of each file that is being written, by the file's name."""
        self._pending: list[PendingConversation] = []
        """Offloaded conversations whose files are being written."""
        self._read_all()

    def tell(self, on_evicted: OnEvicted) -> None:
        """Call `on_evicted` from now on with each conversation that is evicted, and by what."""
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
        """Bytes of all files, with those that are being written."""
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
        """Copy what the disk lacks of a settled entry, and return its conversation.

        A thread writes the copies: `find` waits for it if it has to, and so does `settle`. Earlier
        states of this conversation are dropped then: all but their last few tokens are in the
        entry, and `replaces` names them, or they were restored, or the entry can be resumed
        wherever they can. An entry that can't be copied is None, one that can't be written is
        reported as evicted, and the log has one line for both.
        """
        return completed(self.offloading(entry, replaces))

    def offloading(
        self, entry: CacheEntry, replaces: StoredConversation | None = None
    ) -> Generator[bool, None, StoredConversation | None]:
        """Do as `offload` does. Yield after each array, and True while a thread writes.

        The entry must not change meanwhile. If the iterator is closed, nothing was written.
        """
        return self._settling(self._offloading(entry), replaces, is_awaited=False)

    def saving(
        self, entry: CacheEntry, upto: int, replaces: StoredConversation | None = None
    ) -> Generator[bool, None, StoredConversation | None]:
        """Write the first `upto` tokens of an exact entry, which stays in memory, to the end.

        It writes the rows that the disk lacks and one copy of the states and windows, those after
        `upto` tokens or at the last checkpoint before. Yield as `offloading` does. The entry may
        grow meanwhile, but what it has must not change. Earlier states are dropped as `offload`
        does.
        """
        return self._settling(self._saving(entry, upto), replaces, is_awaited=True)

    def lacks(self, tokens: TokenArray) -> int:
        """Return how many tokens of an exact conversation no file has, or will have."""
        offloaded = [shared for _, shared in self._offloaded(tokens)]
        return len(tokens) - max(self._index.closest(tokens)[1], *offloaded, 0)

    def find(self, prompt: TokenArray) -> tuple[StoredConversation, int] | None:
        """Return the conversation from which `prompt` can reuse most tokens, and how many.

        Only offsets at which it can be resumed count. None if there is no such token. One that is
        being written is waited for.
        """
        self._collect()
        found = self._index.find(prompt)
        here = 0 if found is None else found[1]
        needed = [one for one, shared in self._offloaded(prompt[:-1]) if shared > here]
        if not needed:
            return found
        for one in needed:
            one.writer.wait()
        self._collect()
        return self._index.find(prompt)

    def restore(self, conversation: StoredConversation, upto: int | None = None) -> RestoredEntry:
        """Return the conversation as an entry that `CacheEntry.adopt` reads.

        `upto`: tokens that are needed. If all layers store rows, no others are read. If a
        checkpoint has to take the place of layers that can't be cut, it ends there, and has fewer.
        Reading raises SessionError if files are missing or damaged; the conversations that use them
        are dropped then.
        """
        reader = PieceReader(self._place.folder, self._index.drop_users)
        found = RestoredEntry(conversation, upto, reader)
        if conversation in self._index:
            self._index.use(conversation, found)
        return found

    def drop(self, conversation: StoredConversation) -> None:
        """Remove a conversation, if it is there, and the files that no other one uses."""
        if conversation in self._index:
            self._index.remove(conversation)

    def settle(self) -> None:
        """Wait until all that was offloaded is on the disk."""
        self._collect(is_awaited=True)

    def close(self) -> None:
        """Settle, and unlock the folder, or remove it if it goes with this process."""
        self.settle()
        self._place.close()

    def _settling(
        self,
        work: Generator[bool, None, CopiedConversation | None],
        replaces: StoredConversation | None,
        *,
        is_awaited: bool,
    ) -> Generator[bool, None, StoredConversation | None]:
        """Let a thread write what `work` copies, and wait for it if `is_awaited`; log a failure."""
        self._collect()
        try:
            copied = yield from work
            if copied is None:
                return None
            if copied.files:
                pending = self._begin(copied, replaces, is_awaited=is_awaited)
            elif copied.conversation in self:
                self._index.use(copied.conversation)
                self._index.drop_earlier(copied.conversation, replaces)
        except FAILURES as error:
            self._fail(error)
            return None
        if not copied.files or not is_awaited:
            return copied.conversation
        try:
            while pending in self._pending:
                yield from self._a_moment()
        except BaseException:
            pending.is_wanted = not pending.is_awaited
            raise
        return copied.conversation if copied.conversation in self else None

    def _offloading(self, entry: CacheEntry) -> Generator[bool, None, CopiedConversation | None]:
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
    ) -> Generator[bool, None, CopiedConversation | None]:
        exported = entry.export(outlined=True)
        layers = DividedLayers(entry.caches, exported.layers, len(exported.tokens))
        is_whole = upto == len(exported.tokens) and entry.is_true
        if not upto or not exported.is_exact or not (is_whole or layers.can_be_cut):
            return None
        form = form_of(entry, exported, layers, self._pictures)
        if not is_whole:
            before = [item for item in exported.checkpoints if item.offset <= upto]
            cut = before[-1] if before and not layers.has_only_rows else None
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
    ) -> Generator[bool, None, CopiedConversation]:
        """Copy a conversation for its last write, unless it is there with all that this one has."""
        there = self._index.named(conversation.name)
        if there is not None and there.covers(conversation):
            return CopiedConversation(there, [])
        for pending in self._pending:
            there = pending.conversation
            if there.name == conversation.name and there.covers(conversation) and pending.is_wanted:
                pending.is_awaited = False
                return CopiedConversation(there, [])
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
            self._make_room(sum(file.nbytes for file in (*files, head)), conversation)
            return (yield from self._copying(conversation, files, head))
        except BaseException:
            self._give_up(conversation)
            raise

    def _copying(
        self, conversation: StoredConversation, files: list[PieceFile], head: PieceFile
    ) -> Generator[bool, None, CopiedConversation]:
        """Copy the arrays of files; the conversation's own is written last.

        That is copied first, because states change when the entry grows. Where there are many, the
        first ones are written meanwhile.
        """
        last, copies = (yield from head.copying()), list[PieceFile]()
        while files:
            file = files.pop(0)
            if file.name not in self._index.sizes:  # another may have written it
                copies.append((yield from file.copying()))
            del file
            while self._pending and self._copied([*copies, last]) > COPIED:
                yield from self._a_moment()
            if self._copied(copies) > COPIED:
                yield from self._waiting(self._writer(conversation, copies))
                copies = []
        while conversation.name in self._writers or len(self._pending) >= MOST_WRITERS:
            yield from self._a_moment()
        return CopiedConversation(conversation, [*copies, last])

    def _begin(
        self, copied: CopiedConversation, replaces: StoredConversation | None, *, is_awaited: bool
    ) -> PendingConversation:
        """Begin the last write of a conversation."""
        conversation, head = copied.conversation, copied.files[-1]
        try:
            sizes = {file.name: file.nbytes for file in copied.files} | self._index.sizes
            _check_there(conversation.pieces, sizes)
            about = {**head.about, **conversation.describe(sizes)}
            files = [*copied.files[:-1], replace(head, about=about)]
            writer = self._writer(conversation, files)
        except BaseException:
            self._give_up(conversation)
            raise
        self._pending.append(PendingConversation(conversation, replaces, writer, is_awaited))
        return self._pending[-1]

    def _writer(self, conversation: StoredConversation, files: Sequence[PieceFile]) -> FileWriter:
        """Begin to write files whose arrays are copies, but for those that another writes.

        They count as there from now on. Where conversations are found after a restart, all are on
        the disk at the end, also after a power cut.
        """
        own, sizes, names = conversation.name, self._index.sizes, {*conversation.pieces}
        files = [file for file in files if file.name == own or file.name not in sizes]
        self._make_room(sum(file.nbytes for file in files), conversation)
        needed = {name: one for name, one in self._writers.items() if name in names}
        replaced = {file.name: sizes[file.name] for file in files if file.name in sizes}
        writer = FileWriter(self._place.folder, files, needed, replaced, is_synced=self.is_kept)
        try:
            for file in files:
                self._writers[file.name] = writer
                self._index.wrote(file.name, file.nbytes)
            writer.start()
        except BaseException:
            self._end(writer)
            raise
        return writer

    def _waiting(self, writer: FileWriter) -> Iterator[bool]:
        """Yield True until the writer has ended, and raise its error."""
        try:
            while writer.is_alive:
                writer.wait(MOMENT_S)
                yield True
        finally:
            self._end(writer)
        if writer.error is not None:
            raise writer.error

    def _end(self, writer: FileWriter) -> None:
        """Wait for a writer, and forget the files that it did not write."""
        if writer.is_alive:  # else it has ended, or could not start
            writer.wait()
        for file in writer.files:
            self._writers.pop(file.name, None)
            if file.name in writer.written:
                self.written += file.nbytes
            elif file.name in writer.replaced:
                self._index.wrote(file.name, writer.replaced[file.name])
            else:
                self._index.forget(file.name)

    def _make_room(self, need: int, by: StoredConversation) -> None:
        try:
            self._index.make_room(need, by)
        except SessionError:
            if not self._pending:
                raise
            self.settle()
            self._index.make_room(need, by)

    def _collect(self, *, is_awaited: bool = False) -> None:
        """Add the conversations that are written; `is_awaited`: wait for all of them."""
        for pending in list(self._pending):
            while is_awaited and pending.writer.is_alive:
                pending.writer.wait(MOMENT_S)
            if not pending.writer.is_alive:
                self._finish(pending)  # again after an interrupt
                self._pending.remove(pending)

    def _finish(self, pending: PendingConversation) -> None:
        """Add a conversation if it was written and is still wanted."""
        conversation, error = pending.conversation, pending.writer.error
        self._end(pending.writer)
        if error is None and pending.is_wanted:
            if conversation not in self:
                self._index.add(conversation)
            self._said = ""
            self._index.drop_earlier(conversation, pending.replaces)
            return
        self._index.remove(conversation)
        if error is not None:
            self._fail(error)
            if not pending.is_awaited:
                self._index.on_evicted(conversation, "a failed write")

    def _give_up(self, conversation: StoredConversation) -> None:
        """Remove the files that only `conversation` was to use."""
        if conversation.name in self._writers:  # another one of this name
            self._index.release(conversation)
        else:
            self._index.remove(conversation)

    def _a_moment(self) -> Iterator[bool]:
        for writer in [*self._writers.values()][:1]:
            writer.wait(MOMENT_S)
        yield True
        self._collect()

    def _copied(self, files: Sequence[PieceFile]) -> int:
        """Return the bytes of `files` and of all that wait to be written."""
        waiting = sum(one.writer.nbytes for one in self._pending)
        return waiting + sum(file.nbytes for file in files)

    def _offloaded(self, tokens: TokenArray) -> list[tuple[PendingConversation, int]]:
        """Return the offloaded ones that are written now, and how many of `tokens` each has."""
        return [
            (one, common_prefix(one.conversation.tokens, tokens))
            for one in self._pending
            if not one.is_awaited
        ]

    def _fail(self, error: BaseException) -> None:
        self._say(f"a conversation was not written to the disk cache: {_reason(error)}")

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


@dataclass(frozen=True)
class CopiedConversation:
    """A conversation, and copies of its files that are to be written last; none: it is there."""

    conversation: StoredConversation
    files: Sequence[PieceFile]


class FileWriter:
    """A thread that writes files whose arrays are copies."""

    def __init__(
        self,
        folder: Folder,
        files: Sequence[PieceFile],
        needed: Mapping[str, FileWriter],
        replaced: Mapping[str, int],
        *,
        is_synced: bool,
    ) -> None:
        """Write `files`, in their order, after those in `needed`, which others write.

        `replaced`: bytes of the files in whose place some come.
        """
        self.files, self.nbytes, self.replaced = files, sum(file.nbytes for file in files), replaced
        self.written: set[str] = set()
        """The names of the files that are there."""
        self.error: Exception | None = None
        """Why the others are not."""
        self._folder, self._needed, self._is_synced = folder, dict(needed), is_synced
        self._thread = threading.Thread(
            target=self._write, name="mlxrunner-disk-cache", daemon=True
        )

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, for some seconds at most."""
        self._thread.join(seconds)

    def _write(self) -> None:
        try:
            for name, other in self._needed.items():
                other.wait()
                _check_there([name], other.written)
            self._needed.clear()
            for file in self.files:
                is_last = file is self.files[-1]
                file.write(self._folder, sync=self._is_synced, more=not is_last)
                self.written.add(file.name)
        except Exception as error:
            self.error = error


def _check_there(names: Iterable[str], there: Container[str]) -> None:
    for name in names:
        if name not in there:
            raise OSError(f"{name} was not written")


@dataclass(eq=False)
class PendingConversation:
    """A conversation whose last files are being written."""

    conversation: StoredConversation
    replaces: StoredConversation | None
    writer: FileWriter
    is_awaited: bool
    """True while it stays in memory, and a generator waits for it."""
    is_wanted: bool = True
    """False once that generator was closed."""


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
            with suppress(OSError), Folder(path) as abandoned:
                if abandoned.lock():  # its process does not run any more
                    _remove(abandoned)
        while True:
            folder = Folder(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))
            if folder.lock():  # or else another process took it for abandoned
                return CacheFolder(folder, is_private=True)
    except (OSError, RuntimeError) as error:
        raise SessionError(f"the disk cache can't be made: {_said(error)}") from error


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

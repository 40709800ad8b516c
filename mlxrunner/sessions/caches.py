"""The prefix-cache entry of a session on disk: in pieces, as in the disk cache of conversations.

A save writes the pieces that the session's folder lacks. Version 0.2 wrote one file, which is read
and goes with the next save. `Saver` saves a runner's conversation: its text at once, its caches in
a thread during the next turn.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxrunner.cache.disk.disk_cache import form_of
from mlxrunner.cache.disk.index import StoredConversation, digests, plan, read_conversation
from mlxrunner.cache.disk.pieces import (
    DividedLayers,
    PieceReader,
    RestoredEntry,
    StoredEntry,
    head_file,
    piece_files,
    stored_tokens,
)
from mlxrunner.cache.entry import CacheEntry, TokenArray, as_tokens, common_prefix
from mlxrunner.errors import ModelError, PromptError, SessionError
from mlxrunner.models.fingerprint import PARTS, SPELLING, differences, fingerprint, with_format
from mlxrunner.pictures.table import Picture, PictureNames, PictureTable, renumbered
from mlxrunner.pictures.tokenizer import SeeingTokenizer
from mlxrunner.runner import Runner
from mlxrunner.sessions.session import Session
from mlxrunner.sessions.store import CACHE, CACHE_FILE, SessionStore
from mlxrunner.system.folders import Folder
from mlxrunner.system.tensorfile import TensorFile
from mlxrunner.terminal.output import size
from mlxrunner.tokenizer import Tokenizer


def cache_writer(
    entry: CacheEntry,
    folder: Folder,
    fingerprint: Mapping[str, str],
    *,
    bits: int | None = None,
    pictures: PictureNames | None = None,
) -> Callable[[Folder], None]:
    """Copy what the session in `folder` lacks of an entry; return what writes it, in any thread.

    `fingerprint`: that of the model. `bits` (4 or 8) stores keys and values in fewer bits: what is
    restored is then close to the original, not equal. `pictures`: those of a model that sees.
    """
    names, exported = pictures or PictureNames(PictureTable()), entry.export(outlined=True)
    layers = DividedLayers(entry.caches, exported.layers, len(exported.tokens), bits)
    salt = "" if exported.is_exact else os.urandom(8).hex()
    seed = json.dumps([dict(fingerprint), bits, salt], sort_keys=True).encode()
    last, there = _last(folder, seed, names) if exported.is_exact else (None, {})
    form = form_of(entry, exported, layers, names)
    form = replace(form, is_exact=exported.is_exact and bits is None)
    shared = common_prefix(last.tokens, form.tokens) if last is not None else 0
    conversation = plan(seed, form, last, shared, is_frugal=True)
    files = piece_files(conversation, exported, layers, there, salt=salt, pictures=names, bits=bits)
    sizes = {**there, **{file.name: file.nbytes for file in files}}
    states = layers.states
    more: dict[str, Any] = {"fingerprint": dict(fingerprint)}
    head = head_file(
        conversation, sizes, layers.structure, states, salt=salt, pictures=names, **more
    )
    copies = [file.copied() for file in (*files, head)]
    kept = {*conversation.pieces, conversation.name}
    known = {*there, conversation.name}

    def write(folder: Folder) -> None:
        try:
            while copies:
                copies.pop(0).write(folder, sync=True, more=bool(copies))
        except BaseException:
            drop(folder, lambda name: name in kept and name not in known)
            raise
        drop(folder, lambda name: name not in kept)

    return write


def drop(folder: Folder, is_dropped: Callable[[str], bool] = lambda name: True) -> None:
    """Remove files of the caches of a session."""
    for name in filter(CACHE_FILE.fullmatch, folder.names()):
        if is_dropped(name):
            folder.remove(name)


def _last(
    folder: Folder, seed: bytes, pictures: PictureNames
) -> tuple[StoredConversation | None, dict[str, int]]:
    """Return the conversation in a session's folder, and the sizes of the files that it shares.

    It is None if there is none, or if it is not of the model and the form that `seed` is of.
    """
    with suppress(SessionError, PromptError):
        entry = stored_entry(folder)
        if isinstance(entry, SessionEntry):
            tokens = pictures.adopted(entry.tokens, entry.pictures)
            found, count = replace(entry.conversation, tokens=tokens), len(tokens)
            spelled = pictures.spelled(tokens)
            if found.name.split("-")[1] == digests(seed, spelled, [count])[count]:
                return found, entry.sizes
    return None, {}


def stored_entry(
    folder: Folder, on_damage: Callable[[str], None] = lambda name: None
) -> SessionEntry | StoredEntry | None:
    """Return the entry in a session's folder, or None if it has none.

    `on_damage` is called with the name of a damaged piece. Raise SessionError if the entry is
    damaged.
    """
    try:
        heads = [name for name in folder.names() if CACHE_FILE.fullmatch(name)]
        heads = [name for name in heads if name.startswith("talk-")]
        if heads:
            newest = max(heads, key=lambda name: folder.stat(name).st_mtime_ns)
            return SessionEntry(folder, newest, on_damage)
        return StoredEntry(TensorFile(folder.open(CACHE)))
    except FileNotFoundError:
        return None
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())
        raise SessionError(f"the cache can't be read: {why}") from error


class SessionEntry(RestoredEntry):
    """The entry in the pieces of a session.

    Opening it reads the tokens; a layer is read when it is used. Raise SessionError if a file is
    missing or damaged. If `fingerprint` equals that of the model, call `check` before using the
    layers.
    """

    def __init__(self, folder: Folder, name: str, on_damage: Callable[[str], None]) -> None:
        reader = PieceReader(folder, on_damage)
        with reader.file(name) as file:
            about = json.loads(file.metadata["about"])
            self.fingerprint: dict[str, str] = dict(about["fingerprint"])
            self.pictures: Any = about.get("pictures", {})
            found, self.sizes = read_conversation(name, stored_tokens(file.arrays["tokens"]), about)
            self.nbytes = sum(array.nbytes for array in file.arrays.values())
        for piece, nbytes in self.sizes.items():
            with reader.file(piece) as file:
                if folder.size(piece) != nbytes:
                    raise SessionError("it has another size")
                arrays = (file.arrays[name] for name in file.arrays.keys() - {"tokens"})
                self.nbytes += sum(array.nbytes for array in arrays)
        super().__init__(found, None, reader)

    def renumber(self, known: Mapping[bytes, Picture]) -> None:
        """Give pictures among the tokens the ids that they have in this process.

        `known`: the pictures of this process, by digest. Raise SessionError if another one is among
        the tokens.
        """
        try:
            tokens = renumbered(self.conversation.tokens, self.pictures, known)
        except PromptError as error:
            raise SessionError(str(error)) from error
        self.conversation = replace(self.conversation, tokens=tokens.astype(np.int32, copy=False))


CHANGED = (
    "its file was changed by another program: its tokens and caches are dropped, text and "
    "settings are used as they are"
)
"""The note on a session whose checksum is wrong, as after an edit by hand."""


class Saver:
    """Saves the conversation of one runner, in the thread that owns the runner."""

    def __init__(
        self,
        runner: Runner,
        model: Path | Mapping[str, str],
        store: SessionStore | None = None,
        *,
        caches: bool = True,
        kv_bits: int | None = None,
    ) -> None:
        """Save into `store`, by default the user's.

        `model` is the directory of the model, or its fingerprint. `caches=False` saves only the
        text. `kv_bits` (4 or 8) stores keys and values in fewer bits.
        """
        self.store = SessionStore() if store is None else store
        # Weak, so that a chat that changes its model frees the old one at once.
        self._runner = weakref.ref(runner)
        self._caches, self._kv_bits = caches, kv_bits
        self._outline = runner.cache.outline()
        known = fingerprint(model) if isinstance(model, Path) else model
        self._fingerprint = with_format(known, self._outline)
        self._writer: threading.Thread | None = None
        self._failed: str | None = None
        """The text of an error in the thread; the error itself would keep the folder open."""
        self._behind: dict[str, tuple[int, ...]] = {}
        """The tokens of each session whose caches are newer than its file."""

    @property
    def runner(self) -> Runner:
        """The runner. Raise ModelError if it has been dropped."""
        runner = self._runner()
        if runner is None:
            raise ModelError("no model is loaded: /model NAME loads one")
        return runner

    def load(
        self,
        name: str,
        tokenizer: Tokenizer | None = None,
        known: Mapping[bytes, Picture] | None = None,
    ) -> tuple[Session, str]:
        """Load a session and give its caches to the runner. Return it with a line about them.

        The runner reads the caches in the next turn. A session made with another tokenizer or
        template keeps its text only. `tokenizer`: the one that tokenizes the session's text, by
        default the runner's. `known`: the pictures that the runner can be shown, by digest. Raise
        SessionError if the text cannot be read.
        """
        session, known = self.store.load(name), known or {}
        session.renumber(known)
        self.wait()  # caches still to be written belong to the entry that is replaced now
        different = differences(session.fingerprint, self._fingerprint)
        if any(part in SPELLING for part in different):
            session.forget_tokens()
        mismatched = session.forget_mismatched(
            tokenizer or self.runner.tokenizer, self.runner.facts.vocab
        )
        self.runner.reset()
        if session.is_changed:
            return session, CHANGED
        return session, self._restore(name, known) + (
            "; it is tokenized again: its tokens do not match its text" if mismatched else ""
        )

    def _restore(self, name: str, known: Mapping[bytes, Picture]) -> str:
        try:
            folder = self.store.folder_of(name)
            entry = stored_entry(folder, folder.remove)  # a damaged piece is written again
            if entry is None:
                return "without caches: the first turn evaluates it again"
            if different := differences(entry.fingerprint, self._fingerprint):
                raise SessionError(", ".join(PARTS[part] for part in different))
            if len(entry.tokens) > self.runner.context:
                raise SessionError(
                    f"{len(entry.tokens)} tokens, and the context is {self.runner.context}"
                )
            entry.check(self._outline)
            entry.renumber(known)
        except SessionError as error:
            return f"its caches are dropped, its text is kept: {error}"
        self.runner.cache.adopt(entry, f"session {name}")
        return f"{len(entry.tokens)} tokens restored ({size(entry.nbytes)})"

    def save(self, name: str, session: Session) -> None:
        """Save a session. Its text is on the disk when this returns.

        The caches of its tokens are copied now and written in a thread. If the disk is full, the
        old caches are removed to make room for the text. Raise SessionError if the text cannot be
        saved, or if the caches of an earlier call could not be.
        """
        self._describe(session)
        try:
            self.store.save(name, session)
        except SessionError as error:
            if not _is_full(error):
                raise
            self._save_in_their_place(name, session)
        tokens = session.history.rendering.tokens
        if not self._caches:
            self.store.drop_cache(name)
        elif (writer := self._started()) is not None and writer.is_alive():
            # Copy one entry at a time: `write_behind`, the next save or `wait` writes this one.
            self._behind[name] = tokens
        else:
            self._write(name, tokens)
        self._raise()

    def save_text(self, name: str, session: Session) -> None:
        """Save the text of a session, and no caches. Raise SessionError if that fails."""
        self._describe(session)
        self.store.save(name, session)

    def _describe(self, session: Session) -> None:
        """Note in a session which model made its tokens, and which pictures are among them."""
        session.fingerprint = dict(self._fingerprint)
        for branch in session.branches.values():
            tokens = as_tokens(branch.history.rendering.tokens)
            if (names := self._pictures(tokens)) is not None:
                session.pictures |= names.of(tokens)

    def _pictures(self, tokens: TokenArray) -> PictureNames | None:
        """Return what names the pictures among `tokens`; None if nothing does."""
        runner = self._runner()
        tokenizer = None if runner is None else runner.tokenizer
        names = PictureNames(PictureTable())
        if isinstance(tokenizer, SeeingTokenizer):
            names = PictureNames(tokenizer.sight.table)
        try:
            names.of(tokens)
        except KeyError:  # a model that is gone saw it
            return None
        return names

    def _save_in_their_place(self, name: str, session: Session) -> None:
        """Save the text on a full disk: once the caches are written, or else after removing them.

        Raise SessionError if the text cannot be saved even then.
        """
        if (writer := self._started()) is not None:
            writer.join()
        try:
            self.store.save(name, session)
        except SessionError as error:
            if not _is_full(error) or not self.store.nbytes(name)[1]:
                raise
            self.store.drop_cache(name)
            self.store.save(name, session)

    def wait(self) -> None:
        """Wait until the caches of the last `save` are on the disk.

        Raise SessionError if they could not be written.
        """
        writer = self._started()
        if writer is not None:
            writer.join()
        if self._behind:
            self._write(*self._behind.popitem())
            self.wait()
        self._raise()

    def write_behind(self) -> bool:
        """Begin to write caches that came while the thread was writing, if it has ended since.

        Return True if it did. The runner's entry has then the session's tokens only.
        """
        writer = self._started()
        if not self._behind or (writer is not None and writer.is_alive()):
            return False
        self._write(*self._behind.popitem())
        return True

    def _started(self) -> threading.Thread | None:
        """Return the writing thread, or None.

        A thread that an interrupt kept from starting is forgotten, which releases its lock.
        """
        if self._writer is not None and self._writer.ident is None:
            self._writer = None
        return self._writer

    def _write(self, name: str, tokens: tuple[int, ...]) -> None:
        self._behind.pop(name, None)
        runner = self._runner()
        if runner is None:  # the model is gone, and its entry with it
            return
        runner.cache.keep(tokens)  # drop what was typed and never sent, or taken back
        entry = runner.entry
        pictures = self._pictures(entry.tokens.array)
        if not entry.tokens or pictures is None:
            self.store.drop_cache(name)
            return
        with self.store.lock(name) as held:
            write = cache_writer(
                entry, held, self._fingerprint, bits=self._kv_bits, pictures=pictures
            )
            self._writer = threading.Thread(
                target=self._run, args=(name, [write], held), name="saving a session"
            )
            self._writer.start()

    def _run(self, name: str, write: list[Callable[[Folder], None]], held: Folder) -> None:
        """Write the caches. This runs in the thread, which keeps the session locked meanwhile."""
        try:
            self.store.save_cache(name, write.pop())  # nobody else holds the copies
        except SessionError as error:
            self._failed = str(error)

    def _raise(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise SessionError(failed)


def _is_full(error: SessionError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
    )

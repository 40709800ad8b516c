"""The prefix-cache entry of a session on disk: in pieces, as in the disk cache of conversations.

A save writes the pieces that the session's folder lacks. Version 0.2 wrote one file, which is read
and goes with the next save.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
from mlxrunner.cache.entry import CacheEntry, common_prefix
from mlxrunner.cache.protocol import Saved
from mlxrunner.errors import PromptError, SessionError
from mlxrunner.pictures.table import Picture, PictureNames, PictureTable, renumbered
from mlxrunner.sessions.store import CACHE, CACHE_FILE
from mlxrunner.system.folders import Folder
from mlxrunner.system.tensorfile import TensorFile


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
        for piece, size in self.sizes.items():
            with reader.file(piece) as file:
                if folder.size(piece) != size:
                    raise SessionError("it has another size")
                arrays = (file.arrays[name] for name in file.arrays.keys() - {"tokens"})
                self.nbytes += sum(array.nbytes for array in arrays)
        super().__init__(found, None, reader, None)

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

    def check(self, outline: Sequence[Saved]) -> None:
        """Raise SessionError unless every array has the type and shape that the model stores.

        `outline` describes the model's layers: see `EntryControl.outline`.
        """
        self.outline = outline
        self.check_headers()

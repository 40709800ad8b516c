"""A session's caches out to mlx-lm, and mlx-lm's into a session. The model's weights are not read for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mlxrunner.cache.factory import CacheOptions, layouts_of, outline_of
from mlxrunner.cache.saved import Exported
from mlxrunner.chat.branches import MAIN
from mlxrunner.chat.history import History, Spelling
from mlxrunner.errors import OptionError, SessionError
from mlxrunner.models.fingerprint import PARTS, differences, fingerprint, with_format
from mlxrunner.models.load import unread_model
from mlxrunner.models.resolve import lasting, resolve
from mlxrunner.sessions.entry import StoredEntry, pack
from mlxrunner.sessions.prompt_cache import export_file, import_file
from mlxrunner.sessions.session import Branch, Session
from mlxrunner.sessions.store import Sessions


def export_session(name: str, file: Path, sessions: Sessions | None = None) -> int:
    """Returns the number of tokens. SessionError where there are no caches, or the model is not the one they were made with."""
    sessions = sessions or Sessions()
    session, stored = sessions.load(name), sessions.load_cache(name)
    if stored is None:
        raise SessionError(f"the session {name!r} was saved without caches")
    entry, folder = StoredEntry(stored), resolve(session.model)
    model, known = unread_model(folder), fingerprint(folder)
    for bits in (None, 8, 4):  # what the chat was started with is not said, but seen
        options = CacheOptions(kv_bits=bits)
        with suppress(ValueError):  # heads that can't be quantized
            outlines = outline_of(model, options)
            different = differences(entry.fingerprint, with_format(known, outlines))
            if "kv" not in different:
                break
    if different:
        raise SessionError(
            f"the session {name!r} was made with {', '.join(PARTS[part] for part in different)} than {session.model} has now"
        )
    entry.check(outlines)
    export_file(file, model, str(folder), options, Exported(entry.tokens, list(entry.layers), []))
    return len(entry.tokens)


def import_session(
    file: Path,
    name: str,
    model: str,
    tokens: Sequence[int] | None,
    kv_bits: int | None = None,
    sessions: Sessions | None = None,
) -> int:
    """Returns the number of tokens. SessionError where there is a session of that name, or the file is not of `model`; OptionError for bits
    that the model can't have."""
    if kv_bits not in (None, 4, 8):
        raise OptionError(f"kv_bits: {kv_bits} is out of range, it has to be 4 or 8")
    sessions = sessions or Sessions()
    if sessions.exists(name):
        raise SessionError(
            f"there is a session {name!r} already: `mlxrunner sessions rm {name}` removes it"
        )
    folder = resolve(model)
    unread, options = unread_model(folder), CacheOptions(kv_bits=kv_bits)
    layouts_of(unread, options)  # complains about kv_bits that can't be
    entry = import_file(file, unread, options, tokens)
    known = with_format(fingerprint(folder), outline_of(unread, options))
    packed = pack(entry.export(), known)
    with sessions.lock(name):
        spelled = Branch(None, History(spelling=Spelling("", entry.tokens[:])))
        sessions.save(
            name,
            Session(
                lasting(model), {MAIN: spelled}, fingerprint=known, settings={"kv_bits": kv_bits}
            ),
        )
        sessions.save_cache(name, packed.arrays, packed.metadata)
    return len(entry.tokens)

"""Exchange caches between saved sessions and mlx-lm, without reading the model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mlxrunner.cache.layers.factory import CacheOptions, layouts_of, outline_of
from mlxrunner.cache.saved import Exported
from mlxrunner.cache.tokens import has_pictures
from mlxrunner.errors import OptionError, SessionError
from mlxrunner.models.fingerprint import PARTS, differences, fingerprint, with_format
from mlxrunner.models.load import unread_model
from mlxrunner.models.resolve import lasting, resolve
from mlxrunner.sessions.history import History, Rendering
from mlxrunner.sessions.prompt_cache import export_file, import_file
from mlxrunner.sessions.session import MAIN, Branch, Session
from mlxrunner.sessions.store import SessionStore
from mlxrunner.stored.entry import StoredEntry, pack


def export_session(name: str, file: Path, sessions: SessionStore | None = None) -> int:
    """Write the caches of the session `name` to `file` for mlx-lm. Return the number of tokens.

    `sessions` is by default the user's store. Raise SessionError if the session has no caches, or
    if its model has changed since they were made.
    """
    sessions = sessions or SessionStore()
    session, stored = sessions.load(name), sessions.load_cache(name)
    if stored is None:
        raise SessionError(f"the session {name!r} was saved without caches")
    entry, folder = StoredEntry(stored), resolve(session.model)
    if has_pictures(entry.tokens):
        raise SessionError(f"the session {name!r} has pictures, which no file of mlx-lm can name")
    model, known = unread_model(folder), fingerprint(folder)
    for bits in (None, 8, 4):  # the file does not name its bits, but they show
        options = CacheOptions(kv_bits=bits)
        with suppress(ValueError):  # these heads can't be quantized
            outlines = outline_of(model, options)
            different = differences(entry.fingerprint, with_format(known, outlines))
            if "kv" not in different:
                break
    if different:
        raise SessionError(
            f"the session {name!r} was made with {', '.join(PARTS[part] for part in different)} "
            f"than {session.model} has now"
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
    sessions: SessionStore | None = None,
    *,
    trust: bool = False,
) -> int:
    """Make a session from a prompt-cache file of mlx-lm, and return its number of tokens.

    `tokens` are those that the file was made from; None takes them from the file, if it holds them.
    `kv_bits` (4, 8 or None) tells in how many bits the file stores keys and values. `trust`: see
    `import_file`. Raise SessionError if a session `name` exists or if `file` does not fit `model`,
    and OptionError if the model does not support `kv_bits`.
    """
    if kv_bits not in (None, 4, 8):
        raise OptionError(f"kv_bits: {kv_bits} is out of range, it has to be 4 or 8")
    sessions = sessions or SessionStore()
    if sessions.exists(name):
        raise SessionError(
            f"there is a session {name!r} already: `mlxrunner sessions rm {name}` removes it"
        )
    folder = resolve(model)
    unread, options = unread_model(folder), CacheOptions(kv_bits=kv_bits)
    layouts_of(unread, options)  # raises OptionError for kv_bits that the model can't have
    entry = import_file(file, unread, options, tokens, folder, trust=trust)
    known = with_format(fingerprint(folder), outline_of(unread, options))
    packed = pack(entry.export(), known)
    with sessions.lock(name):
        present = Branch(None, History(rendering=Rendering("", tuple(entry.tokens))))
        sessions.save(
            name,
            Session(
                lasting(model), {MAIN: present}, fingerprint=known, settings={"kv_bits": kv_bits}
            ),
        )
        sessions.save_cache(name, packed.arrays, packed.metadata)
    return len(entry.tokens)

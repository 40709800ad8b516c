"""Sessions of the oracle: what is saved, and what answers after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxrunner import Runner
from mlxrunner.cache.disk.pieces import StoredEntry
from mlxrunner.cache.entry import CacheEntry
from mlxrunner.pictures.table import PictureNames
from mlxrunner.sessions.caches import Saver, SessionEntry, cache_writer, stored_entry
from mlxrunner.sessions.session import Branch, History, Rendering, Session, SessionTurn
from mlxrunner.sessions.store import CACHE_FILE, SessionStore

Make = Callable[..., Saver]


def session(runner: Runner, text: str = "hello") -> Session:
    tokens = tuple(runner.entry.tokens)
    return Session(
        "oracle",
        {
            "main": Branch(
                None,
                History(
                    (SessionTurn(text, text),), Rendering(runner.tokenizer.decode(tokens), tokens)
                ),
            )
        },
    )


def answer(runner: Runner, prompt: list[int], n: int = 6) -> list[tuple[int | None, float | None]]:
    """Tokens and their log-probabilities."""
    return [
        (chunk.token, chunk.logprob)
        for chunk in runner.generate(prompt, max_tokens=n, stop_tokens=[], logprobs=0)
    ]


def last(runner: Runner, prompt: list[int], n: int = 6) -> Any:
    """The usage of a request."""
    return list(runner.generate(prompt, max_tokens=n, stop_tokens=[]))[-1].usage


def save(saver: Saver, name: str = "one") -> None:
    saver.save(name, session(saver.runner))
    saver.wait()


def stored(
    store: SessionStore,
    entry: CacheEntry,
    name: str = "one",
    fingerprint: dict[str, str] | None = None,
    pictures: PictureNames | None = None,
) -> SessionEntry | StoredEntry:
    """Write an entry as the caches of a session, and open them."""
    with store.lock(name) as held:
        write = cache_writer(entry, held, fingerprint or {}, pictures=pictures)
        store.save_cache(name, write)
        found = stored_entry(held)
    assert found is not None
    return found


def pieces(session: Path, kind: str = "") -> list[Path]:
    """Return the files of the caches in a session's folder, in the order of their names."""
    found = [path for path in session.iterdir() if CACHE_FILE.fullmatch(path.name)]
    return sorted(path for path in found if path.name.startswith(kind))

"""Sessions of the oracle: what is saved, and what answers after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.models import tiny_config, tiny_model
from support.prompts import PROMPT

from mlxrunner import Runner
from mlxrunner.cache.disk.pieces import StoredEntry
from mlxrunner.cache.entry import CacheEntry
from mlxrunner.models.facts import facts_of
from mlxrunner.pictures.table import PictureNames
from mlxrunner.sessions.caches import Saver, SessionEntry, cache_writer, stored_entry
from mlxrunner.sessions.session import Branch, History, Rendering, Session, SessionTurn
from mlxrunner.sessions.store import CACHE_FILE, SessionStore
from mlxrunner.testing import ByteTokenizer, oracle_runner

Make = Callable[..., Saver]


def session(runner: Runner, text: str = "hello") -> Session:
    tokens = tuple(runner.entry.tokens)
    rendering = Rendering(runner.tokenizer.decode(tokens), tokens)
    return Session("oracle", {"main": Branch(None, History((SessionTurn(text, text),), rendering))})


def tiny(
    architecture: str, *, wide: bool = False, **sizes: Any
) -> tuple[Any, Callable[..., Runner]]:
    """Return a tiny model, and a function that makes runners of it. `wide`: with heads of 32."""
    heads = {"hidden_size": 128, "head_dim": 32} if wide else {}
    config = tiny_config(architecture, vocab_size=300, **heads, **sizes)
    model = tiny_model(config)

    def new(**options: Any) -> Runner:
        facts = facts_of(model, config)
        return Runner(model, ByteTokenizer(), facts, **{"context": 512, **options})

    return model, new


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


def saved(saver: Make, kinds: Sequence[str] = ("full", "full"), **options: Any) -> Runner:
    """Return a runner of the oracle that has answered PROMPT and saved that as a session."""
    runner = oracle_runner(kinds, **options)
    answer(runner, PROMPT)
    save(saver(runner))
    return runner


def restored_by(
    saver: Make, kinds: Sequence[str] = ("full", "full"), **options: Any
) -> tuple[Runner, str]:
    """Return a runner of the oracle that continues with session `one`, and the line about it."""
    runner = oracle_runner(kinds, **options)
    return runner, saver(runner).load("one")[1]


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

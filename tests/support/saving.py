"""Sessions of the oracle: what is saved, and what answers after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxrunner import Runner
from mlxrunner.sessions.saver import Saver
from mlxrunner.sessions.session import Branch, History, Rendering, Session, SessionTurn

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

"""Measure the cost of the event of each request.

PYTHONPATH=tests python benchmarks/events.py [--tokens 32768] [--rounds 20]

A tiny Llama with random weights, so that what is measured is not lost in the model; a conversation
of 64 messages. "in the observer": everything that is done for the event, after the last chunk was
read, until its line is in the file, as the clock says; "again": the same a second time, when the
model has not just used up the processor's caches. "whole request": the same request watched and
unwatched in turn, in which all that is lost in the noise of the machine. A hit is a regenerated
answer; "edited" changes the last message, so that its place has to be found; "first edited" changes
the first one, where everything is evaluated again. "account": to count its tokens as cached,
missed, displaced or new. Targets: 100 microseconds for the event where nothing was lost, and 1 % of
the request otherwise.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from arguments import print_json, print_table
from support.models import tiny_config, tiny_model

from mlxrunner.bench.harness import Comparison, excess
from mlxrunner.cache.account import TokenAccounting
from mlxrunner.models.facts import facts_of
from mlxrunner.profiling.profile import Profile
from mlxrunner.runner import Runner
from mlxrunner.testing import ByteTokenizer

MESSAGES = 64


class Timed:
    """An observer around another one: microseconds of each call, and of the same call again."""

    def __init__(self, inner: Profile) -> None:
        self.inner = inner
        self.first: list[float] = []
        self.again: list[float] = []

    def __call__(self, runner: Any, observation: Any) -> None:
        for times in (self.first, self.again):
            began = time.perf_counter()
            self.inner(runner, observation)
            times.append((time.perf_counter() - began) * 1e6)


class TimedAccount:
    """Microseconds of the account of each request, from its beginning to its end."""

    def __init__(self) -> None:
        self.took: list[float] = []
        for name in ("begin", "reach", "end"):
            self._wrap(name, getattr(TokenAccounting, name))

    def _wrap(self, name: str, method: Callable[..., Any]) -> None:
        def timed(*given: Any, **more: Any) -> Any:
            began = time.perf_counter()
            found = method(*given, **more)
            took = (time.perf_counter() - began) * 1e6
            if name == "begin":
                self.took.append(0.0)
            self.took[-1] += took
            return found

        setattr(TokenAccounting, name, timed)


def conversation(tokens: int, edit: str = "", first: str = "") -> list[dict[str, str]]:
    """Return a conversation of about `tokens` tokens of the byte tokenizer.

    `edit` ends the last message, `first` begins the first.
    """
    each = tokens // MESSAGES - len("assistant: ")
    messages = [
        {
            "role": "assistant" if number % 2 else "user",
            "content": f"{number} {'word ' * (each // 5)}",
        }
        for number in range(MESSAGES - 1)
    ]
    messages[0]["content"] = first + messages[0]["content"]
    return [*messages, {"role": "user", "content": f"and then? {edit}"}]


def request(runner: Runner, messages: Any) -> float:
    began = time.perf_counter()
    for _ in runner.generate(messages, max_tokens=8, stop_tokens=[]):
        pass
    return time.perf_counter() - began


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tokens", type=int, default=32768)
    options.add_argument("--rounds", type=int, default=20)
    given = options.parse_args()
    config = tiny_config("llama", vocab_size=300, max_position_embeddings=given.tokens + 4096)
    model = tiny_model(config)
    runner = Runner(model, ByteTokenizer(), facts_of(model, config), name="tiny", prefill_step=256)
    with tempfile.TemporaryDirectory() as folder:
        profile = Profile("bench", events=Path(folder) / "events.jsonl")
        profile.watch(runner)
        timed, account = Timed(profile), TimedAccount()
        request(runner, conversation(given.tokens))
        rows: list[Comparison] = []
        for name, target, rounds, edits in (
            ("hit", 100.0, given.rounds, [("", "")]),
            ("edited", None, given.rounds, [("a", ""), ("b", "")]),
            ("first edited", None, 1, [("", "a"), ("", "b")]),
        ):
            watched: list[float] = []
            unwatched: list[float] = []
            timed.first.clear()
            timed.again.clear()
            account.took.clear()
            for number in range(rounds):
                for observer, times in ((timed, watched), (None, unwatched)):
                    runner.observers[:] = [] if observer is None else [observer]
                    edit, first = edits[(2 * number + (observer is None)) % len(edits)]
                    times.append(request(runner, conversation(given.tokens, edit, first)))
            limit = target if target is not None else median(watched) * 1e4
            of_request = median(watched) * 1e4
            for label, took, most in (
                ("in the observer", timed.first, limit),
                ("again", timed.again, limit),
                ("account", account.took, of_request),
            ):
                rows.append(
                    excess(f"{name}: {label}", "us", list(took), [0.0] * len(took), target=most)
                )
            rows.append(
                excess(
                    f"{name}: whole request",
                    "ms",
                    [t * 1e3 for t in watched],
                    [t * 1e3 for t in unwatched],
                )
            )
        print(f"{len(runner.entry.tokens)} tokens in the entry, {given.rounds} rounds")
        print_table(rows)
        print_json(rows, tokens=len(runner.entry.tokens))


if __name__ == "__main__":
    main()

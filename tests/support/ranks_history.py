"""Random histories on several ranks beside one process, run as rank 0 in a process of its own.

The models of a folder are loaded one after the other. Answers end in every way: whole, closed
early, by an error in a callback, and by Ctrl-C at a random moment. Each one is compared with the
cold answer of a model in one piece. Prints JSON for each model: how its answers ended, the tokens
that were compared and that were reused, and the largest difference of a log-probability.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from mlxrunner.models.sharding import Way
from mlxrunner.ranks.bare import lead
from mlxrunner.ranks.guard import guard
from mlxrunner.ranks.hosts import read_hosts
from mlxrunner.ranks.processes import inherited
from mlxrunner.ranks.ranks import Ranks
from mlxrunner.runner import Runner

ENDINGS = ("whole", "closed", "error", "interrupted")
VOCAB = 256
NOISE = 1e-3
"""Largest difference of a log-probability. Sums over ranks are rounded in another order."""


class BrokenError(Exception):
    """The error of a callback."""


def compare(runner: Runner, whole: Runner, prompt: list[int], tokens: int) -> tuple[int, float]:
    """Return the tokens that were compared, and the largest difference of a log-probability.

    Another token is allowed only where the two likeliest ones are equal within NOISE.
    """
    warm = list(runner.generate(prompt, max_tokens=tokens, logprobs=2))
    whole.reset()
    cold = list(whole.generate(prompt, max_tokens=tokens, logprobs=2))
    assert len(warm) == len(cold)
    worst, count = 0.0, 0
    for one, other in zip(warm, cold, strict=True):
        best = other.top_logprobs or {}
        if one.token != other.token:
            likeliest, next_one = best.values()
            assert likeliest - next_one < NOISE, (one, other)
            break
        found = one.top_logprobs or {}
        worst = max(worst, *(abs(best[token] - found.get(token, -9)) for token in best))
        count += 1
    return count, worst


def end(runner: Runner, prompt: list[int], ending: str, chance: random.Random) -> None:
    """Begin an answer to `prompt`, and end it by `ending`."""
    most = chance.randrange(2, 12)

    def fail(tokens: object, logits: object) -> object:
        nonlocal most
        most -= 1
        if not most:
            raise BrokenError
        return logits

    processors = [fail] if ending == "error" else []
    delay = chance.uniform(0, 0.05)
    interrupt = threading.Timer(delay, signal.raise_signal, (signal.SIGINT,))
    with suppress(BrokenError, KeyboardInterrupt):
        if ending == "interrupted":
            interrupt.start()
        chunks = runner.generate(
            prompt, max_tokens=12 if ending == "whole" else 400, logits_processors=processors
        )  # type: ignore[arg-type]
        with closing(chunks):
            for count, _ in enumerate(chunks):
                if ending == "closed" and count >= most:
                    break
        if ending == "interrupted":  # the answer has ended before
            interrupt.join()


def history(runner: Runner, whole: Runner, turns: int) -> dict[str, Any]:
    """Run `turns` turns on both runners, and return what was found."""
    chance = random.Random(7)
    ended, reused, compared, worst = dict.fromkeys(ENDINGS, 0), 0, 0, 0.0
    prompt = [chance.randrange(VOCAB) for _ in range(90)]
    for turn in range(turns):
        ending = ENDINGS[turn % len(ENDINGS)]
        kept = prompt[: chance.randrange(1, len(prompt))]
        prompt = kept + [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 100))]
        prompt = prompt[:180]
        end(runner, prompt, ending, chance)
        ended[ending] += 1
        if chance.random() < 0.5:  # go on where the answer has ended
            prompt = list(runner.entry.tokens)[:200]
        count, difference = compare(runner, whole, [*prompt, turn % VOCAB], 6)
        compared, worst = compared + count, max(worst, difference)
        assert runner.usage is not None
        reused += runner.usage.cached_tokens
    return {"ended": ended, "compared": compared, "reused": reused, "worst": worst}


def bare(ranks: Ranks, runner: Runner) -> None:
    """Check that mlx-lm's own loop on all ranks gives the runner's tokens, also if left early."""
    steps, prompt = lead(runner.model.own_part, ranks.tell), list(range(1, 90))
    asked = runner.generate(prompt, max_tokens=6, stop_tokens=[])
    ours = [chunk.token for chunk in asked]
    whole = list(steps(0, prompt, 6))
    assert whole == ours, (whole, ours)
    with closing(steps(0, prompt, 6)) as left:
        assert next(left) == ours[0]
    assert list(steps(80, prompt[80:], 6)) == ours


def main(folder: str, hosts: str, port: str, turns: str, way: Way) -> None:
    """Run a history of `turns` turns with each model in `folder`, shared in this way."""
    found = read_hosts(hosts, int(port))
    connection = inherited()
    if connection is None:
        launch = [sys.executable, "-m", "mlxrunner", "launch", "--hosts", hosts, "--port", port]
        ours = [sys.executable, "-m", "tests.support.ranks_history", *sys.argv[1:]]
        sys.exit(guard(found, lambda rank: [*launch, "--rank", str(rank)] if rank else ours))
    with Ranks(found, connection, way) as ranks:
        for model in sorted(Path(folder).iterdir()):
            with ranks.load(str(model), {}) as runner:
                whole = Runner.load(model, reserve=False)
                bare(ranks, runner)
                done = history(runner, whole, int(turns))
            print(json.dumps({"model": model.name, **done}))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # the last one is a way

"""A random history on several ranks beside one process, run as rank 0 in a process of its own.

Answers end in every way: whole, closed early, by an error in a callback, and by Ctrl-C at a random
moment. Each one is compared with the cold answer of a model in one piece. Prints JSON: the turns,
how they ended, the tokens that were reused, the largest difference of a log-probability.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
from contextlib import closing, suppress

from mlxrunner.ranks.guard import guard
from mlxrunner.ranks.hosts import read_hosts
from mlxrunner.ranks.processes import inherited
from mlxrunner.ranks.ranks import Ranks
from mlxrunner.runner import Runner

ENDINGS = ("whole", "closed", "error", "interrupted")
VOCAB = 256


class BrokenError(Exception):
    """The error of a callback."""


def compare(runner: Runner, whole: Runner, prompt: list[int], tokens: int) -> float:
    """Return the largest difference of a log-probability. The tokens have to be equal."""
    warm = list(runner.generate(prompt, max_tokens=tokens, logprobs=1))
    whole.reset()
    cold = list(whole.generate(prompt, max_tokens=tokens, logprobs=1))
    pairs = list(zip(warm, cold, strict=True))
    assert [one.token for one in warm] == [one.token for one in cold], (warm, cold)
    return max(abs((one.logprob or 0) - (other.logprob or 0)) for one, other in pairs)


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
    if ending == "interrupted":
        delay = chance.uniform(0, 0.05)
        threading.Timer(delay, signal.raise_signal, (signal.SIGINT,)).start()
    with suppress(BrokenError, KeyboardInterrupt):
        chunks = runner.generate(
            prompt, max_tokens=30 if ending == "whole" else 400, logits_processors=processors
        )  # type: ignore[arg-type]
        with closing(chunks):
            for count, _ in enumerate(chunks):
                if ending == "closed" and count >= most:
                    break


def main(model: str, hosts: str, port: str, turns: str) -> None:
    """Run a history of `turns` turns."""
    chance = random.Random(7)
    ended, reused, worst = dict.fromkeys(ENDINGS, 0), 0, 0.0
    found = read_hosts(hosts, int(port))
    connection = inherited()
    if connection is None:
        launch = [sys.executable, "-m", "mlxrunner", "launch", "--hosts", hosts, "--port", port]
        ours = [sys.executable, "-m", "tests.support.ranks_history", *sys.argv[1:]]
        sys.exit(guard(found, lambda rank: [*launch, "--rank", str(rank)] if rank else ours))
    whole = Runner.load(model, reserve=False)
    with Ranks(found, connection) as ranks:
        runner = ranks.load(model, {})
        prompt = [chance.randrange(VOCAB) for _ in range(90)]
        for turn in range(int(turns)):
            ending = ENDINGS[turn % len(ENDINGS)]
            kept = prompt[: chance.randrange(1, len(prompt))]
            prompt = kept + [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 100))]
            prompt = prompt[:180]
            end(runner, prompt, ending, chance)
            ended[ending] += 1
            if chance.random() < 0.5:  # go on where the answer has ended
                prompt = list(runner.entry.tokens)[:200]
            worst = max(worst, compare(runner, whole, [*prompt, turn % VOCAB], 6))
            assert runner.usage is not None
            reused += runner.usage.cached_tokens
    print(json.dumps({"ended": ended, "reused": reused, "worst": worst}))


if __name__ == "__main__":
    main(*sys.argv[1:])

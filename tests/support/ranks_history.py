"""Random histories on several ranks beside one process, run as rank 0 in a process of its own.

The models of a folder are loaded one after the other. Answers end in every way: whole, closed
early, by an error in a callback, and by Ctrl-C at a random moment. Each one is compared with the
cold answer of a model in one piece. Prints JSON for each model: how its answers ended, the tokens
that were compared and that were reused, and the largest difference of a log-probability. Then the
same for an engine with a few slots, whose conversations take turns, fork and are given up.
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

from mlxrunner import ParallelRunner
from mlxrunner.errors import StepFailedError
from mlxrunner.models.files import ShardingWay
from mlxrunner.ranks.guard import guard, inherited, read_hosts
from mlxrunner.ranks.ranks import COPY, FREE, Ranks, lead
from mlxrunner.results import Chunk
from mlxrunner.runner import Runner
from tests.support.engine import backend, engine_of

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
    return compared(warm, whole, prompt, tokens)


def compared(warm: list[Chunk], whole: Runner, prompt: list[int], tokens: int) -> tuple[int, float]:
    """Compare `warm`, an answer to `prompt`, with the cold one; see `compare`."""
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
        if chance.random() < 0.5:  # continue where the answer has ended
            prompt = list(runner.entry.tokens)[:200]
        count, difference = compare(runner, whole, [*prompt, turn % VOCAB], 6)
        compared, worst = compared + count, max(worst, difference)
        assert runner.usage is not None
        reused += runner.usage.cached_tokens
    return {"ended": ended, "compared": compared, "reused": reused, "worst": worst}


def served(runner: ParallelRunner, whole: Runner, turns: int) -> dict[str, Any]:
    """Run `turns` times 3 rounds, or 1, of up to four requests at a time; return what was found.

    Prompts continue with an answer, fork from any earlier prompt, or are new.
    """
    chance = random.Random(11)
    ended, reused, count, worst = dict.fromkeys(("whole", "closed", "failed"), 0), 0, 0, 0.0
    known = [[chance.randrange(VOCAB) for _ in range(90)]]
    fail_at_times(runner)
    told = count_messages(runner)
    for _ in range(3 * turns if turns > 1 else 1):
        asked = []
        for _ in range(chance.randrange(1, 5)):
            old = chance.choice(known)
            prompt = old[: chance.randrange(len(old) + 1)]
            prompt = (prompt + [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 80))])[
                -180:
            ]
            ending = chance.choice(("whole", "closed"))
            options: Any = {"max_tokens": 12 if ending == "whole" else 60, "logprobs": 2}
            options["speculate"] = chance.choice(("off", "lookup"))
            handle = runner.submit(prompt, **options)
            asked.append((prompt, ending, handle))
        for prompt, ending, handle in asked:
            chunks = []
            with handle:
                try:
                    for chunk in handle:
                        chunks.append(chunk)
                        if ending == "closed" and len(chunks) == 5:
                            break
                except StepFailedError:
                    ending = "failed"
            ended[ending] += 1
            known = [*known, prompt + [c.token for c in chunks if c.token is not None]][-12:]
            if ending == "whole":
                assert chunks[-1].usage is not None
                reused += chunks[-1].usage.cached_tokens
                more, difference = compared(chunks, whole, prompt, 12)
                count, worst = count + more, max(worst, difference)
    found = {"ended": ended, "compared": count, "reused": reused, "worst": worst}
    return {**found, "told": told}


def count_messages(runner: ParallelRunner) -> dict[str, int]:
    """Return how often each message but that of a pass will have been sent."""
    model, told = runner.model, dict.fromkeys((COPY, FREE), 0)
    tell = model.tell

    def count(message: Any) -> None:
        if message[0] in told:
            told[message[0]] += 1
        tell(message)

    model.tell = count
    return told


def fail_at_times(runner: ParallelRunner) -> None:
    """Let one pass in 40 raise an error, before or after all ranks have begun it."""
    chance, engine = random.Random(13), backend(engine_of(runner))
    run = engine._pass

    def may_fail(tokens: Any, caches: Any, **options: Any) -> Any:
        number = chance.randrange(80)
        if number == 0:
            raise BrokenError
        logits = run(tokens, caches, **options)
        if number == 1:
            raise BrokenError
        return logits

    engine._pass = may_fail  # type: ignore[method-assign, union-attr]


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


def main(folder: str, hosts: str, port: str, turns: str, way: ShardingWay) -> None:
    """Run a history of `turns` turns with each model in `folder`, shared in this way."""
    found = read_hosts(hosts, int(port))
    connection = inherited()
    if connection is None:
        launch = [
            sys.executable,
            "-m",
            "mlxrunner",
            "launch",
            "--hosts",
            hosts,
            "--rank-port",
            port,
        ]
        ours = [sys.executable, "-m", "tests.support.ranks_history", *sys.argv[1:]]
        sys.exit(guard(found, lambda rank: [*launch, "--rank", str(rank)] if rank else ours))
    with Ranks(found, connection, way) as ranks:
        for model in sorted(Path(folder).iterdir()):
            with ranks.load(str(model), {}) as runner:
                whole = Runner.load(model, reserve=False)
                bare(ranks, runner)
                done = history(runner, whole, int(turns))
                print(json.dumps({"model": model.name, **done}))
            loaded = ranks.load_served(str(model), {})
            memory = 700 * ranks.shares[0]["token"]
            asked: Any = {"max_sequences": 3, "memory": memory, "reserve": False}
            with ParallelRunner.of(loaded, **asked) as runner:
                print(json.dumps({"model": model.name, **served(runner, whole, int(turns))}))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # the last one is a way

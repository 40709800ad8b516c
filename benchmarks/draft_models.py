"""Measure what a draft model saves or costs for several answers at a time.

python benchmarks/draft_models.py [--size MILLIONS] [--rounds N]

The model is a random Llama whose layers after the second one add a share to the outcome; the draft
model is its first two layers. The smaller the share, the more often its guesses are right. Sides
take turns: --speculate off, and auto.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median
from typing import Any

from speculation import alike

from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.engine.draft_model import DraftCachePool, DraftModel
from mlxrunner.engine.drafting import MOST_ANSWERS
from mlxrunner.engine.engine import Engine

PROMPT, ANSWER = 64, 96
"""Tokens of a prompt and of its answer."""
COUNTS = (1, 2, 4, 8)
"""Numbers of answers at a time."""
CONTEXT = 256


def answered(runner: Engine, prompts: list[list[int]], how: Any) -> tuple[Any, int, float]:
    """Return the answers to `prompts` at the same time, their steps, and the processor time."""
    steps, began = runner.steps, time.process_time()
    found = runner.run(prompts, max_tokens=ANSWER, stop_tokens=[], speculate=how)
    return found, runner.steps - steps, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=20, help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=5)
    given, rng = parser.parse_args(), random.Random(1)
    print("| other layers add | answers | steps | guessed | right | processor time |")
    print("|---|---|---|---|---|---|")
    for share in (0.01, 0.3):
        for count in COUNTS:
            loaded, model, draft = alike(given.size, share)
            made = draft, loaded.facts.vocab, CacheOptions(CONTEXT), 0, 256
            entries = [DraftModel(*made, in_pieces=True) for _ in range(MOST_ANSWERS)]
            parts = model, loaded.tokenizer, loaded.facts
            ratios, drafted, right, steps, fewer = list[float](), 0, 0, 0, 0
            with Engine(*parts, max_sequences=count, context=CONTEXT) as runner:
                runner.guess_with(DraftCachePool(entries))
                for _ in range(given.rounds):
                    prompts = [[rng.randrange(1000) for _ in range(PROMPT)] for _ in range(count)]
                    plain, these, usual = answered(runner, prompts, "off")
                    for slot in runner.slots:
                        slot.cache.reset()
                    found, those, took = answered(runner, prompts, "auto")
                    assert [one.tokens for one in found] == [one.tokens for one in plain]
                    ratios.append(took / usual)
                    steps, fewer = steps + these, fewer + those
                    uses = [use for one in found for use in one.usage.drafts]
                    drafted += sum(use.drafted for use in uses)
                    right += sum(use.accepted for use in uses)
            row = share, count, f"{fewer} of {steps}", drafted, right, f"{median(ratios):.2f}"
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()

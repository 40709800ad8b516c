"""Compare answers with and without guesses, on many architectures.

python benchmarks/equal_drafts.py [--prompts N] [--steps N]

Tiny models with random float32 weights, and one of each of two architectures that was trained to
repeat what stands in the prompt, so that guesses succeed. Half of the answers are sampled. "near":
answers that part where the two likeliest tokens are as good as equally likely.
"""

from __future__ import annotations

import argparse
from dataclasses import astuple

import support.drafting as speculated

from mlxrunner.runner import Runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=500, help="prompts for each model")
    parser.add_argument("--steps", type=int, default=300, help="steps of the training")
    parser.add_argument("--only", nargs="*", default=speculated.NAMES, help="architectures")
    given = parser.parse_args()
    print("| model | answers | tokens | guessed | right | near | different |", flush=True)
    print("|---|---|---|---|---|---|---|")
    for name in given.only:
        show(name, speculated.runner_of(name), given.prompts)
    for name in ("llama", "lfm2"):
        model = speculated.trained(name, given.steps)
        show(f"{name}, trained", speculated.runner_of(name, model), given.prompts)


def show(name: str, runner: Runner, prompts: int) -> None:
    seen = speculated.compare(runner, name, prompts)
    print(f"| {name} | {' | '.join(map(str, astuple(seen)))} |", flush=True)


if __name__ == "__main__":
    main()

"""Measure the cost of holding an answer to a schema.

python benchmarks/structured.py [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it), and let nothing else run. The
sides take turns in one process on the same prompt: answers held to a schema that never ends,
and free ones of as many tokens ("other"). Wall time as the reader of the tokens sees it, after the
first; "x": tokens per second over those of the free ones. In parallel every second request is held
to it.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from typing import Any

from arguments import print_json, print_table

from mlxrunner.bench.harness import (
    Backend,
    Comparison,
    Tokens,
    in_turn,
    measure,
    more_is_better,
    our_backend,
    some_tokens,
    wait,
)
from mlxrunner.engine.parallel_runner import ParallelRunner
from mlxrunner.models.load import load_model
from mlxrunner.runner import Runner

TARGET = 0.9
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "parrots"]}, "maxItems": 5},
        "born": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
    },
    "required": ["name", "age", "likes", "born"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "objects": {"type": "array", "items": PERSON, "minItems": 1000},
    "a string": {"type": "string", "minLength": 10_000},
    "any JSON": {"type": "array", "minItems": 1000},
}


def held_side(runner: Runner, schema: Any) -> Backend:
    def generate(prompt: list[int], max_tokens: int) -> Tokens:
        with closing(
            runner.generate(prompt, max_tokens=max_tokens, schema=schema, stop_tokens=[])
        ) as chunks:
            for chunk in chunks:
                yield chunk.token  # type: ignore[misc]  # each chunk of such an answer has one

    return generate


def alone(runner: Runner, name: str, count: int, rounds: int) -> Comparison:
    sides = {"held": held_side(runner, SCHEMAS[name]), "free": our_backend(runner)}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side in in_turn(sides, turn):
            runner.reset()
            rates[side].append(
                (count - 1) / measure(sides[side], some_tokens(runner, 64), count, runner).decode
            )
    return more_is_better(
        f"{name}, decode {count}", "tok/s", rates["held"][1:], rates["free"][1:], target=TARGET
    )


def together(runner: ParallelRunner, count: int, rounds: int) -> Comparison:
    rates: dict[str, list[float]] = {"held": [], "free": []}
    for turn in range(rounds + 1):
        for side in in_turn(rates, turn):
            wait()
            form: dict[str, Any] = {"schema": SCHEMAS["objects"]} if side == "held" else {}
            began = time.perf_counter()
            each = [[2 + number, *range(20, 40)] for number in range(8)]
            options: dict[str, Any] = {"max_tokens": count, "stop_tokens": []}
            results = list(
                runner.run_each(
                    (prompt, options | (form if i % 2 else {})) for i, prompt in enumerate(each)
                )
            )
            rates[side].append(
                sum(len(result.tokens) for result in results) / (time.perf_counter() - began)
            )
    return more_is_better(
        f"8 at once, 4 of them held, {count} each",
        "tok/s",
        rates["held"][1:],
        rates["free"][1:],
        target=TARGET,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="a directory or a hub id (default: demo)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--quick", action="store_true", help="short runs: does it work, not how fast is it"
    )
    given = parser.parse_args()
    count, rounds = (32, 1) if given.quick else (256, given.rounds)
    loaded = load_model(given.model)
    runner = Runner(loaded.model, loaded.tokenizer, loaded.facts)
    rows = [alone(runner, name, count, rounds) for name in SCHEMAS]
    with ParallelRunner.of(loaded, max_sequences=8, context=32 + count) as several:
        rows.append(together(several, count, rounds))
    print_table(rows)
    print_json(rows, versus="free answers", rounds=rounds)


if __name__ == "__main__":
    main()

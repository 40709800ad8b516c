"""The arguments of the benchmarks, and how they print their results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxrunner.bench.harness import Comparison
    from mlxrunner.runner import Runner

FULL = ("98 M", (768, 12, 12), 8000)
QUICK = ("256 x 2", (256, 2, 4), 1000)


def parser_of(doc: str | None, *, rounds: int, quick: str) -> argparse.ArgumentParser:
    """Return a parser that says `doc` as its help. `quick` is what --quick measures instead."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--quick", action="store_true", help=f"{quick}: does it work, not how fast is it"
    )
    return parser


def llama_of(given: argparse.Namespace) -> tuple[str, tuple[int, int, int], int]:
    """Return the label, the size and the number of tokens of the random Llama to measure."""
    return QUICK if given.quick else FULL


def random_runner(name: str = "random:98M") -> Runner:
    """Return a runner on a random model of that size, which reserves no memory."""
    from mlxrunner.bench.harness import load_or_make
    from mlxrunner.runner import Runner

    loaded = load_or_make(name)
    return Runner(loaded.model, loaded.tokenizer, loaded.facts, name=name)


def print_table(comparisons: Sequence[Comparison]) -> None:
    """Print a table of comparisons on standard output."""
    from mlxrunner.bench.harness import table_of

    print("\n".join(table_of(comparisons)))


def print_json(comparisons: Sequence[Comparison], **about: Any) -> None:
    """Print the comparisons and `about` as one line of JSON on standard output."""
    print(json.dumps({**about, "results": [one.as_dict() for one in comparisons]}))

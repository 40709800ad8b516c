"""The arguments that the benchmarks have in common."""

from __future__ import annotations

import argparse

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

"""Measure how far each architecture can be rewound at 8,000 tokens, and the cost.

python tools/rewind_table.py

Tiny random models; tokens and layers are what counts. Prints the tables of docs/entry.md: one long
text, and the worst turn of a conversation of 40 with a long system prompt, with room for few
checkpoints.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from mlxrunner import Runner
from mlxrunner.cache.entry import PINNED
from mlxrunner.models.facts import facts_of
from mlxrunner.results import Usage
from mlxrunner.testing import EOS, ByteTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.models import ARCHITECTURES, tiny_config, tiny_model

END = [EOS, 1, 2, 3]


def last(runner: Runner, prompt: list[int], max_tokens: int = 2) -> tuple[list[int], Usage]:
    chunks = list(runner.generate(prompt, max_tokens=max_tokens, stop_tokens=[]))
    assert chunks[-1].usage is not None
    return [chunk.token or 0 for chunk in chunks], chunks[-1].usage


def row(architecture: str) -> str:
    config = tiny_config(architecture, max_position_embeddings=16384, vocab_size=300)
    model = tiny_model(config)
    facts = facts_of(model, config)
    runner = Runner(model, ByteTokenizer(), facts)
    rng = np.random.default_rng(0)
    history = [*rng.integers(0, 290, 8000).tolist(), *END]
    for place in range(900, 8000, 900):
        history[place] = EOS
    answer, _ = last(runner, history, 300)
    checkpoints, nbytes = len(runner.entry.checkpoints), runner.entry.checkpoints.nbytes
    share = nbytes / max(1, runner.entry.nbytes)
    figures = [last(runner, history)[1]]
    answer, _ = last(runner, history, 300)
    figures.append(
        last(runner, [*history, *answer[250:], EOS, *rng.integers(0, 290, 30).tolist(), *END])[1]
    )
    last(runner, history, 300)
    figures.append(last(runner, [*history[:4100], 5, *history[4101:]])[1])
    layers = ", ".join(f"{count} {kind}" for kind, count in facts.layers.items())
    reused = " | ".join(f"{u.cached_tokens} of {u.cache.matched_tokens}" for u in figures)
    cost = (
        f"{checkpoints} checkpoints, {share:.0%} of the entry's bytes" if checkpoints else "nothing"
    )
    return f"| {architecture} | {layers} | {reused} | {cost} |"


BUDGETED = ["gemma3_text", "gpt_oss", "qwen3_next", "lfm2", "mamba2"]
BUDGETS = (4, 8, 16)
TURNS, SYSTEM = 40, 1176
LENGTHS = ((30, 20), (600, 60))
"""Tokens of a message and of its answer, in turn."""


def budgeted_runner(architecture: str, checkpoints: int) -> Runner:
    """Return a runner with room for `checkpoints` checkpoints."""
    config = tiny_config(architecture, max_position_embeddings=32768, vocab_size=300)
    model = tiny_model(config)
    facts = facts_of(model, config)
    probe = Runner(model, ByteTokenizer(), facts)
    last(probe, [*range(250)] * 8)
    largest = max(item.nbytes for item in probe.entry.checkpoints)
    return Runner(model, ByteTokenizer(), facts, checkpoint_budget=checkpoints * largest)


def kept(runner: Runner, matched: int) -> tuple[int, int]:
    """Return the tokens that a prompt with a shared beginning finds in the entry, and shares."""
    return runner.entry.reach(matched)[0], matched


def budgeted_row(architecture: str, checkpoints: int) -> str:
    """The worst turn of a conversation, by action."""
    runner, rng = budgeted_runner(architecture, checkpoints), np.random.default_rng(0)
    history = [*rng.integers(0, 290, SYSTEM - 1).tolist(), EOS]
    found: dict[str, list[tuple[int, int]]] = {}
    edits: list[float] = []
    for turn in range(TURNS):
        message, length = LENGTHS[turn % len(LENGTHS)]
        begin = len(history)
        prompt = [*history, *rng.integers(0, 290, message - 1).tolist(), *END]
        answer, _ = last(runner, prompt, length)
        for name, matched in {
            "regenerate": len(prompt) - 1,
            "edit": begin,
            "strip": len(prompt),
            "system": SYSTEM - 2,
        }.items():
            found.setdefault(name, []).append(kept(runner, matched))
        interval = max(runner.entry.checkpoints.interval, len(prompt) / (checkpoints - PINNED))
        reached = (kept(runner, matched) for matched in range(1, len(prompt), 7))
        edits.append(max(matched - there for there, matched in reached) / interval)
        history = [*prompt, *answer[:-1], EOS]
    worst = [min(pairs, key=lambda pair: pair[0] / pair[1]) for pairs in found.values()]
    cells = " | ".join(f"{there} of {matched}" for there, matched in worst)
    return f"| {architecture} | {checkpoints} | {cells} | {max(edits):.2f} |"


def main() -> None:
    print(
        "| architecture | layers (tiny) | regenerate | think-stripped | edit at 4,100 | costs "
        "|\n|---|---|---|---|---|---|"
    )
    for architecture in ARCHITECTURES:
        print(row(architecture), flush=True)
    print(
        "\n| architecture | checkpoints | regenerate | edit of the last message | think-stripped | "
        "line more in the system prompt |"
        " edit anywhere |\n|---|---|---|---|---|---|---|"
    )
    for architecture in BUDGETED:
        for checkpoints in BUDGETS:
            print(budgeted_row(architecture, checkpoints), flush=True)


if __name__ == "__main__":
    main()

"""How far each architecture can be rewound at 8,000 tokens, and what it costs: python tools/rewind_table.py

Tiny random models; tokens and layers are what counts. Prints the table of the README.
"""

from __future__ import annotations

import numpy as np

from mlxrunner import Runner
from mlxrunner.events import Usage
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import EOS, ByteTokenizer
from mlxrunner.testing_models import tiny_config, tiny_model

ARCHITECTURES = [
    "llama", "mistral", "qwen3", "deepseek_v3", "gemma3_text", "gpt_oss", "llama4", "qwen3_next", "lfm2", "jamba", "mamba2",
]  # fmt: skip
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
    figures.append(last(runner, [*history, *answer[250:], EOS, *rng.integers(0, 290, 30).tolist(), *END])[1])
    last(runner, history, 300)
    figures.append(last(runner, [*history[:4100], 5, *history[4101:]])[1])
    layers = ", ".join(f"{count} {kind}" for kind, count in facts.layers.items())
    reused = " | ".join(f"{u.cached_tokens} of {u.matched_tokens}" for u in figures)
    cost = f"{checkpoints} checkpoints, {share:.0%} of the entry's bytes" if checkpoints else "nothing"
    return f"| {architecture} | {layers} | {reused} | {cost} |"


def main() -> None:
    print("| architecture | layers (tiny) | regenerate | think-stripped | edit at 4,100 | costs |\n|---|---|---|---|---|---|")
    for architecture in ARCHITECTURES:
        print(row(architecture), flush=True)


if __name__ == "__main__":
    main()

"""Measure what guessed tokens save or cost, on three kinds of text.

python benchmarks/speculation.py [--size MILLIONS] [--rounds N]

The forward passes are those of a random Llama; what it says is written beforehand, because random
weights repeat nothing: a file of 1,500 tokens with edits, JSON that a schema describes, and prose.
Sides take turns: one token per pass, and --speculate auto.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrunner import Runner
from mlxrunner.bench.models import random_llama
from mlxrunner.models.load import load_model

ROOT = Path(__file__).parent.parent
SIDES = ("off", "auto")
SCHEMA = {
    "type": "array",
    "minItems": 12,
    "maxItems": 12,
    "items": {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 12},
            "birth_year": {"type": "integer", "minimum": 1900, "maximum": 2020},
            "is_member": {"type": "boolean"},
            "newsletter": {"enum": ["weekly", "monthly", "never"]},
        },
        "required": ["first_name", "birth_year", "is_member", "newsletter"],
        "additionalProperties": False,
    },
}
NAMES = "Ada Alan Grace Edsger Barbara Donald Frances John Radia Ken Margaret Niklaus".split()


class Reciting:
    """A model that does all its work, and then says what is written."""

    def __init__(self, model: Any) -> None:
        self._model, self.passes = model, 0
        self.script = mx.zeros(1, mx.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.passes += 1
        at = cache[0].offset
        logits = self._model(tokens, cache=cache)
        said = self.script[at + 1 : at + 1 + tokens.shape[1]]
        return mx.where(mx.arange(logits.shape[-1]) == said[None, :, None], 30.0, logits * 1e-3)


def texts(tokenizer: Any) -> dict[str, tuple[list[int], list[int], dict[str, Any]]]:
    """Return the prompt, the answer and the options of each kind of text."""
    rng = random.Random(1)
    code = tokenizer.encode_more((ROOT / "mlxrunner/cache/lease.py").read_text())[:1500]
    edited = list(code)
    for place in rng.sample(range(len(edited)), 12):
        edited[place : place + rng.randrange(3)] = rng.sample(code, 3)
    prose = tokenizer.encode_more((ROOT / "docs/limits.md").read_text())
    people = [
        {
            "first_name": name,
            "birth_year": rng.randrange(1900, 2020),
            "is_member": rng.random() < 0.5,
            "newsletter": rng.choice(["weekly", "monthly", "never"]),
        }
        for name in NAMES
    ]
    data = tokenizer.encode_more(json.dumps(people))
    return {
        "edit of a file": ([*code, *prose[:20]], edited, {}),
        "JSON by a schema": (prose[:60], data, {"schema": SCHEMA}),
        "prose": (prose[:300], prose[300:900], {}),
        "prose, other words": (code[:300], prose[300:900], {}),
    }


def measure(runner: Runner, text: Any, side: str) -> tuple[float, float, int, int]:
    """Return processor and wall seconds of the decode, its passes and its tokens."""
    prompt, answer, options = text
    model = runner.model
    model.script = mx.array([*prompt, *answer, 0], mx.int32)
    runner.reset()
    chunks = runner.generate(
        prompt, max_tokens=len(answer), stop_tokens=[], speculate=side, **options
    )
    said = [next(chunks).token]
    model.passes, wall, processor = 0, time.perf_counter(), time.process_time()
    said += [chunk.token for chunk in chunks]
    seconds = time.process_time() - processor, time.perf_counter() - wall
    assert said == answer[: len(said)], f"{side}: another answer"
    return *seconds, model.passes, len(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=30, help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    spoken = load_model("demo").tokenizer
    loaded = random_llama("random", given.size * 1e6)
    runner = Runner(Reciting(loaded.model), spoken, loaded.facts, context=8192)
    rows = []
    for name, text in texts(spoken).items():
        runs: dict[str, list[Any]] = {side: [] for side in SIDES}
        for turn in range(given.rounds):
            for side in SIDES if turn % 2 else SIDES[::-1]:
                runs[side].append(measure(runner, text, side))
        pairs = list(zip(runs["off"], runs["auto"], strict=True))
        rows.append(
            [
                name,
                str(runs["off"][0][3]),
                *(str(int(np.median([run[2] for run in runs[side]]))) for side in SIDES),
                *(f"{median(off[i] / auto[i] for off, auto in pairs):.2f}" for i in (0, 1)),
            ]
        )
    print("| text | tokens | passes | passes, guessed | processor time | wall time |")
    print("|---|---|---|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))


if __name__ == "__main__":
    main()

"""Measure what guessed tokens save or cost, on three kinds of text.

python benchmarks/speculation.py [--size MILLIONS] [--rounds N] [--drafts]

With --drafts: a draft model, here and in mlx-lm's own speculative_generate_step, on a random Llama
whose layers after the second one add a share to the outcome; the draft model is the first two.

The forward passes are those of a random Llama; what it says is written beforehand, because random
weights repeat nothing: a file of 1,500 tokens with edits, JSON that a schema describes, and prose.
Sides take turns within each answer: one token per pass, and --speculate auto.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step

from mlxrunner import Runner
from mlxrunner.bench.harness import random_llama
from mlxrunner.cache.layers.factory import CacheOptions
from mlxrunner.engine.draft_model import DraftModel
from mlxrunner.models.load import load_model
from mlxrunner.results import Chunk

PROMPT = list(range(100, 164))
ROOT = Path(__file__).parent.parent
SIDES = ("off", "auto")
STRETCH = 24
"""Tokens after which the sides take turns, so that other work on the machine disturbs both."""
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


class Side:
    """One side of a comparison, which continues by a stretch of its answer at a time."""

    def __init__(self, runner: Runner, chunks: Iterator[Chunk]) -> None:
        self._runner, self._chunks = runner, chunks
        self.said = [next(chunks).token]
        mx.synchronize()
        self.is_over, self.passes, self.processor, self.wall = False, 0, 0.0, 0.0

    def go_on(self) -> None:
        """Answer some tokens more, and add what they took."""
        model = self._runner.model
        model.passes, wall, processor = 0, time.perf_counter(), time.process_time()
        more = [chunk.token for chunk in islice(self._chunks, STRETCH)]
        mx.synchronize()  # no pass of this side is left to the other
        self.processor += time.process_time() - processor
        self.wall += time.perf_counter() - wall
        self.passes += model.passes
        self.said += more
        self.is_over = not more


def texts(tokenizer: Any) -> dict[str, tuple[list[int], list[int], dict[str, Any]]]:
    """Return the prompt, the answer and the options of each kind of text."""
    rng = random.Random(1)
    code = tokenizer.encode_more((ROOT / "mlxrunner/cache/prefix.py").read_text())[:1500]
    edited = list(code)
    for place in rng.sample(range(len(edited)), 12):
        edited[place : place + rng.randrange(3)] = rng.sample(code, 3)
    prose = tokenizer.encode_more((ROOT / "docs/troubleshooting.md").read_text())
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


def measure(runners: dict[str, Runner], text: Any, turn: int) -> dict[str, Side]:
    """Return what each side took for the decode. They take turns within the answer."""
    prompt, answer, options = text
    sides = {}
    for how, runner in runners.items():
        runner.reset()
        runner.model.script = mx.array([*prompt, *answer, 0], mx.int32)
        given = {"max_tokens": len(answer), "stop_tokens": [], "speculate": how} | options
        sides[how] = Side(runner, runner.generate(prompt, **given))
    names = list(sides)
    while not all(side.is_over for side in sides.values()):
        for how in names if turn % 2 else names[::-1]:
            sides[how].go_on()
    for how, side in sides.items():
        assert side.said == answer[: len(side.said)], f"{how}: another answer"
    return sides


def alike(size: float, share: float) -> tuple[Any, Any, Any]:
    """Return a loaded random Llama, and its first two layers, which often say the same.

    `share`: what the other layers add to the outcome, of what they would.
    """
    loaded = random_llama("random", size * 1e6)
    model = loaded.model
    for layer in model.layers[2:]:
        layer.self_attn.o_proj.weight *= share
        layer.mlp.down_proj.weight *= share
    draft = type(model)(replace(model.args, num_hidden_layers=2))
    draft.model.embed_tokens, draft.model.norm = model.model.embed_tokens, model.model.norm
    draft.model.layers, draft.lm_head = model.model.layers[:2], model.lm_head
    mx.eval(model.parameters())
    return loaded, model, draft


def compare_drafts(size: float, rounds: int, count: int = 160) -> None:
    """Print the processor time of each side, as a share of ours without drafts."""
    print("| other layers add | side | processor time | tokens as without drafts |")
    print("|---|---|---|---|")
    for share in (0.01, 0.1, 0.3):
        loaded, model, draft = alike(size, share)
        runner = Runner(model, loaded.tokenizer, loaded.facts, context=1024)
        options = CacheOptions(1024)
        runner.sources.model = DraftModel(draft, loaded.facts.vocab, options, 10**8, 512)

        def ours(how: str, runner: Runner = runner) -> list[Any]:
            runner.reset()
            given: dict[str, Any] = {"max_tokens": count, "stop_tokens": [], "speculate": how}
            return [chunk.token for chunk in runner.generate(PROMPT, **given)]

        def theirs(tokens: int, model: Any = model, draft: Any = draft) -> list[Any]:
            prompt = mx.array(PROMPT)
            if not tokens:
                return [token for token, _ in generate_step(prompt, model, max_tokens=count)]
            given = {"num_draft_tokens": tokens, "max_tokens": count}
            return [int(one[0]) for one in speculative_generate_step(prompt, model, draft, **given)]

        sides: dict[str, Callable[[], list[Any]]] = {"ours, no draft model": partial(ours, "off")}
        sides |= {"ours, draft model": partial(ours, "auto"), "mlx-lm, none": partial(theirs, 0)}
        sides |= {f"mlx-lm, {n} tokens each": partial(theirs, n) for n in (2, 4, 8)}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        said = {}
        for _ in range(rounds):
            for name, answer in sides.items():
                began = time.process_time()
                said[name] = answer()
                taken[name].append(time.process_time() - began)
        plain, expected = taken["ours, no draft model"], said["ours, no draft model"]
        for name, those in taken.items():
            ratio = median(one / usual for one, usual in zip(those, plain, strict=True))
            same = sum(a == b for a, b in zip(said[name], expected, strict=False))
            print(f"| {share} | {name} | {ratio:.2f} | {same} of {count} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=30, help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", action="store_true", help="compare draft models")
    given = parser.parse_args()
    if given.drafts:
        compare_drafts(given.size, given.rounds)
        return
    spoken = load_model("demo").tokenizer
    loaded = random_llama("random", given.size * 1e6)
    runners, drafted = (
        {how: Runner(Reciting(loaded.model), spoken, loaded.facts, context=8192) for how in SIDES}
        for _ in range(2)
    )
    draft = random_llama("draft", given.size * 1e5).model  # knows nothing of what is said
    options = CacheOptions(8192)
    drafted["auto"].sources.model = DraftModel(draft, loaded.facts.vocab, options, 10**8, 512)
    spoken_texts = texts(spoken)
    kinds = [(name, text, runners) for name, text in spoken_texts.items()]
    wrong = "prose, other words"
    kinds.append((f"{wrong}, and a wrong draft model", spoken_texts[wrong], drafted))
    rows = []
    for name, text, sides in kinds:
        runs = [measure(sides, text, turn) for turn in range(given.rounds)]
        first, ratios = (
            runs[0]["off"],
            [
                [getattr(run["off"], kind) / getattr(run["auto"], kind) for run in runs]
                for kind in ("processor", "wall")
            ],
        )
        passes = [median(run[how].passes for run in runs) for how in SIDES]
        numbers = [
            len(first.said),
            *map(int, passes),
            *(f"{median(those):.2f}" for those in ratios),
        ]
        rows.append([name, *map(str, numbers)])
    print("| text | tokens | passes | passes, guessed | processor time | wall time |")
    print("|---|---|---|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))


if __name__ == "__main__":
    main()

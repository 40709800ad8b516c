"""Measure many sequences at once against mlx_lm's batch generator, on the same weights.

python benchmarks/parallel.py [--quick] [--plot FILE]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it), and let nothing else run.
Three sides take turns in one process: ours; mlx-lm's BatchGenerator with the whole prompts; and the
same with the common prefix prefilled once and its caches deep-copied into the batch, as well as it
can be done with it. Times are from the first prompt to the last token, tokens per second count
answers.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from arguments import print_json, print_table
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from mlxrunner.bench.harness import Comparison, less_is_better, more_is_better
from mlxrunner.engine.engine import Engine
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import ByteTokenizer

Prompts = list[list[int]]
Backend = Callable[[Any, list[int], Prompts, int], list[list[int]]]
SIZES = {"512 x 8": (512, 8, 8), "98 M": (768, 12, 12)}


def ours(model: Any, prefix: list[int], ends: Prompts, count: int) -> list[list[int]]:
    facts = facts_of(model, vars(model.args))
    capacity = len(prefix) + max(map(len, ends)) + count
    with Engine(
        model,
        ByteTokenizer(),
        facts,
        max_sequences=len(ends),
        context=capacity,
        kv_cache_tokens=cells(prefix, ends, count),
        prefill_step=1280,
    ) as runner:
        results = runner.run([prefix + end for end in ends], max_tokens=count, stop_tokens=[])
    return [result.tokens for result in results]


def cells(prefix: list[int], ends: Prompts, count: int) -> int:
    """Return twice the cells that these requests need when the prefix is stored once.

    Each sequence's own tokens can lie side by side then.
    """
    return 2 * (len(prefix) + sum(len(end) + count for end in ends))


def batch_generate(model: Any, prefix: list[int], ends: Prompts, count: int) -> list[list[int]]:
    return drain(model, [prefix + end for end in ends], None, count)


def prefilled_once(model: Any, prefix: list[int], ends: Prompts, count: int) -> list[list[int]]:
    if not prefix:
        return batch_generate(model, prefix, ends, count)
    cache = make_prompt_cache(model)
    model(mx.array([prefix]), cache=cache)
    mx.eval([layer.state for layer in cache])
    return drain(model, ends, [copy.deepcopy(cache) for _ in ends], count)


def drain(model: Any, prompts: Prompts, caches: Any, count: int) -> list[list[int]]:
    generator = BatchGenerator(
        model, max_tokens=count, completion_batch_size=len(prompts), prefill_batch_size=8
    )
    ids = generator.insert(prompts, caches=caches) if caches else generator.insert(prompts)
    answers: dict[int, list[int]] = {i: [] for i in ids}
    while sum(map(len, answers.values())) < count * len(prompts):
        responses = generator.next()
        for response in responses[1] if isinstance(responses, tuple) else responses:
            answers[response.uid].append(response.token)
    return [answers[i] for i in ids]


def measure(
    side: Backend, model: Any, prefix: list[int], ends: Prompts, count: int
) -> tuple[float, float, list[list[int]]]:
    """Tokens per second, peak bytes beside the weights, and the answers."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    answers = side(model, prefix, ends, count)
    seconds = time.perf_counter() - began
    return count * len(ends) / seconds, mx.get_peak_memory() - before, answers


def compare(
    model: Any, label: str, prefix: int, sequences: int, count: int, rounds: int, targets: bool
) -> list[Comparison]:
    rng = np.random.default_rng(0)
    common = rng.integers(10, 250, prefix).tolist()
    ends = [rng.integers(10, 250, (8 if prefix else 64) + i % 5).tolist() for i in range(sequences)]
    sides: list[Backend] = [ours, batch_generate, prefilled_once]
    figures: dict[Backend, list[tuple[float, float, list[list[int]]]]] = {
        side: [] for side in sides
    }
    for turn in range(rounds):
        for side in sides if turn % 2 else sides[::-1]:
            figures[side].append(measure(side, model, common, ends, count))
    same = sum(
        a == b for a, b in zip(figures[ours][0][2], figures[batch_generate][0][2], strict=True)
    )
    name = (
        f"{label}, {sequences} x {count} tokens, prefix {prefix} ({same} of {sequences} answers "
        "equal)"
    )
    rate = {side: [run[0] for run in runs] for side, runs in figures.items()}
    peak = {side: [run[1] / 1e6 for run in runs] for side, runs in figures.items()}
    shared = prefix > 0
    rows = [
        more_is_better(
            f"{name}: vs batch_generate",
            "tok/s",
            rate[ours],
            rate[batch_generate],
            (5 if shared else 1) if targets else None,
        ),
        less_is_better("  peak", "MB", peak[ours], peak[batch_generate]),
    ]
    if shared:
        rows += [
            more_is_better(
                "  vs prefix prefilled once and copied",
                "tok/s",
                rate[ours],
                rate[prefilled_once],
                1.2 if targets else None,
            ),
            less_is_better("  peak", "MB", peak[ours], peak[prefilled_once]),
        ]
    return rows


def random_llama(hidden: int, layers: int, heads: int) -> Any:
    args = ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=hidden * 8 // 3,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        rms_norm_eps=1e-5,
        vocab_size=8192,
        max_position_embeddings=16384,
        tie_word_embeddings=hidden < 768,
    )
    mx.random.seed(0)
    model = Model(args)
    mx.eval(model.parameters())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one small comparison: does it work, not how fast is it",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="instead: how a step's cost grows, from 1 to 64 sequences and a prefix of 0 to 8k",
    )
    given = parser.parse_args()
    if given.plot:
        import growth

        growth.plot(growth.measure(random_llama(*SIZES["512 x 8"])), given.plot)
        return
    rows: list[Comparison] = []
    for label, size in [("256 x 2", (256, 2, 4))] if given.quick else SIZES.items():
        model = random_llama(*size)
        prefix, sequences, count = (128, 4, 8) if given.quick else (1024, 16, 64)
        rows += compare(
            model, label, prefix, sequences, count, given.rounds, targets=not given.quick
        )
        rows += compare(model, label, 0, sequences, count, given.rounds, targets=not given.quick)
    print_table(rows)
    print_json(rows, versus="mlx_lm.batch_generate")


if __name__ == "__main__":
    main()

"""Measure the decode steps of many sequences on a hybrid model against mlx_lm's batch generator.

python benchmarks/hybrids.py [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it). The model has three recurrent
layers (Gated DeltaNet, as in Qwen 3.5) for each of full attention, 29 million random parameters.
The sides take turns in one process: many requests of ours, mlx-lm's BatchGenerator, and our single
runner, one request after the other. Only steps in which all sequences decode are measured, in
tokens per second of processor time, which other programs hardly change.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from arguments import parser_of, print_json, print_table
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.qwen3_5 import Model, ModelArgs

from mlxrunner import Runner
from mlxrunner.bench.harness import Comparison, more_is_better
from mlxrunner.engine.engine import Engine
from mlxrunner.models.facts import facts_of
from mlxrunner.testing import ByteTokenizer

Prompts = list[list[int]]
Side = Callable[[Any, Prompts, int], float]
PROMPT, CONTEXT, WARM = 40, 512, 3


def ours(model: Any, prompts: Prompts, steps: int) -> float:
    """Return tokens per second of `steps` steps of all `prompts`."""
    facts = facts_of(model, vars(model.args))
    with Engine(
        model, ByteTokenizer(), facts, max_sequences=len(prompts), context=CONTEXT
    ) as runner:
        handles = [
            runner.submit(prompt, max_tokens=CONTEXT - PROMPT - 1, stop_tokens=[])
            for prompt in prompts
        ]
        while not all(handle.poll() for handle in handles):
            runner.step()
        return rate(runner.step, len(prompts), steps)


def batch_generate(model: Any, prompts: Prompts, steps: int) -> float:
    generator = BatchGenerator(
        model, max_tokens=CONTEXT, completion_batch_size=len(prompts), prefill_batch_size=8
    )
    generator.insert(prompts)
    while len(_responses(generator)) < len(prompts):
        pass
    return rate(generator.next, len(prompts), steps)


def _responses(generator: Any) -> Any:
    found = generator.next()
    return found[1] if isinstance(found, tuple) else found


def one_by_one(model: Any, prompts: Prompts, steps: int) -> float:
    runner = Runner(model, ByteTokenizer(), facts_of(model, vars(model.args)))
    answer = runner.generate(prompts[0], max_tokens=CONTEXT, stop_tokens=[])
    next(answer)
    return rate(lambda: next(answer), 1, steps)


def rate(step: Callable[[], Any], tokens: int, steps: int) -> float:
    for _ in range(WARM):
        step()
    began = time.process_time()
    for _ in range(steps):
        step()
    return tokens * steps / (time.process_time() - began)


def compare(model: Any, sequences: int, steps: int, rounds: int, *, targets: bool) -> Comparison:
    random = np.random.default_rng(0)
    prompts = [random.integers(10, 250, PROMPT).tolist() for _ in range(sequences)]
    sides: list[Side] = [ours, batch_generate, one_by_one]
    rates: dict[Side, list[float]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side in sides if turn % 2 else sides[::-1]:
            gc.collect()
            mx.clear_cache()
            rates[side].append(side(model, prompts, steps))
    alone = sorted(rates[one_by_one])[rounds // 2]
    return more_is_better(
        f"{sequences} sequences (one by one: {alone:.0f})",
        "tok/s",
        rates[ours],
        rates[batch_generate],
        0.9 if targets else None,
    )


def hybrid(hidden: int, layers: int) -> Any:
    config = {
        "model_type": "qwen3_5",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": hidden * 3,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": 4096,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "full_attention_interval": 4,
        "linear_num_value_heads": hidden // 64,
        "linear_num_key_heads": hidden // 128,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    }
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def main() -> None:
    given = parser_of(__doc__, rounds=5, quick="a small comparison").parse_args()
    model = hybrid(128, 4) if given.quick else hybrid(512, 8)
    steps, sizes = (4, (2,)) if given.quick else (40, (8, 16))
    rows = [compare(model, count, steps, given.rounds, targets=not given.quick) for count in sizes]
    print_table(rows)
    print_json(rows, versus="mlx_lm.batch_generate")


if __name__ == "__main__":
    main()

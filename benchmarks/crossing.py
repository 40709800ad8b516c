"""Measure tokens of an answer about a picture that layers look at beside the row (mllama).

PYTHONPATH=tests python benchmarks/crossing.py [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it). A model with random float32
weights gets a picture that fills its four tiles, and a question after it. "mlx-vlm" is what its
`generate` calls for each token: the layers make keys and values of the picture again. Both answer
in turns in one process, and the answers have to be equal. A picture has 6404 rows, as in Llama 3.2
Vision.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import mlx.core as mx
from arguments import parser_of
from support import seeing
from support.seeing import joined

from mlxrunner import Runner
from mlxrunner.models.facts import ModelFacts
from mlxrunner.pictures.vision_encoder import VisionEncoder
from mlxrunner.testing import ByteTokenizer
from mlxrunner.tokenizer.prompt import TokenizedPrompt

FULL = 3
"""The number of a made-up picture without an empty tile."""
QUESTION = list(range(1, 20))


def widened() -> None:
    """Make the model of the tests larger."""
    config = seeing.CONFIGS["mllama"]
    wide = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6}
    more = {"num_hidden_layers": 10, "num_key_value_heads": 2, "cross_attention_layers": [3, 8]}
    config["text_config"] |= {**wide, **more}
    config["vision_config"] |= {"image_size": 160}


def theirs(
    model: Any, prompt: list[int], inputs: dict[str, mx.array], count: int
) -> tuple[Any, float]:
    """Return the greedy answer of mlx-vlm, and the seconds of each token after the first."""
    from mlx_vlm.models.cache import make_prompt_cache

    language = model.language_model
    found = model.get_input_embeddings(mx.array([prompt]), **inputs)
    states = {"cross_attention_states": found.cross_attention_states}
    cache, answer, began = make_prompt_cache(language), list[int](), 0.0
    logits = language(mx.array([prompt]), cache=cache, **states).logits
    while True:
        best: Any = mx.argmax(logits[0, -1]).item()
        answer.append(int(best))
        began = began or time.perf_counter()
        if len(answer) == count:
            return answer, (time.perf_counter() - began) / (count - 1)
        logits = language(mx.array([answer[-1:]]), cache=cache, **states).logits


def ours(runner: Runner, prompt: TokenizedPrompt, count: int) -> tuple[Any, float]:
    runner.reset()
    answer, began = list[int](), 0.0
    for chunk in runner.generate(prompt, max_tokens=count, stop_tokens=[], temperature=0.0):
        answer += [] if chunk.token is None else [chunk.token]
        began = began or time.perf_counter()
    return answer, (time.perf_counter() - began) / (count - 1)


def main() -> None:
    given = parser_of(__doc__, rounds=9, quick="the model of the tests").parse_args()
    if not given.quick:
        widened()
    model = seeing.built("mllama")
    sight = VisionEncoder(model, seeing.MadeUpProcessor("mllama"), "*", b"")
    facts = ModelFacts("mllama", 2048, True, {"full": 2}, seeing.VOCABULARY, False)
    runner = Runner(seeing.seeing_model(model, sight), ByteTokenizer(), facts, context=512)
    block, made = seeing.block_of("mllama", FULL)
    inputs = joined("mllama", [made])
    times: list[tuple[float, float]] = []
    for _ in range(given.rounds + 1):
        asked = seeing.prompt_of("mllama", sight, [("picture", FULL), ("text", QUESTION)])
        mine, own = ours(runner, asked, 33), theirs(model, [*block, *QUESTION], inputs, 33)
        assert mine[0] == own[0], (mine[0], own[0])
        times.append((mine[1], own[1]))
    mine_s, theirs_s = (median(column) * 1000 for column in zip(*times[1:], strict=True))
    share = median(mine / own for mine, own in times[1:])
    print(f"mlxrunner {mine_s:.2f} ms a token, mlx-vlm {theirs_s:.2f} ms, share {share:.2f}")


if __name__ == "__main__":
    main()

"""Measure the second question about a picture beside mlx-vlm.

PYTHONPATH=tests python benchmarks/pictures.py [--quick]

On Linux first put a fast BLAS in front (`mlxrunner doctor` names it). Vision models with random
float32 weights get a picture and a question, and then, with the answer in the history, a second
question. Time runs from the call to the first token, so it has reading the file, preparing the
picture, and the template. "mlx-vlm" is its `stream_generate` with the whole conversation, "with its
caches" adds the two caches that it offers for conversations (`PromptCacheState` and
`VisionFeatureCache`). All run in turns in one process, and all answers have to be equal.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from arguments import parser_of
from PIL import Image
from support import seeing

from mlxrunner import Runner

QUESTIONS = ("What is to be seen here, and where?", "And what is beside it?")
ANSWER = 8
"""Tokens of an answer."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""All that the models say: a text that comes back is made of the same tokens."""


def write(folder: Path, kind: str, *, quick: bool) -> Path:
    """Write a model of this architecture: larger than those of the tests, unless `quick`."""
    config: dict[str, Any] = seeing.CONFIGS[kind]
    config["vocab_size"] = 263 if kind == "gemma3" else 264  # the tokens of the tokenizer
    if kind == "gemma3":
        config["text_config"]["vocab_size"] = 263
    else:
        config["tie_word_embeddings"] = False
    if not quick:
        wide = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6}
        text = {**wide, "num_hidden_layers": 8, "num_key_value_heads": 2}
        eyes = {"hidden_size": 384, "intermediate_size": 1024}
        if kind == "gemma3":
            config["hidden_size"] = 384
            config["text_config"] |= {**text, "head_dim": 64, "mm_tokens_per_image": 64}
            config["vision_config"] |= {**eyes, "num_hidden_layers": 8, "num_attention_heads": 6}
            config["vision_config"] |= {"image_size": 256, "patch_size": 16}
            own = {"size": {"height": 256, "width": 256}}
            seeing.PROCESSORS["gemma3"] |= own
        else:
            config |= text | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 8, 8]}}
            config["vision_config"] |= {**eyes, "depth": 8, "num_heads": 6, "out_hidden_size": 384}
            seeing.PROCESSORS["qwen"] |= {"max_pixels": 128 * 128}
    seeing.write_seeing(folder, kind)
    if kind == "gemma3":
        about = folder / "processor_config.json"
        count = config["text_config"]["mm_tokens_per_image"]
        about.write_text(json.dumps(json.loads(about.read_text()) | {"image_seq_length": count}))
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    letters = {
        json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"][one]
        for one in LETTERS
    }
    name = "language_model.lm_head.weight"
    if kind == "gemma3":  # mlx-vlm uses the embeddings in its place
        name = "language_model.model.embed_tokens.weight"
    spoken = [[float(token in letters)] for token in range(len(weights[name]))]
    weights[name] = weights[name] * mx.array(spoken)
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    return folder


class Theirs:
    """mlx-vlm, asked as its documentation says."""

    def __init__(self, folder: Path, picture: str) -> None:
        from mlx_vlm.utils import load

        self.model, self.processor = load(str(folder))
        self.model.set_dtype(mx.float32)
        self.picture = picture
        self.begin(cached=False)

    def begin(self, *, cached: bool) -> None:
        """Begin a conversation."""
        from mlx_vlm.generate.common import PromptCacheState
        from mlx_vlm.vision_cache import VisionFeatureCache

        self.caches: dict[str, Any] = {}
        if cached:
            state, seen = PromptCacheState(), VisionFeatureCache()
            self.caches = {"prompt_cache_state": state, "vision_cache": seen}

    def ask(self, messages: list[dict[str, Any]]) -> tuple[float, str]:
        """Return the seconds to the first token, and the answer."""
        from mlx_vlm.generate import stream_generate

        begin, first, text = time.perf_counter(), 0.0, ""
        prompt = self.processor.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        for one in stream_generate(
            self.model,
            self.processor,
            prompt,
            image=[self.picture],
            max_tokens=ANSWER,
            temperature=0.0,
            **self.caches,
        ):
            first = first or time.perf_counter() - begin
            text += one.text
        return first, text


def ours(runner: Runner) -> Callable[[list[dict[str, Any]]], tuple[float, str]]:
    def ask(messages: list[dict[str, Any]]) -> tuple[float, str]:
        begin, first, text = time.perf_counter(), 0.0, ""
        for chunk in runner.generate(messages, max_tokens=ANSWER, temperature=0.0):
            first = first or time.perf_counter() - begin
            text += chunk.text
        return first, text

    return ask


def converse(ask: Callable[..., tuple[float, str]], picture: str) -> list[tuple[float, str]]:
    """Ask both questions, and return the times and the answers."""
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTIONS[0]}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    found = [ask(messages)]
    messages.append({"role": "assistant", "content": found[0][1]})
    messages.append({"role": "user", "content": QUESTIONS[1]})
    return [*found, ask(messages)]


def measure(kind: str, work: Path, *, rounds: int, quick: bool) -> None:
    """Print the medians of `kind`."""
    folder = write(work / kind, kind, quick=quick)
    picture = str(work / "picture.png")
    noise = np.random.default_rng(5).integers(0, 255, (256, 256, 3), np.uint8)
    Image.fromarray(noise).save(picture)
    times = defaultdict[str, list[tuple[float, float]]](list)
    answers = set[tuple[str, ...]]()
    theirs = Theirs(folder, picture)
    with Runner.load(str(folder), pictures=True) as runner:

        def one(name: str) -> None:
            runner.reset()
            theirs.begin(cached="caches" in name)
            asked = converse(ours(runner) if name == "mlxrunner" else theirs.ask, picture)
            times[name].append((asked[0][0], asked[1][0]))
            answers.add(tuple(text for _, text in asked))

        names = ("mlxrunner", "mlx-vlm", "mlx-vlm with its caches")
        for number in range(rounds + 1):
            for name in names:
                one(name)
            if not number:
                times.clear()  # the first run of each prepares kernels and files
    assert len(answers) == 1, answers
    for name in names:
        first, second = (median(column) * 1000 for column in zip(*times[name], strict=True))
        share = median(
            mine[1] / its[1] for mine, its in zip(times["mlxrunner"], times[name], strict=True)
        )
        print(f"{kind:12} {name:24} {first:8.1f} ms {second:8.1f} ms   {share:.2f}")


def main() -> None:
    given = parser_of(__doc__, rounds=9, quick="the models of the tests").parse_args()
    print("                                    first question, second   mlxrunner's second / this")
    with tempfile.TemporaryDirectory() as work:
        for kind in ("gemma3", "qwen2_5_vl"):
            measure(kind, Path(work), rounds=given.rounds, quick=given.quick)


if __name__ == "__main__":
    main()

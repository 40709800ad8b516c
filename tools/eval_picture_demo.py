"""Judge the picture demo on pictures that training never used.

python tools/eval_picture_demo.py [--pictures 200] [--model demo-pictures]

Each picture gets six questions in one conversation, greedily, through `Runner` itself. The history
has the true answers, so that a wrong one counts once.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from typing import Any

import numpy as np

from mlxrunner import Runner
from picture_corpus import Question, drawn, question, scene

QUESTIONS = 6


def kind_of(asked: Question) -> str:
    """Return the kind of a question."""
    return " ".join(asked.text.split()[: 2 if asked.text.startswith("How") else 1])


def judge(runner: Runner, pictures: int) -> tuple[Counter[str], Counter[str], list[str]]:
    """Return right answers and questions by kind, and what was wrong."""
    right, asked, wrong = Counter[str](), Counter[str](), list[str]()
    for number in range(pictures):
        rng = random.Random(f"evaluation:{number}")
        shown = scene(rng)
        pixels = np.asarray(drawn(shown, rng))
        messages = list[dict[str, Any]]()
        for place in range(QUESTIONS):
            one = question(shown, rng)
            parts: list[dict[str, Any]] = [{"type": "text", "text": one.text}]
            if not place:
                parts.insert(0, {"type": "image", "image": pixels})
            messages.append({"role": "user", "content": parts})
            answer = runner.complete(messages, max_tokens=20, temperature=0.0).text
            messages.append({"role": "assistant", "content": one.answer})
            asked[kind_of(one)] += 1
            right[kind_of(one)] += answer == one.answer
            if answer != one.answer:
                wrong.append(f"{one.text} {answer!r} is not {one.answer!r}")
    return right, asked, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge the picture demo.")
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--model", default="demo-pictures")
    given = parser.parse_args()
    with Runner.load(given.model, pictures=True) as runner:
        right, asked, wrong = judge(runner, given.pictures)
    for kind, count in sorted(asked.items()):
        print(f"{kind}: {right[kind]} of {count}, {right[kind] / count:.1%}")
    print(f"all: {right.total()} of {asked.total()}, {right.total() / asked.total():.1%}")
    print("\n".join(wrong[:10]))


if __name__ == "__main__":
    main()

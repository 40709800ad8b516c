"""Judge the demo model on conversations that training never used.

python tools/eval_demo.py [--conversations 500] [--model demo]

Every question whose answer is a fact told earlier is asked through `Runner` itself, with the true
conversation up to there as its history, greedily; it counts as right if the right word is in the
answer. In half of the conversations all names are ones that occur nowhere in the training text;
every fourth one is long, with small talk up to about 1,000 tokens.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from dataclasses import dataclass, field

from demo_corpus import Dialogue, dialogue
from mlxrunner import Runner


@dataclass
class Score:
    """Right answers and questions, by kind of question; `wrong`: (question, right word, answer)."""

    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    def share(self, kind: str) -> float:
        return self.right[kind] / max(1, self.asked[kind])


def conversation(number: int) -> Dialogue:
    """The `number`-th conversation of the evaluation; seeded apart from those of the training."""
    rng = random.Random(f"evaluation:{number}")
    filler = rng.randint(12, 30) if number % 4 == 3 else 0
    return dialogue(rng, filler=filler, held_out=number % 2 == 1)


def evaluate(runner: Runner, numbers: range) -> Score:
    """Ask every recall question of these conversations."""
    score = Score()
    for number in numbers:
        talk = conversation(number)
        for recall in talk.recalls:
            prompt = talk.messages[: recall.index]
            tokens = runner.tokenize(prompt)
            if len(tokens) + 40 > runner.context:
                continue
            answer = runner.complete(tokens.tolist(), max_tokens=40).text
            right = re.search(rf"(?<!\w){re.escape(recall.word)}(?!\w)", answer) is not None
            kinds = [
                "all",
                recall.kind,
                "unseen name" if recall.unseen else "other",
                "long" if len(tokens) > 500 else "short",
            ]
            score.asked.update(kinds)
            score.right.update(kinds if right else [])
            if not right:
                score.wrong.append((prompt[-1]["content"], recall.word, answer))
    return score


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--show-wrong", type=int, default=10, metavar="N")
    args = parser.parse_args()
    score = evaluate(Runner.load(args.model), range(args.conversations))
    for question, word, answer in score.wrong[: args.show_wrong]:
        print(f"wrong: {question!r} wants {word!r}, got {answer!r}")
    for kind in sorted(score.asked):
        print(f"{kind:12} {score.right[kind]:5} of {score.asked[kind]:5}  {score.share(kind):6.1%}")
    print(
        f"recall {score.share('all'):.1%} (wanted: 97 %), names never seen "
        f"{score.share('unseen name'):.1%} (wanted: 90 %)"
    )


if __name__ == "__main__":
    main()

"""Judge the demo model on conversations that training never used.

python tools/eval_demo.py [--conversations 500] [--model demo]

Every question whose answer is a fact told earlier is asked through `Runner` itself, with the true
conversation up to there as its history, greedily; it counts as right if the right word is in the
answer. In half of the conversations all names are ones that occur nowhere in the training text;
every fourth one is long, with small talk up to about 1,000 tokens. Each line of `SMALL_TALK`, none
of which is in the training text, is the first message of a conversation of its own.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from dataclasses import dataclass, field

from demo_corpus import Dialogue, dialogue
from mlxrunner import Runner

LONGEST = 200
"""The most characters of a sensible answer to small talk."""
SMALL_TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"Hello|fine|listening|Good|good",
        (
            "hellooo",
            "Hello, little one!",
            "hi computer, hi",
            "heyo, hi, hello!",
            "heyyy",
            "Hi! I am new here",
            "good morning sunshine",
            "good evening to the machine",
            "hello from the far north",
            "hi, first time here",
            "howdy partner",
            "Top of the morning",
            "Hi demo model",
            "hello hello, testing the waters",
            "Yo yo",
            "Knock knock",
            "Greetings, machine",
        ),
    ),
    (
        r"fine|glad|happy|I see|Hello",
        (
            "how's it going?",
            "how ya doing",
            "And you, how do you do today?",
            "How has your day been?",
            "You doing alright?",
            "what is new in your world",
            "are you feeling good?",
            "How are you holding up?",
        ),
    ),
    (
        r"welcome|happy",
        (
            "thank you, little robot",
            "Thanks, that is all I needed",
            "thanks for your time",
            "thx m8",
            "Thank you for remembering",
            "Many many thanks!",
            "that helped, thank you",
            "ok thank you",
        ),
    ),
    (
        r"Goodbye|evening|work|see|right|time",
        (
            "ok bye now",
            "see you next week",
            "Good night, sleep well",
            "I am off to bed",
            "gotta run, bye",
            "Time to go home",
            "bye bye little bot",
            "that's it for me, goodbye",
            "have a great weekend",
            "I will write again in a bit",
        ),
    ),
    (
        r"demo model|toy",
        (
            "whom am I talking to?",
            "Tell me who you are",
            "are you an actual human being?",
            "do robots like you have names?",
            "Which company built you?",
            "Are you GPT-4?",
            "what are you made of?",
            "Are you a cat?",
            "how many parameters do you have",
            "Is there a person behind this?",
        ),
    ),
    (
        r"remember|toy",
        (
            "what are you able to do?",
            "How can you be of use?",
            "So what do you do all day?",
            "can you give me a hand",
            "I could use some help",
            "What should I try first?",
            "show me what you can do",
            "help me please, bot",
        ),
    ),
    (
        r"toy|told|remember|sky",
        (
            "What is the meaning of life?",
            "Who was the first man on the moon?",
            "how tall is Mount Everest",
            "Write a haiku about rain",
            "what's 17 times 23",
            "Can you write some Python for me?",
            "explain gravity like I am five",
            "how do airplanes stay up",
            "Tell me a story about a fox",
            "What is the best pizza topping",
            "who is the prime minister of Japan?",
            "Translate cat into Spanish",
            "Give me a recipe for pancakes",
            "Is there life on other planets?",
            "What will happen tomorrow?",
            "how do I boil an egg",
            "Do aliens exist?",
            "summarize War and Peace",
            "Why is the sky blue?",
            "What's the weather in Rome?",
            "convert 5 miles to kilometers",
            "When did the Titanic sink?",
            "Which came first, the chicken or the egg?",
            "write me a cover letter",
            "What is MLX?",
            "how fast is light",
            "Plan a trip to Iceland",
            "Do you dream of sheep?",
        ),
    ),
    (
        r"see|Tell me|glad|sorry|rest|walk|good|right|work|told|toy|lovely|Friends|tasty|happy",
        (
            "My train was cancelled",
            "I baked bread yesterday",
            "The neighbours have a new car",
            "It is Sunday and I am bored",
            "I just woke up",
            "we watched the stars last night",
        ),
    ),
    (
        r"happy|glad|like|toy|right",
        (
            "you are pretty funny",
            "that's really cool!",
            "nice one, bot",
            "wow, that was quick",
            "I like the way you talk",
        ),
    ),
)
"""Lines that strangers type first, with a pattern of the sensible answers to them."""


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


def odd_answers(runner: Runner) -> list[tuple[str, str]]:
    """Return the lines of small talk that get no sensible answer, with the answer."""
    found = []
    for sensible, lines in SMALL_TALK:
        for line in lines:
            answer = runner.complete([{"role": "user", "content": line}], max_tokens=200).text
            if len(answer) > LONGEST or not re.search(sensible, answer):
                found.append((line, answer))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--show-wrong", type=int, default=10, metavar="N")
    args = parser.parse_args()
    runner = Runner.load(args.model)
    odd, lines = odd_answers(runner), sum(len(lines) for _, lines in SMALL_TALK)
    for line, answer in odd[: args.show_wrong]:
        print(f"odd: {line!r} got {answer!r}")
    print(f"small talk: {lines - len(odd)} of {lines} sensible (wanted: 90 %)")
    score = evaluate(runner, range(args.conversations))
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

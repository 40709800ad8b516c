"""The embedded demo model keeps its promises, on conversations that training never used."""

from __future__ import annotations

import random

import pytest
from support.sample import fewer

from demo_corpus import dialogue
from demo_facts import FACTS, is_held_out
from demo_small_talk import small_talk
from eval_demo import SMALL_TALK, conversation, evaluate, odd_answers
from mlxrunner import Runner


@pytest.mark.exhaustive(0)
def test_it_recalls_what_it_was_told() -> None:
    """The demo recalls 97 % of all questions and 90 % of those about unseen names.

    A part of what tools/eval_demo.py runs, with the same bounds.
    """
    count = fewer(60, 14)
    score = evaluate(Runner.load("demo", reserve=False), range(count))
    assert score.asked["all"] > 2 * count
    assert score.asked["unseen name"] > count / 2
    assert score.asked["long"] > count / 2
    assert score.share("all") >= 0.97, score.wrong
    assert score.share("unseen name") >= 0.9, score.wrong


@pytest.mark.exhaustive(0)
def test_it_answers_small_talk() -> None:
    """At least 90 of 100 lines that strangers may type first get a sensible, short answer."""
    odd = odd_answers(Runner.load("demo", reserve=False, context=512))
    assert len(odd) <= 10, odd


def test_lines_of_the_evaluation_are_not_in_training() -> None:
    """Case and signs do not count."""

    def bare(line: str) -> str:
        return "".join(one for one in line.lower() if one.isalnum() or one == " ").strip()

    judged = {bare(line) for _, lines in SMALL_TALK for line in lines}
    assert len(judged) == 100
    rng = random.Random(1)
    trained = {bare(small_talk(rng)[0]) for _ in range(20_000)}
    for step in range(2_000):
        talk = dialogue(random.Random(f"1:{step}"))
        trained |= {bare(one["content"]) for one in talk.messages if one["role"] == "user"}
    assert not judged & trained


@pytest.mark.parametrize("number", range(8))
def test_names_of_the_evaluation_occur_nowhere_in_training(number: int) -> None:
    """Every word of a training dialogue that could be a name is on the other side of the split."""
    recalls = conversation(2 * number + 1).recalls
    unseen = {recall.word.lower() for recall in recalls if recall.unseen}
    assert all(map(is_held_out, unseen))
    words = {
        word.strip(".,?!").lower()
        for step in range(300)
        for message in dialogue(random.Random(f"1:{step}")).messages
        for word in message["content"].split()
    }
    assert not unseen & words


def test_the_corpus_follows_from_its_seed() -> None:
    """It tells, asks and answers consistently: the recalled word is in the answer."""
    first, again = (dialogue(random.Random(5), filler=10) for _ in range(2))
    assert first == again
    for number in range(100):
        talk = conversation(number)
        roles = [message["role"] for message in talk.messages if message["role"] != "system"]
        assert roles[:2] == ["user", "assistant"]
        for recall in talk.recalls:
            assert recall.kind in FACTS
            assert recall.word in talk.messages[recall.index]["content"]

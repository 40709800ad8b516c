"""A conversation's history is the tokens that were evaluated."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mlxrunner import ContextLengthError, Runner
from mlxrunner.chat.conversation import Conversation
from mlxrunner.testing import EOS, ByteTokenizer, oracle_runner


@pytest.fixture(scope="module")
def demo() -> Runner:
    return Runner.load("demo")


def say(conversation: Conversation, text: str) -> str:
    return "".join(chunk.text for chunk in conversation.send(text))


def test_turn_10_evaluates_only_the_new_tokens_and_remembers_turn_1(demo: Runner) -> None:
    """The main job, on the embedded demo model."""
    demo.reset()
    conversation = Conversation(demo)
    texts = "My name is Ana.|I have a dog.|Hello!|How are you?|I love to eat soup.|Thanks.|"
    for text in f"{texts}I am tired.|Okay.|Good night.".split("|"):
        say(conversation, text)
    before = len(demo.entry.tokens)
    assert "Ana" in say(conversation, "What is my name?")
    usage = conversation.usages[-1]
    assert len(conversation.usages) == 10
    assert (usage.outcome, usage.cached_tokens) == ("hit", before)
    turn = "\n<|im_start|>user\nWhat is my name?<|im_end|>\n<|im_start|>assistant\n"
    assert usage.evaluated_tokens == len(demo.tokenizer.encode_more(turn))
    assert usage.cache.trimmed_tokens == 0


def test_every_turn_of_a_chat_is_a_full_hit(demo: Runner) -> None:
    """The tokens are kept, not made again from the text, however the model splits its words."""
    demo.reset()
    conversation = Conversation(demo, options={"temperature": 1.5, "seed": 3, "max_tokens": 12})
    for turn in range(8):
        say(conversation, f"Call me Zqx{turn}vwj.")
        usage = conversation.usages[-1]
        assert usage.outcome == ("hit" if turn else "miss")
        assert usage.cache.trimmed_tokens == 0


def test_the_template_decides_what_the_tokens_mean(demo: Runner) -> None:
    """The kept tokens spell exactly what the template renders."""
    demo.reset()
    conversation = Conversation(demo, system="Be brief.")
    for text in ("My name is Ana.", "What is my name?", "Hello!"):
        say(conversation, text)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *conversation.messages]
    rendered = demo.tokenizer.render(messages, add_generation_prompt=False)
    assert rendered.startswith(demo.tokenizer.decode(list(demo.entry.tokens)))


def endless(runner: Runner, **options: Any) -> Conversation:
    return Conversation(runner, options={"stop_tokens": [], **options})


def test_an_answer_that_is_stopped_stays_as_far_as_it_was_shown() -> None:
    """In the history and in the entry; the next turn continues from there, and both count."""
    runner = oracle_runner()
    conversation = endless(runner)
    answer: Iterator[Any] = conversation.send("hello")
    shown = "".join(next(answer).text for _ in range(4))
    answer.close()  # type: ignore[attr-defined]
    conversation.send("never begun").close()  # type: ignore[attr-defined]
    assert conversation.messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": shown},
    ]
    before = len(runner.entry.tokens)
    conversation.options["max_tokens"] = 3
    say(conversation, "again")
    first, second = conversation.usages
    assert (first.outcome, first.completion_tokens) == ("miss", 4)
    assert (second.outcome, second.cached_tokens) == ("hit", before)
    assert before == first.prompt_tokens + 4


def test_a_turn_without_an_answer_is_taken_back() -> None:
    """An interrupted prefill keeps the conversation as it was and the entry's finished chunks."""
    runner = oracle_runner(prefill_step=4)
    conversation = endless(runner, max_tokens=3)
    say(conversation, "hello")
    messages = list(conversation.messages)

    def give_up(done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(
            conversation.send("a question that is long enough for several chunks", progress=give_up)
        )
    assert conversation.messages == messages
    assert runner.entry.is_true
    assert len(runner.entry.tokens) > 40


def test_a_turn_that_does_not_fit_is_taken_back() -> None:
    """The error names both numbers; a shorter turn still works."""
    conversation = endless(oracle_runner(context=100), max_tokens=3, overflow="stop")
    say(conversation, "hello")
    with pytest.raises(ContextLengthError, match="context of 100 tokens"):
        conversation.send("x" * 200)
    assert len(conversation.messages) == 2
    say(conversation, "short")
    assert len(conversation.messages) == 4


def test_a_stop_string_falls_back_to_the_text() -> None:
    """The tokens say more than the answer, so the history is tokenized from the text."""
    runner = oracle_runner()
    conversation = endless(runner, max_tokens=8)
    answer = say(conversation, "hello")
    runner.reset()
    conversation = endless(runner, max_tokens=8, stop=(answer[3],))
    assert say(conversation, "hello") == answer[: answer.index(answer[3])]
    say(conversation, "next")
    text = runner.tokenizer.render(conversation.messages[:-1])
    assert list(runner.entry.tokens)[: len(text.encode()) + 1][1:5] == list(text.encode())[:4]


def test_a_stop_string_keeps_the_tokens_of_what_was_shown() -> None:
    """The next turn is a partial hit up to there, not a new tokenization of everything."""
    runner = Runner.load("demo", reserve=False)
    conversation = Conversation(runner, options={"stop": "."})
    for turn, text in enumerate(("My name is Ana.", "I have a dog.", "What is my name?")):
        say(conversation, text)
        usage = conversation.usages[-1]
        assert usage.cached_tokens >= usage.prompt_tokens - 30 or turn == 0
    assert conversation.messages[-1]["content"] == "Your name is Ana"


@pytest.mark.exhaustive(1)
@pytest.mark.parametrize(
    "options",
    [{"stop": "."}, {"stop": "e", "max_tokens": 20}, {"max_tokens": 3}],
    ids=["stop", "early", "limit"],
)
def test_a_full_context_never_ends_a_chat(options: dict[str, Any]) -> None:
    """No turn is refused whatever ends the answers, and no half context is evaluated each time."""
    runner = Runner.load("demo", context=200, reserve=False)
    conversation = Conversation(runner, options=options)
    for turn in range(30):
        say(conversation, ("Hello!", "I have a dog.", "How are you?")[turn % 3])
        assert conversation.usages[-1].evaluated_tokens < 60
        assert runner.entry.is_true
    assert sum(usage.cache.shifted_tokens for usage in conversation.usages) > 100


class Stripping(ByteTokenizer):
    """A template that leaves thinking out of earlier answers, so that the tokens never continue."""

    def render(self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        changed = [
            {**m, "content": m["content"].upper()} if m["role"] == "assistant" else m
            for m in messages
        ]
        return super().render(
            changed,  # type: ignore[arg-type]
            add_generation_prompt=add_generation_prompt,
        )


def test_a_template_that_rewrites_answers_survives_a_full_context() -> None:
    """The oldest turns are not rendered any more."""
    runner = oracle_runner(context=200)
    runner.tokenizer = Stripping()
    conversation = endless(runner, max_tokens=4)
    conversation.policy = "template"
    for turn in range(20):
        say(conversation, f"turn {turn} and some words")
    assert len(conversation.usages) == 20
    assert conversation.history.first > 0
    rendered = runner.tokenizer.render(conversation.messages[2 * conversation.history.first :])
    assert len(rendered) < 200


class Thinking(ByteTokenizer):
    """A template that begins each answer with thinking, and leaves it out of earlier answers."""

    def render(self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        text = super().render(messages, add_generation_prompt=add_generation_prompt)
        return re.sub("<think>.*?</think>", "", text) + "<think>" * add_generation_prompt


def test_thinking_leaves_the_history_with_the_policy_exact_whenever_that_is_set() -> None:
    """Also that of an answer which was given with the policy "template"."""
    runner = oracle_runner()
    runner.tokenizer = Thinking()
    conversation = endless(runner, max_tokens=4)
    conversation.policy = "template"
    say(conversation, "a question")
    conversation.set_policy("exact")
    say(conversation, "another question")
    before, _, _ = conversation.asked.text.rpartition("<think>")
    assert "<think>" not in before


def test_a_message_that_fails_costs_no_older_turn() -> None:
    """The turns that would have had to give room for it are still said to the model."""
    runner = Runner.load("demo", reserve=False)
    conversation = Conversation(runner, policy="template")
    say(conversation, "My name is Ana.")
    with pytest.raises(ContextLengthError):
        conversation.send("word " * 3000)
    assert conversation.history.first == 0
    assert say(conversation, "What is my name?") == "Your name is Ana."


def test_drafts_that_are_given_up_are_not_counted_as_evaluated_ahead() -> None:
    """Only what the message that is sent has of them."""
    runner = oracle_runner()
    conversation = endless(runner, max_tokens=3)
    say(conversation, "hello")
    before = len(runner.entry.tokens)
    conversation.evaluate("a long draft that is given up in the end", lambda: False)
    shared = len(conversation.renderer.render_draft(conversation.history, "").tokens)
    say(conversation, "short")
    assert conversation.usages[-1].cached_tokens == shared
    assert conversation.usages[-1].cache.prefetched_tokens == shared - before
    say(conversation, "more")
    assert conversation.usages[-1].cache.prefetched_tokens == 0


def test_an_answer_of_repeated_tokens_is_kept_whole_over_a_shift() -> None:
    """Nothing is lost or doubled where the entry was moved."""
    runner = Runner.load("demo", context=60, reserve=False)
    conversation = Conversation(runner, options={"stop_tokens": [], "max_tokens": 40})
    for _ in range(4):
        answer = say(conversation, "Hello!")
        assert runner.tokenizer.decode(conversation.history.rendering.tokens).endswith(answer)


def test_a_turn_that_was_interrupted_before_any_text_is_taken_back() -> None:
    """Even if a token was given already, of which nothing could be shown."""
    runner = oracle_runner()
    conversation = endless(runner, stop="\x00" * 3 + "never")
    chunks = conversation.send("hello")
    while not next(chunks).text:
        pass
    chunks.close()  # type: ignore[attr-defined]
    assert len(conversation.messages) == 2
    conversation.clear()
    chunks = conversation.send("hello")
    chunks.close()  # type: ignore[attr-defined]
    assert conversation.messages == []


def test_clear_keeps_the_system_prompt_and_its_tokens() -> None:
    """The first turn after it reuses them."""
    runner = oracle_runner()
    conversation = Conversation(
        runner, system="a system prompt", options={"max_tokens": 3, "stop_tokens": [EOS]}
    )
    say(conversation, "hello")
    conversation.clear()
    say(conversation, "other")
    assert conversation.usages[-1].cached_tokens >= len("system: a system prompt")


def act(conversation: Conversation, rng: random.Random, saved: list[Any]) -> None:
    """Do something that a person may do."""
    turns, number = conversation.history.turns, rng.randrange(100)
    what = rng.choice("send send stop type type type undo edit branch switch look clear".split())
    if what in ("send", "stop"):
        answer = conversation.send(f"q{number} " + "x" * rng.randrange(20))
        for _ in range(rng.randrange(3) if what == "stop" else 100):
            next(answer, None)
        answer.close()  # type: ignore[attr-defined]
    elif what == "type":
        left = iter(range(rng.randrange(6)))
        conversation.evaluate(
            f"q{number} " + "y" * rng.randrange(20), lambda: next(left, None) is None
        )
    elif what == "undo":
        conversation.undo(rng.randrange(1, 3))
    elif what == "edit" and turns:
        conversation.answer_with(rng.randrange(len(turns)), f"edited {number}")
    elif what == "branch":
        saved.append(conversation.history)
    elif what == "switch" and saved:
        conversation.history = saved[-1]
    elif what == "look":
        conversation.evaluate("", lambda: False)
        assert conversation.outlook().cached <= conversation.outlook().tokens
        conversation.drift()
    elif what == "clear":
        conversation.clear()


@pytest.mark.exhaustive(20)
@pytest.mark.parametrize(
    "kinds", [["full", "full"], ["full", "recurrent"], ["sliding", "composite"]], ids="+".join
)
@pytest.mark.parametrize("policy", ["exact", "template"])
@pytest.mark.parametrize("context", [160, 4096], ids=["full context", "much room"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_done_the_entry_is_exact_and_every_place_is_true(
    kinds: list[str], policy: Any, context: int, seed: int
) -> None:
    """Turns, interrupts, typing, going back and forth, in any order."""
    rng = random.Random(seed)
    often = {"checkpoint_budget": 10**6, "checkpoint_interval": 16}
    runner = oracle_runner(kinds, context=context, prefill_step=7, **often)
    options = {"stop_tokens": [], "max_tokens": rng.choice([3, 8])}
    system = rng.choice([None, "be brief"])
    conversation = Conversation(runner, system, options=options, policy=policy)
    saved: list[Any] = []
    for _ in range(40):
        act(conversation, rng, saved)
        history, entry = conversation.history, list(runner.entry.tokens)
        assert runner.entry.is_true or not entry
        marks = [mark for turn in history.turns for mark in (turn.begins, turn.ends) if mark]
        for place in marks:
            assert place.characters <= len(history.rendering.text)
            assert place.tokens <= len(history.rendering.tokens)
        has_shifted = any(usage.cache.shifted_tokens for usage in conversation.usages)
        if rng.random() < 0.1 and 0 < len(entry) < context - 5 and not has_shifted:
            warm, cold = (
                [chunk.token for chunk in one.generate([*entry, 5], max_tokens=3, stop_tokens=[])]
                for one in (runner, oracle_runner(kinds))
            )
            assert warm == cold


def test_an_edited_answer_behind_a_gap_is_known_to_lack_tokens() -> None:
    """An edited answer is saved with its lost tokens, so that the file does not look damaged."""
    conversation = Conversation(
        oracle_runner(context=100),
        options={"max_tokens": 30, "stop_tokens": [], "overflow": "shift", "keep": 2},
    )
    say(conversation, "x" * 60)
    assert conversation.history.dropped > 0
    turn = conversation.history.turns[0]
    conversation.answer_with(0, "no")
    history, tokenizer = conversation.history, conversation.runner.tokenizer
    spells = tokenizer.decode(history.rendering.tokens) == history.rendering.text
    assert spells != bool(history.dropped), turn

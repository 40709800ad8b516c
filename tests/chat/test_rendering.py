"""Evaluated tokens spell one part of a prompt, the template makes the other."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxrunner.chat.conversation import Conversation, TemplateDrift
from mlxrunner.runner import Runner
from mlxrunner.templates.messages import ThinkingSplitter, has_thinking, without_thinking
from mlxrunner.testing import EOS, ByteTokenizer, oracle_runner


class Script:
    """Makes the model say its text, as a logits processor asked once per token."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where(
            mx.arange(logits.shape[-1]) == (self.left.pop(0) if self.left else EOS), 1e4, logits
        )


class Template(ByteTokenizer):
    """A template of a thinking model that trims earlier answers and strips their thinking.

    It may open the thinking itself.
    """

    def __init__(self, opens: bool = False) -> None:
        self.opens = opens

    def render(self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        shown: list[Any] = []
        for number, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "assistant":
                content = (content.split("</think>")[-1] if number < last else content).strip()
            shown.append({**message, "content": content})
        text = super().render(shown, add_generation_prompt=add_generation_prompt)
        if not add_generation_prompt:
            return text
        closing = "\n</think>\n\n" * (variables.get("enable_thinking") is False)
        return text + "<think>\n" * self.opens + closing


def talk(tokenizer: ByteTokenizer | None = None, **options: Any) -> tuple[Conversation, Script]:
    script = Script()
    runner = oracle_runner()
    runner.tokenizer = tokenizer or Template()
    return Conversation(runner, options={"logits_processors": [script]}, **options), script


def say(conversation: Conversation, script: Script, text: str, answer: str) -> None:
    script.left = [*answer.encode(), EOS]
    assert "".join(chunk.text for chunk in conversation.send(text)) == answer


def evaluate_while_reading(conversation: Conversation) -> None:
    conversation.evaluate("", lambda: False)


def is_spelled(conversation: Conversation) -> bool:
    """The tokens spell the text."""
    spelling = conversation.history.rendering
    return conversation.runner.tokenizer.decode(spelling.tokens) == spelling.text


@pytest.mark.parametrize("opens", [False, True], ids=["model opens", "template opens"])
def test_thinking_is_left_out_while_the_user_reads(opens: bool) -> None:
    """The entry is rewound and the reply is evaluated as the next turn sees it, for a full hit.

    This holds where the template leaves the thinking out.
    """
    conversation, script = talk(Template(opens))
    begin = "" if opens else "<think>"
    say(conversation, script, "first", f"{begin}hmm, what is that?</think>\n\nAn answer.")
    evaluate_while_reading(conversation)
    entry, tokenizer = conversation.runner.entry, conversation.runner.tokenizer
    seen = tokenizer.decode(list(entry.tokens))
    assert seen == "user: first\x1eassistant: An answer.\x1euser: "
    assert is_spelled(conversation)
    before = len(entry.tokens)
    say(conversation, script, "second", f"{begin}again</think>\n\nAnother.")
    usage = conversation.usages[-1]
    assert usage.cached_tokens == before
    opening = "<think>\n" if opens else ""
    assert usage.evaluated_tokens == len(f"second\x1eassistant: {opening}")
    say(conversation, script, "third", "Without thinking.")
    rendered = tokenizer.render([*conversation.messages, {"role": "user", "content": "fourth"}])
    assert rendered.startswith(conversation.history.rendering.text.removesuffix("\x1e"))
    assert "think>" not in conversation.history.rendering.text


class Harmony(ByteTokenizer):
    """The template of gpt-oss in short.

    An answer is a message of its own in the channel "final", and may not name its channel.
    """

    def render(self, messages: Any, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        text = ""
        for message in messages:
            is_answer = message["role"] == "assistant"
            assert not is_answer or "<|channel|>" not in message["content"]
            text += (
                f"<|start|>{message['role']}{'<|channel|>final' * is_answer}"
                f"<|message|>{message['content']}<|end|>"
            )
        return text + "<|start|>assistant" * add_generation_prompt


def test_thinking_that_is_a_message_of_its_own_is_left_out_too() -> None:
    """The template is given the answer proper, every turn continues, and each is a full hit."""
    conversation, script = talk(Harmony())
    analysis, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    final, user = "<|channel|>final<|message|>", "<|start|>user<|message|>"
    evaluated = 0
    for number, thought in enumerate((f"{analysis}hmm{end}", "", f"{analysis}x{end}")):
        say(conversation, script, f"question {number}", f"{thought}{final}Answer {number}.")
        assert conversation.usages[-1].cached_tokens == evaluated
        evaluate_while_reading(conversation)
        evaluated = len(conversation.runner.entry.tokens)
        assert is_spelled(conversation)
    seen = conversation.runner.tokenizer.decode(list(conversation.runner.entry.tokens))
    turns = [f"{user}question {n}{end}{final}Answer {n}.<|end|>" for n in range(3)]
    assert seen == "".join(turns) + user
    answers = [message["content"] for message in conversation.messages[1::2]]
    assert answers == [f"Answer {n}." for n in range(3)]
    drift = conversation.drift()
    assert drift is not None
    assert drift.kind == "none"
    conversation.answer_with(1, "Changed.")
    changed = turns[0] + turns[1].replace("Answer 1.", "Changed.") + user
    assert conversation.history.rendering.text == changed


def test_thinking_is_kept_on_demand() -> None:
    """Nothing is rewound; the drift says what the template would have left out."""
    conversation, script = talk(keep_thinking=True)
    say(conversation, script, "first", "<think>hmm</think>\n\nAn answer.")
    evaluate_while_reading(conversation)
    say(conversation, script, "second", "Good.")
    assert conversation.usages[-1].cache.trimmed_tokens == 0
    assert conversation.history.rendering.text == (
        "user: first\x1eassistant: <think>hmm</think>\n\nAn answer.\x1euser: second\x1eassistant: "
        "Good.\x1e"
    )
    drift = conversation.drift()
    assert drift is not None
    assert drift.kind == "thinking"
    assert drift.evaluated - drift.template == len("<think>hmm</think>\n\n")


def test_exact_keeps_what_was_evaluated_and_says_how_it_differs() -> None:
    """An answer with spaces around it, which the template trims: no token is evaluated twice."""
    conversation, script = talk()
    say(conversation, script, "first", "  An answer.  ")
    say(conversation, script, "second", "Good.")
    usage = conversation.usages[-1]
    assert (usage.outcome, usage.cache.trimmed_tokens) == ("hit", 0)
    assert usage.evaluated_tokens == len("user: second\x1eassistant: ")
    drift = conversation.drift()
    assert drift is not None
    assert (drift.kind, drift.evaluated - drift.template) == ("whitespace", 4)
    assert str(drift) == (
        f"different white space, after {drift.at} tokens: {drift.evaluated - drift.at} were "
        f"evaluated, the template has {drift.template - drift.at}"
    )
    assert is_spelled(conversation)


def test_template_evaluates_from_the_difference() -> None:
    """The same answers: the entry is what a cold run on the template's text would hold."""
    conversation, script = talk(policy="template")
    say(conversation, script, "first", "  An answer.  ")
    say(conversation, script, "second", "Good.")
    usage = conversation.usages[-1]
    assert usage.cache.trimmed_tokens > 0
    text = "user: first\x1eassistant: An answer.\x1euser: second\x1eassistant: Good.\x1e"
    assert conversation.history.rendering.text == text
    assert conversation.drift() == TemplateDrift("none", *[usage.prompt_tokens + 6] * 3)


def test_other_tokens_of_the_same_text_are_a_drift_that_exact_keeps() -> None:
    """A sampled answer of the demo model has words that are split otherwise."""
    runner = Runner.load("demo", reserve=False)
    conversation = Conversation(
        runner, options={"temperature": 2.0, "seed": 5, "max_tokens": 40, "stop_tokens": []}
    )
    list(conversation.send("Hello!"))
    list(conversation.send("And?"))
    drift = conversation.drift()
    assert drift is not None
    assert drift.kind in ("retokenized", "text")
    assert conversation.usages[-1].cache.trimmed_tokens == 0


def test_a_draft_is_the_beginning_of_what_is_sent() -> None:
    """It may continue in any way, also behind earlier turns."""
    runner = Runner.load("demo", reserve=False)
    conversation = Conversation(runner, "Be brief.")
    for text in ("My name is Ana.", "I have a dog."):
        whole = conversation.renderer.render(conversation.history, text).tokens
        for end in range(len(text) + 1):
            draft = conversation.renderer.render_draft(conversation.history, text[:end]).tokens
            assert draft[: max(len(draft) - 4, 0)] == whole[: max(len(draft) - 4, 0)]
        list(conversation.send(text))


def test_typing_ahead_leaves_only_the_last_tokens() -> None:
    """Typed text is in the entry when it is sent, and the answers are those without it."""
    ahead, plain = (
        Conversation(Runner.load("demo", reserve=False), options={"max_tokens": 20})
        for _ in range(2)
    )
    for text in ("My name is Ana and I have a very good dog.", "What is my name?"):
        for end in (*range(0, len(text) + 1, 7), len(text)):
            ahead.evaluate(text[:end], lambda: False)
        typed, asked = ("".join(chunk.text for chunk in one.send(text)) for one in (ahead, plain))
        assert typed == asked
        assert ahead.usages[-1].evaluated_tokens <= 16
        assert ahead.usages[-1].cache.prefetched_tokens > 0
        assert ahead.history.rendering == plain.history.rendering


def test_going_back_keeps_the_tokens_before() -> None:
    """Undo, another answer, a branch: the tokens up to there are those that were evaluated."""
    conversation, script = talk()
    for number in range(4):
        say(conversation, script, f"question {number}", f" answer {number} ")
    spelled = conversation.history.rendering
    entry = tuple(conversation.runner.entry.tokens)
    taken = conversation.undo(2)
    assert [turn.user for turn in taken] == ["question 2", "question 3"]
    mark = conversation.history.turns[-1].ends
    assert mark is not None
    left = conversation.history.rendering.tokens
    assert left == spelled.tokens[: mark.tokens] == entry[: mark.tokens]
    assert conversation.outlook().cached == conversation.outlook().tokens
    conversation.answer_with(0, "changed")
    assert [turn.answer for turn in conversation.history.turns] == ["changed"]
    assert conversation.history.rendering.text.endswith("question 0\x1eassistant: changed")
    say(conversation, script, "and now?", "Good.")
    assert conversation.history.rendering.text.endswith(
        "assistant: changed\x1euser: and now?\x1eassistant: Good.\x1e"
    )
    assert is_spelled(conversation)


@pytest.mark.parametrize(
    ("prompt", "answer", "thought", "said"),
    [
        ("", "<think>\nhmm\n</think>\n\nHello", "\nhmm\n", "Hello"),
        ("x<think>\n", "hmm</think>\n\nHello <think>", "hmm", "Hello <think>"),
        ("", "Hello <think> is a tag </think>", "", "Hello <think> is a tag </think>"),
        ("", "  <think>never ended", "never ended", ""),
        ("", "[THINK]a[/THINK]b", "a", "b"),
        (
            "",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            "a",
            "b",
        ),
        ("", "<|channel|>final<|message|>b", "", "b"),
        ("", "<thi", "", "<thi"),
        ("", "", "", ""),
    ],
    ids=(
        "model opens, template opens, later, unfinished, other tags, channels, no analysis, "
        "half a tag, nothing"
    ).split(", "),
)
def test_thinking_is_told_from_the_answer_however_it_is_cut(
    prompt: str, answer: str, thought: str, said: str
) -> None:
    """Piece by piece of every length."""
    for length in range(1, len(answer) + 2):
        thinking = ThinkingSplitter(prompt)
        pieces = [
            piece
            for at in range(0, len(answer), length)
            for piece in thinking.add(answer[at : at + length])
        ]
        pieces += thinking.finish()
        assert "".join(text for is_thinking, text in pieces if is_thinking) == thought
        assert "".join(text for is_thinking, text in pieces if not is_thinking) == said


def test_an_answer_without_its_thinking() -> None:
    """For the clipboard and for the next turn."""
    assert without_thinking("<think>a</think>\n\nb") == "b"
    assert without_thinking("a</think>\n\nb", "assistant: <think>\n") == "b"
    assert without_thinking("Write </think> at the end.") == "Write </think> at the end."
    assert without_thinking("<think>a") == ""
    assert without_thinking("b <think>a</think>") == "b <think>a</think>"
    assert has_thinking("a</think>b")
    assert not has_thinking("b")

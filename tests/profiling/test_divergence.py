"""A prompt and the entry part at the right message and part, in six template families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.checks import read_lines

from mlxrunner.chat.conversation import Conversation
from mlxrunner.profiling.divergence import _from_begin, _from_end
from mlxrunner.profiling.schema import Event
from mlxrunner.tokenizer.prompt import TokenizedPrompt

SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def side(divergence: dict[str, Any], name: str) -> tuple[Any, ...]:
    return tuple(divergence[name][key] for key in ("message", "role", "part"))


def sides(event: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return side(event["divergence"], "previous"), side(event["divergence"], "current")


def test_an_edited_message_is_named(talk: Callable[..., Any], family: Any) -> None:
    """The second user message is named in each family, and its text where it was asked for."""
    talking = talk(family.name, log_text=True)
    talking.ask([user("Hello you"), assistant("Hi"), user("blue cars")], "fine")
    event = talking.ask([user("Hello you"), assistant("Hi"), user("blue bikes")], "fine")
    assert event["reason"] == "diverged"
    assert sides(event) == ((2, "user", "text"), (2, "user", "text"))
    divergence = event["divergence"]
    assert (divergence["message"], divergence["role"], divergence["part"]) == (2, "user", "text")
    assert divergence["common"]["text"].endswith("blue ")
    assert divergence["previous"]["text"].startswith("cars")
    assert divergence["current"]["text"].startswith("bikes")
    where = f"at token {divergence['index']}, in the text of message 2 (user)"
    assert where in Event.of(event).explain()


def test_an_answer_that_was_changed_is_named(talk: Callable[..., Any], family: Any) -> None:
    """The entry's side is the answer itself, which was no part of a prompt yet."""
    talking = talk(family.name)
    talking.ask([user("Hello")], "one two")
    event = talking.ask([user("Hello"), assistant("one three"), user("so")], "fine")
    # The answer had begun without the channel, or the space, that some templates write.
    part = "template_header" if family.name in ("harmony", "mistral") else "text"
    assert sides(event) == ((1, "assistant", "text"), (1, "assistant", part))
    event = talking.ask([SYSTEM, user("Hello")], "fine")
    event = talking.ask([{"role": "system", "content": "Be long."}, user("Hello")], "fine")
    assert sides(event) == ((0, "system", "text"), (0, "system", "text"))


def test_a_message_that_goes_on_parts_at_its_end(talk: Callable[..., Any]) -> None:
    talking = talk("chatml")
    talking.ask([user("Hello")], "fine")
    event = talking.ask([user("Hello, once more")], "fine")
    assert sides(event) == ((0, "user", "message_end"), (0, "user", "text"))
    told = Event.of(event).explain()
    head = "the prompt leaves the cached text in the middle; they part at token "
    assert told.startswith(head)
    where = "in the text of message 0 (user), where before was the end mark of message 0 (user)"
    assert where in told


ANALYSIS = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>fine"
)
PARTED: dict[str, tuple[str, list[Any], str, list[Any], tuple[Any, Any]]] = {
    "another role": (
        "chatml",
        [user("a"), assistant("b"), user("c")],
        "fine",
        [user("a"), user("b"), user("c")],
        ((1, "assistant", "template_header"), (1, "user", "template_header")),
    ),
    "a user instead of an answer": (
        "chatml",
        [user("a")],
        "fine",
        [user("a"), user("b")],
        ((1, "assistant", "generation_prompt"), (1, "user", "template_header")),
    ),
    "within thinking that both begin": (
        "chatml",
        [user("Hello")],
        "<think>one</think>fine",
        [user("Hello"), assistant("<think>other</think>fine"), user("so")],
        ((1, "assistant", "thinking"), (1, "assistant", "thinking")),
    ),
    "a channel that is not sent back": (
        "harmony",
        [user("Hello")],
        ANALYSIS,
        [user("Hello"), assistant("fine"), user("so")],
        ((1, "assistant", "thinking"), (1, "assistant", "template_header")),
    ),
}


@pytest.mark.parametrize(("name", "first", "answer", "then", "places"), PARTED.values(), ids=PARTED)
def test_each_part_of_a_template_is_named(
    name: str, first: Any, answer: str, then: Any, places: Any, talk: Callable[..., Any]
) -> None:
    """A change in parts that few prompts change."""
    talking = talk(name)
    talking.ask(first, answer)
    assert sides(talking.ask(then, "fine")) == places


def test_thinking_that_qwen_strips_is_named(talk: Callable[..., Any]) -> None:
    talking = talk("qwen3", log_text=True)
    answer = "<think>\nhm\n</think>\n\nfine"
    talking.ask([user("Hello")], answer)
    event = talking.ask([user("Hello"), assistant(answer), user("so")], "fine")
    assert sides(event) == ((1, "assistant", "thinking"), (1, "assistant", "text"))
    assert event["divergence"]["previous"]["text"].startswith("<think>\nhm")
    assert event["divergence"]["current"]["text"].startswith("fine<|im_end|>")
    where = (
        "in the text of message 1 (assistant), where before was the thinking block of message 1 "
        "(assistant)"
    )
    assert where in Event.of(event).explain()


def test_another_tool_list_is_named(talk: Callable[..., Any]) -> None:
    """A prompt that its caller has rendered with tools."""
    talking = talk("chatml")
    tokenizer = talking.runner.tokenizer

    def prepared(tool: str) -> TokenizedPrompt:
        variables = {"tools": [{"name": tool}]}
        text = tokenizer.render([SYSTEM, user("Hello")], **variables)
        tokens = np.array(tokenizer.encode(text), np.int32)
        return TokenizedPrompt(tokens, "messages", [SYSTEM, user("Hello")], text, variables)

    talking.ask(prepared("weather"), "fine")
    event = talking.ask(prepared("clock"), "fine")
    assert sides(event) == ((0, "system", "tools"), (0, "system", "tools"))
    assert "in the tool list of message 0 (system)" in Event.of(event).explain()


def test_hashes_are_all_that_is_written_by_default(talk: Callable[..., Any]) -> None:
    """Equal for equal tokens; another profile has other ones."""
    talking = talk("chatml")
    talking.ask([user("Hello secret")], "fine")
    event = talking.ask([user("Hello hidden secret")], "fine")
    divergence = event["divergence"]
    assert {divergence[name]["text"] for name in ("common", "previous", "current")} == {None}
    assert "secret" not in talking.file.read_text()
    common, previous = divergence["common"]["tokens"], divergence["previous"]["tokens"]
    blank = talking.runner.tokenizer.encode_more(" ")
    assert common[-1] == talking.profile._divergences._hashes(blank)[0]
    assert len(common) == 8
    assert 0 < len(previous) <= 16
    again = talk("chatml")
    again.ask([user("Hello secret")], "fine")
    other = again.ask([user("Hello hidden secret")], "fine")["divergence"]
    assert other["common"]["tokens"] != common


def test_raw_prompts_have_text_and_token_ids_nothing(talk: Callable[..., Any]) -> None:
    talking = talk("chatml")
    talking.ask("Hello you", "fine")
    assert sides(talking.ask("Hello there", "fine")) == ((None, None, "text"), (None, None, "text"))
    talking.ask([1, 2, 3, 4], "fine")
    event = talking.ask([1, 2, 5, 6], "fine")
    assert sides(event) == ((None, None, None), (None, None, None))
    assert "in a prompt without known parts" in Event.of(event).explain()


def test_a_chat_knows_its_messages(talk: Callable[..., Any]) -> None:
    """Though it hands over tokens."""
    talking = talk("chatml")
    conversation = Conversation(talking.runner, "Be brief.", {"max_tokens": 3})
    list(conversation.send("first"))
    conversation.clear()
    list(conversation.send("second"))
    event = read_lines(talking.file)[-1]
    assert (event["prompt_kind"], event["messages"]) == ("messages", 2)
    assert sides(event) == ((1, "user", "text"), (1, "user", "text"))


def test_a_character_of_several_tokens_is_not_cut_apart(talk: Callable[..., Any]) -> None:
    """Two letters that share their first byte; and text beyond ASCII before and after."""
    talking = talk("chatml")
    for before, after in (("größe", "grüße"), ("日本語", "日木語")):
        talking.ask([user(before), assistant("ü"), user("日本")], "fine")
        event = talking.ask([user(after), assistant("ü"), user("日本")], "fine")
        assert sides(event) == ((0, "user", "text"), (0, "user", "text"))


@pytest.mark.parametrize(
    ("text", "decoded", "begin", "end"),
    [
        ("[INST] a[/INST]", "[INST]  a [/INST]", 15, 0),  # a decoder that adds spaces
        ("[INST] a b", "[INST] a", 8, None),
        ("x y z", " x", 1, None),
        ("x\ny\nz", "z", None, 4),
        ("aö", "\ufffd", 0, 1),
        ("abc", "abd", None, None),
    ],
)
def test_tokens_are_found_in_the_text_whatever_a_decoder_does_to_spaces(
    text: str, decoded: str, begin: int | None, end: int | None
) -> None:
    assert (_from_begin(text, decoded), _from_end(text, decoded)) == (begin, end)

"""Every character of a rendered conversation is placed in its message, in six families."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from mlxrunner.templates.probe import Place, Rendered
from mlxrunner.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "user"},  # words that templates also write
    {"role": "user", "content": "s"},
    {"role": "assistant", "content": "assistant"},
    {"role": "user", "content": " [INST] system\n"},
]


Tokenizers = dict[str, Tokenizer]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def parts(tokenizer: Tokenizer, messages: Any, **variables: Any) -> list[tuple[Any, ...]]:
    """Runs of characters of one place: (text, message, role, part)."""
    text = tokenizer.render(messages, **variables)
    rendered = Rendered(tokenizer.render, messages, text, variables)
    runs = groupby(range(len(text)), rendered.place)
    return [("".join(text[at] for at in run), *place[:3]) for place, run in runs]


Pieces = list[tuple[int, str, str, str, str]]
"""Number and role of each message, and what stands before its text, its text, and its end."""


def chat_of(begin: str, headers: str, end: str, last: str = " [INST] system\n") -> Pieces:
    """Return the pieces of CHAT where all headers are alike but for the role in place of `{}`."""
    told = [(one["role"], one["content"]) for one in CHAT[:3]] + [("user", last)]
    return [
        (number, role, (begin if number == 0 else "") + headers.format(role), text, end)
        for number, (role, text) in enumerate(told)
    ]


CHATML = chat_of("", "<|im_start|>{}\n", "<|im_end|>\n"), "<|im_start|>assistant\n"
LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n"
MODEL = (
    "<|start|>system<|message|>You are a model. Reasoning: low<|end|><|start|>developer<|message|>"
)
FINAL = "<|start|>assistant<|channel|>final<|message|>"
EXPECTED: dict[str, tuple[Pieces, str]] = {
    "chatml": CHATML,
    "qwen3": CHATML,
    "llama3": (
        [
            (
                *(0, "system"),
                f"<s>{LLAMA3.format('system')}Today Date: 26 Jul 2024\n\n",
                *("user", "<|eot_id|>"),
            ),
            *chat_of("", LLAMA3, "<|eot_id|>", "[INST] system")[1:],
        ],
        LLAMA3.format("assistant"),
    ),
    "gemma": (  # the system text goes in front of the first user message
        [
            (0, "system", "<s><start_of_turn>user\n", "user", ""),
            (1, "user", "\n\n", "s", "<end_of_turn>\n"),
            (2, "assistant", "<start_of_turn>model\n", "assistant", "<end_of_turn>\n"),
            (3, "user", "<start_of_turn>user\n", "[INST] system", "<end_of_turn>\n"),
        ],
        "<start_of_turn>model\n",
    ),
    "mistral": (  # the system text goes into the last user message
        [
            (1, "user", "<s>[INST] ", "s", "[/INST]"),
            (2, "assistant", " ", "assistant", "</s>"),
            (0, "system", "[INST] ", "user", ""),
            (3, "user", "\n\n", " [INST] system\n", "[/INST]"),
        ],
        "",
    ),
    "harmony": (
        [
            (0, "system", f"{MODEL}# Instructions\n\n", "user", "<|end|>"),
            (1, "user", "<|start|>user<|message|>", "s", "<|end|>"),
            (2, "assistant", FINAL, "assistant", "<|end|>"),
            (3, "user", "<|start|>user<|message|>", " [INST] system\n", "<|end|>"),
        ],
        "<|start|>assistant",
    ),
}
"""The pieces of CHAT in each family, and the prompt for the answer."""


def placed(pieces: Pieces, prompt: str) -> list[tuple[Any, ...]]:
    kinds = ("template_header", "text", "message_end")
    found = [
        (text, number, role, kind)
        for number, role, *texts in pieces
        for text, kind in zip(texts, kinds, strict=True)
    ]
    found.append((prompt, 4, "assistant", "generation_prompt"))
    return [one for one in found if one[0]]


def test_every_character_has_its_place(family: Any) -> None:
    """The places are the template's, whatever the texts say."""
    assert parts(family.tokenizer, CHAT) == placed(*EXPECTED[family.name])


def test_thinking_that_the_template_writes_is_a_part_of_its_message(
    family_tokenizers: Tokenizers,
) -> None:
    """Qwen 3 keeps that of the turn under way, in its own layout."""
    messages = [user("a"), assistant("<think>why</think>b")]
    assert parts(family_tokenizers["qwen3"], messages)[3:7] == [
        ("<|im_start|>assistant\n", 1, "assistant", "template_header"),
        ("<think>\nwhy\n</think>", 1, "assistant", "thinking"),
        ("\n\nb", 1, "assistant", "text"),
        ("<|im_end|>\n", 1, "assistant", "message_end"),
    ]


def test_thinking_that_the_template_strips_leaves_the_text(
    family_tokenizers: Tokenizers,
) -> None:
    """The thinking is that of earlier turns."""
    messages = [user("a"), assistant("<think>\nwhy\n</think>\n\nb"), user("c")]
    assert ("b", 1, "assistant", "text") in parts(family_tokenizers["qwen3"], messages)
    assert all(part != "thinking" for *_, part in parts(family_tokenizers["qwen3"], messages))


def test_a_block_that_the_template_adds_to_the_prompt_is_its_own(
    family_tokenizers: Tokenizers,
) -> None:
    """Qwen 3 with thinking switched off."""
    last = parts(family_tokenizers["qwen3"], [user("a")], enable_thinking=False)[-1]
    prompt = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert last == (prompt, 1, "assistant", "generation_prompt")


def test_the_tool_list_is_what_the_template_adds_for_tools(
    family_tokenizers: Tokenizers,
) -> None:
    """Wherever it puts it, in whatever words."""
    tools = [{"name": "weather", "description": "system"}]
    found = parts(family_tokenizers["chatml"], CHAT[:2], tools=tools)
    (listed,) = [found for found in found if found[-1] == "tools"]
    assert listed[0] == '\n\n# Tools\n{"name": "weather", "description": "system"}'
    assert listed[1:] == (0, "system", "tools")
    assert [text for text, *_, part in found if part == "text"] == ["user", "s"]


def test_text_that_was_spelled_otherwise_is_found_again(
    family_tokenizers: Tokenizers,
) -> None:
    """A conversation that kept the thinking which its template would strip."""
    messages = [user("a"), assistant("<think>why</think>b"), user("c")]
    render = family_tokenizers["qwen3"].render
    text = render(messages).replace("assistant\nb", "assistant\n<think>why</think>b")
    kept = Rendered(render, messages, text)
    assert kept.place(text.index("why")) == Place(1, "assistant", "thinking")
    assert kept.place(text.index("b<|im_end|>")) == Place(1, "assistant", "text")
    assert kept.place(text.index("c<|im_end|>")) == Place(2, "user", "text")


@pytest.mark.parametrize("text", ["nothing like it", "", "<|im_start|>user\nX<|im_end|>\n"])
def test_what_the_template_can_not_tell_is_left_open(
    family_tokenizers: Tokenizers, text: str
) -> None:
    """Never guessed."""
    rendered = Rendered(family_tokenizers["chatml"].render, [user("a")], text)
    assert all(rendered.place(at).part in (None, "template_header") for at in range(len(text) + 2))


def test_a_template_that_refuses_the_marks_says_nothing(
    family_tokenizers: Tokenizers,
) -> None:
    """It does not raise either."""
    from mlxrunner.errors import PromptError

    def refuse(*_: Any, **__: Any) -> str:
        raise PromptError("no")

    assert Rendered(refuse, [user("a")], "a").place(0) == Place()


def test_an_empty_message_stays_empty(family_tokenizers: Tokenizers) -> None:
    """Templates ask whether there is a text."""
    messages = [user("a"), assistant(""), user("b")]
    places = parts(family_tokenizers["chatml"], messages)
    assert ("b", 2, "user", "text") in places
    assert "".join(text for text, *_ in places) == family_tokenizers["chatml"].render(messages)

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


def parts(tokenizer: Tokenizer, messages: Any, **variables: Any) -> list[tuple[Any, ...]]:
    """Runs of characters of one place: (text, message, role, part)."""
    text = tokenizer.render(messages, **variables)
    rendered = Rendered(tokenizer.render, messages, text, variables)
    runs = groupby(range(len(text)), rendered.place)
    return [("".join(text[at] for at in run), *place[:3]) for place, run in runs]


CHATML = [
    ("<|im_start|>system\n", 0, "system", "template_header"),
    ("user", 0, "system", "text"),
    ("<|im_end|>\n", 0, "system", "message_end"),
    ("<|im_start|>user\n", 1, "user", "template_header"),
    ("s", 1, "user", "text"),
    ("<|im_end|>\n", 1, "user", "message_end"),
    ("<|im_start|>assistant\n", 2, "assistant", "template_header"),
    ("assistant", 2, "assistant", "text"),
    ("<|im_end|>\n", 2, "assistant", "message_end"),
    ("<|im_start|>user\n", 3, "user", "template_header"),
    (" [INST] system\n", 3, "user", "text"),
    ("<|im_end|>\n", 3, "user", "message_end"),
    ("<|im_start|>assistant\n", 4, "assistant", "generation_prompt"),
]
EXPECTED = {
    "chatml": CHATML,
    "llama3": [
        (
            "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n",
            0,
            "system",
            "template_header",
        ),
        ("user", 0, "system", "text"),
        ("<|eot_id|>", 0, "system", "message_end"),
        ("<|start_header_id|>user<|end_header_id|>\n\n", 1, "user", "template_header"),
        ("s", 1, "user", "text"),
        ("<|eot_id|>", 1, "user", "message_end"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", 2, "assistant", "template_header"),
        ("assistant", 2, "assistant", "text"),
        ("<|eot_id|>", 2, "assistant", "message_end"),
        ("<|start_header_id|>user<|end_header_id|>\n\n", 3, "user", "template_header"),
        ("[INST] system", 3, "user", "text"),
        ("<|eot_id|>", 3, "user", "message_end"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", 4, "assistant", "generation_prompt"),
    ],
    "gemma": [  # the system text goes in front of the first user message
        ("<s><start_of_turn>user\n", 0, "system", "template_header"),
        ("user", 0, "system", "text"),
        ("\n\n", 1, "user", "template_header"),
        ("s", 1, "user", "text"),
        ("<end_of_turn>\n", 1, "user", "message_end"),
        ("<start_of_turn>model\n", 2, "assistant", "template_header"),
        ("assistant", 2, "assistant", "text"),
        ("<end_of_turn>\n", 2, "assistant", "message_end"),
        ("<start_of_turn>user\n", 3, "user", "template_header"),
        ("[INST] system", 3, "user", "text"),
        ("<end_of_turn>\n", 3, "user", "message_end"),
        ("<start_of_turn>model\n", 4, "assistant", "generation_prompt"),
    ],
    "mistral": [  # the system text goes into the last user message
        ("<s>[INST] ", 1, "user", "template_header"),
        ("s", 1, "user", "text"),
        ("[/INST]", 1, "user", "message_end"),
        (" ", 2, "assistant", "template_header"),
        ("assistant", 2, "assistant", "text"),
        ("</s>", 2, "assistant", "message_end"),
        ("[INST] ", 0, "system", "template_header"),
        ("user", 0, "system", "text"),
        ("\n\n", 3, "user", "template_header"),
        (" [INST] system\n", 3, "user", "text"),
        ("[/INST]", 3, "user", "message_end"),
    ],
    "qwen3": CHATML,
    "harmony": [
        (
            "<|start|>system<|message|>You are a model. Reasoning: "
            "low<|end|><|start|>developer<|message|># Instructions\n\n",
            0,
            "system",
            "template_header",
        ),
        ("user", 0, "system", "text"),
        ("<|end|>", 0, "system", "message_end"),
        ("<|start|>user<|message|>", 1, "user", "template_header"),
        ("s", 1, "user", "text"),
        ("<|end|>", 1, "user", "message_end"),
        ("<|start|>assistant<|channel|>final<|message|>", 2, "assistant", "template_header"),
        ("assistant", 2, "assistant", "text"),
        ("<|end|>", 2, "assistant", "message_end"),
        ("<|start|>user<|message|>", 3, "user", "template_header"),
        (" [INST] system\n", 3, "user", "text"),
        ("<|end|>", 3, "user", "message_end"),
        ("<|start|>assistant", 4, "assistant", "generation_prompt"),
    ],
}


def test_every_character_has_its_place(family: Any) -> None:
    """The places are the template's, whatever the texts say."""
    assert parts(family.tokenizer, CHAT) == EXPECTED[family.name]


def test_thinking_that_the_template_writes_is_a_part_of_its_message(
    family_tokenizers: dict[str, Tokenizer],
) -> None:
    """Qwen 3 keeps that of the turn under way, in its own layout."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>why</think>b"},
    ]
    assert parts(family_tokenizers["qwen3"], messages)[3:7] == [
        ("<|im_start|>assistant\n", 1, "assistant", "template_header"),
        ("<think>\nwhy\n</think>", 1, "assistant", "thinking"),
        ("\n\nb", 1, "assistant", "text"),
        ("<|im_end|>\n", 1, "assistant", "message_end"),
    ]


def test_thinking_that_the_template_strips_leaves_the_text(
    family_tokenizers: dict[str, Tokenizer],
) -> None:
    """The thinking is that of earlier turns."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ]
    assert ("b", 1, "assistant", "text") in parts(family_tokenizers["qwen3"], messages)
    assert all(part != "thinking" for *_, part in parts(family_tokenizers["qwen3"], messages))


def test_a_block_that_the_template_adds_to_the_prompt_is_its_own(
    family_tokenizers: dict[str, Tokenizer],
) -> None:
    """Qwen 3 with thinking switched off."""
    last = parts(
        family_tokenizers["qwen3"], [{"role": "user", "content": "a"}], enable_thinking=False
    )[-1]
    assert last == (
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        1,
        "assistant",
        "generation_prompt",
    )


def test_the_tool_list_is_what_the_template_adds_for_tools(
    family_tokenizers: dict[str, Tokenizer],
) -> None:
    """Wherever it puts it, in whatever words."""
    tools = [{"name": "weather", "description": "system"}]
    found = parts(family_tokenizers["chatml"], CHAT[:2], tools=tools)
    (listed,) = [found for found in found if found[-1] == "tools"]
    assert listed[0] == '\n\n# Tools\n{"name": "weather", "description": "system"}'
    assert listed[1:] == (0, "system", "tools")
    assert [text for text, *_, part in found if part == "text"] == ["user", "s"]


def test_text_that_was_spelled_otherwise_is_found_again(
    family_tokenizers: dict[str, Tokenizer],
) -> None:
    """A conversation that kept the thinking which its template would strip."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>why</think>b"},
        {"role": "user", "content": "c"},
    ]
    render = family_tokenizers["qwen3"].render
    text = render(messages).replace("assistant\nb", "assistant\n<think>why</think>b")
    kept = Rendered(render, messages, text)
    assert kept.place(text.index("why")) == Place(1, "assistant", "thinking")
    assert kept.place(text.index("b<|im_end|>")) == Place(1, "assistant", "text")
    assert kept.place(text.index("c<|im_end|>")) == Place(2, "user", "text")


@pytest.mark.parametrize("text", ["nothing like it", "", "<|im_start|>user\nX<|im_end|>\n"])
def test_what_the_template_can_not_tell_is_left_open(
    family_tokenizers: dict[str, Tokenizer], text: str
) -> None:
    """Never guessed."""
    rendered = Rendered(
        family_tokenizers["chatml"].render, [{"role": "user", "content": "a"}], text
    )
    assert all(rendered.place(at).part in (None, "template_header") for at in range(len(text) + 2))


def test_a_template_that_refuses_the_marks_says_nothing(
    family_tokenizers: dict[str, Tokenizer],
) -> None:
    """It does not raise either."""
    from mlxrunner.errors import PromptError

    def refuse(*_: Any, **__: Any) -> str:
        raise PromptError("no")

    assert Rendered(refuse, [{"role": "user", "content": "a"}], "a").place(0) == Place()


def test_an_empty_message_stays_empty(family_tokenizers: dict[str, Tokenizer]) -> None:
    """Templates ask whether there is a text."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    ]
    places = parts(family_tokenizers["chatml"], messages)
    assert ("b", 2, "user", "text") in places
    assert "".join(text for text, *_ in places) == family_tokenizers["chatml"].render(messages)

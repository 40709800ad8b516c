"""Lines of a file become prompts with options; empty ones are counted only."""

from __future__ import annotations

from typing import Any

import pytest
from support.batches import one, read, user

from mlxrunner.batch.fields import FIELDS
from mlxrunner.batch.options import FileOptions
from mlxrunner.batch.store import InputLine
from mlxrunner.config.names import MEANT, SAME
from mlxrunner.config.option import names
from mlxrunner.options import RunnerSettings

VALUES = {
    "max_tokens": 5,
    "template": {"enable_thinking": False},
    "choices": ["yes", "no"],
    "schema": {"type": "string"},
    "stop_tokens": [5],
    "penalty_context": 30,
    "repetition_penalty": 1.1,
    "stop": ["a"],
    "seed": 3,
    "prompt": [5, 6],
}
"""A value for each option that has another name elsewhere."""


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("record", "settings", "prompt"),
    [
        ({"prompt": "Hello"}, {}, [user("Hello")]),
        ({"prompt": "Hello"}, {"raw": True}, "Hello"),
        ({"prompt": "Hello"}, {"system": "Be brief."}, [SYSTEM, user("Hello")]),
        ({"prompt": "Hello"}, {"system": "Be brief.", "raw": True}, "Hello"),
        (
            {"prompt": "Hello", "system": "Be brief."},
            {"system": "Be long."},
            [SYSTEM, user("Hello")],
        ),
        ({"prompt": "Hello", "system": ""}, {"system": "Be long."}, [user("Hello")]),
        ({"messages": [user("Hello")]}, {}, [user("Hello")]),
        ({"messages": [user("Hello")]}, {"raw": True}, [user("Hello")]),
        ({"messages": [user("Hello")]}, {"system": "Be brief."}, [SYSTEM, user("Hello")]),
        ({"messages": [SYSTEM, user("Hello")]}, {"system": "Be long."}, [SYSTEM, user("Hello")]),
        (
            {"messages": [SYSTEM | {"role": "developer"}, user("Hello")]},
            {},
            [SYSTEM, user("Hello")],
        ),
        ({"messages": [user("Hello") | {"refusal": None, "tool_calls": []}]}, {}, [user("Hello")]),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "Hel"},
                            {"type": "text", "text": "lo"},
                        ],
                    }
                ]
            },
            {},
            [user("Hello")],
        ),
        ({"prompt": "Hello", "messages": None}, {}, [user("Hello")]),
        ({"prompt": [5, 0, 2**31 - 1]}, {"system": "Be brief."}, [5, 0, 2**31 - 1]),
        ({"prompt_token_ids": [5, 6]}, {}, [5, 6]),
        ({"prompt": ["Hello"]}, {}, [user("Hello")]),
        ({"prompt": [[5, 6]]}, {"raw": True}, [5, 6]),
        ({"prompt": "\U0001f600 \u2028 \0 {x}"}, {}, [user("\U0001f600 \u2028 \0 {x}")]),
    ],
)
def test_prompts(record: Any, settings: dict[str, Any], prompt: Any) -> None:
    """A prompt is a user message, or plain text with raw.

    A system prompt goes in front where the line brings none.
    """
    assert one(record, **settings) == InputLine(0, 1, prompt)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        (
            {"max_tokens": 5, "temperature": 0.5, "seed": 2**64 - 1},
            {"max_tokens": 5, "temperature": 0.5, "seed": 2**64 - 1},
        ),
        ({"stop": "\n"}, {"stop": ["\n"]}),
        ({"stop": ["a", "b"], "stop_tokens": []}, {"stop": ["a", "b"], "stop_tokens": []}),
        ({"max_tokens": None, "temperature": None}, {}),
        ({"choices": ["yes", "no"]}, {"choices": ["yes", "no"]}),
        ({"schema": {"type": "string"}}, {"schema": '{"type": "string"}'}),
        ({"schema": '{"type": "string"}'}, {"schema": '{"type": "string"}'}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"schema": '{"type": "object"}'}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "strict": True, "schema": {"type": "null"}},
                }
            },
            {"schema": '{"type": "null"}'},
        ),
    ],
)
def test_options(fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Those that the line gives, as `generate` takes them; null is as good as nothing."""
    line = one({"prompt": "Hello", **fields})
    assert (line.prompt, line.options, line.error) == ([user("Hello")], options, None)


def test_a_list_of_prompts_is_one_line_for_each() -> None:
    """Each has the options of the list, and its number behind the id."""
    content = b'{"id": 7, "prompt": ["a", [5, 6]], "seed": 1}\n{"prompt": ["b", "c"]}'
    assert read(content) == [
        InputLine(0, 1, [user("a")], "7/0", options={"seed": 1}),
        InputLine(1, 1, [5, 6], "7/1", options={"seed": 1}),
        InputLine(2, 2, [user("b")]),
        InputLine(3, 2, [user("c")]),
    ]


@pytest.mark.exhaustive(100)
@pytest.mark.parametrize("name", sorted(SAME))
def test_a_name_of_another_program_that_means_the_same_is_taken(name: str) -> None:
    """A line with it is the line with our name."""
    ours = SAME[name]
    assert ours in FIELDS
    value: Any = VALUES[ours]
    around = {} if ours == "prompt" else {"prompt": "Hello"}
    assert one({**around, name: value}) == one({**around, ours: value})
    assert one({**around, name: value}).error is None


def test_no_name_of_another_program_is_one_of_ours() -> None:
    """The tables do not contradict each other either, and each hint names an option that exists."""
    others = {"reasoning_effort", "model", "session"}
    settings = {*names(RunnerSettings), *names(FileOptions), *others}
    assert not SAME.keys() & (FIELDS | MEANT.keys())
    assert not MEANT.keys() & FIELDS
    assert {name.partition(":")[0] for name in MEANT.values()} <= FIELDS | settings


def test_a_line_without_a_form_of_its_answer_overrides_a_default() -> None:
    """`response_format: text` turns a schema for all lines off."""
    line = one({"prompt": "Hello", "response_format": {"type": "text"}}, defaults={"schema": "{}"})
    assert line.options == {"schema": None}


@pytest.mark.parametrize("name", ["a", "", 0, -5, 2**63 - 1, "\u0000\U0001f600", None])
def test_ids_are_kept_as_they_are(name: str | int | None) -> None:
    """Texts and whole numbers, also on a line that can't be run."""
    assert one({"id": name, "prompt": "Hello"}).id == name
    broken = one({"id": name, "promt": "Hello"})
    assert (broken.id, bool(broken.error)) == (name, True)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "with a BOM"])
def test_empty_lines_are_counted_only(end: str, mark: bytes) -> None:
    """Empty lines have a number and no index.

    A byte order mark and line ends, also a missing last one, change nothing.
    """
    lines = read(
        mark
        + end.join(
            ["", '{"prompt": "a"}', "  ", "\t", '{"prompt": "b"}', "", '{"prompt": "c"}']
        ).encode()
    )
    assert [(line.index, line.number, line.prompt) for line in lines] == [
        (0, 2, [user("a")]),
        (1, 5, [user("b")]),
        (2, 7, [user("c")]),
    ]

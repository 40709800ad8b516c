"""Lines of a file become prompts with options, or one error each; none stops the rest."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.batches import one, read, user
from support.checks import json_rows, output_of, rows

from mlxrunner.batch.inputs import FIELDS
from mlxrunner.batch.options import FileOptions
from mlxrunner.batch.store import InputLine
from mlxrunner.config.names import MEANT, SAME
from mlxrunner.config.option import names
from mlxrunner.options import RunnerSettings
from mlxrunner.terminal.output import LONGEST_LINE

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


HELLO, SYSTEM = user("Hello"), {"role": "system", "content": "Be brief."}
PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]


@pytest.mark.parametrize(
    ("record", "settings", "prompt"),
    [
        ({"prompt": "Hello"}, {}, [HELLO]),
        ({"prompt": "Hello"}, {"raw": True}, "Hello"),
        ({"prompt": "Hello"}, {"system": "Be brief."}, [SYSTEM, HELLO]),
        ({"prompt": "Hello"}, {"system": "Be brief.", "raw": True}, "Hello"),
        ({"prompt": "Hello", "system": "Be brief."}, {"system": "Be long."}, [SYSTEM, HELLO]),
        ({"prompt": "Hello", "system": ""}, {"system": "Be long."}, [HELLO]),
        ({"messages": [HELLO]}, {}, [HELLO]),
        ({"messages": [HELLO]}, {"raw": True}, [HELLO]),
        ({"messages": [HELLO]}, {"system": "Be brief."}, [SYSTEM, HELLO]),
        ({"messages": [SYSTEM, HELLO]}, {"system": "Be long."}, [SYSTEM, HELLO]),
        ({"messages": [SYSTEM | {"role": "developer"}, HELLO]}, {}, [SYSTEM, HELLO]),
        ({"messages": [HELLO | {"refusal": None, "tool_calls": []}]}, {}, [HELLO]),
        ({"messages": [HELLO | {"content": PARTS}]}, {}, [HELLO]),
        ({"prompt": "Hello", "messages": None}, {}, [HELLO]),
        ({"prompt": [5, 0, 2**31 - 1]}, {"system": "Be brief."}, [5, 0, 2**31 - 1]),
        ({"prompt_token_ids": [5, 6]}, {}, [5, 6]),
        ({"prompt": ["Hello"]}, {}, [HELLO]),
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
    json_rows(
        r"""
{"max_tokens": 5, "temperature": 0.5, "seed": 18446744073709551615}
 -> {"max_tokens": 5, "temperature": 0.5, "seed": 18446744073709551615}
{"stop": "\n"} -> {"stop": ["\n"]}
{"stop": ["a", "b"], "stop_tokens": []} -> {"stop": ["a", "b"], "stop_tokens": []}
{"max_tokens": null, "temperature": null} -> {}
{"choices": ["yes", "no"]} -> {"choices": ["yes", "no"]}
{"schema": {"type": "string"}} -> {"schema": "{\"type\": \"string\"}"}
{"schema": "{\"type\": \"string\"}"} -> {"schema": "{\"type\": \"string\"}"}
{"response_format": {"type": "text"}} -> {}
{"response_format": {"type": "json_object"}} -> {"schema": "{\"type\": \"object\"}"}
{"response_format": {"type": "json_schema", "json_schema":
 {"name": "a", "strict": true, "schema": {"type": "null"}}}} -> {"schema": "{\"type\": \"null\"}"}
"""
    ),
)
def test_options(fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Those that the line gives, as `generate` takes them; null is as good as nothing."""
    line = one({"prompt": "Hello", **fields})
    assert (line.prompt, line.options, line.error) == ([HELLO], options, None)


def test_a_list_of_prompts_is_one_line_for_each() -> None:
    """Each has the options of the list, and its number after the id."""
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
    around = {} if ours == "prompt" else {"prompt": "Hello"}
    line = one({**around, name: VALUES[ours]})
    assert line == one({**around, ours: VALUES[ours]})
    assert line.error is None


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
    texts = ["", '{"prompt": "a"}', "  ", "\t", '{"prompt": "b"}', "", '{"prompt": "c"}']
    lines = read(mark + end.join(texts).encode())
    found = [(line.index, line.number, line.prompt) for line in lines]
    assert found == [(0, 2, [user("a")]), (1, 5, [user("b")]), (2, 7, [user("c")])]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        *rows(r"""
nope -> JSON: Expecting value at character 1; a line is an object such as {"prompt": "Hi"}
"Hello" -> has to be a JSON object, not a text
null -> has to be a JSON object, not null
{"prompt": "\ud83d"} -> half a character
{"prompt": "a", "stop": ["\uDE00"]} -> half a character
{"prompt": "a", "temperature": NaN} -> not JSON: NaN is not a number of JSON
{"prompt": "a", "temperature": -Infinity} -> not JSON: -Infinity is not a number of JSON
{"prompt": "a", "temperature": 1e999} -> temperature: inf is out of range
{} -> has no "prompt" and no "messages"
{"prompt": "a", "messages": []} -> has both a prompt and messages
{"prompt": ""} -> prompt is empty
{"prompt": 5} -> prompt has to be a text, not a number
{"prompt": []} -> prompt is an empty list
{"prompt": ["a", 5]} -> prompt 1 has to be a text, not a number
{"prompt": ["a", ""]} -> prompt 1 is empty
{"prompt": [5, "a"]} -> prompt: 'a' is not a token id
{"prompt": [5, true]} -> prompt: True is not a token id
{"prompt": [2147483648]} -> prompt: 2147483648 is not a token id
{"prompt": [5], "system": "a"} -> chat template, which token ids leave out
{"question": "a"} -> unknown field 'question': did you mean 'prompt'? known are
{"prompt": "a", "num_ctx": 5} -> 'num_ctx' is not for one line: --context is for the
{"prompt": "a", "n": 2} -> n: 2 is not supported, only 1
{"prompt": "a", "max_tokens": 5, "max_new_tokens": 5}
 -> max_tokens and max_new_tokens say the same thing: give one of them
{"prompt": "a", "num_predict": 5, "max_new_tokens": 5}
 -> num_predict and max_new_tokens say the same thing: give one of them
{"messages": []} -> messages has to be a list of at least one message
{"messages": ["Hello"]} -> message 0 has to be {"role": text, "content": text}, not 'Hello'
{"messages": [{"role": "user"}]}
 -> message 0: content has to be a text or a list of text parts, not None
{"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}
 -> message 0: only an assistant has tool_calls, not 'user'
{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
 -> message 0: content of type 'image_url' is not supported
{"messages": [{"role": "user", "content": ["a"]}]}
 -> message 0: content of type 'a' is not supported, only text
{"prompt": "a", "system": 5} -> system has to be a text, not a number
{"prompt": "a", "logits_processors": [1]} -> logits_processors: [1] is not supported
{"prompt": "a", "id": 1.5} -> id has to be a text or a whole number of at most 64 bits, not 1.5
{"prompt": "a", "id": 9223372036854775808} -> id has to be a text or a whole number
{"prompt": "a", "temperature": -1}
 -> temperature: -1 is out of range, it has to be between 0 and 100
{"prompt": "a", "overflow": "wrap"} -> overflow: 'wrap' is not known
{"prompt": "a", "stop": {"a": 1}} -> stop: {'a': 1} is not a list of texts
{"prompt": "a", "stop": [""]} -> stop: [''] is not a list of texts of at least one character
{"prompt": "a", "stop_tokens": "12"} -> stop_tokens: '12' is not a list; give one, such as [2, 5]
{"prompt": "a", "choices": []} -> choices: the list is empty
{"prompt": "a", "choices": "yes"} -> choices: 'yes' is not a list of texts
{"prompt": "a", "penalty_context": 1000000000000000000000000000000} -> penalty_context: 1
{"prompt": "a", "schema": 5} -> schema has to be a JSON schema (an object), not a number
{"prompt": "a", "response_format": "json"} -> response_format: 'json' is not known
{"prompt": "a", "response_format": {"type": "json_schema"}}
 -> response_format: json_schema has no schema
{"prompt": "a", "schema": {}, "response_format": {"type": "text"}} -> give one of them
"""),
        (b'{"prompt": "\xff"}', "not UTF-8: invalid start byte at byte 13"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit"),
        ("[" * 100_000, "nested too deeply"),
        (
            '{"prompt": "a", "schema": ' + '{"a":' * 100_000 + "1" + "}" * 100_001,
            "nested too deeply",
        ),
        ('{"prompt": "a", "schema": {"not": {}}}', "schema: "),
        (
            '{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": '
            '{"not": {}}}}}',
            "schema: ",
        ),
    ],
)
def test_what_is_said_about_a_bad_line(line: bytes | str, problem: str) -> None:
    """Its number and what is wrong, in one short line; the lines around it are read."""
    good = b'{"prompt": "Hello"}\n'
    content = line.encode() if isinstance(line, str) else line.replace(b"\n", b"")
    first, bad, last = read(good + content + b"\n" + good)
    assert (first, last) == (InputLine(0, 1, [HELLO]), InputLine(2, 3, [HELLO]))
    assert bad.error is not None
    assert bad.error.startswith("line 2: ")
    assert problem in bad.error
    assert len(bad.error) < LONGEST_LINE + 60
    assert "\n" not in bad.error
    assert (bad.prompt, bad.options) == (None, {})


@pytest.mark.parametrize(
    ("line", "problem"),
    rows("""
{"id": 1, "prompt": "a", "prompt": "b"} -> the key 'prompt' is there twice
{"id": 1, "id": 2, "prompt": "a"} -> the key 'id' is there twice
{"id": 1, "prompt": "a", "schema": {"enum": [1], "enum": [2]}}
 -> the key 'enum' is there twice in one object
{"id": 1, "messages": [{"role": "user", "role": "system", "content": "a"}]}
 -> the key 'role' is there twice
{"custom_id": "x", "body": {"prompt": "a", "max_tokens": 1, "max_tokens": 2}}
 -> the key 'max_tokens' is
{"id": 1, "messages": [{"role": "usr", "content": "a"}]}
 -> message 0: role 'usr' is not known, it has to be one of
{"custom_id": "x", "body": {"messages": [{"role": "", "content": "a"}]}} -> role '' is not known
"""),
)
def test_what_could_be_read_in_two_ways_is_an_error(line: str, problem: str) -> None:
    """A repeated key or an unknown role is an error of its line only, with the line's id."""
    (bad,) = read(line)
    assert problem in str(bad.error)
    assert bad.id == ("x" if "custom_id" in line else None if "'id'" in problem else 1)


@pytest.mark.parametrize("name", ["schema", "messages", "temperature", "other"])
def test_any_depth_is_a_line_or_an_error(name: str) -> None:
    """Also where the depth is just what can be read, but not written or quoted any more."""
    sizes = range(sys.getrecursionlimit() - 250, sys.getrecursionlimit() + 50)
    texts = ['{"a":' * size + "1" + "}" * (size + 1) for size in sizes]
    lines = read("\n".join(f'{{"prompt": "a", "{name}": {text}' for text in texts))
    assert len(lines) == len(sizes)
    assert str(lines[-1].error).endswith("nested too deeply")


def test_a_system_prompt_needs_the_template() -> None:
    """A line that asks for one is an error with raw text, which has no place for it."""
    assert one({"prompt": "a", "system": "b"}, raw=True).error == (
        "line 1: a system prompt needs the chat template, which --raw leaves out"
    )


@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 1000])
def test_a_line_that_is_too_long(extra: int) -> None:
    """A line beyond the limit is an error that names the limit, and the next line is read."""
    line = b'{"prompt": "' + b"x" * (100 + extra - 14) + b'"}'
    assert len(line) == 100 + extra
    first, second = read(line + b'\n{"prompt": "b"}\n', longest=100)
    assert first.error == (None if extra <= 0 else "line 1: is longer than 100 bytes")
    assert second == InputLine(1, 2, [user("b")])
    (last,) = read(line, longest=100)
    assert bool(last.error) == (extra > 0)


def test_the_memory_for_one_endless_line_is_bounded() -> None:
    """A file of 400 MB without an end of line is one error, in the memory of the longest line."""
    program = """
import io, resource
from mlxrunner.batch.inputs import lines_of_records, read_records
from mlxrunner.batch.options import BatchOptions

class Zeros(io.RawIOBase):
    left = 400_000_000
    def readable(self): return True
    def readinto(self, buffer):
        n = min(len(buffer), self.left)
        buffer[:n] = b"x" * n
        self.left -= n
        return n

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(line,) = lines_of_records(read_records(io.BufferedReader(Zeros())), BatchOptions())
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(line.error, "|", grown // (1024 if __import__("sys").platform == "linux" else 1024**2))
"""
    error, megabytes = output_of(program).split("|")
    assert error.strip() == "line 1: is longer than 16777216 bytes"
    assert int(megabytes) < 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    "prompt messages id system custom_id body url method max_tokens stop choices schema "
    "response_format".split()
)


@given(st.dictionaries(NAMES, JSON, max_size=4))
@example({"prompt": ["0", "0"]})
def test_any_object_is_a_line_or_an_error(record: dict[str, Any]) -> None:
    """Any object is lines or an error, and every text that comes out can be written as UTF-8."""
    lines = read(json.dumps(record))
    assert lines
    for line in lines:
        assert (line.prompt is None) == (line.error is not None)
        texts = [line.prompt, line.id, dict(line.options), line.error]
        json.dumps(texts, ensure_ascii=False).encode()


@given(st.binary(max_size=200))
def test_any_bytes_are_lines(content: bytes) -> None:
    """There are as many lines as are not empty, and never an exception."""
    assert len(read(content)) == sum(
        bool(line.strip()) for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    )

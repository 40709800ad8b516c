"""Tool calls out of answers, whatever the model's form and however the answer is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrunner.results import Chunk
from mlxrunner.server.events import AnswerEvent, AnswerNote, TextDelta, ThinkingDelta, ToolCallEvent
from mlxrunner.server.tools.formats import BARE, HERMES, OWN, CallFormat, parsed_by_mlx_lm
from mlxrunner.server.tools.reader import AnswerSplitter, call_id, reader_of

PROPERTIES = {
    "at": {"type": "integer"},
    "why": {"type": "string"},
    "all": {"type": "array"},
    "deep": {"anyOf": [{"type": "object"}, {"type": "null"}]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
Parts = list[tuple[str, Any]]
ONE, TWO = ("look", {"at": 1}), ("look", {"at": 2, "why": "a </b> é"})


def form_of(name: str) -> CallFormat:
    """Return a format by its name."""
    own = {one.name: one for one in (*OWN, BARE, HERMES)}
    if name in own:
        return own[name]
    found = parsed_by_mlx_lm(name)
    assert found is not None
    return found


def splitter_of(
    form: CallFormat | None, prompt: str = "", tell: Any = lambda tokens: "?", **more: Any
) -> AnswerSplitter:
    return AnswerSplitter(partial(reader_of, form, TOOLS, prompt), "request", tell, **more)


def events_of(
    name: str, pieces: Sequence[str], *, is_whole: bool = True, **more: Any
) -> tuple[list[AnswerEvent], AnswerSplitter]:
    """Return the events of an answer that comes in pieces."""
    splitter = splitter_of(form_of(name), **more)
    events = [event for piece in pieces for event in splitter.add(Chunk(piece, 1))]
    return [*events, *splitter.finish(is_whole=is_whole)], splitter


def parts_of(events: Sequence[AnswerEvent]) -> Parts:
    """Return thinking, texts and calls, with neighbouring texts joined."""
    parts: Parts = []
    for event in events:
        match event:
            case ToolCallEvent(_, _, name, arguments):
                parts.append((name, json.loads(arguments)))
            case ThinkingDelta(text) | TextDelta(text):
                kind = "thought" if isinstance(event, ThinkingDelta) else "text"
                if parts and parts[-1][0] == kind:
                    parts[-1] = (kind, parts[-1][1] + text)
                elif text:
                    parts.append((kind, text))
    return parts


CASES: list[tuple[str, str, Parts]] = [
    (
        "json_tools",
        '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n'
        "</tool_call>\n<tool_call>\n"
        '{"name": "look", "arguments": {"at":2,"why":"a </b> \\u00e9"}}\n</tool_call>',
        [("thought", "\nhm\n"), ("text", "I look."), ONE, TWO],
    ),
    (
        "json_tools",
        'x <tool_call>{"name": "look", "arguments": {"why": "</tool_call>"}}</tool_call> and more ',
        [("text", "x"), ("look", {"why": "</tool_call>"}), ("text", "and more ")],
    ),
    ("json_tools", "a < b and <tool_cal l> <", [("text", "a < b and <tool_cal l> <")]),
    ("json_tools", '<tool_call>{"name": "look", "arguments": {"at": 1}}', [ONE]),
    (
        "mistral",
        'Well. [TOOL_CALLS][{"name": "look", "arguments": {"at": 1}}, '
        '{"name": "look", "arguments": {"at": 2, "why": "a </b> é"}}]',
        [("text", "Well."), ONE, TWO],
    ),
    (
        "mistral",
        '[TOOL_CALLS]look[ARGS]{"at": 1}[TOOL_CALLS]look[ARGS]{"at": 2, "why": "a </b> é"}',
        [ONE, TWO],
    ),
    ("bare_json", '{"name": "look", "parameters": {"at": 1}}', [ONE]),
    (
        "bare_json",
        '<|python_tag|>{"name": "look", "parameters": {"at": 1}}; '
        '{"type": "function", "name": "look", "parameters": {"at": 2, "why": "a </b> é"}}',
        [ONE, TWO],
    ),
    ("bare_json", '{"name": "Bo", "age": 3}', [("text", '{"name": "Bo", "age": 3}')]),
    ("bare_json", '{"a": 1} is JSON', [("text", '{"a": 1} is JSON')]),
    ("bare_json", "Text {", [("text", "Text {")]),
    (
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=look>\n<parameter=at>\n2\n</parameter>\n"
        "<parameter=why>\na </b> é\n</parameter>\n</function>\n</tool_call>",
        [("text", "I look."), TWO],
    ),
    (
        "qwen3_coder",
        '<tool_call>\n<function=look>\n<parameter=deep>\n{"a": "<b>\\"</parameter>\\n</function>\\n'
        '</tool_call> {"}\n</parameter>\n<parameter=all>\n["</parameter>", {"x": "</b>"}]\n'
        "</parameter>\n<parameter=why>\n{\n</parameter>\n</function>\n</tool_call>\nDone.",
        [
            (
                "look",
                {
                    "deep": {"a": '<b>"</parameter>\n</function>\n</tool_call> {'},
                    "all": ["</parameter>", {"x": "</b>"}],
                    "why": "{",
                },
            ),
            ("text", "Done."),
        ],
    ),
    (
        "qwen3_coder",
        '<tool_call>\n<function=look>\n<parameter=why>\n["\n</parameter>\n'
        "</function>\n</tool_call>\n"
        '<tool_call>\n<function=look>\n<parameter=deep>\n["\n</parameter>\n'
        "</function>\n</tool_call>\n"
        "<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n</function>\n</tool_call>",
        [("look", {"why": '["'}), ("look", {"deep": '["'}), ONE],
    ),
    (
        "glm47",
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>look<arg_key>at</arg_key><arg_value>2</arg_value>"
        "<arg_key>why</arg_key><arg_value>a </b> é</arg_value></tool_call>",
        [ONE, TWO],
    ),
    (
        "pythonic",
        '<|tool_call_start|>[look(at=1), look(at=2, why="a </b> é")]<|tool_call_end|>Done.',
        [ONE, TWO, ("text", "Done.")],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"at": 1}<|tool_call_end|><|tool_calls_section_end|>',
        [ONE],
    ),
    (
        "phi",
        'Hm.<|tool_call|>[{"name": "look", "arguments": {"at": 1}}]<|/tool_call|>',
        [("text", "Hm."), ONE],
    ),
    (
        "deepseek",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
        '{"at": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n'
        '{"at": 2, "why": "a </b> é"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("text", "Hm."), ONE, TWO],
    ),
    (
        "channels",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.look <|constrain|>json<|message|>{"at": 1}',
        [("thought", "hm"), ONE],
    ),
    (
        "channels",
        "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is <|so|>.",
        [("thought", "a < b"), ("text", "It is <|so|>.")],
    ),
    ("channels", "Just text.", [("text", "Just text.")]),
]


@pytest.mark.parametrize(("name", "answer", "parts"), CASES)
def test_calls_are_taken_out_of_an_answer(name: str, answer: str, parts: Parts) -> None:
    """Texts before and after them stay, and so does what only looks like a call."""
    events, splitter = events_of(name, [answer])
    assert parts_of(events) == parts
    assert splitter.note is None


@given(case=st.sampled_from(CASES), data=st.data())
def test_the_events_do_not_depend_on_the_chunks(
    case: tuple[str, str, Parts], data: st.DataObject
) -> None:
    """Tags and JSON may be cut anywhere."""
    name, answer, parts = case
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=len(answer)).map(sorted))
    edges = [0, *cuts, len(answer)]
    pieces = [answer[a:b] for a, b in pairwise(edges)]
    assert parts_of(events_of(name, pieces)[0]) == parts
    assert parts_of(events_of(name, list(answer))[0]) == parts


@given(name=st.sampled_from([case[0] for case in CASES]), data=st.data())
def test_any_text_is_split_without_an_error(name: str, data: st.DataObject) -> None:
    """The cuts change nothing, and text without a tag is the same text."""
    form = form_of(name)
    words = [form.start, form.end, '{"name": "look"', "}", "[", '"', "x ", "<|", "look", ":", "{}"]
    pieces = data.draw(st.lists(st.sampled_from(words) | st.text(max_size=3)))
    is_whole = data.draw(st.booleans())
    events, _ = events_of(name, pieces, is_whole=is_whole)
    whole, _ = events_of(name, ["".join(pieces)], is_whole=is_whole)
    assert parts_of(events) == parts_of(whole)
    has_tag = any(mark in "".join(pieces) for mark in ("<", "[", "{", form.start) if mark)
    if not has_tag:
        assert parts_of(events) in ([("text", "".join(pieces))], [])


CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


def test_a_call_comes_as_soon_as_it_is_whole() -> None:
    """Before the answer continues, with an id that the request decides."""
    splitter = splitter_of(HERMES)
    assert [*splitter.add(Chunk("I look. ", 1))] == [TextDelta("I look.")]
    ids = [call_id("request", number) for number in range(2)]
    for number, identity in enumerate(ids):
        call = ToolCallEvent(number, identity, "look", '{"at": 1}')
        assert [*splitter.add(Chunk(CALL, 1))] == [call]
        assert identity.startswith("call_")
    assert len({*ids, call_id("other", 0)}) == 3


def test_the_models_own_ids_are_kept() -> None:
    """Mistral and Kimi write them; the second call with the same one gets another."""
    one = '{"name": "look", "arguments": {}, "id": "abcdef123"}'
    events, _ = events_of("mistral", [f"[TOOL_CALLS][{one}, {one}]"])
    ids = [event.id for event in events if isinstance(event, ToolCallEvent)]
    assert ids == ["abcdef123", call_id("request", 1)]


@pytest.mark.parametrize(
    ("name", "answer", "is_whole"),
    [
        ("json_tools", "Hm. <tool_call>{look}</tool_call> So.", True),
        ("json_tools", '<tool_call>{"name": 3}</tool_call>', True),
        ("json_tools", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>', True),
        ("json_tools", '<tool_call>{"name": "look", "arguments": {"at": NaN}}</tool_call>', True),
        ("json_tools", 'Hm.\n<tool_call>\n{"name": "look", "argu', False),
        ("mistral", '[TOOL_CALLS][{"name": "look"', False),
        ("mistral", "[TOOL_CALLS]nonsense", True),
        ("qwen3_coder", "<tool_call>\nlook\n</tool_call>", True),
        ("glm47", "<tool_call></tool_call>", True),
        ("pythonic", "<|tool_call_start|>look<|tool_call_end|>", True),
    ],
)
def test_a_malformed_call_is_text(name: str, answer: str, is_whole: bool) -> None:
    """To the letter, with a note; never an error."""
    events, splitter = events_of(name, [answer], is_whole=is_whole)
    assert parts_of(events) == [("text", answer)]
    assert "tool call" in splitter.note.text
    assert splitter.calls == []


def test_a_good_call_after_a_malformed_one_is_read() -> None:
    """The note stays."""
    events, splitter = events_of("json_tools", [f"<tool_call>oh</tool_call>{CALL}"])
    assert parts_of(events) == [("text", "<tool_call>oh</tool_call>"), ONE]
    assert splitter.note is not None


@pytest.mark.parametrize(
    ("before", "arguments", "is_whole"),
    [
        ("", '{"at": ', False),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "[1]<|call|>", True),
        ("<|channel|>final<|message|>hm<|end|><|start|>assistant", "oh<|end|>", True),
    ],
)
def test_a_malformed_call_of_gpt_oss_is_text(before: str, arguments: str, is_whole: bool) -> None:
    """Its header stands before it, without tags: the template refuses them when they come back."""
    header = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    events, splitter = events_of("channels", [before + header + arguments], is_whole=is_whole)
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    body = arguments.partition("<|")[0]
    assert text.removeprefix("hm") == f"commentary to=functions.look json {body}"
    assert splitter.note is not None


def test_a_cut_header_of_gpt_oss_is_no_text() -> None:
    """The template would refuse its tag."""
    events, _ = events_of("channels", ["<|channel|>anal"], is_whole=False)
    assert events == []


def test_without_parallel_calls_only_the_first_is_given() -> None:
    """Text and calls after it are left out, and the note says so."""
    events, splitter = events_of("json_tools", ["Hm.", CALL, "And ", CALL], parallel=False)
    assert parts_of(events) == [("text", "Hm."), ONE]
    assert splitter.is_done
    said = "1 tool calls after the first were left out"
    assert splitter.note == AnswerNote("calls-left-out", said)


def test_without_a_format_tags_are_text() -> None:
    """Thinking is split off nevertheless, also if the prompt has opened it."""
    splitter = splitter_of(None, "<|im_start|>assistant\n<think>\n")
    answer = ["hm", "</th", "ink>\n\n<tool_call>", "x"]
    events = [event for piece in answer for event in splitter.add(Chunk(piece, 1))]
    assert parts_of([*events, *splitter.finish()]) == [("thought", "hm"), ("text", "<tool_call>x")]
    assert splitter.thinking_tokens == 3


def test_log_probabilities_are_those_of_the_text() -> None:
    """Each token once, with the text that it is part of; those of thinking are left out."""
    splitter = splitter_of(HERMES, tell=lambda tokens: f"<{tokens[0]}>")
    events: list[AnswerEvent] = []
    for token, text in enumerate(["<think>", "a", "</think>", "b", " ", "c"]):
        events += splitter.add(Chunk(text, token, -0.5, {token: -0.5, 9: -2.0}))
    events += splitter.finish()
    texts = [event for event in events if isinstance(event, TextDelta)]
    assert "".join(event.text for event in texts) == "b c"
    tokens = [one for event in texts for one in event.tokens]
    assert [one.token for one in tokens] == [2, 3, 4, 5]
    assert (tokens[1].text, tokens[1].logprob, tokens[1].top[1]) == ("<3>", -0.5, ("<9>", 9, -2.0))


AROUND = ("<tool_call>\n", "\n</tool_call>")


@pytest.mark.parametrize("cut", [3, 8, 12, 40])
def test_a_forced_call_that_is_cut_off_gets_no_end(cut: int) -> None:
    """The text has only what the model wrote after the call's beginning, and a note says why."""
    call = json.dumps({"name": "look", "arguments": {"at": 12345}})[:cut]
    events, splitter = events_of("json_tools", [call], is_whole=False, around=AROUND)
    assert parts_of(events) == [("text", "<tool_call>\n" + call)]
    assert splitter.note.text.endswith("it was cut off")


def test_a_forced_call_whose_json_is_whole_at_the_limit_is_a_call() -> None:
    """Its end tag is not the model's to write."""
    call = json.dumps({"name": "look", "arguments": {"at": 1}})
    events, _ = events_of("json_tools", [call], is_whole=False, around=AROUND)
    assert parts_of(events) == [ONE]

"""All that a request says is in the rendered text, or it is an error that names what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_templates import PUBLISHED, chat_template
from support.families import KINDS
from support.sample import examples

from mlxrunner import OptionError, PromptError
from mlxrunner.templates.chat_template import ChatTemplate
from mlxrunner.templates.rendering import jinja_renderer

SOURCES = {name: kind.template for name, kind in KINDS.items()} | PUBLISHED
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {name: ChatTemplate(jinja_renderer(one, SPECIAL)) for name, one in SOURCES.items()}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}},
}
THOUGHT = "<think>\nIt rains.\n</think>\n\n"
LONG = "What does the quick brown fox do when it rains?"


def template(source: str) -> ChatTemplate:
    return ChatTemplate(jinja_renderer(source, SPECIAL))


def said(role: str, content: str, **more: Any) -> Any:
    return {"role": role, "content": content, **more}


def call(content: str = "", **arguments: Any) -> Any:
    made = {"id": "abcdefghi", "type": "function"}
    made["function"] = {"name": "look", "arguments": arguments}  # type: ignore[assignment]
    return said("assistant", content, tool_calls=[made])


def result(content: str) -> Any:
    return said("tool", content, tool_call_id="abcdefghi", name="look")


def is_in(content: str, text: str) -> bool:
    """Return True if a text has a content as it is, trimmed, without thinking, or as JSON."""
    content = content.rpartition("</think>")[2].strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


TEXTS = st.one_of(
    st.sampled_from(["", "a", "user", "assistant", "system", "</s>", " x ", LONG, f"\n{LONG}\n"]),
    st.text(st.sampled_from("ab \n\"'{}<>é日\\"), max_size=30),
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Any], dict[str, Any]]:
    """Draw messages of all roles in any order, and tools or none."""
    messages = []
    for role in draw(st.text(st.sampled_from("uuuaast"), min_size=1, max_size=7)):
        text = draw(TEXTS)
        if role == "t":
            messages += [call(draw(st.sampled_from(["", text])), at=draw(TEXTS)), result(text)]
        elif role == "a":
            messages.append(said("assistant", draw(st.sampled_from(["", THOUGHT])) + text))
        else:
            messages.append(said({"u": "user", "s": "system"}[role], text))
    return messages, draw(st.sampled_from([{}, {"tools": [TOOL]}]))


@examples(400)
@given(st.sampled_from(sorted(TEMPLATES)), conversations())
def test_what_is_said_is_in_the_text_or_an_error(
    family: str, request_: tuple[list[Any], dict[str, Any]]
) -> None:
    """The error is no traceback, and one line."""
    messages, variables = request_
    text, problem = None, ""
    try:
        text = TEMPLATES[family].text(messages, **variables)
    except (PromptError, OptionError) as error:
        problem = str(error)
    if text is None:
        assert len(problem.splitlines()) == 1
        return
    for message in messages:
        assert is_in(message["content"], text)
        for one in message.get("tool_calls", ()):
            assert is_in(one["function"]["arguments"]["at"], text)
    # The same conversation with other texts is another prompt.
    said_ = [one["content"].rpartition("</think>")[2].strip() for one in messages]
    changed = [
        {**one, "content": one["content"] + "qqqq" * bool(has)}
        for one, has in zip(messages, said_, strict=True)
    ]
    assert TEMPLATES[family].text(changed, **variables).count("qqqq") >= sum(map(bool, said_))


@pytest.mark.parametrize("family", SOURCES)
@pytest.mark.parametrize(
    "roles", ["u", "su", "uau", "suau", "suauau"], ids="one system turns both longer".split()
)
def test_a_plain_conversation_is_taken_by_every_template(family: str, roles: str) -> None:
    """Short texts, long ones, repeated ones and thinking are no false alarms."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    for texts in (["a", "b"], [LONG, LONG], [f" {LONG}\n", THOUGHT + LONG], [LONG, THOUGHT]):
        messages = [said(names[role], texts[role == "a"]) for role in roles]
        text = TEMPLATES[family].text(messages)
        assert all(is_in(message["content"], text) for message in messages)


@pytest.mark.parametrize("family", ["phi3-first", "gemma2", "mistral-v1", "chatml"])
def test_a_system_prompt_without_a_place_begins_the_users_message(family: str) -> None:
    """A template that refuses it is served as one that leaves it out."""
    messages = [said("system", "Be brief."), said("user", LONG)]
    text = TEMPLATES[family].text(messages)
    assert "Be brief." in text
    assert text.index("Be brief.") < text.index(LONG)
    assert TEMPLATES[family].text([messages[1]]) != text


@pytest.mark.parametrize("family", ["phi3-first", "gemma2", "mistral-v1", "chatml"])
@pytest.mark.parametrize("more", ["", " And when it snows?"], ids=["equal", "within"])
def test_a_system_prompt_that_the_user_says_too_is_written_twice(family: str, more: str) -> None:
    """The text of one is no sign that the other is there."""
    text = "Say where the quick brown fox is when it rains."
    found = template(SOURCES[family]).text([said("system", text), said("user", text + more)])
    assert found.count(text) == 2


@pytest.mark.parametrize("source", [PUBLISHED["parts only"], PUBLISHED["parts of users"]])
def test_contents_are_given_as_the_template_takes_them(source: str) -> None:
    """The parts are those of each role that needs them."""
    text = template(source).text([said("system", "Be brief."), said("user", "What is my name?")])
    assert "Be brief." in text
    assert "What is my name?" in text
    assert "type" not in text


@pytest.mark.parametrize(
    ("source", "form"), [(PUBLISHED["deepseek"], '{"at": "é"}'), (PUBLISHED["kimi"], '{"at": "é"}')]
)
@pytest.mark.parametrize("has_result", [True, False])
def test_arguments_are_given_as_the_template_takes_them(
    source: str, form: str, has_result: bool
) -> None:
    """A JSON text where the template joins texts."""
    messages = [said("user", LONG), call(at="é"), *([result("rain")] if has_result else [])]
    assert form in template(source).text(messages)


def test_a_list_of_parts_or_a_python_dictionary_is_never_written_out() -> None:
    """A template that shows a content as it is gets texts."""
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    source += "{{ c.function.name ~ c.function.arguments }}{% endfor %}|{% endfor %}"
    text = template(source).text([said("user", "hi"), call(at="x"), result("ok")])
    assert text == 'user: hi|assistant: look{"at": "x"}|tool: ok|'


LOST: list[tuple[str, list[Any], dict[str, Any], str]] = [
    ("phi3-first", [said("user", LONG), call(at="x"), result("rain")], {}, "tool_calls: "),
    ("phi3-first", [said("user", LONG), call(at="x")], {}, "tool_calls: "),
    (
        "phi3-first",
        [said("user", LONG), said("assistant", "hm"), result("rain")],
        {},
        "message 2: ",
    ),
    ("phi3-first", [said("user", LONG)], {"tools": [TOOL]}, "tools: "),
    ("phi3-first", [said("system", LONG)], {}, "message 0: "),
    ("smollm3", [said("user", "a"), said("system", "b"), said("user", "c")], {}, "message 1: "),
    (
        "mistral-v3",
        [
            said("user", "a"),
            call("Let me look.", at="x"),
            result("b"),
            said("assistant", "c"),
            said("user", "d"),
        ],
        {},
        "message 1: ",
    ),
    ("{{ messages[-1].content }}", [said("user", "a"), said("user", "a")], {}, "message 0: "),
    ("{{ messages[0].content }}", [said("user", LONG), said("user", LONG)], {}, "message 1: "),
    ("user assistant", [said("user", "user")], {}, "message 0: "),
    ("{{ messages[0].content[:20] }}", [said("user", LONG)], {}, "message 0: "),
]


@pytest.mark.parametrize(("source", "messages", "variables", "problem"), LOST)
def test_what_is_left_out_is_named(
    source: str, messages: list[Any], variables: dict[str, Any], problem: str
) -> None:
    """Short texts are no exception, though they may be found elsewhere in the text."""
    for _ in range(2):  # what was proven does not help the next one
        with pytest.raises((PromptError, OptionError)) as error:
            template(PUBLISHED.get(source, source)).text(messages, **variables)
        assert str(error.value).startswith(problem)


R1 = """{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}
{%- elif m.role == 'tool' %}<output>{{ m.content }}
{%- elif m.content is none %}{% for c in m.tool_calls %}<call>{{ c['type'] + c.function.name + \
c.function.arguments }}{% endfor %}{% else %}<Assistant>{{ m.content }}{% endif %}{% endfor %}"""
"""Writes calls only beside a content that is None, as DeepSeek R1 and the first V3 do."""
FIRST_CALL = """{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %}
{%- set c = m.tool_calls[0].function %} to={{ c.name }}{{ c.arguments | tojson }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
"""Writes the first of several calls, as gpt-oss does."""
HUNYUAN = """{% for m in messages %}{% set content = m.content %}
{%- if m.role == 'assistant' and '<answer>' in content and '</answer>' in content %}
{%- set content = content.split('<answer>')[-1].split('</answer>')[0].strip() %}{% endif %}\
<{{ m.role }}>{{ content }}{% endfor %}"""
"""Writes only what is within <answer>."""
GEMMA4 = """{% for m in messages %}<|turn>{{ m.role }}
{% if m.role == 'assistant' %}{% for part in m.content.split('<channel|>') %}\
{{ part.split('<|channel>')[0] }}{% endfor %}{% else %}{{ m.content }}{% endif %}<turn|>
{% endfor %}"""
"""Leaves out thinking, also if it has no end."""


def test_calls_are_written_where_their_content_has_to_be_none() -> None:
    """The arguments of each call are there, and so are results."""
    messages = [said("user", LONG), call(at="Oslo"), result("rain"), said("assistant", "It rains.")]
    text = template(R1).text([*messages, said("user", "hi")])
    assert '<call>functionlook{"at": "Oslo"}<output>rain<Assistant>It rains.' in text


@pytest.mark.parametrize(
    "source", [FIRST_CALL, PUBLISHED["llama3.1"], chat_template("strict", "gpt-oss")]
)
@pytest.mark.parametrize("has_ids", [True, False])
def test_calls_of_one_message_are_written_each_before_its_result(
    source: str, has_ids: bool
) -> None:
    """The template refuses two calls in a message, or writes only the first."""
    both = call(at="Oslo")
    both["tool_calls"] += call(at="Rome")["tool_calls"]
    results = [result("wet"), result("dry")]
    for one, its, name in zip(both["tool_calls"], results, "ab", strict=True):
        one["id"] = its["tool_call_id"] = name
        if not has_ids:
            del one["id"], its["tool_call_id"]
    for results_in_order in [results, *[results[::-1]] * has_ids]:
        text = template(source).text([said("user", "Where?"), both, *results_in_order])
        places = [text.index(word) for word in ("Oslo", "wet", "Rome", "dry")]
        assert places == sorted(places)


def test_the_name_of_an_author_is_written_by_a_template_that_reads_it() -> None:
    """Kimi's has it in place of the role."""
    text = template(PUBLISHED["kimi"]).text([said("user", LONG, name="Zorblin")])
    assert f"Zorblin<|middle|>{LONG}" in text


@pytest.mark.parametrize(
    ("source", "answer", "written"),
    [
        (HUNYUAN, "<think>\nHm.\n</think>\n<answer>\n4\n</answer>", "<assistant>4<user>"),
        (HUNYUAN, f"<answer>\n{LONG}\n</answer>", f"<assistant>{LONG}<user>"),
        (GEMMA4, "Yes.<|channel>thought\ncut o", "assistant\nYes.<turn|>"),
        (GEMMA4, "<|channel>thought\ncut o", "assistant\n<turn|>"),
    ],
)
def test_thinking_that_a_template_leaves_out_is_no_loss(
    source: str, answer: str, written: str
) -> None:
    """Also where it was cut off, or has no tags of its own."""
    messages = [said("user", LONG), said("assistant", answer), said("user", "hi")]
    assert written in template(source).text(messages)


@pytest.mark.parametrize(
    ("source", "content"), [(HUNYUAN, "<answer>a</answer> b"), (GEMMA4, "Is <|channel> a tag?")]
)
def test_tags_of_thinking_in_a_users_text_are_no_excuse(source: str, content: str) -> None:
    """A text of the user has to be written whole."""
    cut = source.replace("m.role == 'assistant'", "true")
    with pytest.raises(PromptError, match="message 0"):
        template(cut).text([said("user", content)])


def test_a_refusal_names_what_is_refused_without_the_system_prompt_too() -> None:
    """Gemma 2 has no system role, but that is not why it refuses two users in turn."""
    messages = [said("system", "Be brief."), said("user", "hi"), said("user", LONG)]
    with pytest.raises(PromptError, match="roles must alternate"):
        template(PUBLISHED["gemma2"]).text(messages)


def test_a_template_that_is_broken_is_not_said_to_refuse_a_conversation() -> None:
    """The error names the line."""
    with pytest.raises(PromptError, match="can't be read, line 2: Expected an expression"):
        template("\n{% for m in %}").text([said("user", "hi")])


def test_text_beside_calls_goes_before_them() -> None:
    """Llama 3.1 writes a message with calls without its text."""
    messages = [said("user", LONG), call("Let me look.", at="x"), result("rain")]
    text = template(PUBLISHED["llama3.1"]).text(messages)
    assert text.index("Let me look.") < text.index('"parameters": {"at": "x"}')


def test_white_space_and_switches_that_a_template_removes_are_no_loss() -> None:
    """The text around them is there."""
    messages = [said("system", "Be brief. /no_think"), said("user", "\nhi")]
    assert "Be brief.<|im_end|>" in template(PUBLISHED["smollm3"]).text(messages)


def test_a_growing_conversation_is_rendered_once_for_each_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proofs of its first turns hold for the later ones."""
    renders = 0
    render = jinja_renderer(KINDS["qwen3"].template, SPECIAL)

    def counted(*given: Any, **variables: Any) -> str:
        nonlocal renders
        renders += 1
        return render(*given, **variables)

    chat = ChatTemplate(counted)
    messages: list[Any] = [said("system", LONG)]
    counts = []
    for turn in range(12):
        messages += [said("user", "ok"), said("assistant", f"{turn}"), said("user", LONG * 2)]
        renders = 0
        chat.text(messages, tools=[TOOL])
        counts.append(renders)
        messages.append(said("assistant", LONG))
    assert counts[4:] == [1] * 8


def test_a_model_without_a_template_says_so_once(
    caplog: pytest.LogCaptureFixture, recwarn: Any
) -> None:
    """The prompt is still whole."""
    chat: Callable[..., str] = ChatTemplate(None).text
    for _ in range(3):
        assert chat([said("user", "hi")]) == "User: hi\nAssistant:"
    assert [one.message for one in caplog.records if "no chat template" in one.message] == [
        caplog.records[0].message
    ]
    with pytest.raises(OptionError, match="tools: "):
        chat([said("user", "hi")], tools=[TOOL])


@pytest.mark.parametrize("turns", [20, 200])
def test_the_search_for_contents_grows_with_the_text(turns: int) -> None:
    """A template that changes each text does not make it grow with the square of the history."""
    looked = 0

    class Text(str):
        """A text that counts the characters that are searched."""

        def find(self, *arguments: Any) -> int:
            nonlocal looked
            found, begin = str.find(self, *arguments), arguments[1]
            end = min(len(self), *arguments[2:3], len(self))
            looked += (end if found < 0 else found) - begin
            return found

    def render(messages: Any, add_generation_prompt: bool, /, **variables: Any) -> str:
        return Text("".join(f"<{one['content'].replace(' ', '  ')}>" for one in messages))

    messages: Any = [
        {"role": role, "content": f"{role} says {n} more than this once"}
        for n in range(turns)
        for role in ("user", "assistant")
    ]
    text = ChatTemplate(render).text(messages)
    assert 0 < looked <= 12 * len(text)

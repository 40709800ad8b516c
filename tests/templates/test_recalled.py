"""A template writes the same text whether its loops are remembered or run."""

from __future__ import annotations

import copy
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from support.families import KINDS
from support.strict_templates import TEMPLATES

from mlxrunner.templates import sandbox
from mlxrunner.templates.plain import plain
from mlxrunner.templates.recalled import Memory
from mlxrunner.templates.remembered import ENTRY, Bounded, Remembered, footprint

WRITE = "<{{ m.role }}>{{ m.content }}"
ODD = {
    "next": "{% for m in messages %}{% if not loop.last and messages[loop.index0 + 1].role == "
    "'user' %}!{% endif %}" + WRITE + "{% endfor %}",
    "last": "{% for m in messages %}{{ messages[-1].content if m.role == 'user' }}"
    + WRITE
    + "{% endfor %}",
    "length": "{% for m in messages %}{{ loop.length }}/{{ loop.revindex }}"
    + WRITE
    + "{% endfor %}",
    "count": "{% for m in messages %}{% if loop.index == messages | length %}!{% endif %}"
    + WRITE
    + "{% endfor %}",
    "slices": "{% for m in messages %}{{ messages[loop.index0:] | map(attribute='role') | "
    "join('') }}" + WRITE + "{% endfor %}",
    "neighbours": "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}"
    "{{ loop.nextitem.content if loop.nextitem is defined }}" + WRITE + "{% endfor %}",
    "counter": "{% set ns = namespace(n=0, seen='') %}{% for m in messages %}{% if m.role == "
    "'user' %}{% set ns.n = ns.n + 1 %}{% set ns.seen = ns.seen ~ m.content[:1] %}{% endif %}"
    "{{ ns.n }}" + WRITE + "{% endfor %}{{ ns.n }}{{ ns.seen }}",
    "counted ahead": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == "
    "'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{{ '#' if loop.index0 > ns.last }}" + WRITE + "{% endfor %}",
    "macro": "{% macro say(m) %}{{ m.content }}{{ messages[0].content }}{{ extra }}{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}",
    "macro with a counter": "{% set ns = namespace(n=0) %}{% macro say(m) %}{% set ns.n = ns.n + 2 "
    "%}{{ m.content }}{{ ns.n }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}"
    "{{ ns.n }}",
    "macro that counts": "{% set ns = namespace(n=0) %}{% macro mark(m) %}{% set ns.n = m.content "
    "%}{% endmacro %}{% for m in messages %}{{ mark(m) if m.role == 'tool' }}"
    + WRITE
    + "{% endfor %}{{ ns.n }}",
    "joiner": "{% set comma = joiner(', ') %}{% for m in messages %}{{ comma() }}"
    + WRITE
    + "{% endfor %}",
    "cycle": "{% for m in messages %}{{ loop.cycle('a', 'b') }}" + WRITE + "{% endfor %}",
    "changed": "{% for m in messages %}{% if loop.changed(m.role) %}!{% endif %}"
    + WRITE
    + "{% endfor %}",
    "break": "{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}"
    + WRITE
    + "{% endfor %}",
    "continue": "{% for m in messages %}{% if m.content == 'stop' %}{% continue %}{% endif %}"
    + WRITE
    + "{% endfor %}",
    "shadowed": "{% set text = extra %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set text = m.content %}{% endif %}{{ text }}{% endfor %}{{ text }}",
    "given and assigned": "{% for m in messages %}{% if m.role == 'user' %}{% set extra = "
    "m.content %}{% endif %}{{ extra }}{% endfor %}",
    "assigned late": "{% for m in messages %}{{ late }}" + WRITE + "{% endfor %}{% set late = 1 %}",
    "filtered": "{% for m in messages if m.role != 'tool' %}{{ loop.index }}"
    + WRITE
    + "{% endfor %}",
    "backwards": "{% for m in messages[::-1] %}{{ loop.index0 }}" + WRITE + "{% endfor %}",
    "shortened": "{% set messages = messages[1:] %}{% for m in messages %}{{ messages[0].role }}"
    + WRITE
    + "{% endfor %}",
    "nested": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ loop.index }}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}" + WRITE + "{% endfor %}",
    "in an if": "{% if tools %}{% for m in messages %}{{ tools | tojson }}" + WRITE + "{% endfor %}"
    "{% else %}{% for m in messages %}" + WRITE + "{% endfor %}{% endif %}",
    "whole": "{% for m in messages %}{{ messages | tojson }}{% endfor %}",
    "else": "{% for m in messages if m.role == 'none' %}x{% else %}empty{% endfor %}",
    "loop given away": "{% macro at(l) %}{{ l.length }}{% endmacro %}{% for m in messages %}"
    "{{ at(loop) }}" + WRITE + "{% endfor %}",
    "refuses": "{% for m in messages %}{% if m.content == 'stop' %}{{ raise_exception('no') }}"
    "{% endif %}" + WRITE + "{% endfor %}",
    "numbers": "{% for m in messages %}{{ m.tool_calls[0].function.arguments if m.tool_calls }}"
    "{% endfor %}",
    "two names": "{% set a = namespace(n=0) %}{% if extra == 'x' %}{% set b = a %}{% else %}"
    "{% set b = namespace(n=0) %}{% endif %}{% for m in messages %}{% set a.n = a.n + 1 %}"
    "{{ b.n }}" + WRITE + "{% endfor %}",
    "blocks": "{% for m in messages %}{% set x %}{{ m.content }}{% endset %}{{ x | upper }}"
    "{% endfor %}",
}
SOURCES = {
    **ODD,
    **{name: template for name, (template, _) in TEMPLATES.items()},
    **{f"kind {name}": kind.template for name, kind in KINDS.items()},
}
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    {"a": True, "b": 2},
    {"a": 1.0, "b": 2},
    {"a": None},
)
TEXTS = ["hello", "stop", "<think>\nwhy\n</think>\n\nso", " spaced ", "", "é\ue0f4", "more"]


def message(random: random.Random) -> dict[str, Any]:
    """Return a message of any role."""
    role = random.choice(["user", "assistant", "assistant", "tool", "system"])
    made: dict[str, Any] = {"role": role, "content": random.choice(TEXTS)}
    if role == "assistant" and random.random() < 0.5:
        function = {"name": "look", "arguments": random.choice(ARGUMENTS)}
        made["tool_calls"] = [{"type": "function", "id": "abcdefghi", "function": function}]
    if role == "assistant" and random.random() < 0.3:
        made["reasoning_content"] = "thought"
    if role == "tool":
        made["tool_call_id"] = "abcdefghi"
    return made


def histories(random: random.Random, count: int) -> list[dict[str, Any]]:
    """Return the variables of requests that grow, fork, and change messages at any place."""
    messages = [{"role": "user", "content": "hello"}]
    variables: dict[str, Any] = {"tools": None, "add_generation_prompt": True}
    made = []
    for _ in range(count):
        way = random.random()
        if way < 0.6:
            messages = [*messages, message(random)]
        elif way < 0.75:
            messages = messages[: random.randrange(1, len(messages) + 1)]
        elif way < 0.9:
            messages = copy.deepcopy(messages)
            messages[random.randrange(len(messages))] = message(random)
        else:
            name, value = random.choice(
                [("tools", [{"name": "t"}]), ("tools", None), ("extra", "x"), ("extra", "y")]
            )
            variables = {**variables, name: value}
        made.append({**variables, "messages": copy.deepcopy(messages)})
    return made


def written(source: str, variables: dict[str, Any]) -> str:
    """Return what a template writes, or how it refuses."""
    try:
        return sandbox.render(source, {name: plain(one) for name, one in variables.items()})
    except Exception as error:
        return f"refused: {error}"


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Memory], None]:
    """A function that sets the memory of all renders."""
    return lambda memory: monkeypatch.setattr(sandbox, "_MEMORY", memory)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.exhaustive(12)
def test_it_writes_what_it_would_write_anew(
    name: str, remembering: Callable[[Memory], None]
) -> None:
    """For conversations that grow, fork and change, also if the template looks far ahead."""
    histories_ = histories(random.Random(name), 120)
    remembering(Memory(0))
    anew = [written(SOURCES[name], one) for one in histories_]
    remembering(Memory(10**7))
    assert [written(SOURCES[name], one) for one in histories_] == anew
    remembering(Memory(4000))  # forgets most of it
    assert [written(SOURCES[name], one) for one in histories_] == anew


@pytest.mark.parametrize("name", [*TEMPLATES, "next", "counter", "counted ahead", "nested"])
def test_a_message_is_written_once(name: str, remembering: Callable[[Memory], None]) -> None:
    """A conversation that grows by a turn of a tool runs the body for the new messages only."""
    memory = Memory(10**7)
    remembering(memory)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    known = 0
    for turn in range(5):
        function = {"name": "look", "arguments": {"at": turn}}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": f"I look {turn}.", "tool_calls": [call]},
            {"role": "tool", "content": f"seen {turn}", "tool_call_id": "abcdefghi"},
            {"role": "assistant", "content": f"I saw {turn}."},
        ]
        source = SOURCES[name]
        if name in ("mistral", "gemma3"):
            messages = [
                {"role": ("user", "assistant")[n % 2], "content": f"text {n}"}
                for n in range(4 * turn + 1)
            ]
        out = written(source, {"messages": messages, "tools": None, "add_generation_prompt": True})
        assert not out.startswith("refused")
        if turn:
            assert 0 < len(memory) - known <= 6
        known = len(memory)


LOTS = "m.content | list"
DRAWN = [
    "{{ LOTS | random }}",
    "{{ [LOTS] | map('random') | first }}",
    "{{ [[LOTS]] | map('map', 'random') | first | first }}",
    "{% set how = 'random' %}{{ [LOTS] | map(how) | first }}",
    "{{ [m] | select('sameas', m) | list | length }}",
    "{{ [m] | rejectattr('role', 'sameas', m.role) | list | length }}",
    "{{ draw(m) }}",
]


@pytest.mark.parametrize("drawn", DRAWN)
def test_what_is_drawn_by_lot_is_drawn_anew(
    drawn: str, remembering: Callable[[Memory], None]
) -> None:
    """An iteration whose text does not follow from what it reads is never remembered."""
    memory = Memory(10**7)
    remembering(memory)
    macro = "{% macro draw(m) %}{{ LOTS | random }}{% endmacro %}" if "draw" in drawn else ""
    source = macro + "{% for m in messages %}" + drawn + "{% endfor %}"
    messages = [{"role": "user", "content": "abcdefgh"}]
    out = written(source.replace("LOTS", LOTS), {"messages": messages})
    assert not out.startswith("refused")
    assert len(memory) == 0


def test_other_filters_by_name_are_remembered(remembering: Callable[[Memory], None]) -> None:
    """As templates use them for the parts of a content."""
    memory = Memory(10**7)
    remembering(memory)
    named = "{{ [m] | selectattr('role', 'equalto', m.role) | map(attribute='content') | join }}"
    source = "{% for m in messages %}" + named + "{{ [1, 2] | map('string') | join }}{% endfor %}"
    assert written(source, {"messages": [{"role": "user", "content": "a"}]}) == "a12"
    assert len(memory) == 1


def test_a_memory_keeps_what_was_used_last() -> None:
    """Up to its size; a value that is put again replaces the first."""
    one = ENTRY + footprint("a", b"a" * 1000)
    memory = Bounded[bytes](4 * one)
    for key in "abc":
        memory.put(key, key.encode() * 1000)
    memory.put("b", b"B" * 2000)
    assert memory.get("a") == b"a" * 1000
    memory.put("d", b"d" * 1000)
    assert [(memory.get(key) or b"")[:1] for key in "abcd"] == [b"a", b"B", b"", b"d"]
    memory.put("e", b"e" * 10_000)
    assert len(memory) == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 20_000), ("x" * 10_000 + "\U0001f600", 400)],  # four bytes for each of these letters
    ids=["small", "wide"],
)
def test_a_memory_counts_objects_and_not_only_text(text: str, count: int) -> None:
    """What it holds takes no more of the process's memory than it may."""
    most = 4_000_000
    remembered = Remembered(lambda value: [value, dict(value)], most)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            remembered({"role": "u", "content": f"{number}{text}"})
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert most / 2 < taken < most


def test_a_value_that_changes_meanwhile_is_remembered_as_it_was() -> None:
    """The result belongs to the value by which it is found again."""
    value = {"content": "old"}

    def work(given: Any) -> str:
        value["content"] = "new"  # another thread
        return str(given["content"])

    remembered = Remembered(work, 10**6)
    assert remembered(value) == "old"
    assert remembered({"content": "old"}) == "old"


def test_a_function_remembers_what_it_was_given() -> None:
    """Values that only look alike are others, and so are keys in another order."""
    seen: list[Any] = []

    def work(value: Any) -> int:
        seen.append(value)
        return len(seen)

    remembered = Remembered(work, 10**6)
    alike: list[Any] = [1, True, 1.0, "1", [1], [True], {"a": 1, "b": 2}, {"b": 2, "a": 1}, None]
    assert [remembered(copy.deepcopy(value)) for value in alike] == list(range(1, 10))
    assert [remembered(copy.deepcopy(value)) for value in alike] == list(range(1, 10))
    strange = object()
    assert [remembered(strange), remembered(strange)] == [10, 11]

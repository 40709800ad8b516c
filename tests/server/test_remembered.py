"""Results that are remembered change no prompt, and are bounded."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from typing import Any

import pytest
from support.strict_templates import TEMPLATES

from mlxrunner.server.events import ApiError, ServerRequest
from mlxrunner.server.manager import prompt_record
from mlxrunner.server.prompts import builder, rules
from mlxrunner.server.prompts.answer_tokens import PromptEncoder
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.server.prompts.rules import ENTRY, LRUCache, MemoizedFunction, footprint
from mlxrunner.templates.messages import check_messages

TEXTS = ["hello", " spaced ", "<|im_end|>", "</s> [INST]", "", "x" * 300]
TEXTS.append("<think>\nwhy\n</think>\n\nso")


@pytest.fixture(params=TEMPLATES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def maker(makers: dict[str, PromptBuilder], family: str) -> PromptBuilder:
    """A maker of a family that knows nothing."""
    return PromptBuilder(makers[family].tokenizer, TEMPLATES[family][0])


of_qwen3 = pytest.mark.parametrize("family", ["qwen3"], indirect=True)


def ask(messages: list[dict[str, Any]], **more: Any) -> ServerRequest:
    return ServerRequest(protocol="chat", model="", messages=messages, **more)


def message(order: random.Random) -> dict[str, Any]:
    """Return a message as a client may send it."""
    role = order.choice(["user", "user", "assistant", "assistant", "tool", "system", "developer"])
    made: dict[str, Any] = {"role": role, "content": order.choice(TEXTS)}
    if role == "assistant":
        names = order.choice([(), (), ("look",), ("look", "find")])
        made["tool_calls"] = [call(order, name) for name in names]
        if order.random() < 0.4:
            made["reasoning_content"] = order.choice(["", "thought", "another"])
    if role == "tool":
        made["tool_call_id"] = order.choice(["call_1", "call_2"])
    return made


def call(order: random.Random, name: str) -> dict[str, Any]:
    arguments = order.choice([{"a": 1, "b": "x"}, {"b": "x", "a": 1}, {"a": True}, {}])
    text = json.dumps(arguments, separators=order.choice([(",", ":"), (", ", ": ")]))
    function = {"name": name, "arguments": text}
    return {"id": order.choice(["call_1", "call_2"]), "type": "function", "function": function}


def tool(order: random.Random) -> dict[str, Any]:
    """Return a tool, with its keys in one of two orders, and perhaps with a mark."""
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    if order.random() < 0.5:
        function = dict(reversed(function.items()))
    marked = {"cache_control": {"type": "ephemeral"}} if order.random() < 0.3 else {}
    return {"type": "function", "function": function, **marked}


def requests(order: random.Random, count: int) -> list[ServerRequest]:
    """Return requests of a conversation that grows, forks, and is edited."""
    messages = [{"role": "user", "content": "hello"}]
    made = []
    for number in range(count):
        way = order.random()
        if way < 0.6:
            messages = [*messages, message(order)]
        elif way < 0.8:
            messages = messages[: order.randrange(1, len(messages) + 1)]
        else:
            messages = list(messages)
            messages[order.randrange(len(messages))] = message(order)
        tools = [tool(order) for _ in range(order.choice([0, 1, 2]))]
        thinking = order.choice([None, None, False])
        copied = copy.deepcopy(messages)
        made.append(ask(copied, id=str(number), tools=tools, thinking=thinking))
    return made


def made_of(maker: PromptBuilder, asked: ServerRequest) -> Any:
    """Return the tokens of a prompt and all that is said of it, or the refusal."""
    try:
        made = maker.make(copy.deepcopy(asked))
    except ApiError as refused:
        return refused.message
    seen = prompt_record(asked, made)
    return made.prompt.tokens.tolist(), made.rules, made.link, made.source, seen.digests, seen.tools


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.exhaustive(9)
def test_a_prompt_is_the_same_as_from_a_maker_that_knows_nothing(
    maker: PromptBuilder, family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, rules, digests and refusals, while a conversation grows, forks and is edited."""
    several = requests(random.Random(f"{family} {seed}"), 25)
    with_memory = [made_of(maker, asked) for asked in several]
    assert [made_of(maker, asked) for asked in several] == with_memory
    for name in ("_unmarked", "_in_order"):
        monkeypatch.setattr(rules, name, MemoizedFunction(getattr(rules, name)._work, 0))
    monkeypatch.setattr(builder, "MOST_BYTES", 0)
    anew = PromptBuilder(maker.tokenizer, TEMPLATES[family][0])
    monkeypatch.setattr(anew.tokenizer, "parts", lambda text: [text])
    for asked, expected in zip(several, with_memory, strict=True):
        anew._encoder = PromptEncoder(anew.tokenizer, most=0)
        assert made_of(anew, asked) == expected
    assert any(not isinstance(one, str) for one in with_memory)


def test_the_rules_make_plain_messages(maker: PromptBuilder, family: str) -> None:
    """They are not checked again before the template gets them."""
    for asked in requests(random.Random(family), 40):
        thought = list(map(maker._with_thinking, check_messages(asked.messages)))
        draft, _ = rules.apply(
            rules.PromptDraft(thought, list(map(dict, asked.tools))), maker.probe
        )
        assert check_messages(draft.messages) == draft.messages


@of_qwen3
def test_the_message_that_is_wrong_is_named(maker: PromptBuilder) -> None:
    """By its number, also if the others are known."""
    good = {"role": "user", "content": "hello"}
    maker.make(ask([good]))
    for _ in range(2):
        with pytest.raises(ApiError, match="message 1: content has to be a text"):
            maker.make(ask([good, {**good, "content": 5}]))
    with pytest.raises(ApiError, match="the conversation is empty"):
        maker.make(ask([]))


@of_qwen3
def test_the_same_text_is_encoded_once(
    maker: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that continues, or is edited at its end, encodes only what is new."""
    encoded: list[str] = []
    for name in ("encode", "encode_more"):
        whole = getattr(maker.tokenizer, name)
        monkeypatch.setattr(
            maker.tokenizer, name, lambda text, whole=whole: (encoded.append(text), whole(text))[1]
        )
    messages = [{"role": "user", "content": f"text {n} " + "x" * 100} for n in range(20)]
    maker.make(ask(messages))
    assert sum(map(len, encoded)) > 2000
    encoded.clear()
    messages[-1] = {"role": "user", "content": "another end"}
    maker.make(ask(messages))
    assert "another end" in "".join(encoded)
    assert sum(map(len, encoded)) < 100


def test_a_memory_keeps_what_was_used_last() -> None:
    """Up to its size; a value that is put again replaces the first."""
    one = ENTRY + footprint("a", b"a" * 1000)
    memory = LRUCache[bytes](4 * one)
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
    [("", 5_000), ("x" * 10_000 + "\U0001f600", 100)],  # four bytes for each of these letters
    ids=["small", "wide"],
)
def test_a_memory_counts_objects_and_not_only_text(text: str, count: int) -> None:
    """All that it holds takes no more of the process's memory than it may."""
    most = 1_000_000
    remembered = MemoizedFunction(lambda value: [value, dict(value)], most)
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

    remembered = MemoizedFunction(work, 10**6)
    assert remembered(value) == "old"
    assert remembered({"content": "old"}) == "old"


def test_a_function_remembers_what_it_was_given() -> None:
    """Values that only look alike are others, and so are keys in another order."""
    seen: list[Any] = []

    def work(value: Any) -> int:
        seen.append(value)
        return len(seen)

    remembered = MemoizedFunction(work, 10**6)
    alike: list[Any] = [1, True, 1.0, "1", [1], [True], {"a": 1, "b": 2}, {"b": 2, "a": 1}, None]
    assert [remembered(copy.deepcopy(value)) for value in alike] == list(range(1, 10))
    assert [remembered(copy.deepcopy(value)) for value in alike] == list(range(1, 10))
    strange = object()
    assert [remembered(strange), remembered(strange)] == [10, 11]

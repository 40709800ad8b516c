"""Answers that come back are the tokens that were generated, and the prompt says the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.strict_templates import TEMPLATES, load_strict

from mlxrunner.cache.entry import as_tokens
from mlxrunner.results import Chunk
from mlxrunner.server.events import ServerRequest, TextDelta, ThinkingDelta, ToolCallEvent
from mlxrunner.server.prompts.answer_tokens import (
    AnswerTokenCache,
    PromptEncoder,
    TokenSpan,
)
from mlxrunner.server.prompts.builder import BuiltPrompt, PromptBuilder
from mlxrunner.server.tools.reader import ParsedAnswer
from mlxrunner.tokenizer.base import AnswerTokens

FAMILIES = ("qwen3", "qwen3.5", "llama3", "mistral", "gpt-oss", "glm", "deepseek", "gemma3")
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "integer"}, "for": {"type": "string"}},
        },
    },
}
MERGED = ["look", "name", '{"', '": ', "arguments", "hello", " the", "ello th", "\n\n", "file"]
"""Tokens of several letters, so that a text has several tokenizations."""


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptBuilder]:
    root = tmp_path_factory.mktemp("kept")
    return {
        name: PromptBuilder(load_strict(root / name, name, words=MERGED), TEMPLATES[name][0])
        for name in FAMILIES
    }


@pytest.fixture(params=FAMILIES)
def maker(request: pytest.FixtureRequest, makers: dict[str, PromptBuilder]) -> PromptBuilder:
    """Each family's maker in turn, without answers."""
    maker = makers[request.param]
    maker.kept = AnswerTokenCache()
    return maker


def of(family: str) -> pytest.MarkDecorator:
    """Give a test the maker of one family."""
    return pytest.mark.parametrize("maker", [family], indirect=True)


def call_text(form: str, at: int, order: random.Random) -> str:
    """Write a call as a model of the family might, with its own white space in JSON."""
    arguments = {"at": at, "for": "the <file> \u00e9"}
    inner = json.dumps(arguments, ensure_ascii=order.random() < 0.5)
    loose = inner.replace(": ", ":") if order.random() < 0.5 else inner.replace(", ", " ,  ")
    match form:
        case "json_tools":
            return f'<tool_call>\n{{"name":"look", "arguments":{loose}}}\n</tool_call>'
        case "bare_json":
            return f'{{"name":"look","parameters":{loose}}}'
        case "mistral":
            return f'[TOOL_CALLS] [{{"name":"look","arguments":{loose},"id":"abcdefgh{at % 10}"}}]'
        case "channels":
            header = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
            return header + loose
        case "glm47":
            pairs = (
                f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
                for key, value in arguments.items()
            )
            return f"<tool_call>look\n{''.join(pairs)}</tool_call>"
    inside = f"<｜tool▁call▁begin｜>look<｜tool▁sep｜>{loose}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


@dataclass
class Client:
    """A client that sends each answer back as text and JSON, and a model that answers at random."""

    maker: PromptBuilder
    order: random.Random
    sends_thinking: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, *messages: dict[str, Any]) -> BuiltPrompt:
        """Send the conversation with more messages."""
        self.messages += messages
        return self.maker.make(self.request)

    @property
    def request(self) -> ServerRequest:
        """The request as it would be now."""
        return ServerRequest(
            protocol="chat", model="", id="r", messages=self.messages, tools=[TOOL]
        )

    def answer(self, made: BuiltPrompt, text: str) -> list[int]:
        """Let the model write `text`, take it as a client does, and return its tokens."""
        tokens = [*self.tokens(text), min(self.maker.tokenizer.stop_tokens)]
        stream = self.maker.tokenizer.stream(made.prompt.tokens[-8:].tolist())
        chunks = [Chunk(stream.add(token), token) for token in tokens[:-1]]
        chunks.append(Chunk(stream.finish(), tokens[-1], finish_reason="stop"))
        splitter = self.maker.splitter(made, self.request)
        events = [event for chunk in chunks for event in splitter.add(chunk)]
        events += splitter.finish()
        self.maker.keep(made, chunks)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(event.text for event in events if isinstance(event, TextDelta)),
        }
        thought = "".join(event.text for event in events if isinstance(event, ThinkingDelta))
        if self.sends_thinking and thought:
            message["reasoning_content"] = thought
        calls = [event for event in events if isinstance(event, ToolCallEvent)]
        if calls:
            message["tool_calls"] = list(map(_sent_back, calls))
        self.messages.append(message)
        self.messages += [
            {"role": "tool", "tool_call_id": one.id, "content": f"result of {one.id}"}
            for one in calls
        ]
        return tokens[:-1]

    def tokens(self, text: str) -> list[int]:
        """Return tokens of a text, of many possible ones."""
        marked = [text]
        encode = self.maker.tokenizer.encode_more
        while marked[-1]:
            cut = self.order.randint(1, 12)
            piece = marked.pop()
            while any(piece.find(mark[:1], max(0, cut - 25), cut) >= 0 for mark in "<["):
                cut += 1  # don't cut a mark
                if cut >= len(piece):
                    break
            marked += [piece[:cut], piece[cut:]]
        return [token for piece in marked for token in encode(piece)]


def _sent_back(call: ToolCallEvent) -> dict[str, Any]:
    arguments = json.dumps(json.loads(call.arguments), separators=(",", ":"))
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


GO_ON = {"role": "user", "content": "go on"}


def begins_with(made: BuiltPrompt, before: BuiltPrompt, answer: list[int]) -> bool:
    """Return True if a prompt begins with an earlier one and its answer."""
    both = [*before.prompt.tokens.tolist(), *answer]
    return bool(made.prompt.tokens[: len(both)].tolist() == both)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sends_thinking", [False, True])
def test_answers_come_back_as_their_tokens(
    maker: PromptBuilder, seed: int, sends_thinking: bool
) -> None:
    """Each next prompt begins with the last one and its answer; the text is that of its tokens."""
    order = random.Random(seed)
    client = Client(maker, order, sends_thinking)
    made = client.ask(
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello the file"}
    )
    for turn in range(5):
        text = order.choice(["hello the file", "the file: {x}", "\u00e9 hello\n\nthe file"])
        if order.random() < 0.6:
            call = call_text(maker.form.name, 100 + turn, order)
            joins = maker.form.kind == "tags" and order.random() < 0.5
            text = f"{text}\n{call}" if joins else call
        elif maker.form.kind == "channels":
            text = f"<|channel|>final<|message|>{text}"
        written = client.answer(made, text)
        is_call = "tool_calls" in client.messages[-2]
        after = client.ask(*([] if is_call else [GO_ON]))
        assert maker.tokenizer.decode(after.prompt.tokens.tolist()) == after.prompt.text
        assert begins_with(after, made, written), (after.prompt.text, after.rendered)
        assert after.kept == turn + 1
        made = after


def opened(maker: PromptBuilder, answer: str, **more: Any) -> tuple[Client, BuiltPrompt, list[int]]:
    """Return a client after one answer, with the prompt and the tokens of the answer."""
    client = Client(maker, random.Random(3), **more)
    made = client.ask({"role": "user", "content": "hello the file"})
    return client, made, client.answer(made, answer)


@of("gpt-oss")
@pytest.mark.parametrize("arguments", ['{"at": 7', "[1]"])
def test_a_malformed_call_of_gpt_oss_comes_back(maker: PromptBuilder, arguments: str) -> None:
    """The template takes the text that the client was sent, and the model sees what it wrote."""
    header = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    client, _, _ = opened(maker, header + arguments)
    after = client.ask(GO_ON)
    assert after.kept == 1
    assert header + arguments in after.prompt.text


CALL = '<tool_call>\n{"name":"look", "arguments":{"at":7, "for":"the file"}}\n</tool_call>'
THOUGHT = "<think>\nhello the file\n</think>\n\n"


CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "text": lambda said, _: said.update(content=said["content"] + " and more"),
    "beginning": lambda said, _: said.update(content="Now " + said["content"]),
    "argument": lambda _, call: call.update(arguments='{"at": 8, "for": "the file"}'),
    "name": lambda _, call: call.update(name="looks"),
    "another call": lambda said, _: said.update(tool_calls=said["tool_calls"] * 2),
    "no call": lambda said, _: said.pop("tool_calls"),
}


@of("qwen3")
@pytest.mark.parametrize("change", [*CHANGES, "question"])
def test_an_answer_that_was_changed_is_the_templates(maker: PromptBuilder, change: str) -> None:
    """The model sees what the client sent, not what it wrote itself, or in another conversation."""
    client, _, _ = opened(maker, f"hello the file\n{CALL}")
    question, said = client.messages[:2]
    if change == "question":
        question["content"] = "bye"
    else:
        CHANGES[change](said, said["tool_calls"][0]["function"])
    del client.messages[2:]
    made = client.ask(GO_ON)
    assert (made.kept, made.prompt.text) == (0, made.rendered)


@of("qwen3")
def test_thinking_that_is_left_out_costs_only_itself(maker: PromptBuilder) -> None:
    """The rest of the answer is the tokens that were generated."""
    client, before, tokens = opened(maker, f"{THOUGHT}hello the file\n{CALL}")
    after = client.ask(GO_ON)
    assert after.kept == 1
    assert THOUGHT not in after.prompt.text
    assert CALL in after.prompt.text
    assert CALL not in after.rendered
    visible = tokens[-len(maker.tokenizer.encode_more(CALL)) :]
    end = after.prompt.tokens[len(before.prompt.tokens) :].tolist()
    assert any(end[n : n + len(visible)] == visible for n in range(len(tokens)))


@of("qwen3")
@pytest.mark.parametrize("sends_thinking", [False, True])
def test_thinking_that_comes_back_is_kept(maker: PromptBuilder, sends_thinking: bool) -> None:
    """Within the same task Qwen's template keeps it, if the client sends it."""
    client, before, tokens = opened(maker, f"{THOUGHT}{CALL}", sends_thinking=sends_thinking)
    after = client.ask()
    assert begins_with(after, before, tokens) == sends_thinking
    assert (THOUGHT in after.prompt.text) == sends_thinking


@of("qwen3")
def test_the_newest_of_several_answers_that_fits_is_taken(maker: PromptBuilder) -> None:
    """A client may continue with any of them."""
    client, made, first = opened(maker, "hello the file: one")
    (sent,) = client.messages[1:]
    del client.messages[1:]
    client.answer(made, "hello the file: two")
    client.answer(made, "hello the file: two")
    client.messages[1:] = [sent]
    assert begins_with(client.ask(GO_ON), made, first)
    assert len(maker.kept) == 2


@of("mistral")
@pytest.mark.parametrize(
    "answer",
    ['[TOOL_CALLS] [{"name":"look", "arguments":{"at":7}}]', '[TOOL_CALLS]look[ARGS]{"at":7}'],
)
@pytest.mark.parametrize("others_id", [False, True])
def test_a_call_without_an_id_comes_back(
    maker: PromptBuilder, answer: str, others_id: bool
) -> None:
    """The template writes the id that the server gave it; the tokens are those of the model."""
    client, before, tokens = opened(maker, answer)
    if others_id:
        client.messages[1]["tool_calls"][0]["id"] = client.messages[2]["tool_call_id"] = "other"
    after = client.ask()
    assert after.kept == 1
    assert begins_with(after, before, tokens)
    assert '"id": ' in after.rendered.partition("[TOOL_CALLS]")[2]


@of("mistral")
def test_a_call_with_another_id_is_the_templates(maker: PromptBuilder) -> None:
    """The model wrote its own, and the client sends another one."""
    call = '{"name":"look", "arguments":{"at":7}, "id":"abcdefgh1"}'
    client, _, _ = opened(maker, f"[TOOL_CALLS] [{call}]")
    client.messages[1]["tool_calls"][0]["id"] = client.messages[2]["tool_call_id"] = "abcdefgh2"
    assert client.ask().kept == 0


TYPED = ["hello", " the", " f", "ile", " hello", " the", " ", "file", "."]
"""The tokens of an answer, which are not those of its text."""


def cut_off(maker: PromptBuilder, before: str = "") -> tuple[Client, BuiltPrompt, list[int]]:
    """Return a client that left before the end of an answer, its prompt, and the tokens so far."""
    client = Client(maker, random.Random(3))
    made = client.ask({"role": "user", "content": "hello the file"})
    encode = maker.tokenizer.encode_more
    pieces = [piece for text in TYPED for piece in ([text] if text in MERGED else text)]
    tokens = [*encode(before), *(token for piece in pieces for token in encode(piece))]
    stream = maker.tokenizer.stream(made.prompt.tokens[-8:].tolist())
    maker.keep(made, [Chunk(stream.add(token), token) for token in tokens], is_cut=True)
    assert len(maker.kept) == 1
    return client, made, tokens


@pytest.mark.parametrize("seen", range(1, len("".join(TYPED)) + 1))
def test_an_answer_that_was_cut_off_comes_back_as_far_as_it_was_seen(
    maker: PromptBuilder, seen: int
) -> None:
    """Up to the last token that is whole in what the client has."""
    if maker.form.kind == "channels":
        pytest.skip("its tokens begin with a channel")
    client, made, tokens = cut_off(maker)
    text = "".join(TYPED)[:seen]
    after = client.ask({"role": "assistant", "content": text}, GO_ON)
    decode = maker.tokenizer.decode
    assert after.prompt.text == after.rendered == decode(after.prompt.tokens.tolist())
    ends = [len(decode(tokens[:count])) for count in range(1, len(tokens) + 1)]
    whole = sum(end <= len(text.rstrip()) for end in ends)
    assert begins_with(after, made, tokens[:whole])
    assert after.kept == (1 if whole else 0)


@of("qwen3")
def test_a_cut_answer_may_lack_its_thinking(maker: PromptBuilder) -> None:
    """The part that was seen after it is kept."""
    client, _, tokens = cut_off(maker, THOUGHT)
    after = client.ask({"role": "assistant", "content": "".join(TYPED[:4])}, GO_ON)
    visible = tokens[len(maker.tokenizer.encode_more(THOUGHT)) :][:4]
    found = after.prompt.tokens.tolist()
    assert any(found[n : n + 4] == visible for n in range(len(found)))
    assert (after.kept, after.prompt.text) == (1, after.rendered)


@of("qwen3")
def test_a_cut_answer_that_was_changed_is_kept_up_to_the_change(maker: PromptBuilder) -> None:
    """A whole answer to the same prompt is preferred."""
    client, made, tokens = cut_off(maker)
    after = client.ask({"role": "assistant", "content": "hello they"}, GO_ON)
    assert begins_with(after, made, tokens[:2])
    assert after.prompt.text == after.rendered
    del client.messages[1:]
    whole = client.answer(made, "hello the file: done")
    client.answer(made, "hello the")
    maker.keep(made, [Chunk(text, n) for text, n in zip(TYPED, tokens, strict=False)], is_cut=True)
    del client.messages[2:]
    assert begins_with(client.ask(GO_ON), made, whole)


def keep(kept: AnswerTokenCache, number: int, text: str = "ten tokens") -> None:
    """Keep an answer of a token for each letter."""
    answer = AnswerTokens(text, as_tokens(list(map(ord, text))), list(range(1, len(text) + 1)))
    kept.keep(bytes([number]), f"prompt {number} ", answer, ParsedAnswer("", text, (), 0))


def fills(kept: AnswerTokenCache, number: int) -> list[tuple[int, int, str]]:
    """Return the places that a kept answer fills in the next prompt, and its text."""
    text, links = f"prompt {number} ten tokens.", [bytes([number]), b""]
    nothing = ParsedAnswer("", "", (), 0)
    found = kept.fills(text, links, lambda number: None, lambda *_: nothing)
    return [(fill.begin, fill.end, fill.text) for fill in found]


def test_kept_answers_are_bounded() -> None:
    """Those used last stay."""
    kept = AnswerTokenCache()
    for number in range(3):
        keep(kept, number)
    kept._most = most = kept.nbytes
    assert (len(kept), most > 3 * 1000) == (3, True)
    place = [(9, 19, "ten tokens")]
    assert fills(kept, 0) == place
    keep(kept, 3)
    assert (len(kept), kept.nbytes) == (3, most)
    assert [fills(kept, number) for number in range(4)] == [place, [], place, place]


def test_an_answer_without_text_or_with_half_a_character_is_not_kept() -> None:
    """There is nothing to find."""
    kept = AnswerTokenCache()
    keep(kept, 0, "")
    keep(kept, 0, "b\ufffd")
    assert len(kept) == 0


@of("qwen3")
def test_an_answer_that_a_stop_string_ended_is_kept_up_to_it(maker: PromptBuilder) -> None:
    """If a token ends there."""
    tokenizer = maker.tokenizer
    first, *rest = tokenizer.encode_more("hello the\nend of")
    chunks = [Chunk("hello the", first), *(Chunk("", token) for token in rest)]
    answer = AnswerTokens.of(chunks, tokenizer, tokenizer.encode_more("a"))
    assert answer.text == "hello the" == tokenizer.decode(answer.tokens.tolist())
    half = AnswerTokens.of([Chunk("hel", first)], tokenizer, [])
    assert (half.text, len(half.tokens)) == ("", 0)


def test_texts_are_encoded_once() -> None:
    """Their tokens are remembered, up to a number of bytes."""

    class Counting:
        count = 0

        def encode(self, text: str) -> list[int]:
            self.count += 1
            return [0, *map(ord, text)]

        def encode_more(self, text: str) -> list[int]:
            return self.encode(text)[1:]

    tokenizer: Any = Counting()
    encoder = PromptEncoder(tokenizer, most=1200)
    fill = TokenSpan(3, 5, "xyz", as_tokens([7]))
    for _ in range(2):
        tokens, text = encoder.encode("abcdefg", [fill])
        assert tokens.tolist() == [0, *map(ord, "abc"), 7, *map(ord, "fg")]
        assert text == "abcxyzfg"
    assert tokenizer.count == 2
    encoder.encode("h" * 200, [])
    encoder.encode("abcdefg", [fill])
    assert tokenizer.count > 3

"""Answers that come back are the tokens that were generated, and the prompt says the same."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.strict_templates import TEMPLATES, load_strict

from mlxrunner.cache.tokens import as_tokens
from mlxrunner.results import Chunk
from mlxrunner.serve.asked import Asked
from mlxrunner.serve.events import CallArguments, CallBegan, Text, Thought
from mlxrunner.serve.prompts.kept import KeptTurns
from mlxrunner.serve.prompts.make import Made, PromptMaker

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
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptMaker]:
    """A maker for each family."""
    root = tmp_path_factory.mktemp("kept")
    return {
        name: PromptMaker(load_strict(root / name, name, words=MERGED), TEMPLATES[name][0])
        for name in FAMILIES
    }


@pytest.fixture(params=FAMILIES)
def maker(request: pytest.FixtureRequest, makers: dict[str, PromptMaker]) -> PromptMaker:
    """Each family's maker in turn, without answers."""
    found = makers[request.param]
    found.kept = KeptTurns()
    return found


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
            values = {"at": str(at), "for": arguments["for"]}
            pairs = (
                f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
                for key, value in values.items()
            )
            return f"<tool_call>look\n{''.join(pairs)}</tool_call>"
    inside = f"<｜tool▁call▁begin｜>look<｜tool▁sep｜>{loose}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


@dataclass
class Client:
    """A client that sends each answer back as text and JSON, and a model that answers at random."""

    maker: PromptMaker
    order: random.Random
    sends_thinking: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, *messages: dict[str, Any]) -> Made:
        """Send the conversation with more messages."""
        self.messages += messages
        return self.maker.make(self.request)

    @property
    def request(self) -> Asked:
        """The request as it would be now."""
        return Asked(protocol="chat", model="", id="r", messages=self.messages, tools=[TOOL])

    def answer(self, made: Made, text: str) -> list[int]:
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
            "content": "".join(event.text for event in events if isinstance(event, Text)),
        }
        thought = "".join(event.text for event in events if isinstance(event, Thought))
        if self.sends_thinking and thought:
            message["reasoning_content"] = thought
        began = [event for event in events if isinstance(event, CallBegan)]
        written = [event for event in events if isinstance(event, CallArguments)]
        if began:
            message["tool_calls"] = [
                {
                    "id": one.id,
                    "type": "function",
                    "function": {
                        "name": one.name,
                        "arguments": json.dumps(json.loads(other.text), separators=(",", ":")),
                    },
                }
                for one, other in zip(began, written, strict=True)
            ]
        self.messages.append(message)
        self.messages += [
            {"role": "tool", "tool_call_id": one.id, "content": f"result of {one.id}"}
            for one in began
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


def speeches(made: Made, form: str) -> list[str]:
    """Return the text and that of the template, without what a model may write otherwise."""
    return ["".join(text.split()) for text in (made.prompt.text, made.rendered)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sends_thinking", [False, True])
def test_answers_come_back_as_their_tokens(
    maker: PromptMaker, seed: int, sends_thinking: bool
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
        after = client.ask(*([] if is_call else [{"role": "user", "content": "go on"}]))
        assert maker.tokenizer.decode(after.prompt.tokens.tolist()) == after.prompt.text
        before = as_tokens([*made.prompt.tokens.tolist(), *written]).tolist()
        assert after.prompt.tokens[: len(before)].tolist() == before, (
            after.prompt.text,
            after.rendered,
        )
        assert after.kept == turn + 1
        made = after

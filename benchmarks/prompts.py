"""Measure the processor time that the server takes for a request of a coding agent.

python benchmarks/prompts.py [--quick] [--result 900]

A conversation grows by a call of a tool and its result, up to 130 messages of 85 kB, with 20 tools.
Each request goes through the application, which reads it and writes an answer of one word; its
prompt is made; and its tokens are counted as cached, missed, displaced or new. The model does
nothing here. "at first": by a server that has not seen the conversation. "edited": the first
message is another one. "again": both versions were evaluated before, and take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from mlxrunner.cache.account import TokenAccounting
from mlxrunner.results import Usage
from mlxrunner.server import openai
from mlxrunner.server.events import AnswerEnd, AnswerEvent, ServerRequest, TextDelta
from mlxrunner.server.manager import prompt_record
from mlxrunner.server.models import ModelCard
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.server.server import AccessRules, make_app
from mlxrunner.tokenizer import Tokenizer, load_tokenizer
from mlxrunner.tokenizer.prompt import Caller

MESSAGES = 130
TEMPLATE = """\
{% if tools %}<|im_start|>system
{{ messages[0].content }}{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% set ns = namespace(last=0) %}{% for message in messages %}\
{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{% for message in messages[1:] %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if loop.index0 > ns.last and message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template in the manner of Qwen's."""
EMPTY = """
prompt_tokens completion_tokens cached_tokens evaluated_tokens tokenize_s lookup_s prefill_s ttft_s
decode_s cache_bytes peak_bytes used_bytes matched_tokens trimmed_tokens trim_limited_by
checkpoint evicted_by shifted_tokens reevaluated_tokens lost_tokens prefetched_tokens
""".split()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a short conversation: does it work")
    parser.add_argument("--result", type=int, default=900, help="characters of a tool's result")
    given = parser.parse_args()
    bodies = list(conversation(10 if given.quick else MESSAGES, given.result))
    with TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder))
    known, counts = PromptBuilder(tokenizer, TEMPLATE), TokenAccounting()
    rows = [(len(body["messages"]), *times(body, known, counts)) for body in bodies]
    print("messages  kB  tokens  read and written  prompt made  counted  together")
    print("(milliseconds, median of ten requests)")
    for begin in range(0, len(rows), 10):
        part = rows[begin : begin + 10]
        show(part[-1][0], bodies[begin + len(part) - 1], part)
    edited = edit(bodies[-1], "Mend it.")
    for name, several in {
        "at first": [(0, *times(bodies[-1], PromptBuilder(tokenizer, TEMPLATE), counts))],
        "edited": [(0, *times(edit(edited, f"Do {n}."), known, counts)) for n in range(10)],
        "again": [(0, *times(edit(edited, f"Do {n % 2}."), known, counts)) for n in range(10)],
    }.items():
        show(name, bodies[-1], several)


def edit(body: dict[str, Any], content: str) -> dict[str, Any]:
    """Return a body with another question at its beginning."""
    system, _, *rest = body["messages"]
    return {**body, "messages": [system, {"role": "user", "content": content}, *rest]}


def write_tokenizer(folder: Path) -> Tokenizer:
    """Train a tokenizer with a template for calls of tools, and load it."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers

    fast = Fast(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator([Path(__file__).read_text()], trainer)
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return load_tokenizer(folder)


Row = tuple[int, int, float, float, float]
"""Messages, tokens, and seconds for reading and writing, for the prompt and for its account."""


def show(name: object, body: Any, rows: list[Row]) -> None:
    read, made, counted = (median(row[place] for row in rows) * 1e3 for place in (2, 3, 4))
    print(
        f"{name:>8}  {len(json.dumps(body)) / 1000:3.0f}  {rows[-1][1]:6}  {read:16.2f}  "
        f"{made:11.2f}  {counted:7.2f}  {read + made + counted:8.2f}"
    )


def conversation(messages: int, result_size: int) -> Iterator[dict[str, Any]]:
    """Yield the bodies of an agent's requests."""
    order = random.Random(1)
    tools = [tool(number) for number in range(20)]
    said: list[Any] = [
        {"role": "system", "content": "You are an agent. " * 200},
        {"role": "user", "content": "Fix it."},
    ]
    while len(said) < messages:
        identity = f"call_{len(said)}"
        arguments = json.dumps({"path": f"src/file{len(said)}.py", "lines": 200})
        function = {"name": "tool1", "arguments": arguments}
        call = {"id": identity, "type": "function", "function": function}
        result = "".join(order.choice("abc def\n") for _ in range(result_size))
        said += [
            {"role": "assistant", "content": "I look at it.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": identity, "content": result},
        ]
        yield {"model": "model", "messages": list(said), "tools": tools}


def tool(number: int) -> dict[str, Any]:
    described = {"type": "string", "description": "What it is about, in a few words."}
    properties = {f"field{index}": described for index in range(6)}
    parameters = {"type": "object", "properties": properties, "required": ["field0"]}
    function = {"name": f"tool{number}", "description": "It does much. " * 20}
    return {"type": "function", "function": {**function, "parameters": parameters}}


class OneWord:
    """Answers each request with one word."""

    asked: ServerRequest

    def card(self, model: str) -> ModelCard:
        """Return the card of a model that is loaded, and sees nothing."""
        return ModelCard(model, True, 2**20)

    async def answer(self, asked: ServerRequest) -> AsyncIterator[AnswerEvent]:
        self.asked = asked
        usage = Usage.from_dict({**dict.fromkeys(EMPTY, 0), "outcome": "hit", "reason": None})
        yield TextDelta("Done")
        yield AnswerEnd("stop", usage)


def times(
    body: dict[str, Any], maker: PromptBuilder, counts: TokenAccounting
) -> tuple[int, float, float, float]:
    """Return tokens, and seconds of processor time: to read and write, make and count them."""
    answers, content = OneWord(), json.dumps(body).encode()
    read = asyncio.run(asking(answers, content))
    began = time.process_time()
    made = maker.make(answers.asked)
    record = prompt_record(answers.asked, made)
    ready, tokens = time.process_time(), made.prompt.tokens
    caller = Caller("", "", record=record)
    account = counts.begin(tokens, replace(made.prompt, caller=caller))
    counts.reach(account, len(tokens))
    counts.end(account, account.known, account.known, len(tokens), tokens[:100])
    ended = time.process_time()
    return len(tokens), read, ready - began, ended - ready


async def asking(answers: Any, content: bytes) -> float:
    """Return the seconds of processor time from the first byte of a body to the last one sent."""
    app: Any = make_app([openai.router(answers)], AccessRules(frozenset()))
    await send(app, b"{}")  # warms it up
    began = time.process_time()
    status = await send(app, content)
    assert status == 200
    return time.process_time() - began


async def send(app: Any, content: bytes) -> int:
    """Send a body to an application, and return the status of its answer."""
    sent: list[Any] = []
    body = iter([{"type": "http.request", "body": content}])

    async def receive() -> Any:
        return next(body, None) or await asyncio.Event().wait()

    async def take(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    await app(scope, receive, take)
    return int(sent[0]["status"])


if __name__ == "__main__":
    main()

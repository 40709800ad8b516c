"""Templates and answers that notice every difference."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.models import write_tokenizer

from mlxrunner.engine.constrain import Constraint
from mlxrunner.results import Chunk
from mlxrunner.server.events import AnswerEvent, ServerRequest, ToolCallEvent
from mlxrunner.server.prompts.builder import PromptBuilder
from mlxrunner.tokenizer import Tokenizer, load_tokenizer

_QWEN = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
</tools>

For each call write <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set last = namespace(query=0) %}
{%- for message in messages %}{% if message.role == 'user' and not \
(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}\
{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}REFUSE\
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- set thought = message.reasoning_content or '' %}
{%- set content = message.content %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant
{% if loop.index0 > last.query and (loop.last or thought) %}<think>
{{ thought.strip('\\n') }}
</think>

{% endif %}{{ content }}
{%- for call in message.tool_calls %}
{%- if not loop.first or content %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

QWEN3 = _QWEN.replace("REFUSE", "")
QWEN35 = _QWEN.replace(
    "REFUSE",
    "{% if message.role == 'system' %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}",
)

LLAMA3 = """\
<|begin_of_text|>{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}\
{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}\
<|start_header_id|>system<|end_header_id|>

Today Date: 26 Jul 2024

{{ system }}<|eot_id|>
{%- if tools %}{% if messages and messages[0].role == 'user' %}\
{% set first = messages[0].content | trim %}{% set messages = messages[1:] %}{% else %}\
{{ raise_exception('Cannot put tools in the first user message when there is none!') }}{% endif %}\
<|start_header_id|>user<|end_header_id|>

Respond in the format {"name": function name, "parameters": dictionary of arguments}.

{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{{ first }}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{% if message.tool_calls | length != 1 %}\
{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}\
<|start_header_id|>assistant<|end_header_id|>

{% set call = message.tool_calls[0].function %}\
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
<s>{% if messages[0].role == 'system' %}{% set system = messages[0].content %}\
{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{%- set turn = namespace(index=0) %}
{%- for message in messages %}
{%- if (message.role == 'user' or (message.role == 'assistant' and not message.tool_calls)) %}
{%- if (message.role == 'user') != (turn.index % 2 == 0) %}{{ raise_exception('After the optional \
system message, conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set turn.index = turn.index + 1 %}{% endif %}{% endfor %}
{%- if system %}[SYSTEM_PROMPT]{{ system }}[/SYSTEM_PROMPT]{% endif %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('Tool call \
IDs should be alphanumeric strings with length 9!') }}{% endif %}\
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}\
, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>
{%- elif message.role == 'assistant' %}{{ message.content }}</s>
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{"content": {{ message.content | tojson }}\
, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user and assistant roles are supported, with the exception of \
an initial optional system message!') }}{% endif %}
{%- endfor %}"""

GEMMA3 = """\
<bos>{% if messages[0].role == 'system' %}{% set prefix = messages[0].content + '\\n\\n' %}\
{% set messages = messages[1:] %}{% else %}{% set prefix = '' %}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ prefix if loop.first else '' }}{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

GPT_OSS = """\
<|start|>system<|message|>You are a model. Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if messages[0].role in ('developer', 'system') %}{% set developer = messages[0].content %}\
{% set messages = messages[1:] %}{% else %}{% set developer = '' %}{% endif %}
{%- if developer or tools %}<|start|>developer<|message|>{% if developer %}# Instructions

{{ developer }}{% endif %}{% if tools %}

# Tools

namespace functions {
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}}{% endif %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if '<|channel|>' in message.content %}{{ raise_exception('You have passed a message containing \
<|channel|> tags in the content field.') }}{% endif %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and \
thinking in an assistant message with tool calls!') }}{% endif %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}\
<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant<|channel|>commentary \
to=functions.{{ call.name }} <|constrain|>json<|message|>{{ call.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}
{%- elif message.role == 'tool' %}<|start|>functions.tool to=assistant<|channel|>commentary\
<|message|>{{ message.content | tojson }}<|end|>
{%- elif message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

GLM = """\
[gMASK]<sop>{% if tools %}<|system|>
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
For each call write <tool_call>{name}
<arg_key>{key}</arg_key>
<arg_value>{value}</arg_value>
</tool_call>{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|user|>
{{ message.content }}
{%- elif message.role == 'assistant' %}<|assistant|>
{%- if message.reasoning_content %}
<think>{{ message.reasoning_content.strip() }}</think>{% endif %}
{%- if message.content %}
{{ message.content.strip() }}{% endif %}
{%- for call in message.tool_calls %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- elif message.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}\
<|observation|>{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- elif message.role == 'system' %}<|system|>
{{ message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

DEEPSEEK = """\
<s>{% set ns = namespace(system='', first=true) %}
{%- for message in messages %}{% if message.role == 'system' %}\
{% set ns.system = ns.system + ('' if ns.first else '\\n\\n') + message.content %}\
{% set ns.first = false %}{% endif %}{% endfor %}{{ ns.system }}
{%- if tools %}

## Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<｜User｜>{{ message.content }}
{%- elif message.role == 'assistant' %}<｜Assistant｜>{{ message.content }}
{%- if message.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in message.tool_calls %}<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>\
{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>\
{% endif %}\
<｜end▁of▁sentence｜>
{%- elif message.role == 'tool' %}<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{% endif %}"""

PHI4 = """\
{% for message in messages %}
{%- if message.role == 'system' %}<|im_start|>system<|im_sep|>{{ message.content }}<|im_end|>
{%- elif message.role == 'user' %}<|im_start|>user<|im_sep|>{{ message.content }}<|im_end|>
{%- elif message.role == 'assistant' %}<|im_start|>assistant<|im_sep|>{{ message.content }}\
<|im_end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"""

CHATML = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "qwen3.5": (QWEN35, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "gemma3": (GEMMA3, "<end_of_turn>"),
    "gpt-oss": (GPT_OSS, "<|call|>"),
    "glm": (GLM, "<|user|>"),
    "deepseek": (DEEPSEEK, "<｜end▁of▁sentence｜>"),
    "phi4": (PHI4, "<|im_end|>"),
}
"""The template of each family, and the token that ends a call."""
MARKS: Sequence[str] = (
    "<|im_start|> <|im_end|> <|im_sep|> <tool_call> </tool_call> <think> </think> <|eot_id|> "
    "<|start_header_id|> <|end_header_id|> <|begin_of_text|> <start_of_turn> <end_of_turn> "
    "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|return|> [INST] [/INST] "
    "[TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] <|user|> <|assistant|> <|observation|> <|system|> "
    "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>"
).split()


NESTED = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "at": {"type": "integer", "minimum": 10, "maximum": 99},
        "how": {"$ref": "#/$defs/how"},
    },
    "required": ["at", "how"],
    "additionalProperties": False,
    "$defs": {"how": {"enum": ["fast", "slow"]}},
}
"""A form with parts that are defined elsewhere, and with limits."""


def load_strict(
    folder: Path, family: str, words: Sequence[str] = (), *, opening: str = "", begin: str = ""
) -> Tokenizer:
    """Write the tokenizer of a family: a token per byte, mark and word. Load it.

    `opening`: more of the template, behind its end. `begin`: more, in front of it.
    """
    from tokenizers import Tokenizer as Fast

    template, end = TEMPLATES[family]
    folder.mkdir(parents=True)
    write_tokenizer(folder, chat_template=begin + template + opening, eos_token=end)
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(list(MARKS))
    fast.add_tokens(list(words))
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return load_tokenizer(folder)


LONG = [">\n", '>{"', '": "', '"l', "ook", "}}", "]{", " ok", '{"name": "lo', "a[TOOL_CALLS] [{"]
"""Tokens of several letters, of which some end a tag and go on."""
FIRST = 256
"""The first of them: those before are bytes."""
SHORT = '"}]>0123456789slowfat'
"""Letters that end a value soon."""


def tool(name: str, parameters: dict[str, Any] = NESTED, **more: Any) -> dict[str, Any]:
    """Return a description of a tool."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("look", strict=True), tool("move")]


def asked(**more: Any) -> ServerRequest:
    """Return a request with a strict tool and another one."""
    messages = [{"role": "user", "content": "hi"}]
    given = {"protocol": "chat", "model": "", "id": "r", "messages": messages, "tools": TOOLS}
    return ServerRequest(**{**given, **more})


def tokenizer_of(folder: Path, family: str) -> Tokenizer:
    """Load a tokenizer that has the long tokens as well."""
    load_strict(folder, family)
    path = folder / "tokenizer.json"
    written = json.loads(path.read_text())
    spelled = [text.replace(" ", "\u0120").replace("\n", "\u010a") for text in LONG]
    written["model"]["vocab"] |= {text: FIRST + n for n, text in enumerate(spelled)}
    for token in written["added_tokens"]:
        token["id"] += len(LONG)
    path.write_text(json.dumps(written))
    return load_tokenizer(folder)


def constraint_of(maker: PromptBuilder, request: ServerRequest) -> Constraint | None:
    """Return the constraint of an answer to a request."""
    start = maker.make(request).prompt.constraint
    return None if start is None else start(maker.tokenizer.stop_tokens)


def held_of(maker: PromptBuilder, request: ServerRequest) -> Constraint:
    """Return the constraint of an answer to a request that has one."""
    held = constraint_of(maker, request)
    assert held is not None
    return held


def answered(maker: PromptBuilder, held: Constraint, wish: str, order: random.Random) -> str:
    """Return the answer of a model that wants to say `wish`.

    Where it may not, it gives that up, says anything that may come, and ends as soon as it may.
    """
    tokenizer, said = maker.tokenizer, list[int]()
    short = {token for letter in SHORT for token in tokenizer.encode_more(letter)}
    wishes = tokenizer.encode_more(wish)[::-1]
    while not held.is_done and len(said) < 400:
        allowed = held.mask(tokenizer.vocab_size)
        if wishes and allowed[wishes[-1]]:
            said.append(wishes.pop())
        else:
            may, wishes = allowed.nonzero()[0].tolist(), []
            for few in (tokenizer.stop_tokens, short, may):
                if set(few) & set(may):
                    said.append(order.choice(sorted(set(few) & set(may))))
                    break
        held.advance(said[-1])
    assert held.is_done
    assert held.count == len(said)
    return tokenizer.decode([token for token in said if token not in tokenizer.stop_tokens])


def events_of(maker: PromptBuilder, request: ServerRequest, answer: str) -> list[AnswerEvent]:
    """Return the events of an answer."""
    splitter = maker.splitter(maker.make(request), request)
    return [*splitter.add(Chunk(answer, 1)), *splitter.finish()]


def calls_of(events: Sequence[AnswerEvent]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the arguments of each call."""
    for event in events:
        if isinstance(event, ToolCallEvent):
            yield event.name, json.loads(event.arguments)

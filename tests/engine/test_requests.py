"""Requests: template variables and tools become tokens, and reuse does not change an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from support.chat_templates import PUBLISHED
from support.engine import Engine
from support.families import KINDS

from mlxrunner import OptionError, PromptError, Runner
from mlxrunner.chat.conversation import Conversation
from mlxrunner.models.facts import ModelFacts
from mlxrunner.options import GenerateOptions
from mlxrunner.templates.chat_template import ChatTemplate
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.templates.rendering import jinja_renderer
from mlxrunner.testing import VOCAB, ByteTokenizer, OracleModel
from mlxrunner.tokenizer.prompt import system_tokens, tokenize_prompt
from tests.support.models import tiny_config, tiny_model

TEMPLATE = """\
{%- if tools %}system: tools {{ tools | tojson }}{{ end }}{% endif -%}
{%- for message in messages -%}
{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] -%}
<call>{{ call.function.name }} {{ call.function.arguments.city }}</call>
{%- endfor -%}
{%- if message.tool_call_id %} ({{ message.tool_call_id }}, {{ message.name }}){% endif -%}
{{- end }}
{%- endfor -%}
{%- if add_generation_prompt -%}
assistant: {% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif -%}
{%- endif -%}"""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}
USER: dict[str, Any] = {"role": "user", "content": "How is the weather?"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    ],
}


class TemplateTokenizer(ByteTokenizer):
    """The byte tokenizer with a chat template of jinja."""

    def __init__(self, template: str = TEMPLATE) -> None:
        self._template = ChatTemplate(jinja_renderer(template, {"end": "\x1e"}))

    def render(
        self,
        messages: Sequence[PlainMessage],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        return self._template.text(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )


def calls(**arguments: Any) -> dict[str, Any]:
    given = {"function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "Let me look.", "tool_calls": [given]}


def oracle() -> Runner:
    model = OracleModel(("full", "sliding"))
    facts = ModelFacts("oracle", 4096, True, {"full": 1, "sliding": 1}, VOCAB)
    return Runner(model, TemplateTokenizer(), facts, context=4096, prefill_step=16)


def text_of(prompt: Any, **options: Any) -> str:
    variables = GenerateOptions.of(**options).variables
    return tokenize_prompt(TemplateTokenizer(), prompt, variables).text


def test_tools_variables_calls_and_results_reach_the_template() -> None:
    """Arguments as an object, whether they come as one or as text."""
    result = {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "weather"}
    as_text = json.loads(json.dumps(calls(city="Bonn")))
    as_text["tool_calls"][0]["function"]["arguments"] = '{"city": "Bonn"}'
    for call in (calls(city="Bonn"), as_text):
        text = text_of([USER, call, result], template={"enable_thinking": False}, tools=[TOOL])
        assert text.startswith('system: tools [{"type": "function", "function": {"name": "weather"')
        assert "assistant: Let me look.<call>weather Bonn</call>\x1e" in text
        assert "tool: sunny (1, weather)\x1e" in text
        assert text.endswith("assistant: <think></think>")


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "How is "}, {"type": "text", "text": "the weather?"}]
    assert text_of([{"role": "user", "content": parts}]) == text_of([USER])


TURNS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([USER], {"tools": [TOOL]}),
    ([USER, calls(city="Bonn")], {"tools": [TOOL]}),
    ([USER, calls(city="Bonn"), {"role": "tool", "content": "sunny"}], {"tools": [TOOL]}),
    ([USER], {"tools": [TOOL], "template": {"enable_thinking": False}}),
    ([USER], {"tools": [TOOL], "template": {"enable_thinking": True}}),
    ([USER], {"tools": [TOOL, {**TOOL, "strict": True}]}),
    ([USER], {}),
    ([USER], {"tools": [TOOL]}),
]
"""Conversations with tools, and with tools and variables that change between turns."""


def test_a_warm_runner_answers_as_a_cold_one_does() -> None:
    """Tools and variables are tokens: what is shared with the entry is reused, and nothing else."""
    warm, cached = oracle(), []
    for messages, options in TURNS:
        answer = warm.generate(messages, max_tokens=6, **options)
        tokens = [chunk.token for chunk in answer]
        cold = oracle().generate(messages, max_tokens=6, **options)
        assert tokens == [chunk.token for chunk in cold]
        assert warm.usage is not None
        cached.append(warm.usage.cached_tokens)
    shared = len(TemplateTokenizer().encode(text_of([USER], tools=[TOOL]))) - len("assistant: ")
    assert cached[0] == 0
    assert all(count >= shared for count in cached[1:4])


def test_requests_beside_each_other_answer_as_alone() -> None:
    config = tiny_config("llama", vocab_size=VOCAB)
    model = tiny_model(config)
    facts = ModelFacts("llama", 4096, True, {"full": 2}, VOCAB)
    given = (model, TemplateTokenizer(), facts)
    alone = []
    for messages, options in TURNS:
        chunks = Runner(*given).generate(messages, max_tokens=4, stop_tokens=[], **options)
        alone.append([chunk.token for chunk in chunks])
    with Engine(*given, max_sequences=3, context=1024) as runner:
        requests = [(turn, {"max_tokens": 4, "stop_tokens": [], **own}) for turn, own in TURNS]
        assert [result.tokens for result in runner.run_each(requests)] == alone


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"template": ["x"]}, "template: it has to be a JSON object of variables"),
        ({"template": 5}, "template: it has to be a JSON object of variables"),
        ({"template": "nope"}, "template: not valid JSON"),
        ({"template": {"x": {1, 2}}}, "template: it can't be written as JSON"),
        ({"template": {"x": float("nan")}}, "template: it can't be written as JSON"),
        ({"template": {"messages": []}}, "template: 'messages' is not free for a variable"),
        ({"template": {"tools": []}}, "template: 'tools' is not free"),
        ({"template": {"add_generation_prompt": False}}, "'add_generation_prompt' is not free"),
        ({"template": {"a b": 1}}, "template: 'a b' is not a name"),
        ({"tools": {"name": "f"}}, "tools: it has to be a list of JSON objects"),
        ({"tools": ["f"]}, "tools: number 0 has to be a JSON object, not 'f'"),
        ({"tools": [{}]}, "tools: number 0 has to be a JSON object"),
        ({"tools": [{"f": print}]}, "tools: it can't be written as JSON"),
        ({"tools": '[{"f": NaN}]'}, "tools: not valid JSON"),
        ({"template": '{"x": 1e999}'}, "template: not valid JSON"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError) as error:
        oracle().generate([USER], **options)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "options", "template", "problem"),
    [
        ("text", {"tools": [TOOL]}, TEMPLATE, "only messages go through the chat template"),
        ([1, 2], {"template": {"x": 1}}, TEMPLATE, "only messages go through the chat template"),
        ([USER], {"tools": [TOOL]}, "{{ messages }}", "tools: the model's chat template does not"),
        (
            [USER],
            {"tools": [TOOL]},
            "{% if tools %}{{ raise_exception('No tools!') }}{% endif %}",
            "refuses this conversation: No tools!",
        ),
        (
            [USER, {**CALL, "content": "x"}],
            {},
            "{{ messages[1].content }}",
            "tool_calls: the model's chat template does not use them",
        ),
    ],
)
def test_what_the_template_does_not_use_is_refused(
    prompt: Any, options: dict[str, Any], template: str, problem: str
) -> None:
    with pytest.raises((OptionError, PromptError)) as error:
        tokenize_prompt(
            TemplateTokenizer(template), prompt, GenerateOptions.of(**options).variables
        )
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": None}, "content has to be a text or a list of text parts"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "of type 'image_url' is not"),
        ({"role": "user", "content": ["a"]}, 'only text ({"type": "text", "text": text})'),
        ({"role": "user", "content": [{"type": "text"}]}, "of type 'text' is not supported"),
        ({**CALL, "role": "user"}, "only an assistant has tool_calls, not 'user'"),
        ({**CALL, "tool_calls": {"a": 1}}, "tool_calls has to be a list"),
        ({**CALL, "tool_calls": [5]}, "a tool call has to be {"),
        (
            {**CALL, "tool_calls": [{"type": "custom", "function": {"name": "f"}}]},
            "a tool call of type 'custom' is not supported",
        ),
        (
            {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "the arguments of 'f' have to be a JSON object, such as "
            '{"city": "Oslo"}, not \'[1]\'',
        ),
        ({"role": "tool", "content": "a", "tool_call_id": 1}, "tool_call_id has to be a text"),
    ],
)
def test_a_message_that_is_none_is_refused(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(PromptError) as error:
        text_of([USER, message])
    assert str(error.value).startswith("message 1")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_conversation_of_texts_is_tokenized_without_a_look_for_eyes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch would take one for each line."""

    def look(tokenizer: object) -> bool:
        raise AssertionError(f"{tokenizer} was looked at")

    monkeypatch.setattr("mlxrunner.tokenizer.prompt.sees", look)
    assert "weather" in text_of([USER])
    with pytest.raises(AssertionError, match="was looked at"):
        text_of([{"role": "user", "content": []}])


SYSTEM = "You are a careful pirate, and you rhyme."
TEMPLATES_WITH_SYSTEM = {**PUBLISHED, **{name: kind.template for name, kind in KINDS.items()}}


@pytest.mark.parametrize("family", TEMPLATES_WITH_SYSTEM)
def test_a_full_context_keeps_the_system_prompt_wherever_it_is_written(family: str) -> None:
    """Its template may refuse it alone, or write it into the message of the user."""
    model = OracleModel(("full",))
    facts = ModelFacts("oracle", 4096, True, {"full": 1}, VOCAB)
    tokenizer = TemplateTokenizer(TEMPLATES_WITH_SYSTEM[family])
    messages = [{"role": "system", "content": SYSTEM}, USER]
    prompt = tokenize_prompt(tokenizer, messages)
    runner = Runner(model, tokenizer, facts, context=len(prompt.tokens) + 20)
    asked = runner.complete(messages, max_tokens=200, overflow="shift", stop_tokens=[])
    assert asked.usage.cache.shifted_tokens > 0
    assert SYSTEM in tokenizer.decode(runner.entry.tokens.array.tolist())


@pytest.mark.parametrize("family", ["qwen3.5", "gemma2", "gemma3", "mistral-v1", "mistral-v3"])
def test_a_chat_keeps_the_system_prompt_in_a_full_context(family: str) -> None:
    model = OracleModel(("full",))
    facts = ModelFacts("oracle", 4096, True, {"full": 1}, VOCAB)
    tokenizer = TemplateTokenizer(PUBLISHED[family])
    runner = Runner(model, tokenizer, facts, context=300)
    talk = Conversation(runner, system=SYSTEM, options={"max_tokens": 60, "stop_tokens": []})
    for number in range(6):
        list(talk.send(f"What is the number after {number}?"))
        assert SYSTEM in tokenizer.decode(runner.entry.tokens.array.tolist())
    assert talk.history.dropped > 0 or talk.history.first > 0


def test_a_system_prompt_that_is_written_too_late_is_not_kept() -> None:
    """A context that keeps all before it has no room for anything else."""
    tokenizer = TemplateTokenizer(PUBLISHED["mistral-v3"])
    turns = [{**USER, "content": "hi " * 20}, {"role": "assistant", "content": "ok"}]
    messages = [{"role": "system", "content": SYSTEM}, *turns, USER]
    prompt = tokenize_prompt(tokenizer, messages)
    count = len(prompt.tokens)
    assert SYSTEM in tokenizer.decode(prompt.tokens[: system_tokens(tokenizer, prompt, 3 * count)])
    assert system_tokens(tokenizer, prompt, count + 10) == 1

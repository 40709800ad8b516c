"""Fields of requests, as JSON has them, and row by row of the table of all APIs."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import anthropic.types.beta.message_create_params as beta_params
import anthropic.types.message_create_params as message_params
import mlx_lm
import ollama._types as ollama_types
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.responses.response_create_params as response_params
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from support.sample import examples
from support.scripted import Scripted, app_of

from mlxrunner.batch.inputs import read_fields
from mlxrunner.batch.openai_format import READ
from mlxrunner.batch.options import BatchOptions
from mlxrunner.config.names import SAME
from mlxrunner.config.option import about, names
from mlxrunner.config.request_fields import IGNORED, REFUSED, is_neutral
from mlxrunner.errors import MlxrunnerError
from mlxrunner.options import GenerateOptions

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"default": None}}}
FUNCTION = {"name": "read", "description": "Read", "parameters": SCHEMA, "strict": True}
SAMPLED: dict[str, Any] = {
    "max_tokens": 9, "temperature": 1, "top_p": 0.5, "top_k": 5, "seed": 3, "min_p": 0.1,
    "stop": ["END"], "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.5,
    "repeat_last_n": 30, "stop_token_ids": [7], "chat_template_kwargs": {"a": None, "b": 1.0},
}  # fmt: skip  # a field a line would be thirty lines
CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"a": null}'}}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief"}], "name": "x"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c", "name": "read"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "read"}},
    "parallel_tool_calls": False,
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "stream": False,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "low",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "user": "me",
    **SAMPLED,
}
COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": [1, 2, 3],
    "n": 2,
    "best_of": 2,
    "logprobs": 2,
    "echo": False,
    "user": "me",
    "stream": False,
    "suffix": "",
    **SAMPLED,
}
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}", "id": "f"},
        {"type": "function_call_output", "call_id": "c", "output": "1", "status": "completed"},
    ],
    "instructions": "Be brief",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto",
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "store": False,
    "stream": False,
    **SAMPLED,
}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "1", "is_error": False}
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "x"},
                {"type": "tool_use", "id": "c", "name": "read", "input": {"a": None}},
            ],
        },
        {"role": "user", "content": [RESULT]},
    ],
    "tools": [{"name": "read", "description": "Read", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "read", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "metadata": {"user_id": "me"},
    "stop_sequences": ["END"],
    "max_tokens": 9,
    "temperature": 1,
    "top_k": 5,
    "top_p": 0.5,
    "stream": False,
}
OPTIONS = {
    "num_predict": 9, "temperature": 1, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3,
    "repeat_penalty": 1.5, "repeat_last_n": 30, "stop": ["END"], "num_ctx": 2048,
}  # fmt: skip  # a field a line would be ten lines
CALLED = {"id": "c", "function": {"name": "read", "arguments": {"a": None}}}
OF_OLLAMA: dict[str, Any] = {
    "model": "tiny",
    "think": True,
    "format": SCHEMA,
    "options": OPTIONS,
    "keep_alive": 5,
    "stream": False,
    "logprobs": True,
    "top_logprobs": 2,
}
OLLAMA_CHAT: dict[str, Any] = {
    **OF_OLLAMA,
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [CALLED]},
        {"role": "tool", "content": "1", "tool_name": "read", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}
RAW_FIELDS = {"prompt": "Hi", "system": "Be brief", "raw": False, "suffix": ""}
OLLAMA_GENERATE: dict[str, Any] = OF_OLLAMA | RAW_FIELDS
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": MESSAGE,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
}
"""A body of each route that has nearly all of its fields."""
VALUES = frozenset(("parameters", "input_schema", "schema", "arguments", "input", "format"))
"""Fields with a value of the client's own. `input` and `format` may be objects of the protocol."""
ANSWERS = Scripted()
CLIENT = TestClient(app_of(ANSWERS), raise_server_exceptions=False)
DOCUMENT: dict[str, Any] = CLIENT.get("/openapi.json").json()
WHOLE = {
    *(one.name for one in GenerateOptions.__dataclass_fields__.values() if about(one).kind is int),
    *"max_completion_tokens max_output_tokens num_predict repeat_last_n n best_of".split(),
    *"top_logprobs stop_token_ids prompt logprobs".split(),
}
"""The names of fields whose numbers are integers."""


def outcome(path: str, body: Any) -> tuple[int, Any]:
    """Return the status of an answer, and what was asked for or the message of an error."""
    ANSWERS.begin()
    response = CLIENT.post(path, json=body)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        return response.status_code, error if isinstance(error, str) else error["message"]
    return 200, [replace(asked, id="") for asked in ANSWERS.asked]


def objects(value: Any, name: str = "") -> Iterator[dict[str, Any]]:
    """Yield the objects of a body that have fields of a protocol."""
    if isinstance(value, list):
        for part in value:
            yield from objects(part, name)
    elif isinstance(value, dict):
        is_own = (name in VALUES and "type" not in value) or name == "chat_template_kwargs"
        if is_own or value is SCHEMA or value == SCHEMA:
            return
        yield value
        for key, part in value.items():
            yield from objects(part, key)


def properties(path: str) -> list[str]:
    """Return the names of all fields that the document has for a route, nested ones, too."""
    found = set[str]()

    def walk(schema: Any) -> None:
        if isinstance(schema, list):
            for part in schema:
                walk(part)
        elif isinstance(schema, dict):
            if "$ref" in schema:
                schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            found.update(schema.get("properties", ()))
            for part in schema.values():
                walk(part)

    walk(DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
    return sorted(found | set(BODIES[path]))


@pytest.mark.parametrize("path", BODIES)
def test_the_body_with_nearly_all_fields_is_answered(path: str) -> None:
    """The properties below change bodies that are right."""
    status, asked = outcome(path, BODIES[path])
    assert status == 200, asked


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.exhaustive(0)
def test_a_null_is_not_given(path: str) -> None:
    """At random places of a body, null has the same outcome as no field."""
    names = properties(path)

    @given(data=st.data())
    @examples(40)
    def run(data: st.DataObject) -> None:
        nulls = copy.deepcopy(BODIES[path])
        for _ in range(data.draw(st.integers(1, 4))):
            places = list(objects(nulls))
            place = places[data.draw(st.integers(0, len(places) - 1))]
            name = data.draw(st.sampled_from(sorted(place) + names))
            place[name] = None
        status, said = outcome(path, nulls)
        expected = outcome(path, drop_nulls(nulls))
        shown = status != 200 and said.partition("{")[0] == expected[1].partition("{")[0]
        assert (status, said) == expected or (status == expected[0] and shown)

    run()


def drop_nulls(value: Any) -> Any:
    """Return a body without the nulls in the objects of its protocol."""
    copied = copy.deepcopy(value)
    for one in objects(copied):
        for name in [name for name, part in one.items() if part is None]:
            del one[name]
    return copied


@pytest.mark.parametrize("path", BODIES)
def test_each_field_may_be_null(path: str) -> None:
    """Only those without which there is no request are refused, and the message says so."""
    for name in properties(path):
        body = BODIES[path] | {name: None}
        status, said = outcome(path, body)
        assert (status, said) == outcome(path, {key: body[key] for key in body if key != name})
        assert status == 200 or any(one in said for one in NEEDED), said


NEEDED = ("has to be", "not among", "needs", "no tools", "only the same number as n")
"""Words of the errors about a field that is missing."""


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_float_is_an_integer(path: str) -> None:
    """Each integer of a body, as a float: the same request. A boolean or a fraction is refused."""
    body = BODIES[path]
    for place, name in ((one, name) for one in objects(body) for name in sorted(WHOLE & set(one))):
        old = place[name]
        if isinstance(old, bool | str):
            continue
        expected = outcome(path, body)
        several = isinstance(old, list)
        try:
            place[name] = [float(one) for one in old] if several else float(old)
            assert outcome(path, body) == expected, name
            for wrong in (True, old[0] + 0.5 if several else old + 0.5, 10**400):
                place[name] = [wrong] if several else wrong
                if path == "/v1/messages/count_tokens":
                    continue  # which reads only what the prompt is made of
                status, said = outcome(path, body)
                assert status == 400, (name, wrong, said)
                assert "has to be" in said or "is not" in said, said
        finally:
            place[name] = old


def lines() -> list[tuple[str, dict[str, Any]]]:
    tools = {"tools": CHAT["tools"], "tool_choice": "auto"}
    chat = {name: value for name, value in CHAT.items() if name != "parallel_tool_calls"}
    messages = [{key: m[key] for key in m if key != "name" or m["role"] == "tool"}
                for m in CHAT["messages"]]  # fmt: skip
    completion = {name: value for name, value in COMPLETION.items() if name != "best_of"}
    return [
        ("/v1/chat/completions", {**chat, **tools, "messages": messages, "n": 1}),
        ("/v1/completions", {**completion, "n": 1}),
        ("/v1/responses", RESPONSE),
    ]


def line(url: str, body: Any) -> Any:
    """Return what a line of a batch asks for, or its error."""
    try:
        return read_fields({"custom_id": "a", "url": url, "body": body}, BatchOptions())
    except MlxrunnerError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("url", "body"), lines())
def test_lines_of_batches_are_read_alike(url: str, body: dict[str, Any]) -> None:
    """Nulls and whole floats in each object of a body in OpenAI's form."""
    expected = line(url, body)
    assert not isinstance(expected, str), expected
    names = properties(url)
    for number, place in enumerate(objects(body)):
        for name in names:
            if name not in place:
                changed = copy.deepcopy(body)
                list(objects(changed))[number][name] = None
                assert line(url, changed) == expected, (place, name)
    for name in sorted(WHOLE & set(body)):
        if type(body[name]) is int:
            assert line(url, body | {name: float(body[name])}) == expected, name
            said = line(url, body | {name: True})
            assert name == "logprobs" or "is not" in str(said), name


HI = [{"role": "user", "content": "Hi"}]
SMALL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": HI},
    "/v1/completions": {"model": "tiny", "prompt": "Hi"},
    "/v1/responses": {"model": "tiny", "input": "Hi"},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 9},
    "/api/chat": {"model": "tiny", "messages": HI, "stream": False},
    "/api/generate": {"model": "tiny", "prompt": "Hi", "stream": False},
}
KNOWN = {*names(GenerateOptions), *SAME}
OLLAMA = {"/api/chat", "/api/generate"}
RAW = {"tools", "tool_choice", "parallel_tool_calls", "documents"}
MORE = {
    "/v1/chat/completions": {"think", "enable_thinking", "thinking", "reasoning", *READ},
    "/v1/completions": {"add_special_tokens", *READ} - RAW,
    "/v1/responses": {"text", "reasoning", "include", "instructions", *READ},
    "/v1/messages": READ,
}
"""The fields that a path reads beside those that its document names."""


def reads(path: str) -> set[str]:
    """Return the fields that a path reads itself."""
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    model = DOCUMENT["components"]["schemas"][schema["schema"]["$ref"].rpartition("/")[2]]
    own = KNOWN if path not in OLLAMA else set()
    return {*model["properties"], *MORE.get(path, ()), *own}


@cache
def plain_outcome(path: str) -> Any:
    """Return the outcome of the smallest request."""
    return outcome(path, SMALL[path])


@pytest.mark.parametrize("path", SMALL)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.exhaustive(60)
def test_a_field_that_cannot_be_held_is_refused(path: str, name: str) -> None:
    """Its neutral values ask for nothing. Any other one is an error that names it."""
    if name in reads(path):
        return
    body = SMALL[path]
    chance = random.Random(f"{path} {name}")  # each value comes with each name on some path
    expected = plain_outcome(path)
    for value in chance.sample([None, "", [], {}, *REFUSED[name].neutral], 2):
        assert outcome(path, body | {name: value}) == expected, value
    for value in chance.sample([True, "odd", 0.25, 7, ["odd"], {"odd": 1}], 3):
        if not is_neutral(value, REFUSED[name].neutral):
            status, said = outcome(path, body | {name: value})
            assert status == 400, value
            assert said.startswith(f"{name}: ")
            assert not ANSWERS.asked


@pytest.mark.parametrize("path", SMALL)
def test_a_field_that_changes_no_answer_is_ignored(path: str) -> None:
    """Any value of it is the same request, and it is not reported as unknown."""
    body = SMALL[path]
    expected = CLIENT.post(path, json=body).json()["mlxrunner"]
    for value in (True, "odd", 7, {"odd": 1}):
        given = body | dict.fromkeys(IGNORED.keys() - reads(path), value)
        response = CLIENT.post(path, json=given)
        assert response.status_code == 200, response.text
        assert response.json()["mlxrunner"] == expected
        assert outcome(path, given) == outcome(path, body)


@pytest.mark.parametrize("path", SMALL)
def test_a_field_that_nobody_knows_is_ignored_and_named(path: str) -> None:
    """The answer says so, since it may be a misspelt one."""
    more = {"temprature": 0.5, "options": {"num_crx": 1}} if path in OLLAMA else {"temprature": 1}
    left_out = CLIENT.post(path, json=SMALL[path] | more).json()["mlxrunner"]["left_out"]
    assert left_out == ["field temprature", "field options.num_crx"][: len(more)]


HONOURED: dict[str, Any] = {
    "max_tokens": 9, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3,
    "stop": ["END"], "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5,
    "repeat_penalty": 1.5, "repeat_last_n": 30, "repetition_context_size": 30, "n_predict": 9,
    "stop_token_ids": [7], "guided_json": {"type": "object"}, "json_schema": {"type": "object"},
    "guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}, "ignore_eos": True,
    "response_format": {"type": "json_object"}, "max_completion_tokens": 9,
}  # fmt: skip  # a field a line would be thirty lines
"""Fields of OpenAI's paths that ask for something, with a value that does."""
BY_PATH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **HONOURED,
        "think": False,
        "enable_thinking": False,
        "thinking": {"type": "disabled"},
        "reasoning": {"effort": "low"},
        "reasoning_effort": "low",
        "n": 2,
        "logprobs": True,
        "chat_template_kwargs": {"a": 1},
        "documents": [{"text": "a"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    "/v1/completions": {**HONOURED, "logprobs": 1, "n": 2},
    "/v1/responses": {**HONOURED, "instructions": "Be brief", "reasoning": {"effort": "low"}},
    "/v1/messages": {"min_p": 0.1, "seed": 3, "top_k": 5, "thinking": {"type": "disabled"}},
    "/api/chat": {"format": "json", "think": True, "keep_alive": 5, "logprobs": True},
    "/api/generate": {"format": "json", "think": True, "raw": True, "system": "Be brief"},
}


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, given in BY_PATH.items() for name in given]
)
@pytest.mark.exhaustive(30)
def test_a_field_is_honoured(path: str, name: str) -> None:
    """The request is another one than without it."""
    status, asked = outcome(path, SMALL[path] | {name: BY_PATH[path][name]})
    assert status == 200, asked
    assert asked != outcome(path, SMALL[path])[1]


@pytest.mark.parametrize("name", sorted({*REFUSED, *IGNORED}))
@pytest.mark.exhaustive(40)
def test_members_of_ollamas_options(name: str) -> None:
    """They are checked against the same table."""
    body = SMALL["/api/chat"]
    status, said = outcome("/api/chat", body | {"options": {name: 0.25}})
    assert (status == 200) == (name in IGNORED)
    assert status == 200 or said.startswith(f"options.{name}: ")
    for value in (None, *(REFUSED[name].neutral if name in REFUSED else ())):
        assert outcome("/api/chat", body | {"options": {name: value}}) == outcome("/api/chat", body)


@pytest.mark.parametrize(
    "url", [path for path in SMALL if path.startswith("/v1/") and path != "/v1/messages"]
)
@pytest.mark.parametrize("name", sorted({*REFUSED, *IGNORED} - READ))
@pytest.mark.exhaustive(60)
def test_lines_of_batches_follow_the_table(url: str, name: str) -> None:
    """A body in OpenAI's form is held to it as a request is."""
    body = SMALL[url]
    if name in body or (url == "/v1/responses" and name in reads(url) and name not in IGNORED):
        return
    expected = line(url, body)
    said = line(url, body | {name: 0.25})
    if name in IGNORED and name not in reads(url):
        assert said == expected
    elif name in REFUSED:
        assert f"{name}: 0.25 is not supported" in str(said), said
        for value in REFUSED[name].neutral:
            assert line(url, body | {name: value}) == expected


def annotated(*kinds: Any) -> set[str]:
    return {
        name
        for kind in kinds
        for base in kind.__mro__
        for name in vars(base).get("__annotations__", ())
    }


VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message documents echo guided_choice guided_decoding_backend
guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning
include_stop_str_in_output kv_transfer_params ec_transfer_params length_penalty logits_processors
logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_logprobs
repetition_detection repetition_penalty request_id return_mm_kwargs return_prompt_text
return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start
session_id skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval
structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side
use_beam_search vllm_xargs watermarking
""".split()
LLAMA_CPP = """
adaptive_decay adaptive_target backend_sampling cache_prompt dry_allowed_length dry_base
dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range grammar
grammar_lazy grammar_triggers id_slot ignore_eos json_schema lora min_keep min_p mirostat
mirostat_eta mirostat_tau n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs
parse_tool_calls post_sampling_probs preserved_tokens reasoning_format reasoning_in_content
repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers
speculative.n_max speculative.n_min speculative.p_min t_max_predict_ms thinking_forced_open
timings_per_token top_k top_n_sigma typical_p xtc_probability xtc_threshold
""".split()
LM_STUDIO = "context_length draft_model integrations repeat_penalty system_prompt top_k ttl".split()


def mlx_lm_fields() -> set[str]:
    """Return the fields that mlx-lm's server reads."""
    text = Path(next(iter(mlx_lm.__path__)), "server.py").read_text()
    return set(re.findall(r'body(?:\.get)?[\(\[]\s*"(\w+)"', text))


APIS: dict[str, tuple[str, set[str]]] = {
    "chat": ("/v1/chat/completions", annotated(chat_params.CompletionCreateParamsBase)),
    "completions": ("/v1/completions", annotated(completion_params.CompletionCreateParamsBase)),
    "responses": ("/v1/responses", annotated(response_params.ResponseCreateParamsBase)),
    "messages": (
        "/v1/messages",
        annotated(message_params.MessageCreateParamsBase, beta_params.MessageCreateParamsBase),
    ),
    "ollama chat": ("/api/chat", set(ollama_types.ChatRequest.model_fields)),
    "ollama generate": ("/api/generate", set(ollama_types.GenerateRequest.model_fields)),
    "ollama options": ("/v1/chat/completions", set(ollama_types.Options.model_fields)),
    "mlx-lm": ("/v1/chat/completions", mlx_lm_fields()),
    "vllm": ("/v1/chat/completions", set(VLLM)),
    "llama.cpp": ("/v1/chat/completions", set(LLAMA_CPP)),
    "lm studio": ("/v1/chat/completions", set(LM_STUDIO)),
}
"""The fields of each API, most from its own package, and the path that takes them."""


@pytest.mark.parametrize("api", APIS)
@pytest.mark.exhaustive(11)
def test_each_field_of_each_api_is_in_the_table(api: str) -> None:
    """None is ignored because nobody has thought of it."""
    path, fields = APIS[api]
    assert len(fields) > 6
    assert not fields - reads(path) - REFUSED.keys() - IGNORED.keys()

"""The table of fields of all APIs, row by row: honoured, refused unless neutral, or ignored."""

from __future__ import annotations

import re
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
from serve.test_fields import ANSWERS, CLIENT, DOCUMENT, line, outcome

from mlxrunner.batch.openai_format import READ
from mlxrunner.config.names import SAME
from mlxrunner.config.option import names
from mlxrunner.config.request_fields import IGNORED, REFUSED, is_neutral
from mlxrunner.options import GenerateOptions

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": HI},
    "/v1/completions": {"model": "tiny", "prompt": "Hi"},
    "/v1/responses": {"model": "tiny", "input": "Hi"},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 9},
    "/api/chat": {"model": "tiny", "messages": HI, "stream": False},
    "/api/generate": {"model": "tiny", "prompt": "Hi", "stream": False},
}
OPTIONS = {*names(GenerateOptions), *SAME}
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
    own = OPTIONS if path not in OLLAMA else set()
    return {*model["properties"], *MORE.get(path, ()), *own}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.exhaustive(60)
def test_a_field_that_cannot_be_held_is_refused(path: str, name: str) -> None:
    """Its neutral values ask for nothing. Any other one is an error that names it."""
    if name in reads(path):
        return
    body = BODIES[path]
    expected = outcome(path, body)
    for value in (None, "", [], {}, *REFUSED[name].neutral):
        assert outcome(path, body | {name: value}) == expected, value
    for value in (True, "odd", 0.25, 7, ["odd"], {"odd": 1}):
        if not is_neutral(value, REFUSED[name].neutral):
            status, said = outcome(path, body | {name: value})
            assert status == 400, value
            assert said.startswith(f"{name}: ")
            assert not ANSWERS.asked


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_changes_no_answer_is_ignored(path: str) -> None:
    """Any value of it is the same request, and it is not reported as unknown."""
    body = BODIES[path]
    expected = CLIENT.post(path, json=body).json()["mlxrunner"]
    for value in (True, "odd", 7, {"odd": 1}):
        given = body | dict.fromkeys(IGNORED.keys() - reads(path), value)
        response = CLIENT.post(path, json=given)
        assert response.status_code == 200, response.text
        assert response.json()["mlxrunner"] == expected
        assert outcome(path, given) == outcome(path, body)


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_nobody_knows_is_ignored_and_named(path: str) -> None:
    """The answer says so, since it may be a misspelt one."""
    more = {"temprature": 0.5, "options": {"num_crx": 1}} if path in OLLAMA else {"temprature": 1}
    left_out = CLIENT.post(path, json=BODIES[path] | more).json()["mlxrunner"]["left_out"]
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
    status, asked = outcome(path, BODIES[path] | {name: BY_PATH[path][name]})
    assert status == 200, asked
    assert asked != outcome(path, BODIES[path])[1]


@pytest.mark.parametrize("name", sorted({*REFUSED, *IGNORED}))
@pytest.mark.exhaustive(40)
def test_members_of_ollamas_options(name: str) -> None:
    """They are checked against the same table."""
    body = BODIES["/api/chat"]
    status, said = outcome("/api/chat", body | {"options": {name: 0.25}})
    assert (status == 200) == (name in IGNORED)
    assert status == 200 or said.startswith(f"options.{name}: ")
    for value in (None, *(REFUSED[name].neutral if name in REFUSED else ())):
        assert outcome("/api/chat", body | {"options": {name: value}}) == outcome("/api/chat", body)


@pytest.mark.parametrize(
    "url", [path for path in BODIES if path.startswith("/v1/") and path != "/v1/messages"]
)
@pytest.mark.parametrize("name", sorted({*REFUSED, *IGNORED} - READ))
@pytest.mark.exhaustive(60)
def test_lines_of_batches_follow_the_table(url: str, name: str) -> None:
    """A body in OpenAI's form is held to it as a request is."""
    body = BODIES[url]
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

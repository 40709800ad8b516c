"""The fields of requests that other programs' APIs have, and what becomes of each here.

The server and the lines of a batch are checked against this table, and the page on fields is made
from it. A field that would change the answer is honoured, or refused unless its value asks for
nothing. It knows names and values only; `serve/` and `batch/` read the fields.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from mlxrunner.config.option import shown
from mlxrunner.errors import OptionError


@dataclass(frozen=True)
class RequestField:
    """A field of requests that is not honoured everywhere."""

    apis: str
    """The programs whose API has it."""
    why: str = ""
    """The field to send in its place, or the reason why it may be ignored."""
    neutral: tuple[Any, ...] = ()
    """The values, beside empty ones, that ask for nothing."""


def held(fields: Mapping[str, Any], reads: Container[str] = (), prefix: str = "") -> dict[str, Any]:
    """Return the fields that are left to be read: those of `reads`, and those not in the tables.

    Raise OptionError for one that would change the answer. `prefix` comes before names in errors.
    """
    left = {}
    for name, value in fields.items():
        if name in reads or not is_known(name):
            left[name] = value
        elif (rule := REFUSED.get(name)) is not None and not is_neutral(value, rule.neutral):
            accepted = f", only {' or '.join(map(json.dumps, rule.neutral))}" * bool(rule.neutral)
            raise OptionError(
                f"{prefix}{name}: {shown(value)} is not supported{accepted}: {rule.why}"
            )
    return left


def is_known(name: str) -> bool:
    """Return True if a field is in one of the tables of this module."""
    return name in REFUSED or name in IGNORED


def is_neutral(value: Any, neutral: tuple[Any, ...] = ()) -> bool:
    """Return True if a value asks for nothing: 1 is not True, and 1.0 is 1.

    Null and empty texts, lists and objects ask for nothing, and so does false where true is not
    what there is anyway.
    """
    if value is None or value in ("", [], {}) or (value is False and True not in neutral):
        return True
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


_MAX = "end the answer with max_tokens or stop"
_FORM = "give a JSON schema in response_format, or texts in structured_outputs.choice"
_PARTS = "send messages, and pictures in their content"
_MERGED = "start the server with a model into which they are merged"
_SAMPLING = "choose tokens with temperature, top_p, top_k and min_p"
_THINK = "each protocol has its own: reasoning_effort, reasoning, thinking, think"
_TOOLS = "send tools and tool_choice"
_TEMPLATE = "the model's own chat template is used; chat_template_kwargs sets its variables"
_OPENAI_OPTIONS = "OpenAI's paths take its members as fields of the body, such as temperature"

REFUSED: dict[str, RequestField] = {
    # OpenAI
    "audio": RequestField("OpenAI", "answers are text"),
    "background": RequestField("OpenAI", "the answer comes with the same request"),
    "best_of": RequestField("OpenAI, vLLM", "it may only be n", (1,)),
    "conversation": RequestField("OpenAI", "send the whole conversation, or previous_response_id"),
    "echo": RequestField("OpenAI, vLLM", "only /v1/completions has it"),
    "function_call": RequestField("OpenAI", _TOOLS, ("none", "auto")),
    "functions": RequestField("OpenAI", _TOOLS),
    "image": RequestField("OpenAI", _PARTS),
    "input": RequestField("OpenAI", "only /v1/responses has it: send messages or a prompt"),
    "instructions": RequestField("OpenAI", "send a message of the role system"),
    "logit_bias": RequestField("OpenAI, vLLM, llama.cpp, mlx-lm", _SAMPLING),
    "messages": RequestField("OpenAI, Anthropic, Ollama", "this path takes a prompt or an input"),
    "modalities": RequestField("OpenAI", "answers are text", (["text"],)),
    "n": RequestField("OpenAI, vLLM", "send a request for each answer", (1,)),
    "previous_response_id": RequestField("OpenAI", "only /v1/responses has it"),
    "prompt": RequestField("OpenAI, Ollama", "send messages or an input"),
    "suffix": RequestField("OpenAI, Ollama", "write it into a prompt in the model's own form"),
    "response_format": RequestField("OpenAI", "send format", ({"type": "text"},)),
    "reasoning_effort": RequestField("OpenAI", _THINK),
    "structured_outputs": RequestField("vLLM", "send format"),
    "tool_choice": RequestField("OpenAI", "this path has no choice of tools", ("auto",)),
    "tools": RequestField("OpenAI", "this path has no tools: send messages"),
    "documents": RequestField("vLLM", "write them into a message"),
    "text": RequestField("OpenAI", "only /v1/responses has it: send response_format"),
    "web_search_options": RequestField("OpenAI", "nothing is searched here"),
    # Anthropic
    "container": RequestField("Anthropic", "no code is run here"),
    "mcp_servers": RequestField("Anthropic", "call the servers yourself, and send their tools"),
    "output_config": RequestField("Anthropic", "only /v1/messages has it: send response_format"),
    "output_format": RequestField("Anthropic", "only /v1/messages has it: send response_format"),
    # vLLM, SGLang
    "add_special_tokens": RequestField("vLLM", "the chat template writes them"),
    "allowed_token_ids": RequestField("vLLM", _FORM),
    "bad_words": RequestField("vLLM", _SAMPLING),
    "chat_template": RequestField("vLLM, llama.cpp", _TEMPLATE),
    "custom_logit_processor": RequestField("SGLang", _SAMPLING),
    "ebnf": RequestField("SGLang", _FORM),
    "enable_response_messages": RequestField("vLLM", "the answer is the output of a response"),
    "guided_grammar": RequestField("vLLM", _FORM),
    "guided_json_object": RequestField("vLLM", 'send response_format {"type": "json_object"}'),
    "guided_regex": RequestField("vLLM", _FORM),
    "guided_whitespace_pattern": RequestField("vLLM", "JSON is written as json.dumps does"),
    "include_reasoning": RequestField("vLLM", "leave out reasoning_content yourself", (True,)),
    "include_stop_str_in_output": RequestField("vLLM", "append the stop text yourself"),
    "length_penalty": RequestField("vLLM", "there is no beam search", (1,)),
    "logits_processors": RequestField("vLLM", _SAMPLING),
    "logprob_token_ids": RequestField("vLLM", "ask for top_logprobs"),
    "lora_path": RequestField("SGLang", _MERGED),
    "lora_request": RequestField("vLLM", _MERGED),
    "media_io_kwargs": RequestField("vLLM", "pictures are read as the model's files say"),
    "min_tokens": RequestField("vLLM, SGLang", "ask for the length in the prompt", (0,)),
    "mm_processor_kwargs": RequestField("vLLM", "pictures are read as the model's files say"),
    "no_stop_trim": RequestField("SGLang", "append the stop text yourself"),
    "prompt_token_ids": RequestField("vLLM", "/v1/completions takes tokens as its prompt"),
    "previous_input_messages": RequestField("vLLM", "send them in input"),
    "prompt_embeds": RequestField("vLLM", "send a text or tokens"),
    "prompt_logprobs": RequestField("vLLM", "only the answer has log-probabilities"),
    "regex": RequestField("SGLang", _FORM),
    "repetition_detection": RequestField("vLLM", _MAX),
    "return_hidden_states": RequestField("SGLang", "answers are text"),
    "return_prompt_text": RequestField("vLLM", "`generate -v` shows a prompt"),
    "return_token_ids": RequestField("vLLM", "logprobs names the tokens of an answer"),
    "return_tokens_as_token_ids": RequestField("vLLM", "logprobs has tokens as text and bytes"),
    "separate_reasoning": RequestField("SGLang", "thinking is apart from the answer", (True,)),
    "skip_special_tokens": RequestField("vLLM", "answers never show them", (True,)),
    "spaces_between_special_tokens": RequestField("vLLM", "answers never show them", (True,)),
    "stop_regex": RequestField("SGLang", "stop takes texts"),
    "structural_tag": RequestField("vLLM, SGLang", _FORM),
    "truncate_prompt_tokens": RequestField("vLLM", "shorten the conversation yourself", (-1,)),
    "use_beam_search": RequestField("vLLM", "send several requests with seeds"),
    "vllm_xargs": RequestField("vLLM", "there are no extensions of vLLM here"),
    "watermarking": RequestField("vLLM", _SAMPLING),
    # llama.cpp
    "adaptive_target": RequestField("llama.cpp", _SAMPLING, (-1,)),
    "chat_format": RequestField("llama.cpp", "the form of calls follows from the model"),
    "dry_multiplier": RequestField("llama.cpp", "use repetition_penalty", (0,)),
    "dynatemp_range": RequestField("llama.cpp", _SAMPLING, (0,)),
    "grammar": RequestField("llama.cpp", _FORM),
    "grammar_lazy": RequestField("llama.cpp", _FORM),
    "grammar_triggers": RequestField("llama.cpp", _FORM),
    "image_data": RequestField("llama.cpp", _PARTS),
    "input_extra": RequestField("llama.cpp", "write it into a prompt in the model's own form"),
    "input_prefix": RequestField("llama.cpp", "write it into a prompt in the model's own form"),
    "input_suffix": RequestField("llama.cpp", "write it into a prompt in the model's own form"),
    "lora": RequestField("llama.cpp", _MERGED),
    "min_keep": RequestField("llama.cpp", _SAMPLING, (0, 1)),
    "mirostat": RequestField("llama.cpp, Ollama", _SAMPLING, (0,)),
    "n_cmpl": RequestField("llama.cpp", "use n", (1,)),
    "n_indent": RequestField("llama.cpp", _MAX, (0,)),
    "n_probs": RequestField("llama.cpp", "ask for logprobs and top_logprobs", (0,)),
    "parse_tool_calls": RequestField("llama.cpp", "calls are always parsed", (True,)),
    "post_sampling_probs": RequestField("llama.cpp", "ask for logprobs"),
    "preserved_tokens": RequestField("llama.cpp", "answers never show special tokens"),
    "reasoning_format": RequestField(
        "llama.cpp", "thinking is reasoning_content", ("auto", "deepseek")
    ),
    "reasoning_in_content": RequestField("llama.cpp", "thinking is reasoning_content"),
    "response_fields": RequestField("llama.cpp", "choose fields of the answer yourself"),
    "return_tokens": RequestField("llama.cpp", "logprobs names the tokens of an answer"),
    "samplers": RequestField("llama.cpp", "their order is fixed: penalties, top_k, top_p, min_p"),
    "t_max_predict_ms": RequestField("llama.cpp", _MAX, (0, -1)),
    "thinking_forced_open": RequestField("llama.cpp", _TEMPLATE),
    "top_n_sigma": RequestField("llama.cpp", _SAMPLING, (-1, 0)),
    "typical_p": RequestField("llama.cpp, Ollama", _SAMPLING, (1,)),
    "xtc_probability": RequestField("llama.cpp, mlx-lm", _SAMPLING, (0,)),
    # mlx-lm, LM Studio
    "adapters": RequestField("mlx-lm", _MERGED),
    "frequency_context_size": RequestField("mlx-lm", "use penalty_context", (20,)),
    "integrations": RequestField("LM Studio", "call the servers yourself, and send their tools"),
    "presence_context_size": RequestField("mlx-lm", "use penalty_context", (20,)),
    "role_mapping": RequestField("mlx-lm", _TEMPLATE),
    "system_prompt": RequestField("LM Studio", "send a message of the role system"),
    # Ollama
    "context": RequestField(
        "Ollama", "this server gives and takes no tokens: send messages to /api/chat"
    ),
    "format": RequestField("Ollama", "only /api/ has it: send response_format"),
    "images": RequestField("Ollama", _PARTS),
    "options": RequestField("Ollama", _OPENAI_OPTIONS),
    "raw": RequestField("Ollama", "/api/generate and /v1/completions take raw text"),
    "system": RequestField("Ollama, Anthropic", "send a message of the role system"),
    "template": RequestField("Ollama", _TEMPLATE),
    "think": RequestField("Ollama", _THINK),
    "tfs_z": RequestField("Ollama", _SAMPLING, (1,)),
    # others
    "enable_thinking": RequestField("Qwen", _THINK),
    "thinking": RequestField("Anthropic, DeepSeek", _THINK),
    "reasoning": RequestField("OpenAI, OpenRouter", _THINK),
    "do_sample": RequestField("transformers", "temperature: 0 takes the likeliest token", (True,)),
    "encoder_repetition_penalty": RequestField("text-generation-webui", _SAMPLING, (1,)),
    "epsilon_cutoff": RequestField("transformers", _SAMPLING, (0,)),
    "eta_cutoff": RequestField("transformers", _SAMPLING, (0,)),
    "extra_body": RequestField("OpenAI's client", "its members are fields of the body itself"),
    "guidance_scale": RequestField("transformers", _SAMPLING, (1,)),
    "negative_prompt": RequestField("transformers", _SAMPLING),
    "no_repeat_ngram_size": RequestField("transformers", "use repetition_penalty", (0,)),
    "penalty_alpha": RequestField("transformers", _SAMPLING, (0,)),
    "safe_prompt": RequestField("Mistral", "send a message of the role system"),
    "smoothing_factor": RequestField("text-generation-webui", _SAMPLING, (0,)),
    "top_a": RequestField("text-generation-webui", _SAMPLING, (0,)),
}
"""Fields that would change the answer, or what comes with it.

A path that honours one reads it before this table is asked.
"""

_BILLING = "nobody is billed or ranked here"
_CACHE = "prompts are always cached, and reuse changes no answer"
_LOADING = "the server decides how a model is loaded"
_SHAPE = "it configures a refused field"
_SPEED = "it changes how fast an answer comes, not which"
_WISH = "a hint, not a limit"
_TRACE = "for the logs of another server"

IGNORED: dict[str, RequestField] = {
    # OpenAI
    "access_programs": RequestField("OpenAI", _BILLING),
    "client_metadata": RequestField("Codex", _TRACE),
    "background_options": RequestField("OpenAI", "the answer comes with the same request"),
    "context_management": RequestField("OpenAI, Anthropic", "the client shortens conversations"),
    "include": RequestField("OpenAI", "only /v1/responses has more to include"),
    "max_tool_calls": RequestField("OpenAI", "it counts calls that the server makes: none"),
    "metadata": RequestField("OpenAI, Anthropic", _TRACE),
    "moderation": RequestField("OpenAI", "nothing is moderated here"),
    "parallel_tool_calls": RequestField("OpenAI", "a path without tools has no calls"),
    "prediction": RequestField("OpenAI", _SPEED),
    "prompt_cache_key": RequestField("OpenAI", _CACHE),
    "prompt_cache_options": RequestField("OpenAI", _CACHE),
    "prompt_cache_retention": RequestField("OpenAI", _CACHE),
    "safety_identifier": RequestField("OpenAI", _TRACE),
    "service_tier": RequestField("OpenAI, Anthropic", _BILLING),
    "store": RequestField("OpenAI", "only responses are kept"),
    "stream_options": RequestField("OpenAI", "it says what else a stream has"),
    "truncation": RequestField("OpenAI", "the client shortens conversations"),
    "user": RequestField("OpenAI", _TRACE),
    "verbosity": RequestField("OpenAI", _WISH),
    # Anthropic
    "anthropic_beta": RequestField("Anthropic", "supported features need no switch"),
    "betas": RequestField("Anthropic", "supported features need no switch"),
    "billing_policy": RequestField("Anthropic", _BILLING),
    "cache_control": RequestField("Anthropic", _CACHE),
    "compaction": RequestField("Anthropic", "the client shortens conversations"),
    "diagnostics": RequestField("Anthropic", _TRACE),
    "fallback_credit_token": RequestField("Anthropic", _BILLING),
    "fallbacks": RequestField("Anthropic", "the named model answers, or an error says why not"),
    "inference_geo": RequestField("Anthropic", "nothing leaves this machine"),
    "speed": RequestField("Anthropic", _SPEED),
    "thread": RequestField("Anthropic", "threads are not kept; continuing one is refused"),
    "user_profile_id": RequestField("Anthropic", _TRACE),
    "workspace_id": RequestField("Anthropic", _TRACE),
    # vLLM, SGLang
    "cache_salt": RequestField("vLLM", _CACHE),
    "early_stopping": RequestField("vLLM", _SHAPE),
    "ec_transfer_params": RequestField("vLLM", _SPEED),
    "guided_decoding_backend": RequestField("vLLM", "llguidance holds the form"),
    "kv_transfer_params": RequestField("vLLM", _SPEED),
    "priority": RequestField("vLLM", _SPEED),
    "request_id": RequestField("vLLM", _TRACE),
    "return_mm_kwargs": RequestField("vLLM", "only vLLM's render paths heed it"),
    "return_token_offsets": RequestField("vLLM", "only vLLM's render paths heed it"),
    "rid": RequestField("SGLang", _TRACE),
    "routed_experts_prompt_start": RequestField("vLLM", _SHAPE),
    "session_id": RequestField("vLLM", _TRACE),
    "stream_interval": RequestField("vLLM", _SPEED),
    "stream_reasoning": RequestField("SGLang", _SPEED),
    "thinking_token_budget": RequestField("vLLM", _WISH),
    "truncation_side": RequestField("vLLM", _SHAPE),
    # llama.cpp
    "adaptive_decay": RequestField("llama.cpp", _SHAPE),
    "backend_sampling": RequestField("llama.cpp", _SPEED),
    "cache_prompt": RequestField("llama.cpp", _CACHE),
    "dry_allowed_length": RequestField("llama.cpp", _SHAPE),
    "dry_base": RequestField("llama.cpp", _SHAPE),
    "dry_penalty_last_n": RequestField("llama.cpp", _SHAPE),
    "dry_sequence_breakers": RequestField("llama.cpp", _SHAPE),
    "dynatemp_exponent": RequestField("llama.cpp", _SHAPE),
    "id_slot": RequestField("llama.cpp", _CACHE),
    "mirostat_eta": RequestField("llama.cpp, Ollama", _SHAPE),
    "mirostat_tau": RequestField("llama.cpp, Ollama", _SHAPE),
    "n_cache_reuse": RequestField("llama.cpp", _CACHE),
    "n_discard": RequestField("llama.cpp", "an answer ends where the context is full"),
    "n_keep": RequestField("llama.cpp", "an answer ends where the context is full"),
    "reasoning_budget": RequestField("llama.cpp", _WISH),
    "return_progress": RequestField("llama.cpp", "it says what else a stream has"),
    "speculative.n_max": RequestField("llama.cpp", _SPEED),
    "speculative.n_min": RequestField("llama.cpp", _SPEED),
    "speculative.p_min": RequestField("llama.cpp", _SPEED),
    "speculative.type": RequestField("llama.cpp", _SPEED),
    "thinking_budget_tokens": RequestField("llama.cpp", _WISH),
    "timings_per_token": RequestField("llama.cpp", "it says what else a stream has"),
    "verbose": RequestField("llama.cpp", _TRACE),
    "xtc_threshold": RequestField("llama.cpp, mlx-lm", _SHAPE),
    # mlx-lm, LM Studio
    "context_length": RequestField("LM Studio", _LOADING),
    "draft_model": RequestField("mlx-lm, LM Studio", _SPEED),
    "num_draft_tokens": RequestField("mlx-lm", _SPEED),
    "ttl": RequestField("LM Studio", _LOADING),
    # Ollama
    "embedding_only": RequestField("Ollama", _LOADING),
    "f16_kv": RequestField("Ollama", _LOADING),
    "height": RequestField("Ollama", "it is for models that make pictures"),
    "keep_alive": RequestField("Ollama", "only Ollama's paths heed it"),
    "logits_all": RequestField("Ollama", _LOADING),
    "low_vram": RequestField("Ollama", _LOADING),
    "main_gpu": RequestField("Ollama", _LOADING),
    "num_batch": RequestField("Ollama", _SPEED),
    "num_ctx": RequestField("Ollama", "--context is the server's"),
    "num_gpu": RequestField("Ollama", _LOADING),
    "num_keep": RequestField("Ollama", "an answer ends where the context is full"),
    "num_thread": RequestField("Ollama", _SPEED),
    "numa": RequestField("Ollama", _LOADING),
    "penalize_newline": RequestField("Ollama", "Ollama itself ignores it"),
    "shift": RequestField("Ollama", "an answer ends where the context is full"),
    "steps": RequestField("Ollama", "it is for models that make pictures"),
    "truncate": RequestField("Ollama", "the client shortens conversations"),
    "use_mlock": RequestField("Ollama", _LOADING),
    "use_mmap": RequestField("Ollama", _LOADING),
    "vocab_only": RequestField("Ollama", _LOADING),
    "width": RequestField("Ollama", "it is for models that make pictures"),
    # others
    "thinking_budget": RequestField("Qwen", _WISH),
}
"""Fields that change no answer, with the reason."""

"""The fields of requests that other programs' APIs have, and what becomes of each here.

The server and the lines of a batch are checked against this table, and the page on fields is made
from it. A field that would change the answer is honoured, or refused unless its value asks for
nothing. It knows names and values only; `server/` and `batch/` read the fields.
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
    "audio": RequestField("answers are text"),
    "background": RequestField("the answer comes with the same request"),
    "best_of": RequestField("it may only be n", (1,)),
    "conversation": RequestField("send the whole conversation, or previous_response_id"),
    "echo": RequestField("only /v1/completions has it"),
    "function_call": RequestField(_TOOLS, ("none", "auto")),
    "functions": RequestField(_TOOLS),
    "image": RequestField(_PARTS),
    "input": RequestField("only /v1/responses has it: send messages or a prompt"),
    "instructions": RequestField("send a message of the role system"),
    "logit_bias": RequestField(_SAMPLING),
    "messages": RequestField("this path takes a prompt or an input"),
    "modalities": RequestField("answers are text", (["text"],)),
    "n": RequestField("send a request for each answer", (1,)),
    "previous_response_id": RequestField("only /v1/responses has it"),
    "prompt": RequestField("send messages or an input"),
    "suffix": RequestField("write it into a prompt in the model's own form"),
    "response_format": RequestField("send format", ({"type": "text"},)),
    "reasoning_effort": RequestField(_THINK),
    "structured_outputs": RequestField("send format"),
    "tool_choice": RequestField("this path has no choice of tools", ("auto",)),
    "tools": RequestField("this path has no tools: send messages"),
    "documents": RequestField("write them into a message"),
    "text": RequestField("only /v1/responses has it: send response_format"),
    "web_search_options": RequestField("nothing is searched here"),
    # Anthropic
    "container": RequestField("no code is run here"),
    "mcp_servers": RequestField("call the servers yourself, and send their tools"),
    "output_config": RequestField("only /v1/messages has it: send response_format"),
    "output_format": RequestField("only /v1/messages has it: send response_format"),
    # vLLM, SGLang
    "add_special_tokens": RequestField("the chat template writes them"),
    "allowed_token_ids": RequestField(_FORM),
    "bad_words": RequestField(_SAMPLING),
    "chat_template": RequestField(_TEMPLATE),
    "custom_logit_processor": RequestField(_SAMPLING),
    "ebnf": RequestField(_FORM),
    "enable_response_messages": RequestField("the answer is the output of a response"),
    "guided_grammar": RequestField(_FORM),
    "guided_json_object": RequestField('send response_format {"type": "json_object"}'),
    "guided_regex": RequestField(_FORM),
    "guided_whitespace_pattern": RequestField("JSON is written as json.dumps does"),
    "include_reasoning": RequestField("leave out reasoning_content yourself", (True,)),
    "include_stop_str_in_output": RequestField("append the stop text yourself"),
    "length_penalty": RequestField("there is no beam search", (1,)),
    "logits_processors": RequestField(_SAMPLING),
    "logprob_token_ids": RequestField("ask for top_logprobs"),
    "lora_path": RequestField(_MERGED),
    "lora_request": RequestField(_MERGED),
    "media_io_kwargs": RequestField("pictures are read as the model's files say"),
    "min_tokens": RequestField("ask for the length in the prompt", (0,)),
    "mm_processor_kwargs": RequestField("pictures are read as the model's files say"),
    "no_stop_trim": RequestField("append the stop text yourself"),
    "prompt_token_ids": RequestField("/v1/completions takes tokens as its prompt"),
    "previous_input_messages": RequestField("send them in input"),
    "prompt_embeds": RequestField("send a text or tokens"),
    "prompt_logprobs": RequestField("only the answer has log-probabilities"),
    "regex": RequestField(_FORM),
    "repetition_detection": RequestField(_MAX),
    "return_hidden_states": RequestField("answers are text"),
    "return_prompt_text": RequestField("`generate -v` shows a prompt"),
    "return_token_ids": RequestField("logprobs names the tokens of an answer"),
    "return_tokens_as_token_ids": RequestField("logprobs has tokens as text and bytes"),
    "separate_reasoning": RequestField("thinking is apart from the answer", (True,)),
    "skip_special_tokens": RequestField("answers never show them", (True,)),
    "spaces_between_special_tokens": RequestField("answers never show them", (True,)),
    "stop_regex": RequestField("stop takes texts"),
    "structural_tag": RequestField(_FORM),
    "truncate_prompt_tokens": RequestField("shorten the conversation yourself", (-1,)),
    "use_beam_search": RequestField("send several requests with seeds"),
    "vllm_xargs": RequestField("there are no extensions of vLLM here"),
    "watermarking": RequestField(_SAMPLING),
    # llama.cpp
    "adaptive_target": RequestField(_SAMPLING, (-1,)),
    "chat_format": RequestField("the form of calls follows from the model"),
    "dry_multiplier": RequestField("use repetition_penalty", (0,)),
    "dynatemp_range": RequestField(_SAMPLING, (0,)),
    "grammar": RequestField(_FORM),
    "grammar_lazy": RequestField(_FORM),
    "grammar_triggers": RequestField(_FORM),
    "image_data": RequestField(_PARTS),
    "input_extra": RequestField("write it into a prompt in the model's own form"),
    "input_prefix": RequestField("write it into a prompt in the model's own form"),
    "input_suffix": RequestField("write it into a prompt in the model's own form"),
    "lora": RequestField(_MERGED),
    "min_keep": RequestField(_SAMPLING, (0, 1)),
    "mirostat": RequestField(_SAMPLING, (0,)),
    "n_cmpl": RequestField("use n", (1,)),
    "n_indent": RequestField(_MAX, (0,)),
    "n_probs": RequestField("ask for logprobs and top_logprobs", (0,)),
    "parse_tool_calls": RequestField("calls are always parsed", (True,)),
    "post_sampling_probs": RequestField("ask for logprobs"),
    "preserved_tokens": RequestField("answers never show special tokens"),
    "reasoning_format": RequestField("thinking is reasoning_content", ("auto", "deepseek")),
    "reasoning_in_content": RequestField("thinking is reasoning_content"),
    "response_fields": RequestField("choose fields of the answer yourself"),
    "return_tokens": RequestField("logprobs names the tokens of an answer"),
    "samplers": RequestField("their order is fixed: penalties, top_k, top_p, min_p"),
    "t_max_predict_ms": RequestField(_MAX, (0, -1)),
    "thinking_forced_open": RequestField(_TEMPLATE),
    "top_n_sigma": RequestField(_SAMPLING, (-1, 0)),
    "typical_p": RequestField(_SAMPLING, (1,)),
    "xtc_probability": RequestField(_SAMPLING, (0,)),
    # mlx-lm, LM Studio
    "adapters": RequestField(_MERGED),
    "frequency_context_size": RequestField("use penalty_context", (20,)),
    "integrations": RequestField("call the servers yourself, and send their tools"),
    "presence_context_size": RequestField("use penalty_context", (20,)),
    "role_mapping": RequestField(_TEMPLATE),
    "system_prompt": RequestField("send a message of the role system"),
    # Ollama
    "context": RequestField("this server gives and takes no tokens: send messages to /api/chat"),
    "format": RequestField("only /api/ has it: send response_format"),
    "images": RequestField(_PARTS),
    "options": RequestField(_OPENAI_OPTIONS),
    "raw": RequestField("/api/generate and /v1/completions take raw text"),
    "system": RequestField("send a message of the role system"),
    "template": RequestField(_TEMPLATE),
    "think": RequestField(_THINK),
    "tfs_z": RequestField(_SAMPLING, (1,)),
    # others
    "enable_thinking": RequestField(_THINK),
    "thinking": RequestField(_THINK),
    "reasoning": RequestField(_THINK),
    "do_sample": RequestField("temperature: 0 takes the likeliest token", (True,)),
    "encoder_repetition_penalty": RequestField(_SAMPLING, (1,)),
    "epsilon_cutoff": RequestField(_SAMPLING, (0,)),
    "eta_cutoff": RequestField(_SAMPLING, (0,)),
    "extra_body": RequestField("its members are fields of the body itself"),
    "guidance_scale": RequestField(_SAMPLING, (1,)),
    "negative_prompt": RequestField(_SAMPLING),
    "no_repeat_ngram_size": RequestField("use repetition_penalty", (0,)),
    "penalty_alpha": RequestField(_SAMPLING, (0,)),
    "safe_prompt": RequestField("send a message of the role system"),
    "smoothing_factor": RequestField(_SAMPLING, (0,)),
    "top_a": RequestField(_SAMPLING, (0,)),
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
    "access_programs": RequestField(_BILLING),
    "client_metadata": RequestField(_TRACE),
    "background_options": RequestField("the answer comes with the same request"),
    "context_management": RequestField("the client shortens conversations"),
    "include": RequestField("only /v1/responses has more to include"),
    "max_tool_calls": RequestField("it counts calls that the server makes: none"),
    "metadata": RequestField(_TRACE),
    "moderation": RequestField("nothing is moderated here"),
    "parallel_tool_calls": RequestField("a path without tools has no calls"),
    "prediction": RequestField(_SPEED),
    "prompt_cache_key": RequestField(_CACHE),
    "prompt_cache_options": RequestField(_CACHE),
    "prompt_cache_retention": RequestField(_CACHE),
    "safety_identifier": RequestField(_TRACE),
    "service_tier": RequestField(_BILLING),
    "store": RequestField("only responses are kept"),
    "stream_options": RequestField("it says what else a stream has"),
    "truncation": RequestField("the client shortens conversations"),
    "user": RequestField(_TRACE),
    "verbosity": RequestField(_WISH),
    # Anthropic
    "anthropic_beta": RequestField("supported features need no switch"),
    "betas": RequestField("supported features need no switch"),
    "billing_policy": RequestField(_BILLING),
    "cache_control": RequestField(_CACHE),
    "compaction": RequestField("the client shortens conversations"),
    "diagnostics": RequestField(_TRACE),
    "fallback_credit_token": RequestField(_BILLING),
    "fallbacks": RequestField("the named model answers, or an error says why not"),
    "inference_geo": RequestField("nothing leaves this machine"),
    "speed": RequestField(_SPEED),
    "thread": RequestField("threads are not kept; continuing one is refused"),
    "user_profile_id": RequestField(_TRACE),
    "workspace_id": RequestField(_TRACE),
    # vLLM, SGLang
    "cache_salt": RequestField(_CACHE),
    "early_stopping": RequestField(_SHAPE),
    "ec_transfer_params": RequestField(_SPEED),
    "guided_decoding_backend": RequestField("llguidance holds the form"),
    "kv_transfer_params": RequestField(_SPEED),
    "priority": RequestField(_SPEED),
    "request_id": RequestField(_TRACE),
    "return_mm_kwargs": RequestField("only vLLM's render paths use it"),
    "return_token_offsets": RequestField("only vLLM's render paths use it"),
    "rid": RequestField(_TRACE),
    "routed_experts_prompt_start": RequestField(_SHAPE),
    "session_id": RequestField(_TRACE),
    "stream_interval": RequestField(_SPEED),
    "stream_reasoning": RequestField(_SPEED),
    "thinking_token_budget": RequestField(_WISH),
    "truncation_side": RequestField(_SHAPE),
    # llama.cpp
    "adaptive_decay": RequestField(_SHAPE),
    "backend_sampling": RequestField(_SPEED),
    "cache_prompt": RequestField(_CACHE),
    "dry_allowed_length": RequestField(_SHAPE),
    "dry_base": RequestField(_SHAPE),
    "dry_penalty_last_n": RequestField(_SHAPE),
    "dry_sequence_breakers": RequestField(_SHAPE),
    "dynatemp_exponent": RequestField(_SHAPE),
    "id_slot": RequestField(_CACHE),
    "mirostat_eta": RequestField(_SHAPE),
    "mirostat_tau": RequestField(_SHAPE),
    "n_cache_reuse": RequestField(_CACHE),
    "n_discard": RequestField("an answer ends where the context is full"),
    "n_keep": RequestField("an answer ends where the context is full"),
    "reasoning_budget": RequestField(_WISH),
    "return_progress": RequestField("it says what else a stream has"),
    "speculative.n_max": RequestField(_SPEED),
    "speculative.n_min": RequestField(_SPEED),
    "speculative.p_min": RequestField(_SPEED),
    "speculative.type": RequestField(_SPEED),
    "thinking_budget_tokens": RequestField(_WISH),
    "timings_per_token": RequestField("it says what else a stream has"),
    "verbose": RequestField(_TRACE),
    "xtc_threshold": RequestField(_SHAPE),
    # mlx-lm, LM Studio
    "context_length": RequestField(_LOADING),
    "draft_model": RequestField(_SPEED),
    "num_draft_tokens": RequestField(_SPEED),
    "ttl": RequestField(_LOADING),
    # Ollama
    "embedding_only": RequestField(_LOADING),
    "f16_kv": RequestField(_LOADING),
    "height": RequestField("it is for models that make pictures"),
    "keep_alive": RequestField("only Ollama's paths use it"),
    "logits_all": RequestField(_LOADING),
    "low_vram": RequestField(_LOADING),
    "main_gpu": RequestField(_LOADING),
    "num_batch": RequestField(_SPEED),
    "num_ctx": RequestField("--context is the server's"),
    "num_gpu": RequestField(_LOADING),
    "num_keep": RequestField("an answer ends where the context is full"),
    "num_thread": RequestField(_SPEED),
    "numa": RequestField(_LOADING),
    "penalize_newline": RequestField("Ollama itself ignores it"),
    "shift": RequestField("an answer ends where the context is full"),
    "steps": RequestField("it is for models that make pictures"),
    "truncate": RequestField("the client shortens conversations"),
    "use_mlock": RequestField(_LOADING),
    "use_mmap": RequestField(_LOADING),
    "vocab_only": RequestField(_LOADING),
    "width": RequestField("it is for models that make pictures"),
    # others
    "thinking_budget": RequestField(_WISH),
}
"""Fields that change no answer, with the reason."""

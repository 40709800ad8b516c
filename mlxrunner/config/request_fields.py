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


def _fields(why: str, names: str = "", **passing: tuple[Any, ...]) -> dict[str, RequestField]:
    """Return a rule for each of `names`, and for each field of which some values are `passing`."""
    return {
        **dict.fromkeys(names.split(), RequestField(why)),
        **{name: RequestField(why, neutral) for name, neutral in passing.items()},
    }


REFUSED: dict[str, RequestField] = {
    **_fields("answers are text", "audio return_hidden_states", modalities=(["text"],)),
    **_fields("the answer comes with the same request", "background"),
    **_fields("it may only be n", best_of=(1,)),
    **_fields("send the whole conversation, or previous_response_id", "conversation"),
    **_fields("only /v1/completions has it", "echo"),
    **_fields("send tools and tool_choice", "functions", function_call=("none", "auto")),
    **_fields("send messages, and pictures in their content", "image image_data images"),
    **_fields("only /v1/responses has it: send messages or a prompt", "input"),
    **_fields("send a message of the role system", "instructions system_prompt system safe_prompt"),
    **_fields(
        "choose tokens with temperature, top_p, top_k and min_p",
        "logit_bias bad_words custom_logit_processor logits_processors watermarking "
        "negative_prompt",
        adaptive_target=(-1,),
        dynatemp_range=(0,),
        min_keep=(0, 1),
        mirostat=(0,),
        top_n_sigma=(-1, 0),
        typical_p=(1,),
        xtc_probability=(0,),
        tfs_z=(1,),
        encoder_repetition_penalty=(1,),
        epsilon_cutoff=(0,),
        eta_cutoff=(0,),
        guidance_scale=(1,),
        penalty_alpha=(0,),
        smoothing_factor=(0,),
        top_a=(0,),
    ),
    **_fields("this path takes a prompt or an input", "messages"),
    **_fields("send a request for each answer", n=(1,)),
    **_fields("only /v1/responses has it", "previous_response_id"),
    **_fields("send messages or an input", "prompt"),
    **_fields(
        "write it into a prompt in the model's own form",
        "suffix input_extra input_prefix input_suffix",
    ),
    **_fields("send format", "structured_outputs", response_format=({"type": "text"},)),
    **_fields(
        "each protocol has its own: reasoning_effort, reasoning, thinking, think",
        "reasoning_effort think enable_thinking thinking reasoning",
    ),
    **_fields("this path has no choice of tools", tool_choice=("auto",)),
    **_fields("this path has no tools: send messages", "tools"),
    **_fields("write them into a message", "documents"),
    **_fields("only /v1/responses has it: send response_format", "text"),
    **_fields("nothing is searched here", "web_search_options"),
    **_fields("no code is run here", "container"),
    **_fields("call the servers yourself, and send their tools", "mcp_servers integrations"),
    **_fields("only /v1/messages has it: send response_format", "output_config output_format"),
    **_fields("the chat template writes them", "add_special_tokens"),
    **_fields(
        "give a JSON schema in response_format, or texts in structured_outputs.choice",
        "allowed_token_ids ebnf guided_grammar guided_regex regex structural_tag grammar "
        "grammar_lazy grammar_triggers",
    ),
    **_fields(
        "the model's own chat template is used; chat_template_kwargs sets its variables",
        "chat_template thinking_forced_open role_mapping template",
    ),
    **_fields("the answer is the output of a response", "enable_response_messages"),
    **_fields('send response_format {"type": "json_object"}', "guided_json_object"),
    **_fields("JSON is written as json.dumps does", "guided_whitespace_pattern"),
    **_fields("leave out reasoning_content yourself", include_reasoning=(True,)),
    **_fields("append the stop text yourself", "include_stop_str_in_output no_stop_trim"),
    **_fields("there is no beam search", length_penalty=(1,)),
    **_fields("ask for top_logprobs", "logprob_token_ids"),
    **_fields(
        "start the server with a model into which they are merged",
        "lora_path lora_request lora adapters",
    ),
    **_fields("pictures are read as the model's files say", "media_io_kwargs mm_processor_kwargs"),
    **_fields("ask for the length in the prompt", min_tokens=(0,)),
    **_fields("/v1/completions takes tokens as its prompt", "prompt_token_ids"),
    **_fields("send them in input", "previous_input_messages"),
    **_fields("send a text or tokens", "prompt_embeds"),
    **_fields("only the answer has log-probabilities", "prompt_logprobs"),
    **_fields(
        "end the answer with max_tokens or stop",
        "repetition_detection",
        n_indent=(0,),
        t_max_predict_ms=(0, -1),
    ),
    **_fields("`generate -v` shows a prompt", "return_prompt_text"),
    **_fields("logprobs names the tokens of an answer", "return_token_ids return_tokens"),
    **_fields("logprobs has tokens as text and bytes", "return_tokens_as_token_ids"),
    **_fields("thinking is apart from the answer", separate_reasoning=(True,)),
    **_fields(
        "answers never show them",
        skip_special_tokens=(True,),
        spaces_between_special_tokens=(True,),
    ),
    **_fields("stop takes texts", "stop_regex"),
    **_fields("shorten the conversation yourself", truncate_prompt_tokens=(-1,)),
    **_fields("send several requests with seeds", "use_beam_search"),
    **_fields("there are no extensions of vLLM here", "vllm_xargs"),
    **_fields("the form of calls follows from the model", "chat_format"),
    **_fields("use repetition_penalty", dry_multiplier=(0,), no_repeat_ngram_size=(0,)),
    **_fields("use n", n_cmpl=(1,)),
    **_fields("ask for logprobs and top_logprobs", n_probs=(0,)),
    **_fields("calls are always parsed", parse_tool_calls=(True,)),
    **_fields("ask for logprobs", "post_sampling_probs"),
    **_fields("answers never show special tokens", "preserved_tokens"),
    **_fields(
        "thinking is reasoning_content",
        "reasoning_in_content",
        reasoning_format=("auto", "deepseek"),
    ),
    **_fields("choose fields of the answer yourself", "response_fields"),
    **_fields("their order is fixed: penalties, top_k, top_p, min_p", "samplers"),
    **_fields("use penalty_context", frequency_context_size=(20,), presence_context_size=(20,)),
    **_fields("this server gives and takes no tokens: send messages to /api/chat", "context"),
    **_fields("only /api/ has it: send response_format", "format"),
    **_fields(
        "OpenAI's paths take its members as fields of the body, such as temperature", "options"
    ),
    **_fields("/api/generate and /v1/completions take raw text", "raw"),
    **_fields("temperature: 0 takes the likeliest token", do_sample=(True,)),
    **_fields("its members are fields of the body itself", "extra_body"),
}
"""Fields that would change the answer, or what comes with it.

A path that honours one reads it before this table is asked.
"""

IGNORED: dict[str, RequestField] = {
    **_fields(
        "nobody is billed or ranked here",
        "access_programs service_tier billing_policy fallback_credit_token",
    ),
    **_fields(
        "for the logs of another server",
        "client_metadata metadata safety_identifier user diagnostics user_profile_id "
        "workspace_id request_id rid session_id verbose",
    ),
    **_fields("the answer comes with the same request", "background_options"),
    **_fields(
        "the client shortens conversations",
        "context_management truncation compaction truncate",
    ),
    **_fields("only /v1/responses has more to include", "include"),
    **_fields("it counts calls that the server makes: none", "max_tool_calls"),
    **_fields("nothing is moderated here", "moderation"),
    **_fields("a path without tools has no calls", "parallel_tool_calls"),
    **_fields(
        "it changes how fast an answer comes, not which",
        "prediction speed ec_transfer_params kv_transfer_params priority stream_interval "
        "stream_reasoning backend_sampling speculative.n_max speculative.n_min "
        "speculative.p_min speculative.type draft_model num_draft_tokens num_batch num_thread",
    ),
    **_fields(
        "prompts are always cached, and reuse changes no answer",
        "prompt_cache_key prompt_cache_options prompt_cache_retention cache_control "
        "cache_salt cache_prompt id_slot n_cache_reuse",
    ),
    **_fields("only responses are kept", "store"),
    **_fields("it says what else a stream has", "stream_options return_progress timings_per_token"),
    **_fields(
        "a hint, not a limit",
        "verbosity thinking_token_budget reasoning_budget thinking_budget_tokens thinking_budget",
    ),
    **_fields("supported features need no switch", "anthropic_beta betas"),
    **_fields("the named model answers, or an error says why not", "fallbacks"),
    **_fields("nothing leaves this machine", "inference_geo"),
    **_fields("threads are not kept; continuing one is refused", "thread"),
    **_fields(
        "it configures a refused field",
        "early_stopping routed_experts_prompt_start truncation_side adaptive_decay "
        "dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers "
        "dynatemp_exponent mirostat_eta mirostat_tau xtc_threshold",
    ),
    **_fields("llguidance holds the form", "guided_decoding_backend"),
    **_fields("only vLLM's render paths use it", "return_mm_kwargs return_token_offsets"),
    **_fields("an answer ends where the context is full", "n_discard n_keep num_keep shift"),
    **_fields(
        "the server decides how a model is loaded",
        "context_length ttl embedding_only f16_kv logits_all low_vram main_gpu num_gpu numa "
        "use_mlock use_mmap vocab_only",
    ),
    **_fields("it is for models that make pictures", "height steps width"),
    **_fields("only Ollama's paths use it", "keep_alive"),
    **_fields("--context is the server's", "num_ctx"),
    **_fields("Ollama itself ignores it", "penalize_newline"),
}
"""Fields that change no answer, with the reason."""

"""Lines of OpenAI's batch files: `custom_id`, `method`, `url` and a `body`, translated to our own fields, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlxrunner.batch.fields import OPTIONS, Rules, checked_options, checked_text, conversation, kind
from mlxrunner.batch.store import Format
from mlxrunner.errors import OptionError, PromptError
from mlxrunner.tokenizer.prompt import Prompt

URLS: dict[str, Format] = {
    "/v1/chat/completions": "chat.completion",
    "/v1/completions": "text_completion",
}
FIELDS = frozenset(("custom_id", "method", "url", "body"))
_ELSEWHERE = frozenset(
    "model user metadata store service_tier safety_identifier prompt_cache_key parallel_tool_calls stream_options".split()
)
"""Of no meaning here: there is one model, nobody is billed, and an answer is complete when it is written."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
"""Not supported but for the values that ask for nothing."""


def format_of(record: Mapping[str, Any]) -> Format:
    """Whether a line is one of OpenAI's, and for which kind of answer."""
    if "custom_id" not in record and "body" not in record:
        return "plain"
    url = record.get("url")
    return URLS.get(url, "chat.completion") if isinstance(url, str) else "chat.completion"


def read_openai(record: Mapping[str, Any], rules: Rules) -> tuple[Prompt, dict[str, Any]]:
    """The prompt and the options of an OpenAI line. PromptError, OptionError: what is wrong or not supported."""
    unknown = sorted(record.keys() - FIELDS)
    if unknown:
        raise OptionError(
            f"unknown field {unknown[0]!r:.80} beside custom_id, method, url and body"
        )
    if not isinstance(record.get("custom_id"), str):
        raise PromptError("custom_id has to be a text")
    if record.get("method", "POST") != "POST":
        raise OptionError(f"method {record['method']!r:.80} is not supported, only POST")
    if record.get("url") is not None and record["url"] not in list(URLS):
        raise OptionError(f"url {record['url']!r:.80} is not supported, only {' and '.join(URLS)}")
    if not isinstance(record.get("body"), dict):
        raise PromptError(f"body has to be an object, not {kind(record.get('body'))}")
    body = {
        name: value
        for name, value in record["body"].items()
        if value is not None and name not in _ELSEWHERE
    }
    if format_of(record) == "text_completion":
        prompt: Prompt = checked_text("prompt", body.pop("prompt", None))
    else:
        prompt = conversation(body.pop("messages", None), rules.system)
        _chat_logprobs(body)
    response_format = body.pop("response_format", None)
    return prompt, checked_options(_options(body), response_format, rules)


def _chat_logprobs(body: dict[str, Any]) -> None:
    """`logprobs: true, top_logprobs: k` to our `logprobs: k`."""
    wanted, top = body.pop("logprobs", False), body.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise OptionError(f"logprobs: {wanted!r:.80} is neither true nor false")
    if top is not None and not wanted:
        raise OptionError("top_logprobs needs logprobs to be true")
    if wanted:
        body["logprobs"] = 0 if top is None else top


def _options(body: dict[str, Any]) -> dict[str, Any]:
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise OptionError(
                "max_tokens and max_completion_tokens say the same thing: give one of them"
            )
        body["max_tokens"] = body.pop("max_completion_tokens")
    for name, value in body.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise OptionError(
                f"{name}: {value!r:.80} is not supported, only {json.dumps(_NEUTRAL[name][0])}"
            )
        if name not in _NEUTRAL and name not in OPTIONS:
            raise OptionError(f"{name!r:.80} is not supported in a body")
    return {name: value for name, value in body.items() if name in OPTIONS}

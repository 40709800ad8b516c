"""Check the fields of a batch line.

`read_fields` turns a line into a prompt and options of `generate`. A line has either the fields of
this project or those of OpenAI's batch files (`custom_id`, `method`, `url`, `body`). The latter are
translated, or refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.store import Format
from mlxrunner.engine.constrain import check_form
from mlxrunner.errors import OptionError, PromptError
from mlxrunner.options import GenerateOptions, names
from mlxrunner.templates.messages import Message, check_message
from mlxrunner.tokenizer.prompt import Prompt

OPTIONS = frozenset(names(GenerateOptions))
"""The names of the options that a line may give."""
FIELDS = OPTIONS | {"id", "prompt", "messages", "system", "response_format"}
"""The fields of a line that does not come from OpenAI's batch files."""
ROLES = ("system", "user", "assistant", "tool")
"""The roles that a message may have."""
ANY_OBJECT = '{"type": "object"}'
"""The JSON schema for the `response_format` `json_object`."""

OPENAI_FIELDS = frozenset(("custom_id", "method", "url", "body"))
"""The fields of a line of OpenAI's batch files."""
URLS: dict[str, Format] = {
    "/v1/chat/completions": "chat.completion",
    "/v1/completions": "text_completion",
}
"""The format of the answer for each `url` that is supported."""
_ELSEWHERE = frozenset((
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "stream_options",
))  # fmt: skip  # one name a line would be nine lines
"""Fields of a body that are ignored.

They have no meaning here: there is one model, nobody is billed, and each answer is written whole.
"""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
"""Fields of a body that are not supported, with the values that are accepted and change nothing."""


def format_of(record: Mapping[str, Any]) -> Format:
    """Return the format of the answer to a line with these fields."""
    if "custom_id" not in record and "body" not in record:
        return "plain"
    url = record.get("url")
    return URLS.get(url, "chat.completion") if isinstance(url, str) else "chat.completion"


def read_fields(record: Mapping[str, Any], batch: BatchOptions) -> tuple[Prompt, dict[str, Any]]:
    """Return the prompt and the options of a line.

    A field that is null counts as not given. Raise PromptError or OptionError if a field is wrong
    or not supported.
    """
    if format_of(record) != "plain":
        return _read_openai(record, batch)
    given = {name: value for name, value in record.items() if value is not None}
    unknown = sorted(given.keys() - FIELDS)
    if unknown:
        raise OptionError(
            f"unknown field {unknown[0]!r:.80}: known are {', '.join(sorted(FIELDS))}"
        )
    prompt = _prompt(given, batch)
    options = {name: value for name, value in given.items() if name in OPTIONS}
    return prompt, checked_options(options, given.get("response_format"), batch)


def _prompt(given: Mapping[str, Any], batch: BatchOptions) -> Prompt:
    """Return the prompt of a line. Raise PromptError if it is missing or wrong."""
    if "prompt" in given and "messages" in given:
        raise PromptError("has both a prompt and messages")
    if "prompt" not in given and "messages" not in given:
        raise PromptError('has no "prompt" and no "messages"')
    system = given.get("system", batch.system)
    if system is not None and not isinstance(system, str):
        raise PromptError(f"system has to be a text, not {kind(system)}")
    if "messages" in given:
        return _conversation(given["messages"], system)
    text = _text("prompt", given["prompt"])
    if not batch.raw:
        return _conversation([{"role": "user", "content": text}], system)
    if "system" in given:
        raise PromptError("a system prompt needs the chat template, which --raw leaves out")
    return text


def _text(name: str, value: Any) -> str:
    """Return `value`, the field `name`. Raise PromptError if it is not a text or is empty."""
    if not isinstance(value, str):
        raise PromptError(f"{name} has to be a text, not {kind(value)}")
    if not value:
        raise PromptError(f"{name} is empty")
    return value


def _conversation(messages: Any, system: str | None) -> list[Message]:
    """Return the messages as the chat template takes them.

    A `system` prompt is put in front if they do not begin with one. Raise PromptError for the first
    wrong message.
    """
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages has to be a list of at least one message")
    checked = [_message(number, message) for number, message in enumerate(messages)]
    if system and checked[0]["role"] != "system":
        checked.insert(0, {"role": "system", "content": system})
    return checked


def _message(number: int, message: Any) -> Message:
    """Return message `number` (from 0), checked. Raise PromptError if it is not supported."""
    if isinstance(message, dict) and message.get("role") == "developer":
        # OpenAI's newer name for "system", which no chat template knows.
        message = {**message, "role": "system"}
    checked = check_message(number, message)
    role = checked["role"]
    if role not in ROLES:
        raise PromptError(
            f"message {number}: role {role!r:.80} is not known, it has to be one of "
            f"{', '.join(ROLES)}"
        )
    known = {"content", *checked}
    extra = [name for name, value in message.items() if value and name not in known]
    if extra:
        raise PromptError(f"message {number} has a field that is not supported: {extra[0]!r:.80}")
    return checked


def checked_id(name: str, value: Any) -> str | int | None:
    """Return a line's id unchanged: a text, a whole number of 64 bits, or None.

    Raise PromptError for anything else; the error names the field `name`.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"{name} is not valid Unicode: {error.reason} at character {error.start}"
            ) from error
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise PromptError(
            f"{name} has to be a text or a whole number of at most 64 bits, not {value!r:.80}"
        )
    return value


def checked_options(
    options: dict[str, Any], response_format: Any, batch: BatchOptions
) -> dict[str, Any]:
    """Return a line's own options as they are stored, after checking them with the defaults.

    Raise OptionError if an option is unknown or wrong.
    """
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise OptionError(
            f"unknown option {unknown[0]!r:.80}: known are {', '.join(sorted(OPTIONS))}"
        )
    options = options | _form(options, response_format, batch)
    # A line's form replaces a form of the other kind that the defaults ask for.
    if options.get("schema") is not None and batch.defaults.get("choices"):
        options.setdefault("choices", None)
    if options.get("choices") and batch.defaults.get("schema") is not None:
        options.setdefault("schema", None)
    for name in ("stop", "choices"):
        if options.get(name) is not None:
            options[name] = _texts(name, options[name])
    if options:
        together = GenerateOptions.of(**{**batch.defaults, **options})
        if "schema" in options or "choices" in options:
            check_form(together)
    return options


def _texts(name: str, value: Any) -> list[str]:
    """Return an option as a list of texts. Raise OptionError if it is not one."""
    values = [value] if isinstance(value, str) and name == "stop" else value
    if not isinstance(values, list | tuple) or not all(
        isinstance(text, str) and text for text in values
    ):
        raise OptionError(f"{name}: {value!r:.80} is not a list of texts of at least one character")
    return list(values)


def _form(options: Mapping[str, Any], response_format: Any, batch: BatchOptions) -> dict[str, Any]:
    """Return the options that say which form a line's answer must have.

    `schema` becomes the text of a JSON schema. Raise OptionError if the form is given twice or is
    not known.
    """
    if response_format is None:
        schema = options.get("schema")
        return {"schema": _schema_text(schema)} if schema is not None else {}
    if "schema" in options:
        raise OptionError("schema and response_format say the same thing: give one of them")
    match response_format:
        case {"type": "text"}:
            return {name: None for name in ("schema", "choices") if batch.defaults.get(name)}
        case {"type": "json_object"}:
            return {"schema": ANY_OBJECT}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"schema": _schema_text(schema)}
        case {"type": "json_schema"}:
            raise OptionError(
                "response_format: json_schema has no schema, which has to be an object"
            )
    raise OptionError(
        f"response_format: {response_format!r:.80} is not known; its type has to be text, "
        "json_object or json_schema"
    )


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as text. Raise OptionError if it is neither a text nor an object."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, dict):
        raise OptionError(f"schema has to be a JSON schema (an object), not {kind(schema)}")
    return json.dumps(schema)


def _read_openai(record: Mapping[str, Any], batch: BatchOptions) -> tuple[Prompt, dict[str, Any]]:
    """Return the prompt and the options of a line of OpenAI's batch files."""
    unknown = sorted(record.keys() - OPENAI_FIELDS)
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
        prompt: Prompt = _text("prompt", body.pop("prompt", None))
        body.pop("parallel_tool_calls", None)
    else:
        prompt = _conversation(body.pop("messages", None), batch.system)
        _translate_logprobs(body)
        _translate_template(body, batch.defaults)
    response_format = body.pop("response_format", None)
    return prompt, checked_options(_openai_options(body), response_format, batch)


def _translate_logprobs(body: dict[str, Any]) -> None:
    """Replace the `logprobs: true, top_logprobs: k` of a chat by `logprobs: k`."""
    wanted, top = body.pop("logprobs", False), body.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise OptionError(f"logprobs: {wanted!r:.80} is neither true nor false")
    if top is not None and not wanted:
        raise OptionError("top_logprobs needs logprobs to be true")
    if wanted:
        body["logprobs"] = 0 if top is None else top


def _translate_template(body: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Replace `chat_template_kwargs` by `template`, and check `tools` and the fields about them.

    With `tool_choice` "none" the model sees no tools.
    """
    if "chat_template_kwargs" in body:
        if "template" in body:
            raise OptionError(
                "template and chat_template_kwargs say the same thing: give one of them"
            )
        body["template"] = body.pop("chat_template_kwargs")
    for number, tool in enumerate(body["tools"] if isinstance(body.get("tools"), list) else ()):
        match tool:
            case {"type": "function", "function": {"name": str()}}:
                continue
        raise OptionError(
            f'tools: number {number} has to be {{"type": "function", "function": '
            f'{{"name": text, ...}}}}, not {tool!r:.80}'
        )
    if body.get("tool_choice") == "none":
        body["tools"] = []
    if body.get("tools") == [] and not defaults.get("tools"):
        del body["tools"]
    if body.get("tools") and body.get("parallel_tool_calls") is False:
        raise OptionError("parallel_tool_calls: false is not supported, only true")
    body.pop("parallel_tool_calls", None)


def _openai_options(body: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a body. Raise OptionError for a field that is not supported."""
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


def kind(value: Any) -> str:
    """Return the kind of a JSON value, in words for an error."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")

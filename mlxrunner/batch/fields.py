"""The fields of a line, checked: to a prompt and the options of `generate`. Our own fields; OpenAI's are translated to them first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mlxrunner.config import GenerateOptions
from mlxrunner.constrain import check_form
from mlxrunner.errors import OptionError, PromptError
from mlxrunner.tokenizer.base import Message
from mlxrunner.tokenizer.prompt import Prompt

OPTIONS = frozenset(option.name for option in fields(GenerateOptions))
FIELDS = OPTIONS | {"id", "prompt", "messages", "system", "response_format"}
ANY_OBJECT = '{"type": "object"}'
"""The JSON schema of `response_format` json_object."""


ROLES = ("system", "user", "assistant")


class BrokenLineError(PromptError):
    """A line that can't be run, but some of whose `fields` are known: its id."""

    def __init__(self, problem: str, fields: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.fields = fields


@dataclass(frozen=True)
class Rules:
    """What holds for all lines: `defaults` of options, the `system` prompt of those that bring none, whether a prompt is `raw` text."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    raw: bool = False


def read_plain(record: Mapping[str, Any], rules: Rules) -> tuple[Prompt, dict[str, Any]]:
    """The prompt and the options of our own fields; a field that is null counts as not given. PromptError, OptionError."""
    given = {name: value for name, value in record.items() if value is not None}
    unknown = sorted(given.keys() - FIELDS)
    if unknown:
        raise OptionError(
            f"unknown field {unknown[0]!r:.80}: known are {', '.join(sorted(FIELDS))}"
        )
    prompt = _prompt(given, rules)
    options = {name: value for name, value in given.items() if name in OPTIONS}
    return prompt, checked_options(options, given.get("response_format"), rules)


def _prompt(given: Mapping[str, Any], rules: Rules) -> Prompt:
    if ("prompt" in given) == ("messages" in given):
        raise PromptError(
            "has both a prompt and messages"
            if "prompt" in given
            else 'has no "prompt" and no "messages"'
        )
    system = given.get("system", rules.system)
    if system is not None and not isinstance(system, str):
        raise PromptError(f"system has to be a text, not {kind(system)}")
    if "messages" in given:
        return conversation(given["messages"], system)
    text = checked_text("prompt", given["prompt"])
    if not rules.raw:
        return conversation([{"role": "user", "content": text}], system)
    if "system" in given:
        raise PromptError("a system prompt needs the chat template, which --raw leaves out")
    return text


def checked_text(name: str, value: Any) -> str:
    """A text of at least one character, or PromptError."""
    if not isinstance(value, str):
        raise PromptError(f"{name} has to be a text, not {kind(value)}")
    if not value:
        raise PromptError(f"{name} is empty")
    return value


def conversation(messages: Any, system: str | None) -> list[Message]:
    """Messages as the chat template wants them, `system` in front where they don't begin with one. PromptError names the wrong one."""
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages has to be a list of at least one message")
    checked = [_message(number, message) for number, message in enumerate(messages)]
    if system and checked[0]["role"] != "system":
        checked.insert(0, {"role": "system", "content": system})
    return checked


def _message(number: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(
            f'message {number} has to be {{"role": text, "content": text}}, not {message!r:.80}'
        )
    extra = [name for name, value in message.items() if value and name not in ("role", "content")]
    if extra:
        raise PromptError(f"message {number} has a field that is not supported: {extra[0]!r:.80}")
    # OpenAI's newer name for it; no chat template knows that.
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in ROLES:
        raise PromptError(
            f"message {number}: role {role!r:.80} is not known, it has to be one of {', '.join(ROLES)}"
        )
    return {"role": role, "content": _content(number, message.get("content"))}


def _content(number: int, content: Any) -> str:
    """A text, or OpenAI's list of parts, of which only those of text can be read."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptError(f"message {number}: content has to be a text, not {kind(content)}")
    for part in content:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            shown = part.get("type") if isinstance(part, dict) else part
            raise PromptError(
                f"message {number}: content of type {shown!r:.80} is not supported, only text"
            )
    return "".join(part["text"] for part in content)


def checked_id(name: str, value: Any) -> str | int | None:
    """A line's id as it was given: a text or a whole number (of 64 bits). PromptError for anything else."""
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


def checked_options(options: dict[str, Any], response_format: Any, rules: Rules) -> dict[str, Any]:
    """A line's own options as JSON has them, checked together with the defaults. OptionError."""
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise OptionError(
            f"unknown option {unknown[0]!r:.80}: known are {', '.join(sorted(OPTIONS))}"
        )
    options = options | _structure(options, response_format, rules)
    if (
        options.get("schema") is not None
        and "choices" not in options
        and rules.defaults.get("choices")
    ):
        options["choices"] = None  # a line's form takes the place of the other kind
    if (
        options.get("choices")
        and "schema" not in options
        and rules.defaults.get("schema") is not None
    ):
        options["schema"] = None
    for name in ("stop", "choices"):
        if options.get(name) is not None:
            options[name] = _texts(name, options[name])
    if options:
        together = GenerateOptions.of(**{**rules.defaults, **options})
        if "schema" in options or "choices" in options:
            check_form(together)
    return options


def _texts(name: str, value: Any) -> list[str]:
    values = [value] if isinstance(value, str) and name == "stop" else value
    if not isinstance(values, list | tuple) or not all(
        isinstance(text, str) and text for text in values
    ):
        raise OptionError(f"{name}: {value!r:.80} is not a list of texts of at least one character")
    return list(values)


def _structure(options: Mapping[str, Any], response_format: Any, rules: Rules) -> dict[str, Any]:
    """What a line says about the form of its answer, as the option `schema`: the text of a JSON schema."""
    if response_format is None:
        schema = options.get("schema")
        return {"schema": _schema_text(schema)} if schema is not None else {}
    if "schema" in options:
        raise OptionError("schema and response_format say the same thing: give one of them")
    form = response_format.get("type") if isinstance(response_format, dict) else None
    match form:
        case "text":
            lifted = ("schema", "choices")
            return {name: None for name in lifted if rules.defaults.get(name)}
        case "json_object":
            return {"schema": ANY_OBJECT}
        case "json_schema":
            described = response_format.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(schema, dict):
                raise OptionError(
                    "response_format: json_schema has no schema, which has to be an object"
                )
            return {"schema": _schema_text(schema)}
    raise OptionError(
        f"response_format: {response_format!r:.80} is not known; its type has to be text, json_object or json_schema"
    )


def _schema_text(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, dict):
        raise OptionError(f"schema has to be a JSON schema (an object), not {kind(schema)}")
    return json.dumps(schema)


def kind(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")

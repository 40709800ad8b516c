"""Check the fields of a batch line.

`read_fields` turns a line into prompts and options of `generate`. A line has either the fields of
this project or those of OpenAI's batch files (`custom_id`, `method`, `url`, `body`). Both may have
the names of OpenAI's and vLLM's APIs (`openai_format.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxrunner.batch.openai_format import (
    READ,
    RESPONSE_FIELDS,
    check_functions,
    form_of,
    kind,
    read_response,
    translate,
    unknown,
)
from mlxrunner.batch.options import BatchOptions
from mlxrunner.batch.store import Format
from mlxrunner.config.names import MEANT, SAME, did_you_mean
from mlxrunner.config.option import names, without_nulls
from mlxrunner.config.request_fields import held
from mlxrunner.engine.constrain import check_form
from mlxrunner.errors import OptionError, PromptError
from mlxrunner.options import LARGEST_TOKEN, GenerateOptions
from mlxrunner.templates.messages import PlainMessage, check_message, has_picture, picture_of
from mlxrunner.tokenizer.prompt import Prompt

OPTIONS = frozenset(names(GenerateOptions))
"""The names of the options that a line may give."""
FIELDS = OPTIONS | {"id", "prompt", "messages", "system", "response_format"}
"""The fields of a line that does not come from OpenAI's batch files."""
BODY = OPTIONS | {"response_format"}
"""The fields of a body of OpenAI's batch files beside its prompt, under our names."""
ROLES = ("system", "user", "assistant", "tool")

OPENAI_FIELDS = frozenset(("custom_id", "method", "url", "body"))
"""The fields of a line of OpenAI's batch files."""
URLS: dict[str, Format] = {
    "/v1/chat/completions": "chat.completion",
    "/v1/completions": "text_completion",
    "/v1/responses": "response",
}
"""The format of the answer for each `url` that is supported."""
EMBEDDINGS_URL = "/v1/embeddings"
NO_EMBEDDINGS = (
    "embeddings are not supported: this program generates text; take a program that is made for "
    "embedding models"
)
"""The error of `--embeddings` and of a line with EMBEDDINGS_URL."""


def format_of(record: Mapping[str, Any]) -> Format:
    """Return the format of the answer to a line with these fields."""
    if "custom_id" not in record and "body" not in record:
        return "plain"
    url = record.get("url")
    return URLS.get(url, "chat.completion") if isinstance(url, str) else "chat.completion"


def read_fields(
    record: Mapping[str, Any], batch: BatchOptions
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return the prompts and the options of a line. It has one prompt, or a list of them.

    A field that is null counts as not given. Raise PromptError or OptionError if a field is wrong
    or not supported.
    """
    if format_of(record) != "plain":
        prompt, options = _read_openai(record, batch)
        return [prompt], options
    # An error for a name that is like one of ours says so, and any other field asks for nothing.
    given = held(without_nulls(record), FIELDS | READ | MEANT.keys() | SAME.keys())
    fields = translate(given, batch.defaults, counts_logprobs=True)
    wrong = next((name for name in given if name in fields and name not in FIELDS), None)
    if wrong is not None:
        raise unknown(wrong, FIELDS)
    prompts = _prompts(fields, batch)
    options = {name: value for name, value in fields.items() if name in OPTIONS}
    return prompts, checked_options(options, fields.get("response_format"), batch)


def _prompts(given: Mapping[str, Any], batch: BatchOptions) -> list[Prompt]:
    """Return the prompts of a line. Raise PromptError if there is none or one is wrong."""
    if "prompt" in given and "messages" in given:
        raise PromptError("has both a prompt and messages")
    if "prompt" not in given and "messages" not in given:
        raise PromptError('has no "prompt" and no "messages"')
    system = given.get("system", batch.system)
    if system is not None and not isinstance(system, str):
        raise PromptError(f"system has to be a text, not {kind(system)}")
    if "messages" in given:
        return [_conversation(given["messages"], system, batch.pictures)]
    listed = _listed(given["prompt"])
    if "system" in given and (batch.raw or not all(isinstance(one, str) for one in listed)):
        left_out = "--raw leaves out" if batch.raw else "token ids leave out"
        raise PromptError(f"a system prompt needs the chat template, which {left_out}")
    if batch.raw:
        return listed
    return [
        _conversation([{"role": "user", "content": one}], system, False)
        if isinstance(one, str)
        else one
        for one in listed
    ]


def _listed(prompt: Any) -> list[Prompt]:
    """Return the prompts of the field `prompt`: a text, token ids, or a list of either."""
    if not isinstance(prompt, list) or (prompt and not isinstance(prompt[0], str | list)):
        return [_text_or_tokens("prompt", prompt)]
    if not prompt:
        raise PromptError("prompt is an empty list")
    return [_text_or_tokens(f"prompt {number}", one) for number, one in enumerate(prompt)]


def _text_or_tokens(name: str, value: Any) -> Prompt:
    """Return `value`: a text, or token ids. Raise PromptError if it is neither."""
    if not isinstance(value, list):
        return _text(name, value)
    if not value:
        raise PromptError(f"{name} is empty")
    wrong = next(
        (one for one in value if type(one) is not int or not 0 <= one <= LARGEST_TOKEN), None
    )
    if wrong is not None:
        raise PromptError(f"{name}: {wrong!r:.80} is not a token id")
    return value


def _text(name: str, value: Any) -> str:
    """Return `value`, the field `name`. Raise PromptError if it is not a text or is empty."""
    if not isinstance(value, str):
        raise PromptError(f"{name} has to be a text, not {kind(value)}")
    if not value:
        raise PromptError(f"{name} is empty")
    return value


def _conversation(messages: Any, system: str | None, sees: bool) -> list[PlainMessage]:
    """Return the messages as the chat template takes them.

    A `system` prompt is put in front if they do not begin with one. `sees`: they may have pictures.
    Raise PromptError for the first wrong message.
    """
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages has to be a list of at least one message")
    checked = [_message(number, message, sees) for number, message in enumerate(messages)]
    if system and checked[0]["role"] != "system":
        checked.insert(0, {"role": "system", "content": system})
    return checked


def _message(number: int, message: Any, sees: bool) -> PlainMessage:
    """Return message `number` (from 0), checked. Raise PromptError if it is not supported."""
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        # A picture of OpenAI's comes in our form.
        pairs = ((p, picture_of(p) if isinstance(p, dict) else None) for p in message["content"])
        parts = [p if one is None else {"type": "image", "image": one.image} for p, one in pairs]
        message = {**message, "content": parts}
    if has_picture(message) and not sees:
        raise PromptError(f"message {number} has a picture: run the batch with --pictures")
    if isinstance(message, dict) and message.get("role") == "developer":
        # OpenAI's newer name for "system", which no chat template knows.
        message = {**message, "role": "system"}
    checked = check_message(number, message, _picture_text if sees else None)
    role = checked["role"]
    if role not in ROLES:
        likely = did_you_mean(role, ROLES).rstrip()
        raise PromptError(
            f"message {number}: role {role!r:.80} is not known, it has to be one of "
            f"{', '.join(ROLES)}{likely and ': '}{likely}"
        )
    known = {"content", *checked}
    if role == "assistant":
        known |= {"prefix", "partial"}  # of Mistral, DeepSeek and others: an answer to be continued
    extra = [name for name, value in message.items() if value and name not in known]
    if extra:
        raise PromptError(f"message {number} has a field that is not supported: {extra[0]!r:.80}")
    return checked


def _picture_text(image: Any, name: str) -> str:
    """Return the text of a picture in a line, undecoded. Raise PromptError if it is no text."""
    if isinstance(image, str):
        return image
    raise PromptError(f"{name}: a picture has to be a text: base64, or a URL")


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
    options = options | form_of(options, response_format, batch.defaults)
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


def _read_openai(record: Mapping[str, Any], batch: BatchOptions) -> tuple[Prompt, dict[str, Any]]:
    """Return the prompt and the options of a line of OpenAI's batch files."""
    record = without_nulls(record)
    _check_envelope(record)
    form = format_of(record)
    body = without_nulls(record["body"])
    body.pop("model", None)
    if form == "text_completion" and body.get("add_special_tokens") is True:
        del body["add_special_tokens"]
    reads = {"text_completion": {"prompt"}, "response": RESPONSE_FIELDS}.get(form, {"messages"})
    body = held(body, reads | READ)
    if form == "text_completion":
        prompts = _listed(body.pop("prompt", None))
        if len(prompts) > 1:
            raise PromptError(
                f"a list of {len(prompts)} prompts is not supported in a body: write a line for "
                "each"
            )
        prompt = prompts[0]
    elif form == "response":
        messages, body = read_response(body)
        prompt = _conversation(messages, batch.system, batch.pictures)
    else:
        prompt = _conversation(body.pop("messages", None), batch.system, batch.pictures)
    fields = translate(body, batch.defaults, counts_logprobs=form == "text_completion")
    wrong = next((name for name in body if name in fields and name not in BODY), None)
    if wrong is not None:
        known = BODY | (RESPONSE_FIELDS if form == "response" else {"messages", "prompt"})
        hint = did_you_mean(wrong, known - {wrong}).rstrip()
        raise OptionError(f"{wrong!r:.80} is not supported in a body{hint and ': '}{hint}")
    check_functions(fields.get("tools"))
    response_format = fields.pop("response_format", None)
    return prompt, checked_options(fields, response_format, batch)


def _check_envelope(record: Mapping[str, Any]) -> None:
    """Raise OptionError or PromptError for a wrong field around the body."""
    wrong = sorted(record.keys() - OPENAI_FIELDS)
    if wrong:
        raise OptionError(f"unknown field {wrong[0]!r:.80} beside custom_id, method, url and body")
    if not isinstance(record.get("custom_id"), str):
        raise PromptError("custom_id has to be a text")
    if record.get("method", "POST") != "POST":
        raise OptionError(f"method {record['method']!r:.80} is not supported, only POST")
    if record.get("url") == EMBEDDINGS_URL:
        raise OptionError(NO_EMBEDDINGS)
    if record.get("url") is not None and record["url"] not in list(URLS):
        raise OptionError(f"url {record['url']!r:.80} is not supported, only {', '.join(URLS)}")
    if not isinstance(record.get("body"), dict):
        raise PromptError(f"body has to be an object, not {kind(record.get('body'))}")

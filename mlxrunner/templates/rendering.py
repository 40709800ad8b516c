"""Render a conversation with a chat template in a sandbox, or in a plain fallback format.

The sandbox has the same filters and functions as that of transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlxrunner.errors import ModelError, PromptError, ReadError, TemplateLimitError
from mlxrunner.system import reading
from mlxrunner.system.reading import is_there, read_text
from mlxrunner.templates.messages import PlainMessage, check_messages
from mlxrunner.templates.plain import plain

FALLBACK_STOPS = ("\nUser:", "\nSystem:")
"""Texts before which an answer in the fallback format ends."""
END_OF_MESSAGE = ("<|end|>", "[/INST]")
"""Ends of a message that do not end an answer."""

MOST_TEMPLATE = 2**20
"""Most bytes of a file that holds a template."""
MOST_JSON = 2**27
"""Most bytes of a JSON file; the largest tokenizers in use have 35 million."""

Render = Callable[..., str]
"""A function of `(messages, add_generation_prompt, **variables)` that returns the text."""


def render_chat(
    render: Render | None, messages: Sequence[PlainMessage], add_generation_prompt: bool
) -> str:
    """Return the text of `messages`, made by `render`, or by the fallback if that is None.

    A template without a system role (Gemma 2, some of Mistral) gets the system text in front of the
    first user message. Raise TemplateLimitError if the template was stopped, and PromptError if it
    refuses the conversation.
    """
    plain = check_messages(messages)
    if render is None:
        return _fallback(plain, add_generation_prompt)
    try:
        return render(plain, add_generation_prompt)
    except TemplateLimitError as error:
        raise TemplateLimitError(
            f"the model's chat template does not end well: {error}; another model, or --raw"
        ) from error
    except Exception as error:
        folded = _fold_system(plain)
        if folded is not None:
            try:
                return render(folded, add_generation_prompt)
            except Exception:
                pass
        raise PromptError(
            f"the model's chat template refuses this conversation: {_one_line(error)}"
        ) from error


def jinja_renderer(template: str, special: dict[str, str]) -> Render:
    """Return a renderer for the jinja `template`.

    `special` holds the variables that are the same for every conversation, such as `bos_token`.
    """

    def render(
        messages: Sequence[PlainMessage], add_generation_prompt: bool, /, **variables: Any
    ) -> str:
        return render_jinja(template, messages, add_generation_prompt, **{**special, **variables})

    return render


def render_jinja(
    template: str, messages: Sequence[Any], add_generation_prompt: bool, /, **variables: Any
) -> str:
    """Return `messages` rendered with the jinja `template`, which sees only a copy of plain data.

    Raise TemplateLimitError if the template was stopped, or else what the template raises.
    """
    # As mlx-lm does: without this, transformers says on stderr that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from mlxrunner.templates import sandbox

    given = {
        "tools": None,
        "documents": None,
        **variables,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
    }
    return sandbox.render(template, {name: plain(value) for name, value in given.items()})


def read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template of a model directory, or None.

    That is chat_template.jinja, or else `chat_template` in chat_template.json or in `config`, the
    content of tokenizer_config.json. Raise ModelError if a file cannot be read.
    """
    file = folder / "chat_template.jinja"
    if is_there(file):
        try:
            return read_text(file, MOST_TEMPLATE)
        except ReadError as error:
            raise ModelError(str(error)) from error
    template = (read_json(folder / "chat_template.json") | config).get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        template = {
            str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)
        }.get("default")
    return template if isinstance(template, str) else None


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, or {} if it is missing.

    Raise ModelError if the file cannot be read or holds something else.
    """
    if not is_there(file):
        return {}
    try:
        content = reading.read_json(file, MOST_JSON)
    except ReadError as error:
        raise ModelError(str(error)) from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: has to be a JSON object, not {type(content).__name__}")
    return content


def _fallback(messages: Sequence[PlainMessage], add_generation_prompt: bool) -> str:
    lines = "".join(
        f"{message['role'].capitalize()}: {message['content']}\n" for message in messages
    )
    return lines + ("Assistant:" if add_generation_prompt else "")


def _fold_system(messages: Sequence[PlainMessage]) -> list[PlainMessage] | None:
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return None
    return [
        {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"},
        *messages[2:],
    ]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

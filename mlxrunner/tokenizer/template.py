"""Render a conversation with a chat template, in a sandbox as transformers has it, or with a plain fallback."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxrunner import reading
from mlxrunner.errors import ModelError, PromptError, TemplateLimitError
from mlxrunner.reading import ReadError, is_there, read_text
from mlxrunner.tokenizer.base import Message

FALLBACK_STOPS = ("\nUser:", "\nSystem:")
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
"""Ends of a turn that some conversions forget to list as end-of-sequence tokens; used only if the template writes them."""
END_OF_MESSAGE = ("<|end|>", "[/INST]")
"""Ends of a message that do not end an answer."""

MOST_TEMPLATE = 2**20
"""Bytes of a file that holds a template."""
MOST_JSON = 2**27
"""Of a file of tokens; the largest in use have 35 million."""

Render = Callable[..., str]
"""`(messages, add_generation_prompt, **variables)` -> text."""


def check_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Plain copies; PromptError that says which message is wrong and why."""
    if not messages:
        raise PromptError("the conversation is empty: at least one message is needed")
    checked = []
    for index, message in enumerate(messages):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            raise PromptError(
                f'message {index} has to be {{"role": text, "content": text}}, not {message!r:.80}'
            )
        checked.append({"role": message["role"], "content": message["content"]})
    return checked


def render_chat(
    render: Render | None, messages: Sequence[Message], add_generation_prompt: bool
) -> str:
    """With the template behind `render`, or the fallback where there is none.

    A template that knows no system role (Gemma 2, some Mistral) gets the system text in front of the first user message.
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
    """A renderer for a jinja `template`; `special` are the names it may use (`bos_token`, `eos_token`)."""

    def render(
        messages: list[dict[str, str]], add_generation_prompt: bool, **variables: Any
    ) -> str:
        return render_jinja(template, messages, add_generation_prompt, **special, **variables)

    return render


def render_jinja(
    template: str, messages: Sequence[Any], add_generation_prompt: bool, **variables: Any
) -> str:
    """Render `messages` with the jinja `template`, which sees only a copy of plain data."""
    # As mlx-lm does, which need not be there: transformers would say on stderr that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from mlxrunner.tokenizer import sandbox

    given = {
        "tools": None,
        "documents": None,
        **variables,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
    }
    return sandbox.render(template, {name: _plain(value) for name, value in given.items()})


def _plain(value: Any) -> Any:
    """A copy made of what JSON knows; of anything else the name of its kind, so that no template calls its methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    simple = next((kind for kind in (str, int, float) if isinstance(value, kind)), None)
    return f"<{type(value).__name__}>" if simple is None else simple(value)


def read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """A model directory's chat template: chat_template.jinja, else `chat_template` of tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if is_there(file):
        try:
            return read_text(file, MOST_TEMPLATE)
        except ReadError as error:
            raise ModelError(str(error)) from error
    template = (read_json(folder / "chat_template.json") | config).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {
            str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)
        }.get("default")
    return template if isinstance(template, str) else None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file. ModelError where it is something else."""
    if not is_there(file):
        return {}
    try:
        content = reading.read_json(file, MOST_JSON)
    except ReadError as error:
        raise ModelError(str(error)) from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: has to be a JSON object, not {type(content).__name__}")
    return content


def _fallback(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    lines = "".join(
        f"{message['role'].capitalize()}: {message['content']}\n" for message in messages
    )
    return lines + ("Assistant:" if add_generation_prompt else "")


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return None
    return [
        {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"},
        *messages[2:],
    ]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""Read the chat templates of a model directory, and render one in a sandbox.

The sandbox has the same filters and functions as that of transformers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxrunner.errors import ModelError, PromptError, ReadError
from mlxrunner.system import reading
from mlxrunner.system.reading import is_there, read_text
from mlxrunner.templates.messages import PlainMessage
from mlxrunner.templates.plain import plain

FALLBACK_STOPS = ("\nUser:", "\nSystem:")
"""Texts before which an answer in the fallback format ends."""
END_OF_MESSAGE = ("<|end|>", "[/INST]")
"""Ends of a message that do not end an answer."""

MORE_TEMPLATES = "additional_chat_templates"
"""The folder of a model's named templates, beside the default one."""
MOST_TEMPLATE = 2**20
"""Most bytes of a file that holds a template."""
MOST_JSON = 2**27
"""Most bytes of a JSON file; the largest tokenizers in use have 35 million."""

Render = Callable[..., str]
"""A function of `(messages, add_generation_prompt, **variables)` that returns the text."""


def jinja_renderer(template: str | Mapping[str, str], special: dict[str, str]) -> Render:
    """Return a renderer for the jinja `template`, or for several by their names.

    `special` holds the variables that are the same for every conversation, such as `bos_token`.
    """
    templates = {"default": template} if isinstance(template, str) else template

    def render(
        messages: Sequence[PlainMessage], add_generation_prompt: bool, /, **variables: Any
    ) -> str:
        source = chosen_template(templates, has_tools=bool(variables.get("tools"))) or ""
        return render_jinja(source, messages, add_generation_prompt, **{**special, **variables})

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


def read_templates(
    folder: Path, config: dict[str, Any], *, of_processor: bool = False
) -> dict[str, str]:
    """Return the chat templates of a model directory by their names; {} if it has none.

    `config` is the content of tokenizer_config.json. The order of precedence is that of
    transformers' tokenizers, and then of its processors, which know two files more; or the other
    way round if `of_processor`, as for a model that sees. Raise ModelError if a file can't be read.
    """
    places = [
        _of_tokenizer(folder, config),
        _named(read_json(folder / "chat_template.json").get("chat_template")),
        _named(read_json(folder / "processor_config.json").get("chat_template")),
    ]
    ordered = reversed(places) if of_processor else places
    return next((templates for templates in ordered if templates), {})


def chosen_template(templates: Mapping[str, str], *, has_tools: bool) -> str | None:
    """Return the template for a conversation, with tools or without; None if there is none.

    Raise PromptError if no template is the default.
    """
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if len(templates) > 1 and "default" not in templates:
        raise PromptError(
            f"the model has the chat templates {', '.join(sorted(templates))}, and none is named "
            "default: name one of them so in the model's files"
        )
    return templates.get("default") or next(iter(templates.values()), None)


def read_template(
    folder: Path, config: dict[str, Any], *, of_processor: bool = False
) -> str | None:
    """Return the chat template of a model directory for conversations with tools, or None.

    The parameters and errors are those of `read_templates`.
    """
    templates = read_templates(folder, config, of_processor=of_processor)
    try:
        return chosen_template(templates, has_tools=True)
    except PromptError:
        return None


def _of_tokenizer(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates that have files of their own, or else those of the configuration."""
    files = {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    files["default"] = folder / "chat_template.jinja"
    try:
        found = {
            name: read_text(file, MOST_TEMPLATE) for name, file in files.items() if is_there(file)
        }
    except ReadError as error:
        raise ModelError(str(error)) from error
    return found if "default" in found else _named(config.get("chat_template")) | found


def _named(templates: Any) -> dict[str, str]:
    """Return one template or several, as a JSON file has them, by their names."""
    if isinstance(templates, list):
        pairs = [
            (one.get("name"), one.get("template")) for one in templates if isinstance(one, dict)
        ]
        templates = {str(name): template for name, template in pairs}
    elif not isinstance(templates, dict):
        templates = {"default": templates}
    return {name: one for name, one in templates.items() if isinstance(one, str) and one.strip()}


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

"""Read the chat templates of a model directory, and render them in child processes with limits."""

from __future__ import annotations

import atexit
import marshal
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition
from typing import Any, cast

from mlxrunner.errors import ModelError, PromptError, ReadError, TemplateLimitError
from mlxrunner.system import reading
from mlxrunner.system.reading import is_there, read_text
from mlxrunner.templates import sandbox
from mlxrunner.templates.messages import PlainMessage

FALLBACK_STOPS = ("\nUser:", "\nSystem:")
"""Texts before which an answer in the fallback format ends."""
END_OF_MESSAGE = ("<|end|>", "[/INST]")
"""Ends of a message that do not end an answer."""

MOST_SOURCE = 2**18
"""Most characters of a template; the longest ones in use have about 60,000."""
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of a model's named templates, beside the default one."""
MOST_TEMPLATE = 2**20
"""Most bytes of a file that holds a template."""
MOST_JSON = 2**27
"""Most bytes of a JSON file; the largest tokenizers in use have 35 million."""

PLAIN = 2
"""The version of `marshal` without references, so that nothing is in a value twice."""
MOST_WAITING = 2
"""Most child processes that wait for a render."""
PATIENCE_S = 0.1
"""Seconds to wait for a child process that is in use before another one is started."""

Render = Callable[..., str]
"""A function of `(messages, add_generation_prompt, **variables)` that returns the text."""


def jinja_renderer(template: str | Mapping[str, str], special: dict[str, str]) -> Render:
    """Return a renderer for the jinja `template`, or for several by their names.

    `special` holds the variables that are the same for every conversation, such as `bos_token`.
    """
    templates = {"default": template} if isinstance(template, str) else template
    PROCESSES.prepare()

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
    if len(template) > MOST_SOURCE:
        raise TemplateLimitError(
            f"it has {len(template):,} characters, more than the {MOST_SOURCE:,} "
            "that a template may have"
        )
    given = {
        "tools": None,
        "documents": None,
        **variables,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        request = marshal.dumps((template, given), PLAIN)
    except ValueError:  # something is not plain data
        request = marshal.dumps((template, plain(given)), PLAIN)
    return PROCESSES.render(request)


def plain(value: Any) -> Any:
    """Return a copy of a variable of a template, so that it calls no methods of other objects.

    An object of any other type than those of JSON is replaced by the name of its type.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    simple = next((kind for kind in (str, int, float) if isinstance(value, kind)), None)
    return f"<{type(value).__name__}>" if simple is None else simple(value)


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


class TemplateError(Exception):
    """A template has failed in a child process."""

    def __init__(self, problem: str, lineno: int | None) -> None:
        super().__init__(problem)
        self.lineno = lineno
        """The line that can't be read, or None if the template refuses what it was given."""


class RenderProcesses:
    """Child processes that render templates within limits.

    One is started when none is free in time, and ends with this process. Any thread may use them,
    and so may a process that was forked.
    """

    def __init__(self, seconds: float) -> None:
        """Allow `seconds` of processor time for each render."""
        self._seconds = seconds
        self._free, self._owner = Condition(), 0
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._used = 0
        """The number of processes that render."""

    def prepare(self) -> None:
        """Start the first process, which takes as long as its imports, unless there is one."""
        with suppress(TemplateLimitError):
            child, _ = self._take()
            self._put(child)

    def render(self, request: bytes) -> str:
        """Return the text for `(template, variables)`, as `marshal` writes both.

        Raise TemplateLimitError if the template was stopped, or TemplateError if it fails.
        """
        child, is_new = self._take()
        try:
            sandbox.send(cast(Any, child.stdin), request)
            answer = sandbox.receive(cast(Any, child.stdout))
        except BrokenPipeError:
            answer = b""
        except BaseException:  # an interrupt: the answer would be taken for that of the next one
            self._put(child, is_whole=False)
            raise
        if not answer:
            has_time = child.wait() != -signal.SIGPROF
            self._put(child, is_whole=False)
            if has_time and not is_new:  # something else may have ended it while it waited
                return self.render(request)
            raise TemplateLimitError(
                "it was stopped when it took too much memory"
                if has_time
                else f"it was stopped after {self._seconds:.2g} seconds"
            )
        self._put(child)
        kind, text, line = marshal.loads(answer)
        if kind == "limit":
            raise TemplateLimitError(text)
        if kind == "error":
            raise TemplateError(text, line)
        return str(text)

    def close(self) -> None:
        """End all processes that wait."""
        with self._free:
            waiting, self._waiting = self._waiting, []
        for child in waiting if self._owner == os.getpid() else ():
            _end(child)

    def _take(self) -> tuple[subprocess.Popen[bytes], bool]:
        """Return a process, and True if it was started just now."""
        with self._free:
            if self._owner != os.getpid():  # those of the process that was forked are not ours
                self._owner, self._waiting, self._used = os.getpid(), [], 0
            if self._used and not self._waiting:
                self._free.wait(PATIENCE_S)
            child = self._waiting.pop() if self._waiting else None
            self._used += 1
        if child is not None and child.poll() is None:
            return child, False
        try:
            return self._started(), True
        except BaseException:
            with self._free:
                self._used -= 1
            raise

    def _put(self, child: subprocess.Popen[bytes], *, is_whole: bool = True) -> None:
        with self._free:
            self._used -= 1
            is_kept = is_whole and len(self._waiting) < MOST_WAITING
            if is_kept:
                self._waiting.append(child)
                self._free.notify()
        if not is_kept:
            _end(child)

    def _started(self) -> subprocess.Popen[bytes]:
        """Return a new process. Raise TemplateLimitError if none can be started."""
        file = Path(sandbox.__file__)
        paths = [*filter(None, sys.path), str(file.parent)]
        code = (
            f"import sys; sys.path[:] = {paths!r}; import {file.stem}; {file.stem}."
            f"serve(sys.stdin.buffer, sys.stdout.buffer, {os.getpid()}, {self._seconds!r})"
        )
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        except (OSError, ValueError) as error:
            raise TemplateLimitError(
                f"the process to render it could not be started: {error}"
            ) from error


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):  # what was not written yet
            cast(Any, pipe).close()


PROCESSES = RenderProcesses(sandbox.MOST_PROCESSOR_SECONDS)
atexit.register(PROCESSES.close)

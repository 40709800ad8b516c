"""Render chat templates in jinja2's sandbox, with the names of transformers' own.

The sandbox keeps a template from files and code, but not from running for ever. So `serve` runs in
a child process with limits, and this module imports nothing of the package.
"""

from __future__ import annotations

import json
import marshal
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LEAST_TEXT = 2**18
"""Characters of the longest text that a template may make without being given any."""
TEXT_SHARE = 4
"""Characters of the longest text that a template may make, per byte given to it.

The limit is LEAST_TEXT more than that.
"""
MOST_PROCESSOR_SECONDS = 5.0
"""Most seconds of processor time for one render in a child process."""
MOST_MEMORY = 2**30
"""Most bytes of memory of a child process."""
WAITING_LOOK, RENDERING_LOOK = 1.0, 0.1
"""Seconds between two looks of a child process at its memory and its parent."""


class _Generation(Extension):
    """The tag `{% generation %}` around the assistant's words, which changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    def written(self, caller: Callable[[], str]) -> str:
        """Return the text of the block."""
        return caller()


class _Dict:
    """The name `dict` in a template: a class would reach further."""

    def __call__(self, *args: Any, **names: Any) -> dict[Any, Any]:
        return dict(*args, **names)

    def fromkeys(self, *args: Any, **names: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **names)


class _Namespace(Namespace):
    """The name `namespace` in a template: no attribute begins with an underscore."""

    def __init__(*args: Any, **names: Any) -> None:  # so that `self` may be a name
        self, *given = args
        values = dict(*given, **names)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            "Chat templates cannot store underscore-prefixed attributes on a namespace, but got "
            f"{name!r}. Please rename the attribute."
        )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class Sandbox(ImmutableSandboxedEnvironment):
    """The filters, names, tags and white space that transformers gives to chat templates."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_Dict(),
            namespace=_Namespace,
        )


def serve(requests: BinaryIO, answers: BinaryIO, parent: int, seconds: float) -> None:
    """Render what `requests` asks for until it ends, or the process `parent` does.

    A request is `(source, variables)`, an answer `(kind, text, line)` with the kinds "text",
    "error" and "limit". A render that takes more than `seconds` of processor time ends the process.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    is_darwin = sys.platform == "darwin"
    if not is_darwin:  # there the limit counts what malloc only reserves
        with suppress(ValueError):  # the process has a lower limit already
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # may be that of the parent

    def look(*_: Any) -> None:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if os.getppid() != parent or (is_darwin and grown > MOST_MEMORY):
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    compiled = lru_cache(maxsize=16)(Sandbox().from_string)
    while True:
        signal.setitimer(signal.ITIMER_REAL, WAITING_LOOK, WAITING_LOOK)
        request = receive(requests)
        if not request:
            return
        source, given = marshal.loads(request)
        signal.setitimer(signal.ITIMER_REAL, RENDERING_LOOK, RENDERING_LOOK)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # ends this process
        answer = _answer(compiled, source, given, len(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(answers, marshal.dumps(answer))


def _answer(
    compiled: Callable[[str], jinja2.Template], source: str, given: Mapping[str, Any], size: int
) -> tuple[str, str, int | None]:
    try:
        text = compiled(source).render(given)
    except MemoryError:
        return "limit", "it was stopped when it took too much memory", None
    except Exception as error:
        return "error", str(error) or type(error).__name__, getattr(error, "lineno", None)
    if len(text) > LEAST_TEXT + TEXT_SHARE * size:
        return "limit", f"it made {len(text):,} characters out of {size:,} bytes", None
    return "text", text, None


def send(pipe: BinaryIO, message: bytes) -> None:
    """Write a message to a pipe."""
    pipe.write(len(message).to_bytes(8, "little") + message)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes:
    """Return the next message of a pipe; nothing at its end."""
    size = pipe.read(8)
    message = pipe.read(int.from_bytes(size, "little"))
    return message if len(size) == 8 else b""

"""Render chat templates in jinja2's sandbox, with the names of transformers' own.

The sandbox keeps a template from files and code, but not from running for ever. In this process it
is also metered: a template that may be costly is rendered by `serve` instead, in a child process
with limits. So this module imports nothing of the package.
"""

from __future__ import annotations

import json
import marshal
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from types import BuiltinMethodType
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

LEAST_TEXT = 2**18
"""Characters of the longest text that a template may make without being given any."""
TEXT_SHARE = 4
"""Characters of the longest text that a template may make, per byte given to it.

The limit is LEAST_TEXT more than that.
"""
MOST_SECONDS = 0.5
"""Most seconds of one render in this process."""
LEAST_WORK, WORK_SHARE = 2**24, 16
"""Most characters that one render in this process may put together, and more per byte given."""
MOST_ITEMS = 8
"""Most computed items of lists and dictionaries that a template writes out."""
MOST_SEPARATOR = 64
"""Most characters of a text that is put between others."""
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


class CostlyError(Exception):
    """A template may take long, or much memory: it has to be rendered by a process with limits."""


class _Meter:
    """The time and the text that a render in this process has left."""

    def __init__(self, given: int) -> None:
        self._deadline = time.monotonic() + MOST_SECONDS
        self._left = LEAST_WORK + WORK_SHARE * given

    def tick(self) -> None:
        """Look at the clock. Raise CostlyError if the time is over."""
        if time.monotonic() > self._deadline:
            raise CostlyError

    def spend(self, text: int) -> None:
        """Count characters that are put together. Raise CostlyError if they are too many."""
        self._left -= text
        if self._left < 0:
            raise CostlyError


_METER: ContextVar[_Meter] = ContextVar("meter")

FILTERS = frozenset(
    "abs capitalize count d default dictsort first float int items last length list lower max min "
    "reverse safe sort title unique upper".split()
)
"""Filters whose results are not larger than their values, in about linear time."""
CHOOSING = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
"""Filters that ask a filter or a test about each item."""
METHODS = frozenset(
    "append capitalize count endswith find get index isalnum isalpha isdigit isdecimal isnumeric "
    "islower isspace isupper items keys lower partition pop removeprefix removesuffix split "
    "splitlines startswith title upper values".split()
)
"""Methods of texts and containers whose results are not larger, in about linear time."""
STRIPS = frozenset({"lstrip", "rstrip", "strip"})
"""Methods that take time in proportion to the product of two lengths."""


def _check_short(*texts: Any) -> None:
    if any(len(one) > MOST_SEPARATOR for one in texts if one is not None):
        raise CostlyError


@jinja2.pass_context
def _tick(context: Any, value: Any) -> bool:
    _METER.get().tick()
    return True


def _joined(value: Any) -> Any:
    """Return a value that was put together of others, and spend for it."""
    if isinstance(value, str):
        _METER.get().spend(len(value))
    elif not isinstance(value, int | float):
        raise CostlyError  # lists in lists may be larger than they look
    return value


def _stored(value: Any) -> Any:
    """Return a value that outlives an iteration, and spend for it."""
    if isinstance(value, str | list):
        _METER.get().spend(len(value))
    elif isinstance(value, Namespace):
        raise CostlyError
    return value


def _written(value: Any) -> str:
    """Return the text of a value, and spend for it."""
    text = value if isinstance(value, str) else str(value)
    _METER.get().spend(len(text))
    return text


def _spend_for_replacing(text: Any, old: Any, new: Any) -> None:
    if not all(isinstance(one, str) for one in (text, old, new)):
        raise CostlyError
    _METER.get().spend(len(text) + text.count(old) * len(new))


def _metered_tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    _check_short(*(separators or ()))
    if indent not in (None, *range(9)):
        raise CostlyError
    return _written(_tojson(x, ensure_ascii, indent, separators, sort_keys))


def _metered_filters(theirs: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the filters `theirs`, which spend for what they make, or raise CostlyError."""

    def costly(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # with the marks of jinja
        def refuse(*args: Any, **names: Any) -> Any:
            raise CostlyError

        return refuse

    def choosing(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def chosen(context: Any, value: Any, *args: Any, **names: Any) -> Any:
            ticking = value and (one for one in value if _tick(context, one))
            return function(context, ticking, *args, **names)

        return chosen

    @jinja2.pass_eval_context
    def join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        parts = list(value)
        _check_short(d)
        if attribute is not None or not all(isinstance(one, str | int) for one in parts):
            raise CostlyError
        _METER.get().spend(sum(len(str(one)) + len(d) for one in parts))
        return theirs["join"](context, parts, d)

    @jinja2.pass_eval_context
    def replace(context: Any, s: Any, old: Any, new: Any) -> Any:
        _spend_for_replacing(s, old, new)
        return theirs["replace"](context, s, old, new)

    def trim(value: Any, chars: Any = None) -> Any:
        _check_short(chars)
        return theirs["trim"](value, chars)

    own: dict[str, Callable[..., Any]] = {
        "join": join,
        "replace": replace,
        "string": _written,
        "tojson": _metered_tojson,
        "trim": trim,
        "mlxrunner_joined": _joined,
        "mlxrunner_stored": _stored,
        "mlxrunner_tick": _tick,
        "mlxrunner_written": _written,
    }
    own |= {name: choosing(theirs[name]) for name in CHOOSING}
    others = theirs.items()
    return {name: one if name in FILTERS else costly(one) for name, one in others} | own


class MeteredSandbox(Sandbox):
    """A sandbox that raises CostlyError where a template may take long, or much memory.

    Each iteration looks at the clock, and what makes large texts out of small ones spends from the
    meter of the render, or is refused.
    """

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__()
        self.filters = _metered_filters(self.filters)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator != "%" or not isinstance(left, int):
            raise CostlyError
        return super().call_binop(context, operator, left, right)

    def call(  # jinja names the parameters so
        __self,  # noqa: N805
        __context: Any,
        __function: Any,
        *args: Any,
        **names: Any,
    ) -> Any:
        if isinstance(__function, BuiltinMethodType):
            name = __function.__name__
            if name == "replace" and len(args) == 2:
                _spend_for_replacing(__function.__self__, *args)
            elif name in STRIPS:
                _check_short(*args)
            elif name not in METHODS:
                raise CostlyError
        elif __function is _strftime_now:
            _check_short(*args)
        elif __function is _Namespace:
            if any(isinstance(one, Namespace) for one in (*args, *names.values())):
                raise CostlyError
        elif __function not in (range, _raise_exception) and not isinstance(
            __function, Macro | jinja2.Undefined
        ):
            raise CostlyError
        return super().call(__context, __function, *args, **names)

    def metered(self, source: str) -> jinja2.Template:
        """Return a template that is metered. Raise CostlyError if it can't be."""
        tree: Any = _Meters().visit(self.parse(source))
        return self.from_string(tree)


UNMETERED = (
    *(nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block),
    *(nodes.FilterBlock, nodes.ScopedEvalContextModifier, nodes.EvalContextModifier),
)
"""Statements that only the process with limits runs."""


class _Meters(NodeTransformer):
    """Puts meters into a template: see `MeteredSandbox`."""

    def __init__(self) -> None:
        self._repeated = 0
        """The number of loops and macros around a node."""
        self._buffered = 0
        """The number of macros and blocks around it whose text becomes a value."""
        self._items = 0
        """The number of computed items of lists and dictionaries so far."""

    def generic_visit(self, node: nodes.Node, *args: Any, **names: Any) -> nodes.Node:
        if isinstance(node, UNMETERED):
            raise CostlyError
        return super().generic_visit(node, *args, **names)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        if node.test is not None:
            node.test = nodes.And(_filtered(nodes.Const(None), "tick"), node.test)
        return self._repeated_body(node, buffers=0)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._repeated_body(node, buffers=1)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        if not isinstance(node.call.node, nodes.ExtensionAttribute):
            raise CostlyError
        node.body = self._body(node.body, buffers=1)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        if node.filter is not None:
            raise CostlyError
        node.body = self._body(node.body, buffers=1)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if self._buffered:
            node.nodes = [_filtered(one, "written") for one in node.nodes]
        else:  # the whole text is counted at the end
            given: list[Any] = node.nodes
            node.nodes = [one.node if _is_filtered(one, "joined") else one for one in given]
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name):
            value: Any = node.node
            node.node = _filtered(value, "stored")
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        chain = [node]
        while isinstance(inner := chain[-1].left, nodes.Add):
            chain.append(inner)
        operands = [inner, *(one.right for one in chain)]
        chain[-1].left = self.visit(inner)
        for one in chain:
            one.right = self.visit(one.right)
        computed = sum(not isinstance(one, nodes.Const) for one in operands)
        return _filtered(node, "joined") if computed > 1 else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        node.nodes = [self.visit(one) for one in node.nodes]
        return _filtered(node, "joined")

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._literal(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._literal(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._literal(node, [one for pair in node.items for one in (pair.key, pair.value)])

    def _literal(self, node: nodes.Node, items: list[nodes.Expr]) -> nodes.Node:
        computed = sum(not _is_constant(one) for one in items)
        self._items += computed
        if computed and (self._repeated or self._items > MOST_ITEMS):
            raise CostlyError
        return self.generic_visit(node)

    def _repeated_body(self, node: Any, buffers: int) -> nodes.Node:
        body, node.body = node.body, []
        self.generic_visit(node)
        self._repeated += 1
        tick = nodes.ExprStmt(_filtered(nodes.Const(None), "tick"), lineno=node.lineno)
        node.body = [tick, *self._body(body, buffers)]
        self._repeated -= 1
        repeated: nodes.Node = node
        return repeated

    def _body(self, body: list[nodes.Node], buffers: int) -> list[nodes.Node]:
        self._buffered += buffers
        found = [self.visit(one) for one in body]
        self._buffered -= buffers
        return found


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, f"mlxrunner_{name}", [], [], None, None, lineno=node.lineno)


def _is_filtered(node: Any, name: str) -> bool:
    return isinstance(node, nodes.Filter) and node.name == f"mlxrunner_{name}"


def _is_constant(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple) and all(map(_is_constant, node.items))
    )


@lru_cache(maxsize=1)
def _metered_sandbox() -> MeteredSandbox:
    return MeteredSandbox()


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template | None:
    """Return a template to be rendered in this process; None if it can't be."""
    try:
        return _metered_sandbox().metered(source)
    except CostlyError:
        return None


def render_metered(source: str, given: Mapping[str, Any], size: int) -> str:
    """Return the text that a template makes of the variables `given`, of about `size` bytes.

    Raise CostlyError if a process with limits has to render it, or else what the template raises.
    """
    template = _compiled(source)
    if template is None:
        raise CostlyError
    meter = _Meter(size)
    token = _METER.set(meter)
    try:
        pieces = list(template.generate(given))
    finally:
        _METER.reset(token)
    if sum(map(len, pieces)) > most_text(size):
        raise CostlyError
    return "".join(pieces)


def most_text(size: int) -> int:
    """Return the characters of the longest text that a template may make of `size` bytes."""
    return LEAST_TEXT + TEXT_SHARE * size


def serve(requests: BinaryIO, answers: BinaryIO, parent: int, seconds: float) -> None:
    """Render what `requests` asks for until it ends, or the process `parent` does.

    A request is `(source, variables)`, an answer `(kind, text, line)` with the kinds "text",
    "error" and "limit". A render that takes more than `seconds` of processor time ends the process.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "darwin":  # there the limit counts what malloc only reserves
        with suppress(ValueError):  # the process has a lower limit already
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    unit = 1 if sys.platform == "darwin" else 1024

    def look(*_: Any) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if os.getppid() != parent or used > MOST_MEMORY:
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
    if len(text) > most_text(size):
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
